"""Scores without checkpoints: what the command is told to score, and what it does with the answer."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from hf_symqk import LayerScores, QKScores


def layer(index: int, *, stack: str = "", symmetry: float = 0.5, key_heads: int = 4, **values: Any) -> LayerScores:
    """A layer of four heads."""
    return LayerScores(
        **{
            "name": f"{stack or 'model'}.layers.{index}.attention",
            "stack": stack,
            "index": index,
            "kind": "self",
            "layout": "query/key",
            "num_heads": 4,
            "num_key_value_heads": key_heads,
            "head_dim": 8,
            "symmetry": symmetry,
            "directionality": -symmetry / 2,
            "frobenius_norm": 12.3456789,
            "head_symmetry": (0.1, 0.2, 0.3, 0.4),
            "head_directionality": (-0.1, -0.2, -0.3, -0.4),
            "head_frobenius_norm": (1.0, 2.0, 3.0, 4.0),
            "verified": True,
            **values,
        }
    )


BAND = {"symmetry_null": (-0.0123, 0.0234), "directionality_null": (-0.2, 0.3)}
SPECTRAL = {
    **{"positivity": 0.75, "normalized_trace": 0.25, "stable_rank": 3.5, "effective_rank": 6.25},
    **{"symmetric_energy": 90.0, "skew_energy": 10.0},
    "head_positivity": (0.5, 0.6, 0.7, 0.8),
    **{f"head_{name}": (1.0, 2.0, 3.0, 4.0) for name in ("normalized_trace", "stable_rank", "effective_rank")},
    **{f"head_{name}": (1.0, 2.0, 3.0, 4.0) for name in ("symmetric_energy", "skew_energy")},
}
SKIPPED = "encoder.0.mixer: FooAttention (model type 'foo') with in_proj"

MODELS = {
    "plain": QKScores((layer(0), layer(1, symmetry=-0.25)), model_type="bert", family="encoder", num_parameters=70000),
    "undefined": QKScores(
        (layer(0), layer(1, symmetry=math.nan, directionality=math.nan, frobenius_norm=math.nan)), model_type="bert"
    ),
    "banded": QKScores((layer(0, **BAND), layer(1, symmetry=math.nan))),
    "unverified": QKScores((layer(0), layer(1, verified=False), layer(2, verified=False)), model_type="own"),
    "spectral": QKScores((layer(0, **SPECTRAL), layer(1, **{**SPECTRAL, "positivity": math.nan}))),
    "grouped": QKScores((layer(0, key_heads=2),), model_type="llama", family="decoder", num_parameters=1_100_000_000),
    "stacks": QKScores(
        (layer(0, stack="encoder"), layer(0, stack="decoder", symmetry=0.125), layer(1, stack="decoder")),
        model_type="t5",
        family="encoder-decoder",
        skipped=(SKIPPED,),
    ),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Replaces the scoring of checkpoints by a look into `MODELS`; collects what was asked for."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def score(model: str, **options: Any) -> QKScores:
        calls.append((model, options))
        name = model.rpartition("/")[2]
        if name in MODELS:
            return MODELS[name]
        if name.startswith("checkpoint-"):
            return QKScores((layer(0, symmetry=int(name.rpartition("-")[2]) / 1000), layer(1, symmetry=0.0)))
        if options["revision"]:
            return MODELS["plain"]
        raise FileNotFoundError(f"There is no {model!r}\nin any folder.")

    monkeypatch.setattr("hf_symqk.cli.scores.score_checkpoint", score)
    return calls


@pytest.fixture
def symqk(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command; exit status, stdout and stderr."""
    from hf_symqk.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run
