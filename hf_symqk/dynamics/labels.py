"""Whether a batch has anything to predict."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


__all__ = ["check_labels"]

_IGNORED = -100  # of every loss in Transformers


def check_labels(batch: Mapping[str, Any]) -> None:
    """
    Refuses a batch in which nothing is predicted: its update is zero, or the mean loss 0/0.

    Args:
        batch (`Mapping[str, Any]`): What a model is given.

    Raises:
        ValueError: if it has labels and all are left out of the loss.
    """
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == _IGNORED).all()):
        raise ValueError(f"All {labels.numel()} labels of the batch are {_IGNORED}: nothing is predicted.")
