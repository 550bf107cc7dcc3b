"""A `Trainer` for labelled examples, whose losses are means over examples: of a whole optimizer step, and of the
whole held-out set.

The order of the examples depends on nothing but the seed and the epoch. The last step of an epoch takes what is left:
`accelerate` would fill the share of each process with examples from the start of the epoch, which then count twice in
that step; here the examples that fill it carry a label that the loss leaves out.

Shape legend: `B` examples of a batch, `C` classes (1 for a number to be predicted).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from arguments import RecipeError, check_one_gpu
from examples import IGNORED, EpochCallback
from fingerprints import FingerprintedTrainer
from held_out_loading import WholeHeldOutTrainer
from token_weighted import logits_of
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput


__all__ = ["ExampleMeanLoss", "ExampleWeightedTrainer", "KeyedExamples", "KeyedSampler"]

Key = tuple[int, int]
Encoder = Callable[[dict[str, Any], Sequence[Key]], list[dict[str, Any]]]


class KeyedSampler(torch.utils.data.Sampler[Key]):
    """
    Yields `(epoch, index)` for each example in an order drawn from `(seed, epoch)`, so that a dataset knows the epoch
    in every worker. Indices from `count` on fill the last step of an epoch.

    Args:
        count (`int`):
            Examples.
        seed (`int`):
            Seed of the order.
        multiple (`int`):
            What the number of keys is a multiple of: the examples of one step.
        drop_last (`bool`, *optional*, defaults to `False`):
            Whether the examples that do not fill a step are left out of the epoch, instead of being filled up.

    Example:

    ```python
    >>> keys = list(KeyedSampler(5, seed=0, multiple=4))
    >>> len(keys), sorted(index for _, index in keys)
    (8, [0, 1, 2, 3, 4, 5, 6, 7])
    >>> len(KeyedSampler(5, seed=0, multiple=4, drop_last=True))
    4

    ```
    """

    # No method `set_epoch`: accelerate calls it through its wrappers of samplers in some of their nestings only.
    def __init__(self, count: int, seed: int, multiple: int, drop_last: bool = False) -> None:
        self.count = count
        self.seed = seed
        self.length = count // multiple * multiple if drop_last else -(-count // multiple) * multiple
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Key]:
        epoch = self.epoch
        order = np.random.default_rng([self.seed, epoch]).permutation(self.count)[: self.length]
        for index in [*order.tolist(), *range(self.count, self.length)]:
            yield epoch, index


class KeyedExamples(torch.utils.data.Dataset):
    """
    Labelled rows, encoded when they are read.

    Args:
        rows (`datasets.Dataset`):
            Rows with a column `labels`, of class numbers or of numbers to be predicted.
        encode (`Callable`):
            Takes the columns of some rows and the `(epoch, index)` of each; returns what the model is given for each.
            Whatever it draws at random, it draws from that key.

    Read by number, the epoch is 0. An index beyond the last row is a row whose label is left out of the loss.
    """

    def __init__(self, rows: datasets.Dataset, encode: Encoder) -> None:
        self.rows = rows
        self.encode = encode

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | Key) -> dict[str, torch.Tensor]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int | Key]) -> list[dict[str, torch.Tensor]]:
        """
        Reads the examples of a batch at once.

        Args:
            keys (sequence of `(epoch, index)` or of `int`):
                Which examples.

        Returns:
            `list[dict]`: what `encode` returns for each, and its `labels`.
        """
        pairs = [(0, int(key)) if isinstance(key, int | np.integer) else key for key in keys]
        places = [index % len(self) for _, index in pairs]
        columns = self.rows[places]
        examples = self.encode(columns, [(epoch, place) for (epoch, _), place in zip(pairs, places, strict=True)])
        for example, label, (_, index) in zip(examples, columns["labels"], pairs, strict=True):
            label = label if index < len(self) else type(label)(IGNORED)
            example["labels"] = torch.tensor(label)
        return examples


class ExampleMeanLoss:
    """
    Cross-entropy, or squared error where labels are floating-point numbers, over the examples of an optimizer step,
    for `Trainer(compute_loss_func=...)`.

    The loss of a sequence or image classifier in Transformers is the mean over one batch: a smaller last batch of a
    step, or a process with fewer examples, then weighs more for each example than the others. Here the sum over this
    batch is divided by the number of examples of the whole step, as in [`TokenMeanLoss`].

    Args:
        label_smoothing (`float`, *optional*, defaults to 0.0):
            As `TrainingArguments.label_smoothing_factor`; squared errors know none.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """
        Computes the share of this batch in the loss of its optimizer step.

        Args:
            outputs (`ModelOutput` or `tuple`):
                Output of the model, with logits `(B, C)`.
            labels (`torch.Tensor`):
                Class numbers or numbers `(B,)`; -100 is left out.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*):
                Examples of the whole step. Without it: those of this batch.

        Returns:
            `torch.Tensor`: a scalar; nats, or the square of the labels' unit.
        """
        logits = logits_of(outputs)
        labels = labels.to(logits.device)
        counted = labels != IGNORED
        count = torch.as_tensor(counted.sum() if num_items_in_batch is None else num_items_in_batch)
        total = example_losses(logits.float(), labels, self.label_smoothing)[counted].sum()
        return total / count.to(logits.device).clamp(min=1)


def example_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """
    Loss of each example.

    Args:
        logits (`torch.Tensor`):
            Of shape `(B, C)`.
        labels (`torch.Tensor`):
            Of shape `(B,)`: class numbers, or floating-point numbers for squared errors.
        label_smoothing (`float`, *optional*, defaults to 0.0):
            Of the cross-entropy.

    Returns:
        `torch.Tensor`: of shape `(B,)`; 0 for class -100.
    """
    if labels.is_floating_point():
        return (logits.squeeze(-1) - labels.to(logits.dtype)) ** 2
    return functional.cross_entropy(
        logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
    )


class ExampleWeightedTrainer(WholeHeldOutTrainer, FingerprintedTrainer):
    """
    `Trainer` with the losses and the order of this module; takes the arguments of `Trainer` by keyword, but
    `compute_loss_func`. `train_dataset` is [`KeyedExamples`] or a stream.

    `eval_loss` is the mean over all held-out examples, whatever the batch size and number of processes (`Trainer`
    weights a smaller last batch like the others), and `eval_examples` their number.

    Raises:
        RecipeError: if one process holds several GPUs (`DataParallel`), if `dataloader_drop_last` leaves nothing, or
            for arguments that this class does not serve.
    """

    # Read by `QKScoreCallback(gradients=...)`: one process may compute the loss without the others.
    measures_alone = True

    def __init__(self, **kwargs: Any) -> None:
        arguments = kwargs["args"]
        check_one_gpu(arguments)
        if arguments.train_sampling_strategy != "random":
            raise RecipeError(
                f"train_sampling_strategy={arguments.train_sampling_strategy!r}: the recipe's order is random, leave "
                "it out."
            )
        if arguments.batch_eval_metrics:
            raise RecipeError("batch_eval_metrics: metrics here are those of the whole held-out set, leave it out.")
        super().__init__(compute_loss_func=ExampleMeanLoss(arguments.label_smoothing_factor), **kwargs)
        self._keys: KeyedSampler | None = None
        if isinstance(self.train_dataset, KeyedExamples):
            seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
            at_once = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
            self._keys = KeyedSampler(len(self.train_dataset), seed, at_once, arguments.dataloader_drop_last)
            if len(self._keys) == 0:
                raise RecipeError(
                    f"dataloader_drop_last leaves nothing: {len(self.train_dataset)} training examples are fewer than "
                    f"the {at_once} of one step."
                )
            self.add_callback(EpochCallback(self._keys))

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        return self._keys

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """
        Evaluates as `Trainer` does, with the mean over examples in the place of the mean over batches.

        Args:
            dataloader (`DataLoader`):
                Batches with labels.
            description (`str`):
                For the log.
            prediction_loss_only (`bool`, *optional*):
                Without effect: the loss is computed from the logits.
            ignore_keys (`list[str]`, *optional*):
                See `Trainer`.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`):
                Prefix of the metrics.

        Returns:
            `EvalLoopOutput`: its metrics have `eval_loss` and `eval_examples`.
        """
        output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        logits, labels = torch.as_tensor(output.predictions), torch.as_tensor(output.label_ids)
        output.metrics[f"{metric_key_prefix}_loss"] = example_losses(logits.double(), labels).mean().item()
        output.metrics[f"{metric_key_prefix}_examples"] = len(labels)
        return output

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """
        Predicts one batch.

        Args:
            model (`torch.nn.Module`):
                The model.
            inputs (`dict`):
                What the model is given, and `labels` `(B,)`.
            prediction_loss_only (`bool`):
                See `Trainer`.
            ignore_keys (`list[str]`, *optional*):
                See `Trainer`.

        Returns:
            `tuple`: loss, logits `(B, C)` without whatever else the model returns, and labels.
        """
        loss, outputs, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return loss, logits if logits is None else logits.float(), labels
