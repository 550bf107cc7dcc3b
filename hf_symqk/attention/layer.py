"""One attention layer of a live model: its projections, split into heads, whole whatever holds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .layouts import HeadShape, Part, Projection, QKLayout
from .tensors import LinearTensors, full_shape, is_sharded, linear_shape, whole_linears, whole_parameters


__all__ = ["AttentionLayer", "HeadTensors", "has_projection", "stored_widths"]


class HeadTensors(NamedTuple):
    """Weight `(heads, E, D)` and bias `(heads, E)` (or `None`) of one part, as views on the parameters."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """
    One attention layer of a live model.

    Attributes:
        name (`str`): Dotted path of the attention module in the model.
        module (`torch.nn.Module`): The attention module.
        layout ([`QKLayout`]): Entry of the table that it matches.
        heads ([`HeadShape`]): Its head counts.
        kind (`str`): `"self"` or `"cross"`.
        problem (`str` or `None`): Why the layer cannot be read (its head counts do not fit its weights); whoever
            chooses it is told.
        stack (`str`): Name of its stack (`"encoder"`, `"text_model"`, …), empty if the model has only one.
        index (`int`): Its position in the stack.
    """

    name: str
    module: nn.Module
    layout: QKLayout
    heads: HeadShape
    kind: Literal["self", "cross"]
    stack: str = ""
    index: int = 0
    problem: str | None = None

    def has(self, part: Part) -> bool:
        """Whether the layout says where the part (`"query"`, `"key"`, `"value"`) is, and the module has it there."""
        projection = getattr(self.layout, part)
        return projection is not None and has_projection(self.module, projection)

    def projection(self, part: Part) -> Projection:
        """
        Where the part is.

        Raises:
            ValueError: if the layer does not have it.
        """
        if not self.has(part):
            raise ValueError(f"{self.name!r} has no {part} projection where layout {self.layout.name!r} expects it.")
        return getattr(self.layout, part)

    def input_width(self, part: Part) -> int:
        """Width `D` of the stream that the part is projected from."""
        return stored_widths(self.module, self.projection(part))[1]

    def holder(self, part: Part) -> nn.Module:
        """Submodule that holds the part's projection: a linear map, perhaps adapted, quantised or sharded."""
        return self.module.get_submodule(self.projection(part).module)

    @property
    def read_once(self) -> bool:
        """Whether reading Q and K takes other processes; then every rank has to come along."""
        return is_sharded(self.module)

    @contextmanager
    def tensors(self, *parts: Part, write: bool = False) -> Iterator[dict[Part, HeadTensors]]:
        """
        Whole weights and biases of the given parts, split into heads.

        Args:
            parts (`str`):
                Any of `"query"`, `"key"`, `"value"`.
            write (`bool`, *optional*, defaults to `False`):
                Whether in-place changes are to reach the parameters (see [`whole_linears`]).

        Yields:
            `dict[str, HeadTensors]`: Views, no copies, unless the weights are sharded, adapted or quantised.

        Raises:
            ValueError: if the weights cannot be read (or written) as they are stored.
        """
        with whole_linears([self.holder(part) for part in parts], write=write) as linears:
            yield {part: self._split(part, linears[self.holder(part)]) for part in parts}

    @contextmanager
    def query_key_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """
        W_q `(H, E, D)` and W_k `(G, E, D)` as the scores see them: learned gains of query and key norms folded in.

        Yields:
            `tuple[torch.Tensor, torch.Tensor]`: Views where there is nothing to fold.

        Raises:
            ValueError: if the weights cannot be read as they are stored, or a query or key norm holds parameters
                that are not one gain per channel.
        """
        norms = [
            next((module for name in names if (module := getattr(self.module, name, None)) is not None), None)
            for names in (self.layout.query_norms, self.layout.key_norms)
        ]
        gains = [parameter for norm in norms if norm is not None for parameter in norm.parameters()]
        with whole_parameters(gains) as whole, self.tensors("query", "key") as tensors:
            w_q, w_k = tensors["query"].weight, tensors["key"].weight
            yield self._fold(w_q, norms[0], whole), self._fold(w_k, norms[1], whole)

    def _split(self, part: Part, linear: LinearTensors) -> HeadTensors:
        projection = self.projection(part)
        weight = linear.weight.mT if projection.transposed else linear.weight
        select = projection.rows.select
        bias = None if linear.bias is None else select(linear.bias, self.heads)
        return HeadTensors(select(weight, self.heads), bias)

    def _fold(self, weight: Tensor, norm: nn.Module | None, whole: dict[nn.Parameter, Tensor]) -> Tensor:
        parameters = {} if norm is None else dict(norm.named_parameters())
        if norm is None or not parameters:
            return weight
        heads, head_dim = weight.shape[:2]
        gain = parameters.get("weight")
        if gain is None or full_shape(gain) not in [(head_dim,), (heads * head_dim,), (heads, head_dim)]:
            shapes = {name: tuple(full_shape(parameter)) for name, parameter in parameters.items()}
            raise ValueError(
                f"{self.name!r}: the parameters {shapes} of its {type(norm).__name__} are not one gain per channel of "
                f"{heads} heads of width {head_dim}; they cannot be folded into the weights."
            )
        gains = whole[gain].to(torch.promote_types(gain.dtype, torch.float32)) + _gain_offset(self.name, norm)
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) * gains.view(-1, head_dim, 1)


def _gain_offset(name: str, norm: nn.Module) -> int:
    """0 if a norm multiplies by its weight w, 1 if by 1 + w: its own forward says so, its eps left aside."""
    # A vector of ±1 comes out of every norm as it is, but for the gain. On the CPU and with values of its own, so that
    # no device has to be waited for and no weight that is not finite gets in the way.
    shapes = {name: full_shape(parameter) for name, parameter in norm.named_parameters()}
    probe = torch.ones(shapes["weight"])
    probe.view(-1)[1::2] = -1
    gains = []
    for weight in (0.0, 2.0):
        held = {name: torch.full(shape, weight if name == "weight" else 0.0) for name, shape in shapes.items()}
        gains.append(float((torch.func.functional_call(norm, held, (probe,)) * probe).mean()))
    offset = round(gains[0])
    if offset not in (0, 1) or round(gains[1]) != 2 + offset:
        raise ValueError(
            f"{name!r}: its {type(norm).__name__} multiplies neither by its weight w nor by 1 + w; its gain cannot be "
            "folded into the weights."
        )
    return offset


def stored_widths(module: nn.Module, projection: Projection) -> tuple[int, int]:
    """Output rows and input width of a projection."""
    shape = linear_shape(module.get_submodule(projection.module))
    assert shape is not None, "asked only of projections that `has_projection` has seen"
    rows, width = shape
    return (width, rows) if projection.transposed else (rows, width)


def has_projection(module: nn.Module, projection: Projection) -> bool:
    if projection.module.partition(".")[0] not in module._modules:
        return False
    try:
        holder = module.get_submodule(projection.module)
    except AttributeError:
        return False
    return linear_shape(holder) is not None
