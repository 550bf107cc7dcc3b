"""`symqk compare`: training runs that differ in how Q and K were initialised."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..comparison import compare_runs
from ..comparison.documents import to_document
from ..comparison.figure import draw_comparison
from ..comparison.tables import make_tables
from ..comparison.writing import write_comparison
from .messages import failed, say
from .options import DebugOption
from .pictures import check_picture
from .report import Format, check_writable, choose_format, write_report


__all__ = ["EXAMPLES", "compare"]

EXAMPLES = """
[bold]Examples[/bold]
The runs of a folder: [cyan]symqk compare out/runs[/cyan]
With tables and figure: [cyan]symqk compare out/none-seed* out/symmetric-seed* --output-dir out/comparison[/cyan]
Curves of a file: [cyan]symqk compare curves.csv --markdown[/cyan]
Two arms only: [cyan]symqk compare out/runs --contrast symmetric:independent[/cyan]
"""

_OUTPUT = "Output"


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Folders of runs, folders that hold such, .csv files of curves.", show_default=False
        ),
    ],
    baseline: Annotated[str, typer.Option(metavar="ARM", help="Arm that the others are compared with.")] = "none",
    contrast: Annotated[
        list[str] | None,
        typer.Option(metavar="TREATED:BASELINE", help="Compare these two only; may be given several times."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Groups arm, seed and rate in the folder's path, as in '(?P<arm>\\w+)/seed(?P<seed>\\d+)'. By "
            "default run.json tells them, else a name like symmetric-seed0-lr1e-3.",
        ),
    ] = None,
    differing: Annotated[
        list[str] | None,
        typer.Option(metavar="ARGUMENT", help="An argument that may differ between arms beside the initialisation."),
    ] = None,
    own_rates: Annotated[
        bool, typer.Option("--own-rates", help="Accept arms that have no learning rate in common.")
    ] = False,
    cut: Annotated[
        bool, typer.Option("--cut", help="Compare runs of unequal length at the steps that all have.")
    ] = False,
    window: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the logged points in the running mean.")
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the differences as CSV, with full precision.", rich_help_panel=_OUTPUT)
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown tables.", rich_help_panel=_OUTPUT)
    ] = False,
    as_latex: Annotated[
        bool, typer.Option("--latex", help="Print LaTeX tables (booktabs).", rich_help_panel=_OUTPUT)
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write tables (.md, .tex, .csv, .json) and the figure (.png, .pdf) there.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curves: .png, .pdf or .svg.", rich_help_panel=_OUTPUT),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """
    Compare training runs that differ in how Q and K were initialised.

    Reads what a run of recipes/ or of any Trainer left (trainer_state.json; run.json tells arm, seed and rate and lets
    the pairing be checked), or a .csv with a column step and a column of losses for each run, named as in small and
    small--symmetric. Prints final losses, paired differences with intervals and a sign-flip test over seeds, other
    held-out metrics that were logged, and speed-ups beside what the noise of the loss alone would give.

    Exit status: 0; 1 if the runs cannot be compared, 2 for options that cannot be meant.
    """
    form = choose_format(
        {Format.JSON: as_json, Format.CSV: as_csv, Format.MARKDOWN: as_markdown, Format.LATEX: as_latex}, None
    )
    _check_outputs(output_dir, plot)
    try:
        comparison = compare_runs(
            runs,
            baseline=baseline,
            contrasts=None if contrast is None else [_pair(text) for text in contrast],
            pattern=pattern,
            differing=differing or (),
            own_rates=own_rates,
            cut=cut,
            window=window,
        )
    except ValueError as error:
        failed(error, debug=debug)
        raise typer.Exit(1) from None
    tables = make_tables(comparison)
    if form is Format.JSON:
        sys.stdout.write(json.dumps(to_document(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    elif form is Format.CSV:
        for line in (*comparison.notes, *(f"left out: {line}" for line in comparison.left_out)):
            say(line)
        write_report(tables["differences"], form)
    else:
        for number, table in enumerate(tables.values()):
            sys.stdout.write("\n" if number else "")
            sys.stdout.flush()
            write_report(table, form)
    if output_dir is not None:
        write_comparison(comparison, output_dir)
    if plot is not None:
        draw_comparison(comparison).savefig(plot, dpi=150)


def _check_outputs(output_dir: Path | None, plot: Path | None) -> None:
    if output_dir is not None:
        if output_dir.exists() and not output_dir.is_dir():
            raise typer.BadParameter(f"{str(output_dir)!r} is a file; name a folder.", param_hint="--output-dir")
        check_picture(output_dir / "comparison.png")
    check_writable(plot, "--plot")
    check_picture(plot)


def _pair(text: str) -> tuple[str, str]:
    treated, colon, base = text.partition(":")
    if not (colon and treated and base):
        raise typer.BadParameter(f"{text!r} is no pair; write 'symmetric:none'.", param_hint="--contrast")
    return treated, base
