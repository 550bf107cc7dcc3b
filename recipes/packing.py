"""Documents to sequences of one length.

    documents (one text a row)  ->  token ids a document  ->  blocks of exactly N tokens

Documents follow each other inside a block, so that nothing is padded. An encoder's block is `[CLS] … [SEP]`, with
`[SEP]` between documents; a decoder's is a cut out of one long text, with the end-of-text token between documents.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
from arguments import RecipeError
from file_cache import cached_folder
from tokenization import space_characters, tokenizer_digest
from transformers import PreTrainedTokenizerBase


__all__ = [
    "BlockFrame",
    "Packer",
    "decoder_frame",
    "encoder_frame",
    "pack",
]

logger = logging.getLogger(__name__)

TOKENIZED_AT_ONCE = 1000


class BlockFrame(NamedTuple):
    """Special tokens of a block: those that open and close it, and the one behind each document; `None` for none."""

    head: int | None
    tail: int | None
    separator: int | None

    @property
    def specials(self) -> int:
        """Number of tokens of a block that hold no text."""
        return (self.head is not None) + (self.tail is not None)


def encoder_frame(tokenizer: PreTrainedTokenizerBase) -> BlockFrame:
    """
    The frame `[CLS] … [SEP]`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Knows the tokens.

    Returns:
        `BlockFrame`
    """
    return BlockFrame(tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id)


def decoder_frame(tokenizer: PreTrainedTokenizerBase) -> BlockFrame:
    """
    No frame, and the end-of-text token (an encoder's tokenizer: `[SEP]`) behind each document.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Knows the token.

    Returns:
        `BlockFrame`
    """
    ids = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    separator = next((token for token in ids if token is not None), None)
    if separator is None:
        logger.warning("the tokenizer has no token for the end of a text: documents follow each other without one")
    return BlockFrame(None, None, separator)


def pack(documents: Iterable[Sequence[int]], block_size: int, frame: BlockFrame) -> Iterator[list[int]]:
    """
    Packs documents into blocks of one length. The rest after the last whole block is dropped.

    Args:
        documents (iterable of sequences of `int`):
            Token ids of each document.
        block_size (`int`):
            Tokens of a block.
        frame (`BlockFrame`):
            Special tokens of a block and between documents.

    Yields:
        `list[int]`: `block_size` token ids.
    """
    head, tail, separator = ([] if token is None else [token] for token in frame)
    room = block_size - len(head) - len(tail)
    waiting: list[int] = []
    for document in documents:
        waiting.extend(document)
        waiting.extend(separator)
        start = 0
        while len(waiting) - start >= room:
            yield head + waiting[start : start + room] + tail
            start += room
        waiting = waiting[start:]


@dataclasses.dataclass(frozen=True)
class Packer:
    """
    How text becomes blocks.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        block_size (`int`):
            Tokens of a block, special ones included.
        frame (`BlockFrame`):
            Special tokens of a block and between documents.
        character_spaced (`bool`, *optional*, defaults to `False`):
            Whether [`space_characters`] goes before the tokenizer.

    Raises:
        RecipeError: if a block has no room for text, or is longer than the tokenizer's `model_max_length`.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    frame: BlockFrame
    character_spaced: bool = False

    def __post_init__(self) -> None:
        # A block of one token has nothing to predict it from.
        if self.block_size <= max(self.frame.specials, 1):
            raise RecipeError(
                f"block_size={self.block_size} leaves no room for text beside {self.frame.specials} special tokens."
            )
        if self.block_size > self.tokenizer.model_max_length:
            raise RecipeError(
                f"block_size={self.block_size} is above the {self.tokenizer.model_max_length} tokens that the "
                "tokenizer declares (model_max_length): lower --block_size."
            )

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """
        Tokenizes whole documents, without special tokens.

        Args:
            texts (sequence of `str`):
                Documents.

        Returns:
            `list[list[int]]`: token ids of each document. Their length is not limited: blocks cut them.
        """
        texts = [space_characters(text) for text in texts] if self.character_spaced else list(texts)
        # verbose=False: a document is meant to be longer than the model's input here.
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def blocks(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """
        Tokenizes and packs documents as they come.

        Args:
            texts (iterable of `str`):
                Documents.

        Yields:
            `list[int]`: `block_size` token ids.
        """
        return pack(self._tokenized(texts), self.block_size, self.frame)

    def _tokenized(self, texts: Iterable[str]) -> Iterator[list[int]]:
        remaining = iter(texts)
        while batch := list(itertools.islice(remaining, TOKENIZED_AT_ONCE)):
            yield from self.tokenize(batch)

    def dataset(
        self, documents: datasets.Dataset, text_column: str, num_workers: int | None = None, name: str = "packed"
    ) -> datasets.Dataset:
        """
        Tokenizes and packs documents, from the cache where that was done before.

        Args:
            documents (`datasets.Dataset`):
                Documents, in the order in which they are packed.
            text_column (`str`):
                Their column of text.
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
            "tokenizer": tokenizer_digest(self.tokenizer),
            "block_size": self.block_size,
            "frame": list(self.frame),
            "character_spaced": self.character_spaced,
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
                fn_kwargs={"text_column": text_column, "packer": self},
                cache_file_name=str(work / "tokenized.arrow"),
                new_fingerprint=f"{documents._fingerprint[:32]}-tokenized",
                desc="Tokenizing",
            )
            packing = {"tokenized": tokenized, "block_size": self.block_size, "frame": self.frame}
            if next(_packed_rows(**packing), None) is None:
                raise RecipeError(
                    f"{name}: {len(documents)} document(s) do not fill one block of {self.block_size} tokens: lower "
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


def _tokenize_rows(rows: dict[str, list[str]], text_column: str, packer: Packer) -> dict[str, list[list[int]]]:
    return {"input_ids": packer.tokenize(rows[text_column])}


def _packed_rows(tokenized: datasets.Dataset, block_size: int, frame: BlockFrame) -> Iterator[dict[str, list[int]]]:
    ids = (document for batch in tokenized.iter(batch_size=TOKENIZED_AT_ONCE) for document in batch["input_ids"])
    for block in pack(ids, block_size, frame):
        yield {"input_ids": block}
