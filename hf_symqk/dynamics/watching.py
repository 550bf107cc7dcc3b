"""The batch that a model is being trained on, for whoever measures between two steps."""

from typing import Any

import torch
from torch import Tensor, nn


__all__ = ["BatchWatcher"]


class BatchWatcher:
    """
    Keeps hold of the keyword arguments with which a model was last called in training. The tensors are those that the
    model got, no copies.
    """

    def __init__(self) -> None:
        self.batch: dict[str, Any] | None = None
        self._handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Neither the batch nor the hook goes into copies.
        return {"batch": None, "_handle": None}

    def watch(self, model: nn.Module) -> None:
        """
        Watches a model from now on, and no other.

        Args:
            model (`torch.nn.Module`): The model itself, inside whatever wraps it.
        """
        self.stop()

        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            # Replicas of `DataParallel`, which share the hook, see parts of the batch.
            if module is model and module.training and torch.is_grad_enabled() and not args:
                self.batch = dict(kwargs)

        self._handle = model.register_forward_pre_hook(note, with_kwargs=True)

    def stop(self) -> None:
        """Ends watching; the last batch stays known."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def forget(self) -> None:
        """Ends watching, and lets go of the batch."""
        self.stop()
        self.batch = None

    def sequences(self, number: int) -> dict[str, Any] | None:
        """
        The first sequences of the last batch.

        Args:
            number (`int`): At most how many. A batch whose tensors do not all count sequences first stays whole.

        Returns:
            `dict[str, Any]`: `None` if no batch was seen.
        """
        if self.batch is None:
            return None
        counts = {value.shape[0] for value in self.batch.values() if isinstance(value, Tensor) and value.ndim}
        if len(counts) != 1:
            return dict(self.batch)
        return {
            name: value[:number] if isinstance(value, Tensor) and value.ndim else value
            for name, value in self.batch.items()
        }
