from pydoc_data.topics import topics

import builtin_text
import pytest
from arguments import RecipeError


def test_text_is_prose_by_document(fresh_cache, monkeypatch):
    documents = builtin_text.builtin_documents()
    names, texts = documents["name"], documents["text"]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("topic:") for name in names) == len(topics)
    assert sum(map(len, texts)) > 1_500_000
    assert all(text.strip() for text in texts)
    words = " ".join(texts).lower().split()
    # English prose: its commonest word makes up 5 to 7 %, of code 0 %.
    assert words.count("the") / len(words) > 0.04
    by_name = dict(zip(names, texts, strict=True))
    import textwrap

    assert textwrap.__doc__.strip() in by_name["module:textwrap.py"]
    assert textwrap.dedent.__doc__.strip().splitlines()[0] in by_name["module:textwrap.py"]
    assert not any("/test/" in name or "site-packages" in name for name in names)

    def forbidden():
        raise AssertionError("read again")

    monkeypatch.setattr(builtin_text, "iterate_builtin_documents", forbidden)
    again = builtin_text.builtin_documents()
    assert again["text"] == texts
    assert again._fingerprint == documents._fingerprint


def test_python_without_source_is_named(fresh_cache, monkeypatch):
    monkeypatch.setattr(builtin_text, "_sources", lambda root: [])
    with pytest.raises(RecipeError, match="characters of prose"):
        builtin_text.builtin_documents()
