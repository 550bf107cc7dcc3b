"""
What scores mean when nothing was learned: the range in which W_qk of independent Gaussian W_q, W_k would score.

Shape legend: `D` rows of W (query side), `C` columns of W (key side; equal to `D` in self-attention), `R` rank of the
factors.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from ._sums import exact_products, largest_magnitude, quotient, row_blocks
from .bilinear import BilinearForm


__all__ = ["directionality_null", "form_nulls", "symmetry_null"]

# Simulated symmetry scores: 2^14 put an edge of the 95 % band within 0.03 std.
_SYMMETRY_DRAWS = 2**14
# Simulated pairs of sets of norms, and from which width on half as many: they cost time in proportion, and their own
# chance moves the band's coverage by 0.7 % (1 %).
_DRAWS = 1024
_WIDE = 2048
# Size of the pool that they are chosen from: 32 MiB.
_POOL_ELEMENTS = 2**23
# Channels a side that are simulated exactly.
_OUTLIERS = 8
_SEED = 20250217


# --- symmetry -----------------------------------------------------------------------------------------------------


def symmetry_null(width: int, rank: int, level: float = 0.95) -> tuple[float, float]:
    """
    Range in which the symmetry score of `W = A Bᵀ` lies with probability `level`, for A and B of shape
    `(width, rank)` with independent Gaussian entries of equal variance.

    The left and right singular vectors of such a W are independent and uniform, from which mean and variance of the
    score follow: exactly 1/D, and near 2/D². The band is a Cornish-Fisher expansion about these with leading terms of
    skewness and kurtosis (which fall with the rank). Where it is not accurate, at a width up to 16 or a rank up to 4,
    exact scores are simulated from matrices of size `min(width, rank)` instead, with a generator of its own. Measured
    against simulation, edges are within 0.06 of the distribution's std and the band holds 94.5 to 95.5 % of draws.

    Args:
        width (`int`): Rows and columns D of W.
        rank (`int`): Columns R of the factors; may exceed the width.
        level (`float`, *optional*, defaults to 0.95): Probability of the range; what lies outside is halved.

    Returns:
        `tuple[float, float]`: Low and high edge, in [−1, 1].

    Raises:
        ValueError: if width or rank is below 1, or the level not strictly between 0 and 1.

    Examples:

    ```python
    >>> from hf_symqk.null_band import symmetry_null
    >>> low, high = symmetry_null(768, 64)
    >>> round(low, 4), round(high, 4)
    (-0.0023, 0.0049)

    ```
    """
    _require_level(level)
    if width < 1 or rank < 1:
        raise ValueError(f"A null band needs a width and a rank of at least 1, got {width} and {rank}.")
    tails = ((1 - level) / 2, (1 + level) / 2)
    if width <= 16 or rank <= 4:
        low, high = np.quantile(_simulated_symmetry(width, rank), tails)
        return float(low), float(high)
    # Moments of the squared singular values p of W, scaled to Σp = 1: Σp² and Σp³ for wide factors.
    ratio = rank / width
    squares, cubes = (1 + 2 * ratio) / rank, (1 + 6 * ratio + 5 * ratio**2) / rank**2
    # tr(W W) / ‖W‖² = Σ √(p_i p_j) Q_ij Q_ji with a uniform orthogonal Q, whose fourth moments are known:
    # E Q_ii⁴ = 3/(D(D+2)), E Q_ii² Q_jj² = E Q_ij² Q_ji² = (D+1)/(D(D−1)(D+2)).
    second_moment = 3 / (width * (width + 2)) * (1 + 2 * (1 - squares) / (width - 1))
    mean, std = 1 / width, (second_moment - 1 / width**2) ** 0.5
    skewness, kurtosis = 8 * cubes / 2**1.5, 12 * squares**2
    low, high = (mean + std * _cornish_fisher(NormalDist().inv_cdf(tail), skewness, kurtosis) for tail in tails)
    return max(low, -1.0), min(high, 1.0)


def _cornish_fisher(z: float, skewness: float, kurtosis: float) -> float:
    return z + skewness * (z**2 - 1) / 6 + kurtosis * (z**3 - 3 * z) / 24 - skewness**2 * (2 * z**3 - 5 * z) / 36


@lru_cache(maxsize=64)
def _simulated_symmetry(width: int, rank: int) -> np.ndarray:
    """
    Draws of the symmetry score. With `n = min(R, D)` and a rotation that makes the larger side of B triangular,
    `W = A Bᵀ` has `tr(W W) = tr(N N)` and `‖W‖² = ‖N‖² + ‖X Sᵀ‖²`, where `N = Z Sᵀ`, Z is Gaussian (n, n), and S and X
    are roots of independent Wishart matrices of n dimensions with max(R, D) and D − n degrees of freedom.
    """
    generator = np.random.default_rng(_SEED)
    size = min(width, rank)
    scores, block = [], 2**11  # blocks: a few MiB at a time
    for _ in range(_SYMMETRY_DRAWS // block):
        root = _wishart_root(generator, block, max(width, rank), size)
        core = generator.standard_normal((block, size, size)) @ root.transpose(0, 2, 1)
        rest = _wishart_root(generator, block, width - size, size) @ root.transpose(0, 2, 1)
        trace_of_square = (core * core.transpose(0, 2, 1)).sum((1, 2))
        scores.append(trace_of_square / ((core**2).sum((1, 2)) + (rest**2).sum((1, 2))))
    return np.concatenate(scores)


def _wishart_root(generator: np.random.Generator, draws: int, degrees: int, size: int) -> np.ndarray:
    """X with Xᵀ X of the Wishart distribution: Gaussian rows if they are few, else their triangular factor."""
    if degrees < size:
        return generator.standard_normal((draws, degrees, size))
    root = np.triu(generator.standard_normal((draws, size, size)), 1)
    diagonal = np.arange(size)
    root[:, diagonal, diagonal] = np.sqrt(generator.chisquare(degrees - diagonal, (draws, size)))
    return root


# --- directionality -----------------------------------------------------------------------------------------------


def directionality_null(
    query_norms: Tensor, key_norms: Tensor, rank: int, gamma: float = 2.0, level: float = 0.95
) -> Tensor:
    """
    Range in which the directionality score of `W = A Bᵀ` lies with probability `level`, where the rows of A and B are
    independent Gaussian vectors of R entries and have these norms in the root mean square.

    Row and column norms of W are simulated, not W: given the other factor, a row norm² is a quadratic form in Gaussian
    variables, drawn as a shifted χ² variable with the form's first three cumulants. The channels with the largest
    norms are treated exactly, since rows and columns share their entries. Fixed draws from a generator of its own
    serve every call. Measured against 1,000 to 2,000 simulations of whole matrices each (profiles from flat to one
    channel a hundred times above the others and those of a trained encoder, rank 1 to 8 times the width), the band
    holds 92 to 97 % of draws with edges within 0.2 of half its width; 89 to 91 % with edges within 0.35 where one
    channel dominates both sides and the rank is 8 times the width. Norms measured on a layer carry chance themselves:
    of freshly drawn layers, 91 to 94 % lie in the band of their own norms at a rank of D/4 and more, 90 % at D/24.

    Args:
        query_norms (`torch.Tensor` of shape `(D,)`):
            Euclidean norms of the rows of A, one per input channel of the queries; only their ratios matter.
        key_norms (`torch.Tensor` of shape `(C,)`):
            The same of B.
        rank (`int`):
            Columns R of the factors.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.
        level (`float`, *optional*, defaults to 0.95):
            Probability of the range; what lies outside is halved.

    Returns:
        `torch.Tensor` of shape `(2,)`: Low and high edge, in [−1, 1], fp32 on the device of the norms, for which the
        host does not wait; NaN where a norm is not finite, 0 where all norms of a side are.

    Raises:
        ValueError: if the norms are not vectors, the rank is below 1, or the level not strictly between 0 and 1.
    """
    _require_level(level)
    if rank < 1:
        raise ValueError(f"A null band needs a rank of at least 1, got {rank}.")
    for side, norms in (("query_norms", query_norms), ("key_norms", key_norms)):
        if norms.ndim != 1 or not norms.numel():
            raise ValueError(f"`{side}` holds one norm per input channel, got shape {tuple(norms.shape)}.")
    device = query_norms.device
    width = max(len(query_norms), len(key_norms))
    draws = _DRAWS // 2 if width > _WIDE else _DRAWS
    with exact_products(device):
        query, key = _Profile.of(query_norms), _Profile.of(key_norms.to(device))
        entries, query_gram, key_gram = (
            values.to(device, non_blocking=True)
            for values in _outlier_draws(draws, rank, len(query.outliers), len(key.outliers))
        )
        query_normals, key_normals = (
            _normal_draws(draws, len(profile.norms)).to(device, non_blocking=True).chunk(2) for profile in (query, key)
        )
        # One side takes its halves in reverse: where the profiles agree, draws i and i + n/2 are then mirror images.
        rows, columns = _Side(query, query_gram, query_normals), _Side(key, key_gram, key_normals[::-1])
        row_excess = _excess_draws(rows, columns, entries, rank, gamma)
        column_excess = _excess_draws(columns, rows, entries.mT, rank, gamma)
        scores = quotient(row_excess - column_excess, row_excess + column_excess) * (query.present & key.present)
        ordered = torch.where(query.finite & key.finite, scores, torch.nan).sort().values
    low = round((draws - 1) * (1 - level) / 2)
    return torch.stack([ordered[low], ordered[-1 - low]])


@dataclass(frozen=True)
class _Profile:
    """Row norms of a factor, scaled to a sum of squares of 1."""

    norms: Tensor  # (D,)
    outliers: Tensor  # (K,)  indices of the largest norms
    power_sums: tuple[Tensor, Tensor, Tensor]  # Σ norm², Σ norm⁴, Σ norm⁶ over the other norms
    present: Tensor  # ()    whether any norm is above 0
    finite: Tensor  # ()

    @staticmethod
    def of(norms: Tensor) -> "_Profile":
        norms = norms.float()
        largest = norms.amax()
        present, finite = largest > 0, torch.isfinite(norms).all()
        # The scores of zero and NaN are known: until they are set, any profile will do.
        norms = torch.where(present & finite, norms / largest, 1.0)
        norms = norms / torch.linalg.vector_norm(norms)
        outliers = norms.topk(min(_OUTLIERS, len(norms))).indices
        squares = norms.scatter(0, outliers, 0).square()
        power_sums = (squares.sum(), squares.square().sum(), (squares**3).sum())
        return _Profile(norms, outliers, power_sums, present, finite)


@dataclass(frozen=True)
class _Side:
    """A factor and the draws that belong to it."""

    profile: _Profile
    gram: Tensor  # (n, K, K)  products of the outliers' rows, of unit variance, over R
    normals: tuple[Tensor, ...]  # n x D in all: a standard normal variable for each norm


def _excess_draws(own: _Side, other: _Side, entries: Tensor, rank: int, gamma: float) -> Tensor:
    """
    Draws of what the norms of the rows of W (or of its columns, sides exchanged) exceed their threshold by, in sum and
    relative to ‖W‖. `entries` are those of W between the outliers of both sides, for norms of 1.
    """
    # The squared norm of a row of W = A Bᵀ is that of the row of A times gᵀ K g, g Gaussian and K = Bᵀ B / R.
    first, second, third = (moment[:, None] for moment in _spectral_moments(other.profile, other.gram, rank))
    # Its cumulants are tr K, 2 tr K² and 8 tr K³: those of a shifted and scaled χ² variable.
    spread = _spread(second * (second / third).square())
    scale = second / third * second
    offset = first - scale
    norms_of_outliers = _outlier_norms(own, other, entries)
    parts, start = [], 0
    for half in own.normals:
        for rows in row_blocks(half):
            draws = slice(start + rows.start, start + rows.stop)
            norms = _chi_square(half[rows], spread[draws])
            torch.addcmul(offset[draws], norms, scale[draws], out=norms)
            norms.clamp_(min=0).sqrt_().mul_(own.profile.norms)
            norms[:, own.profile.outliers] = norms_of_outliers[draws]
            parts.append(_relative_excess(norms, gamma))
        start += len(half)
    return torch.cat(parts)


def _outlier_norms(own: _Side, other: _Side, entries: Tensor) -> Tensor:
    """
    Norms of the outliers' rows of W. Entries in the outliers' columns count there as well, so they are shared; those
    in all other columns add up to what the rows' own sizes make likely.
    """
    outliers = own.profile.outliers
    shared = entries.square() @ other.profile.norms[other.profile.outliers].square()
    sum2, sum4, _ = other.profile.power_sums
    normals = torch.cat([half[:, : len(outliers)] for half in own.normals])
    # (No other columns, or all of norm 0: nothing is added, whatever the degrees of freedom.)
    rest = _chi_square(normals, _spread((sum2.square() / sum4).nan_to_num(1.0)))
    sizes = own.gram.diagonal(dim1=-2, dim2=-1)
    return (shared + sum2 * sizes * rest).clamp(min=0).sqrt() * own.profile.norms[outliers]


def _relative_excess(norms: Tensor, gamma: float) -> Tensor:
    """
    As in the score, over ‖W‖: rows and columns have it in common, and draws that differ in it would not be of one W.
    """
    # Not `_sums.excess_ratio`: the pass of `torch.std` alone would take longer than all the rest.
    size = norms.shape[-1]
    mean, norm = norms.mean(-1), torch.linalg.vector_norm(norms, dim=-1)
    std = ((norm.square() - size * mean.square()).clamp(min=0) / max(1, size - 1)).sqrt()
    threshold = mean + gamma * std
    return norms.sub_(threshold[:, None]).clamp_(min=0).sum(-1) / norm


def _spectral_moments(profile: _Profile, gram: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    tr K, tr K² and tr K³ of `K = Bᵀ B / R`, where B has rows of these norms: with the draws of the outliers, and in
    expectation over all other rows.
    """
    weights = profile.norms[profile.outliers]
    gram = gram * (weights[:, None] * weights)
    square = gram @ gram
    own1, own2, own3 = (product.diagonal(dim1=-2, dim2=-1).sum(-1) for product in (gram, square, square @ gram))
    sum2, sum4, sum6 = profile.power_sums
    # Expected traces of the powers of a sum of b² h hᵀ, h Gaussian: E|h|⁴ = R(R+2), E|h|⁶ = R(R+2)(R+4).
    bulk2 = (sum2**2 + sum4 * (rank + 1)) / rank
    bulk3 = (sum2**3 + 3 * sum2 * sum4 * (rank + 1) + sum6 * (rank**2 + 3 * rank + 4)) / rank**2
    return (
        own1 + sum2,
        own2 + 2 * own1 * sum2 / rank + bulk2,
        own3 + 3 * own2 * sum2 / rank + 3 * own1 * bulk2 / rank + bulk3,
    )


def _spread(degrees: Tensor) -> Tensor:
    return 2 / 9 / degrees


def _chi_square(normals: Tensor, spread: Tensor) -> Tensor:
    """χ² / degrees from standard normal variables (Wilson and Hilferty); cut off only by what uses it."""
    return torch.addcmul(1 - spread, normals, spread.sqrt()).pow_(3)


@lru_cache(maxsize=2)
def _normal_draws(draws: int, width: int) -> Tensor:
    """
    Sets of standard normal variables `(draws, width)`, spread evenly: of a larger pool, ordered by the excess that a
    set would have itself, one in every few is kept, and pairs (i, i + draws / 2) lie on a lattice in that order. A
    plain sample of this size would place the edges of a band less than half as well.
    """
    times = max(1, min(8, _POOL_ELEMENTS // (draws * width)))
    pool = torch.randn(times * draws, width, generator=torch.Generator().manual_seed(_SEED))
    # The χ of many degrees of freedom is close to normal: as good as any to rank the sets by.
    excess = torch.cat([_relative_excess(pool[rows] / 16 + 1, gamma=2.0) for rows in row_blocks(pool)])
    kept = excess.argsort(stable=True)[times // 2 :: times]
    half = torch.arange(draws // 2)
    lattice = (half * (5**0.5 - 1) / 2).frac().argsort()
    return pool[torch.cat([kept[2 * half], kept[2 * lattice + 1]])]


@lru_cache(maxsize=16)
def _outlier_draws(draws: int, rank: int, rows: int, columns: int) -> tuple[Tensor, ...]:
    """
    Draws of `G Hᵀ / √R`, `G Gᵀ / R` and `H Hᵀ / R` for Gaussian G `(rows, R)` and H `(columns, R)`: of variance 1, and
    with a mean diagonal of 1. The second half is the first with the sides exchanged.
    """
    generator = np.random.default_rng(_SEED)
    half, size = draws // 2, max(rows, columns)
    # Turned so that Hᵀ is triangular, G has as many coordinates that meet H, and others that only add to its norms.
    root = _wishart_root(generator, half, rank, size)
    shared = generator.standard_normal((half, size, root.shape[1]))
    # Where one channel a side dominates, this variable decides: spread evenly over its quantiles.
    levels = (torch.arange(half, dtype=torch.float64) + 0.5) / half
    shared[:, 0, 0] = generator.permutation(torch.special.ndtri(levels).numpy())
    rest = _wishart_root(generator, half, rank - root.shape[1], size)
    products = shared @ root * rank**0.5
    squares = (shared @ shared.transpose(0, 2, 1) + rest.transpose(0, 2, 1) @ rest, root.transpose(0, 2, 1) @ root)
    both = (
        np.concatenate([products, products.transpose(0, 2, 1)])[:, :rows, :columns],
        np.concatenate(squares)[:, :rows, :rows],
        np.concatenate(squares[::-1])[:, :columns, :columns],
    )
    return tuple(torch.from_numpy((values / rank).astype(np.float32)) for values in both)


# --- both ---------------------------------------------------------------------------------------------------------


def form_nulls(form: BilinearForm, gamma: float = 2.0) -> Tensor:
    """
    Null bands (95 %) of both scores of a form: what independent Gaussian factors of its shape, and of the row norms of
    its factors, would score.

    Args:
        form ([`BilinearForm`] without batch dimensions): The form, usually that of a layer.
        gamma (`float`, *optional*, defaults to 2.0): γ of the directionality score.

    Returns:
        `torch.Tensor` of shape `(4,)`: Low and high edge for symmetry (NaN where W is not square), then for
        directionality, in fp32 on the form's device, for which the host does not wait.

    Raises:
        ValueError: if the form has batch dimensions.
    """
    if form.batch_shape:
        raise ValueError(f"A null band is that of a single form, got a batch of shape {tuple(form.batch_shape)}.")
    low, high = symmetry_null(form.shape[0], form.rank) if form.is_square else (math.nan, math.nan)
    band = directionality_null(_row_norms(form.left), _row_norms(form.right), form.rank, gamma)
    return torch.cat([band.new_full((1,), low), band.new_full((1,), high), band])


def _row_norms(factor: Tensor) -> Tensor:
    """Norms of the rows of `(D, R)` over the largest entry: a scale does not matter here, overflow would."""
    with torch.no_grad():
        largest = largest_magnitude(factor).float()
        # Along the memory of the factor (a linear layer's weight lies `(R, D)`), where sums stream.
        axis = 1 if factor.stride(-1) == 1 else 0
        lying = factor if axis else factor.mT
        parts = [(lying[rows].float() / largest).square_().sum(axis) for rows in row_blocks(lying)]
        return (torch.cat(parts) if axis else torch.stack(parts).sum(0)).sqrt_()


def _require_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"The level of a null band lies strictly between 0 and 1, got {level}.")
