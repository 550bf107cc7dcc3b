"""
Cost of `QKScoreCallback` in a training run: time, extra memory, host synchronisations.

    python benchmarks/callback.py [--threads 1] [--steps 20] [--quick] [--json results.json]

A Trainer trains a BERT-base on random tokens. At each logging event the compared callbacks measure one after another,
so that steps and measurements come from one run. See README.md beside this file for how to read the table.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from bilinear import dense_scores, peak_memory
from report import Result, argument_parser, facts, mib, ms, show
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_symqk import QKScoreCallback, find_attention_layers
from hf_symqk.attention import AttentionLayer
from hf_symqk.scoring import score_layers


LOGGING_STEPS = 10  # what the share of training time is stated for
MEASURE_STEPS = 4  # what the run does, so that each callback measures often enough for a median
Scores = list[list[float]]


# --- the run ------------------------------------------------------------------------------------------------------


class RandomTokens(Dataset):
    """Sequences of random tokens, all of them labels."""

    def __init__(self, number: int, length: int, vocab_size: int):
        self.tokens = torch.randint(0, vocab_size, (number, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class StepTimer(TrainerCallback):
    """Seconds of each training step, from its begin to its end (forward, backward, clipping, optimiser)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    # Callbacks that score before a Trainer's own stand first, so this is after the measurement at the first step.
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds.append(time.perf_counter() - self.start)


class TimedQKScores(QKScoreCallback):
    """The callback itself, with the seconds of each measurement: finding, scoring, the row in the history file."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.seconds: list[float] = []

    def _measure(self, model: nn.Module, state: TrainerState) -> dict[str, float]:
        start = time.perf_counter()
        values = super()._measure(model, state)
        self.seconds.append(time.perf_counter() - start)
        return values


class DenseScores(TrainerCallback):
    """
    Multiplies out the matrices of all heads of a layer at once and reads each value as it comes, at each logging event
    and before the first step.

    Args:
        published (`bool`): The values of the published callback, norm and symmetry (which it takes from small
            products), instead of those of `QKScoreCallback(heads=True)`, each by its dense formula.
    """

    def __init__(self, published: bool):
        self.published = published
        self.seconds: list[float] = []
        self.scores: Scores = []

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:
            self._timed(kwargs["model"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "loss" in kwargs["logs"]:
            self._timed(kwargs["model"])

    def _timed(self, model: nn.Module) -> None:
        start = time.perf_counter()
        self.scores = self.measure(model)
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> Scores:
        """The symmetry of each head of each layer; everything else is computed, read and dropped."""
        return [self._layer(layer) for layer in find_attention_layers(model)]

    def _layer(self, layer: AttentionLayer) -> list[float]:
        with layer.query_key_weights() as (w_q, w_k):
            w = w_q.mT @ w_k  # (H, D, D)
            norms = torch.linalg.vector_norm(w, dim=(1, 2))
            if self.published:
                gram_q, gram_k, mixed = w_q @ w_q.mT, w_k @ w_k.mT, w_k @ w_q.mT
                scores = [(mixed * mixed.mT).sum((1, 2)) / (gram_q * gram_k).sum((1, 2))]
            else:
                scores = [torch.stack(values) for values in zip(*map(dense_scores, w), strict=True)]
            symmetry, *_ = ([float(value) for value in values] for values in (*scores, norms))
        return symmetry


def train(
    config: BertConfig, batch: int, length: int, steps: int
) -> tuple[nn.Module, TrainerState, StepTimer, dict[str, Any]]:
    """One run with all callbacks; in the end they have to agree on the symmetry of each head."""
    callbacks: dict[str, Any] = {
        "defaults": TimedQKScores(),
        "heads=True": TimedQKScores(heads=True, prefix="qk_heads"),
        "dense": DenseScores(published=False),
        "published": DenseScores(published=True),
    }
    timer = StepTimer()
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=steps,
                logging_steps=MEASURE_STEPS,
                per_device_train_batch_size=batch,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                log_level="error",
            ),
            train_dataset=RandomTokens(steps * batch, length, config.vocab_size),
            callbacks=[*callbacks.values(), timer],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    for name, callback in callbacks.items():
        expected = 1 + steps // MEASURE_STEPS
        assert len(callback.seconds) == expected, f"{name} measured {len(callback.seconds)} times, not {expected}"
    ours = callbacks["heads=True"].scores.layers
    for layer, dense, published in zip(ours, callbacks["dense"].scores, callbacks["published"].scores, strict=True):
        for values in (dense, published):
            torch.testing.assert_close(torch.tensor(layer.head_symmetry), torch.tensor(values), atol=1e-4, rtol=0)
    return model, trainer.state, timer, callbacks


# --- host synchronisations ----------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """
    Counts what makes the host wait for a device: transfers to the host, and operations whose result or shape depends
    on values. On the meta device, which has no values, they return zeros, so that work goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = func is torch.ops.aten.copy_.default
        source = args[1] if copies else args[0] if args else None
        if not isinstance(source, Tensor) or source.device.type == "cpu":
            return func(*args, **kwargs)
        zeros: Callable[[], Any]
        if func is torch.ops.aten._local_scalar_dense.default:
            zeros = torch.zeros((), dtype=source.dtype).item
        elif func is torch.ops.aten.nonzero.default:
            zeros = partial(source.new_zeros, (0, source.ndim), dtype=torch.int64)
        elif copies and args[0].device.type == "cpu":
            zeros = args[0].zero_
        elif func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu":
            zeros = partial(torch.zeros, source.shape, dtype=kwargs.get("dtype") or source.dtype)
        else:
            return func(*args, **kwargs)  # on the meta device, what else needs values fails
        self.reads.append(str(func))
        return zeros()


class OnMeta(AttentionLayer):
    """A layer whose weights, as the scores see them, are on the meta device."""

    @contextmanager
    def query_key_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        with super().query_key_weights() as weights:
            w_q, w_k = (weight.to("meta") for weight in weights)
            yield w_q, w_k


def host_reads(layers: list[AttentionLayer], heads: bool = False) -> list[str]:
    """The operations for which one measurement would wait on an accelerator."""
    on_meta = [OnMeta(**vars(layer)) for layer in layers]
    with HostReads() as counter:
        score_layers(on_meta, heads=heads)
    return counter.reads


# --- the table ----------------------------------------------------------------------------------------------------


def compare(config: BertConfig, batch: int, length: int, steps: int) -> list[Result]:
    model, state, timer, callbacks = train(config, batch, length, steps)
    layers = find_attention_layers(model)
    step = statistics.median(timer.seconds[1:])
    costs = {name: statistics.median(callback.seconds[1:]) for name, callback in callbacks.items()}
    print(f"one training step takes {ms(step)}; one measurement, in training steps:", end=" ")
    print(", ".join(f"{name} {cost / step:.3f} ({ms(cost)})" for name, cost in costs.items()))
    peaks = {name: peak_memory(partial(callbacks[name].measure, model)) for name in ("dense", "published")}
    twice = 2 * max(4 * _query_key_entries(layer) for layer in layers)
    results: list[Result] = []
    for name, heads in (("defaults", False), ("heads=True", True)):
        cost = costs[name]
        peak = peak_memory(partial(QKScoreCallback(heads=heads)._measure, model, state))
        reads = len(host_reads(layers, heads))
        share = cost / (LOGGING_STEPS * step)
        rows = [
            ("time, in training steps", ms(cost), ms(step), cost / step, "", True),
            (
                f"time, of {LOGGING_STEPS} steps",
                ms(cost),
                ms(LOGGING_STEPS * step),
                share,
                "< 0.01",
                share < 0.01,
            ),
            (
                "time, against dense heads",
                ms(cost),
                ms(costs["dense"]),
                costs["dense"] / cost,
                "",
                True,
            ),
            (
                "time, against published",
                ms(cost),
                ms(costs["published"]),
                costs["published"] / cost,
                "",
                True,
            ),
            ("extra memory, of twice Q + K", mib(peak), mib(twice), peak / twice, "< 1", peak < twice),
            *(
                (f"extra memory, of {other}", mib(peak), mib(peaks[other]), peak / peaks[other], "", True)
                for other in peaks
            ),
            ("host synchronisations", str(reads), f"{len(layers)} layers", reads, "= 1", reads == 1),
        ]
        results += [Result(f"{name}: {what}", *rest) for what, *rest in rows]
    return results


def _query_key_entries(layer: AttentionLayer) -> int:
    heads = layer.heads.num_attention_heads + layer.heads.num_key_value_heads
    return heads * layer.heads.head_dim * layer.input_width("query")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    arguments = parser.parse_args()
    if arguments.steps < 2 * MEASURE_STEPS or arguments.steps % MEASURE_STEPS:
        parser.error(f"--steps must be a multiple of {MEASURE_STEPS}, {2 * MEASURE_STEPS} or more")
    config, batch, length = BertConfig(), 8, 128
    if arguments.quick:
        config = BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
        )
        batch, length = 2, 16
    about = facts(
        arguments,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
        batch=f"{batch} x {length}",
        steps=arguments.steps,
        measured=f"every {MEASURE_STEPS} steps",
    )
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    show(compare(config, batch, length, arguments.steps), about, arguments.json)


if __name__ == "__main__":
    main()
