"""A comparison as tables: final losses, differences with their tests, speed-ups, and the paper's table beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from .._rendering import Cell, Column, Report
from .documents import arm_document, contrast_document, contrast_facts, estimate_document, secondary_document
from .published import PUBLISHED
from .results import ArmSummary, Comparison, Contrast
from .speedup import SpeedUp
from .statistics import Estimate


__all__ = ["make_tables"]


def make_tables(comparison: Comparison) -> dict[str, Report]:
    """
    The tables of a comparison.

    Args:
        comparison ([`Comparison`]): What [`compare_runs`] returned.

    Returns:
        `dict[str, Report]`: `final_loss`, `differences`, `metrics` and `metric_differences` (where held-out accuracy
        or the like was logged), `speed_up` (where training loss was), the last of these with the notes; then
        `published`, the paper's.
    """
    tables = {"final_loss": _final_losses(comparison), "differences": _differences(comparison)}
    if any(one.metrics for one in comparison.arms):
        tables |= {"metrics": _metrics(comparison), "metric_differences": _metric_differences(comparison)}
    speed_ups = _speed_ups(comparison)
    if speed_ups is not None:
        tables["speed_up"] = speed_ups
    last = list(tables)[-1]
    left_out = tuple(f"left out: {line}" for line in comparison.left_out)
    tables[last] = replace(tables[last], notes=(*tables[last].notes, *comparison.notes), left_out=left_out)
    return {**tables, "published": _published()}


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
    return Report(tuple(columns), data, [arm_document(one) for one in arms], title="Final loss")


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
            Column("smallest p (Holm)", [None if one.p is None else one.p_smallest for one in contrasts], _probability)
        )
    columns.append(Column("verdict", [one.verdict for one in contrasts]))
    data = pd.DataFrame(
        {
            **contrast_facts(one),
            **_estimate_data("train_difference", one.train),
            **_estimate_data("held_out_difference", one.held_out),
            "tested": one.tested,
            "p": one.p,
            "p_corrected": one.p_corrected,
            "p_smallest": one.p_smallest,
            "verdict": one.verdict,
            **_secondary_data(one),
        }
        for one in contrasts
    )
    document = [contrast_document(one) for one in contrasts]
    return Report(tuple(columns), data, document, title="Differences, treated minus baseline")


def _metrics(comparison: Comparison) -> Report:
    rows = [(one, name, found) for one in comparison.arms for name, found in one.metrics.items()]
    arms = [one for one, _, _ in rows]
    columns = (
        *_group_column(arms),
        Column("arm", [one.arm for one in arms]),
        *_rate_column("rate", [one.learning_rate for one in arms]),
        Column("seeds", [len(one.seeds) for one in arms], str),
        Column("held-out", [name for _, name, _ in rows]),
        *_estimate_columns("mean", [found for _, _, found in rows], f"{100 * comparison.confidence:g} %", _loss),
    )
    data = pd.DataFrame(
        {
            "group": one.group,
            "arm": one.arm,
            "learning_rate": one.learning_rate,
            "seeds": len(one.seeds),
            "metric": name,
            **_estimate_data("final", found),
        }
        for one, name, found in rows
    )
    document = [{"arm": one.arm, "metric": name, **(estimate_document(found) or {})} for one, name, found in rows]
    return Report(columns, data, document, title="Final held-out metrics (secondary)")


def _metric_differences(comparison: Comparison) -> Report:
    rows = [(one, name, found) for one in comparison.contrasts for name, found in one.metrics.items()]
    contrasts = [one for one, _, _ in rows]
    percent = f"{100 * comparison.confidence:g} %"
    columns = [
        *_contrast_columns(contrasts),
        Column("seeds", [len(one.seeds) for one in contrasts], str),
        Column("held-out", [name for _, name, _ in rows]),
        *_estimate_columns("difference", [found.difference for _, _, found in rows], percent, _difference),
    ]
    if any(found.p is not None for _, _, found in rows):
        columns.append(Column("p,\nuncorrected", [found.p for _, _, found in rows], _probability))
    data = pd.DataFrame(
        {
            **contrast_facts(one),
            "metric": name,
            **_estimate_data("difference", found.difference),
            "p_uncorrected": found.p,
        }
        for one, name, found in rows
    )
    document = [{**contrast_facts(one), "metric": name, **secondary_document(found)} for one, name, found in rows]
    title = "Differences in held-out metrics (secondary), treated minus baseline"
    return Report(tuple(columns), data, document, title=title)


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
    rows: list[dict[str, Any]] = [contrast_facts(one) for one in contrasts]
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
    document = [contrast_document(one) for one in contrasts]
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


def _secondary_data(one: Contrast) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, found in one.metrics.items():
        values |= _estimate_data(f"held_out_{name}_difference", found.difference)
        values[f"held_out_{name}_p_uncorrected"] = found.p
    return values


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
