"""The two controls: the symmetric init's singular values without its symmetry, and mimetic initialisation."""

import math

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, Architecture
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_symqk import apply_qk_init, find_attention_layers, score_model
from hf_symqk.init.logit_scale import logit_scale

from .family import attention_layer, dense_heads, drawn_bert


def test_singular_values_of_the_symmetric_init_without_its_symmetry():
    """Against dense SVD; the rotation is one of determinant 1, another in each head and under each seed."""
    symmetric, spectrum, again, other = (
        apply_qk_init(drawn_bert(seed=seed, hidden_size=96, num_attention_heads=4), scheme)
        for scheme, seed in (("symmetric", 0), ("spectrum", 0), ("spectrum", 0), ("spectrum", 1))
    )
    values = [torch.linalg.svdvals(dense_heads(model))[:, :24] for model in (symmetric, spectrum)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=0)
    assert max(map(abs, score_model(spectrum).layers[0].head_symmetry)) < 0.25  # 1/E in the mean
    rotations = []
    for model in (spectrum, again, other):
        with torch.no_grad(), attention_layer(model).tensors("query", "key") as tensors:
            w_q, w_k = (tensors[part].weight.double() for part in ("query", "key"))
            basis, *_ = torch.linalg.svd(w_q.mT, full_matrices=False)
            rotations.append(basis.mT @ w_k.mT @ torch.linalg.pinv(basis.mT @ w_q.mT))  # W_k = U R Uᵀ W_q
    eye = torch.eye(24, dtype=torch.float64)
    for rotation in rotations[0]:
        torch.testing.assert_close(rotation @ rotation.T, eye, rtol=0, atol=1e-5)
        assert torch.linalg.det(rotation).item() == pytest.approx(1, abs=1e-4)
    assert torch.equal(rotations[0], rotations[1])
    assert not torch.allclose(rotations[0], rotations[2], atol=0.1)
    assert not torch.allclose(rotations[0][0], rotations[0][1], atol=0.1)


def test_singular_values_at_every_rotary_offset():
    """Turned by the model's own rotary embedding, forms of both inits keep sharing their singular values."""
    config = LlamaConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=8, vocab_size=9, pad_token_id=0
    )
    forms = []
    for scheme in ("symmetric", "spectrum"):
        torch.manual_seed(0)
        model = apply_qk_init(LlamaModel(config), scheme)
        with torch.no_grad(), attention_layer(model).tensors("query", "key") as tensors:
            w_q, w_k = (tensors[part].weight.mT[None] for part in ("query", "key"))  # D unit inputs as tokens
            for offset in (0, 1, 7):
                cos, sin = model.rotary_emb(w_q, torch.full((1, 48), offset))
                turned, _ = apply_rotary_pos_emb(w_q, w_k, cos, sin)
                forms.append((turned[0] @ w_k[0].mT).double())
    for first, second in zip(forms[:3], forms[3:], strict=True):
        torch.testing.assert_close(
            torch.linalg.svdvals(second)[:, :16], torch.linalg.svdvals(first)[:, :16], rtol=1e-4, atol=1e-7
        )
    assert not torch.allclose(torch.linalg.svdvals(forms[1]), torch.linalg.svdvals(forms[0]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_what_modules_multiply_logits_by(architecture: Architecture):
    """1 in T5 and GPT-Neo, 1/√E elsewhere; `tests/attention/test_finding.py` holds the same to the forward passes."""
    for layer in find_attention_layers(architecture.build()):
        expected = architecture.scale or layer.heads.head_dim**-0.5
        assert logit_scale(layer) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt_neo", "gpt2", "whisper"])
def test_mimetic_product(name):
    """
    Times √E and what the module multiplies logits by, each head's form is the best approximation of rank E of
    α Z + β I with Z of std 1/√D: its singular values are the largest of such a matrix (in another draw), and its
    diagonal is positive.
    """
    model = BY_NAME[name].build(qk_init="mimetic")
    layer, forms = attention_layer(model), dense_heads(model)
    head_dim, width = layer.heads.head_dim, forms.shape[-1]
    forms = forms * math.sqrt(head_dim) * (BY_NAME[name].scale or head_dim**-0.5)
    whole = 0.7 * torch.randn(20, width, width, generator=torch.Generator().manual_seed(3)) / math.sqrt(width)
    expected = torch.linalg.svdvals(whole + 0.7 * torch.eye(width))[:, :head_dim].mean(0)
    found = torch.linalg.svdvals(forms)[:, :head_dim].mean(0)
    # Means over 3 or 4 heads of values that spread by 1/√D; sums over E of them are steadier.
    assert found.sum().item() == pytest.approx(expected.sum().item(), rel=0.05)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=0.15)
    assert torch.linalg.svdvals(forms)[:, head_dim:].max() < 1e-5
    assert forms.diagonal(dim1=-2, dim2=-1).mean() > 0.1
    with torch.no_grad(), layer.tensors("query", "key") as tensors:
        query, key = tensors["query"].weight, tensors["key"].weight
        # Halved between both: the same Gram matrix, diagonal, times the scale that the model draws K by.
        ratio = key.norm() / query.norm()
        torch.testing.assert_close(key @ key.mT, query @ query.mT * ratio**2, rtol=1e-3, atol=1e-4)
        assert ratio.item() == pytest.approx(math.sqrt(head_dim) if name == "t5" else 1, rel=0.08)


def test_mimetic_options():
    """Without Z every singular value is β; without I nothing prefers the diagonal."""
    for options, trace in (({"alpha": 0}, 0.5), ({"beta": 0}, 0)):
        init = {"scheme": "mimetic", "options": {"alpha": 0.5, "beta": 0.5} | options}
        forms = dense_heads(apply_qk_init(drawn_bert(hidden_size=96, num_attention_heads=4), init))
        if trace:
            expected = torch.full((4, 24), 0.5, dtype=torch.float64)
            torch.testing.assert_close(torch.linalg.svdvals(forms)[:, :24], expected, rtol=1e-5, atol=0)
        mean = forms.diagonal(dim1=-2, dim2=-1).sum(-1).mean().item() / 24
        assert mean == pytest.approx(trace, abs=0.15 if not trace else 1e-5)


def test_mimetic_logits_have_one_scale():
    """On inputs of one kind the logits of a model that divides by √E and of T5, which does not, spread alike."""
    spreads, inputs = {}, torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    for name in ("bert", "t5"):
        layer = attention_layer(BY_NAME[name].build(qk_init="mimetic"))
        with torch.no_grad(), layer.tensors("query", "key") as tensors:
            query, key = (inputs @ tensors[part].weight.mT for part in ("query", "key"))
        spreads[name] = (query @ key.mT).std().item() * (BY_NAME[name].scale or layer.heads.head_dim**-0.5)
    # E = 12 and 16 singular values of about 1, over √E: E itself drops out of the spread.
    assert spreads["t5"] == pytest.approx(spreads["bert"], rel=0.15)
