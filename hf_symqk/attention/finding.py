"""Attention layers of a live model: which modules match the table, how many heads they have, where they stand."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .borrowing import Borrower, borrowed_from
from .heads import WAY_OUT, head_shape, value_of
from .kinds import kind_of
from .layer import AttentionLayer
from .layouts import QKLayout, layouts
from .placing import place_layers
from .projections import has_parameters, has_projection, stored_widths
from .rows import HeadShape
from .skipping import kinds_of_modules, list_left_out, reason_to_skip, warn_of_left_out
from .tensors import refuse_fsdp1
from .verified import describe_unverified, is_verified


__all__ = [
    "CROSS_ATTENTION",
    "AttentionSurvey",
    "UnknownAttentionError",
    "find_attention_layers",
    "match_modules",
    "outermost_model",
    "survey_attention",
    "survey_modules",
    "walk_modules",
    "warn_of_unverified",
]

logger = logging.get_logger(__name__)

# Names, below the layer's number, of attention whose queries and keys come from different streams.
CROSS_ATTENTION = re.compile(
    r"cross|encoder_attn|encdec|x_attn|visual_attention|image_pooling|fusion_layer|^adapter$", re.IGNORECASE
)
# Attention that pools tokens by a learned probe, its only query.
_PROBE = re.compile(r"(^|\.)head(\.attention)?$|pooling_head", re.IGNORECASE)
# Name parts that wrappers (DDP, FSDP1, torch.compile, activation checkpointing) put between the names of a model.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class UnknownAttentionError(ValueError):
    """No attention layer of a model matches the layout table."""


class AttentionSurvey(NamedTuple):
    """
    A model's attention: the layers that the table describes, a line on each kind of module that it does not, and those
    of these lines that speak of softmax attention, or of what may be.
    """

    layers: list[AttentionLayer]
    left_out: list[str]
    unserved: list[str]


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
    layers, left_out, _ = survey_attention(model)
    warn_of_left_out(model, left_out)
    warn_of_unverified(layers)
    return layers


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
            + "\n".join(left_out.lines[:12] or ["  none that looks like attention", *kinds_of_modules(modules)[:12]])
            + f"\nKnown layouts: {', '.join(layout.name for layout in layouts())}. {WAY_OUT}"
        )
    return AttentionSurvey(place_layers(found), left_out.lines, left_out.softmax)


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
                    config=config,
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
            reason = reason_to_skip(name, module, kind, layout)
            return _Match(reason=reason) if reason else _Match(layout)
    return _Match()


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
