"""
A small config of every model type that Transformers knows: shrunk by the names of its fields, then repaired by what
its own validators say. What no rule gets right is listed in `OVERRIDES`.
"""

import re
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


__all__ = ["LEVELS", "OVERRIDES", "model_types", "small_config"]

# How small: 0 the smallest, grouped keys and heads wider than D/H; 1 heads of D/H and as many keys as queries;
# 2 shallow only; 3 as it is.
LEVELS = range(4)

# Field name → small value, the first pattern that matches. Widths are such that E differs from D/H where `head_dim`
# is a field of its own, and key heads are grouped where their number is.
_FIELDS: list[tuple[str, int]] = [
    (r"(num_)?(encoder_|decoder_|text_|speech_encoder_|t2u_encoder_|t2u_decoder_)?(num_)?(attention_heads|heads)", 4),
    (r"n_heads?|swa_num_attention_heads|num_sliding_attention_heads|num_query_heads|cross_num_attention_heads", 4),
    (
        r"(swa_|cross_)?num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|(de|en)coder_num_key_value_heads"
        r"|num_query_groups|num_global_key_value_heads",
        2,
    ),
    (
        r"hidden_size|cross_hidden_size|adapter_(in|out)_dim|d_model|n_embd|embed_dim|emb_dim|n_embed|embed_size|text_hidden_size|vision_hidden_size|out_hidden_size",
        64,
    ),
    (
        r"(.*_)?intermediate_size|(.*_)?ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|expert_ffn_hidden_size|dff|dim_ff",
        48,
    ),
    (r"(swa_|global_|cross_)?(head_dim|d_kv|attention_head_size|attention_head_dim|key_value_proj_dim)", 32),
    (
        r"(num_|conf_)?(text_|encoder_|decoder_|speech_encoder_|t2u_encoder_|t2u_decoder_|hidden_)?(num_)?(hidden_)?layers",
        2,
    ),
    (r"n_layers?|(encoder_|decoder_)?depth|num_layers_per_stack|num_blocks|l_layers|x_layers|r_layers", 2),
    (r"num_self_attends_per_block|num_encoder_blocks_|folding_trunk_num_hidden_layers|num_loops|num_hidden_blocks", 2),
    (r"memory_attention_num_layers|memory_fuser_num_layers|num_decoder_hidden_layers|resampler_depth", 1),
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
    (r"max_source_positions", 30),
    (r"num_queries|num_latents", 12),
]
_COUNTS_OF_LAYERS = re.compile(r"depths|stage_num_blocks|blocks_per_stage|encoder_depths|decoder_depths|block_sizes")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer")
_KINDS_OF_LAYERS = re.compile(r".*types|layers_block_type|.*heads_per_layer")
_VOCABULARY = 1000
# Fields that some configs leave open and their models cannot do without.
_UNSET = {"head_dim": 32, "vocab_size": 100, "attention_head_dim": 16}

# What no rule gets right, by model type; it holds wherever a config of that type stands in another one.
OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 8, "context_length": 16},
    "informer": {"prediction_length": 8, "context_length": 16},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    # So few tokens that there are no keys of groups of tokens.
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 64, "heavily_compressed_attention": 128}},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "nemotron": {"num_key_value_heads": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dots3_note_text": {"head_dim": 24},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [3, 3, 2]}
    },
    # Fields that their models leave aside for D/H, which is what they hold in every published config.
    **{
        name: {"head_dim": 16}
        for name in ("blt_global_transformer", "blt_local_decoder", "blt_local_encoder", "blt_patcher", "pixtral")
    },
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "glm5_next_text": {"qk_head_dim": 16},  # without rotation
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{
        name: {"hidden_dim": 64, "dim_head": 16, "context_size": 10, "max_pos_emb": 16}
        for name in ("granite_speech_encoder", "granite_speech_plus_encoder")
    },
    "lilt": {"hidden_size": 96},  # a multiple of the heads and of its six coordinates
    "lw_detr": {"projector_scale_factors": [1.0]},
    "lw_detr_vit": {"num_hidden_layers": 4, "window_block_indices": [0, 2], "out_features": ["stage2", "stage4"]},
    "mimi": {"upsample_groups": 64},
    "squeezebert": {"embedding_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "t5gemma2_text": {"dropout_rate": 0.0},
    # Two layers that share their attention, since sharing is what the class checks.
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
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


def _small(name: str, value: int, level: int, grouped: bool) -> int | None:
    """A smaller value of a field, `None` where it stays as it is."""
    small = next((number for pattern, number in _FIELDS if re.fullmatch(pattern, name)), None)
    if level > 0 and small == 32:
        small = 16
    if level > 0 and grouped:
        small = 4
    if level > 1 and (small not in (1, 2, 4) or "head" in name):
        return None
    return small if small is not None and value > small else None


def _small_fields(config: PreTrainedConfig, level: int) -> dict[str, Any]:
    """Fields that change, parts as dicts."""
    fields: dict[str, Any] = {}
    values = vars(config)
    for name, value in values.items():
        if name.startswith("_"):
            continue
        if name == "use_cache":
            fields[name] = False
        if isinstance(value, PreTrainedConfig):
            fields[name] = value.to_dict() | _small_fields(value, level)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value, level, _is_grouped(name))
            if small is not None:
                fields[name] = small
        elif isinstance(value, list | tuple) and _COUNTS_OF_LAYERS.fullmatch(name):
            fields[name] = [min(number, 1) for number in value]
    if "qk_rope_head_dim" in values:
        fields.pop("head_dim", None)  # which follows from it
    if "kv_lora_rank" in values:
        fields["num_key_value_heads"] = 4  # latent attention has no groups
    heads_of_stages = ("num_heads", "num_attention_heads", "num_attention_heads_per_stage")
    if any(isinstance(values.get(name), list | tuple) for name in heads_of_stages):
        fields.pop("embed_dim", None)  # widths a stage that fit its heads
        fields.pop("hidden_size", None)
    for name in _LAYER_COUNTS:
        if name in fields and values[name] == len(values.get("depths") or ()):
            del fields[name]  # the number of stages
    for name, small in _UNSET.items():
        if name in values and values[name] is None:
            fields[name] = min(small, 16) if level and "head" in name else small
    if level < 3 and "depths" not in values:  # whose lists have an entry a stage
        fields |= _kept_layers(config, level)
    counted = next((name for name in _LAYER_COUNTS if name in fields), "")
    if values.get("_out_features") and counted:
        fields |= {"out_features": [f"stage{fields[counted]}"], "out_indices": None}
    fields |= _small_images(values, level)
    if level == 0:  # large vocabularies take most of the time, and special tokens have to lie within
        for number, (name, value) in enumerate(values.items()):
            if isinstance(value, int) and not isinstance(value, bool) and value >= _VOCABULARY:
                if name.endswith(("vocab_size", "vocabulary_size")):
                    fields[name] = _VOCABULARY
                elif name.endswith(("_id", "_index", "_token")):
                    fields[name] = _VOCABULARY - 1 - number
    rotation = values.get("rope_parameters")
    rotated = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    if isinstance(rotation, dict) and "mrope_section" in rotation and (rotated or level < 2):
        half = int((rotated or 16) * rotation.get("partial_rotary_factor", 1.0)) // 2
        third = half // 3
        fields["rope_parameters"] = {**rotation, "mrope_section": [half - 2 * third, third, third]}
    return fields | (OVERRIDES.get(config.model_type, {}) if level < 3 else {})


def _is_grouped(name: str) -> bool:
    return "key_value_heads" in name or name in ("num_kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups")


def _kept_layers(config: PreTrainedConfig, level: int) -> dict[str, Any]:
    """Number of layers and the lists with an entry a layer: one layer of each kind stays, in its order."""
    values = vars(config)
    counted = next((name for name in _LAYER_COUNTS if isinstance(values.get(name), int)), "")
    if not counted:
        return {}
    depth = values[counted]
    lists = {n: list(v) for n, v in values.items() if isinstance(v, list | tuple) and len(v) == depth and depth > 2}
    kinds = list(zip(*(map(str, lists[n]) for n in sorted(lists) if _KINDS_OF_LAYERS.fullmatch(n)), strict=True))
    if not kinds or len(set(kinds)) == 1:
        # Kinds that follow from the number of a layer: as many layers as it takes to see each.
        found = [getattr(config, name, None) for name in ("layers_block_type", "layer_types")]
        computed = [list(one) for one in found if isinstance(one, list | tuple) and len(one) == depth]
        first = {kind: number for one in computed for number, kind in reversed(list(enumerate(one)))}
        if computed and not lists and len(first) > 1 and max(first.values()) < 8:
            return {counted: max(first.values()) + 1}
    own = config.to_dict().get("per_layer_config")
    own = {int(number): value for number, value in own.items()} if isinstance(own, dict) else {}
    if not lists and not own:
        return {}
    kinds = kinds or [()] * depth
    kept = sorted({kinds.index(kind) for kind in kinds} | {0} | ({min(own)} if own else set()))
    kept = kept if len(kept) > 1 else [kept[0], min(kept[0] + 1, depth - 1)]
    small: dict[str, Any] = {}
    if values.get("num_kv_shared_layers"):  # the last layers read the keys of the last of their kind before them
        small["num_kv_shared_layers"] = len(kept)
        kept = kept + kept
    small |= {n: [_small_entry(n, v[number], values) for number in kept] for n, v in lists.items()}
    small[counted] = len(kept)
    if own:
        small["per_layer_config"] = {
            new: {name: _small_own(name, value, values, level) for name, value in own[old].items()}
            for new, old in enumerate(kept)
            if old in own
        }
    return small


def _small_entry(name: str, value: Any, values: dict[str, Any]) -> Any:
    """An entry of a list with one a layer: heads are few, and as many as the model's where they were."""
    if not name.endswith("heads_per_layer") or not isinstance(value, int):
        return value
    return 4 if value == values.get("num_attention_heads") or "key_value" not in name else 2


def _small_own(name: str, value: Any, values: dict[str, Any], level: int) -> Any:
    """A field that one layer has for itself."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "kv_lora_rank" in values:  # latent attention: no groups, and heads of two parts
        name = name.replace("num_key_value_heads", "num_attention_heads")
        name = "qk_head_dim" if name == "head_dim" else name
    return _small(name, value, level, _is_grouped(name)) or value


def _small_images(values: dict[str, Any], level: int) -> dict[str, Any]:
    """Images of a few patches, and what is counted in patches of them."""
    size, patch = values.get("image_size"), values.get("patch_size")
    if level > 1 and not (isinstance(size, int) and isinstance(patch, int)):
        return {}
    patch = patch if isinstance(patch, int) else max(patch) if isinstance(patch, list | tuple) and patch else 16
    side = 64 if "patch_stride" in values else 4 * patch if patch > 7 else 64 // patch * patch
    small: dict[str, Any] = {}
    if isinstance(size, int):
        small["image_size"] = min(size, side)
    elif isinstance(size, list | tuple) and all(isinstance(one, int) for one in size):
        small["image_size"] = [min(one, side) for one in size]
    for name, value in values.items():
        if name.endswith(("feature_sizes", "feat_sizes")) and isinstance(value, list | tuple):
            small[name] = [[n // 16 for n in one] if isinstance(one, list | tuple) else one // 16 for one in value]
    if isinstance(values.get("window_size"), int) and "depths" in values:
        small["window_size"] = min(values["window_size"], 2)
    return small


# --- what validators say ---------------------------------------------------------------------------------------------

# "`codebook_dim` (512) must equal `hidden_size` (64)", "hidden_size = 64, out_features = 256"
_MUST_EQUAL = (
    re.compile(r"`([\w.]+)` \((\d+)\) must (?:equal|match|be equal to) `[^`]+` \((\d+)\)"),
    re.compile(r"\b([\w.]+) = (\d+), [\w.]+ = (\d+)"),
)
_MUST_MATCH = re.compile(r"\b(\w+) must match (\w+)$")
_STAGES = re.compile(r"out_features must be a subset of stage_names: (\[.*?\]) got (\[.*?\])")
_LAYERS_OF = re.compile(r"`[\w.]+` \((\d+)\) must be equal to the number of `([\w.]+)` \((\d+)\)")
_INDEX_LAYERS = re.compile(r"`(?:\w+\.)?(\w+)` \[[\d, ]+\] must index the (\d+) layers")


def _parts(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _repair(fields: dict[str, Any], default: PreTrainedConfig, message: str) -> bool:
    """Changes what a validator complains about, wherever it stands; whether anything was."""
    changed = False
    for pattern in _MUST_EQUAL:
        for path, value, wanted in pattern.findall(message):
            *where, name = path.split(".")
            for part in _parts(fields):
                inside = part.get(where[-1]) if where else part
                if part is fields and not where:
                    inside = vars(default) | fields
                if isinstance(inside, dict) and inside.get(name) == int(value):
                    inside = part if inside is not part and not where else inside
                    inside[name] = int(wanted)
                    changed = True
    for name, wanted in _MUST_MATCH.findall(message):
        for part in _parts(fields):
            if name in part and wanted in part and part[name] != part[wanted]:
                part[name] = part[wanted]
                changed = True
    for known, asked in _STAGES.findall(message):
        stages, features = (re.findall(r"'([^']+)'", found) for found in (known, asked))
        for part in _parts(fields):
            if part.get("out_features") == features:
                part |= {"out_features": stages[-1:], "out_indices": None}
                changed = True
    for depth, name, _ in _LAYERS_OF.findall(message):
        for part in _parts(fields):
            if isinstance(part.get(name), list) and len(part[name]) > int(depth):
                part[name] = part[name][: int(depth)]
                changed = True
    for name, depth in _INDEX_LAYERS.findall(message):
        for part in _parts(fields):
            if isinstance(part.get(name), list):
                part[name] = list(range(int(depth)))[: len(part[name])]
                changed = True
    return changed


def small_config(model_type: str, level: int = 0) -> PreTrainedConfig:
    """
    The default config of a model type, shrunk.

    Args:
        model_type (`str`): A key of `CONFIG_MAPPING`.
        level (`int`, *optional*, defaults to 0): How small, one of `LEVELS`.

    Returns:
        `PreTrainedConfig`

    Raises:
        ValueError: or what else the config's validators raise, if it cannot be repaired.
    """
    default = AutoConfig.for_model(model_type)
    fields = {} if level == 3 else _small_fields(default, level)
    for _ in range(6):
        try:
            return type(default)(**fields)
        except Exception as error:
            if not _repair(fields, default, str(error)):
                raise
    return type(default)(**fields)
