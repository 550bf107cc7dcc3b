"""A comparison as JSON values."""

from __future__ import annotations

import math
from typing import Any

from .results import ArmSummary, Comparison, Contrast, Secondary
from .speedup import SpeedUp
from .statistics import Estimate


__all__ = [
    "arm_document",
    "contrast_document",
    "contrast_facts",
    "estimate_document",
    "secondary_document",
    "to_document",
]


def to_document(comparison: Comparison) -> dict[str, Any]:
    """
    A comparison as JSON values.

    Args:
        comparison ([`Comparison`]): What [`compare_runs`] returned.

    Returns:
        `dict`: `baseline`, `confidence`, `window`, `arms`, `contrasts`, `runs`, `notes` and `left_out`; what is not
        known or not finite is `None`.
    """
    return _finite(
        {
            "baseline": comparison.baseline,
            "confidence": comparison.confidence,
            "window": comparison.window,
            "arms": [arm_document(one) for one in comparison.arms],
            "contrasts": [contrast_document(one) for one in comparison.contrasts],
            "runs": [
                {
                    "name": run.name,
                    "group": run.group,
                    "arm": run.arm,
                    "seed": run.seed,
                    "learning_rate": run.learning_rate,
                }
                for run in comparison.runs
            ],
            "notes": list(comparison.notes),
            "left_out": list(comparison.left_out),
        }
    )


def arm_document(one: ArmSummary) -> dict[str, Any]:
    """One arm as JSON values."""
    return {
        "group": one.group,
        "arm": one.arm,
        "learning_rate": one.learning_rate,
        "best_rate": one.best,
        "seeds": list(one.seeds),
        "train_loss": estimate_document(one.train),
        "held_out_loss": estimate_document(one.held_out),
        "unigram_entropy": one.entropy,
        "learned": one.learned,
        "metrics": {name: estimate_document(found) for name, found in one.metrics.items()},
    }


def contrast_facts(contrast: Contrast) -> dict[str, Any]:
    """What is compared with what."""
    return {
        "group": contrast.group,
        "treated": contrast.treated,
        "baseline": contrast.baseline,
        "setting": contrast.setting,
        "treated_rate": contrast.treated_rate,
        "baseline_rate": contrast.baseline_rate,
        "seeds": len(contrast.seeds),
    }


def contrast_document(one: Contrast) -> dict[str, Any]:
    """One contrast as JSON values."""
    return {
        **contrast_facts(one),
        "seeds": list(one.seeds),
        "train_difference": estimate_document(one.train),
        "held_out_difference": estimate_document(one.held_out),
        "tested": one.tested,
        "p": one.p,
        "p_corrected": one.p_corrected,
        "p_smallest": one.p_smallest,
        "verdict": one.verdict,
        "metrics": {name: secondary_document(found) for name, found in one.metrics.items()},
        "speed_up": {
            "raw": [_speed_document(speed) for speed in one.raw],
            "raw_null": [_speed_document(speed) for speed in one.raw_null],
            "smoothed": [_speed_document(speed) for speed in one.smoothed],
            "smoothed_null": [_speed_document(speed) for speed in one.smoothed_null],
        },
    }


def estimate_document(found: Estimate | None) -> dict[str, Any] | None:
    """A mean with its interval and values, as JSON values."""
    if found is None:
        return None
    return {"mean": found.mean, "low": found.low, "high": found.high, "values": list(found.values)}


def secondary_document(found: Secondary) -> dict[str, Any]:
    """A difference in a metric as JSON values."""
    return {"difference": estimate_document(found.difference), "p_uncorrected": found.p}


def _speed_document(speed: SpeedUp) -> dict[str, Any]:
    return {"fraction": speed.fraction, "reached": speed.reached, "step": speed.step, "target": speed.target}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
