"""Runs as a recipe leaves them, without the training."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


__all__ = ["STEPS", "falling", "fine_tuned", "record", "state", "write_pairs", "write_run"]

STEPS = tuple(range(10, 201, 10))


def falling(end: float, *, start: float = 6.0, noise: float = 0.0, seed: int = 0) -> list[float]:
    """A loss that falls straight from `start` to `end`, with noise on all but its last point."""
    values = np.linspace(start, end, len(STEPS))
    values[:-1] += noise * np.random.default_rng(seed).standard_normal(len(STEPS) - 1)
    return values.tolist()


def record(qk_init: Mapping[str, Any] | None = None, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A `run.json` of a finished run; hashes depend on the seed alone, as those of a pair do."""
    values: dict[str, Any] = {
        "recipe": "mlm",
        "command": "accelerate launch recipes/mlm.py",
        "arguments": {"block_size": 64, "output_dir": "somewhere", "seed": seed, "learning_rate": 1e-3},
        "qk_init": qk_init,
        "seed": seed,
        "learning_rate": 1e-3,
        "max_steps": STEPS[-1],
        "num_processes": 1,
        "data": {"name": "built-in"},
        "versions": {"torch": "2.13"},
        "model": {"class": "BertForMaskedLM", "parameters": 1000, "config": {"qk_init": qk_init}},
        "status": "finished",
        "hashes": {
            "weights": f"w{seed}",
            "v": f"v{seed}",
            "qk": f"q{seed}{qk_init}",
            "batches": f"b{seed}",
            "steps": STEPS[-1],
        },
        "metrics": {"eval_unigram_entropy": 5.2},
        "started": "2026-01-01T00:00:00",
        "finished": "2026-01-01T00:01:00",
    }
    return values | changes


def state(
    train: Sequence[float] | None = None,
    held_out: Mapping[int, float] | None = None,
    scores: Mapping[int, float] | None = None,
    steps: Sequence[int] = STEPS,
    metrics: Mapping[int, Mapping[str, Any]] | None = None,
    rate: Callable[[int], float] = lambda step: 1e-3,
) -> dict[str, Any]:
    """A `trainer_state.json`; `metrics` are logged with the held-out loss of their step, `rate` with the training
    loss."""
    log: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "learning_rate": rate(step)}
        for step, loss in zip(steps, train or [], strict=False)
    ]
    log += [
        {"step": step, "eval_loss": loss, "eval_runtime": 1.0, **(metrics or {}).get(step, {})}
        for step, loss in (held_out or {}).items()
    ]
    log += [
        {"step": step, "qk/symmetry/median": score, "qk/directionality/median": -score, "qk/symmetry/layer_00": score}
        for step, score in (scores or {}).items()
    ]
    last = max(steps)
    log.append({"step": last, "train_loss": 3.3, "train_runtime": 1.0})
    return {"log_history": sorted(log, key=lambda entry: entry["step"]), "global_step": last, "max_steps": last}


def write_run(folder: Path, content: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> Path:
    """Writes both files, or the state alone as a `Trainer` without the recipe's record does."""
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps(content))
    if recorded is not None:
        (folder / "run.json").write_text(json.dumps(recorded))
    return folder


def fine_tuned(folder: Path, arm: str, qk_init: Mapping[str, Any] | None, seed: int, **changes: Any) -> Path:
    """A run as finetune.py leaves it: its first weights are a pretrained model's, its head follows the seed."""
    said = record(qk_init, seed, recipe="finetune", data={"source": "reviews.csv", "head": f"head{seed}"})
    said["hashes"] |= {"weights": f"w{arm}{seed}", "v": f"v{arm}{seed}"}
    said["arguments"] = {"model_name_or_path": f"out/{arm}", "max_length": 16}
    logged = state(falling(0.5), {200: 0.6 + seed / 10})
    return write_run(folder / arm / f"seed{seed}", logged, said | changes)


def write_pairs(
    folder: Path,
    ends: Mapping[str, Sequence[float]],
    inits: Mapping[str, Mapping[str, Any] | None] | None = None,
    *,
    rate: float = 1e-3,
    entropy: float | None = 5.2,
) -> Path:
    """Runs of several arms: `ends` gives for each arm the last held-out loss of seeds 0, 1, …"""
    known: dict[str, Mapping[str, Any] | None] = {"none": None, "symmetric": {"scheme": "symmetric"}, **(inits or {})}
    for arm, values in ends.items():
        for seed, end in enumerate(values):
            metrics = {} if entropy is None else {"eval_unigram_entropy": entropy}
            said = record(known[arm], seed, learning_rate=rate, metrics=metrics)
            said["arguments"] = {**said["arguments"], "learning_rate": rate}
            logged = state(
                falling(end + 0.1, noise=0.05, seed=seed),
                {100: 4.5, 200: end},
                {10: 0.9 if arm != "none" else 0.1, 200: 0.2},
            )
            write_run(folder / f"{arm}--lr{rate:g}--seed{seed}", logged, said)
    return folder
