"""Attention layers of a live model: which modules match the table, how many heads they have, where they stand."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .borrowing import Borrower, borrowed_from
from .heads import WAY_OUT, head_shape, value_of
from .kinds import kind_of
from .layer import AttentionLayer
from .layouts import ComposedProjection, QKLayout, layouts
from .placing import place_layers
from .projections import has_parameters, has_projection, stored_widths
from .rows import HeadShape
from .tensors import linear_shape, refuse_fsdp1
from .verified import describe_unverified, is_verified


__all__ = [
    "CROSS_ATTENTION",
    "LOOKS_LIKE_ATTENTION",
    "AttentionSurvey",
    "UnknownAttentionError",
    "describe_left_out",
    "find_attention_layers",
    "list_left_out",
    "match_modules",
    "outermost_model",
    "survey_attention",
    "survey_modules",
    "walk_modules",
    "warn_of_left_out",
    "warn_of_unverified",
]

logger = logging.get_logger(__name__)

# Names, below the layer's number, of attention whose queries and keys come from different streams.
CROSS_ATTENTION = re.compile(
    r"cross|encoder_attn|encdec|x_attn|visual_attention|image_pooling|fusion_layer", re.IGNORECASE
)
LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|deltanet", re.IGNORECASE)
# Parts of attention that are named after it and project neither queries nor keys.
_NO_ATTENTION = re.compile(r"(Output|MLP|Mlp|Layer|Block|Bias)$")
# Projections of the same names also feed what is no softmax over products of tokens: by names and classes of modules,
# and by model types, all of whose attention is of another kind.
_NOT_SOFTMAX = re.compile(
    r"linear_?attn|linear_?attention|lightning_?attention|deltanet|indexer|channel_?attn|channel_?attention"
    r"|global_?pointer|(?<!pre_)assign|additive|GRUCell",
    re.IGNORECASE,
)
_NOT_SOFTMAX_TYPES = {"autoformer", "mra", "xlstm", "yoso"}
# Children that mix the tokens of queries and keys before attention sees them, or reduce the keys' tokens in space.
_MIXES_TOKENS = re.compile(
    r"conv1d|sconv|[qk]_s?conv\w*|conv_qk\w*|convolution_projection_(query|key)|sr|sequence_reduction|spatial_reduction"
)
# What parts of a module, by their names, say of why no layout serves it.
_REASONS = (
    (_MIXES_TOKENS, "{} mixes tokens before queries and keys meet"),
    (re.compile("experts"), "queries are routed through {}"),
    (re.compile("query_key"), "queries and keys are hashed, and share {}"),
)
# Attributes by which modules say that queries are the largest of those of several tokens.
_POOLS_QUERIES = ("query_stride",)
# Attention that pools tokens by a learned probe, its only query.
_PROBE = re.compile(r"(^|\.)head(\.attention)?$|pooling_head", re.IGNORECASE)
# Name parts that wrappers (DDP, FSDP1, torch.compile, activation checkpointing) put between the names of a model.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class UnknownAttentionError(ValueError):
    """No attention layer of a model matches the layout table."""


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
    several layers (ALBERT) is found once. Modules that look like attention and match no layout are named in a warning,
    and so are layers that are found and not proven by a forward pass.

    Args:
        model (`torch.nn.Module`):
            A live model, wrapped or not. Only its modules' names, attributes and shapes are read.

    Returns:
        `list[AttentionLayer]`: Self- and cross-attention layers, never empty.

    Raises:
        ValueError: if nothing is found (the message lists what was looked at), or FSDP1 shards the model.
    """
    layers, left_out = survey_attention(model)
    warn_of_left_out(model, left_out)
    warn_of_unverified(layers)
    return layers


def warn_of_left_out(model: nn.Module, left_out: list[str], hint: str = "") -> None:
    """Says once what a survey of a model left out, if anything, and perhaps another way out."""
    if left_out:
        logger.warning_once(f"Left out of {type(model).__name__}: {describe_left_out(left_out)} {hint}".rstrip())


def warn_of_unverified(layers: Iterable[AttentionLayer]) -> None:
    """Says once which kinds of layers no forward pass has proven, if any."""
    if described := describe_unverified(layers):
        logger.warning_once(described)


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
    return survey_modules(list(walk_modules(model)), type(model).__name__)


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
    found, skipped = match_modules(modules)
    left_out = list_left_out(modules, found, skipped)
    if not found:
        raise UnknownAttentionError(
            f"No attention layer of {owner} matches a known layout. Modules looked at:\n"
            + "\n".join(left_out[:12] or ["  none that looks like attention", *_kinds_of_modules(modules)[:12]])
            + f"\nKnown layouts: {', '.join(layout.name for layout in layouts())}. {WAY_OUT}"
        )
    return AttentionSurvey(place_layers(found), left_out)


def match_modules(modules: list[tuple[str, nn.Module, Any]]) -> tuple[list[AttentionLayer], dict[str, str]]:
    """
    Holds modules to the table.

    Args:
        modules (`list[tuple[str, torch.nn.Module, Any]]`): As in [`survey_modules`].

    Returns:
        `tuple[list[AttentionLayer], dict[str, str]]`: Layers that the table describes, not placed yet, and why modules
        that have its names are none.

    Raises:
        ValueError: if FSDP1 shards a module.
    """
    candidates = [_Candidate.of(layout) for layout in layouts()]
    found: list[AttentionLayer] = []
    skipped: dict[str, str] = {}
    borrowers: list[Borrower] = []
    for name, module, config in modules:
        if not module._modules:
            continue
        refuse_fsdp1(module)
        outer = [layer.name for layer in found[-1:]] + [borrower.name for borrower in borrowers[-1:]]
        if any(name.startswith(f"{around}.") for around in outer if around):
            continue  # a part of a layer, which may be built of smaller attention modules
        if (lender := borrowed_from(name, config)) is not None:
            borrowers.append(Borrower(name, module, config, lender))
            continue
        layout, reason = _layout_of(name, module, config, candidates)
        if reason:
            skipped[name] = reason
        if layout is not None:
            problem, heads = None, HeadShape(0, 0, 0)
            try:
                heads = head_shape(name, module, layout, config)
            except ValueError as error:
                problem = str(error)
            kind = _kind(name, module, layout)
            role, causal = kind_of(name, kind, config)
            spoken_for = value_of(config, "model_type")
            found.append(
                AttentionLayer(
                    name,
                    module,
                    layout,
                    heads,
                    kind,
                    problem=problem,
                    role=role,
                    causal=causal,
                    model_type=spoken_for,
                    verified=is_verified(layout, module, spoken_for, kind),
                )
            )
    lenders = {layer.name: layer for layer in found}
    for borrower in borrowers:
        layer = borrower.layer(lenders.get(borrower.lender))
        if layer is not None:
            found.append(layer)
        elif not borrower.lender:
            skipped[borrower.name] = "its keys come from another model"
    return found, skipped


def describe_left_out(left_out: list[str]) -> str:
    """A sentence on the modules that a survey left out."""
    return (
        f"{len(left_out)} kinds of module look like attention but match no known layout:\n"
        + "\n".join(left_out[:12])
        + f"\n{WAY_OUT}"
    )


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Match(NamedTuple):
    """What the table has for a module, or (`reason`) why the entry that fits its names does not count."""

    layout: QKLayout | None = None
    reason: str = ""


class _Candidate(NamedTuple):
    """A layout with the names that a module has to have for it, so that nearly all modules are told at a glance."""

    layout: QKLayout
    modules: frozenset[str]
    parameters: frozenset[str]

    @classmethod
    def of(cls, layout: QKLayout) -> "_Candidate":
        inside = frozenset(piece.module.partition(".")[0] for piece in layout.pieces if piece.module)
        return cls(layout, inside, frozenset(piece.weight for piece in layout.pieces if not piece.module))


def _layout_of(name: str, module: nn.Module, config: Any, table: list[_Candidate]) -> _Match:
    modules, parameters = module._modules.keys(), module._parameters.keys()
    kind: str | None = None
    for layout, inside, own in table:
        if not (inside <= modules and own <= parameters):
            continue
        kind = kind or value_of(config, "model_type")
        if layout.model_types is not None and kind not in layout.model_types:
            continue
        if layout.query_scale is not None and not has_parameters(module, layout.query_scale.parameters):
            continue
        if has_projection(module, layout.query) and has_projection(module, layout.key):
            reason = _reason_to_skip(name, module, kind, layout)
            return _Match(reason=reason) if reason else _Match(layout)
    return _Match()


def _reason_to_skip(name: str, module: nn.Module, kind: str | None, layout: QKLayout) -> str:
    """Why a module whose projections have the names of a layout is no softmax over products of its tokens."""
    mixing = [child for child in module._modules if _MIXES_TOKENS.fullmatch(child)]
    if mixing:
        return f"{mixing[0]} mixes tokens before queries and keys meet"
    strides = [value_of(module, name) for name in _POOLS_QUERIES]
    if any(stride not in (None, 1, (1, 1)) for stride in strides):
        return "each query is pooled from those of several tokens"
    # Latent attention is softmax attention whatever its model is called.
    composed = isinstance(layout.key, ComposedProjection)
    if kind in _NOT_SOFTMAX_TYPES or (not composed and _NOT_SOFTMAX.search(f"{name}.{type(module).__name__}")):
        return "no softmax over products of queries and keys"
    return ""


def walk_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, PreTrainedConfig | None]]:
    """Modules, their clean names, and the config that speaks for each: its own, or that of the model around it."""
    configs: dict[str, PreTrainedConfig | None] = {}
    for path, module in model.named_modules():
        own = getattr(module, "config", None)
        parent = configs.get(path.rpartition(".")[0]) if path else None
        configs[path] = own if isinstance(own, PreTrainedConfig) and isinstance(module, PreTrainedModel) else parent
        name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        yield name, module, own if isinstance(own, PreTrainedConfig) else configs[path]


def _kind(name: str, module: nn.Module, layout: QKLayout) -> Literal["self", "cross"]:
    parts = name.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    # What is numbered itself bears the name of its list.
    below_layer = ".".join((numbers and parts[numbers[-1] + 1 :]) or parts[-2:])
    # A width of 0 is unknown: weights of a checkpoint in a form that cannot be read.
    widths = {stored_widths(module, projection)[1] for projection in (layout.query, layout.key)} - {0}
    flagged = getattr(module, "is_cross_attention", False) is True
    named = CROSS_ATTENTION.search(below_layer) or _PROBE.search(below_layer)
    return "cross" if flagged or len(widths) > 1 or named else "self"


def _kinds_of_modules(modules: list[tuple[str, nn.Module, Any]]) -> list[str]:
    """What a model without attention mixes its tokens with: a line on each kind of module with several linear maps."""
    kinds: dict[str, str] = {}
    for name, module, _ in modules:
        linear = [child for child, holder in module.named_children() if _is_linear(holder)]
        if len(linear) > 1:
            kinds.setdefault(f"{type(module).__name__} with {', '.join(linear)}", name)
    return [f"  {name or '(root)'}: {kind}" for kind, name in kinds.items()]


def _outwards(name: str) -> Iterator[str]:
    """A module's name, and those of the modules around it but for the whole model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_linear(holder: nn.Module) -> bool:
    return linear_shape(holder) is not None


def _holds_weights(holder: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in holder.parameters())


def _reason_of_parts(name: str, module: nn.Module) -> str:
    """Why no layout can serve a module, as far as names and shapes of its parts say."""
    if _NOT_SOFTMAX.search(f"{name}.{type(module).__name__}"):
        return "no softmax over products of queries and keys"
    for path, part in module.named_modules():
        for pattern, reason in _REASONS:
            if pattern.fullmatch(path.rpartition(".")[2]):
                return reason.format(path)
        weight = part._parameters.get("weight")
        if weight is not None and weight.ndim == 3 and not hasattr(part, "kernel_size"):
            return f"{path} holds several matrices, of which a forward chooses"
    return ""


def list_left_out(
    modules: list[tuple[str, nn.Module, Any]],
    found: Sequence[_Named],
    skipped: dict[str, str],
    otherwise: str = "",
) -> list[str]:
    """
    Modules that look like attention and hold weights, but are not, contain or belong to a layer that was found.

    Args:
        modules (`list[tuple[str, torch.nn.Module, Any]]`): As in [`survey_modules`].
        found (`Sequence`): The layers.
        skipped (`dict[str, str]`): Why modules are left out, by name.
        otherwise (`str`, *optional*): What is said of the others.

    Returns:
        `list[str]`: A line a kind.
    """
    # What belongs to a layer that was found, or pools tokens by a learned probe, is no attention between tokens.
    within = [layer.name for layer in found]
    within += [name for name, module, _ in modules if "pool" in type(module).__name__.lower()]
    names: dict[str, list[str]] = {}
    looked_at = [
        (name, module, config)
        for name, module, config in modules
        if name in skipped
        or (LOOKS_LIKE_ATTENTION.search(type(module).__name__) and not _NO_ATTENTION.search(type(module).__name__))
    ]
    # Weights that stand deeper count where nothing that was told apart has them.
    for holds in (_is_linear, _holds_weights):
        known, around = set(within), {outer for name in within for outer in _outwards(name)}
        for name, module, config in looked_at:
            if name in around or not known.isdisjoint(_outwards(name)):
                continue
            weights = [child for child, holder in module.named_children() if holds(holder)]
            if not weights or "sampling_offsets" in weights:  # only norms; deformable attention has no W_k
                continue
            entry = (
                f"{type(module).__name__} (model type {value_of(config, 'model_type')!r}) with {', '.join(weights)}"
            )
            reason = skipped.get(name) or otherwise or _reason_of_parts(name, module)
            entry += f": {reason}" if reason else ""
            names.setdefault(entry, []).append(name or "(root)")
        within += [name for kin in names.values() for name in kin]
    return [
        f"  {kin[0]}{f' and {len(kin) - 1} more' if len(kin) > 1 else ''}: {entry}" for entry, kin in names.items()
    ]
