"""
Query-key initialisation: the `SymmetricInit` option and the schemes that write W_k from a drawn W_q.

Shape legend: `D` model width, `H` query heads, `G` key/value heads, `r = H / G`, `E` head width.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .attention import (
    ATTENTION_KINDS,
    AttentionKind,
    AttentionLayer,
    AttentionSurvey,
    HeadShape,
    HeadTensors,
    LayerChoice,
    Part,
    UnknownAttentionError,
    describe_left_out,
    outermost_model,
    select_layers,
    survey_attention,
    warn_of_unverified,
)


__all__ = ["SymmetricInit", "apply_qk_init"]

logger = logging.get_logger(__name__)

# How far (in standard errors) the spreads of two drawn weights may lie apart and still count as drawn alike.
_ALIKE_STANDARD_ERRORS = 8.0
# Entries that are looked at first: enough to tell spreads that differ by 3 %.
_SAMPLE = 2**16


def _kaiming_uniform(weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> None:
    """What `nn.Linear.reset_parameters` draws: both uniform in ±1/√fan_in."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1])
        nn.init.uniform_(bias, -bound, bound, generator=generator)


def _symmetric(query: HeadTensors, key: HeadTensors, heads: HeadShape, ratio: float, with_bias: bool) -> None:
    pairs = [(query.weight, key.weight)]
    if with_bias and query.bias is not None and key.bias is not None:
        pairs.append((query.bias, key.bias))
    for source, target in pairs:
        groups = heads.num_key_value_groups
        if groups > 1:
            # The sum over the group keeps the layer form symmetric, 1/√r keeps K's scale, the heads stay distinct.
            source = source.float().unflatten(0, (heads.num_key_value_heads, groups)).sum(1) / math.sqrt(groups)
        target.copy_(source if ratio == 1 else source.float() * ratio)


# A scheme writes the key part in place, from the drawn query part; `None` leaves the draw as it is.
_SCHEMES: dict[str, Callable[[HeadTensors, HeadTensors, HeadShape, float, bool], None] | None] = {
    "symmetric": _symmetric,
    "independent": None,
}
_DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor | None, torch.Generator], None]] = {
    "kaiming_uniform": _kaiming_uniform,
}


@dataclass(frozen=True)
class SymmetricInit:
    """
    How W_q and W_k of self-attention start: as a config option (`BertConfig(qk_init=SymmetricInit())`), as the keyword
    `qk_init=` of `from_config`, or through [`apply_qk_init`].

    The symmetric scheme sets `W_k^h = (σ_k/σ_q) · W_q^h` (arXiv:2502.10927, section 5), with grouped keys
    `W_k^g = (σ_k/σ_q) · (1/√r) Σ_{h∈g} W_q^h`, so that every head form (the layer form, with grouped keys) is
    symmetric. σ_k/σ_q keeps the scale of the model's own K draw (T5 draws K √E larger than Q) and is exactly 1 where
    both are drawn alike. W_q, every other parameter and the random state are those of the plain init; Q and K stay two
    parameters. A symmetric W_qk has a Frobenius norm √2 above an independent one of the same scale.

    Args:
        scheme (`str`, *optional*, defaults to `"symmetric"`):
            `"symmetric"`, or `"independent"`, which keeps Q and K as they are drawn.
        layers (`Sequence[int]` or `Mapping[str, Sequence[int]]`, *optional*):
            Indices of the layers to initialise, counted within each stack (`"encoder"`, `"text_model"`, …): a sequence
            for every stack, or a mapping from stack names. All layers by default.
        attention (`str`, *optional*, defaults to `"self"`):
            `"self"`, `"cross"` or `"all"`; or self-attention of one side or direction alone: `"encoder"`, `"decoder"`,
            `"bidirectional"` or `"causal"`. Cross-attention reads two different streams.
        distribution (`str`, *optional*):
            Redraws Q, K, V and their biases (which then differ between Q and K) before the scheme acts.
            `"kaiming_uniform"` is PyTorch's default for linear layers, ±1/√D, which the published training script used
            by accident; with `scheme="independent"` it is that change of scale alone. The draw takes its seed from the
            K draw that it replaces, not from the global random state. By default the model's own draw stays.

    Raises:
        ValueError: on construction, for an unknown scheme, kind or distribution, or for layers that are no indices.

    Examples:

    ```python
    >>> from transformers import AutoModel, BertConfig
    >>> from hf_symqk import SymmetricInit

    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> model = AutoModel.from_config(config, qk_init=SymmetricInit(layers=[0, 1]))
    >>> attention = model.encoder.layer[0].attention.self
    >>> bool((attention.query.weight == attention.key.weight).all())
    True
    >>> model.config.qk_init
    SymmetricInit(scheme='symmetric', layers=(0, 1), attention='self', distribution=None)

    ```
    """

    scheme: str = "symmetric"
    layers: LayerChoice | None = None
    attention: AttentionKind = "self"
    distribution: str | None = None

    def __post_init__(self) -> None:
        _require_one_of("scheme", self.scheme, _SCHEMES)
        _require_one_of("attention", self.attention, ATTENTION_KINDS)
        if self.distribution is not None:
            _require_one_of("distribution", self.distribution, _DISTRIBUTIONS)
        if isinstance(self.layers, Mapping):
            layers: Any = {str(stack): _indices(indices) for stack, indices in self.layers.items()}
        else:
            layers = None if self.layers is None else _indices(self.layers)
        object.__setattr__(self, "layers", layers)  # one form, so that equal choices compare equal

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    @property
    def changes_weights(self) -> bool:
        """Whether the option does anything at all to the layers that it names."""
        return _SCHEMES[self.scheme] is not None or self.distribution is not None

    @property
    def needs_whole_model(self) -> bool:
        """Whether it takes the whole model, its stacks and kinds of attention, to tell which layers are meant."""
        return self.layers is not None or self.attention != "self"

    def to_dict(self) -> dict[str, Any]:
        """
        The option as JSON values, without fields that have their default (except the scheme).

        Returns:
            `dict`: What `config.json` holds under `qk_init`.
        """
        values: dict[str, Any] = {"scheme": self.scheme}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values[field.name] = value
        if isinstance(self.layers, Mapping):
            values["layers"] = {stack: list(indices) for stack, indices in self.layers.items()}
        elif self.layers is not None:
            values["layers"] = list(self.layers)
        return values

    @classmethod
    def from_value(cls, value: "str | Mapping[str, Any] | SymmetricInit") -> "SymmetricInit":
        """
        Reads the option in any of its forms.

        Args:
            value (`str`, `Mapping` or [`SymmetricInit`]):
                Name of a scheme, the mapping of [`~SymmetricInit.to_dict`], or the option itself.

        Returns:
            [`SymmetricInit`]

        Raises:
            ValueError: for an unknown scheme or field.
            TypeError: for a value of another type.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(scheme=value)
        if isinstance(value, Mapping):
            known = [field.name for field in fields(cls)]
            unknown = sorted(set(value) - set(known))
            if unknown:
                raise ValueError(f"`qk_init` has no field {', '.join(map(repr, unknown))}; its fields are {known}.")
            return cls(**value)
        raise TypeError(f"`qk_init` must be a string, a mapping or a SymmetricInit, got {value!r}.")


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
    write_init(choose_layers(survey, init), init)
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
        ValueError: if the model has no such layers, or the option means all and some modules that look like attention
            are not known.
    """
    if init.layers is None and survey.left_out and init.changes_weights:
        raise ValueError(
            f"`qk_init` is to reach every layer, but {describe_left_out(survey.left_out)} Or name the layers that it "
            "is to reach with `SymmetricInit(layers=...)`."
        )
    return select_layers(survey.layers, layers=init.layers, attention=init.attention)


def require_servable(layers: Iterable[AttentionLayer], init: SymmetricInit) -> None:
    """
    Checks that the scheme can serve layers, before anything is written.

    Args:
        layers (`Iterable[AttentionLayer]`): The layers.
        init ([`SymmetricInit`]): The option.

    Raises:
        ValueError: naming the first layer that it cannot serve, and why.
    """
    for layer in layers:
        widths = [layer.input_width(part) for part in ("query", "key")]
        if init.scheme == "symmetric" and widths[0] != widths[1]:
            raise ValueError(
                f"Scheme 'symmetric' cannot serve {layer.name!r} ({layer.kind}-attention): its queries are made from "
                f"{widths[0]} channels and its keys from {widths[1]}. Choose the layers with `layers` or `attention`."
            )
        layer.require_writable("query", "key")
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


def write_init(layers: Iterable[AttentionLayer], init: SymmetricInit) -> None:
    """
    Writes the scheme to layers.

    Args:
        layers (`Iterable[AttentionLayer]`): The layers.
        init ([`SymmetricInit`]): The option.

    Raises:
        ValueError: before anything is written, if the scheme cannot serve a layer (see [`require_servable`]), or Q
            of a layer is all zero, so that K cannot be made from it.
    """
    layers = list(layers)
    require_servable(layers, init)
    if not init.changes_weights:
        return
    warn_of_unverified(layers)
    scheme = _SCHEMES[init.scheme]
    # What is redrawn is drawn alike; the model's own draw may not be.
    ratios = [_scale_ratio(layer) if init.distribution is None else 1.0 for layer in layers]
    parts: tuple[Part, ...] = ("query", "key") if init.distribution is None else ("query", "key", "value")
    for layer, ratio in zip(layers, ratios, strict=True):
        with layer.tensors(*parts, write=True) as tensors:
            if init.distribution is not None:
                _redraw([tensors[part] for part in parts], tensors["key"], init.distribution)
            if scheme is not None:
                scheme(tensors["query"], tensors["key"], layer.heads, ratio, init.distribution is None)
    if layers:
        logger.info(f"qk_init {init.to_dict()} applied to {len(layers)} attention layers")


def _scale_ratio(layer: AttentionLayer) -> float:
    """σ_k/σ_q of the drawn weights; exactly 1 unless they differ by more than chance."""
    with layer.tensors("query", "key") as tensors:
        query, key = tensors["query"].weight, tensors["key"].weight
        # Nearly always they are drawn alike, and a sample of the channels shows it; a difference is measured on all.
        sample = max(1, query.shape[1] * _SAMPLE // max(query.numel(), 1))
        for channels in dict.fromkeys((min(sample, query.shape[1]), query.shape[1])):
            weights = query[:, :channels], key[:, :channels]
            # About zero: these are draws of mean 0, and a handful of entries has no degree of freedom to spare.
            query_std, key_std = (
                torch.linalg.vector_norm(weight, dtype=torch.float32).item() / math.sqrt(weight.numel())
                for weight in weights
            )
            standard_error = math.sqrt(sum(0.5 / weight.numel() for weight in weights))
            ratio = key_std / query_std if query_std else math.inf
            if query_std == key_std or 0 < abs(math.log(ratio or math.inf)) <= _ALIKE_STANDARD_ERRORS * standard_error:
                return 1.0
    if query_std == 0:
        raise ValueError(f"Scheme 'symmetric' cannot serve {layer.name!r}: its query weight is all zero.")
    return ratio


def _redraw(parts: list[HeadTensors], key: HeadTensors, distribution: str) -> None:
    # The K draw is about to be thrown away; its bits are as random as a seed can be, and the same on every rank.
    bits = key.weight.flatten()[:2].to("cpu", torch.float32).view(torch.int32).tolist()
    generator = torch.Generator().manual_seed((bits[0] & 0x7FFFFFFF) << 32 | bits[-1] & 0xFFFFFFFF)
    for part in parts:
        heads, head_dim, width = part.weight.shape
        weight = torch.empty(heads * head_dim, width)
        bias = None if part.bias is None else torch.empty(heads * head_dim)
        _DISTRIBUTIONS[distribution](weight, bias, generator)
        part.weight.copy_(weight.view(heads, head_dim, width))
        if part.bias is not None and bias is not None:
            part.bias.copy_(bias.view(heads, head_dim))


def _require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    if value not in list(known):
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}.")


def _indices(values: Any) -> tuple[int, ...]:
    valid = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
    indices = tuple(values) if valid else ()
    if not indices or any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in indices):
        raise ValueError(
            f"`layers` must be a non-empty sequence of layer indices (0, 1, …) or a mapping from stack names to them, "
            f"got {values!r}."
        )
    return tuple(sorted(set(indices)))
