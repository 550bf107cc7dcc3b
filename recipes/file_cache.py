"""Folders of prepared data that are whole or absent: written beside, checked on every use, rebuilt when damaged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets


__all__ = ["cache_root", "cached_folder"]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# A checksum of everything would cost minutes on a large corpus; up to this size (bytes) a file is read in full on
# every use, beyond it only its length is compared.
FULL_CHECK_BYTES = 64 * 2**20


def cache_root() -> Path:
    """Returns the folder of the recipes' caches, inside the cache of `datasets` (`HF_DATASETS_CACHE`)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "hf_symqk"


def cached_folder(name: str, key: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """
    Returns a folder that `build` filled, from the cache where it is there and undamaged.

    Args:
        name (`str`):
            Kind of content, the readable part of the folder's name.
        key (mapping):
            Everything that the content depends on; must be serialisable as JSON.
        build (`Callable`):
            Fills the empty folder that it is given. What it leaves in a subfolder `work` is thrown away.

    Returns:
        `Path`: the folder. It must not be written to.
    """
    serialised = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(serialised.encode()).hexdigest()[:20]
    folder = cache_root() / f"{name}-{digest}"
    if folder.exists():
        damage = _damage(folder)
        if damage is None:
            return folder
        logger.warning("cached %s is rebuilt: %s", folder.name, damage)
        _remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".building", dir=folder.parent))
    try:
        build(building)
        shutil.rmtree(building / "work", ignore_errors=True)
        _write_manifest(building, serialised)
        try:
            os.replace(building, folder)
        except OSError:
            # Another run finished the same content first. Its folder is as good as ours if it is whole.
            if not folder.exists() or _damage(folder) is not None:
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _remove(folder: Path) -> None:
    # Moved away first, so that another run never meets a half-deleted folder.
    doomed = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".damaged", dir=folder.parent))
    os.replace(folder, doomed / "content")
    shutil.rmtree(doomed)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    checksum = hashlib.sha256(path.read_bytes()).hexdigest() if size <= FULL_CHECK_BYTES else None
    return {"bytes": size, "sha256": checksum}


def _write_manifest(folder: Path, serialised_key: str) -> None:
    files = {path.relative_to(folder).as_posix(): _describe(path) for path in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps({"key": json.loads(serialised_key), "files": files}, indent=1))


def _damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, or `None`."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    for name, description in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _describe(path) != description:
            return f"{name} is not what was written"
    return None
