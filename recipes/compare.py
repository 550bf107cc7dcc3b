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
import math
import shlex
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from argument_parsing import check_file_keys, given_arguments, parse_own_arguments, split_file
from arguments import RecipeError, parse_qk_init
from filelock import FileLock, Timeout
from jobs import Job, Outcome, is_under_way, launcher_words, run_jobs, run_record
from resuming import newest_checkpoint
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
_LARGEST_SEED = 2**32 - 1  # NumPy's


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
        for seed in self.seeds:
            if not 0 <= seed <= _LARGEST_SEED:
                raise RecipeError(f"seeds: {seed} is no seed; choose from 0 to {_LARGEST_SEED}.")
        for rate in self.learning_rates or ():
            if not 0 < rate < math.inf:
                raise RecipeError(f"learning_rates: {rate:g} is no learning rate; choose above 0.")
        self.arms()

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
    from_file, flags = split_file(rest)
    given = _given(flags)
    for name, instead in _OWN.items():
        if name in given:
            raise RecipeError(f"{name} in the recipe's arguments: each run has its own; give --{instead}.")
    if arguments.learning_rates is not None and "learning_rate" in given:
        raise RecipeError("learning_rate and learning_rates are both given: give one.")
    if "resume_from_checkpoint" in {**from_file, **given}:
        raise RecipeError("resume_from_checkpoint: a run that has a checkpoint is continued from it; leave it out.")
    recipe_rate = _recipe_rate(arguments.recipe, from_file, flags)
    runs = Path(arguments.output_dir) / "runs"
    overruled = set(IGNORED_ARGUMENTS) | set(_OWN)
    shared = {
        "recipe": Path(arguments.recipe).name,
        "arguments": {name: value for name, value in {**from_file, **given}.items() if name not in overruled},
    }
    there = _runs_there(runs)
    _check_others(there, shared, arguments.learning_rates is not None)
    _check_arms(arguments, there)
    jobs: list[Job] = []
    finished = []
    start = (*launcher_words(arguments.launcher), arguments.recipe, *rest)
    rates: list[float | None] = [None] if arguments.learning_rates is None else [*arguments.learning_rates]
    for seed, rate, (arm, word) in itertools.product(arguments.seeds, rates, arguments.arms().items()):
        name = "--".join([arm, *([] if rate is None else [f"lr{rate:g}"]), f"seed{seed}"])
        asked = recipe_rate if rate is None else rate
        folder = _same_run(there, arm, asked, seed) or runs / name
        record = there.get(folder)
        if record is not None and asked is not None and record["learning_rate"] != asked:
            raise RecipeError(
                f"the run in {str(folder)!r} is of another learning rate ({record['learning_rate']:g} then, {asked:g} "
                "now): give --learning_rates, or choose another output_dir."
            )
        if record is not None and record["status"] == "finished":
            finished.append(folder.name)
            continue
        if is_under_way(folder):
            raise RecipeError(
                f"the run in {str(folder)!r} is still at work, without the compare.py that started it: wait until it "
                "has ended, or end its processes."
            )
        words = ["--qk_init", word, "--seed", str(seed), "--output_dir", str(folder)]
        words += [] if rate is None else ["--learning_rate", repr(rate)]
        checkpoint = newest_checkpoint(folder)
        words += [] if checkpoint is None else ["--resume_from_checkpoint", str(checkpoint)]
        jobs.append(Job(folder.name, folder, (*start, *words)))
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / RECORD).write_text(json.dumps(shared, indent=2) + "\n", encoding="utf-8")
    return jobs, finished


def _given(words: Sequence[str]) -> dict[str, str]:
    """The words after each flag for the recipe, by its name."""
    given: dict[str, list[str]] = {}
    flag: str | None = None
    for word in without_secrets(words):
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            flag = flag.replace("-", "_")
            given[flag] = [value] if equals else []
        elif flag is None:
            raise RecipeError(f"{word!r} belongs to no argument; a file of arguments comes first.")
        else:
            given[flag].append(word)
    return {name: " ".join(values) for name, values in given.items()}


def _check_file_values(rest: Sequence[str], given: Collection[str]) -> None:
    """What a comparison varies is not taken from the recipe's file, nor overruled in silence."""
    from_file, _ = split_file(rest)
    for name in ("qk_init", "seed"):
        flag = _OWN[name]
        if name in from_file and flag not in given:
            value = from_file[name]
            word = value if isinstance(value, str) else json.dumps(value)
            example = shlex.join(["none", word] if name == "qk_init" and word != "none" else [word]) + " …"
            raise RecipeError(f"{rest[0]} gives {name}, which a comparison varies: say --{flag}, as in {example}")


def _recipe_rate(recipe: str, from_file: Mapping[str, Any], words: Sequence[str]) -> float | None:
    """
    The learning rate of runs that are given none of their own, and on the way whether the recipe knows its arguments:
    else every run would say so. What a script of one's own knows cannot be asked; its default is not known (`None`).
    """
    path = Path(recipe).resolve()
    defaults: Mapping[str, Any] = {}
    values: Mapping[str, Any] = _given(words)
    if path.parent == Path(__file__).resolve().parent:
        module = importlib.import_module(path.stem)
        if not hasattr(module, "ARGUMENTS"):
            raise RecipeError(f"recipe={recipe!r} makes no runs that could be compared.")
        check_file_keys(from_file, module.ARGUMENTS)
        defaults = module.DEFAULTS
        values, unknown = given_arguments(module.ARGUMENTS, words)
        if unknown:
            raise RecipeError(f"{path.name} has no argument {' '.join(unknown)}: see its --help.")
    rate = {**defaults, **from_file, **values}.get("learning_rate")
    try:
        return None if rate is None else float(rate)
    except (TypeError, ValueError):
        raise RecipeError(f"learning_rate={rate!r} is no number.") from None


def _runs_there(runs: Path) -> dict[Path, dict[str, Any]]:
    """The records of the runs in a folder."""
    folders = sorted(path for path in runs.glob("*") if path.is_dir())
    return {folder: record for folder in folders if (record := run_record(folder)) is not None}


def _same_run(there: Mapping[Path, Mapping[str, Any]], arm: str, rate: float | None, seed: int) -> Path | None:
    """A run that is there under another name, as that of a rate that is the recipe's own; all say what they were."""
    for folder, record in there.items():
        if (arm_name(record["qk_init"]), record["learning_rate"], record["seed"]) == (arm, rate, seed):
            return folder
    return None


def _check_arms(arguments: ComparisonArguments, there: Mapping[Path, Mapping[str, Any]]) -> None:
    """What is to be compared is here or in the folder: told before the runs are made."""
    arms = list(dict.fromkeys([*arguments.arms(), *_arms(there)]))
    if len(arms) < 2:
        raise RecipeError(f"{arms[0]} is the only initialisation: give --qk_init one to compare it with.")
    if arguments.baseline is not None and arguments.baseline not in arms:
        raise RecipeError(f"baseline={arguments.baseline!r} is none of the arms: {', '.join(arms)}.")


def _arms(there: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    return [arm_name(record["qk_init"]) for record in there.values() if record["status"] == "finished"]


def _check_others(there: Mapping[Path, Mapping[str, Any]], shared: Mapping[str, Any], own_rates: bool) -> None:
    """All runs of the folder enter the comparison, so all must have been started alike."""
    for folder in there:
        path = folder / RECORD
        if not path.is_file():
            raise RecipeError(f"{str(folder)!r} is a run that compare.py did not start: choose another output_dir.")
        theirs = json.loads(path.read_text(encoding="utf-8"))
        different = []
        if theirs["recipe"] != shared["recipe"]:
            different.append(f"recipe ({theirs['recipe']} then, {shared['recipe']} now)")
        then, now = theirs["arguments"], shared["arguments"]
        names = set(then) | set(now)
        if own_rates or "--lr" in folder.name:
            names -= {"learning_rate"}
        for name in sorted(names):
            if _value(then.get(name)) != _value(now.get(name)):
                different.append(f"{name} ({_shown(then, name)} then, {_shown(now, name)} now)")
        if different:
            raise RecipeError(
                f"the run in {str(folder)!r} was started with other arguments: {'; '.join(different)}. Repeat the "
                "command with those, or choose another output_dir."
            )


def _value(value: Any) -> Any:
    """A value of a file, or the words of a command line that mean the same."""
    if not isinstance(value, str):
        return json.loads(json.dumps(value, default=str))
    if value == "":  # a flag alone
        return True
    try:
        return float(value)  # YAML reads 1e-3 as a word
    except ValueError:
        pass
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _shown(arguments: Mapping[str, Any], name: str) -> str:
    return repr(arguments[name]) if name in arguments else "not given"


def _analyse(arguments: ComparisonArguments) -> None:
    """Prints and writes the comparison of all runs in the output folder."""
    folder = Path(arguments.output_dir)
    arms = [*arguments.arms(), *_arms(_runs_there(folder / "runs"))]
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
    _check_file_values(rest, given_arguments([ComparisonArguments], words)[0])
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
