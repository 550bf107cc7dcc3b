"""What an attention module multiplies its logits by."""

from ..attention import AttentionLayer, value_of


__all__ = ["logit_scale"]

# Under which names modules of Transformers keep the factor.
_NAMES = ("scaling", "scale", "softmax_scale", "inv_norm_factor")
# Model types that multiply by nothing and keep nothing that says so.
_UNSCALED = frozenset({"gpt_neo"})


def logit_scale(layer: AttentionLayer) -> float:
    """
    The factor on a layer's logits `q · k`, as the module keeps it; 1/√E where it keeps none.

    Args:
        layer ([`AttentionLayer`]): The layer.

    Returns:
        `float`: 1 in the T5 family and in GPT-Neo.
    """
    if layer.model_type in _UNSCALED:
        return 1.0
    held = (value_of(layer.module, name) for name in _NAMES)
    found = next((value for value in held if isinstance(value, int | float) and value > 0), None)
    return layer.heads.head_dim**-0.5 if found is None else float(found)
