"""Query-key initialisation: the `SymmetricInit` option, the table of schemes, and writing them to a model."""

from . import builtin_schemes  # registers them
from .applying import apply_qk_init, choose_layers, require_servable, write_init
from .option import SymmetricInit
from .registry import LayerDraw, LayerRequest, QKInitScheme, register_qk_init, schemes, unregister_qk_init


__all__ = [
    "LayerDraw",
    "LayerRequest",
    "QKInitScheme",
    "SymmetricInit",
    "apply_qk_init",
    "builtin_schemes",
    "choose_layers",
    "register_qk_init",
    "require_servable",
    "schemes",
    "unregister_qk_init",
    "write_init",
]
