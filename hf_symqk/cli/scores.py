"""`symqk scores`: the scores of checkpoints."""

import math
from pathlib import Path
from typing import Annotated

import typer

from ..attention import AttentionKind
from ..checkpoint import score_checkpoint
from ..scores import QKScores
from .messages import failed, warnings_in_one_line, working
from .options import DebugOption, RevisionOption, SubfolderOption, TokenOption, parse_layers
from .pictures import check_picture, draw_model, draw_models, draw_run
from .report import Format, check_writable, choose_format, write_report
from .tables import history_table, model_report, models_report, models_table, run_report
from .targets import Target, find_targets


__all__ = ["EXAMPLES", "scores"]

EXAMPLES = """
[bold]Examples[/bold]
The layers of one model: [cyan]symqk scores google-bert/bert-base-uncased[/cyan]
Its heads, to a file: [cyan]symqk scores out --heads --output heads.csv[/cyan]
Several, as a LaTeX table: [cyan]symqk scores gpt2 out/a out/b --latex[/cyan]
A run, with its plot: [cyan]symqk scores out/checkpoint-* --plot run.png[/cyan]
A run on the Hub: [cyan]symqk scores EleutherAI/pythia-70m --revisions step0,step512[/cyan]
"""

_OUTPUT = "Output"


def scores(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Folders, weight files or Hub repositories.", show_default=False),
    ],
    heads: Annotated[bool, typer.Option("--heads", help="One row per head.")] = False,
    layers: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="Only these: 0,1,2 or 0-5, per stack encoder:0,1;decoder:2."),
    ] = None,
    attention: Annotated[
        AttentionKind,
        typer.Option(metavar="KIND", help="self, cross, all, encoder, decoder, bidirectional or causal."),
    ] = "self",
    gamma: Annotated[
        float, typer.Option(metavar="NUMBER", help="Row norms count beyond mean + gamma * std (directionality).")
    ] = 2.0,
    spectral: Annotated[
        bool, typer.Option("--spectral", help="Score eigenvalues and singular values too (slow for wide layers).")
    ] = False,
    revision: RevisionOption = None,
    revisions: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Revisions of one MODEL that are steps of its training: step1000,step2000."
        ),
    ] = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, as QKScores reads it.", rich_help_panel=_OUTPUT)
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV, with full precision.", rich_help_panel=_OUTPUT)
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table.", rich_help_panel=_OUTPUT)
    ] = False,
    as_latex: Annotated[
        bool, typer.Option("--latex", help="Print a LaTeX table (booktabs).", rich_help_panel=_OUTPUT)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write there instead; .json, .csv, .md, .tex and .txt say the format.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the scores too: .png, .pdf or .svg.", rich_help_panel=_OUTPUT),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """
    Print the W_qk scores of checkpoints.

    Only the Q and K weights are read. One MODEL gives its layers, several give one row each: median and quartiles over
    layers. The checkpoint-* folders of one training run, or the folder that holds them, give one row per step. Beside
    each score of a layer stands the null band: where independent Gaussian W_q and W_k of its shape would score in 95 %
    of draws.

    Exit status: 0, 1 if a MODEL failed (the others are printed), 2 for options that cannot be meant.
    """
    form = choose_format(
        {Format.JSON: as_json, Format.CSV: as_csv, Format.MARKDOWN: as_markdown, Format.LATEX: as_latex}, output
    )
    check_writable(output, "--output")
    check_writable(plot, "--plot")
    check_picture(plot)
    choice = parse_layers(layers)
    if not math.isfinite(gamma):
        raise typer.BadParameter(f"{gamma} is not a finite number.", param_hint="--gamma")
    targets = find_targets(models, revision=revision, revisions=revisions)
    one = targets.run is None and len(targets.checkpoints) == 1
    # Bands take as long as the scores, and tables of models and of steps have no room for them.
    null_band = one or form is Format.JSON
    scored: list[tuple[Target, QKScores]] = []
    for number, target in enumerate(targets.checkpoints, 1):
        try:
            with (
                working(f"{target.name} ({number} of {len(targets.checkpoints)})"),
                warnings_in_one_line(target.name),
            ):
                measured = score_checkpoint(
                    target.model,
                    revision=target.revision,
                    subfolder=subfolder,
                    token=token or None,
                    layers=choice,
                    attention=attention,
                    heads=heads,
                    gamma=gamma,
                    null_band=null_band,
                    spectral=spectral,
                )
            scored.append((target, measured))
        except Exception as error:
            failed(error, about=target.name, debug=debug)
    if scored:
        if targets.run is not None:
            report = run_report(scored, heads=heads)
        elif one:
            report = model_report(scored[0][1], heads=heads)
        else:
            report = models_report(scored, heads=heads)
        write_report(report, form, output)
        if plot is not None:
            with warnings_in_one_line("--plot"):
                if targets.run is not None:
                    draw_run(history_table(scored), plot)
                elif one:
                    draw_model(scored[0][1], plot, heads=heads)
                else:
                    draw_models(models_table(scored), plot)
    if len(scored) < len(targets.checkpoints):
        raise typer.Exit(1)
