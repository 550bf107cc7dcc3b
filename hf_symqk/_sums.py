"""
Sums over the entries of `W = left @ right.T` without `W`, and scores from them: the arithmetic behind `bilinear.py`.

Shape legend: `B` matrices of a batch, `D` rows, `C` columns, `R` rank of the factors.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


# Scratch of one chunk in elements: on a CPU it should stay near the cache, on an accelerator fill the machine.
_SCRATCH_ELEMENTS = {"cpu": 2**20}
_SCRATCH_ELEMENTS_ACCELERATOR = 2**24
# Edge of a tile: large enough for the matrix product to run at full rate, small enough to be summed in the cache.
_TILE_EDGE = {"cpu": 512}
_TILE_EDGE_ACCELERATOR = 2048
# Squares of a factor beyond this (or below its inverse) ask for fp64: products of two must stay in the range of fp32.
_MAX_SIZE = 2.0**45


@dataclass(frozen=True)
class Sums:
    """Sums over the entries of one batch of matrices `W / scale`, and how far rounding may have moved them."""

    trace_of_square: Tensor  # (B,)   tr(W W); NaN where W is not square
    squared_norm: Tensor  # (B,)   ‖W‖²
    row_squares: Tensor  # (B, D) ‖row‖²
    column_squares: Tensor  # (B, C)
    scale: Tensor  # (B,)
    relative_error: Tensor  # (B,)   of squared_norm; NaN where an input is not finite

    @staticmethod
    def cat(parts: list["Sums"]) -> "Sums":
        return Sums(*(torch.cat([getattr(part, name) for part in parts]) for name in Sums.__dataclass_fields__))

    def replace(self, index: int, other: "Sums") -> None:
        """Writes the single matrix of `other` over that at `index`."""
        for name in Sums.__dataclass_fields__:
            mine = getattr(self, name)
            mine[index] = getattr(other, name)[0].to(mine)


# --- scores from sums ---------------------------------------------------------------------------------------------


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where both are 0, NaN where either is not finite; rounding may not leave [−1, 1]."""
    ratio = torch.where(denominator == 0, torch.zeros_like(denominator), numerator / denominator)
    finite = torch.isfinite(numerator) & torch.isfinite(denominator)
    return torch.where(finite, ratio.clamp(-1, 1), torch.nan)


def symmetry(sums: Sums) -> Tensor:
    return quotient(sums.trace_of_square, sums.squared_norm)


def directionality(sums: Sums, gamma: float) -> Tensor:
    return excess_ratio(sums.row_squares.sqrt(), sums.column_squares.sqrt(), gamma)


def norm(sums: Sums) -> Tensor:
    return sums.squared_norm.sqrt() * sums.scale


def excess_ratio(row_norms: Tensor, column_norms: Tensor, gamma: float) -> Tensor:
    rows, columns = _excess(row_norms, gamma), _excess(column_norms, gamma)
    return quotient(rows - columns, rows + columns)


def _excess(norms: Tensor, gamma: float) -> Tensor:
    # A single norm has no spread (its std with N − 1 is 0/0), hence nothing above it.
    std = norms.std(-1) if norms.shape[-1] > 1 else torch.zeros_like(norms[..., 0])
    threshold = (norms.mean(-1) + gamma * std).unsqueeze(-1)
    return torch.where(norms > threshold, norms - threshold, norms * 0).sum(-1)  # norms * 0 keeps NaN


# --- sums from factors --------------------------------------------------------------------------------------------


def chunk_sums(left: Tensor, right: Tensor, dtype: torch.dtype, with_rows: bool) -> Sums:
    dims, columns, rank = left.shape[-2], right.shape[-2], left.shape[-1]
    left, right = (_converted(factor, dtype) for factor in (left, right))
    # 10·D·R² operations against 2·D²·R and the passes over the tiles, which cost about as much as 100 more channels of
    # R. Tiles come in mirrored pairs, so they serve square matrices only.
    if dims == columns and 10 * dims * rank**2 > 2 * dims**2 * (rank + 100):
        return Sums.cat([_tile_sums(a, b, dtype) for a, b in zip(left, right, strict=True)])
    return _gram_sums(left, right, dtype, with_rows)


def _converted(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor in another dtype if that copy fits the scratch; else it is converted in pieces where it is used."""
    once = factor[:1] if factor.stride(0) == 0 else factor
    return once.to(dtype).expand_as(factor) if once.numel() <= scratch(factor) else factor


def careful_sums(left: Tensor, right: Tensor, with_rows: bool) -> Sums:
    """Sums of a single matrix in fp64, whatever the range of its numbers; `scale` makes `squared_norm` 1."""
    # fp64 does not exist on every accelerator; this path is rare enough to be walked on the host.
    left, right = (
        factor.to("cpu" if factor.device.type == "mps" else factor.device).double() for factor in (left, right)
    )
    # W does not change if a channel is scaled up on one side and down on the other, but sums over channels of very
    # unequal size would cancel.
    sizes = [torch.linalg.vector_norm(factor, dim=-2, keepdim=True) for factor in (left, right)]
    balance = (sizes[1] / sizes[0]).sqrt()
    balance = torch.where(torch.isfinite(balance) & (balance > 0), balance, torch.ones_like(balance))
    left, right = left * balance, right / balance
    left_range, right_range = largest_magnitude(left), largest_magnitude(right)
    sums = chunk_sums(left / left_range[:, None, None], right / right_range[:, None, None], torch.float64, with_rows)
    square = torch.where(sums.squared_norm == 0, torch.ones_like(sums.squared_norm), sums.squared_norm)
    return Sums(
        sums.trace_of_square / square,
        sums.squared_norm / square,
        sums.row_squares / square[:, None],
        sums.column_squares / square[:, None],
        square.sqrt() * left_range * right_range,
        torch.where(sums.squared_norm > 0, sums.relative_error, sums.squared_norm),  # 0 is exact, NaN stays NaN
    )


def _gram_sums(left: Tensor, right: Tensor, dtype: torch.dtype, with_rows: bool) -> Sums:
    left_gram, right_gram, cross = _grams(left, right, dtype)
    trace_of_square = (cross * cross.mT).flatten(1).sum(1)
    squared_norm = (left_gram * right_gram).flatten(1).sum(1)
    empty = cross.new_empty(left.shape[0], 0)
    # Terms of ⟨G, K⟩ can cancel down to ‖W‖² from sizes of up to ‖G‖‖K‖, each rounded to eps.
    sizes = [
        torch.linalg.vector_norm(gram.flatten(1), dim=1).expand(left.shape[0]) for gram in (left_gram, right_gram)
    ]
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
        blocks = row_blocks(left if left.shape[-2] > right.shape[-2] else right)
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
    for rows in row_blocks(factor):
        block = factor[:, rows].to(gram.dtype)
        # Along the memory of the factor (weights of linear layers lie the second way): elementwise steps then stream.
        if block.stride(-1) == 1:
            squares[:, rows] = (block @ gram).mul_(block).sum(-1)
        else:
            squares[:, rows] = (gram @ block.mT).mul_(block.mT).sum(-2)
    return squares.clamp_(min=0)  # rounding may leave a zero row below zero


def _tile_sums(left: Tensor, right: Tensor, dtype: torch.dtype) -> Sums:
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
) -> Sums:
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
    return Sums(trace_of_square, squared_norm, rows, columns, torch.ones_like(error), relative_error)


# --- precision and memory -----------------------------------------------------------------------------------------


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32


def largest_magnitude(matrix: Tensor) -> Tensor:
    """Largest magnitude of each matrix (1 for a zero one): dividing by it keeps squares within the dtype's range."""
    largest = torch.linalg.vector_norm(matrix, ord=torch.inf, dim=(-2, -1))
    return torch.where(largest == 0, torch.ones_like(largest), largest)


def scratch(tensor: Tensor) -> int:
    return _SCRATCH_ELEMENTS.get(tensor.device.type, _SCRATCH_ELEMENTS_ACCELERATOR)


def chunk_limit(factor: Tensor) -> int:
    """How many matrices share a chunk: as many as fit the scratch whole, each in one long product."""
    return max(1, scratch(factor) // (factor.shape[-2] * factor.shape[-1] or 1))


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices over the rows of `(..., D, R)` whose temporaries fit the scratch."""
    rows = matrix.shape[-2]
    step = max(1, scratch(matrix) // max(1, matrix.numel() // max(1, rows)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def flat_chunks(left: Tensor, right: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Dimension by dimension: flattening an expanded (stride 0) batch would copy the keys of each group.
    if left.ndim == 3:
        yield from zip(left.split(limit), right.split(limit), strict=True)
    else:
        for a, b in zip(left, right, strict=True):
            yield from flat_chunks(a, b, limit)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
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
