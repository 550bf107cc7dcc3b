import math

import pandas as pd
import pytest
import torch
from loss_run import build_model
from reporting import SCORE_TABLE, compare_scores, label_entropy, write_score_table

import hf_symqk


def test_table_of_first_and_last_scores(tmp_path):
    one, two = build_model("bert"), build_model("bert")
    hf_symqk.apply_qk_init(two, "symmetric")
    first, last = hf_symqk.score_model(one), hf_symqk.score_model(two)
    table = compare_scores(first, last)
    assert list(table["layer"]) == ["00", "01", "median"]
    assert list(table["symmetry_first"][:2]) == [layer.symmetry for layer in first.layers]
    assert list(table["symmetry_last"][:2]) == pytest.approx([1, 1], abs=1e-5)
    assert table["symmetry_first"][2] == pytest.approx(first.summary()["symmetry"]["median"])
    assert table["directionality_last"][2] == pytest.approx(last.summary()["directionality"]["median"])
    assert list(table["frobenius_norm_last"][:2]) == [layer.frobenius_norm for layer in last.layers]
    path = write_score_table(table, tmp_path)
    assert path == tmp_path / SCORE_TABLE
    pd.testing.assert_frame_equal(pd.read_csv(path, dtype={"layer": str}), table)


def test_scores_of_another_model_are_refused():
    first = hf_symqk.score_model(build_model("bert"))
    last = hf_symqk.score_model(build_model("modernbert"))
    with pytest.raises(ValueError, match="different layers"):
        compare_scores(first, last)


def test_entropy_bounds_every_predictor_without_context():
    examples = [{"labels": torch.tensor([5, -100, 5, 6])}, {"labels": torch.tensor([7, -100])}]
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert label_entropy(examples) == pytest.approx(expected)
    assert label_entropy([]) == 0.0
