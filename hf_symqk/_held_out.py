"""Which of the values that an evaluation logs say how good a model is."""

from collections.abc import Mapping
from typing import Any


__all__ = ["HELD_OUT_LOSS", "held_out_metric", "held_out_results"]

_PREFIX = "eval_"
HELD_OUT_LOSS = f"{_PREFIX}loss"

# What the recipes log of the held-out set itself: how much it is, and what needs no model.
_OF_THE_DATA = frozenset(
    {"epoch", "examples", "majority_accuracy", "predicted_tokens", "samples", "unigram_entropy", "variance"}
)
# How long it took, as `Trainer` logs it, for each of several held-out sets too.
_OF_THE_MACHINE = ("runtime", "_per_second", "_time")


def held_out_metric(key: str) -> str | None:
    """
    The name of a measure of the model, without its prefix.

    Args:
        key (`str`): A key of the log.

    Returns:
        `str` or `None`: `None` for what is no measure of the model on held-out data.

    Example:

    ```python
    >>> [held_out_metric(key) for key in ("eval_loss", "eval_accuracy", "eval_runtime", "eval_examples", "loss")]
    ['loss', 'accuracy', None, None, None]

    ```
    """
    name = key.removeprefix(_PREFIX)
    return None if name == key or name in _OF_THE_DATA or name.endswith(_OF_THE_MACHINE) else name


def held_out_results(metrics: Mapping[str, Any]) -> dict[str, float]:
    """
    How good a model is on held-out data.

    Args:
        metrics (`Mapping[str, Any]`): As `Trainer.evaluate` returns them.

    Returns:
        `dict`: Name without the prefix `eval_` to value; what is no number is left out.
    """
    return {
        name: float(value)
        for key, value in metrics.items()
        if (name := held_out_metric(key)) is not None and isinstance(value, int | float)
    }
