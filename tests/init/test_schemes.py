"""What each scheme gives: against dense algebra, against the models' own forward passes, and what it refuses."""

import copy
import math
import re

import pytest
import torch
from architectures import BY_NAME
from torch import nn
from transformers import AutoConfig, AutoModel

from hf_symqk import SymmetricInit, apply_qk_init, score_model
from hf_symqk.attention import ChannelPairs
from hf_symqk.init.turning import balanced_signs, planes, quarter_turn

from .family import attention_layer, check_refusal, dense_heads, drawn_bert, logits


PAPER = {"hidden_size": 768, "num_attention_heads": 12}  # the sizes of BERT base: E = 64


def dense_symmetry(forms: torch.Tensor) -> list[float]:
    return ((forms * forms.mT).sum((-2, -1)) / forms.square().sum((-2, -1))).tolist()


# --- symmetry=s ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["normal", "uniform", "truncated"])
def test_each_head_meets_its_symmetry(draw):
    """To 1e-4 in fp32 whatever the draw, by the package's score and by the dense matrix."""
    for symmetry in (0.9, 0.3, 0, -0.5, -0.95):
        model = apply_qk_init(drawn_bert(draw, **PAPER), SymmetricInit(symmetry=symmetry))
        assert score_model(model).layers[0].head_symmetry == pytest.approx([symmetry] * 12, abs=1e-4)
    assert dense_symmetry(dense_heads(model)[:2]) == pytest.approx([symmetry] * 2, abs=1e-4)


def test_the_layer_meets_its_symmetry():
    """The same of the sum over heads, where heads have keys of their own and where they share them."""
    for symmetry in (0.9, 0.3, 0, -0.5, -1):
        init = SymmetricInit(symmetry=symmetry, target="layer")
        models = [apply_qk_init(drawn_bert("uniform"), init), BY_NAME["llama"].build(qk_init=init)]
        for model in models:
            assert [layer.symmetry for layer in score_model(model).layers] == pytest.approx(
                [symmetry] * len(score_model(model).layers), abs=1e-4
            )
            assert dense_symmetry(dense_heads(model).sum(0)) == pytest.approx(symmetry, abs=1e-4)


def test_how_far_the_other_level_lies_off():
    """The figures that the documentation of `target` gives, at D = 768, E = 64 and 12 heads."""
    table = SymmetricInit.__doc__.replace("\u2212", "-")
    told = re.findall(r"\n +\| (-?[\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \|(?=\n)", table)
    assert len(told) == 5
    for row in told:
        symmetry, layer_at_heads, heads_at_layer = map(float, row)
        of_heads = apply_qk_init(drawn_bert(**PAPER), SymmetricInit(symmetry=symmetry))
        assert score_model(of_heads).layers[0].symmetry == pytest.approx(layer_at_heads, abs=0.02)
        of_layer = apply_qk_init(drawn_bert(**PAPER), SymmetricInit(symmetry=symmetry, target="layer"))
        assert score_model(of_layer).layers[0].head_symmetry == pytest.approx([heads_at_layer] * 12, abs=0.02)


@pytest.mark.parametrize("member", [{"symmetry": 0.3}, {"symmetry": -0.4, "target": "layer"}, "indefinite"])
def test_keys_keep_the_norm_of_the_queries(member):
    """A is orthogonal: each channel pair of K has the norm of Q's, times σ_k/σ_q where the model draws K apart."""
    for model in (apply_qk_init(drawn_bert(**PAPER), member), BY_NAME["t5"].build(qk_init=member)):
        layer = attention_layer(model)
        with layer.tensors("query", "key") as tensors:
            ratio = (tensors["key"].weight.norm() / tensors["query"].weight.norm()).item()
            heads = tensors["key"].weight.flatten(1).norm(dim=1) / tensors["query"].weight.flatten(1).norm(dim=1)
        assert heads.tolist() == pytest.approx([ratio] * len(heads), rel=1e-5)
        # T5's K is drawn √E = 4 times wider; 2,304 weights give their spread to 2 %.
        assert ratio == pytest.approx(4 if layer.model_type == "t5" else 1, rel=0.1 if ratio > 2 else 1e-5)


def test_values_by_layer():
    """A sequence counts the layers of each stack, a mapping names stacks, and `layers` leaves the others alone."""
    encoder, decoder = [0.8, 0.1], [0.9, 0.2, -0.5]
    for symmetry in ({"encoder": encoder, "decoder": decoder}, {"encoder": encoder, "decoder": tuple(decoder)}):
        scores = score_model(BY_NAME["bart"].build(qk_init={"symmetry": symmetry})).layers
        for layer in scores:
            expected = symmetry[layer.stack][layer.index]
            assert layer.head_symmetry == pytest.approx([expected] * layer.num_heads, abs=1e-4)
    one = {"symmetry": {"encoder": 0.5}, "attention": "encoder"}
    scores = score_model(BY_NAME["bart"].build(qk_init=one)).layers
    assert [layer.head_symmetry[0] > 0.4 for layer in scores] == [layer.stack == "encoder" for layer in scores]
    some = SymmetricInit(symmetry=[0.9, 0.5, 0.7], layers=[0, 2])
    heads = [layer.head_symmetry[0] for layer in score_model(BY_NAME["bert"].build(qk_init=some)).layers]
    assert heads == pytest.approx([0.9, heads[1], 0.7], abs=1e-4)
    assert abs(heads[1]) < 0.4


@pytest.mark.parametrize(
    ("name", "qk_init", "message"),
    [
        ("bert", {"symmetry": [0.5, 0.1]}, r"gives 2 values, and stack '' has 3 attention layers \(encoder.layer.0"),
        ("bart", {"symmetry": [0.5, 0.1]}, r"gives 2 values, and stack 'decoder' has 3 attention layers"),
        ("bart", {"symmetry": {"encoder": 0.5, "text": 1}}, r"names the stack 'text'.* model has \['encoder', 'dec"),
        ("bart", {"symmetry": {"encoder": 0.5}}, r"has no value for the stack 'decoder'"),
        ("llama", {"symmetry": 0.5}, r"'layers.0.self_attn' .*6 query heads share 2 key heads.*target='layer'"),
        ("llama", "spectrum", r"'layers.0.self_attn' .*6 query heads that share 2 key heads"),
        ("llama", "mimetic", r"'layers.0.self_attn' .*6 query heads that share 2 key heads"),
        ("deepseek_v3", "indefinite", r"query weight .* is a product"),
    ],
)
def test_what_cannot_hold_is_refused_before_writing(name, qk_init, message):
    """At construction and on a finished model, whose weights and config stay as they are."""
    check_refusal(name, qk_init, message)


def test_odd_heads_have_no_pairs():
    """E = 15: neither J nor equal numbers of signs, which is found before anything is written; I and −I need none."""
    for member in ({"symmetry": 0.5}, {"symmetry": -1, "target": "layer"}, "indefinite"):
        model = drawn_bert(hidden_size=45, num_attention_heads=3, num_hidden_layers=2)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"'encoder.layer.0.attention.self' .* heads have 15 channels \(E\)"):
            apply_qk_init(model, member)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for member in ("symmetric", "negative", {"symmetry": 1.0}):
        assert score_model(apply_qk_init(model, member)).layers[0].symmetry == pytest.approx(1, abs=1e-5)


def test_grouped_keys_at_the_ends():
    """With ±1 grouped keys need no choice of level: the layer form is symmetric, or skew."""
    model = BY_NAME["llama"].build(qk_init={"symmetry": -1})
    assert [layer.symmetry for layer in score_model(model).layers] == pytest.approx([-1] * 3, abs=1e-5)


# --- signs --------------------------------------------------------------------------------------------------------


def test_indefinite_and_negative_spectra():
    """Indefinite: E/2 eigenvalues of either sign and a trace of nearly 0. Negative: W_k = −W_q, none above 0."""
    half = 32
    forms = dense_heads(apply_qk_init(drawn_bert(**PAPER), "indefinite"))
    torch.testing.assert_close(forms, forms.mT)
    values = torch.linalg.eigvalsh(forms[0])
    noise = 1e-6 * values.abs().max()
    assert ((values > noise).sum().item(), (values < -noise).sum().item()) == (half, half)
    # tr = Σ ± of E squared norms of D entries, each known to √(2/D): relative to their sum √(2/(D E)) = 0.6 %.
    assert (values.sum() / values.abs().sum()).abs().item() < 0.04
    model = apply_qk_init(drawn_bert(), "negative")
    module = attention_layer(model).module
    assert torch.equal(module.key.weight, -module.query.weight)
    assert torch.equal(module.key.bias, -module.query.bias)
    assert torch.linalg.eigvalsh(dense_heads(model)).max() < 1e-6


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (ChannelPairs((0, 1), (2, 3), ()), [1, -1, 1, -1]),
        (ChannelPairs((0, 2), (1, 3), ()), [1, 1, -1, -1]),
        (ChannelPairs((), (), (0, 1, 2, 3)), [1, -1, 1, -1]),
        (ChannelPairs((0,), (1,), (2, 3)), [1, 1, -1, -1]),
        (ChannelPairs((0,), (1,), (2, 3, 4, 5)), [1, 1, -1, -1, 1, -1]),
        (ChannelPairs((0, 1, 2), (3, 4, 5), ()), None),
        (ChannelPairs((0,), (1,), (2,)), None),
    ],
)
def test_signs_are_balanced_and_keep_pairs_together(pairs, expected):
    """As many of either, equal within a pair, alternating over the pairs; refused where that is impossible."""
    if expected is None:
        with pytest.raises(ValueError, match="two equal halves"):
            balanced_signs(pairs)
        return
    signs = balanced_signs(pairs)
    assert signs == expected
    assert sum(signs) == 0


def test_quarter_turn_is_a_skew_square_root_of_minus_one():
    """J² = −I and Jᵀ = −J, over rotary pairs and the rest."""
    pairs = planes(ChannelPairs((1, 2), (4, 5), (0, 3)))
    turn = quarter_turn(torch.eye(6), pairs)
    assert torch.equal(turn @ turn, -torch.eye(6))
    assert torch.equal(turn.T, -turn)


# --- the models' own forward passes -------------------------------------------------------------------------------

_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 8,
    "vocab_size": 99,
    "pad_token_id": 0,
}
# No rotation; halves, all channels and a part of them; neighbours, all and a part; a norm of queries and keys.
FORWARD = {
    "bert": {},
    "llama": {},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gptj": {"n_embd": 48, "n_layer": 1, "n_head": 3, "rotary_dim": 8},
    "cohere": {},
    "glm": {"head_dim": 16, "num_key_value_heads": 3},
    "modernbert": {},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 3},
}


@pytest.mark.parametrize("model_type", FORWARD)
@pytest.mark.parametrize(
    ("member", "sign"), [("symmetric", 1), ({"symmetry": -1}, -1), ("indefinite", 1), ("negative", 1)]
)
def test_logits_at_every_offset(model_type, member, sign):
    """
    With the model's own rotary positions, `q_i · k_j = ± q_j · k_i` at every pair of positions and with biases: A
    commutes with the rotation. A pairing that is not the model's fails here, at offsets other than 0.
    """
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **_SIZES | FORWARD[model_type]))
    layer = attention_layer(model)
    with torch.no_grad(), layer.tensors("query", "key", write=True) as tensors:
        for part in tensors.values():
            part.weight.normal_()  # large, so that the rotation and not the rounding decides
            if part.bias is not None:
                part.bias.normal_()
    apply_qk_init(model, member)
    tokens = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(1))
    (found,) = logits(model, input_ids=tokens)
    torch.testing.assert_close(found, sign * found.mT, rtol=0, atol=1e-5 * found.abs().max().item())
    (backwards,) = logits(model, input_ids=tokens.flip(1))
    assert not torch.allclose(backwards.flip(2, 3), found, rtol=1e-3), "the positions must matter"
    if member in ("symmetric", "negative"):
        diagonal = found.diagonal(dim1=-2, dim2=-1) * (1 if member == "symmetric" else -1)
        assert diagonal.min() > 0, "each token scores itself by ±‖q‖²"


def test_logits_of_grouped_keys():
    """Summed over the heads they are symmetric, or skew, at every offset."""
    for member, sign in (("indefinite", 1), ({"symmetry": -1}, -1)):
        model = BY_NAME["llama"].build(qk_init=member)
        (found, *_) = logits(model, input_ids=torch.arange(3, 11)[None])
        summed = found.sum(1)
        torch.testing.assert_close(summed, sign * summed.mT, rtol=0, atol=1e-5 * summed.abs().max().item())
        assert not torch.allclose(found, sign * found.mT, rtol=0.1), "heads of a group have queries of their own"


# --- the norm -----------------------------------------------------------------------------------------------------


def test_where_the_pairing_is_not_known():
    """A model whose forward pass nobody has seen may rotate anything: J and signs by pairs are refused, ±I are not."""

    class Attention(nn.Module):
        num_heads, head_dim = 2, 4

        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention()])})
    for member in ({"symmetry": 0.5}, {"symmetry": -1}, "indefinite"):
        with pytest.raises(ValueError, match=r"Scheme '\w+' cannot serve 'layers.0' .*not known which channels"):
            apply_qk_init(model, member)
    for member in ("negative", "spectrum", "mimetic", "symmetric"):
        apply_qk_init(model, member)
    assert torch.equal(model["layers"][1].k_proj.weight, model["layers"][1].q_proj.weight)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neox", "t5", "bart"])
@pytest.mark.parametrize("member", ["symmetric", {"symmetry": -0.5, "target": "layer"}, "indefinite"])
def test_matched_norm(name, member):
    """Each layer form has the norm of the form drawn, from one factor a layer for Q and K alike; scores stay."""
    init = {"scheme": member} if isinstance(member, str) else member
    plain, free, matched = (BY_NAME[name].build(qk_init=option) for option in (None, init, {**init, "norm": "match"}))
    for before, loose, after in zip(*(score_model(model).layers for model in (plain, free, matched)), strict=True):
        assert after.frobenius_norm == pytest.approx(before.frobenius_norm, rel=1e-5)
        assert after.symmetry == pytest.approx(loose.symmetry, abs=1e-5)
        assert after.frobenius_norm != pytest.approx(loose.frobenius_norm, rel=1e-3)
    with attention_layer(free).tensors("query", "key") as old, attention_layer(matched).tensors("query", "key") as new:
        factors = [(new[part].weight / old[part].weight).flatten() for part in ("query", "key")]
        torch.testing.assert_close(torch.cat(factors), factors[0][0].expand(sum(map(len, factors))), rtol=1e-5, atol=0)


def test_matched_norm_is_that_of_the_redrawn_form():
    """With `distribution` the form drawn is the redrawn one: arms of one distribution have one norm."""
    kaiming = {"distribution": "kaiming_uniform"}
    independent = BY_NAME["bert"].build(qk_init={"scheme": "independent", **kaiming})
    matched = BY_NAME["bert"].build(qk_init={"norm": "match", **kaiming})
    norms = [[layer.frobenius_norm for layer in score_model(model).layers] for model in (independent, matched)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert score_model(matched).layers[0].symmetry == pytest.approx(1, abs=1e-5)


def test_a_form_of_norm_zero_cannot_be_matched():
    """Nothing has been written when it is found."""
    model = drawn_bert(num_hidden_layers=2)
    torch.nn.init.zeros_(attention_layer(model, 1).module.key.weight)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"`norm` cannot serve 'encoder.layer.1.*key weight is all zero"):
        apply_qk_init(model, {"norm": "match"})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- biases -------------------------------------------------------------------------------------------------------


def test_biases_are_mapped_as_the_weights_are():
    """A channel of ones, whose weights are the biases, would have been mapped alike."""
    for member in ({"symmetry": 0.3, "target": "layer"}, {"symmetry": -1}, "indefinite", "negative"):
        model = drawn_bert(hidden_size=32, num_attention_heads=2)
        query, key = attention_layer(model).module.query, attention_layer(model).module.key
        with torch.no_grad():
            query.weight[:, 3] = query.bias
        apply_qk_init(model, member)
        torch.testing.assert_close(key.bias, key.weight[:, 3])
    for member in ("spectrum",):
        model = apply_qk_init(drawn_bert(), member)
        assert torch.equal(attention_layer(model).module.key.bias, attention_layer(model).module.query.bias)
    model = drawn_bert()
    before = copy.deepcopy(model.state_dict())
    apply_qk_init(model, "mimetic")
    for part in ("query", "key"):
        name = f"encoder.layer.0.attention.self.{part}.bias"
        assert torch.equal(model.state_dict()[name], before[name])


def test_half_precision():
    """Written in bf16 a score is met as far as bf16 goes."""
    for name, init in (("bert", {"symmetry": 0.3}), ("llama", {"symmetry": -0.5, "target": "layer"})):
        model = BY_NAME[name].build(qk_init=init, dtype=torch.bfloat16)
        layer = score_model(model).layers[0]
        found = layer.symmetry if name == "llama" else layer.head_symmetry[0]
        assert found == pytest.approx(init["symmetry"], abs=5e-3)
    assert math.isfinite(
        score_model(BY_NAME["bert"].build(qk_init="spectrum", dtype=torch.bfloat16)).layers[0].symmetry
    )
