"""
Products of queries and keys in a forward pass that a gradient is taken of, and what the projections before them read.

Shape legend: `D` width of a projection's input, `E` head width, `N`, `M` tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .catching import Catcher, Logits, Product, attention_implementation


__all__ = ["ProjectionCall", "TappedLogits", "Taps", "tap_logits"]


class TappedLogits(NamedTuple):
    """
    The logits of one softmax as a node of the graph.

    Attributes:
        logits ([`Logits`]): Queries and keys, in the graph too, and the innermost module that ran.
        product (`torch.Tensor`): Their product.
        factor (`float`): What the product has multiplied them by besides (`alpha` of `baddbmm`).
        axes (`tuple[int, int]`): Which dimensions of the product count queries and keys.
        taken (`torch.Tensor`): What the softmax takes: the product scaled, masked, with what is added to it.
    """

    logits: Logits
    product: Tensor
    factor: float
    axes: tuple[int, int]
    taken: Tensor

    def arranged(self, gradient: Tensor) -> Tensor:
        """A tensor of the product's shape as `(..., N, M)`, leading dimensions as those of queries and keys."""
        return gradient.movedim(self.axes, (-2, -1))


class ProjectionCall(NamedTuple):
    """What a projection read `(..., D)` and gave, in the graph. No other path leads from this input."""

    input: Tensor
    output: Tensor


# Held of each softmax until the backward pass: its product, a copy, the product scaled and masked, and the weights, of
# which Llama's eager attention keeps all (measured: 5.0; BERT's 3.4). Softmaxes are often fp32 where the rest is not.
_NUMBERS = 5
_BYTES_OF_SOFTMAX = 4
_PRODUCTS = {torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.bmm, Tensor.baddbmm, Tensor.__matmul__}
_MULTIPLIES = {F.linear, torch.einsum, torch.matmul, Tensor.matmul, Tensor.__matmul__}
Holder = nn.Module | nn.Parameter


class Taps(NamedTuple):
    """Filled while a model runs: logits in the order in which they are made, and the calls of each projection."""

    logits: list[TappedLogits]
    calls: dict[Holder, list[ProjectionCall]]


@contextmanager
def tap_logits(
    model: nn.Module, projections: Iterable[Holder], admit: Callable[[int], None] | None = None
) -> Iterator[Taps]:
    """
    Keeps hold of the products of queries and keys in the graph of a forward pass, which runs every attention as
    `"eager"`, so that there are products.

    Args:
        model (`torch.nn.Module`):
            The model that is run, with gradients on.
        projections (`Iterable[torch.nn.Module | torch.nn.Parameter]`):
            Linear maps, or weights that a forward gives to `torch.nn.functional.linear`, whose inputs are wanted.
        admit (`Callable[[int], None]`, *optional*):
            Told before each product how many bytes the logits up to there take until the backward pass; raises if
            that is too much.

    Yields:
        [`Taps`]
    """
    held = list(dict.fromkeys(projections))
    calls: dict[Holder, list[ProjectionCall]] = {holder: [] for holder in held}
    parameters = {holder: calls[holder] for holder in held if isinstance(holder, nn.Parameter)}
    tapper = _Tapper(parameters, admit or (lambda size: None))
    with ExitStack() as stack:
        stack.enter_context(attention_implementation(model, "eager"))
        for module in held:
            if isinstance(module, nn.Module):
                before = module.register_forward_pre_hook(_separate, with_kwargs=True)
                after = module.register_forward_hook(_noting(calls[module]), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.callback(tapper.let_go)
        stack.enter_context(tapper.watching(model))
        yield Taps(tapper.tapped, calls)


def _alias(hidden: Tensor) -> Tensor:
    """The same values as a node of their own, with a gradient even where no parameter has one."""
    return hidden.view_as(hidden) if hidden.requires_grad else hidden.detach().requires_grad_()


def _separate(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (_alias(args[0]), *args[1:]), kwargs
    name, hidden = next(iter(kwargs.items()))
    return args, {**kwargs, name: _alias(hidden)}


def _noting(calls: list[ProjectionCall]) -> Callable:
    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        calls.append(ProjectionCall(hidden, output if isinstance(output, Tensor) else output[0]))

    return note


class _Tapper(Catcher):
    """Puts every product of matrices into the graph as a node that can be asked for, and notes those of a softmax."""

    def __init__(self, parameters: dict[nn.Parameter, list[ProjectionCall]], admit: Callable[[int], None]) -> None:
        super().__init__(norms=True, inputs=())
        self.tapped: list[TappedLogits] = []
        self._admit = admit
        self._bytes = 0
        self._awaited = 0  # how many weights the last softmax gave, until they weigh values
        self._parameters = {held.untyped_storage().data_ptr(): calls for held, calls in parameters.items()}
        self._taps: dict[int, tuple[Product, Tensor, float]] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with self:  # watching its parts
                return _attend(*args, **kwargs)
        if self._parameters and func in _MULTIPLIES:
            place = next((n for n, held in enumerate(args) if self._calls_of(held) is not None), None)
            if place is not None:
                return self._project(func, args, kwargs, place)
        if func in _PRODUCTS and torch.is_grad_enabled():
            left, right = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)][-2:]
            weighs, self._awaited = left.numel() == self._awaited, 0  # values, by the weights of the last softmax
            if left.ndim > 2 and right.ndim > 2 and not weighs:  # before it is there: one may be too large already
                batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
                self._admit(self._bytes + _bytes(left, batch.numel() * left.shape[-2] * right.shape[-1]))
        return super().__torch_function__(func, types, args, kwargs)

    def let_go(self) -> None:
        """Drops what was followed on its way: a backward pass needs the memory."""
        for held in (self._products, self._taps, self._alive):
            held.clear()

    def _calls_of(self, held: Any) -> list[ProjectionCall] | None:
        return self._parameters.get(held.untyped_storage().data_ptr()) if isinstance(held, Tensor) else None

    def _project(self, func: Callable, args: tuple, kwargs: dict[str, Any], place: int) -> Tensor:
        """A product with a weight that is asked for, the argument before it being what it reads."""
        hidden = _alias(args[place - 1])
        output = func(*args[: place - 1], hidden, *args[place:], **kwargs)
        calls = self._calls_of(args[place])
        assert calls is not None, "asked only of such weights"
        # Heads and their channels may be dimensions of their own.
        calls.append(ProjectionCall(hidden, output.flatten(hidden.ndim - 1)))
        return output

    def made(self, product: Product, output: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if not torch.is_grad_enabled() or not output.is_floating_point():
            return output
        node = output if output.requires_grad else output.requires_grad_()
        self._taps[id(product.logits)] = product, node, float(kwargs.get("alpha", 1.0))
        # What comes next may write into it, as masks are added in place.
        return node.clone()

    def taken(self, product: Product, logits: Logits, tensor: Tensor) -> None:
        if id(product.logits) not in self._taps:
            return
        made, node, factor = self._taps[id(product.logits)]
        axes = (made.query_axis, made.key_axis)
        # Keys are what the softmax sums over; they may have stood on the left.
        turned = logits.query is not product.logits.query
        if not any(node is tapped.product for tapped in self.tapped):
            self._bytes += _bytes(node, node.numel())
            self._awaited = tensor.numel()
            self._admit(self._bytes)  # of products that were not seen coming
            self.tapped.append(TappedLogits(logits, node, factor, axes[::-1] if turned else axes, tensor))


def _bytes(like: Tensor, logits: int) -> int:
    """What so many logits take until the backward pass, with what is made of them."""
    size = like.element_size()
    return logits * ((_NUMBERS - 1) * size + max(size, _BYTES_OF_SOFTMAX))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by parts; a token that sees none gets zeros, as there."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    logits = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype is torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if masked else logits + attn_mask
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return F.dropout(weights, dropout_p) @ value
