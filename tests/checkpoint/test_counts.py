"""Head counts and lengths that a config has under names of its own."""

import pytest
from transformers import AutoConfig

from hf_symqk.checkpoint.counts import HeadCounts, counts_of, length_of
from hf_symqk.checkpoint.sections import section_of


@pytest.mark.parametrize(
    ("model_type", "values", "path", "expected"),
    [
        ("convbert", {"hidden_size": 768, "num_attention_heads": 12}, "encoder.layer.0.attention.self", (6, None, 64)),
        ("convbert", {"hidden_size": 96, "num_attention_heads": 1}, "encoder.layer.0.attention.self", (1, None, 48)),
        ("vjepa2", {"pred_num_attention_heads": 6}, "predictor.layer.0.attention", (6, None, None)),
        ("perceiver", {"num_cross_attention_heads": 1}, "encoder.cross_attention.attention.self", (1, None, None)),
        ("sam2_video", {"memory_attention_num_attention_heads": 2}, "memory_attention.layers.0", (2, None, None)),
        ("grounding-dino", {"encoder_attention_heads": 8}, "encoder.layers.0.fusion_layer.attn", (4, None, None)),
    ],
)
def test_counts(model_type: str, values: dict, path: str, expected: tuple) -> None:
    """By the path of the module, whatever the config says of others."""
    config = AutoConfig.for_model(model_type, **values)
    assert counts_of(config, path) == HeadCounts(*expected)
    section = section_of(config, path, {64})
    assert (section.num_attention_heads, section.num_key_value_heads, section.head_dim) == expected


def test_others_say_it_as_usual() -> None:
    """A rule holds for its own part of its own model."""
    assert counts_of(AutoConfig.for_model("vjepa2"), "encoder.layer.0.attention") is None
    assert counts_of(AutoConfig.for_model("bert"), "predictor.layer.0.attention") is None


def test_lists_shorter_than_said() -> None:
    """Mask2Former counts the prediction before any layer as one of its decoder: files are complete with one less."""
    config = AutoConfig.for_model("mask2former", decoder_layers=10)
    assert length_of(config, "model.transformer_module.decoder.layers") == 9
    assert length_of(config, "model.pixel_level_module.decoder.encoder.layers") is None


def test_a_text_backbone_is_not_an_image_backbone() -> None:
    """GroundingDINO calls both a backbone; the text's config speaks for the text's."""
    config = AutoConfig.for_model("grounding-dino", text_config={"model_type": "bert", "num_attention_heads": 6})
    assert section_of(config, "text_backbone.encoder.layer.0.attention.self").num_attention_heads == 6
