"""Names of stacks and numbers of layers, told from the layers' paths alone."""

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar


__all__ = ["place_layers"]


class _Found(Protocol):
    """A layer before it is placed: a dataclass with `stack` and `index`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...


Layer = TypeVar("Layer", bound=_Found)


def place_layers(found: list[Layer]) -> list[Layer]:
    """Names stacks and counts layers in them. Names do not depend on what is around: a head model has its base's."""
    found = sorted(found, key=_position)
    containers = {layer.name: _container(layer.name) for layer in found}
    # What has cross-attention alone (a pooling head, a resampler) leaves the names of the others as they are.
    own = list(dict.fromkeys(containers[layer.name] for layer in found if layer.kind == "self"))
    names = _stack_names(list(dict.fromkeys(containers.values()))) | _stack_names(own)
    groups: dict[tuple[str, str], list[Layer]] = {}
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


def _position(layer: _Found) -> tuple[Any, ...]:
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
