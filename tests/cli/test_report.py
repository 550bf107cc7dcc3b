"""Reports on a terminal: numbers and names are whole however narrow it is."""

import pandas as pd
import pytest

from hf_symqk.cli.report import Column, Format, Report, write_report


REPORT = Report(
    (
        Column("a name", ["of several words", "model.layers.0.self_attn"]),
        Column("symmetry\nnull 95 %", [(-0.5, 0.25), ()], "{:.3f}".format),
        Column("heads", [16, None], str),
    ),
    pd.DataFrame(),
    None,
    notes=("a note that is longer than the narrowest of terminals",),
)


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_terminal(monkeypatch, capsys, columns):
    """Text folds between words, nothing is cut off, headings take two lines, and a rule is drawn below them."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich recognises a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    write_report(REPORT, Format.TEXT)
    out = capsys.readouterr().out
    assert "model.layers.0.self_attn  " in out
    assert "-0.500…0.250     16" in out
    assert "a note that is longer than the narrowest of terminals\n" in out
    assert "symmetry null" not in out
    assert "───" in out


def test_pipe(monkeypatch, capsys):
    """Lines are as long as they have to be and end with their last letter; headings are one line."""
    monkeypatch.setenv("COLUMNS", "20")
    write_report(REPORT, Format.TEXT)
    assert capsys.readouterr().out == (
        "a name                    symmetry null 95 %  heads\n"
        "of several words                -0.500…0.250     16\n"
        "model.layers.0.self_attn\n"
        "\n"
        "a note that is longer than the narrowest of terminals\n"
    )
