"""
Names in files and names in models. Transformers renames modules on load, splits some of their tensors, and keeps the
old names in the files it writes; its own tables of this are asked here.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, PermuteForRope, Split, WeightConverter, WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING_NAMES, MODEL_MAPPING_NAMES

from .sections import parts_speaking_for, section_of, sub_configs


__all__ = ["Place", "places", "split_key"]

# A tensor's module and its name there. What packed formats keep beside a weight is named after it (`weight.absmax`).
_KEY = re.compile(r"^(?:(.*?)\.)?(weight\..+|[^.]+)$")
# What a conversion may do to a tensor and leave its rows where they are. Reordering the channels of a head for another
# rotary embedding moves those of queries and keys alike, and W_qk stays what it was, but for rounding.
_HARMLESS = (Chunk, PermuteForRope, Split)
# Models inside a model whose class neither the config nor the names tell: path and class, by the type of the whole.
_INSIDE = {
    "qwen2_5_omni": {
        "thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
        "thinker.model": "Qwen2_5OmniThinkerModel",
    },
    "sam3": {"text_encoder.text_model": "CLIPTextModel"},
    "unlimited_ocr": {
        "vision_tower.sam_encoder": "UnlimitedOcrSamVisionEncoder",
        "vision_tower.vision_encoder": "UnlimitedOcrVisionEncoder",
    },
    "unlimited_ocr_vision": {
        "sam_encoder": "UnlimitedOcrSamVisionEncoder",
        "vision_encoder": "UnlimitedOcrVisionEncoder",
    },
    "shieldgemma2": {"model.model": "Gemma3Model"},
}
# Where in what holds a backbone it stands, if not at once.
_IN_BACKBONES = {"backbone": "conv_encoder.model", "pixel_level_module": "encoder"}
# What a model with a head calls its base, in the tables that hold for both.
_BASE = "model."


class Place(NamedTuple):
    """Name that a tensor has in a model, and which of how many equal parts of its rows it has: `first` to `last`."""

    name: str
    first: int = 0
    last: int = 1
    parts: int = 1


def split_key(key: str, parameters: Container[str] = ()) -> tuple[str, str]:
    """
    `layers.0.q_proj.weight.absmax` → (`layers.0.q_proj`, `weight.absmax`). What the table calls a parameter outside
    any linear map is a path of its own: `layers.0.attn.in_proj_weight` → (`layers.0.attn.in_proj_weight`, ``).
    """
    parts = key.split(".")
    if parts[-1] in parameters or ".".join(parts[-2:]) in parameters:
        return key, ""
    found = _KEY.match(key)
    return (found[1] or "", found[2]) if found else ("", key)


def places(keys: Iterable[str], config: PreTrainedConfig) -> dict[str, list[Place]]:
    """
    Where the tensors of a checkpoint are in a live model. Keys of model types that Transformers does not know stay as
    they are.

    Args:
        keys (`Iterable[str]`): Names of tensors in files; names of live modules come out unchanged.
        config (`PreTrainedConfig`): The checkpoint's config.

    Returns:
        `dict[str, list[Place]]`: By key, usually one place; several where Transformers splits the tensor.
    """
    names = {key: key for key in keys}
    converters: list[WeightConverter] = []
    for rename, convert in _stages(config, names):
        for renaming in rename:
            names.update({key: renaming.rename_source_key(name)[0] for key, name in names.items()})
        converters += convert
    found = {key: _converted(name, converters, config) for key, name in names.items()}
    if _whole_class(config) == _base_class(config):
        # Tables name what the model with a head has; Transformers takes the base's name off again for the base alone.
        for key, alike in found.items():
            if not key.startswith(_BASE):
                found[key] = [place._replace(name=place.name.removeprefix(_BASE)) for place in alike]
    return found


def _converted(name: str, converters: list[WeightConverter], config: PreTrainedConfig) -> list[Place]:
    for converter in converters:
        renamed, matched = converter.rename_source_key(name)
        if matched is not None:
            first, *others = converter.target_patterns
            alike = [renamed.replace(first, other, 1) for other in (first, *others)]
            spans = _spans(converter, name, config)
            return [Place(name, *span) for name, span in zip(alike, spans, strict=True)] if spans else [Place(name)]
    return [Place(name)]


def _spans(converter: WeightConverter, name: str, config: PreTrainedConfig) -> list[tuple[int, int, int]]:
    """Which parts of the rows each of the tensors gets, of how many; nothing if that cannot be told."""
    number = len(converter.target_patterns)
    if not any(isinstance(step, Split) for step in converter.operations):
        return [(part, part + 1, number) for part in range(number)]
    # One part is as large as a head.
    section = section_of(config, name.rpartition(".")[0])
    heads, groups = section.num_attention_heads, section.num_key_value_heads or section.num_attention_heads
    if heads is None or groups is None or section.problem is not None:
        return []
    ends = list(accumulate((heads, groups, groups)))
    return [(start, end, ends[-1]) for start, end in zip((0, *ends), ends, strict=False)]


_Stage = tuple[list[WeightRenaming], list[WeightConverter]]


def _stages(config: PreTrainedConfig, names: dict[str, str]) -> Iterator[_Stage]:
    """Tables of the whole model, of its base model, of its parts, and of times gone by, in Transformers' order."""
    base, whole = _base_class(config), _whole_class(config)
    by_class = _table(whole)
    yield _stage(by_class or _table(config.model_type))
    if base != whole:
        # What the model with a head calls its base is told by the names themselves: most of them begin with it.
        first, number = Counter(name.partition(".")[0] for name in names.values()).most_common(1)[0]
        prefix = first if 2 * number > len(names) else ""
        table = _table(base) or (_table(config.model_type) if by_class else None)
        yield _stage(table, scope="", prefix=prefix)
    inside = _INSIDE.get(config.model_type, {})
    for scope, name in inside.items():
        yield _stage(_table(name), scope=scope, prefix=_BASE.removesuffix("."))
    for scope, part in _scopes(config, names.values()).items():
        if any(f"{path}.".startswith(f"{scope}.") for path in inside):
            continue
        backbone = _table(MODEL_FOR_BACKBONE_MAPPING_NAMES.get(part.model_type))
        if backbone is not None and set(scope.split(".")) & set(_IN_BACKBONES):
            yield _stage(backbone, scope=scope)
        yield _stage(_table(_base_class(part)) or _table(part.model_type), scope=scope)
    yield _stage(_table("legacy"))


def _base_class(config: PreTrainedConfig) -> str | None:
    base = MODEL_MAPPING_NAMES.get(config.model_type)
    return base if isinstance(base, str) or base is None else base[0]


def _whole_class(config: PreTrainedConfig) -> str | None:
    return next(iter(config.architectures or ()), _base_class(config))


def _table(identifier: str | None) -> list | None:
    return get_checkpoint_conversion_mapping(identifier) if identifier else None


def _stage(table: list | None, scope: str | None = None, prefix: str = "") -> _Stage:
    for entry in table or ():
        if scope is not None:
            entry.scope_prefix, entry.base_model_prefix = scope, prefix
    renamings = [entry for entry in table or () if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table or () if isinstance(entry, WeightConverter) and _keeps_rows(entry)]
    return renamings, converters


def _keeps_rows(converter: WeightConverter) -> bool:
    by_rows = all(isinstance(step, _HARMLESS) and getattr(step, "dim", 0) == 0 for step in converter.operations)
    # Parts of different sizes are those of queries, keys and values, or of what is none of them.
    unequal = any(isinstance(step, Split) for step in converter.operations)
    ends = [pattern.removesuffix(".weight")[-6:] for pattern in converter.target_patterns]
    return by_rows and len(converter.source_patterns) == 1 and (not unequal or ends == ["q_proj", "k_proj", "v_proj"])


def _scopes(config: PreTrainedConfig, names: Iterable[str]) -> dict[str, PreTrainedConfig]:
    """Paths under which the parts of a config speak, by the first component that names one."""
    scopes: dict[str, PreTrainedConfig] = {}
    for path in {name.rpartition(".")[0] for name in names} if sub_configs(config) else ():
        parts = path.split(".")
        for position, part in enumerate(parts):
            if found := parts_speaking_for(config, part):
                scope, rest = ".".join(parts[: position + 1]), ".".join(parts[position + 1 :])
                inner = _IN_BACKBONES.get(part, "")
                scopes[f"{scope}.{inner}" if inner and f"{rest}.".startswith(f"{inner}.") else scope] = found[0]
                break
    # What stands beside a backbone in the same part of the model is not the backbone's.
    return {
        scope: part
        for scope, part in scopes.items()
        if not any(f"{scope}.{inner}" in scopes for inner in _IN_BACKBONES.values())
    }
