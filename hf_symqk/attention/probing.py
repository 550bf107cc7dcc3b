"""
W_q and W_k from the forward pass itself: an attention module is fed basis vectors, and the query and key tensors
that reach its softmax are caught. What comes back is the truth whatever the layout; the tests hold the table to it,
and `score_model(..., probe=True)` serves models that the table does not know.

Shape legend: `D` width of the input, `H` query heads, `G` key heads, `E` head width, `N`, `M` tokens, `S` slots: the
places of an input that hold one vector each.

What is replaced while probing: positions (all tokens stand at position 0, where a rotation is the identity), norms
inside the module (by their learned gain, since the rest of a norm is not linear) and caches (by none).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .calling import Call, Rerun, capture_calls
from .catching import Logits


__all__ = [
    "Call",
    "NoLogitsError",
    "NoStreamsError",
    "ProbedAttention",
    "ProbingError",
    "capture_calls",
    "probe_attention",
]

_TOLERANCE = 1e-4  # of the largest response; fp32 sums over D terms leave about 1e-6


class ProbingError(ValueError):
    """A module's forward gives no linear map from one token's hidden state to its queries and keys."""


class NoLogitsError(ProbingError):
    """No softmax of a module takes products of queries and keys that both depend on hidden states."""


class NoStreamsError(ProbingError):
    """A module takes no hidden states as arguments of its own, so that there is nothing to replace."""


class ProbedAttention(NamedTuple):
    """
    What the forward of an attention module does with hidden states before one softmax.

    Attributes:
        query (`torch.Tensor`): W_q `(H, E, D)`, with whatever scale the forward puts on the queries.
        key (`torch.Tensor`): W_k `(G, E, D)` of the distinct key heads; query head h meets key head `h // (H / G)`.
        query_bias (`torch.Tensor`): `(H, E)`, response to the zero vector.
        key_bias (`torch.Tensor`): `(G, E)`.
        scaling (`float` or `None`): Factor that the attention function was told to put on the logits, if it was told.
        route (`str`): Where the tensors were caught: `"interface"`, `"sdpa"` or `"matmul"`.
        kind (`str`): `"self"` if queries and keys come from one argument of the module, else `"cross"`.
        slots (`str`): `"all"` if every token of the input was checked, `"first"` if one token alone.
        place (`str`): Path, in the module, of the innermost module that ran when the product was made.
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor
    key_bias: Tensor
    scaling: float | None
    route: str
    kind: Literal["self", "cross"]
    slots: str
    place: str

    @property
    def num_key_value_heads(self) -> int:
        """Number of distinct key heads."""
        return self.key.shape[0]

    @property
    def is_handed_over(self) -> bool:
        """Whether queries and keys are channels of the module's arguments: what projects them stands around it."""
        return all(bool((weight != 0).sum(-1).le(1).all()) for weight in (self.query, self.key))


# --- the response to basis vectors -----------------------------------------------------------------------------------


Side = Literal["query", "key"]
_SIDES: tuple[Side, Side] = ("query", "key")


class _Response(NamedTuple):
    weight: Tensor  # (heads, E, D)
    bias: Tensor  # (heads, E)
    places: Tensor | None  # (heads, …): index of each in the caught tensor; `None` where they stand in its own order


def probe_attention(module: nn.Module, call: Call, *, width: int | None = None) -> list[ProbedAttention]:
    """
    W_q and W_k of one attention module by its response to basis vectors.

    Args:
        module (`torch.nn.Module`):
            The attention module. It is run again with the arguments of `call`, hidden states replaced.
        call ([`Call`]):
            Arguments as the model around it gives them (see [`capture_calls`]).
        width (`int`, *optional*):
            Width `D` of the hidden states, where it is known: tells them from other arguments. Where it is not,
            channels are looked for in the last dimension, then in the second.

    Returns:
        `list[ProbedAttention]`: One for each softmax whose queries and keys both depend on hidden states. Logits
        of positions (relative-position keys, biases) are none.

    Raises:
        NoStreamsError: if the call has no hidden states among its arguments.
        NoLogitsError: if there is no such softmax.
        ProbingError: if a response is not linear in the token's own hidden state.
    """
    with _evaluating(module):
        rerun = Rerun(module, call, width)
        if not rerun.streams:
            raise NoStreamsError(f"{type(module).__name__} takes no hidden states as an argument.")
        try:
            return _probe(rerun, width, 0)
        except ProbingError as error:
            if width is not None or not any(2 < rerun.neutral[names[0]].ndim < 5 for names in rerun.streams):
                raise
            try:
                return _probe(rerun, width, 1)
            except Exception:
                raise error from None  # what was said of the usual order of dimensions says more


def _probe(rerun: Rerun, width: int | None, channel: int) -> list[ProbedAttention]:
    module = rerun.module
    paths = {part: path for path, part in module.named_modules()}
    streams = [_Stream(rerun, names, width, channel) for names in rerun.streams]
    results: list[ProbedAttention] = []
    for index, sides in sorted(_dependent(module, streams).items()):
        if len(sides) < 2:
            continue
        for side, (main, *others) in sides.items():
            for other in others:
                _require_sum(streams[main], streams[other], index, side)
        readers, read = (streams[sides[side][0]] for side in _SIDES)
        query, key = _respond(readers, read, index)
        caught = readers.zero[index]
        results.append(
            ProbedAttention(
                *_distinct(query, key),
                caught.scaling,
                caught.route,
                "self" if readers is read else "cross",
                "all" if query.places is None else "first",
                "" if caught.module is None else paths.get(caught.module, ""),
            )
        )
    if not results:
        raise NoLogitsError(
            f"No softmax of {type(module).__name__} has queries and keys that depend on hidden states."
        )
    return results


def _dependent(module: nn.Module, streams: list["_Stream"]) -> dict[int, dict[Side, list[int]]]:
    """By number of the softmax: the streams that its queries depend on, and those that its keys do."""
    found: dict[int, dict[Side, list[int]]] = {}
    for number, stream in enumerate(streams):
        if len(stream.zero) != len(stream.moved):
            raise ProbingError(f"{type(module).__name__} takes another path for other hidden states.")
        for index, (before, after) in enumerate(zip(stream.zero, stream.moved, strict=True)):
            for side in _SIDES:
                if _differ(getattr(before, side), getattr(after, side)):
                    found.setdefault(index, {}).setdefault(side, []).append(number)
    return found


def _differ(before: Tensor, after: Tensor) -> bool:
    return before.shape != after.shape or bool((before - after).abs().max() > 1e-6 * after.abs().max())


def _require_sum(main: "_Stream", other: "_Stream", index: int, side: Side) -> None:
    """Where a second argument reaches queries or keys too, it has to be added: else W depends on what it holds."""
    with_other = {other.names[0]: other.arranged(other.random)}
    moved, zero = (main.rerun({main.names[0]: main.arranged(x), **with_other}) for x in (main.random, main.none))
    alone = getattr(main.moved[index], side) - getattr(main.zero[index], side)
    beside = getattr(moved[index], side) - getattr(zero[index], side)
    if alone.shape != beside.shape or (alone - beside).abs().max() > _TOLERANCE * alone.abs().max():
        raise ProbingError(
            f"{type(main.rerun.module).__name__}, {side}: the response to {main.names[0]!r} is not linear, since it "
            f"depends on {other.names[0]!r} as well"
        )


class _Stream:
    """One argument of an attention module, replaced by vectors of our choice. All responses are kept for reading."""

    def __init__(self, rerun: Rerun, names: list[str], width: int | None, channel: int = 0) -> None:
        self.rerun, self.names = rerun, names
        original: Tensor = rerun.neutral[names[0]]
        # Channels stand last, or (convolutions) second.
        self.channel = channel if channel and 2 < original.ndim < 5 else original.ndim - 1
        if width is not None and original.shape[-1] != width:
            self.channel = 1 if original.ndim == 4 and original.shape[1] == width else original.shape.index(width)
        self.shape = original.movedim(self.channel, -1).shape
        self.slots, self.width = self.shape[:-1].numel(), self.shape[-1]
        self.example = original.new_empty(0)
        generator = torch.Generator().manual_seed(0)
        self.random = torch.randn(self.slots, self.width, generator=generator)
        self.none = torch.zeros_like(self.random)
        self.zero, self.moved = self.run(self.none), self.run(self.random)
        self._alone: dict[int, _Alone] = {}

    def arranged(self, vectors: Tensor) -> Tensor:
        """The argument with one vector in every slot `(S, D)`."""
        return vectors.to(self.example).view(self.shape).movedim(-1, self.channel)

    def run(self, vectors: Tensor) -> list[Logits]:
        """Logits for one vector in every slot `(S, D)`."""
        return self.rerun({self.names[0]: self.arranged(vectors)})

    @functools.cached_property
    def doubled(self) -> list[Logits]:
        return self.run(2 * self.random)

    @functools.cached_property
    def everywhere(self) -> list[list[Logits]]:
        """Every slot carries another basis vector, as many runs as it takes."""
        blocks = torch.eye(self.width).split(self.slots)
        padding = [torch.zeros(self.slots - len(block), self.width) for block in blocks]
        return [self.run(torch.cat(pair)) for pair in zip(blocks, padding, strict=True)]

    def alone(self, slot: int) -> "_Alone":
        """One slot alone carries vectors."""
        if slot not in self._alone:
            self._alone[slot] = _Alone(self, slot)
        return self._alone[slot]

    def respond(self, index: int, side: Side) -> _Response:
        """
        Response of one side of one softmax, read at every token.

        Raises:
            ProbingError: if it is not linear.
        """

        def read(logits: list[Logits]) -> Tensor:  # (S, heads, E)
            return _by_slot(_aligned(logits[index], side), self.slots)

        bias = read(self.zero)
        columns = torch.cat([read(logits) - bias for logits in self.everywhere])[: self.width]
        weight = columns.permute(1, 2, 0)
        for factor, logits in ((1.0, self.moved), (2.0, self.doubled)):
            predicted = factor * torch.einsum("sd,hed->she", self.random.to(weight), weight)
            _check(read(logits) - bias, predicted, side, f"at {self.slots} tokens")
        return _Response(weight, bias.mean(0), None)


class _Alone:
    """One slot of a stream alone carries vectors, so that positions and orders of tokens do not matter."""

    def __init__(self, stream: _Stream, slot: int) -> None:
        self.stream, self.slot = stream, slot
        self.where = "at the first token" if slot == 0 else f"at token {slot}"

    def _run(self, vector: Tensor, others: Tensor | None = None) -> list[Logits]:
        values = self.stream.none.clone() if others is None else others.clone()
        values[self.slot] = vector
        return self.stream.run(values)

    @functools.cached_property
    def units(self) -> list[list[Logits]]:
        return [self._run(unit) for unit in torch.eye(self.stream.width)]

    @functools.cached_property
    def moved(self) -> list[Logits]:
        return self._run(self.stream.random[self.slot])

    @functools.cached_property
    def checks(self) -> list[tuple[float, list[Logits], list[Logits]]]:
        """The slot's vector of the random input, once and twice, alone and among others; and without it."""
        vector, nothing = self.stream.random[self.slot], self.stream.none[0]
        return [
            (factor, self._run(factor * vector, others), self._run(nothing, others))
            for factor in (1.0, 2.0)
            for others in (None, self.stream.random)
        ]

    def reaches(self, index: int, side: Side) -> tuple[Tensor, ...]:
        """Index of the queries or keys that the slot reaches."""
        moved = _aligned(self.moved[index], side) - _aligned(self.stream.zero[index], side)
        return (moved.abs().amax(-1) > 1e-6 * moved.abs().max()).nonzero(as_tuple=True)

    def respond(self, index: int, side: Side) -> _Response:
        """
        Response of one side of one softmax.

        Raises:
            ProbingError: if it is not linear in this slot alone.
        """

        def read(logits: list[Logits]) -> Tensor:
            return _aligned(logits[index], side)

        touched = self.reaches(index, side)
        zero = read(self.stream.zero)
        weight = torch.stack([(read(logits) - zero)[touched] for logits in self.units], -1)
        for factor, present, absent in self.checks:
            predicted = factor * weight @ self.stream.random[self.slot].to(weight)
            _check((read(present) - read(absent))[touched], predicted, side, self.where)
            if (read(absent) - zero)[touched].abs().max() > _TOLERANCE * predicted.abs().max():
                raise ProbingError(f"{side}: other tokens reach the same place")
        return _Response(weight, zero[touched], torch.stack(touched, -1))


# --- queries and keys that meet --------------------------------------------------------------------------------------


def _respond(first: _Stream, second: _Stream, index: int) -> tuple[_Response, _Response]:
    """Queries and keys, head by head those that meet in the product: of all tokens, else of one token alone."""
    name = type(first.rerun.module).__name__
    for stream, side in ((first, "query"), (second, "key")):
        if not torch.isfinite(getattr(stream.zero[index], side)).all():
            raise ProbingError(f"The {side} of {name} is not finite.")
    reasons: list[str] = []
    try:
        query, key = first.respond(index, "query"), second.respond(index, "key")
        if query.weight.shape[0] == key.weight.shape[0]:
            return query, key
        reasons.append("queries and keys have different heads")
    except ProbingError as error:
        reasons.append(str(error))
    try:
        slot = _meeting_slot(first, second, index)
        return _meeting(first.alone(slot).respond(index, "query"), second.alone(slot).respond(index, "key"))
    except ProbingError as error:
        reasons.append(str(error))
    raise ProbingError(f"{name}, " + "; ".join(dict.fromkeys(reasons)))


def _meeting_slot(first: _Stream, second: _Stream, index: int) -> int:
    """A token whose query meets its own key in the product: the first, or one of another part of the input."""
    tokens = first.shape[-2] if len(first.shape) > 2 else first.slots
    shared = min(first.slots, second.slots)
    for slot in dict.fromkeys((0, tokens - 1, tokens // 2, first.slots - 1)):
        if slot < shared:
            places = (s.alone(slot).reaches(index, side) for s, side in zip((first, second), _SIDES, strict=True))
            query, key = ({tuple(row[:-1]) for row in torch.stack(p, -1).tolist()} for p in places)
            if query & key:
                return slot
    raise ProbingError("no token's query was seen to meet its own key")


def _meeting(query: _Response, key: _Response) -> tuple[_Response, _Response]:
    """
    For each query head the key that stands in the same product. A token may be laid down in several places (windows
    that overlap), of which those count where its own query and its own key meet.
    """
    assert query.places is not None, "read at one token"
    assert key.places is not None, "read at one token"
    keys: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(key.places[:, :-1].tolist()):
        keys.setdefault(tuple(place), []).append(number)
    pairs: list[tuple[int, int]] = []
    for number, place in enumerate(query.places[:, :-1].tolist()):
        for other in keys.get(tuple(place), ()):
            pair = number, other
            if not any(_alike(query.weight, number, q) and _alike(key.weight, other, k) for q, k in pairs):
                pairs.append(pair)
    # One head has one key; several are another reading of the token (blocks of another kind).
    if len({number for number, _ in pairs}) < len(pairs):
        raise ProbingError("a token's query meets several keys of that token")
    queries, others = (list(numbers) for numbers in zip(*pairs, strict=True))
    return (
        _Response(query.weight[queries], query.bias[queries], query.places[queries]),
        _Response(key.weight[others], key.bias[others], key.places[others]),
    )


def _alike(weight: Tensor, one: int, other: int) -> bool:
    return one == other or bool((weight[one] - weight[other]).abs().max() <= 1e-5 * weight[one].abs().max())


def _distinct(query: _Response, key: _Response) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_q, W_k, and their biases; of keys that are repeated for the queries of a group, one."""
    heads = key.weight.shape[0]
    for repeats in (r for r in range(heads, 1, -1) if heads % r == 0):
        blocks = key.weight.unflatten(0, (heads // repeats, repeats))
        if torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            return query.weight, key.weight[::repeats], query.bias, key.bias[::repeats]
    return query.weight, key.weight, query.bias, key.bias


def _aligned(logits: Logits, side: Side) -> Tensor:
    """Queries or keys with the leading dimensions of the logits, so that those that meet have the same index there."""
    query, key = logits.query, logits.key
    if query.ndim > 2 and key.ndim > 2:
        heads, groups = query.shape[-3], key.shape[-3]
        if 1 < groups < heads and heads % groups == 0:
            key = key.repeat_interleave(heads // groups, -3)
    try:
        leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    except RuntimeError as error:
        raise ProbingError(f"queries {tuple(query.shape)} and keys {tuple(key.shape)} do not meet") from error
    tensor = query if side == "query" else key
    return tensor.expand(*leading, *tensor.shape[-2:])


def _check(response: Tensor, predicted: Tensor, side: Side, where: str) -> None:
    scale = predicted.abs().max()
    error = (response - predicted).abs().max()
    if not torch.isfinite(response).all() or not scale > 0 or not error <= _TOLERANCE * scale:
        raise ProbingError(
            f"{side}: the response is not linear {where}: off by {float(error):.2g} of {float(scale):.2g}"
        )


def _by_slot(tensor: Tensor, slots: int) -> Tensor:
    """`(S, heads, E)` of queries or keys `(B, heads, N, E)` or `(B · heads, N, E)`."""
    tokens = tensor.shape[-2]
    if slots % tokens:
        raise ProbingError(f"{slots} tokens give queries or keys of shape {tuple(tensor.shape)}")
    batch = slots // tokens
    leading = tensor.shape[:-2].numel()
    if leading % batch or (tensor.ndim > 3 and tensor.shape[0] != batch):
        raise ProbingError(f"{slots} tokens give queries or keys of shape {tuple(tensor.shape)}")
    return tensor.reshape(batch, leading // batch, tokens, -1).transpose(1, 2).flatten(0, 1)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
