"""A `Trainer` that finds the weights of its own checkpoints again."""

from __future__ import annotations

from typing import Any

from arguments import RecipeError
from torch import nn
from transformers import PreTrainedModel, Trainer


__all__ = ["CheckpointLoadingTrainer"]


class CheckpointLoadingTrainer(Trainer):
    """
    `Trainer`, with checkpoints loaded by `from_pretrained` where their names of weights are not the model's.

    Transformers saves some architectures (ViT among them) under older names, which `from_pretrained` converts.
    `Trainer` does not when it resumes or loads the best model (Transformers 5.24): it warns of missing keys and goes
    on with the weights that the model had. Takes the arguments of `Trainer`.
    """

    _renamed = False

    def load_checkpoint(self, folder: str) -> None:
        """
        Puts the weights of a checkpoint into the model, to evaluate it without training.

        Args:
            folder (`str`):
                Of the checkpoint.

        Raises:
            RecipeError: where parameters are spread over processes, which only training prepares.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise RecipeError(
                f"do_train is off and resume_from_checkpoint={folder!r}: evaluate it without DeepSpeed and FSDP."
            )
        self._load_from_checkpoint(folder)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.unexpected_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._renamed = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_renamed(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._renamed = False
        super()._load_best_model()
        self._load_renamed(str(self.state.best_model_checkpoint), None)

    def _load_renamed(self, folder: str, model: nn.Module | None) -> None:
        if not self._renamed:
            return
        target = self.accelerator.unwrap_model(self.model if model is None else model)
        assert isinstance(target, PreTrainedModel)
        restored = type(target).from_pretrained(folder, dtype=target.dtype)
        # Strict: what is still missing now is an error, not a run with other weights.
        target.load_state_dict(restored.state_dict())
