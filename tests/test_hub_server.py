"""The local Hub that other tests rely on: `huggingface_hub` itself has to take it for one."""

from pathlib import Path

import huggingface_hub
import pytest
from hub_server import HubServer, connected, hub
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


__all__ = ["hub"]

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a small and a large file, and one in a folder."""
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(WEIGHTS)
    (folder / "sub" / "notes.txt").write_text("notes")
    return folder


def test_downloads_of_files_and_snapshots(hub: HubServer, folder: Path) -> None:
    # Both ways of serving, directly and by redirect, and the cache entry that huggingface_hub makes of them.
    commit = hub.add_repo("org/model", folder)
    path = Path(hf_hub_download("org/model", "model.bin"))
    assert path.read_bytes() == WEIGHTS
    assert path.parent.name == commit
    snapshot = Path(snapshot_download("org/model"))
    assert {file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()} == {
        "config.json",
        "model.bin",
        "sub/notes.txt",
    }
    assert hub.sent("model.bin") == len(WEIGHTS)
    assert {request.server for request in hub.asked("model.bin", method="GET")} == {"storage"}


def test_listings(hub: HubServer, folder: Path) -> None:
    # model_info, list_repo_tree, paths info and the module-level functions agree on names and sizes.
    commit = hub.add_repo("org/model", folder)
    info = HfApi().model_info("org/model", files_metadata=True)
    assert info.sha == commit
    assert {s.rfilename: s.size for s in info.siblings or ()} == {
        "config.json": 2,
        "model.bin": len(WEIGHTS),
        "sub/notes.txt": 5,
    }
    assert {s.rfilename for s in huggingface_hub.model_info("org/model").siblings or ()} == {
        "config.json",
        "model.bin",
        "sub/notes.txt",
    }
    assert [entry.path for entry in huggingface_hub.list_repo_tree("org/model")] == ["config.json", "model.bin", "sub"]
    assert [entry.path for entry in HfApi().list_repo_tree("org/model", "sub")] == ["sub/notes.txt"]
    (entry,) = HfApi().get_paths_info("org/model", ["model.bin", "missing"])
    assert getattr(entry, "size", None) == len(WEIGHTS)


def test_revisions_are_branches_and_commits(hub: HubServer, folder: Path) -> None:
    first = hub.add_repo("model", folder)  # a repository without a namespace, as gpt2
    (folder / "config.json").write_text('{"a": 1}')
    second = hub.add_repo("model", folder, revision="refs/pr/1")
    assert first != second
    assert HfApi().model_info("model").sha == first
    assert HfApi().model_info("model", revision="refs/pr/1").sha == second
    assert HfApi().model_info("model", revision=second).sha == second
    assert [entry.path for entry in HfApi().list_repo_tree("model", revision=first)] == [
        "config.json",
        "model.bin",
        "sub",
    ]


def test_refusals_are_those_of_the_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.add_repo("org/open", folder)
    hub.add_repo("org/gated", folder, gated=True, token="hf_right")
    hub.add_repo("org/private", folder, private=True, token="hf_right")
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("org/none", "config.json")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("org/open", "config.json", revision="none")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("org/open", "none.json")
    assert HfApi().model_info("org/gated").gated == "manual"
    for token in (None, "hf_wrong"):
        with pytest.raises(GatedRepoError):
            hf_hub_download("org/gated", "model.bin", token=token)
        with pytest.raises(RepositoryNotFoundError):
            HfApi().model_info("org/private", token=token)
    assert hf_hub_download("org/gated", "model.bin", token="hf_right")
    with connected(hub, tmp_path / "other", token="hf_right"):
        assert hf_hub_download("org/private", "model.bin")


def test_storage_refuses_the_token_and_expired_links(hub: HubServer, folder: Path) -> None:
    # So a test that passes shows that the token stayed at home.
    commit = hub.add_repo("org/model", folder)
    url = f"{hub.storage}/org/model/{commit}/model.bin?signature=0"
    session = huggingface_hub.get_session()
    assert session.get(url, headers={"Range": "bytes=3-6"}).content == bytes([3, 4, 5, 6])
    assert session.get(url, headers={"Authorization": "Bearer x"}).status_code == 400
    hub.expire_links()
    assert session.get(url).status_code == 403


def test_faults_last_as_long_as_ordered(hub: HubServer, folder: Path) -> None:
    hub.add_repo("org/model", folder)
    hub.add_fault("hub/api/models", status=503)
    with pytest.raises(HfHubHTTPError, match="503"):
        HfApi().model_info("org/model")
    assert HfApi().model_info("org/model").sha
