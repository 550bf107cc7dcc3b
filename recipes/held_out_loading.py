"""A `Trainer` that evaluates on all that is held out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer


__all__ = ["WholeHeldOutTrainer"]


class WholeHeldOutTrainer(Trainer):
    """
    `Trainer`, with `dataloader_drop_last` for training alone: `Trainer` leaves the last held-out rows out too, and
    where they do not fill one batch, all of them. Takes the arguments of `Trainer`.
    """

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """
        Makes the dataloader of an evaluation.

        Args:
            eval_dataset (`str` or `torch.utils.data.Dataset`, *optional*):
                See `Trainer`.

        Returns:
            `DataLoader`: of all rows.
        """
        with self._nothing_dropped():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """
        Makes the dataloader of a prediction.

        Args:
            test_dataset (`torch.utils.data.Dataset`):
                See `Trainer`.

        Returns:
            `DataLoader`: of all rows.
        """
        with self._nothing_dropped():
            return super().get_test_dataloader(test_dataset)

    @contextlib.contextmanager
    def _nothing_dropped(self) -> Iterator[None]:
        dropped = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = False
        try:
            yield
        finally:
            self.args.dataloader_drop_last = dropped
