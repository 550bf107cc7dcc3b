import datasets
import numpy as np
import pytest
from arguments import DataArguments, RecipeError
from text_data import check_block_size, load_documents, pack, packed_dataset, tokenize


def test_pack_keeps_every_token_in_order():
    documents = [[10, 11, 12], [20], [30, 31, 32, 33, 34, 35, 36]]
    blocks = list(pack(documents, 5, 1, 2))
    # Stream with a 2 after each document: 10 11 12 | 2 20 2 | 30 31 32 | 33 34 35 | (36 2 dropped)
    assert blocks == [[1, 10, 11, 12, 2], [1, 2, 20, 2, 2], [1, 30, 31, 32, 2], [1, 33, 34, 35, 2]]
    assert list(pack(documents, 4, None, None)) == [[10, 11, 12, 20], [30, 31, 32, 33]]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_each_kind_hold_the_same_documents(text_files, documents, kind, streaming):
    arguments = DataArguments(train_file=text_files[kind], streaming=streaming, stream_validation_documents=6)
    loaded = load_documents(arguments)
    train = [row["text"] for row in loaded.train]
    held_out = loaded.held_out["text"]
    assert len(held_out) == (6 if streaming else 3)  # 5 % of 60
    assert sorted([*train, *held_out]) == sorted(documents)
    if streaming:
        assert list(held_out) == documents[:6]
    else:
        assert load_documents(arguments).held_out["text"] == held_out


def test_hold_out_is_by_document_and_shared_by_all_runs(text_files, documents):
    held_out = load_documents(DataArguments(train_file=text_files["txt"], validation_split_percentage=25)).held_out
    places = np.random.default_rng(20_000).permutation(60)[:15]
    assert set(held_out["text"]) == {documents[place] for place in places}


def test_validation_file(text_files, tmp_path):
    file = tmp_path / "held.txt"
    file.write_text("first\n\nsecond\n")
    loaded = load_documents(DataArguments(train_file=text_files["csv"], validation_file=str(file)))
    assert list(loaded.held_out["text"]) == ["first", "second"]
    assert len(loaded.train) == 60


def test_dataset_folder_with_validation_split(tmp_path, text_files, documents):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.txt").write_text("\n".join(documents))
    (folder / "validation.txt").write_text("held one\nheld two\n")
    loaded = load_documents(DataArguments(dataset_name=str(folder)))
    assert list(loaded.held_out["text"]) == ["held one", "held two"]
    assert list(loaded.train["text"]) == documents
    (folder / "train.txt").rename(folder / "test.txt")
    with pytest.raises(RecipeError, match="no split named train; it has test, validation"):
        load_documents(DataArguments(dataset_name=str(folder)))


def test_paragraphs(tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text("one\ntwo\n\nthree\n\nfour\n")
    loaded = load_documents(DataArguments(train_file=str(file), sample_by="paragraph", validation_split_percentage=0))
    assert [text.strip() for text in loaded.train["text"]] == ["one\ntwo", "three", "four"]
    assert loaded.held_out is None


@pytest.mark.parametrize("streaming", [False, True])
def test_text_column_is_missing(text_files, streaming):
    arguments = DataArguments(train_file=text_files["csv"], text_column="body", streaming=streaming)
    with pytest.raises(RecipeError, match=r"no column 'body': it has text, length\. .*--text_column"):
        load_documents(arguments)


def test_text_column_of_numbers(text_files):
    with pytest.raises(RecipeError, match=r"'length' .* holds int64, not text"):
        load_documents(DataArguments(train_file=text_files["csv"], text_column="length"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", ["", "\n  \n\n"])
def test_empty_file(tmp_path, content, streaming):
    file = tmp_path / "empty.txt"
    file.write_text(content)
    with pytest.raises(RecipeError, match=r"empty\.txt.*(is empty|has no text)"):
        load_documents(DataArguments(train_file=str(file), streaming=streaming))


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.txt' does not exist"):
        load_documents(DataArguments(train_file=str(tmp_path / "none.txt")))
    (tmp_path / "text.docx").write_text("text")
    with pytest.raises(RecipeError, match=r"suffix must be one of \.txt"):
        load_documents(DataArguments(train_file=str(tmp_path / "text.docx")))
    (tmp_path / "broken.json").write_text('{"text": "a"\n[')
    with pytest.raises(RecipeError, match=r"broken\.json' cannot be read as json"):
        load_documents(DataArguments(train_file=str(tmp_path / "broken.json")))


def test_one_document_cannot_be_split(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("only one line")
    with pytest.raises(RecipeError, match="1 document"):
        load_documents(DataArguments(train_file=str(file)))


def test_packed_dataset_is_independent_of_workers_and_cached(documents, tokenizer, fresh_cache, monkeypatch):
    data = datasets.Dataset.from_dict({"text": documents})
    one = packed_dataset(data, "text", tokenizer, 32, name="one")
    two = packed_dataset(data, "text", tokenizer, 32, num_workers=2, name="two")
    expected = list(pack(tokenize(documents, tokenizer), 32, tokenizer.cls_token_id, tokenizer.sep_token_id))
    assert one["input_ids"][:] == two["input_ids"][:] == expected
    assert all(len(block) == 32 for block in expected)
    monkeypatch.setattr("text_data.pack", None)
    assert packed_dataset(data, "text", tokenizer, 32, name="one")["input_ids"][:] == expected


def test_cache_follows_documents_tokenizer_and_block_size(documents, tokenizer, fresh_cache):
    from tokenization import train_tokenizer

    data = datasets.Dataset.from_dict({"text": documents})
    other = train_tokenizer(documents, 280)
    made = [
        packed_dataset(data, "text", tokenizer, 32),
        packed_dataset(data, "text", tokenizer, 16),
        packed_dataset(data, "text", other, 32),
        packed_dataset(datasets.Dataset.from_dict({"text": documents[1:]}), "text", tokenizer, 32),
    ]
    assert len({str(blocks["input_ids"][:]) for blocks in made}) == 4


def test_block_that_nothing_fills(tokenizer, fresh_cache):
    with pytest.raises(RecipeError, match="do not fill one block of 64 tokens"):
        packed_dataset(datasets.Dataset.from_dict({"text": ["short"]}), "text", tokenizer, 64)


def test_block_size_is_checked(tokenizer, tmp_path):
    with pytest.raises(RecipeError, match="block_size=2 leaves no room"):
        check_block_size(2, tokenizer)
    check_block_size(3, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    limited = type(tokenizer).from_pretrained(tmp_path, model_max_length=128)
    with pytest.raises(RecipeError, match="block_size=129 is above the 128"):
        check_block_size(129, limited)
