"""The metrics of the GLUE tasks, for `evaluate.load("recipes/metrics/glue", "sst2")`.

A metric module is copied by itself into the cache of `evaluate`, so that this one cannot build on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import datasets
import evaluate
from scipy.stats import pearsonr, spearmanr  # From: hf_symqk[recipes]
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef  # From: hf_symqk[recipes]


__all__ = ["Glue"]

Score = Callable[[list[float], list[float]], float]

ACCURACY: dict[str, Score] = {"accuracy": accuracy_score}
ACCURACY_AND_F1: dict[str, Score] = {"accuracy": accuracy_score, "f1": f1_score}
# Each score takes references, then predictions; names are those of the metric `glue` on the Hub.
TASKS: dict[str, dict[str, Score]] = {
    "cola": {"matthews_correlation": matthews_corrcoef},
    "sst2": ACCURACY,
    "mrpc": ACCURACY_AND_F1,
    "stsb": {
        "pearson": lambda references, predictions: pearsonr(predictions, references)[0],
        "spearmanr": lambda references, predictions: spearmanr(predictions, references)[0],
    },
    "qqp": ACCURACY_AND_F1,
    "mnli": ACCURACY,
    "qnli": ACCURACY,
    "rte": ACCURACY,
    "wnli": ACCURACY,
}


class Glue(evaluate.Metric):
    """
    The metrics of one GLUE task; the configuration names the task.

    Example:

    ```python
    >>> metric = evaluate.load("recipes/metrics/glue", "mrpc")
    >>> metric.compute(predictions=[1, 1, 0, 1], references=[1, 0, 1, 1])
    {'accuracy': 0.5, 'f1': 0.6666666666666666}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in TASKS:
            raise KeyError(f"GLUE has no task {self.config_name!r}: choose one of {', '.join(TASKS)}.")
        kind = "float64" if self.config_name == "stsb" else "int64"
        return evaluate.MetricInfo(
            description="The metrics of the GLUE benchmark.",
            citation="",
            inputs_description="predictions and references: class numbers; for stsb, numbers.",
            features=datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {name: float(score(references, predictions)) for name, score in TASKS[self.config_name].items()}
