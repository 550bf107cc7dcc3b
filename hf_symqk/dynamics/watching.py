"""The batch that a Trainer trained on last, and its loss once more, for whoever measures between two steps."""

import copy
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .labels import check_labels


if TYPE_CHECKING:  # a slow import, which only those pay who train with it
    from transformers import Trainer


__all__ = ["LastBatch"]


class LastBatch:
    """
    The inputs of one training step (of the last batch, where several are accumulated): the Trainer's own tensors, no
    copies.

    Args:
        trainer (`Trainer`): Whose step it is.
        inputs (`Mapping[str, Any]`): What the step is given, labels included.
        num_items (`torch.Tensor` or `int`, *optional*): What the Trainer divides the step's losses by, if it does.
    """

    def __init__(self, trainer: "Trainer", inputs: Mapping[str, Any], num_items: Tensor | int | None = None) -> None:
        self._trainer = weakref.ref(trainer)
        self.inputs = dict(inputs)
        self.num_items = num_items

    @property
    def number(self) -> int:
        """How many sequences the batch has: of what the model's main input counts first, or else its labels do."""
        trainer = self._trainer()
        main = getattr(getattr(trainer, "model", None), "main_input_name", None)
        names = [name for name in (main, "input_ids", "labels", *self.inputs) if name]
        tensors = (value for name in names if isinstance(value := self.inputs.get(name), Tensor) and value.ndim)
        first = next(tensors, None)
        return 1 if first is None else first.shape[0]

    def sequences(self, number: int) -> dict[str, Any]:
        """
        The first sequences of the batch, in tensors, lists and mappings.

        Args:
            number (`int`): At most how many.

        Returns:
            `dict[str, Any]`

        Raises:
            ValueError: if something has no entry a sequence, so that nobody knows what of it belongs to the first.
        """
        there = self.number
        if number >= there:
            return dict(self.inputs)
        return {name: _first(value, number, there, name) for name, value in self.inputs.items()}

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """
        The Trainer's own loss of the first sequences, as if they were a whole step: a mean over the items of a step is
        one over theirs.

        Args:
            model (`torch.nn.Module`): What is run.
            number (`int`): At most how many sequences.

        Returns:
            `torch.Tensor`: In the graph of the forward pass.

        Raises:
            ValueError: if nothing is predicted in them; if the Trainer is gone, or one of several whose loss may wait
                for the others.
        """
        trainer = self._trainer()
        if trainer is None:
            raise ValueError("The Trainer whose batch it was is gone.")
        if trainer.args.world_size > 1 and not _measures_alone(trainer):
            raise ValueError(
                f"One of {trainer.args.world_size} processes would compute the loss of {type(trainer).__name__} "
                "alone, which has a `compute_loss` or `compute_loss_func` of its own; did that meet the other "
                "processes, it would wait for ever. If it does not, say so with a class attribute "
                "`measures_alone = True`."
            )
        with _left_as_it_was(trainer), _unheard(trainer):
            inputs = trainer._prepare_inputs(self.sequences(number))
            check_labels(inputs)
            # What the step divides by counts all accumulated batches of all processes; here a mean is a mean of these.
            items = None if self.num_items is None else _count_items(trainer, inputs)
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return loss[0] if isinstance(loss, tuple) else loss


def _first(value: Any, number: int, there: int, name: str) -> Any:
    """What belongs to the first sequences of those that are there."""
    if isinstance(value, Tensor):
        # Positions of several kinds (time, height, width) stand before the sequences: (3, B, N).
        several = value.ndim == 3 and (name.endswith("position_ids") or value.shape[0] != there)
        if several and value.shape[1] == there:
            return value[:, :number].contiguous()
        if value.ndim and value.shape[0] == there:
            return value[:number]
        if value.numel() == 1:  # one number for all
            return value
        found = f"shape {tuple(value.shape)}"
    elif isinstance(value, Mapping):
        return {key: _first(held, number, there, f"{name}.{key}") for key, held in value.items()}
    elif isinstance(value, list | tuple):
        if len(value) == there:
            return value[:number]
        found = f"{len(value)} entries"
    else:
        return value
    raise ValueError(
        f"The first {number} of {there} sequences cannot be cut out of the batch: {name!r} has {found}, none for each "
        "sequence. Give a number of sequences that is not less than the batch size, or none."
    )


def _measures_alone(trainer: "Trainer") -> bool:
    """
    Whether a Trainer's loss is known to need no other process: Transformers' own does not, and a class may say it of
    its loss by `measures_alone`, for itself and for subclasses that leave the loss as it is.
    """
    from transformers import Trainer

    if "compute_loss" in vars(trainer):
        return False
    for one in type(trainer).__mro__:
        if "measures_alone" in vars(one):
            return bool(vars(one)["measures_alone"])
        if "compute_loss" in vars(one):
            return one is Trainer and trainer.compute_loss_func is None
    return False


def _count_items(trainer: "Trainer", inputs: Mapping[str, Any]) -> Tensor | int | None:
    """As the Trainer counts what is predicted, in one batch of one process."""
    from transformers import Trainer

    return Trainer._get_num_items_in_batch(trainer, [dict(inputs)], trainer.args.device)


@contextmanager
def _left_as_it_was(trainer: "Trainer") -> Iterator[None]:
    """Afterwards a Trainer's attributes are what they were, and so is what its tensors and containers hold."""
    before = dict(vars(trainer))
    held = _held(before, {})
    try:
        yield
    finally:
        now = vars(trainer)
        now.clear()
        now.update(before)
        for value, copied in held:
            _put_back(value, copied)


def _held(value: Any, seen: dict[int, Any]) -> list[tuple[Any, Any]]:
    """Tensors and containers with a copy of each; of mappings, which nest metrics by name, also what is inside."""
    from transformers.utils import ModelOutput

    # Outputs that are kept are replaced by new ones, and refuse to be changed.
    if (
        id(value) in seen
        or isinstance(value, ModelOutput)
        or not isinstance(value, Tensor | dict | list | set | deque)
    ):
        return []
    seen[id(value)] = value
    if isinstance(value, Tensor):
        return [(value, value.detach().clone())]
    inside = [pair for held in value.values() for pair in _held(held, seen)] if isinstance(value, dict) else []
    return [(value, copy.copy(value)), *inside]


def _put_back(value: Any, copied: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            if not torch.equal(value, copied):
                value.copy_(copied)
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(copied)
    else:
        value.update(copied)


@contextmanager
def _unheard(trainer: "Trainer") -> Iterator[None]:
    """
    Inside, what a Trainer logs reaches neither callbacks nor history, for some log where they compute losses; and it
    is one process that shares no average with others.
    """
    handler, state, args = trainer.callback_handler, trainer.state, trainer.args
    trainer.callback_handler, trainer.state, trainer.args = copy.copy(handler), copy.copy(state), copy.copy(args)
    trainer.callback_handler.callbacks = []
    trainer.state.log_history = list(state.log_history)
    trainer.args.average_tokens_across_devices = False
    trainer.args._n_gpu = min(1, args.n_gpu)
    try:
        yield
    finally:
        trainer.callback_handler, trainer.state, trainer.args = handler, state, args
