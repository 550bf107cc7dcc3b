"""What is not supported is an error that names the module and what it holds, in scoring and initialising alike."""

import pytest
from oracle.building import build
from transformers import AutoModel

from hf_symqk import apply_qk_init, score_model


# Model type, class that the message has to name, and names of what it holds.
NOTHING_TO_SCORE = {
    "autoformer": ("AutoformerAttention", ["q_proj", "k_proj"]),  # correlation of series
    "inkling_text": ("InklingAttention", ["q_proj", "k_proj", "k_sconv"]),  # convolved keys
    "jetmoe": ("JetMoeAttention", ["experts", "kv_proj"]),  # queries from experts
    "mamba": ("MambaMixer", ["in_proj", "x_proj"]),  # no attention at all
    "swiftformer": ("SwiftFormerEfficientAdditiveAttention", ["to_query", "to_key"]),  # additive
    "xlstm": ("xLSTMLayer", ["q", "k", "igate_preact"]),  # linear
    "yoso": ("YosoSelfAttention", ["query", "key"]),  # hashed
}


@pytest.mark.parametrize("model_type", NOTHING_TO_SCORE)
def test_nothing_to_score(model_type: str) -> None:
    """Whoever meets the error has to see at once which module is meant, and of what a layout would have to speak."""
    model = build(model_type)
    module, names = NOTHING_TO_SCORE[model_type]
    before = {name: parameter._version for name, parameter in model.named_parameters()}
    for action in (score_model, apply_qk_init, lambda one: AutoModel.from_config(one.config, qk_init="symmetric")):
        with pytest.raises(ValueError, match="No attention layer of") as caught:
            action(model)
        line = next(line for line in str(caught.value).splitlines() if module in line)
        assert all(name in line for name in names)
        assert "register_qk_layout" in str(caught.value)
    assert {name: parameter._version for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("model_type", "module", "reason"),
    [
        ("bailing_hybrid", "BailingHybridDeltaAttention", "conv1d mixes tokens"),
        ("segformer", "SegformerAttention", "sequence_reduction mixes tokens"),
    ],
)
def test_part_of_a_model(model_type: str, module: str, reason: str) -> None:
    """What can be scored is, the rest is named. An init that means all layers refuses before it writes."""
    model = build(model_type)
    scores = score_model(model)
    assert any(module in line and reason in line for line in scores.skipped)
    before = {name: parameter._version for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=module):
        apply_qk_init(model)
    assert {name: parameter._version for name, parameter in model.named_parameters()} == before
