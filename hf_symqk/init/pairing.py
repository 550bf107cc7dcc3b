"""Stand-in for `attention/rotary.py` until it is merged: half-split pairs for any config with rotary parameters."""

from typing import NamedTuple

from ..attention import AttentionLayer


class ChannelPairs(NamedTuple):
    """Channels of a head that the model's rotary embedding turns together, and those that it leaves."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    rest: tuple[int, ...]
    rotary: bool


def channel_pairs(layer: AttentionLayer) -> ChannelPairs:
    """Half-split pairs."""
    width = layer.heads.head_dim
    config = getattr(layer.module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return ChannelPairs((), (), tuple(range(width)), False)
    turned = int(width * parameters.get("partial_rotary_factor", 1.0))
    half = turned // 2
    return ChannelPairs(tuple(range(half)), tuple(range(half, 2 * half)), tuple(range(2 * half, width)), True)
