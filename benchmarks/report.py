"""What the benchmarks share: their arguments, the facts of a run, and the table of ratios that they print."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers


__all__ = ["Result", "argument_parser", "facts", "mib", "ms", "show"]


@dataclass
class Result:
    """One comparison: what was compared, both sides as they read, their ratio, the target, and whether it is met."""

    what: str
    ours: str
    against: str
    ratio: float
    target: str
    met: bool


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="threads of a product (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that the script runs, not the ratios")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def facts(arguments: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """Sets the number of threads and returns what a reader has to know of the run."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "device": "cpu", "dtype": "float32", "threads": torch.get_num_threads(), **others}


def show(results: list[Result], about: Mapping[str, Any], path: Path | None) -> None:
    """Prints the table, and writes it with the facts to a JSON file if there is a path."""
    table = pd.DataFrame([asdict(result) for result in results])
    table["met"] = ["" if not result.target else "yes" if result.met else "no" for result in results]
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    if path is not None:
        content = {"about": about, "results": [asdict(result) for result in results]}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def ms(seconds: float) -> str:
    """`0.1234` as `123.4 ms`."""
    return f"{1e3 * seconds:.1f} ms"


def mib(number: float) -> str:
    """Bytes as `1.5 MiB`."""
    return f"{number / 2**20:.1f} MiB"
