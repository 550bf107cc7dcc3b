"""What a comparison found: arms, contrasts between them, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .runs import HELD_OUT, TRAIN, Run
from .speedup import SpeedUp
from .statistics import Estimate


__all__ = [
    "EQUAL_RATES",
    "LEARNED_BY",
    "LOSS_LABELS",
    "OWN_RATES",
    "ArmSummary",
    "Comparison",
    "Contrast",
    "Secondary",
]

# Nats below the entropy of the tokens' frequencies that a run must end to count as having learned from context.
LEARNED_BY = 0.3
LOSS_LABELS = {TRAIN: "training loss", HELD_OUT: "held-out loss"}
EQUAL_RATES, OWN_RATES = "equal rates", "own best rates"


@dataclass(frozen=True)
class ArmSummary:
    """
    One arm at one learning rate.

    Attributes:
        group (`str`): Setting that it belongs to; empty for folders of runs.
        arm (`str`): Name of the initialisation.
        learning_rate (`float` or `None`): Its rate, `None` if not known.
        seeds (`tuple`): Its seeds.
        train (`Estimate` or `None`): Last logged training loss over seeds.
        held_out (`Estimate` or `None`): Last held-out loss over seeds.
        entropy (`float` or `None`): Unigram entropy of the held-out tokens.
        best (`bool`): Whether this is the arm's best rate (also where it is its only one).
        metrics (`Mapping[str, Estimate]`): Last held-out accuracy and whatever else the runs logged, by name.
    """

    group: str
    arm: str
    learning_rate: float | None
    seeds: tuple[int | None, ...]
    train: Estimate | None
    held_out: Estimate | None
    entropy: float | None
    best: bool
    metrics: Mapping[str, Estimate] = field(default_factory=dict)

    @property
    def learned(self) -> bool | None:
        """Whether its held-out loss ended 0.3 nats below the unigram entropy; `None` if that is not known."""
        if self.entropy is None or self.held_out is None:
            return None
        return self.held_out.mean <= self.entropy - LEARNED_BY


@dataclass(frozen=True)
class Secondary:
    """
    What a contrast shows in a metric beside the loss. It is no part of the verdict.

    Attributes:
        difference (`Estimate`): Treated minus baseline, last one logged.
        p (`float` or `None`): Sign-flip test over seeds, not corrected for anything; `None` where there is none.
    """

    difference: Estimate
    p: float | None


@dataclass(frozen=True)
class Contrast:
    """
    A treated arm against a baseline arm, paired by seed.

    Attributes:
        group (`str`): Setting that both belong to.
        treated (`str`): Arm.
        baseline (`str`): Arm that it is compared with.
        setting (`str`): `"equal rates"`, or `"own best rates"` where there are several.
        treated_rate (`float` or `None`): Learning rate of the treated arm.
        baseline_rate (`float` or `None`): Learning rate of the baseline.
        seeds (`tuple`): Seeds that both have.
        train (`Estimate` or `None`): Treated minus baseline, last logged training loss.
        held_out (`Estimate` or `None`): Treated minus baseline, last held-out loss.
        tested (`str`): Loss that the test is of: the held-out one where it is known.
        p (`float` or `None`): Sign-flip test over seeds; `None` where there is none.
        p_corrected (`float` or `None`): After Holm's correction over the arms of the same setting.
        p_smallest (`float`): What `p_corrected` cannot go below with the seeds of all contrasts of the setting.
        verdict (`str`): What the data say, in words.
        raw (`tuple[SpeedUp, ...]`): Speed-up by the paper's rule, one a seed whose baseline did not diverge.
        raw_null (`tuple[SpeedUp, ...]`): The same of the baseline against its own end.
        smoothed (`tuple[SpeedUp, ...]`): Speed-up by running means, of the same seeds.
        smoothed_null (`tuple[SpeedUp, ...]`): The same of the baseline against its own end.
        metrics (`Mapping[str, Secondary]`): Differences in held-out accuracy and whatever else the runs logged, by
            name.
    """

    group: str
    treated: str
    baseline: str
    setting: str
    treated_rate: float | None
    baseline_rate: float | None
    seeds: tuple[int | None, ...]
    train: Estimate | None
    held_out: Estimate | None
    tested: str
    p: float | None
    p_corrected: float | None
    p_smallest: float
    verdict: str
    raw: tuple[SpeedUp, ...]
    raw_null: tuple[SpeedUp, ...]
    smoothed: tuple[SpeedUp, ...]
    smoothed_null: tuple[SpeedUp, ...]
    metrics: Mapping[str, Secondary] = field(default_factory=dict)

    @property
    def tested_difference(self) -> Estimate:
        """The difference that the test is of."""
        found = self.held_out if self.tested == LOSS_LABELS[HELD_OUT] else self.train
        assert found is not None
        return found


@dataclass(frozen=True)
class Comparison:
    """
    What [`compare_runs`] found.

    Attributes:
        runs (`tuple[Run, ...]`): The runs compared, held to the same steps.
        baseline (`str`): Name of the baseline arm.
        arms (`tuple[ArmSummary, ...]`): Final losses.
        contrasts (`tuple[Contrast, ...]`): Differences, tests and speed-ups.
        window (`float`): Share of the logged points that the smoothed rule takes.
        confidence (`float`): Level of the intervals; tests are at one minus it.
        notes (`tuple[str, ...]`): Statements on rules, on what the data can show, and on what could not be checked.
        left_out (`tuple[str, ...]`): Runs that are not compared, and why.
    """

    runs: tuple[Run, ...]
    baseline: str
    arms: tuple[ArmSummary, ...]
    contrasts: tuple[Contrast, ...]
    window: float
    confidence: float
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
