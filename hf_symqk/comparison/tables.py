"""A comparison as tables: final losses, differences with their tests, speed-ups, and the paper's table beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from .._rendering import Cell, Column, Report
from .published import PUBLISHED
from .results import ArmSummary, Comparison, Contrast
from .speedup import SpeedUp
from .statistics import Estimate


__all__ = ["make_tables", "to_document"]


def make_tables(comparison: Comparison) -> dict[str, Report]:
    """
    The tables of a comparison.

    Args:
        comparison ([`Comparison`]): What [`compare_runs`] returned.

    Returns:
        `dict[str, Report]`: `final_loss`, `differences`, `speed_up` (where training loss was logged), the last of
        these with the notes; then `published`, the paper's.
    """
    tables = {"final_loss": _final_losses(comparison), "differences": _differences(comparison)}
    speed_ups = _speed_ups(comparison)
    if speed_ups is not None:
        tables["speed_up"] = speed_ups
    last = list(tables)[-1]
    left_out = tuple(f"left out: {line}" for line in comparison.left_out)
    tables[last] = replace(tables[last], notes=(*tables[last].notes, *comparison.notes), left_out=left_out)
    return {**tables, "published": _published()}


def to_document(comparison: Comparison) -> dict[str, Any]:
    """
    A comparison as JSON values.

    Args:
        comparison ([`Comparison`]): What [`compare_runs`] returned.

    Returns:
        `dict`: `baseline`, `confidence`, `window`, `arms`, `contrasts`, `runs`, `notes` and `left_out`; what is not
        known or not finite is `None`.
    """
    return _finite(
        {
            "baseline": comparison.baseline,
            "confidence": comparison.confidence,
            "window": comparison.window,
            "arms": [_arm_document(one) for one in comparison.arms],
            "contrasts": [_contrast_document(one) for one in comparison.contrasts],
            "runs": [
                {
                    "name": run.name,
                    "group": run.group,
                    "arm": run.arm,
                    "seed": run.seed,
                    "learning_rate": run.learning_rate,
                }
                for run in comparison.runs
            ],
            "notes": list(comparison.notes),
            "left_out": list(comparison.left_out),
        }
    )


def _final_losses(comparison: Comparison) -> Report:
    arms = comparison.arms
    percent = f"{100 * comparison.confidence:g} %"
    columns = [
        *_group_column(arms),
        Column("arm", [one.arm for one in arms]),
        *_rate_column("rate", [one.learning_rate for one in arms]),
        *_best_column(arms),
        Column("seeds", [len(one.seeds) for one in arms], str),
        *_estimate_columns("training\nloss", [one.train for one in arms], percent, _loss),
        *_estimate_columns("held-out\nloss", [one.held_out for one in arms], percent, _loss),
    ]
    if any(one.entropy is not None for one in arms):
        columns.append(Column("unigram\nentropy", [one.entropy for one in arms], _loss))
    data = pd.DataFrame(
        {
            "group": one.group,
            "arm": one.arm,
            "learning_rate": one.learning_rate,
            "best_rate": one.best,
            "seeds": len(one.seeds),
            **_estimate_data("train_loss", one.train),
            **_estimate_data("held_out_loss", one.held_out),
            "unigram_entropy": one.entropy,
        }
        for one in arms
    )
    return Report(tuple(columns), data, [_arm_document(one) for one in arms], title="Final loss")


def _differences(comparison: Comparison) -> Report:
    contrasts = comparison.contrasts
    percent = f"{100 * comparison.confidence:g} %"
    columns = [
        *_contrast_columns(contrasts),
        Column("seeds", [len(one.seeds) for one in contrasts], str),
        *_estimate_columns("training\nloss", [one.train for one in contrasts], percent, _difference),
        *_estimate_columns("held-out\nloss", [one.held_out for one in contrasts], percent, _difference),
    ]
    if any(one.p is not None for one in contrasts):
        columns.append(Column("p", [one.p for one in contrasts], _probability))
        columns.append(Column("p (Holm)", [one.p_corrected for one in contrasts], _probability))
        columns.append(
            Column("smallest p", [None if one.p is None else one.p_smallest for one in contrasts], _probability)
        )
    columns.append(Column("verdict", [one.verdict for one in contrasts]))
    data = pd.DataFrame(
        {
            **_contrast_data(one),
            **_estimate_data("train_difference", one.train),
            **_estimate_data("held_out_difference", one.held_out),
            "tested": one.tested,
            "p": one.p,
            "p_corrected": one.p_corrected,
            "p_smallest": one.p_smallest,
            "verdict": one.verdict,
        }
        for one in contrasts
    )
    document = [_contrast_document(one) for one in contrasts]
    return Report(tuple(columns), data, document, title="Differences, treated minus baseline")


def _speed_ups(comparison: Comparison) -> Report | None:
    contrasts = [one for one in comparison.contrasts if one.raw]
    if not contrasts:
        return None
    columns = [*_contrast_columns(contrasts)]
    rules: list[tuple[str, str, Callable[[Contrast], tuple[SpeedUp, ...]]]] = [
        ("raw", "speed-up", lambda one: one.raw),
        ("raw_null", "its null", lambda one: one.raw_null),
        ("smoothed", "smoothed", lambda one: one.smoothed),
        ("smoothed_null", "its null", lambda one: one.smoothed_null),
    ]
    rows: list[dict[str, Any]] = [_contrast_data(one) for one in contrasts]
    several = max(len(one.seeds) for one in contrasts) > 1
    for name, title, of in rules:
        found = [of(one) for one in contrasts]
        columns.append(Column(title, [_median(speeds) for speeds in found], _percent))
        if several:
            columns.append(Column(f"{title}\nover seeds", [_ends(speeds) for speeds in found], _percent))
        if not name.endswith("null"):
            columns.append(Column(f"{title}\nreached", [_reached(speeds) for speeds in found]))
        for row, speeds in zip(rows, found, strict=True):
            fractions = [speed.fraction for speed in speeds]
            row[f"{name}_speed_up_median"] = _median(speeds)
            row[f"{name}_speed_up_low"] = min(fractions, default=None)
            row[f"{name}_speed_up_high"] = max(fractions, default=None)
            row[f"{name}_reached"] = sum(speed.reached for speed in speeds)
    notes = ("Speed-up over several seeds: the median, and from the lowest to the highest.",) if several else ()
    document = [_contrast_document(one) for one in contrasts]
    return Report(tuple(columns), pd.DataFrame(rows), document, notes, title="Speed-up")


def _published() -> Report:
    layers, data, plain, symmetric, speed = zip(*PUBLISHED, strict=True)
    columns = (
        Column("layers", layers, str),
        Column("data", data),
        Column("final loss,\nrandom", plain, _loss),
        Column("final loss,\nsymmetric", symmetric, _loss),
        Column("speed-up", [value / 100 for value in speed], _percent),
    )
    names = ["layers", "data", "final_loss_random", "final_loss_symmetric", "speed_up_percent"]
    table = pd.DataFrame(list(PUBLISHED), columns=names)
    notes = (
        "Training loss and the raw rule; one run each; 0 %: not reached. The published symmetric start also changed "
        "the scale of Q, K and V.",
    )
    title = "Published: Saponati et al. (2025), arXiv:2502.10927"
    return Report(columns, table, table.to_dict(orient="records"), notes, title=title)


def _contrast_columns(contrasts: Sequence[Contrast]) -> list[Column]:
    columns = [
        *_group_column(contrasts),
        Column("treated", [one.treated for one in contrasts]),
        Column("baseline", [one.baseline for one in contrasts]),
    ]
    if len({(one.setting, one.treated_rate, one.baseline_rate) for one in contrasts}) > 1:
        columns.append(Column("rates", [_rates(one) for one in contrasts]))
    return columns


def _rates(contrast: Contrast) -> str:
    treated, baseline = (_rate(rate) for rate in (contrast.treated_rate, contrast.baseline_rate))
    return f"both {treated}" if contrast.setting == "equal rates" else f"own best: {treated}, {baseline}"


def _group_column(rows: Sequence[ArmSummary] | Sequence[Contrast]) -> list[Column]:
    groups = [one.group for one in rows]
    return [Column("setting", groups)] if any(groups) else []


def _rate_column(title: str, rates: Sequence[float | None]) -> list[Column]:
    return [Column(title, rates, _rate)] if any(rate is not None for rate in rates) else []


def _best_column(arms: Sequence[ArmSummary]) -> list[Column]:
    if all(one.best for one in arms):
        return []
    return [Column("best", ["best" if one.best else "" for one in arms])]


def _estimate_columns(
    title: str, estimates: Sequence[Estimate | None], percent: str, form: Callable[[Any], str]
) -> list[Column]:
    if not any(estimates):
        return []
    means: list[Cell] = [None if one is None else one.mean for one in estimates]
    columns = [Column(title, means, form)]
    if any(one is not None and one.interval for one in estimates):
        ends: list[Cell] = [None if one is None else one.interval for one in estimates]
        columns.append(Column(f"{title.splitlines()[0]}\n{percent}", ends, form))
    return columns


def _estimate_data(name: str, found: Estimate | None) -> dict[str, Any]:
    low, high = (None, None) if found is None else (found.low, found.high)
    return {f"{name}_mean": None if found is None else found.mean, f"{name}_low": low, f"{name}_high": high}


def _contrast_data(contrast: Contrast) -> dict[str, Any]:
    return {
        "group": contrast.group,
        "treated": contrast.treated,
        "baseline": contrast.baseline,
        "setting": contrast.setting,
        "treated_rate": contrast.treated_rate,
        "baseline_rate": contrast.baseline_rate,
        "seeds": len(contrast.seeds),
    }


def _arm_document(one: ArmSummary) -> dict[str, Any]:
    return {
        "group": one.group,
        "arm": one.arm,
        "learning_rate": one.learning_rate,
        "best_rate": one.best,
        "seeds": list(one.seeds),
        "train_loss": _estimate_document(one.train),
        "held_out_loss": _estimate_document(one.held_out),
        "unigram_entropy": one.entropy,
        "learned": one.learned,
    }


def _contrast_document(one: Contrast) -> dict[str, Any]:
    return {
        **_contrast_data(one),
        "seeds": list(one.seeds),
        "train_difference": _estimate_document(one.train),
        "held_out_difference": _estimate_document(one.held_out),
        "tested": one.tested,
        "p": one.p,
        "p_corrected": one.p_corrected,
        "p_smallest": one.p_smallest,
        "verdict": one.verdict,
        "speed_up": {
            "raw": [_speed_document(speed) for speed in one.raw],
            "raw_null": [_speed_document(speed) for speed in one.raw_null],
            "smoothed": [_speed_document(speed) for speed in one.smoothed],
            "smoothed_null": [_speed_document(speed) for speed in one.smoothed_null],
        },
    }


def _estimate_document(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"mean": found.mean, "low": found.low, "high": found.high, "values": list(found.values)}


def _speed_document(speed: SpeedUp) -> dict[str, Any]:
    return {"fraction": speed.fraction, "reached": speed.reached, "step": speed.step, "target": speed.target}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _median(speeds: Sequence[SpeedUp]) -> float | None:
    return float(np.median([speed.fraction for speed in speeds])) if speeds else None


def _ends(speeds: Sequence[SpeedUp]) -> tuple[float, float] | None:
    fractions = [speed.fraction for speed in speeds]
    return (min(fractions), max(fractions)) if len(fractions) > 1 else None


def _reached(speeds: Sequence[SpeedUp]) -> str:
    if not speeds:
        return ""
    count = sum(speed.reached for speed in speeds)
    if count == 0:
        return "not reached"
    return f"step {speeds[0].step}" if len(speeds) == 1 else f"{count} of {len(speeds)}"


def _loss(value: float) -> str:
    # Losses are computed in single precision: a decimal tie is decided by the number that was logged, not by its
    # digits read in double precision.
    return f"{np.float32(value):.3f}"


def _difference(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # a zero has no sign


def _probability(value: float) -> str:
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{round(100 * value)} %"


def _rate(value: float | None) -> str:
    return "not known" if value is None else f"{value:g}"
