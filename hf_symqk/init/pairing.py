"""Stand-in for `attention/rotary.py` until it is merged: half-split pairs for any config with rotary parameters."""

from dataclasses import dataclass

from ..attention import AttentionLayer


@dataclass(frozen=True)
class ChannelPairs:
    """Channels of a head that the model's rotary embedding turns together, and those that it leaves."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    rest: tuple[int, ...]


def channel_pairs(layer: AttentionLayer) -> ChannelPairs:
    """Half-split pairs."""
    width = layer.heads.head_dim
    parameters = getattr(getattr(layer.module, "config", None), "rope_parameters", None)
    if not parameters:
        return ChannelPairs((), (), tuple(range(width)))
    half = int(width * parameters.get("partial_rotary_factor", 1.0)) // 2
    return ChannelPairs(tuple(range(half)), tuple(range(half, 2 * half)), tuple(range(2 * half, width)))
