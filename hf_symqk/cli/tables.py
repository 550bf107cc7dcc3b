"""From scores to the tables of `symqk scores`: of one model, of several, of the checkpoints of a run."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ..history import COLUMNS
from ..scores import METRICS, LayerScores, QKScores
from .report import Cell, Column, Report
from .targets import Target


__all__ = ["history_table", "model_report", "models_report", "models_table", "run_report"]

Scored = Sequence[tuple[Target, QKScores]]

_SCORES = ("symmetry", "directionality")
# Of the spectral scores, those that mean the same whatever the scale; data has them all.
_SPECTRUM = {
    "positivity": "positivity",
    "normalized_trace": "trace",
    "stable_rank": "stable\nrank",
    "effective_rank": "effective\nrank",
}
_QUANTILES = ("q25", "median", "q75")
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def model_report(scores: QKScores, *, heads: bool) -> Report:
    """
    The layers of one model, or its heads.

    Args:
        scores ([`QKScores`]): Scores of the model.
        heads (`bool`): One row per head instead of one per layer.

    Returns:
        [`Report`]
    """
    data = _head_table(scores) if heads else _layer_table(scores)
    columns = [*_place_columns(data), *_kind_columns(scores, data)]
    for metric in _SCORES:
        columns.append(Column(metric, data[metric].tolist(), _score))
        if not heads and any(getattr(layer, f"{metric}_null") for layer in scores.layers):
            bands = [getattr(layer, f"{metric}_null") for layer in scores.layers]
            columns.append(Column(f"{metric}\nnull 95 %", bands, _score))
    columns.append(Column("norm", data["frobenius_norm"].tolist(), _norm))
    columns += _spectral_columns(data)
    if not heads:
        columns += _head_columns(data)
    columns += _marks(data)
    return Report(tuple(columns), data, scores.to_dict(), tuple(_about(scores)), tuple(_skipped(scores)))


def models_report(scored: Scored, *, heads: bool) -> Report:
    """
    One row for each of several models, or the heads of all.

    Args:
        scored (`Sequence[tuple[Target, QKScores]]`): The models, in the order of their rows.
        heads (`bool`): One row per head instead of one per model.

    Returns:
        [`Report`]
    """
    if heads:
        data = _stacked([(target.name, scores) for target, scores in scored], "model")
        columns = [
            Column("model", data["model"].tolist()),
            *_place_columns(data),
            *(Column(metric, data[metric].tolist(), _score) for metric in _SCORES),
            Column("norm", data["frobenius_norm"].tolist(), _norm),
            *_spectral_columns(data),
            *_marks(data),
        ]
    else:
        unverified = any(scores.unverified for _, scores in scored)
        skipped = any(scores.skipped for _, scores in scored)
        data = models_table(scored)
        columns = [
            Column("model", data["model"].tolist()),
            Column("kind", _blanks(data["family"])),
            Column("parameters", _blanks(data["parameters"]), _count),
            Column("layers", data["layers"].tolist(), _whole),
            *_quantile_columns(data),
            *_spectral_columns(data, "_median"),
            *([Column("unverified", [len(s.unverified) or None for _, s in scored], _whole)] if unverified else []),
            *([Column("skipped", [len(scores.skipped) or None for _, scores in scored], _whole)] if skipped else []),
        ]
    lines = [f"{target.name}: {line}" for target, scores in scored for line in _skipped(scores)]
    return Report(tuple(columns), data, [scores.to_dict() for _, scores in scored], left_out=tuple(lines))


def run_report(scored: Scored, *, heads: bool) -> Report:
    """
    The checkpoints of a training run: median and quartiles of each step (and stack), or every layer and head of each
    step in the columns of `qk_scores.csv`.

    Args:
        scored (`Sequence[tuple[Target, QKScores]]`): The checkpoints, by step.
        heads (`bool`): The rows of layers and heads instead of those of steps.

    Returns:
        [`Report`]
    """
    document = [{"step": target.step, "scores": scores.to_dict()} for target, scores in scored]
    if heads:
        data = history_table(scored, heads=True)
        columns = [
            Column("step", data["step"].tolist(), _whole),
            *_place_columns(data),
            *(Column(metric, data[metric].tolist(), _score) for metric in _SCORES),
            Column("norm", data["frobenius_norm"].tolist(), _norm),
            *_spectral_columns(data),
        ]
    else:
        data = pd.DataFrame(
            {"step": target.step, "stack": stack, **_summary(scores, stack)}
            for target, scores in scored
            for stack in scores.stacks
        )
        columns = [
            Column("step", data["step"].tolist(), _whole),
            *([Column("stack", data["stack"].tolist())] if data["stack"].any() else []),
            *_quantile_columns(data),
            Column("norm", data["frobenius_norm_median"].tolist(), _norm),
            *_spectral_columns(data, "_median"),
        ]
    # Every checkpoint of a run is built alike, so what was left out of one is said once.
    lines = dict.fromkeys(line for _, scores in scored for line in _skipped(scores))
    return Report(tuple(columns), data, document, left_out=tuple(lines))


def models_table(scored: Scored) -> pd.DataFrame:
    """
    Median and quartiles of several models, as [`~hf_symqk.plots.plot_models`] draws them.

    Args:
        scored (`Sequence[tuple[Target, QKScores]]`): The models.

    Returns:
        `pandas.DataFrame`: A row a model.
    """
    rows = [
        {
            "model": target.name,
            "parameters": scores.num_parameters,
            "family": scores.family,
            "model_type": scores.model_type,
            **_summary(scores, None),
            "unverified": len(scores.unverified),
            "skipped": "; ".join(_left_out(scores)),
        }
        for target, scores in scored
    ]
    return pd.DataFrame(rows).astype({"parameters": "Int64"})


def history_table(scored: Scored, *, heads: bool = False) -> pd.DataFrame:
    """
    The checkpoints of a run in the columns of a `qk_scores.csv`, as [`~hf_symqk.plots.plot_history`] draws them.

    Args:
        scored (`Sequence[tuple[Target, QKScores]]`): The checkpoints, by step.
        heads (`bool`, *optional*, defaults to `False`): Adds the rows of heads.

    Returns:
        `pandas.DataFrame`: `head` is missing for the layer form.
    """
    parts = []
    for target, scores in scored:
        tables = [scores.to_pandas(), *([scores.to_pandas(heads=True)] if heads else [])]
        columns = [*COLUMNS, *scores.metrics[len(METRICS) :]]
        parts += [table.assign(step=target.step).reindex(columns=columns) for table in tables]
    return pd.concat([part.astype({"head": "Int64"}) for part in parts], ignore_index=True)


def _layer_table(scores: QKScores) -> pd.DataFrame:
    """The layers with their null bands, each end in a column of its own."""
    data = scores.to_pandas()
    for metric in reversed(_SCORES):
        bands = [getattr(layer, f"{metric}_null") for layer in scores.layers]
        if any(bands) and f"{metric}_null_low" not in data:
            position = list(data.columns).index(metric) + 1
            for end, name in ((1, "high"), (0, "low")):
                values = [band[end] if band else float("nan") for band in bands]
                data.insert(position, f"{metric}_null_{name}", values)
    return data


def _head_table(scores: QKScores) -> pd.DataFrame:
    return scores.to_pandas(heads=True)


def _stacked(named: list[tuple[str, QKScores]], column: str) -> pd.DataFrame:
    tables = [_head_table(scores) for _, scores in named]
    for table, (name, _) in zip(tables, named, strict=True):
        table.insert(0, column, name)
    return pd.concat(tables, ignore_index=True)


def _place_columns(data: pd.DataFrame) -> list[Column]:
    """Stack, layer and head of each row; the stack only where there are several."""
    columns = [Column("stack", data["stack"].tolist())] if data["stack"].any() else []
    columns.append(Column("layer", data["layer"].tolist(), _whole))
    if "head" in data:
        columns.append(Column("head", _blanks(data["head"]), _whole))
    return columns


def _kind_columns(scores: QKScores, data: pd.DataFrame) -> list[Column]:
    """What each row is, where the layers are not all alike."""
    kinds = {layer.name: _kind(layer) for layer in scores.layers}
    if len(set(kinds.values())) < 2:
        return []
    return [Column("attention", [kinds[name] for name in data["name"]])]


def _kind(layer: LayerScores) -> str:
    direction = {True: "causal", False: "bidirectional", None: ""}[layer.causal]
    return ", ".join(filter(None, (layer.role, "cross" if layer.kind == "cross" else direction)))


def _head_columns(data: pd.DataFrame) -> list[Column]:
    columns = [Column("heads", data["num_heads"].tolist(), _whole)]
    if (data["num_key_value_heads"] != data["num_heads"]).any():
        columns.append(Column("key heads", data["num_key_value_heads"].tolist(), _whole))
    return columns


def _marks(data: pd.DataFrame) -> list[Column]:
    """Which rows are of layers that no forward pass has proven, where there are any."""
    marks: list[Cell] = ["" if verified else "unverified" for verified in data["verified"]]
    return [Column("", marks)] if any(marks) else []


def _quantile_columns(data: pd.DataFrame) -> list[Column]:
    columns = []
    for metric in _SCORES:
        quartiles = list(zip(data[f"{metric}_q25"].tolist(), data[f"{metric}_q75"].tolist(), strict=True))
        columns += [
            Column(metric, data[f"{metric}_median"].tolist(), _score),
            Column(f"{metric}\nquartiles", quartiles, _score),
        ]
    return columns


def _spectral_columns(data: pd.DataFrame, suffix: str = "") -> list[Column]:
    """Spectral scores, where they were measured; medians with the suffix `_median`."""
    return [
        Column(title, data[name + suffix].tolist(), _score)
        for name, title in _SPECTRUM.items()
        if name + suffix in data
    ]


def _summary(scores: QKScores, stack: str | None) -> dict[str, Any]:
    summary = scores.summary(stack)
    # As in the summary, a layer that is not finite does not count; `_skipped` names it.
    layers = sum(stack in (None, layer.stack) and not math.isnan(layer.frobenius_norm) for layer in scores.layers)
    quantiles = {f"{metric}_{name}": summary[metric][name] for metric in scores.metrics for name in _QUANTILES}
    return {"layers": layers, **quantiles}


def _about(scores: QKScores) -> list[str]:
    """What the model is, and median and quartiles of each stack."""
    size = None if scores.num_parameters is None else f"{_count(scores.num_parameters)} parameters"
    kind = " ".join(part for part in (scores.model_type, scores.family and f"({scores.family})") if part)
    about = ", ".join(part for part in (kind, size) if part)
    lines = [about] if about else []
    for stack in scores.stacks:
        summary = _summary(scores, stack)
        values = ", ".join(
            f"{metric} {_score(summary[f'{metric}_median'])} "
            f"({_score(summary[f'{metric}_q25'])}…{_score(summary[f'{metric}_q75'])})"
            for metric in _SCORES
        )
        layers = "1 layer" if summary["layers"] == 1 else f"{summary['layers']} layers"
        lines.append(f"{stack + ', ' if stack else ''}median (quartiles) of {layers}: {values}")
    return lines


def _skipped(scores: QKScores) -> list[str]:
    lines = [f"skipped: {line}" for line in _left_out(scores)]
    if unverified := scores.unverified:
        some = f"{', '.join(unverified[:3])}{', …' if len(unverified) > 3 else ''}"
        layers = "1 layer" if len(unverified) == 1 else f"{len(unverified)} layers"
        lines.append(f"unverified: no forward pass has proven how W_q and W_k of {layers} are read: {some}")
    return lines


def _left_out(scores: QKScores) -> list[str]:
    """What the medians are not of: modules that were skipped, and layers that are not finite."""
    lines = [line.strip() for line in scores.skipped]
    return lines + ([f"not finite: {', '.join(scores.undefined)}"] if scores.undefined else [])


def _blanks(values: pd.Series) -> list[Any]:
    return [None if pd.isna(value) else value for value in values]


def _score(value: float) -> str:
    # What rounds to zero has no sign.
    text = f"{value:.3f}"
    return text.lstrip("-") if text == "-0.000" else text


def _norm(value: float) -> str:
    return f"{value:.3f}"


def _whole(value: float) -> str:
    return str(value)


def _count(value: float) -> str:
    """`109482240` → `109.5M`."""
    for size, suffix in _SUFFIXES:
        if value >= size:
            return f"{value / size:.1f}{suffix}"
    return str(value)
