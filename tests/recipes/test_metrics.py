"""The metric modules: values against formulas, offline loading, and runs that use one cache at the same time."""

import doctest
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest


ROOT = Path(__file__).resolve().parents[2]
METRICS = ROOT / "recipes" / "metrics"
NAMES = sorted(path.name for path in METRICS.iterdir() if path.is_dir() and not path.name.startswith("_"))


def load(name, config=None):
    return evaluate.load(str(METRICS / name), config, keep_in_memory=True)


# Ten examples: 3 true positives, 2 false positives, 1 false negative, 4 true negatives.
PREDICTIONS = [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
REFERENCES = [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
ACCURACY, F1 = 7 / 10, 2 * 3 / (2 * 3 + 2 + 1)
MATTHEWS = (3 * 4 - 2 * 1) / math.sqrt((3 + 2) * (3 + 1) * (4 + 2) * (4 + 1))
# Deviations from the mean (-2, -1, 0, 1, 2) and (-2, 0, -1, 2, 1), squares summing to 10 each, products to 8.
ORDERED, SHUFFLED = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 2.0, 5.0, 4.0]
# The same order with the last far out: ranks do not change, the linear correlation does:
# deviations (-11, -9, -10, 38, -8), products to 53.
FAR = [1.0, 3.0, 2.0, 50.0, 4.0]
FAR_PEARSON = 53 / math.sqrt(10 * (11**2 + 9**2 + 10**2 + 38**2 + 8**2))


@pytest.mark.parametrize(
    ("name", "config", "pair", "expected"),
    [
        ("accuracy", None, (PREDICTIONS, REFERENCES), {"accuracy": ACCURACY}),
        ("f1", None, (PREDICTIONS, REFERENCES), {"f1": F1}),
        ("matthews_correlation", None, (PREDICTIONS, REFERENCES), {"matthews_correlation": MATTHEWS}),
        ("matthews_correlation", None, ([1] * 10, REFERENCES), {"matthews_correlation": 0.0}),
        ("pearsonr", None, (ORDERED, SHUFFLED), {"pearsonr": 0.8}),
        ("pearsonr", None, (ORDERED, FAR), {"pearsonr": FAR_PEARSON}),
        ("spearmanr", None, (ORDERED, FAR), {"spearmanr": 0.8}),
        ("glue", "cola", (PREDICTIONS, REFERENCES), {"matthews_correlation": MATTHEWS}),
        ("glue", "mrpc", (PREDICTIONS, REFERENCES), {"accuracy": ACCURACY, "f1": F1}),
        ("glue", "qqp", (PREDICTIONS, REFERENCES), {"accuracy": ACCURACY, "f1": F1}),
        ("glue", "stsb", (ORDERED, FAR), {"pearson": FAR_PEARSON, "spearmanr": 0.8}),
        *[
            ("glue", task, (PREDICTIONS, REFERENCES), {"accuracy": ACCURACY})
            for task in ("sst2", "mnli", "qnli", "rte", "wnli")
        ],
    ],
)
def test_values_by_hand(name, config, pair, expected):
    metric, (predictions, references) = load(name, config), pair
    result = metric.compute(predictions=predictions, references=references)
    assert result == pytest.approx(expected)
    assert all(type(value) is float for value in result.values())
    # Batches of arrays, as an evaluation gives them.
    for part in (slice(0, 3), slice(3, None)):
        metric.add_batch(predictions=np.array(predictions)[part], references=np.array(references)[part])
    assert metric.compute() == pytest.approx(expected)


def test_f1_of_several_classes():
    # Precision and recall of the three classes: 1 and 1/2; 1/2 and 1; 1 and 1.
    pair = {"predictions": [0, 1, 1, 2], "references": [0, 0, 1, 2]}
    expected = {"f1": (2 / 3 + 2 / 3 + 1) / 3}
    assert load("f1").compute(**pair, average="macro") == pytest.approx(expected)


def test_unknown_task():
    with pytest.raises(KeyError, match=r"no task 'sst3': choose one of cola, sst2"):
        load("glue", "sst3")


@pytest.mark.parametrize("name", NAMES)
def test_examples(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    specification = importlib.util.spec_from_file_location(name, METRICS / name / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


LOADED = """
import sys, evaluate
metric = evaluate.load("recipes/metrics/glue", "mrpc", keep_in_memory=eval(sys.argv[1]))
for _ in range(5):
    metric.add_batch(predictions=[1, 0, 1], references=[1, 1, 1])
print(metric.compute())
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", ["True", "False"])
def test_runs_that_start_at_once_share_an_empty_cache(tmp_path, in_memory):
    """Each copies the module into one cache; those not in memory also write their predictions there."""
    command = [sys.executable, "-c", LOADED, in_memory]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "text": True}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) for _ in range(2)]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        assert out.strip() == "{'accuracy': 0.6666666666666666, 'f1': 0.8}"
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize(("library", "metric"), [("sklearn", "accuracy"), ("scipy", "spearmanr")])
def test_missing_library_names_the_extra(monkeypatch, library, metric):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install hf_symqk\[recipes\]"):
        load(metric)
