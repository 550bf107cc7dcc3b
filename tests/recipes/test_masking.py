import numpy as np
import pytest
import torch
from arguments import RecipeError
from masking import TokenMasker


def equal(one, two):
    return all(torch.equal(one[name], two[name]) for name in ("input_ids", "labels"))


def mask(masker, row, epoch, index):
    """Of one sequence."""
    return {name: rows[0] for name, rows in masker(np.array([row]), epoch, [index]).items()}


def test_masks_depend_on_seed_epoch_and_index_only(tokenizer):
    masker, row = TokenMasker(tokenizer, 0.15, seed=1), list(range(10, 210))
    reference = mask(masker, row, 3, 7)
    np.random.seed(5)
    torch.manual_seed(5)
    assert equal(mask(TokenMasker(tokenizer, 0.15, seed=1), row, 3, 7), reference)
    others = (TokenMasker(tokenizer, 0.15, seed=2), 3, 7), (masker, 4, 7), (masker, 3, 8)
    for other in (mask(made, row, epoch, index) for made, epoch, index in others):
        assert not torch.equal(other["labels"], reference["labels"])


def test_masks_of_a_batch_are_those_of_its_sequences(tokenizer):
    """Whatever stands beside a sequence, and in which order."""
    masker, rows = TokenMasker(tokenizer, 0.15, seed=1), np.random.default_rng(0).integers(5, 300, size=(3, 50))
    batch = masker(rows, 2, [9, 4, 7])
    for place, index in enumerate([9, 4, 7]):
        assert equal(mask(masker, rows[place], 2, index), {name: part[place] for name, part in batch.items()})


def test_masks_are_those_of_every_version(tokenizer):
    """Runs that were kept, and checkpoints that are resumed, saw these: drawn here as the first version drew them."""
    row, generator = np.arange(10, 74), np.random.default_rng([1, 3, 7])
    chosen, fate = generator.random(64) < 0.15, generator.random(64)
    random_ids = generator.integers(len(tokenizer), size=64)
    masked = mask(TokenMasker(tokenizer, 0.15, seed=1), row, 3, 7)
    replaced = np.where(fate < 0.8, tokenizer.mask_token_id, np.where(fate < 0.9, row, random_ids))
    assert masked["input_ids"].tolist() == np.where(chosen, replaced, row).tolist()
    assert masked["labels"].tolist() == np.where(chosen, row, -100).tolist()


def test_shares_and_replacements_are_those_of_bert(tokenizer):
    masker = TokenMasker(tokenizer, 0.15, seed=0)
    row = np.random.default_rng(0).integers(5, 300, size=400_000)
    masked = mask(masker, row, 0, 0)
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
    masked = mask(TokenMasker(tokenizer, 1.0, seed=0), [*specials, 10, *specials], 0, 0)
    assert (masked["labels"] != -100).sum() == 1
    assert masked["labels"][len(specials)] == 10


def test_sequence_without_a_mask_is_kept_as_it_is(tokenizer):
    masked = mask(TokenMasker(tokenizer, 1e-9, seed=0), [10, 11, 12], 0, 0)
    assert masked["input_ids"].tolist() == [10, 11, 12]
    assert masked["labels"].tolist() == [-100] * 3


def test_tokenizer_without_mask_token(tokenizer):
    class Plain:
        mask_token_id = None
        name_or_path = "plain"

    with pytest.raises(RecipeError, match="'plain' has no mask token"):
        TokenMasker(Plain(), 0.15, 0)
