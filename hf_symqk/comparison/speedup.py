"""How much sooner a treated run gets where the baseline ends, by two rules, and what chance alone gives by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from .errors import ComparisonError


__all__ = ["MINIMAL_WINDOW", "SpeedUp", "raw_speed_up", "smooth", "smoothed_speed_up", "window_size"]

# A mean of fewer points smooths nothing.
MINIMAL_WINDOW = 3


@dataclass(frozen=True)
class SpeedUp:
    """
    Speed-up of one pair of runs.

    Attributes:
        step (`int` or `None`): First logged step at which the run is at or below the target; `None` if never.
        last_step (`int`): Last step of the baseline.
        target (`float`): What the baseline ends at.
    """

    step: int | None
    last_step: int
    target: float

    @property
    def reached(self) -> bool:
        """Whether the target is reached at all."""
        return self.step is not None

    @property
    def fraction(self) -> float:
        """`1 - step / last_step`; 0 where the target is not reached, as the paper counts it."""
        return 0.0 if self.step is None or not self.last_step else 1 - self.step / self.last_step


def raw_speed_up(treated: pd.Series, baseline: pd.Series) -> SpeedUp:
    """
    The paper's rule: 1 − (first logged step at which the treated loss is at or below the baseline's last logged
    loss) / (last step).

    Args:
        treated (`pandas.Series`): Loss by step.
        baseline (`pandas.Series`): Loss by step.

    Returns:
        [`SpeedUp`]

    Example:

    ```python
    >>> baseline = pd.Series([4.0, 3.0, 2.0, 2.0], index=[10, 20, 30, 40])
    >>> treated = pd.Series([4.0, 2.0, 1.5, 1.0], index=[10, 20, 30, 40])
    >>> raw_speed_up(treated, baseline).fraction
    0.5
    >>> raw_speed_up(baseline, baseline).fraction  # the rule's own null
    0.25

    ```
    """
    target = float(baseline.iloc[-1])
    below = treated.index[treated.le(target)]
    return SpeedUp(int(below[0]) if len(below) else None, int(baseline.index[-1]), target)


def window_size(points: int, share: float) -> int:
    """
    Points that the running mean takes: a share of those logged, at least three.

    Args:
        points (`int`): Logged points.
        share (`float`): Share of them, above 0 and at most 1.

    Returns:
        `int`
    """
    return max(MINIMAL_WINDOW, math.ceil(share * points - 1e-9))


def smooth(curve: pd.Series, window: int) -> pd.Series:
    """
    Running mean over a point and those before it. The first `window - 1` points have none: a mean of fewer would be
    noisier than the others.

    Args:
        curve (`pandas.Series`): Values by step.
        window (`int`): Points of the mean.

    Returns:
        `pandas.Series`: Shorter by `window - 1`.

    Raises:
        ComparisonError: if the curve has fewer points.
    """
    if len(curve) < window:
        raise ComparisonError(
            f"a curve of {len(curve)} logged points is too short for a running mean of {window}: log more often."
        )
    return curve.rolling(window).mean().iloc[window - 1 :]


def smoothed_speed_up(treated: pd.Series, baseline: pd.Series, window: int) -> SpeedUp:
    """
    [`raw_speed_up`] of the running means of both.

    Args:
        treated (`pandas.Series`): Loss by step.
        baseline (`pandas.Series`): Loss by step, at the same steps.
        window (`int`): Points of the running mean.

    Returns:
        [`SpeedUp`]

    Raises:
        ComparisonError: if the curves have fewer points.
    """
    return raw_speed_up(smooth(treated, window), smooth(baseline, window))
