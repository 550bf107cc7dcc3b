"""The attention layers of a checkpoint: stand-ins for those of a live model, whose weights come from files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..attention import AttentionLayer, HeadShape, Projection, QKLayout
from .adapter import AdapterPart
from .forms import Form
from .reading import Need, Reader
from .weights import StoredTensor


__all__ = ["CheckpointLayer", "Part", "needs_of"]


@dataclass(frozen=True)
class Part:
    """
    One of the modules that W_q and W_k of a layer are made of: a projection, or a norm.

    Args:
        path (`str`): Its path in the model.
        stored (`Mapping[str, StoredTensor]`): Its tensors, by their names in it.
        form (`Form` or `None`): How a projection is stored; `None` for what is one plain vector, a norm or a scale.
        is_parameter (`bool`): Whether the path is that of a parameter outside any linear map.
        adapter (`AdapterPart` or `None`): What an adapter does to it.
    """

    path: str
    stored: Mapping[str, StoredTensor]
    form: Form | None
    is_parameter: bool = False
    adapter: AdapterPart | None = None

    @property
    def needed(self) -> list[StoredTensor]:
        """The module's own tensors that have to be read."""
        if self.adapter is not None and not self.adapter.needs_base:
            return []
        return [self.stored[name] for name in (("weight",) if self.form is None else self.form.needed)]

    @property
    def added(self) -> list[StoredTensor]:
        """The adapter's tensors that have to be read."""
        return list(self._of_adapter().values())

    def _of_adapter(self) -> dict[str, StoredTensor]:
        # The adapter was made of tensors of this class, of which it knows key, type and shape alone.
        return {} if self.adapter is None else cast(dict[str, StoredTensor], dict(self.adapter.tensors))

    def weight(self, read: Mapping[StoredTensor, Tensor], transposed: bool) -> Tensor:
        """The weight as a live module would have it, `(D, O)` if transposed, from what was read."""
        weight: Tensor | None = None
        if self.needed:
            values = {name: read[tensor] for name, tensor in self.stored.items() if tensor in read}
            weight = values["weight"] if self.form is None else self.form.dense(values)
            if self.form is not None and self.form.out_in and transposed:
                weight = weight.mT
            # Nothing can be computed in 8 bits, and 16 hold their values exactly.
            weight = weight.to(torch.bfloat16) if weight.dtype.itemsize == 1 else weight
        if self.adapter is not None:
            values = {name: read[tensor] for name, tensor in self._of_adapter().items()}
            weight = self.adapter.weight(values, weight, transposed=transposed)
        assert weight is not None, "a part that needs nothing of its own has an adapter"
        return weight


@dataclass(frozen=True, eq=False)
class CheckpointLayer:
    """
    One attention layer of a checkpoint; [`score_layers`] takes it like one of a live model.

    Attributes:
        found ([`AttentionLayer`]): The same layer among modules on the meta device.
        parts (`tuple[Part, ...]`): The modules that its W_q and W_k are made of.
        needs (`tuple[Need, ...]`): What has to be read of them.
        reader (`Reader`): What reads it.
        dtype (`torch.dtype` or `None`): What weights are converted to.
        problem (`str` or `None`): Why the layer cannot be read.
    """

    found: AttentionLayer
    parts: tuple[Part, ...]
    needs: tuple[Need, ...]
    reader: Reader
    dtype: torch.dtype | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def stack(self) -> str:
        return self.found.stack

    @property
    def index(self) -> int:
        return self.found.index

    @property
    def kind(self) -> str:
        return self.found.kind

    @property
    def role(self) -> str | None:
        return self.found.role

    @property
    def causal(self) -> bool | None:
        return self.found.causal

    @property
    def key_source(self) -> str:
        return self.found.key_source

    @property
    def layout(self) -> QKLayout:
        return self.found.layout

    @property
    def heads(self) -> HeadShape:
        return self.found.heads

    @property
    def model_type(self) -> str | None:
        return self.found.model_type

    @property
    def verified(self) -> bool:
        return self.found.verified

    @property
    def read_once(self) -> bool:
        """Files are slower than arithmetic."""
        return True

    @property
    def keys(self) -> tuple[StoredTensor, ...]:
        """The tensors behind W_q and W_k."""
        return tuple(need.tensor for need in self.needs)

    @contextmanager
    def query_key_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """
        W_q `(H, E, D)` and W_k `(G, E, D)` as the scores see them, held as long as the context.

        Raises:
            OSError: if a file cannot be read.
            ValueError: if what was read is not the weight that it should be.
        """
        read = self.reader.take(self.needs)
        places = [(*self._place(part), part) for part in self.parts]
        empty = [getattr(module, name) for module, name, _ in places]
        try:
            for module, name, part in places:
                weight = part.weight(read, self._is_transposed(part))
                setattr(module, name, nn.Parameter(weight.to(self.dtype or weight.dtype), requires_grad=False))
            del read
            with self.found.query_key_weights() as weights:
                yield weights
        finally:
            for (module, name, _), weight in zip(places, empty, strict=True):
                setattr(module, name, weight)

    def _is_transposed(self, part: Part) -> bool:
        return any(piece.transposed for piece, path in self.found.paths() if path == part.path)

    def _place(self, part: Part) -> tuple[nn.Module, str]:
        """The stand-in that takes the part's weight, and its name there."""
        lent = self.key_source and part.path.startswith(f"{self.key_source}.")
        path = part.path.removeprefix(self.key_source if lent else self.name).removeprefix(".")
        module, _, name = path.rpartition(".") if part.is_parameter else (path, "", "weight")
        return self.found.holding.get_submodule(module), name


def needs_of(part: Part, projections: list[Projection], heads: HeadShape) -> list[Need]:
    """
    What has to be read of a module.

    Args:
        part (`Part`): The module.
        projections (`list[Projection]`): Query, key or both, as far as it holds them; none for a norm.
        heads ([`HeadShape`]): The layer's head counts.

    Returns:
        `list[Need]`: The rows of queries and keys alone, where rows can be read alone.
    """
    by_rows = part.form is not None and part.form.rows and part.adapter is None
    if not by_rows or not projections or any(entry.transposed for entry in projections):
        return [Need(tensor) for tensor in (*part.needed, *part.added)]
    return [Need(tensor, _row_spans(tensor, projections, heads)) for tensor in part.needed]


def _row_spans(tensor: StoredTensor, projections: list[Projection], heads: HeadShape) -> tuple[tuple[int, int], ...]:
    rows = torch.arange(tensor.shape[0])
    # Asking for the rows of a list of row numbers tells them, whatever the layout's order.
    chosen = torch.cat([entry.rows.select(rows, heads).flatten() for entry in projections]).unique()
    starts = chosen[torch.cat([torch.tensor([True]), chosen.diff() > 1])]
    ends = chosen[torch.cat([chosen.diff() > 1, torch.tensor([True])])] + 1
    if len(starts) > 1:  # scattered over the tensor: reading it in one go costs less than skipping
        starts, ends = starts[:1], ends[-1:]
    size = tensor.nbytes // tensor.shape[0]
    return tuple((int(start) * size, int(end) * size) for start, end in zip(starts, ends, strict=True))
