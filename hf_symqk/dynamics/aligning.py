"""
Which hidden states the queries and keys of a softmax were projected from, token by token, proven by the graph of the
forward pass; and what the forward does to queries and keys in between.

Shape legend: `S` sequences, `H` query heads, `G` key heads, `N`, `M` tokens on the query and the key side, `D` width
of a projection's input, `E` head width.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import AttentionLayer, Part, Projection
from ..attention.projections import weight_of
from ..attention.tapping import ProjectionCall, TappedLogits, Taps


__all__ = ["AlignedLogits", "Relation", "align_logits", "projections_of"]

Relation = Literal["direct", "rotated", "other"]
_RELATIONS: tuple[Relation, ...] = ("direct", "rotated", "other")
# Of the largest entry. fp32 sums over E channels leave 1e-6; half precision rounds each of them.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_HALF = 3e-2


class NoSourceError(ValueError):
    """The queries or keys of a softmax are not those of one token's hidden state each."""


@dataclass(frozen=True)
class _Side:
    """Where the tokens of one side of the logits stand: order of its leading dimensions, and of its input's."""

    hidden: Tensor  # (S, N, D)
    sequences_first: bool
    relation: Relation
    factor: float


class AlignedLogits(NamedTuple):
    """
    Logits whose tokens are known.

    Attributes:
        tapped ([`TappedLogits`]): The logits.
        query_input, key_input (`torch.Tensor`): `(S, N, D)` and `(S, M, D)`, what W_q and W_k read.
        factor (`float`): What `∂ loss / ∂ product` is multiplied by to get `scale · ∂ loss / ∂ logits`.
        scale (`float` or `None`): The forward's own factor from `x W_q W_kᵀ xᵀ` to the logits; `None` where it is not
            the same for all pairs of tokens.
        relation (`str`): `"direct"` if queries and keys are what the projections give, times a constant; `"rotated"`
            if their lengths alone are; else `"other"`.
        arrange (`Callable`): From a tensor of the product's shape to `(S, H, N, M)`.
    """

    tapped: TappedLogits
    query_input: Tensor
    key_input: Tensor
    factor: float
    scale: float | None
    relation: Relation
    arrange: Callable[[Tensor], Tensor]


def projections_of(layer: AttentionLayer) -> dict[Part, nn.Module | nn.Parameter]:
    """
    What reads the hidden states that W_q and W_k of a layer are multiplied by.

    Args:
        layer ([`AttentionLayer`]): The layer.

    Returns:
        `dict[str, torch.nn.Module | torch.nn.Parameter]`: By `"query"` and `"key"`: a linear map, or (where the
        forward reads a parameter) its weight.
    """
    holders: dict[Part, nn.Module | nn.Parameter] = {}
    for part in ("query", "key"):
        first = layer.projection(part).pieces[0]
        held = weight_of(layer.holding, first, first.weight) if first.is_parameter else None
        holders[part] = layer.holding.get_submodule(first.module) if held is None else held
    return holders


def align_logits(layer: AttentionLayer, tapped: list[TappedLogits], taps: Taps) -> list[AlignedLogits]:
    """
    The logits of a layer that are products of its own queries and keys.

    Args:
        layer ([`AttentionLayer`]): The layer.
        tapped (`list[TappedLogits]`): Logits that were made inside its module.
        taps ([`Taps`]): Calls of its projections; the graph of the forward pass still stands.

    Returns:
        `list[AlignedLogits]`: One, or as many as the forward calls the module. Never empty.

    Raises:
        ValueError: if there are none, naming the layer and what stands in the way.
    """
    holders = projections_of(layer)
    reasons: list[str] = []
    aligned: list[AlignedLogits] = []
    for logits in tapped:
        try:
            aligned.append(_align(layer, logits, taps.calls[holders["query"]], taps.calls[holders["key"]]))
        except NoSourceError as error:
            reasons.append(str(error))
    if layer.kind == "self" and not layer.key_source:
        # Products with projected positions may pass as well; the keys of tokens come from what the queries come from.
        alike = [one for one in aligned if torch.equal(one.query_input, one.key_input)]
        aligned = alike or aligned
    if aligned:
        return aligned
    if not tapped:
        reasons = ["the forward pass ran no softmax over products of its queries and keys"]
    raise ValueError(
        f"{layer.name!r} ({type(layer.module).__name__}) has no update of W_qk: {'; '.join(dict.fromkeys(reasons))}. "
        "Choose other layers with `layers`, if there are any."
    )


def _align(
    layer: AttentionLayer, tapped: TappedLogits, queries: list[ProjectionCall], keys: list[ProjectionCall]
) -> AlignedLogits:
    heads = layer.heads.num_attention_heads
    query = _side(layer, "query", tapped.logits.query, queries)
    key = _side(layer, "key", tapped.logits.key, keys)
    sequences, tokens = query.hidden.shape[:2]
    others = key.hidden.shape[1]
    shape = tapped.arranged(tapped.product).shape
    if key.hidden.shape[0] != sequences or shape.numel() != sequences * heads * tokens * others:
        raise NoSourceError(
            f"its logits {tuple(shape)} are not those of {heads} heads, {sequences} sequences, {tokens} queries and "
            f"{others} keys"
        )

    def arrange(gradient: Tensor) -> Tensor:
        leading = (sequences, heads) if query.sequences_first else (heads, sequences)
        arranged = tapped.arranged(gradient).reshape(*leading, tokens, others)
        return arranged if query.sequences_first else arranged.transpose(0, 1)

    factor = tapped.factor * query.factor * key.factor
    on_logits = _factor_of_logits(tapped)
    relation = max(query.relation, key.relation, key=_RELATIONS.index)
    scale = None if on_logits is None else factor * on_logits
    return AlignedLogits(tapped, query.hidden, key.hidden, factor, scale, relation, arrange)


def _factor_of_logits(tapped: TappedLogits) -> float | None:
    """What the forward multiplies the product by on its way into the softmax; `None` if not by one number."""
    ones = torch.ones_like(tapped.taken)
    (slope,) = torch.autograd.grad(tapped.taken, tapped.product, ones, retain_graph=True)
    slopes = slope[slope != 0].to(torch.promote_types(slope.dtype, torch.float32))  # 0 where a mask stands
    if not slopes.numel():
        return None
    low, high = float(slopes.min()), float(slopes.max())
    return high if high - low <= _tolerance(tapped.product) * abs(high) else None


def _side(layer: AttentionLayer, part: Part, caught: Tensor, calls: list[ProjectionCall]) -> _Side:
    """
    The input of one side. The last call of the projection that the caught tensor depends on made it: earlier calls
    reach it through the layers between.
    """
    seed = torch.Generator().manual_seed(0)
    width = layer.input_width(part)
    if not caught.isfinite().all():
        raise NoSourceError(f"its {'queries' if part == 'query' else 'keys'} are not all finite numbers")
    reason = f"its {part} projection does not reach the softmax"
    for call in reversed(calls):
        hidden = call.input
        if not caught.requires_grad or not _depends(caught, hidden):
            continue
        channel = -1 if hidden.shape[-1] == width else 1
        rows = hidden.movedim(channel, -1).flatten(0, -2)
        tokens = caught.shape[-2]
        sequences, rest = divmod(len(rows), tokens)
        if rest or caught.shape[:-2].numel() % max(1, sequences):
            raise NoSourceError(
                f"{len(rows)} hidden states give {'queries' if part == 'query' else 'keys'} of shape "
                f"{tuple(caught.shape)}, not one a token"
            )
        for sequences_first, batch_first in ((True, True), (True, False), (False, True), (False, False)):
            order = _Order(sequences, tokens, sequences_first, batch_first)
            if order.fits(caught, hidden, channel, seed):
                relation, factor = _relation(layer, part, caught, call, order)
                return _Side(order.of_rows(rows.detach()), sequences_first, relation, factor)
        reason = f"other tokens reach its {'queries' if part == 'query' else 'keys'} before they meet"
        break
    raise NoSourceError(reason)


def _depends(caught: Tensor, hidden: Tensor) -> bool:
    (slope,) = torch.autograd.grad(
        caught, hidden, torch.ones_like(caught), retain_graph=True, allow_unused=True, materialize_grads=False
    )
    return slope is not None


class _Order(NamedTuple):
    """One reading of the dimensions of caught queries or keys, and of the hidden states that they come from."""

    sequences: int
    tokens: int
    sequences_first: bool  # of the caught tensor: else heads stand first
    batch_first: bool  # of the hidden states: else tokens stand first

    def of_caught(self, caught: Tensor) -> Tensor:
        """`(S, H, N, E)`."""
        if self.sequences_first:
            return caught.reshape(self.sequences, -1, *caught.shape[-2:])
        return caught.reshape(-1, self.sequences, *caught.shape[-2:]).transpose(0, 1)

    def of_rows(self, rows: Tensor) -> Tensor:
        """`(S, N, …)` of `(S · N, …)`."""
        if self.batch_first:
            return rows.unflatten(0, (self.sequences, self.tokens))
        return rows.unflatten(0, (self.tokens, self.sequences)).transpose(0, 1)

    def fits(self, caught: Tensor, hidden: Tensor, channel: int, seed: torch.Generator) -> bool:
        """Whether each hidden state reaches the caught vectors of its own token and no other, by the graph."""
        for chosen in self._choices(seed):
            marked = self.of_caught(torch.zeros_like(caught))
            places = chosen.to(caught.device)[:, None, :, None].expand(marked.shape)
            noise = torch.randn(marked.shape, generator=seed).to(caught)
            cotangent = torch.where(places, noise, 0)
            if not self.sequences_first:
                cotangent = cotangent.transpose(0, 1)
            (slope,) = torch.autograd.grad(caught, hidden, cotangent.reshape(caught.shape), retain_graph=True)
            reached = self.of_rows((slope.movedim(channel, -1).flatten(0, -2) != 0).any(-1))
            if not torch.equal(reached.cpu(), chosen):
                return False
        return True

    def _choices(self, seed: torch.Generator) -> Iterator[Tensor]:
        """Two sets of tokens, each the complement of the other, that no other order of the tokens gives."""
        shape = (self.sequences, self.tokens)
        chosen = torch.ones(shape, dtype=torch.bool)
        for _ in range(100):
            chosen = torch.rand(shape, generator=seed) < 0.5
            told_apart = min(shape) == 1 or not torch.equal(chosen.flatten(), chosen.T.flatten())
            if 0 < chosen.sum() < chosen.numel() and told_apart:
                yield ~chosen
                break
        yield chosen


def _relation(
    layer: AttentionLayer, part: Part, caught: Tensor, call: ProjectionCall, order: _Order
) -> tuple[Relation, float]:
    """How caught queries or keys differ from what the projection gave, and by which factor."""
    projection = layer.projection(part)
    if not isinstance(projection, Projection) or projection.batch_norm is not None:
        return "other", 1.0
    rows = call.output.shape[-1]
    channel = -1
    if not projection.rows.fits(rows, layer.heads):
        channel, rows = 1, call.output.shape[1]
        if not projection.rows.fits(rows, layer.heads):
            return "other", 1.0
    output = call.output.detach().movedim(channel, 0).flatten(1)  # (O, S · N)
    given = order.of_rows(projection.rows.select(output, layer.heads).movedim(-1, 0)).transpose(1, 2)  # (S, H, N, E)
    met = order.of_caught(caught.detach())
    if met.shape[1] != given.shape[1] and met.shape[1] % given.shape[1] == 0:
        given = given.repeat_interleave(met.shape[1] // given.shape[1], 1)
    if met.shape != given.shape:
        return "other", 1.0
    met, given = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (met, given))
    tolerance = _tolerance(caught)
    square = given.square().sum()
    factor = float((met * given).sum() / square) if square > 0 else math.nan
    if (met - factor * given).abs().max() <= tolerance * met.abs().max():
        return "direct", factor
    lengths, before = (torch.linalg.vector_norm(tensor, dim=-1) for tensor in (met, given))
    factor = float((lengths * before).sum() / before.square().sum())
    if (lengths - factor * before).abs().max() <= tolerance * lengths.max():
        return "rotated", factor
    return "other", 1.0


def _tolerance(tensor: Tensor) -> float:
    return _TOLERANCE.get(tensor.dtype, _TOLERANCE_HALF)
