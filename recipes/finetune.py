"""Sequence classification on top of a pretrained run of `mlm.py` or `clm.py`, or of a model on the Hub.

    accelerate launch recipes/finetune.py                                     # offline, no argument: minutes
    accelerate launch recipes/finetune.py --model_name_or_path out/mlm --output_dir out/finetune-symmetric
    accelerate launch recipes/finetune.py --model_name_or_path out/mlm --task_name sst2
    accelerate launch recipes/finetune.py --model_name_or_path out/mlm --train_file reviews.csv --label_column stars

See recipes/README.md for the arguments and for what a run leaves in its output folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from arguments import ModelArguments, RecipeError, TokenizerArguments
from evaluation_metrics import HeldOutMetrics, class_metrics, number_metrics, task_metrics
from example_weighted import ExampleWeightedTrainer, KeyedExamples
from labelled_data import ExampleStream, LabelArguments, LabelledData, baseline, label_splits
from modeling import ENCODER, build_config
from running import Run, check_stream, recipe_defaults, run_script, start_run
from sequence_data import (
    TASKS,
    SequenceArguments,
    SequenceEncoder,
    check_text,
    load_sequences,
    sequence_dataset,
    sequence_source,
    tokenize_examples,
)
from sequence_modeling import (
    build_classifier,
    check_classifies,
    load_pretrained_config,
    load_pretrained_tokenizer,
    prepare_config,
)
from tokenization import load_tokenizer, trained_tokenizer
from transformers import (
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

import hf_symqk
from hf_symqk._held_out import held_out_results


__all__ = ["DEFAULTS", "FinetuneModelArguments", "main"]

# Chosen with small encoders, pretrained and fresh; longer or faster runs learn the built-in passages by heart.
DEFAULTS = recipe_defaults("out/finetune", max_steps=100, learning_rate=5e-4, logging_steps=10, eval_steps=25)
STREAM_TOKENIZER_EXAMPLES = 10_000


@dataclasses.dataclass
class FinetuneModelArguments(ModelArguments):
    """Which model is fine-tuned; without any, a small fresh encoder as in `mlm.py`, to compare with."""

    model_name_or_path: str | None = dataclasses.field(
        default=None, metadata={"help": "Pretrained model: output folder of mlm.py or clm.py, or Hub id."}
    )
    qk_init: dict | str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Query-key initialisation of a fresh model: symmetric unless given, none (the model's own), "
            "independent, or an object as in mlm.py. A pretrained model keeps its weights."
        },
    )

    def __post_init__(self) -> None:
        for name in ("config_name", "model_type", "config_overrides", "qk_init"):
            if self.model_name_or_path is not None and getattr(self, name) is not None:
                raise RecipeError(
                    f"{name}={getattr(self, name)!r} is for a fresh model, but "
                    f"model_name_or_path={self.model_name_or_path!r} is pretrained: give one."
                )
        if self.model_name_or_path is None and self.qk_init is None:
            self.qk_init = "symmetric"


def main(argv: Sequence[str] | None = None) -> ExampleWeightedTrainer:
    """
    Runs the recipe.

    Args:
        argv (sequence of `str`, *optional*):
            Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `ExampleWeightedTrainer`: after the run.

    Raises:
        RecipeError: for arguments, text, tokenizer or model that cannot be used; before training begins.
    """
    kinds = (FinetuneModelArguments, TokenizerArguments, SequenceArguments, LabelArguments, TrainingArguments)
    run = start_run("finetune", kinds, DEFAULTS, argv)
    model_arguments, _, arguments, label_arguments, training_arguments = run.arguments
    check_stream(training_arguments, arguments)

    with training_arguments.main_process_first(desc="reading the text"):
        data = _read(arguments, label_arguments)
        metrics = _metrics(arguments, data)
        if data.held_out is None and training_arguments.do_eval:
            raise RecipeError(
                "no example is held out (validation_split_percentage or stream_validation_examples is 0), but "
                "evaluation is on: hold some out, or give --do_eval false."
            )
        tokenizer, config = _tokenizer_and_config(run, data)
    model, head = _build(run, config)
    if head is not None:
        run.announce(f"pretrained weights of {model_arguments.model_name_or_path}; fresh ones: {head[:16]} (SHA-256)")

    columns = list(arguments.text_columns.values())
    encoder = SequenceEncoder(tokenizer, columns, arguments.max_length)
    with training_arguments.main_process_first(desc="tokenizing"):
        train = _training_part(run, data, encoder)
        held_out = (
            None if data.held_out is None else KeyedExamples(_tokenized(data.held_out, encoder, arguments), encoder)
        )
    train_size = f"{len(train):,}" if isinstance(train, KeyedExamples) else "a stream of"
    kinds_of_label = "numbers" if data.classes is None else f"{len(data.classes)} classes"
    run.announce(
        f"text: {train_size} training and {len(held_out) if held_out is not None else 'no'} held-out examples, "
        f"{kinds_of_label}, up to {arguments.max_length} tokens"
    )

    trainer = ExampleWeightedTrainer(
        model=model,
        args=training_arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        # Multiples of 8 keep the number of shapes small, and suit tensor cores.
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        compute_metrics=metrics,
        callbacks=run.callbacks(),
    )
    run.execute(
        trainer,
        data={
            "source": sequence_source(arguments),
            **sequence_dataset(arguments),
            "task": arguments.task_name,
            "train_examples": len(train) if isinstance(train, KeyedExamples) else None,
            "held_out_examples": 0 if held_out is None else len(held_out),
            "classes": None if data.classes is None else len(data.classes),
            "max_length": arguments.max_length,
            "head": head,
        },
        evaluation_metrics=lambda: {} if data.held_out is None else baseline(data.held_out, data.classes),
        summary=lambda metrics: _summary(metrics, data.classes),
    )
    return trainer


def _read(arguments: SequenceArguments, label_arguments: LabelArguments) -> LabelledData:
    if arguments.task_name is not None and label_arguments.validation_split == "validation":
        label_arguments.validation_split = TASKS[arguments.task_name].validation_split
        if arguments.dataset_name is not None or arguments.train_file is not None:
            label_arguments.validation_split = "validation"
    source = sequence_source(arguments)
    splits = load_sequences(arguments, label_arguments.validation_split)
    data = label_splits(splits, arguments.text_columns, source, label_arguments, arguments)
    for part, name in ((data.train, "training"), (data.held_out, "held-out")):
        if isinstance(part, datasets.Dataset):
            check_text(part, arguments.text_columns, f"the {name} part of {source}")
    return data


def _metrics(arguments: SequenceArguments, data: LabelledData) -> HeldOutMetrics:
    if arguments.task_name is None:
        return number_metrics() if data.classes is None else class_metrics(data.classes)
    if (data.classes is None) != (arguments.task_name == "stsb"):
        held = "numbers" if data.classes is None else "classes"
        raise RecipeError(f"task_name={arguments.task_name!r} does not fit labels that are {held}: leave it out.")
    return task_metrics(arguments.task_name)


def _tokenizer_and_config(run: Run, data: LabelledData) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    model_arguments, tokenizer_arguments, arguments, _, _ = run.arguments
    pretrained, named = model_arguments.model_name_or_path, tokenizer_arguments.tokenizer_name
    if pretrained is not None:
        config = load_pretrained_config(pretrained)
        tokenizer = load_pretrained_tokenizer(named or pretrained)
    else:
        if named is not None:
            tokenizer = load_tokenizer(named)
        else:
            tokenizer = trained_tokenizer(_texts(data.train, arguments), "text", tokenizer_arguments.vocab_size)
        config = build_config(model_arguments, tokenizer, named is None, ENCODER)
        check_classifies(config, f"model_type={config.model_type!r}")
    return tokenizer, prepare_config(config, tokenizer, data.classes)


def _texts(train: datasets.Dataset | datasets.IterableDataset, arguments: SequenceArguments) -> datasets.Dataset:
    columns = list(arguments.text_columns.values())
    if isinstance(train, datasets.IterableDataset):
        rows = list(train.take(STREAM_TOKENIZER_EXAMPLES))
        return datasets.Dataset.from_dict({"text": [row[column] for column in columns for row in rows]})
    return datasets.Dataset.from_dict({"text": [text for column in columns for text in train[column]]})


def _build(run: Run, config: PreTrainedConfig) -> tuple[PreTrainedModel, str | None]:
    model_arguments, _, arguments, _, _ = run.arguments
    pretrained, heads = model_arguments.model_name_or_path, []

    def make(option: dict[str, Any] | str | None) -> PreTrainedModel:
        model, head = build_classifier(config, arguments.max_length, pretrained, option)
        heads.append(head)
        return model

    # What a pretrained model carries is how its Q and K were initialised before its pretraining.
    carried = getattr(config, "qk_init", None)
    if carried is not None:
        carried = hf_symqk.SymmetricInit.from_value(carried).to_dict()
    model = run.build(model_arguments.qk_init if pretrained is None else carried, make)
    return model, heads[0]


def _training_part(run: Run, data: LabelledData, encoder: SequenceEncoder) -> KeyedExamples | ExampleStream:
    _, _, arguments, label_arguments, training_arguments = run.arguments
    if not isinstance(data.train, datasets.IterableDataset):
        return KeyedExamples(_tokenized(data.train, encoder, arguments), encoder)
    seed = training_arguments.seed if training_arguments.data_seed is None else training_arguments.data_seed
    buffer = arguments.shuffle_buffer_size
    return ExampleStream(data.train, encoder, label_arguments.label_column, data.classes, buffer, seed)


def _tokenized(rows: datasets.Dataset, encoder: SequenceEncoder, arguments: SequenceArguments) -> datasets.Dataset:
    return rows.map(
        tokenize_examples,
        batched=True,
        num_proc=arguments.preprocessing_num_workers,
        remove_columns=encoder.columns,
        fn_kwargs={
            "columns": encoder.columns,
            "tokenizer": encoder.tokenizer,
            "max_length": encoder.max_length,
        },
        desc="Tokenizing",
    )


def _summary(metrics: Mapping[str, float], classes: Sequence[str] | None) -> str:
    results = held_out_results(metrics)
    loss = results.pop("loss")
    scores = ", ".join(f"{name} {value:.3f}" for name, value in results.items())
    unit = "squared error" if classes is None else "nats"
    always = (
        f"variance of the labels {metrics['eval_variance']:.3f}"
        if classes is None
        else f"the most frequent class is {metrics['eval_majority_accuracy']:.1%} of them"
    )
    return (
        f"held-out loss {loss:.3f} ({unit} an example), {scores} of {int(metrics['eval_examples']):,} "
        f"examples; {always}"
    )


if __name__ == "__main__":
    run_script(main)
