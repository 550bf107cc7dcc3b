"""
The schemes that come with the package: `W_k = (σ_k/σ_q) W_q A` with a small matrix A, and two controls.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `r = H / G`, `E` head width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .logit_scale import logit_scale
from .registry import LayerDraw, LayerRequest, precise, register_qk_init
from .turning import balanced_signs, planes, quarter_turn, turn_to


__all__: list[str] = []


# --- what schemes ask of a layer ----------------------------------------------------------------------------------


def _some_form(request: LayerRequest) -> None:
    _own_keys(request)
    if not any(request.options[name] for name in ("alpha", "beta")):
        raise ValueError("with alpha = beta = 0 its form would be zero.")


def _one_stream(request: LayerRequest) -> None:
    query, key = (request.layer.input_width(part) for part in ("query", "key"))
    if query != key:
        raise ValueError(f"its queries are made from {query} channels and its keys from {key}.")


def _own_keys(request: LayerRequest) -> None:
    _one_stream(request)
    heads = request.heads
    if heads.num_key_value_groups > 1:
        raise ValueError(
            f"it is a property of each head, which {heads.num_attention_heads} query heads that share "
            f"{heads.num_key_value_heads} key heads cannot have."
        )


def _symmetry_in_reach(request: LayerRequest) -> None:
    _one_stream(request)
    heads, symmetry = request.heads, request.symmetry
    if symmetry == 1:
        return
    if request.target == "head" and symmetry != -1 and heads.num_key_value_groups > 1:
        raise ValueError(
            f"{heads.num_attention_heads} query heads share {heads.num_key_value_heads} key heads, so that no choice "
            f"of keys gives each head a symmetry of {symmetry:g}. Aim at the layer's: "
            f"`SymmetricInit(symmetry={symmetry:g}, target='layer')`."
        )
    planes(request.channel_pairs)


def _signs_in_reach(request: LayerRequest) -> None:
    _one_stream(request)
    balanced_signs(request.channel_pairs)


# --- one matrix A per head ----------------------------------------------------------------------------------------


def _write_keys(draw: LayerDraw, act: Callable[[Tensor], Tensor]) -> None:
    """
    `W_k = (σ_k/σ_q) W_q A`. A bias is mapped alike, so that what A gives the form it gives to queries and keys with
    their biases as well.
    """
    for source, target in draw.sources():
        source = act(source)
        target.copy_(source if draw.ratio == 1 else precise(source) * draw.ratio)


def _write_symmetric(draw: LayerDraw) -> None:
    if draw.symmetry == 1:
        _write_keys(draw, lambda source: source)
        return
    pairs = planes(draw.channel_pairs)
    weight = precise(next(draw.sources())[0])
    turned = quarter_turn(weight, pairs)
    if draw.target == "layer":
        # Heads side by side are one wide head.
        cosine, sine = turn_to(draw.symmetry, weight.flatten(0, 1), turned.flatten(0, 1))
    else:
        cosine, sine = (value.view(-1, 1, 1) for value in turn_to(draw.symmetry, weight, turned))

    def turn(source: Tensor) -> Tensor:
        source = precise(source)
        return cosine.to(source) * source + sine.to(source) * quarter_turn(source, pairs)

    _write_keys(draw, turn)


def _write_indefinite(draw: LayerDraw) -> None:
    signs = balanced_signs(draw.channel_pairs)

    def act(source: Tensor) -> Tensor:
        return source * torch.tensor(signs, dtype=source.dtype, device=source.device).unsqueeze(-1)

    _write_keys(draw, act)


def _write_negative(draw: LayerDraw) -> None:
    _write_keys(draw, lambda source: -source)


# --- controls -----------------------------------------------------------------------------------------------------


def _write_spectrum(draw: LayerDraw) -> None:
    """
    With `W_q = U Σ V^T`, `W_k = U R Σ V^T`. In place of U any orthonormal basis Q of the same columns does, and is
    cheaper to have: `W_q = Q B`, `W_k = Q R B`, where R, turned into the basis U, is again a random rotation.
    """
    weight = draw.query.weight
    # fp64 does not exist on every accelerator.
    basis, rest = torch.linalg.qr(weight.to("cpu" if weight.device.type == "mps" else weight.device).double().mT)
    rotation = _random_rotations(weight.shape[0], basis.shape[-1], draw.generator).to(basis)
    draw.key.weight.copy_((basis @ rotation @ rest).mT * draw.ratio)
    if draw.query.bias is not None and draw.key.bias is not None:
        draw.key.bias.copy_(precise(draw.query.bias) * draw.ratio)


def _random_rotations(number: int, size: int, generator: torch.Generator) -> Tensor:
    """`(number, size, size)` in fp64: uniform over the orthogonal matrices of determinant 1."""
    draw = torch.randn(number, size, size, generator=generator, device="cpu", dtype=torch.float64)
    basis, rest = torch.linalg.qr(draw)
    rotation = basis * rest.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # else QR's own signs would not be uniform
    rotation[..., 0] *= torch.linalg.det(rotation).sign().unsqueeze(-1)
    return rotation


def _write_mimetic(draw: LayerDraw) -> None:
    """
    Each head's form times what the module multiplies logits by is the best approximation of rank E of
    `(α Z + β I) / √E`, halved between Q and K so that K keeps its scale relative to Q. Biases stay as they are drawn.
    """
    number, head_dim, width = draw.query.weight.shape
    scale = 1 / (logit_scale(draw.layer) * math.sqrt(head_dim))
    ratio = draw.ratio or 1.0
    alpha, beta = draw.options["alpha"], draw.options["beta"]
    for head in range(number):  # one at a time: D × D each
        # Device and dtype are said: defaults are whatever the model is built under.
        form = torch.randn(width, width, generator=draw.generator, device="cpu", dtype=torch.float32)
        form *= alpha / math.sqrt(width)
        form.diagonal().add_(beta)
        left, values, right = torch.linalg.svd(form.to(draw.query.weight.device))
        root = (values[:head_dim] * scale).sqrt()
        for tensor, vectors, share in (
            (draw.query.weight, left.mT, ratio**-0.5),
            (draw.key.weight, right, ratio**0.5),
        ):
            tensor[head].zero_()  # a head wider than the model has channels to spare
            tensor[head, : len(root)] = (vectors[:head_dim] * root.unsqueeze(-1) * share).to(tensor)


register_qk_init(name="symmetric", write=_write_symmetric, takes_symmetry=True, check=_symmetry_in_reach)
register_qk_init(name="independent", write=None)
register_qk_init(name="indefinite", write=_write_indefinite, check=_signs_in_reach)
register_qk_init(name="negative", write=_write_negative, check=_one_stream)
register_qk_init(name="spectrum", write=_write_spectrum, check=_own_keys)
register_qk_init(
    name="mimetic",
    write=_write_mimetic,
    rewrites=("query", "key"),
    options={"alpha": 0.7, "beta": 0.7},
    check=_some_form,
)
