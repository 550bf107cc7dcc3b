"""Plots: what is drawn is what the history and the scores hold. (The pictures themselves were looked at.)"""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hf_symqk.history import COLUMNS, ScoreHistory
from hf_symqk.plots import plot_heads, plot_history, plot_layers, plot_models
from hf_symqk.scores import LayerScores, QKScores


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


# --- scores of models ---------------------------------------------------------------------------------------------


def layer(index: int, stack: str = "", heads: int = 4, **values) -> LayerScores:
    """A layer whose scores tell its index and heads."""
    measured = {"symmetry": index / 10, "directionality": -index / 10, "frobenius_norm": 1.0 + index}
    per_head = {
        f"head_{name}": tuple(value / 2 + head / 100 for head in range(heads)) for name, value in measured.items()
    }
    about = {"kind": "self", "layout": "plain", "num_heads": heads, "num_key_value_heads": heads, "head_dim": 8}
    nulls = {"symmetry_null": (-0.02, 0.03), "directionality_null": (-0.5 - index / 100, 0.4)}
    return LayerScores(f"{stack}.{index}", stack, index, **{**about, **measured, **per_head, **nulls, **values})


@pytest.fixture
def encoder() -> QKScores:
    """Four layers of one stack; the third has no score."""
    spoilt = {"symmetry": math.nan, "head_symmetry": (math.nan,) * 4}
    return QKScores((layer(0), layer(1), layer(2, **spoilt), layer(3)), model_type="bert")


@pytest.fixture
def translator() -> QKScores:
    """Two stacks, the second with cross-attention."""
    layers = [layer(0, "encoder"), layer(1, "encoder"), layer(0, "decoder"), layer(0, "decoder", kind="cross")]
    return QKScores(tuple(layers), model_type="t5")


def legend_of(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_layers_hold_scores_and_null_band(encoder):
    """The line has the scores, with a gap at NaN; the grey band has the edges of each layer's null."""
    ax = plot_layers(encoder, metric="directionality")
    line = next(line for line in ax.get_lines() if line.get_label() == "bert")
    assert line.get_xdata().tolist() == [0, 1, 2, 3]
    assert np.allclose(line.get_ydata(), [0, -0.1, -0.2, -0.3])
    assert legend_of(ax) == ["95 % of independent Gaussian W_q, W_k", "bert"]
    (band,) = ax.collections
    paths = band.get_paths()
    for index, path in enumerate(paths):
        (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
        assert (left, right) == (index - 0.5, index + 0.5)
        assert (low, high) == pytest.approx((-0.5 - index / 100, 0.4))
    assert len(paths) == 4
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "directionality score")
    assert ax.get_ylim() == (-1.05, 1.05)
    gap = plot_layers(encoder).get_lines()[0].get_ydata()
    assert np.isnan(gap).tolist() == [False, False, True, False]


def test_layers_without_null_band_or_bound(encoder):
    """Scores without null bands are drawn without one and without its legend; a norm has neither band nor range."""
    bare = QKScores((layer(0, symmetry_null=()), layer(1, symmetry_null=(math.nan, math.nan))))
    ax = plot_layers(bare)
    assert not ax.collections
    assert legend_of(ax) == ["layers"]
    ax = plot_layers(encoder, metric="frobenius_norm")
    assert not ax.collections
    assert np.allclose(ax.get_lines()[0].get_ydata(), [1, 2, 3, 4])
    assert ax.get_ylim()[1] > 4


def test_layers_of_several_stacks(translator):
    """A line each, apart in dash and marker; one entry for all bands; the stack can be chosen, and where to draw."""
    lines = {line.get_label(): line for line in plot_layers(translator).get_lines()}
    assert {"encoder", "decoder", "decoder cross"} <= lines.keys()
    styles = {
        (lines[name].get_linestyle(), lines[name].get_marker()) for name in ("encoder", "decoder", "decoder cross")
    }
    assert len(styles) == 3
    assert legend_of(plot_layers(translator)).count("95 % of independent Gaussian W_q, W_k") == 1
    given = matplotlib.pyplot.figure().subplots()
    assert plot_layers(translator, stack="encoder", ax=given) is given
    assert "decoder" not in legend_of(given)


def test_heads_hold_scores(encoder):
    """Layers × heads on a fixed scale with 0 in the middle, values in the cells, a cross where there is no score."""
    ax = plot_heads(encoder)
    (image,) = ax.get_images()
    values = image.get_array()
    assert values.shape == (4, 4)
    assert np.allclose(values[3], [0.15, 0.16, 0.17, 0.18])
    assert image.get_clim() == (-1, 1)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")
    texts = [text.get_text() for text in ax.texts]
    assert len(texts) == 12
    assert "0.15" in texts
    (crosses,) = ax.collections
    assert crosses.get_offsets().tolist() == [[head, 2] for head in range(4)]
    assert "−0.15" in [text.get_text() for text in plot_heads(encoder, metric="directionality").texts]  # noqa: RUF001 (a minus)


def test_signs_of_many_heads_are_hatched():
    """Where values have no room, negative heads are hatched: both ends of the scale are equally dark in grey."""
    rows = [tuple((-1) ** (head + index) * 0.5 for head in range(64)) for index in range(30)]
    many = QKScores(tuple(layer(index, heads=64, head_symmetry=row) for index, row in enumerate(rows)))
    ax = plot_heads(many)
    assert not ax.texts
    (hatched,) = ax.collections
    assert hatched.get_hatch()
    centres = {tuple(path.get_extents().get_points().mean(0).astype(int)) for path in hatched.get_paths()}
    assert centres == {(head, index) for index in range(30) for head in range(64) if (head + index) % 2}
    assert legend_of(ax) == ["below −0.05"]  # noqa: RUF001 (a minus sign, as it is drawn)


def test_heads_of_layers_that_differ_in_number():
    """Cells past a layer's last head are empty, not missing."""
    ax = plot_heads(QKScores((layer(0, heads=2), layer(1, heads=3))))
    assert np.ma.getmaskarray(ax.get_images()[0].get_array()).tolist() == [[False, False, True], [False] * 3]
    assert not ax.collections


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"one stack; choose `stack` among \['encoder', 'decoder'\]"),
        ({"stack": "tower"}, r"No stack named 'tower' in these scores; there are \['encoder', 'decoder'\]"),
        ({"stack": "encoder", "metric": "skewness"}, "`metric` must be among 'symmetry'.*got 'skewness'"),
    ],
)
def test_heads_that_cannot_be_drawn(translator, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_heads(translator, **arguments)


def test_heads_that_were_not_scored():
    """The error says how to score them."""
    bare = QKScores((layer(0, head_symmetry=()),))
    with pytest.raises(ValueError, match="no heads; score the model with `heads=True`"):
        plot_heads(bare)


def models_table() -> pd.DataFrame:
    rows = [
        ("a", 1e8, "encoder", 0.4, 0.5, 0.7),
        ("b", 1e9, "decoder", -0.1, 0.0, 0.05),
        ("c", 2e9, "encoder-decoder", 0.1, 0.2, 0.3),
        ("d", 3e9, "encoder", 0.3, 0.4, 0.5),
        ("e", 4e9, None, 0.1, 0.1, 0.1),
    ]
    names = ["model", "parameters", "family", "symmetry_q25", "symmetry_median", "symmetry_q75"]
    return pd.DataFrame(rows, columns=names)


def test_models_hold_medians_and_quartiles():
    """Families apart in colour and in marker, medians with quartile bars against a logarithmic axis."""
    ax = plot_models(models_table())
    assert ax.get_xscale() == "log"
    assert legend_of(ax) == ["encoders", "decoders", "encoder-decoders", "family not known"]
    encoders = ax.containers[0]
    points, _, (bars,) = encoders.lines
    assert points.get_xydata().tolist() == [[1e8, 0.5], [3e9, 0.4]]
    assert np.allclose(bars.get_segments()[0], [[1e8, 0.4], [1e8, 0.7]])
    assert len({container.lines[0].get_color() for container in ax.containers}) == 4
    assert len({container.lines[0].get_marker() for container in ax.containers}) == 4


def test_models_from_scores():
    """QKScores will do: parameters and family are theirs, quartiles those of the summary."""
    models = [
        QKScores((layer(0), layer(2), layer(4)), family="encoder", num_parameters=1000, source="one"),
        QKScores((layer(1),), family="decoder", num_parameters=2000, source="two"),
    ]
    ax = plot_models(models)
    points, _, (bars,) = ax.containers[0].lines
    assert points.get_xydata().tolist() == [[1000, 0.2]]
    assert np.allclose(bars.get_segments()[0], [[1000, 0.1], [1000, 0.3]])


def test_models_left_out_are_named():
    """Without a number of parameters, or a score, a model cannot be placed; without any there is no picture."""
    table = models_table()
    table["parameters"] = table["parameters"].astype("Int64")
    table.loc[1, "parameters"] = pd.NA
    table.loc[2, "symmetry_median"] = math.nan
    with pytest.warns(UserWarning, match=r"without a number of parameters or a symmetry score: b, c\."):
        ax = plot_models(table)
    assert legend_of(ax) == ["encoders", "family not known"]
    with pytest.raises(ValueError, match=r"No model has both .*: b, c"):
        plot_models(table[1:3])
    with pytest.raises(ValueError, match="no rows"):
        plot_models(table[:0])


def test_tables_that_are_not_of_models():
    """What is missing or unknown is named."""
    with pytest.raises(ValueError, match=r"lacks the columns \['directionality_q25'"):
        plot_models(models_table(), metric="directionality")
    with pytest.raises(ValueError, match=r"`family` must be among .* got \['vision'\]"):
        plot_models(models_table().assign(family="vision"))


def test_published_scores_part_encoders_from_decoders():
    """The paper's figure: language encoders are symmetric, decoders are not. (Families with sound values only.)"""
    path = Path(__file__).parents[2] / "shared" / "reference" / "published_scores.json"
    if not path.exists():
        pytest.skip("the published scores (shared/reference beside the repository) are not here")
    families = {"BERT": "encoder", "ROBERTA": "encoder", "ALBERT": "encoder", "GPT": "decoder", "GPT-neo": "decoder"}
    rows = [
        {
            "model": entry["model"],
            "parameters": entry["parameters"],
            "family": families[entry["family"]],
            **dict(
                zip(
                    ("symmetry_q25", "symmetry_median", "symmetry_q75"),
                    np.quantile(entry["symmetry"], [0.25, 0.5, 0.75]),
                    strict=True,
                )
            ),
        }
        for entry in json.loads(path.read_text(encoding="utf-8")).values()
        if entry["family"] in families
    ]
    encoders, decoders = (container.lines[0].get_ydata() for container in plot_models(pd.DataFrame(rows)).containers)
    assert len(encoders) + len(decoders) == len(rows) > 20
    assert np.median(encoders) > 0.4
    assert np.median(decoders) < 0.15
