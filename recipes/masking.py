"""Masked tokens whose places depend on nothing but a seed, the epoch and the example.

`DataCollatorForLanguageModeling` draws from one generator a process, so that its masks follow batch size, number of
processes and workers, and the place where a run was resumed. Here each example has a generator of its own, keyed by
(seed, epoch, index): one process with a batch of 32, four accumulated batches of 8 and two processes with 16 see the
same masked sequences.

Shape legend: `N` tokens of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from arguments import RecipeError
from text_data import TOKENIZED_AT_ONCE, pack, tokenize
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


__all__ = ["EVALUATION_MASK_SEED", "MaskEpochCallback", "MaskedDataset", "MaskedStream", "TokenMasker"]

# Held-out masks are the same in every run, whatever its seed.
EVALUATION_MASK_SEED = 10_000
IGNORED = -100


class TokenMasker:
    """
    Masks a sequence as BERT does: of the chosen tokens 80 % become the mask token, 10 % a random one, 10 % stay.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Gives the mask token, the special tokens (never chosen) and the size of the vocabulary.
        probability (`float`):
            Share of the tokens that are chosen.
        seed (`int`):
            First part of the key of each sequence's generator.

    Raises:
        RecipeError: if the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int) -> None:
        if tokenizer.mask_token_id is None:
            raise RecipeError(f"the tokenizer {tokenizer.name_or_path!r} has no mask token: choose an encoder's.")
        self.mask_token_id = int(tokenizer.mask_token_id)
        self.special_ids = np.unique(np.asarray(tokenizer.all_special_ids, dtype=np.int64))
        self.vocab_size = len(tokenizer)
        self.probability = probability
        self.seed = seed

    def __call__(self, input_ids: Sequence[int], epoch: int, index: int) -> dict[str, torch.Tensor]:
        """
        Masks one sequence.

        Args:
            input_ids (sequence of `int`):
                Token ids of shape `(N,)`.
            epoch (`int`):
                Pass over the data, from 0.
            index (`int`):
                Place of the sequence in the data, from 0.

        Returns:
            `dict`: `input_ids` and `labels`, `int64` of shape `(N,)`; labels are -100 where nothing is predicted.
        """
        original = np.asarray(input_ids, dtype=np.int64)
        generator = np.random.default_rng([self.seed, epoch, index])
        # Each draw takes the same amount from the generator whatever was chosen, so that one token's fate never
        # shifts another's.
        chosen = generator.random(original.shape) < self.probability
        fate = generator.random(original.shape)
        random_ids = generator.integers(self.vocab_size, size=original.shape)
        chosen &= ~np.isin(original, self.special_ids)
        masked = np.where(chosen & (fate < 0.8), self.mask_token_id, original)
        masked = np.where(chosen & (fate >= 0.9), random_ids, masked)
        labels = np.where(chosen, original, IGNORED)
        # No attention mask: packed sequences have no padding, and without a mask attention takes its fastest kernel.
        return {"input_ids": torch.from_numpy(masked), "labels": torch.from_numpy(labels)}


class MaskedDataset(torch.utils.data.Dataset):
    """
    Packed blocks, masked when they are read.

    Args:
        blocks (`datasets.Dataset`):
            Column `input_ids`, as [`packed_dataset`] makes it.
        masker (`TokenMasker`):
            Masks a block.

    The epoch lies in shared memory: workers that live on from epoch to epoch see it change.
    """

    def __init__(self, blocks: datasets.Dataset, masker: TokenMasker) -> None:
        self.blocks = blocks.with_format("numpy")
        self.masker = masker
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """Pass over the data that the masks belong to."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch.fill_(value)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """
        Reads the sequences of a batch at once.

        Args:
            indices (`list[int]`):
                Places of the sequences.

        Returns:
            `list[dict]`: as [`TokenMasker`] returns them.
        """
        rows = self.blocks[list(indices)]["input_ids"]
        epoch = self.epoch
        return [self.masker(row, epoch, int(index)) for row, index in zip(rows, indices, strict=True)]


class MaskedStream(torch.utils.data.IterableDataset):
    """
    A stream of documents, tokenized, packed and masked while it is read. It never ends: pass follows pass.

    Args:
        documents (`datasets.IterableDataset`):
            Documents with some text.
        text_column (`str`):
            Their column of text.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        masker (`TokenMasker`):
            Masks a block. Its epoch is the pass, its index the block's place in the pass.
        block_size (`int`):
            Tokens of a block.
        shuffle_buffer_size (`int`):
            Documents that are shuffled among each other, anew in each pass; 0 keeps the order.
        seed (`int`):
            Seed of that shuffle.

    One reader packs, so that a block's place does not depend on how many read: `Trainer` reads it in the main process
    and hands each process its share. Passes are counted here and not by `Trainer`, which takes an endless stream for
    one epoch, and can therefore skip to the right place when a run is resumed.
    """

    def __init__(
        self,
        documents: datasets.IterableDataset,
        text_column: str,
        tokenizer: PreTrainedTokenizerBase,
        masker: TokenMasker,
        block_size: int,
        shuffle_buffer_size: int,
        seed: int,
    ) -> None:
        self.documents = documents
        if shuffle_buffer_size > 0:
            self.documents = documents.shuffle(seed=seed, buffer_size=shuffle_buffer_size)
        self.text_column = text_column
        self.tokenizer = tokenizer
        self.masker = masker
        self.block_size = block_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RecipeError(
                f"dataloader_num_workers={worker.num_workers}: a stream is packed by one reader, choose 0 or 1."
            )
        for number in itertools.count():
            self.documents.set_epoch(number)
            index = -1
            for index, block in enumerate(self._blocks()):
                yield self.masker(block, number, index)
            if index < 0:
                raise RecipeError(
                    f"the streamed text does not fill one block of {self.block_size} tokens: lower --block_size or "
                    "give more text."
                )

    def _blocks(self) -> Iterator[list[int]]:
        return pack(self._tokenized(), self.block_size, self.tokenizer.cls_token_id, self.tokenizer.sep_token_id)

    def _tokenized(self) -> Iterator[list[int]]:
        rows: Iterator[dict[str, Any]] = iter(self.documents)
        while texts := [row[self.text_column] for row in itertools.islice(rows, TOKENIZED_AT_ONCE)]:
            yield from tokenize(texts, self.tokenizer)


class MaskEpochCallback(TrainerCallback):
    """
    Tells a [`MaskedDataset`] at the begin of each epoch which one it is, after a resume too.

    Args:
        dataset (`MaskedDataset`):
            The training data.

    `set_epoch` of accelerate's dataloaders cannot serve: with several processes it reaches the sampler only, with one
    process the dataset too (Accelerate 1.15), and the masks would differ from the second epoch on.
    """

    def __init__(self, dataset: MaskedDataset) -> None:
        self.dataset = dataset
        self._next_epoch = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reads from the state of `Trainer`, restored from a checkpoint, how many epochs are done."""
        self._next_epoch = int(state.epoch or 0)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the epoch of the masks."""
        self.dataset.epoch = self._next_epoch
        self._next_epoch += 1
