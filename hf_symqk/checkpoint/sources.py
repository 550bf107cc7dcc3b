"""
Where the bytes of a checkpoint come from: a folder, the local Hub cache, or byte ranges over HTTP, in this order.
"""

import os
from pathlib import Path
from typing import Protocol

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .hub import HubSource
from .ranges import files_below, read_file


__all__ = ["HubSource", "LocalSource", "Source", "open_source"]


class Source(Protocol):
    """
    The files of one checkpoint. All methods may be called from several threads at once. File names are relative to the
    folder (of the repository), with `/` between the parts.
    """

    @property
    def name(self) -> str:
        """What messages call it: `folder/x`, `org/model@revision`."""
        ...

    @property
    def num_parameters(self) -> int | None:
        """Number of parameters as the Hub gives it; `None` where it does not say."""
        ...

    def files(self) -> list[str]:
        """Names of all files, sorted."""
        ...

    def size(self, file: str) -> int:
        """Size of a file in bytes."""
        ...

    def fetch(self, file: str) -> Path:
        """Path of the whole file on this disk, downloaded if need be."""
        ...

    def local_path(self, file: str) -> Path | None:
        """Path of the file if it is on this disk already."""
        ...

    def read(self, file: str, start: int, buffer: memoryview) -> None:
        """Fills the buffer with the bytes of the file from position `start` on."""
        ...


def open_source(
    path_or_repo_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
) -> tuple[Source, str | None]:
    """
    Finds a checkpoint: what exists on this disk under the given path, otherwise the Hub's repository of this name.

    Args:
        path_or_repo_id (`str` or `os.PathLike`):
            Folder, single file, or id of a model repository. A path that exists wins over a repository.
        revision (`str`, *optional*):
            Branch, tag or commit of the repository.
        subfolder (`str`, *optional*):
            Folder within the folder or repository.
        token (`str` or `bool`, *optional*):
            Access token, as in `huggingface_hub`; by default the one that is logged in or in `HF_TOKEN`.

    Returns:
        `tuple[Source, str | None]`: The source and, if a single file was given, that file's name in it.

    Raises:
        FileNotFoundError: There is no such path, and no repository can have this name.
        ValueError: A revision was given for a folder, or a subfolder for a file.
        RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError, LocalEntryNotFoundError:
            From `huggingface_hub`: the repository or revision does not exist or may not be read, or it is neither
            reachable nor cached.
    """
    given = os.fspath(path_or_repo_id)
    path = Path(given).expanduser()
    if given and path.exists():
        if revision is not None:
            raise ValueError(
                f"{given!r} exists on this disk, and a folder has no revisions: leave out revision={revision!r}, or, "
                "if the repository of this name on the Hub is meant, run from another folder."
            )
        if path.is_file():
            if subfolder:
                raise ValueError(f"{given!r} is a file: leave out subfolder={subfolder!r}, or give the folder alone.")
            return LocalSource(path.parent), path.name
        return LocalSource(path / subfolder if subfolder else path), None
    if not isinstance(path_or_repo_id, str):
        raise FileNotFoundError(f"There is no file or folder {given!r}.")
    try:
        if not given:
            raise HFValidationError("it is empty.")
        validate_repo_id(given)
    except HFValidationError as error:
        raise FileNotFoundError(
            f"There is no file or folder {given!r}, and no repository on the Hub can have this name: {error}"
        ) from error
    return HubSource(given, revision=revision, subfolder=subfolder, token=token), None


class LocalSource:
    """
    A folder on this disk.

    Args:
        folder (`Path`): The folder that holds the checkpoint.
    """

    num_parameters: int | None = None

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {str(folder)!r}.")
        self.folder = folder
        self.name = str(folder)

    def files(self) -> list[str]:
        return files_below(self.folder)

    def size(self, file: str) -> int:
        return self.fetch(file).stat().st_size

    def fetch(self, file: str) -> Path:
        path = self.local_path(file)
        if path is None:
            raise FileNotFoundError(f"There is no file {file!r} in {self.name!r}.")
        return path

    def local_path(self, file: str) -> Path | None:
        path = self.folder / file
        return path if path.is_file() else None

    def read(self, file: str, start: int, buffer: memoryview) -> None:
        read_file(self.fetch(file), f"{file} of {self.name}", start, buffer)
