"""What kind of model a config or a live module is of."""

import re

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from .attention import outermost_model


__all__ = ["model_family", "model_type"]

_GENERATING = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def model_type(model: nn.Module) -> str | None:
    """`config.model_type` of the outermost Transformers model in a module, `None` if there is none."""
    whole = outermost_model(model)
    return None if whole is None else whole.config.model_type


def model_family(config: PreTrainedConfig) -> str | None:
    """
    Which way a model's attention looks, told from its config.

    Args:
        config (`PreTrainedConfig`): The config of a whole model.

    Returns:
        `str`: `"encoder"`, `"decoder"` or `"encoder-decoder"`; `None` for a model type that Transformers does not know
        and whose architectures do not say.
    """
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if getattr(config, "is_decoder", False):
        return "decoder"
    kind = config.model_type
    generates = any(kind in mapping for mapping in _GENERATING)
    if kind in CONFIG_MAPPING:
        return "decoder" if generates and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "encoder"
    architectures = " ".join(config.architectures or ())
    if re.search(r"CausalLM|LMHead|ForConditionalGeneration", architectures):
        return "decoder"
    return "encoder" if re.search(r"MaskedLM|ImageClassification|ForPreTraining", architectures) else None
