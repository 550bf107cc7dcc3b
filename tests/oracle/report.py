"""
Every model type of Transformers, small, one after the other: does the table find its attention, and does the forward
pass agree? Each type runs in a process of its own with a time limit. Results are kept a line a type, so that a run
can be stopped and taken up again.

    python -m oracle.report --output oracle.jsonl            # from the folder `tests`
    python -m oracle.report --output oracle.jsonl --types bert gpt2 --again
"""

import argparse
import json
import multiprocessing
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from .building import build, model_types, shake
from .comparing import compare_model


_MEMORY = 7 * 2**30  # bytes of address space a process may take
_RANK = ("not built", "crashed", "nothing", "unknown", "none", "some", "all but unknown", "wrong", "all")


def examine(model_type: str) -> Iterator[dict[str, Any]]:
    """One line of the report, better with every size that is tried. A mismatch at any size is one for good."""
    best: dict[str, Any] = {}
    errors: list[str] = []
    for level in range(4):
        try:
            record = _examine(model_type, level)
        except Exception as error:
            record = {"type": model_type, "status": "not built", "error": f"{type(error).__name__}: {error}"[:300]}
            errors.append(f"level {level}: {record['error']}")
        if not best or _RANK.index(record["status"]) > _RANK.index(best["status"]):
            best = record
        yield best | {"build_errors": errors}
        if best["status"] in ("all", "wrong"):
            break
        if level == 1 and best["status"] != "not built":
            break


def _examine(model_type: str, level: int) -> dict[str, Any]:
    start = time.monotonic()
    model = build(model_type, level)
    record: dict[str, Any] = {
        "type": model_type,
        "class": type(model).__name__,
        "level": level,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    shake(model)
    comparison = compare_model(model)
    outcomes = Counter(verdict.outcome for verdict in comparison.verdicts.values())
    record |= {"found": len(comparison.verdicts), "outcomes": dict(outcomes)}
    modules = dict(model.named_modules())
    layouts = {layer.name: layer.layout.name for layer in comparison.layers}
    configs = {name: _model_type(name, modules) for name in layouts}
    record["layers"] = [
        {
            "name": name,
            "class": type(modules[name]).__name__,
            "outcome": verdict.outcome,
            "factors": verdict.factors and [round(f, 6) for f in verdict.factors],
            "note": verdict.note,
            "layout": layouts[name],
            "config": configs[name],
        }
        for name, verdict in comparison.verdicts.items()
    ]
    record |= {
        "unknown": comparison.unknown,
        "other": comparison.other,
        "left_out": comparison.left_out,
        "errors": comparison.errors,
    }
    if outcomes.get("wrong"):
        status = "wrong"
    elif not comparison.verdicts:
        status = "unknown" if comparison.unknown else "nothing"
    elif outcomes.get("unproven"):
        status = "some" if outcomes.get("proven") or outcomes.get("product") else "none"
    else:
        status = "all but unknown" if comparison.unknown else "all"
    return record | {"status": status, "seconds": round(time.monotonic() - start, 1)}


def _model_type(name: str, modules: dict[str, Any]) -> str | None:
    """Model type of the config that stands closest around a module."""
    while True:
        config = getattr(modules[name], "config", None)
        if isinstance(config, transformers.PreTrainedConfig):
            return config.model_type
        if not name:
            return None
        name = name.rpartition(".")[0]


def _child(model_type: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for record in examine(model_type):
        sender.send(record)
    sender.send(None)


def run(types: list[str], output: Path, seconds: float) -> None:
    """Examines types one after the other and appends a line for each."""
    context = multiprocessing.get_context("fork")
    for model_type in types:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(model_type, sender))
        process.start()
        sender.close()
        record: dict[str, Any] = {"type": model_type, "status": "not built", "error": "nothing came back"}
        deadline = time.monotonic() + seconds
        try:
            while receiver.poll(max(0, deadline - time.monotonic())):
                message = receiver.recv()
                if message is None:
                    break
                record = message
            else:
                record |= {"stopped": f"after {seconds} s"}
        except EOFError:
            record |= {"stopped": "the process died"}
        process.kill()
        process.join()
        with output.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{model_type:32} {record['status']:16} {record.get('outcomes', '')} {record.get('stopped', '')}",
            flush=True,
        )


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each type."""
    if not path.exists():
        return {}
    return {record["type"]: record for record in map(json.loads, path.read_text().splitlines())}


def markdown(records: dict[str, dict[str, Any]]) -> str:
    """Counts, and each type that is not proven throughout with the reason."""
    counts = Counter(record["status"] for record in records.values())
    lines = [f"{len(records)} model types", "", "| status | types |", "|---|---|"]
    lines += [f"| {status} | {number} |" for status, number in counts.most_common()]
    lines += ["", "| type | status | layers | why |", "|---|---|---|---|"]
    for name, record in sorted(records.items()):
        if record["status"] == "all":
            continue
        layers = ", ".join(f"{number} {outcome}" for outcome, number in record.get("outcomes", {}).items())
        open_layers = [layer for layer in record.get("layers", ()) if layer["outcome"] in ("wrong", "unproven")]
        reasons = dict.fromkeys(f"{layer['class']}: {layer['note']}" for layer in open_layers)
        reasons |= dict.fromkeys(f"{kind}: {found}" for kind, found in record.get("unknown", {}).items())
        reasons |= dict.fromkeys([*record.get("errors", ()), record.get("error", ""), record.get("stopped", "")])
        why = "; ".join(reason for reason in reasons if reason)[:300].replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {record['status']} | {layers} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--again", action="store_true", help="also types that the output has already")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th type")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--markdown", type=Path, help="where to write a summary of the whole output")
    arguments = parser.parse_args()
    done = {} if arguments.again else read(arguments.output)
    number, parts = map(int, arguments.part.split("/"))
    types = (arguments.types or model_types())[number - 1 :: parts]
    run([t for t in types if t not in done], arguments.output, arguments.seconds)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(read(arguments.output)))


if __name__ == "__main__":
    main()
