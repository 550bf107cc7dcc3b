"""Blocks hold the text, all of it and in its order, whatever makes them."""

import datasets
import pytest
from arguments import RecipeError
from packing import BlockFrame, Packer, decoder_frame, encoder_frame, pack


def test_pack_keeps_every_token_in_order():
    documents = [[10, 11, 12], [20], [30, 31, 32, 33, 34, 35, 36]]
    blocks = list(pack(documents, 5, BlockFrame(1, 2, 2)))
    # Stream with a 2 after each document: 10 11 12 | 2 20 2 | 30 31 32 | 33 34 35 | (36 2 dropped)
    assert blocks == [[1, 10, 11, 12, 2], [1, 2, 20, 2, 2], [1, 30, 31, 32, 2], [1, 33, 34, 35, 2]]
    # A decoder's blocks are cuts out of one text: 10 11 12 2 | 20 2 30 31 | 32 33 34 35 | (36 2 dropped)
    assert list(pack(documents, 4, BlockFrame(None, None, 2))) == [[10, 11, 12, 2], [20, 2, 30, 31], [32, 33, 34, 35]]
    assert list(pack(documents, 4, BlockFrame(None, None, None))) == [[10, 11, 12, 20], [30, 31, 32, 33]]


def test_packed_dataset_is_independent_of_workers_and_cached(documents, tokenizer, fresh_cache, monkeypatch):
    data = datasets.Dataset.from_dict({"text": documents})
    packer = Packer(tokenizer, 32, encoder_frame(tokenizer))
    one = packer.dataset(data, "text", name="one")
    two = packer.dataset(data, "text", num_workers=2, name="two")
    expected = list(packer.blocks(documents))
    assert one["input_ids"][:] == two["input_ids"][:] == expected
    assert all(len(block) == 32 for block in expected)
    monkeypatch.setattr("packing.pack", None)
    assert packer.dataset(data, "text", name="one")["input_ids"][:] == expected


def test_cache_follows_documents_tokenizer_and_block_size(documents, tokenizer, fresh_cache):
    from tokenization import train_tokenizer

    data = datasets.Dataset.from_dict({"text": documents})
    other = train_tokenizer(documents, 280)
    encoder = encoder_frame(tokenizer)
    made = [
        Packer(tokenizer, 32, encoder).dataset(data, "text"),
        Packer(tokenizer, 16, encoder).dataset(data, "text"),
        Packer(other, 32, encoder).dataset(data, "text"),
        Packer(tokenizer, 32, BlockFrame(None, None, 2)).dataset(data, "text"),
        Packer(tokenizer, 32, encoder, character_spaced=True).dataset(data, "text"),
        Packer(tokenizer, 32, encoder).dataset(datasets.Dataset.from_dict({"text": documents[1:]}), "text"),
    ]
    assert len({str(blocks["input_ids"][:]) for blocks in made}) == len(made)


def test_spaced_characters_are_what_is_tokenized(documents, tokenizer):
    """The published treatment: each character a word of its own, spaces too."""
    packer = Packer(tokenizer, 32, encoder_frame(tokenizer), character_spaced=True)
    assert tokenizer.decode(packer.tokenize(["a key"])[0]) == "a   k e y"
    first = tokenizer.decode(next(packer.blocks(documents)), skip_special_tokens=True)
    assert len(first) > 20
    assert " ".join(documents[0]).startswith(first)


def test_end_of_text_stands_between_a_decoders_documents(tokenizer, decoder_tokenizer):
    decoder = decoder_tokenizer
    assert decoder_frame(decoder) == (None, None, decoder.eos_token_id)
    # An encoder's tokenizer, which the paper's decoders use, has [SEP] in that place.
    assert decoder_frame(tokenizer) == (None, None, tokenizer.sep_token_id)
    [ids] = Packer(decoder, 64, decoder_frame(decoder)).tokenize(["the key"])
    assert decoder.decode(ids) == "the key"


def test_block_that_nothing_fills(tokenizer, fresh_cache):
    with pytest.raises(RecipeError, match="do not fill one block of 64 tokens"):
        Packer(tokenizer, 64, encoder_frame(tokenizer)).dataset(
            datasets.Dataset.from_dict({"text": ["short"]}), "text"
        )


def test_block_size_is_checked(tokenizer, tmp_path):
    with pytest.raises(RecipeError, match="block_size=2 leaves no room"):
        Packer(tokenizer, 2, encoder_frame(tokenizer))
    Packer(tokenizer, 3, encoder_frame(tokenizer))
    with pytest.raises(RecipeError, match="block_size=1 leaves no room"):
        Packer(tokenizer, 1, decoder_frame(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    limited = type(tokenizer).from_pretrained(tmp_path, model_max_length=128)
    with pytest.raises(RecipeError, match="block_size=129 is above the 128"):
        Packer(limited, 129, encoder_frame(limited))
