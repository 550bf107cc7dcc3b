"""
A bilinear form `W = left @ right.T` in factored shape, and its scores. Pure torch: nothing here knows transformers.

Shape legend: `D` rows of `W` (query side), `C` columns of `W` (key side; equal to `D` in self-attention), `R` rank of
the factors, `...` any leading (batch) dimensions.

For these scores no `D × C` matrix is ever held. Two ways lead to the same sums, and the cheaper one is taken by shape:

- *Gram*: with `G = leftᵀ left`, `K = rightᵀ right` and `M = rightᵀ left` (all `R × R`), `tr(W W) = tr(M M)`,
  `‖W‖² = ⟨G, K⟩`, row norms² = `rowsum((left K) ∘ left)`, column norms² = `rowsum((right G) ∘ right)`:
  `10 D R²` operations.
- *Tiles*: each pair of mirrored tiles of `W` is multiplied out, summed and dropped: `2 D² R` operations.

Spectra come from `R × R` matrices too, or from W itself where that is smaller (`_spectra.py`).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import _spectra
from ._sums import (
    Sums,
    accumulation_dtype,
    careful_sums,
    chunk_limit,
    chunk_sums,
    directionality,
    exact_products,
    flat_chunks,
    norm,
    row_blocks,
    symmetry,
)


__all__ = ["BilinearForm", "BilinearScores", "SpectralScores"]


class BilinearScores(NamedTuple):
    """
    Scores of a bilinear form, one tensor of the form's batch shape each. See [`BilinearForm.scores`].
    """

    symmetry: Tensor
    directionality: Tensor
    frobenius_norm: Tensor
    relative_error: Tensor


class SpectralScores(NamedTuple):
    """
    Scores of a bilinear form's spectrum, one tensor of the form's batch shape each. See
    [`BilinearForm.spectral_scores`].
    """

    positivity: Tensor
    normalized_trace: Tensor
    stable_rank: Tensor
    effective_rank: Tensor
    symmetric_energy: Tensor
    skew_energy: Tensor


class BilinearForm:
    """
    The matrix `W = left @ right.mT`, kept as its two factors.

    Query-key forms of attention are of this kind: for one head `left = W_q` and `right = W_k`, both `(D, E)`; for a
    layer the heads' factors stand side by side, `(D, H·E)`. Rows of `W` belong to the query token, columns to the
    key token.

    Sums are accumulated in fp32 (bf16 and fp16 factors are converted piece by piece, fp64 factors stay fp64) whatever
    autocast or TF32 setting is in force, and repeated in fp64 where cancellation between the factors, or numbers
    beyond the range of fp32, would spoil the result. Nothing is tracked by autograd.

    Args:
        left (`torch.Tensor` of shape `(..., D, R)`):
            Query-side factor, floating point.
        right (`torch.Tensor` of shape `(..., C, R)`):
            Key-side factor. Its leading dimensions must broadcast with those of `left`: grouped keys are
            `left` `(G, r, D, E)` against `right` `(G, 1, D, E)`, which costs no copy.

    Raises:
        TypeError: if a factor is not a floating point tensor.
        ValueError: if ranks differ, leading dimensions do not broadcast, or the factors are on different devices.

    Examples:

    ```python
    >>> import torch
    >>> from hf_symqk import BilinearForm

    >>> w_q = torch.randn(12, 768, 64, generator=torch.Generator().manual_seed(0))  # 12 heads
    >>> form = BilinearForm(w_q, w_q)  # W_k = W_q: each head's form is symmetric
    >>> form.shape
    torch.Size([12, 768, 768])
    >>> bool((form.symmetry_score() - 1).abs().max() < 1e-5)
    True

    ```
    """

    # A relative error of ‖W‖² above this asks for a second pass in fp64: scores are meant to be right to 1e-4.
    max_relative_error = 2e-5

    def __init__(self, left: Tensor, right: Tensor):
        for side, factor in (("left", left), ("right", right)):
            if not isinstance(factor, Tensor) or not factor.is_floating_point():
                found = f"dtype {factor.dtype}" if isinstance(factor, Tensor) else type(factor).__name__
                raise TypeError(f"`{side}` must be a floating point tensor, got {found}.")
            if factor.ndim < 2:
                raise ValueError(f"`{side}` must have shape (..., D, R), got {tuple(factor.shape)}.")
        if left.shape[-1] != right.shape[-1]:
            raise ValueError(
                f"`left` and `right` must share their last dimension (the rank R), got {tuple(left.shape)} and "
                f"{tuple(right.shape)}."
            )
        if left.device != right.device:
            raise ValueError(f"`left` is on {left.device} and `right` on {right.device}; move one of them.")
        try:
            self.batch_shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        except RuntimeError as error:
            raise ValueError(
                f"Leading dimensions of `left` {tuple(left.shape)} and `right` {tuple(right.shape)} do not broadcast."
            ) from error
        self.left = left
        self.right = right

    @property
    def shape(self) -> torch.Size:
        """Shape `(..., D, C)` of the matrix that the factors stand for."""
        return torch.Size((*self.batch_shape, self.left.shape[-2], self.right.shape[-2]))

    @property
    def rank(self) -> int:
        """Number of columns `R` of the factors, an upper bound of the matrix's rank."""
        return self.left.shape[-1]

    @property
    def is_square(self) -> bool:
        """Whether rows and columns live in spaces of one width; symmetry and trace exist only then."""
        return self.left.shape[-2] == self.right.shape[-2]

    def __repr__(self) -> str:
        return f"BilinearForm(shape={tuple(self.shape)}, rank={self.rank}, dtype={self.left.dtype})"

    def symmetry_score(self) -> Tensor:
        """
        Symmetry score `(‖S‖² − ‖N‖²) / ‖W‖² = tr(W W) / ‖W‖²`, S and N the symmetric and skew-symmetric parts of W
        (arXiv:2502.10927, section 3, definition of the symmetry score).

        Returns:
            `torch.Tensor` of the batch shape, in [−1, 1]: 1 for symmetric, −1 for skew-symmetric matrices, about 0 for
            a product of independent random factors. 0 where W is zero (within rounding), NaN where a factor holds NaN
            or infinity.

        Raises:
            ValueError: if W is not square.
        """
        self._require_square("symmetry score")
        return self._to_batch(symmetry(self._sums(with_rows=False)))

    def directionality_score(self, gamma: float = 2.0) -> Tensor:
        """
        Directionality score `(R − C) / (R + C)`: R sums, over the rows whose norm exceeds `t = mean + gamma · std` of
        all row norms (std with N − 1), the excess `norm − t`; C does the same over columns (arXiv:2502.10927, section
        3, definition of the directionality score, with the sign of its figures: columns are negative).

        Args:
            gamma (`float`, *optional*, defaults to 2.0):
                How many standard deviations above the mean a norm must lie to count.

        Returns:
            `torch.Tensor` of the batch shape, in [−1, 1]: negative where columns dominate. 0 where no norm exceeds its
            threshold (so for the zero matrix), NaN where a factor holds NaN or infinity.
        """
        return self._to_batch(directionality(self._sums(), gamma))

    def scores(self, gamma: float = 2.0, careful: bool = True) -> BilinearScores:
        """
        Symmetry, directionality and Frobenius norm from one pass over the factors.

        Args:
            gamma (`float`, *optional*, defaults to 2.0): As in [`~BilinearForm.directionality_score`].
            careful (`bool`, *optional*, defaults to `True`): Repeats in fp64 what fp32 cannot give. To know that, the
                host waits for the device; with `False` it does not, and the caller looks at `relative_error`, an
                estimate for ‖W‖²: above `BilinearForm.max_relative_error`, or NaN, the scores are not to be trusted.

        Returns:
            [`BilinearScores`]: Symmetry is NaN where W is not square; for the rest see the single scores.
        """
        sums = self._sums(careful=careful)
        values = (symmetry(sums), directionality(sums, gamma), norm(sums), sums.relative_error)
        return BilinearScores(*map(self._to_batch, values))

    def frobenius_norm(self) -> Tensor:
        """
        Frobenius norm `‖W‖` (`torch.Tensor` of the batch shape, ≥ 0; NaN where a factor holds NaN or infinity).
        """
        return self._to_batch(norm(self._sums(with_rows=False)))

    def row_norms(self) -> Tensor:
        """
        Euclidean norms of the rows of W (`torch.Tensor` of shape `(..., D)`): one per channel of the query token.
        """
        sums = self._sums()
        return self._to_batch(sums.row_squares.sqrt() * sums.scale[:, None])

    def column_norms(self) -> Tensor:
        """
        Euclidean norms of the columns of W (`torch.Tensor` of shape `(..., C)`): one per channel of the key token.
        """
        sums = self._sums()
        return self._to_batch(sums.column_squares.sqrt() * sums.scale[:, None])

    def trace(self) -> Tensor:
        """
        Trace `tr(W) = Σ left ∘ right` (`torch.Tensor` of the batch shape).

        Raises:
            ValueError: if W is not square.
        """
        self._require_square("trace")
        parts = []
        with exact_products(self.left.device):
            for left, right in self._chunks():
                total = left.new_zeros(left.shape[0], dtype=accumulation_dtype(left, right))
                for rows in row_blocks(left):
                    total += (left[:, rows].to(total.dtype) * right[:, rows].to(total.dtype)).sum((-2, -1))
                parts.append(total)
        return self._to_batch(torch.cat(parts))

    def eigenvalues(self) -> Tensor:
        """
        Eigenvalues of W that need not be 0, from the `R × R` product of the factors, in fp64.

        Returns:
            `torch.Tensor` of shape `(..., min(R, D))`, complex, largest magnitude first; the `D − R` others are 0. NaN
            where a factor holds NaN or infinity.

        Raises:
            ValueError: if W is not square.
        """
        self._require_square("spectrum")
        return self._spectrum(_spectra.eigenvalues)

    def singular_values(self) -> Tensor:
        """
        Singular values of W that need not be 0, from triangular factors (`R × R`), in fp64 (`torch.Tensor` of shape
        `(..., min(R, D, C))`, largest first; NaN where a factor holds NaN or infinity).
        """
        return self._spectrum(_spectra.singular_values)

    def spectral_scores(self) -> SpectralScores:
        """
        Scores of the spectrum, in fp64. Eigenvalues λ, singular values σ, rank R of the factors (D, where that is
        smaller). The cost is `O(D R² + R³)` a matrix; a layer form of multi-head attention, whose R is about D, costs
        two dense decompositions.

        Returns:
            [`SpectralScores`]: `positivity`, `Σ Re λ / Σ |λ|` in [−1, 1]: 1 where W is positive semi-definite, −1
            where it is negative; a token then attends to (or away from) its like. `normalized_trace`,
            `tr W / (√R ‖W‖)` in [−1, 1]: 1 for multiples of the identity (or, of lower rank, of an orthogonal
            projection). `stable_rank`, `‖W‖² / σ₁²`, and `effective_rank`, `exp(−Σ p log p)` with `p = σ / Σ σ` (Roy &
            Vetterli, 2007), both in [1, R]. `symmetric_energy` and `skew_energy`, ‖S‖² and ‖N‖² of the symmetric and
            the skew-symmetric part, whose sum is ‖W‖². All are 0 where W is zero and NaN where a factor holds NaN or
            infinity; where W is not square, all but the two ranks are NaN.

        Examples:

        ```python
        >>> import torch
        >>> from hf_symqk import BilinearForm

        >>> w_q = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        >>> scores = BilinearForm(w_q, w_q).spectral_scores()  # W = W_q W_qᵀ is positive semi-definite
        >>> round(float(scores.positivity), 6), round(float(scores.skew_energy), 6)
        (1.0, 0.0)

        ```
        """
        singular = self.singular_values()
        if self.is_square:
            eigen = self.eigenvalues().to(singular.device)
        else:
            eigen = torch.full_like(singular, torch.nan, dtype=torch.complex128)
        return SpectralScores(
            _spectra.positivity(eigen, singular),
            _spectra.normalized_trace(eigen, singular),
            _spectra.stable_rank(singular),
            _spectra.effective_rank(singular),
            *_spectra.energies(eigen, singular),
        )

    def to_dense(self) -> Tensor:
        """
        The matrix itself, `torch.Tensor` of shape `(..., D, C)` in the accumulation dtype, for small matrices.
        """
        with exact_products(self.left.device):
            dtype = accumulation_dtype(self.left, self.right)
            return self.left.to(dtype) @ self.right.to(dtype).mT

    def _require_square(self, what: str) -> None:
        if not self.is_square:
            raise ValueError(
                f"The {what} needs a square matrix; this form has shape {tuple(self.shape)}: its rows and columns "
                "belong to streams of different width."
            )

    def _to_batch(self, value: Tensor) -> Tensor:
        return value.reshape((*self.batch_shape, *value.shape[1:]))

    def _chunks(self, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Views `(B, D, R)`, `(B, C, R)` of the factors, in batch order, `limit` or what the scratch allows."""
        batch = [size for size in self.batch_shape if size != 1] or [1]
        left, right = (
            factor.expand(*self.batch_shape, *factor.shape[-2:]).view(*batch, *factor.shape[-2:])
            for factor in (self.left, self.right)
        )
        yield from flat_chunks(left, right, limit or chunk_limit(left))

    def _spectrum(self, values: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with exact_products(self.left.device):
            # Where both factors are shared by a chunk, one matrix stands for all of it.
            parts = [values(*chunk).expand(chunk[0].shape[0], -1) for chunk in self._chunks()]
            return self._to_batch(torch.cat(parts))

    def _sums(self, with_rows: bool = True, careful: bool = True) -> Sums:
        with exact_products(self.left.device):
            sums = Sums.cat([chunk_sums(*chunk, accumulation_dtype(*chunk), with_rows) for chunk in self._chunks()])
            doubtful = torch.nonzero(~(sums.relative_error <= self.max_relative_error)).flatten() if careful else ()
            if len(doubtful):
                items = list(self._chunks(limit=1))
                for index in doubtful:
                    left, right = items[index]
                    sums.replace(index, careful_sums(left, right, with_rows))
        return sums
