"""One table and its notes, in every format the command writes."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .messages import say


__all__ = ["Cell", "Column", "Format", "Report", "check_writable", "choose_format", "write_report"]

_GAP = 2  # between columns, one of them the (blank) rule of the box
Cell = str | int | float | tuple[float, ...] | None


class Format(str, Enum):
    """Formats of a report; the values are the options that ask for them."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"


_SUFFIXES = {
    ".txt": Format.TEXT,
    ".json": Format.JSON,
    ".csv": Format.CSV,
    ".md": Format.MARKDOWN,
    ".markdown": Format.MARKDOWN,
    ".tex": Format.LATEX,
}


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
    """

    columns: tuple[Column, ...]
    data: pd.DataFrame
    document: Any
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def choose_format(asked: dict[Format, bool], output: Path | None) -> Format:
    """
    The format that the options ask for.

    Args:
        asked (`dict[Format, bool]`): Which of the options were given.
        output (`Path` or `None`): `--output`, whose suffix decides where no option does.

    Returns:
        [`Format`]

    Raises:
        typer.BadParameter: for several formats at once, or a suffix that is none.
    """
    options = [form for form, given in asked.items() if given]
    if len(options) > 1:
        names = " and ".join(f"--{form.value}" for form in options)
        raise typer.BadParameter("these exclude each other; give one.", param_hint=names)
    if options:
        return options[0]
    if output is None:
        return Format.TEXT
    if output.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter(
            f"the suffix of {str(output)!r} is not one of {', '.join(_SUFFIXES)}; use one of them or add --json, "
            "--csv, --markdown or --latex.",
            param_hint="--output",
        )
    return _SUFFIXES[output.suffix.lower()]


def check_writable(path: Path | None, option: str) -> None:
    """
    Refuses, before any work is done, a file that could not be written after it.

    Args:
        path (`Path` or `None`): The file.
        option (`str`): The option that names it.

    Raises:
        typer.BadParameter: if it is a folder, or its folder does not exist.
    """
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a folder; name a file.", param_hint=option)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {str(path.parent)!r} does not exist.", param_hint=option)


def write_report(report: Report, form: Format, output: Path | None = None) -> None:
    """
    Writes a report to stdout or to a file.

    Args:
        report ([`Report`]): The report.
        form ([`Format`]): Its format.
        output (`Path`, *optional*): The file; stdout by default.
    """
    if form is Format.CSV:
        for line in report.left_out:
            say(line)
    if form is Format.TEXT and output is None and Console().is_terminal:
        _print_table(report)
        return
    text = _RENDERERS[form](report)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        output.write_text(text, encoding="utf-8", newline="\n")


def _print_table(report: Report) -> None:
    """On a terminal: a rule below the heading, text folded between words; numbers and names are kept whole."""
    console = Console(highlight=False)
    widths = _fold([[column.title, *_plain(column)] for column in report.columns], report.columns, console.width)
    # On a narrow terminal lines run over rather than that digits are cut off.
    console.width = max(console.width, sum(widths))
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, _GAP - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for column, width in zip(report.columns, widths, strict=True):
        table.add_column(Text(column.title), justify="right" if column.form else "left", width=width - _GAP)
    for row in zip(*(_plain(column) for column in report.columns), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for line in _below(report):
        console.print(Text(line), soft_wrap=True)


def _fold(cells: list[list[str]], columns: Sequence[Column], limit: int) -> list[int]:
    """Widths of columns and the gap after each: as wide as they are, text folded where that is beyond the limit."""
    lines = [[line for cell in column for line in cell.split("\n")] for column in cells]
    widths = [_GAP + max(map(len, column)) for column in lines]
    words = [[word for line in column for word in line.split()] for column in lines]
    narrowest = [_GAP + max(map(len, column), default=0) for column in words]
    foldable = [number for number, column in enumerate(columns) if column.form is None]
    while sum(widths) > limit:
        wide = [number for number in foldable if widths[number] > narrowest[number]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _below(report: Report) -> list[str]:
    lines = [*report.notes, *report.left_out]
    return ["", *lines] if lines else []


def _text(report: Report) -> str:
    """In a pipe or a file: aligned columns as wide as they have to be, no wrapping."""
    columns = []
    for column in report.columns:
        cells = [_title(column), *_plain(column)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if column.form else cell.ljust(width) for cell in cells])
    table = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return _lines([*table, *_below(report)])


def _json(report: Report) -> str:
    return json.dumps(report.document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(report: Report) -> str:
    # NaN is a score that does not exist; what is not known, or has no head, is blank.
    data = report.data.apply(lambda values: values if values.dtype.kind == "f" else values.astype("string").fillna(""))
    return data.to_csv(index=False, na_rep="nan", lineterminator="\n")


def _markdown(report: Report) -> str:
    cells = [[cell.replace("|", "\\|") for cell in (_title(column), *_plain(column))] for column in report.columns]
    rows = [f"| {' | '.join(row)} |" for row in zip(*cells, strict=True)]
    rule = f"| {' | '.join('---:' if column.form else '---' for column in report.columns)} |"
    below = [part for line in (*report.notes, *report.left_out) for part in ("", line.strip())]
    return _lines([rows[0], rule, *rows[1:], *below])


def _latex(report: Report) -> str:
    table = pd.DataFrame({column.title: _latex_cells(column) for column in report.columns})
    table.columns = pd.Index([_latex_escaped(_title(column)) for column in report.columns])
    style = table.style.hide(axis="index")
    alignment = "".join("r" if column.form else "l" for column in report.columns)
    # Notes are comments, so that the file can be taken in by \input as it is.
    below = [f"% {line.strip()}" for line in (*report.notes, *report.left_out)]
    return style.to_latex(hrules=True, column_format=alignment) + _lines(below)


_RENDERERS = {
    Format.TEXT: _text,
    Format.JSON: _json,
    Format.CSV: _csv,
    Format.MARKDOWN: _markdown,
    Format.LATEX: _latex,
}


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _title(column: Column) -> str:
    return column.title.replace("\n", " ")


def _plain(column: Column) -> list[str]:
    return ["…".join(written) for written in _written(column)]


def _latex_cells(column: Column) -> list[str]:
    if column.form is None:
        return [_latex_escaped(cell) for cell in _plain(column)]
    # A minus is one only in mathematics; between two dashes stands what the text has as an ellipsis.
    return ["--".join(number.replace("-", "$-$") for number in written) for written in _written(column)]


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
