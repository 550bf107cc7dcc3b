"""
Small models of every architecture that the layout table serves, shared by the tests. Head counts are chosen so that
mistakes show: E differs from D/H wherever the config allows it, and key heads are grouped wherever they can be.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel


D, LAYERS, VOCAB = 48, 3, 99


@dataclass(frozen=True)
class Architecture:
    """A config class with small values, and what the forward pass of its model takes."""

    name: str
    config_class: str
    values: dict[str, Any]
    inputs: Callable[["Architecture"], dict[str, torch.Tensor]]
    auto_class: str = "AutoModel"
    stacks: tuple[str, ...] = ("",)
    # Scale that the module's forward puts on the logits, where it is not 1/√E.
    scale: float | None = None
    values_of_parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config(self, **overrides: Any) -> PreTrainedConfig:
        return getattr(transformers, self.config_class)(**{**self.values, **self.values_of_parts, **overrides})

    def build(self, seed: int = 0, config: PreTrainedConfig | None = None, **kwargs: Any) -> PreTrainedModel:
        """A model as `from_config` makes it under the seed."""
        torch.manual_seed(seed)
        auto_class = getattr(transformers, self.auto_class)
        return auto_class.from_config(config or self.config(), **kwargs)


def _tokens(architecture: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(3, VOCAB, (2, 7), generator=generator)}


def _tokens_at_position_zero(architecture: Architecture) -> dict[str, torch.Tensor]:
    # All tokens at one position: rotary embeddings then turn queries and keys alike, and the logits are those of W_qk.
    tokens = _tokens(architecture)
    return {**tokens, "position_ids": torch.zeros_like(tokens["input_ids"])}


def _both_sides(architecture: Architecture) -> dict[str, torch.Tensor]:
    tokens = _tokens(architecture)["input_ids"]
    return {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]}


def _pixels(architecture: Architecture) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def _tokens_and_pixels(architecture: Architecture) -> dict[str, torch.Tensor]:
    return {**_tokens(architecture), **_pixels(architecture)}


def _speech(architecture: Architecture) -> dict[str, torch.Tensor]:
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": _tokens(architecture)["input_ids"]}


_BERT = {
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
}
_IMAGE = {k: v for k, v in _BERT.items() if k not in ("vocab_size", "max_position_embeddings")} | {
    "image_size": 16,
    "patch_size": 8,
}
_GROUPED = _BERT | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
_SEQ2SEQ = {
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "vocab_size": VOCAB,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_ENCODER_DECODER = ("encoder", "decoder", "decoder_cross")

ARCHITECTURES = [
    Architecture("bert", "BertConfig", _BERT, _tokens),
    Architecture("roberta", "RobertaConfig", _BERT, _tokens),
    Architecture("electra", "ElectraConfig", _BERT | {"embedding_size": 20}, _tokens),
    Architecture("albert", "AlbertConfig", _BERT | {"embedding_size": 20}, _tokens),
    Architecture(
        "distilbert",
        "DistilBertConfig",
        {"dim": D, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 40, "vocab_size": VOCAB},
        _tokens,
    ),
    Architecture("vit", "ViTConfig", _IMAGE, _pixels),
    Architecture("deit", "DeiTConfig", _IMAGE, _pixels),
    Architecture(
        "clip",
        "CLIPConfig",
        {"projection_dim": 8},
        _tokens_and_pixels,
        stacks=("text_model", "vision_model"),
        values_of_parts={
            "text_config": _BERT | {"eos_token_id": 2},
            "vision_config": _IMAGE | {"num_hidden_layers": 2, "num_attention_heads": 3},
        },
    ),
    Architecture(
        "bart", "BartConfig", _SEQ2SEQ | {"max_position_embeddings": 24}, _both_sides, stacks=_ENCODER_DECODER
    ),
    Architecture(
        "t5",
        "T5Config",
        {
            "d_model": D,
            "d_kv": 16,
            "d_ff": 40,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "vocab_size": VOCAB,
            "decoder_start_token_id": 0,
        },
        _both_sides,
        stacks=_ENCODER_DECODER,
        scale=1.0,
    ),
    Architecture(
        "whisper",
        "WhisperConfig",
        _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 24},
        _speech,
        stacks=_ENCODER_DECODER,
    ),
    Architecture(
        "opt",
        "OPTConfig",
        _BERT | {"ffn_dim": 40, "word_embed_proj_dim": D},
        _tokens,
    ),
    Architecture(
        "gpt_neo",
        "GPTNeoConfig",
        {
            "hidden_size": D,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": VOCAB,
            "max_position_embeddings": 24,
        },
        _tokens,
        scale=1.0,
    ),
    Architecture(
        "gptj",
        "GPTJConfig",
        {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 8, "vocab_size": VOCAB, "n_positions": 24},
        _tokens_at_position_zero,
    ),
    Architecture("llama", "LlamaConfig", _GROUPED, _tokens_at_position_zero),
    Architecture("mistral", "MistralConfig", _GROUPED, _tokens_at_position_zero),
    Architecture("qwen2", "Qwen2Config", _BERT | {"num_key_value_heads": 2}, _tokens_at_position_zero),
    Architecture("qwen3", "Qwen3Config", _GROUPED, _tokens_at_position_zero),
    Architecture("gpt2", "GPT2Config", {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB}, _tokens),
    Architecture(
        "gpt2_with_cross_attention",
        "GPT2Config",
        {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "add_cross_attention": True},
        lambda architecture: {
            **_tokens(architecture),
            "encoder_hidden_states": torch.randn(2, 6, D, generator=torch.Generator().manual_seed(2)),
        },
        stacks=("", "cross"),
    ),
    Architecture(
        "bert_with_cross_attention",
        "BertConfig",
        _BERT | {"is_decoder": True, "add_cross_attention": True},
        lambda architecture: {
            **_tokens(architecture),
            "encoder_hidden_states": torch.randn(2, 6, D, generator=torch.Generator().manual_seed(2)),
        },
        stacks=("", "cross"),
    ),
    Architecture("modernbert", "ModernBertConfig", _BERT | {"pad_token_id": 0}, _tokens_at_position_zero),
    Architecture(
        "phi3",
        "Phi3Config",
        {k: v for k, v in _GROUPED.items() if k != "head_dim"} | {"pad_token_id": 0},
        _tokens_at_position_zero,
    ),
    Architecture("gpt_neox", "GPTNeoXConfig", _BERT, _tokens_at_position_zero),
    Architecture(
        "bloom", "BloomConfig", {"hidden_size": D, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB}, _tokens
    ),
]
# Schemes whose attention is not two plain projections, or whose forward pass does not return its attention: the oracle
# (`tests/oracle`) proves them.
_LATENT = {k: v for k, v in _GROUPED.items() if k not in ("head_dim", "num_key_value_heads")} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": LAYERS,  # no experts: their routers save buffers beside the parameters
}
_FALCON = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB}
_BIGCODE = {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 24}
_SIGLIP = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
_DETR = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "num_queries": 6,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
}
IRREGULAR = [
    Architecture("falcon_one_key_head", "FalconConfig", _FALCON, _tokens_at_position_zero),
    Architecture("falcon_even", "FalconConfig", _FALCON | {"multi_query": False}, _tokens_at_position_zero),
    Architecture(
        "falcon_grouped",
        "FalconConfig",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        _tokens_at_position_zero,
    ),
    Architecture("gpt_bigcode_one_key_head", "GPTBigCodeConfig", _BIGCODE, _tokens),
    Architecture("gpt_bigcode_even", "GPTBigCodeConfig", _BIGCODE | {"multi_query": False}, _tokens),
    Architecture(
        "codegen",
        "CodeGenConfig",
        {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCAB, "n_positions": 24},
        _tokens,
    ),
    Architecture(
        "deberta", "DebertaConfig", _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _tokens
    ),
    Architecture(
        "deberta_v2", "DebertaV2Config", _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _tokens
    ),
    Architecture(
        "mpt",
        "MptConfig",
        {"d_model": D, "n_layers": LAYERS, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 24},
        _tokens,
    ),
    Architecture("deepseek_v3", "DeepseekV3Config", _LATENT, _tokens),
    Architecture("deepseek_v2", "DeepseekV2Config", _LATENT | {"q_lora_rank": None}, _tokens),
    Architecture(
        "xlnet",
        "XLNetConfig",
        {"d_model": D, "n_layer": LAYERS, "n_head": 4, "d_inner": 40, "vocab_size": VOCAB},
        _tokens,
    ),
    Architecture(
        "siglip",
        "SiglipConfig",
        {},
        _tokens_and_pixels,
        stacks=("text_model", "vision_model", "vision_model_head_cross"),
        values_of_parts={
            "text_config": _SIGLIP | {"vocab_size": VOCAB, "max_position_embeddings": 24},
            "vision_config": _SIGLIP | {"image_size": 16, "patch_size": 8},
        },
    ),
    Architecture("timesformer", "TimesformerConfig", _IMAGE | {"num_frames": 2}, _pixels),
    Architecture(
        "qwen3_next",
        "Qwen3NextConfig",
        _GROUPED
        | {
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        _tokens,
    ),
    Architecture("persimmon", "PersimmonConfig", _BERT, _tokens_at_position_zero),
    Architecture(
        "timesfm",
        "TimesFmConfig",
        {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 40},
        _tokens,
    ),
    Architecture(
        "gemma4_vision",
        "Gemma4VisionConfig",
        _GROUPED | {"position_embedding_size": 24, "patch_size": 8},
        _pixels,
    ),
    Architecture(
        "gemma4_audio",
        "Gemma4AudioConfig",
        {
            "hidden_size": D,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [8, 8],
            "output_proj_dims": D,
        },
        _speech,
    ),
    Architecture(
        "wavtokenizer",
        "WavTokenizerConfig",
        {
            "num_filters": 4,
            "upsampling_ratios": [2, 2],
            "hidden_size": 16,
            "codebook_size": VOCAB,
            "codebook_dim": 16,
            "decoder_hidden_size": D,
            "decoder_intermediate_size": 40,
            "decoder_num_layers": 2,
            "decoder_attention_num_groups": 4,
        },
        _speech,
    ),
    Architecture(
        "conditional_detr",
        "ConditionalDetrConfig",
        _DETR | {"d_model": D},
        _pixels,
        stacks=_ENCODER_DECODER,
    ),
    Architecture("dab_detr", "DabDetrConfig", _DETR | {"hidden_size": D}, _pixels, stacks=_ENCODER_DECODER),
    Architecture(
        "axk2",
        "AXK2Config",
        {k: v for k, v in _LATENT.items() if k not in ("n_group", "topk_group", "first_k_dense_replace")}
        | {"mlp_layer_types": ["dense"] * LAYERS, "index_head_dim": 16, "index_n_heads": 2},
        _tokens,
    ),
]
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + IRREGULAR}
# The ten that the initialisation promises are tested on, one by one.
INIT_ARCHITECTURES = [
    BY_NAME[name]
    for name in ("bert", "roberta", "vit", "gpt2", "modernbert", "llama", "gpt_neox", "clip", "t5", "bart")
]

__all__ = ["ARCHITECTURES", "BY_NAME", "INIT_ARCHITECTURES", "IRREGULAR", "LAYERS", "VOCAB", "Architecture", "D"]
