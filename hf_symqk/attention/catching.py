"""
Queries and keys on their way into a softmax, whichever way a model computes its attention: through Transformers'
attention interface, `scaled_dot_product_attention`, or a matrix product whose result a softmax takes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask


__all__ = ["Catcher", "Logits", "Product", "attention_implementation", "catch_logits"]

_NAME = "hf_symqk_probe"
_MATMUL = {torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__}
_BADDBMM = {torch.baddbmm, Tensor.baddbmm}
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.logsumexp, Tensor.logsumexp}
# Their results are new hidden states, no longer the product of a query and a key.
_FORGETS = {F.linear, F.conv1d, F.conv2d, F.layer_norm, torch.addmm, *_SOFTMAX}
_TURNS = {
    *(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.permute, torch.permute),
    *(Tensor.mT.__get__, Tensor.T.__get__),  # type: ignore[attr-defined]  # a descriptor, to Python alone
}
_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # dimensions that are told apart by their sizes
_NORMS = {F.layer_norm, F.rms_norm}
_ELLIPSIS = "αβγδεζηθ"  # labels of the dimensions that an equation leaves unnamed
_CAUGHT: list["Catcher"] = []


class Logits(NamedTuple):
    """Queries `(..., N, E)` and keys `(..., M, E)` of one softmax, and the innermost module that ran."""

    query: Tensor
    key: Tensor
    scaling: float | None
    route: str
    module: nn.Module | None


class Product(NamedTuple):
    """A product on its way to a softmax, and which dimensions (from the last) count its queries and its keys."""

    logits: Logits
    query_axis: int = -2
    key_axis: int = -1


@contextmanager
def catch_logits(model: nn.Module, *, norms: bool = True, inputs: tuple[Tensor, ...] = ()) -> Iterator[list[Logits]]:
    """
    Catches queries and keys of every softmax that runs inside the context.

    Args:
        model (`torch.nn.Module`):
            The model or attention module that is run. Its configs are switched to an attention function of ours, and
            back afterwards; it sees no mask.
        norms (`bool`, *optional*, defaults to `True`):
            Whether norms act. `False` leaves their learned gain alone, which is linear.
        inputs (`tuple[torch.Tensor, ...]`, *optional*):
            Tensors that norms leave as they are if `norms=False`: what is normalised before it is projected is the
            input of W_q and W_k, whether the norm stands inside the attention module or before it.

    Yields:
        `list[Logits]`: In the order in which they run.
    """
    catcher = Catcher(norms=norms, inputs=inputs)
    with ExitStack() as stack:
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, eager_mask)
        stack.enter_context(attention_implementation(model, _NAME))
        for module in model.modules():
            if not norms and module is not model and _is_norm(module):
                stack.enter_context(_gain_alone(module, inputs))
        _CAUGHT.append(catcher)
        stack.callback(_CAUGHT.remove, catcher)
        stack.enter_context(catcher.watching(model))
        yield catcher.logits


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """
    Switches every config of a model to one attention function, and back afterwards.

    Args:
        model (`torch.nn.Module`): The model.
        name (`str`): Name of the function in Transformers' interface, or `"eager"`.

    Yields:
        `None`
    """
    configs = {id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    for config in list(configs.values()):
        parts = (getattr(config, part, None) for part in config.sub_configs)
        configs |= {id(part): part for part in parts if isinstance(part, PreTrainedConfig)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """An attention function for Transformers' interface that notes its queries and keys."""
    with torch._C.DisableTorchFunction():
        for catcher in _CAUGHT:
            catcher.logits.append(Logits(query, key, scaling, "interface", module))
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = logits.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights


class Catcher(TorchFunctionMode):
    """Follows products of matrices until a softmax takes them."""

    def __init__(self, *, norms: bool, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.norms, self.inputs = norms, inputs
        self.logits: list[Logits] = []
        self._modules: list[nn.Module] = []
        self._products: dict[int, list[Product]] = {}
        self._alive: list[Tensor] = []  # or ids would be used again

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, what a model computes passes here, and it is known which of its modules runs."""
        with ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(self.enter).remove)
                stack.callback(module.register_forward_hook(self.leave).remove)
            fastpath = torch.backends.mha.get_fastpath_enabled()
            stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(self)
            yield

    def made(self, product: Product, output: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """What goes on in the place of a product that was just computed."""
        return output

    def taken(self, product: Product, logits: Logits, tensor: Tensor) -> None:
        """Notes a product that a softmax takes, inside `tensor`."""
        self.logits.append(logits)

    def enter(self, module: nn.Module, args: Any) -> None:
        self._modules.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._modules and self._modules.pop() is not module:
            pass

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # A Python function that would hand itself over again: it is run with us watching its parts.
            with mock.patch("torch.nn.functional.has_torch_function", return_value=False), self:
                return func(*args, **kwargs)
        if not self.norms and func is F.normalize:
            return args[0]
        if not self.norms and func in _NORMS:
            hidden = args[0] if args else kwargs["input"]
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            alone = weight is None or any(hidden is tensor for tensor in self.inputs)
            return hidden if alone else hidden * weight
        if func is F.scaled_dot_product_attention:
            query, key = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            self.logits.append(Logits(query, key, kwargs.get("scale"), "sdpa", self._module))
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            tensor = args[0] if args else kwargs["input"]
            for product in self._products.get(id(tensor), []):
                self.taken(product, _over_keys(product, dim, output.ndim), tensor)
            return output
        if func in _FORGETS:
            return output
        made = self._product(func, args, kwargs)
        if made is not None:
            output = self.made(made, output, kwargs)
            self._note(output, [made])
            return output
        followed: list[Product] = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                known = [product.logits for product in followed]
                followed += [p for p in self._products.get(id(leaf), []) if not any(p.logits is q for q in known)]
        if followed:
            if func in _TURNS:
                dimensions = args[0].ndim
                # What has fewer dimensions than its axes say was made of a product along the way, and is none itself.
                followed = [
                    _turned(product, func, args, kwargs)
                    for product in followed
                    if all(-axis <= dimensions for axis in product[1:])
                ]
            targets = [args[0]] if func is Tensor.__setitem__ else tree_leaves(output)
            for target in targets:
                if isinstance(target, Tensor):
                    self._note(target, followed)
        return output

    @property
    def _module(self) -> nn.Module | None:
        return self._modules[-1] if self._modules else None

    def _note(self, tensor: Tensor, products: list[Product]) -> None:
        self._products[id(tensor)] = products
        self._alive.append(tensor)

    def _product(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Product | None:
        if func in _MATMUL:
            left, right = (*args, *kwargs.values())[:2]
        elif func in _BADDBMM:
            left, right = (*args, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))[-2:]
            if len(args) == 3:
                left, right = args[1:]
        elif func is torch.einsum:
            return self._einsum(*args)
        else:
            return None
        if left.ndim < 2 or right.ndim < 2:
            return None
        return Product(Logits(left, right.mT, None, "matmul", self._module))

    def _einsum(self, equation: Any, *operands: Any) -> Product | None:
        if not isinstance(equation, str):
            return None
        operands = tuple(operands[0]) if isinstance(operands[0], list | tuple) else operands
        terms, _, output = equation.replace(" ", "").partition("->")
        labels = terms.split(",")
        if len(operands) != 2 or len(labels) != 2 or not output:
            return None
        unnamed = [tensor.ndim - len(own.replace("...", "")) for tensor, own in zip(operands, labels, strict=True)]
        rest = _ELLIPSIS[: max(unnamed)] if "..." in equation else ""
        # Aligned at the last one, as broadcasting does.
        labels = [own.replace("...", rest[len(rest) - number :]) for own, number in zip(labels, unnamed, strict=True)]
        output = output.replace("...", rest)
        left, right = operands
        first, second = labels
        if output[-1] in first and output[-1] not in second:
            left, right, first, second = right, left, second, first
        shared = [label for label in output if label in first and label in second]
        summed = [label for label in first if label in second and label not in output]
        if not summed:
            return None
        tensors, axes = [], []
        for tensor, own in ((left, first), (right, second)):
            alone = [label for label in own if label not in shared and label not in summed]
            axes.append(max((output.rindex(label) for label in alone if label in output), default=0) - len(output))
            order = [own.index(label) for label in (*shared, *alone, *summed)]
            tensors.append(
                tensor.permute(order).reshape(
                    *(tensor.shape[own.index(label)] for label in shared),
                    _size(tensor, own, alone),
                    _size(tensor, own, summed),
                )
            )
        return Product(Logits(tensors[0], tensors[1], None, "matmul", self._module), *axes)


def _turned(product: Product, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Product:
    """A product whose dimensions change places."""
    sizes = _SIZES[: args[0].ndim]
    with torch._C.DisableTorchFunction():
        turned = func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape
    axes = (turned.index(sizes[axis]) - len(turned) for axis in product[1:])
    return Product(product.logits, *axes)


def _over_keys(product: Product, dim: Any, dimensions: int) -> Logits:
    """Keys are what the softmax sums over, whichever side of the product they stood on."""
    logits = product.logits
    if isinstance(dim, int) and (dim if dim < 0 else dim - dimensions) == product.query_axis:
        return logits._replace(query=logits.key, key=logits.query)
    return logits


def _size(tensor: Tensor, own: str, labels: list[str]) -> int:
    return functools.reduce(lambda size, label: size * tensor.shape[own.index(label)], labels, 1)


def _is_norm(module: nn.Module) -> bool:
    # Batch norms are affine as they stand; what has modules of its own is named after a norm for other reasons.
    named = "norm" in type(module).__name__.lower() and not isinstance(module, nn.modules.batchnorm._NormBase)
    return named and not module._modules


def _signs(like: Tensor) -> Tensor:
    """Mean 0 and length 1 per channel."""
    signs = torch.ones_like(like)
    signs[..., 1::2] = -1
    return signs


@contextmanager
def _gain_alone(norm: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[None]:
    """Replaces a norm by its learned gain: what is left when its input already has mean 0 and length 1 per channel."""
    forward = norm.forward

    def gain(*args: Any, **kwargs: Any) -> Any:
        if not args:
            args = (kwargs.pop(next(iter(kwargs))),)
        hidden = args[0]
        if any(hidden is tensor for tensor in inputs):
            return hidden
        if isinstance(norm, nn.GroupNorm):
            return hidden if norm.weight is None else hidden * norm.weight.view(-1, *[1] * (hidden.ndim - 2))
        signs = [_signs(hidden)]
        plus = forward(*signs, *args[1:], **kwargs)
        several = not isinstance(plus, Tensor)
        if several:  # a norm of queries and keys in one
            signs = [_signs(one) for one in args[: len(plus)]]
            plus = forward(*signs, *args[len(plus) :], **kwargs)
        minus = forward(*(-sign for sign in signs), *args[len(signs) :], **kwargs)
        pairs = zip(plus, minus, strict=True) if several else [(plus, minus)]
        results = [one * (p - m) * sign / 2 for one, sign, (p, m) in zip(args, signs, pairs, strict=False)]
        return tuple(results) if several else results[0]

    own = norm.__dict__.get("forward")
    norm.__dict__["forward"] = gain
    try:
        yield
    finally:
        del norm.__dict__["forward"]
        if own is not None:
            norm.__dict__["forward"] = own
