"""The two rules of speed-up, at their edges."""

import numpy as np
import pandas as pd
import pytest

from hf_symqk.comparison import ComparisonError
from hf_symqk.comparison.speedup import raw_speed_up, smooth, smoothed_speed_up, window_size


STEPS = [100, 200, 300, 400]


def curve(*values):
    return pd.Series(values, index=STEPS[: len(values)], dtype=float)


@pytest.mark.parametrize(
    ("treated", "step", "fraction"),
    [
        ((5, 3, 2, 1), 300, 0.25),  # at the target counts
        ((5, 1.9, 2.5, 1), 200, 0.5),  # the first time counts, even if it rises again
        ((5, 4, 3, 2), 400, 0.0),  # reached at the very end
        ((5, 4, 3, 2.0001), None, 0.0),
        ((1, 1, 1, 1), 100, 0.75),
        ((5, float("nan"), float("nan"), float("nan")), None, 0.0),  # diverged
    ],
)
def test_raw_rule(treated, step, fraction):
    """First logged step at or below the baseline's last loss; never reached is 0 and says so."""
    found = raw_speed_up(curve(*treated), curve(6, 5, 4, 2))
    assert (found.step, found.fraction, found.reached) == (step, fraction, step is not None)


def test_null_is_what_noise_gives():
    """A baseline that dips below its own end has a speed-up over itself."""
    noisy = curve(6, 1.9, 2.2, 2.0)
    assert raw_speed_up(noisy, noisy).fraction == 0.5
    assert raw_speed_up(curve(6, 5, 4, 2), curve(6, 5, 4, 2)).fraction == 0.0


def test_running_mean_is_causal_and_whole():
    """Each value is a mean over itself and those before, and there are none of fewer points."""
    found = smooth(curve(4, 2, 3, 7), 3)
    assert list(found.index) == [300, 400]
    assert found.tolist() == pytest.approx([3.0, 4.0])


def test_smoothing_takes_the_noise_out_of_the_null():
    """On a loss that is flat but for noise the raw rule calls it a speed-up of half a run and more; means do not."""
    steps = np.arange(1, 401) * 10
    values = 3 - np.arange(400) / 400 + 0.1 * np.random.default_rng(0).standard_normal(400)
    noisy = pd.Series(values, index=steps)
    window = window_size(400, 0.05)
    assert window == 20
    assert smoothed_speed_up(noisy, noisy, window).fraction < 0.05 < raw_speed_up(noisy, noisy).fraction


@pytest.mark.parametrize(("points", "share", "window"), [(1000, 0.05, 50), (20, 0.05, 3), (61, 0.05, 4), (40, 0.1, 4)])
def test_window(points, share, window):
    """A share of the points, rounded up, but never so few that nothing is smoothed."""
    assert window_size(points, share) == window


def test_curve_shorter_than_the_window():
    """A clear error rather than an empty curve."""
    with pytest.raises(ComparisonError, match="2 logged points is too short for a running mean of 3"):
        smooth(curve(1, 2), 3)
