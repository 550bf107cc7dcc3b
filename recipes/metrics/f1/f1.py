"""F1, for `evaluate.load("recipes/metrics/f1")`; computed by scikit-learn."""

from __future__ import annotations

import datasets
import evaluate
from sklearn.metrics import f1_score  # From: hf_symqk[recipes]


__all__ = ["F1"]


class F1(evaluate.Metric):
    """
    Harmonic mean of precision and recall: of class 1, or with `average="macro"` the mean over classes.

    Example:

    ```python
    >>> metric = evaluate.load("recipes/metrics/f1")
    >>> metric.compute(predictions=[1, 1, 0, 0], references=[1, 0, 1, 0])
    {'f1': 0.5}
    >>> metric.compute(predictions=[0, 1, 2, 2], references=[0, 1, 2, 1], average="macro")
    {'f1': 0.7777777777777777}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Harmonic mean of precision and recall, in [0, 1]; 0 for a class that never occurs.",
            citation="",
            inputs_description="predictions and references: class numbers. average: as in sklearn.metrics.f1_score.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(
        self, predictions: list[int], references: list[int], average: str = "binary", pos_label: int = 1
    ) -> dict[str, float]:
        score = f1_score(references, predictions, average=average, pos_label=pos_label, zero_division=0.0)
        return {"f1": float(score)}
