"""`--plot`: which of the plots is drawn, and where to. They need matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import typer

from .. import plots
from ..scores import QKScores


if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["check_picture", "draw_model", "draw_models", "draw_run"]

_METRICS = ("symmetry", "directionality")


def check_picture(path: Path | None) -> None:
    """
    Refuses, before any work is done, a picture that could not be drawn after it.

    Args:
        path (`Path` or `None`): `--plot`.

    Raises:
        ImportError: if matplotlib is not installed.
        typer.BadParameter: if the suffix is of no kind of picture.
    """
    if path is None:
        return
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('--plot needs matplotlib; install it with `pip install "hf_symqk[plots]"`.') from error
    matplotlib.use("agg")  # files only: no display is needed
    kinds = _figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in kinds:
        raise typer.BadParameter(
            f"the suffix of {str(path)!r} is of no picture that can be drawn; use .png, .pdf or .svg.",
            param_hint="--plot",
        )


def draw_model(scores: QKScores, path: Path, *, heads: bool) -> None:
    """
    Draws the layers of one model, symmetry beside directionality; below them its heads, a row a stack.

    Args:
        scores ([`QKScores`]): Scores of the model.
        path (`Path`): Picture to write.
        heads (`bool`): Adds the heat maps of heads.
    """
    rows: list[tuple[Callable[..., Any], str | None]] = [(plots.plot_layers, None)]
    if heads:
        rows += [(plots.plot_heads, stack) for stack in scores.stacks]
    figure = _figure(len(rows), len(_METRICS))
    axes = figure.subplots(len(rows), len(_METRICS), squeeze=False)
    for (draw, stack), row in zip(rows, axes, strict=True):
        for metric, ax in zip(_METRICS, row, strict=True):
            draw(scores, metric=metric, stack=stack, ax=ax)
    figure.savefig(path)


def draw_models(table: pd.DataFrame, path: Path) -> None:
    """
    Draws several models, symmetry beside directionality.

    Args:
        table (`pandas.DataFrame`): What [`models_table`] returned.
        path (`Path`): Picture to write.
    """
    figure = _figure(1, len(_METRICS))
    for metric, ax in zip(_METRICS, figure.subplots(1, len(_METRICS)), strict=True):
        plots.plot_models(table, metric=metric, ax=ax)
    figure.savefig(path)


def draw_run(history: pd.DataFrame, path: Path) -> None:
    """
    Draws a training run.

    Args:
        history (`pandas.DataFrame`): What [`history_table`] returned.
        path (`Path`): Picture to write.
    """
    plots.plot_history(history, metrics=_METRICS, stack=None).savefig(path)


def _figure(rows: int, columns: int) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(5.4 * columns, 4.2 * rows), layout="constrained")
