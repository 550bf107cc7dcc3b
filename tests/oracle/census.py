"""A census of another question than `report`'s: what its module finds of each type, kept line by line as there."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from . import report
from .building import NoModelError
from .configs import model_types


__all__ = ["level_by_level", "take"]


def level_by_level(
    model_type: str, levels: Iterable[int], examine: Callable[[str, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """
    Asks small models of one type, until all of its layers were seen, or some in a model beyond the first.

    Args:
        model_type (`str`): The type.
        levels (iterable of `int`): Which small configs are tried, in order.
        examine (`Callable[[str, int], dict]`): What is found of the type at a level.

    Yields:
        `dict`: The best record so far.
    """
    best: dict[str, Any] = {}
    for level in levels:
        start = time.monotonic()
        try:
            record = examine(model_type, level)
        except NoModelError as error:
            yield {"type": model_type, "status": "no model", "error": str(error), "layers": [], "seen": 0}
            return
        except Exception as error:
            record = {
                "type": model_type, "status": "not built", "error": f"{type(error).__name__}: {error}"[:300],
                "layers": [], "level": level, "seen": 0,
            }  # fmt: skip
        record["seconds"] = round(time.monotonic() - start, 1)
        if not best or record["seen"] > best["seen"] or best["status"] == "not built":
            best = record
        yield best
        if best["status"] == "all" or (level > 0 and best["seen"]):
            break


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
