"""
From the layers of a model to its scores.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `r = H / G`, `E` head width.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import (
    AttentionKind,
    AttentionLayer,
    HeadShape,
    LayerChoice,
    PlacedLayer,
    ProbedLayer,
    UnknownAttentionError,
    describe_unverified,
    full_shape,
    outermost_model,
    select_layers,
    survey_attention,
    survey_by_probing,
    warn_of_left_out,
)
from .bilinear import BilinearForm
from .model_family import model_family, model_type
from .null_band import form_nulls
from .scores import METRICS, SPECTRAL_METRICS, LayerScores, QKScores


__all__ = [
    "ScorableLayer",
    "described",
    "head_forms",
    "join_gathering",
    "layer_form",
    "score_layers",
    "score_model",
    "undefined_layers",
]

_PROBE_IT = "Or let `score_model(model, probe=True)` find W_q and W_k by running the model."


class NamedLayout(Protocol):
    """Where W_q and W_k of a layer were found."""

    @property
    def name(self) -> str: ...


class ScorableLayer(PlacedLayer, Protocol):
    """What scoring needs to know of a layer; [`AttentionLayer`] has it."""

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> NamedLayout: ...
    @property
    def heads(self) -> HeadShape: ...
    @property
    def read_once(self) -> bool: ...
    @property
    def verified(self) -> bool: ...

    def query_key_weights(self) -> AbstractContextManager[tuple[Tensor, Tensor]]: ...


ErrorHandler = Callable[[ScorableLayer, Exception], None]

_ERROR_ROW = len(METRICS)  # of what is measured of a layer


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
        # One head of each group after the other: `sum` would convert all of them at once.
        first, *others = w_q.unflatten(0, (w_k.shape[0], -1)).unbind(1)
        w_q = first.to(torch.promote_types(w_q.dtype, torch.float32), copy=True)
        for head in others:
            w_q += head
    return BilinearForm(w_q.flatten(0, 1).mT, w_k.flatten(0, 1).mT)


def score_model(
    model: nn.Module,
    *,
    layers: LayerChoice | None = None,
    attention: AttentionKind = "self",
    heads: bool = True,
    gamma: float = 2.0,
    null_band: bool = True,
    spectral: bool = False,
    probe: bool = False,
    inputs: Mapping[str, Any] | None = None,
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
            Any model whose attention the layout table knows; with `probe=True`, any model that runs.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers to score, for every stack or per stack name; all by default.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`; or self-attention of one side or direction alone: `"encoder"`, `"decoder"`,
            `"bidirectional"` or `"causal"`.
        heads (`bool`, *optional*, defaults to `True`):
            Whether each head is scored too.
        gamma (`float`, *optional*, defaults to 2.0):
            γ of the directionality score.
        null_band (`bool`, *optional*, defaults to `True`):
            Whether the range that independent Gaussian weights score in is given with each layer.
        spectral (`bool`, *optional*, defaults to `False`):
            Whether eigenvalues and singular values are scored too (see [`BilinearForm.spectral_scores`]). Heads are
            quick; the layer form of multi-head attention takes two dense decompositions, minutes at a width of 4096.
        probe (`bool`, *optional*, defaults to `False`):
            Whether W_q and W_k of attention that the table does not know are found by running the model: once with
            `inputs`, then each unknown attention module on basis vectors, whose queries and keys are caught on their
            way into the softmax. Such layers have the layout `"probed (…)"`; layers that the table knows are read as
            ever. Weights are those that the forward uses, a factor that it puts on queries or keys (1/√E, say)
            included, which shows in `frobenius_norm` alone; a factor on the logits is not part of them.
        inputs (`Mapping`, *optional*):
            With `probe=True`, the keyword arguments that the model is run with: two or more sequences of two or more
            tokens. By default the model's `dummy_inputs`, or inputs made from its config.

    Returns:
        [`QKScores`]: One entry per layer. A layer with a weight that is not finite scores NaN and is named in a
        warning; so are layers whose W_q and W_k no forward pass has proven, which are marked (`verified`).

    Raises:
        ValueError: if no attention layer is found, a layer or kind is asked for that the model does not have, or the
            weights of a layer cannot be read as they are stored; with `probe=True`, if the model cannot be run, or
            queries or keys of an unknown layer are no linear map of one token's hidden state.

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
    found, left_out = _survey(model, probe, inputs)
    chosen = select_layers(found, layers=layers, attention=attention)
    whole = outermost_model(model)
    scores = QKScores(
        score_layers(chosen, gamma=gamma, heads=heads, null_band=null_band, spectral=spectral),
        gamma,
        model_type(model),
        family=None if whole is None else model_family(whole.config),
        num_parameters=sum(math.prod(full_shape(parameter)) for parameter in model.parameters()),
        skipped=tuple(line.strip() for line in left_out),
    )
    for text in filter(None, (undefined_layers(scores), describe_unverified(chosen))):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return scores


def _survey(
    model: nn.Module, probe: bool, inputs: Mapping[str, Any] | None
) -> tuple[list[AttentionLayer | ProbedLayer], list[str]]:
    if probe:
        layers, left_out = survey_by_probing(model, inputs)
        warn_of_left_out(model, left_out)
        return layers, left_out
    if inputs is not None:
        raise ValueError("`inputs` are what the model is run with by `probe=True`; without it the model is not run.")
    try:
        survey = survey_attention(model)
    except UnknownAttentionError as error:
        raise UnknownAttentionError(f"{error} {_PROBE_IT}") from None
    warn_of_left_out(model, survey.left_out, _PROBE_IT)
    return [*survey.layers], survey.left_out


def undefined_layers(scores: QKScores) -> str | None:
    """The warning for layers whose scores are NaN, `None` if there are none."""
    names = ", ".join(scores.undefined)
    return f"W_qk scores are NaN where query or key weights are not finite: {names}." if names else None


def score_layers(
    layers: Iterable[ScorableLayer],
    *,
    gamma: float = 2.0,
    heads: bool = True,
    null_band: bool = False,
    spectral: bool = False,
    on_error: ErrorHandler | None = None,
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
        null_band (`bool`, *optional*, defaults to `False`):
            Whether the range that independent Gaussian weights score in is given with each layer.
        spectral (`bool`, *optional*, defaults to `False`):
            Whether eigenvalues and singular values are scored too.
        on_error (`Callable[[layer, Exception], None]`, *optional*):
            Takes what goes wrong with one layer, which then scores NaN; the other layers stand. By default it is
            raised.

    Returns:
        `tuple[LayerScores, ...]`
    """
    layers = list(layers)
    measure = partial(_measure, gamma=gamma, heads=heads, null_band=null_band, spectral=spectral)
    queued = [_guarded(layer, on_error, measure) for layer in layers]
    arrived = _to_host([values for values in queued if values is not None])
    metrics = (*METRICS, *SPECTRAL_METRICS) if spectral else METRICS
    results = []
    for layer, values in zip(layers, queued, strict=True):
        columns = None if values is None else next(arrived)
        if columns is not None and not layer.read_once and any(map(_is_doubtful, columns[_ERROR_ROW][null_band:])):
            again = _guarded(layer, on_error, partial(measure, careful=True))
            columns = None if again is None else next(_to_host([again]))
        results.append(_layer_scores(layer, columns, null_band, metrics))
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


def _measure(
    layer: ScorableLayer, gamma: float, heads: bool, null_band: bool, spectral: bool, careful: bool = False
) -> Tensor:
    """
    Symmetry, directionality, norm, rounding error and spectral scores if asked for (rows) of the layer form and of
    each head form (columns). With null bands, a first column begins with low and high of symmetry and of
    directionality.
    """
    with layer.query_key_weights() as (w_q, w_k):
        whole = layer_form(w_q, w_k)
        forms = [whole, head_forms(w_q, w_k)] if heads else [whole]
        # Weights that are whole only here, or come from a file, get the second look that they may need now: where they
        # are gathered all ranks have to gather alike, and reading again costs more than waiting for the device.
        careful = careful or layer.read_once
        columns = [torch.stack([x.flatten() for x in form.scores(gamma, careful)]) for form in forms]
        if spectral:
            spectra = [torch.stack([x.flatten() for x in form.spectral_scores()]) for form in forms]
            columns = [torch.cat([one, other.to(one)]) for one, other in zip(columns, spectra, strict=True)]
        if null_band:
            edges = columns[0].new_zeros(len(columns[0]), 1)
            edges[: _ERROR_ROW + 1, 0] = form_nulls(whole, gamma)
            columns.insert(0, edges)
        return torch.cat(columns, dim=1)


def _to_host(queued: list[Tensor]) -> Any:
    """Iterates over the columns of each tensor as Python floats, after one transfer for all."""
    if not queued:
        return iter(())
    widths = [values.shape[1] for values in queued]
    together = torch.cat([values.to(queued[0].device) for values in queued], dim=1).cpu()
    # One and the same NaN, so that equal scores compare equal.
    return (
        [[math.nan if math.isnan(value) else value for value in row] for row in part.tolist()]
        for part in together.split(widths, dim=1)
    )


def _is_doubtful(relative_error: float) -> bool:
    return not relative_error <= BilinearForm.max_relative_error  # NaN is doubtful too


def _layer_scores(
    layer: ScorableLayer, columns: list[list[float]] | None, null_band: bool, metrics: Sequence[str]
) -> LayerScores:
    measured: dict[str, Any] = dict.fromkeys(metrics, math.nan)
    if columns is not None:
        if null_band:
            edges = [row.pop(0) for row in columns]
            bands = {"symmetry_null": tuple(edges[:2]), "directionality_null": tuple(edges[2:4])}
            # There is no band where there is no score.
            measured |= {name: band for name, band in bands.items() if not any(map(math.isnan, band))}
        for metric, values in zip(metrics, columns[:_ERROR_ROW] + columns[_ERROR_ROW + 1 :], strict=True):
            measured |= {metric: values[0], f"head_{metric}": tuple(values[1:])}
    return LayerScores(**described(layer), **measured)


def described(layer: ScorableLayer) -> dict[str, Any]:
    """
    What a layer is, under the names of [`LayerScores`].

    Args:
        layer ([`ScorableLayer`]): The layer.

    Returns:
        `dict[str, Any]`
    """
    return {
        "name": layer.name,
        "stack": layer.stack,
        "index": layer.index,
        "kind": layer.kind,
        "role": layer.role,
        "causal": layer.causal,
        "key_source": layer.key_source,
        "layout": layer.layout.name,
        "num_heads": layer.heads.num_attention_heads,
        "num_key_value_heads": layer.heads.num_key_value_heads,
        "head_dim": layer.heads.head_dim,
        "verified": layer.verified,
    }
