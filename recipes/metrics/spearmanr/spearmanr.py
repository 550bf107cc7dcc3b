"""Spearman correlation, for `evaluate.load("recipes/metrics/spearmanr")`; computed by SciPy."""

from __future__ import annotations

import datasets
import evaluate
from scipy.stats import spearmanr  # From: hf_symqk[recipes]


__all__ = ["SpearmanR"]


class SpearmanR(evaluate.Metric):
    """
    Correlation of the ranks of predictions and references in [-1, 1]; NaN where either is constant.

    Example:

    ```python
    >>> metric = evaluate.load("recipes/metrics/spearmanr")
    >>> metric.compute(predictions=[1.0, 2.0, 3.0, 4.0], references=[2.0, 4.0, 6.0, 8.0])
    {'spearmanr': 1.0}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Spearman correlation, in [-1, 1].",
            citation="",
            inputs_description="predictions and references: numbers.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"spearmanr": float(spearmanr(predictions, references)[0])}
