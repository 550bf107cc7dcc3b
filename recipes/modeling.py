"""The language model of a recipe: its config, checked before anything is trained, and the model built from it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from arguments import ModelArguments, RecipeError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


__all__ = [
    "DECODER",
    "ENCODER",
    "ModelKind",
    "build_config",
    "build_model",
    "check_causal",
    "check_names",
    "check_positions",
    "parse_config_overrides",
    "read_config",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """
    Encoders or decoders: which architectures serve, and which is taken where none is named.

    Attributes:
        name (`str`): How errors call them.
        mapping (mapping): Config class to model class, of Transformers.
        auto_class (`type`): Builds the model.
        is_decoder (`bool`): Whether a token may attend to those before it alone.
        default_model_type (`str`): Architecture of the default model.
        default_shape (mapping): Its sizes.
    """

    name: str
    mapping: Any
    auto_class: Any
    is_decoder: bool
    default_model_type: str
    default_shape: Mapping[str, Any]


SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
# Pre-norm rotary models of this size leave the unigram plateau within a minute on one core; a post-norm BERT of the
# same size does not within minutes.
ENCODER = ModelKind(
    name="masked-language-model encoder",
    mapping=MODEL_FOR_MASKED_LM_MAPPING,
    auto_class=AutoModelForMaskedLM,
    is_decoder=False,
    default_model_type="modernbert",
    default_shape={**SMALL, "max_position_embeddings": 512},
)
DECODER = ModelKind(
    name="decoder (causal language model)",
    mapping=MODEL_FOR_CAUSAL_LM_MAPPING,
    auto_class=AutoModelForCausalLM,
    is_decoder=True,
    default_model_type="llama",
    default_shape={**SMALL, "max_position_embeddings": 512},
)
RECIPE_OF = {ENCODER.name: "mlm.py", DECODER.name: "clm.py"}
SPECIAL_IDS = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "mask_token_id")


def parse_config_overrides(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """
    Reads changes to a config.

    Args:
        value (`dict`, `str` or `None`):
            A mapping, a JSON object, or `"hidden_size=64,num_hidden_layers=2"`.

    Returns:
        `dict`: name to value; numbers, booleans and `null` are read as such.

    Raises:
        RecipeError: for a part without `=`, and for text that opens a JSON object but is none.

    Example:

    ```python
    >>> parse_config_overrides("hidden_size=64,hidden_act=relu")
    {'hidden_size': 64, 'hidden_act': 'relu'}

    ```
    """
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    if value.strip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise RecipeError(f"config_overrides={value!r} is not a JSON object: {error}") from None
    overrides = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, equals, text = part.partition("=")
        if not equals:
            raise RecipeError(f"config_overrides: {part!r} is not of the form name=value.")
        try:
            overrides[name.strip()] = json.loads(text if text not in ("True", "False") else text.lower())
        except json.JSONDecodeError:
            overrides[name.strip()] = text.strip()
    return overrides


def read_config(
    arguments: ModelArguments, default_model_type: str, default_shape: Mapping[str, Any]
) -> tuple[str, dict[str, Any], str]:
    """
    Reads which architecture the arguments name.

    Args:
        arguments (`ModelArguments`):
            Name a config, an architecture or neither.
        default_model_type (`str`):
            Architecture that is meant by neither.
        default_shape (mapping):
            Its sizes.

    Returns:
        `tuple`: the architecture, which Transformers knows; values for its config, without `config_overrides`; and how
        errors call the source of both.

    Raises:
        RecipeError: if both are named, the config cannot be loaded, or Transformers does not know the architecture.
    """
    if arguments.config_name is not None and arguments.model_type is not None:
        raise RecipeError(
            f"config_name={arguments.config_name!r} and model_type={arguments.model_type!r} both name the "
            "architecture: give one."
        )
    if arguments.config_name is not None:
        try:
            values, _ = PreTrainedConfig.get_config_dict(arguments.config_name)
        except (OSError, ValueError) as error:
            raise RecipeError(f"config_name={arguments.config_name!r} cannot be loaded: {error}") from error
        model_type, source = values.pop("model_type", None), f"config_name={arguments.config_name!r}"
        carried = values.pop("qk_init", None)
        if carried is not None:
            logger.warning("%s carries qk_init=%s: the argument qk_init replaces it", source, carried)
    else:
        model_type = arguments.model_type or default_model_type
        values = dict(default_shape) if arguments.model_type is None else {}
        source = f"model_type={model_type!r}"
    if model_type not in CONFIG_MAPPING:
        raise RecipeError(f"{source}: Transformers {transformers.__version__} knows no architecture {model_type!r}.")
    return model_type, values, source


def build_config(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, trained_tokenizer: bool, kind: ModelKind
) -> PreTrainedConfig:
    """
    Builds the config of a language model that fits its tokenizer.

    Args:
        arguments (`ModelArguments`):
            Which architecture, and what is changed in it.
        tokenizer (`PreTrainedTokenizerBase`):
            Gives the special tokens, and the vocabulary size except where `config_name` or an override states one.
        trained_tokenizer (`bool`):
            Whether the recipe trained it; a vocabulary size of `config_name` then belongs to another tokenizer and is
            replaced.
        kind (`ModelKind`):
            `ENCODER` or `DECODER`.

    Returns:
        `PreTrainedConfig`: the config.

    Raises:
        RecipeError: if the config cannot be found or built, is not of that kind, its vocabulary is smaller than the
            tokenizer's, or its heads do not divide its width.
    """
    overrides = parse_config_overrides(arguments.config_overrides)
    model_type, values, source = read_config(arguments, kind.default_model_type, kind.default_shape)
    config_class = CONFIG_MAPPING[model_type]
    _check_kind(config_class, source, kind)
    check_names(overrides, config_class(), source)
    if "num_hidden_layers" in overrides and "layer_types" in values and "layer_types" not in overrides:
        logger.warning("%s: layer_types is derived anew for %d layers", source, overrides["num_hidden_layers"])
        del values["layer_types"]

    for name in SPECIAL_IDS:
        if hasattr(config_class(), name) and name not in overrides:
            values[name] = _special_id(tokenizer, name)
    if "vocab_size" not in overrides and (arguments.config_name is None or trained_tokenizer):
        values["vocab_size"] = len(tokenizer)
    values.update(overrides)
    try:
        config = config_class(**values)
    except Exception as error:  # config classes raise errors of several libraries
        raise RecipeError(f"{source} with config_overrides={overrides}: {error}") from error
    _check_config(config, tokenizer, source, kind)
    return config


def build_model(
    config: PreTrainedConfig, qk_init: dict[str, Any] | str | None, block_size: int, kind: ModelKind
) -> PreTrainedModel:
    """
    Builds the model, with its weights drawn from PyTorch's global generator.

    Args:
        config (`PreTrainedConfig`):
            As [`build_config`] returns it.
        qk_init (`dict`, `str` or `None`):
            Query-key initialisation; `None` for the model's own.
        block_size (`int`):
            Tokens that it will be given.
        kind (`ModelKind`):
            `ENCODER` or `DECODER`.

    Returns:
        `PreTrainedModel`: the model, on the CPU in float32.

    Raises:
        RecipeError: if the model or its initialisation rejects the config, it has fewer positions than `block_size`,
            or it is to be a decoder and reads what it is to predict.
    """
    try:
        model = kind.auto_class.from_config(config, qk_init=qk_init)
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(f"{config.model_type} with qk_init={qk_init!r} cannot be built: {error}") from error
    check_positions(model, block_size)
    if kind.is_decoder:
        check_causal(model, block_size)
    return model


def check_causal(model: PreTrainedModel, block_size: int) -> None:
    """
    Checks that a model's prediction of a token does not depend on that token: it would learn to copy it.

    Args:
        model (`PreTrainedModel`):
            The model. One whose weights are partitioned (ZeRO-3) is taken as it is.
        block_size (`int`):
            Tokens of a block.

    Raises:
        RecipeError: if the logits of earlier places change with the last token.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return
    length = min(block_size, 8)
    tokens = torch.arange(length).remainder(model.config.vocab_size).repeat(2, 1)
    tokens[1, -1] = (tokens[0, -1] + 1) % model.config.vocab_size
    training = model.training
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens.to(model.device)).logits[:, :-1].float()
    model.train(training)
    if not torch.allclose(logits[0], logits[1], rtol=1e-4, atol=1e-5):
        raise RecipeError(
            f"{type(model).__name__} reads the tokens that it is to predict: it is no decoder as it is configured "
            "(model_type, config_overrides)."
        )


def check_positions(model: PreTrainedModel, block_size: int, argument: str = "block_size") -> None:
    """
    Checks that a model has a position for each token of a block.

    Args:
        model (`PreTrainedModel`):
            The model.
        block_size (`int`):
            Tokens of a block.
        argument (`str`, *optional*, defaults to `"block_size"`):
            The argument that gives it.

    Raises:
        RecipeError: if it has fewer. The RoBERTa family counts positions from `pad_token_id + 1`, so that
            `max_position_embeddings` 514 with padding id 1 are 512 positions.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    reason = "max_position_embeddings"
    for name, module in model.named_modules():
        if not (name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)):
            continue
        if module.padding_idx is not None:
            offset = module.padding_idx + 1
            limit = module.num_embeddings - offset
            reason = f"max_position_embeddings {module.num_embeddings} less {offset}: it counts from pad_token_id + 1"
    if limit is not None and 0 <= limit < block_size:
        raise RecipeError(
            f"{argument}={block_size} is above the {limit} positions of {model.config.model_type} ({reason}): lower "
            f"--{argument} or raise max_position_embeddings by --config_overrides."
        )


def _check_kind(config_class: type[PreTrainedConfig], source: str, kind: ModelKind) -> None:
    if config_class not in kind.mapping:
        other = next((other for other in (ENCODER, DECODER) if other != kind and config_class in other.mapping), None)
        if other is not None:
            hint = f" It is a {other.name}: {RECIPE_OF[other.name]} trains it."
        else:
            known = sorted({mapped.model_type for mapped in kind.mapping})
            hint = f" These are: {', '.join(known)}."
        raise RecipeError(f"{source} is not a {kind.name}.{hint}")
    model_class: Any = kind.mapping[config_class]
    if isinstance(model_class, list | tuple):
        model_class = model_class[0]
    if model_class.main_input_name != "input_ids":
        raise RecipeError(f"{source} reads {model_class.main_input_name}, not text: choose a model of text.")
    if config_class().is_encoder_decoder:
        raise RecipeError(f"{source} is an encoder-decoder, which this recipe does not train: choose a {kind.name}.")


def check_names(overrides: Mapping[str, Any], config: PreTrainedConfig, source: str) -> None:
    """
    Checks that a config has what is to be changed in it.

    Args:
        overrides (mapping):
            The changes.
        config (`PreTrainedConfig`):
            Any config of the architecture.
        source (`str`):
            How the error calls it.

    Raises:
        RecipeError: for an unknown name, with those that are close to it.
    """
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise RecipeError(f"config_overrides: {source} has no {name!r}.{hint}")


def _special_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    # BERT-like tokenizers have no begin and end of text but the two tokens that enclose a sequence.
    stand_in = {"bos_token_id": "cls_token_id", "eos_token_id": "sep_token_id"}.get(name, name)
    value = getattr(tokenizer, name)
    return getattr(tokenizer, stand_in) if value is None else value


def _check_config(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str, kind: ModelKind) -> None:
    # Architectures that serve as both say which they are to be.
    is_decoder = getattr(config, "is_decoder", False)
    if is_decoder and not kind.is_decoder:
        raise RecipeError(
            f"{source} has is_decoder=True, a decoder: set is_decoder=false by --config_overrides, or train it with "
            f"{RECIPE_OF[DECODER.name]}."
        )
    if kind.is_decoder and not is_decoder and type(config) in ENCODER.mapping:
        hint = ", or make it a decoder by --config_overrides is_decoder=true" if hasattr(config, "is_decoder") else ""
        raise RecipeError(f"{source} is an encoder: train it with {RECIPE_OF[ENCODER.name]}{hint}.")
    if config.vocab_size < len(tokenizer):
        raise RecipeError(
            f"{source} has vocab_size={config.vocab_size}, below the {len(tokenizer)} entries of the tokenizer: give "
            f"--config_overrides vocab_size={len(tokenizer)} or another --tokenizer_name."
        )
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    free_width = getattr(config, "head_dim", None) is not None
    if heads is not None and width is not None and not free_width and (heads < 1 or width % heads):
        raise RecipeError(
            f"{source}: hidden_size={width} is not a multiple of num_attention_heads={heads}: change one by "
            "--config_overrides."
        )
