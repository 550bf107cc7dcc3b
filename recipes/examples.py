"""Blocks of tokens to what a language model is trained on, in memory or as a stream.

What an example is, is a function's matter: of the block, the epoch (a stream's pass) and the block's place. A masked
example takes the last two for the key of its masks; the next token depends on the block alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import datasets
import numpy as np
import torch
from arguments import RecipeError
from packing import Packer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


__all__ = [
    "IGNORED",
    "BlockDataset",
    "BlockSampler",
    "BlockStream",
    "EpochCallback",
    "next_token_example",
    "without_fillers",
]

IGNORED = -100  # label of what the losses leave out
MakeExample = Callable[[Sequence[int], int, int], dict[str, torch.Tensor]]


def next_token_example(input_ids: Sequence[int], epoch: int, index: int) -> dict[str, torch.Tensor]:
    """
    Makes an example whose every token but the first is to be predicted from those before it.

    Args:
        input_ids (sequence of `int`):
            Token ids of shape `(N,)`.
        epoch (`int`):
            Not used.
        index (`int`):
            Not used.

    Returns:
        `dict`: `input_ids` and `labels`, `int64` of shape `(N,)`. A token's label stands in its own place, as
        Transformers has it; the first is -100, so that whoever counts labels counts what is predicted.
    """
    ids = torch.from_numpy(np.asarray(input_ids, dtype=np.int64))
    labels = ids.clone()
    labels[0] = IGNORED
    return {"input_ids": ids, "labels": labels}


class BlockDataset(torch.utils.data.Dataset):
    """
    Packed blocks, made into examples when they are read.

    Args:
        blocks (`datasets.Dataset`):
            Column `input_ids`, as [`Packer.dataset`] makes it.
        make_example (`Callable`):
            Makes an example of a block, the epoch and the block's place in the data.

    The epoch lies in shared memory: workers that live on from epoch to epoch see it change. A place beyond the last
    block is a filler: one token over and over, of which nothing is predicted.
    """

    def __init__(self, blocks: datasets.Dataset, make_example: MakeExample) -> None:
        self.blocks = blocks.with_format("numpy")
        self.make_example = make_example
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """Pass over the data that the examples belong to."""
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
            `list[dict]`: as `make_example` returns them.
        """
        rows = self.blocks[[index % len(self) for index in indices]]["input_ids"]
        epoch = self.epoch
        return [
            self.make_example(row, epoch, int(index)) if index < len(self) else _filler(row)
            for row, index in zip(rows, indices, strict=True)
        ]


def _filler(input_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    ids = torch.full((len(input_ids),), int(input_ids[0]), dtype=torch.int64)
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}


def without_fillers(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Leaves out of a batch the rows that a [`BlockDataset`] was asked for beyond its last block.

    Args:
        batch (mapping of `str` to `torch.Tensor`):
            `input_ids` and `labels`, each of shape `(B, N)`, and whatever else has `B` rows.

    Returns:
        `dict`: the same without those rows.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    real = (labels != IGNORED).any(dim=1) | (ids != ids[:, :1]).any(dim=1)
    return {name: tensor[real] for name, tensor in batch.items()}


class BlockSampler(torch.utils.data.Sampler[int]):
    """
    Yields the places of a [`BlockDataset`] in the order that `Trainer` and accelerate draw from seed and epoch for any
    data, and behind it the fillers that the last step of an epoch takes. Accelerate would fill the share of each
    process with blocks from the start of the epoch, which then count twice in that step.

    Args:
        data (`BlockDataset`):
            The training data, which knows the epoch.
        seed (`int`):
            Seed of the order.
        multiple (`int`):
            What the number of places is a multiple of: the blocks of one step, or 1 where none are to be filled up.
        drop_last (`int`, *optional*, defaults to 1):
            The blocks that are left over of a multiple of this are not read in the epoch.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether the order is drawn, or that of the text.

    Example:

    ```python
    >>> data = BlockDataset(datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 5}), next_token_example)
    >>> list(BlockSampler(data, seed=0, multiple=4, shuffle=False))
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> sorted(BlockSampler(data, seed=0, multiple=1))
    [0, 1, 2, 3, 4]

    ```
    """

    def __init__(self, data: BlockDataset, seed: int, multiple: int, drop_last: int = 1, shuffle: bool = True) -> None:
        self.data = data
        self.seed = seed
        self.count = len(data) // drop_last * drop_last
        self.length = -(-self.count // multiple) * multiple
        self.shuffle = shuffle

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(len(self.data))
        if self.shuffle:
            # As accelerate's SeedableRandomSampler draws it.
            order = torch.randperm(
                len(self.data), generator=torch.Generator().manual_seed(self.seed + self.data.epoch)
            )
        yield from order[: self.count].tolist()
        yield from range(len(self.data), len(self.data) + self.length - self.count)


class BlockStream(torch.utils.data.IterableDataset):
    """
    A stream of documents, tokenized, packed and made into examples while it is read. It never ends: pass follows pass.

    Args:
        documents (`datasets.IterableDataset`):
            Documents with some text.
        text_column (`str`):
            Their column of text.
        packer (`Packer`):
            How text becomes blocks.
        make_example (`Callable`):
            Makes an example of a block, the pass and the block's place in it.
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
        packer: Packer,
        make_example: MakeExample,
        shuffle_buffer_size: int,
        seed: int,
    ) -> None:
        self.documents = documents
        if shuffle_buffer_size > 0:
            self.documents = documents.shuffle(seed=seed, buffer_size=shuffle_buffer_size)
        self.text_column = text_column
        self.packer = packer
        self.make_example = make_example

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RecipeError(
                f"dataloader_num_workers={worker.num_workers}: a stream is packed by one reader, choose 0 or 1."
            )
        for number in itertools.count():
            self.documents.set_epoch(number)
            index = -1
            for index, block in enumerate(self.packer.blocks(row[self.text_column] for row in self.documents)):
                yield self.make_example(block, number, index)
            if index < 0:
                raise RecipeError(
                    f"the streamed text does not fill one block of {self.packer.block_size} tokens: lower "
                    "--block_size or give more text."
                )


class HasEpoch(Protocol):
    """What [`EpochCallback`] sets."""

    epoch: int


class EpochCallback(TrainerCallback):
    """
    Tells a [`BlockDataset`], or whatever else has an epoch, at the begin of each which one it is, after a resume too.

    Args:
        dataset (`BlockDataset`):
            The training data, or the sampler that gives its examples their epoch.

    `set_epoch` of accelerate's dataloaders cannot serve: with several processes it reaches the sampler only, with one
    process the dataset too (Accelerate 1.15), and masks would differ from the second epoch on.
    """

    def __init__(self, dataset: BlockDataset | HasEpoch) -> None:
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
        """Sets the epoch."""
        self.dataset.epoch = self._next_epoch
        self._next_epoch += 1
