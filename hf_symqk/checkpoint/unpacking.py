"""
From the tensors in which a checkpoint stores a linear map to the matrix that they stand for: one function a form, each
on the values that were read. [`forms`] says which of them applies.
"""

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


__all__ = [
    "WAY_OUT",
    "Config",
    "Read",
    "Shape",
    "Stored",
    "StoredTensor",
    "Tensors",
    "as_it_is",
    "four_bit",
    "four_bit_shape",
    "gptq",
    "gptq_shape",
    "llm_int8",
    "module_path",
    "packed",
    "packed_shape",
    "scaled",
    "weight_shape",
]


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


WAY_OUT = "Score an unquantised checkpoint of the model, or one saved after `model.dequantize()`."


def module_path(tensors: Tensors) -> str:
    """The module path that the keys share."""
    return next((tensor.key.removesuffix(name).rstrip(".") for name, tensor in tensors.items()), "the linear map")


class Stored(NamedTuple):
    """What shape and matrix are computed from."""

    tensors: Tensors
    config: Config
    read: Read

    def error(self, what: str) -> ValueError:
        return ValueError(f"{module_path(self.tensors)}: {what}")


# --- the matrix as it is ------------------------------------------------------------------------------------------


def weight_shape(stored: Stored) -> Shape | None:
    shape = stored.tensors["weight"].shape
    return (shape[0], shape[1]) if len(shape) == 2 else None


def as_it_is(stored: Stored) -> Tensor:
    return stored.read["weight"]


# --- scales beside it: one for all, one a row, or one a block -----------------------------------------------------


def scaled(stored: Stored, scale: str) -> Tensor:
    """
    `(q - z) · s`. Also where the scale is called `weight_scale_inv`: that is the inverse of what the quantiser
    multiplied by.
    """
    weight = stored.read["weight"].float()
    if "weight_zero_point" in stored.read:
        weight = weight - _spread(stored, "weight_zero_point", stored.read["weight_zero_point"], weight.shape)
    scales = stored.read[scale]
    if scales.dtype == torch.uint8:
        scales = (scales.float() - 127).exp2()  # exponents (E8M0) in files older than their type
    return weight * _spread(stored, scale, scales, weight.shape)


def _spread(stored: Stored, name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scales (or zero points) as float32 that broadcast against the matrix."""
    values = values.float()
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.shape == shape[:1]:
        return values.unsqueeze(1)
    blocks = _blocks(stored.config, shape, tuple(values.shape)) if values.ndim == 2 else None
    if blocks is None:
        raise stored.error(f"{name} has shape {tuple(values.shape)}, which does not fit a weight of {tuple(shape)}.")
    for dim, block in enumerate(blocks):
        if values.shape[dim] > 1:
            values = values.repeat_interleave(block, dim=dim).narrow(dim, 0, shape[dim])
    return values


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


def _bits(stored: Stored, words: int, entries: int) -> int:
    """Bits of an entry, when so many entries lie in so many words."""
    bits = next((bits for bits in (2, 4, 8) if -(-entries * bits // 32) == words), None)
    if bits is None:
        raise stored.error(f"{entries} entries in {words} words of 32 bits are not of 2, 4 or 8 bits. {WAY_OUT}")
    return bits


def packed_shape(stored: Stored) -> Shape | None:
    rows, columns = stored.read["weight_shape"].tolist()
    return rows, columns


def packed(stored: Stored) -> Tensor:
    """compressed-tensors: entries shifted to unsigned, packed along rows; zero points along columns."""
    rows, columns = stored.read["weight_shape"].tolist()
    words = stored.read["weight_packed"]
    bits = _bits(stored, words.shape[1], columns)
    weight = _unpack(words, bits)[:, :columns].float() - 2 ** (bits - 1)
    spread = {"weight_scale": stored.read["weight_scale"]}
    if "weight_zero_point" in stored.read:
        zeros = _unpack(stored.read["weight_zero_point"].mT, bits)[:, :rows].mT
        spread["weight_zero_point"] = zeros.float() - 2 ** (bits - 1)
    group = stored.read.get("weight_g_idx")
    if group is not None and bool((group >= 0).all()):  # columns in the order of activations; -1: in their own
        full = {name: values.float()[:, group.long()] for name, values in spread.items()}
    else:
        full = {name: _spread(stored, name, values, (rows, columns)) for name, values in spread.items()}
    return (weight - full.get("weight_zero_point", 0)) * full["weight_scale"]


def _gptq_bits(stored: Stored) -> int:
    return _bits(stored, stored.tensors["qzeros"].shape[1], stored.tensors["scales"].shape[1])


def _is_awq(stored: Stored) -> bool:
    """GPTQ packs inputs, AWQ outputs: the width of the packed matrix tells."""
    return stored.tensors["qweight"].shape[1] != stored.tensors["scales"].shape[1]


def gptq_shape(stored: Stored) -> Shape | None:
    columns, rows = stored.tensors["qweight"].shape[0], stored.tensors["scales"].shape[1]
    return (rows, columns) if _is_awq(stored) else (rows, columns * 32 // _gptq_bits(stored))


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where entry i of a word lies


def gptq(stored: Stored) -> Tensor:
    """GPTQ and AWQ, both (inputs, outputs): `(q - z) · s`, with z and s of the input's group."""
    bits, scales = _gptq_bits(stored), stored.read["scales"].float()
    inputs = stored.tensors["qweight"].shape[0]
    if _is_awq(stored):
        if bits != 4:
            raise stored.error(f"AWQ of {bits} bits is not known here, only of 4. {WAY_OUT}")
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


def llm_int8(stored: Stored) -> Tensor:
    order = stored.read.get("weight_format")
    if order is not None and order.item() != 0:
        raise stored.error(
            f"weight_format is {int(order)}: an order of entries that bitsandbytes used for GPUs before 0.45. "
            "Load the checkpoint with such a version, and save it again."
        )
    return stored.read["weight"].float() * (stored.read["SCB"].float() / 127).unsqueeze(1)


def _quant_state(stored: Stored) -> Mapping[str, Any]:
    packed = next(value for name, value in stored.read.items() if name.startswith("weight.quant_state."))
    return json.loads(bytes(packed.tolist()))


def four_bit_shape(stored: Stored) -> Shape | None:
    shape = _quant_state(stored)["shape"]
    return (shape[0], shape[1]) if len(shape) == 2 else None


def four_bit(stored: Stored) -> Tensor:
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
