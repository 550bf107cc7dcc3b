"""Blocks of tokens to what a language model is trained on, in memory or as a stream.

What an example is, is a function's matter: of the block, the epoch (a stream's pass) and the block's place. A masked
example takes the last two for the key of its masks; the next token depends on the block alone. The function is given
all blocks of a batch at once, so that what does not differ between them is done once.

Shape legend: `B` sequences of a batch, `N` tokens of a sequence.
"""

from __future__ import annotations

import functools
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
    "next_token_examples",
    "rows_of_pass",
    "without_fillers",
]

IGNORED = -100  # label of what the losses leave out
# From token ids `(B, N)`, the epoch and the places of the `B` blocks to tensors `(B, N)`.
ExampleMaker = Callable[[np.ndarray, int, Sequence[int]], dict[str, torch.Tensor]]


def next_token_examples(input_ids: np.ndarray, epoch: int, indices: Sequence[int]) -> dict[str, torch.Tensor]:
    """
    Makes examples whose every token but the first is to be predicted from those before it.

    Args:
        input_ids (`numpy.ndarray`):
            Token ids of shape `(B, N)`.
        epoch (`int`):
            Not used.
        indices (sequence of `int`):
            Not used.

    Returns:
        `dict`: `input_ids` and `labels`, `int64` of shape `(B, N)`. A token's label stands in its own place, as
        Transformers has it; the first is -100, so that whoever counts labels counts what is predicted.
    """
    ids = torch.from_numpy(np.array(input_ids, dtype=np.int64))
    labels = ids.clone()
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels}


class BlockDataset(torch.utils.data.Dataset):
    """
    Packed blocks, made into examples when they are read.

    Args:
        blocks (`datasets.Dataset`):
            Column `input_ids`, as [`Packer.dataset`] makes it.
        make_examples (`ExampleMaker`):
            Makes examples of some blocks, the epoch and the blocks' places in the data.

    The epoch lies in shared memory: workers that live on from epoch to epoch see it change. A place beyond the last
    block is a filler: one token over and over, of which nothing is predicted.
    """

    def __init__(self, blocks: datasets.Dataset, make_examples: ExampleMaker) -> None:
        # Rows are read from the table itself, which a selection of it is laid over.
        self.blocks = blocks if blocks._indices is None else blocks.flatten_indices()
        self.make_examples = make_examples
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

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned opens the file itself; arrays of it would be copied.
        return {name: value for name, value in self.__dict__.items() if name != "_pieces"}

    @functools.cached_property
    def _pieces(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Token ids of the table's pieces, where they lie, usually in a mapped file, and the place where each ends."""
        pieces = [piece for piece in self.blocks.data.column("input_ids").chunks if len(piece)]
        ends = np.cumsum([len(piece) for piece in pieces])
        return [piece.flatten().to_numpy().reshape(len(piece), -1) for piece in pieces], ends

    def _read(self, places: np.ndarray) -> np.ndarray:
        # What datasets does for any column takes some 2 % of a step of a small model.
        pieces, ends = self._pieces
        numbers = np.searchsorted(ends, places, side="right")
        # Below zero: counted from the end of the piece.
        rows = zip(numbers.tolist(), (places - ends[numbers]).tolist(), strict=True)
        return np.stack([pieces[number][place] for number, place in rows])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """
        Reads the sequences of a batch at once.

        Args:
            indices (`list[int]`):
                Places of the sequences.

        Returns:
            `list[dict]`: the rows of what `make_examples` returns.
        """
        ids = self._read(np.asarray(indices) % len(self))
        examples = self.make_examples(ids, self.epoch, indices)
        for row, index in enumerate(indices):
            if index >= len(self):
                examples["input_ids"][row] = int(ids[row, 0])
                examples["labels"][row] = IGNORED
        return _rows(examples)


def _rows(examples: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(examples, row, strict=True)) for row in zip(*examples.values(), strict=True)]


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
    real = (labels != IGNORED).any(dim=1)
    if real.all():  # nearly always, and then nothing is copied
        return dict(batch)
    real |= (ids != ids[:, :1]).any(dim=1)
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
    >>> data = BlockDataset(datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 5}), next_token_examples)
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


def rows_of_pass(stream: datasets.IterableDataset, number: int) -> Iterator[dict[str, Any]]:
    """
    Reads a stream once, in the main process or in the one worker of a dataloader, in the same order.

    Args:
        stream (`datasets.IterableDataset`):
            The stream; where it is shuffled, each pass has an order of its own.
        number (`int`):
            Number of the pass, from 0.

    Yields:
        `dict`: column to value.

    Raises:
        RecipeError: if several workers read.
    """
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise RecipeError(f"dataloader_num_workers={worker.num_workers}: a stream has one reader, choose 0 or 1.")
    stream.set_epoch(number)
    # Not `for row in stream`: in a worker, be it the only one, Datasets 5.2 then draws another order.
    for batch in stream.iter(batch_size=1):
        yield {name: value for name, (value,) in batch.items()}


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
        make_examples (`ExampleMaker`):
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
        make_examples: ExampleMaker,
        shuffle_buffer_size: int,
        seed: int,
    ) -> None:
        self.documents = documents
        if shuffle_buffer_size > 0:
            self.documents = documents.shuffle(seed=seed, buffer_size=shuffle_buffer_size)
        self.text_column = text_column
        self.packer = packer
        self.make_examples = make_examples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in itertools.count():
            texts = (row[self.text_column] for row in rows_of_pass(self.documents, number))
            index = -1
            for index, block in enumerate(self.packer.blocks(texts)):
                yield from _rows(self.make_examples(np.array([block]), number, [index]))
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
