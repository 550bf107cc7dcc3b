"""Arguments shared by the recipes: dataclasses, and a parser that reads a file, the command line or both.

`TrainingArguments` is the class of Transformers, with every flag it documents. A recipe only changes *defaults*, and
only those of flags that the user left alone (see [`parse_arguments`]).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments


__all__ = [
    "DataArguments",
    "FileArguments",
    "MaskingArguments",
    "ModelArguments",
    "ParsedArguments",
    "RecipeError",
    "SourceArguments",
    "TokenizerArguments",
    "check_one_gpu",
    "parse_arguments",
    "parse_own_arguments",
    "parse_qk_init",
    "read_argument_file",
]

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Names the files that a file of arguments builds on.
EXTENDS = "extends"
# Mappings of which a later file changes entries; any other value it replaces as a whole.
JOINED = ("config_overrides",)
# What the command line names replaces what a file says of the same thing in other words.
REPLACES = {
    "train_file": ["validation_file", "dataset_name", "dataset_config_name"],
    "dataset_name": ["train_file", "validation_file", "dataset_config_name"],
    "model_type": ["config_name", "config_overrides"],
    "config_name": ["model_type", "config_overrides"],
    "num_train_epochs": ["max_steps"],
}


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
            "help": "Query-key initialisation: none (the model's own), symmetric, independent, a JSON object such as "
            '\'{"scheme": "symmetric", "layers": [0, 1]}\', or a mapping in a file.'
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


@dataclasses.dataclass
class ParsedArguments:
    """
    What [`parse_arguments`] read.

    Attributes:
        filled (`tuple`): The dataclasses, in the order asked for.
        used_defaults (`dict`): The recipe's defaults that were used.
        given (`set[str]`): Names of the arguments that the file or the command line gave.
    """

    filled: tuple[Any, ...]
    used_defaults: dict[str, Any]
    given: set[str]

    def changed(self) -> dict[str, Any]:
        """
        Arguments that differ from the defaults of their dataclasses, whoever set them.

        Returns:
            `dict`: name to a JSON value; tokens are replaced by their names.
        """
        changed: dict[str, Any] = {}
        for values in self.filled:
            shown = values.to_dict() if hasattr(values, "to_dict") else dataclasses.asdict(values)
            for field in dataclasses.fields(values):
                default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                named = field.name in self.given or field.name in self.used_defaults
                if named and field.name in shown and shown[field.name] != default:
                    changed[field.name] = shown[field.name]
        return changed


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


def parse_arguments(
    dataclass_types: Sequence[type],
    defaults: Mapping[str, Any],
    argv: Sequence[str],
    *,
    unless_given: Mapping[str, Iterable[str]] | None = None,
) -> ParsedArguments:
    """
    Reads the arguments of a recipe from one YAML or JSON file, from the command line, or from both (the command line
    wins: `--train_file` also over a `dataset_name` of the file, `--model_type` also over its `config_overrides`).

    A file may build on others: `extends: [parts/base.yaml, parts/data.yaml]`, paths beside it. A later one wins over
    an earlier one and the file itself over all of them; the entries of their `config_overrides` are joined.

    Args:
        dataclass_types (sequence of `type`):
            Dataclasses to fill, in the order in which they are returned.
        defaults (mapping):
            The recipe's own defaults, for flags that neither the file nor the command line gives.
        argv (sequence of `str`):
            Words of the command line, without the program. The first may be the path of a file.
        unless_given (mapping of `str` to names, *optional*):
            `{"max_steps": ["num_train_epochs"]}` drops the recipe's default of `max_steps` where the user gave
            `num_train_epochs`, so that a default never overrules a wish.

    Returns:
        `ParsedArguments`: the filled dataclasses, the recipe's defaults that were used, and what was given.

    Raises:
        RecipeError: for a file that is missing, unreadable or holds unknown keys, for an argument that no dataclass
            knows, and for a value that a dataclass rejects.
    """
    words = list(argv)
    parser = _parser(dataclass_types)
    from_file: dict[str, Any] = {}
    if words and words[0].lower().endswith(CONFIG_SUFFIXES) and not words[0].startswith("-"):
        from_file = read_argument_file(Path(words.pop(0)))
        _check_file(from_file, dataclass_types)

    on_command_line = _given_on_command_line(dataclass_types, words)
    replaced = {other for name in on_command_line for other in REPLACES.get(name, ())}
    from_file = {name: value for name, value in from_file.items() if name not in replaced}
    given = set(from_file) | on_command_line
    used = {name: value for name, value in defaults.items() if name not in given}
    for name, others in (unless_given or {}).items():
        if given & set(others):
            used.pop(name, None)

    # Strings among the defaults go through the type of their flag like words of the command line do: a YAML `1e-3`,
    # which YAML reads as a string, is a number here.
    parser.set_defaults(**used, **from_file)
    try:
        filled = parser.parse_args_into_dataclasses(args=words, look_for_args_file=False)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return ParsedArguments(tuple(filled), used, given)


def _parser(dataclass_types: Sequence[Any], add_help: bool = True) -> HfArgumentParser:
    # argparse would let flags be shortened; a command that is kept in scripts must not change its meaning when a
    # longer flag with the same beginning appears.
    return HfArgumentParser(list(dataclass_types), allow_abbrev=False, add_help=add_help)


def parse_own_arguments(dataclass_type: Any, argv: Sequence[str]) -> tuple[Any, list[str]]:
    """
    Reads the arguments of a program that hands the others on to a recipe.

    Args:
        dataclass_type (`type`):
            Dataclass to fill.
        argv (sequence of `str`):
            Words of the command line, without the program.

    Returns:
        `tuple`: the filled dataclass, and the words that it does not know, in their order.

    Raises:
        RecipeError: for a value that the dataclass rejects.
    """
    filled, rest = _parser([dataclass_type]).parse_args_into_dataclasses(
        args=list(argv), look_for_args_file=False, return_remaining_strings=True
    )
    return filled, list(rest)


def read_argument_file(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """
    Reads a file of arguments, joined with the files that it extends.

    Args:
        path (`Path`):
            A YAML or JSON file.
        extended_by (`tuple[Path, ...]`, *optional*):
            The files that led here, each extending the next.

    Returns:
        `dict`: name to value.

    Raises:
        RecipeError: if it is missing, unreadable, no mapping, or extends itself.
    """
    path = path.resolve() if extended_by else path
    if not path.is_file():
        by = f", which {str(extended_by[-1])!r} extends," if extended_by else ""
        raise RecipeError(f"argument file {str(path)!r}{by} does not exist (working folder: {os.getcwd()!r}).")
    if path.resolve() in [other.resolve() for other in extended_by]:
        raise RecipeError(
            f"argument file {str(path)!r} extends itself: {' -> '.join(map(str, [*extended_by, path]))}."
        )
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"argument file {str(path)!r} cannot be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeError(f"argument file {str(path)!r} holds a {type(content).__name__}, not a mapping of arguments.")
    bases = content.pop(EXTENDS, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise RecipeError(f"argument file {str(path)!r}: {EXTENDS} must be a path or a list of paths, not {bases!r}.")
    joined: dict[str, Any] = {}
    for part in [*(read_argument_file(path.parent / base, (*extended_by, path)) for base in bases), content]:
        for name, value in part.items():
            both = name in JOINED and isinstance(joined.get(name), dict) and isinstance(value, dict)
            joined[name] = {**joined[name], **value} if both else value
    return joined


def _check_file(content: Mapping[str, Any], dataclass_types: Sequence[type]) -> None:
    hints: dict[str, Any] = {}
    for dataclass_type in dataclass_types:
        types = typing.get_type_hints(dataclass_type)
        hints.update({field.name: types[field.name] for field in dataclasses.fields(dataclass_type) if field.init})
    unknown = sorted(str(key) for key in content if key not in hints)
    if unknown:
        raise RecipeError(f"the argument file holds unknown keys: {', '.join(unknown)}.")
    for name, value in content.items():
        # YAML 1.1 reads the bare words no, off, yes and on as booleans: `eval_strategy: no` arrives as False.
        accepted = typing.get_args(hints[name]) or (hints[name],)
        if isinstance(value, bool) and bool not in accepted:
            raise RecipeError(
                f"{name}: {value} in the argument file is a boolean, which {name} does not take. YAML reads the words "
                f"no, off, yes and on so: put the word in quotes."
            )


def _given_on_command_line(dataclass_types: Sequence[type], words: Sequence[str]) -> set[str]:
    """Names of the flags among the words, whatever their values."""
    # Without --help, which is to show the defaults that this parser suppresses.
    parser = _parser(dataclass_types, add_help=False)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    namespace, _ = parser.parse_known_args(list(words))
    return set(vars(namespace))
