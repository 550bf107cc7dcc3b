"""
The one table of query-key layouts: in which projections of an attention module W_q and W_k live, and in which rows.
The entries that come with the package are in `builtin_layouts.py`.

Shape legend: `D` width of the input, `H` query heads, `G` key/value heads (`H % G == 0`), `E` head width, `O` output
rows of a projection. A weight is read as `(O, D)`, one row per output channel, a bias as `(O,)`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor


__all__ = [
    "GatedRows",
    "HeadRows",
    "HeadShape",
    "Projection",
    "QKLayout",
    "layouts",
    "register_qk_layout",
    "unregister_qk_layout",
]

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
class GatedRows:
    """Rows of a query projection that holds, head by head, a query and a gate of its width (`[q0 g0 q1 g1 …]`)."""

    def count(self, heads: HeadShape) -> int:
        return 2 * heads.num_attention_heads * heads.head_dim

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        return rows.unflatten(0, (heads.num_attention_heads, 2, heads.head_dim))[:, 0]


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


# At the end, since it registers its entries with the functions above.
from . import builtin_layouts  # noqa: E402, F401
