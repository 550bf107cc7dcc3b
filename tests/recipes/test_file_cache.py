import json

import pytest
from file_cache import MANIFEST, cache_root, cached_folder


class Builder:
    def __init__(self, text="content"):
        self.text, self.calls = text, 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "deep").mkdir()
        (folder / "deep" / "file.txt").write_text(self.text)
        (folder / "work").mkdir()
        (folder / "work" / "scrap").write_text("scrap")


def test_built_once_for_each_key(fresh_cache):
    build = Builder()
    first = cached_folder("thing", {"a": 1}, build)
    assert cached_folder("thing", {"a": 1}, build) == first
    assert build.calls == 1
    assert cached_folder("thing", {"a": 2}, build) != first
    assert build.calls == 2
    assert first.parent == cache_root() == fresh_cache / "hf_symqk"
    assert (first / "deep" / "file.txt").read_text() == "content"
    assert not (first / "work").exists()


def damage_content(folder):
    (folder / "deep" / "file.txt").write_text("CONTENT")  # as long as before


def damage_by_deleting(folder):
    (folder / "deep" / "file.txt").unlink()


def damage_manifest(folder):
    (folder / MANIFEST).write_text("{")


def damage_by_removing_manifest(folder):
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_content, damage_by_deleting, damage_manifest, damage_by_removing_manifest],
    ids=lambda f: f.__name__,
)
def test_damaged_folder_is_rebuilt(fresh_cache, damage, caplog):
    build = Builder()
    folder = cached_folder("thing", {}, build)
    damage(folder)
    assert cached_folder("thing", {}, build) == folder
    assert build.calls == 2
    assert (folder / "deep" / "file.txt").read_text() == "content"
    assert "rebuilt" in caplog.text
    assert json.loads((folder / MANIFEST).read_text())["key"] == {}
    assert [path.name for path in cache_root().iterdir()] == [folder.name]


def test_failed_build_leaves_nothing(fresh_cache):
    def build(folder):
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_folder("thing", {}, build)
    assert list(cache_root().iterdir()) == []


def test_run_that_finished_first_is_taken(fresh_cache):
    inner = Builder("theirs")

    def build(folder):
        Builder("ours")(folder)
        cached_folder("thing", {}, inner)  # another run, while we build

    folder = cached_folder("thing", {}, build)
    assert (folder / "deep" / "file.txt").read_text() == "theirs"
    assert [path.name for path in cache_root().iterdir()] == [folder.name]
