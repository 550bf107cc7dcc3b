"""
How an attention module is called by the model around it, and calling it again with other hidden states: positions at
0, no cache, everything else as it was.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .catching import Logits, catch_logits


__all__ = ["Call", "Rerun", "capture_calls"]

# Arguments that carry no token's hidden state; they keep their values while the hidden states are replaced.
_NO_STREAM = re.compile(r"mask|pos|rotary|rope|freqs|cos|sin|bias|timestep|reference|shape|index|^r$|^rel")
_POSITIONS = re.compile(r"position|rotary|freqs|rope|pos_emb|cos|sin")
_CACHE = re.compile(r"past_key|cache|layer_past|past_bucket")


class Call(NamedTuple):
    """How a module was called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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
                # Cosines come first, but for modules whose first position has sine and cosine of 0 in that order.
                swapped = first.flatten()[0] == 0 and second.flatten()[0] > 0
                return type(value)((zero, length) if swapped else (length, zero))
        return type(value)(_positions_at_zero(item) for item in value)
    return value


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


def _repeated(tensor: Tensor, batch: int, copies: int) -> Tensor:
    """A tensor of one batch for several; what has a first dimension of 1 serves them all."""
    fits = tensor.ndim > 0 and batch > 1 and tensor.shape[0] % batch == 0
    return torch.cat([tensor] * copies) if fits and tensor.shape[0] else tensor


class Rerun:
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
        self._given: tuple[Tensor, ...] = ()
        # One tensor under several names (query, key and value of torch's attention) is one stream, also where the
        # same was computed twice.
        self.streams: list[list[str]] = []
        for name, value in values.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or not 2 <= value.ndim <= 5:
                continue
            if _NO_STREAM.search(name) or (width is not None and width not in value.shape):
                continue
            same = next((stream for stream in self.streams if _is_same(values[stream[0]], value)), None)
            if same is None:
                self.streams.append([name])
            else:
                same.append(name)

    @staticmethod
    def _neutral(name: str, value: Any) -> Any:
        if _CACHE.search(name):
            return False if isinstance(value, bool) else None
        return _positions_at_zero(value) if _POSITIONS.search(name) else value

    def __call__(self, hidden: Mapping[str, Tensor], copies: int = 1) -> list[Logits]:
        """
        Runs the module.

        Args:
            hidden (`Mapping[str, torch.Tensor]`): By the first name of a stream, what it is to carry.
            copies (`int`, *optional*, defaults to 1): How many batches are in `hidden`, one behind the other; other
                arguments are repeated as often.

        Returns:
            `list[Logits]`: Of every softmax, in the order in which they run.
        """
        args, kwargs = self.arguments(hidden, copies)
        with torch.no_grad(), catch_logits(self.module, norms=False, inputs=self._given) as caught:
            self.module(*args, **kwargs)
        return caught

    def arguments(self, hidden: Mapping[str, Tensor], copies: int = 1) -> Call:
        """The arguments of the call, with other hidden states."""
        values = {**self.neutral, **hidden}
        if copies > 1:
            batch = next(iter(hidden.values())).shape[0] // copies
            others = {name: value for name, value in values.items() if name not in hidden}
            values |= tree_map_only(Tensor, lambda tensor: _repeated(tensor, batch, copies), others)
        # Copies, since a module may write into its arguments; one for all names of a stream.
        values = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        for names in self.streams:
            values |= dict.fromkeys(names, values[names[0]])
        self._given = tuple(values[names[0]] for names in self.streams)
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
        return Call(tuple(args), kwargs | values)
