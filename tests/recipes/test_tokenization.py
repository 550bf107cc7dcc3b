import datasets
import pytest
import tokenizers
from arguments import DataArguments, RecipeError, TokenizerArguments
from tokenization import (
    DECODER_TOKENS,
    ENCODER_TOKENS,
    choose_tokenizer,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    trained_tokenizer,
)
from transformers import PreTrainedTokenizerFast


def test_round_trip_of_any_text(tokenizer):
    for text in ("the symmetric key", "ünïcödé ☃ 漢字\n\ttab", "unseen WORDS 123"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    ids = tokenizer("the")["input_ids"]
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert len(tokenizer) == 300


def test_vocabulary_must_hold_the_bytes(documents):
    assert len(train_tokenizer(documents, 261)) == 261
    with pytest.raises(RecipeError, match="vocab_size=260 is below 261"):
        train_tokenizer(documents, 260)


def test_trained_once(documents, fresh_cache, monkeypatch):
    data = datasets.Dataset.from_dict({"text": documents})
    first = trained_tokenizer(data, "text", 300)
    assert "Ġthe" in first.get_vocab()
    monkeypatch.setattr("tokenization.train_tokenizer", None)
    assert tokenizer_digest(trained_tokenizer(data, "text", 300)) == tokenizer_digest(first)


def test_stream_gives_its_first_documents(documents, fresh_cache):
    stream = datasets.Dataset.from_dict({"text": [*documents, "zzyzx " * 500]}).to_iterable_dataset()
    wanted, data = TokenizerArguments(vocab_size=300), DataArguments(stream_tokenizer_documents=len(documents))
    chosen = choose_tokenizer(wanted, data, stream, "text", ENCODER_TOKENS)
    assert tokenizer_digest(chosen) == tokenizer_digest(train_tokenizer(documents, 300))


def test_digest_tells_tokenizers_apart(documents, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(load_tokenizer(str(tmp_path))) == tokenizer_digest(tokenizer)
    assert tokenizer_digest(train_tokenizer(documents, 301)) != tokenizer_digest(tokenizer)


def test_decoders_tokenizer_has_one_token_for_both_ends_of_a_text(decoder_tokenizer, tokenizer, tmp_path):
    assert decoder_tokenizer.bos_token_id == decoder_tokenizer.eos_token_id == 0
    assert decoder_tokenizer.decode(decoder_tokenizer("the key")["input_ids"]) == "the key"
    assert tokenizer_digest(decoder_tokenizer) != tokenizer_digest(tokenizer)
    decoder_tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path), DECODER_TOKENS)) == 300


def test_tokenizer_of_spaced_characters_merges_nothing(documents, fresh_cache):
    data = datasets.Dataset.from_dict({"text": documents})
    vocabulary = trained_tokenizer(data, "text", 300, character_spaced=True).get_vocab()
    assert "Ġthe" not in vocabulary
    assert "Ġt" in vocabulary


def test_tokenizer_without_mask_token(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="has no mask token"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(RecipeError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))
