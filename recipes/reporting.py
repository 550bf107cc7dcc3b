"""What a recipe leaves beside the model: the table of first and last scores, and figures to read the loss by.

The scores are those of W_qk (`hf_symqk.score_model`): symmetry in [-1, 1] (1 symmetric, 0 typical of independent
weights), directionality in [-1, 1] (negative: columns dominate).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_symqk import QKScores
from hf_symqk.cards import SCORES_FIGURE, write_model_card
from hf_symqk.plots import plot_history


__all__ = [
    "SCORE_TABLE",
    "FirstStepClock",
    "announce",
    "compare_scores",
    "final_evaluation",
    "label_entropy",
    "write_card",
    "write_score_table",
]

logger = logging.getLogger(__name__)

SCORE_TABLE = "qk_scores_first_last.csv"
# The norm stands beside the scores: a symmetric W_qk starts √2 above an independent one of the same scale.
SCORES = ("symmetry", "directionality", "frobenius_norm")


def announce(arguments: TrainingArguments, text: str) -> None:
    """
    Prints a line of a recipe's progress, once however many processes run.

    Args:
        arguments (`TrainingArguments`):
            Knows which process is the main one.
        text (`str`):
            The line.
    """
    if arguments.process_index == 0:
        print(text, flush=True)


class FirstStepClock(TrainerCallback):
    """Measures the seconds from the start of this process to the end of its first optimizer step."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops the clock at the first step."""
        if self.seconds is None:
            self.seconds = time.time() - psutil.Process(os.getpid()).create_time()


def label_entropy(examples: Iterable[dict[str, torch.Tensor]], ignored: int = -100) -> float:
    """
    Entropy of the tokens that are to be predicted: no predictor that ignores the context reaches a lower loss on them.

    Args:
        examples (iterable of `dict`):
            `labels` of any shape.
        ignored (`int`, *optional*, defaults to -100):
            Label of what is not predicted.

    Returns:
        `float`: nats a token; 0.0 without any.

    Example:

    ```python
    >>> round(label_entropy([{"labels": torch.tensor([3, -100, 4])}]), 4)
    0.6931

    ```
    """
    counts: Counter[int] = Counter()
    for example in examples:
        labels = example["labels"]
        counts.update(labels[labels != ignored].tolist())
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values()) if total else 0.0


def compare_scores(first: QKScores, last: QKScores) -> pd.DataFrame:
    """
    Puts the scores before and after training side by side.

    Args:
        first (`QKScores`):
            Scores before the first step.
        last (`QKScores`):
            Scores after the last step, of the same model.

    Returns:
        `pd.DataFrame`: a row a layer with columns `stack` (left out where there is one, unnamed), `layer`, and
        `…_first` and `…_last` of `symmetry`, `directionality` and `frobenius_norm`; then a row `median` for each
        stack of layers.

    Raises:
        ValueError: if the two do not describe the same layers.
    """
    names = [layer.name for layer in first.layers]
    if names != [layer.name for layer in last.layers]:
        raise ValueError("the scores before and after training are of different layers")
    rows: list[dict[str, Any]] = []
    for before, after in zip(first.layers, last.layers, strict=True):
        row: dict[str, Any] = {"stack": before.stack, "layer": f"{before.index:02d}"}
        for score in SCORES:
            row[f"{score}_first"] = float(getattr(before, score))
            row[f"{score}_last"] = float(getattr(after, score))
        rows.append(row)
    table = pd.DataFrame(rows)
    medians = table.drop(columns="layer").groupby("stack", sort=False).median().reset_index()
    medians.insert(1, "layer", "median")
    whole = pd.concat([table, medians], ignore_index=True)
    # An encoder is one stack without a name.
    return whole if whole["stack"].any() else whole.drop(columns="stack")


def write_score_table(table: pd.DataFrame, folder: str | os.PathLike[str]) -> Path:
    """
    Writes the table of [`compare_scores`].

    Args:
        table (`pd.DataFrame`):
            The table.
        folder (path):
            Output folder of the run.

    Returns:
        `Path`: the file, `qk_scores_first_last.csv`.
    """
    path = Path(folder) / SCORE_TABLE
    table.to_csv(path, index=False)
    return path


def final_evaluation(trainer: Trainer) -> dict[str, float]:
    """
    Evaluates after training, or takes the evaluation that training ended with: the masks would be the same.

    Args:
        trainer (`Trainer`):
            After `train`.

    Returns:
        `dict`: the metrics `eval_…`.
    """
    reloaded = trainer.args.load_best_model_at_end
    for entry in reversed(trainer.state.log_history):
        if entry.get("step") == trainer.state.global_step and "eval_loss" in entry and not reloaded:
            return {name: value for name, value in entry.items() if name.startswith("eval_")}
    return trainer.evaluate()


def write_card(folder: Path) -> None:
    """
    Writes the model card of a run and its figure. The run is over and saved: whatever is wrong with a picture or a
    text must not make a failure of it.

    Args:
        folder (`Path`):
            Output folder of the run.
    """
    try:
        figure = plot_history(folder)
        from matplotlib import pyplot

        figure.savefig(folder / SCORES_FIGURE)
        pyplot.close(figure)
    except ImportError as error:
        logger.info("the model card has no figure: %s", error)
    except Exception as error:
        logger.warning("the model card has no figure: %s: %s", type(error).__name__, error)
    try:
        write_model_card(folder)
    except Exception as error:
        logger.warning("no model card: %s: %s", type(error).__name__, error)
