"""The command itself: its subcommands, its version, and how it ends."""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

from . import architectures, compare, layouts, scores
from .messages import failed, say


__all__ = ["app", "main"]

_EXAMPLES = """
[bold]Examples[/bold]
The scores of one model: [cyan]symqk scores google-bert/bert-base-uncased[/cyan]
Of a training run, drawn: [cyan]symqk scores out/checkpoint-* --plot run.png[/cyan]
Training runs against each other: [cyan]symqk compare out/runs[/cyan]
Where Q and K were found: [cyan]symqk layouts out[/cyan]
"""

app = typer.Typer(
    name="symqk", add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, epilog=_EXAMPLES
)


def _add(command: Callable[..., None], examples: str) -> None:
    # Line breaks inside the paragraphs of a docstring are those of the source, not of the reader's terminal.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs), epilog=examples)(command)


_add(scores.scores, scores.EXAMPLES)
_add(compare.compare, compare.EXAMPLES)
_add(layouts.layouts, layouts.EXAMPLES)
_add(architectures.architectures, architectures.EXAMPLES)


def _print_version(asked: bool) -> None:
    if asked:
        try:
            print(version("hf_symqk"))
        except PackageNotFoundError:
            print("unknown (hf_symqk is not installed)")
        raise typer.Exit


@app.callback()
def symqk(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """
    Scores of W_qk = W_q W_k^T of checkpoints in folders and on the Hugging Face Hub; training runs against each other.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Runs the command.

    Args:
        arguments (`Sequence[str]`, *optional*): Arguments; those of the process by default.

    Returns:
        `int`: Exit status: 0; 1 when something failed; 2 for usage; 130 when interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not are_progress_bars_disabled():
        disable_progress_bars()  # one of our own says what is read, on terminals only
    try:
        return app(arguments, prog_name="symqk", standalone_mode=False) or 0
    except typer.TyperException as error:
        message = error.format_message().replace("Value error, ", "").rstrip(".")  # as pydantic begins its messages
        say(f"{message}. See 'symqk {_command(arguments)}--help'.")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        failed(error, debug="--debug" in arguments)
        return 1


def _command(arguments: Sequence[str]) -> str:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    return next((f"{argument} " for argument in arguments if argument in known), "")
