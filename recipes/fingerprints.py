"""Fingerprints of what two runs have to share before their losses may be compared: initial weights and batches.

Shape legend: `D` model width, `O` output rows of a projection, `B` sequences of a batch.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from arguments import RecipeError
from checkpoint_loading import CheckpointLoadingTrainer
from group_ending import GroupEndingTrainer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_symqk.attention import AttentionLayer, Part, full_shape, survey_attention, whole_parameters
from hf_symqk.attention.projections import piece_widths
from hf_symqk.cards import CARD


__all__ = ["BatchFingerprint", "FingerprintedTrainer", "count_parameters", "fingerprint_weights"]

logger = logging.getLogger(__name__)

PARTS: tuple[Part, ...] = ("query", "key", "value")
# Digests of sequences are added up modulo this.
MODULUS = 2**256


def count_parameters(model: nn.Module) -> int:
    """
    Counts the parameters of a model, tied ones once, also where this process holds a part of them only.

    Args:
        model (`torch.nn.Module`):
            The model.

    Returns:
        `int`: their number.
    """
    return sum(full_shape(parameter).numel() for parameter in model.parameters())


def fingerprint_weights(model: nn.Module) -> dict[str, str]:
    """
    Digests of a model's weights, those of its attention apart. Every process has to call where weights are sharded.

    Args:
        model (`torch.nn.Module`):
            The model, before training.

    Returns:
        `dict`: SHA-256 over names, shapes and bytes; `"qk"` of weights and biases of the queries and keys of every
        attention layer, `"v"` of its values, `"weights"` of all other parameters and of the buffers. An initialisation
        of Q and K changes `"qk"`; one that redraws them with `distribution` changes `"v"` too; none may change
        `"weights"`.
    """
    claims = _claims(model)
    digests = {name: hashlib.sha256() for name in ("weights", "qk", "v")}
    # A tied parameter is visited once, under the first of its names.
    for name, parameter in sorted(model.named_parameters()):
        with whole_parameters([parameter]) as whole:
            parts = _split(whole[parameter], claims.get(parameter, {}))
        for kind, tensor in parts.items():
            _update(digests[kind], name, tensor)
    for name, buffer in sorted(model.named_buffers()):
        _update(digests["weights"], name, buffer)
    return {name: digest.hexdigest() for name, digest in digests.items()}


class BatchFingerprint(TrainerCallback, ExportableState):
    """
    Digest of all training batches: a sum, modulo 2^256, of the SHA-256 of each sequence with its optimizer step.

    A sum, so that neither the order of the sequences inside a step nor the process that saw them matters: a step of
    one batch of 32 and one of two processes with two accumulated batches of 8 each have the same fingerprint. It is
    saved in checkpoints, and a resumed run adds to it.
    """

    def __init__(self) -> None:
        self._total = 0  # of all processes, up to the last `combine`
        self._own = 0  # of this process, since then
        self._sequences = self._own_sequences = 0
        self._steps = 0
        self._last_step: int | None = None

    def add(self, batch: Mapping[str, torch.Tensor], step: int) -> None:
        """
        Adds a batch.

        Args:
            batch (mapping of `str` to `torch.Tensor`):
                What the model is trained on, on the CPU; each tensor of shape `(B, …)`.
            step (`int`):
                Optimizer steps done before.
        """
        if step != self._last_step:
            self._last_step, self._steps = step, self._steps + 1
        for head, rows in _sequences(batch):
            digest = hashlib.sha256(f"{step};{head}".encode())
            for row in rows:
                digest.update(row)
            self._own += int.from_bytes(digest.digest(), "big")
            self._own_sequences += 1

    def combine(self) -> None:
        """Brings the processes together; each has to call."""
        gathered = gather_object([(self._own, self._own_sequences)])
        self._total = (self._total + sum(own for own, _ in gathered)) % MODULUS
        self._sequences += sum(sequences for _, sequences in gathered)
        self._own = self._own_sequences = 0

    def result(self, steps: int) -> dict[str, Any]:
        """
        The fingerprint, after [`~BatchFingerprint.combine`].

        Args:
            steps (`int`):
                Optimizer steps of the run.

        Returns:
            `dict`: `batches`, `None` where some step's batches were not seen (the run was resumed from a checkpoint
            without a fingerprint), `steps` and `sequences`.
        """
        if self._steps != steps:
            logger.warning("the fingerprint saw the batches of %d of %d steps only: left out", self._steps, steps)
            return {"batches": None, "steps": steps, "sequences": None}
        digest = hashlib.sha256(f"{self._total:064x} {self._sequences}".encode())
        return {"batches": digest.hexdigest(), "steps": steps, "sequences": self._sequences}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; see `ExportableState`."""
        attributes = {"_total": f"{self._total:064x}", "_sequences": self._sequences, "_steps": self._steps}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continues from a checkpoint, with or without `restore_callback_states_from_checkpoint`."""
        assert isinstance(state.stateful_callbacks, dict)
        name, fresh = type(self).__name__, BatchFingerprint().state()
        if state.global_step == 0:
            state.stateful_callbacks[name] = fresh
        # A checkpoint of a run without this callback has no entry, and `Trainer` fails to save the next one.
        saved = state.stateful_callbacks.setdefault(name, fresh)["attributes"]
        self._total, self._sequences, self._steps = int(saved["_total"], 16), saved["_sequences"], saved["_steps"]
        self._own = self._own_sequences = 0
        self._last_step = None


class FingerprintedTrainer(GroupEndingTrainer, CheckpointLoadingTrainer):
    """`Trainer` that keeps a [`BatchFingerprint`] of its training batches. Takes the arguments of `Trainer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self.args.accelerator_config, "split_batches", False):
            raise RecipeError(
                "accelerator_config: split_batches=true makes batch sizes those of all processes together, by which "
                "the last step of an epoch would be cut wrongly; leave it out, and divide the batch size yourself."
            )
        self.add_callback(BatchFingerprint())

    @property
    def batch_fingerprint(self) -> BatchFingerprint:
        """Of the batches seen so far."""
        return next(found for found in self.callback_handler.callbacks if isinstance(found, BatchFingerprint))

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """
        Trains on one batch and adds it to the fingerprint.

        Args:
            model (`torch.nn.Module`):
                The model.
            inputs (`dict`):
                The batch.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*):
                See `Trainer`.

        Returns:
            `torch.Tensor`: the loss.
        """
        # An accelerator copies and computes on behind our back; the digest is taken while it does.
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
        copies = {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}
        devices = {value.device for value in tensors.values()} - {torch.device("cpu")}
        copied = [torch.accelerator.current_stream(device).record_event() for device in devices]
        loss = super().training_step(model, inputs, num_items_in_batch)
        for event in copied:
            event.synchronize()
        self.batch_fingerprint.add(self.fingerprinted(copies), self.state.global_step)
        return loss

    def fingerprinted(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        The rows of a batch that the fingerprint is of; all of them, unless a subclass knows better.

        Args:
            batch (`dict`):
                What the model was trained on, on the CPU; each tensor of shape `(B, …)`.

        Returns:
            `dict`: the same tensors, or some of their rows.
        """
        return batch

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """
        Leaves the card of the run as it is: `Trainer` would write its draft over it when it pushes.

        Args:
            args:
                See `Trainer`.
            kwargs:
                See `Trainer`.
        """
        if not (Path(str(self.args.output_dir)) / CARD).exists():
            super().create_model_card(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The main process alone asks callbacks for their state, when it is too late to ask the others.
        self.batch_fingerprint.combine()
        super()._save_checkpoint(model, trial)


def _claims(model: nn.Module) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """Output rows of the parameters that hold queries, keys and values, by what they count as."""
    claims: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    for layer in survey_attention(model).layers:
        if layer.problem is not None:
            continue
        for part in PARTS:
            kind = "v" if part == "value" else "qk"
            for parameter, mask in _rows_of(layer, part) if layer.has(part) else ():
                known = claims.setdefault(parameter, {})
                known[kind] = known[kind] | mask if kind in known else mask
    return claims


def _rows_of(layer: AttentionLayer, part: Part) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
    """Parameters of a part, each with a mask that broadcasts to its matrix or vector."""
    for piece in layer.projection(part).pieces:
        holder = layer.holding.get_submodule(piece.module)
        number, _ = piece_widths(layer.holding, piece)
        mask = torch.zeros(number, dtype=torch.bool)
        mask[piece.rows.select(torch.arange(number), layer.heads).flatten()] = True
        weight, bias = getattr(holder, piece.weight), getattr(holder, piece.bias, None)
        shape = full_shape(weight)
        if not piece.is_parameter:
            shaped = mask.view(1, -1) if piece.transposed else mask.view(-1, *[1] * (len(shape) - 1))
        else:
            shaped = mask.view(1, *shape[1:]) if piece.transposed else mask.view(*shape[:-1], 1)
        yield weight, shaped
        if isinstance(bias, nn.Parameter):
            yield bias, mask.view(full_shape(bias))


def _split(tensor: torch.Tensor, claims: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not claims:
        return {"weights": tensor}
    parts: dict[str, torch.Tensor] = {}
    rest = torch.ones(tensor.shape, dtype=torch.bool)
    for kind, mask in claims.items():
        whole = mask.expand(tensor.shape) & rest
        parts[kind] = tensor[whole.to(tensor.device)]
        rest &= ~whole
    if rest.any():
        parts["weights"] = tensor[rest.to(tensor.device)]
    return parts


def _sequences(batch: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, list[Any]]]:
    """Each sequence of a batch: names, types and shapes of what it consists of, and the bytes."""
    mask = batch.get("attention_mask")
    parts = dict(sorted(batch.items()))
    if mask is None or mask.ndim != 2:
        # Without -1, which a batch of no rows leaves open.
        rows = [_bytes(part.reshape(len(part), math.prod(part.shape[1:]))) for part in parts.values()]
        head = _head({name: part[:0] for name, part in parts.items()})
        yield from ((head, list(row)) for row in zip(*rows, strict=True))
        return
    # Padding is a matter of what stands beside a sequence in its batch.
    for index, kept in enumerate(mask.bool()):
        own = {name: part[index][kept] if part.shape == mask.shape else part[index] for name, part in parts.items()}
        head = _head({name: part[None] for name, part in own.items()})
        yield head, [_bytes(part.reshape(-1)) for part in own.values()]


def _head(parts: Mapping[str, torch.Tensor]) -> str:
    return "".join(f"{name} {part.dtype} {tuple(part.shape[1:])};" for name, part in parts.items())


def _bytes(tensor: torch.Tensor) -> Any:
    """Bytes of a tensor, row by row where it has rows; also of types that NumPy does not know."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def _update(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    digest.update(_bytes(tensor.reshape(-1)))
