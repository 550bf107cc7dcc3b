"""Text for the language-model recipes: documents from files, from the Hub or built in, and their hold-out."""

from __future__ import annotations

import codecs
import dataclasses
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from archives import extract_member
from arguments import DataArguments, FileArguments, RecipeError, SourceArguments
from builtin_text import builtin_documents


__all__ = [
    "Documents",
    "check_column",
    "load_documents",
    "load_parts",
    "load_splits",
]

logger = logging.getLogger(__name__)

FILE_KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
ARCHIVE = ".zip"
DECODED_AT_ONCE = 2**20
DECODED_AT_MOST = 2**28  # at the start of a file: about a second
# Which documents are held out must not vary with the seed of a run: losses of two runs are compared on them.
SPLIT_SEED = 20_000


@dataclasses.dataclass
class Documents:
    """Training and held-out documents; the training part is a stream where `streaming` was asked for."""

    train: datasets.Dataset | datasets.IterableDataset
    held_out: datasets.Dataset | None
    text_column: str
    source: str


def load_documents(arguments: DataArguments) -> Documents:
    """
    Loads the text that the arguments name, or the built-in text, and holds a part out by document.

    Args:
        arguments (`DataArguments`):
            Where the text is, and how much of it is held out.

    Returns:
        `Documents`: documents with some text in them; empty ones are dropped, and counted in a log message.

    Raises:
        RecipeError: if a file or split is missing, holds no text, lacks the text column, or has too few documents to
            hold one out.
    """
    column = arguments.text_column
    builtin = arguments.dataset_name is None and arguments.train_file is None
    if builtin:
        if column != "text":
            raise RecipeError(f"text_column={column!r}: the built-in text has the column text only.")
        parts: dict[str, Any] = {"train": builtin_documents()}
    else:
        parts = load_parts(arguments, arguments.sample_by)
    if "train" not in parts:
        raise RecipeError(
            f"dataset_name={arguments.dataset_name!r} has no split named train; it has {', '.join(sorted(parts))}."
        )
    source = arguments.dataset_name or arguments.train_file or "built-in text"
    train, held_out = parts["train"], parts.get("validation")
    if isinstance(train, datasets.IterableDataset):
        return _hold_out_of_stream(train, held_out, column, source, arguments)

    if not builtin:
        train = _with_text(train, column, f"the training text of {source!r}")
    if held_out is not None:
        held_out = _with_text(held_out, column, f"the held-out text of {arguments.validation_file or source!r}")
    elif arguments.validation_split_percentage > 0:
        wanted = max(1, round(len(train) * arguments.validation_split_percentage / 100))
        if len(train) - wanted < 1:
            raise RecipeError(
                f"{source!r} has {len(train)} document(s), too few to hold {wanted} out: give --validation_file, "
                "--sample_by line or paragraph for a text file, or --validation_split_percentage 0 with "
                "--do_eval false."
            )
        # `train_test_split` writes its indices beside the data, which may be a checked folder of ours, and cannot keep
        # them in memory (Datasets 5.2).
        order = np.random.default_rng(SPLIT_SEED).permutation(len(train))
        held_out = train.select(np.sort(order[:wanted]), keep_in_memory=True)
        train = train.select(np.sort(order[wanted:]), keep_in_memory=True)
    return Documents(train, held_out, column, source)


def load_splits(arguments: SourceArguments) -> dict[str, Any]:
    """
    Loads the splits of the dataset that the arguments name.

    Args:
        arguments (`SourceArguments`):
            Name a dataset.

    Returns:
        `dict`: split to `Dataset` or, with `streaming`, `IterableDataset`.

    Raises:
        RecipeError: if the dataset cannot be loaded.
    """
    try:
        loaded = datasets.load_dataset(
            arguments.dataset_name, arguments.dataset_config_name, streaming=arguments.streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RecipeError(f"dataset_name={arguments.dataset_name!r} cannot be loaded: {error}") from error
    return dict(loaded)


def load_parts(arguments: FileArguments, sample_by: str = "line") -> dict[str, Any]:
    """
    Loads the splits of the dataset, or the files, that the arguments name.

    Args:
        arguments (`FileArguments`):
            Name a dataset or a training file.
        sample_by (`str`, *optional*, defaults to `"line"`):
            What one row of a `.txt` file is: `"line"`, `"paragraph"` or `"document"`.

    Returns:
        `dict`: split (of files, `"train"` and perhaps `"validation"`) to `Dataset` or, with `streaming`,
        `IterableDataset`.

    Raises:
        RecipeError: if the dataset or a file is missing, empty or cannot be read.
    """
    if arguments.dataset_name is not None:
        return load_splits(arguments)
    assert arguments.train_file is not None
    files = {"train": arguments.train_file}
    if arguments.validation_file is not None:
        files["validation"] = arguments.validation_file
    for split, path in files.items():
        _check_file(split, path)
    return {split: _load_file(split, path, sample_by, arguments.streaming) for split, path in files.items()}


def check_column(
    part: datasets.Dataset | datasets.IterableDataset, column: str, what: str, columns: list[str]
) -> None:
    """
    Checks that a column of text is there.

    Args:
        part (`Dataset` or `IterableDataset`):
            The data.
        column (`str`):
            The column.
        what (`str`):
            How the error calls the data.
        columns (`list[str]`):
            The columns that it has.

    Raises:
        RecipeError: if there is no such column, or it holds something else than text.
    """
    if column not in columns:
        raise RecipeError(f"{what} has no column {column!r}: it has {', '.join(columns)}. Name one by --text_column.")
    if part.features is None:  # a stream that declares nothing: looked at row by row
        return
    feature = part.features[column]
    # A column of text and something else has a feature without a dtype (Json).
    dtype = getattr(feature, "dtype", None)
    if dtype not in ("string", "large_string", "null"):
        raise RecipeError(
            f"column {column!r} of {what} holds {dtype or feature}, not text: name another by --text_column."
        )


def _check_file(split: str, path: str) -> None:
    name = "train_file" if split == "train" else "validation_file"
    file, known = Path(path), [*FILE_KINDS, ARCHIVE]
    if file.suffix.lower() not in known:
        raise RecipeError(f"{name}={path!r}: the suffix must be one of {', '.join(known)}.")
    if not file.is_file():
        raise RecipeError(f"{name}={path!r} does not exist.")
    if file.stat().st_size == 0:
        raise RecipeError(f"{name}={path!r} is empty: give a file with text.")


def _load_file(split: str, path: str, sample_by: str, streaming: bool) -> Any:
    file = extract_member(path, split, FILE_KINDS) if path.lower().endswith(ARCHIVE) else path
    kind = FILE_KINDS[Path(file).suffix.lower()]
    extra = {"sample_by": sample_by} if kind == "text" else {}
    if kind != "parquet":
        _check_encoding(file, path)
    try:
        return datasets.load_dataset(kind, data_files={split: file}, split=split, streaming=streaming, **extra)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RecipeError(f"{path!r} cannot be read as {kind}: {error.__cause__ or error}") from error


def _check_encoding(file: str, name: str) -> None:
    """Datasets decodes some kinds of files only when their rows are read, and streams in the middle of a run."""
    decoder, line, position = codecs.getincrementaldecoder("utf-8")(), 1, 0
    with open(file, "rb") as source:
        while position < DECODED_AT_MOST:
            chunk = source.read(DECODED_AT_ONCE)
            position += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise RecipeError(
                    f"{name!r} is not UTF-8 (byte 0x{error.object[error.start]:02x} in line {line}): convert it, for "
                    "example by iconv -f latin1 -t utf-8."
                ) from error
            if not chunk:
                return
            line += text.count("\n")


def _has_text(text: str | None) -> bool:
    if not isinstance(text, str | None):
        raise RecipeError(f"a document is {str(text)[:80]!r} ({type(text).__name__}), not text: leave it out.")
    return bool(text and text.strip())


def _with_text(part: datasets.Dataset, column: str, what: str) -> datasets.Dataset:
    check_column(part, column, what, part.column_names)
    kept = part.filter(_has_text, input_columns=[column], desc="Dropping empty documents")
    if len(kept) == 0:
        raise RecipeError(f"{what} is empty: none of its {len(part)} documents has any text in column {column!r}.")
    if len(kept) < len(part):
        logger.warning("%d of the %d documents of %s are empty: dropped", len(part) - len(kept), len(part), what)
    return kept


def _hold_out_of_stream(
    train: datasets.IterableDataset,
    held_out: datasets.IterableDataset | None,
    column: str,
    source: str,
    arguments: DataArguments,
) -> Documents:
    """Splits a stream; its held-out part is small and becomes a dataset in memory."""
    what = f"the training text of {source!r}"
    first = next(iter(train), None)
    if first is None:
        raise RecipeError(f"{what} is empty: give a file or split with text.")
    check_column(train, column, what, list(first))
    train = train.filter(_has_text, input_columns=[column])
    count = arguments.stream_validation_documents
    if held_out is not None:
        rows = held_out.take(count) if count else held_out
        held = [row[column] for row in rows if column in row and _has_text(row[column])]
        if not held:
            raise RecipeError(f"the validation split of {source!r} has no text in column {column!r}.")
    else:
        held = [row[column] for row in train.take(count)]
        train = train.skip(count)
    if next(iter(train), None) is None:
        raise RecipeError(
            f"{what} has no text beyond the {len(held)} held-out documents: give more text, or lower "
            "--stream_validation_documents."
        )
    return Documents(train, datasets.Dataset.from_dict({column: held}) if held else None, column, source)
