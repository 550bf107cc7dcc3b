"""A comparison as a picture: curves of loss with bands over seeds, and the scores of W_qk below them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .results import Comparison
from .runs import HELD_OUT, TRAIN, Run, is_score


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["draw_comparison"]

# Okabe and Ito's colours, ordered so that neighbours differ in lightness as well; dashes tell them apart in grey.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-"},
    {"color": "#D55E00", "linestyle": "--"},
    {"color": "#0072B2", "linestyle": "-."},
    {"color": "#56B4E9", "linestyle": (0, (1, 1))},
    {"color": "#009E73", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#CC79A7", "linestyle": (0, (8, 2))},
)
# Bands of more arms than this cover each other: then only the baseline has one.
_MOST_BANDS = 5
_LABELS = {TRAIN: "training loss", HELD_OUT: "held-out loss"}
_MOST_COLUMNS = 3
# Inches that an entry of the legend takes beside its text, and for each character of it.
_LEGEND_LINE, _LEGEND_CHARACTER = 0.9, 0.085
# The first points of a curve are far above all that matters; the axis begins where this share of the steps is done.
_SHOWN_FROM = 0.05


def draw_comparison(comparison: Comparison) -> Figure:
    """
    Draws the runs of a comparison, each arm at its own best rate. A line is the mean over seeds, a band goes from the
    lowest to the highest (of many arms, only the baseline has one), a dotted line is what the baseline ends at. Axes of
    loss leave out the first steps, where it falls from its start.

    Args:
        comparison ([`Comparison`]): What [`compare_runs`] returned.

    Returns:
        `matplotlib.figure.Figure`: Save it with `figure.savefig(...)`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Figures need matplotlib; install it with `pip install "hf_symqk[plots]"`.') from error
    panels = _panels(comparison)
    # Of one setting, losses stand beside each other and scores below them; of many, each has a panel.
    losses = sum(key in _LABELS for _, key in panels)
    columns = min(_MOST_COLUMNS, len(panels)) if _many_groups(comparison) else losses
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 3.0 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    arms = _arms(comparison)
    styles = {arm: _style(number) for number, arm in enumerate(arms)}
    for ax, (group, key) in zip(axes, panels, strict=False):
        runs = [run for run in _best_runs(comparison) if run.group == group]
        _draw(ax, runs, key, comparison.baseline, styles)
        ax.set_title(group, fontsize="medium")
    for ax in axes[len(panels) :]:
        ax.remove()
    named: dict[str, Any] = {}
    for ax in axes[: len(panels)]:
        named |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    labels, handles = list(named), list(named.values())
    width = _LEGEND_LINE + _LEGEND_CHARACTER * max(map(len, labels))
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": max(1, int(figure.get_figwidth() / width))}
    figure.legend(handles, labels, frameon=False, handlelength=4, **place)
    return figure


def _style(number: int) -> dict[str, Any]:
    """Once the styles are through, the colours come again with the dashes of others; the baseline's stay its own."""
    if number < len(_STYLES):
        return _STYLES[number]
    others = len(_STYLES) - 1
    again, place = divmod(number - 1, others)
    return {**_STYLES[1 + place], "linestyle": _STYLES[1 + (place + again) % others]["linestyle"]}


def _many_groups(comparison: Comparison) -> bool:
    return len({run.group for run in comparison.runs}) > 1


def _arms(comparison: Comparison) -> list[str]:
    """The baseline first: it has the plainest line."""
    arms = dict.fromkeys(run.arm for run in comparison.runs)
    return sorted(arms, key=lambda arm: arm != comparison.baseline)


def _best_runs(comparison: Comparison) -> list[Run]:
    best = {(one.group, one.arm, one.learning_rate) for one in comparison.arms if one.best}
    return [run for run in comparison.runs if (run.group, run.arm, run.learning_rate) in best]


def _panels(comparison: Comparison) -> list[tuple[str, str]]:
    panels = []
    for group in dict.fromkeys(run.group for run in comparison.runs):
        keys = dict.fromkeys(key for run in comparison.runs if run.group == group for key in run.curves)
        losses = [key for key in (TRAIN, HELD_OUT) if key in keys]
        panels += [(group, key) for key in losses]
        panels += [(group, key) for key in sorted((key for key in keys if is_score(key)), key=_score_order)]
    return panels


def _score_order(key: str) -> tuple[str, bool]:
    return key.partition("/")[2].rpartition("/symmetry")[0], "symmetry" not in key


def _draw(ax: Axes, runs: Sequence[Run], key: str, baseline: str, styles: dict[str, dict[str, Any]]) -> None:
    shown = []
    for arm, style in styles.items():
        curves = [run.curves[key] for run in runs if run.arm == arm and key in run.curves]
        if not curves:
            continue
        table = pd.concat(curves, axis=1)
        rate = next(run.learning_rate for run in runs if run.arm == arm)
        label = arm if rate is None or len({run.learning_rate for run in runs}) == 1 else f"{arm} (rate {rate:g})"
        mean = table.mean(axis=1)
        ax.plot(mean.index, mean, label=label, linewidth=1.4, **style)
        if len(curves) > 1 and (len(styles) <= _MOST_BANDS or arm == baseline):
            ax.fill_between(
                table.index, table.min(axis=1), table.max(axis=1), color=style["color"], alpha=0.18, linewidth=0
            )
        shown.append(table)
        if arm == baseline and key in _LABELS:
            ax.axhline(mean.iloc[-1], color="0.4", linewidth=0.9, linestyle=":")
    ax.set_xlabel("step")
    ax.locator_params(axis="x", nbins=5)
    if key in _LABELS:
        ax.set_ylabel(_LABELS[key])
        _limit(ax, pd.concat(shown, axis=1))
    else:
        ax.set_ylabel(f"{key.removeprefix('qk/').removesuffix('/median').replace('/', ' ')}, median")
        ax.axhline(0, color="grey", linewidth=0.6)
        ax.set_ylim(-1.05, 1.05)


def _limit(ax: Axes, table: pd.DataFrame) -> None:
    late = table[table.index >= _SHOWN_FROM * table.index[-1]]
    values = late.to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    if len(values) and values.max() > values.min():
        room = 0.04 * (values.max() - values.min())
        ax.set_ylim(values.min() - room, values.max() + room)
