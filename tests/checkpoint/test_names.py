"""Names in files against names in models: what Transformers' tables alone do not tell."""

import pytest
from transformers import AutoConfig

from hf_symqk.checkpoint.names import Place, places


def test_parts_of_different_sizes() -> None:
    """Molmo2 writes grouped keys into one tensor with the queries: each part has the rows of its heads."""
    config = AutoConfig.for_model("molmo2_text", num_attention_heads=8, num_key_value_heads=2)
    found = places(["layers.0.self_attn.att_proj.weight"], config)["layers.0.self_attn.att_proj.weight"]
    assert found == [
        Place("layers.0.self_attn.q_proj.weight", 0, 8, 12),
        Place("layers.0.self_attn.k_proj.weight", 8, 10, 12),
        Place("layers.0.self_attn.v_proj.weight", 10, 12, 12),
    ]


@pytest.mark.parametrize(("architecture", "prefix"), [("PaddleOCRVLModel", ""), ("PaddleOCRVLForX", "model.")])
def test_the_base_alone_has_no_name(architecture: str, prefix: str) -> None:
    """Tables name what a model with a head has; its base alone goes without the head's name for it."""
    config = AutoConfig.for_model("paddleocr_vl", architectures=[architecture])
    key = "visual.vision_model.encoder.layers.0.self_attn.q_proj.weight"
    assert places([key], config)[key] == [Place(prefix + key)]
