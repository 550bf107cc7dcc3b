"""A census of another question than `report`'s: what its module finds of each type, kept line by line as there."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from . import report
from .configs import model_types


__all__ = ["take"]


def take(examine: Callable[..., Any], description: str | None) -> None:
    """
    Reads the command line, and asks each type that the output does not hold yet.

    Args:
        examine (`Callable`): What is found of one type, in place of `report.examine`.
        description (`str` or `None`): For `--help`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=60, help="processor time of one type")
    arguments = parser.parse_args()
    with mock.patch.object(report, "examine", examine):
        done = report.read(arguments.output)
        types = arguments.types or [name for name in model_types() if name not in done]
        report.run(types, arguments.output, arguments.seconds, arguments.workers)
