import datasets
import numpy as np
import pytest
from arguments import DataArguments, RecipeError
from text_data import _hold_out_of_stream, load_documents


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


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "encoding"),
    [
        ("a.txt", "plain\n" * 9 + "café\n", "latin-1"),
        ("a.csv", "text\n" + "plain\n" * 8 + "café\n", "latin-1"),
        ("a.jsonl", '{"text": "plain"}\n' * 9 + '{"text": "café"}\n', "latin-1"),
        ("a.txt", "plain\n" * 9 + "café", "latin-1"),
        ("a.csv", "text\nplain\n", "utf-16"),
    ],
    ids=["txt", "csv", "jsonl", "last byte", "utf-16"],
)
def test_file_that_is_not_utf_8(tmp_path, name, content, encoding, streaming, monkeypatch):
    """Some kinds show it to whoever reads the row only, a stream after hours. A character may lie across chunks."""
    monkeypatch.setattr("text_data.DECODED_AT_ONCE", 5)
    file = tmp_path / name
    file.write_bytes(content.encode(encoding))
    arguments = DataArguments(train_file=str(file), streaming=streaming, stream_validation_documents=1)
    found = "byte 0xff in line 1" if encoding == "utf-16" else "byte 0xe9 in line 10"
    with pytest.raises(RecipeError, match=rf"{name}' is not UTF-8 \({found}\): convert it"):
        load_documents(arguments)
    file.write_bytes((content * 2).encode("utf-8"))
    assert len(list(load_documents(arguments).train)) > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_text_that_is_sometimes_something_else(tmp_path, streaming):
    file = tmp_path / "mixed.jsonl"
    file.write_text('{"text": "one"}\n{"text": ["two"]}\n' * 20)
    with pytest.raises(RecipeError, match=r"'text' of the training text of .*mixed\.jsonl' holds Json.*, not text"):
        load_documents(DataArguments(train_file=str(file), streaming=streaming))


def test_stream_that_declares_nothing_and_holds_more_than_text():
    """Its rows are looked at as they come."""
    rows = [{"text": text} for text in ["one", None, "two", ["three"]]]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    arguments = DataArguments(train_file="a.txt", streaming=True, stream_validation_documents=4)
    with pytest.raises(RecipeError, match=r"a document is .*three.* \(list\), not text"):
        _hold_out_of_stream(stream, None, "text", "a.txt", arguments)


def test_one_document_cannot_be_split(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("only one line")
    with pytest.raises(RecipeError, match=r"1 document.*--validation_split_percentage 0 with --do_eval false"):
        load_documents(DataArguments(train_file=str(file)))
