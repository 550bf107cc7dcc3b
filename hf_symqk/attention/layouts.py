"""
The one table of query-key layouts: in which projections of an attention module W_q and W_k live, and in which rows.
The entries that come with the package are in `builtin_layouts.py`.

Shape legend: `D` width of the input, `H` query heads, `G` key/value heads (`H % G == 0`), `E` head width, `O` output
rows of a projection. A weight is read as `(O, D)`, one row per output channel, a bias as `(O,)`.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType

from torch import Tensor

from .rows import RowSelector


__all__ = [
    "ENTRY_POINTS",
    "ComposedProjection",
    "LearnedScale",
    "Projection",
    "QKLayout",
    "is_built_in",
    "layouts",
    "register_qk_layout",
    "unregister_qk_layout",
]


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
        weight (`str`, *optional*, defaults to `"weight"`):
            Name of the weight in that module. A parameter of the attention module itself has `module=""`; it may have
            more dimensions, the input's width first (`transposed`) or last.
        bias (`str`, *optional*, defaults to `"bias"`):
            Name of the bias, where there is one.
        batch_norm (`str`, *optional*):
            Submodule that normalises each output row over the batch. Its gain and running variance, which outside of
            training make it a fixed factor a row, are folded in when scoring.
    """

    module: str
    rows: RowSelector
    transposed: bool = False
    weight: str = "weight"
    bias: str = "bias"
    batch_norm: str | None = None

    @property
    def pieces(self) -> "tuple[Projection, ...]":
        """The projection itself; of a [`ComposedProjection`], what it is made of."""
        return (self,)

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is a parameter of some other name than a linear map's, so that no such map holds it."""
        return self.module == "" or self.weight != "weight"

    @property
    def path(self) -> str:
        """What tells where the weight is, relative to the attention module: the linear map, or the parameter."""
        if not self.is_parameter:
            return self.module
        return f"{self.module}.{self.weight}" if self.module else self.weight


@dataclass(frozen=True)
class ComposedProjection:
    """
    Two linear maps in a row, perhaps with a norm between them: `W = W_up · diag(gain) · W_down`.

    Args:
        down ([`Projection`]): The first one; its rows are one head.
        up ([`Projection`]): The second one, split into heads.
        norm (`str`, *optional*): Submodule that normalises what is between; its learned gain is folded in.
        shared ([`Projection`], *optional*): Rows of the first one that all heads have as their last channels.
        scale (`str`, *optional*): Attribute of the attention module, where it has one, that multiplies the product
            (but not the shared rows).
        shared_norm (`str`, *optional*): Submodule that normalises the shared rows; its learned gain is folded in.
        twice (`bool`, *optional*, defaults to `False`): `True` where the second one reads what the first one gives
            twice, side by side: normalised, and as it is. The forms leave out what the norm does besides its gain, so
            both count alike.
    """

    down: Projection
    up: Projection
    norm: str | None = None
    shared: Projection | None = None
    scale: str | None = None
    shared_norm: str | None = None
    twice: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms in it."""
        return tuple(norm for norm in (self.norm, self.shared_norm) if norm is not None)

    @property
    def pieces(self) -> tuple[Projection, ...]:
        """The linear maps it is made of; the first reads the input, the last has the heads."""
        return (self.down, self.up) if self.shared is None else (self.down, self.shared, self.up)


@dataclass(frozen=True)
class LearnedScale:
    """
    What a forward multiplies its queries by, channel by channel or head by head, besides norms.

    Args:
        parameters (`tuple[str, ...]`): Parameters of the attention module, by dotted path.
        scale (`Callable`): Their whole tensors → a tensor that `(H, E)` can be multiplied by, once it is viewed so;
            one factor for all channels does not matter.
    """

    parameters: tuple[str, ...]
    scale: Callable[..., Tensor]


@dataclass(frozen=True)
class QKLayout:
    """One entry of the table; see [`register_qk_layout`] for the fields."""

    name: str
    query: Projection | ComposedProjection
    key: Projection | ComposedProjection
    value: Projection | None = None
    query_norms: tuple[str, ...] = ()
    key_norms: tuple[str, ...] = ()
    model_types: frozenset[str] | None = None
    query_scale: LearnedScale | None = None
    file_types: frozenset[str] | None = None
    num_heads: int | str | None = None

    @property
    def pieces(self) -> tuple[Projection, ...]:
        """The linear maps that W_q and W_k are made of; a fused one stands twice."""
        return (*self.query.pieces, *self.key.pieces)

    @property
    def lendable(self) -> tuple[Projection, ...]:
        """What other layers may borrow of the key: all of it, or the latent that each expands for itself."""
        return self.key.pieces[:-1] if isinstance(self.key, ComposedProjection) else self.key.pieces

    @property
    def lent_norms(self) -> tuple[str, ...]:
        """Names of the norms that come with what is lent."""
        inner = self.key.norm if isinstance(self.key, ComposedProjection) else None
        return self.key_norms if inner is None else (*self.key_norms, inner)

    @property
    def inner_norms(self) -> tuple[str, ...]:
        """Names of the norms between the linear maps of composed projections."""
        composed = [part for part in (self.query, self.key) if isinstance(part, ComposedProjection)]
        return tuple(norm for part in composed for norm in part.norms)

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of all modules whose gain may be folded in, whether a module has them or not."""
        return (*self.query_norms, *self.key_norms, *self.inner_norms)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Paths of weights that are parameters outside any linear map."""
        scale = () if self.query_scale is None else self.query_scale.parameters
        return (*(piece.path for piece in self.pieces if piece.is_parameter), *scale)


ENTRY_POINTS = "hf_symqk.layouts"  # group in which other packages name what registers their layouts

_LAYOUTS: dict[str, QKLayout] = {}
_loaded: set[str] = set()


def register_qk_layout(
    *,
    name: str,
    query: Projection | ComposedProjection,
    key: Projection | ComposedProjection,
    value: Projection | None = None,
    query_norms: tuple[str, ...] = (),
    key_norms: tuple[str, ...] = (),
    model_types: Iterable[str] | None = None,
    query_scale: LearnedScale | None = None,
    file_types: Iterable[str] | None = None,
    num_heads: int | str | None = None,
) -> QKLayout:
    """
    Adds a layout to the table: finding, scoring and initialisation then know it. Layouts registered later are tried
    first, so that an own layout wins over a built-in one of the same module names.

    A model with remote code is served the same way: its modules are matched by the names of their projections, and by
    `config.model_type` where `model_types` are given; nothing of it is imported. A package that brings its layouts
    along names what registers them as an entry point, which is loaded when the table is first read; layouts that were
    registered by hand still win over those:

    ```toml
    [project.entry-points."hf_symqk.layouts"]
    my_model = "my_package.layouts:register"  # a function of no arguments, or a module that registers on import
    ```

    Args:
        name (`str`):
            Name of the layout, unique in the table.
        query ([`Projection`] or [`ComposedProjection`]):
            Where W_q lives. A module matches if it has the submodules of query and key.
        key ([`Projection`] or [`ComposedProjection`]):
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
        query_scale ([`LearnedScale`], *optional*):
            What queries are multiplied by besides; a module without its parameters does not match.
        file_types (`Iterable[str]`, *optional*):
            Model types whose config and files tell all that the layout needs of a module (head counts, fixed factors),
            where only some do: checkpoints of others are refused, live models are not. By default, all.
        num_heads (`int` or `str`, *optional*):
            Number of query heads, where neither module nor config has it under a name that Transformers uses: the
            number itself, or the dotted path of an attribute in the attention module.

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
    types, in_files = (None if given is None else frozenset(given) for given in (model_types, file_types))
    entry = QKLayout(name, query, key, value, query_norms, key_norms, types, query_scale, in_files, num_heads)
    _LAYOUTS[name] = entry
    return entry


def unregister_qk_layout(name: str) -> None:
    """
    Removes a layout from the table.

    Args:
        name (`str`): Name given to [`register_qk_layout`].

    Raises:
        KeyError: if there is no such layout.
    """
    _load_entry_points()
    del _LAYOUTS[name]


def layouts() -> list[QKLayout]:
    """
    The table, in the order in which layouts are tried (last registered first). The first call loads the entry points
    of other packages; one that fails is left out with a warning.
    """
    _load_entry_points()
    return list(reversed(_LAYOUTS.values()))


def is_built_in(layout: QKLayout) -> bool:
    """Whether an entry came with the package; one of the same name that somebody else registered did not."""
    return _BUILT_IN.get(layout.name) is layout


def _load_entry_points() -> None:
    """Registers the layouts of other packages, once. What was registered by hand before stays ahead of them."""
    if _loaded:
        return
    _loaded.add(ENTRY_POINTS)  # before loading, since what is loaded may read the table itself
    by_hand = [name for name in _LAYOUTS if name not in _BUILT_IN]
    for point in entry_points(group=ENTRY_POINTS):
        before = dict(_LAYOUTS)
        try:
            loaded = point.load()
            if not isinstance(loaded, ModuleType):
                loaded()
        except Exception as error:
            # All of a package or nothing, so that no half of it reads a model wrongly.
            _LAYOUTS.clear()
            _LAYOUTS.update(before)
            package = point.dist.name if point.dist is not None else point.value
            warnings.warn(
                f"The layouts of package {package!r} (entry point {point.name!r} = {point.value!r} of group "
                f"{ENTRY_POINTS!r}) are left out: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )
    for name in by_hand:
        _LAYOUTS[name] = _LAYOUTS.pop(name)


# At the end, since it registers its entries with the functions above; for that alone, so that nothing of it is used.
from . import builtin_layouts  # noqa: E402, F401 (see above)


_BUILT_IN = dict(_LAYOUTS)  # before anybody else adds to it
