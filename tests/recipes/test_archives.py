"""Archives as Kaggle hands them out: the right member is found, and what is wrong with an archive is said."""

import io
import zipfile
from pathlib import Path

import pytest
from archives import extract_member
from arguments import DataArguments, RecipeError
from text_data import load_documents


TABLE = "id,comment_text,toxic\n" + "".join(f'{n},"comment {n},\nsecond line",0\n' for n in range(40))
SUFFIXES = (".csv", ".jsonl")


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return str(path)


def zipped_bytes(members):
    buffer = io.BytesIO()
    zipped(buffer, members)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        {"train.csv": TABLE, "test.csv": "a", "sample_submission.csv": "b"},
        {"data/train.csv": TABLE, "__MACOSX/data/train.csv": "x", "test.csv": "a"},
        {"train.csv.zip": zipped_bytes({"train.csv": TABLE}), "test.csv.zip": b"a", "test_labels.csv.zip": b"b"},
        {"comments.csv": TABLE},
        {"train-00000-of-00001.csv": TABLE, "readme.md": "a"},
        {"testimonies.csv": TABLE},
    ],
    ids=["plain", "in a folder", "zipped again", "the only one", "the only table", "only looks like test"],
)
def test_member_is_found(tmp_path, members):
    path = zipped(tmp_path / "archive.zip", members)
    file = Path(extract_member(path, "train", SUFFIXES))
    assert file.suffix == ".csv"
    assert file.read_text() == TABLE
    loaded = load_documents(DataArguments(train_file=path, text_column="comment_text"))
    assert sorted([*loaded.train["comment_text"], *loaded.held_out["comment_text"]])[0] == "comment 0,\nsecond line"
    assert len(loaded.train) + len(loaded.held_out) == 40


def test_it_is_extracted_once(tmp_path, monkeypatch):
    path = zipped(tmp_path / "archive.zip", {"train.csv": TABLE})
    first = extract_member(path, "train", SUFFIXES)
    monkeypatch.setattr("archives._copy", None)
    assert extract_member(path, "train", SUFFIXES) == first


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"test.csv": "a", "test_labels.csv": "b"}, "no member called train .*train.csv.*holds test.csv, test_labels"),
        ({"test.csv": "a", "sample_submission.csv": "b"}, "no member called train .*holds test.csv, sample_sub"),
        ({"test.csv": TABLE}, "no member called train .*it holds test.csv"),
        (
            {"data/Validation.csv.zip": zipped_bytes({"a.csv": TABLE})},
            "no member called train .*data/Validation",
        ),
        ({"data.csv.zip": zipped_bytes({"test.csv": TABLE})}, "data.csv.zip' in .* holds test.csv, not one file"),
        ({"a/train.csv": "a", "b/train.csv": "b"}, "several members called train .*holds a/train.csv, b/train.csv"),
        ({"notes.txt": "a"}, "no member called train .*it holds notes.txt"),
        ({}, "it holds nothing"),
        ({"train.csv.zip": zipped_bytes({"readme": "a"})}, "train.csv.zip' in .* holds readme, not one file"),
        ({"train.csv.zip": b"no archive"}, "cannot be read as a zip archive"),
    ],
    ids=[
        "test and its labels",
        "test and another",
        "test alone",
        "validation, zipped again",
        "test, under another name",
        "several",
        "none",
        "empty",
        "nothing inside",
        "broken inside",
    ],
)
def test_missing_member_is_named(tmp_path, members, message):
    path = zipped(tmp_path / "archive.zip", members)
    with pytest.raises(RecipeError, match=message):
        extract_member(path, "train", SUFFIXES)


def test_training_data_are_not_held_out(tmp_path):
    with pytest.raises(RecipeError, match=r"no member called validation .*it holds train\.csv"):
        extract_member(zipped(tmp_path / "archive.zip", {"train.csv": TABLE}), "validation", SUFFIXES)


def test_half_a_download(tmp_path):
    path = Path(zipped(tmp_path / "archive.zip", {"train.csv": TABLE * 100}))
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(RecipeError, match=r"archive\.zip' cannot be read as a zip archive .*download it again"):
        load_documents(DataArguments(train_file=str(path)))


def test_column_that_the_table_does_not_have(tmp_path):
    path = zipped(tmp_path / "archive.zip", {"train.csv": TABLE})
    with pytest.raises(RecipeError, match=r"no column 'text': it has id, comment_text, toxic\."):
        load_documents(DataArguments(train_file=path))
