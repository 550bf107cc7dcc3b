"""The effective weight of a linear map with a LoRA or DoRA adapter, of a live model or of files."""

import torch
from torch import Tensor


__all__ = ["adapted_weight"]


def adapted_weight(
    original: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    scaling: float,
    magnitude: Tensor | None = None,
    transposed: bool = False,
    before: Tensor | None = None,
) -> Tensor:
    """
    `W + scaling · B A`, and with DoRA its rows scaled to learned norms.

    Args:
        original (`torch.Tensor` of shape `(O, D)`, or `(D, O)` if transposed):
            Weight without any adapter.
        down (`torch.Tensor` of shape `(R, D)`):
            A.
        up (`torch.Tensor` of shape `(O, R)`):
            B.
        scaling (`float`):
            What B A is multiplied by.
        magnitude (`torch.Tensor` of `O` entries, *optional*):
            DoRA's norms; plain LoRA without.
        transposed (`bool`, *optional*, defaults to `False`):
            Whether the weight is stored as GPT-2's `Conv1D` stores it.
        before (`torch.Tensor`, *optional*):
            The weight that earlier adapters made of the original. Norms are those of the original with this adapter
            alone, whatever others did before (as in PEFT).

    Returns:
        `torch.Tensor`: Of the weight's shape, in float32 or wider.
    """
    original = original.to(torch.promote_types(original.dtype, torch.float32))
    before = original if before is None else before
    delta = scaling * (up.to(original.dtype) @ down.to(original.dtype))
    delta = delta.mT if transposed else delta
    if magnitude is None:
        return before + delta
    inputs = 0 if transposed else 1
    norm = torch.linalg.vector_norm(original + delta, dim=inputs)
    return (magnitude.to(original.dtype).flatten() / norm).unsqueeze(inputs) * (before + delta)
