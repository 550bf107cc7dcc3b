"""
Every model type of Transformers, small, one after the other: does the table find its attention, and does the forward
pass agree? Each type runs in a process of its own with a time limit. Results are kept a line a type, so that a run
can be stopped and taken up again.

    python -m oracle.report --output oracle.jsonl            # from the folder `tests`
    python -m oracle.report --output oracle.jsonl --types bert gpt2 --again
    python -m oracle.report --output promises.jsonl --promises alone

`--promises` also holds each type to what the package promises of it (`promises.py`).
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_symqk.attention import AttentionLayer

from .building import NoModelError, build, shake
from .comparing import compare_model
from .configs import LEVELS, model_types
from .promises import keep_promises


_MEMORY = 7 * 2**30  # bytes of address space a process may take
# What a type comes to, the better the later; a mismatch at one size is not made good by another size.
_RANK = (
    "no model",
    "not built",
    "nothing",
    "mixed",
    "unknown",
    "none",
    "some",
    "all but unknown",
    "all but mixed",
    "wrong",
    "all",
)


def examine(model_type: str) -> Iterator[dict[str, Any]]:
    """One line of the report, better with every size that is tried. A mismatch at any size is one for good."""
    best: dict[str, Any] = {}
    errors: list[str] = []
    for level in LEVELS:
        try:
            record = _examine(model_type, level)
        except NoModelError as error:
            yield {"type": model_type, "status": "no model", "error": str(error)}
            return
        except Exception as error:
            record = {"type": model_type, "status": "not built", "error": f"{type(error).__name__}: {error}"[:300]}
            errors.append(f"level {level}: {record['error']}")
        if not best or _RANK.index(record["status"]) > _RANK.index(best["status"]):
            best = record
        yield best | {"build_errors": errors}
        if best["status"] in ("all", "wrong"):
            break
        if level == 1 and best["status"] != "not built" and not best.get("errors"):
            break  # it runs, and a larger one would show the same


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
    layers = {layer.name: layer for layer in comparison.layers}
    record["layers"] = [
        {
            "name": name,
            "class": type(modules[name]).__name__,
            "outcome": verdict.outcome,
            "factors": verdict.factors and [round(f, 6) for f in verdict.factors],
            "note": verdict.note,
            **about_layer(layers[name]),
        }
        for name, verdict in comparison.verdicts.items()
    ]
    record |= {
        "unknown": comparison.unknown,
        "mixed": comparison.mixed,
        "other": comparison.other,
        "left_out": comparison.left_out,
        "errors": comparison.errors,
    }
    if outcomes.get("wrong"):
        status = "wrong"
    elif not comparison.verdicts:
        status = "unknown" if comparison.unknown else "mixed" if comparison.mixed else "nothing"
    elif outcomes.get("unproven"):
        status = "some" if outcomes.get("proven") or outcomes.get("product") else "none"
    else:
        rest = "unknown" if comparison.unknown else "mixed" if comparison.mixed else ""
        status = f"all but {rest}" if rest else "all"
    return record | {"status": status, "seconds": round(time.monotonic() - start, 1)}


def examine_promises(model_type: str) -> Iterator[dict[str, Any]]:
    """One line on what the package promises of a type, at the first size that can be built and has attention."""
    record: dict[str, Any] = {"type": model_type, "status": "not built"}
    errors: list[str] = []
    for level in LEVELS:
        try:
            record = _promises(model_type, level)
        except NoModelError as error:
            yield {"type": model_type, "status": "no model", "error": str(error)}
            return
        except Exception as error:
            errors.append(f"level {level}: {type(error).__name__}: {error}"[:300])
        if record["status"] not in ("not built", "nothing"):
            break
    yield record | {"build_errors": errors}


def _promises(model_type: str, level: int) -> dict[str, Any]:
    findings = keep_promises(model_type, level)
    outcomes = {finding.outcome for finding in findings.values()}
    status = next(
        (status for status in ("broken", "elsewhere", "refused", "partly", "rounded") if status in outcomes), "kept"
    )
    return {
        "type": model_type,
        "level": level,
        "status": status if findings else "nothing",
        "promises": {name: finding._asdict() for name, finding in findings.items()},
    }


def examine_both(model_type: str) -> Iterator[dict[str, Any]]:
    """The line of [`examine`], and with the last one of it what the package promises, at the same size."""
    record: dict[str, Any] = {}
    for record in examine(model_type):
        yield record
    if "level" in record:
        yield record | {"promises": _promises(model_type, record["level"])["promises"]}


def about_layer(layer: AttentionLayer) -> dict[str, Any]:
    """What tells how a layer was found: the entry of the table, whose config spoke, and what holds its parameters."""
    holders = {name.rpartition(".")[0] or name for name, _ in layer.module.named_parameters()}
    return {
        "layout": layer.layout.name,
        "config": layer.model_type,
        "kind": layer.kind,
        "parameters": sorted(holders),
    }


Examine = Callable[[str], Iterator[dict[str, Any]]]


def _child(model_type: str, seconds: int, sender: Any, examination: Examine) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    for record in examination(model_type):
        used = resource.getrusage(resource.RUSAGE_SELF)
        sender.send(record | {"cpu_seconds": round(used.ru_utime + used.ru_stime, 1)})
    sender.send(None)


class _Examination:
    """One type in a process of its own, which the parent may end."""

    def __init__(self, model_type: str, seconds: int, examination: Examine) -> None:
        context = multiprocessing.get_context("fork")
        self.record: dict[str, Any] = {"type": model_type, "status": "not built", "error": "nothing came back"}
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(model_type, seconds, sender, examination))
        self.process.start()
        sender.close()
        self.seconds = seconds
        # The processor's time is what counts; a process that sleeps is ended as well.
        self.deadline = time.monotonic() + 5 * seconds

    def receive(self) -> bool:
        """Takes one message; whether it was the last."""
        try:
            message = self.receiver.recv()
        except EOFError:
            self.process.join()
            out_of_time = self.process.exitcode == -signal.SIGXCPU
            stopped = f"after {self.seconds} s" if out_of_time else f"the process died ({self.process.exitcode})"
            self.record |= {"stopped": stopped}
            return True
        if message is not None:
            self.record = message
        return message is None

    def end(self) -> dict[str, Any]:
        """Its record, once the process is gone."""
        self.process.kill()
        self.process.join()
        self.receiver.close()
        return self.record


def run(
    types: list[str], output: Path, seconds: int = 60, workers: int = 1, examination: Examine | None = None
) -> None:
    """
    Examines types and appends a line for each.

    Args:
        types (`list[str]`): Model types.
        output (`Path`): File of JSON lines.
        seconds (`int`, *optional*, defaults to 60): Processor time that one type may take, all sizes together.
        workers (`int`, *optional*, defaults to 1): Types at a time.
        examination (`Callable`, *optional*): What yields the lines of a type; [`examine`] by default.
    """
    # Children are forked: what is imported here is imported once, and threads would not survive.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    compare_model(build("bert"))
    waiting = list(reversed(types))
    running: list[_Examination] = []
    with output.open("a") as file:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Examination(waiting.pop(), seconds, examination or examine))
            receivers = {one.receiver: one for one in running}
            ready = multiprocessing.connection.wait(list(receivers), timeout=5)
            over = [one for receiver, one in receivers.items() if receiver in ready and one.receive()]
            for one in running:
                if one not in over and time.monotonic() > one.deadline:
                    one.record |= {"stopped": f"asleep for {5 * seconds} s"}
                    over.append(one)
            for one in over:
                running.remove(one)
                record = one.end() | {"transformers": transformers.__version__}
                file.write(json.dumps(record) + "\n")
                file.flush()
                promises = " ".join(f"{k} {v['outcome']}" for k, v in record.get("promises", {}).items())
                what = f"{record['status']:16} {record.get('outcomes', promises)} {record.get('stopped', '')}"
                print(f"{record['type']:32} {what} {record.get('cpu_seconds', '')}", flush=True)


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
        for unlisted in ("unknown", "mixed"):
            reasons |= dict.fromkeys(f"{kind}: {found}" for kind, found in record.get(unlisted, {}).items())
        reasons |= dict.fromkeys([*record.get("errors", ()), record.get("error", ""), record.get("stopped", "")])
        why = "; ".join(reason for reason in reasons if reason)[:300].replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {record['status']} | {layers} | {why} |")
    return "\n".join(lines) + "\n"


_EXAMINATIONS: dict[str | None, Examine] = {"too": examine_both, "alone": examine_promises}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--again", action="store_true", help="also types that the output has already")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th type")
    parser.add_argument("--seconds", type=int, default=60, help="processor time of one type")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--promises",
        nargs="?",
        const="too",
        choices=_EXAMINATIONS,
        help="also what the package promises of each type, or that alone",
    )
    parser.add_argument("--markdown", type=Path, help="where to write a summary of the whole output")
    arguments = parser.parse_args()
    done = {} if arguments.again else read(arguments.output)
    number, parts = map(int, arguments.part.split("/"))
    types = (arguments.types or model_types())[number - 1 :: parts]
    run(
        [t for t in types if t not in done],
        arguments.output,
        arguments.seconds,
        arguments.workers,
        _EXAMINATIONS.get(arguments.promises),
    )
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(read(arguments.output)))


if __name__ == "__main__":
    main()
