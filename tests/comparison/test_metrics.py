"""Held-out accuracy and other metrics beside the loss: reported with intervals, and no part of the test."""

import io
import json

import numpy as np
import pandas as pd
import pytest

from hf_symqk._held_out import held_out_metric
from hf_symqk._rendering import Format, render
from hf_symqk.comparison import compare_runs
from hf_symqk.comparison.documents import to_document
from hf_symqk.comparison.tables import make_tables
from hf_symqk.comparison.writing import write_comparison

from .making import falling, record, state, write_run


PLAIN = {"accuracy": [0.90, 0.92, 0.91, 0.90, 0.93, 0.92], "f1": [0.80] * 6}
TREATED = {"accuracy": [0.92, 0.94, 0.93, 0.92, 0.94, 0.95], "f1": [0.79, 0.81] * 3}
DIFFERENCES = [0.02, 0.02, 0.02, 0.02, 0.01, 0.03]


def write(folder, arm, qk_init, values, end, **more):
    """Runs of six seeds; what an evaluation logs besides measures of the model stands among them."""
    for seed in range(6):
        last = {f"eval_{name}": values[name][seed] for name in values}
        last |= {"eval_examples": 359, "eval_majority_accuracy": 0.117, "eval_samples_per_second": 7.0, **more}
        early = {f"eval_{name}": 0.1 for name in values}
        logged = state(falling(end), {100: 4.5, 200: end + seed / 100}, metrics={100: early, 200: last})
        write_run(folder / f"{arm}--seed{seed}", logged, record(qk_init, seed, metrics={}))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "runs", "none", None, PLAIN, 3.0)
    write(tmp_path / "runs", "symmetric", {"scheme": "symmetric"}, TREATED, 3.0)
    return tmp_path / "runs"


def test_metrics_are_paired_by_seed(folder):
    """The last values logged, their intervals and the paired differences; nothing that is no measure of the model."""
    comparison = compare_runs([folder])
    plain, treated = comparison.arms
    assert set(plain.metrics) == set(treated.metrics) == {"accuracy", "f1"}
    assert plain.metrics["accuracy"].values == pytest.approx(PLAIN["accuracy"])
    low, high = plain.metrics["accuracy"].interval
    assert low < np.mean(PLAIN["accuracy"]) < high
    (contrast,) = comparison.contrasts
    accuracy = contrast.metrics["accuracy"]
    assert accuracy.difference.values == pytest.approx(DIFFERENCES)
    assert accuracy.difference.low > 0
    assert accuracy.p == 2**-5  # six of one sign
    assert contrast.metrics["f1"].p == 1.0


def test_the_loss_alone_is_tested(folder):
    """Six seeds agree in accuracy, but the losses are equal: the verdict is on the loss, whose p is corrected for no
    metric, and the report says which outcome is which."""
    (contrast,) = (comparison := compare_runs([folder])).contrasts
    assert not any("unigram" in line for line in comparison.notes), "accuracy says whether something was learned"
    assert contrast.tested == "held-out loss"
    assert (contrast.p, contrast.p_corrected, contrast.p_smallest) == (1.0, 1.0, 2**-5)
    assert contrast.verdict == "no evidence of a difference"
    (line,) = [line for line in comparison.notes if line.startswith("Primary outcome")]
    assert line.startswith("Primary outcome: held-out loss; verdicts are on it alone. Secondary: accuracy, f1.")
    assert "not corrected" in line


def test_tables(folder):
    """In every format: a row for each arm, or contrast, and metric; p is called uncorrected where it stands."""
    tables = make_tables(compare_runs([folder]))
    assert list(tables) == ["final_loss", "differences", "metrics", "metric_differences", "speed_up", "published"]
    text = render(tables["metrics"], Format.MARKDOWN)
    assert "| none | 0.001 | 6 | accuracy | 0.913 | 0.901…0.926 |" in text
    text = render(tables["metric_differences"], Format.MARKDOWN)
    assert "| symmetric | none | 6 | accuracy | +0.020 | +0.013…+0.027 | 0.031 |" in text
    assert "p, uncorrected" in text
    assert "p, uncorrected" in render(tables["metric_differences"], Format.LATEX)
    table = pd.read_csv(io.StringIO(render(tables["metric_differences"], Format.CSV)))
    assert table["metric"].tolist() == ["accuracy", "f1"]
    assert table["difference_mean"][0] == pytest.approx(0.02, abs=1e-12)
    # The one table that `symqk compare --csv` prints has them too.
    wide = pd.read_csv(io.StringIO(render(tables["differences"], Format.CSV)))
    assert wide["held_out_accuracy_difference_mean"][0] == pytest.approx(0.02, abs=1e-12)
    assert wide["held_out_accuracy_p_uncorrected"][0] == 2**-5


def test_document_and_files(folder, tmp_path):
    """JSON has each seed's values; each table is a file."""
    comparison = compare_runs([folder])
    document = json.loads(json.dumps(to_document(comparison), allow_nan=False))
    assert document["arms"][0]["metrics"]["accuracy"]["values"] == pytest.approx(PLAIN["accuracy"])
    found = document["contrasts"][0]["metrics"]["accuracy"]
    assert found["difference"]["values"] == pytest.approx(DIFFERENCES)
    assert found["p_uncorrected"] == 2**-5
    written = {path.name for path in write_comparison(comparison, tmp_path / "out", figure=False)}
    assert {"metrics.csv", "metric_differences.csv"} <= written


def test_metric_of_some_runs_only(folder, tmp_path):
    """Left out by name, as a loss is; the others stand."""
    write(tmp_path, "independent", {"scheme": "independent"}, {"accuracy": PLAIN["accuracy"]}, 3.0)
    comparison = compare_runs([folder, *sorted(tmp_path.glob("independent*"))])
    assert {name for one in comparison.arms for name in one.metrics} == {"accuracy"}
    assert any(line.startswith("The held-out f1 is left out:") for line in comparison.notes)


def test_what_is_no_number_is_no_metric(tmp_path):
    """A Trainer of one's own may log anything, a confusion matrix too."""
    for arm, init in (("none", None), ("symmetric", {"scheme": "symmetric"})):
        write(tmp_path, arm, init, {}, 3.0, eval_confusion=[[1, 2], [3, 4]])
    comparison = compare_runs([tmp_path])
    assert all(not one.metrics for one in comparison.arms)
    assert "metrics" not in make_tables(comparison)


def test_one_seed(tmp_path):
    """No interval and no p, and nothing said of a p."""
    for arm, init in (("none", None), ("symmetric", {"scheme": "symmetric"})):
        logged = state(falling(3.0), {200: 3.0}, metrics={200: {"eval_accuracy": 0.5}})
        write_run(tmp_path / arm, logged, record(init))
    comparison = compare_runs([tmp_path])
    found = comparison.contrasts[0].metrics["accuracy"]
    assert (found.difference.interval, found.p) == (None, None)
    text = render(make_tables(comparison)["metric_differences"], Format.MARKDOWN)
    assert "uncorrected" not in text
    assert not any("not corrected" in line for line in comparison.notes)


@pytest.mark.parametrize(
    "key",
    [
        "eval_set_a_unigram_entropy",
        "eval_a_samples",
        "eval_num_tokens",
        "eval_model_preparation_time",
        "eval_mem_cpu_alloc_delta",
        "eval_a_samples_per_second",
    ],
)
def test_what_says_nothing_of_the_model_is_no_metric(key):
    """Also with the name of one of several held-out sets in front."""
    assert held_out_metric(key) is None
    assert held_out_metric("eval_set_a_accuracy") == "set_a_accuracy"
