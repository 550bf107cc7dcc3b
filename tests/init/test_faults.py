"""What once went wrong with the family of inits, or would go wrong in silence."""

import math

import pytest
import torch
from architectures import BY_NAME, VOCAB
from oracle.building import build
from transformers import AutoModel, BertConfig, BertModel

import hf_symqk
from hf_symqk import SymmetricInit, apply_qk_init, find_attention_layers, qk_updates, register_qk_init
from hf_symqk.comparison.runs import arm_name, independent_twin
from hf_symqk.init.logit_scale import logit_scale

from .family import attention_layer, dense_heads, drawn_bert


MEMBERS = [
    "symmetric",
    "indefinite",
    "negative",
    "spectrum",
    "mimetic",
    {"symmetry": 0.5},
    {"symmetry": -1, "norm": "match"},
    {"scheme": "independent", "distribution": "kaiming_uniform"},
]
CONFIG = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 8,
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize("init", MEMBERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_precision(init, dtype):
    """Built in it, and applied to a model that is in it: right as far as its digits go."""
    model = AutoModel.from_config(BertConfig(**CONFIG), dtype=dtype, qk_init=init)
    applied = apply_qk_init(BertModel(BertConfig(**CONFIG)).to(dtype), init)
    for found in (model, applied):
        assert attention_layer(found).module.key.weight.dtype is dtype
        assert all(torch.isfinite(parameter).all() for parameter in found.parameters())
        score = hf_symqk.score_model(found).layers[0].head_symmetry[0]
        expected = {"symmetric": 1, "indefinite": 1, "negative": 1}
        asked = expected.get(init) if isinstance(init, str) else init.get("symmetry")
        if asked is not None:
            assert score == pytest.approx(asked, abs=1e-4 if dtype is torch.float64 else 1e-2)


@pytest.mark.parametrize("init", MEMBERS, ids=str)
def test_default_devices_are_for_what_the_model_makes(init):
    """Under `with torch.device(...)` factories follow it; what is drawn here comes from a generator on the CPU."""
    model = drawn_bert()
    with torch.device("meta"):
        apply_qk_init(model, init)
    expected = apply_qk_init(drawn_bert(), init)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_a_form_of_norm_zero_is_refused_and_taken_back():
    """No factor brings it to another norm; the layer is named and keeps what it had."""
    with pytest.raises(ValueError, match=r"mimetic.*alpha = beta = 0 its form would be zero"):
        apply_qk_init(drawn_bert(), {"scheme": "mimetic", "options": {"alpha": 0, "beta": 0}})
    register_qk_init(name="zero", write=lambda draw: draw.key.weight.zero_())
    try:
        model, plain = drawn_bert(), drawn_bert()
        with pytest.raises(ValueError, match=r"`norm` cannot serve 'encoder.layer.0.attention.self': scheme 'zero'"):
            apply_qk_init(model, {"scheme": "zero", "norm": "match"})
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
    finally:
        hf_symqk.unregister_qk_init("zero")


def test_one_weight_cannot_be_two():
    """Q and K tied to one parameter would end symmetric whatever was asked for."""
    model = drawn_bert()
    attention = attention_layer(model).module
    attention.key.weight = attention.query.weight
    before = attention.query.weight.detach().clone()
    for init in ("negative", "spectrum", "indefinite"):
        with pytest.raises(ValueError, match="has one weight for queries and keys"):
            apply_qk_init(model, init)
    with pytest.raises(ValueError, match="has one weight for queries and keys"):
        apply_qk_init(model, {"symmetry": 0.5})
    assert torch.equal(attention.query.weight, before)
    apply_qk_init(model, "symmetric")
    assert torch.equal(attention.query.weight, before)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt_neo", "gpt2", "openai-gpt", "esm", "deberta", "deberta-v2"])
def test_what_modules_multiply_logits_by_is_what_their_forward_does(name):
    """Read off the graph of a forward pass, from logits and products of queries and keys."""
    model = (BY_NAME[name].build() if name in BY_NAME else build(name)).eval()
    tokens = torch.randint(5, min(VOCAB, 30), (2, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    updates = qk_updates(model, inputs, loss=lambda outputs, batch: outputs[0].float().square().mean())
    layers = {layer.name: layer for layer in find_attention_layers(model)}
    assert updates.layers
    for update in updates.layers:
        assert update.scale == pytest.approx(logit_scale(layers[update.name]), rel=1e-4), update.name


def test_options_have_one_form():
    """What comes back from `config.json` is what was given, also where JSON has no tuples."""
    register_qk_init(name="tabled", write=lambda draw: None, options={"table": (1, 2)})
    try:
        given = SymmetricInit("tabled", options={"table": (1, 2)})
        assert given == SymmetricInit("tabled") == SymmetricInit.from_value(given.to_dict())
        other = SymmetricInit("tabled", options={"table": (3, 4)})
        assert other == SymmetricInit.from_value(other.to_dict()) != given
    finally:
        hf_symqk.unregister_qk_init("tabled")


def test_names_of_arms_that_are_cut():
    """A cut behind a minus must not look like the end of a part."""
    arm = arm_name(
        {"scheme": "symmetric", "symmetry": [-0.5] * 20, "target": "layer", "distribution": "kaiming_uniform"}
    )
    assert independent_twin(arm) == "independent-kaiming_uniform"


@pytest.mark.parametrize("symmetry", [{0.9, 0.1}, frozenset({0.5}), "0.5"])
def test_what_has_no_order_is_no_list_of_layers(symmetry):
    with pytest.raises(ValueError, match="`symmetry` must be a number"):
        SymmetricInit(symmetry=symmetry)


def test_norms_of_the_members():
    """The table of the docstring: sizes of layer forms over that of the independent draw (D = 768, 12 heads)."""
    norms = {}
    sizes = {"hidden_size": 768, "num_attention_heads": 12}
    for name, init in {
        "drawn": "independent",
        "symmetric": "symmetric",
        "negative": "negative",
        "0.5": {"symmetry": 0.5},
        "0": {"symmetry": 0.0},
        "spectrum": "spectrum",
        "indefinite": "indefinite",
        "-1": {"symmetry": -1},
    }.items():
        norms[name] = (
            hf_symqk.score_model(apply_qk_init(drawn_bert(**sizes), init), heads=False).layers[0].frobenius_norm
        )
    ratios = {name: norm / norms["drawn"] for name, norm in norms.items()}
    expected = {
        "symmetric": 1.41,
        "negative": 1.41,
        "0.5": 1.32,
        "0": 1.21,
        "spectrum": 1.04,
        "indefinite": 1,
        "-1": 1,
    }
    for name, ratio in expected.items():
        assert ratios[name] == pytest.approx(ratio, abs=0.015), name  # ±0.005 from draw to draw
    assert math.isclose(ratios["symmetric"], math.sqrt(2), rel_tol=0.01)
    assert dense_heads(apply_qk_init(drawn_bert(), "negative")).diagonal(dim1=-2, dim2=-1).sum() < 0
