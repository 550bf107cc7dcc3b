"""
W_q and W_k from the forward pass itself: an attention module is fed basis vectors, and the query and key tensors
that reach its softmax are caught. What comes back is the truth whatever the layout; the tests hold the table to it,
and [`probe_model`] serves models that the table does not know.

Shape legend: `D` width of the input, `H` query heads, `G` key heads, `E` head width, `N`, `M` tokens, `S` slots: the
places of an input that hold one vector each.

What is replaced while probing: positions (all tokens stand at position 0, where a rotation is the identity), norms
inside the module (by their learned gain, since the rest of a norm is not linear) and caches (by none).
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .catching import Logits, catch_logits


__all__ = ["Call", "ProbedAttention", "ProbingError", "capture_calls", "probe_attention", "probe_model"]

# Arguments that carry no token's hidden state; they keep their values while the hidden states are replaced.
_NO_STREAM = re.compile(r"mask|position|rotary|freqs|cos|sin|bias|embedding_?s?_?0|timestep|reference|shape|index|pos")
_POSITIONS = re.compile(r"position|rotary|freqs|rope|pos_emb|cos|sin")
_CACHE = re.compile(r"past_key|cache|layer_past|past_bucket")
_TOLERANCE = 1e-4  # of the largest response; fp32 sums over D terms leave about 1e-6


class ProbingError(ValueError):
    """A module's forward gives no linear map from one token's hidden state to its queries and keys."""


class Call(NamedTuple):
    """How a module was called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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


# --- calls: what an attention module is given by the model around it ------------------------------------------------


@contextmanager
def capture_calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Call]]:
    """
    Notes with which arguments modules are called; the first call of each counts.

    Args:
        modules (`Mapping[str, torch.nn.Module]`): Modules of a model that is run inside the context.

    Yields:
        `dict[str, Call]`: Filled while the model runs.
    """
    calls: dict[str, Call] = {}

    def hook(name: str) -> Callable:
        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.setdefault(name, Call(args, dict(kwargs)))

        return record

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _positions_at_zero(value: Any) -> Any:
    """Position arguments as they are at position 0: integers 0, rotations the identity, anything else as it is."""
    if isinstance(value, Tensor) and value.is_complex():
        return torch.ones_like(value) * value.abs()
    if isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool:
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _positions_at_zero(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        pair = len(value) == 2 and all(isinstance(v, Tensor) and v.is_floating_point() for v in value)
        if pair and value[0].shape == value[1].shape:
            first, second = value
            length = (first.square() + second.square()).sqrt()
            # A rotation has the same length everywhere (not always 1: some rotary scalings stretch it).
            if length.numel() and (length - length.flatten()[0]).abs().max() < 1e-3 * length.max():
                zero = torch.zeros_like(length)
                # Cosines average above sines, whichever comes first.
                return type(value)((length, zero) if first.mean() >= second.mean() else (zero, length))
        return type(value)(_positions_at_zero(item) for item in value)
    return value


class _Rerun:
    """An attention module that is called again and again with other hidden states."""

    def __init__(self, module: nn.Module, call: Call, width: int | None) -> None:
        self.module = module
        bound = inspect.signature(module.forward).bind_partial(*call.args, **call.kwargs)
        self.bound = bound
        kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
        values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if kinds[name] is inspect.Parameter.VAR_KEYWORD:
                values |= value
            elif kinds[name] is inspect.Parameter.VAR_POSITIONAL:
                values |= {f"*{number}": item for number, item in enumerate(value)}
            else:
                values[name] = value
        self.neutral = {name: self._neutral(name, value) for name, value in values.items()}
        # One tensor under several names (query, key and value of torch's attention) is one stream.
        self.streams: list[list[str]] = []
        for name, value in values.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or not 2 <= value.ndim <= 5:
                continue
            if _NO_STREAM.search(name) or (width is not None and width not in value.shape):
                continue
            same = next((stream for stream in self.streams if values[stream[0]] is value), None)
            if same is None:
                self.streams.append([name])
            else:
                same.append(name)

    @staticmethod
    def _neutral(name: str, value: Any) -> Any:
        if _CACHE.search(name):
            return False if isinstance(value, bool) else None
        return _positions_at_zero(value) if _POSITIONS.search(name) else value

    def shape(self, stream: list[str]) -> torch.Size:
        return self.neutral[stream[0]].shape

    def __call__(self, stream: list[str], hidden: Tensor) -> list[Logits]:
        values = {**self.neutral, **dict.fromkeys(stream, hidden)}
        values = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        if len(stream) > 1:
            shared = values[stream[0]]
            values |= dict.fromkeys(stream, shared)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = True
        for name, parameter in self.bound.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += [values.pop(key) for key in sorted(k for k in values if k.startswith("*"))]
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD or name not in values:
                positional = False
            elif positional and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                args.append(values.pop(name))
            else:
                kwargs[name] = values.pop(name)
        with torch.no_grad(), catch_logits(self.module, norms=False) as caught:
            self.module(*args, **kwargs, **values)
        return caught


# --- the response to basis vectors -----------------------------------------------------------------------------------


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
    with ExitStack() as stack:
        stack.enter_context(_evaluating(module))
        rerun = _Rerun(module, call, width)
        generator = torch.Generator().manual_seed(0)
        # Per stream: logits with every stream as it was given except this one, which is 0 or random.
        found: dict[int, dict[str, tuple[int, Any]]] = {}
        for number, stream in enumerate(rerun.streams):
            zero = rerun(stream, torch.zeros(rerun.shape(stream), **_like(rerun.neutral[stream[0]])))
            moved = rerun(stream, _random(rerun.neutral[stream[0]], generator))
            if len(zero) != len(moved):
                raise ProbingError(f"{type(module).__name__} takes another path for other hidden states.")
            for index, (before, after) in enumerate(zip(zero, moved, strict=True)):
                for side in ("query", "key"):
                    if _differ(getattr(before, side), getattr(after, side)):
                        found.setdefault(index, {}).setdefault(side, (number, None))
        results: list[ProbedAttention] = []
        for index, sides in sorted(found.items()):
            if len(sides) < 2:
                continue
            responses = {}
            for side, (number, _) in sides.items():
                responses[side] = _respond(rerun, rerun.streams[number], index, side, width, generator)
            kind = "self" if sides["query"][0] == sides["key"][0] else "cross"
            caught = rerun(rerun.streams[0], rerun.neutral[rerun.streams[0][0]])[index]
            results.append(
                ProbedAttention(
                    responses["query"].weight,
                    responses["key"].weight,
                    responses["query"].bias,
                    responses["key"].bias,
                    caught.scaling,
                    caught.route,
                    kind,
                    min(responses["query"].slots, responses["key"].slots),
                )
            )
    if not results:
        raise ProbingError(f"No softmax of {type(module).__name__} has queries and keys that depend on hidden states.")
    return results


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator).to(tensor)


def _differ(before: Tensor, after: Tensor) -> bool:
    return before.shape != after.shape or bool((before - after).abs().max() > 1e-6 * after.abs().max())


def _respond(
    rerun: _Rerun, stream: list[str], index: int, side: str, width: int | None, generator: torch.Generator
) -> _Response:
    original: Tensor = rerun.neutral[stream[0]]
    # Channels stand last, or (convolutions) second.
    channel = original.ndim - 1
    if width is not None and original.shape[-1] != width:
        channel = 1 if original.ndim == 4 and original.shape[1] == width else original.shape.index(width)

    def run(hidden: Tensor) -> Tensor:
        return getattr(rerun(stream, hidden.movedim(-1, channel))[index], side)

    shape = original.movedim(channel, -1).shape
    example = original.new_empty(0)
    problem = ""
    for respond in (_respond_everywhere, _respond_at_first):
        try:
            return respond(run, shape, example, generator)
        except ProbingError as error:
            problem = str(error)
    raise ProbingError(f"{type(rerun.module).__name__}, {side}: {problem}")


def _respond_everywhere(
    run: Callable[[Tensor], Tensor], shape: torch.Size, example: Tensor, generator: torch.Generator
) -> _Response:
    """Every slot carries another basis vector; a random input then has to come out as predicted at every slot."""
    slots, width = shape[:-1].numel(), shape[-1]

    def respond(vectors: Tensor) -> Tensor:  # (S, D) -> (S, heads, E)
        return _by_slot(run(vectors.to(example).view(shape)), slots)

    bias = respond(torch.zeros(slots, width))
    if not torch.isfinite(bias).all():
        raise ProbingError("the response to zero vectors is not finite")
    if (bias - bias[:1]).abs().max() > _TOLERANCE * bias.abs().max():
        # Added positions, say: the bias differs between tokens, and only differences are compared.
        pass
    columns = []
    identity = torch.eye(width)
    for start in range(0, width, slots):
        block = identity[start : start + slots]
        number = block.shape[0]
        padded = torch.cat([block, torch.zeros(slots - number, width)])
        columns.append((respond(padded) - bias)[:number])
    weight = torch.cat(columns).permute(1, 2, 0)  # (heads, E, D)
    random = torch.randn(slots, width, generator=generator)
    for factor in (1.0, 2.0):
        response = respond(factor * random) - bias
        predicted = factor * torch.einsum("sd,hed->she", random.to(weight), weight)
        _check(response, predicted, f"at {slots} tokens")
    return _Response(weight, bias.mean(0), "all")


def _respond_at_first(
    run: Callable[[Tensor], Tensor], shape: torch.Size, example: Tensor, generator: torch.Generator
) -> _Response:
    """The first slot alone carries vectors (others are 0), so that positions and orders of tokens do not matter."""
    slots, width = shape[:-1].numel(), shape[-1]

    def hidden(vector: Tensor, others: Tensor | None = None) -> Tensor:
        values = torch.zeros(slots, width) if others is None else others.clone()
        values[0] = vector
        return values.to(example).view(shape)

    zero = run(hidden(torch.zeros(width)))
    vector = torch.randn(width, generator=generator)
    moved = run(hidden(vector)) - zero
    touched = (moved.abs().amax(-1) > 1e-6 * moved.abs().max()).nonzero(as_tuple=True)
    if not touched[0].numel():
        raise ProbingError("the first token reaches no query or key")
    weight = torch.stack([(run(hidden(unit)) - zero)[touched] for unit in torch.eye(width)], -1)
    bias = zero[touched]
    others = torch.randn(slots, width, generator=generator)
    for factor in (1.0, 2.0):
        predicted = factor * weight @ vector.to(weight)
        _check((run(hidden(factor * vector)) - zero)[touched], predicted, "at the first token")
        mixed = run(hidden(factor * vector, others)) - run(hidden(torch.zeros(width), others))
        _check(mixed[touched], predicted, "at the first token among others")
    return _Response(weight, bias, "first")


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
