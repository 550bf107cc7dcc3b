"""
Sources of checkpoints: what is read from where, how many bytes of it cross the network, and what happens when they do
not. The Hub is a local server (`hub_server`); waits are recorded instead of slept.
"""

import logging
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import HubServer, connected, hub
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from hf_symqk.checkpoint import ranges
from hf_symqk.checkpoint.headers import read_header
from hf_symqk.checkpoint.sources import HubSource, LocalSource, Source, open_source


__all__ = ["hub"]

FILE = "model.safetensors"
REPO = "org/model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 301,000 parameters (602 kB in bfloat16), its config, and another model in a folder."""
    folder = tmp_path / "saved"
    (folder / "vision").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "q.weight": torch.randn(1000, 300, generator=generator).bfloat16(),
        "scale": torch.ones(1000, dtype=torch.bfloat16),
    }
    save_file(weights, folder / FILE)
    save_file({"x": torch.ones(3)}, folder / "vision" / FILE)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between repetitions, which do not take place."""
    waits: list[float] = []
    monkeypatch.setattr(ranges, "time", SimpleNamespace(sleep=waits.append, time=ranges.time.time))
    return waits


def read(source: Source, file: str, start: int, count: int) -> bytes:
    buffer = bytearray(count)
    source.read(file, start, memoryview(buffer))
    return bytes(buffer)


def cut(folder: Path, start: int, count: int, file: str = FILE) -> bytes:
    """What a read has to give, by the plainest means."""
    return (folder / file).read_bytes()[start : start + count]


# On this disk


def test_a_folder(folder: Path) -> None:
    source, file = open_source(folder)
    assert isinstance(source, LocalSource)
    assert file is None
    assert source.name == str(folder)
    assert source.num_parameters is None
    assert source.files() == ["config.json", FILE, f"vision/{FILE}"]
    assert source.size(FILE) == (folder / FILE).stat().st_size
    assert source.fetch("config.json") == source.local_path("config.json") == folder / "config.json"
    assert read(source, FILE, 100, 5000) == cut(folder, 100, 5000)
    assert read(source, FILE, 100, 0) == b""


@pytest.mark.parametrize("where", ["folder", "hub", "cache"])
def test_a_buffer_of_any_type_is_filled(where: str, hub: HubServer, folder: Path) -> None:
    # Tensors are read into their own memory, whose elements are wider than a byte.
    hub.add_repo(REPO, folder)
    if where == "cache":
        hf_hub_download(REPO, FILE)
    source, _ = open_source(folder if where == "folder" else REPO)
    slot = read_header(source, FILE).slots["q.weight"]
    weight = torch.empty(slot.shape, dtype=torch.bfloat16)
    source.read(FILE, slot.start, weight.view(torch.int16).numpy().reshape(-1).data)
    expected = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(weight, expected)


def test_a_single_file_and_a_subfolder(folder: Path) -> None:
    source, file = open_source(str(folder / FILE))
    assert (source.name, file) == (str(folder), FILE)
    source, file = open_source(str(folder), subfolder="vision", token="hf_harmless")
    assert (source.files(), file) == ([FILE], None)


def test_what_exists_wins_over_a_repository(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("saved", folder)
    monkeypatch.chdir(folder.parent)
    assert isinstance(open_source("saved")[0], LocalSource)
    assert hub.requests == []


def test_hidden_folders_are_no_part_of_a_checkpoint(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / FILE).write_bytes(b"")
    assert ".cache/" not in "".join(open_source(folder)[0].files())


def test_wrong_paths_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*saved' exists .* a folder has no revisions: leave out revision='main'"):
        open_source(str(folder), revision="main")
    with pytest.raises(ValueError, match="is a file: leave out subfolder='vision'"):
        open_source(folder / FILE, subfolder="vision")
    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*saved/audio'"):
        open_source(folder, subfolder="audio")
    with pytest.raises(FileNotFoundError, match=r"There is no file or folder '.*saved/none'"):
        open_source(folder / "none")
    for name in (str(folder / "none"), "a//b", ""):
        with pytest.raises(FileNotFoundError, match=rf"no file or folder '{name}', and no repository .* this name"):
            open_source(name)
    source, _ = open_source(folder)
    for call in (source.size, source.fetch, lambda file: read(source, file, 0, 1)):
        with pytest.raises(FileNotFoundError, match=r"There is no file 'none.json' in '.*saved'"):
            call("none.json")
    assert source.local_path("none.json") is None


def test_a_short_file_is_an_error(folder: Path) -> None:
    source, _ = open_source(folder)
    size = source.size(FILE)
    with pytest.raises(ValueError, match=f"{FILE} of .* 100 bytes were expected from position .*{size} bytes.*again"):
        read(source, FILE, size - 99, 100)


# On the Hub


def test_ranges_are_read_and_nothing_else(hub: HubServer, folder: Path) -> None:
    # The point of it all: bytes of the file that cross the network are those asked for, in one request each; the
    # address at the storage host is asked for once, and nothing is left in the cache.
    commit = hub.add_repo(REPO, folder)
    source, file = open_source(REPO)
    assert isinstance(source, HubSource)
    assert (file, source.name, source.commit) == (None, REPO, commit)
    assert source.num_parameters == 301_000
    assert source.files() == ["config.json", FILE, f"vision/{FILE}"]
    assert source.size(FILE) == (folder / FILE).stat().st_size
    assert len(hub.asked()) == 1

    reads = [(0, 8), (8, 200), (100_000, 300_000), (source.size(FILE) - 1, 1)]
    for start, count in reads:
        assert read(source, FILE, start, count) == cut(folder, start, count)
    stored = hub.asked(FILE, server="storage")
    assert [request.range for request in stored] == [f"bytes={start}-{start + count - 1}" for start, count in reads]
    assert hub.sent(FILE) == sum(count for _, count in reads)
    assert [request.method for request in hub.asked(FILE, server="hub")] == ["HEAD"]
    assert source.local_path(FILE) is None
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*"))


def test_small_files_come_from_the_hub_itself(hub: HubServer, folder: Path) -> None:
    # Without a redirect the ranges go to the Hub, with the token.
    hub.add_repo(REPO, folder, private=True, token="hf_right")
    source, _ = open_source(REPO, token="hf_right")
    assert read(source, "config.json", 2, 5) == b"model"
    assert hub.sent("config.json") == 5


def test_cached_files_cost_nothing(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    path = Path(hf_hub_download(REPO, FILE))
    hub.clear()
    source, _ = open_source(REPO)
    assert source.local_path(FILE) == source.fetch(FILE) == path
    assert read(source, FILE, 100_000, 300_000) == cut(folder, 100_000, 300_000)
    assert hub.asked(FILE) == []
    # The file in the folder has the same name, but is not cached.
    assert source.local_path(f"vision/{FILE}") is None


def test_a_file_cached_at_another_commit_is_not_used(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    hf_hub_download(REPO, "config.json")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    commit = hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    assert source.local_path("config.json") is None
    assert "gpt2" in source.fetch("config.json").read_text()
    assert commit in str(source.fetch("config.json"))


def test_fetch_downloads_once_and_serves_offline_runs(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    assert source.fetch("config.json").read_text() == source.fetch("config.json").read_text() != ""
    assert len(hub.asked("config.json", method="GET")) == 1
    with connected(hub, Path(constants.HF_HUB_CACHE), offline=True):
        assert open_source(REPO)[0].files() == ["config.json"]


def test_fetch_keeps_to_the_commit_when_the_branch_moves(hub: HubServer, folder: Path) -> None:
    first = hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    before = (folder / "config.json").read_text()
    later = folder.parent / "later"
    later.mkdir()
    (later / "config.json").write_text("{}")
    hub.add_repo(REPO, later)
    path = source.fetch("config.json")
    assert path.read_text() == before
    assert first in str(path)


def test_revisions(hub: HubServer, folder: Path) -> None:
    first = hub.add_repo(REPO, folder)
    other = folder.parent / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    second = hub.add_repo(REPO, other, revision="refs/pr/1")
    for revision, commit in [("main", first), ("refs/pr/1", second), (first, first)]:
        source, _ = open_source(REPO, revision=revision)
        assert isinstance(source, HubSource)
        assert (source.commit, source.name) == (commit, f"{REPO}@{revision}")
    source, _ = open_source(REPO, revision="refs/pr/1")
    assert source.size("config.json") == len(read(source, "config.json", 0, 2)) == 2


def test_a_deleted_branch_is_not_read_from_the_cache(hub: HubServer, folder: Path) -> None:
    # The Hub was asked and knows better, as with huggingface_hub's own downloads.
    hub.add_repo(REPO, folder, revision="v1")
    hf_hub_download(REPO, "config.json", revision="v1")
    hub.remove_revision(REPO, "v1")
    with pytest.raises(RevisionNotFoundError):
        open_source(REPO, revision="v1")


def test_a_subfolder_of_a_repository(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO, subfolder="vision/")
    assert (source.files(), source.name) == ([FILE], f"{REPO}/vision")
    assert source.num_parameters is None  # the Hub's number is that of the model at the root
    assert read(source, FILE, 10, 50) == cut(folder, 10, 50, f"vision/{FILE}")
    assert source.fetch(FILE).read_bytes() == (folder / "vision" / FILE).read_bytes()
    with pytest.raises(FileNotFoundError, match="org/model has no folder 'audio'"):
        open_source(REPO, subfolder="audio")


def test_the_size_is_asked_for_where_the_listing_lacks_it(hub: HubServer, folder: Path) -> None:
    # Mirrors of the Hub may list names alone. One request tells the address and the size.
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    assert isinstance(source, HubSource)
    source._sizes = dict.fromkeys(source._sizes)
    assert read(source, FILE, 5, 5) == cut(folder, 5, 5)
    assert source.size(FILE) == (folder / FILE).stat().st_size
    assert len(hub.asked(FILE, server="hub")) == 1


def test_a_range_is_not_held_twice(hub: HubServer, tmp_path: Path) -> None:
    # Of a layer of a large model, a second copy would double the memory of a run. What may be allocated beside the
    # buffer is a few blocks of the connection, of 64 KiB each; the server's are among them.
    (tmp_path / "big").mkdir()
    save_file({"x": torch.zeros(4_000_000)}, tmp_path / "big" / FILE)
    hub.add_repo(REPO, tmp_path / "big")
    source, _ = open_source(REPO)
    read(source, FILE, 0, 8)
    buffer = memoryview(bytearray(16_000_000))
    tracemalloc.start()
    source.read(FILE, 8, buffer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_tokens_and_refusals(hub: HubServer, folder: Path, waits: list[float]) -> None:
    hub.add_repo("org/gated", folder, gated=True, token="hf_right")
    hub.add_repo("org/private", folder, private=True, token="hf_right")
    hub.add_repo(REPO, folder)
    with pytest.raises(RepositoryNotFoundError, match="no file or folder 'org/none' on this disk either"):
        open_source("org/none")
    with pytest.raises(RepositoryNotFoundError):
        open_source("org/private")
    with pytest.raises(RevisionNotFoundError):
        open_source(REPO, revision="none")
    with pytest.raises(EntryNotFoundError):
        read(open_source(REPO)[0], "none.bin", 0, 1)
    with pytest.raises(EntryNotFoundError):
        open_source(REPO)[0].fetch("none.bin")
    for token in (None, "hf_wrong"):
        # The Hub shows what a gated repository holds; the files are refused.
        source, _ = open_source("org/gated", token=token)
        with pytest.raises(GatedRepoError):
            read(source, FILE, 0, 8)
        with pytest.raises(GatedRepoError):
            source.fetch("config.json")
    assert waits == []  # none of these is worth another try
    for repo in ("org/gated", "org/private"):
        assert read(open_source(repo, token="hf_right")[0], FILE, 0, 8) == cut(folder, 0, 8)


def test_the_token_of_the_environment_stays_at_the_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add_repo(REPO, folder, gated=True, token="hf_right")
    with connected(hub, tmp_path / "cache", token="hf_right"):
        source, _ = open_source(REPO)
        read(source, FILE, 0, 8)
    assert {request.headers.get("authorization") for request in hub.asked(server="hub")} == {"Bearer hf_right"}
    stored = hub.asked(server="storage")
    assert [request.status for request in stored] == [206]
    assert "authorization" not in stored[0].headers


# Faults


@pytest.mark.parametrize("where", ["hub/org/model/resolve", "storage/org/model"])
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_servers_are_asked_again(
    where: str, status: int, hub: HubServer, folder: Path, waits: list[float]
) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault(where, method=None, status=status, times=3)
    source, _ = open_source(REPO)
    assert read(source, FILE, 7, 1000) == cut(folder, 7, 1000)
    assert waits == [ranges.BASE_WAIT, 2 * ranges.BASE_WAIT, 4 * ranges.BASE_WAIT]


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"Retry-After": "17"}, 17),
        ({"RateLimit": '"resolvers";r=0;t=23'}, 23),
        ({"Retry-After": "soon"}, ranges.BASE_WAIT),
    ],
    ids=["seconds", "rate limit of the Hub", "nonsense"],
)
def test_the_server_says_how_long_to_wait(
    headers: dict[str, str], wait: float, hub: HubServer, folder: Path, waits: list[float]
) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", status=429, headers=headers)
    assert read(open_source(REPO)[0], FILE, 0, 8) == cut(folder, 0, 8)
    assert waits == [wait]


def test_the_server_says_until_when_to_wait(hub: HubServer, folder: Path, waits: list[float]) -> None:
    # A date in 10 minutes, and one in the past. A minute of tolerance for the time until the answer is read.
    hub.add_repo(REPO, folder)
    for seconds in (600, -600):
        date = formatdate(ranges.time.time() + seconds, usegmt=True)
        hub.add_fault("storage/", status=429, headers={"Retry-After": date})
    assert read(open_source(REPO)[0], FILE, 0, 8) == cut(folder, 0, 8)
    assert waits == [pytest.approx(600, abs=60), 0]


def test_a_dropped_connection_goes_on_where_it_stopped(hub: HubServer, folder: Path, waits: list[float]) -> None:
    # No byte is transferred twice, however often it drops, as long as each request brings some.
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", drop_after=30_000, times=9)
    assert read(open_source(REPO)[0], FILE, 50, 300_000) == cut(folder, 50, 300_000)
    assert hub.sent(FILE) == 300_000
    starts = [50 + 30_000 * count for count in range(10)]
    assert [request.range for request in hub.asked(server="storage")] == [f"bytes={start}-300049" for start in starts]
    assert waits == [ranges.BASE_WAIT] * 9


def test_an_answer_that_ends_early_without_saying_so(hub: HubServer, folder: Path, waits: list[float]) -> None:
    # Proxies drop Content-Length; then the HTTP client takes any end for the right one.
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", drop_after=100, hide_length=True)
    assert read(open_source(REPO)[0], FILE, 0, 1000) == cut(folder, 0, 1000)
    assert waits == [ranges.BASE_WAIT]


def test_a_slow_server_is_asked_again(
    hub: HubServer, folder: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    # The answer comes long after the client has given up on it.
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.add_fault("storage/", delay=30)
    assert read(source, FILE, 0, 100) == cut(folder, 0, 100)
    assert waits[0] == ranges.BASE_WAIT


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop_after": 0}], ids=["status", "connection"])
def test_what_fails_for_good_is_one_clear_error(
    fault: dict[str, int], hub: HubServer, folder: Path, waits: list[float]
) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", times=float("inf"), **fault)
    with pytest.raises(OSError, match=rf"bytes 10-29 of {FILE} of {REPO} failed {ranges.MAX_FAILURES} times"):
        read(open_source(REPO)[0], FILE, 10, 20)
    assert len(waits) == ranges.MAX_FAILURES - 1
    assert waits == sorted(waits)
    assert max(waits) <= ranges.LONGEST_WAIT


def test_an_expired_link_is_signed_again(hub: HubServer, folder: Path, waits: list[float]) -> None:
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    read(source, FILE, 0, 8)
    hub.expire_links()
    assert read(source, FILE, 8, 100) == cut(folder, 8, 100)
    assert len(hub.asked(FILE, method="HEAD", server="hub")) == 2
    assert waits == []


def test_a_link_that_never_works_is_given_up(hub: HubServer, folder: Path, waits: list[float]) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", status=403, times=float("inf"))
    with pytest.raises(OSError, match=rf"bytes 0-7 of {FILE} of {REPO} failed .* answered 403"):
        read(open_source(REPO)[0], FILE, 0, 8)
    assert len(hub.asked(server="storage")) == ranges.MAX_FAILURES


def test_a_server_without_ranges_sends_the_file_once(
    hub: HubServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The whole body of the first answer is not taken; the file is downloaded into the cache, once for all threads.
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", ignore_range=True, times=float("inf"))
    source, _ = open_source(REPO)
    with caplog.at_level(logging.WARNING, "hf_symqk"), ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda start: read(source, FILE, start, 100), range(0, 400, 100)))
    assert b"".join(parts) == cut(folder, 0, 400)
    assert source.local_path(FILE) is not None
    assert len([request for request in hub.asked(server="storage") if request.range is None]) == 1
    (message,) = {record.getMessage() for record in caplog.records}
    assert message.startswith(f"The server gives no part of {FILE} of {REPO}: it answers with the whole file")
    assert len(caplog.records) == 1


def test_a_range_that_is_the_whole_file_may_be_answered_so(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", ignore_range=True)
    source, _ = open_source(REPO)
    size = source.size(FILE)
    assert read(source, FILE, 0, size) == (folder / FILE).read_bytes()
    assert hub.sent(FILE) == size
    assert source.local_path(FILE) is None


def test_compressed_answers_are_not_taken_for_bytes_of_the_file(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", headers={"Content-Encoding": "gzip"})
    source, _ = open_source(REPO)
    assert read(source, FILE, 0, 8) == cut(folder, 0, 8)
    assert hub.asked(server="storage")[0].headers["accept-encoding"] == "identity"
    assert source.local_path(FILE) is not None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("bytes 0-7/9", rf"{FILE} of {REPO} has \d+ bytes according to the Hub, 9 where it is stored"),
        ("bytes 1-8/602000", rf"Asked for bytes 0-7 of {FILE} of {REPO}, the server answered with 'bytes 1-8/602000'"),
        ("", rf"Asked for bytes 0-7 of {FILE} of {REPO}, the server answered with ''"),
    ],
    ids=["other size", "other range", "no range"],
)
def test_other_ranges_than_asked_for_are_refused(answer: str, message: str, hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", status=206, headers={"Content-Range": answer})
    with pytest.raises(OSError, match=message):
        read(open_source(REPO)[0], FILE, 0, 8)


def test_reads_beyond_the_end(hub: HubServer, folder: Path) -> None:
    # By the size of the listing, before a request; and where the stored file is shorter than listed.
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    size = source.size(FILE)
    with pytest.raises(ValueError, match=rf"{FILE} of {REPO} is too short: 8 bytes .* it has {size} bytes"):
        read(source, FILE, size - 7, 8)
    assert hub.asked(FILE) == []
    hub.add_fault("storage/", status=416, headers={"Content-Range": "bytes */100"})
    with pytest.raises(ValueError, match=rf"{FILE} of {REPO} is too short: 8 bytes .* it has 100 bytes"):
        read(source, FILE, size - 8, 8)


def test_threads_share_one_address(hub: HubServer, folder: Path) -> None:
    hub.add_repo(REPO, folder)
    source, _ = open_source(REPO)
    together = threading.Barrier(8)

    def work(index: int) -> bool:
        together.wait(timeout=60)
        return all(
            read(source, FILE, start, 7000) == cut(folder, start, 7000)
            for start in range(index * 70_000, (index + 1) * 70_000, 7000)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert hub.sent(FILE) == 8 * 10 * 7000
    assert len(hub.asked(FILE, server="hub")) == 1


# Without the network


def test_offline_the_cache_is_the_source(hub: HubServer, folder: Path) -> None:
    commit = hub.add_repo(REPO, folder, revision="v1")
    hub.add_repo(REPO, folder)
    snapshot_download(REPO, revision="v1", allow_patterns=["*.json", "vision/*"])
    hub.clear()
    with connected(hub, Path(constants.HF_HUB_CACHE), offline=True):
        for revision in ("v1", commit):
            source, _ = open_source(REPO, revision=revision)
            assert source.files() == ["config.json", f"vision/{FILE}"]
            assert read(source, "config.json", 2, 5) == b"model"
            assert source.fetch("config.json").read_text() == (folder / "config.json").read_text()
        assert open_source(REPO, revision="v1", subfolder="vision")[0].files() == [FILE]
        for call in (source.fetch, source.size, lambda file: read(source, file, 0, 8)):
            with pytest.raises(LocalEntryNotFoundError, match=rf"does not hold {FILE} of {REPO}.* offline mode"):
                call(FILE)
        for repo, arguments in [("org/none", {}), (REPO, {}), (REPO, {"revision": "v1", "subfolder": "audio"})]:
            with pytest.raises(LocalEntryNotFoundError, match=rf"{repo}.* nor in the local cache .* offline mode"):
                open_source(repo, **arguments)
    assert hub.requests == []


def test_without_a_connection_the_cache_serves_at_once(
    hub: HubServer, folder: Path, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    hub.add_repo(REPO, folder)
    hf_hub_download(REPO, "config.json")
    hub.stop()
    with caplog.at_level(logging.WARNING, "hf_symqk"):
        source, _ = open_source(REPO)
    assert source.files() == ["config.json"]
    assert waits == []
    assert "Reading what the local cache holds of it" in caplog.text
    with pytest.raises(LocalEntryNotFoundError, match=f"does not hold {FILE}"):
        read(source, FILE, 0, 8)
    with pytest.raises(LocalEntryNotFoundError, match=r"org/none is neither .* and the Hub cannot be asked"):
        open_source("org/none")
    assert waits == []  # a mistyped path says so at once


@pytest.mark.parametrize("cached", [True, False])
def test_a_hub_that_is_down(cached: bool, hub: HubServer, folder: Path, waits: list[float]) -> None:
    # With a cache its errors do not matter, without one it is asked again.
    hub.add_repo(REPO, folder)
    if cached:
        hf_hub_download(REPO, "config.json")
    hub.add_fault("hub/api/models", status=503, times=3)
    source, _ = open_source(REPO)
    assert source.files() == (["config.json"] if cached else ["config.json", FILE, f"vision/{FILE}"])
    assert len(waits) == (0 if cached else 2)


def test_other_refusals_pass_through(hub: HubServer, folder: Path, waits: list[float]) -> None:
    hub.add_repo(REPO, folder)
    hub.add_fault("storage/", status=418)
    with pytest.raises(HfHubHTTPError, match="418"):
        read(open_source(REPO)[0], FILE, 0, 8)
    hub.add_fault("hub/api/models", status=418)
    with pytest.raises(HfHubHTTPError, match="418"):
        open_source(REPO)
    assert waits == []


# Slow: most of the time is the import of torch and transformers in the two processes.
@pytest.mark.slow
def test_other_processes_with_the_endpoint_in_their_environment(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    # Nothing patched: HF_ENDPOINT, HF_HOME and HF_TOKEN as users set them; then the same offline, from the cache.
    hub.add_repo(REPO, folder, gated=True, token="hf_right")
    program = (
        "from hf_symqk.checkpoint.headers import read_header\n"
        "from hf_symqk.checkpoint.sources import open_source\n"
        f"source, _ = open_source({REPO!r})\n"
        "print(source.fetch('config.json').read_text())\n"
        f"print(list(read_header(source, {FILE!r}).slots))\n"
    )
    environment = hub.environment(tmp_path / "home") | {"HF_TOKEN": "hf_right"}

    def run(**changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environment | changes,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )

    online = run()
    assert online.stdout.splitlines() == ['{"model_type": "bert"}', "['q.weight', 'scale']"], online.stderr
    assert hub.sent(FILE) == 8 + int.from_bytes(cut(folder, 0, 8), "little")
    hub.clear()
    offline = run(HF_HUB_OFFLINE="1")
    assert offline.stdout.splitlines() == ['{"model_type": "bert"}']
    assert "LocalEntryNotFoundError" in offline.stderr
    assert hub.requests == []
