"""The batch that a Trainer trained on last, and its loss once more, for whoever measures between two steps."""

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn


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
        num_items (`torch.Tensor` or `int`, *optional*): What the Trainer divides losses by, if it does.
    """

    def __init__(self, trainer: "Trainer", inputs: Mapping[str, Any], num_items: Tensor | int | None = None) -> None:
        self._trainer = weakref.ref(trainer)
        self.inputs = dict(inputs)
        self.num_items = num_items

    def sequences(self, number: int) -> dict[str, Any]:
        """
        The first sequences of the batch.

        Args:
            number (`int`): At most how many. A batch whose tensors do not all count the same first stays whole.

        Returns:
            `dict[str, Any]`
        """
        counts = {value.shape[0] for value in self.inputs.values() if isinstance(value, Tensor) and value.ndim}
        if len(counts) != 1:
            return dict(self.inputs)
        return {
            name: value[:number] if isinstance(value, Tensor) and value.ndim else value
            for name, value in self.inputs.items()
        }

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """
        The Trainer's own loss of the first sequences.

        Args:
            model (`torch.nn.Module`): What is run.
            number (`int`): At most how many sequences.

        Returns:
            `torch.Tensor`: In the graph of the forward pass.

        Raises:
            ValueError: if the Trainer is gone, or one of several whose loss may wait for the others.
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
        with _unheard(trainer):
            inputs = trainer._prepare_inputs(self.sequences(number))
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=self.num_items)
        return loss[0] if isinstance(loss, tuple) else loss


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


@contextmanager
def _unheard(trainer: "Trainer") -> Iterator[None]:
    """Inside, what a Trainer logs reaches neither callbacks nor history: some log where they compute losses."""
    handler, state = trainer.callback_handler, trainer.state
    trainer.callback_handler, trainer.state = copy.copy(handler), copy.copy(state)
    trainer.callback_handler.callbacks = []
    trainer.state.log_history = list(state.log_history)
    try:
        yield
    finally:
        trainer.callback_handler, trainer.state = handler, state
