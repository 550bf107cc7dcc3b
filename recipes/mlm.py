"""Masked-language-model pretraining with a symmetric query-key initialisation.

    accelerate launch recipes/mlm.py                          # offline, no argument: a few minutes on two cores
    accelerate launch recipes/mlm.py --qk_init none --output_dir out/plain
    accelerate launch recipes/mlm.py run.yaml --max_steps 2000

See recipes/README.md for the arguments and for what a run leaves in its output folder.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import datasets
import torch
import transformers
from arguments import DataArguments, MaskingArguments, ModelArguments, RecipeError, parse_arguments, parse_qk_init
from masking import EVALUATION_MASK_SEED, MaskedDataset, MaskedStream, MaskEpochCallback, TokenMasker
from modeling import build_config, build_model
from reporting import (
    FirstStepClock,
    announce,
    compare_scores,
    final_evaluation,
    label_entropy,
    write_score_table,
)
from text_data import Documents, check_block_size, load_documents, packed_dataset
from token_weighted import TokenWeightedTrainer
from tokenization import choose_tokenizer
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    enable_full_determinism,
    set_seed,
)

import hf_symqk


__all__ = ["DEFAULTS", "main"]

logger = logging.getLogger(__name__)

# What `TrainingArguments` takes where the user gives nothing. Chosen with the default encoder and text so that a run
# of a few minutes on one core leaves the unigram plateau far behind.
DEFAULTS: dict[str, Any] = {
    "output_dir": "out/mlm",
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
}
# A default must not overrule what the user asks for in other words.
UNLESS_GIVEN = {
    "max_steps": ["num_train_epochs"],
    "eval_strategy": ["do_eval"],
    "eval_on_start": ["do_eval", "eval_strategy"],
    "eval_steps": ["eval_strategy"],
    "logging_steps": ["logging_strategy"],
}


def mask_documents(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    data_arguments: DataArguments,
    masking_arguments: MaskingArguments,
    training_arguments: TrainingArguments,
) -> tuple[MaskedDataset | MaskedStream, MaskedDataset | None]:
    """
    Tokenizes, packs and masks the text.

    Args:
        documents (`Documents`):
            The text.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        data_arguments (`DataArguments`):
            How the text is packed.
        masking_arguments (`MaskingArguments`):
            How much is masked.
        training_arguments (`TrainingArguments`):
            Their data seed (or seed) keys the training masks; held-out masks have a key of their own.

    Returns:
        `tuple`: training and held-out examples, the latter `None` where nothing is held out.

    Raises:
        RecipeError: if the text does not fill one block.
    """
    column, block_size = documents.text_column, data_arguments.block_size
    seed = training_arguments.seed if training_arguments.data_seed is None else training_arguments.data_seed
    masker = TokenMasker(tokenizer, masking_arguments.mlm_probability, seed)

    def packed(part: datasets.Dataset, name: str) -> datasets.Dataset:
        return packed_dataset(part, column, tokenizer, block_size, data_arguments.preprocessing_num_workers, name)

    train: MaskedDataset | MaskedStream
    if isinstance(documents.train, datasets.IterableDataset):
        buffer = data_arguments.shuffle_buffer_size
        train = MaskedStream(documents.train, column, tokenizer, masker, block_size, buffer, seed)
    else:
        train = MaskedDataset(packed(documents.train, "packed-train"), masker)
    held_out = None
    if documents.held_out is not None:
        held_out_masker = TokenMasker(tokenizer, masking_arguments.mlm_probability, EVALUATION_MASK_SEED)
        held_out = MaskedDataset(packed(documents.held_out, "packed-held-out"), held_out_masker)
    return train, held_out


def check_run(training_arguments: TrainingArguments, data_arguments: DataArguments) -> None:
    """
    Checks what can be checked before any text is read.

    Args:
        training_arguments (`TrainingArguments`):
            The run.
        data_arguments (`DataArguments`):
            Its text.

    Raises:
        RecipeError: for what the recipe does not do, and for a stream without `max_steps` or with several readers.
    """
    if training_arguments.do_predict:
        raise RecipeError("do_predict: the recipe has no test part; give it as --validation_file and use --do_eval.")
    if not (training_arguments.do_train or training_arguments.do_eval):
        raise RecipeError("do_train and do_eval are both off: there is nothing to do.")
    if data_arguments.streaming and training_arguments.do_train and training_arguments.max_steps <= 0:
        raise RecipeError("streaming needs --max_steps: the length of a stream is not known.")
    if data_arguments.streaming and training_arguments.dataloader_num_workers > 1:
        raise RecipeError(
            f"dataloader_num_workers={training_arguments.dataloader_num_workers}: a stream is packed by one reader, "
            "choose 0 or 1."
        )


def main(argv: Sequence[str] | None = None) -> TokenWeightedTrainer:
    """
    Runs the recipe.

    Args:
        argv (sequence of `str`, *optional*):
            Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `TokenWeightedTrainer`: after the run.

    Raises:
        RecipeError: for arguments, text, tokenizer or config that cannot be used; before training begins.
    """
    kinds = (ModelArguments, DataArguments, MaskingArguments, TrainingArguments)
    words = sys.argv[1:] if argv is None else argv
    parsed, used_defaults = parse_arguments(kinds, DEFAULTS, words, unless_given=UNLESS_GIVEN)
    model_arguments, data_arguments, masking_arguments, training_arguments = parsed
    _set_up_logging(training_arguments)
    check_run(training_arguments, data_arguments)
    defaults = ", ".join(f"{name}={value}" for name, value in used_defaults.items())
    announce(training_arguments, f"defaults of the recipe in use: {defaults or 'none'}")

    with training_arguments.main_process_first(desc="reading the text"):
        documents = load_documents(data_arguments)
        tokenizer = choose_tokenizer(model_arguments, data_arguments, documents.train, documents.text_column)
    if documents.held_out is None and training_arguments.do_eval:
        raise RecipeError(
            "no text is held out (validation_split_percentage or stream_validation_documents is 0), but evaluation "
            "is on: hold some out, or give --do_eval false."
        )
    # The model comes before the text is packed: what is wrong with it must not show after an hour of tokenizing.
    check_block_size(data_arguments.block_size, tokenizer)
    qk_init = parse_qk_init(model_arguments.qk_init)
    config = build_config(model_arguments, tokenizer, model_arguments.tokenizer_name is None)
    if training_arguments.full_determinism:
        enable_full_determinism(training_arguments.seed)
    else:
        set_seed(training_arguments.seed)
    model = build_model(config, qk_init, data_arguments.block_size)
    announce(
        training_arguments,
        f"model: {type(model).__name__}, {model.num_parameters():,} parameters, qk_init={qk_init or 'none'}",
    )

    with training_arguments.main_process_first(desc="packing the text"):
        train, held_out = mask_documents(documents, tokenizer, data_arguments, masking_arguments, training_arguments)
    train_size = f"{len(train):,}" if isinstance(train, MaskedDataset) else "a stream of"
    held_out_size = f"{len(held_out):,}" if held_out is not None else "no"
    announce(
        training_arguments,
        f"text: {train_size} training and {held_out_size} held-out sequences of {data_arguments.block_size} tokens, "
        f"vocabulary {len(tokenizer):,}",
    )

    clock = FirstStepClock()
    callbacks: list[TrainerCallback] = [hf_symqk.QKScoreCallback(), clock]
    if isinstance(train, MaskedDataset):
        callbacks.append(MaskEpochCallback(train))
    trainer = TokenWeightedTrainer(
        model=model,
        args=training_arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    metrics: dict[str, float] = {}
    if training_arguments.do_train:
        first = hf_symqk.score_model(model)
        metrics.update(_train(trainer, clock))
        _report_scores(trainer, first)
    if training_arguments.do_eval and held_out is not None:
        metrics.update(final_evaluation(trainer))
        metrics["eval_unigram_entropy"] = label_entropy(held_out[index] for index in range(len(held_out)))
    _finish(trainer, metrics)
    return trainer


def _set_up_logging(arguments: TrainingArguments) -> None:
    level = arguments.get_process_log_level()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    transformers.utils.logging.set_verbosity(level)
    datasets.utils.logging.set_verbosity(level)
    if arguments.process_index != 0 or arguments.disable_tqdm:
        datasets.disable_progress_bars()


def _train(trainer: TokenWeightedTrainer, clock: FirstStepClock) -> dict[str, float]:
    resume: str | bool | None = trainer.args.resume_from_checkpoint
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        resume = resume.lower() == "true"
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    metrics = dict(result.metrics)
    if clock.seconds is not None:
        metrics["train_seconds_to_first_step"] = round(clock.seconds, 2)
    return metrics


def _report_scores(trainer: TokenWeightedTrainer, first: hf_symqk.QKScores) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    table = compare_scores(first, hf_symqk.score_model(model))
    if trainer.is_world_process_zero():
        path = write_score_table(table, str(trainer.args.output_dir))
        # `load_best_model_at_end` has put another step's weights back by now.
        last = "of the best checkpoint" if trainer.args.load_best_model_at_end else "after the last"
        print(f"\nW_qk before the first step and {last} ({path}):")
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"), flush=True)


def _finish(trainer: TokenWeightedTrainer, metrics: dict[str, float]) -> None:
    """Writes metrics and state; everything that the processes do together ends here."""
    for part in ("train", "eval"):
        selected = {name: value for name, value in metrics.items() if name.startswith(part)}
        if selected:
            trainer.save_metrics(part, selected)
    trainer.save_state()
    if "eval_loss" in metrics:
        announce(
            trainer.args,
            f"\nheld-out loss {metrics['eval_loss']:.3f} nats a masked token "
            f"({int(metrics['eval_predicted_tokens']):,} tokens); unigram entropy of these tokens "
            f"{metrics['eval_unigram_entropy']:.3f}",
        )
    if "train_seconds_to_first_step" in metrics:
        announce(
            trainer.args,
            f"first step {metrics['train_seconds_to_first_step']:.1f} s after the start, "
            f"{metrics['train_runtime']:.1f} s of training; everything is in {trainer.args.output_dir}",
        )
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    try:
        finished = main()
    except RecipeError as error:
        raise SystemExit(f"error: {error}") from None
    # Without it the processes of a group warn at exit.
    finished.accelerator.end_training()
