"""`compare_runs`: from runs to summaries of arms and contrasts between them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .aligning import align
from .checks import check_arms, check_unique, pairing, state_unrecorded
from .curve_files import read_curves
from .errors import ComparisonError
from .results import EQUAL_RATES, LEARNED_BY, LOSS_LABELS, OWN_RATES, ArmSummary, Comparison, Contrast, Secondary
from .runs import HELD_OUT, TRAIN, Run, independent_twin, metric_of, read_folders
from .speedup import SpeedUp, raw_speed_up, smoothed_speed_up, window_size
from .statements import make_statements
from .statistics import Estimate, estimate, holm, sign_flip_p, smallest_p


__all__ = ["compare_runs"]

Key = tuple[str, float | None]  # an arm at a rate


def compare_runs(
    sources: Sequence[str | os.PathLike[str]],
    *,
    baseline: str = "none",
    contrasts: Iterable[tuple[str, str]] | None = None,
    pattern: str | None = None,
    differing: Iterable[str] = (),
    own_rates: bool = False,
    cut: bool = False,
    window: float = 0.05,
    confidence: float = 0.95,
) -> Comparison:
    """
    Compares training runs that differ in how Q and K were initialised.

    Args:
        sources (sequence of paths):
            Folders of runs (with `trainer_state.json`, and `run.json` where a recipe wrote them), folders that hold
            such folders, and `.csv` files of curves (a column `step`, a column of losses a run).
        baseline (`str`, *optional*, defaults to `"none"`):
            Arm that the others are compared with.
        contrasts (iterable of pairs, *optional*):
            `(treated, baseline)` pairs to compare. By default every arm with the baseline, and each arm that differs
            from an `independent` one in its scheme only with that one too: the effect of symmetry at equal scale.
        pattern (`str`, *optional*):
            Regular expression with the groups `arm`, `seed` and `rate`, searched for in the paths of folders. What
            `run.json` says of seed and rate goes first; the arm is then that of the pattern, which must not bring
            runs of different initialisations together.
        differing (iterable of `str`, *optional*):
            Arguments that may differ between arms beside the initialisation, as the pretrained model in fine-tuning.
        own_rates (`bool`, *optional*, defaults to `False`):
            Accepts arms that have no learning rate in common.
        cut (`bool`, *optional*, defaults to `False`):
            Compares logs of unequal length at the steps that all have, and says so, instead of refusing. Runs that
            were planned for different numbers of steps are then compared if their learning rates agreed so far.
        window (`float`, *optional*, defaults to 0.05):
            Share of the logged points in the running mean of the smoothed speed-up.
        confidence (`float`, *optional*, defaults to 0.95):
            Level of the intervals; a difference counts at `p <= 1 - confidence`.

    Returns:
        [`Comparison`]

    Raises:
        ComparisonError: for sources that hold no runs, runs that are no pairs or differ in more than the
            initialisation, logs of unequal length, and arms that are not there.

    Examples:

    ```python
    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "curves.csv"
    >>> _ = path.write_text("step,small,small--symmetric\\n10,4.0,4.0\\n20,3.0,2.0\\n30,2.0,1.5\\n40,2.0,1.0\\n")
    >>> (contrast,) = compare_runs([path]).contrasts
    >>> contrast.treated, contrast.baseline, contrast.raw[0].fraction, contrast.raw_null[0].fraction
    ('symmetric', 'none', 0.5, 0.25)
    >>> contrast.verdict
    'one seed: no test'
    >>> folder.cleanup()

    ```
    """
    if not 0 < window <= 1:
        raise ComparisonError(f"window={window}: choose a share of the logged points above 0 and up to 1.")
    if not 0 < confidence < 1:
        raise ComparisonError(f"confidence={confidence}: choose a level between 0 and 1.")
    runs, left_out, arms_met = _read(sources, baseline, pattern)
    notes = check_arms(runs)
    check_unique(runs)
    pairs = None if contrasts is None else [(str(treated), str(base)) for treated, base in contrasts]
    _require_arms(runs, left_out, arms_met, baseline, pairs)
    differing = list(differing)
    level = 1 - confidence
    notes += state_unrecorded(runs)
    compared: list[Run] = []
    summaries: list[ArmSummary] = []
    found: list[Contrast] = []
    for group in dict.fromkeys(run.group for run in runs):
        members = [run for run in runs if run.group == group]
        chosen = _pairs(members, baseline, pairs)
        _check_rates(members, own_rates, chosen)
        notes += pairing(members, differing, cut)
        members, aligned = align(members, cut)
        notes += aligned + _state_diverged(members)
        compared += members
        of_group = _summaries(members, confidence)
        summaries += of_group
        found += _contrasts(members, of_group, chosen, window, confidence, notes)
    notes = list(dict.fromkeys(notes))
    if not found:
        lines = f" Left out: {'; '.join(left_out)}." if left_out else ""
        raise ComparisonError(f"no pair of runs with the same seed is left to compare: {_seeds(compared)}{lines}")
    notes += make_statements(summaries, found, window, level)
    return Comparison(
        tuple(compared), baseline, tuple(summaries), tuple(found), window, confidence, tuple(notes), tuple(left_out)
    )


def _state_diverged(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        ends = {label: _last(run, key) for key, label in LOSS_LABELS.items() if key in run.curves}
        lost = [f"its last {label} is {value}" for label, value in ends.items() if not math.isfinite(value)]
        if lost:
            lines.append(f"{run.name} diverged ({', '.join(lost)}): what it enters has no interval and no test.")
    return lines


def _seeds(runs: Sequence[Run]) -> str:
    """Which seeds there are of each arm, and at which rate where that tells them apart."""
    several = len({run.learning_rate for run in runs}) > 1
    seeds: dict[str, list[str]] = {}
    for run in runs:
        arm = f"{run.group} {run.arm}".strip() + (f" at rate {_rate(run.learning_rate)}" if several else "")
        seeds.setdefault(arm, []).append("not known" if run.seed is None else str(run.seed))
    listed = (f"{arm} has seed{'s' * (len(of) > 1)} {', '.join(of)}" for arm, of in seeds.items())
    return f"{'; '.join(listed)}."


def _read(
    sources: Sequence[str | os.PathLike[str]], baseline: str, pattern: str | None
) -> tuple[list[Run], list[str], list[str]]:
    if not sources:
        raise ComparisonError("there is nothing to compare: name folders of runs or .csv files of curves.")
    files = [Path(source) for source in sources if Path(source).suffix.lower() == ".csv" and Path(source).is_file()]
    folders = [source for source in sources if Path(source) not in files]
    runs, left_out, arms = read_folders(folders, pattern) if folders else ([], [], [])
    for file in files:
        curves = read_curves(file, baseline)
        if len(files) > 1:
            curves = [replace(run, group=f"{file.stem}: {run.group}" if run.group else file.stem) for run in curves]
        elif folders:
            curves = [replace(run, group=run.group or file.stem) for run in curves]
        runs += curves
        arms += [run.arm for run in curves]
    return runs, left_out, list(dict.fromkeys(arms))


def _require_arms(
    runs: Sequence[Run],
    left_out: Sequence[str],
    met: Sequence[str],
    baseline: str,
    pairs: list[tuple[str, str]] | None,
) -> None:
    named = [baseline] if pairs is None else [arm for pair in pairs for arm in pair]
    unknown = sorted(set(named) - set(met))
    if unknown:
        raise ComparisonError(
            f"no run of {', '.join(map(repr, unknown))}; there are runs of {', '.join(map(repr, met))}. Choose the "
            "baseline among them."
        )
    finished = {run.arm for run in runs}
    missing = [arm for arm in dict.fromkeys(named) if arm not in finished]
    if missing or len(finished) < 2:
        lines = f" Left out: {'; '.join(left_out)}." if left_out else ""
        what = f"no finished run of {', '.join(missing)}" if missing else f"finished runs of {met[0]} only"
        raise ComparisonError(f"{what}: there is nothing to compare.{lines}")


def _pairs(runs: Sequence[Run], baseline: str, asked: list[tuple[str, str]] | None) -> list[tuple[str, str]]:
    arms = list(dict.fromkeys(run.arm for run in runs))
    if asked is not None:
        return [pair for pair in asked if set(pair) <= set(arms)]
    pairs = [(arm, baseline) for arm in arms if arm != baseline and baseline in arms]
    for arm in arms:
        twin = independent_twin(arm)
        if twin is not None and twin in arms and twin != baseline and arm != baseline:
            pairs.append((arm, twin))
    return pairs


def _check_rates(runs: Sequence[Run], own_rates: bool, pairs: Sequence[tuple[str, str]]) -> None:
    rates: dict[str, set[float | None]] = {}
    for run in runs:
        rates.setdefault(run.arm, set()).add(run.learning_rate)
    for treated, base in pairs:
        if not own_rates and not rates[treated] & rates[base]:
            texts = [", ".join(_rate(rate) for rate in sorted(rates[arm], key=str)) for arm in (base, treated)]
            raise ComparisonError(
                f"{base} and {treated} differ in more than the initialisation: learning_rate ({texts[0]} and "
                f"{texts[1]}). Run both at the same rates, or ask for each arm at its own best rate (own_rates)."
            )


def _rate(rate: float | None) -> str:
    return "not known" if rate is None else f"{rate:g}"


def _summaries(runs: Sequence[Run], confidence: float) -> list[ArmSummary]:
    cells: dict[Key, list[Run]] = {}
    for run in runs:
        cells.setdefault((run.arm, run.learning_rate), []).append(run)
    summaries = []
    for (arm, rate), members in cells.items():
        entropies = [run.entropy for run in members if run.entropy is not None]
        train, held_out = (_final(members, key, confidence) for key in (TRAIN, HELD_OUT))
        metrics = {
            name: found
            for key, name in _metrics(runs).items()
            if (found := _final(members, key, confidence)) is not None
        }
        seeds = tuple(run.seed for run in members)
        entropy = min(entropies) if len(entropies) == len(members) else None
        summaries.append(ArmSummary(members[0].group, arm, rate, seeds, train, held_out, entropy, False, metrics))
    best = {_best(summaries, arm) for arm, _ in cells}
    order = list(dict.fromkeys(run.arm for run in runs))
    summaries.sort(key=lambda one: (order.index(one.arm), one.learning_rate or 0))
    return [replace(one, best=(one.arm, one.learning_rate) in best) for one in summaries]


def _final(runs: Sequence[Run], key: str, confidence: float) -> Estimate | None:
    if any(key not in run.curves for run in runs):
        return None
    return estimate([float(run.curves[key].iloc[-1]) for run in runs], confidence)


def _metrics(runs: Sequence[Run]) -> dict[str, str]:
    """Names of the metrics beside the losses, by their key in the log."""
    return {key: name for run in runs for key in run.curves if (name := metric_of(key)) is not None}


def _best(summaries: Sequence[ArmSummary], arm: str) -> Key:
    """
    The rate of the lowest mean final loss among those that were run with most seeds: a lucky seed makes none the best.
    A run that diverged is never the best.
    """
    own = [one for one in summaries if one.arm == arm]
    most = max(len(one.seeds) for one in own)

    def loss(one: ArmSummary) -> float:
        found = one.held_out or one.train
        return found.mean if found is not None and math.isfinite(found.mean) else math.inf

    return arm, min((one for one in own if len(one.seeds) == most), key=loss).learning_rate


def _contrasts(
    runs: Sequence[Run],
    summaries: Sequence[ArmSummary],
    pairs: Sequence[tuple[str, str]],
    window: float,
    confidence: float,
    notes: list[str],
) -> list[Contrast]:
    cells = {(one.arm, one.learning_rate): one for one in summaries}
    best = {one.arm: one.learning_rate for one in summaries if one.best}
    rates = sorted({one.learning_rate for one in summaries}, key=lambda rate: rate or 0)
    settings: list[tuple[str, list[tuple[Key, Key]]]] = []
    if len(rates) > 1:
        settings.append((OWN_RATES, [((arm, best[arm]), (base, best[base])) for arm, base in pairs]))
    for rate in rates:
        equal = [((arm, rate), (base, rate)) for arm, base in pairs if (arm, rate) in cells and (base, rate) in cells]
        settings.append((EQUAL_RATES, equal))
    found: list[Contrast] = []
    for setting, keys in settings:
        family = [
            contrast
            for treated, base in keys
            if (contrast := _contrast(runs, setting, treated, base, window, confidence, notes)) is not None
        ]
        found += _corrected(family, cells, 1 - confidence)
    return found


def _contrast(
    runs: Sequence[Run], setting: str, treated: Key, base: Key, window: float, confidence: float, notes: list[str]
) -> Contrast | None:
    """A contrast without its correction; `None` where no seed is common to both."""
    by_seed = [
        {run.seed: run for run in runs if (run.arm, run.learning_rate) == key and run.arm == key[0]}
        for key in (treated, base)
    ]
    seeds = [seed for seed in by_seed[1] if seed in by_seed[0]]
    alone = sorted({str(seed) for found in by_seed for seed in found if seed not in seeds})
    if alone:
        which = f"seed{'s' * (len(alone) > 1)} {', '.join(alone)}"
        notes.append(f"{treated[0]} against {base[0]}: not both have {which}, which is left out.")
    if not seeds:
        return None
    mates = [(by_seed[0][seed], by_seed[1][seed]) for seed in seeds]
    metrics = _metrics(runs)
    differences = {
        key: estimate([_last(one, key) - _last(other, key) for one, other in mates], confidence)
        for key in (TRAIN, HELD_OUT, *metrics)
        if all(key in run.curves for pair in mates for run in pair)
    }
    tested = HELD_OUT if HELD_OUT in differences else TRAIN
    curves = [(one.curves[TRAIN], other.curves[TRAIN]) for one, other in mates if TRAIN in differences]
    width = window_size(len(curves[0][0]), window) if curves else 0
    smoothed = [pair for pair in curves if len(pair[0]) >= width]
    return Contrast(
        group=mates[0][0].group,
        treated=treated[0],
        baseline=base[0],
        setting=setting,
        treated_rate=treated[1],
        baseline_rate=base[1],
        seeds=tuple(seeds),
        train=differences.get(TRAIN),
        held_out=differences.get(HELD_OUT),
        tested=LOSS_LABELS[tested],
        p=sign_flip_p(differences[tested].values),
        p_corrected=None,
        p_smallest=1.0,
        verdict="",
        raw=_known(raw_speed_up(one, other) for one, other in curves),
        raw_null=_known(raw_speed_up(other, other) for _, other in curves),
        smoothed=_known(smoothed_speed_up(one, other, width) for one, other in smoothed),
        smoothed_null=_known(smoothed_speed_up(other, other, width) for _, other in smoothed),
        metrics={
            name: Secondary(differences[key], sign_flip_p(differences[key].values))
            for key, name in metrics.items()
            if key in differences
        },
    )


def _known(speeds: Iterable[SpeedUp]) -> tuple[SpeedUp, ...]:
    """Without those whose target is no loss that could be reached: the baseline diverged."""
    return tuple(speed for speed in speeds if math.isfinite(speed.target))


def _diverged(contrast: Contrast, arms: Sequence[ArmSummary]) -> list[str]:
    losses = [one.held_out if contrast.tested == LOSS_LABELS[HELD_OUT] else one.train for one in arms]
    return [
        one.arm if seed is None else f"{one.arm} with seed {seed}"
        for one, found in zip(arms, losses, strict=True)
        for seed, value in zip(one.seeds, () if found is None else found.values, strict=True)
        if seed in contrast.seeds and not math.isfinite(value)
    ]


def _last(run: Run, key: str) -> float:
    return float(run.curves[key].iloc[-1])


def _corrected(family: Sequence[Contrast], cells: dict[Key, ArmSummary], level: float) -> list[Contrast]:
    tested = [contrast for contrast in family if contrast.p is not None]
    corrected = dict(zip(map(id, tested), holm([contrast.p or 0.0 for contrast in tested]), strict=True))
    # Holm's method gives no smaller value where a p grows: with each p at its own floor, all are as small as they get.
    floors = dict(zip(map(id, tested), holm([smallest_p(len(contrast.seeds)) for contrast in tested]), strict=True))
    finished = []
    for contrast in family:
        smallest = floors.get(id(contrast), smallest_p(len(contrast.seeds), max(1, len(tested))))
        whole = replace(contrast, p_corrected=corrected.get(id(contrast)), p_smallest=smallest)
        arms = [cells[contrast.treated, contrast.treated_rate], cells[contrast.baseline, contrast.baseline_rate]]
        finished.append(replace(whole, verdict=_verdict(whole, arms, level)))
    return finished


def _verdict(contrast: Contrast, arms: Sequence[ArmSummary], level: float) -> str:
    difference = contrast.tested_difference
    if not math.isfinite(difference.mean):
        return f"no test: {' and '.join(_diverged(contrast, arms))} diverged"
    asleep = [one.arm for one in arms if one.learned is False]
    if asleep:
        return f"inconclusive: {' and '.join(asleep)} did not learn (less than {LEARNED_BY} nats below unigrams)"
    if contrast.p_corrected is None:
        return "one seed: no test"
    if contrast.p_corrected <= level + 1e-12:
        return f"{'lower' if difference.mean < 0 else 'higher'} {contrast.tested}"
    count = len(contrast.seeds)
    if contrast.p_smallest > level + 1e-12 and contrast.p is not None and contrast.p <= smallest_p(count) + 1e-12:
        # The test is at its floor: the data could not have spoken more clearly.
        return f"too few seeds to tell: all {count} pairs agree, but p cannot go below {contrast.p_smallest:.3g}"
    return "no evidence of a difference"
