"""What every recipe does around its own model and data: arguments, logging, the seeded model, training, its record,
the table of scores, the final evaluation, what is saved and pushed, and errors of one line.

A recipe's `main` reads, in this order: [`start_run`], its data, [`Run.build`], its `Trainer` (with
[`Run.callbacks`]), [`Run.execute`].
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate.optimizer
import datasets
import torch
import transformers
from argument_parsing import parse_arguments
from arguments import RecipeError, SourceArguments, parse_qk_init
from fingerprints import FingerprintedTrainer, count_parameters, fingerprint_weights
from reporting import FirstStepClock, announce, compare_scores, final_evaluation, write_card, write_score_table
from resuming import checkpoint_to_resume
from run_record import RunRecord, software_versions, without_secrets
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    enable_full_determinism,
    set_seed,
)

import hf_symqk


__all__ = ["UNLESS_GIVEN", "Run", "check_stream", "recipe_defaults", "run_script", "start_run"]

logger = logging.getLogger(__name__)

_LOOKED_UP = "is_lomo_available"
# A default must not overrule what the user asks for in other words.
UNLESS_GIVEN = {
    "max_steps": ["num_train_epochs"],
    "eval_strategy": ["do_eval"],
    "eval_on_start": ["do_eval", "eval_strategy"],
    "eval_steps": ["eval_strategy"],
    "logging_steps": ["logging_strategy"],
}


def recipe_defaults(output_dir: str, **changes: Any) -> dict[str, Any]:
    """
    What `TrainingArguments` takes where the user gives nothing: chosen for small models and the data that needs no
    network, so that a run takes minutes on two cores.

    Args:
        output_dir (`str`):
            The recipe's own output folder.
        changes:
            Defaults in which the recipe differs.

    Returns:
        `dict`: name to value.
    """
    return {
        "output_dir": output_dir,
        "do_train": True,
        "do_eval": True,
        "max_steps": 600,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "learning_rate": 2e-3,
        "weight_decay": 0.01,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
        "logging_steps": 50,
        "eval_strategy": "steps",
        "eval_steps": 200,
        "eval_on_start": True,
        "save_strategy": "no",
        # Without an accelerator there is no memory to pin, and PyTorch warns at each epoch and evaluation.
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "report_to": "none",
        **changes,
    }


def start_run(
    recipe: str,
    dataclass_types: Sequence[type],
    defaults: Mapping[str, Any],
    argv: Sequence[str] | None = None,
    *,
    unless_given: Mapping[str, Iterable[str]] = UNLESS_GIVEN,
) -> Run:
    """
    Reads the arguments of a recipe, checks what concerns every recipe, sets up logging, prints the defaults in use.

    Args:
        recipe (`str`):
            Its name, as the record of the run gives it.
        dataclass_types (sequence of `type`):
            Dataclasses of its arguments; the last is `TrainingArguments`.
        defaults (mapping):
            See [`recipe_defaults`].
        argv (sequence of `str`, *optional*):
            Words of the command line; `sys.argv[1:]` without it.
        unless_given (mapping of `str` to names, *optional*):
            See [`parse_arguments`].

    Returns:
        `Run`: the run, its `arguments` in the order of `dataclass_types`.

    Raises:
        RecipeError: for arguments that cannot be used.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parsed = parse_arguments(dataclass_types, defaults, words, unless_given=unless_given)
    run = Run(recipe, words, parsed.filled, parsed.changed())
    arguments = run.training_arguments
    level = arguments.get_process_log_level()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    transformers.utils.logging.set_verbosity(level)
    datasets.utils.logging.set_verbosity(level)
    if arguments.process_index != 0 or arguments.disable_tqdm:
        datasets.disable_progress_bars()
    if arguments.do_predict:
        raise RecipeError("do_predict: the recipe has no test part; give it as held-out data and use --do_eval.")
    if arguments.mixed_precision == "fp16" and arguments.device.type == "cpu":  # the launcher's wish, too
        raise RecipeError(
            "fp16 needs an accelerator, on a CPU it would be float32 without a word: give --fp16 false (to "
            "`accelerate launch`, --mixed_precision no), and --bf16 where half precision is meant."
        )
    if not (arguments.do_train or arguments.do_eval):
        raise RecipeError("do_train and do_eval are both off: there is nothing to do.")
    _remember_lookup()
    arguments.resume_from_checkpoint = checkpoint_to_resume(arguments)
    if arguments.resume_from_checkpoint is not None:
        # An uninterrupted run evaluates at no such step, and the two have to log the same.
        arguments.eval_on_start = False
    used = ", ".join(f"{name}={value}" for name, value in parsed.used_defaults.items())
    run.announce(f"defaults of the recipe in use: {used or 'none'}")
    return run


def _remember_lookup() -> None:
    """Accelerate searches the disk for a package at each step (1.15), which takes 1 % of a small model's training."""
    lookup = getattr(accelerate.optimizer, _LOOKED_UP, None)
    if lookup is not None and not hasattr(lookup, "cache_info"):
        setattr(accelerate.optimizer, _LOOKED_UP, functools.cache(lookup))


def check_stream(training_arguments: TrainingArguments, source: SourceArguments) -> None:
    """
    Checks what a stream needs before any of it is read.

    Args:
        training_arguments (`TrainingArguments`):
            The run.
        source (`SourceArguments`):
            Its data.

    Raises:
        RecipeError: for a stream without `max_steps` or with several readers.
    """
    if source.streaming and training_arguments.do_train and training_arguments.max_steps <= 0:
        raise RecipeError("streaming needs --max_steps: the length of a stream is not known.")
    if source.streaming and training_arguments.dataloader_num_workers > 1:
        raise RecipeError(
            f"dataloader_num_workers={training_arguments.dataloader_num_workers}: a stream has one reader, choose 0 "
            "or 1."
        )


@dataclasses.dataclass
class Run:
    """
    One run of a recipe.

    Attributes:
        recipe (`str`): Name of the recipe.
        words (`list[str]`): Its command line.
        arguments (`tuple`): Its filled dataclasses.
        changed (`dict`): Arguments that differ from the defaults of their dataclasses.
        qk_init (`dict` or `None`): The initialisation, known once the model is built.
    """

    recipe: str
    words: list[str]
    arguments: tuple[Any, ...]
    changed: dict[str, Any]
    qk_init: dict[str, Any] | None = None
    _weights: dict[str, str] = dataclasses.field(default_factory=dict)
    _clock: FirstStepClock = dataclasses.field(default_factory=FirstStepClock)

    @property
    def training_arguments(self) -> TrainingArguments:
        """The last of the arguments."""
        return self.arguments[-1]

    def announce(self, text: str) -> None:
        """Prints a line, once however many processes run."""
        announce(self.training_arguments, text)

    def build(
        self, qk_init: dict[str, Any] | str | None, make: Callable[[dict[str, Any] | str | None], PreTrainedModel]
    ) -> PreTrainedModel:
        """
        Seeds the generators and builds the model.

        Args:
            qk_init (`dict`, `str` or `None`):
                The argument of that name.
            make (`Callable`):
                Builds the model from what `from_config(..., qk_init=...)` takes.

        Returns:
            `PreTrainedModel`: what `make` returned.

        Raises:
            RecipeError: if `qk_init` is a string that opens a JSON object but is none, or the model has no attention
                that can be scored; and what `make` raises.
        """
        arguments, option = self.training_arguments, parse_qk_init(qk_init)
        if arguments.full_determinism:
            enable_full_determinism(arguments.seed)
        else:
            set_seed(arguments.seed)
        model = make(option)
        # After `make`, which has checked it.
        self.qk_init = None if option is None else hf_symqk.SymmetricInit.from_value(option).to_dict()
        self.announce(
            f"model: {type(model).__name__}, {count_parameters(model):,} parameters, qk_init={option or 'none'}"
        )
        try:
            self._weights = fingerprint_weights(model)
        except ValueError as error:  # no attention that could be initialised or scored
            raise RecipeError(str(error)) from error
        return model

    def callbacks(self) -> list[TrainerCallback]:
        """Returns the callbacks that every recipe gives its trainer."""
        return [hf_symqk.QKScoreCallback(), self._clock]

    def execute(
        self,
        trainer: FingerprintedTrainer,
        data: Mapping[str, Any],
        evaluation_metrics: Callable[[], Mapping[str, float]] = dict,
        summary: Callable[[Mapping[str, float]], str] | None = None,
    ) -> dict[str, float]:
        """
        Trains and evaluates as the arguments ask for, and leaves everything in the output folder: model, metrics,
        state, table of scores, `run.json`, and the model card.

        Args:
            trainer (`FingerprintedTrainer`):
                With model and data.
            data (mapping):
                What the record says of the data: where they came from, and how many there are.
            evaluation_metrics (`Callable`, *optional*):
                Computes metrics `eval_…` that the trainer does not know, after the final evaluation.
            summary (`Callable`, *optional*):
                Makes of the metrics, where the run evaluated, the line that is printed.

        Returns:
            `dict`: the metrics.
        """
        arguments = self.training_arguments
        if not arguments.do_train:
            evaluated = "the model as it is before training"
            if arguments.resume_from_checkpoint is not None:
                trainer.load_checkpoint(arguments.resume_from_checkpoint)
                evaluated = arguments.resume_from_checkpoint
            self.announce(f"do_train is off: {evaluated} is evaluated")
            metrics = self._evaluate(trainer, evaluation_metrics)
            self._leave(trainer, metrics, summary)
        else:
            record = RunRecord(str(arguments.output_dir), self._facts(trainer, data), arguments.process_index == 0)
            try:
                metrics = self._train(trainer)
                metrics.update(self._evaluate(trainer, evaluation_metrics))
                self._leave(trainer, metrics, summary)
                trainer.batch_fingerprint.combine()
                steps = trainer.state.global_step
                hashes = {**self._weights, **trainer.batch_fingerprint.result(steps)}
                record.finish(hashes=hashes, metrics=metrics, max_steps=trainer.state.max_steps)
            except BaseException as error:
                record.fail(error)
                raise
            if arguments.process_index == 0:
                write_card(Path(str(arguments.output_dir)))
        if arguments.push_to_hub:
            trainer.push_to_hub()
        return metrics

    def _facts(self, trainer: FingerprintedTrainer, data: Mapping[str, Any]) -> dict[str, Any]:
        arguments = self.training_arguments
        model: Any = trainer.model
        return {
            "recipe": self.recipe,
            "command": without_secrets(self.words),
            "arguments": self.changed,
            "qk_init": self.qk_init,
            "seed": arguments.seed,
            "learning_rate": arguments.learning_rate,
            "max_steps": arguments.max_steps if arguments.max_steps > 0 else None,
            "num_processes": arguments.world_size,
            "resumed_from": arguments.resume_from_checkpoint,
            "data": dict(data),
            "versions": software_versions(),
            "model": {
                "class": type(model).__name__,
                "model_type": model.config.model_type,
                "num_parameters": count_parameters(model),
            },
            "hashes": {**self._weights, "batches": None, "steps": None, "sequences": None},
            "metrics": {},
        }

    def _train(self, trainer: FingerprintedTrainer) -> dict[str, float]:
        model: Any = trainer.model
        first = _scores(model)
        result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
        metrics = dict(result.metrics)
        if self._clock.seconds is not None:
            metrics["train_seconds_to_first_step"] = round(self._clock.seconds, 2)
        self._report_scores(trainer, first)
        return metrics

    def _report_scores(self, trainer: FingerprintedTrainer, first: hf_symqk.QKScores | None) -> None:
        last_scores = None if first is None else _scores(trainer.accelerator.unwrap_model(trainer.model))
        if first is None or last_scores is None:
            return
        table = compare_scores(first, last_scores)
        if trainer.is_world_process_zero():
            path = write_score_table(table, str(trainer.args.output_dir))
            # `load_best_model_at_end` has put another step's weights back by now.
            last = "of the best checkpoint" if trainer.args.load_best_model_at_end else "after the last"
            print(f"\nW_qk before the first step and {last} ({path}):")
            print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"), flush=True)

    def _evaluate(
        self, trainer: FingerprintedTrainer, evaluation_metrics: Callable[[], Mapping[str, float]]
    ) -> dict[str, float]:
        if not trainer.args.do_eval or trainer.eval_dataset is None:
            return {}
        return {**final_evaluation(trainer), **evaluation_metrics()}

    def _leave(
        self,
        trainer: FingerprintedTrainer,
        metrics: Mapping[str, float],
        summary: Callable[[Mapping[str, float]], str] | None,
    ) -> None:
        """Writes metrics and state, and prints what came out."""
        evaluated = any(name.startswith("eval") for name in metrics)
        for part in ("train", "eval"):
            selected = {name: value for name, value in metrics.items() if name.startswith(part)}
            if selected:
                trainer.save_metrics(part, selected)
        if trainer.args.do_train:  # the state of a trained run may be there
            trainer.save_state()
        if evaluated and summary is not None:
            self.announce(f"\n{summary(metrics)}")
        if "train_seconds_to_first_step" in metrics:
            self.announce(
                f"first step {metrics['train_seconds_to_first_step']:.1f} s after the start, "
                f"{metrics['train_runtime']:.1f} s of training; everything is in {trainer.args.output_dir}"
            )


def _scores(model: Any) -> hf_symqk.QKScores | None:
    """Scores for the table of the run, which goes on without them."""
    try:
        return hf_symqk.score_model(model)
    except Exception as error:
        logger.warning("no table of W_qk scores: %s", error)
        return None


def run_script(main: Callable[[], FingerprintedTrainer]) -> None:
    """
    Runs a recipe as a program: what the user can mend is an error of one line, without a traceback.

    Args:
        main (`Callable`):
            The recipe's `main`.
    """
    try:
        finished = main()
    except RecipeError as error:
        raise SystemExit(f"error: {error}") from None
    finished.end()
