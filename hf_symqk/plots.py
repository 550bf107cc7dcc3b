"""Plots of W_qk scores. They need matplotlib: `pip install "hf_symqk[plots]"`."""

import math
import os
import warnings
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .history import read_history
from .scores import LayerScores, QKScores


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["plot_heads", "plot_history", "plot_layers", "plot_models"]

_LABELS = {"symmetry": "symmetry score", "directionality": "directionality score", "frobenius_norm": "Frobenius norm"}
_BOUNDED = ("symmetry", "directionality")  # in [−1, 1], with a sign
# Lines of stacks: they differ in dash and marker as well.
_SHADES = ("#0072B2", "#D55E00", "#009E73", "black")
_NULL_LABEL = "95 % of independent Gaussian W_q, W_k"
# Families differ in colour, marker and fill: any one of them tells them apart.
_FAMILIES: dict[str | None, dict[str, Any]] = {
    "encoder": {"color": "#0072B2", "marker": "o", "label": "encoders"},
    "decoder": {"color": "#D55E00", "marker": "s", "markerfacecolor": "white", "label": "decoders"},
    "encoder-decoder": {"color": "#009E73", "marker": "^", "markerfacecolor": "0.85", "label": "encoder-decoders"},
    None: {"color": "dimgrey", "marker": "x", "label": "family not known"},
}
# Below this a head counts as negative: signs of scores near 0 are chance, and would only be speckles.
_HATCHED_BELOW = -0.05


def plot_history(
    path: str | os.PathLike | pd.DataFrame,
    *,
    metrics: tuple[str, ...] = ("symmetry", "directionality"),
    stack: str | None = None,
) -> "Figure":
    """
    Draws the scores of a training run against its steps: one row of axes per metric (and stack), on the left one line
    a layer with the median over layers and its quartile band, on the right a layer × step heat map.

    Args:
        path (`str`, `os.PathLike` or `pandas.DataFrame`):
            A `qk_scores.csv`, the output folder that holds one, or the table that [`~hf_symqk.history.read_history`]
            returns.
        metrics (`tuple[str, ...]`, *optional*, defaults to `("symmetry", "directionality")`):
            Any of `"symmetry"`, `"directionality"`, `"frobenius_norm"`.
        stack (`str`, *optional*):
            Draws only this stack of a model with several; all by default.

    Returns:
        `matplotlib.figure.Figure`: Save it with `figure.savefig(...)`.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: for a metric or a stack that the history does not have, or a history without rows.
    """
    plt = _pyplot()
    table = path if isinstance(path, pd.DataFrame) else read_history(path)
    table = table[table["head"].isna()]
    if table.empty:
        raise ValueError("The history has no rows yet: nothing has been measured.")
    for metric in metrics:
        _require_metric(metric, "metrics")
    stacks = list(table["stack"].unique())
    if stack is not None:
        if stack not in stacks:
            raise ValueError(f"No stack named {stack!r} in this history; there are {stacks}.")
        stacks = [stack]
    rows = [(name, metric) for name in stacks for metric in metrics]
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(10, 3.2 * len(rows)), squeeze=False, layout="constrained", width_ratios=(3, 2)
    )
    for (name, metric), (left, right) in zip(rows, axes, strict=True):
        values = table[table["stack"] == name].pivot(index="step", columns="layer", values=metric)
        _draw_lines(left, values, metric)
        _draw_heat_map(right, values, metric)
        if name:
            left.set_title(name)
            right.set_title(name)
    return figure


def plot_layers(
    scores: QKScores, *, metric: str = "symmetry", stack: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """
    Draws the score of each layer: a line a stack, and in grey the range of layers in which nothing was learned, where
    the scores hold it.

    Args:
        scores ([`QKScores`]):
            Scores of a model.
        metric (`str`, *optional*, defaults to `"symmetry"`):
            `"symmetry"`, `"directionality"` or `"frobenius_norm"`.
        stack (`str`, *optional*):
            Draws only this stack of a model with several; all by default.
        ax (`matplotlib.axes.Axes`, *optional*):
            Where to draw; a figure of its own by default.

    Returns:
        `matplotlib.axes.Axes`: Save it with `ax.figure.savefig(...)`. A layer without a score is a gap.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: for a metric or a stack that the scores do not have.
    """
    _require_metric(metric)
    ax = _axes(ax)
    from matplotlib.ticker import MaxNLocator

    groups: dict[tuple[str, str], list[LayerScores]] = {}
    for layer in _layers_of(scores, stack):
        groups.setdefault((layer.stack, layer.kind), []).append(layer)
    band = _NULL_LABEL
    styles = cycle([("-", "o"), ("--", "s"), (":", "^"), ("-.", "D")])
    for ((name, kind), layers), (line, marker), shade in zip(groups.items(), styles, cycle(_SHADES), strict=False):
        # Where several bands overlap, their edges say whose they are.
        edge = {"colors": shade, "linestyles": line} if len(groups) > 1 else {}
        if _draw_null(ax, layers, metric, band, edge):
            band = "_"  # one entry in the legend serves all
        label = " ".join(part for part in (name, "" if kind == "self" else kind) if part) or scores.model_type
        values = [getattr(layer, metric) for layer in layers]
        style: dict[str, Any] = {
            "linestyle": line,
            "marker": marker,
            "color": shade,
            "markersize": 5,
            "linewidth": 1.4,
        }
        ax.plot([layer.index for layer in layers], values, label=label or "layers", zorder=3, **style)
    if metric in _BOUNDED:
        ax.axhline(0, color="black", linewidth=0.5, linestyle=(0, (1, 2)), zorder=2)
        ax.set_ylim(-1.05, 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("layer")
    ax.set_ylabel(_LABELS[metric])
    ax.legend(fontsize="small", frameon=False)
    return ax


def plot_heads(
    scores: QKScores, *, metric: str = "symmetry", stack: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """
    Draws the score of each head as a layer × head heat map on a fixed scale. Values are printed where there is room
    for them; where there is none, negative heads are hatched, so that the sign is seen without colour too.

    Args:
        scores ([`QKScores`]):
            Scores of a model, with heads.
        metric (`str`, *optional*, defaults to `"symmetry"`):
            `"symmetry"`, `"directionality"` or `"frobenius_norm"` (on a scale of its own, not a fixed one).
        stack (`str`, *optional*):
            Which stack to draw; a model with several needs it.
        ax (`matplotlib.axes.Axes`, *optional*):
            Where to draw; a figure of its own by default.

    Returns:
        `matplotlib.axes.Axes`: Heads without a score are marked by a cross.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if heads were not scored, a stack has to be chosen, or for a metric or a stack that the scores do
            not have.
    """
    _require_metric(metric)
    if stack is None and len(scores.stacks) > 1:
        raise ValueError(f"A heat map of heads shows one stack; choose `stack` among {scores.stacks}.")
    layers = _layers_of(scores, stack)
    heads = [getattr(layer, f"head_{metric}") for layer in layers]
    if not any(heads):
        raise ValueError("These scores have no heads; score the model with `heads=True`.")
    ax = _axes(ax)
    values = np.full((len(layers), max(layer.num_heads for layer in layers)), np.nan)
    for row, measured in zip(values, heads, strict=True):
        row[: len(measured)] = measured
    image = ax.imshow(values, aspect="auto", origin="lower", interpolation="nearest", **_scale(metric))
    ax.figure.colorbar(image, ax=ax, label=_LABELS[metric])
    missing = [
        (head, row)
        for row, layer in enumerate(layers)
        for head in range(layer.num_heads)
        if np.isnan(values[row, head])
    ]
    if missing:
        columns, rows = zip(*missing, strict=True)
        ax.scatter(columns, rows, s=20, marker="x", color="grey", label="no score")
    if not _print_values(ax, image, values) and metric in _BOUNDED:
        _hatch_negative(ax, values)
    labels = [f"{layer.index}" if layer.kind == "self" else f"{layer.index} {layer.kind}" for layer in layers]
    _set_ticks(ax.set_yticks, labels, 16)
    _set_ticks(ax.set_xticks, [str(head) for head in range(values.shape[1])], 16)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    if stack:
        ax.set_title(stack)
    return ax


def plot_models(
    models: Sequence[QKScores] | pd.DataFrame, *, metric: str = "symmetry", ax: "Axes | None" = None
) -> "Axes":
    """
    Draws many models against their number of parameters: a marker at the median over layers, a bar between the
    quartiles, encoders and decoders apart in colour and marker (as in figure 2 of arXiv:2502.10927).

    Args:
        models (`Sequence[QKScores]` or `pandas.DataFrame`):
            Scores of models, or a table with a row a model and the columns `model`, `parameters`, `family`, and
            `{metric}_q25`, `{metric}_median`, `{metric}_q75`.
        metric (`str`, *optional*, defaults to `"symmetry"`):
            `"symmetry"`, `"directionality"` or `"frobenius_norm"`.
        ax (`matplotlib.axes.Axes`, *optional*):
            Where to draw; a figure of its own by default.

    Returns:
        `matplotlib.axes.Axes`: A model without a number of parameters or a score is left out and named in a warning.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the table lacks a column, a family is not known, or no model is left to draw.
    """
    _require_metric(metric)
    table = models if isinstance(models, pd.DataFrame) else _models_table(models)
    quartiles = [f"{metric}_{name}" for name in ("q25", "median", "q75")]
    lacking = [name for name in ("model", "parameters", "family", *quartiles) if name not in table]
    if lacking:
        raise ValueError(f"The table of models lacks the columns {lacking}; it has {list(table.columns)}.")
    family = table["family"].astype(object).where(table["family"].notna(), None)
    unknown = sorted({str(name) for name in family if name not in _FAMILIES})
    if unknown:
        raise ValueError(f"`family` must be among {[name for name in _FAMILIES if name]} or empty, got {unknown}.")
    numbers = table[["parameters", *quartiles]].apply(pd.to_numeric).astype(float)
    drawn = numbers.notna().all(axis=1) & (numbers["parameters"] > 0)
    left_out = ", ".join(map(str, table["model"][~drawn]))
    if not drawn.any():
        raise ValueError(f"No model has both a number of parameters and a {_LABELS[metric]}: {left_out or 'no rows'}.")
    if left_out:
        warnings.warn(f"Not drawn, without a number of parameters or a {_LABELS[metric]}: {left_out}.", stacklevel=2)
    ax = _axes(ax)
    for name, style in _FAMILIES.items():
        rows = numbers[drawn & np.array([found == name for found in family], dtype=bool)]
        if rows.empty:
            continue
        low, median, high = (rows[column].to_numpy() for column in quartiles)
        bars = np.clip([median - low, high - median], 0, None)
        ax.errorbar(rows["parameters"], median, bars, linestyle="", markersize=5, elinewidth=0.7, zorder=3, **style)
    ax.set_xscale("log")
    if metric in _BOUNDED:
        ax.axhline(0, color="grey", linewidth=0.6)
        ax.set_ylim(-1.05, 1.05)
    ax.set_xlabel("parameters")
    ax.set_ylabel(f"{_LABELS[metric]} (median, quartiles over layers)")
    ax.legend(fontsize="small", frameon=False)
    return ax


def _models_table(models: Sequence[QKScores]) -> pd.DataFrame:
    rows = []
    for position, scores in enumerate(models):
        row: dict[str, Any] = {"model": scores.source or scores.model_type or f"model {position}"}
        row |= {"parameters": scores.num_parameters, "family": scores.family}
        row |= {f"{metric}_{name}": value for metric, of in scores.summary().items() for name, value in of.items()}
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else ["model", "parameters", "family"])


def _layers_of(scores: QKScores, stack: str | None) -> list[LayerScores]:
    if stack is not None and stack not in scores.stacks:
        raise ValueError(f"No stack named {stack!r} in these scores; there are {scores.stacks}.")
    return [layer for layer in scores.layers if stack is None or layer.stack == stack]


def _require_metric(metric: str, argument: str = "metric") -> None:
    if metric not in _LABELS:
        raise ValueError(f"`{argument}` must be among {', '.join(map(repr, _LABELS))}, got {metric!r}.")


def _axes(ax: "Axes | None") -> "Axes":
    return _pyplot().subplots(figsize=(6.4, 4.2), layout="constrained")[1] if ax is None else ax


def _draw_null(ax: "Axes", layers: list[LayerScores], metric: str, label: str, edge: dict[str, Any]) -> bool:
    """The null band of each layer as a grey step as wide as the layer; whether there was any."""
    bands = [(layer.index, *band) for layer in layers if (band := getattr(layer, f"{metric}_null", ()))]
    bands = [band for band in bands if not math.isnan(band[1])]
    if bands:
        # Bands of symmetry can be thinner than a line: the edge keeps them visible.
        edges = np.array([(index + side, low, high) for index, low, high in bands for side in (-0.5, 0.5, 0.5)]).T
        edges[1:, 2::3] = np.nan  # each layer's step ends before the next begins
        ax.fill_between(*edges, color="0.8", alpha=0.7 if edge else 1, linewidth=1.5, zorder=1, label=label)
        if edge:
            index, low, high = np.array(bands).T
            for side in (low, high):
                ax.hlines(side, index - 0.5, index + 0.5, linewidth=0.7, zorder=1.5, **edge)
    return bool(bands)


def _print_values(ax: "Axes", image: Any, values: np.ndarray) -> bool:
    """Writes each value into its cell, unless a cell is too small to read it; whether it was done."""
    box = ax.get_window_extent()
    width, height = 72 / ax.figure.dpi * box.width / values.shape[1], 72 / ax.figure.dpi * box.height / values.shape[0]
    size = min(9.0, width / 3.4, height / 1.2)  # "−0.12" is near 3 font sizes wide
    if size < 5:
        return False
    for (row, head), value in np.ndenumerate(values):
        if not np.isnan(value):
            red, green, blue, _ = image.to_rgba(value)
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            text = f"{round(value, 2) + 0.0:.2f}".replace("-", "\N{MINUS SIGN}")
            ax.text(head, row, text, color="white" if dark else "black", fontsize=size, ha="center", va="center")
    return True


def _hatch_negative(ax: "Axes", values: np.ndarray) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    cells = [Rectangle((head - 0.5, row - 0.5), 1, 1) for row, head in np.argwhere(values < _HATCHED_BELOW)]
    if cells:
        style: dict[str, Any] = {"facecolor": "none", "edgecolor": "0.25", "linewidth": 0, "hatch": "////"}
        ax.add_collection(PatchCollection(cells, **style), autolim=False)
        label = f"below {_HATCHED_BELOW}".replace("-", "\N{MINUS SIGN}")
        legend: dict[str, Any] = {
            "loc": "lower right",
            "bbox_to_anchor": (1, 1),
            "fontsize": "x-small",
            "frameon": False,
        }
        ax.legend(handles=[Rectangle((0, 0), 1, 1, label=label, **style)], **legend)


def _set_ticks(setter: Any, labels: list[str], most: int) -> None:
    shown = range(0, len(labels), max(1, -(-len(labels) // most)))
    setter(list(shown), [labels[position] for position in shown])


def _scale(metric: str) -> dict[str, Any]:
    # Scores have a sign and a bound, so the colours are fixed and 0 is white; a norm has neither.
    return {"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if metric in _BOUNDED else {"cmap": "viridis"}


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('Plots need matplotlib; install it with `pip install "hf_symqk[plots]"`.') from error
    return plt


def _draw_lines(ax: "Axes", values: pd.DataFrame, metric: str) -> None:
    # Dark to light by depth: the order of the layers can be read in print too.
    shades = [0.15 + 0.65 * position / max(1, values.shape[1] - 1) for position in range(values.shape[1])]
    marker = "o" if len(values) == 1 else None
    for (layer, line), shade in zip(values.items(), shades, strict=True):
        ax.plot(line.index, line, color=_viridis(shade), linewidth=0.9, marker=marker, label=f"layer {layer}")
    low, median, high = (values.quantile(level, axis=1) for level in (0.25, 0.5, 0.75))
    ax.fill_between(values.index, low, high, color="black", alpha=0.15, linewidth=0, label="quartiles")
    ax.plot(median.index, median, color="black", linewidth=2, linestyle="--", marker=marker, label="median")
    if metric in _BOUNDED:
        ax.axhline(0, color="grey", linewidth=0.6)
    ax.set_xlabel("step")
    ax.set_ylabel(_LABELS[metric])
    ax.legend(fontsize="x-small", ncols=1 + values.shape[1] // 8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _viridis(shade: float) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](shade)


def _draw_heat_map(ax: "Axes", values: pd.DataFrame, metric: str) -> None:
    image = ax.imshow(values.T, aspect="auto", origin="lower", interpolation="nearest", **_scale(metric))
    # Steps are categories here: measurements need not lie evenly (the last one often does not).
    _set_ticks(ax.set_xticks, [str(step) for step in values.index], 6)
    _set_ticks(ax.set_yticks, [str(layer) for layer in values.columns], 12)
    ax.set_xlabel("step")
    ax.set_ylabel("layer")
    ax.figure.colorbar(image, ax=ax, label=_LABELS[metric])
