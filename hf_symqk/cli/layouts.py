"""`symqk layouts`: how the queries and keys of a checkpoint were found."""

import re
from typing import Annotated, Any

import pandas as pd
import typer

from ..checkpoint import find_checkpoint_layers
from .messages import failed, warnings_in_one_line, working
from .options import DebugOption, JsonOption, RevisionOption, SubfolderOption, TokenOption
from .report import Column, Format, Report, write_report


__all__ = ["EXAMPLES", "layouts"]

EXAMPLES = """
[bold]Examples[/bold]
On the Hub: [cyan]symqk layouts meta-llama/Llama-3.2-1B[/cyan]
Every tensor of a folder: [cyan]symqk layouts out/checkpoint-500 --json[/cyan]
"""

# The first number in a path is that of the layer; tensors that differ in nothing else share a row.
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_ABOUT = ("stack", "kind", "layout", "num_heads", "num_key_value_heads", "head_dim")
_TENSOR = ("key", "shape", "dtype", "file")


def layouts(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, weight file or Hub repository.")],
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """
    Show how W_q and W_k of a checkpoint are found: keys, shapes, layout, heads, and what is left out.

    Layers that are stored alike share a row, with * in place of their number; --json lists each layer and tensor.
    """
    try:
        with working(model), warnings_in_one_line(model):
            survey = find_checkpoint_layers(model, revision=revision, subfolder=subfolder, token=token or None)
    except Exception as error:
        failed(error, about=model, debug=debug)
        raise typer.Exit(1) from None
    write_report(_report(survey), Format.JSON if as_json else Format.TEXT)


def _report(survey: Any) -> Report:
    found = [_describe(layer) for layer in survey.layers]
    left_out = [line.strip() for line in survey.left_out]
    rows: dict[tuple[Any, ...], list[int]] = {}
    for layer in found:
        for tensor in layer["tensors"] or [dict.fromkeys(_TENSOR, "")]:
            shape = "x".join(map(str, tensor["shape"]))
            alike = (*(layer[name] for name in _ABOUT), _LAYER_NUMBER.sub("*", tensor["key"], count=1), shape)
            rows.setdefault((*alike, tensor["dtype"]), []).append(layer["index"])
    stacks, kinds, layout, heads, key_heads, widths, keys, shapes, dtypes = zip(*rows, strict=True)
    columns = (
        *([Column("stack", stacks)] if any(stacks) else []),
        Column("layers", [_ranges(indices) for indices in rows.values()]),
        *([Column("kind", kinds)] if len(set(kinds)) > 1 else []),
        Column("layout", layout),
        Column("heads", heads, str),
        Column("key\nheads", key_heads, str),
        Column("width", widths, str),
        Column("tensor", keys),
        Column("shape", shapes),
        Column("dtype", dtypes),
    )
    notes = [_grouping(found), *(f"cannot be read: {layer['problem']}" for layer in found if layer["problem"])]
    document = {"source": str(survey.source), "layers": found, "left_out": left_out}
    return Report(
        columns, pd.DataFrame(found), document, tuple(filter(None, notes)), tuple(f"left out: {x}" for x in left_out)
    )


def _describe(layer: Any) -> dict[str, Any]:
    """A layer of a survey as plain values."""
    heads = layer.heads
    tensors = [
        {"key": stored.key, "shape": list(stored.shape), "dtype": str(stored.dtype), "file": str(stored.file)}
        for stored in layer.keys
    ]
    return {
        "name": layer.name,
        "stack": layer.stack,
        "index": layer.index,
        "kind": layer.kind,
        "layout": layer.layout.name,
        "num_heads": heads.num_attention_heads,
        "num_key_value_heads": heads.num_key_value_heads,
        "head_dim": heads.head_dim,
        "grouped": heads.num_attention_heads != heads.num_key_value_heads,
        "problem": layer.problem,
        "tensors": [{**tensor, "dtype": tensor["dtype"].removeprefix("torch.")} for tensor in tensors],
    }


def _grouping(found: list[dict[str, Any]]) -> str:
    grouped = sorted({layer["num_heads"] // layer["num_key_value_heads"] for layer in found if layer["grouped"]})
    return f"grouped keys: {' or '.join(map(str, grouped))} query heads read each key head" if grouped else ""


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` → `0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
