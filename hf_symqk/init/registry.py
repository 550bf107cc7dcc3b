"""
The table of schemes: what a scheme is given of a layer, what it declares, and how one is added.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `r = H / G`, `E` head width.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ..attention import AttentionLayer, ChannelPairs, HeadShape, HeadTensors, Part, channel_pairs


__all__ = [
    "LayerDraw",
    "LayerRequest",
    "QKInitScheme",
    "Target",
    "precise",
    "register_qk_init",
    "scheme_named",
    "schemes",
    "unregister_qk_init",
]

Target = Literal["head", "layer"]


def precise(tensor: Tensor) -> Tensor:
    """
    A tensor in at least single precision.

    Args:
        tensor (`torch.Tensor`): Any floating point tensor.

    Returns:
        `torch.Tensor`: The same one, unless it is of half precision.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class LayerRequest:
    """
    What is asked of one layer: all that a scheme's `check` sees.

    Attributes:
        layer ([`AttentionLayer`]): The layer; its weights may not be drawn yet, or be elsewhere.
        options (`Mapping[str, Any]`): The scheme's own numbers, with the defaults that it declared.
        symmetry (`float`): Symmetry score to aim at; 1 unless the scheme takes `symmetry`.
        target (`str`): Whose score it is: `"head"` or `"layer"`.
    """

    layer: AttentionLayer
    options: Mapping[str, Any] = field(default_factory=dict)
    symmetry: float = 1.0
    target: Target = "head"

    @property
    def heads(self) -> HeadShape:
        """Head counts of the layer."""
        return self.layer.heads

    @cached_property
    def channel_pairs(self) -> ChannelPairs:
        """
        Which channels of a head the model's rotary positions turn together.

        Raises:
            ValueError: if the pairing is not known.
        """
        return channel_pairs(self.layer)


@dataclass(frozen=True, eq=False)
class LayerDraw(LayerRequest):
    """
    One layer as the model has drawn it, for a scheme to write in place.

    Attributes:
        query ([`HeadTensors`]): Weight `(H, E, D)` and bias `(H, E)`.
        key ([`HeadTensors`]): Weight `(G, E, D)` and bias `(G, E)`. A bias is `None` where there is none, or it is not
            the scheme's to write (a `distribution` has drawn it).
        ratio (`float`): σ_k/σ_q of the draws, exactly 1 where they are drawn alike.
        generator (`torch.Generator`): Source of randomness, on the CPU. Its seed is taken from the K draw, so that
            the global random state stays as it is, and every process of a sharded model draws the same.
    """

    query: HeadTensors = field(kw_only=True)
    key: HeadTensors = field(kw_only=True)
    ratio: float = field(kw_only=True)
    generator: torch.Generator = field(kw_only=True)

    def sources(self) -> Iterator[tuple[Tensor, Tensor]]:
        """
        What K can be made of, and where it is written: weights, and biases where Q and K both have one.

        Yields:
            `tuple[torch.Tensor, torch.Tensor]`: Q's tensor `(G, E, D)` or `(G, E, 1)`, with grouped keys the sum over
            each group times 1/√r, which has the scale of one head; and K's of the same shape, to be written in place.
        """
        pairs = [(self.query.weight, self.key.weight)]
        if self.query.bias is not None and self.key.bias is not None:
            pairs.append((self.query.bias.unsqueeze(-1), self.key.bias.unsqueeze(-1)))
        for source, target in pairs:
            groups = self.heads.num_key_value_groups
            if groups > 1:
                # The sum over the group keeps the layer form symmetric, 1/√r keeps K's scale, the heads stay distinct.
                grouped = precise(source).unflatten(0, (self.heads.num_key_value_heads, groups))
                source = grouped.sum(1) / math.sqrt(groups)
            yield source, target


@dataclass(frozen=True)
class QKInitScheme:
    """
    An entry of the table; see [`register_qk_init`], which makes it.
    """

    name: str
    write: Callable[[LayerDraw], None] | None
    rewrites: tuple[Part, ...]
    options: Mapping[str, Any]
    takes_symmetry: bool
    check: Callable[[LayerRequest], None] | None

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the defaults of those that are not given."""
        return {**self.options, **options}

    def validated(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """
        The options in one form, without those that have their default.

        Args:
            options (`Mapping[str, Any]`): As they were given.

        Returns:
            `dict[str, Any]`: JSON values, in the order of declaration.

        Raises:
            ValueError: for a name that the scheme does not declare, or a value that is not of the default's kind.
        """
        unknown = [name for name in options if name not in self.options]
        if unknown:
            declared = f"its options are {', '.join(map(repr, self.options))}" if self.options else "it has none"
            raise ValueError(f"`options`: scheme {self.name!r} has no {', '.join(map(repr, unknown))}; {declared}.")
        valid: dict[str, Any] = {}
        for name, default in self.options.items():
            if name not in options:
                continue
            value = options[name]
            if _is_number(default):
                if not _is_number(value) or not math.isfinite(value):
                    raise ValueError(
                        f"`options`: {name!r} of scheme {self.name!r} must be a finite number, got {value!r}."
                    )
                value = float(value) if isinstance(default, float) else value
            value = _json_value(name, value)
            if value != default:
                valid[name] = value
        return valid


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json_value(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(f"`options`: {name!r} has to fit into config.json, which {value!r} does not.") from None


_SCHEMES: dict[str, QKInitScheme] = {}


def register_qk_init(
    *,
    name: str,
    write: Callable[[LayerDraw], None] | None,
    rewrites: tuple[Part, ...] = ("key",),
    options: Mapping[str, Any] | None = None,
    takes_symmetry: bool = False,
    check: Callable[[LayerRequest], None] | None = None,
) -> QKInitScheme:
    """
    Adds a scheme, under which `SymmetricInit(scheme=name)` and `qk_init=name` then reach it, also from `config.json`
    and the recipes. A process that reads such a `config.json` has to have imported the module that registers it.

    Args:
        name (`str`):
            Name of the scheme, an identifier.
        write (`Callable[[LayerDraw], None]`):
            Writes K (and Q) of one layer in place. Whatever is random comes from the generator it is given, so that
            all else stays as it was drawn. It is called under `torch.no_grad()`, once a layer, with whole tensors
            whatever the engine; on every process where weights are sharded, so it must do the same on each. `None`
            leaves the draw as it is.
        rewrites (`tuple[str, ...]`, *optional*, defaults to `("key",)`):
            What it writes: `("key",)` or `("query", "key")`.
        options (`Mapping[str, Any]`, *optional*):
            Its own settings by name, with their defaults (JSON values); `SymmetricInit(options=...)` may change them,
            a number to another number.
        takes_symmetry (`bool`, *optional*, defaults to `False`):
            Whether it takes `SymmetricInit(symmetry=..., target=...)`.
        check (`Callable[[LayerRequest], None]`, *optional*):
            Raises `ValueError` with the reason, a sentence, if the scheme cannot serve a layer. Called for every layer
            before any is written.

    Returns:
        [`QKInitScheme`]: The new entry.

    Raises:
        ValueError: if `name` is taken or no identifier, or `write`, `rewrites` or `options` are not as described.

    Examples:

    ```python
    >>> from transformers import AutoModel, BertConfig
    >>> import hf_symqk

    >>> def write(draw):  # W_k = -W_q in every other head
    ...     for source, target in draw.sources():
    ...         target.copy_(source * draw.ratio)
    ...         target[:: draw.options["every"]] *= -1
    >>> scheme = hf_symqk.register_qk_init(name="alternating", write=write, options={"every": 2})
    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> model = AutoModel.from_config(config, qk_init="alternating")
    >>> model.config.qk_init
    SymmetricInit(scheme='alternating')
    >>> hf_symqk.unregister_qk_init("alternating")

    ```
    """
    if not isinstance(name, str) or not name.isidentifier() or name.lower() == "none":
        raise ValueError(f"`name` must be an identifier other than 'none', got {name!r}.")
    if name in _SCHEMES:
        raise ValueError(f"A scheme named {name!r} is registered already; choose another name or unregister it first.")
    if not (check is None or callable(check)):
        raise ValueError(f"`check` must be a function of a LayerRequest, got {check!r}.")
    if not (write is None or callable(write)):
        raise ValueError(f"`write` must be a function of a LayerDraw, got {write!r}.")
    if tuple(rewrites) not in (("key",), ("query", "key")):
        raise ValueError(f"`rewrites` must be ('key',) or ('query', 'key'), got {rewrites!r}.")
    defaults = {str(option): _json_value(option, value) for option, value in (options or {}).items()}
    entry = QKInitScheme(name, write, tuple(rewrites), MappingProxyType(defaults), takes_symmetry, check)
    _SCHEMES[name] = entry
    return entry


def unregister_qk_init(name: str) -> None:
    """
    Removes a scheme from the table.

    Args:
        name (`str`): Name given to [`register_qk_init`].

    Raises:
        KeyError: if there is no such scheme.
    """
    del _SCHEMES[name]


def schemes() -> list[str]:
    """Names of the registered schemes, in the order of registration."""
    return list(_SCHEMES)


def scheme_named(name: object) -> QKInitScheme:
    """
    The entry of a name.

    Args:
        name (`object`): What was given as a name.

    Returns:
        [`QKInitScheme`]

    Raises:
        ValueError: if there is none, listing those that are registered.
    """
    entry = _SCHEMES.get(name) if isinstance(name, str) else None
    if entry is None:
        raise ValueError(
            f"`scheme` must be one of {', '.join(map(repr, _SCHEMES))}, got {name!r}. If it is a scheme of your own, "
            "also one that a config.json names: import the module that calls `hf_symqk.register_qk_init` first."
        )
    return entry
