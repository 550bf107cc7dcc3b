"""Scores of factored forms: right against dense fp64, whatever the shape, layout, dtype, scale or backend setting."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_symqk._sums as sums_module
from hf_symqk import BilinearForm, directionality_score, symmetry_score


# What the scores promise; fp32 rounding of sums of a few thousand terms stays well below it.
TOLERANCE = 1e-4
# Both ways of computing, forced by shape: 10·D·R² against 2·D²·(R + 100) operations. D = 150 is no multiple of a tile.
GRAM, TILES, WIDE = (150, 8), (150, 90), (40, 130)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(left: Tensor, right: Tensor) -> np.ndarray:
    return (left.double() @ right.double().mT).numpy()


def numpy_symmetry(w: np.ndarray) -> np.ndarray:
    """By the paper's definition, from the symmetric and the skew part."""
    symmetric, skew = (w + w.swapaxes(-1, -2)) / 2, (w - w.swapaxes(-1, -2)) / 2
    return ((symmetric**2).sum((-2, -1)) - (skew**2).sum((-2, -1))) / (w**2).sum((-2, -1))


def numpy_directionality(w: np.ndarray, gamma: float = 2.0) -> np.ndarray:
    def excess(norms: np.ndarray) -> float:
        threshold = norms.mean() + gamma * norms.std(ddof=1)
        return sum(norm - threshold for norm in norms if norm > threshold)

    scores = []
    for matrix in w.reshape(-1, *w.shape[-2:]):
        rows, columns = (excess(np.sqrt((matrix**2).sum(axis))) for axis in (1, 0))
        scores.append((rows - columns) / (rows + columns) if rows + columns else 0.0)
    return np.array(scores).reshape(w.shape[:-2])


def close(actual: Tensor, expected: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check_all_methods(left: Tensor, right: Tensor) -> None:
    form, w = BilinearForm(left, right), dense(left, right)
    assert form.shape == w.shape
    scores = form.scores()
    close(form.symmetry_score(), numpy_symmetry(w))
    close(scores.symmetry, numpy_symmetry(w))
    # Excesses over a threshold are small differences of norms: they keep about two digits less than the norms.
    close(form.directionality_score(), numpy_directionality(w), 1e-3)
    close(scores.directionality, numpy_directionality(w), 1e-3)
    norms = np.sqrt((w**2).sum((-2, -1)))
    close(scores.frobenius_norm, norms)
    close(form.frobenius_norm(), norms)
    close(form.row_norms(), np.sqrt((w**2).sum(-1)))
    close(form.column_norms(), np.sqrt((w**2).sum(-2)))
    # The trace, and single entries, may cancel: their errors are relative to the norm.
    size = torch.as_tensor(norms)
    close(form.trace() / size, np.trace(w, axis1=-2, axis2=-1) / norms)
    close(form.to_dense() / size[..., None, None], w / norms[..., None, None])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and tiles, the last ones cut, at sizes that a test can afford."""
    monkeypatch.setattr(sums_module, "_TILE_EDGE", {"cpu": 64})
    monkeypatch.setattr(sums_module, "_SCRATCH_ELEMENTS", {"cpu": 2**9})


# --- against dense matrices ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [GRAM, TILES, WIDE], ids=["gram", "tiles", "rank-above-width"])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)], ids=str)
def test_methods_agree_with_dense_fp64(batch: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Every method, both ways of computing, every batch shape: blocks, tiles and chunks lose nothing."""
    check_all_methods(draw(*batch, *shape), draw(*batch, *shape, seed=1))


@pytest.mark.parametrize(("shape", "way"), [(GRAM, "_gram_sums"), (TILES, "_tile_sums"), (WIDE, "_tile_sums")])
def test_shapes_take_the_way_they_stand_for(shape: tuple[int, int], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the other tests: if the cost rule moves, GRAM and TILES have to move with it."""
    taken = []
    for name in ("_gram_sums", "_tile_sums"):
        original = getattr(sums_module, name)
        monkeypatch.setattr(
            sums_module, name, lambda *args, name=name, original=original: taken.append(name) or original(*args)
        )
    BilinearForm(draw(*shape), draw(*shape, seed=1)).scores()
    assert taken == [way]


@pytest.mark.parametrize("small", [False, True], ids=["one-chunk", "many-chunks"])
@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_grouped_keys_broadcast(shape: tuple[int, int], small: bool, request: pytest.FixtureRequest) -> None:
    """Keys shared by a group of query heads (and queries shared by keys) score as if they were repeated."""
    if small:
        request.getfixturevalue("small_tiles")
    left, right = draw(2, 3, *shape), draw(2, 1, *shape, seed=1)
    check_all_methods(left, right)
    check_all_methods(right, left)
    check_all_methods(left, right[0, 0])
    repeated = BilinearForm(left, right.expand(2, 3, *shape).contiguous()).scores()
    for grouped, plain in zip(BilinearForm(left, right).scores(), repeated, strict=True):
        close(grouped, plain, 1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [GRAM, TILES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_input_dtypes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Factors of every float dtype are scored as the numbers they hold: no product is rounded to a half precision."""
    left, right = draw(2, *shape, dtype=dtype), draw(2, *shape, seed=1, dtype=dtype)
    check_all_methods(left, right)
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert {score.dtype for score in BilinearForm(left, right).scores()} == {expected}


@pytest.mark.parametrize("tokens_last", [False, True], ids=["interleaved", "linear"])
def test_strided_views(tokens_last: bool) -> None:
    """Views of a weight (heads of a linear layer; Q, K interleaved in one tensor) score like contiguous copies."""
    if tokens_last:
        left, right = (draw(4 * 8, 50, seed=seed).view(4, 8, 50).mT for seed in (0, 1))
    else:
        left, right = draw(50, 4, 8, 3).permute(3, 1, 0, 2)[
            :2
        ]  # no dimension but E of stride 1, then only every third
    assert not left.is_contiguous()
    check_all_methods(left, right)


def test_dimension_of_one() -> None:
    """A 1 × 1 form is symmetric, has no spread of norms and hence no direction."""
    scores = BilinearForm(draw(3, 1, 4), draw(3, 1, 4, seed=1)).scores()
    close(scores.symmetry, torch.ones(3))
    close(scores.directionality, torch.zeros(3))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dims", [(40, 90), (90, 40)], ids=str)
def test_rectangular_forms(dims: tuple[int, int]) -> None:
    """Cross-attention between widths: direction and norms exist, symmetry and trace do not, and that is said."""
    left, right = draw(2, dims[0], 8), draw(2, dims[1], 8, seed=1)
    form, w = BilinearForm(left, right), dense(left, right)
    scores = form.scores()
    close(scores.directionality, numpy_directionality(w), 1e-3)
    close(form.row_norms(), np.sqrt((w**2).sum(-1)))
    close(form.column_norms(), np.sqrt((w**2).sum(-2)))
    assert scores.symmetry.isnan().all()
    for method in (form.symmetry_score, form.trace):
        with pytest.raises(ValueError, match="square"):
            method()
    with pytest.raises(ValueError, match="square"):
        symmetry_score(form.to_dense())


@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_dense_functions_equal_the_factored_ones(shape: tuple[int, int]) -> None:
    """`symmetry_score(W)` and `symmetry_score(form)` are one definition; so for directionality, with its γ."""
    form = BilinearForm(draw(2, *shape), draw(2, *shape, seed=1))
    w = form.to_dense()
    close(symmetry_score(w), symmetry_score(form))
    for gamma in (1.0, 2.0):
        close(directionality_score(w, gamma), directionality_score(form, gamma), 1e-3)


# --- what the scores mean ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_symmetric_and_skew_forms_reach_the_ends(shape: tuple[int, int]) -> None:
    """W_q W_qᵀ scores 1 and x yᵀ − y xᵀ scores −1, within fp32 rounding of the sums (1e-5)."""
    x, y = draw(*shape), draw(*shape, seed=1)
    close(BilinearForm(x, x).symmetry_score(), 1.0, 1e-5)
    skew = BilinearForm(torch.cat([x, y], -1), torch.cat([y, -x], -1))
    close(skew.symmetry_score(), -1.0, 1e-5)
    close(symmetry_score(skew.to_dense()), -1.0, 1e-5)


def test_independent_factors_score_about_zero() -> None:
    """tr(W W) of independent factors has mean 0 and a spread of about 1/D relative to ‖W‖²: ten of these are 0.01."""
    left, right = draw(6, 1000, 32), draw(6, 1000, 32, seed=1)
    assert BilinearForm(left, right).symmetry_score().abs().max() < 0.01


@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_sign_of_directionality(shape: tuple[int, int]) -> None:
    """Columns belong to keys and are negative, as in the paper's figures; the transposed form flips the sign."""
    left, right = draw(*shape), draw(*shape, seed=1)
    right[7] *= 30  # one key channel: one column of W
    assert BilinearForm(left, right).directionality_score() < -0.4
    assert BilinearForm(right, left).directionality_score() > 0.4
    forward, backward = BilinearForm(left, right).scores(), BilinearForm(right, left).scores()
    close(forward.directionality, -backward.directionality, 1e-5)
    close(forward.symmetry, backward.symmetry, 1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_gamma_is_honoured(gamma: float) -> None:
    """γ moves the threshold as an independent implementation says (std with N − 1)."""
    left, right = draw(2, 60, 8) * draw(60, 1, seed=2).exp(), draw(2, 60, 8, seed=1)
    expected = numpy_directionality(dense(left, right), gamma)
    form = BilinearForm(left, right)
    close(form.directionality_score(gamma), expected, 1e-3)
    close(form.scores(gamma).directionality, expected, 1e-3)
    close(directionality_score(form.to_dense(), gamma), expected, 1e-3)


@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_scaling_and_order_of_heads_do_not_matter(shape: tuple[int, int]) -> None:
    """Scores are of the shape of W, not its size; a batch is scored item by item, wherever the chunks are cut."""
    left, right = draw(5, *shape), draw(5, *shape, seed=1)
    scores = BilinearForm(left, right).scores()
    for factors in ((7.0, 1.0), (1.0, -0.03), (-1e4, 1e-7), (1e-18, 1e18), (1e-11, 1e-11)):
        scaled = BilinearForm(left * factors[0], right * factors[1]).scores()
        sign = math.copysign(1.0, factors[0] * factors[1])
        close(scaled.symmetry, scores.symmetry, 1e-5)  # tr((−W)(−W)) = tr(W W)
        close(scaled.directionality, scores.directionality, 1e-3)
        close(scaled.frobenius_norm / (sign * factors[0] * factors[1]) / scores.frobenius_norm, torch.ones(5), 1e-5)
    order = torch.tensor([3, 0, 4, 1, 2])
    for permuted, plain in zip(BilinearForm(left[order], right[order]).scores(), scores, strict=True):
        close(permuted, plain[order], 1e-5)


# --- numbers that are hard -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [GRAM, TILES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1e-15, 1e15, 1e19, 1e30])
def test_tiny_and_huge_weights(scale: float, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Squares, and squares of squares, of the weights leave the range of fp32 (fully, or into denormals) unnoticed."""
    left, right = (draw(2, *shape, seed=seed, dtype=torch.float64).mul(scale).to(dtype) for seed in (0, 1))
    expected = dense(left.double() / scale, right.double() / scale)
    scores = BilinearForm(left, right).scores()
    close(scores.symmetry, numpy_symmetry(expected))
    close(scores.directionality, numpy_directionality(expected), 1e-3)


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_range_of_fp64(scale: float) -> None:
    """fp64 factors whose fourth powers leave the range of fp64 are scored all the same."""
    left, right = draw(*GRAM, dtype=torch.float64), draw(*GRAM, seed=1, dtype=torch.float64)
    scores = BilinearForm(left * scale, right * scale).scores()
    close(scores.symmetry, numpy_symmetry(dense(left, right)))


def test_half_precision_products_do_not_overflow() -> None:
    """fp16 ends at 65504: entries of W around 8 · 300² would be infinite in it, in fp32 they are nothing special."""
    left, right = draw(*GRAM).mul(300).half(), draw(*GRAM, seed=1).mul(300).half()
    assert (left @ right.mT).isinf().any()
    check_all_methods(left, right)
    assert symmetry_score((left[:8, :4] / 300) @ (right[:8, :4] / 300).mT).isfinite()


def nearly_cancelling(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Factors [x, x + δ] and [y, −y]: W = −δ yᵀ is tiny beside its factors."""
    x, y = draw(*shape), draw(*shape, seed=1)
    return torch.cat([x, x + 3e-4 * draw(*shape, seed=2)], -1), torch.cat([y, -y], -1)


def test_cancellation_between_factors_is_computed_in_fp64() -> None:
    """⟨G, K⟩ is a small difference of large terms here: fp32 alone gets it wrong, the second pass right."""
    left, right = nearly_cancelling(GRAM)
    w = dense(left, right)
    scores = BilinearForm(left, right).scores()
    close(scores.symmetry, numpy_symmetry(w))
    close(scores.directionality, numpy_directionality(w), 1e-3)
    close(scores.frobenius_norm / np.sqrt((w**2).sum()), 1.0)
    assert scores.relative_error < BilinearForm.max_relative_error
    unguarded = BilinearForm(left, right).scores(careful=False)
    assert unguarded.relative_error > BilinearForm.max_relative_error
    assert not abs(unguarded.frobenius_norm.double() / np.sqrt((w**2).sum()) - 1) < TOLERANCE


def test_cancellation_in_tiles() -> None:
    """The same where W is multiplied out in tiles: its entries are what cancels."""
    left, right = nearly_cancelling(TILES)
    close(BilinearForm(left, right).symmetry_score(), numpy_symmetry(dense(left, right)))


def test_second_pass_serves_single_items() -> None:
    """Only the item that needs fp64 is done again, and it lands in its own place."""
    bad_left, bad_right = nearly_cancelling(GRAM)
    left, right = draw(4, 150, 16, seed=5), draw(4, 150, 16, seed=6)
    left[2], right[2] = bad_left, bad_right
    check_scores = BilinearForm(left, right).symmetry_score()
    close(check_scores, numpy_symmetry(dense(left, right)))


@pytest.mark.parametrize("shape", [GRAM, TILES, (700, 400)], ids=str)
def test_exact_cancellation_is_zero(shape: tuple[int, int]) -> None:
    """Factors that cancel to W = 0 leave rounding only, which must not be scored as if it were a matrix."""
    x, y = draw(*shape), draw(*shape, seed=1)
    scores = BilinearForm(torch.cat([x, x], -1), torch.cat([y, -y], -1)).scores()
    assert all(score == 0 for score in scores)  # the error estimate too: the zero is exact


@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_zero_factors_score_zero(shape: tuple[int, int]) -> None:
    """Freshly zeroed weights: 0, not 0/0; also dense, and beside an item that is not zero."""
    left, right = draw(2, *shape), draw(2, *shape, seed=1)
    left[0] = 0
    scores = BilinearForm(left, right).scores()
    assert all(score[0] == 0 for score in scores)
    close(scores.symmetry[1], numpy_symmetry(dense(left[1], right[1])))
    zeros = torch.zeros(5, 5)
    assert symmetry_score(zeros) == directionality_score(zeros) == 0


@pytest.mark.parametrize("shape", [GRAM, TILES])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_items_score_nan_alone(value: float, shape: tuple[int, int]) -> None:
    """A diverged head is NaN in every score; its neighbours keep theirs."""
    left, right = draw(3, *shape), draw(3, *shape, seed=1)
    clean = BilinearForm(left, right).scores()
    right[1, 4, 2] = value
    for score, expected in zip(BilinearForm(left, right).scores(), clean, strict=True):
        assert score[1].isnan()
        close(score[[0, 2]], expected[[0, 2]], 1e-5)
    w = torch.eye(3)
    w[0, 1] = value
    assert symmetry_score(w).isnan()
    assert directionality_score(w).isnan()


# --- surroundings --------------------------------------------------------------------------------------------------


def settings() -> tuple[Any, ...]:
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch has no one word for backends that differ
        precision = "mixed"
    return (
        precision,
        torch.backends.cuda.matmul.fp32_precision if hasattr(torch.backends.cuda.matmul, "fp32_precision") else None,
        getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
    )


@pytest.fixture(params=["autocast", "medium", "mkldnn"])
def rough_products(request: pytest.FixtureRequest) -> Any:
    """A setting under which fp32 products run in bf16 (where the processor can)."""
    precision = torch.get_float32_matmul_precision()
    if request.param == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
    elif request.param == "medium":
        torch.set_float32_matmul_precision("medium")
        yield
        torch.set_float32_matmul_precision(precision)
    else:
        matmul = getattr(torch.backends.mkldnn, "matmul", None)
        if not hasattr(matmul, "fp32_precision"):
            pytest.skip("torch before 2.9 has no such setting")
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16"
        yield
        matmul.fp32_precision = before


@pytest.mark.parametrize("shape", [GRAM, TILES])
def test_low_precision_settings_are_set_aside(shape: tuple[int, int], rough_products: None) -> None:
    """A training script's autocast or TF32/bf16 setting costs the scores no digit, and is in force again after."""
    left, right = draw(*shape), draw(*shape, seed=1)
    left.requires_grad_()
    before = settings()
    scores = BilinearForm(left, right).scores()
    dense_form = BilinearForm(left, right).to_dense()
    assert settings() == before
    assert not any(score.requires_grad for score in scores)
    w = dense(left.detach(), right)
    # fp32 sums: 1e-5. Products in bf16 are off by 1e-3 and more.
    close(scores.symmetry, numpy_symmetry(w), 1e-5)
    close(scores.frobenius_norm / np.sqrt((w**2).sum()), 1.0, 1e-5)
    close(dense_form, w, 1e-5)


def test_settings_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of a score must not leave the process in another precision."""

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("hf_symqk.bilinear.chunk_sums", fail)
    before = settings()
    with pytest.raises(MemoryError):
        BilinearForm(draw(*GRAM), draw(*GRAM)).scores()
    assert settings() == before


class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operation returned, the inputs' own excepted."""

    def __init__(self, *inputs: Tensor):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "dims", "rank"), [((2, 2), 16384, 8), ((1,), 2048, 1024)], ids=["gram", "tiles"])
def test_no_dense_matrix_is_allocated(batch: tuple[int, ...], dims: int, rank: int, dtype: torch.dtype) -> None:
    """The point of the factors: memory stays at blocks and R × R products, far below D × D, in either way."""
    left, right = draw(*batch, rank, dims, dtype=dtype).mT, draw(*batch, rank, dims, seed=1, dtype=dtype).mT
    with LargestTensor(left, right) as largest:
        BilinearForm(left, right).scores()
    limit = max(2**19, rank * rank)
    assert 0 < largest.numel <= limit <= dims * dims / 4


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "error", "message"),
    [
        ([[1.0]], torch.ones(1, 1), TypeError, "`left` must be a floating point tensor, got list"),
        (torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64), TypeError, "`right` .* got dtype torch.int64"),
        (torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2), TypeError, "`left` .* got dtype torch.complex64"),
        (torch.ones(2), torch.ones(2, 2), ValueError, r"`left` must have shape \(\.\.\., D, R\), got \(2,\)"),
        (torch.ones(4, 2), torch.ones(4, 3), ValueError, "share their last dimension"),
        (torch.ones(2, 4, 2), torch.ones(3, 4, 2), ValueError, "do not broadcast"),
        (torch.ones(4, 2), torch.ones(4, 2, device="meta"), ValueError, "`left` is on cpu and `right` on meta"),
    ],
)
def test_bad_factors_are_refused(left: Any, right: Any, error: type[Exception], message: str) -> None:
    """Mistakes are named at construction, not somewhere inside a product."""
    with pytest.raises(error, match=message):
        BilinearForm(left, right)


@pytest.mark.parametrize("function", [symmetry_score, directionality_score])
def test_bad_matrices_are_refused(function: Any) -> None:
    """The dense functions name what they were given."""
    with pytest.raises(TypeError, match="got list"):
        function([[1.0]])
    with pytest.raises(TypeError, match="got dtype torch"):
        function(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="matrix"):
        function(torch.ones(2))


def test_properties_and_repr() -> None:
    """Shape, rank and dtype are readable without computing anything, even on the meta device."""
    form = BilinearForm(torch.empty(2, 3, 10, 4, device="meta"), torch.empty(2, 1, 12, 4, device="meta"))
    assert (form.shape, form.rank, form.is_square) == ((2, 3, 10, 12), 4, False)
    assert repr(form) == "BilinearForm(shape=(2, 3, 10, 12), rank=4, dtype=torch.float32)"


@pytest.mark.parametrize(("rank", "exponent"), [(64, 5), (8, 4)])
def test_channels_of_opposite_scale(rank: int, exponent: int) -> None:
    """
    Channels that are large in one factor and small in the other (a norm's gain, say) leave an ordinary W; its scores
    must not drown in the large channels' sums.
    """
    left, right = draw(768, rank).double(), draw(768, rank, seed=1).double()
    scale = torch.logspace(-exponent, exponent, rank, dtype=torch.float64)
    plain = BilinearForm(left, right).scores()
    for dtype in (torch.float32, torch.float64):
        scores = BilinearForm((left * scale).to(dtype), (right / scale).to(dtype)).scores()
        # fp32 rounds the scaled factors themselves to 6e-8.
        assert scores.symmetry.item() == pytest.approx(plain.symmetry.item(), abs=1e-5)
        assert scores.directionality.item() == pytest.approx(plain.directionality.item(), abs=1e-4)
        assert scores.frobenius_norm.item() == pytest.approx(plain.frobenius_norm.item(), rel=1e-5)
