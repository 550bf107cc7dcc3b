"""The tables in their formats, and the figure."""

import io
import json

import pandas as pd
import pytest

from hf_symqk._rendering import Format, render
from hf_symqk.comparison import compare_runs
from hf_symqk.comparison.documents import to_document
from hf_symqk.comparison.figure import _style, draw_comparison
from hf_symqk.comparison.tables import make_tables
from hf_symqk.comparison.writing import write_comparison

from .making import write_pairs


PLAIN = [3.50, 3.60, 3.45]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = write_pairs(tmp_path_factory.mktemp("runs"), {"none": PLAIN, "symmetric": [3.4, 3.7, 3.2]})
    return compare_runs([folder])


def test_markdown(comparison):
    """Means with their intervals, differences with a sign, and the verdict in words. By hand: differences of -0.1, 0.1
    and -0.25 have a standard error of 0.1014, times 4.303; six of the eight sums are at least 0.25 from 0."""
    tables = make_tables(comparison)
    text = render(tables["differences"], Format.MARKDOWN)
    assert text.splitlines()[:2] == ["**Differences, treated minus baseline**", ""]
    assert text.splitlines()[4] == (
        "| symmetric | none | 3 | -0.083 | -0.520…+0.353 | -0.083 | -0.520…+0.353 | 0.750 | 0.750 | 0.250 "
        "| no evidence of a difference |"
    )
    final = render(tables["final_loss"], Format.MARKDOWN)
    assert "| none | 0.001 | 3 | 3.617 | 3.427…3.806 | 3.517 | 3.327…3.706 | 5.200 |" in final


def test_notes_stand_below_the_last_of_the_own_tables(comparison):
    """Once, and above the paper's table."""
    tables = make_tables(comparison)
    assert list(tables) == ["final_loss", "differences", "speed_up", "published"]
    assert set(comparison.notes) <= set(tables["speed_up"].notes)
    assert not set(comparison.notes) & {*tables["differences"].notes, *tables["published"].notes}


def test_latex(comparison):
    """One tabular a table, with all its columns: two of one heading are two; special characters are escaped."""
    text = render(make_tables(comparison)["speed_up"], Format.LATEX)
    lines = text.splitlines()
    assert lines[0] == "% Speed-up"
    head = next(line for line in lines if line.startswith("treated"))
    assert head.count("its null &") == 2
    row = next(line for line in lines if line.startswith("symmetric"))
    assert row.count("&") == head.count("&")
    assert r"\%" in row
    assert not any("%" in line.replace(r"\%", "") for line in lines if not line.startswith("%"))


def test_csv_has_full_precision(comparison):
    """A row a contrast, with numbers that can be computed with."""
    table = pd.read_csv(io.StringIO(render(make_tables(comparison)["differences"], Format.CSV)))
    assert table["held_out_difference_mean"][0] == pytest.approx(-0.25 / 3, abs=1e-12)
    found = table.loc[0, ["treated", "baseline", "seeds", "tested"]].tolist()
    assert found == ["symmetric", "none", 3, "held-out loss"]


def test_document(comparison):
    """JSON values only, with each seed's own figures."""
    document = json.loads(json.dumps(to_document(comparison), allow_nan=False))
    (contrast,) = document["contrasts"]
    assert contrast["held_out_difference"]["values"] == pytest.approx([-0.1, 0.1, -0.25])
    assert len(contrast["speed_up"]["raw_null"]) == 3
    assert document["arms"][0]["held_out_loss"]["mean"] == pytest.approx(sum(PLAIN) / 3)


def test_diverged_run_in_json_and_tables(tmp_path):
    """NaN is not JSON; in a table it is called what it is."""
    folder = write_pairs(tmp_path, {"none": [3.0, 3.1], "symmetric": [3.0, float("nan")]})
    comparison = compare_runs([folder])
    json.dumps(to_document(comparison), allow_nan=False)
    assert "nan" in render(make_tables(comparison)["differences"], Format.MARKDOWN)


def test_figure(comparison):
    """Losses beside each other, scores below them; a line and a band for each arm, which differ in dash as well."""
    figure = draw_comparison(comparison)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels == ["training loss", "held-out loss", "symmetry, median", "directionality, median"]
    for ax in figure.axes:
        lines = [line for line in ax.lines if not line.get_label().startswith("_")]
        assert [line.get_label() for line in lines] == ["none", "symmetric"]
        assert len({line.get_linestyle() for line in lines}) == 2
        assert len(ax.collections) == 2
    last = figure.axes[1].lines[0].get_ydata()[-1]
    assert last == pytest.approx(sum(PLAIN) / 3)


def test_files(comparison, tmp_path):
    """All of them, in a folder that is made."""
    written = write_comparison(comparison, tmp_path / "new" / "folder")
    names = {path.name for path in written}
    assert names == {
        *(f"comparison.{suffix}" for suffix in ("md", "tex", "json", "png", "pdf")),
        "final_loss.csv",
        "differences.csv",
        "speed_up.csv",
        "published.csv",
    }
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == names
    assert (tmp_path / "new" / "folder" / "comparison.md").read_text().count("| --- |") >= 3
    published = pd.read_csv(tmp_path / "new" / "folder" / "published.csv")
    assert published.iloc[0].tolist() == [4, "Jigsaw", 2.782, 2.758, 26]


def test_every_arm_has_a_line_of_its_own():
    """Also where there are more of them than styles; the baseline's is no other's."""
    styles = [(style["color"], str(style["linestyle"])) for style in map(_style, range(20))]
    assert len(set(styles)) == 20
    assert [color for color, _ in styles].count("black") == 1
