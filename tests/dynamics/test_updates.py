"""Sums over batches, weights of terms and scores of updates, against dense sums of outer products."""

import math

import pytest
import torch
from test_measuring import CAUSAL_LM, MASKED_LM, TOKENS, build, relative

from hf_symqk import QKScores, directionality_score, qk_updates, symmetry_score
from hf_symqk.dynamics.outer_sums import OuterSum, Room


def batches(number: int) -> list[dict]:
    """Of different lengths and sizes."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(5, 99, (2 + n % 2, 5 + n % 3), generator=generator) for n in range(number)]
    return [{"input_ids": one, "labels": one} for one in tokens]


@pytest.fixture(scope="module")
def gpt2():
    return build("gpt2", "AutoModelForCausalLM")


@pytest.mark.parametrize("number", [2, 3, 12])
def test_sums_over_batches_are_exact(gpt2, number):
    """
    Few batches are kept as factors, many as matrices (the width is 48); either way the sum of what each gives alone.
    """
    several = batches(number)
    total = qk_updates(gpt2, iter(several))
    alone = [qk_updates(gpt2, batch) for batch in several]
    assert total.num_batches == number
    assert total.loss == pytest.approx(sum(one.loss for one in alone) / number)
    tokens = sum(batch["labels"].numel() for batch in several)
    for index, layer in enumerate(total.layers):
        expected = sum(one.layers[index].head_forms.to_dense() for one in alone)
        assert relative(layer.head_forms.to_dense(), expected) < 1e-12
        assert layer.head_forms.rank == (tokens if number == 2 else 48)
        assert layer.weights is None, "tokens of several batches are not told apart"
        for side in ("position_as_context", "position_as_prediction"):
            parts = [getattr(one.layers[index], side) for one in alone]
            longest = max(part.shape[1] for part in parts)
            padded = sum(torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts)
            assert torch.allclose(getattr(layer, side), padded)


def test_memory_is_bounded():
    """Never more than the matrices, whatever comes; the bound is said where it does not fit, with what it takes."""
    heads, width = 3, 10
    room = Room(limit=math.inf)
    kept = OuterSum("a layer", room)
    for _ in range(20):
        kept.add(torch.randn(2, 4, width), torch.randn(2, 4, width), torch.randn(2, heads, 4, 4))
        held = [kept.matrices] if kept.factors is None else list(kept.factors)
        assert sum(tensor.numel() * 4 for tensor in held) == room.taken["a layer"]
        assert room.taken["a layer"] <= 4 * heads * (width + 1) ** 2
    small = OuterSum("a layer", Room(limit=4 * heads * (width + 1) ** 2 - 1))
    many = torch.randn(20, 4, width), torch.randn(20, 4, width), torch.randn(20, heads, 4, 4)
    with pytest.raises(ValueError, match=r"up to 'a layer' take .* choose fewer `layers`.*`heads=False`"):
        small.add(*many)


def test_scores_are_those_of_the_matrices(gpt2):
    """Of layers and heads, from factors and from matrices alike."""
    for given in (CAUSAL_LM, batches(12)):
        updates = qk_updates(gpt2, given)
        scores = updates.scores(gamma=1.0)
        assert isinstance(scores, QKScores)
        for layer, found in zip(updates.layers, scores.layers, strict=True):
            heads = layer.head_forms.to_dense()
            whole = heads.sum(0)
            assert found.symmetry == pytest.approx(float(symmetry_score(whole)), abs=1e-9)
            assert found.directionality == pytest.approx(float(directionality_score(whole, 1.0)), abs=1e-9)
            assert found.frobenius_norm == pytest.approx(float(whole.norm()), rel=1e-9)
            assert found.head_symmetry == pytest.approx(symmetry_score(heads).tolist(), abs=1e-9)
            assert found.head_directionality == pytest.approx(directionality_score(heads, 1.0).tolist(), abs=1e-9)
            assert (found.name, found.causal, found.role) == (layer.name, True, "decoder")
        log = updates.to_log("w", heads=True)
        assert log["w/update_symmetry/layer_01_head_02"] == updates.scores().layers[1].head_symmetry[2]


def test_layers_without_heads(gpt2):
    """The layer's form alone: the same as with heads, and nothing that is not there is given."""
    for given in (CAUSAL_LM, batches(12)):
        with_heads, without = qk_updates(gpt2, given), qk_updates(gpt2, given, heads=False, layers=[1])
        (layer,) = without.layers
        assert relative(layer.form.to_dense(), with_heads.layers[1].form.to_dense()) < 1e-12
        assert without.scores().layers[0].head_symmetry == ()
        with pytest.raises(ValueError, match="ask with `heads=True`"):
            _ = layer.head_forms


def test_weights_of_terms(gpt2):
    """
    `|β_ij|` over the context of each prediction and over the predictions of each context, per head: from the matrix
    that a hook on the logits' gradient gives. The first token is context of all and predicts from itself alone, so
    that its own logits do not matter.
    """
    model = build("gpt2", "AutoModelForCausalLM")
    (layer, *_) = qk_updates(model, CAUSAL_LM).layers
    model.eval().set_attn_implementation("eager")
    probabilities, slopes = {}, {}
    module = model.transformer.h[0].attn

    def keep(module, args, output):
        probabilities["p"] = output[1]
        output[1].register_hook(lambda slope: slopes.update(p=slope))

    handle = module.register_forward_hook(keep)
    # The output of the attention function, from which values are gathered: its gradient is that of `weights @ value`.
    original = torch.nn.functional.dropout

    def dropout(hidden, *args, **kwargs):
        result = original(hidden, *args, **kwargs)
        if hidden.ndim == 4 and "d" not in slopes and result.requires_grad:
            slopes["d"] = None
            probabilities["d"] = hidden
            hidden.register_hook(lambda slope: slopes.update(d=slope))
        return result

    torch.nn.functional.dropout = dropout
    try:
        model(**CAUSAL_LM).loss.backward()
    finally:
        torch.nn.functional.dropout = original
        handle.remove()
    p, slope = probabilities["d"].detach(), slopes["d"]
    by_hand = p * (slope - (slope * p).sum(-1, keepdim=True)) * layer.scale  # the softmax's Jacobian, written out
    assert torch.allclose(layer.weights.as_context, by_hand.abs().sum(-2).transpose(0, 1), rtol=1e-6)
    assert torch.allclose(layer.weights.as_prediction, by_hand.abs().sum(-1).transpose(0, 1), rtol=1e-6)
    assert torch.allclose(layer.position_as_context, layer.weights.as_context.sum(1))
    assert torch.allclose(layer.position_as_prediction, layer.weights.as_prediction.sum(1))
    assert (layer.position_as_prediction[:, 0].abs() < 1e-12).all()
    assert (layer.position_as_context[:, 0] > 0).all()


def test_one_direction_sees_half_of_the_pairs():
    """Causal attention pairs tokens with earlier ones alone; bidirectional attention both ways round."""
    causal = build("bert", "AutoModelForCausalLM", is_decoder=True)
    both = build("bert", "AutoModelForMaskedLM")
    for offset in (1, -1):
        assert qk_updates(both, MASKED_LM, offset=offset).layers[0].form.to_dense().norm() > 0
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    backwards = sum(qk_updates(causal, batch, offset=-n).layers[0].form.to_dense() for n in range(TOKENS.shape[1]))
    whole = qk_updates(causal, batch).layers[0].form.to_dense()
    assert relative(backwards, whole) < 1e-12, "nothing is left for later tokens"


def test_cross_attention_has_two_streams():
    """Rows of the decoder's, columns of the encoder's tokens: two sums of weights of different lengths."""
    model = build("bart", "AutoModelForSeq2SeqLM")
    batch = {"input_ids": TOKENS, "labels": TOKENS[:, :5].contiguous()}
    for layer in qk_updates(model, batch, attention="cross").layers:
        assert layer.kind == "cross"
        assert layer.weights.as_prediction.shape == (3, 3, 5)
        assert layer.weights.as_context.shape == (3, 3, 7)
        assert layer.form.frobenius_norm() > 0
