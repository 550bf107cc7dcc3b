"""
Training throughput of `recipes/mlm.py` and `recipes/clm.py` beside a plain loop, and how soon their first step comes.

    python benchmarks/recipes.py [--threads 1] [--steps 130] [--quick] [--json results.json]

The recipe and the loop train copies of one model on the same batches and take turns, step by step. See README.md
beside this file for how to read the table.
"""

import copy
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

import language_modeling
import torch
from report import Result, argument_parser, facts, ms, show
from running import Run
from token_weighted import TokenWeightedTrainer
from torch import nn
from torch.nn import functional
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


RECIPES = Path(language_modeling.__file__).parent
PERIOD = 10  # steps from one logging event, with its scores of W_qk, to the next
WARM_UP = PERIOD  # steps that are not counted
SECONDS_TO_FIRST_STEP = 15.0
QUICK = ["--config_overrides", "hidden_size=32,intermediate_size=48,num_hidden_layers=2"]


class WatchedTrainer(TokenWeightedTrainer):
    """Shows the batch, the learning rate and the loss of its last step to the plain loop."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        self.batch = dict(inputs)
        assert self.optimizer is not None
        self.step_rate = self.optimizer.param_groups[0]["lr"]
        self.step_loss = super().training_step(model, inputs, *args)
        return self.step_loss


class PlainLoop(TrainerCallback):
    """
    Behind each step of the recipe, the same step written out: forward, loss, backward, clipping, optimizer. The batch
    is given to it; the recipe has to make it, and logs, scores W_qk and keeps its record in its own time.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.recipe: list[float] = []
        self.plain: list[float] = []
        self.start = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.model = copy.deepcopy(kwargs["model"])
        decays = set(self.trainer.get_decay_parameter_names(self.model))
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            groups[name in decays].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": args.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True,
        )
        self.start = time.perf_counter()

    # The logging of a step follows this event, and so counts for the recipe's next step.
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.perf_counter()
        self.recipe.append(now - self.start)
        for group in self.optimizer.param_groups:
            group["lr"] = self.trainer.step_rate
        loss = self.step(self.trainer.batch)
        self.plain.append(time.perf_counter() - now)
        torch.testing.assert_close(loss, self.trainer.step_loss, rtol=1e-3, atol=0)
        self.start = time.perf_counter()

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One optimizer step; returns the loss before it."""
        self.model.train()
        offset = self.trainer.offset
        logits = self.model(input_ids=batch["input_ids"]).logits
        labels = functional.pad(batch["labels"][:, offset:], (0, offset), value=-100)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def throughput(recipe: str, steps: int, more: list[str]) -> list[Result]:
    """Trains by the recipe's defaults, but for evaluation, with the plain loop in between."""
    loop = PlainLoop()
    original = Run.callbacks

    def watched(self: Run) -> list[TrainerCallback]:
        return [*original(self), loop]

    class Trainer(WatchedTrainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            loop.trainer = self

    module = importlib.import_module(recipe)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Run, "callbacks", watched),
        patch.object(language_modeling, "TokenWeightedTrainer", Trainer),
    ):
        words = ["--max_steps", str(steps), "--output_dir", folder, "--do_eval", "false", "--use_cpu"]
        module.main([*words, "--disable_tqdm", "true", "--logging_steps", str(PERIOD), "--log_level", "error", *more])
    ours, against = (_by_period(times[WARM_UP:]) for times in (loop.recipe, loop.plain))
    ratios = [plain / own for plain, own in zip(against, ours, strict=True)]
    # Other work on the machine comes in bursts, which fall on one side: the median is of periods that they left alone.
    median, whole = statistics.median(ratios), sum(against) / sum(ours)
    what, times = f"{recipe}.py: throughput", (ms(sum(ours)), ms(sum(against)))
    return [
        Result(f"{what}, median of {len(ratios)} periods", *times, median, ">= 0.95", median >= 0.95),
        Result(f"{what}, all {len(ratios) * PERIOD} steps", *times, whole, "", True),
    ]


def _by_period(times: list[float]) -> list[float]:
    return [sum(times[start : start + PERIOD]) for start in range(0, len(times) - PERIOD + 1, PERIOD)]


def first_step(recipe: str, more: list[str]) -> Result:
    """Seconds from the start of a process to the end of its first step, its text prepared by a run before."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(RECIPES / f"{recipe}.py"), "--max_steps", "1", "--output_dir", folder, *more]
        environment = {**os.environ, "HF_DATASETS_CACHE": str(Path(folder) / "cache")}
        for _ in range(2):
            subprocess.run([*command, "--use_cpu"], check=True, capture_output=True, env=environment)
            metrics = json.loads((Path(folder) / "run.json").read_text())["metrics"]
            seconds.append(metrics["train_seconds_to_first_step"])
    fresh, cached = seconds
    ratio = cached / SECONDS_TO_FIRST_STEP
    return Result(
        f"{recipe}.py: first step from the cache, against {SECONDS_TO_FIRST_STEP:.0f} s (right: without it)",
        f"{cached:.1f} s",
        f"{fresh:.1f} s",
        ratio,
        "<= 1",
        ratio <= 1,
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=130, help="training steps (default: 130)")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + PERIOD:
        parser.error(f"--steps must be {WARM_UP + PERIOD} or more")
    more = QUICK if arguments.quick else []
    about = facts(arguments, steps=arguments.steps, models="defaults of the recipes" if not more else "tiny")
    results: list[Result] = []
    for recipe in ("mlm", "clm"):
        results += throughput(recipe, arguments.steps, more)
        results.append(first_step(recipe, more))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    show(results, about, arguments.json)


if __name__ == "__main__":
    main()
