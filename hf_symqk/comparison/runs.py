"""Runs as they are found: folders that a recipe or any `Trainer` wrote."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .._held_out import HELD_OUT_LOSS, held_out_metric
from .errors import ComparisonError


__all__ = [
    "HELD_OUT",
    "RATE",
    "RECORD",
    "STATE",
    "TRAIN",
    "Run",
    "arm_name",
    "independent_twin",
    "is_score",
    "listed",
    "metric_of",
    "read_folders",
]

STATE = "trainer_state.json"
RECORD = "run.json"
TRAIN, HELD_OUT = "loss", HELD_OUT_LOSS
RATE = "learning_rate"
ENTROPY = "eval_unigram_entropy"

_SCORE = re.compile(r"qk/(?:[^/]+/)?(symmetry|directionality)/median")
# Numbers with their sign and fraction, and words.
_WORD = re.compile(r"(?<!\w)-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)|\w+")
_LONGEST_PART = 64
# Fields of `SymmetricInit` that the scheme `independent` does not take.
_OF_SCHEMES = ("norm", "options", "symmetry", "target")
_SEED = re.compile(r"(?:^|[-_. ])seed[-_=]?(?P<seed>\d+)(?=$|[-_. ])", re.IGNORECASE)
_RATE = re.compile(r"(?:^|[-_. ])lr[-_=]?(?P<rate>\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?=$|[-_. ])", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """
    One run, or one curve of a file.

    Attributes:
        name (`str`): What messages call it.
        arm (`str`): Which initialisation it had; see [`arm_name`].
        seed (`int` or `None`): Its seed, `None` if not known.
        learning_rate (`float` or `None`): Its learning rate, `None` if not known.
        curves (`Mapping[str, pandas.Series]`): Values by step, under the names of the log: `loss`, `eval_loss`,
            `eval_accuracy`, `qk/symmetry/median`, …
        source (`str`): Folder or file that it was read from.
        group (`str`): What is compared among itself only: the setting that a column of a file names; empty for
            folders.
        record (`Mapping` or `None`): The content of `run.json`.
        entropy (`float` or `None`): Entropy of the held-out tokens' frequencies, in nats.
    """

    name: str
    arm: str
    seed: int | None
    learning_rate: float | None
    curves: Mapping[str, pd.Series]
    source: str
    group: str = ""
    record: Mapping[str, Any] | None = None
    entropy: float | None = None


def is_score(key: str) -> bool:
    """Whether a key of the log is the median of a score over layers."""
    return bool(_SCORE.fullmatch(key))


def metric_of(key: str) -> str | None:
    """The name of a measure on held-out data beside the loss, as `accuracy`; `None` for any other key of the log."""
    return None if key == HELD_OUT else held_out_metric(key)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Some names for a message, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def arm_name(qk_init: Mapping[str, Any] | str | None) -> str:
    """
    A name for an initialisation, fit for a folder.

    Args:
        qk_init (`Mapping`, `str` or `None`): As `from_config` takes it; `None` for the model's own.

    Returns:
        `str`

    Example:

    ```python
    >>> arm_name(None), arm_name({"scheme": "symmetric"})
    ('none', 'symmetric')
    >>> arm_name({"scheme": "symmetric", "distribution": "kaiming_uniform", "layers": [0, 1]})
    'symmetric-kaiming_uniform-layers_0_1'
    >>> arm_name({"scheme": "symmetric", "symmetry": -0.5, "target": "layer"})
    'symmetric-symmetry_-0.5-target_layer'

    ```
    """
    if qk_init is None:
        return "none"
    values = {"scheme": qk_init} if isinstance(qk_init, str) else dict(qk_init)
    parts = [str(values.pop("scheme", "symmetric"))]
    distribution = values.pop("distribution", None)
    parts += [str(distribution)] if distribution is not None else []
    for name, value in sorted(values.items()):
        if value is not None and (name, value) != ("attention", "self"):
            text = json.dumps(value)
            part = "_".join([name, *_WORD.findall(text)])
            if len(part) > _LONGEST_PART:  # a value for each of many layers
                part = f"{part[: _LONGEST_PART - 9].rstrip('-_.')}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            parts.append(part)
    return "-".join(parts)


def independent_twin(arm: str) -> str | None:
    """
    The arm that differs from another in its scheme only, as far as `independent` can: without what only other schemes
    take.

    Args:
        arm (`str`): A name as [`arm_name`] makes it.

    Returns:
        `str` or `None`: `None` for arms that differ from the model's own initialisation in the scheme alone.

    Example:

    ```python
    >>> independent_twin("symmetric-kaiming_uniform-symmetry_-0.5")
    'independent-kaiming_uniform'

    ```
    """
    scheme, _, rest = arm.partition("-")
    # A minus stands before a digit, and no name begins with one.
    parts = re.split(r"-(?!\d)", rest) if rest else []
    shared = [part for part in parts if part.partition("_")[0] not in _OF_SCHEMES]
    return "-".join(["independent", *shared]) if shared and scheme != "independent" else None


def read_folders(
    paths: Sequence[str | os.PathLike[str]], pattern: str | None = None
) -> tuple[list[Run], list[str], list[str]]:
    """
    Reads finished runs.

    Args:
        paths (sequence of paths): Folders of runs, or folders whose subfolders are.
        pattern (`str`, *optional*): Regular expression with the group `arm`, and `seed` and `rate` where there are
            any, searched for in the paths of runs without `run.json`. By default `seed0` and `lr1e-3` in the folder's
            name are seed and rate, and the rest of it is the arm.

    Returns:
        `tuple`: the runs, lines on those that are left out, and the names of all arms that were met.

    Raises:
        ComparisonError: for a folder that holds no run, and for a file that cannot be read.
    """
    expression = _compiled(pattern)
    runs: list[Run] = []
    left_out: list[str] = []
    arms: list[str] = []
    for folder in _expanded([Path(path) for path in paths]):
        record = _read_json(folder / RECORD) if (folder / RECORD).is_file() else None
        arm, seed, rate = _identity(folder, record, expression)
        arms.append(arm)
        status = "finished" if record is None else record.get("status")
        if status != "finished":
            left_out.append(f"{folder}: {RECORD} says {status!r}, not 'finished'")
            continue
        path = _state_file(folder)
        state = _read_json(path)
        if not isinstance(state.get("log_history"), list):
            raise ComparisonError(f"{str(path)!r} holds no log_history: it is no state of a Trainer.")
        if record is None and (unfinished := _unfinished(state)):
            left_out.append(f"{folder}: {unfinished}")
            continue
        name = str(folder)
        try:
            curves, entropy = _curves(state), _entropy(folder, record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ComparisonError(f"{name!r}: its log is not what `Trainer` writes: {error}") from None
        runs.append(Run(name, arm, seed, rate, curves, name, record=record, entropy=entropy))
    return runs, left_out, list(dict.fromkeys(arms))


def _expanded(paths: list[Path]) -> list[Path]:
    folders: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ComparisonError(f"there is no {str(path)!r}.")
        if not path.is_dir():
            raise ComparisonError(
                f"{str(path)!r} is neither a folder of a run nor a .csv of curves: name the folder that holds {STATE}."
            )
        inner = [path] if _holds_run(path) else sorted(inner for inner in path.iterdir() if _holds_run(inner))
        if not inner:
            raise ComparisonError(
                f"{str(path)!r} holds no run: neither it nor a folder in it has {RECORD} or {STATE}."
            )
        folders += inner
    seen: dict[Path, Path] = {folder.resolve(): folder for folder in reversed(folders)}
    return list(reversed(seen.values()))


def _holds_run(folder: Path) -> bool:
    if not folder.is_dir() or folder.name.startswith("checkpoint-"):
        return False
    return (folder / RECORD).is_file() or (folder / STATE).is_file() or bool(_checkpoint_states(folder))


def _checkpoint_states(folder: Path) -> list[Path]:
    states = [
        path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name[len("checkpoint-") :].isdigit()
    ]
    return sorted(states, key=lambda path: int(path.parent.name.rpartition("-")[2]))


def _state_file(folder: Path) -> Path:
    """`Trainer` writes its state beside the model where `save_state` is called, and into each checkpoint."""
    if (folder / STATE).is_file():
        return folder / STATE
    states = _checkpoint_states(folder)
    if not states:
        raise ComparisonError(f"{str(folder)!r} is a finished run without {STATE}: its losses are not known.")
    return states[-1]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ComparisonError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ComparisonError(f"{str(path)!r} holds a {type(content).__name__}, not an object.")
    return content


def _unfinished(state: Mapping[str, Any]) -> str | None:
    done, planned = state.get("global_step") or 0, state.get("max_steps") or 0
    control = (state.get("stateful_callbacks") or {}).get("TrainerControl") or {}
    stopped = (control.get("args") or {}).get("should_training_stop", False)  # early stopping is an end as well
    return None if done >= planned or stopped else f"stopped at step {done} of {planned}"


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ComparisonError(f"the pattern {pattern!r} is no regular expression: {error}.") from None
    groups = set(expression.groupindex)
    if "arm" not in groups or groups - {"arm", "seed", "rate"}:
        raise ComparisonError(
            f"the pattern {pattern!r} has the groups {sorted(groups)}; it needs arm, and may have seed and rate: "
            r"'(?P<arm>\w+)/seed(?P<seed>\d+)'."
        )
    return expression


def _identity(
    folder: Path, record: Mapping[str, Any] | None, expression: re.Pattern[str] | None
) -> tuple[str, int | None, float | None]:
    if expression is not None:
        found = expression.search(folder.as_posix())
        if found is None:
            raise ComparisonError(f"the pattern {expression.pattern!r} is not found in {folder.as_posix()!r}.")
        values = found.groupdict()
    else:
        values = {}
        rest = folder.resolve().name
        for kind in (_SEED, _RATE):
            if match := kind.search(rest):
                values |= match.groupdict()
                rest = rest[: match.start()] + rest[match.end() :]
        values["arm"] = rest.strip("-_. ") or folder.resolve().parent.name
    seed, rate = _number(values.get("seed"), int, folder), _number(values.get("rate"), float, folder)
    if record is None:
        return values["arm"], seed, rate
    missing = [name for name in ("qk_init", "seed", "learning_rate", "status") if name not in record]
    if missing:
        raise ComparisonError(f"{str(folder / RECORD)!r} lacks {', '.join(missing)}.")
    arm = arm_name(record["qk_init"]) if expression is None else values["arm"]
    return arm, record["seed"], record["learning_rate"]


def _number(text: str | None, kind: type, folder: Path) -> Any:
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise ComparisonError(f"{text!r}, found by the pattern in {str(folder)!r}, is no number.") from None


def _curves(state: Mapping[str, Any]) -> dict[str, pd.Series]:
    points: dict[str, dict[int, float]] = {}
    for entry in state["log_history"]:
        for key, value in entry.items():
            held_out = held_out_metric(key)
            # A metric may be anything that a user's function returns, and a rate a mapping (of groups of parameters).
            is_number = isinstance(value, int | float | None)
            known = key in (TRAIN, HELD_OUT) or is_score(key) or ((held_out or key == RATE) and is_number)
            if known and "step" in entry:
                at, curve = int(entry["step"]), points.setdefault(key, {})
                # An evaluation after training repeats that of its last step, or is of another step's weights
                # (`load_best_model_at_end`).
                if not (held_out and at in curve):
                    curve[at] = math.nan if value is None else float(value)
    return {key: pd.Series(values, dtype=float).sort_index() for key, values in points.items()}


def _entropy(folder: Path, record: Mapping[str, Any] | None) -> float | None:
    metrics = dict((record or {}).get("metrics") or {})
    if ENTROPY not in metrics and (folder / "all_results.json").is_file():
        metrics = _read_json(folder / "all_results.json")
    return float(metrics[ENTROPY]) if metrics.get(ENTROPY) is not None else None
