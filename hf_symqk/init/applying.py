"""
From an option to weights: which layers it speaks of, whether its scheme can serve them, and writing.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `E` head width.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention import (
    AttentionLayer,
    AttentionSurvey,
    HeadTensors,
    Part,
    UnknownAttentionError,
    describe_left_out,
    outermost_model,
    select_layers,
    survey_attention,
    warn_of_unverified,
)
from ..scoring import layer_form
from .drawing import redraw, scale_ratio, seeded_by
from .option import SymmetricInit
from .registry import LayerDraw, LayerRequest, scheme_named


__all__ = ["apply_qk_init", "choose_layers", "require_servable", "write_init"]

logger = logging.get_logger(__name__)


def apply_qk_init(model: nn.Module, qk_init: "str | Mapping[str, Any] | SymmetricInit" = "symmetric") -> nn.Module:
    """
    Initialises W_q and W_k of a model that exists already, in place: what `from_config(..., qk_init=...)` does to a
    new one. The model's config, if it has one, then carries the option. The parameters stay the same objects, so an
    optimizer built before keeps its hold of them.

    Args:
        model (`torch.nn.Module`):
            Any model whose attention the layout table knows, also sharded (every rank has to call).
        qk_init (`str`, `Mapping` or [`SymmetricInit`], *optional*, defaults to `"symmetric"`):
            The option, in any form.

    Returns:
        `torch.nn.Module`: The model.

    Raises:
        ValueError: before anything is written, if the option names what the model does not have or a layer cannot be
            served.

    Examples:

    ```python
    >>> from transformers import AutoModel, GPT2Config
    >>> import hf_symqk

    >>> model = AutoModel.from_config(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99))
    >>> model = hf_symqk.apply_qk_init(model, "symmetric")
    >>> round(hf_symqk.score_model(model).layers[0].symmetry, 4)
    1.0

    ```
    """
    init = SymmetricInit.from_value(qk_init)
    try:
        survey = survey_attention(model)
    except UnknownAttentionError as error:
        raise UnknownAttentionError(
            f"{error} A layout that is not known can be scored (`score_model(model, probe=True)`), but not "
            "initialised: an init has to know where to write."
        ) from None
    write_init(choose_layers(survey, init), init, survey.layers)
    if (whole := outermost_model(model)) is not None:
        whole.config.qk_init = init.to_dict()  # plain values, which a config can hold with and without the plugin
    return model


def choose_layers(survey: AttentionSurvey, init: SymmetricInit) -> list[AttentionLayer]:
    """
    Layers of a model that the option speaks of.

    Args:
        survey ([`AttentionSurvey`]): What [`survey_attention`] found in the model in which layers are counted.
        init ([`SymmetricInit`]): The option.

    Returns:
        `list[AttentionLayer]`

    Raises:
        ValueError: if the model has no such layers, or the option means all and some modules that are softmax
            attention, or may be, are not known.
    """
    if init.layers is None and init.changes_weights:
        if survey.unserved:
            raise ValueError(
                f"`qk_init` is to reach every layer, but {describe_left_out(survey.unserved)} Or name the layers that "
                "it is to reach with `SymmetricInit(layers=...)`."
            )
        if survey.left_out:  # linear attention and its kin, which no scheme speaks of
            logger.warning_once("`qk_init` leaves as they are:\n" + "\n".join(survey.left_out))
    return select_layers(survey.layers, layers=init.layers, attention=init.attention)


def require_servable(
    layers: Iterable[AttentionLayer], init: SymmetricInit, among: Sequence[AttentionLayer] | None = None
) -> None:
    """
    Checks that the scheme can serve layers, before anything is written.

    Args:
        layers (`Iterable[AttentionLayer]`): The layers.
        init ([`SymmetricInit`]): The option.
        among (`Sequence[AttentionLayer]`, *optional*): As in [`write_init`].

    Raises:
        ValueError: naming the first layer that it cannot serve, and why.
    """
    for request in _requests(list(layers), init, among):
        _require_servable(request, init)


def _require_servable(request: LayerRequest, init: SymmetricInit) -> None:
    layer, check = request.layer, scheme_named(init.scheme).check
    if check is not None:
        try:
            check(request)
        except ValueError as error:
            reason = str(error)
            if not reason.startswith(repr(layer.name)):  # else it is told already, and the way out as well
                reason = f"{layer.name!r} ({layer.kind}-attention): {reason} Choose the layers with `layers` or "
                reason += "`attention`."
            raise ValueError(f"Scheme {init.scheme!r} cannot serve {reason}") from None
    layer.require_writable("query", "key")
    if (init.scheme != "symmetric" or init.symmetry is not None) and init.changes_weights and _is_tied(layer):
        raise ValueError(
            f"{layer.name!r} has one weight for queries and keys, so that scheme {init.scheme!r} cannot make them "
            "differ. Untie them, or choose other layers with `layers`."
        )
    storages = layer.storages("query", "key") - {"plain"}
    if storages:
        raise ValueError(
            f"{layer.name!r} holds Q or K as {', '.join(sorted(storages))}, which can be scored but not written; "
            "initialise the model before adapters are added or weights are quantised."
        )
    if init.distribution is not None and not layer.has("value"):
        raise ValueError(
            f"`distribution` redraws V too, and {layer.name!r} has none where layout {layer.layout.name!r} "
            "expects it. Describe the layout with `value=` by `hf_symqk.register_qk_layout`."
        )


def _is_tied(layer: AttentionLayer) -> bool:
    """Whether W_q and W_k are one parameter: the same rows of a module, or two modules that share their weight."""
    query, key = layer.projection("query"), layer.projection("key")
    if query == key:
        return True
    holders = [layer.holder(part) for part in ("query", "key")]
    names = [projection.pieces[0].weight for projection in (query, key)]
    weights = [getattr(holder, name, None) for holder, name in zip(holders, names, strict=True)]
    return holders[0] is not holders[1] and weights[0] is not None and weights[0] is weights[1]


def write_init(
    layers: Iterable[AttentionLayer], init: SymmetricInit, among: Sequence[AttentionLayer] | None = None
) -> None:
    """
    Writes the scheme to layers.

    Args:
        layers (`Iterable[AttentionLayer]`): The layers.
        init ([`SymmetricInit`]): The option.
        among (`Sequence[AttentionLayer]`, *optional*): All layers of the model, in which values of `symmetry` that
            differ by layer are counted. By default, the layers themselves.

    Raises:
        ValueError: before anything is written, if the scheme cannot serve a layer (see [`require_servable`]), or
            weights of a layer are all zero, so that nothing can be made from them.
    """
    requests = _requests(list(layers), init, among)
    for request in requests:
        _require_servable(request, init)
    if not init.changes_weights:
        return
    warn_of_unverified([request.layer for request in requests])
    ratios = [_ratio(request.layer, init) for request in requests]
    for request, ratio in zip(requests, ratios, strict=True):
        _write(request, ratio, init)
    if requests:
        logger.info(f"qk_init {init.to_dict()} applied to {len(requests)} attention layers")


@torch.no_grad()
def _write(request: LayerRequest, ratio: float, init: SymmetricInit) -> None:
    write = scheme_named(init.scheme).write
    parts: tuple[Part, ...] = ("query", "key") if init.distribution is None else ("query", "key", "value")
    with request.layer.tensors(*parts, write=True) as tensors:
        query, key = tensors["query"], tensors["key"]
        if init.distribution is not None:
            redraw([tensors[part] for part in parts], init.distribution, seeded_by(key))
            query, key = query._replace(bias=None), key._replace(bias=None)  # these stay as they were drawn
        if write is None:
            return
        before = _norm(query, key) if init.norm is not None else None
        drawn = None if before is None else (query.weight.clone(), key.weight.clone())
        write(
            LayerDraw(
                request.layer,
                request.options,
                request.symmetry,
                request.target,
                query=query,
                key=key,
                ratio=ratio,
                generator=seeded_by(key),
            )
        )
        if before is not None and drawn is not None:
            after = _norm(query, key)
            if not (after > 0 and math.isfinite(after)):
                query.weight.copy_(drawn[0])
                key.weight.copy_(drawn[1])
                raise ValueError(
                    f"`norm` cannot serve {request.layer.name!r}: scheme {init.scheme!r} has written a form of norm "
                    f"{after:g}, which no factor brings to that of the form drawn ({before:g})."
                )
            factor = math.sqrt(before / after)
            query.weight.mul_(factor)
            key.weight.mul_(factor)


def _norm(query: HeadTensors, key: HeadTensors) -> float:
    return layer_form(query.weight, key.weight).frobenius_norm().item()


def _ratio(layer: AttentionLayer, init: SymmetricInit) -> float:
    if init.distribution is not None or scheme_named(init.scheme).write is None:
        return 1.0  # what is redrawn is drawn alike; the model's own draw may not be
    ratio = scale_ratio(layer)
    if math.isinf(ratio):
        raise ValueError(f"Scheme {init.scheme!r} cannot serve {layer.name!r}: its query weight is all zero.")
    if ratio == 0 and init.norm is not None:
        raise ValueError(f"`norm` cannot serve {layer.name!r}: its key weight is all zero, and so is the form drawn.")
    return ratio


# --- what is asked of each layer ----------------------------------------------------------------------------------


def _requests(
    layers: list[AttentionLayer], init: SymmetricInit, among: Sequence[AttentionLayer] | None
) -> list[LayerRequest]:
    stacks: dict[str, list[str]] = {}
    for layer in sorted(layers if among is None else among, key=lambda layer: layer.index):
        stacks.setdefault(layer.stack, []).append(layer.name)
    options = scheme_named(init.scheme).complete(init.options)
    values = _symmetry_by_name(init, stacks, {layer.stack for layer in layers})
    return [LayerRequest(layer, options, values[layer.name], init.target) for layer in layers]


def _symmetry_by_name(init: SymmetricInit, stacks: Mapping[str, list[str]], chosen: set[str]) -> dict[str, float]:
    """The value of each layer by its name; stacks that are not chosen need none."""
    given = 1.0 if init.symmetry is None else init.symmetry
    if isinstance(given, Mapping):
        for stack in (*given, *sorted(chosen)):
            if stack not in stacks or stack not in given:
                lacking = f"names the stack {stack!r}" if stack in given else f"has no value for the stack {stack!r}"
                raise ValueError(
                    f"`symmetry` {lacking}; the layers that are to be initialised are in {sorted(chosen)}, and the "
                    f"model has {list(stacks)}."
                )
    values: dict[str, float] = {}
    for stack, names in stacks.items():
        own = given.get(stack, 1.0) if isinstance(given, Mapping) else given
        if isinstance(own, Sequence):
            if len(own) != len(names):
                if stack not in chosen:
                    continue
                raise ValueError(
                    f"`symmetry` gives {len(own)} values, and stack {stack!r} has {len(names)} attention layers "
                    f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''}): give one value for each, or a "
                    "mapping from stack names."
                )
            values.update(zip(names, own, strict=True))
        else:
            values.update(dict.fromkeys(names, own))
    return values
