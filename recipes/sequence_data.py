"""Labelled text for `finetune.py`: GLUE tasks, files and datasets of one's own, and passages of the built-in text.

splits with one or two text columns and a label  ->  token ids of each example
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
from arguments import FileArguments, RecipeError
from builtin_text import builtin_documents
from text_data import SPLIT_SEED, load_parts
from transformers import PreTrainedTokenizerBase


__all__ = [
    "TASKS",
    "SequenceArguments",
    "SequenceEncoder",
    "builtin_passages",
    "check_text",
    "load_sequences",
    "sequence_dataset",
    "sequence_source",
    "tokenize_examples",
]

GLUE = "nyu-mll/glue"


class Task(NamedTuple):
    """Columns of a GLUE task, and the split that it is judged by."""

    text_column: str
    text_pair_column: str | None = None
    validation_split: str = "validation"


TASKS = {
    "cola": Task("sentence"),
    "sst2": Task("sentence"),
    "mrpc": Task("sentence1", "sentence2"),
    "stsb": Task("sentence1", "sentence2"),
    "qqp": Task("question1", "question2"),
    "mnli": Task("premise", "hypothesis", "validation_matched"),
    "qnli": Task("question", "sentence"),
    "rte": Task("sentence1", "sentence2"),
    "wnli": Task("sentence1", "sentence2"),
}
# Passages of the built-in text: characters of one, and how many of each class are taken.
SHORTEST, LONGEST = 40, 160
PASSAGES = {"train": 2_000, "validation": 300}
HELD_OUT_DOCUMENTS = 0.15


@dataclasses.dataclass
class SequenceArguments(FileArguments):
    """
    Which labelled text is read. Without any: passages of the built-in text, to be told apart by where they come from,
    the language reference or a docstring of the library.
    """

    validation_split_percentage: float = dataclasses.field(
        default=10.0,
        metadata={"help": "Share (%%) of the data held out where it has no validation split. The same in every run."},
    )
    task_name: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": f"A GLUE task: {', '.join(TASKS)}. It gives the columns and the metrics, and where nothing else "
            f"names the data, reads {GLUE} from the Hub."
        },
    )
    text_column: str | None = dataclasses.field(
        default=None, metadata={"help": "Column that holds the text: the task's, or text, unless given."}
    )
    text_pair_column: str | None = dataclasses.field(
        default=None, metadata={"help": "Column of a second text, where each example is a pair."}
    )
    max_length: int = dataclasses.field(
        default=128,
        metadata={"help": "Tokens of an example; longer ones are cut, batches padded to their longest."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_name is not None and self.task_name not in TASKS:
            raise RecipeError(f"task_name={self.task_name!r}: choose one of {', '.join(TASKS)}.")
        if self.text_column is None:
            task = TASKS.get(self.task_name or "")
            self.text_column = "text" if task is None else task.text_column
            if self.text_pair_column is None and task is not None:
                self.text_pair_column = task.text_pair_column
        if self.streaming and self.builtin:
            raise RecipeError("streaming reads a task, dataset_name or train_file: the built-in text is not streamed.")
        if self.builtin and (self.text_column != "text" or self.text_pair_column is not None):
            raise RecipeError(
                f"text_column={self.text_column!r} and text_pair_column={self.text_pair_column!r}: the built-in "
                "passages have the column text only."
            )
        if self.max_length < 1:
            raise RecipeError(f"max_length={self.max_length}: choose 1 or more.")

    @property
    def builtin(self) -> bool:
        """Whether the data are the passages of the built-in text."""
        return self.task_name is None and self.dataset_name is None and self.train_file is None

    @property
    def text_columns(self) -> dict[str, str]:
        """Argument to column, of the one or two texts."""
        columns = {"text_column": self.text_column, "text_pair_column": self.text_pair_column}
        return {argument: column for argument, column in columns.items() if column is not None}


def sequence_source(arguments: SequenceArguments) -> str:
    """Returns what the data are called in messages and in the record of a run."""
    named = arguments.dataset_name or arguments.train_file
    if named is not None:
        return repr(named)
    return "the passages of the built-in text" if arguments.builtin else f"{arguments.task_name} of {GLUE}"


def sequence_dataset(arguments: SequenceArguments) -> dict[str, str]:
    """Returns what the record of a run adds of a dataset that no argument names: that of a GLUE task."""
    if arguments.task_name is None or arguments.dataset_name is not None or arguments.train_file is not None:
        return {}
    return {"dataset": GLUE, "dataset_config": arguments.task_name}


def load_sequences(arguments: SequenceArguments, validation_split: str) -> dict[str, Any]:
    """
    Loads the text that the arguments name, or the built-in passages.

    Args:
        arguments (`SequenceArguments`):
            Where it is.
        validation_split (`str`):
            Name of the split that is held out, which `validation_file` becomes.

    Returns:
        `dict`: split to `datasets.Dataset` or `datasets.IterableDataset`.

    Raises:
        RecipeError: if it cannot be loaded.
    """
    if arguments.builtin:
        return builtin_passages()
    if glue := sequence_dataset(arguments):
        names: dict[str, Any] = {"dataset_name": glue["dataset"], "dataset_config_name": glue["dataset_config"]}
        arguments = dataclasses.replace(arguments, **names)
    parts = load_parts(arguments)
    for part in parts.values():
        if isinstance(part, datasets.IterableDataset) and part.features is not None:
            _check_kinds(part.features, arguments.text_columns, sequence_source(arguments))
    if arguments.train_file is not None and "validation" in parts:
        parts[validation_split] = parts.pop("validation")
    return parts


def builtin_passages() -> dict[str, datasets.Dataset]:
    """
    Returns passages of the built-in text, as many of each class: of the language reference, and of the docstrings of
    the library. Held-out passages are of documents that no training passage is of.

    Returns:
        `dict`: `"train"` and `"validation"`, columns `text` and `label`.

    Raises:
        RecipeError: if the interpreter came without the source of its standard library.
    """
    kinds = {"topic": "reference", "module": "docstring"}
    found: dict[str, dict[str, list[str]]] = {split: {kind: [] for kind in kinds} for split in PASSAGES}
    documents = builtin_documents()
    drawn = np.random.default_rng(SPLIT_SEED).random(len(documents))
    held_out = (drawn < HELD_OUT_DOCUMENTS).tolist()
    # Some topics share passages: held-out ones come first, and a passage is taken once.
    seen: set[str] = set()
    for split, wanted in (("validation", True), ("train", False)):
        for document, is_held_out in zip(documents, held_out, strict=True):
            if is_held_out == wanted:
                passages = [passage for passage in _passages(document["text"]) if passage not in seen]
                seen.update(passages)
                found[split][document["name"].split(":")[0]].extend(passages)
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(kinds.values()))}
    )
    splits = {}
    for split, most in PASSAGES.items():
        number = min(most, *(len(texts) for texts in found[split].values()))
        content: dict[str, list[Any]] = {"text": [], "label": []}
        for kind, texts in found[split].items():
            order = np.random.default_rng(SPLIT_SEED).permutation(len(texts))[:number]
            content["text"].extend(texts[place] for place in order)
            content["label"].extend([kinds[kind]] * number)
        splits[split] = datasets.Dataset.from_dict(content, features=features)
    return splits


def _passages(text: str) -> Iterable[str]:
    for words in dict.fromkeys(" ".join(passage.split()) for passage in text.split("\n\n")):
        # Without letters it is a line of a table; without spaces, a name.
        if SHORTEST <= len(words) <= LONGEST and " " in words and any(letter.isalpha() for letter in words):
            yield words


def check_text(rows: datasets.Dataset, columns: Mapping[str, str], what: str) -> None:
    """
    Checks that columns hold text.

    Args:
        rows (`datasets.Dataset`):
            The rows.
        columns (mapping of `str` to `str`):
            Argument to column.
        what (`str`):
            What the rows are called in messages.

    Raises:
        RecipeError: if a column holds something else, or is empty somewhere.
    """
    _check_kinds(rows.features, columns, what)
    for column in columns.values():
        missing = sum(text is None for text in rows[column])
        if missing:
            raise RecipeError(f"{missing} of the {len(rows)} examples of {what} have no text in column {column!r}.")


def _check_kinds(features: datasets.Features, columns: Mapping[str, str], what: str) -> None:
    for argument, column in columns.items():
        # A column that is not there is named with those that are, when labels are looked at.
        dtype = getattr(features.get(column), "dtype", None)
        if column in features and dtype not in ("string", "large_string"):
            raise RecipeError(
                f"column {column!r} of {what} holds {dtype or features[column]}, not text: name another by "
                f"--{argument}."
            )


def tokenize_examples(
    rows: Mapping[str, Sequence[str]], columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list[list[int]]]:
    """
    Tokenizes texts, or pairs of texts, and cuts them.

    Args:
        rows (mapping):
            Columns of some rows.
        columns (sequence of `str`):
            One or two columns of text.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        max_length (`int`):
            Tokens of an example, special ones included.

    Returns:
        `dict`: what the tokenizer gives its model, but for the attention mask.

    Raises:
        RecipeError: if something is no text, which of a stream shows only when it is read.
    """
    for column in columns:
        for text in rows[column]:
            if not isinstance(text, str):
                raise RecipeError(f"an example has {text!r} for text in column {column!r}: mend it, or leave it out.")
    texts = [list(rows[column]) for column in columns]
    return dict(tokenizer(*texts, truncation=True, max_length=max_length, return_attention_mask=False))


class SequenceEncoder:
    """
    Turns rows into examples: of token ids, where they were tokenized before, or of text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        columns (sequence of `str`):
            One or two columns of text.
        max_length (`int`):
            Tokens of an example.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], max_length: int) -> None:
        self.tokenizer = tokenizer
        self.columns = list(columns)
        self.max_length = max_length

    def __call__(self, columns: Mapping[str, Any], keys: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """
        Encodes some rows.

        Args:
            columns (mapping):
                Their columns.
            keys (sequence of `(epoch, index)`):
                Not used.

        Returns:
            `list[dict]`: `input_ids` and whatever else the tokenizer gives its model, each of shape `(N,)`.
        """
        if "input_ids" not in columns:
            columns = tokenize_examples(columns, self.columns, self.tokenizer, self.max_length)
        names = [name for name in self.tokenizer.model_input_names if name in columns]
        return [{name: columns[name][place] for name in names} for place in range(len(keys))]
