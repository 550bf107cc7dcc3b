"""`QKScoreCallback`: W_qk scores while a Trainer trains, in its log history and in every tracker."""

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from .attention import (
    ATTENTION_KINDS,
    AttentionKind,
    AttentionLayer,
    LayerChoice,
    find_attention_layers,
    select_layers,
)
from .dynamics import LastBatch, LogitsTooLargeError, QKUpdates, check_memory, log_of_updates, sum_updates
from .history import ScoreHistory
from .model_family import model_type
from .scores import QKScores
from .scoring import ScorableLayer, join_gathering, score_layers, undefined_layers


__all__ = ["QKScoreCallback"]

logger = logging.getLogger(__name__)

_SEQUENCES = 8  # of a batch, whose updates are scored unless a number is given


def _is_training_loss(logs: Mapping[str, Any]) -> bool:
    return any(key.rpartition("/")[2] == "loss" and not key.startswith("eval") for key in logs)


class QKScoreCallback(TrainerCallback):
    """
    Scores W_qk during training. The values join the Trainer's own logging events, so they stand in
    `trainer.state.log_history` (and `trainer_state.json`) and reach every tracker of `report_to` at the right step:
    `qk/symmetry/median`, `qk/directionality/median`, `qk/symmetry/layer_00`, … (see [`QKScores.to_log`]). They are
    also written to `qk_scores.csv` in the output folder, which [`~hf_symqk.plots.plot_history`] draws.

    The run is not changed: no extra logging events but the one before the first step, nothing written to the model, no
    randomness used. What goes wrong in a measurement is logged once and training goes on. Under DDP, FSDP2 and
    DeepSpeed ZeRO-3 every rank helps to gather one layer at a time and rank 0 scores.

    Args:
        every (`int`, *optional*, defaults to 1):
            Scores at each k-th logging event of the training loss.
        log_at_start (`bool`, *optional*, defaults to `True`):
            Scores before the first step (step 0) of a run that is not resumed.
        log_at_end (`bool`, *optional*, defaults to `True`):
            Scores at the end of training, in the event that logs the run's summary.
        heads (`bool`, *optional*, defaults to `False`):
            Scores each head too: `qk/symmetry/layer_00_head_03`.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers to score, for every stack or per stack name; all by default.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`; or self-attention of one side or direction alone: `"encoder"`, `"decoder"`,
            `"bidirectional"` or `"causal"`.
        prefix (`str`, *optional*, defaults to `"qk"`):
            First part of the logged names.
        gradients (`bool` or `int`, *optional*, defaults to `False`):
            Scores the update of W_qk too (see [`qk_updates`]), as `qk/update_symmetry/median`,
            `qk/update_directionality/layer_00`, …: that of the last batch that rank 0 was trained on, of its first 8
            sequences or as many as the number says, by the weights after that step, without dropout. Not before the
            first step, which has no batch. It takes one forward and backward pass over these sequences with eager
            attention, for which the Trainer's `compute_loss` is called once more, as if they were a whole step (a mean
            is over their items alone, so that norms do not depend on batch size or accumulation). Nothing of it
            reaches the run; what the Trainer keeps of losses, in its attributes and in tensors, lists, sets and
            mappings there, is put back. A batch that has something without an entry a sequence is not cut: give at
            least its number of sequences.
            Under engines that shard there is no such pass. Among several processes rank 0 runs it alone, so only for
            a loss that waits for no other: Transformers' own, or that of a Trainer whose class says
            `measures_alone = True`; else training goes on without.
        gradients_memory_gib (`float`, *optional*, defaults to 8.0):
            What the attention logits of that pass (about `5 · S · H · N²` numbers a layer, of S sequences of N tokens
            and H heads) and the updates may take together, in GiB. Where they would take more, fewer sequences are
            measured; where one is too many, none. Either is said once, and so is running out of memory, after which
            the run measures no updates any more.
        strict (`bool`, *optional*, defaults to `False`):
            Raises what goes wrong in a measurement, after every rank has come through it.
        spectral (`bool`, *optional*, defaults to `False`):
            Scores eigenvalues and singular values too: `qk/positivity/median`, … (see
            [`BilinearForm.spectral_scores`]; two dense decompositions a layer of multi-head attention).

    Raises:
        ValueError: for options that cannot be meant; and when the Trainer is made, if the model has no known attention
            or none of the layers asked for.

    Examples:

    ```python
    >>> from transformers import Trainer
    >>> from hf_symqk import QKScoreCallback

    >>> callback = QKScoreCallback(every=2, heads=True)  # Trainer(..., callbacks=[callback])

    ```
    """

    # Read by the plugin: this callback has to add its values before trackers read the logs.
    runs_before_trackers = True

    def __init__(
        self,
        every: int = 1,
        log_at_start: bool = True,
        log_at_end: bool = True,
        heads: bool = False,
        layers: LayerChoice | None = None,
        gamma: float = 2.0,
        attention: AttentionKind = "self",
        prefix: str = "qk",
        gradients: bool | int = False,
        strict: bool = False,
        spectral: bool = False,
        gradients_memory_gib: float = 8.0,
    ):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"`every` must be a whole number of logging events, at least 1; got {every!r}.")
        if attention not in ATTENTION_KINDS:
            raise ValueError(f"`attention` must be one of {', '.join(map(repr, ATTENTION_KINDS))}, got {attention!r}.")
        if not prefix or prefix.endswith("/"):
            raise ValueError(f"`prefix` must be a name without a slash at its end, got {prefix!r}.")
        if not isinstance(gradients, int) or gradients < 0:
            raise ValueError(f"`gradients` must be True, False or a number of sequences, got {gradients!r}.")
        check_memory(gradients_memory_gib, "gradients_memory_gib")
        self.every = every
        self.log_at_start = log_at_start
        self.log_at_end = log_at_end
        self.heads = heads
        self.layers = layers
        self.gamma = gamma
        self.attention = attention
        self.prefix = prefix
        self.gradients = _SEQUENCES if gradients is True else int(gradients)
        self.gradients_memory_gib = gradients_memory_gib
        self.strict = strict
        self.spectral = spectral
        self.scores: QKScores | None = None
        self.update_scores: QKScores | None = None
        self._batch: LastBatch | None = None
        self._fitting = self.gradients  # how many sequences the memory allows, as far as is known
        self._handlers: list[weakref.ref[CallbackHandler]] = []
        self._history: ScoreHistory | None = None
        self._measured_step: int | None = None
        self._summary: dict[str, Any] | None = None
        self._is_due = self._is_after_step = False
        self._events = 0
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Handlers lead to the model and the whole Trainer, which a copy of the callback is not to carry around.
        return {**self.__dict__, "_handlers": [], "_batch": None}

    # --- events ---

    @property
    def watches_batches(self) -> bool:
        """Read by the plugin: whether this callback is shown what each training step is given."""
        return bool(self.gradients)

    def on_batch(self, trainer: Any, inputs: Mapping[str, Any], num_items: Any) -> None:
        """
        Called by the plugin before a batch is trained on.

        Args:
            trainer (`Trainer`): Who trains.
            inputs (`Mapping[str, Any]`): What the step is given.
            num_items (`torch.Tensor` or `int`, *optional*): What it divides its loss by.
        """
        if trainer.state.is_world_process_zero:
            self._guard("the batch", self._keep_batch, trainer, inputs, num_items)

    def on_added(self, handler: CallbackHandler) -> None:
        """
        Called by the plugin: the handler is what sends the values of step 0 to the other callbacks.

        Args:
            handler (`transformers.trainer_callback.CallbackHandler`): The Trainer's list of callbacks.

        Raises:
            ValueError: if another callback logs under the same prefix, or the model lacks the layers asked for.
        """
        others = [callback for callback in handler.callbacks if isinstance(callback, QKScoreCallback)]
        if any(callback is not self and callback.prefix == self.prefix for callback in others):
            handler.callbacks.remove(self)
            raise ValueError(f"There is a QKScoreCallback with prefix {self.prefix!r} already; give this one another.")
        self._handlers.append(weakref.ref(handler))
        # A wrong choice is an error now, not after an hour of training. While the Trainer is being made there is no
        # model yet; `on_init_end` comes with it.
        if (model := getattr(handler, "model", None)) is not None:
            self._chosen(model)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._chosen(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.scores = self.update_scores = self._history = self._measured_step = self._summary = None
        self._batch = None
        self._fitting = self.gradients
        self._is_due = self._is_after_step = False
        # The history of a resumed run brings its events along, so that every k-th stays every k-th.
        self._events = len({row.get("step") for row in state.log_history if _is_training_loss(row)})
        self._said.clear()
        if state.is_world_process_zero:
            path = Path(str(args.output_dir)) / f"{self.prefix.replace('/', '_')}_scores.csv"
            self._guard("the history file", self._open_history, path, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_due = self._is_after_step = False
        # Here and not in `on_train_begin`: by now every tracker has opened its run.
        if self.log_at_start and state.global_step == 0 and not self._is_scored(state):
            logs = {**self._measure(kwargs["model"], state), "epoch": 0.0}
            state.log_history.append({**logs, "step": 0})
            # On every rank, as the Trainer's own events: other callbacks may meet their peers in it.
            for handler in (known() for known in self._handlers):
                if handler is not None and handler.optimizer is kwargs.get("optimizer"):
                    handler.on_log(args, state, control, logs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._note_event(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._note_event(control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs["logs"]
        is_summary = any(key.rpartition("/")[2] == "train_runtime" for key in logs)
        # After a step, what the flow callback decided on comes first, by whatever names the Trainer (or a subclass)
        # logs the loss; a loss that a later callback asked for counts too. Logs inside a step do not.
        is_evaluation = any("eval_" in key for key in logs)
        is_event = self._is_after_step and (_is_training_loss(logs) or (self._is_due and not is_evaluation))
        if is_event:
            self._is_due = self._is_after_step = False
            self._events += 1
        is_turn = is_event and self._events % self.every == 0
        if self._is_scored(state) or not (is_turn or (is_summary and self.log_at_end)):
            return
        values = self._measure(kwargs["model"], state)
        logs.update(values)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)
        elif values:
            state.log_history.append({**values, "step": state.global_step})
        if is_summary:
            self._summary = logs

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._batch = None
        # The summary is also what `train()` returns as the run's metrics; there the scores do not belong.
        for key in [key for key in self._summary or () if key.startswith(f"{self.prefix}/")]:
            (self._summary or {}).pop(key)

    # --- measuring ---

    def _note_event(self, control: TrainerControl) -> None:
        self._is_after_step = True
        self._is_due = self._is_due or control.should_log

    def _is_scored(self, state: TrainerState) -> bool:
        if self._measured_step == state.global_step:
            return True
        key = f"{self.prefix}/symmetry/median"  # measured before the run was interrupted
        return any(key in row for row in state.log_history if row.get("step") == state.global_step)

    def _chosen(self, model: nn.Module) -> list[AttentionLayer]:
        return select_layers(find_attention_layers(model), layers=self.layers, attention=self.attention)

    def _open_history(self, path: Path, resumed_step: int) -> None:
        self._history = ScoreHistory(path, resumed_step, self.spectral)

    def _measure(self, model: nn.Module, state: TrainerState) -> dict[str, float]:
        """Scores on rank 0, while every rank gathers every layer; the values to log, empty on other ranks."""
        errors: list[Exception] = []

        def on_error(layer: ScorableLayer, error: Exception) -> None:
            errors.append(error)
            self._say(f"{layer.name}: {type(error).__name__}: {error}")

        # Set on every rank, whatever comes: ranks must agree on what has been measured, or one would gather alone.
        self._measured_step = state.global_step
        scores = None
        try:
            chosen = self._chosen(model)
            if state.is_world_process_zero:
                results = score_layers(
                    chosen, gamma=self.gamma, heads=self.heads, spectral=self.spectral, on_error=on_error
                )
                scores = QKScores(results, self.gamma, model_type(model))
            else:
                join_gathering(chosen, on_error=on_error)
        except Exception as error:
            errors.append(error)
            self._say(f"{type(error).__name__}: {error}")
        if errors and self.strict:
            raise errors[0]
        if scores is None:
            return {}
        self.scores = scores
        undefined = undefined_layers(scores)
        if undefined and not errors:
            self._say(undefined, once="not finite")
        if (history := self._history) is not None:
            self._guard("the history file", history.append, state.global_step, scores)
        values = scores.to_log(self.prefix, heads=self.heads)
        if self.gradients:
            self._guard("the updates of W_qk", self._measure_updates, model, values)
        return values

    def _keep_batch(self, *batch: Any) -> None:
        self._batch = LastBatch(*batch)

    def _measure_updates(self, model: nn.Module, values: dict[str, float]) -> None:
        self.update_scores = None
        if (batch := self._batch) is None:
            if self._measured_step:
                self._say("the updates of W_qk: no training step was seen", once="no batch")
            return
        if not self._fitting:  # said before
            return
        self.update_scores = self._updates_that_fit(model, batch).scores(self.gamma)
        values.update(log_of_updates(self.update_scores, self.prefix, self.heads))

    def _updates_that_fit(self, model: nn.Module, batch: LastBatch) -> QKUpdates:
        """Of as many sequences as the memory allows."""
        while True:
            number = min(self._fitting, batch.number)
            try:
                return sum_updates(
                    model,
                    [partial(batch.loss, number=number)],
                    layers=self.layers,
                    attention=self.attention,
                    heads=self.heads,
                    memory_gib=self.gradients_memory_gib,
                    memory_option="gradients_memory_gib",
                )
            except LogitsTooLargeError as error:
                if number == 1:
                    raise
                self._fitting = number // 2
                self._say(f"updates of W_qk of fewer sequences than {self.gradients}: {error}", once="fewer")
            except (MemoryError, RuntimeError) as error:
                # What the CPU's allocator raises has no class of its own.
                known = isinstance(error, MemoryError | torch.OutOfMemoryError)
                if not known and "can't allocate memory" not in str(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
                break
        # By now the error, and with it what the pass had allocated, is gone.
        self._fitting = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise MemoryError(
            f"{number} sequences took more memory than there is, so that no updates are measured in the rest of the "
            f"run; give a lower `gradients_memory_gib` than {self.gradients_memory_gib:g}, or a number of sequences "
            f"as `gradients`. {reason}"
        )

    def _guard(self, what: str, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:
            self._say(f"{what}: {type(error).__name__}: {error}")
            if self.strict:
                raise

    def _say(self, message: str, once: str | None = None) -> None:
        # A measurement that fails will fail at every event; the run's log should say so once.
        if (once or message) not in self._said:
            self._said.add(once or message)
            logger.warning("QKScoreCallback (training goes on): %s", message)
