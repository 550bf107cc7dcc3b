"""Runs as columns of a CSV: a column `step`, and a column of losses for each run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pandas as pd

from .errors import ComparisonError
from .runs import TRAIN, Run


__all__ = ["read_curves"]

_SEPARATOR = "--"
_SEED = re.compile(r"seed[-_=]?(\d+)", re.IGNORECASE)
_RATE = re.compile(r"lr[-_=]?(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", re.IGNORECASE)


def read_curves(path: str | os.PathLike[str], baseline: str = "none") -> list[Run]:
    """
    Reads curves of training loss.

    The name of a column says what it is, in parts between `--`: `seed0` and `lr1e-3` are seed and learning rate, and
    the rest is the setting and the arm. `4-layer--jigsaw--symmetric` is the arm `symmetric` of the setting
    `4-layer--jigsaw` where a column of that name, or `4-layer--jigsaw--none`, is the baseline. Where there is one
    setting only, columns may be named by the arm alone. A column without an arm is the baseline, whatever its name.

    Args:
        path (path): The file.
        baseline (`str`, *optional*, defaults to `"none"`): Name of the baseline arm.

    Returns:
        `list[Run]`

    Raises:
        ComparisonError: if the file cannot be read, has no column `step` or no baseline, or a column is not numeric.
    """
    table, empty = _read(Path(path))
    names = [str(name) for name in table.columns if name != "step"]
    parts = {name: _parts(name) for name in names}
    stems = {stem for stem, _, _ in parts.values()}
    runs = []
    for name in names:
        stem, seed, rate = parts[name]
        group, arm = _group_and_arm(stem, stems, baseline)
        logged = ~empty[name]
        curve = pd.Series(table[name][logged].to_numpy(), index=table["step"][logged].astype(int))
        if curve.empty:
            raise ComparisonError(f"{str(path)!r}: the column {name!r} is empty.")
        runs.append(Run(f"{path}: {name}", arm, seed, rate, {TRAIN: curve}, str(path), group))
    grouped: dict[str, set[str]] = {}
    for run in runs:
        grouped.setdefault(run.group, set()).add(run.arm)
    alone = [group or "the file" for group, arms in grouped.items() if baseline not in arms or len(arms) < 2]
    if alone:
        raise ComparisonError(
            f"{str(path)!r}: {', '.join(alone)} has no {baseline!r} beside another arm; a treated column is named "
            f"after its baseline, as in 'run' and 'run{_SEPARATOR}symmetric'. Columns: {', '.join(names)}."
        )
    return runs


def _read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The numbers, and which cells are empty: a loss that is written as NaN is one that diverged."""
    try:
        # Of two columns of one name pandas would call the second by another one.
        header = pd.read_csv(path, dtype=str, keep_default_na=False, header=None, nrows=1).iloc[0]
        text = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise ComparisonError(f"{str(path)!r} cannot be read: {error}") from None
    twice = header[header.duplicated()].unique()
    if len(twice):
        raise ComparisonError(
            f"{str(path)!r} has several columns {', '.join(map(repr, twice))}: name each its own way."
        )
    if "step" not in text:
        raise ComparisonError(f"{str(path)!r} has no column 'step'; its columns are {', '.join(map(str, text))}.")
    if len(text.columns) < 3:
        raise ComparisonError(f"{str(path)!r} has fewer than two columns of losses: there is nothing to compare.")
    text = text.apply(lambda column: column.str.strip())
    empty = text == ""
    table = text.apply(pd.to_numeric, errors="coerce").astype(float)
    no_numbers = table.isna() & ~empty & (text.apply(lambda column: column.str.lower()) != "nan")
    words = [str(name) for name in table if no_numbers[name].any()]
    if words:
        raise ComparisonError(f"{str(path)!r}: {', '.join(words)} has values that are no numbers.")
    if not (table["step"] % 1 == 0).all():
        raise ComparisonError(f"{str(path)!r}: a step is missing, or no whole number.")
    if not table["step"].is_monotonic_increasing or not table["step"].is_unique:
        raise ComparisonError(f"{str(path)!r}: the steps do not increase from line to line.")
    return table, empty


def _parts(name: str) -> tuple[str, int | None, float | None]:
    seed: int | None = None
    rate: float | None = None
    rest = []
    for part in name.split(_SEPARATOR):
        if found := _SEED.fullmatch(part):
            seed = int(found[1])
        elif found := _RATE.fullmatch(part):
            rate = float(found[1])
        else:
            rest.append(part)
    return _SEPARATOR.join(rest), seed, rate


def _group_and_arm(stem: str, stems: set[str], baseline: str) -> tuple[str, str]:
    """The longest beginning that is a column itself, or one with the baseline's name after it, is the setting."""
    pieces = stem.split(_SEPARATOR)
    for length in range(len(pieces) - 1, 0, -1):
        group, arm = _SEPARATOR.join(pieces[:length]), _SEPARATOR.join(pieces[length:])
        if group in stems or f"{group}{_SEPARATOR}{baseline}" in stems:
            return group, arm
    return ("", stem) if baseline in stems else (stem, baseline)
