"""Accuracy, for `evaluate.load("recipes/metrics/accuracy")`; computed by scikit-learn."""

from __future__ import annotations

import datasets
import evaluate
from sklearn.metrics import accuracy_score  # From: hf_symqk[recipes]


__all__ = ["Accuracy"]


class Accuracy(evaluate.Metric):
    """
    Share of predictions that equal their reference.

    Example:

    ```python
    >>> metric = evaluate.load("recipes/metrics/accuracy")
    >>> metric.compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
    {'accuracy': 0.75}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of predictions that equal their reference, in [0, 1].",
            citation="",
            inputs_description="predictions and references: class numbers.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}
