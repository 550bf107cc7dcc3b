"""The text that every Python carries: the language reference of `pydoc_data.topics` and the standard library's
docstrings, about 2 million characters of English prose.

A document is one topic of the reference, or the docstrings of one module in the order of its source. Held-out
documents are thus whole modules: the near-copies that the methods of one module make of each other stay on one side.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import RecipeError
from datasets import Dataset
from file_cache import cached_folder


__all__ = ["builtin_documents", "iterate_builtin_documents"]

logger = logging.getLogger(__name__)

# Raise it when a document changes for the same Python: it is part of the cache's key.
FORMAT = 1
# Tests are code about code, and site-packages is not the standard library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Below this (characters) the interpreter came without the source of its library.
SMALLEST = 500_000


def builtin_documents() -> Dataset:
    """
    Returns the built-in text, one row a document, from the cache where it was read before.

    Returns:
        `Dataset`: columns `name` (`"topic:…"` or `"module:…"`) and `text`.

    Raises:
        RecipeError: if the interpreter came without the source of its standard library.
    """

    def build(folder: Path) -> None:
        rows = list(iterate_builtin_documents())
        characters = sum(len(row["text"]) for row in rows)
        if characters < SMALLEST:
            raise RecipeError(
                f"this Python carries only {characters:,} characters of prose (its standard library came without "
                "source): give --train_file or --dataset_name."
            )
        Dataset.from_list(rows).save_to_disk(str(folder))

    folder = cached_folder("builtin-text", _builtin_key(), build)
    return Dataset.load_from_disk(str(folder))


def iterate_builtin_documents() -> Iterator[dict[str, str]]:
    """
    Reads the built-in text from the interpreter, without importing the modules that it describes.

    Yields:
        `dict`: `name` and `text` of a document. A docstring that occurred before is left out.
    """
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield {"name": f"topic:{topic}", "text": topics[topic].strip()}
    seen: set[str] = set()
    root = _standard_library()
    for path in _sources(root):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            # Some files of the library are deliberately not valid source (templates, bad-syntax samples).
            logger.info("%s is not parsed", path.relative_to(root))
            continue
        docstrings = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and docstring.strip() and docstring not in seen:
                    seen.add(docstring)
                    docstrings.append((getattr(node, "lineno", 0), docstring.strip()))
        if docstrings:
            text = "\n\n".join(docstring for _, docstring in sorted(docstrings))
            yield {"name": f"module:{path.relative_to(root).as_posix()}", "text": text}


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _sources(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _builtin_key() -> dict[str, Any]:
    # Reading the text takes seconds, listing the files milliseconds: names and lengths tell apart what two
    # interpreters, or two patches of one distribution, carry.
    root = _standard_library()
    listing = hashlib.sha256()
    for path in _sources(root):
        listing.update(f"{path.relative_to(root).as_posix()}:{path.stat().st_size}\n".encode())
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "sources": listing.hexdigest(),
    }
