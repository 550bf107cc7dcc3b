"""Plots of W_qk scores. They need matplotlib: `pip install "hf_symqk[plots]"`."""

import os
from typing import TYPE_CHECKING, Any

import pandas as pd

from .history import read_history


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["plot_history"]

_LABELS = {"symmetry": "symmetry score", "directionality": "directionality score", "frobenius_norm": "Frobenius norm"}


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
        if metric not in _LABELS:
            raise ValueError(f"`metrics` must be among {', '.join(map(repr, _LABELS))}, got {metric!r}.")
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
    if metric != "frobenius_norm":
        ax.axhline(0, color="grey", linewidth=0.6)
    ax.set_xlabel("step")
    ax.set_ylabel(_LABELS[metric])
    ax.legend(fontsize="x-small", ncols=1 + values.shape[1] // 8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _viridis(shade: float) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](shade)


def _draw_heat_map(ax: "Axes", values: pd.DataFrame, metric: str) -> None:
    # Scores have a sign and a bound, so the colours are fixed and 0 is white; a norm has neither.
    bounded = metric != "frobenius_norm"
    scale: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if bounded else {"cmap": "viridis"}
    image = ax.imshow(values.T, aspect="auto", origin="lower", interpolation="nearest", **scale)
    # Steps are categories here: measurements need not lie evenly (the last one often does not).
    shown = range(0, len(values), max(1, -(-len(values) // 6)))
    ax.set_xticks(list(shown), [str(values.index[position]) for position in shown])
    every = range(0, values.shape[1], max(1, -(-values.shape[1] // 12)))
    ax.set_yticks(list(every), [str(values.columns[position]) for position in every])
    ax.set_xlabel("step")
    ax.set_ylabel("layer")
    ax.figure.colorbar(image, ax=ax, label=_LABELS[metric])
