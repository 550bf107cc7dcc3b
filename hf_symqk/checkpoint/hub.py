"""
A model repository on the Hub as a source of a checkpoint. What the Hub's own client decides (tokens, endpoint, offline
mode, errors of missing and gated repositories, where cached files lie) is left to `huggingface_hub`.
"""

import logging
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .ranges import (
    LIBRARY_NAME,
    NoRangesError,
    RemoteFile,
    files_below,
    first_line,
    is_transient,
    read_file,
    repeat,
)


__all__ = ["HubSource"]

logger = logging.getLogger(__name__)


class HubSource:
    """
    A model repository on the Hub at one commit. Files in the local cache at that commit are read from there; of all
    others the ranges asked for are requested, and nothing is stored. Without the network (`HF_HUB_OFFLINE`, no
    connection) it consists of what the cache holds of the revision.

    Args:
        repo_id (`str`): Id of the repository.
        revision (`str`, *optional*): Branch, tag or commit.
        subfolder (`str`, *optional*): Folder within the repository.
        token (`str` or `bool`, *optional*): Access token, as in `huggingface_hub`.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
    ) -> None:
        folder = (subfolder or "").strip("/")
        self.repo_id = repo_id
        self.revision = revision
        self.token = token
        self.name = repo_id + (f"@{revision}" if revision else "") + (f"/{folder}" if folder else "")
        self.num_parameters: int | None = None
        self.commit = ""
        self._prefix = f"{folder}/" if folder else ""
        self._sizes: dict[str, int | None] = {}
        self._unreachable: Exception | None = None
        self._remote: dict[str, RemoteFile] = {}
        self._lock = threading.Lock()
        self._download_lock = threading.Lock()
        self._connect()

    def files(self) -> list[str]:
        return sorted(self._sizes)

    def size(self, file: str) -> int:
        size = self._sizes.get(file)
        if size is None:
            path = self.local_path(file)
            size = self._remote_file(file).size() if path is None else path.stat().st_size
            self._sizes[file] = size
        return size

    def fetch(self, file: str) -> Path:
        path = self.local_path(file)
        if path is None:
            self._check_reachable(file)
            arguments: dict[str, Any] = {"token": self.token, "library_name": LIBRARY_NAME}
            # First by the name of the revision: so the cache learns which commit it stands for, and a later run finds
            # the file offline. If the name has moved on since it was looked up, the commit itself is fetched.
            hf_hub_download(self.repo_id, self._prefix + file, revision=self.revision, **arguments)
            path = self.local_path(file)
            if path is None:
                path = Path(hf_hub_download(self.repo_id, self._prefix + file, revision=self.commit, **arguments))
        return path

    def local_path(self, file: str) -> Path | None:
        path = try_to_load_from_cache(self.repo_id, self._prefix + file, revision=self.commit)
        return Path(path) if isinstance(path, str) else None

    def read(self, file: str, start: int, buffer: memoryview) -> None:
        path = self.local_path(file)
        if path is None:
            try:
                return self._remote_file(file).read(start, buffer.cast("B"))
            except NoRangesError as reason:
                path = self._fetch_whole(file, reason)
        return read_file(path, self._title(file), start, buffer)

    def _title(self, file: str) -> str:
        return f"{file} of {self.name}"

    def _remote_file(self, file: str) -> RemoteFile:
        self._check_reachable(file)
        with self._lock:
            if file not in self._remote:
                url = hf_hub_url(self.repo_id, self._prefix + file, revision=self.commit)
                self._remote[file] = RemoteFile(url, self._title(file), self._sizes.get(file), self.token)
            return self._remote[file]

    def _fetch_whole(self, file: str, reason: Exception) -> Path:
        with self._download_lock:  # one thread downloads and says so, the others wait for it
            path = self.local_path(file)
            if path is None:
                logger.warning(
                    "The server gives no part of %s: %s. Downloading the whole file.", self._title(file), reason
                )
                path = self.fetch(file)
        return path

    def _check_reachable(self, file: str) -> None:
        if self._unreachable is not None:
            raise LocalEntryNotFoundError(
                f"The local cache does not hold {self._title(file)} at commit {self.commit}, and the Hub cannot be "
                f"asked for it: {first_line(self._unreachable)}"
            ) from self._unreachable

    def _connect(self) -> None:
        """Looks up the commit and its files; what the cache knows of the revision, where the Hub cannot be asked."""
        try:
            return self._take_info(self._model_info())
        except RevisionNotFoundError:
            raise
        except (HTTPError, OfflineModeIsEnabled) as error:
            failure: Exception = error
        if self._take_cached_snapshot(failure):
            return None
        # A busy server may answer later; one that cannot be reached will not, and a mistyped path should say so now.
        if isinstance(failure, HfHubHTTPError) and is_transient(failure):
            try:
                return self._take_info(repeat(f"asking for {self.name}", self._model_info))
            except HTTPError as error:
                failure = error
        # From here on as huggingface_hub has it: its own errors where the Hub said no, this one where it said nothing.
        if isinstance(failure, RepositoryNotFoundError):
            failure.append_to_message(f"\n(There is no file or folder {self.repo_id!r} on this disk either.)")
        if isinstance(failure, HfHubHTTPError) and not is_transient(failure):
            raise failure
        raise LocalEntryNotFoundError(
            f"{self.name} is neither a folder on this disk nor in the local cache ({constants.HF_HUB_CACHE}), and the "
            f"Hub cannot be asked for it: {first_line(failure)}"
        ) from failure

    def _model_info(self) -> ModelInfo:
        return HfApi(token=self.token, library_name=LIBRARY_NAME).model_info(
            self.repo_id, revision=self.revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        )

    def _take_info(self, info: ModelInfo) -> None:
        if info.sha is None:
            raise ValueError(f"{constants.ENDPOINT} does not say which commit {self.name} is: is it a Hub endpoint?")
        self.commit = info.sha
        self._sizes = {
            sibling.rfilename.removeprefix(self._prefix): sibling.size
            for sibling in info.siblings or ()
            if sibling.rfilename.startswith(self._prefix)
        }
        if self._prefix and not self._sizes:
            raise FileNotFoundError(f"{self.repo_id} has no folder {self._prefix[:-1]!r} at commit {self.commit}.")
        # The Hub counts the model at the root of a repository; one in a folder may be another.
        if info.safetensors is not None and not self._prefix:
            self.num_parameters = info.safetensors.total

    def _take_cached_snapshot(self, reason: Exception) -> bool:
        try:
            # No pattern, no file that has to be there: the folder is wanted as it is, complete or not.
            snapshot = Path(
                snapshot_download(self.repo_id, revision=self.revision, local_files_only=True, allow_patterns=[])
            )
        except LocalEntryNotFoundError:
            return False
        folder = snapshot / self._prefix
        if not folder.is_dir():
            return False
        if not isinstance(reason, OfflineModeIsEnabled):
            logger.warning(
                "The Hub cannot be asked for %s (%s). Reading what the local cache holds of it.",
                self.name,
                first_line(reason),
            )
        self.commit = snapshot.name
        self._sizes = {file: (folder / file).stat().st_size for file in files_below(folder)}
        self._unreachable = reason
        return True
