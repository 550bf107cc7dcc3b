"""
A whole tensor from whatever holds it: plain parameters, DTensors (FSDP2, tensor parallel), DeepSpeed ZeRO-3
partitions.

Each of these is collective under an engine that shards: every rank has to come along.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


__all__ = ["full_shape", "whole_parameters"]


def full_shape(parameter: Tensor) -> torch.Size:
    """
    Shape of the whole parameter, also where this process holds a part of it or (ZeRO-3) nothing.

    Args:
        parameter (`torch.Tensor`): A parameter of a live model.

    Returns:
        `torch.Size`: The shape that the parameter has in an unsharded model.
    """
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def whole_parameters(
    parameters: Sequence[nn.Parameter], *, write: bool = False
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """
    Makes whole tensors of parameters, for reading or for writing.

    Args:
        parameters (`Sequence[torch.nn.Parameter]`):
            The parameters; they may be sharded or partitioned.
        write (`bool`, *optional*, defaults to `False`):
            Whether what is written in place to the tensors is to reach the parameters. Under ZeRO-3 the values of rank
            0 count.

    Yields:
        `dict`: The whole tensor of each parameter: itself where it is whole already (no copy).

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
        tensors: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            if parameter.is_meta:
                raise ValueError("The parameter is on the meta device and has no values; materialise the model first.")
            tensors[parameter] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
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
