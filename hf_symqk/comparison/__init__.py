"""Comparison of training runs that differ in how Q and K were initialised: losses, speed-ups, tests over seeds."""

from .comparing import compare_runs
from .errors import ComparisonError
from .results import ArmSummary, Comparison, Contrast
from .runs import Run, arm_name


__all__ = ["ArmSummary", "Comparison", "ComparisonError", "Contrast", "Run", "arm_name", "compare_runs"]
