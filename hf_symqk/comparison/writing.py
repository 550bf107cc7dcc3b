"""The files of a comparison."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .._rendering import Format, render
from .documents import to_document
from .figure import draw_comparison
from .results import Comparison
from .tables import make_tables


__all__ = ["write_comparison"]


def write_comparison(comparison: Comparison, folder: str | os.PathLike[str], *, figure: bool = True) -> list[Path]:
    """
    Writes a comparison: `comparison.md`, `comparison.tex` and `comparison.json`, each table (the paper's too) as a
    `.csv` with full precision, and the figure as `comparison.png` and `comparison.pdf`.

    Args:
        comparison ([`Comparison`]): What [`compare_runs`] returned.
        folder (path): Where to; made if it is not there.
        figure (`bool`, *optional*, defaults to `True`): Whether to draw the figure, which needs matplotlib.

    Returns:
        `list[Path]`: The files.

    Raises:
        ImportError: if the figure is asked for and matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_comparison(comparison) if figure else None
    tables = make_tables(comparison)
    texts = {
        "comparison.md": "\n".join(render(table, Format.MARKDOWN) for table in tables.values()),
        "comparison.tex": "\n".join(render(table, Format.LATEX) for table in tables.values()),
        "comparison.json": json.dumps(to_document(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        **{f"{name}.csv": render(table, Format.CSV) for name, table in tables.items()},
    }
    written = []
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
        written.append(folder / name)
    if drawn is not None:
        for suffix in ("png", "pdf"):
            path = folder / f"comparison.{suffix}"
            drawn.savefig(path, dpi=150)
            written.append(path)
    return written
