"""Metrics of the classification recipes, through `evaluate`, from the modules in `metrics/`: no network is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
from arguments import RecipeError
from transformers import EvalPrediction


__all__ = ["METRICS_FOLDER", "HeldOutMetrics", "class_metrics", "number_metrics", "task_metrics"]

METRICS_FOLDER = Path(__file__).resolve().parent / "metrics"


class HeldOutMetrics:
    """
    Computes metrics of a whole held-out set, for `Trainer(compute_metrics=...)`.

    Args:
        wanted (mapping of `str` to `dict`):
            Folder in `metrics/` to the keyword arguments of its `compute`.
        config_name (`str`, *optional*):
            Configuration of the metrics, for `glue`.
        of_classes (`bool`, *optional*, defaults to `True`):
            Whether predictions are the classes of the greatest logits, instead of the logits themselves.

    Raises:
        RecipeError: if a library that a metric needs is missing.
    """

    def __init__(
        self, wanted: Mapping[str, Mapping[str, Any]], config_name: str | None = None, of_classes: bool = True
    ) -> None:
        self.of_classes = of_classes
        self.parts: list[tuple[Any, Mapping[str, Any]]] = []
        for name, keywords in wanted.items():
            try:
                # In memory: every process of a run computes, and files of several would meet in one folder.
                metric = evaluate.load(str(METRICS_FOLDER / name), config_name, keep_in_memory=True)
            except ImportError as error:
                raise RecipeError(f'{error} From a checkout: pip install ".[recipes]".') from None
            self.parts.append((metric, keywords))

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """
        Computes the metrics.

        Args:
            prediction (`EvalPrediction`):
                Logits `(B, C)` and labels `(B,)` of the whole held-out set.

        Returns:
            `dict`: name to value.
        """
        logits = np.asarray(prediction.predictions)
        answers = logits.argmax(axis=-1) if self.of_classes else logits.squeeze(-1)
        values: dict[str, float] = {}
        for metric, keywords in self.parts:
            values.update(metric.compute(predictions=answers, references=prediction.label_ids, **keywords))
        return values


def class_metrics(classes: Sequence[str]) -> HeldOutMetrics:
    """
    Accuracy, F1 (of the second of two classes, or the mean over more) and Matthews correlation.

    Args:
        classes (sequence of `str`):
            The classes.

    Returns:
        `HeldOutMetrics`: the metrics.
    """
    average = "binary" if len(classes) == 2 else "macro"
    return HeldOutMetrics({"accuracy": {}, "f1": {"average": average}, "matthews_correlation": {}})


def number_metrics() -> HeldOutMetrics:
    """Returns Pearson's and Spearman's correlation of predicted numbers."""
    return HeldOutMetrics({"pearsonr": {}, "spearmanr": {}}, of_classes=False)


def task_metrics(task: str) -> HeldOutMetrics:
    """
    The metrics that GLUE prescribes for a task.

    Args:
        task (`str`):
            Name of the task.

    Returns:
        `HeldOutMetrics`: the metrics.
    """
    return HeldOutMetrics({"glue": {}}, task, of_classes=task != "stsb")
