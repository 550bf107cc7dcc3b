"""Is everything there? A summary over what a broken download left of a model must not pass for the model's."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..attention import CROSS_ATTENTION, NOT_SOFTMAX, borrowed_from, layouts
from .counts import length_of
from .sections import section_of


__all__ = ["beyond_the_model", "require_complete"]

# Layers that predict further tokens are saved with a model and not loaded with it.
_PREDICTS_FURTHER = re.compile(r"(^|\.)mtp(\.|_)")
# A list of layers and a number in it, from the left.
_IN_A_LIST = re.compile(r"(?:(.*?)\.)?(\d+)(?:\.(.*))?$")
_FURTHER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


class _Stack(NamedTuple):
    """Modules of each layer of a list of layers: paths below the layer, by its number."""

    layers: dict[int, set[str]]
    said: int  # how many layers the config says, 0 if nothing

    @property
    def length(self) -> int:
        return max(self.layers) + 1


def _stacks(paths: Iterable[str], config: PreTrainedConfig) -> dict[str, _Stack]:
    stacks: dict[str, _Stack] = {}
    for path in paths:
        found = _IN_A_LIST.match(path)
        if found is None:
            continue
        name = found[1] or ""
        if name not in stacks:
            said = length_of(config, name)
            stacks[name] = _Stack({}, (section_of(config, name).num_hidden_layers if said is None else said) or 0)
        stacks[name].layers.setdefault(int(found[2]), set()).add(found[3] or "")
    return stacks


def beyond_the_model(paths: Iterable[str], config: PreTrainedConfig) -> dict[str, list[str]]:
    """
    Modules that files hold and models do not: those that predict tokens after the next one.

    Args:
        paths (`Iterable[str]`): Paths of the modules that hold tensors.
        config (`PreTrainedConfig`): The checkpoint's config.

    Returns:
        `dict[str, list[str]]`: Paths to leave out, by what contains them.
    """
    paths = list(paths)
    beyond: dict[str, list[str]] = {}
    further = next((number for name in _FURTHER_LAYERS if (number := _count(config, name))), 0)
    stacks = _stacks(paths, config) if further else {}
    for path in paths:
        if found := _PREDICTS_FURTHER.search(path):
            beyond.setdefault(path[: found.end()].rstrip("._"), []).append(path)
    for name, stack in stacks.items():
        if stack.said and stack.length == stack.said + further:
            for number in range(stack.said, stack.length):
                layer = f"{name}.{number}" if name else str(number)
                beyond[layer] = [path for path in paths if path == layer or path.startswith(f"{layer}.")]
    return beyond


def _count(config: Any, name: str) -> int:
    try:
        text = config.get_text_config()
    except ValueError:  # several parts read text (MusicGen), none of which is what a language model is
        text = config
    value = next((value for part in (config, text) if isinstance(value := getattr(part, name, None), int)), 0)
    return max(0, value)


def require_complete(paths: Iterable[str], attention: Mapping[str, set[str]], config: PreTrainedConfig) -> None:
    """
    Args:
        paths (`Iterable[str]`): Paths of the modules that hold tensors.
        attention (`Mapping[str, set[str]]`): Attention modules that were found, as [`query_key_holders`] gives them.
        config (`PreTrainedConfig`): The checkpoint's config.

    Raises:
        ValueError: if layers are missing, or one lacks what its siblings have; the message names it.
    """
    stacks = {
        name: stack
        for name, stack in _stacks(paths, config).items()
        if any(path.startswith(f"{name}." if name else "") for path in attention)
    }
    for name, stack in sorted(stacks.items()):
        _require_numbers(name, stack, stacks)
        _require_alike(name, stack, config)


def _require_numbers(name: str, stack: _Stack, stacks: Mapping[str, _Stack]) -> None:
    # A smaller stack beside one that is as long as the config says is not meant by it.
    longest = max(other.length for other in stacks.values() if other.said == stack.said)
    expected = stack.said if longest < stack.said else stack.length
    gaps = sorted(set(range(expected)) - set(stack.layers))
    if gaps:
        said = f", though config.json says {stack.said} layers" if stack.said > gaps[0] else ""
        raise ValueError(
            f"no tensor of layer {gaps[0]} in {name!r}{said} (layers there: {len(stack.layers)}). Download the "
            "checkpoint again."
        )


def _require_alike(name: str, stack: _Stack, config: PreTrainedConfig) -> None:
    """A layer of another kind has something else instead; one that only lacks something is broken."""
    kinds: dict[tuple[frozenset[str], frozenset[str]], int] = {}
    for number, modules in stack.layers.items():
        kinds.setdefault((frozenset(modules), _borrowed(_numbered(name, number), modules, config)), number)
    parts = {modules: {path for path in modules if _is_part(path)} for modules, _ in kinds}
    for (kind, borrowed), number in kinds.items():
        for (other, _), sibling in kinds.items():
            missing = sorted(path for path in parts[other] - parts[kind] - borrowed if not _may_be_absent(path, kind))
            if missing and kind < other:
                raise ValueError(
                    f"no tensor of {_numbered(name, number)}.{missing[0]}, which its sibling layer {sibling} has. "
                    "Download the checkpoint again, unless the layer borrows it from another one, which is not known "
                    "here."
                )


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if name else str(number)


def _borrowed(layer: str, modules: Iterable[str], config: PreTrainedConfig) -> frozenset[str]:
    """Paths below a layer of what another layer lends it."""
    names = {name for layout in layouts() for name in (*(piece.path for piece in layout.lendable), *layout.lent_norms)}
    return frozenset(
        f"{attention}.{name}"
        for attention in {path.rpartition(".")[0] for path in modules}
        if attention and borrowed_from(f"{layer}.{attention}", section_of(config, layer)) is not None
        for name in names
    )


def _may_be_absent(path: str, modules: frozenset[str]) -> bool:
    """Only some layers may have cross-attention or a step to the next stage, and stages may differ in length."""
    attention = path.rpartition(".")[0]
    only_some = CROSS_ATTENTION.search(attention) or attention.startswith("downsample")
    if only_some and not any(other.startswith(f"{attention}.") for other in modules):
        return True
    inner = _IN_A_LIST.match(path)
    # Its own list ends before; a gap in it would be noticed.
    numbers = [found for other in modules if inner and (found := _IN_A_LIST.match(other)) and found[1] == inner[1]]
    return inner is not None and all(int(found[2]) < int(inner[2]) for found in numbers)


def _is_part(path: str) -> bool:
    if NOT_SOFTMAX.search(path):
        return False  # an indexer chooses keys for attention, and layers may share one; other kinds are not read
    return any(
        path == name or path.endswith(f".{name}")
        for layout in layouts()
        for name in (*(piece.path for piece in layout.pieces), *layout.norms, *layout.parameters)
    )
