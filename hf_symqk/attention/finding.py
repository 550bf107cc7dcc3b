"""Attention layers of a live model: which modules match the table, how many heads they have, where they stand."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .layer import AttentionLayer, has_projection, stored_widths
from .layouts import HeadShape, QKLayout, layouts
from .tensors import linear_shape, refuse_fsdp1


__all__ = [
    "CROSS_ATTENTION",
    "HEAD_DIM",
    "LOOKS_LIKE_ATTENTION",
    "NUM_HEADS",
    "NUM_KEY_VALUE_HEADS",
    "AttentionSurvey",
    "describe_left_out",
    "find_attention_layers",
    "outermost_model",
    "survey_attention",
    "survey_modules",
]

logger = logging.get_logger(__name__)

# Attribute names under which modules and configs of Transformers keep their head counts.
NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv")
# Names, below the layer's number, of attention whose queries and keys come from different streams.
CROSS_ATTENTION = re.compile(r"cross|encoder_attn|encdec|x_attn|visual_attention|image_pooling", re.IGNORECASE)
LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|deltanet", re.IGNORECASE)
# Parts of attention that are named after it and project neither queries nor keys.
_NO_ATTENTION = re.compile(r"(Output|MLP|Mlp|Layer|Block)$")
_NOT_SOFTMAX = re.compile(r"linear_?attn|linear_?attention|lightning_?attention|deltanet|indexer", re.IGNORECASE)
# Children that mix the tokens of queries and keys before attention sees them.
_CONVOLUTION = re.compile(r"conv1d|[qk]_conv\w*|conv_qk\w*")
_WAY_OUT = "Describe another layout with `hf_symqk.register_qk_layout`."
# Name parts that wrappers (DDP, FSDP1, torch.compile, activation checkpointing) put between the names of a model.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class AttentionSurvey(NamedTuple):
    """A model's attention: the layers that the table describes, and a line on each kind of module that it does not."""

    layers: list[AttentionLayer]
    left_out: list[str]


def outermost_model(module: nn.Module) -> PreTrainedModel | None:
    """
    The Transformers model in a module: itself, or what DDP, PEFT and other wrappers hold.

    Args:
        module (`torch.nn.Module`): Any module.

    Returns:
        `PreTrainedModel`: The outermost one, `None` if there is none.
    """
    return next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """
    Finds every attention layer of a model that the layout table knows: encoder before decoder, then by path and
    number, an order that names alone give, so that it is the same for a model and its checkpoint. A module shared by
    several layers (ALBERT) is found once. Modules that look like attention and match no layout are named in a warning.

    Args:
        model (`torch.nn.Module`):
            A live model, wrapped or not. Only its modules' names, attributes and shapes are read.

    Returns:
        `list[AttentionLayer]`: Self- and cross-attention layers, never empty.

    Raises:
        ValueError: if nothing is found (the message lists what was looked at), or FSDP1 shards the model.
    """
    layers, left_out = survey_attention(model)
    if left_out:
        logger.warning_once(f"Left out of {type(model).__name__}: {describe_left_out(left_out)}")
    return layers


def survey_attention(model: nn.Module) -> AttentionSurvey:
    """
    [`find_attention_layers`] for callers who say themselves what is left out.

    Args:
        model (`torch.nn.Module`): A live model, wrapped or not.

    Returns:
        `AttentionSurvey`

    Raises:
        ValueError: if nothing is found (the message lists what was looked at), or FSDP1 shards the model.
    """
    return survey_modules(list(_walk(model)), type(model).__name__)


def survey_modules(modules: list[tuple[str, nn.Module, Any]], owner: str) -> AttentionSurvey:
    """
    [`survey_attention`] of modules that need not be a live model's: those of a checkpoint hold shapes only.

    Args:
        modules (`list[tuple[str, torch.nn.Module, Any]]`): Dotted path, module, and what speaks for it where it says
            nothing itself: an object with (some of) the attributes of a config.
        owner (`str`): How messages call the whole.

    Returns:
        `AttentionSurvey`

    Raises:
        ValueError: as [`survey_attention`] does.
    """
    table = layouts()
    found: list[AttentionLayer] = []
    for name, module, config in modules:
        if not module._modules:
            continue
        refuse_fsdp1(module)
        layout = _layout_of(name, module, config, table)
        if layout is not None:
            problem, heads = None, HeadShape(0, 0, 0)
            try:
                heads = _head_shape(name, module, layout, config)
            except ValueError as error:
                problem = str(error)
            found.append(AttentionLayer(name, module, layout, heads, _kind(name, module, layout), problem=problem))
    left_out = _left_out(modules, found)
    if not found:
        raise ValueError(
            f"No attention layer of {owner} matches a known layout. Modules looked at:\n"
            + ("\n".join(left_out[:12]) or "  none that looks like attention")
            + f"\nKnown layouts: {', '.join(layout.name for layout in table)}. {_WAY_OUT}"
        )
    return AttentionSurvey(_place(found), left_out)


def describe_left_out(left_out: list[str]) -> str:
    """A sentence on the modules that a survey left out."""
    return (
        f"{len(left_out)} kinds of module look like attention but match no known layout:\n"
        + "\n".join(left_out[:12])
        + f"\n{_WAY_OUT}"
    )


def _layout_of(name: str, module: nn.Module, config: Any, table: list[QKLayout]) -> QKLayout | None:
    model_type = getattr(config, "model_type", None)
    for layout in table:
        known = layout.model_types is None or model_type in layout.model_types
        if known and has_projection(module, layout.query) and has_projection(module, layout.key):
            # Projections of these names also feed what is no softmax over tokens, or are convolved on the way to it.
            convolved = any(_CONVOLUTION.fullmatch(child) for child in module._modules)
            return None if convolved or _NOT_SOFTMAX.search(f"{name}.{type(module).__name__}") else layout
    return None


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, PreTrainedConfig | None]]:
    """Modules, their clean names, and the config that speaks for each: its own, or that of the model around it."""
    configs: dict[str, PreTrainedConfig | None] = {}
    for path, module in model.named_modules():
        own = getattr(module, "config", None)
        parent = configs.get(path.rpartition(".")[0]) if path else None
        configs[path] = own if isinstance(own, PreTrainedConfig) and isinstance(module, PreTrainedModel) else parent
        name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        yield name, module, own if isinstance(own, PreTrainedConfig) else configs[path]


def _attribute(names: tuple[str, ...], *holders: Any) -> int | None:
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _head_shape(name: str, module: nn.Module, layout: QKLayout, config: Any) -> HeadShape:
    """Head counts from the module, else from its config, else from shapes; then checked against the shapes."""
    rows = [(projection, stored_widths(module, projection)[0]) for projection in (layout.query, layout.key)]
    (_, query_rows), (_, key_rows) = rows
    separate = layout.query.module != layout.key.module
    num_heads = _attribute(NUM_HEADS, module) or _attribute(NUM_HEADS, config)
    head_dim = _attribute(HEAD_DIM, module) or _attribute(HEAD_DIM, config)
    if num_heads is None and head_dim is not None and separate:
        num_heads = query_rows // head_dim
    if num_heads is None:
        raise ValueError(
            f"{name!r} ({type(module).__name__}): neither the module nor its config says how many heads it has "
            f"(looked for {', '.join(NUM_HEADS)} and {', '.join(HEAD_DIM)}). {_WAY_OUT}"
        )
    groups = _attribute(NUM_KEY_VALUE_HEADS, module) or _attribute(NUM_KEY_VALUE_HEADS, config) or num_heads
    if head_dim is None:
        head_dim = query_rows // layout.query.rows.count(HeadShape(num_heads, groups, 1))
    candidates = [HeadShape(num_heads, groups, head_dim)]
    if separate and head_dim and key_rows % head_dim == 0:
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
    # A width of 0 is unknown: weights of a checkpoint in a form that cannot be read.
    widths = {stored_widths(module, projection)[1] for projection in (layout.query, layout.key)} - {0}
    flagged = getattr(module, "is_cross_attention", False) is True
    return "cross" if flagged or len(widths) > 1 or CROSS_ATTENTION.search(below_layer) else "self"


def _place(found: list[AttentionLayer]) -> list[AttentionLayer]:
    """Names stacks and counts layers in them. Names do not depend on what is around: a head model has its base's."""
    found = sorted(found, key=_position)
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
    return [replace(layer, stack=stack, index=index) for layer in found for stack, index in [places[layer.name]]]


def _position(layer: AttentionLayer) -> tuple[Any, ...]:
    """Sorts by path with numbers as numbers, encoders before decoders, self- before cross-attention of one layer."""
    parts = [
        (0, int(part), "") if part.isdigit() else (1, part.startswith("decoder"), part)
        for part in layer.name.split(".")
    ]
    last_number = max((position for position, part in enumerate(parts) if part[0] == 0), default=-1)
    return parts[: last_number + 1], layer.kind == "cross", parts[last_number + 1 :]


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


def _left_out(modules: list[tuple[str, nn.Module, Any]], found: list[AttentionLayer]) -> list[str]:
    """Modules that look like attention and hold weights, but are not, contain or belong to a layer that was found."""
    # What belongs to a layer that was found, or pools tokens by a learned probe, is no attention between tokens.
    within = [layer.name for layer in found]
    within += [name for name, module, _ in modules if "pool" in type(module).__name__.lower()]
    names: dict[str, list[str]] = {}
    for name, module, config in modules:
        if not LOOKS_LIKE_ATTENTION.search(type(module).__name__) or _NO_ATTENTION.search(type(module).__name__):
            continue
        weights = [child for child, holder in module.named_children() if linear_shape(holder) is not None]
        if not weights or "sampling_offsets" in weights:  # only norms; deformable attention has no W_k
            continue
        if any(f"{known}.".startswith(f"{name}.") or f"{name}.".startswith(f"{known}.") for known in within):
            continue
        entry = (
            f"{type(module).__name__} (model type {getattr(config, 'model_type', None)!r}) with {', '.join(weights)}"
        )
        names.setdefault(entry, []).append(name or "(root)")
    return [
        f"  {kin[0]}{f' and {len(kin) - 1} more' if len(kin) > 1 else ''}: {entry}" for entry, kin in names.items()
    ]
