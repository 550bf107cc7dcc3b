"""What looks like attention and is left out: which modules of a model, and why."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn
from transformers.utils import logging

from .heads import WAY_OUT, value_of
from .layouts import ComposedProjection, QKLayout
from .tensors import linear_shape


__all__ = [
    "LOOKS_LIKE_ATTENTION",
    "NOT_SOFTMAX",
    "LeftOut",
    "describe_left_out",
    "kinds_of_modules",
    "list_left_out",
    "reason_to_skip",
    "warn_of_left_out",
]

logger = logging.get_logger(__name__)

_NO_SOFTMAX = "no softmax over products of queries and keys"
LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|deltanet", re.IGNORECASE)
# Parts of attention that are named after it and project neither queries nor keys.
_NO_ATTENTION = re.compile(r"(Output|MLP|Mlp|Layer|Block|Bias)$")
# Projections of the same names also feed what is no softmax over products of tokens: by names and classes of modules,
# and by model types, all of whose attention is of another kind.
NOT_SOFTMAX = re.compile(
    r"linear_?attn|linear_?(self)?_?attention|lightning_?attention|deltanet|indexer|channel_?attn|channel_?attention"
    r"|global_?pointer|(?<!pre_)assign|additive|GRUCell|rwkv|PatchTSMixerGated",
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


class LeftOut(NamedTuple):
    """
    Attributes:
        lines (`list[str]`): A line on each kind of module that is left out.
        softmax (`list[str]`): Those of them that are softmax attention, or may be.
    """

    lines: list[str]
    softmax: list[str]


def describe_left_out(left_out: list[str]) -> str:
    """A sentence on the modules that a survey left out."""
    return (
        f"{len(left_out)} kinds of module look like attention but match no known layout:\n"
        + "\n".join(left_out[:12])
        + f"\n{WAY_OUT}"
    )


def warn_of_left_out(model: nn.Module, left_out: list[str], hint: str = "") -> None:
    """Says once what a survey of a model left out, if anything, and perhaps another way out."""
    if left_out:
        logger.warning_once(f"Left out of {type(model).__name__}: {describe_left_out(left_out)} {hint}".rstrip())


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def reason_to_skip(name: str, module: nn.Module, kind: str | None, layout: QKLayout) -> str:
    """Why a module whose projections have the names of a layout is no softmax over products of its tokens."""
    mixing = [child for child in module._modules if _MIXES_TOKENS.fullmatch(child)]
    if mixing:
        return f"{mixing[0]} mixes tokens before queries and keys meet"
    strides = [value_of(module, name) for name in _POOLS_QUERIES]
    if any(stride not in (None, 1, (1, 1)) for stride in strides):
        return "each query is pooled from those of several tokens"
    # Latent attention is softmax attention whatever its model is called.
    composed = isinstance(layout.key, ComposedProjection)
    if kind in _NOT_SOFTMAX_TYPES or (not composed and NOT_SOFTMAX.search(f"{name}.{type(module).__name__}")):
        return _NO_SOFTMAX
    return ""


def kinds_of_modules(modules: list[tuple[str, nn.Module, Any]]) -> list[str]:
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
    if NOT_SOFTMAX.search(f"{name}.{type(module).__name__}"):
        return _NO_SOFTMAX
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
) -> LeftOut:
    """
    Modules that look like attention and hold weights, but are not, contain or belong to a layer that was found.

    Args:
        modules (`list[tuple[str, torch.nn.Module, Any]]`): As in [`survey_modules`].
        found (`Sequence`): The layers.
        skipped (`dict[str, str]`): Why modules are left out, by name.
        otherwise (`str`, *optional*): What is said of the others.

    Returns:
        [`LeftOut`]
    """
    # What belongs to a layer that was found, or pools tokens by a learned probe, is no attention between tokens.
    within = [layer.name for layer in found]
    within += [name for name, module, _ in modules if "pool" in type(module).__name__.lower()]
    names: dict[tuple[str, str], list[str]] = {}
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
            names.setdefault((entry, reason), []).append(name or "(root)")
        within += [name for kin in names.values() for name in kin]
    lines = {
        f"  {kin[0]}{f' and {len(kin) - 1} more' if len(kin) > 1 else ''}: {entry}{reason and f': {reason}'}": reason
        for (entry, reason), kin in names.items()
    }
    return LeftOut(list(lines), [line for line, reason in lines.items() if reason != _NO_SOFTMAX])
