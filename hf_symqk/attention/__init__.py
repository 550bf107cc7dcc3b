"""Where W_q and W_k live: the table of layouts, finding them in a model, whole tensors from sharded ones."""

from .borrowing import borrowed_from
from .finding import (
    CROSS_ATTENTION,
    AttentionSurvey,
    UnknownAttentionError,
    find_attention_layers,
    outermost_model,
    survey_attention,
    survey_modules,
    warn_of_unverified,
)
from .heads import HEAD_DIM, NUM_HEADS, NUM_KEY_VALUE_HEADS, value_of
from .layer import AttentionLayer, HeadTensors
from .layouts import (
    ComposedProjection,
    LearnedScale,
    Projection,
    QKLayout,
    layouts,
    register_qk_layout,
    unregister_qk_layout,
)
from .probed import ProbedLayer, ProbedSurvey, survey_by_probing
from .probing import ProbingError
from .rotary import ChannelPairs, channel_pairs
from .rows import (
    GatedRows,
    HeadRows,
    HeadShape,
    LatentRows,
    Part,
    PerHeadRows,
    RowSelector,
    ShardedRows,
    WholeRows,
)
from .selection import ATTENTION_KINDS, AttentionKind, LayerChoice, PlacedLayer, describe_kind, select_layers
from .skipping import LOOKS_LIKE_ATTENTION, NOT_SOFTMAX, describe_left_out, warn_of_left_out
from .tensors import full_shape, linear_shape, storage_name, whole_linears, whole_parameters
from .verified import describe_unverified


__all__ = [
    "ATTENTION_KINDS",
    "CROSS_ATTENTION",
    "HEAD_DIM",
    "LOOKS_LIKE_ATTENTION",
    "NOT_SOFTMAX",
    "NUM_HEADS",
    "NUM_KEY_VALUE_HEADS",
    "AttentionKind",
    "AttentionLayer",
    "AttentionSurvey",
    "ChannelPairs",
    "ComposedProjection",
    "GatedRows",
    "HeadRows",
    "HeadShape",
    "HeadTensors",
    "LatentRows",
    "LayerChoice",
    "LearnedScale",
    "Part",
    "PerHeadRows",
    "PlacedLayer",
    "ProbedLayer",
    "ProbedSurvey",
    "ProbingError",
    "Projection",
    "QKLayout",
    "RowSelector",
    "ShardedRows",
    "UnknownAttentionError",
    "WholeRows",
    "borrowed_from",
    "channel_pairs",
    "describe_kind",
    "describe_left_out",
    "describe_unverified",
    "find_attention_layers",
    "full_shape",
    "layouts",
    "linear_shape",
    "outermost_model",
    "register_qk_layout",
    "select_layers",
    "storage_name",
    "survey_attention",
    "survey_by_probing",
    "survey_modules",
    "unregister_qk_layout",
    "value_of",
    "warn_of_left_out",
    "warn_of_unverified",
    "whole_linears",
    "whole_parameters",
]
