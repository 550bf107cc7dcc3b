"""
Which way an attention layer looks and which side of a model it stands on, told from its path and the config that
speaks for it: all that a live model and a checkpoint both know. What the forward passes of the models do is held
against this by the tests.
"""

import re
from typing import Any, Literal, NamedTuple

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from .heads import value_of


__all__ = ["Kind", "Role", "kind_of", "spoken_by"]

Role = Literal["encoder", "decoder"]

_ENCODER = re.compile(r"(?<![a-z-])encoder(?![a-z-])")
_DECODER = re.compile(r"(?<![a-z-])decoder(?![a-z-])")
_GENERATING = {
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
# Parts of a model that read images, sound or their features, by what stands in a path or a model type.
_TOWER = re.compile(
    r"vision|visual|image|video|audio|speech|codec|vq|protein|qformer|resampler|perceiver|projector|connector"
)
# What a decoder's config speaks for and is none: the encoder of what CLVP's decoder goes on from.
_CONDITIONING = re.compile(r"(^|\.)conditioning_encoder\.")
# Layers of a model that is no part of another.
_WHOLE = re.compile(r"(model\.)?layers\.")
# What follows a model's type in the type of its part that speaks.
_LANGUAGE = re.compile(r"_(text|text_model|text_decoder|language|llm|decoder|talker|thinker)$")

# What the mappings of Transformers do not tell of a model type: causal (`True`), bidirectional (`False`), or a matter
# of the inputs, which say where a prefix ends that all of its tokens see, or of the attention function (`None`).
_BY_TYPE: dict[str, bool | None] = {
    **dict.fromkeys(
        (
            "blt_global_transformer",
            "blt_local_decoder",
            "blt_local_encoder",
            "blt_patcher",
            "clip_text_model",
            "clipseg_text_model",
            "clvp_decoder",
            "coarse_acoustics",
            "csm",
            "csm_depth_decoder_model",
            "decision_transformer",
            "glm_image_text",
            "granite4_vision_text",
            "groupvit_text_model",
            "higgs_audio_v2",
            "imagegpt",
            "kosmos_2_5_text_model",
            "kosmos_2_text_model",
            "metaclip_2_text_model",
            "mimi",
            "mimi_encoder",
            "owlv2_text_model",
            "owlvit_text_model",
            "pocket_tts_audio_tokenizer_encoder",
            "pp_formulanet_text",
            "semantic",
            "timesfm2_5",
            "voxtral_realtime_encoder",
            "xclip_text_model",
        ),
        True,
    ),
    **dict.fromkeys(("fine_acoustics", "t5gemma2_text", "xlnet"), False),
    **dict.fromkeys(
        ("cpmant", "git", "deepseek_ocr2_encoder", "phi4_multimodal_audio", "phi4_multimodal_vision"), None
    ),
}
# Types that are causal in a decoder alone: `is_decoder` of their config says something else, or nothing.
_CAUSAL_AS_DECODER = {"blip_text_model", "informer", "pix2struct_text_model", "time_series_transformer"}
# Types whose models are decoders by a flag alone.
_DECODER_BY_FLAG = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
# Causal, and yet encoders: what they make of a text or a sound is compared, or decoded by others.
_CAUSAL_ENCODERS = {
    "blt_local_encoder",
    "blt_patcher",
    "clip_text_model",
    "clipseg_text_model",
    "deepseek_ocr2_encoder",
    "groupvit_text_model",
    "metaclip_2_text_model",
    "mimi",
    "mimi_encoder",
    "owlv2_text_model",
    "owlvit_text_model",
    "pocket_tts_audio_tokenizer_encoder",
    "voxtral_realtime_encoder",
    "xclip_text_model",
}


class Kind(NamedTuple):
    """
    Where a layer stands and which way it looks.

    Attributes:
        role (`str` or `None`): `"encoder"` or `"decoder"`; `None` where neither path nor config says.
        causal (`bool` or `None`): Whether no token sees a later one (images in a causal text may see all of
            themselves). `None` for cross-attention, whose two streams have no common order, where neither path nor
            config says, and where it depends on the inputs of a forward pass (prefix language models) or on the
            attention function (Phi-4's vision tower is causal under SDPA alone).
    """

    role: Role | None
    causal: bool | None


def spoken_by(config: Any) -> Any:
    """The config itself, where what speaks for a layer is only what a checkpoint's config says of its heads."""
    return getattr(config, "said_by", config)


def kind_of(name: str, kind: str, config: Any) -> Kind:
    """
    Tells role and direction of an attention layer.

    Args:
        name (`str`): Dotted path of the attention module.
        kind (`str`): `"self"` or `"cross"`.
        config (`Any`): What speaks for it: a config, or what a checkpoint's config says of it.

    Returns:
        [`Kind`]
    """
    config = spoken_by(config)
    model_type = value_of(config, "model_type") or ""
    side = _side(f"{name}.{model_type}")
    causal = _causal(model_type, side, name, config)
    return Kind(_role(model_type, side, causal), None if kind == "cross" else causal)


def _side(where: str) -> Role | None:
    """The side that a path names; a decoder may be built of what is called an encoder elsewhere (BERT)."""
    return "decoder" if _DECODER.search(where) else "encoder" if _ENCODER.search(where) else None


def _causal(model_type: str, side: Role | None, name: str, config: Any) -> bool | None:
    if _CONDITIONING.search(name):
        return False
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    if model_type in _CAUSAL_AS_DECODER:
        return side == "decoder" or (side is None and value_of(config, "is_decoder") is True)
    if value_of(config, "use_bidirectional_attention") in (True, "all"):
        # PaliGemma and π0 say so of a part, which sees a prefix in both directions.
        return None if model_type in ("gemma", "gemma2") and _WHOLE.match(name) is None else False
    if value_of(config, "is_decoder") is True or value_of(config, "causal") is True:
        return True
    if _has_two_sides(model_type):
        # Queries of detection models (DETR) all see each other.
        return None if side is None else side == "decoder" and _generates(model_type)
    if model_type in _DECODER_BY_FLAG:
        return False
    if (ahead := value_of(config, "attention_context_right")) is not None:
        return ahead == 0  # local attention over sound
    if _TOWER.search(name) or (model_type not in _GENERATING and _TOWER.search(model_type)):
        return False if model_type in CONFIG_MAPPING else None
    if _generates(model_type):
        return True
    return False if model_type in CONFIG_MAPPING else None


def _role(model_type: str, side: Role | None, causal: bool | None) -> Role | None:
    generates = causal is None and _generates(model_type) and not _has_two_sides(model_type)
    if side == "decoder" or ((causal or generates) and model_type not in _CAUSAL_ENCODERS):
        return "decoder"
    return "encoder" if side or (model_type in CONFIG_MAPPING and not _has_two_sides(model_type)) else None


def _has_two_sides(model_type: str) -> bool:
    """Whether models of a type have both sides; told from the type, since configs of parts say that they are alone."""
    return model_type in CONFIG_MAPPING and getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False)


def _generates(model_type: str) -> bool:
    return model_type in _GENERATING or _LANGUAGE.sub("", model_type) in _GENERATING
