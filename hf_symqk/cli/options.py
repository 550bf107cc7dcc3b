"""Options that several commands share, and the reading of those that are more than a word."""

import re
from typing import Annotated

import typer

from ..attention import LayerChoice


__all__ = ["DebugOption", "JsonOption", "RevisionOption", "SubfolderOption", "TokenOption", "parse_layers"]

RevisionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the Hub; holds for every MODEL.")
]
SubfolderOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Folder inside each MODEL that holds the checkpoint.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        envvar="HF_TOKEN",
        help="Access token for private and gated repositories. Prefer the variable or `hf auth login`: arguments can "
        "be read by other users of the machine.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def parse_layers(text: str | None) -> LayerChoice | None:
    """
    Reads `--layers`.

    Args:
        text (`str` or `None`): `0,1,2`, `0-5`, or per stack `encoder:0,1;decoder:2`.

    Returns:
        The choice as [`score_checkpoint`] takes it, `None` for all layers.

    Raises:
        typer.BadParameter: if it cannot be read.
    """
    if text is None:
        return None
    compact = "".join(text.split())
    if ":" not in compact:
        return _numbers(compact, text)
    choice: dict[str, list[int]] = {}
    for part in filter(None, compact.split(";")):
        stack, colon, numbers = part.rpartition(":")
        if not colon or stack in choice:
            raise _unreadable(text)
        choice[stack] = _numbers(numbers, text)
    return choice


def _numbers(compact: str, text: str) -> list[int]:
    if not _NUMBERS.fullmatch(compact):
        raise _unreadable(text)
    chosen: list[int] = []
    for part in compact.split(","):
        first, _, last = part.partition("-")
        chosen += range(int(first), int(last or first) + 1)
    if not chosen:
        raise _unreadable(text)
    return chosen


def _unreadable(text: str) -> typer.BadParameter:
    return typer.BadParameter(
        f"{text!r} cannot be read; write '0,1,2', '0-5', or 'encoder:0,1;decoder:2' per stack.", param_hint="--layers"
    )
