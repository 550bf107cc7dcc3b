"""
A bilinear form `W = left @ right.T` in factored shape, and its scores. Pure torch: nothing here knows transformers.

Shape legend: `D` rows of `W` (query side), `C` columns of `W` (key side; equal to `D` in self-attention), `R` rank of
the factors, `...` any leading (batch) dimensions.

No `D × C` matrix is ever held. Two ways lead to the same sums, and the cheaper one is taken by shape:

- *Gram*: with `G = leftᵀ left`, `K = rightᵀ right` and `M = rightᵀ left` (all `R × R`), `tr(W W) = tr(M M)`,
  `‖W‖² = ⟨G, K⟩`, row norms² = `rowsum((left K) ∘ left)`, column norms² = `rowsum((right G) ∘ right)`:
  `10 D R²` operations.
- *Tiles*: each pair of mirrored tiles of `W` is multiplied out, summed and dropped: `2 D² R` operations.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


__all__ = ["BilinearForm", "BilinearScores", "directionality_score", "symmetry_score"]

# Scratch of one chunk in elements: on a CPU it should stay in the cache, on an accelerator it should fill the machine.
_SCRATCH_ELEMENTS = {"cpu": 2**19}
_SCRATCH_ELEMENTS_ACCELERATOR = 2**24
# As many matrices share a chunk as leave each this many rows of its factors at a time.
_MIN_BLOCK_ROWS = 2048
# Edge of a tile: large enough for the matrix product to run at full rate, small enough to be summed in the cache.
_TILE_EDGE = {"cpu": 512}
_TILE_EDGE_ACCELERATOR = 2048
# So do squares of a factor beyond this (or below its inverse): products of two of them must stay in the range of fp32.
_MAX_SIZE = 2.0**45


class BilinearScores(NamedTuple):
    """
    Scores of a bilinear form, one tensor of the form's batch shape each. See [`BilinearForm.scores`].
    """

    symmetry: Tensor
    directionality: Tensor
    frobenius_norm: Tensor
    relative_error: Tensor


@dataclass(frozen=True)
class _Sums:
    """Sums over the entries of one batch of matrices `W / scale`, and how far rounding may have moved them."""

    trace_of_square: Tensor  # (B,)   tr(W W); NaN where W is not square
    squared_norm: Tensor  # (B,)   ‖W‖²
    row_squares: Tensor  # (B, D) ‖row‖²
    column_squares: Tensor  # (B, C)
    scale: Tensor  # (B,)
    relative_error: Tensor  # (B,)   of squared_norm; NaN where an input is not finite

    @staticmethod
    def cat(parts: list["_Sums"]) -> "_Sums":
        return _Sums(*(torch.cat([getattr(part, name) for part in parts]) for name in _Sums.__dataclass_fields__))

    def replace(self, index: int, other: "_Sums") -> None:
        """Writes the single matrix of `other` over that at `index`."""
        for name in _Sums.__dataclass_fields__:
            mine = getattr(self, name)
            mine[index] = getattr(other, name)[0].to(mine)


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
        return self._to_batch(_symmetry(self._sums(with_rows=False)))

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
        return self._to_batch(_directionality(self._sums(), gamma))

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
        values = (_symmetry(sums), _directionality(sums, gamma), _norm(sums), sums.relative_error)
        return BilinearScores(*map(self._to_batch, values))

    def frobenius_norm(self) -> Tensor:
        """
        Frobenius norm `‖W‖` (`torch.Tensor` of the batch shape, ≥ 0; NaN where a factor holds NaN or infinity).
        """
        return self._to_batch(_norm(self._sums(with_rows=False)))

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
        with _exact_products(self.left.device):
            for left, right in self._chunks():
                total = left.new_zeros(left.shape[0], dtype=_accumulation_dtype(left, right))
                for rows in _row_blocks(left):
                    total += (left[:, rows].to(total.dtype) * right[:, rows].to(total.dtype)).sum((-2, -1))
                parts.append(total)
        return self._to_batch(torch.cat(parts))

    def to_dense(self) -> Tensor:
        """
        The matrix itself, `torch.Tensor` of shape `(..., D, C)` in the accumulation dtype, for small matrices.
        """
        with _exact_products(self.left.device):
            dtype = _accumulation_dtype(self.left, self.right)
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
        limit = limit or max(1, _scratch(left) // (_MIN_BLOCK_ROWS * self.rank or 1))
        yield from _flat_chunks(left, right, limit)

    def _sums(self, with_rows: bool = True, careful: bool = True) -> _Sums:
        with _exact_products(self.left.device):
            sums = _Sums.cat([_chunk_sums(*chunk, _accumulation_dtype(*chunk), with_rows) for chunk in self._chunks()])
            doubtful = torch.nonzero(~(sums.relative_error <= self.max_relative_error)).flatten() if careful else ()
            if len(doubtful):
                items = list(self._chunks(limit=1))
                for index in doubtful:
                    left, right = items[index]
                    sums.replace(index, _careful_sums(left, right, with_rows))
        return sums


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
        w = w.to(_accumulation_dtype(w))
        w = w / _range(w)[..., None, None]
        trace_of_square, squared_norm = w.new_zeros(2, *w.shape[:-2])
        for rows in _row_blocks(w):  # a block at a time: w * w.mT would be a second matrix
            trace_of_square += (w[..., rows, :] * w[..., rows].mT).sum((-2, -1))
            squared_norm += w[..., rows, :].square().sum((-2, -1))
        return _ratio(trace_of_square, squared_norm)


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
        w = w.to(_accumulation_dtype(w))
        w = w / _range(w)[..., None, None]
        return _excess_ratio(torch.linalg.vector_norm(w, dim=-1), torch.linalg.vector_norm(w, dim=-2), gamma)


def _require_matrix(w: Tensor) -> Tensor:
    if not isinstance(w, Tensor) or not w.is_floating_point():
        found = f"dtype {w.dtype}" if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"Expected a floating point tensor or a BilinearForm, got {found}.")
    if w.ndim < 2:
        raise ValueError(f"Expected a matrix of shape (..., D, C), got {tuple(w.shape)}.")
    return w


# --- scores from sums ---------------------------------------------------------------------------------------------


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where both are 0, NaN where either is not finite; rounding may not leave [−1, 1]."""
    ratio = torch.where(denominator == 0, torch.zeros_like(denominator), numerator / denominator)
    finite = torch.isfinite(numerator) & torch.isfinite(denominator)
    return torch.where(finite, ratio.clamp(-1, 1), torch.nan)


def _symmetry(sums: _Sums) -> Tensor:
    return _ratio(sums.trace_of_square, sums.squared_norm)


def _directionality(sums: _Sums, gamma: float) -> Tensor:
    return _excess_ratio(sums.row_squares.sqrt(), sums.column_squares.sqrt(), gamma)


def _norm(sums: _Sums) -> Tensor:
    return sums.squared_norm.sqrt() * sums.scale


def _excess_ratio(row_norms: Tensor, column_norms: Tensor, gamma: float) -> Tensor:
    rows, columns = _excess(row_norms, gamma), _excess(column_norms, gamma)
    return _ratio(rows - columns, rows + columns)


def _excess(norms: Tensor, gamma: float) -> Tensor:
    # A single norm has no spread (its std with N − 1 is 0/0), hence nothing above it.
    std = norms.std(-1) if norms.shape[-1] > 1 else torch.zeros_like(norms[..., 0])
    threshold = (norms.mean(-1) + gamma * std).unsqueeze(-1)
    return torch.where(norms > threshold, norms - threshold, norms * 0).sum(-1)  # norms * 0 keeps NaN


# --- sums from factors --------------------------------------------------------------------------------------------


def _chunk_sums(left: Tensor, right: Tensor, dtype: torch.dtype, with_rows: bool) -> _Sums:
    dims, columns, rank = left.shape[-2], right.shape[-2], left.shape[-1]
    # 10·D·R² operations against 2·D²·R and the passes over the tiles, which cost about as much as 100 more channels of
    # R. Tiles come in mirrored pairs, so they serve square matrices only.
    if dims == columns and 10 * dims * rank**2 > 2 * dims**2 * (rank + 100):
        return _Sums.cat([_tile_sums(a, b, dtype) for a, b in zip(left, right, strict=True)])
    return _gram_sums(left, right, dtype, with_rows)


def _careful_sums(left: Tensor, right: Tensor, with_rows: bool) -> _Sums:
    """Sums of a single matrix in fp64, whatever the range of its numbers; `scale` makes `squared_norm` 1."""
    # fp64 does not exist on every accelerator; this path is rare enough to be walked on the host.
    left, right = (
        factor.to("cpu" if factor.device.type == "mps" else factor.device).double() for factor in (left, right)
    )
    left_range, right_range = _range(left), _range(right)
    sums = _chunk_sums(left / left_range[:, None, None], right / right_range[:, None, None], torch.float64, with_rows)
    square = torch.where(sums.squared_norm == 0, torch.ones_like(sums.squared_norm), sums.squared_norm)
    return _Sums(
        sums.trace_of_square / square,
        sums.squared_norm / square,
        sums.row_squares / square[:, None],
        sums.column_squares / square[:, None],
        square.sqrt() * left_range * right_range,
        torch.where(sums.squared_norm > 0, sums.relative_error, sums.squared_norm),  # 0 is exact, NaN stays NaN
    )


def _gram_sums(left: Tensor, right: Tensor, dtype: torch.dtype, with_rows: bool) -> _Sums:
    left_gram, right_gram, cross = _grams(left, right, dtype)
    trace_of_square = (cross * cross.mT).sum((-2, -1))
    squared_norm = (left_gram * right_gram).sum((-2, -1))
    empty = cross.new_empty(left.shape[0], 0)
    # Terms of ⟨G, K⟩ can cancel down to ‖W‖² from sizes of up to ‖G‖‖K‖, each rounded to eps.
    sizes = [torch.linalg.vector_norm(gram, dim=(-2, -1)).expand(left.shape[0]) for gram in (left_gram, right_gram)]
    error = 2 * torch.finfo(dtype).eps * sizes[0] * sizes[1]
    return _checked(
        trace_of_square,
        squared_norm,
        _row_squares(left, right_gram) if with_rows else empty,
        _row_squares(right, left_gram) if with_rows else empty,
        sizes=sizes,
        error=error,
        noise=8 * error,
    )


def _grams(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """
    leftᵀ left, rightᵀ right and rightᵀ left (NaN if their rows differ in number). The first two have one entry only
    where all matrices share the factor, as the query heads of a group share their keys.
    """
    size, square = left.shape[0], left.shape[-2] == right.shape[-2]
    once_left, once_right = (factor[:1] if factor.stride(0) == 0 else factor for factor in (left, right))
    # Blocks bound the size of converted copies; without any, one long product each is faster.
    blocks: Iterable[slice] = [slice(None)]
    if not left.dtype is right.dtype is dtype:
        blocks = _row_blocks(left if left.shape[-2] > right.shape[-2] else right)
    totals: list[Tensor] = []
    for rows in blocks:
        # Past its end a shorter factor adds nothing.
        a, b = once_left[:, rows].to(dtype), once_right[:, rows].to(dtype)
        products = [a.mT @ a, b.mT @ b]
        if square:
            products.append(b.mT.expand(size, -1, -1) @ a.expand(size, -1, -1))
        totals = [total.add_(product) for total, product in zip(totals, products, strict=True)] if totals else products
    left_gram, right_gram = totals[:2]
    return left_gram, right_gram, totals[2] if square else left_gram.new_full((size, 1, 1), torch.nan)


def _row_squares(factor: Tensor, gram: Tensor) -> Tensor:
    """Row norms² of `factor @ other.mT`, where `gram = otherᵀ other`."""
    squares = gram.new_empty(factor.shape[:-1])
    for rows in _row_blocks(factor):
        block = factor[:, rows].to(gram.dtype)
        # Along the memory of the factor (weights of linear layers lie the second way): elementwise steps then stream.
        if block.stride(-1) == 1:
            squares[:, rows] = (block @ gram).mul_(block).sum(-1)
        else:
            squares[:, rows] = (gram @ block.mT).mul_(block.mT).sum(-2)
    return squares.clamp_(min=0)  # rounding may leave a zero row below zero


def _tile_sums(left: Tensor, right: Tensor, dtype: torch.dtype) -> _Sums:
    size = left.shape[0]
    row_squares, column_squares = left.new_zeros(2, size, dtype=dtype)
    trace_of_square = left.new_zeros((), dtype=dtype)
    left_squares, right_squares = left.new_zeros(2, dtype=dtype)
    edge = _TILE_EDGE.get(left.device.type, _TILE_EDGE_ACCELERATOR)
    blocks = [slice(start, min(start + edge, size)) for start in range(0, size, edge)]
    for i, rows in enumerate(blocks):
        left_rows, right_rows = left[rows].to(dtype), right[rows].to(dtype)
        left_squares += torch.linalg.vector_norm(left_rows).square()
        right_squares += torch.linalg.vector_norm(right_rows).square()
        for columns in blocks[i:]:
            tile = left_rows @ right[columns].to(dtype).mT  # W[rows, columns]
            if columns == rows:
                trace_of_square += (tile * tile.mT).sum()
            else:
                mirror = right_rows @ left[columns].to(dtype).mT  # W[columns, rows] transposed
                trace_of_square += 2 * (tile * mirror).sum()
                mirror.square_()
                column_squares[rows] += mirror.sum(1)
                row_squares[columns] += mirror.sum(0)
            tile.square_()
            row_squares[rows] += tile.sum(1)
            column_squares[columns] += tile.sum(0)
    squared_norm = row_squares.sum()
    # Each entry of W is rounded to eps · ‖row of left‖‖row of right‖; in ‖W‖² these errors are independent.
    noise = torch.finfo(dtype).eps ** 2 * left_squares * right_squares
    return _checked(
        trace_of_square[None],
        squared_norm[None],
        row_squares[None],
        column_squares[None],
        sizes=(left_squares[None], right_squares[None]),
        error=(squared_norm * noise / size).sqrt()[None],
        noise=64 * noise[None],
    )


def _checked(
    trace_of_square: Tensor,
    squared_norm: Tensor,
    rows: Tensor,
    columns: Tensor,
    sizes: Iterable[Tensor],
    error: Tensor,
    noise: Tensor,
) -> _Sums:
    """
    The sums with their relative error, from the expected absolute `error` of ‖W‖², the ‖W‖² that rounding alone could
    leave (`noise`), and the `sizes` of the factors' squares.
    """
    if squared_norm.dtype is torch.float64:
        # What is left in fp64 after cancelling to its last digits is rounding, not a matrix.
        vanishes = squared_norm <= noise
        trace_of_square, squared_norm = (sum_.masked_fill(vanishes, 0) for sum_ in (trace_of_square, squared_norm))
        rows, columns = (side.masked_fill(vanishes[:, None], 0) for side in (rows, columns))
    in_range = torch.ones_like(error, dtype=torch.bool)
    for size in sizes:
        in_range &= (size > 1 / _MAX_SIZE) & (size < _MAX_SIZE)
    relative_error = torch.where(in_range & (squared_norm > 0), error / squared_norm, torch.inf)
    return _Sums(trace_of_square, squared_norm, rows, columns, torch.ones_like(error), relative_error)


# --- precision and memory -----------------------------------------------------------------------------------------


def _accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32


def _range(matrix: Tensor) -> Tensor:
    """Largest magnitude of each matrix (1 for a zero one): dividing by it keeps squares within the dtype's range."""
    largest = torch.linalg.vector_norm(matrix, ord=torch.inf, dim=(-2, -1))
    return torch.where(largest == 0, torch.ones_like(largest), largest)


def _scratch(tensor: Tensor) -> int:
    return _SCRATCH_ELEMENTS.get(tensor.device.type, _SCRATCH_ELEMENTS_ACCELERATOR)


def _row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices over the rows of `(..., D, R)` whose temporaries fit the scratch."""
    rows = matrix.shape[-2]
    step = max(1, _scratch(matrix) // max(1, matrix.numel() // max(1, rows)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _flat_chunks(left: Tensor, right: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Dimension by dimension: flattening an expanded (stride 0) batch would copy the keys of each group.
    if left.ndim == 3:
        yield from zip(left.split(limit), right.split(limit), strict=True)
    else:
        for a, b in zip(left, right, strict=True):
            yield from _flat_chunks(a, b, limit)


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32: without autocast, TF32 or bf16 passes, and without gradients; all restored on leaving."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        backends = (torch.backends.cuda, torch.backends.mkldnn)
        matmuls = [
            backend.matmul for backend in backends if hasattr(getattr(backend, "matmul", None), "fp32_precision")
        ]
        if matmuls:
            for matmul in matmuls:
                stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
                matmul.fp32_precision = "ieee"
        else:  # torch before 2.9
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield
