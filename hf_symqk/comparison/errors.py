"""The one error of comparisons."""

__all__ = ["ComparisonError"]


class ComparisonError(ValueError):
    """Runs that cannot be compared: names the runs or the values, and the way out."""
