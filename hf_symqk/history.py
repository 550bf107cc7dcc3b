"""
`qk_scores.csv`: the scores of a training run as a table that survives the run being killed.

Columns: `step`, `stack` (empty if the model has one), `layer`, `head` (empty for the layer form), `symmetry`,
`directionality`, `frobenius_norm`, and the spectral scores where a run measures them. NaN is written as `nan`.
"""

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .scores import METRICS, SPECTRAL_METRICS, QKScores


__all__ = ["COLUMNS", "ScoreHistory", "read_history"]

COLUMNS = ("step", "stack", "layer", "head", *METRICS)
_ALL_COLUMNS = (*COLUMNS, *SPECTRAL_METRICS)


def read_history(path: str | os.PathLike) -> pd.DataFrame:
    """
    Reads a `qk_scores.csv`. A last line that a killed process left unfinished is left out.

    Args:
        path (`str` or `os.PathLike`):
            The file, or the output folder that holds it.

    Returns:
        `pandas.DataFrame`: Columns as in the file; `head` is a nullable integer, missing for the layer form.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a history of scores.
    """
    path = Path(path)
    path = path / "qk_scores.csv" if path.is_dir() else path
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    columns = tuple(lines[0].strip().split(",")) if lines else ()
    if columns not in (COLUMNS, _ALL_COLUMNS):
        raise ValueError(f"{str(path)!r} is not a history of W_qk scores; its first line is not {','.join(COLUMNS)}.")
    finished = csv.reader(line for line in lines[1:] if line.endswith("\n"))
    table = pd.DataFrame([row for row in finished if len(row) == len(columns)], columns=list(columns))
    types = {"step": "int64", "layer": "int64", "head": "Int64", **dict.fromkeys(columns[4:], "float64")}
    table["head"] = table["head"].where(table["head"] != "", pd.NA)
    return table.astype(types)


class ScoreHistory:
    """
    Writes a `qk_scores.csv`, one measurement at a time, each on disk when [`~ScoreHistory.append`] returns.

    Args:
        path (`str` or `os.PathLike`):
            The file.
        resumed_step (`int`):
            Optimiser step at which the run starts. At 0 an older file is replaced; at a later step its rows up to that
            step stay, and those beyond it, which the resumed run will measure again, are dropped.
        spectral (`bool`, *optional*, defaults to `False`):
            Whether the file has columns for spectral scores.
    """

    def __init__(self, path: str | os.PathLike, resumed_step: int, spectral: bool = False):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.columns = list(_ALL_COLUMNS if spectral else COLUMNS)
        kept: list[dict[str, Any]] = []
        if resumed_step and self.path.exists():
            table = read_history(self.path).reindex(columns=self.columns)
            table = table[table["step"] <= resumed_step].astype({"head": "string"}).fillna({"head": ""})
            kept = [dict(zip(self.columns, row, strict=True)) for row in table.to_numpy(dtype=object)]
        self.steps = {row["step"] for row in kept}
        # Written beside and moved into place: a kill in between leaves the old file or the new one, never a half.
        unfinished = self.path.with_suffix(".tmp")
        self._write(unfinished, kept, mode="w")
        os.replace(unfinished, self.path)

    def append(self, step: int, scores: QKScores) -> None:
        """
        Adds one measurement; a step that is in the file already is not added again.

        Args:
            step (`int`): Optimiser step.
            scores ([`QKScores`]): Scores of all layers, and of heads if they were measured.
        """
        if step in self.steps:
            return
        self.steps.add(step)
        layers = [{"step": step, "head": "", **row} for row in scores.rows()]
        heads = [{"step": step, **row} for row in scores.rows(heads=True)]
        self._write(self.path, [*layers, *heads], mode="a")

    def _write(self, path: Path, rows: Iterable[Mapping[str, Any]], mode: str) -> None:
        with open(path, mode, encoding="utf-8", newline="") as file:
            # What was not measured is missing.
            writer = csv.DictWriter(file, self.columns, "nan", extrasaction="ignore", lineterminator="\n")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
