"""
What the model has drawn: its scale, the randomness in it, and drawing it again from another distribution.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `E` head width.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..attention import AttentionLayer, HeadTensors


__all__ = ["DISTRIBUTIONS", "redraw", "scale_ratio", "seeded_by"]

# How far (in standard errors) the spreads of two drawn weights may lie apart and still count as drawn alike.
_ALIKE_STANDARD_ERRORS = 8.0
# Entries that are looked at first: enough to tell spreads that differ by 3 %.
_SAMPLE = 2**16


def _kaiming_uniform(weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> None:
    """What `nn.Linear.reset_parameters` draws: both uniform in ±1/√fan_in."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1])
        nn.init.uniform_(bias, -bound, bound, generator=generator)


DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor | None, torch.Generator], None]] = {
    "kaiming_uniform": _kaiming_uniform,
}


def seeded_by(key: HeadTensors) -> torch.Generator:
    """
    A source of randomness from a K draw that is about to be thrown away: its bits are as random as a seed can be, and
    the same on every rank.

    Args:
        key ([`HeadTensors`]): The draw.

    Returns:
        `torch.Generator`: On the CPU.
    """
    bits = key.weight.flatten()[:2].to("cpu", torch.float32).view(torch.int32).tolist()
    return torch.Generator().manual_seed((bits[0] & 0x7FFFFFFF) << 32 | bits[-1] & 0xFFFFFFFF)


def redraw(parts: Iterable[HeadTensors], distribution: str, generator: torch.Generator) -> None:
    """
    Draws weights and biases of parts again, in place.

    Args:
        parts (`Iterable[HeadTensors]`): The parts.
        distribution (`str`): A key of `DISTRIBUTIONS`.
        generator (`torch.Generator`): Source of randomness.
    """
    for part in parts:
        heads, head_dim, width = part.weight.shape
        # On the CPU, where the generator is; in fp32, whatever the model is built in.
        weight = torch.empty(heads * head_dim, width, device="cpu", dtype=torch.float32)
        bias = None if part.bias is None else torch.empty(heads * head_dim, device="cpu", dtype=torch.float32)
        DISTRIBUTIONS[distribution](weight, bias, generator)
        part.weight.copy_(weight.view(heads, head_dim, width))
        if part.bias is not None and bias is not None:
            part.bias.copy_(bias.view(heads, head_dim))


def scale_ratio(layer: AttentionLayer) -> float:
    """
    σ_k/σ_q of the drawn weights.

    Args:
        layer ([`AttentionLayer`]): The layer.

    Returns:
        `float`: Exactly 1 unless they differ by more than chance; infinite if Q alone is all zero, 0 if K alone is.
    """
    with layer.tensors("query", "key") as tensors:
        query, key = tensors["query"].weight, tensors["key"].weight
        # Nearly always they are drawn alike, and a sample of the channels shows it; a difference is measured on all.
        sample = max(1, query.shape[1] * _SAMPLE // max(query.numel(), 1))
        for channels in dict.fromkeys((min(sample, query.shape[1]), query.shape[1])):
            weights = query[:, :channels], key[:, :channels]
            # About zero: these are draws of mean 0, and a handful of entries has no degree of freedom to spare.
            precision = torch.promote_types(query.dtype, torch.float32)
            query_std, key_std = (
                torch.linalg.vector_norm(weight, dtype=precision).item() / math.sqrt(weight.numel())
                for weight in weights
            )
            standard_error = math.sqrt(sum(0.5 / weight.numel() for weight in weights))
            ratio = key_std / query_std if query_std else math.inf
            if query_std == key_std or 0 < abs(math.log(ratio or math.inf)) <= _ALIKE_STANDARD_ERRORS * standard_error:
                return 1.0
    return ratio
