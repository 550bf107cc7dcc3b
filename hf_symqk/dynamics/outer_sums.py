"""
Sums of weighted outer products of hidden states, `Σ_ij β_ij x_i y_jᵀ`, as factors or multiplied out, whichever is
smaller.

Shape legend: `H` heads, `S` sequences, `N`, `M` tokens on the query and the key side, `T = S · N`, `D`, `C` width of
`x` and `y`. Both `x` and `y` carry a last channel of ones, which keeps what biases add.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ..bilinear import BilinearForm


__all__ = ["LogitsTooLargeError", "OuterSum", "Room", "check_memory"]


def check_memory(value: float, option: str) -> None:
    """
    Refuses what is no amount of memory.

    Args:
        value (`float`): GiB.
        option (`str`): What errors call it.

    Raises:
        ValueError: unless it is a number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"`{option}` must be a number of GiB above 0, got {value!r}.")


class LogitsTooLargeError(ValueError):
    """The attention logits of a batch take more than they may; those of fewer sequences might not."""


@dataclass
class Room:
    """Bytes that attention logits and sums may take in all, and what they take so far."""

    limit: float
    option: str = "memory_gib"  # what the limit is called where it was given
    logits: int = 0  # of the batch that is being added
    taken: dict[str, int] = field(default_factory=dict)

    def admit_logits(self, size: int) -> None:
        """
        Notes what the attention logits of a batch take, with what comes next.

        Args:
            size (`int`): Bytes of all logits up to here.

        Raises:
            LogitsTooLargeError: if that is too much, saying what there is to do.
        """
        held = sum(self.taken.values())
        if size + held > self.limit:
            beside = f" beside {held / 2**30:.3g} GiB of sums" if held else ""
            raise LogitsTooLargeError(
                f"The attention logits of a batch, all of which are held until their gradients are there, take "
                f"{size / 2**30:.3g} GiB or more{beside}; that is more than `{self.option}` = "
                f"{self.limit / 2**30:.3g}. Raise it, or give fewer sequences at once or shorter ones."
            )
        self.logits = size

    def reserve(self, name: str, size: int) -> None:
        """
        Notes what the sum of a layer takes.

        Args:
            name (`str`): Of the layer.
            size (`int`): Bytes.

        Raises:
            ValueError: if that is too much, saying what there is to do.
        """
        self.taken[name] = size
        total = sum(self.taken.values())
        if total + self.logits > self.limit:
            beside = f" beside {self.logits / 2**30:.3g} GiB of attention logits" if self.logits else ""
            raise ValueError(
                f"The updates of {len(self.taken)} layers up to {name!r} take {total / 2**30:.3g} GiB{beside}; that "
                f"is more than `{self.option}` = {self.limit / 2**30:.3g}. Raise it, choose fewer `layers`, or keep "
                "layer forms alone with `heads=False`."
            )


class OuterSum:
    """
    One sum a head, `(H, D + 1, C + 1)`.

    As long as the tokens are few it is kept as its factors, `x` `(T, D + 1)` and `Σ_j β_ij y_j` `(H, T, C + 1)`; from
    `T (D + 1 + H (C + 1)) ≥ H (D + 1) (C + 1)` on as the matrices, so that it never takes more than those, however
    many batches come. Sums are exact either way.

    Args:
        name (`str`): What errors call it.
        room ([`Room`]): What it may take.
    """

    def __init__(self, name: str, room: Room) -> None:
        self.name = name
        self.room = room
        self.factors: tuple[Tensor, Tensor] | None = None
        self.matrices: Tensor | None = None

    def add(self, queries: Tensor, keys: Tensor, weights: Tensor) -> None:
        """
        Adds one batch.

        Args:
            queries (`torch.Tensor` of shape `(S, N, D)`): `x`.
            keys (`torch.Tensor` of shape `(S, M, C)`): `y`.
            weights (`torch.Tensor` of shape `(S, H, N, M)`): β.
        """
        x, y = (F.pad(tensor.to(weights.dtype), (0, 1), value=1.0) for tensor in (queries, keys))
        heads, rows, columns = weights.shape[1], x.shape[-1], y.shape[-1]
        before = 0 if self.factors is None else len(self.factors[0])
        tokens = before + x.shape[:2].numel()
        size = tokens * (rows + heads * columns)
        if self.matrices is None and size < heads * rows * columns:
            self.room.reserve(self.name, size * weights.element_size())
            right = (weights.transpose(0, 1) @ y).flatten(1, 2)  # (H, S, N, C + 1)
            left = x.flatten(0, 1)
            if self.factors is not None:
                left, right = torch.cat([self.factors[0], left]), torch.cat([self.factors[1], right], 1)
            self.factors = left, right
            return
        self.room.reserve(self.name, heads * rows * columns * weights.element_size())
        total = self._multiplied_out(x.new_zeros(heads, rows, columns))
        for head, matrix in enumerate(total):  # a head at a time: all of `weights @ y` may be larger than the sums
            matrix.addmm_(x.flatten(0, 1).mT, (weights[:, head] @ y).flatten(0, 1))

    def _multiplied_out(self, empty: Tensor) -> Tensor:
        if self.matrices is None:
            self.matrices = empty
            if self.factors is not None:
                left, right = self.factors
                for matrix, factor in zip(empty, right, strict=True):
                    matrix.addmm_(left.mT, factor)
                self.factors = None
        return self.matrices

    @property
    def is_multiplied_out(self) -> bool:
        """Whether the matrices themselves are kept."""
        return self.matrices is not None

    def dense(self, extended: bool) -> Tensor:
        """The matrices `(H, D, C)`; of shape `(H, D + 1, C + 1)` with `extended`."""
        if self.matrices is not None:
            return self.matrices if extended else self.matrices[:, :-1, :-1]
        form = self.form(extended)
        return form.left @ form.right.mT

    def form(self, extended: bool, together: bool = False) -> BilinearForm:
        """
        The sums as factors.

        Args:
            extended (`bool`): Whether the last channel, of ones, is part of them.
            together (`bool`, *optional*, defaults to `False`): Whether heads are summed.

        Returns:
            [`BilinearForm`] of batch shape `(H,)`, or `()` with `together`.
        """
        end = None if extended else -1
        if self.factors is not None:
            left, right = self.factors
            right = right.sum(0) if together else right
            return BilinearForm(left[:, :end].mT, right[..., :end].mT)
        matrices = self.dense(extended)
        matrices = matrices.sum(0) if together else matrices
        identity = torch.eye(matrices.shape[-2], dtype=matrices.dtype, device=matrices.device)
        return BilinearForm(identity, matrices.mT)
