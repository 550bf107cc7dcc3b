"""
W_q and W_k from the forward pass itself: an attention module is fed basis vectors, and the query and key tensors
that reach its softmax are caught. What comes back is the truth whatever the layout; the tests hold the table to it,
and `score_model(..., probe=True)` serves models that the table does not know.

Shape legend: `D` width of the input, `H` query heads, `G` key heads, `E` head width, `N`, `M` tokens, `S` slots: the
places of an input that hold one vector each.

What is replaced while probing: positions (all tokens stand at position 0, where a rotation is the identity), norms
inside the module (by their learned gain, since the rest of a norm is not linear) and caches (by none).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .calling import Call, Rerun, capture_calls
from .responding import SIDES, TOLERANCE, ProbingError, Response, Side, Stream, differ


__all__ = [
    "Call",
    "NoLogitsError",
    "NoStreamsError",
    "ProbedAttention",
    "ProbingError",
    "capture_calls",
    "probe_attention",
]


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
    streams = [Stream(rerun, names, width, channel) for names in rerun.streams]
    results: list[ProbedAttention] = []
    constant: set[str] = set()
    for index, sides in sorted(_dependent(module, streams).items()):
        if len(sides) < 2:
            constant |= {side for side in SIDES if side not in sides}
            continue
        for side, (main, *others) in sides.items():
            for other in others:
                _require_sum(streams[main], streams[other], index, side)
        readers, read = (streams[sides[side][0]] for side in SIDES)
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
        which = {"query": "its queries do not", "key": "its keys do not"}
        reason = f" ({', '.join(which[side] for side in sorted(constant))})" if constant else ""
        raise NoLogitsError(
            f"No softmax of {type(module).__name__} has queries and keys that depend on hidden states{reason}."
        )
    return results


def _dependent(module: nn.Module, streams: list["Stream"]) -> dict[int, dict[Side, list[int]]]:
    """By number of the softmax: the streams that its queries depend on, and those that its keys do."""
    found: dict[int, dict[Side, list[int]]] = {}
    for number, stream in enumerate(streams):
        if len(stream.zero) != len(stream.moved):
            raise ProbingError(f"{type(module).__name__} takes another path for other hidden states.")
        for index, (before, after) in enumerate(zip(stream.zero, stream.moved, strict=True)):
            for side in SIDES:
                if differ(getattr(before, side), getattr(after, side)):
                    found.setdefault(index, {}).setdefault(side, []).append(number)
    return found


def _require_sum(main: "Stream", other: "Stream", index: int, side: Side) -> None:
    """Where a second argument reaches queries or keys too, it has to be added: else W depends on what it holds."""
    with_other = {other.names[0]: other.arranged(other.random)}
    moved, zero = (main.rerun({main.names[0]: main.arranged(x), **with_other}) for x in (main.random, main.none))
    alone = getattr(main.moved[index], side) - getattr(main.zero[index], side)
    beside = getattr(moved[index], side) - getattr(zero[index], side)
    if alone.shape != beside.shape or (alone - beside).abs().max() > TOLERANCE * alone.abs().max():
        raise ProbingError(
            f"{type(main.rerun.module).__name__}, {side}: the response to {main.names[0]!r} is not linear, since it "
            f"depends on {other.names[0]!r} as well"
        )


# --- queries and keys that meet --------------------------------------------------------------------------------------


def _respond(first: Stream, second: Stream, index: int) -> tuple[Response, Response]:
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


def _meeting_slot(first: Stream, second: Stream, index: int) -> int:
    """A token whose query meets its own key in the product: the first, or one of another part of the input."""
    tokens = first.shape[-2] if len(first.shape) > 2 else first.slots
    shared = min(first.slots, second.slots)
    pairs = tuple(zip((first, second), SIDES, strict=True))
    for slot in dict.fromkeys((0, tokens - 1, tokens // 2, first.slots - 1)):
        if slot < shared and all(stream.alone(slot).is_reached(index, side) for stream, side in pairs):
            places = (stream.alone(slot).reaches(index, side) for stream, side in pairs)
            query, key = ({tuple(row[:-1]) for row in torch.stack(p, -1).tolist()} for p in places)
            if query & key:
                return slot
    raise ProbingError("no token's query was seen to meet its own key")


def _meeting(query: Response, key: Response) -> tuple[Response, Response]:
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
        Response(query.weight[queries], query.bias[queries], query.places[queries]),
        Response(key.weight[others], key.bias[others], key.places[others]),
    )


def _alike(weight: Tensor, one: int, other: int) -> bool:
    return one == other or bool((weight[one] - weight[other]).abs().max() <= 1e-5 * weight[one].abs().max())


def _distinct(query: Response, key: Response) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_q, W_k, and their biases; of keys that are repeated for the queries of a group, one."""
    heads = key.weight.shape[0]
    for repeats in (r for r in range(heads, 1, -1) if heads % r == 0):
        blocks = key.weight.unflatten(0, (heads // repeats, repeats))
        if torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            return query.weight, key.weight[::repeats], query.bias, key.bias[::repeats]
    return query.weight, key.weight, query.bias, key.bias


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
