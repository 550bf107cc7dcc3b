"""Q and K tensors from files and from the Hub, nothing else, and their scores."""

from .finding import CheckpointSurvey, find_checkpoint_layers
from .layers import CheckpointLayer
from .scoring import score_checkpoint


__all__ = ["CheckpointLayer", "CheckpointSurvey", "find_checkpoint_layers", "score_checkpoint"]
