"""
Head counts that a config has under names of their own, or that follow from others, and lists of layers that are
shorter than it says: what the live model works out for itself, and a file leaves to whoever reads it.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedConfig


__all__ = ["HeadCounts", "counts_of", "length_of"]

_Number = Callable[[Any], int]


class HeadCounts(NamedTuple):
    """What is said of the attention modules at a path."""

    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None


class _Rule(NamedTuple):
    """Model types of the config that speaks, where in a model it does, and what it says."""

    types: tuple[str, ...]
    path: re.Pattern[str]
    heads: _Number
    groups: _Number | None = None
    head_dim: _Number | None = None


def _of(name: str) -> _Number:
    """The value of a config under a dotted name."""

    def value(config: Any) -> int:
        for part in name.split("."):
            config = getattr(config, part)
        return config

    return value


def _convbert_heads(config: Any) -> int:
    return max(1, config.num_attention_heads // config.head_ratio)


_GROUNDING_DINO = ("grounding-dino", "mm-grounding-dino")
_SAM_DECODERS = tuple(
    f"{name}_mask_decoder"
    for name in (
        "sam",
        "sam_hq",
        "sam2",
        "sam2_video",
        "sam3_tracker",
        "sam3_tracker_video",
        "edgetam",
        "edgetam_video",
    )
)

_SEAMLESS = ("seamless_m4t", "seamless_m4t_v2")

_RULES = tuple(
    _Rule(types, re.compile(path), *numbers)
    for types, path, *numbers in (
        (("aria",), r"^(model\.)?multi_modal_projector\.", _of("vision_config.num_attention_heads")),
        (("bridgetower",), r"(^|\.)vision_model\.visual\.", lambda config: config.vision_config.hidden_size // 64),
        (("bridgetower_vision_model",), r"^visual\.", lambda config: config.hidden_size // 64),
        # Half of each head's channels go through a convolution instead.
        (
            ("convbert",),
            r"attention\.self$",
            _convbert_heads,
            None,
            lambda config: config.hidden_size // _convbert_heads(config) // 2,
        ),
        (
            ("edgetam_video",),
            r"(^|\.)spatial_perceiver\.",
            _of("perceiver_resampler_num_attention_heads"),
            None,
            _of("perceiver_resampler_attention_head_dim"),
        ),
        (
            ("EvollaModel", "evolla"),
            r"(^|\.)sequence_compressor_resampler\.",
            _of("resampler_heads"),
            None,
            _of("resampler_dim_head"),
        ),
        (("fun_asr_nano",), r"(^|\.)multi_modal_projector\.", _of("adaptor_config.num_attention_heads")),
        (("gemma3n_audio",), r"(^|\.)conformer\.", _of("conf_num_attention_heads")),
        (
            _GROUNDING_DINO,
            r"(^|\.)encoder\.layers\.\d+\.(fusion_layer|text_enhancer_layer)\.",
            lambda config: config.encoder_attention_heads // 2,
        ),
        (_GROUNDING_DINO, r"(^|\.)decoder\.layers\.", _of("decoder_attention_heads")),
        (
            ("idefics_perciever",),
            r"(^|\.)perceiver_resampler\.",
            _of("resampler_n_heads"),
            None,
            _of("resampler_head_dim"),
        ),
        (
            ("idefics2_perceiver",),
            r"(^|perceiver_resampler\.)layers\.",
            _of("resampler_n_heads"),
            _of("num_key_value_heads"),
            _of("resampler_head_dim"),
        ),
        (("mask2former",), r"(^|\.)transformer_module\.", _of("num_attention_heads")),
        (("oneformer",), r"(^|\.)transformer_module\.", _of("num_attention_heads")),
        # The text encoder, of which the rest of the config says the width alone.
        (("oneformer",), r"(^|\.)text_mapper\.text_encoder\.", lambda config: config.text_encoder_width // 64),
        (("omdet-turbo",), r"(^|\.)decoder\.layers\.|^layers\.", _of("decoder_num_heads")),
        (("perceiver",), r"(^|\.)encoder\.self_attends\.", _of("num_self_attention_heads")),
        (("perceiver",), r"(^|\.)encoder\.cross_attention\.", _of("num_cross_attention_heads")),
        # Cross-attention is as much narrower as the config says, with as many heads.
        (_SAM_DECODERS, r"(^|\.)mask_decoder\.transformer\.", _of("num_attention_heads")),
        (("patchtsmixer",), r"(^|\.)self_attn_layer$", _of("self_attn_heads")),
        (_SEAMLESS, r"(^|\.)speech_encoder\.", _of("speech_encoder_attention_heads")),
        (_SEAMLESS, r"(^|\.)text_encoder\.", _of("encoder_attention_heads")),
        (_SEAMLESS, r"(^|\.)text_decoder\.", _of("decoder_attention_heads")),
        (_SEAMLESS, r"(^|\.)t2u_model\.(model\.)?encoder\.", _of("t2u_encoder_attention_heads")),
        (_SEAMLESS, r"(^|\.)t2u_model\.(model\.)?decoder\.", _of("t2u_decoder_attention_heads")),
        (
            ("edgetam_video", "sam2_video", "sam3_tracker_video"),
            r"(^|\.)memory_attention\.",
            _of("memory_attention_num_attention_heads"),
        ),
        (("vjepa2",), r"(^|\.)predictor\.", _of("pred_num_attention_heads")),
        (("xclip",), r"(^|\.)mit\.", _of("vision_config.mit_num_attention_heads")),
        (("xclip",), r"(^|\.)prompts_generator\.", _of("prompt_num_attention_heads")),
    )
)


def counts_of(config: PreTrainedConfig, path: str) -> HeadCounts | None:
    """
    What a config says in a way of its own of the attention module at a path.

    Args:
        config (`PreTrainedConfig`): One config, without those inside it.
        path (`str`): Dotted path of the module in the whole model.

    Returns:
        [`HeadCounts`], or `None` where the config says it as others do.
    """
    kind = getattr(config, "model_type", None)
    for rule in _RULES:
        if kind in rule.types and rule.path.search(path):
            groups, head_dim = (None if number is None else number(config) for number in (rule.groups, rule.head_dim))
            return HeadCounts(rule.heads(config), groups, head_dim)
    return None


def length_of(config: PreTrainedConfig, path: str) -> int | None:
    """
    What a config says in a way of its own of the length of the list of layers at a path; `None` where it says it as
    others do. The arguments are those of [`counts_of`].
    """
    kind = getattr(config, "model_type", None)
    # These count the queries' first prediction, before any layer, as a layer of the decoder.
    if kind in ("mask2former", "oneformer") and path.endswith("transformer_module.decoder.layers"):
        return config.decoder_layers - 1
    return None
