"""Plots: what is drawn is what the history holds. (The pictures themselves were looked at.)"""

import numpy as np
import pandas as pd
import pytest

from hf_symqk.history import COLUMNS, ScoreHistory
from hf_symqk.plots import plot_history


matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def no_window():
    """Figures are drawn without a display, and closed."""
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


@pytest.fixture
def history() -> pd.DataFrame:
    """Two stacks of two and three layers over four steps, with a row per head that must not be drawn."""
    rows = [
        (step, stack, layer, head, 1 - step / 100 - layer / 10, -layer / 10, 1.0 + layer)
        for step in (0, 10, 20, 25)
        for stack, depth in (("encoder", 2), ("decoder", 3))
        for layer in range(depth)
        for head in (pd.NA, 0)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"head": "Int64"})


def test_lines_and_heat_map_hold_the_scores(history):
    """Lines with median and band on the left, layers × steps on the right, a row per stack and metric."""
    figure = plot_history(history)
    axes = [axis for axis in figure.axes if axis.get_xlabel() == "step"]
    assert len(axes) == 8
    left, right = axes[2], axes[3]  # encoder, directionality
    assert left.get_title() == "encoder"
    assert left.get_ylabel() == "directionality score"
    lines = {line.get_label(): line.get_ydata() for line in left.get_lines()}
    assert np.allclose(lines["layer 1"], -0.1)
    assert np.allclose(lines["median"], -0.05)
    assert len(left.collections) == 1, "the quartile band"
    image = right.get_images()[0].get_array()
    assert image.shape == (2, 4)
    assert np.allclose(image[1], -0.1)
    assert [label.get_text() for label in right.get_xticklabels()] == ["0", "10", "20", "25"]


def test_choices(history, tmp_path):
    """Stack and metrics choose; the output folder of a run will do; what is not there is one clear error."""
    figure = plot_history(history, stack="decoder", metrics=("frobenius_norm",))
    assert [axis.get_title() for axis in figure.axes if axis.get_xlabel() == "step"] == ["decoder", "decoder"]
    with pytest.raises(ValueError, match="`metrics` must be among 'symmetry'"):
        plot_history(history, metrics=("skewness",))
    with pytest.raises(
        ValueError, match=r"No stack named 'tower' in this history; there are \['encoder', 'decoder'\]"
    ):
        plot_history(history, stack="tower")
    ScoreHistory(tmp_path / "qk_scores.csv", resumed_step=0)
    with pytest.raises(ValueError, match="no rows yet"):
        plot_history(tmp_path)
    with pytest.raises(FileNotFoundError):
        plot_history(tmp_path / "elsewhere.csv")
