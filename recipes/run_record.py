"""`run.json`: what a run was, in one file that other tools read. Written when training begins and when it ends."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


__all__ = ["RUN_RECORD", "RunRecord", "software_versions", "without_secrets"]

RUN_RECORD = "run.json"
PACKAGES = ("hf_symqk", "torch", "transformers", "accelerate", "datasets")


def software_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that a run's result may depend on."""
    return {**{name: metadata.version(name) for name in PACKAGES}, "python": platform.python_version()}


def without_secrets(words: Sequence[str]) -> list[str]:
    """
    Words of a command line that can be shown: the values of `--…_token` are replaced.

    Args:
        words (sequence of `str`):
            The command line.

    Returns:
        `list[str]`: as many words.

    Example:

    ```python
    >>> without_secrets(["--hub_token", "hf_abc", "--push_to_hub"])
    ['--hub_token', '<HUB_TOKEN>', '--push_to_hub']

    ```
    """
    shown: list[str] = []
    hidden = None
    for word in words:
        flag, equals, _ = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        secret = f"<{name.upper()}>" if flag.startswith("--") and name.endswith("_token") else None
        if hidden is not None:
            word = hidden
        elif secret is not None and equals:
            word = f"{flag}={secret}"
        hidden = secret if hidden is None and not equals else None
        shown.append(word)
    return shown


class RunRecord:
    """
    The file `run.json` of an output folder.

    Args:
        folder (path):
            Output folder of the run; made if it is not there.
        content (mapping):
            JSON values that are known when training begins.
        writes (`bool`):
            Whether this process is the one that writes; the others keep the content only.
    """

    def __init__(self, folder: str | os.PathLike[str], content: Mapping[str, Any], writes: bool) -> None:
        self.path = Path(folder) / RUN_RECORD
        self.writes = writes
        self.content: dict[str, Any] = {**content, "status": "running", "started": _now(), "finished": None}
        self._write()

    def finish(self, **more: Any) -> None:
        """
        Marks the run as finished.

        Args:
            more:
                Values that are known now.
        """
        self._end("finished", more)

    def fail(self, error: BaseException) -> None:
        """
        Marks the run as failed.

        Args:
            error (`BaseException`):
                Why.
        """
        self._end("failed", {"error": f"{type(error).__name__}: {error}".rstrip(": ")})

    def _end(self, status: str, more: Mapping[str, Any]) -> None:
        self.content.update(more, status=status, finished=_now())
        self._write()

    def _write(self) -> None:
        if not self.writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads it meanwhile finds the old file or the new one, never a part.
        handle, name = tempfile.mkstemp(prefix=f".{RUN_RECORD}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.content, file, indent=2, ensure_ascii=False)
                file.write("\n")
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def _umask() -> int:
    value = os.umask(0o022)
    os.umask(value)
    return value


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
