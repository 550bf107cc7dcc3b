"""One table and its notes, in every format the command writes, to where the options say."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._rendering import Cell, Column, Format, Report, plain_cells, render, text_below
from .messages import say


__all__ = ["Cell", "Column", "Format", "Report", "check_writable", "choose_format", "write_report"]

_GAP = 2  # between columns, one of them the (blank) rule of the box
_SUFFIXES = {
    ".txt": Format.TEXT,
    ".json": Format.JSON,
    ".csv": Format.CSV,
    ".md": Format.MARKDOWN,
    ".markdown": Format.MARKDOWN,
    ".tex": Format.LATEX,
}


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
    text = render(report, form)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        output.write_text(text, encoding="utf-8", newline="\n")


def _print_table(report: Report) -> None:
    """On a terminal: a rule below the heading, text folded between words; numbers and names are kept whole."""
    console = Console(highlight=False)
    widths = _fold([[column.title, *plain_cells(column)] for column in report.columns], report.columns, console.width)
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
    for row in zip(*(plain_cells(column) for column in report.columns), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    if report.title:
        console.print(Text(report.title, style="bold"), soft_wrap=True)
        console.print()
    console.print(table)
    for line in text_below(report):
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
