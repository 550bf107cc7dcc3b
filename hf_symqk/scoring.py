"""
From the layers of a model to its scores.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `r = H / G`, `E` head width.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import (
    AttentionKind,
    HeadShape,
    LayerChoice,
    QKLayout,
    find_attention_layers,
    outermost_model,
    select_layers,
)
from .bilinear import BilinearForm
from .scores import METRICS, LayerScores, QKScores


__all__ = ["ScorableLayer", "head_forms", "join_gathering", "layer_form", "score_layers", "score_model"]


class ScorableLayer(Protocol):
    """What scoring needs to know of a layer; [`AttentionLayer`] has it."""

    @property
    def name(self) -> str: ...
    @property
    def stack(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def layout(self) -> QKLayout: ...
    @property
    def heads(self) -> HeadShape: ...
    @property
    def is_sharded(self) -> bool: ...

    def query_key_weights(self) -> AbstractContextManager[tuple[Tensor, Tensor]]: ...


ErrorHandler = Callable[[ScorableLayer, Exception], None]


def head_forms(w_q: Tensor, w_k: Tensor) -> BilinearForm:
    """
    The forms `W_q^h (W_k^g(h))ᵀ` of all heads, key head `g = h // (H / G)`.

    Args:
        w_q (`torch.Tensor` of shape `(H, E, D)`): Query weight, split into heads.
        w_k (`torch.Tensor` of shape `(G, E, D)`): Key weight, split into heads; G divides H.

    Returns:
        [`BilinearForm`] of batch shape `(G, r)`: flattened, the order of the query heads. Views, no copies.
    """
    groups = w_k.shape[0]
    return BilinearForm(w_q.mT.unflatten(0, (groups, -1)), w_k.mT.unsqueeze(1))


def layer_form(w_q: Tensor, w_k: Tensor) -> BilinearForm:
    """
    The form of a layer, `Σ_h W_q^h (W_k^g(h))ᵀ`. With grouped keys the query heads of a group are summed first, which
    gives the same matrix at rank G·E instead of H·E.

    Args:
        w_q (`torch.Tensor` of shape `(H, E, D)`): Query weight, split into heads.
        w_k (`torch.Tensor` of shape `(G, E, D)`): Key weight, split into heads; G divides H.

    Returns:
        [`BilinearForm`] without batch dimensions.
    """
    if w_q.shape[0] != w_k.shape[0]:
        w_q = w_q.unflatten(0, (w_k.shape[0], -1)).sum(1, dtype=torch.promote_types(w_q.dtype, torch.float32))
    return BilinearForm(w_q.flatten(0, 1).mT, w_k.flatten(0, 1).mT)


def score_model(
    model: nn.Module,
    *,
    layers: LayerChoice | None = None,
    attention: AttentionKind = "self",
    heads: bool = True,
    gamma: float = 2.0,
) -> QKScores:
    """
    Scores W_qk of every attention layer of a live model, on the model's device. The model is only read: neither its
    weights, gradients and mode nor the random state change. It may be wrapped (DDP, `torch.compile`, `DataParallel`),
    sharded (FSDP2, tensor parallel, DeepSpeed ZeRO-3: every rank has to call), adapted (LoRA, DoRA) or quantised
    (bitsandbytes, torchao); one layer's Q and K are whole at a time.

    Not part of the scores: biases, rotary positions (scores are at offset 0), ALiBi and relative-position terms, and
    the data-dependent part of query and key norms (their learned gains are folded in).

    Args:
        model (`torch.nn.Module`):
            Any model whose attention the layout table knows.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers to score, for every stack or per stack name; all by default.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`.
        heads (`bool`, *optional*, defaults to `True`):
            Whether each head is scored too.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.

    Returns:
        [`QKScores`]: One entry per layer. A layer with a weight that is not finite scores NaN and is named in a
        warning.

    Raises:
        ValueError: if no attention layer is found, a layer or kind is asked for that the model does not have, or the
            weights of a layer cannot be read as they are stored.

    Examples:

    ```python
    >>> from transformers import AutoModel, BertConfig
    >>> import hf_symqk

    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> scores = hf_symqk.score_model(AutoModel.from_config(config, qk_init="symmetric"))
    >>> round(scores.summary()["symmetry"]["median"], 4)
    1.0
    >>> len(scores.layers), scores.layers[0].num_heads
    (2, 4)

    ```
    """
    chosen = select_layers(find_attention_layers(model), layers=layers, attention=attention)
    scores = QKScores(score_layers(chosen, gamma=gamma, heads=heads), gamma, model_type(model))
    undefined = [layer.name for layer in scores.layers if math.isnan(layer.frobenius_norm)]
    if undefined:
        warnings.warn(not_finite(undefined), RuntimeWarning, stacklevel=2)
    return scores


def model_type(model: nn.Module) -> str | None:
    """`config.model_type` of the outermost Transformers model in a module, `None` if there is none."""
    whole = outermost_model(model)
    return None if whole is None else whole.config.model_type


def not_finite(names: list[str]) -> str:
    """The warning for layers whose scores are NaN."""
    return f"W_qk scores are NaN where query or key weights are not finite: {', '.join(names)}."


def score_layers(
    layers: Iterable[ScorableLayer], *, gamma: float = 2.0, heads: bool = True, on_error: ErrorHandler | None = None
) -> tuple[LayerScores, ...]:
    """
    Scores layers, one after another. Under an engine that shards, every rank has to call this or [`join_gathering`].

    On an accelerator nothing waits for the host until the last layer is queued; then all values come over at once.

    Args:
        layers (`Iterable`):
            Layers, as [`find_attention_layers`] yields them.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.
        heads (`bool`, *optional*, defaults to `True`):
            Whether each head is scored too.
        on_error (`Callable[[layer, Exception], None]`, *optional*):
            Takes what goes wrong with one layer, which then scores NaN; the other layers stand. By default it is
            raised.

    Returns:
        `tuple[LayerScores, ...]`
    """
    layers = list(layers)
    queued = [_guarded(layer, on_error, _measure, gamma, heads, False) for layer in layers]
    arrived = _to_host([values for values in queued if values is not None])
    results = []
    for layer, values in zip(layers, queued, strict=True):
        columns = None if values is None else next(arrived)
        if columns is not None and not layer.is_sharded and any(_is_doubtful(error) for error in columns[-1]):
            again = _guarded(layer, on_error, _measure, gamma, heads, True)
            columns = None if again is None else next(_to_host([again]))
        results.append(_layer_scores(layer, columns))
    return tuple(results)


def join_gathering(layers: Iterable[ScorableLayer], *, on_error: ErrorHandler | None = None) -> None:
    """
    Takes part in gathering each layer's weights without scoring them: for ranks whose scores nobody reads.

    Args:
        layers (`Iterable`): The layers that other ranks score.
        on_error (`Callable[[layer, Exception], None]`, *optional*): As in [`score_layers`].
    """
    for layer in layers:
        _guarded(layer, on_error, _gather)


def _gather(layer: ScorableLayer) -> None:
    with layer.query_key_weights():
        pass


def _guarded(layer: ScorableLayer, on_error: ErrorHandler | None, action: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return action(layer, *arguments)
    except Exception as error:
        if on_error is None:
            raise
        on_error(layer, error)
        return None


def _measure(layer: ScorableLayer, gamma: float, heads: bool, careful: bool) -> Tensor:
    """Symmetry, directionality, norm and rounding error (rows) of the layer form and of each head form (columns)."""
    with layer.query_key_weights() as (w_q, w_k):
        forms = [layer_form(w_q, w_k), head_forms(w_q, w_k)] if heads else [layer_form(w_q, w_k)]
        # Sharded weights are whole only here, and all ranks have to gather alike: whatever needs a second look gets it
        # now. Gathering waits for the other ranks anyway.
        careful = careful or layer.is_sharded
        return torch.cat([torch.stack([x.flatten() for x in form.scores(gamma, careful)]) for form in forms], dim=1)


def _to_host(queued: list[Tensor]) -> Any:
    """Iterates over the columns of each tensor as Python floats, after one transfer for all."""
    if not queued:
        return iter(())
    widths = [values.shape[1] for values in queued]
    together = torch.cat([values.to(queued[0].device) for values in queued], dim=1).cpu()
    return (part.tolist() for part in together.split(widths, dim=1))


def _is_doubtful(relative_error: float) -> bool:
    return not relative_error <= BilinearForm.max_relative_error  # NaN is doubtful too


def _layer_scores(layer: ScorableLayer, columns: list[list[float]] | None) -> LayerScores:
    measured: dict[str, Any] = dict.fromkeys(METRICS, math.nan)
    if columns is not None:
        measured = {metric: values[0] for metric, values in zip(METRICS, columns[:-1], strict=True)}
        measured |= {f"head_{metric}": tuple(values[1:]) for metric, values in zip(METRICS, columns[:-1], strict=True)}
    return LayerScores(
        name=layer.name,
        stack=layer.stack,
        index=layer.index,
        kind=layer.kind,
        layout=layer.layout.name,
        num_heads=layer.heads.num_attention_heads,
        num_key_value_heads=layer.heads.num_key_value_heads,
        head_dim=layer.heads.head_dim,
        **measured,
    )
