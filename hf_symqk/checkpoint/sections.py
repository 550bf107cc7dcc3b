"""Which part of a `config.json` speaks for a module, told from the module's path alone: no model is built."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..attention import HEAD_DIM, NUM_HEADS, NUM_KEY_VALUE_HEADS, layouts, value_of
from .counts import counts_of
from .sources import Source
from .weights import read_json


__all__ = ["Section", "parts_speaking_for", "read_config", "section_of", "sub_configs"]

# Words by which paths and configs call one modality.
_SYNONYMS = (
    {"text", "language", "lm", "llm"},
    {"vision", "visual", "image", "img", "vit", "video"},
    {"audio", "speech", "sound"},
)
# Parts of models that hold what configs call otherwise: MaskFormer and its kin.
_HOUSES = {"pixel_level_module": "backbone"}
_SIDES = ("encoder", "decoder")
_ATTENDS_TO = re.compile(r"(attn|attention)$")
# With what stands before them where encoder and decoder count apart (`encoder_attention_heads`).
_HEADS = (*NUM_HEADS, "attention_heads", "self_attention_heads")
_KEY_VALUE_HEADS = (*NUM_KEY_VALUE_HEADS, "key_value_heads")
_LAYERS = ("num_hidden_layers", "layers", "num_layers", "n_layers", "n_layer")
_WIDTH = (
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embed_dim",
    "true_hidden_size",
    "attention_hidden_size",
    "hidden_dim",
)
_NAMES = (_HEADS, _KEY_VALUE_HEADS, HEAD_DIM, _WIDTH, _LAYERS)


@dataclass(frozen=True)
class Section:
    """
    What a config says of the attention modules under a path, under the names that [`survey_modules`] looks for;
    `per_layer` where it says it of each layer apart; `said_by` is the part of the config that says it.
    """

    model_type: str | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    hidden_sizes: tuple[int, ...]
    num_hidden_layers: int | None
    per_layer: bool = False
    qk_rope_head_dim: int | None = None
    problem: str | None = None
    said_by: PreTrainedConfig | None = field(default=None, compare=False, repr=False)


def read_config(source: Source, file: str) -> PreTrainedConfig:
    """
    Reads a `config.json`: with the config class of Transformers where its model type has one (which knows aliases and
    the defaults that the file leaves out), else as it stands. Code of a repository is never run.

    Args:
        source (`Source`): Where the checkpoint is.
        file (`str`): Name of the file.

    Returns:
        `PreTrainedConfig`

    Raises:
        ValueError: if the file is no JSON object, or the config class refuses its values.
    """
    read_json(source, file)  # for its errors
    # Read again by Transformers, which writes numbers that JSON does not have in a way of its own.
    values, _ = PreTrainedConfig.get_config_dict(str(source.fetch(file)))
    values.pop("qk_init", None)  # says how weights were drawn, not what they are
    try:
        return _as_config(values)
    except Exception as error:  # the classes raise whatever their fields' checks raise
        kind = values.get("model_type")
        raise ValueError(f"{source.name}: {file} does not make a config of model type {kind!r}: {error}") from error


def _as_config(values: dict[str, Any]) -> PreTrainedConfig:
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type].from_dict(values)
    parts = {key: _as_config(part) for key, part in values.items() if _is_config(key, part)}
    config = PreTrainedConfig.from_dict({key: value for key, value in values.items() if key not in parts})
    config.__dict__.update(parts, model_type=model_type)
    return config


def _is_config(key: str, value: Any) -> bool:
    if not isinstance(value, dict) or key == "quantization_config":
        return False
    return "model_type" in value or any(name in value for name in _HEADS)


def sub_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configs inside a config, by attribute name."""
    return {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}


def parts_speaking_for(config: PreTrainedConfig, part: str) -> list[PreTrainedConfig]:
    """The configs inside a config that are named after one component of a path, the best first."""
    house = _HOUSES.get(part, part)
    subs = {name: sub for name, sub in sub_configs(config).items() if speaks_for(name, house)}
    # A `text_backbone` is described by the text's config.
    order = sorted(subs, key=lambda name: (_nearness(name, house), not name.startswith("backbone")), reverse=True)
    return [subs[name] for name in order]


def section_of(config: PreTrainedConfig, path: str, widths: Container[int] | None = None) -> Section:
    """
    Finds what a config says of the module at a path.

    Args:
        config (`PreTrainedConfig`): The whole config.
        path (`str`): Dotted path of an attention module.
        widths (`Container[int]`, *optional*): Sizes of the module's weights, the width of its input among them; they
            tell apart configs that the path does not.

    Returns:
        [`Section`]: With `problem` set where several parts of the config could be meant.
    """
    parts = path.split(".")
    for own in _with_parts(config) if widths is not None else ():
        if (counts := counts_of(own, path)) is not None:
            kind = getattr(own, "model_type", None)
            return Section(kind, *counts, hidden_sizes=(), num_hidden_layers=None, per_layer=True, said_by=own)
    for part in parts:
        if _ATTENDS_TO.search(part):
            continue  # called after what it attends to, like the `encoder_attn` of a decoder
        named = parts_speaking_for(config, part)
        # Part of the whole may be called after what it attends to, and be described by the whole's config.
        config = next((sub for sub in named if any(map(_counts_heads, _with_parts(sub)))), config)
    whole = _section(config, parts)
    staged = any(_section(sub, parts).per_layer for sub in _with_parts(config) if sub is not config)
    if whole.num_attention_heads is None or not _fits(whole, widths) or staged:
        # Nothing in the path names a part, as in a language model saved out of a larger model, or in a backbone (which
        # has stages of all widths).
        candidates = [sub for sub in _with_parts(config) if _first(sub, _HEADS) is not None]
        fitting = [sub for sub in candidates if _fits(_section(sub, parts), widths)] or candidates
        sections = {_section(sub, parts) for sub in fitting}
        if len({(section.num_attention_heads, section.num_key_value_heads) for section in sections}) > 1:
            names = [
                name for name, sub in sub_configs(config).items() if any(part in fitting for part in _with_parts(sub))
            ]
            names += ["the model's own values"] if config in fitting else []
            problem = f"the path does not say which of {', '.join(names)} in config.json speaks for it"
            return replace(whole, problem=problem)
        config = fitting[0] if fitting else config
    return _section(config, parts)


def _fits(section: Section, widths: Container[int] | None) -> bool:
    """Whether a section may speak for weights of these sizes; one that counts by layers may have widths by layers."""
    said = section.hidden_sizes
    return widths is None or section.per_layer or not said or any(width in widths for width in said)


def _section(config: PreTrainedConfig, parts: list[str]) -> Section:
    # Where encoder and decoder share a config it may count their heads apart (`encoder_attention_heads`, …).
    side = next((side for part in parts for side in _SIDES if part.startswith(side)), None)
    number = next((int(part) for part in parts if part.isdigit()), 0)
    own = [tuple(form for name in names for form in _of_side(name, side)) if side else () for names in _NAMES]
    names = [(*apart, *both) for apart, both in zip(own, _NAMES, strict=True)]
    if _first(config, own[0], number) is not None:
        names[1:3] = own[1:3]  # what is said of key heads without naming a side is then said of the other one
    per_layer = any(isinstance(value_of(config, name), list | tuple) for name in (*names[0], *names[1]))
    heads, groups, head_dim = (_first(config, entry, number) for entry in names[:3])
    counts = {name: count for name in names[4] if (count := _first(config, (name,), number))}
    # A layer may be counted as several (two attentions in one, LongCat), so the smaller number is that of the list.
    layers = next((count for name, count in counts.items() if name in own[4]), None) or min(
        counts.values(), default=None
    )
    if value_of(config, "multi_query") and not value_of(config, "new_decoder_architecture"):
        groups = 1  # Falcon, whatever it says of key heads
    widths = {width for name in names[3] if (width := _first(config, (name,), number))}
    if hasattr(config, "num_hidden_groups"):
        layers = None  # layers that share weights (ALBERT) are fewer in the file
    shared = _first(config, ("qk_rope_head_dim",), number)
    kind = getattr(config, "model_type", None)
    return Section(kind, heads, groups, head_dim, tuple(widths), layers, per_layer, shared, said_by=config)


def _of_side(name: str, side: str) -> tuple[str, ...]:
    """`encoder_num_layers` and `num_encoder_layers` for `num_layers`."""
    return (f"{side}_{name}", name.replace("num_", f"num_{side}_")) if "num_" in name else (f"{side}_{name}",)


def _layer_config(config: PreTrainedConfig, number: int) -> Any:
    """What a config says of one layer alone (Gemma 4), `None` where it does not."""
    if not value_of(config, "is_heterogeneous"):
        return None  # without values of its own for any layer, a config need not even say how many there are
    own = value_of(config, "per_layer_config")
    return own[number] if number < len(own) else None


def _first(config: PreTrainedConfig, names: tuple[str, ...], number: int = 0) -> int | None:
    for name in names:
        value = value_of(config, name)
        if value is None:
            value = value_of(_layer_config(config, number), name)
        if isinstance(value, list | tuple) and number < len(value):
            value = value[number]  # one value a layer, or a stage of layers
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _counts_heads(config: PreTrainedConfig) -> bool:
    """Whether a config says how many heads there are, or is of a type whose layout does."""
    if _first(config, _HEADS) is not None:
        return True
    kind = value_of(config, "model_type")
    return any(layout.num_heads and kind in (layout.model_types or ()) for layout in layouts())


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for sub in sub_configs(config).values():
        yield from _with_parts(sub)


def _nearness(name: str, part: str) -> tuple[bool, int, bool, bool]:
    """
    Of several configs that share words with a part of a path: the same name comes first, then more words, then the
    same side. A bare `encoder_config` comes last of its kind: a `sam_encoder` has a `sam_config`.
    """
    stem = name.removesuffix("_config")
    words, others = stem.split("_"), part.split("_")
    shared = len(set(words) & set(others))
    return stem == part, shared, stem != "encoder", any(side in words and side in others for side in _SIDES)


def speaks_for(name: str, part: str) -> bool:
    """Whether a config's attribute (`vision_config`) is named after a part of a path (`vision_tower`)."""
    stem = name.removesuffix("_config")
    if stem == part:
        return True
    words, others = set(stem.split("_")), set(part.split("_"))
    return bool(words & others) or any(words & group and others & group for group in _SYNONYMS)
