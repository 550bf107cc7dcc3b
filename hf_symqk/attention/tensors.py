"""
A whole tensor from whatever holds it: plain parameters, DTensors (FSDP2, tensor parallel), DeepSpeed ZeRO-3
partitions, LoRA and DoRA adapters, quantised weights. The one place that knows how a weight is stored.

Gathering is collective under an engine that shards: every rank has to come along, and nothing that one rank alone
could skip or fail in stands before it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from .lora import adapted_weight


__all__ = [
    "LinearTensors",
    "full_shape",
    "is_sharded",
    "linear_shape",
    "refuse_fsdp1",
    "storage_name",
    "whole_linears",
    "whole_parameters",
]


class LinearTensors(NamedTuple):
    """Weight of a linear map as it is stored, `(O, D)` or (Conv1D) `(D, O)`, and its bias `(O,)` or `None`."""

    weight: Tensor
    bias: Tensor | None


Whole = Mapping[Any, Tensor]  # by parameter


def full_shape(parameter: Tensor) -> torch.Size:
    """
    Shape of the whole parameter, also where this process holds a part of it or (ZeRO-3) nothing.

    Args:
        parameter (`torch.Tensor`): A parameter of a live model.

    Returns:
        `torch.Size`: The shape that the parameter has in an unsharded model.
    """
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def linear_shape(holder: nn.Module) -> torch.Size | None:
    """
    Shape of the weight matrix that a module holds in any form.

    Args:
        holder (`torch.nn.Module`): A linear map: plain, sharded, adapted or quantised.

    Returns:
        `torch.Size`: Two dimensions, in the order of storage; `None` if the module holds no matrix.

    Raises:
        ValueError: if the module is sharded by FSDP1, which tells no shapes of its parts.
    """
    weight = holder._parameters.get("weight") if type(holder) is nn.Linear else None
    if type(weight) is nn.Parameter and not hasattr(weight, "ds_shape") and not hasattr(weight, "_fsdp_flattened"):
        return weight.shape  # by far the most, at a glance
    return _storage(holder).shape(holder)


@contextmanager
def whole_linears(holders: Sequence[nn.Module], *, write: bool = False) -> Iterator[dict[nn.Module, LinearTensors]]:
    """
    Whole effective weights of linear maps, for reading or for writing.

    Args:
        holders (`Sequence[torch.nn.Module]`):
            The linear maps.
        write (`bool`, *optional*, defaults to `False`):
            Whether what is written in place to the tensors is to reach the parameters, which has to be plain storage
            (see [`storage_name`]). Under ZeRO-3 the values of rank 0 count.

    Yields:
        `dict[torch.nn.Module, LinearTensors]`: The parameters themselves where they are whole already (no copy); else
        new tensors, valid until the context ends.

    Raises:
        ValueError: if a weight is on the meta device, is stored in a form that cannot be read, or (`write=True`) is
            not plain, so that what is written would be lost.
    """
    if write and (lost := [holder for holder in holders if storage_name(holder) != "plain"]):
        raise ValueError(f"{type(lost[0]).__name__} ({storage_name(lost[0])}) can be read but not written.")
    parameters = [parameter for holder in dict.fromkeys(holders) for parameter in holder.parameters()]
    with whole_parameters(parameters, write=write) as whole:
        yield {holder: _storage(holder).read(holder, whole) for holder in holders}


def is_sharded(holder: nn.Module) -> bool:
    """
    Whether reading a module's weights takes other processes.

    Args:
        holder (`torch.nn.Module`): A linear map or any other module.

    Returns:
        `bool`
    """
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in holder.parameters())


def storage_name(holder: nn.Module) -> str:
    """
    Name of the form in which a linear map is stored.

    Args:
        holder (`torch.nn.Module`): The linear map.

    Returns:
        `str`: `"plain"` (which alone can be written), `"PEFT adapter"`, `"bitsandbytes"`, `"torchao"`,
        `"convolution in groups"` or `"packed"`.
    """
    return _storage(holder).name


@contextmanager
def whole_parameters(
    parameters: Sequence[nn.Parameter], *, write: bool = False
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """
    Whole tensors of parameters; see [`whole_linears`] for the arguments.

    Args:
        parameters (`Sequence[torch.nn.Parameter]`): The parameters; they may be sharded or partitioned.
        write (`bool`, *optional*, defaults to `False`): Whether in-place changes are to reach the parameters.

    Yields:
        `dict[torch.nn.Parameter, torch.Tensor]`

    Raises:
        ValueError: if a parameter is on the meta device, where it has no values.
    """
    partitioned = [parameter for parameter in parameters if _is_partitioned(parameter)]
    if partitioned:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None)
    else:
        gathered = nullcontext()
    with gathered, torch.no_grad():
        tensors: dict[nn.Parameter, Tensor] = {
            parameter: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            for parameter in parameters
        }
        if any(tensor.is_meta for tensor in tensors.values()):
            raise ValueError("The weights are on the meta device and have no values; materialise the model first.")
        yield tensors
        if write:
            for parameter, tensor in tensors.items():
                if isinstance(parameter, DTensor):
                    parameter.copy_(distribute_tensor(tensor, parameter.device_mesh, parameter.placements))


def _is_partitioned(parameter: nn.Parameter) -> bool:
    if not hasattr(parameter, "ds_id"):
        return False
    # Available without being kept so: somebody around us gathered it and will write it back. Gathering it again would
    # partition it under their feet.
    status: Any = parameter
    return status.ds_status.name != "AVAILABLE" or status.ds_persist


# --- forms of storage ---------------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    """A form in which a linear map is stored: how to tell it, the shape it stands for, and its effective tensors."""

    name: str
    holds: Callable[[nn.Module], bool]
    shape: Callable[[nn.Module], torch.Size | None]
    read: Callable[[nn.Module, Whole], LinearTensors]


def _storage(holder: nn.Module) -> _Storage:
    return next(storage for storage in _STORAGES if storage.holds(holder))


def _held(holder: nn.Module, name: str) -> Tensor | None:
    tensor = getattr(holder, name, None)
    return tensor if isinstance(tensor, Tensor) else None


def _bias(holder: nn.Module, whole: Whole) -> Tensor | None:
    bias = _held(holder, "bias")
    return None if bias is None else whole.get(bias, bias.detach())


def _out_in(holder: nn.Module) -> torch.Size | None:
    features: list[Any] = [getattr(holder, name, None) for name in ("out_features", "in_features")]
    return torch.Size(features) if all(isinstance(number, int) for number in features) else None


# Plain: a floating point matrix with nothing beside it that its values would have to be multiplied by.


def _is_plain(holder: nn.Module) -> bool:
    weight = _held(holder, "weight")
    if weight is None or not weight.is_floating_point() or _is_foreign(weight):
        return False
    return not any("scale" in name for name, _ in _own_tensors(holder))


def _own_tensors(holder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from holder.named_parameters(recurse=False)
    yield from holder.named_buffers(recurse=False)


def _is_foreign(weight: Tensor) -> bool:
    """A tensor class of some library, whose values are not simply its entries."""
    return not type(weight.data).__module__.startswith("torch.") and type(weight.data) is not Tensor


def _plain_shape(holder: nn.Module) -> torch.Size | None:
    weight = _held(holder, "weight")
    if weight is None:
        return None
    if getattr(weight, "_fsdp_flattened", False):
        raise ValueError(_FSDP1)
    shape = full_shape(weight)
    if len(shape) > 2 and isinstance(holder, nn.Conv1d | nn.Conv2d) and shape[2:].numel() == 1:
        return torch.Size((shape[0], shape[1] * holder.groups))  # a convolution of one token
    return shape if len(shape) == 2 else None


_FSDP1 = (
    "The model is sharded by FSDP1 (`FullyShardedDataParallel`), which keeps no shaped parameters. Use FSDP2 "
    "(`fully_shard`; `fsdp_version: 2` in accelerate), whose weights can be read."
)


def refuse_fsdp1(module: nn.Module) -> None:
    """
    Refuses what FSDP1 has sharded, whichever way it keeps its parameters.

    Args:
        module (`torch.nn.Module`): Any module of a model.

    Raises:
        ValueError: if the module is a unit of FSDP1.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError(_FSDP1)


def _read_plain(holder: nn.Module, whole: Whole) -> LinearTensors:
    weight: Any = _held(holder, "weight")
    return LinearTensors(whole.get(weight, weight.detach()), _bias(holder, whole))


# A convolution of one token in groups of channels (SqueezeBERT), whose matrix is block-diagonal.


def _is_grouped(holder: nn.Module) -> bool:
    return isinstance(holder, nn.Conv1d | nn.Conv2d) and holder.groups > 1 and _is_plain(holder)


def _read_grouped(holder: Any, whole: Whole) -> LinearTensors:
    weight, bias = _read_plain(holder, whole)
    return LinearTensors(torch.block_diag(*weight.flatten(1).chunk(holder.groups)), bias)


# Adapters: LoRA and DoRA as base + scaling · B A, without merging.


def _is_adapted(holder: nn.Module) -> bool:
    peft = sys.modules.get("peft")  # not imported: no module can be one of its layers
    return peft is not None and isinstance(holder, peft.tuners.tuners_utils.BaseTunerLayer)


def _adapted_shape(holder: Any) -> torch.Size | None:
    return linear_shape(holder.base_layer)


def _read_adapted(holder: Any, whole: Whole) -> LinearTensors:
    base = _storage(holder.base_layer).read(holder.base_layer, whole)
    if holder.merged:
        if holder.disable_adapters:
            raise ValueError(
                f"The adapters {holder.merged_adapters} of {type(holder).__name__} are merged and disabled at once; "
                "unmerge them first."
            )
        return base
    if holder.disable_adapters:
        return base
    effective = base.weight
    for adapter in holder.active_adapters:
        if adapter not in getattr(holder, "lora_A", {}):
            if any(adapter in getattr(holder, name, {}) for name in holder.adapter_layer_names):
                raise ValueError(
                    f"Adapter {adapter!r} is a {type(holder).__module__}.{type(holder).__name__}: {_MERGE}"
                )
            continue  # this adapter does not touch this layer
        variant = holder.lora_variant.get(adapter)
        name = getattr(variant, "__name__", type(variant).__name__)
        if variant is not None and name != "DoraLinearVariant":
            raise ValueError(f"Adapter {adapter!r} is a LoRA variant ({name}): {_MERGE}")
        effective = adapted_weight(
            base.weight,
            whole[holder.lora_A[adapter].weight],
            whole[holder.lora_B[adapter].weight],
            scaling=holder.scaling[adapter],
            magnitude=None if variant is None else whole[holder.lora_magnitude_vector[adapter].weight],
            transposed=holder.fan_in_fan_out,
            before=effective,
        )
    return LinearTensors(effective, base.bias)


_MERGE = "its effective weight is not known here. Merge it (`merge_and_unload`) before scoring."


# Quantised: dequantised here, one linear map at a time.


def _is_bitsandbytes(holder: nn.Module) -> bool:
    weight = _held(holder, "weight")
    quantised = type(weight).__name__ in ("Params4bit", "Int8Params")
    return quantised and weight is not None and not weight.is_floating_point()


def _read_bitsandbytes(holder: nn.Module, whole: Whole) -> LinearTensors:
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight: Any = holder.weight
    state: Any = getattr(holder, "state", None)
    return LinearTensors(dequantize_bnb_weight(weight, state).view(_out_in(holder)), _bias(holder, whole))


def _is_torchao(holder: nn.Module) -> bool:
    weight = _held(holder, "weight")
    return weight is not None and type(weight.data).__module__.startswith("torchao.")


def _read_torchao(holder: nn.Module, whole: Whole) -> LinearTensors:
    weight: Any = holder.weight
    return LinearTensors(weight.dequantize(), _bias(holder, whole))


def _packed_shape(holder: nn.Module) -> torch.Size | None:
    # Only modules that hold something and say what matrix it stands for; others (norms, dropout) are no linear maps.
    return _out_in(holder) if any(True for _ in _own_tensors(holder)) else None


def _read_packed(holder: nn.Module, whole: Whole) -> LinearTensors:
    held = ", ".join(f"{name} ({tensor.dtype})".replace("torch.", "") for name, tensor in _own_tensors(holder))
    raise ValueError(
        f"{type(holder).__module__}.{type(holder).__name__} stores its weight as {held}; this packed form cannot be "
        "dequantised here. Load the model without quantisation, or dequantise it first (`model.dequantize()`)."
    )


_STORAGES = (
    _Storage("PEFT adapter", _is_adapted, _adapted_shape, _read_adapted),
    _Storage("bitsandbytes", _is_bitsandbytes, _out_in, _read_bitsandbytes),
    _Storage("torchao", _is_torchao, _plain_shape, _read_torchao),
    _Storage("convolution in groups", _is_grouped, _plain_shape, _read_grouped),
    _Storage("plain", _is_plain, _plain_shape, _read_plain),
    _Storage("packed", lambda holder: True, _packed_shape, _read_packed),
)
