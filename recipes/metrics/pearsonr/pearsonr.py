"""Pearson correlation, for `evaluate.load("recipes/metrics/pearsonr")`; computed by SciPy."""

from __future__ import annotations

import datasets
import evaluate
from scipy.stats import pearsonr  # From: hf_symqk[recipes]


__all__ = ["PearsonR"]


class PearsonR(evaluate.Metric):
    """
    Linear correlation of predictions and references in [-1, 1]; NaN where either is constant.

    Example:

    ```python
    >>> metric = evaluate.load("recipes/metrics/pearsonr")
    >>> metric.compute(predictions=[1.0, 2.0, 3.0, 4.0], references=[2.0, 4.0, 6.0, 8.0])
    {'pearsonr': 1.0}

    ```
    """

    # Lists, the default: arrays (format="numpy") arrive in single precision.
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Pearson correlation, in [-1, 1].",
            citation="",
            inputs_description="predictions and references: numbers.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"pearsonr": float(pearsonr(predictions, references)[0])}
