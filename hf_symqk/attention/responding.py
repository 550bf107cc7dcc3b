"""
Basis vectors in the place of one argument of an attention module, and what queries and keys make of them.

Shape legend: `D` width of the input, `E` head width, `N` tokens, `B` batch, `S` slots: the places of an input that
hold one vector each.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .calling import Rerun
from .catching import Logits


__all__ = ["SIDES", "TOLERANCE", "ProbingError", "Response", "Side", "Stream", "differ"]

TOLERANCE = 1e-4  # of the largest response; fp32 sums over D terms leave about 1e-6
_TOKENS_AT_ONCE = 2048


class ProbingError(ValueError):
    """A module's forward gives no linear map from one token's hidden state to its queries and keys."""


Side = Literal["query", "key"]
SIDES: tuple[Side, Side] = ("query", "key")


class Response(NamedTuple):
    weight: Tensor  # (heads, E, D)
    bias: Tensor  # (heads, E)
    places: Tensor | None  # (heads, …): index of each in the caught tensor; `None` where they stand in its own order


class Stream:
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
        # How many inputs may run in one batch: a dimension of batches stands first, if there is one.
        self._at_once = max(1, _TOKENS_AT_ONCE // self.slots) if original.ndim > 2 else 1

    def arranged(self, vectors: Tensor) -> Tensor:
        """The argument with one vector in every slot `(S, D)`."""
        return vectors.to(self.example).view(self.shape).movedim(-1, self.channel)

    def run(self, vectors: Tensor) -> list[Logits]:
        """Logits for one vector in every slot `(S, D)`."""
        return self.rerun({self.names[0]: self.arranged(vectors)})

    def run_each(self, inputs: Iterable[Tensor]) -> Iterator[list[Logits]]:
        """[`run`] of one input after the other, several in one batch wherever that gives the same."""
        inputs = iter(inputs)
        while chunk := list(itertools.islice(inputs, self._at_once)):
            together = self._together(chunk) if len(chunk) > 1 else None
            if together is None:
                self._at_once = 1
                yield from (self.run(vectors) for vectors in chunk)
            else:
                yield from together

    def _together(self, chunk: list[Tensor]) -> list[list[Logits]] | None:
        hidden = torch.cat([self.arranged(vectors) for vectors in chunk])
        try:
            caught = self.rerun({self.names[0]: hidden}, copies=len(chunk))
        except Exception:  # other arguments may fit one batch alone
            return None
        alone = self.run(chunk[0])
        if len(caught) != len(alone):
            return None
        results: list[list[Logits]] = [[] for _ in chunk]
        for one, expected in zip(caught, alone, strict=True):
            queries, keys = (_copies(getattr(one, side), getattr(expected, side), len(chunk)) for side in SIDES)
            if queries is None or keys is None:
                return None
            for result, query, key in zip(results, queries, keys, strict=True):
                result.append(expected._replace(query=query, key=key))
        return results

    @functools.cached_property
    def doubled(self) -> list[Logits]:
        return self.run(2 * self.random)

    @functools.cached_property
    def everywhere(self) -> list[list[Logits]]:
        """Every slot carries another basis vector, as many runs as it takes."""
        blocks = torch.eye(self.width).split(self.slots)
        padding = [torch.zeros(self.slots - len(block), self.width) for block in blocks]
        return list(self.run_each(torch.cat(pair) for pair in zip(blocks, padding, strict=True)))

    def alone(self, slot: int) -> "_Alone":
        """One slot alone carries vectors."""
        if slot not in self._alone:
            self._alone[slot] = _Alone(self, slot)
        return self._alone[slot]

    def respond(self, index: int, side: Side) -> Response:
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
        return Response(weight, bias.mean(0), None)


class _Alone:
    """One slot of a stream alone carries vectors, so that positions and orders of tokens do not matter."""

    def __init__(self, stream: Stream, slot: int) -> None:
        self.stream, self.slot = stream, slot
        self.where = "at the first token" if slot == 0 else f"at token {slot}"

    def _filled(self, vector: Tensor, others: Tensor | None = None) -> Tensor:
        values = self.stream.none.clone() if others is None else others.clone()
        values[self.slot] = vector
        return values

    def _run(self, vector: Tensor, others: Tensor | None = None) -> list[Logits]:
        return self.stream.run(self._filled(vector, others))

    @functools.cached_property
    def columns(self) -> dict[tuple[int, Side], Tensor]:
        """By softmax and side: the response `(places, E, D)` to basis vectors, of the places that the slot reaches."""
        keys: list[tuple[int, Side]] = [(index, side) for index in range(len(self.moved)) for side in SIDES]
        touched = {key: self.reaches(*key) for key in keys if self.is_reached(*key)}
        zero = {(index, side): _aligned(self.stream.zero[index], side)[at] for (index, side), at in touched.items()}
        columns: dict[tuple[int, Side], list[Tensor]] = {key: [] for key in touched}
        # One run after the other is read and forgotten: all of them would not fit into memory.
        for logits in self.stream.run_each(self._filled(unit) for unit in torch.eye(self.stream.width)):
            for (index, side), at in touched.items():
                columns[index, side].append(_aligned(logits[index], side)[at] - zero[index, side])
        return {key: torch.stack(columns[key], -1) for key in touched}

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

    def is_reached(self, index: int, side: Side) -> bool:
        """Whether the slot reaches any of the queries or keys."""
        return differ(getattr(self.stream.zero[index], side), getattr(self.moved[index], side))

    def reaches(self, index: int, side: Side) -> tuple[Tensor, ...]:
        """Index of the queries or keys that the slot reaches."""
        moved = _aligned(self.moved[index], side) - _aligned(self.stream.zero[index], side)
        return (moved.abs().amax(-1) > 1e-6 * moved.abs().max()).nonzero(as_tuple=True)

    def respond(self, index: int, side: Side) -> Response:
        """
        Response of one side of one softmax.

        Raises:
            ProbingError: if it is not linear in this slot alone.
        """

        def read(logits: list[Logits]) -> Tensor:
            return _aligned(logits[index], side)

        touched = self.reaches(index, side)
        zero = read(self.stream.zero)
        weight = self.columns[index, side]
        for factor, present, absent in self.checks:
            predicted = factor * weight @ self.stream.random[self.slot].to(weight)
            _check((read(present) - read(absent))[touched], predicted, side, self.where)
            if (read(absent) - zero)[touched].abs().max() > TOLERANCE * predicted.abs().max():
                raise ProbingError(f"{side}: other tokens reach the same place")
        return Response(weight, zero[touched], torch.stack(touched, -1))


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


def _copies(together: Tensor, alone: Tensor, number: int) -> Iterable[Tensor] | None:
    """Queries or keys of a batch of inputs, one by one; `None` if the first is not what it was alone."""
    if together.shape == alone.shape:
        parts: tuple[Tensor, ...] = (together,) * number  # of no token
    elif together.shape == (number * alone.shape[0], *alone.shape[1:]):
        parts = together.split(alone.shape[0])
    else:
        return None
    return None if (parts[0] - alone).abs().max() > TOLERANCE * alone.abs().max() else parts


def _check(response: Tensor, predicted: Tensor, side: Side, where: str) -> None:
    scale = predicted.abs().max()
    error = (response - predicted).abs().max()
    if not torch.isfinite(response).all() or not scale > 0 or not error <= TOLERANCE * scale:
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


def differ(before: Tensor, after: Tensor) -> bool:
    return before.shape != after.shape or bool((before - after).abs().max() > 1e-6 * after.abs().max())
