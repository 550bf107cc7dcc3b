"""What the command says beside its results: one line each, on stderr."""

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape


__all__ = ["EXPECTED", "describe_error", "failed", "one_line", "say", "warnings_in_one_line", "working"]

# What a wrong name, file or answer raises (errors of the Hub are OSErrors): the message says it all. Anything else is
# named by its type too, as its message alone may be no more than a key.
EXPECTED = (ValueError, OSError, ImportError)


def one_line(text: str) -> str:
    """The words of a message of several lines, on one."""
    return " ".join(text.split())


def say(text: str, about: str | None = None) -> None:
    """
    Writes one line to stderr.

    Args:
        text (`str`): The message; line breaks become spaces.
        about (`str`, *optional*): The model it is about.
    """
    print(": ".join(["symqk", *([about] if about else []), one_line(text)]), file=sys.stderr, flush=True)


def describe_error(error: BaseException) -> str:
    """The message of an error, with its type where the message alone would not do."""
    message = one_line(str(error))
    if isinstance(error, EXPECTED) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def failed(error: BaseException, *, about: str | None = None, debug: bool = False) -> None:
    """
    Says that something went wrong.

    Args:
        error (`BaseException`): What was raised.
        about (`str`, *optional*): The model it is about.
        debug (`bool`, *optional*, defaults to `False`): Writes the traceback first.
    """
    if debug:
        traceback.print_exception(error)
    say(describe_error(error), about)


@contextmanager
def warnings_in_one_line(about: str) -> Iterator[None]:
    """Turns the warnings of what runs inside into lines on stderr that name the model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            yield
        finally:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                say(f"warning: {text}", about)


def working(text: str) -> AbstractContextManager[Any]:
    """A moving line that says what is being done, where stderr is a terminal; nothing otherwise."""
    console = Console(stderr=True)
    return console.status(escape(text)) if console.is_terminal else nullcontext()
