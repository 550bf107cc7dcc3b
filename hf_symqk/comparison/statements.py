"""The sentences below the tables: which rules were used, and what the data can and cannot show."""

from __future__ import annotations

from collections.abc import Sequence

from .results import EQUAL_RATES, OWN_RATES, ArmSummary, Contrast
from .statistics import seeds_needed


__all__ = ["make_statements"]


def make_statements(
    summaries: Sequence[ArmSummary], contrasts: Sequence[Contrast], window: float, level: float
) -> list[str]:
    """
    States how the figures came about.

    Args:
        summaries (sequence of [`ArmSummary`]): All arms.
        contrasts (sequence of [`Contrast`]): All contrasts.
        window (`float`): Share of the logged points in a running mean.
        level (`float`): Level of the tests.

    Returns:
        `list[str]`
    """
    percent = f"{100 * (1 - level):g} %"
    lines = ["Final loss: the last one logged."]
    seeds = {len(one.seeds) for one in summaries}
    if max(seeds) > 1:
        lines.append(f"Intervals: {percent}, Student t over seeds; differences are paired by seed.")
    if min(seeds) == 1:
        lines.append("One seed: there is no interval and no test; a difference between two runs may be chance.")
    tests = [contrast for contrast in contrasts if contrast.p is not None]
    if tests:
        lines.append(
            f"Test: sign-flip permutation of the paired differences of {tests[0].tested}, two-sided, exact up to 16 "
            f"seeds; p is corrected by Holm's method over the arms compared at the same rates. A difference counts at "
            f"p <= {level:g}."
        )
        for count, family, floor in sorted({_reach(contrast, contrasts) for contrast in tests}):
            number, unequal = len(family), len(set(family)) > 1
            of = f" of {', '.join(map(str, family[:-1]))} and {family[-1]} seeds" if unequal else ""
            line = f"With {count} seeds and {number} comparison{'s' * (number > 1)}{of}, p cannot go below {floor:.3g}"
            needed = f"{seeds_needed(number, level)} seeds{' in each' * unequal}"
            lines.append(f"{line}: {needed} could show a difference." if floor > level + 1e-12 else f"{line}.")
    lines += _metric_statements(contrasts)
    if any(contrast.setting == OWN_RATES for contrast in contrasts):
        lines.append(
            "Own best rate: the one of the lowest mean held-out loss (training loss where none is held out), chosen "
            "on the losses reported here, for both arms alike."
        )
        lines += _edges(summaries)
    unknown = [one for one in summaries if one.learned is None]
    if unknown and not any(contrast.metrics for contrast in contrasts):  # an accuracy says it by itself
        lacking = "unigram entropy" if any(one.held_out is not None for one in unknown) else "held-out loss"
        lines.append(f"Whether the runs learned more than the tokens' frequencies is not known: no {lacking}.")
    return lines + _speed_up_statements(contrasts, window)


def _reach(contrast: Contrast, contrasts: Sequence[Contrast]) -> tuple[int, tuple[int, ...], float]:
    """Seeds of a contrast, those of all that are corrected for together, and what its p cannot go below."""

    def place(one: Contrast) -> tuple[object, ...]:
        return one.group, one.setting, one.treated_rate if one.setting == EQUAL_RATES else None

    family = [len(other.seeds) for other in contrasts if other.p is not None and place(other) == place(contrast)]
    return len(contrast.seeds), tuple(sorted(family)), contrast.p_smallest


def _metric_statements(contrasts: Sequence[Contrast]) -> list[str]:
    metrics = {name: found for contrast in contrasts for name, found in contrast.metrics.items()}
    if not metrics:
        return []
    line = f"Primary outcome: {contrasts[0].tested}; verdicts are on it alone. Secondary: {', '.join(metrics)}."
    if all(found.p is None for found in metrics.values()):
        return [line]
    return [
        f"{line} Their p is of the same test, but not corrected for several comparisons and not among those that "
        "Holm's method counts: of several, some are small by chance."
    ]


def _edges(summaries: Sequence[ArmSummary]) -> list[str]:
    lines = []
    for one in (summary for summary in summaries if summary.best):
        rates = [other.learning_rate or 0 for other in summaries if (other.group, other.arm) == (one.group, one.arm)]
        if len(rates) > 1 and one.learning_rate in (min(rates), max(rates)):
            where = "lowest" if one.learning_rate == min(rates) else "highest"
            lines.append(f"{one.arm}: its best rate is the {where} tried; a better one may lie beyond.")
    return lines


def _speed_up_statements(contrasts: Sequence[Contrast], window: float) -> list[str]:
    with_loss = [contrast for contrast in contrasts if contrast.train is not None]
    if not with_loss:
        return ["No training loss was logged: no speed-up."]
    lost = ["A baseline that diverged is no target: a pair with it has no speed-up."]
    if all(len(contrast.raw) == len(contrast.seeds) for contrast in with_loss):
        lost = []
    elif not any(contrast.raw for contrast in with_loss):
        return lost
    lines = [
        "Speed-up: 1 - (first logged step at which the treated run's training loss is at or below the baseline's last "
        "one) / (last step); not reached counts as 0. Null: the same of the baseline against its own end, which the "
        "noise of the loss alone gives."
    ]
    if any(contrast.smoothed for contrast in contrasts):
        lines.append(
            f"Smoothed: the same of running means over {100 * window:g} % of the logged points (at least 3), each "
            "over a point and those before it."
        )
    if any(contrast.raw and not contrast.smoothed for contrast in contrasts):
        lines.append("Logs of fewer points than the running mean takes have no smoothed speed-up.")
    return lines + lost
