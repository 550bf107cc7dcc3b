"""The tokenizer of a text recipe: loaded, or trained on the training documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import tokenizers
from arguments import DataArguments, RecipeError, TokenizerArguments
from file_cache import cached_folder
from tokenizers import decoders, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


__all__ = [
    "DECODER_TOKENS",
    "ENCODER_TOKENS",
    "choose_tokenizer",
    "load_tokenizer",
    "space_characters",
    "tokenizer_digest",
    "train_tokenizer",
    "trained_tokenizer",
]

ENCODER_TOKENS = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "unk_token": "[UNK]",
}
# As GPT-2 has it, one token for both ends of a text; and padding, for whoever fine-tunes the model.
DECODER_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}


def space_characters(text: str) -> str:
    """
    Puts a space between all characters, as the training script of arXiv:2502.10927 does on Wikipedia and RedPajama.

    Args:
        text (`str`):
            A document.

    Returns:
        `str`: the same with spaces.

    Example:

    ```python
    >>> space_characters("a key")
    'a   k e y'

    ```
    """
    return " ".join(text)


def choose_tokenizer(
    tokenizer_arguments: TokenizerArguments,
    data_arguments: DataArguments,
    documents: datasets.Dataset | datasets.IterableDataset,
    text_column: str,
    special_tokens: Mapping[str, str],
) -> PreTrainedTokenizerBase:
    """
    Loads the tokenizer that the arguments name, or trains one on the training documents.

    Args:
        tokenizer_arguments (`TokenizerArguments`):
            Name a tokenizer, or the size of the one that is trained.
        data_arguments (`DataArguments`):
            How many documents of a stream it is trained on, and whether its characters are spaced.
        documents (`datasets.Dataset` or `datasets.IterableDataset`):
            The training documents.
        text_column (`str`):
            Their column of text.
        special_tokens (mapping of `str` to `str`):
            `ENCODER_TOKENS` or `DECODER_TOKENS`.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer.

    Raises:
        RecipeError: see [`load_tokenizer`] and [`train_tokenizer`].
    """
    if tokenizer_arguments.tokenizer_name is not None:
        return load_tokenizer(tokenizer_arguments.tokenizer_name, special_tokens)
    if isinstance(documents, datasets.IterableDataset):
        rows = documents.take(data_arguments.stream_tokenizer_documents)
        documents = datasets.Dataset.from_dict({text_column: [row[text_column] for row in rows]})
    return trained_tokenizer(
        documents, text_column, tokenizer_arguments.vocab_size, special_tokens, data_arguments.character_spaced
    )


def load_tokenizer(name: str, special_tokens: Mapping[str, str] = ENCODER_TOKENS) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer.

    Args:
        name (`str`):
            Folder or Hub id.
        special_tokens (mapping of `str` to `str`, *optional*):
            What a trained tokenizer would have: where that is a mask token, this one needs one too.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer.

    Raises:
        RecipeError: if there is no such tokenizer, or it lacks the mask token that it needs.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"tokenizer_name={name!r} cannot be loaded: {error}") from error
    if "mask_token" in special_tokens and tokenizer.mask_token_id is None:
        raise RecipeError(
            f"tokenizer_name={name!r} has no mask token, which masked language modelling needs: choose the tokenizer "
            "of an encoder, or leave --tokenizer_name out to have one trained."
        )
    return tokenizer


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, special_tokens: Mapping[str, str] = ENCODER_TOKENS
) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer, which knows every text (no unknown token is ever produced).

    Args:
        documents (iterable of `str`):
            Training text.
        vocab_size (`int`):
            Entries, the 256 bytes and the special tokens included.
        special_tokens (mapping of `str` to `str`, *optional*):
            `ENCODER_TOKENS` (the default) or `DECODER_TOKENS`.

    Returns:
        `PreTrainedTokenizerFast`: an encoder's encloses a sequence in its class and separator tokens, a decoder's adds
        nothing.

    Raises:
        RecipeError: if `vocab_size` does not hold the bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = list(dict.fromkeys(special_tokens.values()))
    smallest = len(alphabet) + len(specials)
    if vocab_size < smallest:
        raise RecipeError(
            f"vocab_size={vocab_size} is below {smallest}, the {len(alphabet)} bytes and {len(specials)} special "
            "tokens of the trained tokenizer: raise it."
        )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents, trainer)
    if "cls_token" in special_tokens:
        cls, sep = special_tokens["cls_token"], special_tokens["sep_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, specials.index(cls)), (sep, specials.index(sep))],
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def trained_tokenizer(
    documents: datasets.Dataset,
    text_column: str,
    vocab_size: int,
    special_tokens: Mapping[str, str] = ENCODER_TOKENS,
    character_spaced: bool = False,
) -> PreTrainedTokenizerBase:
    """
    Trains a tokenizer on documents, or loads the one that was trained on them before.

    Args:
        documents (`datasets.Dataset`):
            The training documents.
        text_column (`str`):
            Their column of text.
        vocab_size (`int`):
            See [`train_tokenizer`].
        special_tokens (mapping of `str` to `str`, *optional*):
            See [`train_tokenizer`].
        character_spaced (`bool`, *optional*, defaults to `False`):
            Whether it is trained on spaced characters.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer.

    Raises:
        RecipeError: see [`train_tokenizer`].
    """

    def texts() -> Iterator[str]:
        for batch in documents.select_columns([text_column]).iter(batch_size=1000):
            for text in batch[text_column]:
                if text is None:
                    raise RecipeError("an example that the tokenizer is trained on has no text: leave it out.")
                yield space_characters(text) if character_spaced else text

    key: dict[str, Any] = {
        "documents": documents._fingerprint,
        "text_column": text_column,
        "vocab_size": vocab_size,
        "special_tokens": dict(special_tokens),
        "character_spaced": character_spaced,
        "tokenizers": tokenizers.__version__,
    }

    def build(folder: Path) -> None:
        train_tokenizer(texts(), vocab_size, special_tokens).save_pretrained(folder)

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
