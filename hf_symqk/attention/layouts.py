"""
The one table of query-key layouts: in which projections of an attention module W_q and W_k live, and in which rows.

Shape legend: `D` width of the input, `H` query heads, `G` key/value heads (`H % G == 0`), `E` head width, `O` output
rows of a projection. A weight is read as `(O, D)`, one row per output channel, a bias as `(O,)`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor


__all__ = ["HeadRows", "HeadShape", "Projection", "QKLayout", "layouts", "register_qk_layout", "unregister_qk_layout"]

Part = Literal["query", "key", "value"]


class HeadShape(NamedTuple):
    """
    Head counts of an attention module: `num_attention_heads` H, `num_key_value_heads` G and `head_dim` E (which need
    not be D/H). Query head h reads key head `h // (H // G)`.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per key head, `r = H / G` (the name that Transformers uses)."""
        return self.num_attention_heads // self.num_key_value_heads

    def count(self, part: Part) -> int:
        """Number of heads of the query, key or value part."""
        return self.num_attention_heads if part == "query" else self.num_key_value_heads


class RowSelector(Protocol):
    """Which output rows of a projection belong to the heads of one part. [`HeadRows`] serves the regular cases."""

    def count(self, heads: HeadShape) -> int:
        """Output rows that the whole projection has for these head counts."""

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        """View `(heads of the part, E, ...)` of a tensor `(O, ...)`."""


@dataclass(frozen=True)
class HeadRows:
    """
    Rows of one part in a projection that holds one or several parts.

    Args:
        part (`str`):
            `"query"`, `"key"` or `"value"`.
        order (`tuple[str, ...]`, *optional*):
            Parts in the order in which the projection holds them; by default the part has a projection of its own.
        interleaved (`bool`, *optional*, defaults to `False`):
            `False`: all heads of one part, then all of the next (`[q0 q1 … k0 k1 … v0 v1 …]`). `True`: all parts of
            one head, then those of the next (`[q0 k0 v0 q1 k1 v1 …]`), which exists only where `H = G`.
    """

    part: Part
    order: tuple[Part, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", (self.part,))
        if self.part not in self.order:
            raise ValueError(f"`part` {self.part!r} is not in `order` {self.order}.")

    def count(self, heads: HeadShape) -> int:
        return sum(heads.count("query" if self.interleaved else part) for part in self.order) * heads.head_dim

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        position = self.order.index(self.part)
        if self.interleaved:
            return rows.unflatten(0, (heads.num_attention_heads, len(self.order), heads.head_dim))[:, position]
        start = sum(heads.count(part) for part in self.order[:position]) * heads.head_dim
        number = heads.count(self.part)
        return rows.narrow(0, start, number * heads.head_dim).unflatten(0, (number, heads.head_dim))


@dataclass(frozen=True)
class Projection:
    """
    A linear map inside an attention module.

    Args:
        module (`str`):
            Name of the submodule that holds `weight` (and perhaps `bias`), relative to the attention module.
        rows (`RowSelector`):
            Rows that belong to the part in question.
        transposed (`bool`, *optional*, defaults to `False`):
            `True` where the weight is stored `(D, O)`, as in GPT-2's `Conv1D`.
    """

    module: str
    rows: RowSelector
    transposed: bool = False


@dataclass(frozen=True)
class QKLayout:
    """One entry of the table; see [`register_qk_layout`] for the fields."""

    name: str
    query: Projection
    key: Projection
    value: Projection | None = None
    query_norms: tuple[str, ...] = ()
    key_norms: tuple[str, ...] = ()
    model_types: frozenset[str] | None = None


_LAYOUTS: dict[str, QKLayout] = {}


def register_qk_layout(
    *,
    name: str,
    query: Projection,
    key: Projection,
    value: Projection | None = None,
    query_norms: tuple[str, ...] = (),
    key_norms: tuple[str, ...] = (),
    model_types: Iterable[str] | None = None,
) -> QKLayout:
    """
    Adds a layout to the table: finding, scoring and initialisation then know it. Layouts registered later are tried
    first, so that an own layout wins over a built-in one of the same module names.

    Args:
        name (`str`):
            Name of the layout, unique in the table.
        query (`Projection`):
            Where W_q lives. A module matches if it has the submodules of query and key.
        key (`Projection`):
            Where W_k lives.
        value (`Projection`, *optional*):
            Where W_v lives; only an init that redraws V needs it.
        query_norms (`tuple[str, ...]`, *optional*):
            Names of submodules that normalise the queries, where an attention module has one; their learned gain is
            folded into W_q and W_k when scoring.
        key_norms (`tuple[str, ...]`, *optional*):
            The same for the keys.
        model_types (`Iterable[str]`, *optional*):
            `config.model_type` values that the layout holds for. Needed where other models use the same names for
            another order of rows (fused projections); by default any model with these submodules matches.

    Returns:
        [`QKLayout`]: The new entry.

    Raises:
        ValueError: if `name` is taken.

    Examples:

    ```python
    >>> from hf_symqk.attention import HeadRows, Projection, register_qk_layout, unregister_qk_layout

    >>> layout = register_qk_layout(
    ...     name="my_fused_kq",
    ...     query=Projection("to_kq", HeadRows("query", order=("key", "query"))),
    ...     key=Projection("to_kq", HeadRows("key", order=("key", "query"))),
    ...     model_types=["my_model"],
    ... )
    >>> unregister_qk_layout("my_fused_kq")

    ```
    """
    if name in _LAYOUTS:
        raise ValueError(f"A layout named {name!r} is registered already; choose another name or unregister it first.")
    types = None if model_types is None else frozenset(model_types)
    _LAYOUTS[name] = QKLayout(name, query, key, value, query_norms, key_norms, types)
    return _LAYOUTS[name]


def unregister_qk_layout(name: str) -> None:
    """
    Removes a layout from the table.

    Args:
        name (`str`): Name given to [`register_qk_layout`].

    Raises:
        KeyError: if there is no such layout.
    """
    del _LAYOUTS[name]


def layouts() -> list[QKLayout]:
    """The table, in the order in which layouts are tried (last registered first)."""
    return list(reversed(_LAYOUTS.values()))


# Separate projections are split the same way by every model that uses these names. The modules' own head counts and
# shapes are checked against each other, so that a model which packs more into one of them is refused, not misread.
for _query, _key, _value in (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
):
    register_qk_layout(
        name=f"{_query}/{_key}",
        query=Projection(_query, HeadRows("query")),
        key=Projection(_key, HeadRows("key")),
        value=Projection(_value, HeadRows("value")),
        query_norms=("q_norm", "q_layernorm"),
        key_norms=("k_norm", "k_layernorm"),
    )


def _fused(
    module: str, order: tuple[Part, ...], *, interleaved: bool = False, transposed: bool = False
) -> list[Projection]:
    return [Projection(module, HeadRows(part, order, interleaved), transposed) for part in order]


# Fused projections: the same module name stands for different orders of rows, so the model types are listed.
for _name, _module, _storage, _types in (
    ("Wqkv", "Wqkv", {}, ["modernbert"]),
    ("qkv_proj", "qkv_proj", {}, ["phi3"]),
    ("query_key_value (interleaved)", "query_key_value", {"interleaved": True}, ["bloom", "gpt_neox"]),
    ("c_attn (Conv1D)", "c_attn", {"transposed": True}, ["gpt2"]),
):
    _q, _k, _v = _fused(_module, ("query", "key", "value"), **_storage)
    register_qk_layout(name=_name, query=_q, key=_k, value=_v, model_types=_types)

_k, _v = _fused("c_attn", ("key", "value"), transposed=True)
register_qk_layout(
    name="q_attn + c_attn (Conv1D, cross-attention)",
    query=Projection("q_attn", HeadRows("query"), transposed=True),
    key=_k,
    value=_v,
    model_types=["gpt2"],
)
