"""The model of `vit.py`: its config, checked before anything is trained, and the model built from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arguments import ModelArguments, RecipeError
from modeling import config_from_arguments
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification, PreTrainedConfig
from transformers import PreTrainedModel

import hf_symqk


__all__ = ["DEFAULT_SHAPE", "build_image_config", "build_image_model", "image_size_of"]
