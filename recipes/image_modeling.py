"""The model of `vit.py`: its config, checked before anything is trained, and the model built from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arguments import ModelArguments, RecipeError
from modeling import check_names, parse_config_overrides, read_config
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

import hf_symqk


__all__ = ["build_image_config", "build_image_model", "image_sides"]

DEFAULT_MODEL_TYPE = "vit"
# For the built-in digits: 16 patches of 2 × 2 pixels.
DIGITS_SHAPE = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    # The 0.02 of ViT suits a width of 768: at 64 the model learns several times more slowly from it.
    "initializer_range": 0.1,
}
# For other images, where no architecture is named: 64 patches of 8 × 8 pixels.
IMAGES_SHAPE = {**DIGITS_SHAPE, "image_size": 64, "patch_size": 8, "num_channels": 3}


def build_image_config(arguments: ModelArguments, classes: Sequence[str], digits: bool) -> PreTrainedConfig:
    """
    Builds the config of an image classifier.

    Args:
        arguments (`ModelArguments`):
            Which architecture, and what is changed in it.
        classes (sequence of `str`):
            The classes.
        digits (`bool`):
            Whether the images are the built-in digits, for which the small default model is cut smaller still.

    Returns:
        `PreTrainedConfig`: the config, with the classes in `id2label`.

    Raises:
        RecipeError: if the config cannot be found or built, is not that of a Vision Transformer for classification, or
            its patches do not divide its images or its heads its width.
    """
    overrides = parse_config_overrides(arguments.config_overrides)
    model_type, values, source = read_config(arguments, DEFAULT_MODEL_TYPE, DIGITS_SHAPE if digits else IMAGES_SHAPE)
    config_class = CONFIG_MAPPING[model_type]
    _check_class(config_class, source)
    check_names(overrides, config_class(), source)
    values.update(overrides)
    values["id2label"] = dict(enumerate(classes))
    values["label2id"] = {name: number for number, name in enumerate(classes)}
    values.pop("num_labels", None)
    try:
        config = config_class(**values)
    except Exception as error:  # config classes raise errors of several libraries
        raise RecipeError(f"{source} with config_overrides={overrides}: {error}") from error
    _check_sizes(config, source)
    return config


def build_image_model(config: PreTrainedConfig, qk_init: dict[str, Any] | str | None) -> PreTrainedModel:
    """
    Builds the model, with its weights drawn from PyTorch's global generator.

    Args:
        config (`PreTrainedConfig`):
            As [`build_image_config`] returns it.
        qk_init (`dict`, `str` or `None`):
            Query-key initialisation; `None` for the model's own.

    Returns:
        `PreTrainedModel`: the model, on the CPU in float32.

    Raises:
        RecipeError: if the model or its initialisation rejects the config, or it has no attention that is scored.
    """
    try:
        model = AutoModelForImageClassification.from_config(config, qk_init=qk_init)
        scored = hf_symqk.score_model(model).layers
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(f"{config.model_type} with qk_init={qk_init!r} cannot be built: {error}") from error
    if not scored:
        raise RecipeError(f"{config.model_type} has no attention with queries and keys: choose a Vision Transformer.")
    return model


def image_sides(config: PreTrainedConfig) -> tuple[int, int]:
    """
    Height and width of the images that a model takes.

    Args:
        config (`PreTrainedConfig`):
            Its config.

    Returns:
        `tuple[int, int]`: pixels.
    """
    return _pair(config.image_size)


def _pair(value: Any) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def _check_class(config_class: type[PreTrainedConfig], source: str) -> None:
    if config_class not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        known = sorted(
            mapped.model_type
            for mapped in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
            if hasattr(mapped(), "patch_size") and hasattr(mapped(), "image_size")
        )
        raise RecipeError(f"{source} is not an image classifier. Vision Transformers are: {', '.join(known)}.")
    if not hasattr(config_class(), "image_size"):
        raise RecipeError(f"{source} declares no image_size, it is no Vision Transformer: choose vit, deit or beit.")


def _check_sizes(config: PreTrainedConfig, source: str) -> None:
    if config.num_channels not in (1, 3):
        raise RecipeError(f"{source} has num_channels={config.num_channels}: choose 1 (grey) or 3 (colour).")
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, int | list | tuple):
        sides, patches = image_sides(config), _pair(patch)
        if any(part < 1 or part > side or side % part for side, part in zip(sides, patches, strict=True)):
            raise RecipeError(
                f"{source}: patch_size={patch} does not divide image_size={config.image_size}: change one by "
                "--config_overrides."
            )
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and isinstance(width, int) and (heads < 1 or width % heads):
        raise RecipeError(
            f"{source}: hidden_size={width} is not a multiple of num_attention_heads={heads}: change one by "
            "--config_overrides."
        )
