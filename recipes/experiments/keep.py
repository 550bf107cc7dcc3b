"""
Keeps what a comparison needs of its runs, and its tables and figure, without models and logs.

    python recipes/experiments/keep.py out/encoder recipes/experiments/encoder

The folder then serves as `--output_dir` of the same `compare.py` command, which adds seeds or initialisations to it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from hf_symqk._held_out import held_out_metric


# Of the scores, medians over layers; of the rest, what is compared.
_KEPT = re.compile(r"step|loss|learning_rate|qk/.*/median")
_COPIED = ("run.json", "compare.json")
_STATE = "trainer_state.json"


def kept_state(state: dict[str, Any]) -> dict[str, Any]:
    """
    A Trainer's state with the losses, held-out metrics and median scores of its log alone.

    Args:
        state (`dict`): Content of `trainer_state.json`.

    Returns:
        `dict`
    """
    log = [
        {key: value for key, value in entry.items() if _KEPT.fullmatch(key) or held_out_metric(key)}
        for entry in state["log_history"]
    ]
    return {
        **{name: state[name] for name in ("global_step", "max_steps")},
        "log_history": [entry for entry in log if set(entry) - {"step"}],
    }


def keep(source: Path, target: Path) -> list[str]:
    """
    Copies the finished runs of a comparison, and its report.

    Args:
        source (`Path`): Output folder of `compare.py`, or one that runs and `symqk compare` were given the same way.
        target (`Path`): Folder that takes `runs` and `comparison`; what is there of other runs stays. The source
            itself, where `compare.py` has added runs to those that are kept there: their states are cut in place.

    Returns:
        `list[str]`: Names of the runs.

    Raises:
        FileNotFoundError: if the source is no output folder of `compare.py` whose comparison was written.
    """
    for name in ("runs", "comparison"):
        if not (source / name).is_dir():
            raise FileNotFoundError(f"{str(source)!r} has no {name}: it is no finished output folder of compare.py.")
    names = []
    for run in sorted(path for path in (source / "runs").iterdir() if (path / "run.json").is_file()):
        if json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] != "finished":
            continue
        folder = target / "runs" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        copied = [run / name for name in _COPIED if folder.resolve() != run.resolve()]
        for file in filter(Path.is_file, copied):  # runs of one's own have no compare.json
            shutil.copyfile(file, folder / file.name)
        state = kept_state(json.loads((run / _STATE).read_text(encoding="utf-8")))
        (folder / _STATE).write_text(json.dumps(state, separators=(",", ":")) + "\n", encoding="utf-8")
        names.append(run.name)
    if source.resolve() != target.resolve():
        drawn_twice = shutil.ignore_patterns("*.pdf")
        shutil.copytree(source / "comparison", target / "comparison", ignore=drawn_twice, dirs_exist_ok=True)
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="output folder of compare.py")
    parser.add_argument("target", type=Path, help="where its runs and report are kept")
    arguments = parser.parse_args()
    print(f"kept {len(keep(arguments.source, arguments.target))} runs in {arguments.target}")
