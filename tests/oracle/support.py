"""
From what the oracle found to the data that the package carries: which attention of which model types is proven by its
own forward pass, and the page that shows it.

    python -m oracle.report --output oracle.jsonl --workers 2     # from the folder `tests`
    python -m oracle.support oracle.jsonl                         # writes support.json and SUPPORT.md
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import hf_symqk
from hf_symqk.attention.verified import Support
from hf_symqk.cli.architectures import support_report
from hf_symqk.cli.report import Format, write_report

from .configs import model_types
from .report import read


__all__ = ["lowest_transformers", "page", "support_of"]

FOLDER = Path(hf_symqk.__file__).parent / "attention"
DATA, PAGE = FOLDER / "support.json", FOLDER / "SUPPORT.md"
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# `  layers.0.attn and 5 more: FooAttention (model type 'foo') with q_proj, k_proj: why`
_LEFT_OUT = re.compile(
    r"\s*(?P<example>\S+)(?: and \d+ more)?: (?P<module>\w+) \(model type [^)]*\) with (?P<parameters>[^:]*)"
    r"(?:: (?P<reason>.*))?"
)
# `FooAttention (q_proj, k_proj)`
_MET = re.compile(r"(?P<module>\w+) \((?P<parameters>.*)\)")
# What differs from one machine to the next: rounding errors, addresses.
_VARYING = re.compile(r": off by \S+ of [\d.e+-]+|\boff by [\d.e+-]+|(?<= at )0x[0-9a-f]+")
_LONGEST = 160
_MIXED = "its queries or keys are no linear map of one token's hidden state"
_LEARNED = "its queries or keys are not made from hidden states"
_NO_LAYOUT = "it matches no layout"
# How the note on a layer begins whose head counts do not fit: it is found and cannot be read.
_PROBLEM = "problem: "


def support_of(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """
    The content of the data file.

    Args:
        records (`Mapping[str, Mapping[str, Any]]`): The last record of each type, as `oracle.report` wrote it.

    Returns:
        `dict[str, Any]`: Plain values in a fixed order, without what changes from run to run.

    Raises:
        ValueError: if the records are of several versions of Transformers.
    """
    versions = {record["transformers"] for record in records.values()}
    if len(versions) != 1:
        raise ValueError(f"The records are of Transformers {sorted(versions)}; take them with one version.")
    types = {name: _type_support(records[name]) for name in sorted(records)}
    return {"transformers": versions.pop(), "lowest_transformers": lowest_transformers(), "types": types}


def lowest_transformers() -> str:
    """The lowest version of Transformers that `pyproject.toml` allows: the one place that says it."""
    stated = re.search(r'"transformers>=([\d.]+)"', _PYPROJECT.read_text(encoding="utf-8"))
    assert stated is not None, "pyproject.toml states no lowest version of Transformers"
    return stated.group(1)


def _type_support(record: Mapping[str, Any]) -> dict[str, Any]:
    if "found" not in record:
        return {"status": "not built", "problem": _short(record.get("error") or record.get("stopped", ""))}
    found = group_layers(layer for layer in record["layers"] if not layer["note"].startswith(_PROBLEM))
    skipped, unsupported = _not_found(record)
    open_ends = [one for one in found if set(one["outcomes"]) - {"proven", "product"}]
    if not found:
        status = "unsupported" if unsupported else "no attention"
    elif not open_ends:
        status = "partly proven" if unsupported else "proven"
    else:
        proofs = {"proven", "product"} & set().union(*(one["outcomes"] for one in found))
        status = "partly proven" if proofs else "unproven"
    complete = status in ("proven", "no attention") and not record.get("stopped")
    problem = "" if complete else _short("; ".join([*record["errors"][-1:], record.get("stopped", "")]).strip("; "))
    values = {
        "status": status,
        "model": record["class"],
        "level": record["level"],
        "found": found,
        "skipped": skipped,
        "unsupported": unsupported,
        "problem": problem,
    }
    return {name: value for name, value in values.items() if value or name == "level"}


def group_layers(layers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Layers that are found alike, as one entry.

    Args:
        layers (`Iterable[Mapping[str, Any]]`): Layers of a record: `name`, `class`, `layout`, `config`, `kind` and
            `parameters`, and, where they were held to a forward pass, `outcome` and `note`.

    Returns:
        `list[dict[str, Any]]`: In the order in which they first stand.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for layer in layers:
        groups.setdefault((layer["layout"], layer["config"], layer["kind"], layer["class"]), []).append(layer)
    return [
        {
            "layout": layout,
            "config": config,
            "kind": kind,
            "module": module,
            "outcomes": dict(sorted(Counter(layer.get("outcome", "unproven") for layer in members).items())),
            "evidence": "; ".join(_evidence(members)),
            "example": members[0]["name"],
            "parameters": sorted({name for layer in members for name in layer["parameters"]}),
        }
        for (layout, config, kind, module), members in groups.items()
    ]


def _evidence(members: Iterable[Mapping[str, Any]]) -> list[str]:
    """Routes (`interface`, `matmul (run alone)`), then what stood in the way of a proof."""
    routes, obstacles = set(), set()
    for layer in members:
        note = layer.get("note", "")
        if layer.get("outcome") in ("proven", "product"):
            route = note.partition(",")[0]
            routes.add(f"{route} (run alone)" if note.endswith("alone") else route)
        elif note:
            obstacles.add(_short(note.partition(";")[0]))
    return [*sorted(routes), *sorted(obstacles)]


def _not_found(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Modules that are skipped for a reason, and those that the table does not know, one of each class."""
    skipped: dict[tuple[str, str], dict[str, Any]] = {}
    unsupported: dict[tuple[str, str], dict[str, Any]] = {}
    for layer in record["layers"]:
        if layer["note"].startswith(_PROBLEM):
            reason = layer["note"].removeprefix(f"{_PROBLEM}{layer['name']!r} ({layer['class']}): ")
            _add(unsupported, layer["class"], layer["name"], ", ".join(layer["parameters"]), reason)
    for name, reason, entries in (
        ("unknown", _NO_LAYOUT, unsupported),
        ("mixed", _MIXED, skipped),
        ("other", _LEARNED, skipped),
    ):
        for kind, found in record[name].items():
            met = _MET.fullmatch(kind)
            assert met is not None, f"cannot be read: {kind!r}"
            example, _, probed = found.partition(": ")
            # The shapes of a forward's own heads help whoever writes the entry.
            reason_here = f"{reason} (in the forward: {probed})" if name == "unknown" and "H " in probed else reason
            _add(entries, met.group("module"), example, met.group("parameters"), reason_here)
    met_classes = {module for module, _ in (*skipped, *unsupported)}
    for line in record["left_out"]:
        read_line = _LEFT_OUT.fullmatch(line)
        if read_line is None:
            continue  # "none that looks like attention"
        module, example, parameters, reason = read_line.group("module", "example", "parameters", "reason")
        if reason:
            _add(skipped, module, example, parameters, reason)
        elif module not in met_classes:
            _add(unsupported, module, example, parameters, _NO_LAYOUT)
    return list(skipped.values()), list(unsupported.values())


def _add(
    entries: dict[tuple[str, str], dict[str, Any]], module: str, example: str, parameters: str, reason: str
) -> None:
    names = sorted(filter(None, parameters.split(", ")))
    entries.setdefault(
        (module, ",".join(names)),
        {"module": module, "example": example, "parameters": names, "reason": _short(reason)},
    )


def _short(text: str) -> str:
    line = " ".join(_VARYING.sub("", text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def dumps(values: Mapping[str, Any]) -> str:
    """The data file: a line a type, so that differences can be read."""
    lines = [f"  {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in values["types"].items()]
    head = [f" {json.dumps(name)}: {json.dumps(values[name])}" for name in ("transformers", "lowest_transformers")]
    return "{\n" + ",\n".join([*head, ' "types": {\n' + ",\n".join(lines) + "\n }"]) + "\n}\n"


_PAGE = """\
# Which attention is found, and what proves it

Every model type of Transformers {transformers} was built small with random weights, and each layer that the table of
layouts finds was held to the model's own forward pass: basis vectors go in, and the queries and keys that reach the
softmax have to be those of the table, head by head, by value. Supported is Transformers ≥ {lowest}. {types} types:

| status | types | what it means |
|---|---:|---|
{counts}

{layers} combinations of layout, model type (of the config that speaks for a layer) and self- or cross-attention are
proven; layers of any other are scored and marked `unverified`, in models of these types as in others, and so are
layouts that somebody registered and modules that run a forward of their own. `symqk architectures` prints this table
(`symqk architectures bert llama` some of its rows, `--json` more of it, `--layouts` the layouts themselves).

Written by these two commands, from the folder `tests`; do not edit by hand:

```bash
python -m oracle.report --output oracle.jsonl --workers 2   # a process a type: ten minutes on two cores
python -m oracle.support oracle.jsonl                       # support.json and this page
```

"""
_MEANINGS = {
    "proven": "all softmax attention that the forward runs over products of tokens is found, and all found is proven",
    "partly proven": "some layers are not proven, or some attention is not found",
    "unproven": "found and scored, marked `unverified`",
    "unsupported": "has softmax attention that no layout describes: an error names it",
    "no attention": "no softmax over products of queries and keys of tokens in the small model",
    "not built": "no small model could be made",
}


def page(values: Mapping[str, Any]) -> str:
    """The text above the table of `SUPPORT.md`."""
    counts = Counter(one["status"] for one in values["types"].values())
    return _PAGE.format(
        transformers=values["transformers"],
        lowest=values["lowest_transformers"],
        types=len(values["types"]),
        counts="\n".join(f"| {name} | {counts[name]} | {meaning} |" for name, meaning in _MEANINGS.items()),
        layers=len(Support(values).proven),
    )


def write(records: Mapping[str, Mapping[str, Any]], data: Path = DATA, support_page: Path = PAGE) -> dict[str, Any]:
    """
    Writes the data file and the page.

    Args:
        records (`Mapping[str, Mapping[str, Any]]`): The last record of each type.
        data (`Path`, *optional*): Where the data go.
        support_page (`Path`, *optional*): Where the page goes.

    Returns:
        `dict[str, Any]`: The data.
    """
    values = support_of(records)
    data.write_text(dumps(values), encoding="utf-8", newline="\n")
    write_report(support_report(Support(values)), Format.MARKDOWN, support_page)
    table = support_page.read_text(encoding="utf-8")
    support_page.write_text(page(values) + table, encoding="utf-8", newline="\n")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="what `oracle.report --output` wrote")
    records = read(parser.parse_args().records)
    if missing := sorted(set(model_types()) - set(records)):
        parser.error(f"{len(missing)} model types have no record; run oracle.report again: {', '.join(missing[:12])}")
    values = write(records)
    counts = Counter(one["status"] for one in values["types"].values())
    print(f"{len(values['types'])} types: {', '.join(f'{number} {status}' for status, number in counts.items())}")


if __name__ == "__main__":
    main()
