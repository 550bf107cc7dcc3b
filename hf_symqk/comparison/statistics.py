"""Intervals and tests over seeds. What is paired is paired by seed: two runs that saw the same batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


__all__ = ["EXACT_UP_TO", "Estimate", "estimate", "holm", "seeds_needed", "sign_flip_p", "smallest_p"]

# 2^16 assignments of signs are enumerated; beyond that they are drawn.
EXACT_UP_TO = 16
_RESAMPLES = 99_999


@dataclass(frozen=True)
class Estimate:
    """
    A mean over seeds.

    Attributes:
        values (`tuple[float, ...]`): One value a seed.
        mean (`float`): Their mean.
        low (`float` or `None`): Lower end of the Student t interval; `None` for one seed, which has none.
        high (`float` or `None`): Upper end.
    """

    values: tuple[float, ...]
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends, `None` for one seed."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """
    Mean and Student t interval.

    Args:
        values (`Sequence[float]`): One value a seed.
        confidence (`float`, *optional*, defaults to 0.95): Level of the interval.

    Returns:
        [`Estimate`]: without an interval for one value, or where a value is not finite.

    Example:

    ```python
    >>> found = estimate([1.0, 2.0, 3.0])
    >>> found.mean, round(found.low, 3), round(found.high, 3)
    (2.0, -0.484, 4.484)
    >>> estimate([1.0]).interval is None
    True

    ```
    """
    array = np.asarray(values, dtype=float)
    mean = float(array.mean())
    if len(array) < 2 or not np.isfinite(array).all():
        return Estimate(tuple(array.tolist()), mean)
    error = float(stats.sem(array))
    if error == 0:  # of which scipy makes NaN
        return Estimate(tuple(array.tolist()), mean, mean, mean)
    low, high = stats.t.interval(confidence, len(array) - 1, loc=mean, scale=error)
    return Estimate(tuple(array.tolist()), mean, float(low), float(high))


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """
    Two-sided sign-flip permutation test of paired differences: if the two arms do not differ, each difference could as
    well have had the other sign.

    Args:
        differences (`Sequence[float]`): Treated minus baseline, one a seed. Up to 16 all assignments of signs are
            enumerated; beyond, 99,999 are drawn with a fixed seed.

    Returns:
        `float` or `None`: p value of the mean; `None` for one seed, or where a difference is not finite.

    Example:

    ```python
    >>> sign_flip_p([-0.1, -0.2, -0.3])  # the two extreme ones among 2^3
    0.25

    ```
    """
    array = np.asarray(differences, dtype=float)
    if len(array) < 2 or not np.isfinite(array).all():
        return None
    exact = len(array) <= EXACT_UP_TO
    result = stats.permutation_test(
        (array,),
        np.mean,
        permutation_type="samples",
        alternative="two-sided",
        n_resamples=np.inf if exact else _RESAMPLES,
        vectorized=True,
        batch=4096,
        random_state=0,
    )
    return float(result.pvalue)


def smallest_p(seeds: int, comparisons: int = 1) -> float:
    """
    What the test cannot go below, however large the effect.

    Args:
        seeds (`int`): Number of pairs.
        comparisons (`int`, *optional*, defaults to 1): Comparisons that Holm's method corrects for.

    Returns:
        `float`: `comparisons · 2^(1 - seeds)`, at most 1; a test that draws its permutations cannot go below 2e-5.

    Example:

    ```python
    >>> smallest_p(3), smallest_p(6), smallest_p(6, comparisons=3)
    (0.25, 0.03125, 0.09375)

    ```
    """
    exact = 2.0 ** (1 - seeds) if seeds <= EXACT_UP_TO else 2 / (_RESAMPLES + 1)
    return min(1.0, comparisons * exact)


def seeds_needed(comparisons: int, level: float) -> int:
    """
    Seeds with which the corrected test can reach a level at all.

    Args:
        comparisons (`int`): Comparisons that are corrected for.
        level (`float`): The level.

    Returns:
        `int`

    Example:

    ```python
    >>> seeds_needed(1, 0.05), seeds_needed(3, 0.05)
    (6, 7)

    ```
    """
    return math.ceil(1 + math.log2(comparisons / level) - 1e-9)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """
    Holm's step-down correction: the chance of any false finding among them stays below the level.

    Args:
        p_values (`Sequence[float]`): One a comparison.

    Returns:
        `tuple[float, ...]`: Corrected, in the order given.

    Example:

    ```python
    >>> holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)

    ```
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[position]))
        corrected[position] = largest
    return tuple(corrected)
