"""Intervals and tests against answers that are known: enumerations, tables, and what they promise under chance."""

import itertools

import numpy as np
import pytest
from scipy import stats

from hf_symqk.comparison.statistics import estimate, holm, seeds_needed, sign_flip_p, smallest_p


def enumerated(differences):
    """The two-sided test as it is defined: the share of all 2^n assignments whose mean lies as far out."""
    values = np.array(differences)
    means = [abs(float(np.mean(values * signs))) for signs in itertools.product((1, -1), repeat=len(values))]
    return np.mean(np.array(means) >= abs(values.mean()) - 1e-12)


def test_interval_is_students():
    """Mean ± t(0.975, n − 1)·s/√n; 2.7764 is the quantile for four degrees of freedom that tables give."""
    values = [2.1, 2.5, 1.9, 2.2, 2.8]
    found = estimate(values)
    half = 2.7764451 * np.std(values, ddof=1) / np.sqrt(5)
    assert found.mean == pytest.approx(2.3)
    assert found.interval == pytest.approx((2.3 - half, 2.3 + half), abs=1e-7)


def test_interval_against_scipys_own():
    """The same as the interval of scipy's one-sample t test, at another level too."""
    values = np.random.default_rng(3).normal(size=7)
    for level in (0.8, 0.95):
        theirs = stats.ttest_1samp(values, 0).confidence_interval(level)
        assert estimate(values, level).interval == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("values", [[1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_no_interval(values):
    """One seed says nothing about others, and a run that diverged has no place in a mean."""
    assert estimate(values).interval is None


def test_equal_values_have_an_interval_of_no_width():
    """Not NaN: seeds that agree to the last digit do agree."""
    assert estimate([1.5, 1.5, 1.5]).interval == (1.5, 1.5)


def test_interval_covers_as_often_as_it_says():
    """Of 4,000 draws of six seeds 95 % hold the truth; the tolerance is four standard errors, √(0.95·0.05/4000)·4."""
    draws = np.random.default_rng(0).normal(loc=3.0, scale=0.2, size=(4000, 6))
    covered = []
    for values in draws:
        low, high = estimate(values).interval
        covered.append(low <= 3.0 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.014)


@pytest.mark.parametrize(
    "differences",
    [
        [-0.1, -0.2, -0.3],
        [0.1, -0.2, 0.3, 0.05],
        [0.4, 0.4, 0.4, -0.4, 0.4],  # ties
        [0.0, 0.0, -0.3, -0.1],  # pairs that are equal
        [-0.01, -0.02, -0.03, -0.05, -0.011, 0.001],
        np.random.default_rng(1).normal(0.3, 1, 9).tolist(),
    ],
)
def test_sign_flips_are_enumerated(differences):
    """Exactly the share of all assignments of signs, with ties and equal pairs."""
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=1e-12)


@pytest.mark.parametrize("seeds", [2, 3, 6, 10])
def test_smallest_p_is_reached(seeds):
    """What the report calls the floor of the test is what differences of one sign give."""
    assert sign_flip_p(np.linspace(1, 2, seeds)) == pytest.approx(smallest_p(seeds)) == 2 ** (1 - seeds)


def test_no_difference_at_all():
    """Equal runs are the least evidence there is."""
    assert sign_flip_p([0.0, 0.0, 0.0]) == 1.0


def test_many_seeds_are_drawn_not_enumerated():
    """Beyond 16 seeds signs are drawn: the same p twice, and no smaller than the number of draws allows."""
    differences = np.linspace(1, 2, 20)
    assert sign_flip_p(differences) == sign_flip_p(differences) == pytest.approx(smallest_p(20))


@pytest.mark.parametrize("differences", [[0.3], [0.1, float("nan")]])
def test_no_test(differences):
    """One pair cannot be tested, nor can a run that diverged."""
    assert sign_flip_p(differences) is None


def test_false_findings_are_rare():
    """Under no effect p ≤ 0.05 comes up in 2/64 of draws of six seeds; 5 % is above it by more than 3 errors."""
    draws = np.random.default_rng(5).standard_normal((600, 6))
    assert np.mean([sign_flip_p(values) <= 0.05 for values in draws]) < 0.055


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        ([0.02], [0.02]),
        ([0.01, 0.04], [0.02, 0.04]),
        ([0.04, 0.01, 0.03], [0.06, 0.03, 0.06]),  # 3·0.01, 2·0.03, then no smaller than the one before
        ([0.5, 0.6, 0.9], [1.0, 1.0, 1.0]),
        ([0.03, 0.03, 0.03, 0.03], [0.12] * 4),
        ([], []),
    ],
)
def test_holm(given, corrected):
    """Worked by hand from the definition of the step-down method."""
    assert holm(given) == pytest.approx(corrected)


@pytest.mark.parametrize(("comparisons", "seeds"), [(1, 6), (2, 7), (3, 7), (4, 8)])
def test_seeds_needed(comparisons, seeds):
    """The fewest seeds whose floor is at the level: one less would not do."""
    assert seeds_needed(comparisons, 0.05) == seeds
    assert smallest_p(seeds, comparisons) <= 0.05 < smallest_p(seeds - 1, comparisons)
