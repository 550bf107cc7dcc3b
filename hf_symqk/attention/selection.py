"""
Choosing attention layers by kind, side, direction and index, with one error for a choice that the model does not have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar


__all__ = ["ATTENTION_KINDS", "AttentionKind", "LayerChoice", "PlacedLayer", "describe_kind", "select_layers"]

AttentionKind = Literal["self", "cross", "all", "encoder", "decoder", "bidirectional", "causal"]
LayerChoice = Sequence[int] | Mapping[str, Sequence[int]]


class KnownKind(Protocol):
    """A layer that knows what it is."""

    @property
    def kind(self) -> str: ...
    @property
    def role(self) -> str | None: ...
    @property
    def causal(self) -> bool | None: ...


class PlacedLayer(KnownKind, Protocol):
    """A layer that knows where it stands, and whose keys it reads."""

    @property
    def stack(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def key_source(self) -> str: ...


class _Readable(PlacedLayer, Protocol):
    @property
    def problem(self) -> str | None: ...


_CHOICES: dict[AttentionKind, Callable[[PlacedLayer], bool]] = {
    "self": lambda layer: layer.kind == "self",
    "cross": lambda layer: layer.kind == "cross",
    "all": lambda layer: True,
    "encoder": lambda layer: layer.kind == "self" and layer.role == "encoder",
    "decoder": lambda layer: layer.kind == "self" and layer.role == "decoder",
    "bidirectional": lambda layer: layer.kind == "self" and layer.causal is False,
    "causal": lambda layer: layer.kind == "self" and layer.causal is True,
}
ATTENTION_KINDS: tuple[AttentionKind, ...] = tuple(_CHOICES)

Selectable = TypeVar("Selectable", bound=_Readable)


def select_layers(
    found: list[Selectable], *, layers: LayerChoice | None = None, attention: AttentionKind = "self"
) -> list[Selectable]:
    """
    Chooses among the attention layers of a model.

    Args:
        found (`list[AttentionLayer]`):
            What [`find_attention_layers`] returned, or layers of a checkpoint.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Layer indices, counted within each stack; a sequence holds for every stack of the model, a mapping names
            the stacks (`{"encoder": [0, 1]}`). All layers by default.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`; or self-attention of one side or direction alone: `"encoder"`, `"decoder"`,
            `"bidirectional"` or `"causal"`.

    Returns:
        `list[AttentionLayer]`: The chosen layers, in their order, never empty.

    Raises:
        ValueError: for a kind, a stack or an index that the model does not have, or a chosen layer that cannot be
            read.
    """
    if attention not in ATTENTION_KINDS:
        raise ValueError(f"`attention` must be one of {', '.join(map(repr, ATTENTION_KINDS))}, got {attention!r}.")
    candidates = [layer for layer in found if _CHOICES[attention](layer)]
    if not candidates:
        kinds = ", ".join(dict.fromkeys(describe_kind(layer) for layer in found))
        name = f"{attention}-attention" if attention in ("self", "cross") else f"{attention} self-attention"
        raise ValueError(f"The model has no {name} layer (`attention={attention!r}`), only {kinds}.")
    chosen = candidates if layers is None else _by_index(candidates, layers)
    for layer in chosen:
        if layer.problem is not None:
            raise ValueError(f"{layer.problem} Choose other layers with `layers` to go without this one.")
    return chosen


def describe_kind(layer: KnownKind) -> str:
    """
    Kind, side and direction of a layer in a few words.

    Args:
        layer (`KnownKind`): The layer, or its scores.

    Returns:
        `str`: As in `"causal self-attention (decoder)"`; what is not known is left out.
    """
    direction = {None: "", True: "causal ", False: "bidirectional "}[layer.causal if layer.kind == "self" else None]
    return f"{direction}{layer.kind}-attention" + (f" ({layer.role})" if layer.role else "")


def _by_index(candidates: list[Selectable], layers: LayerChoice) -> list[Selectable]:
    stacks: dict[str, list[int]] = {}
    for layer in candidates:
        stacks.setdefault(layer.stack, []).append(layer.index)
    wanted = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(stacks, layers)
    choices = "; ".join(f"{stack!r}: {_ranges(indices)}" for stack, indices in stacks.items())
    for stack, indices in wanted.items():
        if stack not in stacks:
            raise ValueError(f"`layers` names the stack {stack!r}; this model has {choices}.")
        missing = sorted(set(indices) - set(stacks[stack]))
        if missing:
            raise ValueError(
                f"`layers` asks for {missing} of stack {stack!r}; this model has {choices}. To choose per stack give "
                "a mapping from stack names to indices."
            )
    return [layer for layer in candidates if layer.index in wanted.get(layer.stack, ())]


def _ranges(indices: list[int]) -> str:
    consecutive = indices == list(range(indices[0], indices[0] + len(indices)))
    return f"layers {indices[0]} to {indices[-1]}" if consecutive and len(indices) > 1 else f"layers {indices}"
