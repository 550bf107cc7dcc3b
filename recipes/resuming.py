"""Which checkpoint a run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

from arguments import RecipeError
from transformers import TrainingArguments


__all__ = ["checkpoint_to_resume", "newest_checkpoint"]

_PREFIX = "checkpoint-"
_STATE = "trainer_state.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """
    The checkpoint of most steps that training can go on from. One that an interrupt left unfinished is passed over,
    which `Trainer` would take.

    Args:
        folder (`Path`):
            Output folder of a run.

    Returns:
        `Path` or `None`: `None` where there is none.
    """
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdigit()]
    found.sort(key=lambda path: int(path.name[len(_PREFIX) :]), reverse=True)
    return next((path for path in found if _lacks(path) is None), None)


def checkpoint_to_resume(arguments: TrainingArguments) -> str | None:
    """
    Reads `resume_from_checkpoint`.

    Args:
        arguments (`TrainingArguments`):
            Of the run.

    Returns:
        `str` or `None`: a checkpoint's folder, for `true` the newest one of the output folder; `None` for none.

    Raises:
        RecipeError: for a folder that training cannot go on from, and for `true` where there is no checkpoint.
    """
    given: str | bool | None = arguments.resume_from_checkpoint
    word = str(given).lower()
    if given is None or word == "false":
        return None
    if word == "true":
        newest = newest_checkpoint(Path(str(arguments.output_dir)))
        if newest is None:
            raise RecipeError(
                f"resume_from_checkpoint={given}: {str(arguments.output_dir)!r} holds no finished checkpoint. Leave "
                "it out to begin anew, or name a checkpoint's folder."
            )
        return str(newest)
    lacks = _lacks(Path(str(given)), trained=bool(arguments.do_train))
    if lacks is not None:
        raise RecipeError(f"resume_from_checkpoint={given!r}: {lacks}. Name a folder such as {_PREFIX}200.")
    return str(given)


def _lacks(folder: Path, trained: bool = True) -> str | None:
    """What is missing of a checkpoint; `None` for a whole one."""
    if not folder.is_dir():
        return "there is no such folder"
    try:  # which `Trainer` writes last
        json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"it holds no whole {_STATE}, without which it is no finished checkpoint"
    # Written with the optimizer's state, under names of its own by each way of spreading it over processes.
    if trained and not any(folder.glob("rng_state*.pth")):
        return "it holds a model without the state of its training (save_only_model), which cannot go on from it"
    return None
