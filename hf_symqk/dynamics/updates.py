"""
What training does to W_qk: [`QKUpdates`], layers × heads, with their scores.

Shape legend: `H` query heads, `S` sequences, `N`, `M` tokens on the query and the key side, `D`, `C` width of what W_q
and W_k read (equal in self-attention).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bilinear import BilinearForm
from ..dense import directionality_score, symmetry_score
from ..scores import METRICS, LayerScores, QKScores
from .aligning import Relation
from .outer_sums import OuterSum


__all__ = ["LayerUpdate", "QKUpdates", "TermWeights", "log_of_updates"]


class TermWeights(NamedTuple):
    """
    How much the rank-1 terms `β_ij x_i x_jᵀ` of a layer's updates weigh: sums of `|β_ij|`, one row a head (with
    `heads=False` one in all, of the terms summed over heads). Signed sums over the context of a prediction would say
    nothing: a softmax makes each of them 0.

    Attributes:
        as_prediction (`torch.Tensor` of shape `(H, S, N)`): Of each token over its context, on the query side: the
            token whose output the loss asks for.
        as_context (`torch.Tensor` of shape `(H, S, M)`): Of each token over what attends to it, on the key side.
    """

    as_prediction: Tensor
    as_context: Tensor


@dataclass(frozen=True, eq=False)
class LayerUpdate:
    """
    The update of W_qk of one attention layer.

    Attributes:
        name (`str`), stack (`str`), index (`int`), kind (`str`), layout (`str`), num_heads (`int`),
            num_key_value_heads (`int`), head_dim (`int`), role, causal, key_source, verified: As in [`LayerScores`].
        scale (`float` or `None`): Factor of the logits that the forward pass was seen to use (1/√E, 1 in T5);
            `None` where it differs from pair to pair (capped logits). The forms have it in them either way.
        relation (`str`): What the logits are: `"direct"`, `scale · (x_i W_q + b_q) (x_j W_k + b_k)ᵀ` and whatever does
            not depend on this product; `"rotated"`, with queries and keys turned by their positions in between;
            `"other"`, with something else in between (query and key norms, latent projections).
        position_as_prediction (`torch.Tensor` of shape `(H, N)`), position_as_context (`torch.Tensor` of shape
            `(H, M)`): [`TermWeights`] summed over all sequences.
        weights ([`TermWeights`] or `None`): Those of each token; `None` where several batches were summed.
    """

    name: str
    stack: str
    index: int
    kind: str
    layout: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    role: str | None
    causal: bool | None
    key_source: str
    verified: bool
    scale: float | None
    relation: Relation
    position_as_prediction: Tensor
    position_as_context: Tensor
    weights: TermWeights | None
    _sum: OuterSum
    _has_heads: bool

    @property
    def form(self) -> BilinearForm:
        """The layer's update `(D, C)`, the sum of those of its heads."""
        return self._sum.form(extended=False, together=True)

    @property
    def head_forms(self) -> BilinearForm:
        """
        The update `(D, C)` of each head, batch shape `(H,)`: `left` are hidden states, `right` what each of them is
        paired with; or, where that is less to keep, the identity and the matrices themselves.

        Raises:
            ValueError: if heads were not kept.
        """
        self._require_heads()
        return self._sum.form(extended=False)

    @property
    def extended_head_forms(self) -> BilinearForm:
        """
        [`~LayerUpdate.head_forms`] with one more row and column `(D + 1, C + 1)`, of hidden states with a last channel
        of 1: contracted with weights that have the bias as their last row, they give the gradients of weights and
        biases.

        Raises:
            ValueError: if heads were not kept.
        """
        self._require_heads()
        return self._sum.form(extended=True)

    def _require_heads(self) -> None:
        if not self._has_heads:
            raise ValueError(f"Only the update of the whole layer {self.name!r} was kept; ask with `heads=True`.")

    def scores(self, gamma: float = 2.0) -> LayerScores:
        """
        Symmetry, directionality and norm of the layer's update and (where kept) of each head's.

        Args:
            gamma (`float`, *optional*, defaults to 2.0): γ of the directionality score.

        Returns:
            [`LayerScores`]
        """
        columns = [_scores(self.form, None if not self._sum.is_multiplied_out else self._dense().sum(0), gamma)]
        if self._has_heads:
            columns.append(_scores(self.head_forms, self._dense() if self._sum.is_multiplied_out else None, gamma))
        whole, *heads = torch.cat([column.view(len(METRICS), -1) for column in columns], 1).mT.tolist()
        measured: dict[str, Any] = dict(zip(METRICS, whole, strict=True))
        if heads:
            by_head = map(tuple, zip(*heads, strict=True))
            measured |= {f"head_{metric}": values for metric, values in zip(METRICS, by_head, strict=True)}
        return LayerScores(
            name=self.name,
            stack=self.stack,
            index=self.index,
            kind=self.kind,
            layout=self.layout,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            role=self.role,
            causal=self.causal,
            key_source=self.key_source,
            verified=self.verified,
            **measured,
        )

    def _dense(self) -> Tensor:
        return self._sum.dense(extended=False)


def _scores(form: BilinearForm, dense: Tensor | None, gamma: float) -> Tensor:
    """Symmetry, directionality and norm (rows); of the matrices where they are at hand, which is far cheaper."""
    if dense is None:
        return torch.stack([values.flatten() for values in form.scores(gamma)[: len(METRICS)]])
    square = dense.shape[-1] == dense.shape[-2]
    norm = torch.linalg.vector_norm(dense, dim=(-2, -1))
    symmetry = symmetry_score(dense) if square else torch.full_like(norm, math.nan)
    return torch.stack([values.flatten() for values in (symmetry, directionality_score(dense, gamma), norm)])


@dataclass(frozen=True, eq=False)
class QKUpdates:
    """
    Updates of W_qk of all chosen layers, as [`qk_updates`] returns them.

    Attributes:
        layers (`tuple[LayerUpdate, ...]`): Encoder before decoder, then by path and number.
        loss (`float`): Mean loss of the batches.
        num_batches (`int`): How many batches were summed.
        model_type (`str` or `None`): `config.model_type` of the model.
    """

    layers: tuple[LayerUpdate, ...]
    loss: float
    num_batches: int
    model_type: str | None = None

    def scores(self, gamma: float = 2.0) -> QKScores:
        """
        Scores of the updates, as [`score_model`] gives those of W_qk.

        Args:
            gamma (`float`, *optional*, defaults to 2.0): γ of the directionality score.

        Returns:
            [`QKScores`]
        """
        return QKScores(tuple(layer.scores(gamma) for layer in self.layers), gamma, self.model_type)

    def to_log(self, prefix: str = "qk", heads: bool = False) -> dict[str, float]:
        """
        Flat names and values for a logger, beside those of [`QKScores.to_log`]: `qk/update_symmetry/median`,
        `qk/encoder/update_symmetry/layer_00`.

        Args:
            prefix (`str`, *optional*, defaults to `"qk"`): First part of each name.
            heads (`bool`, *optional*, defaults to `False`): Adds each head, where heads were kept.

        Returns:
            `dict[str, float]`: Python floats.
        """
        return log_of_updates(self.scores(), prefix, heads)


def log_of_updates(scores: QKScores, prefix: str, heads: bool) -> dict[str, float]:
    """
    [`QKUpdates.to_log`] of scores that are there already.

    Args:
        scores ([`QKScores`]): Scores of updates.
        prefix (`str`): First part of each name.
        heads (`bool`): Adds each head.

    Returns:
        `dict[str, float]`: Python floats.
    """
    renamed = {}
    for name, value in scores.to_log(prefix, heads=heads).items():
        root, metric, entry = name.rsplit("/", 2)
        renamed[f"{root}/update_{metric}/{entry}"] = value
    return renamed
