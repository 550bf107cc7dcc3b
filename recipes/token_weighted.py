"""A `Trainer` whose losses are means over predicted tokens: of a whole optimizer step, and of the whole held-out set.

Shape legend: `B` sequences of a batch, `N` tokens of a sequence, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from arguments import RecipeError, check_one_gpu
from examples import IGNORED, BlockDataset, BlockSampler, without_fillers
from fingerprints import FingerprintedTrainer
from held_out_loading import WholeHeldOutTrainer
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput


__all__ = ["TokenMeanLoss", "TokenWeightedTrainer", "logits_of"]


def _aligned(labels: torch.Tensor, offset: int) -> torch.Tensor:
    """Labels `(B, N)` beside the logits that predict them."""
    return functional.pad(labels[:, offset:], (0, offset), value=IGNORED)


def logits_of(outputs: Any) -> torch.Tensor:
    """Logits, `(B, N, V)` or `(B, C)`, of a model's output, which was called without labels."""
    return outputs["logits"] if isinstance(outputs, dict) else outputs[0]


class TokenMeanLoss:
    """
    Cross-entropy over the predicted tokens of an optimizer step, for `Trainer(compute_loss_func=...)`.

    `BertForMaskedLM`, `RobertaForMaskedLM` and others take keyword arguments, from which `Trainer` concludes that they
    normalise by `num_items_in_batch`, which they do not: what it logs and back-propagates is then too large by
    accumulation steps times processes (Transformers 5.24). Here the sum over this batch is divided by the number of
    tokens predicted in the whole step, of all accumulated batches and, with `average_tokens_across_devices` (the
    default), of all processes. `Trainer` multiplies by the number of processes afterwards, and DistributedDataParallel
    divides by it when it averages gradients: what is left is the mean over tokens.

    Args:
        label_smoothing (`float`, *optional*, defaults to 0.0):
            As `TrainingArguments.label_smoothing_factor`, which `Trainer` leaves to a loss function that it is given.
        offset (`int`, *optional*, defaults to 0):
            How many places before its label a prediction stands: 0 for masked tokens, 1 for next tokens.
    """

    def __init__(self, label_smoothing: float = 0.0, offset: int = 0) -> None:
        self.label_smoothing = label_smoothing
        self.offset = offset

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """
        Computes the share of this batch in the loss of its optimizer step.

        Args:
            outputs (`ModelOutput` or `tuple`):
                Output of the model, with logits `(B, N, V)`.
            labels (`torch.Tensor`):
                Token ids `(B, N)`, -100 where nothing is predicted.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*):
                Tokens predicted in the whole step. Without it: those of this batch.

        Returns:
            `torch.Tensor`: a scalar, in nats.
        """
        logits = logits_of(outputs).float()
        labels = _aligned(labels.to(logits.device), self.offset)
        total = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(count, device=logits.device)
        # A step in which no token was drawn (one short sequence) has loss 0, not 0/0.
        return total / count.clamp(min=1)


def _sampler(data: BlockDataset, arguments: TrainingArguments) -> BlockSampler:
    strategy = arguments.train_sampling_strategy
    if strategy not in ("random", "sequential"):
        raise RecipeError(
            f"train_sampling_strategy={strategy!r}: blocks are of one length; choose 'random' or 'sequential'."
        )
    at_once = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    dropped = at_once if arguments.dataloader_drop_last else 1
    # One process takes a smaller last batch as it is.
    multiple = at_once if arguments.world_size > 1 else 1
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    sampler = BlockSampler(data, seed, multiple, dropped, strategy == "random")
    if len(sampler) == 0:
        raise RecipeError(
            f"dataloader_drop_last leaves nothing: {len(data)} training sequences are fewer than the {at_once} of one "
            "step."
        )
    return sampler


class TokenWeightedTrainer(WholeHeldOutTrainer, FingerprintedTrainer):
    """
    `Trainer` with the losses of this module; takes the arguments of `Trainer` by keyword, but `compute_loss_func`.

    `Trainer` averages the losses of held-out batches, so that its `eval_loss` varies with batch size and number of
    processes. Here it is the sum over all predicted tokens divided by their number; sequences that fill up the last
    batch of several processes count once. So they do in training: the last step of an epoch over a [`BlockDataset`]
    takes what is left.

    Args:
        offset (`int`, *optional*, defaults to 0):
            See [`TokenMeanLoss`].

    Raises:
        RecipeError: if one process holds several GPUs (`DataParallel`), for an order that blocks of one length have
            no use for, or if `dataloader_drop_last` leaves nothing.
    """

    # Read by `QKScoreCallback(gradients=...)`: one process may compute the loss without the others.
    measures_alone = True

    def __init__(self, *, offset: int = 0, **kwargs: Any) -> None:
        training_arguments = kwargs["args"]
        check_one_gpu(training_arguments)
        loss = TokenMeanLoss(training_arguments.label_smoothing_factor, offset)
        super().__init__(compute_loss_func=loss, **kwargs)
        self.offset = offset
        self._reset_sums()
        self._places = (
            _sampler(self.train_dataset, self.args) if isinstance(self.train_dataset, BlockDataset) else None
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler | None:
        return self._places if self._places is not None else super()._get_train_sampler(train_dataset)

    def fingerprinted(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        The rows of a batch that the fingerprint is of.

        Args:
            batch (`dict`):
                `input_ids` and `labels`, each `(B, N)`.

        Returns:
            `dict`: those that do not fill up a step.
        """
        return without_fillers(batch)

    def _reset_sums(self) -> None:
        self._held_out_nats = 0.0
        self._held_out_tokens = 0

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """
        Evaluates as `Trainer` does, with the token-weighted loss in the place of the mean over batches.

        Args:
            dataloader (`DataLoader`):
                Batches with labels.
            description (`str`):
                For the log.
            prediction_loss_only (`bool`, *optional*):
                See `Trainer`.
            ignore_keys (`list[str]`, *optional*):
                See `Trainer`.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`):
                Prefix of the metrics.

        Returns:
            `EvalLoopOutput`: its metrics have `eval_loss` (nats a token) and `eval_predicted_tokens`.

        Raises:
            RecipeError: if no token of the held-out set is predicted.
        """
        self._reset_sums()
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._held_out_tokens == 0:
            raise RecipeError("no held-out token is masked: give more held-out text, or a higher --mlm_probability.")
        assert output.metrics is not None
        output.metrics[f"{metric_key_prefix}_loss"] = self._held_out_nats / self._held_out_tokens
        output.metrics[f"{metric_key_prefix}_predicted_tokens"] = self._held_out_tokens
        return output

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """
        Predicts one batch and adds its loss to the sums over the held-out set.

        Args:
            model (`torch.nn.Module`):
                The model.
            inputs (`dict`):
                `input_ids` and `labels`, each `(B, N)`.
            prediction_loss_only (`bool`):
                Whether logits and labels are left out of what is returned.
            ignore_keys (`list[str]`, *optional*):
                See `Trainer`.

        Returns:
            `tuple`: loss, logits and labels, as `Trainer` returns them.
        """
        step: tuple[Any, Any, Any] = super().prediction_step(model, inputs, False, ignore_keys)
        loss, logits, labels = step
        scores = logits[0] if isinstance(logits, tuple) else logits
        targets = _aligned(labels.to(scores.device), self.offset)
        nats = functional.cross_entropy(
            scores.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
        ).sum(dim=1)
        counts = (targets != IGNORED).sum(dim=1)
        # One row a sequence: only so can the repeated sequences of the last batch be told from real ones.
        nats, counts = self.gather_function((nats, counts))
        self._held_out_nats += nats.double().sum().item()
        self._held_out_tokens += int(counts.sum())
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)
