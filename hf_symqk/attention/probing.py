"""
W_q and W_k from the forward pass itself: an attention module is fed basis vectors, and the query and key tensors
that reach its softmax are caught. What comes back is the truth whatever the layout; the tests hold the table to it,
and [`probe_model`] serves models that the table does not know.

Shape legend: `D` width of the input, `H` query heads, `G` key heads, `E` head width, `N`, `M` tokens, `S` slots: the
places of an input that hold one vector each.

What is replaced while probing: positions (all tokens stand at position 0, where a rotation is the identity), norms
inside the module (by their learned gain, since the rest of a norm is not linear) and caches (by none).
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .calling import Call, Rerun, capture_calls
from .catching import Logits, catch_logits


__all__ = ["Call", "ProbedAttention", "ProbingError", "capture_calls", "probe_attention", "probe_model"]

_TOLERANCE = 1e-4  # of the largest response; fp32 sums over D terms leave about 1e-6


class ProbingError(ValueError):
    """A module's forward gives no linear map from one token's hidden state to its queries and keys."""


class ProbedAttention(NamedTuple):
    """
    What the forward of an attention module does with hidden states before the softmax.

    Attributes:
        query (`torch.Tensor`): W_q `(H, E, D)`, with whatever scale the forward puts on the queries.
        key (`torch.Tensor`): W_k `(G, E, D)`; `G = H` where the forward repeats its key heads.
        query_bias (`torch.Tensor`): `(H, E)`, response to the zero vector.
        key_bias (`torch.Tensor`): `(G, E)`.
        scaling (`float` or `None`): Factor that the attention function was told to put on the logits, if it was told.
        route (`str`): Where the tensors were caught: `"interface"`, `"sdpa"` or `"matmul"`.
        kind (`str`): `"self"` if queries and keys come from one argument of the module, else `"cross"`.
        slots (`str`): `"all"` if every token of the input was checked, `"first"` if the first alone.
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor
    key_bias: Tensor
    scaling: float | None
    route: str
    kind: str
    slots: str

    @property
    def num_key_value_heads(self) -> int:
        """Number of distinct key heads: the forward may have repeated each for the query heads that read it."""
        heads = self.key.shape[0]
        for repeats in (r for r in range(heads, 1, -1) if heads % r == 0):
            blocks = self.key.unflatten(0, (heads // repeats, repeats))
            if torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
                return heads // repeats
        return heads


# --- the response to basis vectors -----------------------------------------------------------------------------------


Side = Literal["query", "key"]
_SIDES: tuple[Side, Side] = ("query", "key")


class _Response(NamedTuple):
    weight: Tensor  # (heads, E, D)
    bias: Tensor  # (heads, E)
    slots: str


def probe_attention(module: nn.Module, call: Call, *, width: int | None = None) -> list[ProbedAttention]:
    """
    W_q and W_k of one attention module by its response to basis vectors.

    Args:
        module (`torch.nn.Module`):
            The attention module. It is run again with the arguments of `call`, hidden states replaced.
        call ([`Call`]):
            Arguments as the model around it gives them (see [`capture_calls`]).
        width (`int`, *optional*):
            Width `D` of the hidden states, where it is known: tells them from other arguments.

    Returns:
        `list[ProbedAttention]`: One for each softmax whose queries and keys both depend on hidden states. Logits
        of positions (relative-position keys, biases) are none.

    Raises:
        ProbingError: if there is no such softmax, or a response is not linear in the token's own hidden state.
    """
    results: list[ProbedAttention] = []
    with _evaluating(module):
        rerun = Rerun(module, call, width)
        streams = [_Stream(rerun, names, width) for names in rerun.streams]
        for index, sides in sorted(_dependent(module, streams).items()):
            if len(sides) < 2:
                continue
            query, key = (streams[sides[side]].respond(index, side) for side in ("query", "key"))
            caught = streams[sides["query"]].zero[index]
            kind = "self" if sides["query"] == sides["key"] else "cross"
            slots = "all" if query.slots == key.slots == "all" else "first"
            results.append(
                ProbedAttention(
                    query.weight, key.weight, query.bias, key.bias, caught.scaling, caught.route, kind, slots
                )
            )
    if not results:
        raise ProbingError(f"No softmax of {type(module).__name__} has queries and keys that depend on hidden states.")
    return results


def _dependent(module: nn.Module, streams: list["_Stream"]) -> dict[int, dict[Side, int]]:
    """By number of the softmax: the first stream that its queries depend on, and the first that its keys do."""
    found: dict[int, dict[Side, int]] = {}
    for number, stream in enumerate(streams):
        if len(stream.zero) != len(stream.moved):
            raise ProbingError(f"{type(module).__name__} takes another path for other hidden states.")
        for index, (before, after) in enumerate(zip(stream.zero, stream.moved, strict=True)):
            for side in _SIDES:
                if _differ(getattr(before, side), getattr(after, side)):
                    found.setdefault(index, {}).setdefault(side, number)
    return found


def _differ(before: Tensor, after: Tensor) -> bool:
    return before.shape != after.shape or bool((before - after).abs().max() > 1e-6 * after.abs().max())


class _Stream:
    """One argument of an attention module, replaced by vectors of our choice. All responses are kept for reading."""

    def __init__(self, rerun: Rerun, names: list[str], width: int | None) -> None:
        self.rerun, self.names = rerun, names
        original: Tensor = rerun.neutral[names[0]]
        # Channels stand last, or (convolutions) second.
        self.channel = original.ndim - 1
        if width is not None and original.shape[-1] != width:
            self.channel = 1 if original.ndim == 4 and original.shape[1] == width else original.shape.index(width)
        self.shape = original.movedim(self.channel, -1).shape
        self.slots, self.width = self.shape[:-1].numel(), self.shape[-1]
        self.example = original.new_empty(0)
        generator = torch.Generator().manual_seed(0)
        self.random = torch.randn(self.slots, self.width, generator=generator)
        self.zero, self.moved = self.run(torch.zeros_like(self.random)), self.run(self.random)

    def run(self, vectors: Tensor) -> list[Logits]:
        """Logits for one vector in every slot `(S, D)`."""
        hidden = vectors.to(self.example).view(self.shape).movedim(-1, self.channel)
        return self.rerun(self.names, hidden)

    @functools.cached_property
    def doubled(self) -> list[Logits]:
        return self.run(2 * self.random)

    @functools.cached_property
    def everywhere(self) -> list[list[Logits]]:
        """Every slot carries another basis vector, as many runs as it takes."""
        blocks = torch.eye(self.width).split(self.slots)
        padding = [torch.zeros(self.slots - len(block), self.width) for block in blocks]
        return [self.run(torch.cat(pair)) for pair in zip(blocks, padding, strict=True)]

    def _first(self, vector: Tensor, others: Tensor | None = None) -> list[Logits]:
        values = torch.zeros(self.slots, self.width) if others is None else others.clone()
        values[0] = vector
        return self.run(values)

    @functools.cached_property
    def at_first(self) -> list[list[Logits]]:
        """The first slot alone carries vectors, so that positions and orders of tokens do not matter."""
        return [self._first(unit) for unit in torch.eye(self.width)]

    @functools.cached_property
    def checks_at_first(self) -> list[tuple[float, list[Logits], list[Logits]]]:
        """The first vector of the random input, once and twice, alone and among others; and without it."""
        nothing = torch.zeros(self.width)
        return [
            (factor, self._first(factor * self.random[0], others), self._first(nothing, others))
            for factor in (1.0, 2.0)
            for others in (None, self.random)
        ]

    def respond(self, index: int, side: Side) -> _Response:
        """
        Response of one side of one softmax.

        Raises:
            ProbingError: if it is not linear.
        """
        if not torch.isfinite(getattr(self.zero[index], side)).all():
            raise ProbingError(f"The {side} of {type(self.rerun.module).__name__} is not finite.")
        try:
            return self._respond_everywhere(index, side)
        except ProbingError as error:
            try:
                return self._respond_at_first(index, side)
            except ProbingError as again:
                raise ProbingError(f"{type(self.rerun.module).__name__}, {side}: {error}; {again}") from None

    def _respond_everywhere(self, index: int, side: Side) -> _Response:
        def read(logits: list[Logits]) -> Tensor:  # (S, heads, E)
            return _by_slot(getattr(logits[index], side), self.slots)

        bias = read(self.zero)
        columns = torch.cat([read(logits) - bias for logits in self.everywhere])[: self.width]
        weight = columns.permute(1, 2, 0)
        for factor, logits in ((1.0, self.moved), (2.0, self.doubled)):
            predicted = factor * torch.einsum("sd,hed->she", self.random.to(weight), weight)
            _check(read(logits) - bias, predicted, f"at {self.slots} tokens")
        return _Response(weight, bias.mean(0), "all")

    def _respond_at_first(self, index: int, side: Side) -> _Response:
        def read(logits: list[Logits]) -> Tensor:
            return getattr(logits[index], side)

        zero = read(self.zero)
        moved = read(self.checks_at_first[0][1]) - zero
        touched = (moved.abs().amax(-1) > 1e-6 * moved.abs().max()).nonzero(as_tuple=True)
        if not touched[0].numel():
            raise ProbingError("the first token reaches none of it")
        weight = torch.stack([(read(logits) - zero)[touched] for logits in self.at_first], -1)
        for factor, present, absent in self.checks_at_first:
            predicted = factor * weight @ self.random[0].to(weight)
            _check((read(present) - read(absent))[touched], predicted, "at the first token")
            if (read(absent) - zero)[touched].abs().max() > _TOLERANCE * predicted.abs().max():
                raise ProbingError("other tokens reach the same place")
        return _Response(weight, zero[touched], "first")


def _check(response: Tensor, predicted: Tensor, where: str) -> None:
    scale = predicted.abs().max()
    error = (response - predicted).abs().max()
    if not torch.isfinite(response).all() or not scale > 0 or not error <= _TOLERANCE * scale:
        raise ProbingError(f"the response is not linear {where}: off by {float(error):.2g} of {float(scale):.2g}")


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


# --- whole models ----------------------------------------------------------------------------------------------------


def probe_model(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, ProbedAttention | ProbingError]:
    """
    W_q and W_k of every attention module that a forward pass of the model reaches, found by probing alone.

    Args:
        model (`torch.nn.Module`):
            A live model with whole weights.
        inputs (`Mapping[str, Any]`):
            Keyword arguments of one forward pass; two or more sequences of two or more tokens.

    Returns:
        `dict[str, ProbedAttention | ProbingError]`: By name of the module, in the order in which they run; an error
        where a softmax was met whose queries or keys are not linear in the hidden states.

    Raises:
        ProbingError: if no softmax over tokens is met at all.
    """
    names = {module: name for name, module in model.named_modules()}
    modules = {name: module for module, name in names.items() if name}
    with (
        _evaluating(model),
        torch.no_grad(),
        capture_calls(modules) as calls,
        catch_logits(model) as caught,
    ):
        model(**inputs)
    met = [names[logits.module] for logits in caught if logits.module is not None]
    results: dict[str, ProbedAttention | ProbingError] = {}
    for name in dict.fromkeys(met):
        # The innermost module may be handed queries and keys; the one that projects them stands around it.
        owner = name
        while owner and not any(parameter.ndim > 1 for parameter in modules[owner].parameters()):
            owner = owner.rpartition(".")[0]
        if not owner or owner in results:
            continue
        try:
            results[owner] = probe_attention(modules[owner], calls[owner])[0]
        except ProbingError as error:
            results[owner] = error
        except Exception as error:  # whatever a module's own code raises when it is run alone
            results[owner] = ProbingError(f"{type(modules[owner]).__name__} cannot be run alone: {error}")
    if not results:
        raise ProbingError(f"The forward pass of {type(model).__name__} reaches no softmax over tokens.")
    return results
