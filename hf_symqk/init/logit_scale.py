"""What an attention module multiplies its logits by."""

from collections.abc import Callable

from ..attention import AttentionLayer, value_of


__all__ = ["logit_scale"]

# Under which names modules of Transformers keep the factor.
_NAMES = ("scaling", "scale", "softmax_scale", "inv_norm_factor")


def _default(layer: AttentionLayer) -> float:
    return layer.heads.head_dim**-0.5


def _disentangled(layer: AttentionLayer) -> float:
    """One term of content and one for each kind of position share the scale."""
    terms = 1 + len(set(value_of(layer.module, "pos_att_type") or ()) & {"c2p", "p2c"})
    return (layer.heads.head_dim * terms) ** -0.5


# Model types whose modules keep nothing that says it, or something that does not.
_BY_TYPE: dict[str, Callable[[AttentionLayer], float]] = {
    "gpt_neo": lambda layer: 1.0,
    "deberta": _disentangled,
    "deberta-v2": _disentangled,
    # Scaled before the rotation; `scaling` is 1 for what comes after it.
    **dict.fromkeys(("esm", "evolla"), _default),
    "openai-gpt": _default,  # `scale` says whether
    "openai_privacy_filter": _default,  # half of it on queries and half on keys
}


def logit_scale(layer: AttentionLayer) -> float:
    """
    The factor on a layer's logits `q · k`, as the module keeps it; 1/√E where it keeps none.

    Args:
        layer ([`AttentionLayer`]): The layer.

    Returns:
        `float`: 1 in the T5 family and in GPT-Neo.
    """
    if (own := _BY_TYPE.get(layer.model_type or "")) is not None:
        return own(layer)
    held = (value_of(layer.module, name) for name in _NAMES)
    numbers = (value for value in held if isinstance(value, int | float) and not isinstance(value, bool))
    return float(next((value for value in numbers if value > 0), _default(layer)))
