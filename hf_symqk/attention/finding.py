"""
Attention layers of a live model: which modules match the table, how many heads they have, where in the model they
stand.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .layouts import HeadShape, Part, Projection, QKLayout, layouts
from .tensors import LinearTensors, full_shape, is_sharded, linear_shape, refuse_fsdp1, whole_linears, whole_parameters


__all__ = ["AttentionLayer", "HeadTensors", "find_attention_layers"]

logger = logging.get_logger(__name__)

# Attribute names under which modules and configs of Transformers keep their head counts.
_NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv")
_CROSS_ATTENTION = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
_WAY_OUT = "Describe another layout with `hf_symqk.register_qk_layout`."
# Name parts that wrappers (DDP, FSDP1, torch.compile, activation checkpointing) put between the names of a model.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class HeadTensors(NamedTuple):
    """Weight `(heads, E, D)` and bias `(heads, E)` (or `None`) of one part, as views on the parameters."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """
    One attention layer of a live model.

    Attributes:
        name (`str`): Dotted path of the attention module in the model.
        module (`torch.nn.Module`): The attention module.
        layout ([`QKLayout`]): Entry of the table that it matches.
        heads ([`HeadShape`]): Its head counts.
        kind (`str`): `"self"` or `"cross"`.
        stack (`str`): Name of the stack it belongs to (`"encoder"`, `"text_model"`, …), empty if the model has only
        one.
        index (`int`): Its position in the stack.
    """

    name: str
    module: nn.Module
    layout: QKLayout
    heads: HeadShape
    kind: Literal["self", "cross"]
    stack: str = ""
    index: int = 0

    def has(self, part: Part) -> bool:
        """Whether the layout says where the part (`"query"`, `"key"`, `"value"`) is, and the module has it there."""
        projection = getattr(self.layout, part)
        return projection is not None and _has(self.module, projection)

    def projection(self, part: Part) -> Projection:
        """
        Where the part is.

        Raises:
            ValueError: if the layer does not have it.
        """
        if not self.has(part):
            raise ValueError(f"{self.name!r} has no {part} projection where layout {self.layout.name!r} expects it.")
        return getattr(self.layout, part)

    def input_width(self, part: Part) -> int:
        """Width `D` of the stream that the part is projected from."""
        return _widths(self.module, self.projection(part))[1]

    def holder(self, part: Part) -> nn.Module:
        """Submodule that holds the part's projection: a linear map, perhaps adapted, quantised or sharded."""
        return self.module.get_submodule(self.projection(part).module)

    @property
    def is_sharded(self) -> bool:
        """Whether reading Q and K takes other processes; then every rank has to come along."""
        return is_sharded(self.module)

    @contextmanager
    def tensors(self, *parts: Part, write: bool = False) -> Iterator[dict[Part, HeadTensors]]:
        """
        Whole weights and biases of the given parts, split into heads.

        Args:
            parts (`str`):
                Any of `"query"`, `"key"`, `"value"`.
            write (`bool`, *optional*, defaults to `False`):
                Whether in-place changes are to reach the parameters (see [`whole_linears`]).

        Yields:
            `dict[str, HeadTensors]`: Views, no copies, unless the weights are sharded, adapted or quantised.

        Raises:
            ValueError: if the weights cannot be read (or written) as they are stored.
        """
        with whole_linears([self.holder(part) for part in parts], write=write) as linears:
            yield {part: self._split(part, linears[self.holder(part)]) for part in parts}

    @contextmanager
    def query_key_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """
        W_q `(H, E, D)` and W_k `(G, E, D)` as the scores see them: learned gains of query and key norms folded in.

        Yields:
            `tuple[torch.Tensor, torch.Tensor]`: Views where there is nothing to fold.

        Raises:
            ValueError: if the weights cannot be read as they are stored, or a query or key norm holds parameters that
            are
                not one gain per channel.
        """
        norms = [
            next((module for name in names if (module := getattr(self.module, name, None)) is not None), None)
            for names in (self.layout.query_norms, self.layout.key_norms)
        ]
        gains = [parameter for norm in norms if norm is not None for parameter in norm.parameters()]
        with whole_parameters(gains) as whole, self.tensors("query", "key") as tensors:
            w_q, w_k = tensors["query"].weight, tensors["key"].weight
            yield self._fold(w_q, norms[0], whole), self._fold(w_k, norms[1], whole)

    def _split(self, part: Part, linear: LinearTensors) -> HeadTensors:
        projection = self.projection(part)
        weight = linear.weight.mT if projection.transposed else linear.weight
        select = projection.rows.select
        bias = None if linear.bias is None else select(linear.bias, self.heads)
        return HeadTensors(select(weight, self.heads), bias)

    def _fold(self, weight: Tensor, norm: nn.Module | None, whole: dict[nn.Parameter, Tensor]) -> Tensor:
        parameters = {} if norm is None else dict(norm.named_parameters())
        if norm is None or not parameters:
            return weight
        heads, head_dim = weight.shape[:2]
        gain = parameters.get("weight")
        if gain is None or full_shape(gain) not in [(head_dim,), (heads * head_dim,), (heads, head_dim)]:
            shapes = {name: tuple(full_shape(parameter)) for name, parameter in parameters.items()}
            raise ValueError(
                f"{self.name!r}: the parameters {shapes} of its {type(norm).__name__} are not one gain per channel of "
                f"{heads} heads of width {head_dim}; they cannot be folded into the weights."
            )
        # Asking the norm itself (with a vector that every norm leaves at ±1) tells a gain of w from one of 1 + w, and
        # the difference of both signs drops its bias.
        probe = torch.ones(full_shape(gain), dtype=weight.dtype, device=weight.device)
        probe.view(-1)[1::2] = -1
        held = {name: whole[parameter] for name, parameter in parameters.items()}
        response = [torch.func.functional_call(norm, held, (sign * probe,)) for sign in (1, -1)]
        gains = ((response[0] - response[1]) * probe / 2).view(-1, head_dim, 1)
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) * gains


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """
    Finds every attention layer of a model that the layout table knows, in the model's own order. A module shared by
    several layers (ALBERT) is found once.

    Args:
        model (`torch.nn.Module`):
            A live model, wrapped or not. Only its modules' names, attributes and shapes are read.

    Returns:
        `list[AttentionLayer]`: Self- and cross-attention layers, never empty.

    Raises:
        ValueError: if nothing is found (the message lists what was looked at), or if the head counts of a module do
        not
            fit the shapes of its weights.
    """
    table = layouts()
    modules = list(_walk(model))
    found: list[AttentionLayer] = []
    for name, module, config in modules:
        if not module._modules:
            continue
        refuse_fsdp1(module)
        model_type = getattr(config, "model_type", None)
        for layout in table:
            if layout.model_types is not None and model_type not in layout.model_types:
                continue
            if _has(module, layout.query) and _has(module, layout.key):
                heads = _head_shape(name, module, layout, config)
                found.append(AttentionLayer(name, module, layout, heads, _kind(name, module, layout)))
                break
    left_out = _left_out(modules, found)
    if not found:
        raise ValueError(
            f"No attention layer of {type(model).__name__} matches a known layout. Modules looked at:\n"
            + ("\n".join(left_out[:12]) or "  none whose class looks like attention")
            + f"\nKnown layouts: {', '.join(layout.name for layout in table)}. {_WAY_OUT}"
        )
    if left_out:
        logger.warning_once(
            f"{len(left_out)} modules of {type(model).__name__} look like attention but match no known layout; they "
            "are left out:\n" + "\n".join(left_out[:12]) + f"\n{_WAY_OUT}"
        )
    return _place(found)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, PreTrainedConfig | None]]:
    """Modules, their clean names, and the config that speaks for each: its own, or that of the model around it."""
    configs: dict[str, PreTrainedConfig | None] = {}
    for path, module in model.named_modules():
        own = getattr(module, "config", None)
        parent = configs.get(path.rpartition(".")[0]) if path else None
        configs[path] = own if isinstance(own, PreTrainedConfig) and isinstance(module, PreTrainedModel) else parent
        name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        yield name, module, own if isinstance(own, PreTrainedConfig) else configs[path]


def _widths(module: nn.Module, projection: Projection) -> tuple[int, int]:
    """Output rows and input width of a projection."""
    shape = linear_shape(module.get_submodule(projection.module))
    assert shape is not None, "asked only of projections that `_has` has seen"
    rows, width = shape
    return (width, rows) if projection.transposed else (rows, width)


def _has(module: nn.Module, projection: Projection) -> bool:
    if projection.module.partition(".")[0] not in module._modules:
        return False
    try:
        holder = module.get_submodule(projection.module)
    except AttributeError:
        return False
    return linear_shape(holder) is not None


def _attribute(names: tuple[str, ...], *holders: Any) -> int | None:
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _head_shape(name: str, module: nn.Module, layout: QKLayout, config: PreTrainedConfig | None) -> HeadShape:
    """Head counts from the module, else from its config, else from shapes; then checked against the shapes."""
    rows = [(projection, _widths(module, projection)[0]) for projection in (layout.query, layout.key)]
    (_, query_rows), (_, key_rows) = rows
    separate = layout.query.module != layout.key.module
    num_heads = _attribute(_NUM_HEADS, module) or _attribute(_NUM_HEADS, config)
    head_dim = _attribute(_HEAD_DIM, module) or _attribute(_HEAD_DIM, config)
    if head_dim is None and num_heads is not None and separate:
        head_dim = query_rows // num_heads
    if num_heads is None and head_dim is not None and separate:
        num_heads = query_rows // head_dim
    if num_heads is None or head_dim is None:
        raise ValueError(
            f"{name!r} ({type(module).__name__}): neither the module nor its config says how many heads it has "
            f"(looked for {', '.join(_NUM_HEADS)} and {', '.join(_HEAD_DIM)})."
        )
    groups = _attribute(_NUM_KEY_VALUE_HEADS, module) or _attribute(_NUM_KEY_VALUE_HEADS, config) or num_heads
    candidates = [HeadShape(num_heads, groups, head_dim)]
    if separate and key_rows % head_dim == 0:
        # The config's key heads need not be those of this module (cross-attention, per-layer counts): shapes decide.
        candidates.append(HeadShape(num_heads, key_rows // head_dim, head_dim))
    # Falling back to one key head a query head serves fused modules whose config speaks of other layers.
    candidates.append(HeadShape(num_heads, num_heads, head_dim))
    for heads in candidates:
        fits = all(projection.rows.count(heads) == number for projection, number in rows)
        if fits and heads.num_key_value_heads and num_heads % heads.num_key_value_heads == 0:
            return heads
    described = ", ".join(f"{projection.module} has {number} rows" for projection, number in rows)
    raise ValueError(
        f"{name!r} ({type(module).__name__}): {described}, which does not fit layout {layout.name!r} with "
        f"{num_heads} query heads and {groups} key heads of width {head_dim}. If this module orders its rows "
        "otherwise, describe it with `hf_symqk.register_qk_layout`."
    )


def _kind(name: str, module: nn.Module, layout: QKLayout) -> Literal["self", "cross"]:
    parts = name.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    below_layer = ".".join(parts[numbers[-1] + 1 :] if numbers else parts[-1:])
    two_widths = _widths(module, layout.query)[1] != _widths(module, layout.key)[1]
    flagged = getattr(module, "is_cross_attention", False) is True
    return "cross" if flagged or two_widths or _CROSS_ATTENTION.search(below_layer) else "self"


def _place(found: list[AttentionLayer]) -> list[AttentionLayer]:
    """Names stacks and counts layers in them. Names do not depend on what is around: a head model has its base's."""
    containers = {layer.name: _container(layer.name) for layer in found}
    names = _stack_names(list(dict.fromkeys(containers.values())))
    groups: dict[tuple[str, str], list[AttentionLayer]] = {}
    for layer in found:
        groups.setdefault((names[containers[layer.name]], layer.kind), []).append(layer)
    places: dict[str, tuple[str, int]] = {}
    for (stack, kind), members in groups.items():
        if kind == "cross":
            stack = f"{stack}_cross" if stack else "cross"
        numbers = [next((int(part) for part in layer.name.split(".") if part.isdigit()), 0) for layer in members]
        # The number in the path is the layer's own; where several layers share it (nested lists), count instead.
        if len(set(numbers)) < len(numbers):
            numbers = list(range(len(members)))
        places.update((layer.name, (stack, number)) for layer, number in zip(members, numbers, strict=True))
    return [
        AttentionLayer(layer.name, layer.module, layer.layout, layer.heads, layer.kind, *places[layer.name])
        for layer in found
    ]


def _container(name: str) -> tuple[str, ...]:
    """Path to what holds the list of layers: `text_model.encoder.layers.3.self_attn` → `(text_model, encoder)`."""
    parts = name.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts))
    return tuple(parts[: max(0, number - 1)])


def _stack_names(containers: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    if len(containers) == 1:
        return {containers[0]: ""}
    common = 0
    while all(len(path) > common for path in containers) and len({path[common] for path in containers}) == 1:
        common += 1
    rests = {path: path[common:] for path in containers}
    names = {}
    for path, rest in rests.items():
        # As many parts as it takes to tell this stack from the others; the one with nothing left is the main stack.
        length = next(
            (n for n in range(1, len(rest) + 1) if Counter(other[:n] for other in rests.values())[rest[:n]] == 1),
            len(rest),
        )
        names[path] = "_".join(rest[:length]) or "main"
    return names


def _left_out(modules: list[tuple[str, nn.Module, PreTrainedConfig | None]], found: list[AttentionLayer]) -> list[str]:
    """Modules that look like attention and hold weights, but are not, contain or belong to a layer that was found."""
    names = [layer.name for layer in found]
    lines: dict[str, str] = {}
    for name, module, config in modules:
        if "attention" not in type(module).__name__.lower():
            continue
        weights = [child for child, holder in module.named_children() if getattr(holder, "weight", None) is not None]
        if not weights or any(f"{known}.".startswith(f"{name}.") or name.startswith(f"{known}.") for known in names):
            continue
        entry = (
            f"{type(module).__name__} (model type {getattr(config, 'model_type', None)!r}) with {', '.join(weights)}"
        )
        lines.setdefault(entry, f"  {name or '(root)'}: {entry}")
    return list(lines.values())
