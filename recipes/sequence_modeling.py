"""The model of `finetune.py`: a pretrained one with a fresh head, or a small fresh encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from arguments import RecipeError
from modeling import check_positions
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


__all__ = ["build_classifier", "load_pretrained_config", "load_pretrained_tokenizer", "prepare_config"]


def load_pretrained_config(name: str) -> PreTrainedConfig:
    """
    Loads the config of a pretrained model that can carry a classification head.

    Args:
        name (`str`):
            Folder or Hub id.

    Returns:
        `PreTrainedConfig`: the config.

    Raises:
        RecipeError: if there is none, or the architecture has no head for classifying sequences.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"model_name_or_path={name!r} cannot be loaded: {error}") from error
    check_classifies(config, f"model_name_or_path={name!r}")
    return config


def check_classifies(config: PreTrainedConfig, source: str) -> None:
    """
    Checks that Transformers has a head for classifying sequences for an architecture.

    Args:
        config (`PreTrainedConfig`):
            Its config.
        source (`str`):
            How the error calls it.

    Raises:
        RecipeError: if it has none, with the architectures that have one.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        known = sorted({mapped.model_type for mapped in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING})
        raise RecipeError(
            f"{source} is a {config.model_type}, which has no head for classifying text. These have: "
            f"{', '.join(known)}."
        )


def load_pretrained_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Loads the tokenizer of a pretrained model. One without a token for padding, as decoders have it, pads with its end
    of text: those places are masked, and decoders classify by the last token before them.

    Args:
        name (`str`):
            Folder or Hub id.

    Returns:
        `PreTrainedTokenizerBase`: the tokenizer; it pads on the right.

    Raises:
        RecipeError: if there is none, or it has neither token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"the tokenizer of {name!r} cannot be loaded: {error} Name one by --tokenizer_name."
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise RecipeError(
                f"the tokenizer of {name!r} has neither a token for padding nor one for the end of text: set "
                "pad_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def prepare_config(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, classes: Sequence[str] | None
) -> PreTrainedConfig:
    """
    Fits a config to its task, in place.

    Args:
        config (`PreTrainedConfig`):
            The config.
        tokenizer (`PreTrainedTokenizerBase`):
            Gives the padding token.
        classes (sequence of `str` or `None`):
            The classes; `None` where one number is predicted.

    Returns:
        `PreTrainedConfig`: the same, with `id2label`, `problem_type` and `pad_token_id`.
    """
    names = list(classes) if classes is not None else ["LABEL_0"]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "regression" if classes is None else "single_label_classification"
    config.pad_token_id = tokenizer.pad_token_id
    return config


def build_classifier(
    config: PreTrainedConfig,
    max_length: int,
    pretrained: str | None = None,
    qk_init: dict[str, Any] | str | None = None,
) -> tuple[PreTrainedModel, str | None]:
    """
    Builds a model that classifies sequences; what is not read from a file is drawn from PyTorch's global generator.

    Args:
        config (`PreTrainedConfig`):
            As [`prepare_config`] returns it.
        max_length (`int`):
            Tokens that it will be given.
        pretrained (`str`, *optional*):
            Folder or Hub id of its weights. Without it all are drawn.
        qk_init (`dict` or `str`, *optional*):
            Query-key initialisation of a model whose weights are drawn.

    Returns:
        `tuple`: the model, on the CPU in float32, and a digest of the weights that a pretrained model did not have
        (its head), by which two fine-tuning runs can be compared.

    Raises:
        RecipeError: if it cannot be built, or has fewer positions than `max_length`.
    """
    try:
        if pretrained is None:
            model = AutoModelForSequenceClassification.from_config(config, qk_init=qk_init)
            digest = None
        else:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                pretrained, config=config, dtype=torch.float32, output_loading_info=True
            )
            digest = _digest(model, sorted(loading["missing_keys"]))
    except (OSError, ValueError, TypeError, RuntimeError, AssertionError) as error:
        what = f"model_name_or_path={pretrained!r}" if pretrained else f"{config.model_type} with qk_init={qk_init!r}"
        raise RecipeError(f"{what} cannot be built: {error}") from error
    check_positions(model, max_length, "max_length")
    return model, digest


def _digest(model: PreTrainedModel, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    state = model.state_dict()
    for name in names:
        digest.update(f"{name} {tuple(state[name].shape)};".encode())
        digest.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
