"""A `Trainer` that finds in its own checkpoints again what it had: the weights, and the losses not yet logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arguments import RecipeError
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


__all__ = ["CheckpointLoadingTrainer"]

_NOT_LOGGED = "losses_not_logged.json"


class CheckpointLoadingTrainer(Trainer):
    """
    `Trainer`, with checkpoints loaded by `from_pretrained` where their names of weights are not the model's.

    Transformers saves some architectures (ViT among them) under older names, which `from_pretrained` converts.
    `Trainer` does not when it resumes or loads the best model (Transformers 5.24): it warns of missing keys and goes
    on with the weights that the model had. Nor does it keep the losses since the last logged one, so that the first
    loss that a resumed run logs would be a mean of fewer steps. Takes the arguments of `Trainer`.
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        loss = self.accelerator.gather(self._tr_loss).mean().item()  # of all processes, as `Trainer` logs it
        steps = self.state.global_step - self._globalstep_last_logged
        if self.args.should_save:
            # First, as what `Trainer` writes last says that a checkpoint is whole.
            folder = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _NOT_LOGGED).write_text(json.dumps({"loss": loss, "steps": steps}) + "\n", encoding="utf-8")
        super()._save_checkpoint(model, trial)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Called once on resuming, after `Trainer` has set the sums of losses to 0 and before the first step.
        super()._load_rng_state(checkpoint)
        path = None if checkpoint is None else Path(checkpoint) / _NOT_LOGGED
        if path is not None and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self._tr_loss += kept["loss"]
            self._total_loss_scalar -= kept["loss"]  # `train_loss` is of the steps since resuming
            self._globalstep_last_logged -= kept["steps"]

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
