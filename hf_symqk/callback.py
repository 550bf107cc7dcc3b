"""`QKScoreCallback`: W_qk scores in the Trainer's log history."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .scores import score_model


__all__ = ["QKScoreCallback"]


class QKScoreCallback(TrainerCallback):
    """
    Scores W_qk before the first step and at each logging event, and adds the values to `trainer.state.log_history`
    (and so to `trainer_state.json`): `qk/symmetry/median`, `qk/directionality/median`, `qk/symmetry/layer_00`, … (see
    [`QKScores.to_log`]). All values are Python floats.

    Args:
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.

    Examples:

    ```python
    >>> from hf_symqk import QKScoreCallback
    >>> callback = QKScoreCallback()  # Trainer(..., callbacks=[callback])

    ```
    """

    def __init__(self, gamma: float = 2.0):
        self.gamma = gamma
        self._scored_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._scored_step = None
        if state.global_step == 0:
            state.log_history.append({**self._scores(state, kwargs["model"]), "epoch": 0.0, "step": 0})

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Evaluation and the summary of the run log at a step that has been scored already.
        if state.log_history and state.global_step != self._scored_step:
            state.log_history[-1].update(self._scores(state, kwargs["model"]))

    def _scores(self, state: TrainerState, model: nn.Module) -> dict[str, float]:
        self._scored_step = state.global_step
        return score_model(model, gamma=self.gamma).to_log()
