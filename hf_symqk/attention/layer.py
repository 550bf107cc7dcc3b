"""One attention layer of a live model: its projections, split into heads, whole whatever holds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .kinds import Role
from .layouts import ComposedProjection, Projection, QKLayout
from .norms import batch_norm_gain, fold_gain
from .projections import has_projection, stored_widths, weight_of
from .rows import HeadShape, Part
from .tensors import LinearTensors, is_sharded, storage_name, whole_linears, whole_parameters


__all__ = ["AttentionLayer", "HeadTensors"]


class HeadTensors(NamedTuple):
    """Weight `(heads, E, D)` and bias `(heads, E)` (or `None`) of one part, as views on the parameters."""

    weight: Tensor
    bias: Tensor | None


class _Read(NamedTuple):
    """Whole tensors of a layer: by the linear map that holds them, and by parameter."""

    linears: dict[nn.Module, LinearTensors]
    parameters: dict[nn.Parameter, Tensor]


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
        role (`str` or `None`), causal (`bool` or `None`): See [`Kind`].
        key_source (`str`): Name of the layer whose keys it reads, empty if it makes its own.
        joined (`torch.nn.Module` or `None`): Holds its projections where `module` does not hold them all.
        model_type (`str` or `None`): Model type of the config that speaks for it.
        verified (`bool`): Whether a forward pass has proven its W_q and W_k (see `verified.py`).
        config (`Any`): What speaks for it: a config, or what a checkpoint's config says of it; `None` without any.
    """

    name: str
    module: nn.Module
    layout: QKLayout
    heads: HeadShape
    kind: Literal["self", "cross"]
    stack: str = ""
    index: int = 0
    problem: str | None = None
    role: Role | None = None
    causal: bool | None = None
    key_source: str = ""
    joined: nn.Module | None = None
    model_type: str | None = None
    verified: bool = False
    config: Any = None

    @property
    def holding(self) -> nn.Module:
        """What the paths of the layout are relative to."""
        return self.module if self.joined is None else self.joined

    def paths(self) -> list[tuple[Projection, str]]:
        """The linear maps that W_q and W_k are made of, each with its path in the model."""
        lent = self.layout.lendable if self.key_source else ()
        return [
            (piece, ".".join(filter(None, (self.key_source if piece in lent else self.name, piece.path))))
            for piece in self.layout.pieces
        ]

    def norms(self) -> list[tuple[str, tuple[str, ...]]]:
        """Names that a norm may have whose gain is folded in, each list with the path of the module that has it."""
        lender = self.key_source or self.name
        inner = [
            (owner, (projection.norm,))
            for owner, projection in ((self.name, self.layout.query), (lender, self.layout.key))
            if isinstance(projection, ComposedProjection) and projection.norm is not None
        ]
        return [(self.name, self.layout.query_norms), (lender, self.layout.key_norms), *inner]

    def has(self, part: Part) -> bool:
        """Whether the layout says where the part (`"query"`, `"key"`, `"value"`) is, and the module has it there."""
        projection = getattr(self.layout, part)
        return projection is not None and has_projection(self.holding, projection)

    def projection(self, part: Part) -> Projection | ComposedProjection:
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
        return stored_widths(self.holding, self.projection(part))[1]

    def holder(self, part: Part) -> nn.Module:
        """
        Module that holds the part's weight: a linear map, perhaps adapted, quantised or sharded, or (where the weight
        is a parameter of some other name) the module that has that parameter.

        Raises:
            ValueError: if the part is a product of several weights, or the layer does not have it.
        """
        self.require_writable(part)
        return self.holding.get_submodule(self.projection(part).pieces[0].module)

    def holders(self, *parts: Part) -> set[nn.Module]:
        """All modules that hold weights of the parts."""
        return {self.holding.get_submodule(piece.module) for part in parts for piece in self.projection(part).pieces}

    def require_writable(self, *parts: Part) -> None:
        """
        Checks that values can be given to parts.

        Raises:
            ValueError: if a part is a product of several weights, or the keys are those of another layer.
        """
        for part in parts:
            if part == "key" and self.key_source:
                raise ValueError(
                    f"{self.name!r} reads the keys of {self.key_source!r}, whose W_k cannot be made from the W_q of "
                    "several layers. Choose layers that have keys of their own with `layers`."
                )
            projection = self.projection(part)
            if isinstance(projection, ComposedProjection):
                names = ", ".join(dict.fromkeys(piece.path for piece in projection.pieces))
                raise ValueError(
                    f"{self.name!r}: the {part} weight of layout {self.layout.name!r} is a product ({names}); it can "
                    "be scored but not initialised. Choose other layers with `layers`, if there are any."
                )
            if projection.batch_norm is not None:
                raise ValueError(
                    f"{self.name!r}: the {part} rows of layout {self.layout.name!r} go through {projection.batch_norm}"
                    ", which rescales each of them by the statistics of the data; they can be scored but not "
                    "initialised."
                )

    def storages(self, *parts: Part) -> set[str]:
        """Names of the forms in which the parts' linear maps are stored (see [`storage_name`])."""
        maps = [piece for part in parts for piece in self.projection(part).pieces if not piece.is_parameter]
        return {storage_name(self.holding.get_submodule(piece.module)) for piece in maps}

    @property
    def read_once(self) -> bool:
        """Whether reading Q and K takes other processes; then every rank has to come along."""
        return is_sharded(self.holding)

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
            `dict[str, HeadTensors]`: Views, no copies, unless the weights are sharded, adapted, quantised or a
            product, or their rows stand in an order that no view gives as heads.

        Raises:
            ValueError: if the weights cannot be read (or written) as they are stored.
        """
        if write:
            self.require_writable(*parts)
        projections = {part: self.projection(part) for part in parts}
        pieces = [piece for projection in projections.values() for piece in projection.pieces]
        linears = [self.holding.get_submodule(piece.module) for piece in pieces if not piece.is_parameter]
        named = [
            weight_of(self.holding, piece, name)
            for piece in pieces
            if piece.is_parameter
            for name in (piece.weight, piece.bias)
        ]
        inner = [name for one in projections.values() if isinstance(one, ComposedProjection) for name in one.norms]
        inner += [piece.batch_norm for piece in pieces if piece.batch_norm is not None]
        norms = [self._norm(name) for name in dict.fromkeys(inner)]
        gains = [parameter for norm in norms if norm is not None for parameter in norm.parameters()]
        with (
            whole_parameters(gains) as whole_gains,
            whole_parameters([held for held in named if held is not None], write=write) as whole,
            whole_linears(linears, write=write) as whole_maps,
        ):
            read = _Read(whole_maps, {**whole_gains, **whole})
            split = {part: self._part(projection, read) for part, projection in projections.items()}
            yield split
            for part in parts if write else ():
                self._write_back(projections[part].pieces[0], split[part], read)

    @contextmanager
    def query_key_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """
        W_q `(H, E, D)` and W_k `(G, E, D)` as the scores see them: learned gains of query and key norms, and learned
        scales of the queries, folded in.

        Yields:
            `tuple[torch.Tensor, torch.Tensor]`: Views where there is nothing to fold.

        Raises:
            ValueError: if the weights cannot be read as they are stored, or a query or key norm holds parameters
                that are not one gain per channel.
        """
        norms = [
            next((module for name in names if (module := getattr(self.holding, name, None)) is not None), None)
            for names in (self.layout.query_norms, self.layout.key_norms)
        ]
        learned = self.layout.query_scale
        scales = [self.holding.get_parameter(path) for path in learned.parameters] if learned else []
        gains = [parameter for norm in norms if norm is not None for parameter in norm.parameters()]
        with whole_parameters(gains + scales) as whole, self.tensors("query", "key") as tensors:
            w_q = fold_gain(self.name, tensors["query"].weight, norms[0], whole)
            w_k = fold_gain(self.name, tensors["key"].weight, norms[1], whole)
            if learned is not None:
                heads, head_dim = w_q.shape[:2]
                scale = learned.scale(*(whole[parameter].float() for parameter in scales))
                scale = scale.view(heads, 1) if scale.numel() == heads != head_dim else scale.view(-1, head_dim)
                w_q = w_q * scale.unsqueeze(-1)
            yield w_q, w_k

    def _norm(self, name: str | None) -> nn.Module | None:
        """A norm of the attention module by its path, if it has it."""
        try:
            return None if name is None else self.holding.get_submodule(name)
        except AttributeError:
            return None

    def _part(self, projection: Projection | ComposedProjection, read: _Read) -> HeadTensors:
        if isinstance(projection, Projection):
            return self._split(projection, read)
        down, up = self._split(projection.down, read), self._split(projection.up, read)
        latent = fold_gain(self.name, down.weight, self._norm(projection.norm), read.parameters)
        if projection.twice:
            latent = torch.cat([latent, down.weight.to(latent)], 1)
        dtype = torch.promote_types(torch.promote_types(latent.dtype, up.weight.dtype), torch.float32)
        weight = up.weight.to(dtype) @ latent.flatten(0, 1).to(dtype)
        if projection.scale is not None:
            weight = weight * getattr(self.module, projection.scale, 1.0)
        if projection.shared is not None:
            shared = self._split(projection.shared, read).weight
            shared = fold_gain(self.name, shared, self._norm(projection.shared_norm), read.parameters).to(dtype)
            weight = torch.cat([weight, shared.expand(weight.shape[0], -1, -1)], 1)
        # What a norm or a scale makes of biases is left aside: nobody reads those of a product.
        return HeadTensors(weight, None)

    def _rows(self, piece: Projection, read: _Read) -> LinearTensors:
        """A whole linear map, one row per output channel: views."""
        if piece.is_parameter:
            held, added = (weight_of(self.holding, piece, name) for name in (piece.weight, piece.bias))
            assert held is not None, "asked only of projections that the layer has"
            weight, bias = read.parameters[held], None if added is None else read.parameters[added]
            weight = weight.flatten(1) if piece.transposed else weight.flatten(0, -2)
            bias = None if bias is None else bias.flatten()
        else:
            weight, bias = read.linears[self.holding.get_submodule(piece.module)]
            weight = weight.flatten(1)  # a convolution of one token has dimensions of size 1 behind
        weight = weight.mT if piece.transposed else weight
        if (norm := self._norm(piece.batch_norm)) is not None:
            # What the norm makes of the bias is left aside: no part of W_qk.
            gain = batch_norm_gain(norm, read.parameters)
            weight, bias = weight.to(torch.promote_types(weight.dtype, gain.dtype)) * gain.unsqueeze(1), None
        return LinearTensors(weight, bias)

    def _split(self, piece: Projection, read: _Read) -> HeadTensors:
        weight, bias = self._rows(piece, read)
        select = piece.rows.select
        return HeadTensors(select(weight, self.heads), None if bias is None else select(bias, self.heads))

    def _write_back(self, piece: Projection, heads: HeadTensors, read: _Read) -> None:
        """Some orders of rows cannot be viewed as heads: what was written to their copies goes to its rows."""
        for rows, written in zip(self._rows(piece, read), heads, strict=True):
            if rows is None or written is None:
                continue
            if written.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():
                continue
            index = piece.rows.select(torch.arange(rows.shape[0], device=rows.device), self.heads).flatten()
            rows[index] = written.flatten(0, 1)
