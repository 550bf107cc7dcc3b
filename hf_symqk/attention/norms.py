"""Learned gains of norms, folded into the weights before them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .tensors import full_shape


__all__ = ["batch_norm_gain", "fold_gain"]


def fold_gain(name: str, weight: Tensor, norm: nn.Module | None, whole: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """
    Multiplies the rows of a weight by the gain that a norm puts on them.

    Args:
        name (`str`): How messages call the attention module.
        weight (`torch.Tensor` of shape `(heads, E, D)`): A weight, split into heads.
        norm (`torch.nn.Module` or `None`): What normalises its output.
        whole (`Mapping[torch.nn.Parameter, torch.Tensor]`): The norm's parameters with their values.

    Returns:
        `torch.Tensor`: The weight itself where there is no gain.

    Raises:
        ValueError: if the norm's parameters are not one gain per channel.
    """
    parameters = {} if norm is None else dict(norm.named_parameters())
    if norm is None or not parameters:
        return weight
    heads, head_dim = weight.shape[:2]
    gain = parameters.get("weight")
    if gain is None or full_shape(gain) not in [(head_dim,), (heads * head_dim,), (heads, head_dim)]:
        shapes = {name: tuple(full_shape(parameter)) for name, parameter in parameters.items()}
        raise ValueError(
            f"{name!r}: the parameters {shapes} of its {type(norm).__name__} are not one gain per channel of "
            f"{heads} heads of width {head_dim}; they cannot be folded into the weights."
        )
    gains = whole[gain].to(torch.promote_types(gain.dtype, torch.float32)) + _gain_offset(name, norm)
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) * gains.view(-1, head_dim, 1)


def batch_norm_gain(norm: nn.Module, whole: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """
    What a batch norm multiplies each channel by outside of training.

    Args:
        norm (`torch.nn.Module`): A batch norm of `O` channels.
        whole (`Mapping[torch.nn.Parameter, torch.Tensor]`): Its parameters with their values.

    Returns:
        `torch.Tensor` of shape `(O,)`: Its gain over the root of its running variance, in fp32 or more.
    """
    assert isinstance(norm, nn.modules.batchnorm._NormBase), "said by the layout"
    gain = torch.ones(norm.num_features) if norm.weight is None else whole[norm.weight]
    gain = gain.to(torch.promote_types(gain.dtype, torch.float32))
    return gain if norm.running_var is None else gain * (norm.running_var.to(gain) + norm.eps).rsqrt()


def _gain_offset(name: str, norm: nn.Module) -> int:
    """0 if a norm multiplies by its weight w, 1 if by 1 + w: its own forward says so, its eps left aside."""
    # A vector of ±1 comes out of every norm as it is, but for the gain. On the CPU and with values of its own, so that
    # no device has to be waited for and no weight that is not finite gets in the way.
    shapes = {name: full_shape(parameter) for name, parameter in norm.named_parameters()}
    probe = torch.ones(shapes["weight"])
    probe.view(-1)[1::2] = -1
    gains = []
    for weight in (0.0, 2.0):
        held = {name: torch.full(shape, weight if name == "weight" else 0.0) for name, shape in shapes.items()}
        gains.append(float((torch.func.functional_call(norm, held, (probe,)) * probe).mean()))
    offset = round(gains[0])
    if offset not in (0, 1) or round(gains[1]) != 2 + offset:
        raise ValueError(
            f"{name!r}: its {type(norm).__name__} multiplies neither by its weight w nor by 1 + w; its gain cannot be "
            "folded into the weights."
        )
    return offset
