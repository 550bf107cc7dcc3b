"""Scores of a matrix, dense or factored."""

import torch
from torch import Tensor

from ._sums import accumulation_dtype, excess_ratio, largest_magnitude, quotient, row_blocks
from .bilinear import BilinearForm


__all__ = ["directionality_score", "symmetry_score"]


def symmetry_score(w: Tensor | BilinearForm) -> Tensor:
    """
    Symmetry score `tr(W W) / ‖W‖²` of a matrix, dense or factored; see [`BilinearForm.symmetry_score`].

    Args:
        w (`torch.Tensor` of shape `(..., D, D)` or [`BilinearForm`]):
            The matrix (or matrices).

    Returns:
        `torch.Tensor` of the batch shape, in [−1, 1]; 0 for a zero matrix, NaN where an entry is NaN or infinite.

    Raises:
        TypeError: if `w` is neither a floating point tensor nor a [`BilinearForm`].
        ValueError: if the matrix is not square.

    Examples:

    ```python
    >>> import torch, hf_symqk
    >>> hf_symqk.symmetry_score(torch.tensor([[2.0, 1.0], [1.0, 0.0]]))
    tensor(1.)
    >>> hf_symqk.symmetry_score(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
    tensor(-1.)

    ```
    """
    if isinstance(w, BilinearForm):
        return w.symmetry_score()
    if _require_matrix(w).shape[-1] != w.shape[-2]:
        raise ValueError(f"The symmetry score needs a square matrix, got shape {tuple(w.shape)}.")
    with torch.no_grad():
        w = w.to(accumulation_dtype(w))
        w = w / largest_magnitude(w)[..., None, None]
        trace_of_square, squared_norm = w.new_zeros(2, *w.shape[:-2])
        for rows in row_blocks(w):  # a block at a time: w * w.mT would be a second matrix
            trace_of_square += (w[..., rows, :] * w[..., rows].mT).sum((-2, -1))
            squared_norm += w[..., rows, :].square().sum((-2, -1))
        return quotient(trace_of_square, squared_norm)


def directionality_score(w: Tensor | BilinearForm, gamma: float = 2.0) -> Tensor:
    """
    Directionality score `(R − C) / (R + C)` of a matrix, dense or factored; see [`BilinearForm.directionality_score`].

    Args:
        w (`torch.Tensor` of shape `(..., D, C)` or [`BilinearForm`]):
            The matrix (or matrices).
        gamma (`float`, *optional*, defaults to 2.0):
            How many standard deviations above the mean a norm must lie to count.

    Returns:
        `torch.Tensor` of the batch shape, in [−1, 1]; negative where columns dominate, 0 where no norm exceeds its
        threshold, NaN where an entry is NaN or infinite.

    Raises:
        TypeError: if `w` is neither a floating point tensor nor a [`BilinearForm`].

    Examples:

    ```python
    >>> import torch, hf_symqk
    >>> w = torch.ones(64, 64)
    >>> w[:, 3] = 10.0  # one column dominates
    >>> hf_symqk.directionality_score(w)
    tensor(-1.)

    ```
    """
    if isinstance(w, BilinearForm):
        return w.directionality_score(gamma)
    _require_matrix(w)
    with torch.no_grad():
        w = w.to(accumulation_dtype(w))
        w = w / largest_magnitude(w)[..., None, None]
        return excess_ratio(torch.linalg.vector_norm(w, dim=-1), torch.linalg.vector_norm(w, dim=-2), gamma)


def _require_matrix(w: Tensor) -> Tensor:
    if not isinstance(w, Tensor) or not w.is_floating_point():
        found = f"dtype {w.dtype}" if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"Expected a floating point tensor or a BilinearForm, got {found}.")
    if w.ndim < 2:
        raise ValueError(f"Expected a matrix of shape (..., D, C), got {tuple(w.shape)}.")
    return w
