"""Training files inside zip archives, as Kaggle hands them out."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from arguments import RecipeError
from file_cache import cached_folder


__all__ = ["extract_member"]

# Names that open with one of these words, and not with the split's, say that a member is something else.
PARTS = {"train", "validation", "valid", "val", "dev", "test"}


def extract_member(path: str, split: str, suffixes: Iterable[str]) -> str:
    """
    Extracts the file of a split from a zip archive, to the recipes' cache.

    The member is the one called like the split (`train.csv`, in any folder of the archive), else the only one that has
    a suitable suffix, unless its name is that of another part (`test_labels.csv`). It may itself be a zip of one file,
    as in the download of the Jigsaw challenge (`train.csv.zip`).

    Args:
        path (`str`):
            The archive.
        split (`str`):
            `"train"` or `"validation"`.
        suffixes (iterable of `str`):
            Suffixes of files that can be read.

    Returns:
        `str`: the extracted file.

    Raises:
        RecipeError: if the archive is damaged, encrypted, or does not hold such a member.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _extract(archive, path, split, tuple(suffixes))
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise RecipeError(f"{path!r} cannot be read as a zip archive ({error}): download it again.") from error


def _extract(archive: zipfile.ZipFile, path: str, split: str, suffixes: tuple[str, ...]) -> str:
    # macOS adds folders of its own, with files of the same names.
    members = [info for info in archive.infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")]
    readable = [info for info in members if _name(info).endswith((*suffixes, *(f"{end}.zip" for end in suffixes)))]
    named = [info for info in readable if _name(info).partition(".")[0] == split]
    only = [info for info in readable if len(readable) == 1 and not _is_other_part(info, split)]
    chosen = named or only
    if len(chosen) != 1:
        wanted = ", ".join(f"{split}{suffix}" for suffix in suffixes)
        held = ", ".join(info.filename for info in members) or "nothing"
        number = "several members" if named else "no member"
        raise RecipeError(
            f"{path!r} has {number} called {split} ({wanted}, or one of these zipped): it holds {held}. Extract the "
            "right one, and give it instead."
        )
    member = chosen[0]
    key = {"member": member.filename, "crc": member.CRC, "bytes": member.file_size}

    def build(folder: Path) -> None:
        (folder / "content").mkdir()
        with archive.open(member) as source:
            if not _name(member).endswith(".zip"):
                _copy(source, folder / "content" / _name(member))
                return
            with zipfile.ZipFile(source) as inner:
                inside = [info for info in inner.infolist() if _name(info).endswith(suffixes)]
                if len(inside) != 1 or (only and _is_other_part(inside[0], split)):
                    held = ", ".join(inner.namelist()) or "nothing"
                    raise RecipeError(f"{member.filename!r} in {path!r} holds {held}, not one file of {split} data.")
                with inner.open(inside[0]) as content:
                    _copy(content, folder / "content" / _name(inside[0]))

    folder = cached_folder("archive", key, build)
    return str(next((folder / "content").iterdir()))


def _name(info: zipfile.ZipInfo) -> str:
    return Path(info.filename).name.lower()


def _is_other_part(info: zipfile.ZipInfo, split: str) -> bool:
    word = re.split(r"[^a-z]", _name(info))[0]
    return word in PARTS - {split}


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
