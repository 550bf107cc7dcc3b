"""Examples follow the epoch and their place, in memory and as a stream, and nothing else."""

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from arguments import RecipeError
from examples import (
    BlockDataset,
    BlockSampler,
    BlockStream,
    EpochCallback,
    next_token_examples,
    rows_of_pass,
    without_fillers,
)
from labelled_data import ExampleStream
from masking import TokenMasker
from packing import Packer, encoder_frame
from torch.utils.data import DataLoader
from transformers import TrainerState, default_data_collator


def blocks(count=24, length=16, seed=0):
    rows = np.random.default_rng(seed).integers(5, 300, size=(count, length))
    return datasets.Dataset.from_dict({"input_ids": rows.tolist()})


def equal(one, two):
    return all(torch.equal(one[name], two[name]) for name in ("input_ids", "labels"))


def test_next_tokens_are_all_predicted_but_the_first():
    """Whoever counts labels, shifted or not, has to come to the same number."""
    examples = next_token_examples(np.array([[7, 8, 9], [4, 5, 6]], dtype=np.int32), 3, [5, 2])
    assert examples["input_ids"].tolist() == [[7, 8, 9], [4, 5, 6]]
    assert examples["labels"].tolist() == [[-100, 8, 9], [-100, 5, 6]]
    assert examples["input_ids"].dtype == examples["labels"].dtype == torch.int64


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_see_the_epoch(tokenizer, persistent):
    masker = TokenMasker(tokenizer, 0.15, seed=0)
    data, rows = BlockDataset(blocks(), masker), np.array(blocks()["input_ids"])
    loader = DataLoader(
        data, batch_size=5, num_workers=2, persistent_workers=persistent, collate_fn=default_data_collator
    )
    for epoch in (0, 1, 2):
        data.epoch = epoch
        labels = torch.cat([batch["labels"] for batch in loader])
        assert torch.equal(labels, masker(rows, epoch, range(24))["labels"])


def test_one_row_and_a_batch_agree(tokenizer):
    data = BlockDataset(blocks(), TokenMasker(tokenizer, 0.15, seed=0))
    assert len(data) == 24
    assert equal(data.__getitems__([3, 9, 2])[1], data[9])


def test_rows_are_those_of_the_table_however_it_is_cut(tmp_path):
    """In memory and mapped, in pieces of several sizes, selected, and in a process that was spawned."""
    rows = np.array(blocks()["input_ids"])
    pieces = [datasets.Dataset.from_dict({"input_ids": part.tolist()}) for part in np.split(rows, [1, 8, 8 + 13])]
    whole = datasets.concatenate_datasets(pieces)
    whole.save_to_disk(str(tmp_path))
    order = [23, 0, 1, 7, 8, 20, 21, 0]
    for table, places in (
        (whole, order),
        (datasets.Dataset.load_from_disk(str(tmp_path)), order),
        (whole.select(order), range(len(order))),
    ):
        data = BlockDataset(table, next_token_examples)
        read = default_data_collator(data.__getitems__(list(places)))
        assert read["input_ids"].tolist() == rows[order].tolist()
        loader = DataLoader(data, batch_size=8, num_workers=1, sampler=places, multiprocessing_context="spawn")
        assert torch.equal(next(iter(loader))["input_ids"], read["input_ids"])


def test_callback_counts_epochs_after_a_resume_too(tokenizer):
    data = BlockDataset(blocks(), TokenMasker(tokenizer, 0.15, seed=0))
    for begin, expected in ((0, [0, 1]), (2.0, [2, 3]), (1.75, [1, 2])):
        callback, state = EpochCallback(data), TrainerState(epoch=begin)
        callback.on_train_begin(None, state, None)
        seen = []
        for _ in expected:
            callback.on_epoch_begin(None, state, None)
            seen.append(data.epoch)
        assert seen == expected


@pytest.mark.parametrize("seed", [0, 7])
def test_order_is_that_of_trainer(seed):
    """Runs from before this sampler pair with those after it."""
    data = BlockDataset(blocks(), next_token_examples)
    theirs = SeedableRandomSampler(data, data_seed=seed)
    for epoch in (0, 1, 2):
        data.epoch = epoch
        theirs.set_epoch(epoch)
        assert list(BlockSampler(data, seed, 1)) == list(theirs) != list(range(24))


def test_fillers_end_an_epoch_and_predict_nothing(tokenizer):
    """24 blocks in steps of 10: six rows fill the last step. Whoever leaves them out keeps a block without masks."""
    data = BlockDataset(blocks(), TokenMasker(tokenizer, 0.15, seed=0))
    places = list(BlockSampler(data, 0, 10))
    assert sorted(places[:24]) == list(range(24))
    assert places[24:] == list(range(24, 30))
    assert list(BlockSampler(data, 0, 10, drop_last=10)) == places[:20]
    batch = default_data_collator(data.__getitems__(places[20:]))
    assert (batch["labels"][4:] == -100).all()
    batch["labels"][0] = -100
    assert torch.equal(without_fillers(batch)["input_ids"], batch["input_ids"][:4])
    assert len(without_fillers({name: tensor[4:] for name, tensor in batch.items()})["labels"]) == 0


def stream(documents, tokenizer, buffer=0, block_size=32):
    rows = datasets.Dataset.from_dict({"text": documents}).to_iterable_dataset()
    packer = Packer(tokenizer, block_size, encoder_frame(tokenizer))
    return BlockStream(rows, "text", packer, TokenMasker(tokenizer, 0.15, 0), buffer, seed=0)


def first(masked_stream, count):
    iterator = iter(masked_stream)
    return [next(iterator) for _ in range(count)]


def test_stream_goes_on_with_the_next_pass(documents, tokenizer):
    masked = stream(documents, tokenizer)
    rows = list(masked.packer.blocks(documents))
    seen = first(masked, len(rows) + 3)
    for number, start, count in ((0, 0, len(rows)), (1, len(rows), 3)):
        expected = masked.make_examples(np.array(rows[:count]), number, range(count))
        assert equal(default_data_collator(seen[start : start + count]), expected)


def test_stream_is_shuffled_anew_in_each_pass_and_reproducibly(documents, tokenizer):
    count = len(first_pass := list(stream(documents, tokenizer).packer.blocks(documents)))
    one, two = first(stream(documents, tokenizer, 20), 2 * count), first(stream(documents, tokenizer, 20), 2 * count)
    assert all(equal(a, b) for a, b in zip(one, two, strict=True))
    originals = [torch.where(row["labels"] == -100, row["input_ids"], row["labels"]).tolist() for row in one]
    assert originals[:5] != first_pass[:5]
    assert originals[:5] != originals[count : count + 5]


@pytest.mark.parametrize("kind", ["text", "labelled"])
def test_one_worker_reads_a_stream_in_the_order_of_none(documents, tokenizer, kind):
    """Into the third pass, shuffled, of several files: order and keys are those of the main process."""
    if kind == "text":
        data = stream(documents, tokenizer, 20)
        count = 3 * len(list(data.packer.blocks(documents)))
    else:
        rows = datasets.Dataset.from_dict({"text": documents, "label": [0, 1] * 30}).to_iterable_dataset(num_shards=3)

        def encode(columns, keys):
            return [{"number": torch.tensor(int(columns["text"][0].split()[0])), "key": torch.tensor(keys[0])}]

        data, count = ExampleStream(rows, encode, "label", ["0", "1"], 20, seed=0), 3 * len(documents)

    def read(workers):
        loader = iter(DataLoader(data, batch_size=count, num_workers=workers, collate_fn=default_data_collator))
        return next(loader)

    none, one = read(0), read(1)
    for name, tensor in none.items():
        assert torch.equal(tensor, one[name]), name


@pytest.mark.parametrize("skipped", [0, 6])
def test_order_of_a_stream_is_that_of_datasets(skipped):
    """Checkpoints and runs without workers from before this reader go on with the same order."""
    rows = datasets.Dataset.from_dict({"number": list(range(60))}).to_iterable_dataset(num_shards=3)
    rows = (rows.skip(skipped) if skipped else rows).shuffle(seed=1, buffer_size=20)
    seen = []
    for number in (0, 1, 2):
        seen.append([row["number"] for row in rows_of_pass(rows, number)])
        assert seen[-1] == [row["number"] for row in rows]
        assert len(set(seen[-1])) == 60 - skipped
    assert seen[0] != seen[1] != seen[2]


def test_stream_wants_one_reader_and_some_text(documents, tokenizer):
    with pytest.raises(RecipeError, match="one reader"):
        next(iter(DataLoader(stream(documents, tokenizer), num_workers=2)))
    with pytest.raises(RecipeError, match="does not fill one block"):
        next(iter(stream(["short"], tokenizer)))
