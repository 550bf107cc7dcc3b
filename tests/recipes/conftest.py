"""Gives the recipes' tests a cache of their own."""

import csv
import json
import random
from pathlib import Path

import datasets
import pandas as pd
import pytest
from tokenization import DECODER_TOKENS, train_tokenizer


RECIPES = Path(__file__).resolve().parents[2] / "recipes"


TEXT = "the symmetric query and key of a model attend to each other while it reads some long text"


def make_documents(count=60, seed=0):
    """Documents of 20 to 80 words, the same for the same seed."""
    generator, words = random.Random(seed), TEXT.split()
    return [
        f"{number} " + " ".join(generator.choices(words, k=generator.randint(20, 80))) + "." for number in range(count)
    ]


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("datasets-cache")


@pytest.fixture(autouse=True)
def _own_cache(cache_folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache_folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache_folder))


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    folder = tmp_path / "fresh-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="session")
def documents():
    return make_documents()


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer(documents, 300)


@pytest.fixture(scope="session")
def decoder_tokenizer(documents):
    return train_tokenizer(documents, 300, DECODER_TOKENS)


@pytest.fixture(scope="session")
def text_files(documents, tmp_path_factory):
    """The same documents as each kind of file."""
    folder = tmp_path_factory.mktemp("text")
    paths = {kind: folder / f"text.{kind}" for kind in ("txt", "jsonl", "csv", "parquet")}
    paths["txt"].write_text("\n".join(documents) + "\n")
    paths["jsonl"].write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    with paths["csv"].open("w", newline="") as file:
        csv.writer(file).writerows([["text", "length"], *([document, len(document)] for document in documents)])
    pd.DataFrame({"text": documents}).to_parquet(paths["parquet"])
    return {kind: str(path) for kind, path in paths.items()}
