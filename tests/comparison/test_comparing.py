"""What several seeds, arms and rates allow to say, and the words that say it."""

import numpy as np
import pytest

from hf_symqk.comparison import ComparisonError, compare_runs
from hf_symqk.comparison.tables import make_tables

from .making import falling, record, state, write_pairs, write_run


KAIMING = {
    "symmetric-kaiming_uniform": {"scheme": "symmetric", "distribution": "kaiming_uniform"},
    "independent-kaiming_uniform": {"scheme": "independent", "distribution": "kaiming_uniform"},
}
PLAIN = [3.50, 3.60, 3.45, 3.55, 3.52, 3.48]


def lower(values, by, spread=0.01):
    """Losses below these by about as much, so that all differences have one sign."""
    return [value - by + spread * number for number, value in enumerate(values)]


def only(comparison):
    (contrast,) = comparison.contrasts
    return contrast


def test_difference_is_paired_by_seed(tmp_path):
    """The interval is that of the differences: far narrower than the spread of losses over seeds would give."""
    contrast = only(compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": lower(PLAIN, 0.1)})]))
    differences = [-0.1 + 0.01 * number for number in range(6)]
    assert contrast.held_out.values == pytest.approx(differences)
    assert contrast.held_out.mean == pytest.approx(np.mean(differences))
    assert contrast.held_out.high - contrast.held_out.low < 0.05 < np.ptp(PLAIN)
    assert contrast.seeds == (0, 1, 2, 3, 4, 5)


def test_six_seeds_of_one_sign_are_a_difference(tmp_path):
    """The smallest p of six pairs, and the direction in words."""
    contrast = only(compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": lower(PLAIN, 0.1)})]))
    assert contrast.p == contrast.p_corrected == contrast.p_smallest == pytest.approx(2**-5)
    assert contrast.verdict == "lower held-out loss"


def test_a_treatment_that_harms(tmp_path):
    """The other direction is told as plainly."""
    assert only(compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": lower(PLAIN, -0.2)})])).verdict == (
        "higher held-out loss"
    )


def test_no_evidence(tmp_path):
    """Differences of both signs."""
    mixed = [value + (-1) ** number * 0.02 for number, value in enumerate(PLAIN)]
    contrast = only(compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": mixed})]))
    assert contrast.p > 0.3
    assert contrast.verdict == "no evidence of a difference"


def test_three_seeds_cannot_show_any(tmp_path):
    """However large the effect: p = 0.25, and the report says that the seeds are too few and how many it takes."""
    comparison = compare_runs([write_pairs(tmp_path, {"none": PLAIN[:3], "symmetric": lower(PLAIN[:3], 1.0)})])
    assert only(comparison).p == 0.25
    assert only(comparison).verdict == "too few seeds to tell: all 3 pairs agree, but p cannot go below 0.25"
    assert (
        "With 3 seeds and 1 comparison, p cannot go below 0.25: 6 seeds could show a difference." in comparison.notes
    )


def test_one_seed(tmp_path):
    """No interval, no test, and a statement."""
    comparison = compare_runs([write_pairs(tmp_path, {"none": PLAIN[:1], "symmetric": lower(PLAIN[:1], 1.0)})])
    contrast = only(comparison)
    assert (contrast.p, contrast.held_out.interval, contrast.verdict) == (None, None, "one seed: no test")
    assert any(line.startswith("One seed: there is no interval and no test") for line in comparison.notes)


def test_arms_are_corrected_for_and_symmetry_is_told_from_scale(tmp_path):
    """Four arms: three against the baseline, and the symmetric one against the independent one of its own scale."""
    ends = {arm: lower(PLAIN, by) for arm, by in zip(("symmetric", *KAIMING), (0.1, 0.2, 0.3), strict=True)}
    comparison = compare_runs([write_pairs(tmp_path, {"none": PLAIN, **ends}, KAIMING)])
    pairs = {(one.treated, one.baseline): one for one in comparison.contrasts}
    assert set(pairs) == {
        ("symmetric", "none"),
        ("symmetric-kaiming_uniform", "none"),
        ("independent-kaiming_uniform", "none"),
        ("symmetric-kaiming_uniform", "independent-kaiming_uniform"),
    }
    assert {one.p for one in comparison.contrasts} == {2**-5}
    assert {one.p_corrected for one in comparison.contrasts} == {4 * 2**-5}
    assert {one.verdict for one in comparison.contrasts} == {
        "too few seeds to tell: all 6 pairs agree, but p cannot go below 0.125"
    }
    assert pairs["symmetric-kaiming_uniform", "independent-kaiming_uniform"].held_out.mean == pytest.approx(0.1)
    assert any("4 comparisons, p cannot go below 0.125: 8 seeds could" in line for line in comparison.notes)


def test_members_of_the_family_have_the_independent_arm_of_their_scale(tmp_path):
    """What only their scheme takes is no difference of scale; without a distribution the baseline is that arm."""
    records = KAIMING | {
        "skew": {"scheme": "symmetric", "symmetry": -1.0, "norm": "match", "distribution": "kaiming_uniform"},
        "half": {"scheme": "symmetric", "symmetry": 0.5},
    }
    ends = {arm: lower(PLAIN, 0.1) for arm in ("independent-kaiming_uniform", "skew", "half")}
    comparison = compare_runs([write_pairs(tmp_path, {"none": PLAIN, **ends}, records)])
    skew = "symmetric-kaiming_uniform-norm_match-symmetry_-1.0"
    assert {(one.treated, one.baseline) for one in comparison.contrasts} == {
        ("independent-kaiming_uniform", "none"),
        (skew, "none"),
        (skew, "independent-kaiming_uniform"),
        ("symmetric-symmetry_0.5", "none"),
    }


def test_floor_of_unequal_numbers_of_seeds(tmp_path):
    """Nine pairs and six, all of one sign: Holm's method doubles the smaller p (2/2^8), and the larger (2^-5) stands
    as it is. That is what neither can go below, and the report says no other."""
    ends = {"none": [3.5 + number / 50 for number in range(9)]}
    ends |= {"symmetric": lower(ends["none"], 0.2), "independent-kaiming_uniform": lower(ends["none"][:6], 0.3)}
    comparison = compare_runs([write_pairs(tmp_path, ends, KAIMING)])
    found = {one.treated: (one.p_corrected, one.p_smallest) for one in comparison.contrasts}
    assert found == {"symmetric": (2**-7, 2**-7), "independent-kaiming_uniform": (2**-5, 2**-5)}
    assert {one.verdict for one in comparison.contrasts} == {"lower held-out loss"}
    assert "With 6 seeds and 2 comparisons of 6 and 9 seeds, p cannot go below 0.0312." in comparison.notes
    assert "With 9 seeds and 2 comparisons of 6 and 9 seeds, p cannot go below 0.00781." in comparison.notes


def test_too_few_seeds_in_one_of_several(tmp_path):
    """With three pairs p = 0.25 however many the other comparison has, which takes nothing from it."""
    ends = {"none": PLAIN, "symmetric": lower(PLAIN, 0.1), "independent-kaiming_uniform": lower(PLAIN[:3], 0.3)}
    comparison = compare_runs([write_pairs(tmp_path, ends, KAIMING)])
    verdicts = {one.treated: one.verdict for one in comparison.contrasts}
    assert verdicts["independent-kaiming_uniform"] == (
        "too few seeds to tell: all 3 pairs agree, but p cannot go below 0.25"
    )
    line = "With 3 seeds and 2 comparisons of 3 and 6 seeds, p cannot go below 0.25: 7 seeds in each could show a"
    assert f"{line} difference." in comparison.notes


def test_contrasts_that_are_asked_for(tmp_path):
    """Fewer comparisons, less to correct for."""
    ends = {"none": PLAIN, "symmetric": lower(PLAIN, 0.1), "independent-kaiming_uniform": lower(PLAIN, 0.3)}
    folder = write_pairs(tmp_path, ends, KAIMING)
    contrast = only(compare_runs([folder], contrasts=[("symmetric", "independent-kaiming_uniform")]))
    assert (contrast.baseline, contrast.p_corrected) == ("independent-kaiming_uniform", 2**-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "plain"}, "no run of 'plain'; there are runs of 'none', 'symmetric'"),
        ({"contrasts": [("symmetric", "zero")]}, "no run of 'zero'"),
        ({"window": 0}, "window=0"),
        ({"confidence": 95}, "confidence=95"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, options, message):
    """Each with the value and what there is instead."""
    folder = write_pairs(tmp_path, {"none": PLAIN[:1], "symmetric": PLAIN[:1]})
    with pytest.raises(ComparisonError, match=message):
        compare_runs([folder], **options)


def test_one_arm_only(tmp_path):
    """Said with the runs that were left out, which are likely the reason."""
    folder = write_pairs(tmp_path, {"none": PLAIN[:1]})
    write_run(tmp_path / "s", state(), record({"scheme": "symmetric"}, status="failed"))
    with pytest.raises(ComparisonError, match=r"finished runs of none only.*'failed'"):
        compare_runs([folder])
    with pytest.raises(ComparisonError, match="nothing to compare"):
        compare_runs([])


@pytest.mark.parametrize("asleep", ["none", "symmetric"])
def test_runs_that_did_not_learn(tmp_path, asleep):
    """A loss at the entropy of the tokens' frequencies says nothing about attention, whichever arm it is of."""
    ends = {"none": PLAIN, "symmetric": lower(PLAIN, 0.1)} | {asleep: [4.95] * 6}
    contrast = only(compare_runs([write_pairs(tmp_path, ends)]))
    assert contrast.verdict.startswith(f"inconclusive: {asleep} did not learn")


@pytest.mark.parametrize(("end", "learned"), [(4.9, True), (4.91, False)])
def test_learning_starts_0_3_nats_below(tmp_path, end, learned):
    """The line is drawn at 0.3 nats below, and belongs to those that learned."""
    comparison = compare_runs([write_pairs(tmp_path, {"none": [end], "symmetric": [3.0]})])
    assert comparison.arms[0].learned is learned


def test_entropy_that_is_not_known(tmp_path):
    """Images have none: the test stands, and the report says what it could not check."""
    comparison = compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": lower(PLAIN, 0.1)}, entropy=None)])
    assert only(comparison).verdict == "lower held-out loss"
    assert any("no unigram entropy" in line for line in comparison.notes)


def test_each_arm_at_its_own_best_rate(tmp_path):
    """An init that shifts the best rate is compared fairly: at equal rates it wins one and loses one, at best rates
    neither; the edge of the grid is pointed out."""
    write_pairs(tmp_path / "slow", {"none": PLAIN, "symmetric": lower(PLAIN, -0.4)}, rate=1e-3)
    write_pairs(tmp_path / "fast", {"none": lower(PLAIN, -0.3), "symmetric": lower(PLAIN, 0.0, 0.0)}, rate=2e-3)
    comparison = compare_runs([tmp_path / "slow", tmp_path / "fast"])
    best = {one.arm: one.learning_rate for one in comparison.arms if one.best}
    assert best == {"none": 1e-3, "symmetric": 2e-3}
    found = {(one.setting, one.treated_rate): one.verdict for one in comparison.contrasts}
    assert found == {
        ("own best rates", 2e-3): "no evidence of a difference",
        ("equal rates", 1e-3): "higher held-out loss",
        ("equal rates", 2e-3): "lower held-out loss",
    }
    assert "none: its best rate is the lowest tried; a better one may lie beyond." in comparison.notes


def test_diverged_run_is_no_best_rate_and_no_test(tmp_path):
    """NaN beats nothing, and a mean without it would be a mean of the lucky seeds."""
    write_pairs(tmp_path / "slow", {"none": PLAIN[:2], "symmetric": PLAIN[:2]}, rate=1e-3)
    write_pairs(tmp_path / "fast", {"none": [3.0, float("nan")], "symmetric": [3.0, 3.0]}, rate=2e-3)
    comparison = compare_runs([tmp_path / "slow", tmp_path / "fast"])
    assert {one.arm: one.learning_rate for one in comparison.arms if one.best} == {"none": 1e-3, "symmetric": 2e-3}
    found = {(one.setting, one.treated_rate): one.verdict for one in comparison.contrasts}
    assert found["equal rates", 2e-3] == "no test: none with seed 1 diverged"
    run = tmp_path / "fast" / "none--lr0.002--seed1"
    assert (
        f"{run} diverged (its last training loss is nan, its last held-out loss is nan): what it enters has no "
        in (line.removesuffix("interval and no test.") for line in comparison.notes)
    )


@pytest.mark.parametrize("end", [float("inf"), float("nan")])
def test_no_speed_up_towards_a_baseline_that_diverged(tmp_path, end):
    """Every loss is below infinity: the first step would be the one at which it is reached."""
    for seed, last in ((0, 3.0), (1, end)):
        for arm, init, loss in (("none", None, last), ("symmetric", {"scheme": "symmetric"}, 2.5)):
            curve = [*falling(3.0)[:-1], loss]
            write_run(tmp_path / f"{arm}{seed}", state(curve, {200: 3.0}), record(init, seed))
    comparison = compare_runs([tmp_path])
    contrast = only(comparison)
    assert contrast.verdict != "no test: none with seed 1 diverged"  # the held-out loss, which is tested, did not
    for speeds in (contrast.raw, contrast.raw_null, contrast.smoothed, contrast.smoothed_null):
        assert [speed.target for speed in speeds] == [pytest.approx(speeds[0].target)]
        assert speeds[0].target < 4
    assert "A baseline that diverged is no target: a pair with it has no speed-up." in comparison.notes
    alone = compare_runs([tmp_path / f"{arm}1" for arm in ("none", "symmetric")])
    assert only(alone).raw == ()
    assert not any(line.startswith(("Speed-up", "No training loss")) for line in alone.notes)
    assert "speed_up" not in make_tables(alone)


def test_a_seed_that_one_arm_lacks(tmp_path):
    """The others stay paired, and the odd one is named."""
    comparison = compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": lower(PLAIN[:4], 0.1)})])
    assert only(comparison).seeds == (0, 1, 2, 3)
    assert any("not both have seeds 4, 5" in line for line in comparison.notes)


def test_no_seed_in_common(tmp_path):
    """Unpaired runs are not compared."""
    for seed, init in ((0, None), (1, {"scheme": "symmetric"})):
        write_run(tmp_path / str(seed), state(falling(3.0)), record(init, seed))
    message = r"no pair of runs with the same seed is left to compare: none has seed 0; symmetric has seed 1\.$"
    with pytest.raises(ComparisonError, match=message):
        compare_runs([tmp_path])


def test_training_loss_alone(tmp_path):
    """Where nothing is held out the test is of the training loss, and the report says which loss it is of."""
    for seed in range(6):
        write_run(tmp_path / f"none-seed{seed}", state(falling(3.0 + seed / 10)))
        write_run(tmp_path / f"symmetric-seed{seed}", state(falling(2.5 + seed / 9)))
    comparison = compare_runs([tmp_path])
    assert only(comparison).verdict == "lower training loss"
    assert any("paired differences of training loss" in line for line in comparison.notes)
    assert "Whether the runs learned more than the tokens' frequencies is not known: no held-out loss." in (
        comparison.notes
    )
    assert sum("Pairing could not be checked" in line for line in comparison.notes) == 1


def test_speed_ups_of_every_seed(tmp_path):
    """By both rules, with the null of both; a treated run that ends lower gets there sooner than the baseline."""
    contrast = only(compare_runs([write_pairs(tmp_path, {"none": PLAIN, "symmetric": lower(PLAIN, 0.5)})]))
    rules = (contrast.raw, contrast.raw_null, contrast.smoothed, contrast.smoothed_null)
    assert [len(found) for found in rules] == [6] * 4
    for speed, null in zip(contrast.smoothed, contrast.smoothed_null, strict=True):
        assert speed.fraction > null.fraction == 0.0
