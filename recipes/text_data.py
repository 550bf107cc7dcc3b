"""Text for the language-model recipes: documents, their hold-out, and sequences packed to the block length.

    documents (one text a row)  ->  token ids a document  ->  blocks of exactly N tokens

A block is `[CLS] … [SEP]`; documents follow each other inside it, separated by `[SEP]`, so that nothing is padded.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from arguments import DataArguments, FileArguments, RecipeError
from builtin_text import builtin_documents
from file_cache import cached_folder
from tokenization import tokenizer_digest
from transformers import PreTrainedTokenizerBase


__all__ = [
    "Documents",
    "check_block_size",
    "load_documents",
    "load_parts",
    "pack",
    "packed_dataset",
    "tokenize",
]

logger = logging.getLogger(__name__)

FILE_KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Which documents are held out must not vary with the seed of a run: losses of two runs are compared on them.
SPLIT_SEED = 20_000
TOKENIZED_AT_ONCE = 1000


@dataclasses.dataclass
class Documents:
    """Training and held-out documents; the training part is a stream where `streaming` was asked for."""

    train: datasets.Dataset | datasets.IterableDataset
    held_out: datasets.Dataset | None
    text_column: str


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
    source = arguments.dataset_name or arguments.train_file or "the built-in text"
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
                "--eval_strategy no."
            )
        # `train_test_split` writes its indices beside the data, which may be a checked folder of ours, and cannot keep
        # them in memory (Datasets 5.2).
        order = np.random.default_rng(SPLIT_SEED).permutation(len(train))
        held_out = train.select(np.sort(order[:wanted]), keep_in_memory=True)
        train = train.select(np.sort(order[wanted:]), keep_in_memory=True)
    return Documents(train, held_out, column)


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
        try:
            loaded = datasets.load_dataset(
                arguments.dataset_name, arguments.dataset_config_name, streaming=arguments.streaming
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise RecipeError(f"dataset_name={arguments.dataset_name!r} cannot be loaded: {error}") from error
        return dict(loaded)
    assert arguments.train_file is not None
    files = {"train": arguments.train_file}
    if arguments.validation_file is not None:
        files["validation"] = arguments.validation_file
    kinds = {split: _file_kind(split, path) for split, path in files.items()}
    parts: dict[str, Any] = {}
    for split, path in files.items():
        extra = {"sample_by": sample_by} if kinds[split] == "text" else {}
        try:
            parts[split] = datasets.load_dataset(
                kinds[split], data_files={split: path}, split=split, streaming=arguments.streaming, **extra
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            cause = error.__cause__ or error
            raise RecipeError(f"{path!r} cannot be read as {kinds[split]}: {cause}") from error
    return parts


def check_block_size(block_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Checks that a block has room for text, and that the tokenizer's model takes blocks of that length.

    Args:
        block_size (`int`):
            Tokens of a block, special ones included.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.

    Raises:
        RecipeError: if it has none, or is longer than the tokenizer's `model_max_length`.
    """
    specials = (tokenizer.cls_token_id is not None) + (tokenizer.sep_token_id is not None)
    if block_size <= specials:
        raise RecipeError(f"block_size={block_size} leaves no room for text beside {specials} special tokens.")
    if block_size > tokenizer.model_max_length:
        raise RecipeError(
            f"block_size={block_size} is above the {tokenizer.model_max_length} tokens that the tokenizer declares "
            "(model_max_length): lower --block_size."
        )


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """
    Tokenizes whole documents, without special tokens.

    Args:
        texts (sequence of `str`):
            Documents.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.

    Returns:
        `list[list[int]]`: token ids of each document. Their length is not limited: [`pack`] cuts them.
    """
    # verbose=False: a document is meant to be longer than the model's input here.
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return encoded["input_ids"]


def pack(
    documents: Iterable[Sequence[int]], block_size: int, cls_token_id: int | None, sep_token_id: int | None
) -> Iterator[list[int]]:
    """
    Packs documents into blocks of one length. The rest after the last whole block is dropped.

    Args:
        documents (iterable of sequences of `int`):
            Token ids of each document.
        block_size (`int`):
            Tokens of a block.
        cls_token_id (`int` or `None`):
            Opens each block, if there is such a token.
        sep_token_id (`int` or `None`):
            Closes each block and follows each document, if there is such a token.

    Yields:
        `list[int]`: `block_size` token ids.
    """
    head = [] if cls_token_id is None else [cls_token_id]
    tail = [] if sep_token_id is None else [sep_token_id]
    room = block_size - len(head) - len(tail)
    waiting: list[int] = []
    for document in documents:
        waiting.extend(document)
        waiting.extend(tail)
        start = 0
        while len(waiting) - start >= room:
            yield head + waiting[start : start + room] + tail
            start += room
        waiting = waiting[start:]


def packed_dataset(
    documents: datasets.Dataset,
    text_column: str,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    num_workers: int | None = None,
    name: str = "packed",
) -> datasets.Dataset:
    """
    Tokenizes and packs documents, from the cache where that was done before.

    Args:
        documents (`datasets.Dataset`):
            Documents, in the order in which they are packed.
        text_column (`str`):
            Their column of text.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        block_size (`int`):
            Tokens of a block.
        num_workers (`int`, *optional*):
            Processes that tokenize; the blocks do not depend on it.
        name (`str`, *optional*, defaults to `"packed"`):
            Readable part of the cache folder's name.

    Returns:
        `datasets.Dataset`: column `input_ids`, each row of `block_size` ids.

    Raises:
        RecipeError: if all the documents together do not fill one block.
    """
    key = {
        "documents": documents._fingerprint,
        "text_column": text_column,
        "tokenizer": tokenizer_digest(tokenizer),
        "block_size": block_size,
        "cls": tokenizer.cls_token_id,
        "sep": tokenizer.sep_token_id,
    }

    def build(folder: Path) -> None:
        work = folder / "work"
        work.mkdir()
        tokenized = documents.map(
            _tokenize_rows,
            batched=True,
            batch_size=TOKENIZED_AT_ONCE,
            num_proc=num_workers,
            remove_columns=documents.column_names,
            fn_kwargs={"text_column": text_column, "tokenizer": tokenizer},
            cache_file_name=str(work / "tokenized.arrow"),
            new_fingerprint=f"{documents._fingerprint[:32]}-tokenized",
            desc="Tokenizing",
        )
        packing = {
            "tokenized": tokenized,
            "block_size": block_size,
            "cls_token_id": tokenizer.cls_token_id,
            "sep_token_id": tokenizer.sep_token_id,
        }
        if next(_packed_rows(**packing), None) is None:
            raise RecipeError(
                f"{name}: {len(documents)} document(s) do not fill one block of {block_size} tokens: lower "
                "--block_size or give more text."
            )
        # One process packs, in the order of the documents: how many tokenized them must not move a block's border.
        blocks = datasets.Dataset.from_generator(
            _packed_rows,
            features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}),
            cache_dir=str(work / "packed"),
            gen_kwargs=packing,
            fingerprint=f"{documents._fingerprint[:32]}-packed",
        )
        blocks.save_to_disk(str(folder / "blocks"))

    return datasets.Dataset.load_from_disk(str(cached_folder(name, key, build) / "blocks"))


def _tokenize_rows(
    rows: dict[str, list[str]], text_column: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[list[int]]]:
    return {"input_ids": tokenize(rows[text_column], tokenizer)}


def _packed_rows(
    tokenized: datasets.Dataset, block_size: int, cls_token_id: int | None, sep_token_id: int | None
) -> Iterator[dict[str, list[int]]]:
    ids = (document for batch in tokenized.iter(batch_size=TOKENIZED_AT_ONCE) for document in batch["input_ids"])
    for block in pack(ids, block_size, cls_token_id, sep_token_id):
        yield {"input_ids": block}


def _file_kind(split: str, path: str) -> str:
    name = "train_file" if split == "train" else "validation_file"
    file = Path(path)
    if file.suffix.lower() not in FILE_KINDS:
        raise RecipeError(f"{name}={path!r}: the suffix must be one of {', '.join(FILE_KINDS)}.")
    if not file.is_file():
        raise RecipeError(f"{name}={path!r} does not exist.")
    if file.stat().st_size == 0:
        raise RecipeError(f"{name}={path!r} is empty: give a file with text.")
    return FILE_KINDS[file.suffix.lower()]


def _check_column(
    part: datasets.Dataset | datasets.IterableDataset, column: str, what: str, columns: list[str]
) -> None:
    if column not in columns:
        raise RecipeError(f"{what} has no column {column!r}: it has {', '.join(columns)}. Name one by --text_column.")
    dtype = getattr(part.features[column], "dtype", None) if part.features is not None else None
    if dtype is not None and dtype not in ("string", "large_string", "null"):
        raise RecipeError(f"column {column!r} of {what} holds {dtype}, not text: name another by --text_column.")


def _has_text(text: str | None) -> bool:
    return bool(text and text.strip())


def _with_text(part: datasets.Dataset, column: str, what: str) -> datasets.Dataset:
    _check_column(part, column, what, part.column_names)
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
    _check_column(train, column, what, list(first))
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
    return Documents(train, datasets.Dataset.from_dict({column: held}) if held else None, column)
