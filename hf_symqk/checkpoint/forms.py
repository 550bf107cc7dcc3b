"""
The forms in which checkpoint files store a linear map: as a plain matrix, or as integers or narrow floats with scales
beside them. One table: what tells a form, the shape that it stands for, and how to get the matrix back.

Nothing is read here. A reader says which tensors stand under a module path ([`StoredTensor`]), [`form_of`] answers
with a [`Form`], which says what to read and turns it into the matrix.

Every tensor under the path has to be accounted for: a scale that nobody applied would give wrong scores silently.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


__all__ = ["Form", "StoredTensor", "Tensors", "form_of"]


class StoredTensor(Protocol):
    """A tensor of a checkpoint that has not been read."""

    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, StoredTensor]  # by name below the module path: "weight", "weight_scale", "weight.absmax"
Config = Mapping[str, Any]  # `quantization_config` of config.json; empty where there is none
Read = Mapping[str, Tensor]  # the same names, after reading
Shape = tuple[int, int]


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
        return None if self.problem else self._rule.shape(_Stored(self._tensors, self._config, read or {}))

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
        return self._rule.dense(_Stored(self._tensors, self._config, read))


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


class _Stored(NamedTuple):
    """What shape and matrix are computed from."""

    tensors: Tensors
    config: Config
    read: Read

    def error(self, what: str) -> ValueError:
        return ValueError(f"{_path(self.tensors)}: {what}")


class _Rule(NamedTuple):
    """
    A form as one line of the table. Names are patterns; the tensors of the first of the required ones have to be of
    one of the types. What is neither required nor optional nor harmless is a problem.
    """

    name: str
    required: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    shape: Callable[[_Stored], Shape | None]
    dense: Callable[[_Stored], Tensor]
    optional: tuple[str, ...] = ()
    for_shape: str = ""
    rows: bool = False

    def takes(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.required + self.optional)

    def matches(self, tensors: Tensors) -> bool:
        found = [[name for name in tensors if re.fullmatch(pattern, name)] for pattern in self.required]
        return all(found) and all(tensors[name].dtype in self.dtypes for name in found[0])


# --- the matrix as it is ------------------------------------------------------------------------------------------

_FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))


def _weight_shape(stored: _Stored) -> Shape | None:
    shape = stored.tensors["weight"].shape
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _as_it_is(stored: _Stored) -> Tensor:
    return stored.read["weight"]


# --- scales beside it: one for all, one a row, or one a block -----------------------------------------------------


def _scaled(stored: _Stored, scale: str) -> Tensor:
    """
    `(q - z) · s`. Also where the scale is called `weight_scale_inv`: that is the inverse of what the quantiser
    multiplied by.
    """
    weight = stored.read["weight"].float()
    if "weight_zero_point" in stored.read:
        weight = weight - _spread(stored, "weight_zero_point", weight.shape)
    return weight * _spread(stored, scale, weight.shape)


def _spread(stored: _Stored, name: str, shape: tuple[int, ...], values: Tensor | None = None) -> Tensor:
    """A scale (or zero point) as float32 that broadcasts against the matrix."""
    scale = stored.read[name] if values is None else values
    if scale.dtype == torch.uint8 and "scale" in name:
        scale = (scale.float() - 127).exp2()  # exponents (E8M0), in files older than its type
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape == shape[:1]:
        return scale.unsqueeze(1)
    blocks = _blocks(stored.config, shape, tuple(scale.shape)) if scale.ndim == 2 else None
    if blocks is None:
        raise stored.error(f"{name} has shape {tuple(scale.shape)}, which does not divide a weight of {tuple(shape)}.")
    for dim, block in enumerate(blocks):
        if scale.shape[dim] > 1:
            scale = scale.repeat_interleave(block, dim=dim)[(slice(None),) * dim + (slice(shape[dim]),)]
    return scale


def _blocks(config: Config, shape: tuple[int, ...], grid: tuple[int, ...]) -> Shape | None:
    """
    Height and width of a block: what the configuration says, or 128 × 128 (its default), if that gives this grid,
    the last blocks being cut off; else what divides evenly.
    """
    declared = [config.get("weight_block_size"), *(weights.get("block_structure") for weights in _groups(config))]
    for block in [*declared, (128, 128)]:
        if block and all(-(-size // b) == count for size, b, count in zip(shape, block, grid, strict=True)):
            return block[0], block[1]
    if any(size % count for size, count in zip(shape, grid, strict=True)):
        return None
    return shape[0] // grid[0], shape[1] // grid[1]


def _groups(config: Config) -> list[Mapping[str, Any]]:
    """How compressed-tensors quantised the weights, one entry a group of modules."""
    return [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]


# --- integers packed into int32 -----------------------------------------------------------------------------------


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """(n, m) int32 as (n, m · 32 / bits) unsigned integers, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def _bits(stored: _Stored, words: int, entries: int) -> int:
    """Bits of an entry, when so many entries lie in so many words."""
    bits = next((bits for bits in (2, 4, 8) if -(-entries * bits // 32) == words), None)
    if bits is None:
        raise stored.error(f"{entries} entries in {words} words of 32 bits are not of 2, 4 or 8 bits. {_WAY_OUT}")
    return bits


def _packed_shape(stored: _Stored) -> Shape | None:
    rows, columns = stored.read["weight_shape"].tolist()
    return rows, columns


def _packed(stored: _Stored) -> Tensor:
    """compressed-tensors: entries shifted to unsigned, packed along rows; zero points along columns."""
    rows, columns = stored.read["weight_shape"].tolist()
    words = stored.read["weight_packed"]
    bits = _bits(stored, words.shape[1], columns)
    weight = _unpack(words, bits)[:, :columns].float() - 2 ** (bits - 1)
    scale = stored.read["weight_scale"]
    spread = {"weight_scale": scale}
    if "weight_zero_point" in stored.read:
        zeros = _unpack(stored.read["weight_zero_point"].mT, bits)[:, :rows].mT
        spread["weight_zero_point"] = zeros.float() - 2 ** (bits - 1)
    group = stored.read.get("weight_g_idx")
    if group is not None and bool((group >= 0).all()):  # columns in the order of activations; -1: in their own
        full = {name: values.float()[:, group.long()] for name, values in spread.items()}
    else:
        full = {name: _spread(stored, name, (rows, columns), values) for name, values in spread.items()}
    return (weight - full.get("weight_zero_point", 0)) * full["weight_scale"]


def _gptq_bits(stored: _Stored) -> int:
    return _bits(stored, stored.tensors["qzeros"].shape[1], stored.tensors["scales"].shape[1])


def _is_awq(stored: _Stored) -> bool:
    """GPTQ packs inputs, AWQ outputs: the width of the packed matrix tells."""
    return stored.tensors["qweight"].shape[1] != stored.tensors["scales"].shape[1]


def _gptq_shape(stored: _Stored) -> Shape | None:
    columns, rows = stored.tensors["qweight"].shape[0], stored.tensors["scales"].shape[1]
    return (rows, columns) if _is_awq(stored) else (rows, columns * 32 // _gptq_bits(stored))


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where entry i of a word lies


def _gptq(stored: _Stored) -> Tensor:
    """GPTQ and AWQ, both (inputs, outputs): `(q - z) · s`, with z and s of the input's group."""
    bits, scales = _gptq_bits(stored), stored.read["scales"].float()
    inputs = stored.tensors["qweight"].shape[0]
    if _is_awq(stored):
        weight, zeros = (
            _unpack(stored.read[name], bits).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
            for name in ("qweight", "qzeros")
        )
    else:
        inputs = inputs * 32 // bits
        weight = _unpack(stored.read["qweight"].mT, bits).mT
        words = stored.read["qzeros"]
        if stored.config.get("checkpoint_format", stored.config.get("format")) != "gptq_v2":
            # The first version of the format stores z - 1. GPTQModel adds the one to whole words, carries and all.
            words = words + torch.tensor(sum(1 << bit for bit in range(0, 31, bits)), dtype=torch.int32)
        zeros = _unpack(words, bits)
    groups = stored.read.get("g_idx")
    if groups is None:
        if inputs % scales.shape[0]:
            raise stored.error(f"scales has {scales.shape[0]} rows, which do not divide {inputs} inputs.")
        groups = torch.arange(inputs) // (inputs // scales.shape[0])
    groups = groups.long()
    return ((weight - zeros[groups]) * scales[groups]).mT


# --- bitsandbytes -------------------------------------------------------------------------------------------------


def _llm_int8(stored: _Stored) -> Tensor:
    order = stored.read.get("weight_format")
    if order is not None and order.item() != 0:
        raise stored.error(
            f"weight_format is {int(order)}: an order of entries that bitsandbytes used for GPUs before 0.45. "
            "Load the checkpoint with such a version, and save it again."
        )
    return stored.read["weight"].float() * (stored.read["SCB"].float() / 127).unsqueeze(1)


def _quant_state(stored: _Stored) -> Mapping[str, Any]:
    packed = next(value for name, value in stored.read.items() if name.startswith("weight.quant_state."))
    return json.loads(bytes(packed.tolist()))


def _4bit_shape(stored: _Stored) -> Shape | None:
    shape = _quant_state(stored)["shape"]
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _4bit(stored: _Stored) -> Tensor:
    """Two entries of a code book a byte, the high half first; a scale a block, which may be coded in turn."""
    state, read = _quant_state(stored), stored.read
    shape = state["shape"]
    absmax = read["weight.absmax"]
    if "weight.nested_absmax" in read:
        outer = _each(read["weight.nested_absmax"], state["nested_blocksize"], absmax.numel())
        absmax = read["weight.nested_quant_map"][absmax.long()] * outer + state["nested_offset"]
    packed = read["weight"].flatten().view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[: prod(shape)]
    weight = read["weight.quant_map"][codes.long()] * _each(absmax.float(), state["blocksize"], codes.numel())
    return weight.view(shape).to(getattr(torch, state["dtype"]))


def _each(values: Tensor, block: int, count: int) -> Tensor:
    return values.repeat_interleave(block)[:count]


# --- the table ----------------------------------------------------------------------------------------------------

_INT8, _INT32 = frozenset((torch.int8,)), frozenset((torch.int32,))
_PACKED_SHAPE = r"weight_shape"
_QUANT_STATE = r"weight\.quant_state\.bitsandbytes__(nf4|fp4)"

# The first that matches counts: the forms that ask for more stand first.
_RULES = (
    _Rule(
        "bitsandbytes 4-bit",
        ("weight", _QUANT_STATE, r"weight\.absmax", r"weight\.quant_map"),
        _FLOATS | _INT8 | {torch.uint8},  # bytes, carried by any type
        _4bit_shape,
        _4bit,
        optional=(r"weight\.nested_absmax", r"weight\.nested_quant_map"),
        for_shape=_QUANT_STATE,
    ),
    _Rule("bitsandbytes LLM.int8", ("weight", "SCB"), _INT8, _weight_shape, _llm_int8, optional=("weight_format",)),
    _Rule(
        "compressed-tensors packed",
        ("weight_packed", "weight_scale", _PACKED_SHAPE),
        _INT32,
        _packed_shape,
        _packed,
        optional=("weight_zero_point", "weight_g_idx"),
        for_shape=_PACKED_SHAPE,
    ),
    _Rule("GPTQ or AWQ", ("qweight", "qzeros", "scales"), _INT32, _gptq_shape, _gptq, optional=("g_idx",)),
    _Rule(
        "scaled fp8", ("weight", "weight_scale_inv"), _FP8, _weight_shape, partial(_scaled, scale="weight_scale_inv")
    ),
    _Rule("scaled fp8", ("weight", "weight_scale"), _FP8, _weight_shape, partial(_scaled, scale="weight_scale")),
    _Rule(
        "scaled int8",
        ("weight", "weight_scale"),
        _INT8,
        _weight_shape,
        partial(_scaled, scale="weight_scale"),
        optional=("weight_zero_point",),
    ),
    _Rule("fp8", ("weight",), _FP8, _weight_shape, _as_it_is, rows=True),
    _Rule("plain", ("weight",), _FLOATS, _weight_shape, _as_it_is, rows=True),
)
_UNKNOWN = _Rule("unknown", (), frozenset(), lambda stored: None, _as_it_is)


# --- problems -----------------------------------------------------------------------------------------------------

# Beside a weight without changing it: the bias, and scales of what flows in and out.
_FLOW = r"(input|output|act|activation|input_act(ivation)?|output_act(ivation)?|q|k|v|kv|prob|kv_cache)"
_HARMLESS = rf"bias|{_FLOW}_(global_)?(scale|zero_point)(_inv|_ub)?|input_g_idx"

# Forms that are not dequantised here, and the names that tell them.
_FOREIGN = {
    "AQLM": r"codebooks",
    "EETQ": r"weight_scales",
    "EXL2": r"q_weight",
    "EXL3": r"trellis",
    "FP-Quant": r"dqweight|forward_hadamard_matrix",
    "HIGGS": r"tables2?",
    "HQQ": r"W_q",
    "Marlin": r"B|workspace",
    "MLX": r"qbiases|biases",
    "MXFP4": r"(\w+_)?blocks",
    "NVFP4": r"weight_scale_2|weight_global_scale|weight_sf(_rowmajor)?",
    "QuIP#": r"Qidxs\w*",
    "quanto": r"weight\._(data|scale|shift)",
    "SpQR": r"dense_weights",
    "torchao": r"_weight_\w+|weight:\S+",
    "VPTQ": r"\w*centroids(\.weight)?",
}

_WAY_OUT = "Score an unquantised checkpoint of the model, or one saved after `model.dequantize()`."


def _path(tensors: Tensors) -> str:
    """The module path that the keys share."""
    return next((tensor.key.removesuffix(name).rstrip(".") for name, tensor in tensors.items()), "the linear map")


def _held(tensors: Tensors) -> str:
    return ", ".join(f"{name} ({tensor.dtype})" for name, tensor in sorted(tensors.items())).replace("torch.", "")


def _problem(rule: _Rule, tensors: Tensors, config: Config) -> str | None:
    reason = next((reason for find in _PROBLEMS if (reason := find(rule, tensors, config))), None)
    return reason and f"{_path(tensors)} is stored as {_held(tensors)}: {reason}. {_WAY_OUT}"


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
