"""
The small matrices A of `W_k = W_q A`: turns by an angle in pairs of channels, and signs of channels.

Shape legend: `D` width of the input, `E` head width, `...` heads.

`J` is the turn by 90° in pairs of channels: skew, `J² = −I`. With `A = cos θ · I + sin θ · J`, which is orthogonal,
the form `W A^T W^T` has the symmetric part `cos θ · W W^T` and the skew part `−sin θ · W J W^T`, whatever W is. So it
scores `s` exactly where `tan² θ = (1 − s) ‖W W^T‖² / ((1 + s) ‖W J W^T‖²)`. (With `M = W^T W` these squared norms are
`tr(M M)` and `tr(M J M J^T)`.)
"""

import torch
from torch import Tensor

from ..attention import ChannelPairs
from ..bilinear import BilinearForm


__all__ = ["balanced_signs", "planes", "quarter_turn", "turn_to"]

Planes = tuple[tuple[int, ...], tuple[int, ...]]


def planes(pairs: ChannelPairs) -> Planes:
    """
    All channels of a head in pairs: those that the rotary embedding turns together, and neighbours among the rest.

    Args:
        pairs ([`ChannelPairs`]): The model's own pairs.

    Returns:
        `tuple`: First and second channel of each pair.

    Raises:
        ValueError: if a channel is left over.
    """
    if len(pairs.rest) % 2:
        raise ValueError(
            f"its heads have {2 * len(pairs.first) + len(pairs.rest)} channels (E), which do not go into pairs; only "
            "a symmetry of 1 needs none."
        )
    return pairs.first + pairs.rest[::2], pairs.second + pairs.rest[1::2]


def quarter_turn(weight: Tensor, pairs: Planes) -> Tensor:
    """
    The turn by 90° in each pair of channels.

    Args:
        weight (`torch.Tensor` of shape `(..., E, D)`): Weight of heads.
        pairs (`tuple`): First and second channel of each pair, all E of them.

    Returns:
        `torch.Tensor` of the same shape: a new tensor.
    """
    first, second = map(list, pairs)
    turned = torch.empty_like(weight)
    turned[..., first, :] = -weight[..., second, :]
    turned[..., second, :] = weight[..., first, :]
    return turned


def turn_to(symmetry: float, weight: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """
    Cosine and sine of the angle at which forms have a symmetry score.

    Args:
        symmetry (`float`): The score, in [−1, 1].
        weight (`torch.Tensor` of shape `(..., E, D)`): W.
        turned (`torch.Tensor` of shape `(..., E, D)`): W J.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: In fp64 where the device has it, one for each leading index; exactly 1 and
        0 for symmetry 1, exactly 0 and 1 for −1.
    """
    left = weight.mT
    symmetric, skew = (BilinearForm(left, right.mT).frobenius_norm() for right in (weight, turned))
    if symmetric.device.type != "mps":  # which has no fp64
        symmetric, skew = symmetric.double(), skew.double()
    cosine, sine = (1 + symmetry) ** 0.5 * skew, (1 - symmetry) ** 0.5 * symmetric
    length = torch.hypot(cosine, sine)
    zero = length == 0  # a head that is all zero has no score, whatever the angle
    return torch.where(zero, 1.0, cosine / length), torch.where(zero, 0.0, sine / length)


def balanced_signs(pairs: ChannelPairs) -> list[int]:
    """
    A sign for each channel: as many +1 as −1, the same in channels that are turned together, and alternating over
    those pairs, so that slow and fast turns get both.

    Args:
        pairs ([`ChannelPairs`]): The model's own pairs.

    Returns:
        `list[int]`: E signs.

    Raises:
        ValueError: if the numbers cannot be equal.
    """
    number, rest = len(pairs.first), len(pairs.rest)
    if rest % 2 or (number % 2 and not rest):
        raise ValueError(
            f"its heads have {2 * number + rest} channels (E), of which rotary positions turn {2 * number} in pairs: "
            "they do not fall into two equal halves that keep the pairs together."
        )
    signs = [0] * (2 * number + rest)
    for index, (first, second) in enumerate(zip(pairs.first, pairs.second, strict=True)):
        signs[first] = signs[second] = (-1) ** index
    # An odd pair more with + is made up for by two channels with − among the rest.
    ahead = 2 if number % 2 else 0
    for index, channel in enumerate(pairs.rest):
        signs[channel] = -1 if index < ahead else (-1) ** index
    return signs
