"""Paired runs of a recipe with several query-key initialisations, and their comparison.

    python recipes/compare.py --seeds 0 1 2 3 4 5
    python recipes/compare.py --recipe recipes/clm.py --qk_init none symmetric --seeds 0 1 2 --max_steps 300
    python recipes/compare.py --learning_rates 1e-3 2e-3 4e-3 --jobs 2 --launcher "torchrun --nproc_per_node 2"

Arguments that are not its own go to the recipe. The same command goes on where it stopped; other seeds, rates or
initialisations join the runs that are there. See recipes/README.md.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argument_parsing import CONFIG_SUFFIXES, parse_own_arguments, read_argument_file
from arguments import RecipeError, parse_qk_init
from filelock import FileLock, Timeout
from jobs import Job, Outcome, launcher_words, run_jobs, run_status
from run_record import without_secrets

from hf_symqk import SymmetricInit
from hf_symqk._rendering import Format, render
from hf_symqk.comparison import ComparisonError, arm_name, compare_runs
from hf_symqk.comparison.checks import IGNORED_ARGUMENTS
from hf_symqk.comparison.tables import make_tables
from hf_symqk.comparison.writing import write_comparison


__all__ = ["ComparisonArguments", "main", "plan"]

RECORD = "compare.json"  # in each run's folder: with what it was started
# What this program sets for each run itself.
_OWN = {"qk_init": "qk_init", "seed": "seeds", "output_dir": "output_dir"}


@dataclasses.dataclass
class ComparisonArguments:
    """Which runs are made, how, and where."""

    recipe: str = dataclasses.field(
        default=str(Path(__file__).with_name("mlm.py")), metadata={"help": "Script that makes one run."}
    )
    qk_init: list[str] = dataclasses.field(
        default_factory=lambda: ["none", "symmetric"],
        metadata={"help": "Initialisations: none, a scheme's name, or JSON objects, as the recipes take them."},
    )
    seeds: list[int] = dataclasses.field(
        default_factory=lambda: [0, 1, 2], metadata={"help": "Each initialisation is run with each of these seeds."}
    )
    learning_rates: list[float] | None = dataclasses.field(
        default=None, metadata={"help": "… and at each of these rates; without them at the recipe's own."}
    )
    baseline: str | None = dataclasses.field(
        default=None, metadata={"help": "Arm that the others are compared with: none, or else the first."}
    )
    output_dir: str = dataclasses.field(
        default="out/compare", metadata={"help": "Takes runs/, a folder for each run, and comparison/."}
    )
    launcher: str = dataclasses.field(
        default="accelerate launch", metadata={"help": "Command that starts a script, with its options."}
    )
    jobs: int = dataclasses.field(default=1, metadata={"help": "Runs made at once."})

    def __post_init__(self) -> None:
        if not Path(self.recipe).is_file():
            raise RecipeError(f"recipe={self.recipe!r}: there is no such script.")
        if self.jobs < 1:
            raise RecipeError(f"jobs={self.jobs}: choose 1 or more.")
        for name in ("qk_init", "seeds", "learning_rates"):
            values = getattr(self, name)
            if values is not None and len(set(values)) < len(values):
                raise RecipeError(f"{name} names a value twice: {' '.join(map(str, values))}.")
        arms = self.arms()
        if self.baseline is not None and self.baseline not in arms:
            raise RecipeError(f"baseline={self.baseline!r} is none of the arms: {', '.join(arms)}.")

    def arms(self) -> dict[str, str]:
        """Returns the word of `qk_init` for each arm, by its name."""
        arms: dict[str, str] = {}
        for word in self.qk_init:
            option = parse_qk_init(word)
            try:
                name = arm_name(None if option is None else SymmetricInit.from_value(option).to_dict())
            except (ValueError, TypeError) as error:
                raise RecipeError(f"qk_init={word!r}: {error}") from None
            if name in arms:
                raise RecipeError(f"qk_init={arms[name]!r} and {word!r} are the same initialisation.")
            arms[name] = word
        return arms


def plan(arguments: ComparisonArguments, rest: Sequence[str]) -> tuple[list[Job], list[str]]:
    """
    Says which runs are to be made, and which are there already.

    Args:
        arguments (`ComparisonArguments`):
            What is compared.
        rest (sequence of `str`):
            Words for the recipe.

    Returns:
        `tuple`: the runs to be made, seed by seed so that pairs are complete as early as possible, and the names of
        those that are finished.

    Raises:
        RecipeError: for words that this program sets itself, and for runs in the output folder that were started with
            other arguments.
    """
    from_file, given = _given(rest)
    for name, instead in _OWN.items():
        if name in given:
            raise RecipeError(f"{name} in the recipe's arguments: each run has its own; give --{instead}.")
    if arguments.learning_rates is not None and "learning_rate" in given:
        raise RecipeError("learning_rate and learning_rates are both given: give one.")
    if "resume_from_checkpoint" in given:
        raise RecipeError("resume_from_checkpoint: a run that has a checkpoint is continued from it; leave it out.")
    runs = Path(arguments.output_dir) / "runs"
    overruled = set(IGNORED_ARGUMENTS) | set(_OWN) | ({"learning_rate"} if arguments.learning_rates else set())
    shared = {
        "recipe": Path(arguments.recipe).name,
        "arguments": {name: value for name, value in {**from_file, **given}.items() if name not in overruled},
    }
    _check_others(runs, shared)
    jobs: list[Job] = []
    finished = []
    start = (*launcher_words(arguments.launcher), arguments.recipe, *rest)
    rates: list[float | None] = [None] if arguments.learning_rates is None else [*arguments.learning_rates]
    for seed, rate, (arm, word) in itertools.product(arguments.seeds, rates, arguments.arms().items()):
        name = "--".join([arm, *([] if rate is None else [f"lr{rate:g}"]), f"seed{seed}"])
        folder = runs / name
        if run_status(folder) == "finished":
            finished.append(name)
            continue
        words = ["--qk_init", word, "--seed", str(seed), "--output_dir", str(folder)]
        words += [] if rate is None else ["--learning_rate", repr(rate)]
        if any(folder.glob("checkpoint-*/trainer_state.json")):
            words += ["--resume_from_checkpoint", "true"]
        jobs.append(Job(name, folder, (*start, *words)))
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / RECORD).write_text(json.dumps(shared, indent=2) + "\n", encoding="utf-8")
    return jobs, finished


def _given(rest: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the words for the recipe say, by name: the content of a file, and the words after each flag."""
    words = without_secrets(rest)
    from_file: dict[str, Any] = {}
    if words and words[0].lower().endswith(CONFIG_SUFFIXES) and not words[0].startswith("-"):
        from_file = read_argument_file(Path(words.pop(0)))
    given: dict[str, list[str]] = {}
    flag: str | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            flag = flag.replace("-", "_")
            given[flag] = [value] if equals else []
        elif flag is None:
            raise RecipeError(f"{word!r} belongs to no argument; a file of arguments comes first.")
        else:
            given[flag].append(word)
    return from_file, {name: " ".join(values) for name, values in given.items()}


def _check_others(runs: Path, shared: Mapping[str, Any]) -> None:
    """All runs of the folder enter the comparison, so all must have been started alike."""
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()):
        if run_status(folder) is None:
            continue
        path = folder / RECORD
        if not path.is_file():
            raise RecipeError(f"{str(folder)!r} is a run that compare.py did not start: choose another output_dir.")
        theirs = json.loads(path.read_text(encoding="utf-8"))
        different = []
        if theirs["recipe"] != shared["recipe"]:
            different.append(f"recipe ({theirs['recipe']} then, {shared['recipe']} now)")
        then, now = theirs["arguments"], json.loads(json.dumps(shared["arguments"]))
        for name in sorted(set(then) | set(now)):
            if then.get(name) != now.get(name):
                different.append(f"{name} ({_shown(then, name)} then, {_shown(now, name)} now)")
        if different:
            raise RecipeError(
                f"the run in {str(folder)!r} was started with other arguments: {'; '.join(different)}. Repeat the "
                "command with those, or choose another output_dir."
            )


def _shown(arguments: Mapping[str, Any], name: str) -> str:
    return repr(arguments[name]) if name in arguments else "not given"


def _analyse(arguments: ComparisonArguments) -> None:
    """Prints and writes the comparison of all runs in the output folder."""
    folder = Path(arguments.output_dir)
    arms = list(arguments.arms())
    baseline = arguments.baseline or ("none" if "none" in arms else arms[0])
    comparison = compare_runs([folder / "runs"], baseline=baseline)
    tables = make_tables(comparison)
    print("\n" + "\n".join(render(table, Format.TEXT) for table in tables.values()))
    drawn = importlib.util.find_spec("matplotlib") is not None
    write_comparison(comparison, folder / "comparison", figure=drawn)
    without = "" if drawn else '; no figure without matplotlib: pip install "hf_symqk[plots]"'
    print(f"tables, figure and JSON are in {folder / 'comparison'}{without}", flush=True)


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    """
    Makes the runs that are missing, and compares all that are finished.

    Args:
        argv (sequence of `str`, *optional*):
            Words of the command line; `sys.argv[1:]` without it.

    Returns:
        `list[Outcome]`: how the runs ended that were made.

    Raises:
        RecipeError: for arguments that cannot be used, a folder in use, and runs that cannot be compared.
    """
    words = sys.argv[1:] if argv is None else argv
    arguments, rest = parse_own_arguments(ComparisonArguments, words)
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".compare.lock", timeout=0):
            jobs, finished = plan(arguments, rest)
            if finished:
                print(f"finished already: {', '.join(finished)}", flush=True)
            if jobs:
                print(
                    f"{len(jobs)} runs, {arguments.jobs} at once: {shlex.join(without_secrets(jobs[0].command))}",
                    flush=True,
                )
            outcomes = run_jobs(jobs, arguments.jobs, lambda line: print(line, flush=True))
            failed = [outcome.job.name for outcome in outcomes if not outcome.finished]
            try:
                _analyse(arguments)
            except ComparisonError as error:
                raise RecipeError(f"{error} Failed: {', '.join(failed)}." if failed else str(error)) from None
    except Timeout:
        raise RecipeError(f"another compare.py is at work in {arguments.output_dir!r}.") from None
    if failed:
        print(f"{len(failed)} of {len(jobs)} runs failed, the same command tries them again: {', '.join(failed)}")
    return outcomes


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)  # as a scheduler sends it; the runs that are under way end with this one
    try:
        ended = main()
    except RecipeError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0 if all(outcome.finished for outcome in ended) else 1)
