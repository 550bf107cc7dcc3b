"""`symqk architectures`: the support table, a row a model type, and the layouts that it rests on."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import Annotated, Any

import pandas as pd
import typer

from ..attention import ComposedProjection, Projection, QKLayout, layouts
from ..attention.verified import OtherAttention, Support, TypeSupport, load_support
from .options import JsonOption
from .report import Column, Format, Report, write_report


__all__ = ["EXAMPLES", "architectures", "support_report"]

EXAMPLES = """
[bold]Examples[/bold]
All model types: [cyan]symqk architectures[/cyan]
Some of them: [cyan]symqk architectures bert 'qwen*'[/cyan]
Where Q and K stand: [cyan]symqk architectures --layouts[/cyan]
"""

_ANY = "any"


def architectures(
    types: Annotated[
        list[str] | None,
        typer.Argument(metavar="TYPE", help="Model types: a name, a part of one, or a pattern.", show_default=False),
    ] = None,
    list_layouts: Annotated[
        bool, typer.Option("--layouts", help="List the layouts of queries and keys, and the types each serves.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """
    Show which model types are supported, and what proves it.

    Each was built small and every layer that is found was held to the model's own forward pass; the table says by
    which route, and what is skipped, unverified or unsupported and why. Scores of unverified layers are marked.
    """
    if list_layouts and types:
        raise typer.BadParameter("lists all layouts; leave the types away.", param_hint="--layouts")
    report = _layouts_report() if list_layouts else support_report(load_support(), types or ())
    write_report(report, Format.JSON if as_json else Format.TEXT)


def support_report(support: Support, names: Sequence[str] = ()) -> Report:
    """
    The support table.

    Args:
        support ([`Support`]): What is known.
        names (`Sequence[str]`, *optional*): Names, parts of names or patterns of model types; all by default.

    Returns:
        [`Report`]

    Raises:
        typer.BadParameter: for a name that is no type's.
    """
    chosen = {name: support.types[name] for name in _choose(support, names)}
    rows = [_row(support, one) for one in chosen.values()]
    titles = ("status", "layers", "layouts", "proven by", "skipped", "unverified or unsupported")
    columns = (
        Column("model type", list(chosen)),
        *(Column(title, [row[title] for row in rows]) for title in titles),
    )
    document = {
        "transformers": support.transformers,
        "lowest_transformers": support.lowest_transformers,
        "types": {name: _document(support, one) for name, one in chosen.items()},
    }
    data = pd.DataFrame({column.title: column.cells for column in columns})
    return Report(columns, data, document, notes=(f"as of Transformers {support.transformers}",))


def _choose(support: Support, names: Iterable[str]) -> list[str]:
    chosen: dict[str, None] = {}
    for name in names:
        exact = [known for known in support.types if _plain(known) == _plain(name)]
        pattern = name if any(sign in name for sign in "*?[") else f"*{name}*"
        found = exact or [known for known in support.types if fnmatch(_plain(known), _plain(pattern))]
        if not found:
            near = difflib.get_close_matches(name, support.types, n=3)
            hint = f" Near it: {', '.join(near)}." if near else ""
            raise typer.BadParameter(
                f"no model type of Transformers {support.transformers} is called {name!r}.{hint}", param_hint="TYPE"
            )
        chosen |= dict.fromkeys(found)
    return sorted(chosen) if chosen else list(support.types)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _row(support: Support, one: TypeSupport) -> dict[str, str]:
    kinds: dict[str, int] = {}
    for found in one.found:
        kinds[found.kind] = kinds.get(found.kind, 0) + found.count
    open_ends = [f"unverified {found.module}: {found.evidence}" for found in one.found if not _proves(support, found)]
    open_ends += [f"unsupported {_named(other)}" for other in one.unsupported]
    open_ends += [one.problem] if one.problem else []
    return {
        "status": one.status,
        "layers": ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds, reverse=True)),
        "layouts": "; ".join(dict.fromkeys(found.layout for found in one.found)),
        "proven by": ", ".join(
            dict.fromkeys(
                found.evidence if found.proven else f"as {found.config}"
                for found in one.found
                if _proves(support, found)
            )
        ),
        "skipped": "; ".join(f"{other.module}: {other.reason}" for other in one.skipped),
        "unverified or unsupported": "; ".join(open_ends),
    }


def _proves(support: Support, found: Any) -> bool:
    return support.proves(found.layout, found.config, found.kind)


def _named(other: OtherAttention) -> str:
    return f"{other.module} ({', '.join(other.parameters)}): {other.reason}"


def _document(support: Support, one: TypeSupport) -> dict[str, Any]:
    def plain(entry: Any) -> dict[str, Any]:
        return {**vars(entry), "parameters": list(entry.parameters)}

    return {
        "status": one.status,
        "model": one.model,
        "layers": [{**plain(found), "verified": _proves(support, found)} for found in one.found],
        "skipped": [plain(other) for other in one.skipped],
        "unsupported": [plain(other) for other in one.unsupported],
        "problem": one.problem,
    }


def _layouts_report() -> Report:
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
