"""Symmetric query-key initialisation and W_qk scores for Hugging Face Transformers. Importing registers the plugin."""

from .attention import find_attention_layers, register_qk_layout, unregister_qk_layout
from .bilinear import BilinearForm, BilinearScores, SpectralScores
from .callback import QKScoreCallback
from .checkpoint import score_checkpoint
from .dense import directionality_score, symmetry_score
from .dynamics import LayerUpdate, QKUpdates, TermWeights, qk_updates
from .init import SymmetricInit, apply_qk_init, register_qk_init, unregister_qk_init
from .plugin import register, unregister
from .scores import LayerScores, QKScores
from .scoring import score_model


__all__ = [
    "BilinearForm",
    "BilinearScores",
    "LayerScores",
    "LayerUpdate",
    "QKScoreCallback",
    "QKScores",
    "QKUpdates",
    "SpectralScores",
    "SymmetricInit",
    "TermWeights",
    "apply_qk_init",
    "directionality_score",
    "find_attention_layers",
    "qk_updates",
    "register",
    "register_qk_init",
    "register_qk_layout",
    "score_checkpoint",
    "score_model",
    "symmetry_score",
    "unregister",
    "unregister_qk_init",
    "unregister_qk_layout",
]

register()
