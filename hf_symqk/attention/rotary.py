"""
Which channels of a head a model's rotary position embedding rotates together. `W_k = W_q A` keeps a property of W_qk
at every offset of two tokens only where A commutes with the rotation: where it is, on each pair of channels, a
multiple of the identity, of a quarter turn `J`, or a sum of the two.

What the forward passes of the models do is held against this by the tests (`tests/oracle/rotary.py`).

Shape legend: `E` head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .heads import value_of
from .kinds import spoken_by
from .layer import AttentionLayer


__all__ = ["ChannelPairs", "channel_pairs"]


@dataclass(frozen=True)
class ChannelPairs:
    """
    Channels of a head that are rotated together.

    Attributes:
        first (`tuple[int, ...]`): The first channel of each pair, in the order of rows of
            [`AttentionLayer.tensors`].
        second (`tuple[int, ...]`): The channel that `first` of the same index is rotated with.
        rest (`tuple[int, ...]`): Channels that are not rotated.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def rotary(self) -> bool:
        """Whether any channel is rotated."""
        return bool(self.first)


class _Turned(NamedTuple):
    """Where the channels that a layer rotates stand in a head: how many, behind how many others."""

    width: int
    start: int = 0


def channel_pairs(layer: AttentionLayer) -> ChannelPairs:
    """
    Tells which channels of a layer's heads its rotary position embedding rotates together.

    Args:
        layer ([`AttentionLayer`]): A layer of a live model.

    Returns:
        [`ChannelPairs`]: Channels count from 0 to `E − 1` in the order of the rows of a head as
        [`AttentionLayer.tensors`] yields them, which is the same for queries and keys. Without rotary positions, or in
        a layer that has none, all of them are `rest`.

    Raises:
        ValueError: if it is not known of the layer: nobody has seen a forward pass of its kind (see
            [`AttentionLayer.verified`]), or what its forward does is no rotation of pairs.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaModel
    >>> from hf_symqk.attention import channel_pairs, find_attention_layers

    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32)
    >>> layer = find_attention_layers(LlamaModel(config))[0]
    >>> pairs = channel_pairs(layer)
    >>> list(zip(pairs.first, pairs.second)), pairs.rest
    ([(0, 4), (1, 5), (2, 6), (3, 7)], ())

    ```
    """
    if layer.problem is not None:
        raise ValueError(layer.problem)
    model_type = layer.model_type
    reason = ""
    if not layer.verified or model_type is None:
        reason = "nobody has seen a forward pass of such layers"
    elif unseen := {model_type, *(owner.__name__ for owner in type(layer.module).__mro__)} & _UNSEEN.keys():
        reason = _UNSEEN[min(unseen)]
    elif _said(layer, "position_embeddings_type") == "rotary":
        reason = "its forward rotates hidden states before it projects them"
    if reason:
        raise ValueError(
            f"{layer.name!r} ({type(layer.module).__name__}, model type {model_type!r}): it is not known which "
            f"channels of its heads are rotated together, since {reason}. The scheme 'symmetric' (W_k = W_q) commutes "
            "with every rotation; else choose other layers with `layers`."
        )
    channels, parts = range(layer.heads.head_dim), _PARTS.get(model_type or "", 1)
    width, start = _turned(layer) if _rotates(layer) else _Turned(0)
    if width % (2 * parts) or not 0 <= start <= start + width <= len(channels):
        raise ValueError(
            f"{layer.name!r} (model type {model_type!r}): its config has {width} of {len(channels)} channels of a "
            "head rotated, which are no pairs of them. The scheme 'symmetric' commutes with every rotation."
        )
    within = range(start, start + width)
    if model_type in _ADJACENT:
        first, second = list(within[::2]), list(within[1::2])
    else:
        apart = (len(channels) if _is_proportional(layer) else width) // parts // 2
        each = width // parts
        first = [channel for part in range(parts) for channel in within[part * each :][: each // 2]]
        second = [channel + apart for channel in first]
    rest = set(channels) - {*first, *second}
    return ChannelPairs(tuple(first), tuple(second), tuple(sorted(rest)))


# --- whether a layer rotates ----------------------------------------------------------------------------------------


def _rotates(layer: AttentionLayer) -> bool:
    """Whether a layer's queries and keys are rotated at all, which some layers of a model may be and others not."""
    if layer.kind == "cross":  # positions of two streams: nothing that was seen rotates them
        return False
    if (own := _BY_LAYER.get(layer.model_type or "")) is not None:
        return own(layer)
    if any(hasattr(holder, "position_embedding_type") for holder in (layer.module, spoken_by(layer.config))):
        return _said(layer, "position_embedding_type") in ("rotary", "rope")
    if (told := value_of(layer.module, "use_rope")) is not None:
        return bool(told)
    return layer.model_type in _WITHOUT_CONFIG or _rope_parameters(layer) is not None


def _rope_parameters(layer: AttentionLayer) -> Mapping[str, Any] | None:
    """What the config says of the rotation, of layers of this one's type where it tells them apart."""
    parameters = value_of(spoken_by(layer.config), "rope_parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return None
    by_type = {name: values for name, values in parameters.items() if values is None or isinstance(values, Mapping)}
    if len(by_type) < len(parameters):
        return parameters
    layer_type = _layer_type(layer)
    if layer_type not in by_type:
        raise ValueError(
            f"{layer.name!r} (model type {layer.model_type!r}): its config tells rotations apart by types of layers "
            f"({', '.join(by_type)}), of which it is {layer_type or 'none'}. Choose other layers with `layers`, or "
            "the scheme 'symmetric', which commutes with every rotation."
        )
    return by_type[layer_type]


def _said(layer: AttentionLayer, name: str) -> Any:
    """What the module says, else its config."""
    told = value_of(layer.module, name)
    return value_of(spoken_by(layer.config), name) if told is None else told


def _layer_type(layer: AttentionLayer) -> str | None:
    """The layer's own entry in `layer_types` of its config."""
    for name in ("layer_type", "attention_type"):
        if isinstance(told := value_of(layer.module, name), str):
            return told
    types, index = value_of(spoken_by(layer.config), "layer_types"), value_of(layer.module, "layer_idx")
    return types[index] if isinstance(types, list | tuple) and isinstance(index, int) else None


def _is_sliding(layer: AttentionLayer) -> bool:
    return _layer_type(layer) == "sliding_attention"


# --- which of its channels ------------------------------------------------------------------------------------------


def _turned(layer: AttentionLayer) -> _Turned:
    """The channels that a layer rotates, if it rotates any."""
    head_dim, shared = layer.heads.head_dim, layer.heads.shared_head_dim
    if (own := _WIDTHS.get(layer.model_type or "")) is not None:
        return own(layer)
    if shared:  # the last channels of latent attention
        return _Turned(shared, head_dim - shared)
    parameters = _rope_parameters(layer) or {}
    factor = parameters.get("partial_rotary_factor", 1.0)
    if _is_proportional(layer):
        return _Turned(2 * int(factor * head_dim // 2))
    # One frequency for every second channel, as the rotary embeddings count them.
    return _Turned(2 * len(range(0, int(head_dim * factor), 2)))


def _is_proportional(layer: AttentionLayer) -> bool:
    """Whether a part of the frequencies of the whole head is left out, so that pairs stand as far apart as in all."""
    return (_rope_parameters(layer) or {}).get("rope_type") == "proportional"


def _first(name: str) -> Callable[[AttentionLayer], _Turned]:
    """The first channels, as many as the config says under a name; all of them if it says nothing."""
    return lambda layer: _Turned(value_of(spoken_by(layer.config), name) or layer.heads.head_dim)


def _last(name: str) -> Callable[[AttentionLayer], _Turned]:
    """The last channels, as many as the config says under a name."""

    def turned(layer: AttentionLayer) -> _Turned:
        width = value_of(spoken_by(layer.config), name)
        return _Turned(width, layer.heads.head_dim - width)

    return turned


# --- what configs do not tell ---------------------------------------------------------------------------------------

# Types that rotate neighbours, (0, 1), (2, 3), …; all others rotate the halves of what they rotate.
_ADJACENT = {
    "axk1",
    "axk2",
    "bailing_hybrid",
    "blt_global_transformer",
    "blt_local_decoder",
    "blt_local_encoder",
    "blt_patcher",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots3_note_text",
    "efficientloftr",
    "ernie4_5",
    "ernie4_5_moe",
    "ernie4_5_vl_moe_text",
    "glm",
    "glm4",
    "glm4_moe_lite",
    "glm4v_text",
    "glm_moe_dsa",
    "glm_ocr_text",
    "gptj",
    "helium",
    "hy_v4_vl_text",
    "inkling2_vision",
    "lightglue",
    "llama4_text",
    "llama4_vision_model",
    "longcat_flash",
    "mistral4",
    "mistral_large4_text",
    "moonshine",
    "moonshine_streaming",
    "openai_privacy_filter",
    "pe_audio_encoder",
    "roformer",
    "sam3_vit_model",
    "sarvam_mla",
    "youtu",
}
# Types whose config has no parameters of the rotation.
_WITHOUT_CONFIG = {"codegen", "deepseek_v4", "dinov3_vit", "gptj", "lightglue", "roformer", "sapiens2"}
# Types some of whose layers or models rotate: what decides.
_BY_LAYER: dict[str, Callable[[AttentionLayer], bool]] = {
    **dict.fromkeys(("cohere2", "flint"), lambda layer: value_of(layer.module, "sliding_window") is not None),
    "cohere2_moe": lambda layer: layer.module.sliding_window is not None or bool(layer.module.force_rope),
    **dict.fromkeys(("afmoe", "lara_mini"), _is_sliding),
    **dict.fromkeys(
        ("exaone4", "exaone_moe", "exaone4_5_text", "kolibri1"),
        lambda layer: layer.module.sliding_window is None or bool(layer.module.is_sliding),
    ),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa", "muse_glimmer_text", "muse_spark_text"),
        lambda layer: bool(spoken_by(layer.config).layer_rope_theta[layer.module.layer_idx]),
    ),
    "falcon": lambda layer: not spoken_by(layer.config).alibi,
    "zamba2": lambda layer: bool(spoken_by(layer.config).use_mem_rope),
    "clvp_encoder": lambda layer: bool(spoken_by(layer.config).use_rotary_embedding),
    **dict.fromkeys(("moshi", "kyutai_speech_to_text"), lambda layer: layer.module.rotary_emb is not None),
}
# Types whose config tells the width in a way of its own.
_WIDTHS: dict[str, Callable[[AttentionLayer], _Turned]] = {
    # Three axes of equal width, in whole pairs.
    "minimax_m3_vl_vision": lambda layer: _Turned(3 * 2 * (layer.heads.head_dim // 3 // 2)),
    "efficientloftr": lambda layer: _Turned(layer.heads.head_dim),  # whose factor counts channels of two axes
    "deepseek_v4": _last("qk_rope_head_dim"),
    **dict.fromkeys(("codegen", "gptj"), _first("rotary_dim")),
    # What the forward makes of this config's width, which a head may fall short of.
    "clvp_encoder": lambda layer: _Turned(
        max(spoken_by(layer.config).projection_dim // (2 * layer.heads.num_attention_heads), 32)
    ),
}
# Types that turn so many parts of a head each for itself: one an axis of an image.
_PARTS: dict[str, int] = {"gemma4_vision": 2}
# Model types, or classes of modules in models of several, of which it is not known, and why.
_UNSEEN: dict[str, str] = {
    **dict.fromkeys(
        (
            "Apertus1p5VisionTokenizerAttnBlock",
            "ChameleonVQVAEEncoderAttnBlock",
            "Dots3NoteAudioAttention",
            "EdgeTamVideoPerceiverAttention",
            "EdgeTamVideoRoPECrossAttention",
            "EdgeTamVideoRoPESelfAttention",
            "EvollaSequenceAlignerCrossAttention",
            "EvollaSequenceCompressorAttention",
            "IdeficsAttention",
            "NeuCodecAttention",
            "PPDocLayoutV2ReadingOrderSelfAttention",
            "PocketTTSAudioTokenizerAttention",
            "Sam2VideoRoPEAttention",
            "Sam3TrackerVideoRoPEAttention",
            "SeamlessM4TConformerSelfAttention",
            "T5Gemma2MergedAttention",
            "Xcodec2Attention",
            "blt_local_decoder",
            "mimi_decoder",
            "muse_glimmer_assistant",
            "qwen2_5_omni_talker",
            "qwen3_omni_moe_talker_code_predictor",
            "wav2vec2-bert",
        ),
        "the tests could not run its forward pass",
    ),
    "qwen2_5_omni_dit": "its forward rotates the first head alone",
    "vjepa2": "its forward turns the two channels of a pair by different angles, which is no rotation",
}
