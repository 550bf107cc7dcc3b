"""
Which way the attention of a model looks, by its own forward: one token's hidden state is changed where it enters an
attention module, and the outputs that change with it are those of the tokens that see it.

    python -m oracle.directions --output directions.jsonl            # from the folder `tests`
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_symqk.attention import AttentionLayer, survey_attention
from hf_symqk.attention.calling import Call, Rerun

from . import census
from .building import build, shake
from .comparing import _run
from .configs import LEVELS


__all__ = ["Direction", "directions", "examine"]

_CHANGED = 1e-6  # of the largest value: attention weights of a masked token are 0, or of the order of exp(-1e4)


class Direction(NamedTuple):
    """
    What a forward says about one layer.

    Attributes:
        causal (`bool` or `None`): Whether no token sees a later one; `None` where it could not be seen.
        note (`str`): Why not.
    """

    causal: bool | None
    note: str = ""


def directions(model: PreTrainedModel, errors: list[str]) -> dict[str, tuple[AttentionLayer, Direction]]:
    """
    Looks at every self-attention layer that a forward pass of a model reaches.

    Args:
        model (`PreTrainedModel`): A small model in eval mode.
        errors (`list[str]`): Takes what inputs were not taken.

    Returns:
        `dict[str, tuple[AttentionLayer, Direction]]`: By name of the layer.
    """
    layers = [layer for layer in survey_attention(model).layers if layer.problem is None]
    calls, *_ = _run(model, errors)
    found = {}
    for layer in layers:
        if layer.kind != "self":
            found[layer.name] = (layer, Direction(None, "cross"))
        elif layer.name not in calls:
            found[layer.name] = (layer, Direction(None, "not reached"))
        else:
            try:
                found[layer.name] = (layer, _direction(layer, calls[layer.name]))
            except Exception as error:
                found[layer.name] = (layer, Direction(None, f"{type(error).__name__}: {error}"[:200]))
    return found


def _direction(layer: AttentionLayer, call: Call) -> Direction:
    width = layer.input_width("query")
    rerun = Rerun(layer.module, call, width)
    if not rerun.streams:
        return Direction(None, "no hidden states among its arguments")
    stream = rerun.streams[0]
    hidden: Tensor = rerun.neutral[stream[0]]
    if hidden.shape[-1] != width:
        return Direction(None, f"hidden states of shape {tuple(hidden.shape)}")
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(hidden.shape, generator=generator).to(hidden)
    slots = hidden.shape[:-1].numel()

    def run(changed: int | None) -> Tensor:
        values = hidden.clone()
        if changed is not None:
            row = values.view(slots, width)[changed]
            row.copy_(torch.randn(width, generator=generator))
        return _output(layer.module, rerun, stream, values, slots)

    plain = run(None)
    if not torch.equal(plain, run(None)):
        return Direction(None, "its output changes from run to run")

    earlier = later = False
    for changed in _tokens(hidden, slots):
        difference = (run(changed) - plain).abs().amax(-1)
        touched = (difference > _CHANGED * plain.abs().max()).nonzero().flatten()
        # Tokens of one sequence stand in one order in memory, whatever stands between them.
        earlier |= bool((touched < changed).any())
        later |= bool((touched > changed).any())
    if earlier:
        return Direction(False)
    return Direction(True) if later else Direction(None, "no token sees another one")


def _tokens(hidden: Tensor, slots: int) -> list[int]:
    """Some tokens of the last sequence, not its last one alone, which may be padding."""
    tokens = hidden.shape[1] if hidden.ndim == 3 else slots
    return sorted(
        {
            slots - 1,
            slots - max(1, tokens // 2),
            slots - max(1, 3 * tokens // 4),
            slots - tokens,
            slots - tokens + min(5, tokens - 1),
        }
    )


def _output(module: nn.Module, rerun: Rerun, stream: list[str], hidden: Tensor, slots: int) -> Tensor:
    args, kwargs = rerun.arguments({stream[0]: hidden})
    with torch.no_grad():
        output = module(*args, **kwargs)
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:-1].numel() == slots:
            return leaf.reshape(slots, -1)
    raise ValueError(f"no output for each of {slots} tokens")


def examine(model_type: str) -> Iterator[dict[str, Any]]:
    """One line for a type: of each layer what the package says and what the forward does."""
    yield from census.level_by_level(model_type, LEVELS[:2], _examine)


def _examine(model_type: str, level: int) -> dict[str, Any]:
    model = build(model_type, level)
    shake(model)
    errors: list[str] = []
    try:
        found = directions(model, errors)
    except ValueError as error:
        if "No attention layer" not in str(error):
            raise
        return {
            "type": model_type,
            "status": "all",
            "layers": [],
            "level": level,
            "seen": 0,
            "class": type(model).__name__,
        }
    layers = [
        {
            "name": layer.name,
            "class": type(layer.module).__name__,
            "kind": layer.kind,
            "role": getattr(layer, "role", None),
            "causal": getattr(layer, "causal", None),
            "forward": direction.causal,
            "note": direction.note,
            "is_causal": getattr(layer.module, "is_causal", None),
            "stack": layer.stack,
        }
        for layer, direction in found.values()
    ]
    own = [layer for layer in layers if layer["kind"] == "self"]
    seen = sum(layer["forward"] is not None for layer in own)
    status = "all" if seen == len(own) else "some" if seen else "none"
    return {
        "type": model_type,
        "class": type(model).__name__,
        "level": level,
        "status": status,
        "seen": seen,
        "layers": layers,
        "errors": errors[:4],
    }


if __name__ == "__main__":
    census.take(examine, __doc__)
