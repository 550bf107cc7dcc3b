"""
Which output rows of a projection are those of the heads of one part: the arrangements that models store them in.

Shape legend: `E` head width, `O` output rows of a projection.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor


__all__ = [
    "GatedRows",
    "HeadRows",
    "HeadShape",
    "LatentRows",
    "Part",
    "PerHeadRows",
    "RowSelector",
    "ShardedRows",
    "WholeRows",
]

Part = Literal["query", "key", "value"]


class HeadShape(NamedTuple):
    """
    Head counts of an attention module: `num_attention_heads` H, `num_key_value_heads` G and `head_dim` E (which need
    not be D/H). Query head h reads key head `h // (H // G)`. `shared_head_dim` of the E channels of a key, the last
    ones, may be the same for all heads (the rotary channels of latent attention).
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    shared_head_dim: int = 0

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per key head, `r = H / G` (the name that Transformers uses)."""
        return self.num_attention_heads // self.num_key_value_heads

    def count(self, part: Part) -> int:
        """Number of heads of the query, key or value part."""
        return self.num_attention_heads if part == "query" else self.num_key_value_heads


class RowSelector(Protocol):
    """Which output rows of a projection belong to the heads of one part. [`HeadRows`] serves the regular cases."""

    def fits(self, number: int, heads: HeadShape) -> bool:
        """Whether a projection of so many output rows can be one with these head counts."""

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        """View `(heads of the part, E, ...)` of a tensor `(O, ...)`."""


@dataclass(frozen=True)
class HeadRows:
    """
    Rows of one part in a projection that holds one or several parts.

    Args:
        part (`str`):
            `"query"`, `"key"` or `"value"`.
        order (`tuple[str, ...]`, *optional*):
            Parts in the order in which the projection holds them; by default the part has a projection of its own.
        interleaved (`bool`, *optional*, defaults to `False`):
            `False`: all heads of one part, then all of the next (`[q0 q1 … k0 k1 … v0 v1 …]`). `True`: all parts of
            one key head, then those of the next: `[q0 k0 v0 q1 k1 v1 …]` where `H = G`, `[q0 q1 k0 v0 q2 q3 k1 v1 …]`
            where two query heads read each key head.
    """

    part: Part
    order: tuple[Part, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", (self.part,))
        if self.part not in self.order:
            raise ValueError(f"`part` {self.part!r} is not in `order` {self.order}.")

    def count(self, heads: HeadShape) -> int:
        """Output rows that the whole projection has for these head counts."""
        return sum(map(heads.count, self.order)) * heads.head_dim

    def fits(self, number: int, heads: HeadShape) -> bool:
        return number == self.count(heads)

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        position = self.order.index(self.part)
        blocks = heads.num_key_value_heads if self.interleaved else 1
        start, number = sum(map(heads.count, self.order[:position])) // blocks, heads.count(self.part) // blocks
        rows = rows.unflatten(0, (blocks, -1, heads.head_dim)).narrow(1, start, number)
        # Heads of one key head stand together; a view only where one of the two dimensions is 1 or they are adjacent.
        return rows.flatten(0, 1)


@dataclass(frozen=True)
class GatedRows:
    """Rows of a query projection that holds, head by head, a query and a gate of its width (`[q0 g0 q1 g1 …]`)."""

    def __str__(self) -> str:
        return "query gate"

    def fits(self, number: int, heads: HeadShape) -> bool:
        return number == 2 * heads.num_attention_heads * heads.head_dim

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        return rows.unflatten(0, (heads.num_attention_heads, 2, heads.head_dim))[:, 0]


@dataclass(frozen=True)
class PerHeadRows:
    """
    Rows of one part in a projection that holds, head by head, parts of the head's width and then a rest of another
    (`[q0 k0 v0 q1 k1 v1 …]` with values of any width, `[q0 g0 q1 g1 …]` with gates of any width).

    Args:
        position (`int`, *optional*, defaults to 0): How many parts of width `E` stand before this one in a head.
    """

    position: int = 0

    def __str__(self) -> str:
        return f"part {self.position + 1} of each head"

    def fits(self, number: int, heads: HeadShape) -> bool:
        each, rest = divmod(number, heads.num_attention_heads)
        even = rest == 0 and heads.num_attention_heads == heads.num_key_value_heads
        return even and each > (self.position + 1) * heads.head_dim

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        rows = rows.unflatten(0, (heads.num_attention_heads, -1))
        return rows.narrow(1, self.position * heads.head_dim, heads.head_dim)


@dataclass(frozen=True)
class ShardedRows:
    """
    Rows of one part in a projection that was trained in shards, each with its heads of all parts in one order
    (`[q0 q1 v0 v1 k0 k1 | q2 q3 v2 v3 k2 k3 | …]`).

    Args:
        part (`str`): `"query"`, `"key"` or `"value"`.
        order (`tuple[str, ...]`): Parts in the order in which a shard holds them.
        shards (`int`): Number of shards; it divides the number of heads.
    """

    part: Part
    order: tuple[Part, ...]
    shards: int

    def fits(self, number: int, heads: HeadShape) -> bool:
        even = heads.num_attention_heads % self.shards == 0
        return even and number == sum(map(heads.count, self.order)) * heads.head_dim

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        rows = rows.unflatten(0, (self.shards, len(self.order), -1, heads.head_dim))
        return rows[:, self.order.index(self.part)].flatten(0, 1)


@dataclass(frozen=True)
class LatentRows:
    """
    Rows of latent attention (DeepSeek's MLA), whose keys are projected down, normalised, and up again, and end in
    channels that all heads share.

    Args:
        part (`str`):
            `"latent"`: the rows of the first projection that go on to the second; `"shared"`: its last rows, which
            end the keys of every head; `"key"`: the first rows of each head in the second one, whose rest is values.
    """

    part: Literal["latent", "shared", "key"]

    def fits(self, number: int, heads: HeadShape) -> bool:
        if self.part != "key":
            return number > heads.shared_head_dim
        each, rest = divmod(number, heads.num_attention_heads)
        return rest == 0 and each > heads.head_dim - heads.shared_head_dim

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        shared = heads.shared_head_dim
        if self.part == "key":
            return rows.unflatten(0, (heads.num_attention_heads, -1))[:, : heads.head_dim - shared]
        latent = rows.shape[0] - shared
        rows = rows[:latent] if self.part == "latent" else rows[latent:]
        return rows.unsqueeze(0)


@dataclass(frozen=True)
class WholeRows:
    """All rows of a projection that stands before another one, as one head."""

    def fits(self, number: int, heads: HeadShape) -> bool:
        return True

    def select(self, rows: Tensor, heads: HeadShape) -> Tensor:
        return rows.unsqueeze(0)
