"""How many heads an attention module has, told from its attributes, its config and its shapes."""

from operator import attrgetter
from typing import Any

from torch import nn

from .layouts import ComposedProjection, QKLayout
from .projections import piece_widths
from .rows import HeadShape


__all__ = ["HEAD_DIM", "NUM_HEADS", "NUM_KEY_VALUE_HEADS", "WAY_OUT", "attribute", "head_shape", "value_of"]

# Attribute names under which modules and configs of Transformers keep their head counts.
NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "kv_n_heads")
HEAD_DIM = (
    "qk_head_dim",
    "head_dim",
    "d_head",
    "dim_head",
    "attention_head_size",
    "head_size",
    "key_value_proj_dim",
    "d_kv",
    "key_dim",
)
_SHARED_HEAD_DIM = "qk_rope_head_dim"
WAY_OUT = "Describe another layout with `hf_symqk.register_qk_layout`."


def attribute(holder: Any, names: tuple[str, ...]) -> int | None:
    """The first positive integer that a module or config has under one of the names."""
    values = (value_of(holder, name) for name in names)
    return next((value for value in values if _is_count(value)), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def value_of(holder: Any, name: str) -> Any:
    """An attribute of a module or config, `None` if it has none."""
    try:
        return getattr(holder, name, None)
    except Exception:  # configs refuse, each with an error of its own, what they hold for each layer apart
        return None


def head_shape(name: str, module: nn.Module, layout: QKLayout, config: Any) -> HeadShape:
    """
    Head counts from the module, else from its config, else from shapes; then checked against the shapes.

    Args:
        name (`str`): How messages call the module.
        module (`torch.nn.Module`): The attention module.
        layout ([`QKLayout`]): The entry of the table that it matches.
        config (`Any`): What speaks for the module where it says nothing itself.

    Returns:
        [`HeadShape`]

    Raises:
        ValueError: if nothing says how many heads there are, or it does not fit the shapes.
    """
    shapes = [piece_widths(module, piece) for piece in layout.pieces]
    rows = [(piece, number) for piece, (number, _) in zip(layout.pieces, shapes, strict=True)]
    query_rows, key_rows = rows[len(layout.query.pieces) - 1][1], rows[-1][1]
    fused = layout.query.pieces[-1].path == layout.key.pieces[-1].path
    separate = not fused and len(layout.key.pieces) == 1
    own_num_heads = _said(module, layout.num_heads) or attribute(module, NUM_HEADS)
    num_heads = own_num_heads or attribute(config, NUM_HEADS)
    own_head_dim = attribute(module, HEAD_DIM)
    head_dim = own_head_dim or attribute(config, HEAD_DIM)
    if num_heads is None and head_dim is not None and separate:
        num_heads = query_rows // head_dim
    if num_heads is None:
        raise ValueError(
            f"{name!r} ({type(module).__name__}): neither the module nor its config says how many heads it has "
            f"(looked for {', '.join(NUM_HEADS)} and {', '.join(HEAD_DIM)}). {WAY_OUT}"
        )
    groups = attribute(module, NUM_KEY_VALUE_HEADS) or attribute(config, NUM_KEY_VALUE_HEADS) or num_heads
    shared = _shared_head_dim(module, layout, config)
    if shared is not None:
        groups = num_heads  # whatever the config says of groups: latent keys are made for each head
    if head_dim:
        widths = [head_dim]
    elif not fused:
        widths = [query_rows // num_heads]
    else:
        width = shapes[0][1]
        order = getattr(layout.query.pieces[-1].rows, "order", ("query", "key", "value"))
        totals = [sum(num_heads if part == "query" else count for part in order) for count in (groups, num_heads)]
        widths = [query_rows // total for total in totals if query_rows % total == 0]
        # Heads that fill the width are the rule.
        widths.sort(key=lambda head_dim: head_dim * num_heads != width)
    candidates = []
    for width in filter(None, widths):
        candidates.append(HeadShape(num_heads, groups, width, shared or 0))
        if separate and key_rows % width == 0:
            # The config's key heads need not be those of this module (cross-attention, per-layer counts).
            candidates.append(HeadShape(num_heads, key_rows // width, width))
        # Falling back to one key head a query head serves fused modules whose config speaks of other layers.
        candidates.append(HeadShape(num_heads, num_heads, width, shared or 0))
    if own_head_dim and not own_num_heads and separate:
        # The config's number may be that of other layers (the encoder's); the module's own width tells.
        candidates.append(HeadShape(query_rows // own_head_dim, key_rows // own_head_dim, own_head_dim))
    for heads in candidates:
        fits = all(piece.rows.fits(number, heads) for piece, number in rows)
        if fits and heads.num_key_value_heads and heads.num_attention_heads % heads.num_key_value_heads == 0:
            return heads
    described = ", ".join(dict.fromkeys(f"{piece.path} has {number} rows" for piece, number in rows))
    raise ValueError(
        f"{name!r} ({type(module).__name__}): {described}, which does not fit layout {layout.name!r} with "
        f"{num_heads} query heads and {groups} key heads of width {head_dim or (widths or [0])[0]}. If this module "
        "orders its rows otherwise, describe it with `hf_symqk.register_qk_layout`."
    )


def _said(module: nn.Module, num_heads: int | str | None) -> int | None:
    """The number of heads that a layout gives itself, or says where the module has it."""
    if not isinstance(num_heads, str):
        return num_heads
    try:
        return attrgetter(num_heads)(module)
    except AttributeError:  # a stand-in, of which a config has to say it
        return None


def _shared_head_dim(module: nn.Module, layout: QKLayout, config: Any) -> int | None:
    """Channels of a key that all heads share, `None` in a layout that has no such keys."""
    if not any(isinstance(part, ComposedProjection) and part.shared for part in (layout.query, layout.key)):
        return None
    # 0 in layers without rotation, whatever the config says of the others.
    own = value_of(module, _SHARED_HEAD_DIM)
    return own if isinstance(own, int) else attribute(config, (_SHARED_HEAD_DIM,)) or 0
