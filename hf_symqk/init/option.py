"""`SymmetricInit`: which scheme, for which layers, with what numbers, as a value that a config can hold."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from typing import Any, Literal, get_args

from ..attention import ATTENTION_KINDS, AttentionKind, LayerChoice, Part
from ..scores import QKScores
from .drawing import DISTRIBUTIONS
from .registry import QKInitScheme, Target, scheme_named, schemes


__all__ = ["SymmetricInit", "SymmetryChoice"]

SymmetryChoice = float | Sequence[float] | Mapping[str, float | Sequence[float]]
# Digits of a score that a profile keeps: more than an init meets, and few enough to read in a config.
_PROFILE_DIGITS = 6


@dataclass(frozen=True, repr=False)
class SymmetricInit:
    """
    How W_q and W_k of self-attention start: as a config option (`BertConfig(qk_init=SymmetricInit())`), as the keyword
    `qk_init=` of `from_config`, or through [`apply_qk_init`].

    Most schemes set `W_k^h = (σ_k/σ_q) · W_q^h A` with a small orthogonal matrix A per head, and with grouped keys
    `W_k^g = (σ_k/σ_q) · (1/√r) (Σ_{h∈g} W_q^h) A`. σ_k/σ_q keeps the scale of the model's own K draw (T5 draws K √E
    larger than Q) and is exactly 1 where both are drawn alike. Every parameter but K, and the random state, are those
    of the plain init (`"mimetic"` and `norm` change Q too); Q and K stay two parameters. Where both have a bias, K's
    is Q's mapped in the same way. A commutes with the model's rotary positions: where the form is symmetric (or skew),
    `q_i · k_j = ± q_j · k_i` holds at every offset of two tokens; scores in between are those at offset 0.

    | scheme | W_k | what it gives |
    |---|---|---|
    | `"symmetric"` | A = I (arXiv:2502.10927, section 5) | every head form, and the layer form, symmetric |
    | with `symmetry=s` | A = cos θ · I + sin θ · J, J a turn by 90° in pairs of channels | symmetry s; −1: skew |
    | `"indefinite"` | A = ±1 on the diagonal, in equal number | symmetric; as many negative eigenvalues as positive |
    | `"negative"` | A = −I | symmetric and negative: each token shuns its like |
    | `"spectrum"` | U R Σ Vᵀ of W_q = U Σ Vᵀ, R a random rotation | heads with the symmetric ones' singular values |
    | `"mimetic"` | W_q W_kᵀ ≈ α Z + β I (arXiv:2305.09828), Z random of std 1/√D | each head near to the identity |
    | `"independent"` | as drawn | the model's own init |

    The score of each head and that of their sum cannot both be met, but for 1 and −1. For random draws with D = 768,
    E = 64 and 12 heads:

    | `symmetry` | of the layer, if each head has it | of each head, if the layer has it |
    |---|---|---|
    | 0.9 | 0.94 | 0.82 |
    | 0.5 | 0.69 | 0.24 |
    | 0 | 0.30 | −0.30 |
    | −0.5 | −0.24 | −0.69 |
    | −0.9 | −0.82 | −0.94 |

    Forms differ in size too. The layer form's Frobenius norm over that of the independent draw, for the same shapes:

    | symmetric, negative | `symmetry=0.5` | `symmetry=0` | spectrum | indefinite, `symmetry=-1` |
    |---|---|---|---|---|
    | 1.41 | 1.32 | 1.21 | 1.04 | 1.00 |

    (its square grows by `(tr A)² / D` in each head). `norm="match"` takes that away, so that a comparison is one of
    structure; where queries and keys go through a norm, which undoes any scale, it changes no logit. All this is said
    of W_q and W_k without such norms, or with gains that are all alike, as they start: one that only rescales queries
    and keys keeps `q_i · k_j = ± q_j · k_i`, one that subtracts their mean does so for ±I alone.

    `"mimetic"` is what is published for Q and K, without V and the output; α and β may have any sign. It divides by √E
    and what the module multiplies logits by (1 in T5 and GPT-Neo), so that logits are those of `(α Z + β I) / √E` in
    every model. Biases stay as drawn, and rotary positions turn the form at other offsets than 0. It decomposes a
    D × D matrix for each head: 0.5 s at D = 768 on one core.

    Args:
        scheme (`str`, *optional*, defaults to `"symmetric"`):
            One of the above, or one added by [`register_qk_init`].
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
        symmetry (`float`, `Sequence[float]` or `Mapping[str, float | Sequence[float]]`, *optional*):
            Symmetry score to start from, in [−1, 1], with `scheme="symmetric"`: one for all layers; a sequence with a
            value for each attention layer of a stack, in their order, also of those that `layers` leaves out; or a
            mapping from stack names to either. By default 1, for which W_k is W_q bit by bit.
        target (`str`, *optional*, defaults to `"head"`):
            Whose score `symmetry` is: that of each head's form (`"head"`) or of their sum (`"layer"`). Each is met to
            1e-4 in fp32, whatever the draw. With grouped keys only the layer's can be, but for 1 and −1, for which the
            two are one and the layer form is what is symmetric, or skew.
        norm (`str`, *optional*):
            `"match"` multiplies Q and K of a layer by one number each, the same, so that the layer form's Frobenius
            norm is that of the form drawn. Biases stay.
        options (`Mapping[str, Any]`, *optional*):
            Numbers that the scheme has of its own: `alpha` and `beta` of `"mimetic"`.

    Raises:
        ValueError: on construction, for an unknown scheme, kind, distribution or option, values out of range, a field
            that the scheme does not take, or layers that are no indices.

    Examples:

    ```python
    >>> from transformers import AutoModel, BertConfig
    >>> import hf_symqk
    >>> from hf_symqk import SymmetricInit

    >>> config = BertConfig(
    ...     hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=99
    ... )
    >>> model = AutoModel.from_config(config, qk_init=SymmetricInit(layers=[0, 1]))
    >>> attention = model.encoder.layer[0].attention.self
    >>> bool((attention.query.weight == attention.key.weight).all())
    True
    >>> model.config.qk_init
    SymmetricInit(scheme='symmetric', layers=(0, 1))

    >>> model = AutoModel.from_config(config, qk_init=SymmetricInit(symmetry=[0.9, 0.5, -1]))
    >>> [round(score, 3) for layer in hf_symqk.score_model(model).layers for score in layer.head_symmetry[:2]]
    [0.9, 0.9, 0.5, 0.5, -1.0, -1.0]

    ```
    """

    scheme: str = "symmetric"
    layers: LayerChoice | None = None
    attention: AttentionKind = "self"
    distribution: str | None = None
    symmetry: SymmetryChoice | None = None
    target: Target = "head"
    norm: Literal["match"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entry = scheme_named(self.scheme)
        _require_one_of("attention", self.attention, ATTENTION_KINDS)
        _require_one_of("target", self.target, get_args(Target))
        if self.distribution is not None:
            _require_one_of("distribution", self.distribution, DISTRIBUTIONS)
        if self.norm is not None:
            _require_one_of("norm", self.norm, ("match",))
            if entry.write is None:
                raise ValueError(
                    f"`norm` brings a scheme's forms to the norm of those drawn, which {self.scheme!r} keeps."
                )
        if not isinstance(self.options, Mapping):
            raise ValueError(f"`options` must be a mapping from names to values, got {self.options!r}.")
        if isinstance(self.layers, Mapping):
            layers: Any = {str(stack): _indices(indices) for stack, indices in self.layers.items()}
        else:
            layers = None if self.layers is None else _indices(self.layers)
        # One form each, so that equal choices compare equal.
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "symmetry", self._checked_symmetry(entry))
        object.__setattr__(self, "options", entry.validated(self.options))

    def _checked_symmetry(self, entry: QKInitScheme) -> SymmetryChoice | None:
        given = {"symmetry": self.symmetry is not None, "target": self.target != "head"}
        if not entry.takes_symmetry and any(given.values()):
            named = " and ".join(f"`{name}`" for name, is_given in given.items() if is_given)
            able = " or ".join(repr(name) for name in schemes() if scheme_named(name).takes_symmetry)
            raise ValueError(f"{named} cannot be chosen with scheme {self.scheme!r}, only with {able}.")
        if self.symmetry is None or isinstance(self.symmetry, Mapping):
            stacks = {str(stack): _symmetries(values) for stack, values in (self.symmetry or {}).items()}
            if self.symmetry is not None and not stacks:
                raise ValueError(f"`symmetry` names no stack: {self.symmetry!r}.")
            return stacks or None
        symmetry = _symmetries(self.symmetry)
        return None if symmetry == 1 else symmetry

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def __repr__(self) -> str:
        shown = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        shown = {name: value for name, value in shown.items() if name == "scheme" or value != _default(name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def rewrites(self) -> tuple[Part, ...]:
        """The parts of attention that the option writes: of `"query"`, `"key"` and `"value"`."""
        if self.distribution is not None:
            return ("query", "key", "value")
        entry = scheme_named(self.scheme)
        if entry.write is None:
            return ()
        return ("query", "key") if self.norm is not None else entry.rewrites

    @property
    def changes_weights(self) -> bool:
        """Whether the option does anything at all to the layers that it names."""
        return bool(self.rewrites)

    @property
    def needs_whole_model(self) -> bool:
        """Whether it takes the whole model, its stacks and kinds of attention, to tell what is meant for a layer."""
        per_layer = self.symmetry is not None and not isinstance(self.symmetry, float)
        return self.layers is not None or self.attention != "self" or per_layer

    def to_dict(self) -> dict[str, Any]:
        """
        The option as JSON values, without fields that have their default (except the scheme).

        Returns:
            `dict`: What `config.json` holds under `qk_init`.
        """
        values: dict[str, Any] = {"scheme": self.scheme}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != _default(entry.name):
                values[entry.name] = _plain(value)
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
            known = [entry.name for entry in fields(cls)]
            unknown = sorted(set(value) - set(known))
            if unknown:
                raise ValueError(f"`qk_init` has no field {', '.join(map(repr, unknown))}; its fields are {known}.")
            return cls(**value)
        raise TypeError(f"`qk_init` must be a string, a mapping or a SymmetricInit, got {value!r}.")

    @classmethod
    def from_scores(cls, scores: QKScores, target: Target = "layer") -> "SymmetricInit":
        """
        The init that starts each self-attention layer at the symmetry of another model's: the profile of a trained
        one, say.

        Args:
            scores ([`QKScores`]):
                Scores of a model with stacks of the same names and numbers of layers.
            target (`str`, *optional*, defaults to `"layer"`):
                Which form is to have the layer's score: the layer's own, or (`"head"`) each head's.

        Returns:
            [`SymmetricInit`]: One value a layer, by stack, rounded to six digits.

        Raises:
            ValueError: if a layer has no score, or none is self-attention.

        Examples:

        ```python
        >>> from transformers import AutoModel, BertConfig
        >>> import hf_symqk

        >>> config = BertConfig(
        ...     hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
        ... )
        >>> trained = AutoModel.from_config(config, qk_init={"symmetry": [0.8, 0.3], "target": "layer"})
        >>> init = hf_symqk.SymmetricInit.from_scores(hf_symqk.score_model(trained))
        >>> [round(value, 3) for value in init.symmetry[""]]
        [0.8, 0.3]

        ```
        """
        stacks: dict[str, list[float]] = {}
        for layer in sorted(scores.layers, key=lambda layer: layer.index):
            if layer.kind != "self":
                continue
            if math.isnan(layer.symmetry):
                raise ValueError(f"{layer.name!r} has no symmetry score (NaN), so nothing can start there.")
            value = min(1.0, max(-1.0, layer.symmetry))  # a rounding beyond the range is none of the layer's
            stacks.setdefault(layer.stack, []).append(round(value, _PROFILE_DIGITS))
        if not stacks:
            raise ValueError("The scores are of no self-attention layer, so there is no profile to start from.")
        return cls(symmetry=stacks, target=target)


def _default(name: str) -> Any:
    entry = SymmetricInit.__dataclass_fields__[name]
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _plain(value: Any) -> Any:
    """JSON values."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


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


def _symmetries(values: Any) -> float | tuple[float, ...]:
    is_one = not isinstance(values, Iterable)
    unordered = isinstance(values, str | bytes | Mapping | Set)
    listed = (values,) if is_one else () if unordered else tuple(values)
    if not listed or not all(
        isinstance(value, Real) and not isinstance(value, bool) and -1 <= float(value) <= 1 for value in listed
    ):
        raise ValueError(
            "`symmetry` must be a number from -1 to 1, a non-empty sequence of them (one for each layer of a stack) "
            f"or a mapping from stack names to either, got {values!r}."
        )
    checked = tuple(float(value) + 0.0 for value in listed)  # no -0.0, which is another name for 0
    return checked[0] if is_one else checked
