"""
Eigenvalues and singular values of `W = left @ right.T` without `W`, and scores from them: the arithmetic behind the
spectral part of `bilinear.py`.

Shape legend: `B` matrices of a batch, `D` rows, `C` columns, `R` rank of the factors.

The non-zero eigenvalues of `left @ right.T` are those of `right.T @ left` (R × R). With `left = Q U`, `right = P V` (Q
and P orthonormal, U and V triangular) its non-zero singular values are those of `U @ V.T` (R × R); unlike Gram
matrices, which square them, decompositions keep the small ones. Where `R` is not below the width, the matrix itself is
the smaller one. Everything is in fp64: a small eigenvalue is no sum, in which rounding would average out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._sums import quotient


def eigenvalues(left: Tensor, right: Tensor) -> Tensor:
    """The `min(R, D)` eigenvalues `(B, min(R, D))` of square matrices, largest magnitude first; the others are 0."""
    left, right = _double(left), _double(right)
    small = left @ right.mT if left.shape[-1] >= left.shape[-2] else right.mT @ left
    values = _of_finite(small, torch.linalg.eigvals)
    return values.gather(-1, values.abs().argsort(dim=-1, descending=True))


def singular_values(left: Tensor, right: Tensor) -> Tensor:
    """The `min(R, D, C)` singular values `(B, min(R, D, C))`, largest first; the others are 0."""
    left, right = _double(left), _double(right)
    if left.shape[-1] >= min(left.shape[-2], right.shape[-2]):
        small = left @ right.mT
    else:
        small = _triangle(left) @ _triangle(right).mT
    return _of_finite(small, torch.linalg.svdvals)


def positivity(eigenvalues: Tensor, singular_values: Tensor) -> Tensor:
    total = eigenvalues.abs().sum(-1)
    # Where all eigenvalues are 0 (rows and columns of W are orthogonal), what is left of them is rounding.
    size = singular_values.square().sum(-1).sqrt()
    rounding = total <= 8 * torch.finfo(total.dtype).eps * eigenvalues.shape[-1] * size
    return torch.where(rounding, torch.zeros_like(total), quotient(eigenvalues.real.sum(-1), total))


def normalized_trace(eigenvalues: Tensor, singular_values: Tensor) -> Tensor:
    size = singular_values.square().sum(-1).sqrt()
    return quotient(eigenvalues.real.sum(-1), size * eigenvalues.shape[-1] ** 0.5)


def energies(eigenvalues: Tensor, singular_values: Tensor) -> tuple[Tensor, Tensor]:
    """‖S‖² and ‖N‖² of the symmetric and the skew-symmetric part."""
    squared_norm, trace_of_square = singular_values.square().sum(-1), eigenvalues.square().sum(-1).real
    # Rounding may leave what is 0 below it.
    symmetric, skew = ((squared_norm + sign * trace_of_square).clamp(min=0) / 2 for sign in (1, -1))
    return symmetric, skew


def stable_rank(singular_values: Tensor) -> Tensor:
    return _ratio(singular_values.square().sum(-1), singular_values[..., 0].square())


def effective_rank(singular_values: Tensor) -> Tensor:
    total = singular_values.sum(-1)
    shares = _ratio(singular_values, total.unsqueeze(-1))
    return torch.where(total == 0, total, torch.special.entr(shares).sum(-1).exp())


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where both are 0."""
    return numerator / torch.where(denominator == 0, torch.ones_like(denominator), denominator)


def _double(factor: Tensor) -> Tensor:
    # fp64 does not exist on every accelerator. What all matrices of a batch share is converted, and later decomposed,
    # once: products broadcast it.
    once = factor[:1] if factor.stride(0) == 0 else factor
    return once.to("cpu" if factor.device.type == "mps" else factor.device, torch.float64)


def _triangle(factor: Tensor) -> Tensor:
    return torch.linalg.qr(factor, mode="r").R


def _of_finite(matrices: Tensor, decompose: Callable[[Tensor], Tensor]) -> Tensor:
    """LAPACK refuses NaN and infinity; they come out as NaN."""
    broken = ~torch.isfinite(matrices).all(-1).all(-1)
    return decompose(matrices.masked_fill(broken[:, None, None], 0)).masked_fill(broken[:, None], torch.nan)
