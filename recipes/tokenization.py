"""The tokenizer of a text recipe: loaded, or trained on the training documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import tokenizers
from arguments import DataArguments, RecipeError, TokenizerArguments
from file_cache import cached_folder
from tokenizers import decoders, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


__all__ = ["choose_tokenizer", "load_tokenizer", "tokenizer_digest", "train_tokenizer", "trained_tokenizer"]

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "unk_token": "[UNK]",
}


def choose_tokenizer(
    tokenizer_arguments: TokenizerArguments,
    data_arguments: DataArguments,
    documents: datasets.Dataset | datasets.IterableDataset,
    text_column: str,
) -> PreTrainedTokenizerBase:
    """
    Loads the tokenizer that the arguments name, or trains one on the training documents.

    Args:
        tokenizer_arguments (`TokenizerArguments`):
            Name a tokenizer, or the size of the one that is trained.
        data_arguments (`DataArguments`):
            How many documents of a stream it is trained on.
        documents (`datasets.Dataset` or `datasets.IterableDataset`):
            The training documents.
        text_column (`str`):
            Their column of text.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer.

    Raises:
        RecipeError: see [`load_tokenizer`] and [`train_tokenizer`].
    """
    if tokenizer_arguments.tokenizer_name is not None:
        return load_tokenizer(tokenizer_arguments.tokenizer_name)
    if isinstance(documents, datasets.IterableDataset):
        rows = documents.take(data_arguments.stream_tokenizer_documents)
        documents = datasets.Dataset.from_dict({text_column: [row[text_column] for row in rows]})
    return trained_tokenizer(documents, text_column, tokenizer_arguments.vocab_size)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer for masked language modelling.

    Args:
        name (`str`):
            Folder or Hub id.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer, which has a mask token.

    Raises:
        RecipeError: if there is no such tokenizer, or it has no mask token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"tokenizer_name={name!r} cannot be loaded: {error}") from error
    if tokenizer.mask_token_id is None:
        raise RecipeError(
            f"tokenizer_name={name!r} has no mask token, which masked language modelling needs: choose the tokenizer "
            "of an encoder, or leave --tokenizer_name out to have one trained."
        )
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer, which knows every text (no unknown token is ever produced).

    Args:
        documents (iterable of `str`):
            Training text.
        vocab_size (`int`):
            Entries, the 256 bytes and the special tokens included.

    Returns:
        `PreTrainedTokenizerFast`: with tokens for padding, mask, and begin and end of a sequence.

    Raises:
        RecipeError: if `vocab_size` does not hold the bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise RecipeError(
            f"vocab_size={vocab_size} is below {smallest}, the {len(alphabet)} bytes and {len(SPECIAL_TOKENS)} "
            "special tokens of the trained tokenizer: raise it."
        )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = list(SPECIAL_TOKENS.values())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents, trainer)
    cls, sep = SPECIAL_TOKENS["cls_token"], SPECIAL_TOKENS["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, special_tokens.index(cls)), (sep, special_tokens.index(sep))],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)


def trained_tokenizer(documents: datasets.Dataset, text_column: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """
    Trains a tokenizer on documents, or loads the one that was trained on them before.

    Args:
        documents (`datasets.Dataset`):
            The training documents.
        text_column (`str`):
            Their column of text.
        vocab_size (`int`):
            See [`train_tokenizer`].

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer.

    Raises:
        RecipeError: see [`train_tokenizer`].
    """

    def texts() -> Iterator[str]:
        for batch in documents.select_columns([text_column]).iter(batch_size=1000):
            yield from batch[text_column]

    key: dict[str, Any] = {
        "documents": documents._fingerprint,
        "text_column": text_column,
        "vocab_size": vocab_size,
        "special_tokens": SPECIAL_TOKENS,
        "tokenizers": tokenizers.__version__,
    }

    def build(folder: Path) -> None:
        train_tokenizer(texts(), vocab_size).save_pretrained(folder)

    return AutoTokenizer.from_pretrained(cached_folder("tokenizer", key, build))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    Identifies a tokenizer by what it does, wherever it was loaded from.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.

    Returns:
        `str`: a digest of its vocabulary, rules and special tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    content += json.dumps({name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())})
    return hashlib.sha256(content.encode()).hexdigest()
