"""Where W_q and W_k live: the table of layouts, finding them in a model, whole tensors from sharded ones."""

from .finding import AttentionLayer, HeadTensors, find_attention_layers
from .layouts import (
    HeadRows,
    HeadShape,
    Part,
    Projection,
    QKLayout,
    RowSelector,
    layouts,
    register_qk_layout,
    unregister_qk_layout,
)
from .selection import ATTENTION_KINDS, AttentionKind, LayerChoice, select_layers
from .tensors import full_shape, linear_shape, storage_name, whole_linears, whole_parameters


__all__ = [
    "ATTENTION_KINDS",
    "AttentionKind",
    "AttentionLayer",
    "HeadRows",
    "HeadShape",
    "HeadTensors",
    "LayerChoice",
    "Part",
    "Projection",
    "QKLayout",
    "RowSelector",
    "find_attention_layers",
    "full_shape",
    "layouts",
    "linear_shape",
    "register_qk_layout",
    "select_layers",
    "storage_name",
    "unregister_qk_layout",
    "whole_linears",
    "whole_parameters",
]
