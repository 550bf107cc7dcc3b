"""Which of the values that an evaluation logs say how good a model is."""

import re
from collections.abc import Mapping
from typing import Any


__all__ = ["HELD_OUT_LOSS", "held_out_metric", "held_out_results"]

_PREFIX = "eval_"
HELD_OUT_LOSS = f"{_PREFIX}loss"

# What the recipes log of the held-out set itself: how much it is, and what needs no model.
_OF_THE_DATA = frozenset(
    {
        *("epoch", "examples", "majority_accuracy", "num_tokens", "predicted_tokens", "samples", "steps"),
        *("unigram_entropy", "variance"),
    }
)
# How long it took and how much memory, as `Trainer` logs it.
_OF_THE_MACHINE = re.compile(r"(?:.*_)?(?:runtime|per_second|time)|(?:.*_)?mem_(?:cpu|gpu)_.*|before_init_mem_.*")


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
    # Of several held-out sets, each value carries the name of its set in front.
    of_the_data = any(name == other or name.endswith(f"_{other}") for other in _OF_THE_DATA)
    return None if name == key or of_the_data or _OF_THE_MACHINE.fullmatch(name) else name


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
