"""Matthews correlation, for `evaluate.load("recipes/metrics/matthews_correlation")`; computed by scikit-learn."""

from __future__ import annotations

import datasets
import evaluate
from sklearn.metrics import matthews_corrcoef  # From: hf_symqk[recipes]


__all__ = ["MatthewsCorrelation"]


class MatthewsCorrelation(evaluate.Metric):
    """
    Correlation of predicted and true classes in [-1, 1]; 0 where all predictions are one class.

    Example:

    ```python
    >>> metric = evaluate.load("recipes/metrics/matthews_correlation")
    >>> metric.compute(predictions=[1, 1, 0, 0], references=[1, 0, 1, 0])
    {'matthews_correlation': 0.0}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Correlation of predicted and true classes, in [-1, 1].",
            citation="",
            inputs_description="predictions and references: class numbers.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
