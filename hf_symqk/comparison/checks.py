"""What runs must share to be compared: everything but the initialisation, the seed and, on purpose, the rate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import ComparisonError
from .runs import RATE, Run, arm_name, listed


__all__ = [
    "IGNORED_ARGUMENTS",
    "check_arms",
    "check_unique",
    "differing_arguments",
    "differing_settings",
    "pairing",
    "state_unrecorded",
]

# Where a run is written, watched and kept, and how its batches come to it: none of it reaches the weights.
IGNORED_ARGUMENTS = frozenset(
    {
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "disable_tqdm",
        "hub_always_push",
        "hub_model_id",
        "hub_private_repo",
        "hub_revision",
        "hub_strategy",
        "hub_token",
        "local_rank",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "logging_dir",
        "output_dir",
        "overwrite_output_dir",
        "preprocessing_num_workers",
        "project",
        "push_to_hub",
        "report_to",
        "restore_callback_states_from_checkpoint",
        "resume_from_checkpoint",
        "run_name",
        "save_on_each_node",
        "save_only_model",
        "save_steps",
        "save_strategy",
        "save_total_limit",
        "trackio_space_id",
    }
)
# What makes an arm, a seed or a rate of the comparison.
_VARIED = frozenset({"qk_init", "seed", "data_seed", "learning_rate"})
# What of an initialisation says which values and biases it redraws, and how.
_REDRAWING = ("distribution", "layers", "attention")
# How long a run is planned to be.
_LENGTH = frozenset({"max_steps", "num_train_epochs"})
# Learning rates are logged in full; shares of the same rate differ by rounding.
_SAME_RATE = 1e-6
_SETTINGS = ("recipe", "model", "data", "num_processes", "max_steps")


def check_unique(runs: Iterable[Run]) -> None:
    """
    Refuses two runs of one arm, rate and seed.

    Args:
        runs (iterable of [`Run`]): The runs.

    Raises:
        ComparisonError: naming both.
    """
    seen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        other = seen.setdefault((run.group, run.arm, run.learning_rate, run.seed), run)
        if other is not run:
            seed = "no seed is known of either" if run.seed is None else f"seed {run.seed}"
            raise ComparisonError(
                f"{other.name} and {run.name} are both of arm {run.arm!r} ({seed}): give one of them, name folders "
                "like 'symmetric-seed0', or say by a pattern where arm and seed stand."
            )


def check_arms(runs: Iterable[Run]) -> list[str]:
    """
    Refuses an arm that holds runs of several initialisations, as a pattern can make it that does not tell them apart.

    Args:
        runs (iterable of [`Run`]): The runs.

    Returns:
        `list[str]`: A statement where arms have other names than the initialisations that `run.json` records.

    Raises:
        ComparisonError: naming two runs of one arm and the initialisation of each.
    """
    inits: dict[str, tuple[Run, str, str]] = {}
    for run in runs:
        if run.record is None:
            continue
        # Two options can be too alike for their names (lists in lists): what is recorded tells.
        name, written = arm_name(run.record["qk_init"]), json.dumps(run.record["qk_init"], sort_keys=True)
        other, expected, theirs = inits.setdefault(run.arm, (run, name, written))
        if written != theirs:
            if name == expected:
                name, expected = written, theirs
            raise ComparisonError(
                f"{other.name} and {run.name} are both called {run.arm!r}, but run.json records different "
                f"initialisations of them: {expected} and {name}. Let the group arm of a pattern tell them apart."
            )
    named = {arm: name for arm, (_, name, _) in inits.items() if arm != name}
    if not named:
        return []
    listed = "; ".join(f"{arm}: {name}" for arm, name in named.items())
    return [f"Arms are named by the pattern; the initialisations that run.json records of them: {listed}."]


def differing_arguments(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """
    Arguments by which two runs differ although they should not.

    Args:
        first (`Mapping[str, Any]`): Arguments of one run.
        second (`Mapping[str, Any]`): Arguments of another.

    Returns:
        `dict`: Both values by name, without the initialisation, seeds, the learning rate, and what does not reach the
        weights (folders, names, saving, the Hub, the readers of the data).

    Example:

    ```python
    >>> differing_arguments({"block_size": 64, "output_dir": "a"}, {"block_size": 128, "output_dir": "b"})
    {'block_size': (64, 128)}

    ```
    """
    names = sorted((set(first) | set(second)) - IGNORED_ARGUMENTS - _VARIED)
    return {
        name: (first.get(name), second.get(name)) for name in names if not _same(first.get(name), second.get(name))
    }


def differing_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """
    [`differing_arguments`] of two records, and what else they say of how they were trained.

    Args:
        first (`Mapping[str, Any]`): A `run.json`.
        second (`Mapping[str, Any]`): Another.

    Returns:
        `dict`: Both values by name.
    """
    different = differing_arguments(first.get("arguments") or {}, second.get("arguments") or {})
    for name in _SETTINGS:
        values = [_without_own(record.get(name)) for record in (first, second)]
        if not _same(*values):
            different.setdefault(name, (values[0], values[1]))
    return different


def pairing(runs: Sequence[Run], differing: Iterable[str] = (), cut: bool = False) -> list[str]:
    """
    Checks that runs differ in nothing but the initialisation, the seed and the rate, and that runs of one seed saw the
    same batches and started from the same other weights.

    Args:
        runs (sequence of [`Run`]): Runs of one group.
        differing (iterable of `str`, *optional*): Arguments that may differ; the weights then may too.
        cut (`bool`, *optional*, defaults to `False`): Whether their lengths may differ.

    Returns:
        `list[str]`: Statements on what could not be checked, or differs by intent.

    Raises:
        ComparisonError: naming the runs and what differs.
    """
    recorded = [run for run in runs if run.record is not None]
    notes = []
    allowed = set(differing)
    for run in recorded[1:]:
        different = differing_settings(_record(recorded[0]), _record(run))
        expected = allowed | (_LENGTH if cut else frozenset())
        different = {name: values for name, values in different.items() if name not in expected}
        if different:
            values = "; ".join(f"{name} ({_short(a)} and {_short(b)})" for name, (a, b) in different.items())
            raise ComparisonError(
                f"{recorded[0].name} and {run.name} differ in more than the initialisation: {values}."
            )
    for name, versions in _versions(recorded).items():
        notes.append(f"Versions of {name} differ between runs: {', '.join(versions)}.")
    fault = "have the same seed but saw different batches"
    if cut:
        notes += _shared_start(recorded)
        notes += _same_hashes(recorded, "batches", lambda run: (run.seed, _hash(run, "steps")), fault)
    else:
        notes += _same_hashes(
            recorded, "steps", lambda run: (run.seed,), "were hashed over different numbers of steps"
        )
        notes += _same_hashes(recorded, "batches", lambda run: (run.seed,), fault)
    if any(_hash(run, "head") is not None for run in recorded):
        notes += _same_hashes(recorded, "head", lambda run: (run.seed,), "have the same seed but other fresh heads")
    if allowed:
        notes.append(f"By wish these may differ between arms, and the first weights with them: {', '.join(allowed)}.")
        return notes
    other = "have the same seed but started from different weights (other than {})"
    notes += _same_hashes(recorded, "weights", lambda run: (run.seed,), other.format("Q, K and V of attention"))
    notes += _same_hashes(recorded, "v", lambda run: (run.seed, _redraws(run)), other.format("Q and K of attention"))
    redrawing = sorted({run.arm for run in recorded if _redraws(run)})
    if redrawing and any(not _redraws(run) for run in recorded):
        notes.append(
            f"{', '.join(redrawing)}: a `distribution` redraws V and the biases of attention too, so these arms "
            "differ from the others in scale as well as in what the scheme does."
        )
    return notes


def state_unrecorded(runs: Sequence[Run]) -> list[str]:
    """
    Says of which runs it is not known whether they are pairs.

    Args:
        runs (sequence of [`Run`]): All runs.

    Returns:
        `list[str]`: One statement, or none.
    """
    sources = list(dict.fromkeys(run.source for run in runs if run.record is None))
    if not sources:
        return []
    return [
        "Pairing could not be checked: whether these runs share batches, other weights and arguments is not recorded "
        f"(no run.json): {listed(sources)}."
    ]


def _record(run: Run) -> Mapping[str, Any]:
    return run.record or {}


def _redraws(run: Run) -> str:
    """What an initialisation does to weights beside Q and K: empty for nothing."""
    init = _record(run).get("qk_init")
    if not isinstance(init, Mapping) or init.get("distribution") is None:
        return ""
    return json.dumps({name: init[name] for name in _REDRAWING if name in init}, sort_keys=True)


def _same_hashes(runs: Sequence[Run], name: str, key: Callable[[Run], tuple[Any, ...]], fault: str) -> list[str]:
    """Refuses a hash that differs among runs of one key; says whose is not known."""
    seen: dict[tuple[Any, ...], tuple[Run, Any]] = {}
    unknown = []
    for run in runs:
        value = _hash(run, name)
        if value is None:
            unknown.append(run.name)
            continue
        other, expected = seen.setdefault(key(run), (run, value))
        if value != expected:
            raise ComparisonError(f"{other.name} and {run.name} {fault}: they are no pair.")
    if not unknown:
        return []
    return [f"Pairing could not be checked: run.json has no hash of {name} (as after resuming): {listed(unknown)}."]


def _shared_start(runs: Sequence[Run]) -> list[str]:
    """
    Of runs of different length, holds the learning rates to each other, as shares of each run's own, as far as all
    go: a rate that falls to the end of a run has done so at another step in each.
    """
    lengths = {(_record(run).get("max_steps"), _hash(run, "steps")) for run in runs}
    if len(lengths) < 2:
        return []
    known = [run for run in runs if run.learning_rate and RATE in run.curves]
    for run in known[1:]:
        shares = [one.curves[RATE] / (one.learning_rate or 1.0) for one in (known[0], run)]
        first, other = shares[0].align(shares[1], join="inner")
        if first.empty:
            raise ComparisonError(
                f"{known[0].name} and {run.name} are of different length and logged their learning rates at no common "
                "step: whether they were alike as far as both go cannot be told. Log both at the same steps."
            )
        apart = first.index[(first - other).abs() > _SAME_RATE]
        if len(apart):
            rates = " and ".join(f"{one.curves[RATE][apart[0]]:.3g}" for one in (known[0], run))
            raise ComparisonError(
                f"{known[0].name} and {run.name} are of different length, and at step {apart[0]} their learning rates "
                f"are {rates}: cut to the steps that both have, they would still differ in more than the "
                "initialisation. Train both for the same number of steps, or with a learning rate that does not "
                "follow it (constant_with_warmup, and warmup_steps as a number of steps)."
            )
    notes = [
        "Runs of different length are compared as far as all go. Whether they saw the same batches could be checked "
        "for runs of equal length only."
    ]
    if len(known) < len(runs):
        unknown = [run.name for run in runs if run not in known]
        notes.append(f"Whether their learning rates agreed so far is not known (not logged): {listed(unknown)}.")
    return notes


def _hash(run: Run, name: str) -> Any:
    """A hash of the record; that of a pretrained model's fresh head is recorded with its task."""
    return (_record(run).get("data" if name == "head" else "hashes") or {}).get(name)


def _versions(runs: Sequence[Run]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run in runs:
        versions = _record(run).get("versions")
        for name, version in (versions if isinstance(versions, Mapping) else {}).items():
            found.setdefault(str(name), []).append(str(version))
    return {name: sorted(set(values)) for name, values in found.items() if len(set(values)) > 1}


def _without_own(value: Any) -> Any:
    """Without the initialisation, and without the digest of a fresh head, which follows the seed."""
    if isinstance(value, Mapping):
        return {name: _without_own(inner) for name, inner in value.items() if name not in ("qk_init", "head")}
    return [_without_own(inner) for inner in value] if isinstance(value, list) else value


def _same(first: Any, second: Any) -> bool:
    return json.dumps(first, sort_keys=True, default=str) == json.dumps(second, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
