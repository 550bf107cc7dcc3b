"""Runs held to the same logged steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from .errors import ComparisonError
from .runs import HELD_OUT, TRAIN, Run, listed, metric_of


__all__ = ["align"]


def align(runs: Sequence[Run], cut: bool) -> tuple[list[Run], list[str]]:
    """
    Holds the runs of a group to the same logged steps. Evaluations may be at different steps, as after resuming, if
    the last of them is at the same: that one is compared.

    Args:
        runs (sequence of [`Run`]): Runs of one group.
        cut (`bool`): Cuts them to the steps that all have, instead of refusing.

    Returns:
        `tuple`: the runs, and statements on what was left out or cut.

    Raises:
        ComparisonError: for logs of unequal length, naming the runs, or runs that log no loss in common.
    """
    notes: list[str] = []
    curves: list[dict[str, pd.Series]] = [dict(run.curves) for run in runs]
    metrics = {key: f"held-out {name}" for run in runs for key in run.curves if (name := metric_of(key))}
    for key, label in {TRAIN: "training loss", HELD_OUT: "held-out loss", **metrics}.items():
        without = [run.name for run in runs if key not in run.curves]
        if without and len(without) < len(runs):
            notes.append(f"The {label} is left out: {listed(without)} logged none.")
        if without:
            for found in curves:
                found.pop(key, None)
            continue
        indices = [found[key].index for found in curves]
        if all(index.equals(indices[0]) for index in indices):
            continue
        same_end = key != TRAIN and len({index[-1] for index in indices}) == 1
        different = next(number for number, index in enumerate(indices) if not index.equals(indices[0]))
        described = _described([runs[0], runs[different]], [indices[0], indices[different]])
        if not (cut or same_end):
            raise ComparisonError(
                f"the logs of {label} are of unequal length or steps: {described}; finish the shorter run, or ask for "
                "the steps that all have in common to be compared (cut)."
            )
        common = indices[0]
        for index in indices[1:]:
            common = common.intersection(index)
        if not len(common):
            raise ComparisonError(f"the logs of {label} have no step in common: {described}.")
        for found in curves:
            found[key] = found[key].loc[common]
        line = (
            f"The {label} is compared at the {len(common)} steps that all logs have, up to step {common[-1]} "
            f"({described})."
        )
        decay = " A learning rate that decays to the end of a run has not done so there."
        notes.append(line if same_end else line + decay)
    if not any(TRAIN in found or HELD_OUT in found for found in curves):
        raise ComparisonError(f"these runs log no loss in common: {listed([run.name for run in runs])}.")
    return [replace(run, curves=found) for run, found in zip(runs, curves, strict=True)], notes


def _described(pair: Sequence[Run], indices: Sequence[pd.Index]) -> str:
    texts = [f"{run.name} ({len(index)} points to step {index[-1]})" for run, index in zip(pair, indices, strict=True)]
    text = " and ".join(texts)
    if len(indices[0]) == len(indices[1]) and indices[0][-1] == indices[1][-1]:
        return f"{text}, not both at step {indices[0].symmetric_difference(indices[1])[0]}"
    return text
