"""
The forms in which checkpoint files store a linear map: as a plain matrix, or as integers or narrow floats with scales
beside them. One table: what tells a form, the shape that it stands for, and how to get the matrix back.

Nothing is read here. A reader says which tensors stand under a module path ([`StoredTensor`]), [`form_of`] answers
with a [`Form`], which says what to read and turns it into the matrix.

Every tensor under the path has to be accounted for: a scale that nobody applied would give wrong scores silently.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .unpacking import (
    WAY_OUT,
    Config,
    Read,
    Shape,
    Stored,
    StoredTensor,
    Tensors,
    as_it_is,
    four_bit,
    four_bit_shape,
    gptq,
    gptq_shape,
    llm_int8,
    module_path,
    packed,
    packed_shape,
    scaled,
    weight_shape,
)


__all__ = ["Form", "StoredTensor", "Tensors", "form_of"]


@dataclass(frozen=True)
class Form:
    """
    How one linear map is stored.

    Attributes:
        name (`str`):
            `"plain"`, `"fp8"`, `"scaled fp8"`, `"bitsandbytes 4-bit"`, …
        needed (`tuple[str, ...]`):
            Names of the tensors that [`~Form.dense`] takes.
        needed_for_shape (`tuple[str, ...]`):
            Names of the (small) tensors that [`~Form.shape`] takes; mostly none.
        rows (`bool`):
            Whether rows of the matrix are the rows of `needed`, so that some of them can be read alone and need no
            [`~Form.dense`].
        out_in (`bool`):
            Whether the matrix is always (outputs, inputs). Quantisers turn GPT-2's `Conv1D` round; a plain matrix is
            as the model stores it.
        problem (`str` or `None`):
            Why the matrix cannot be had, and the way out; `None` where it can.
    """

    name: str
    needed: tuple[str, ...]
    needed_for_shape: tuple[str, ...]
    rows: bool
    out_in: bool
    problem: str | None
    _rule: "_Rule"
    _tensors: Tensors
    _config: Config

    def shape(self, read: Read | None = None) -> Shape | None:
        """
        Shape of the matrix that the tensors stand for.

        Args:
            read (`Mapping[str, torch.Tensor]`, *optional*): Values of `needed_for_shape`, by name.

        Returns:
            `tuple[int, int]`: `None` if it is no matrix, or cannot be had.

        Raises:
            ValueError: if the tensors contradict each other.
        """
        return None if self.problem else self._rule.shape(Stored(self._tensors, self._config, read or {}))

    def dense(self, read: Read) -> Tensor:
        """
        The matrix that the tensors stand for.

        Args:
            read (`Mapping[str, torch.Tensor]`): Values of `needed`, by name.

        Returns:
            `torch.Tensor`: A floating point matrix of [`~Form.shape`]: the tensor itself where it is plain; float32
            where scales were applied, or the type that the quantiser says the matrix had.

        Raises:
            ValueError: if there is a `problem`, or the tensors contradict each other.
        """
        if self.problem:
            raise ValueError(self.problem)
        return self._rule.dense(Stored(self._tensors, self._config, read))


def form_of(tensors: Tensors, quantization_config: Config | None = None) -> Form:
    """
    The form in which a linear map is stored.

    Args:
        tensors (`Mapping[str, StoredTensor]`):
            All tensors below the module path, by the name that follows it.
        quantization_config (`Mapping[str, Any]`, *optional*):
            `quantization_config` of the checkpoint's config.json.

    Returns:
        [`Form`]: With a `problem` where the form is unknown, known but not read here, or has a tensor beside it that
        nobody knows.
    """
    config = quantization_config or {}
    rule = next((rule for rule in _RULES if rule.matches(tensors)), _UNKNOWN)
    return Form(
        name=rule.name,
        needed=tuple(name for name in tensors if rule.takes(name)),
        needed_for_shape=tuple(name for name in tensors if re.fullmatch(rule.for_shape, name)),
        rows=rule.rows,
        out_in=not rule.rows,
        problem=_problem(rule, tensors, config),
        _rule=rule,
        _tensors=tensors,
        _config=config,
    )


class _Rule(NamedTuple):
    """
    A form as one line of the table. Names are patterns; the tensors of the first of the required ones have to be of
    one of the types. What is neither required nor optional nor harmless is a problem.
    """

    name: str
    required: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    shape: Callable[[Stored], Shape | None]
    dense: Callable[[Stored], Tensor]
    optional: tuple[str, ...] = ()
    for_shape: str = ""
    rows: bool = False

    def takes(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.required + self.optional)

    def matches(self, tensors: Tensors) -> bool:
        found = [[name for name in tensors if re.fullmatch(pattern, name)] for pattern in self.required]
        return all(found) and all(tensors[name].dtype in self.dtypes for name in found[0])


# --- the table ----------------------------------------------------------------------------------------------------

_INT8, _INT32 = frozenset((torch.int8,)), frozenset((torch.int32,))
_PACKED_SHAPE = r"weight_shape"
_QUANT_STATE = r"weight\.quant_state\.bitsandbytes__(nf4|fp4)"

_FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))

# The first that matches counts: the forms that ask for more stand first.
_RULES = (
    _Rule(
        "bitsandbytes 4-bit",
        ("weight", _QUANT_STATE, r"weight\.absmax", r"weight\.quant_map"),
        _FLOATS | _INT8 | {torch.uint8},  # bytes, carried by any type
        four_bit_shape,
        four_bit,
        optional=(r"weight\.nested_absmax", r"weight\.nested_quant_map"),
        for_shape=_QUANT_STATE,
    ),
    _Rule("bitsandbytes LLM.int8", ("weight", "SCB"), _INT8, weight_shape, llm_int8, optional=("weight_format",)),
    _Rule(
        "compressed-tensors packed",
        ("weight_packed", "weight_scale", _PACKED_SHAPE),
        _INT32,
        packed_shape,
        packed,
        optional=("weight_zero_point", "weight_g_idx"),
        for_shape=_PACKED_SHAPE,
    ),
    _Rule("GPTQ or AWQ", ("qweight", "qzeros", "scales"), _INT32, gptq_shape, gptq, optional=("g_idx",)),
    _Rule("scaled fp8", ("weight", "weight_scale_inv"), _FP8, weight_shape, partial(scaled, scale="weight_scale_inv")),
    _Rule("scaled fp8", ("weight", "weight_scale"), _FP8, weight_shape, partial(scaled, scale="weight_scale")),
    _Rule(
        "scaled int8",
        ("weight", "weight_scale"),
        _INT8,
        weight_shape,
        partial(scaled, scale="weight_scale"),
        optional=("weight_zero_point",),
    ),
    _Rule("fp8", ("weight",), _FP8, weight_shape, as_it_is, rows=True),
    _Rule("plain", ("weight",), _FLOATS, weight_shape, as_it_is, rows=True),
)
_UNKNOWN = _Rule("unknown", (), frozenset(), lambda stored: None, as_it_is)


# --- problems -----------------------------------------------------------------------------------------------------

# Beside a weight without changing it: the bias, scales of what flows in and out, and what I-BERT works out of the
# weight at every step.
_FLOW = r"(input|output|act|activation|input_act(ivation)?|output_act(ivation)?|q|k|v|kv|prob|kv_cache)"
_HARMLESS = (
    rf"bias|{_FLOW}_(global_)?(scale|zero_point)(_inv|_ub)?|input_g_idx|(weight|bias)_integer|fc_scaling_factor"
)

# Forms that are not dequantised here, and the names that tell them; the first that fits is named.
_FOREIGN = {
    "MXFP4": r"(\w+_)?blocks",
    "AQLM": r"codebooks",
    "EETQ": r"weight_scales",
    "EXL2": r"q_weight",
    "EXL3": r"trellis",
    "FP-Quant": r"dqweight|forward_hadamard_matrix",
    "HIGGS": r"tables2?",
    "HQQ": r"W_q",
    "Marlin": r"B|workspace",
    "MLX": r"qbiases|biases",
    "NVFP4": r"weight_scale_2|weight_global_scale|weight_sf(_rowmajor)?",
    "QuIP#": r"Qidxs\w*",
    "quanto": r"weight\._(data|scale|shift)",
    "SpQR": r"dense_weights",
    "torchao": r"_weight_\w+|weight:\S+",
    "VPTQ": r"\w*centroids(\.weight)?",
}


def _held(tensors: Tensors) -> str:
    return ", ".join(f"{name} ({tensor.dtype})" for name, tensor in sorted(tensors.items())).replace("torch.", "")


def _problem(rule: _Rule, tensors: Tensors, config: Config) -> str | None:
    reason = next((reason for find in _PROBLEMS if (reason := find(rule, tensors, config))), None)
    return reason and f"{module_path(tensors)} is stored as {_held(tensors)}: {reason}. {WAY_OUT}"


def _foreign(rule: _Rule, tensors: Tensors, config: Config) -> str | None:
    forms = (form for form, names in _FOREIGN.items() if any(re.fullmatch(names, name) for name in tensors))
    form = next(forms, None)
    return form and f"this is the form of {form}, which is not dequantised here"


def _unknown(rule: _Rule, tensors: Tensors, config: Config) -> str | None:
    return "no form that is known here" if rule is _UNKNOWN else None


def _strangers(rule: _Rule, tensors: Tensors, config: Config) -> str | None:
    names = sorted(name for name in tensors if not rule.takes(name) and not re.fullmatch(_HARMLESS, name))
    return f"what {', '.join(names)} does to the weight is not known here" if names else None


def _setting(rule: _Rule, tensors: Tensors, config: Config) -> str | None:
    for name, forms, values, why in _SETTINGS:
        value = str(config.get(name) or "").lower()
        if re.fullmatch(forms, rule.name) and not re.fullmatch(values, value):
            return f"{name} of quantization_config is {config.get(name)!r}, {why}"
    return None


# What the configuration may say for a form to be read: name, forms (pattern), allowed values (pattern), else why not.
_OTHER_ORDER = "which orders the entries differently"
_SETTINGS = (
    ("quant_method", r".*", r"(?!bitnet).*", "which quantises weights again in every forward pass"),
    ("quant_method", r"scaled int8", r"compressed-tensors", "and its scales are not known here"),
    ("transform_config", r".*", r"", "which rotates weights"),
    ("checkpoint_format", r"GPTQ or AWQ", r"|gptq|gptq_v2|gemm", _OTHER_ORDER),
    ("format", r"GPTQ or AWQ", r"|gptq|gptq_v2|gemm", _OTHER_ORDER),
    ("version", r"GPTQ or AWQ", r"|gemm", _OTHER_ORDER),
)
_PROBLEMS = (_foreign, _unknown, _strangers, _setting)
