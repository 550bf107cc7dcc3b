"""`symqk architectures`: the table of layouts."""

from typing import Any

import pandas as pd

from ..attention import ComposedProjection, Projection, QKLayout, layouts
from .options import JsonOption
from .report import Column, Format, Report, write_report


__all__ = ["EXAMPLES", "architectures"]

EXAMPLES = """
[bold]Examples[/bold]
As a table: [cyan]symqk architectures[/cyan]
For a script: [cyan]symqk architectures --json[/cyan]
"""

_ANY = "any"


def architectures(as_json: JsonOption = False) -> None:
    """
    List the layouts of queries and keys that are known, and the model types each serves.

    A layout that names no model types serves every model whose attention has projections of these names.
    """
    write_report(_report(), Format.JSON if as_json else Format.TEXT)


def _report() -> Report:
    # In the order of registration: those that serve many models first.
    known = [_describe(layout) for layout in reversed(layouts())]
    columns = (
        Column("layout", [layout["name"] for layout in known]),
        Column("queries", [layout["query"]["module"] for layout in known]),
        Column("keys", [layout["key"]["module"] for layout in known]),
        Column("rows", [_order(layout) for layout in known]),
        Column("model types", [", ".join(layout["model_types"] or [_ANY]) for layout in known]),
    )
    note = f"{_ANY}: every model whose attention has projections of these names"
    return Report(columns, pd.DataFrame(known), known, notes=(note,))


def _describe(layout: QKLayout) -> dict[str, Any]:
    return {
        "name": layout.name,
        "query": _projection(layout.query),
        "key": _projection(layout.key),
        "query_norms": list(layout.query_norms),
        "key_norms": list(layout.key_norms),
        "model_types": None if layout.model_types is None else sorted(layout.model_types),
    }


def _projection(projection: Projection | ComposedProjection) -> dict[str, Any]:
    last = projection.pieces[-1]
    rows = last.rows
    # Selectors of other classes need have none of these; their own description stands for them.
    part = getattr(rows, "part", None)
    order = getattr(rows, "order", part and (part,))
    return {
        "module": ", ".join(dict.fromkeys(piece.path for piece in projection.pieces)),
        "rows": " ".join(order) if order else str(rows),
        "interleaved": bool(getattr(rows, "interleaved", False)),
        "shards": getattr(rows, "shards", 1),
        "transposed": last.transposed,
    }


def _order(layout: dict[str, Any]) -> str:
    """How the rows of the projections are ordered, in words."""
    query, key = layout["query"], layout["key"]
    parts = list(dict.fromkeys([query["rows"], key["rows"]]))
    words = ["separate" if parts == ["query", "key"] else " / ".join(parts)]
    words += ["interleaved by head"] if query["interleaved"] else []
    words += [f"in {query['shards']} shards"] if query["shards"] > 1 else []
    words += ["transposed"] if query["transposed"] else []
    return ", ".join(words)
