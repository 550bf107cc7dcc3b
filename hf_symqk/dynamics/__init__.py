"""What training does to W_qk: the gradient of a loss with respect to it, as a sum over pairs of tokens."""

from .measuring import qk_updates, sum_updates
from .outer_sums import LogitsTooLargeError, check_memory
from .updates import LayerUpdate, QKUpdates, TermWeights, log_of_updates
from .watching import LastBatch


__all__ = [
    "LastBatch",
    "LayerUpdate",
    "LogitsTooLargeError",
    "QKUpdates",
    "TermWeights",
    "check_memory",
    "log_of_updates",
    "qk_updates",
    "sum_updates",
]
