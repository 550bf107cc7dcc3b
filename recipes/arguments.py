"""
Arguments shared by the recipes, as dataclasses.

`TrainingArguments` is the class of Transformers, with every flag it documents. A recipe only changes *defaults*, and
only those of flags that the user left alone (see `argument_parsing.py`).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers import TrainingArguments


__all__ = [
    "DataArguments",
    "FileArguments",
    "MaskingArguments",
    "ModelArguments",
    "RecipeError",
    "SourceArguments",
    "TokenizerArguments",
    "check_one_gpu",
    "parse_qk_init",
]


class RecipeError(ValueError):
    """A value that a recipe cannot work with: names the value and the way out, and is raised before training."""


@dataclasses.dataclass
class ModelArguments:
    """Which model is trained, and how its attention is initialised."""

    config_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Folder or Hub id whose config.json gives the architecture."}
    )
    model_type: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Architecture by name (bert, gpt2, vit, …) with its default sizes. Without it and without "
            "config_name: the recipe's own small model."
        },
    )
    config_overrides: dict | str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Changes to the config: 'hidden_size=64,num_hidden_layers=2', a JSON object, or a mapping in a "
            "file."
        },
    )
    qk_init: dict | str | None = dataclasses.field(
        default="symmetric",
        metadata={
            "help": "Query-key initialisation: none (the model's own), a scheme (symmetric, independent, indefinite, "
            "negative, spectrum, mimetic), a JSON object such as "
            '\'{"scheme": "symmetric", "symmetry": 0.5, "layers": [0, 1]}\', or a mapping in a file.'
        },
    )


@dataclasses.dataclass
class TokenizerArguments:
    """Which tokenizer a text recipe uses."""

    tokenizer_name: str | None = dataclasses.field(
        default=None,
        metadata={"help": "Folder or Hub id of a tokenizer. Without it one is trained on the training documents."},
    )
    vocab_size: int = dataclasses.field(
        default=512, metadata={"help": "Entries of the byte-level BPE tokenizer that the recipe trains."}
    )


@dataclasses.dataclass
class SourceArguments:
    """A dataset on the Hub or in a folder, and how a part of it is held out. Without any: the recipe's own data."""

    dataset_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Dataset on the Hub, or a folder that datasets.load_dataset reads."}
    )
    dataset_config_name: str | None = dataclasses.field(
        default=None, metadata={"help": "Configuration of that dataset."}
    )
    validation_split_percentage: float = dataclasses.field(
        default=5.0,
        metadata={"help": "Share (%%) of the data held out where it has no validation split. The same in every run."},
    )
    preprocessing_num_workers: int | None = dataclasses.field(
        default=None, metadata={"help": "Processes that prepare the data. The result does not depend on it."}
    )
    streaming: bool = dataclasses.field(
        default=False, metadata={"help": "Read and prepare the data while training. Needs max_steps."}
    )
    shuffle_buffer_size: int = dataclasses.field(
        default=1_000, metadata={"help": "Examples in the shuffle buffer of a stream; 0 keeps the stream's order."}
    )

    def __post_init__(self) -> None:
        if self.dataset_config_name is not None and self.dataset_name is None:
            raise RecipeError(f"dataset_config_name={self.dataset_config_name!r} needs dataset_name beside it.")
        if not 0 <= self.validation_split_percentage < 100:
            raise RecipeError(
                f"validation_split_percentage={self.validation_split_percentage}: choose a value from 0 up to, "
                "but not including, 100."
            )
        if self.preprocessing_num_workers is not None and self.preprocessing_num_workers < 1:
            raise RecipeError(f"preprocessing_num_workers={self.preprocessing_num_workers}: choose 1 or more.")
        _check_counts(self, "shuffle_buffer_size")


@dataclasses.dataclass
class FileArguments(SourceArguments):
    """The same, or files of one's own."""

    train_file: str | None = dataclasses.field(
        default=None,
        metadata={"help": "Training data: .txt, .json, .jsonl, .csv, .parquet, or a .zip that holds one."},
    )
    validation_file: str | None = dataclasses.field(
        default=None, metadata={"help": "Held-out data, of the same kind as train_file."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name is not None and self.train_file is not None:
            raise RecipeError(
                f"dataset_name={self.dataset_name!r} and train_file={self.train_file!r} both name the data: give one."
            )
        if self.validation_file is not None and self.train_file is None:
            raise RecipeError(f"validation_file={self.validation_file!r} needs train_file beside it.")


@dataclasses.dataclass
class DataArguments(FileArguments):
    """Which text is read, how it is held out and packed. Without any: the English prose that Python carries."""

    text_column: str = dataclasses.field(default="text", metadata={"help": "Column that holds the text."})
    sample_by: str = dataclasses.field(
        default="line", metadata={"help": "What one document of a .txt file is: line, paragraph or document (file)."}
    )
    character_spaced: bool = dataclasses.field(
        default=False,
        metadata={"help": "Put a space between all characters before tokenizing, as published runs did (README.md)."},
    )
    block_size: int = dataclasses.field(
        default=64, metadata={"help": "Tokens of a packed sequence, specials included."}
    )
    stream_validation_documents: int = dataclasses.field(
        default=500,
        metadata={"help": "First documents of a stream that are held out where it has no validation split."},
    )
    stream_tokenizer_documents: int = dataclasses.field(
        default=10_000, metadata={"help": "Training documents of a stream that the tokenizer is trained on."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming and self.dataset_name is None and self.train_file is None:
            raise RecipeError("streaming reads dataset_name or train_file: the built-in text is not streamed.")
        if self.sample_by not in ("line", "paragraph", "document"):
            raise RecipeError(f"sample_by={self.sample_by!r}: choose line, paragraph or document.")
        _check_counts(self, "stream_validation_documents", "stream_tokenizer_documents")


@dataclasses.dataclass
class MaskingArguments:
    """How many tokens of a sequence are to be predicted."""

    mlm_probability: float = dataclasses.field(
        default=0.15,
        metadata={"help": "Share of tokens that are predicted; of these 80 %% are masked, 10 %% random, 10 %% kept."},
    )

    def __post_init__(self) -> None:
        if not 0 < self.mlm_probability <= 1:
            raise RecipeError(f"mlm_probability={self.mlm_probability}: choose a share above 0 and up to 1.")


def check_one_gpu(arguments: TrainingArguments) -> None:
    """
    Checks that a process has one GPU at most: losses would be averaged over GPUs that hold unequal shares.

    Args:
        arguments (`TrainingArguments`):
            The run.

    Raises:
        RecipeError: if one process holds several GPUs (`DataParallel`).
    """
    if arguments.n_gpu > 1:
        raise RecipeError(
            f"one process sees {arguments.n_gpu} GPUs: start one process a GPU with `accelerate launch --multi_gpu "
            f"--num_processes {arguments.n_gpu}`, or show it one GPU by CUDA_VISIBLE_DEVICES."
        )


def _check_counts(arguments: Any, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) < 0:
            raise RecipeError(f"{name}={getattr(arguments, name)}: choose 0 or more.")


def parse_qk_init(value: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
    """
    Turns the `qk_init` argument into what `from_config(..., qk_init=...)` takes.

    Args:
        value (`dict`, `str` or `None`):
            A scheme's name, `"none"`, a JSON object as a string, or a mapping read from a file.

    Returns:
        `dict`, `str` or `None`: `None` for the model's own initialisation.

    Raises:
        RecipeError: if a string that opens a JSON object is not one.
    """
    if value is None or isinstance(value, dict):
        return value
    if value.strip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise RecipeError(f"qk_init={value!r} is not a JSON object: {error}") from None
    return None if value.lower() == "none" else value
