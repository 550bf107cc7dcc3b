import datasets
import numpy as np
import pytest
import torch
from arguments import RecipeError
from masking import MaskedDataset, MaskedStream, MaskEpochCallback, TokenMasker
from text_data import pack, tokenize
from torch.utils.data import DataLoader
from transformers import TrainerState, default_data_collator


def blocks(count=24, length=16, seed=0):
    rows = np.random.default_rng(seed).integers(5, 300, size=(count, length))
    return datasets.Dataset.from_dict({"input_ids": rows.tolist()})


def equal(one, two):
    return all(torch.equal(one[name], two[name]) for name in ("input_ids", "labels"))


def test_masks_depend_on_seed_epoch_and_index_only(tokenizer):
    masker, row = TokenMasker(tokenizer, 0.15, seed=1), list(range(10, 210))
    reference = masker(row, 3, 7)
    np.random.seed(5)
    torch.manual_seed(5)
    assert equal(TokenMasker(tokenizer, 0.15, seed=1)(row, 3, 7), reference)
    for other in (TokenMasker(tokenizer, 0.15, seed=2)(row, 3, 7), masker(row, 4, 7), masker(row, 3, 8)):
        assert not torch.equal(other["labels"], reference["labels"])


def test_shares_and_replacements_are_those_of_bert(tokenizer):
    masker = TokenMasker(tokenizer, 0.15, seed=0)
    row = np.random.default_rng(0).integers(5, 300, size=400_000)
    masked = masker(row, 0, 0)
    inputs, labels = masked["input_ids"].numpy(), masked["labels"].numpy()
    chosen = labels != -100
    assert chosen.mean() == pytest.approx(0.15, abs=0.003)
    assert (labels[chosen] == row[chosen]).all()
    assert (inputs[~chosen] == row[~chosen]).all()
    assert (inputs[chosen] == tokenizer.mask_token_id).mean() == pytest.approx(0.8 + 0.1 / 300, abs=0.005)
    assert (inputs[chosen] == row[chosen]).mean() == pytest.approx(0.1 + 0.1 / 300, abs=0.005)
    replaced = inputs[chosen & (inputs != row) & (inputs != tokenizer.mask_token_id)]
    assert len(set(replaced.tolist())) == 299  # any entry of the vocabulary but the mask


def test_special_tokens_are_never_chosen(tokenizer):
    specials = tokenizer.all_special_ids
    masked = TokenMasker(tokenizer, 1.0, seed=0)([*specials, 10, *specials], 0, 0)
    assert (masked["labels"] != -100).sum() == 1
    assert masked["labels"][len(specials)] == 10


def test_sequence_without_a_mask_is_kept_as_it_is(tokenizer):
    masked = TokenMasker(tokenizer, 1e-9, seed=0)([10, 11, 12], 0, 0)
    assert masked["input_ids"].tolist() == [10, 11, 12]
    assert masked["labels"].tolist() == [-100] * 3


def test_tokenizer_without_mask_token(tokenizer):
    class Plain:
        mask_token_id = None
        name_or_path = "plain"

    with pytest.raises(RecipeError, match="'plain' has no mask token"):
        TokenMasker(Plain(), 0.15, 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_see_the_epoch(tokenizer, persistent):
    data = MaskedDataset(blocks(), TokenMasker(tokenizer, 0.15, seed=0))
    loader = DataLoader(
        data, batch_size=5, num_workers=2, persistent_workers=persistent, collate_fn=default_data_collator
    )
    for epoch in (0, 1, 2):
        data.epoch = epoch
        labels = torch.cat([batch["labels"] for batch in loader])
        expected = torch.stack([data.masker(data.blocks[i]["input_ids"], epoch, i)["labels"] for i in range(24)])
        assert torch.equal(labels, expected)


def test_one_row_and_a_batch_agree(tokenizer):
    data = MaskedDataset(blocks(), TokenMasker(tokenizer, 0.15, seed=0))
    assert len(data) == 24
    assert equal(data.__getitems__([3, 9, 2])[1], data[9])


def test_callback_counts_epochs_after_a_resume_too(tokenizer):
    data = MaskedDataset(blocks(), TokenMasker(tokenizer, 0.15, seed=0))
    for begin, expected in ((0, [0, 1]), (2.0, [2, 3]), (1.75, [1, 2])):
        callback, state = MaskEpochCallback(data), TrainerState(epoch=begin)
        callback.on_train_begin(None, state, None)
        seen = []
        for _ in expected:
            callback.on_epoch_begin(None, state, None)
            seen.append(data.epoch)
        assert seen == expected


def stream(documents, tokenizer, buffer=0, block_size=32):
    rows = datasets.Dataset.from_dict({"text": documents}).to_iterable_dataset()
    return MaskedStream(rows, "text", tokenizer, TokenMasker(tokenizer, 0.15, 0), block_size, buffer, seed=0)


def first(masked_stream, count):
    iterator = iter(masked_stream)
    return [next(iterator) for _ in range(count)]


def test_stream_goes_on_with_the_next_pass(documents, tokenizer):
    masked = stream(documents, tokenizer)
    rows = list(pack(tokenize(documents, tokenizer), 32, tokenizer.cls_token_id, tokenizer.sep_token_id))
    seen = first(masked, len(rows) + 3)
    assert all(equal(seen[i], masked.masker(rows[i], 0, i)) for i in range(len(rows)))
    assert all(equal(seen[len(rows) + i], masked.masker(rows[i], 1, i)) for i in range(3))


def test_stream_is_shuffled_anew_in_each_pass_and_reproducibly(documents, tokenizer):
    count = len(first_pass := list(pack(tokenize(documents, tokenizer), 32, 1, 2)))
    one, two = first(stream(documents, tokenizer, 20), 2 * count), first(stream(documents, tokenizer, 20), 2 * count)
    assert all(equal(a, b) for a, b in zip(one, two, strict=True))
    originals = [torch.where(row["labels"] == -100, row["input_ids"], row["labels"]).tolist() for row in one]
    assert originals[:5] != first_pass[:5]
    assert originals[:5] != originals[count : count + 5]


def test_stream_wants_one_reader_and_some_text(documents, tokenizer):
    with pytest.raises(RecipeError, match="one reader"):
        next(iter(DataLoader(stream(documents, tokenizer), num_workers=2)))
    labels = next(iter(DataLoader(stream(documents, tokenizer), num_workers=1, batch_size=4)))["labels"]
    assert torch.equal(labels, torch.stack([row["labels"] for row in first(stream(documents, tokenizer), 4)]))
    with pytest.raises(RecipeError, match="does not fill one block"):
        next(iter(stream(["short"], tokenizer)))
