"""Spectral scores of factored forms: right against dense decompositions, and the same wherever they are shown."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import BY_NAME
from torch import Tensor
from transformers import BertModel, LlamaModel

from hf_symqk import BilinearForm, QKScores, score_checkpoint, score_model
from hf_symqk.history import ScoreHistory, read_history
from hf_symqk.scores import METRICS, SPECTRAL_METRICS


# fp64 decompositions of matrices of a few hundred rows; scores are sums of about as many terms.
TOLERANCE = 1e-9


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def numpy_scores(w: np.ndarray, rank: int) -> list[float]:
    """By the definitions, from NumPy's dense decompositions."""
    eigenvalues, singular = np.linalg.eigvals(w), np.linalg.svd(w, compute_uv=False)
    shares = singular[singular > 0] / singular.sum()
    symmetric, skew = (w + w.T) / 2, (w - w.T) / 2
    return [
        eigenvalues.real.sum() / np.abs(eigenvalues).sum(),
        np.trace(w) / (math.sqrt(rank) * np.linalg.norm(w)),
        np.linalg.norm(w) ** 2 / singular[0] ** 2,
        math.exp(-(shares * np.log(shares)).sum()),
        np.linalg.norm(symmetric) ** 2,
        np.linalg.norm(skew) ** 2,
    ]


# R below, at and above the width; W of the last is dense.
@pytest.mark.parametrize(("width", "rank"), [(60, 7), (60, 60), (20, 90), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_dense_matrix(width, rank, dtype):
    left, right = draw(3, width, rank, dtype=dtype), draw(3, width, rank, seed=1, dtype=dtype)
    right[1] = left[1]
    scores = torch.stack(BilinearForm(left, right).spectral_scores(), dim=-1)
    dense = (left.double() @ right.double().mT).numpy()
    expected = [numpy_scores(matrix, min(width, rank)) for matrix in dense]
    # |λ| of the zeros that NumPy finds beyond the rank are rounding, about 1e-8 of the others where they cluster.
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-6, atol=1e-9 * np.linalg.norm(dense) ** 2)


def test_eigenvalues_and_singular_values():
    left, right = draw(40, 6), draw(40, 6, seed=1)
    form, dense = BilinearForm(left, right), left @ right.mT
    largest = np.array(sorted(np.linalg.eigvals(dense.numpy()), key=abs, reverse=True))[:6]
    # Conjugates have one magnitude, so their order is chance.
    np.testing.assert_allclose(np.sort_complex(form.eigenvalues().numpy()), np.sort_complex(largest), atol=1e-9)
    assert (form.eigenvalues().abs().diff() <= 1e-12).all()
    singular = form.singular_values()
    assert singular.shape == (6,)
    torch.testing.assert_close(singular, torch.linalg.svdvals(dense)[:6], rtol=1e-10, atol=1e-12)
    wide = BilinearForm(left, draw(25, 6, seed=2))
    torch.testing.assert_close(
        wide.singular_values(), torch.linalg.svdvals(wide.to_dense())[:6], rtol=1e-10, atol=1e-12
    )


def test_known_matrices():
    """The identity, its negative, a rotation of the plane, and what is zero, broken or not square."""
    identity, turn = torch.eye(4), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    assert [round(float(value), 12) for value in BilinearForm(identity, identity).spectral_scores()] == [
        *(1, 1, 4, 4),
        *(4, 0),
    ]
    negative = BilinearForm(identity, -identity).spectral_scores()
    assert (float(negative.positivity), float(negative.normalized_trace)) == pytest.approx((-1, -1))
    rotation = BilinearForm(turn, torch.eye(2)).spectral_scores()
    assert [float(value) for value in rotation] == pytest.approx([0, 0, 2, 2, 0, 2], abs=1e-12)
    zero = BilinearForm(torch.zeros(5, 2), torch.ones(5, 2)).spectral_scores()
    assert [float(value) for value in zero] == [0] * 6
    broken = draw(2, 9, 3)
    broken[1, 4, 1] = torch.inf
    scores = BilinearForm(broken, draw(2, 9, 3, seed=1)).spectral_scores()
    assert all(math.isfinite(value[0]) and math.isnan(value[1]) for value in scores)
    flat = BilinearForm(draw(9, 3), draw(7, 3)).spectral_scores()
    assert [math.isnan(value) for value in flat] == [True, True, False, False, True, True]
    with pytest.raises(ValueError, match=r"spectrum needs a square matrix.*\(9, 7\)"):
        BilinearForm(draw(9, 3), draw(7, 3)).eigenvalues()


def test_small_singular_values_survive():
    """Gram matrices square them: in fp64 what is 1e-9 of the largest would be lost."""
    scale = torch.logspace(0, -9, 8, dtype=torch.float64)
    left, right = (torch.linalg.qr(draw(50, 8, seed=seed)).Q for seed in (0, 1))
    singular = BilinearForm(left * scale, right).singular_values()
    torch.testing.assert_close(singular, scale, rtol=1e-5, atol=0)


def test_eigenvalues_that_are_all_zero_have_no_sign():
    """Rows and columns of W in orthogonal spaces: what decompositions leave of its eigenvalues is rounding."""
    basis = torch.linalg.qr(draw(40, 12)).Q
    scores = BilinearForm(basis[:, :6], basis[:, 6:]).spectral_scores()
    assert float(scores.positivity) == 0
    assert float(scores.effective_rank) == pytest.approx(6)


def test_grouped_keys_count_for_every_query_head():
    left, right = draw(2, 3, 30, 4), draw(2, 1, 30, 4, seed=1)
    grouped = BilinearForm(left, right).spectral_scores()
    each = BilinearForm(left, right.expand(2, 3, 30, 4).contiguous()).spectral_scores()
    for one, other in zip(grouped, each, strict=True):
        assert one.shape == (2, 3)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    alone = BilinearForm(left[:1, :1].expand(2, 3, 30, 4), right[:1].expand(2, 3, 30, 4)).spectral_scores()
    assert all((value == value[0, 0]).all() for value in alone)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaModel(BY_NAME["llama"].config())


def test_scores_of_a_model(llama, tmp_path):
    """Layer and heads by the definition; the same from its files; only where they are asked for."""
    scores = score_model(llama, spectral=True)
    assert scores.metrics == (*METRICS, *SPECTRAL_METRICS)
    layer, attention = scores.layers[1], llama.layers[1].self_attn
    heads, groups, width = layer.num_heads, layer.num_key_value_heads, layer.head_dim
    w_q = attention.q_proj.weight.detach().double().view(heads, width, -1)
    w_k = attention.k_proj.weight.detach().double().view(groups, width, -1).repeat_interleave(heads // groups, 0)
    forms = (w_q.mT @ w_k).numpy()
    # Values cross over in fp32.
    found = [getattr(layer, metric) for metric in SPECTRAL_METRICS]
    np.testing.assert_allclose(found, numpy_scores(forms.sum(0), min(w_q.shape[2], groups * width)), rtol=1e-5)
    for head, form in enumerate(forms):
        found = [getattr(layer, f"head_{metric}")[head] for metric in SPECTRAL_METRICS]
        np.testing.assert_allclose(found, numpy_scores(form, width), rtol=1e-5)
    plain = score_model(llama)
    assert plain.metrics == METRICS
    assert plain.layers[1].positivity is None
    assert plain.layers[1].head_positivity == ()
    assert "positivity" not in plain.to_pandas()
    assert "positivity" not in plain.summary()
    assert plain.layers[1].symmetry_null == layer.symmetry_null
    assert plain.layers[1].directionality_null == layer.directionality_null
    llama.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path, spectral=True) == scores


def test_tables_and_files_hold_them(llama, tmp_path):
    scores = score_model(llama, spectral=True)
    scores.to_json(tmp_path / "scores.json")
    assert QKScores.from_json(tmp_path / "scores.json") == scores
    assert scores.to_log(heads=True)["qk/stable_rank/layer_01_head_00"] == scores.layers[1].head_stable_rank[0]
    assert scores.to_log()["qk/positivity/median"] == scores.summary()["positivity"]["median"]
    assert list(scores.to_pandas(heads=True)["effective_rank"])[:2] == list(scores.layers[0].head_effective_rank[:2])
    history = ScoreHistory(tmp_path / "qk_scores.csv", 0, spectral=True)
    history.append(5, scores)
    written = (tmp_path / "qk_scores.csv").read_text()
    rows = pd.concat([scores.to_pandas().assign(head=""), scores.to_pandas(heads=True)]).assign(step=5)
    assert written == rows.to_csv(columns=history.columns, index=False, na_rep="nan", lineterminator="\n")
    ScoreHistory(tmp_path / "qk_scores.csv", 5, spectral=True)
    assert (tmp_path / "qk_scores.csv").read_text() == written, "a resumed run leaves what was measured as it is"
    table = read_history(tmp_path / "qk_scores.csv")
    np.testing.assert_allclose(
        table.loc[table["head"].isna(), "skew_energy"], [layer.skew_energy for layer in scores.layers]
    )
    # Resumed without them, and with them again: what was not measured is missing.
    ScoreHistory(tmp_path / "qk_scores.csv", 5).append(6, score_model(llama))
    assert "positivity" not in read_history(tmp_path / "qk_scores.csv")
    history = ScoreHistory(tmp_path / "qk_scores.csv", 6, spectral=True)
    history.append(7, scores)
    history.append(8, score_model(llama, heads=False))
    table = read_history(tmp_path / "qk_scores.csv")
    assert pd.isna(table.loc[table["step"] == 8, "positivity"]).all()
    assert pd.isna(table.loc[table["step"] == 6, "positivity"]).all()
    assert table.loc[table["step"] == 7, "positivity"].notna().all()


def test_a_symmetric_start_is_positive():
    """W_q W_qᵀ is positive semi-definite: no token that attends away from its like."""
    torch.manual_seed(0)
    scores = score_model(BertModel._from_config(BY_NAME["bert"].config(), qk_init="symmetric"), spectral=True)
    for layer in scores.layers:
        assert layer.positivity == pytest.approx(1, abs=1e-6)
        assert layer.skew_energy == pytest.approx(0, abs=1e-6 * layer.symmetric_energy)


def test_a_broken_layer_does_not_stop_the_others(llama):
    torch.manual_seed(0)
    model = LlamaModel(BY_NAME["llama"].config())
    with torch.no_grad():
        model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        scores = score_model(model, spectral=True)
    assert math.isnan(scores.layers[0].positivity)
    assert math.isfinite(scores.layers[1].positivity)
    assert math.isnan(QKScores.from_dict(scores.to_dict()).layers[0].stable_rank)


def test_values_are_those_of_transformer_lens():
    """Its factored matrix holds the same factors, and decomposes them its own way."""
    lens = pytest.importorskip(
        "transformer_lens", reason="TransformerLens is installed by hand (benchmarks/README.md)"
    )
    left, right = draw(3, 64, 8), draw(3, 64, 8, seed=1)
    theirs, ours = lens.FactoredMatrix(left, right.mT), BilinearForm(left, right)
    torch.testing.assert_close(ours.singular_values(), theirs.S, rtol=1e-9, atol=1e-9)
    for mine, other in zip(ours.eigenvalues().numpy(), theirs.eigenvalues.numpy(), strict=True):
        np.testing.assert_allclose(np.sort_complex(mine), np.sort_complex(other), atol=1e-9)
    torch.testing.assert_close(
        ours.spectral_scores().positivity,
        (theirs.eigenvalues.real.sum(-1) / theirs.eigenvalues.abs().sum(-1)),
        rtol=1e-9,
        atol=1e-9,
    )
