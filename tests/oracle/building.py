"""
A small model of every type that Transformers knows: configs shrunk by the names of their fields, and inputs made from
the signatures of forward passes. What no rule covers is listed in `OVERRIDES`.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


__all__ = ["build", "inputs_of", "model_types", "small_config"]

# Field name → small value, the first pattern that matches. Widths are such that E differs from D/H where `head_dim`
# is a field of its own, and key heads are grouped where their number is.
_FIELDS: list[tuple[str, int]] = [
    (r"(num_)?(encoder_|decoder_|text_|speech_encoder_|t2u_encoder_|t2u_decoder_)?(num_)?(attention_heads|heads)", 4),
    (r"n_heads?|swa_num_attention_heads|num_sliding_attention_heads|num_query_heads", 4),
    (
        r"(swa_)?num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|(de|en)coder_num_key_value_heads|num_query_groups",
        2,
    ),
    (
        r"hidden_size|d_model|n_embd|embed_dim|n_embed|embed_size|text_hidden_size|vision_hidden_size|out_hidden_size",
        64,
    ),
    (
        r"(.*_)?intermediate_size|(.*_)?ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|expert_ffn_hidden_size|dff|dim_ff",
        48,
    ),
    (r"(swa_|global_)?(head_dim|d_kv|attention_head_size|attention_head_dim|key_value_proj_dim)", 32),
    (r"(num_)?(text_|encoder_|decoder_|speech_encoder_|t2u_encoder_|t2u_decoder_|hidden_)?(num_)?(hidden_)?layers", 2),
    (r"n_layers?|(encoder_|decoder_)?depth|num_layers_per_stack|num_blocks|l_layers|x_layers|r_layers", 2),
    (r"num_self_attends_per_block|num_encoder_blocks_|folding_trunk_num_hidden_layers|num_loops|num_hidden_blocks", 2),
    (r"q_lora_rank", 24),
    (r"kv_lora_rank", 40),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"(num|n_routed|num_local|moe_num)_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|moe_router_topk", 2),
    (r"n_group|topk_group|n_groups", 1),
    (r"ngram_vocab_size_base|encoder_hash_byte_group_vocab|entity_vocab_size", 500),
    (r"first_k_dense_replace", 1),
]
_COUNTS_OF_LAYERS = re.compile(r"depths|stage_num_blocks|blocks_per_stage|encoder_depths|decoder_depths|block_sizes")
_VOCABULARY = 1000
# Fields that some configs leave open and their models cannot do without.
_UNSET = {"head_dim": 32, "vocab_size": 100, "attention_head_dim": 16}
_LARGEST = 150_000_000  # parameters

# What no rule gets right, by model type; it holds wherever a config of that type stands in another one.
OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 8, "context_length": 16},
    "informer": {"prediction_length": 8, "context_length": 16},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "wavtokenizer": {"codebook_dim": 64},
    "nemotron": {"num_key_value_heads": 2},
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{
        name: {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {"model_type": "resnet", "depths": [1, 1, 1, 1], "out_features": ["stage4"]},
        }
        for name in ("detr", "conditional_detr", "dab-detr", "table-transformer")
    },
}


def model_types() -> list[str]:
    """Every model type with a config in Transformers, in alphabetical order."""
    return sorted(CONFIG_MAPPING_NAMES)


def _default(model_type: str) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type)


def _small_fields(config: PreTrainedConfig, level: int) -> dict[str, Any]:
    """Fields that change, parts as dicts."""
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            fields[name] = value.to_dict() | _small_fields(value, level)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((number for pattern, number in _FIELDS if re.fullmatch(pattern, name)), None)
            if level > 0 and small == 32:
                small = 16
            if level > 1 and small != 2 and small != 4:
                continue
            if level > 1 and "head" in name:
                continue
            if small is not None and value > small:
                fields[name] = small
        elif isinstance(value, list | tuple) and _COUNTS_OF_LAYERS.fullmatch(name):
            fields[name] = [min(number, 1) for number in value]
    if "qk_rope_head_dim" in vars(config):
        fields.pop("head_dim", None)  # which follows from it
    if "kv_lora_rank" in vars(config):
        fields["num_key_value_heads"] = 4  # latent attention has no groups
    if any(isinstance(vars(config).get(name), list | tuple) for name in ("num_heads", "num_attention_heads")):
        fields.pop("embed_dim", None)  # widths a stage that fit its heads
        fields.pop("hidden_size", None)
    for name, small in _UNSET.items():
        if name in vars(config) and vars(config)[name] is None:
            fields[name] = min(small, 16) if level and "head" in name else small
    counted = next(
        (n for n in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(vars(config).get(n), int)), ""
    )
    if counted:
        # Lists with an entry a layer keep those of the layers that are kept: one of each kind.
        depth = vars(config)[counted]
        lists = {
            n: v for n, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == depth and depth > 2
        }
        kinds = list(zip(*(lists[n] for n in sorted(lists) if n.endswith("types")), strict=True)) or [()]
        kept = sorted({kinds.index(kind) for kind in kinds} | {0})
        kept = kept if len(kept) > 1 else [kept[0], min(kept[0] + 1, depth - 1)]
        if lists and level < 3:
            fields |= {n: [v[number] for number in kept] for n, v in lists.items()}
            fields[counted] = len(kept)
        own = vars(config).get("per_layer_config")
        if isinstance(own, dict) and level < 3:
            fields["per_layer_config"] = {new: own[old] for new, old in enumerate(kept) if old in own}
    if vars(config).get("_out_features") and counted in fields:
        fields |= {"out_features": [f"stage{fields[counted]}"], "out_indices": None}
    if isinstance(getattr(config, "image_size", None), int) and isinstance(getattr(config, "patch_size", None), int):
        fields["image_size"] = min(config.image_size, 4 * config.patch_size)
    elif isinstance(getattr(config, "image_size", None), int) and level < 2:
        fields["image_size"] = min(config.image_size, 64)
    if level == 0:  # large vocabularies take most of the time, and special tokens have to lie within
        for number, (name, value) in enumerate(vars(config).items()):
            if isinstance(value, int) and not isinstance(value, bool) and value >= _VOCABULARY:
                if name.endswith(("vocab_size", "vocabulary_size")):
                    fields[name] = _VOCABULARY
                elif name.endswith(("_id", "_index", "_token")):
                    fields[name] = _VOCABULARY - 1 - number
    rotation = vars(config).get("rope_parameters")
    if isinstance(rotation, dict) and "mrope_section" in rotation and ("head_dim" in fields or level < 2):
        half = int((fields.get("head_dim") or 16) * rotation.get("partial_rotary_factor", 1.0)) // 2
        third = half // 3
        fields["rope_parameters"] = {**rotation, "mrope_section": [half - 2 * third, third, third]}
    return fields | (OVERRIDES.get(config.model_type, {}) if level < 3 else {})


def small_config(model_type: str, level: int = 0) -> PreTrainedConfig:
    """
    The default config of a model type, shrunk.

    Args:
        model_type (`str`): A key of `CONFIG_MAPPING`.
        level (`int`, *optional*, defaults to 0): 0 the smallest; 1 with head widths D/H; 2 shallow only; 3 as it is.

    Returns:
        `PreTrainedConfig`
    """
    default = _default(model_type)
    fields = {} if level == 3 else _small_fields(default, level)
    return type(default)(**fields)


def _model_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Model classes of a config: those of the auto mappings (the base model first), then any of its module."""
    names: list[str] = []
    mappings = sorted(name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES"))
    mappings.sort(key=lambda name: name != "MODEL_MAPPING_NAMES")
    for mapping in mappings:
        entry = getattr(modeling_auto, mapping).get(config.model_type, ())
        names += [entry] if isinstance(entry, str) else list(entry)
    for name in dict.fromkeys(names):
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            yield found
    package = type(config).__module__.rpartition(".")[0]
    own = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    found = [value for value in vars(own).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    found = [value for value in found if value.__module__.startswith(package) and "PreTrained" not in value.__name__]
    # Those that hold the most stand last in a file.
    yield from (value for value in reversed(found) if getattr(value, "config_class", None) is type(config))


def build(model_type: str, level: int = 0, seed: int = 0) -> PreTrainedModel:
    """
    A small model with random weights.

    Args:
        model_type (`str`): A key of `CONFIG_MAPPING`.
        level (`int`, *optional*, defaults to 0): How small (see [`small_config`]).
        seed (`int`, *optional*, defaults to 0): Seed of the weights.

    Returns:
        `PreTrainedModel`: In eval mode.

    Raises:
        RuntimeError: if no class can be built, or it would be too large.
    """
    try:
        config = small_config(model_type, level)
    except Exception as error:
        raise RuntimeError(f"config: {type(error).__name__}: {error}") from error
    classes = list(dict.fromkeys(_model_classes(config)))
    if not classes:
        raise RuntimeError("no model class")
    errors = []
    for model_class in classes[:6]:
        try:
            if level < 2:
                raise LookupError("small enough")
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
            if size > _LARGEST:
                raise MemoryError(f"{size:,} parameters")
        except MemoryError as error:
            errors.append(f"{model_class.__name__}: {error}")
            continue
        except Exception:
            size = 0  # some classes cannot be made on the meta device
        try:
            config = small_config(model_type, level)
            torch.manual_seed(seed)
            return model_class._from_config(config).eval()
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__}: {str(error)[:160]}")
    raise RuntimeError("; ".join(errors))


# --- inputs ----------------------------------------------------------------------------------------------------------


def _first(config: Any, *names: str, default: int) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _image(config: Any) -> tuple[int, int, int]:
    size = _first(config, "image_size", "img_size", "input_size", default=64)
    if isinstance(size, dict):
        size = (size.get("height", 64), size.get("width", 64))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = _first(config, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
    return (channels if isinstance(channels, int) else 3), height, width


def inputs_of(model: PreTrainedModel, batch: int = 2, tokens: int = 8) -> dict[str, torch.Tensor]:
    """
    Inputs of one forward pass, by the names in its signature.

    Args:
        model (`PreTrainedModel`): The model.
        batch (`int`, *optional*, defaults to 2): Sequences, images or recordings.
        tokens (`int`, *optional*, defaults to 8): Tokens of text.

    Returns:
        `dict[str, torch.Tensor]`
    """
    config = model.config
    vision = _part(config, "vision_config", "image_config") or config
    audio = _part(config, "audio_config", "speech_config", "encoder_config") or config
    parameters = inspect.signature(model.forward).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    vocabulary = min(100, int(_first(config, "vocab_size", default=100) or 100))
    generator = torch.Generator().manual_seed(1)

    def integers(*shape: int) -> torch.Tensor:
        low = min(5, vocabulary - 1)
        return torch.randint(low, max(vocabulary, low + 1), shape, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    channels, height, width = _image(vision)
    mels = _first(audio, "num_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim", default=80)
    makers = {
        "input_ids": lambda: integers(batch, tokens),
        "decoder_input_ids": lambda: integers(batch, tokens - 2),
        "pixel_values": lambda: floats(batch, channels, height, width),
        "pixel_values_videos": lambda: floats(batch, 4, channels, height, width),
        "input_values": lambda: floats(batch, 8000),
        "input_features": lambda: floats(batch, mels, 2 * _first(audio, "max_source_positions", default=50)),
        "hidden_states": lambda: floats(batch, tokens, _first(config, "hidden_size", "d_model", default=64)),
        "encoder_hidden_states": lambda: floats(batch, tokens, _first(config, "hidden_size", "d_model", default=64)),
        "inputs_embeds": lambda: floats(batch, tokens, _first(config, "hidden_size", "d_model", default=64)),
        "bbox": lambda: torch.zeros(batch, tokens, 4, dtype=torch.long),
        "attention_mask": lambda: torch.ones(batch, tokens, dtype=torch.long),
        "past_values": lambda: floats(batch, _first(config, "context_length", default=32), 1).squeeze(-1),
    }
    wanted = [name for name in parameters if name in makers and name in required]
    main = getattr(model, "main_input_name", "input_ids")
    for name in (main, "input_ids", "decoder_input_ids", "pixel_values", "input_values", "input_features", "bbox"):
        if name in parameters and name in makers:
            wanted.append(name)
    return {name: makers[name]() for name in dict.fromkeys(wanted)}


def _part(config: PreTrainedConfig, *names: str) -> Any:
    return next((part for name in names if (part := getattr(config, name, None)) is not None), None)


def shake(model: nn.Module, seed: int = 5) -> None:
    """Moves norms and biases away from 1 and 0, and projections that are drawn as zeros, so that mistakes show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.numel() > 1_000_000:
                continue  # embeddings
            if not torch.isfinite(parameter).all():
                parameter.zero_()
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
            elif parameter.abs().max() < 1e-4:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
