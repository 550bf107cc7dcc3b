"""Tables and their notes as text, JSON, CSV, Markdown and LaTeX: what the command prints and comparisons write."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pandas as pd


__all__ = ["Cell", "Column", "Format", "Report", "plain_cells", "render", "text_below"]

Cell = str | int | float | tuple[float, ...] | None


class Format(str, Enum):
    """Formats of a report; the values are the options that ask for them."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"


@dataclass(frozen=True)
class Column:
    """
    A column of the table that people read.

    Attributes:
        title (`str`): Heading; a line break in it is kept only on a terminal.
        cells (`Sequence`): Text, numbers, ranges `(low, high)`, or `None` and `()` for nothing.
        form (`Callable[[Any], str]`, *optional*): How one number is written; `None` for a column of text.
    """

    title: str
    cells: Sequence[Cell]
    form: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Report:
    """
    Attributes:
        columns (`tuple[Column, ...]`): The table as text, Markdown and LaTeX show it.
        data (`pandas.DataFrame`): The same with full precision, for CSV.
        document (`Any`): Plain values, for JSON.
        notes (`tuple[str, ...]`): Lines below the table.
        left_out (`tuple[str, ...]`): Lines on what the table does not show and should not hide: below the table, or on
            stderr where the format has no room for them.
        title (`str`): Line above the table, empty for none.
    """

    columns: tuple[Column, ...]
    data: pd.DataFrame
    document: Any
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    title: str = ""


def render(report: Report, form: Format) -> str:
    """
    Writes out a report.

    Args:
        report ([`Report`]): The report.
        form ([`Format`]): Its format.

    Returns:
        `str`: Ends with a line break. CSV holds neither title nor notes.
    """
    return _RENDERERS[form](report)


def text_below(report: Report) -> list[str]:
    """Lines below a table of text: a blank one, the notes, and what is left out."""
    lines = [*report.notes, *report.left_out]
    return ["", *lines] if lines else []


def _text(report: Report) -> str:
    """In a pipe or a file: aligned columns as wide as they have to be, no wrapping."""
    columns = []
    for column in report.columns:
        cells = [_title(column), *plain_cells(column)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if column.form else cell.ljust(width) for cell in cells])
    table = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return _lines([*_titled(report.title), *table, *text_below(report)])


def _json(report: Report) -> str:
    return json.dumps(report.document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(report: Report) -> str:
    # NaN is a score that does not exist; what is not known, or has no head, is blank.
    data = report.data.apply(lambda values: values if values.dtype.kind == "f" else values.astype("string").fillna(""))
    return data.to_csv(index=False, na_rep="nan", lineterminator="\n")


def _markdown(report: Report) -> str:
    cells = [
        [cell.replace("|", "\\|") for cell in (_title(column), *plain_cells(column))] for column in report.columns
    ]
    rows = [f"| {' | '.join(row)} |" for row in zip(*cells, strict=True)]
    rule = f"| {' | '.join('---:' if column.form else '---' for column in report.columns)} |"
    below = [part for line in (*report.notes, *report.left_out) for part in ("", line.strip())]
    return _lines([*_titled(f"**{report.title}**" if report.title else ""), rows[0], rule, *rows[1:], *below])


def _latex(report: Report) -> str:
    table = pd.DataFrame({number: _latex_cells(column) for number, column in enumerate(report.columns)})
    table.columns = pd.Index([_latex_escaped(_title(column)) for column in report.columns])
    style = table.style.hide(axis="index")
    alignment = "".join("r" if column.form else "l" for column in report.columns)
    # Notes are comments, so that the file can be taken in by \input as it is.
    below = [f"% {line.strip()}" for line in (*report.notes, *report.left_out)]
    above = [f"% {report.title}"] if report.title else []
    return _lines(above) + style.to_latex(hrules=True, column_format=alignment) + _lines(below)


_RENDERERS = {
    Format.TEXT: _text,
    Format.JSON: _json,
    Format.CSV: _csv,
    Format.MARKDOWN: _markdown,
    Format.LATEX: _latex,
}


def _titled(title: str) -> list[str]:
    return [title, ""] if title else []


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _title(column: Column) -> str:
    return column.title.replace("\n", " ")


def plain_cells(column: Column) -> list[str]:
    """The cells of a column as text."""
    return ["…".join(written) for written in _written(column)]


def _latex_cells(column: Column) -> list[str]:
    if column.form is None:
        return [_latex_escaped(cell) for cell in plain_cells(column)]
    # A minus is one only in mathematics; between two dashes stands what the text has as an ellipsis.
    return [
        "--".join(_latex_escaped(number).replace("-", "$-$") for number in written) for written in _written(column)
    ]


def _written(column: Column) -> list[list[str]]:
    """The strings in each cell: one, or the two ends of a range."""
    form = column.form or str
    cells = [() if cell is None else cell if isinstance(cell, tuple) else (cell,) for cell in column.cells]
    return [[form(value) for value in values] for values in cells]


def _latex_escaped(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)


_LATEX_SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}
