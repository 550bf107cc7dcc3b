"""
A small model of every type that Transformers knows, from its small config, with weights that let mistakes show.
"""

import importlib
from collections.abc import Iterator

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from .configs import small_config


__all__ = ["NoModelError", "build", "shake"]

_LARGEST = 150_000_000  # parameters


class NoModelError(RuntimeError):
    """A type that has a config and no model, so that nothing can be built."""


def _model_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Model classes of a config: those of the auto mappings (the base model first), then any of its module."""
    names: list[str] = []
    mappings = sorted(name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES"))
    mappings.sort(key=lambda name: name != "MODEL_MAPPING_NAMES")
    for mapping in mappings:
        entry = getattr(modeling_auto, mapping).get(config.model_type, ())
        names += [entry] if isinstance(entry, str) else list(entry)
    for name in dict.fromkeys(names):
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            yield found
    package = type(config).__module__.rpartition(".")[0]
    try:
        own = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError as error:
        # A config whose models stand elsewhere (a type that only renames another one), or nowhere.
        if error.name is None or not error.name.startswith(package):
            raise
        return
    found = [value for value in vars(own).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    found = [value for value in found if value.__module__.startswith(package) and "PreTrained" not in value.__name__]
    # Those that hold the most stand last in a file.
    yield from (value for value in reversed(found) if getattr(value, "config_class", None) is type(config))


def build(model_type: str, level: int = 0, seed: int = 0) -> PreTrainedModel:
    """
    A small model with random weights.

    Args:
        model_type (`str`): A key of `CONFIG_MAPPING`.
        level (`int`, *optional*, defaults to 0): How small (see [`small_config`]).
        seed (`int`, *optional*, defaults to 0): Seed of the weights.

    Returns:
        `PreTrainedModel`: In eval mode.

    Raises:
        NoModelError: if there is no class of this type.
        RuntimeError: if no class can be built, or it would be too large.
    """
    try:
        config = small_config(model_type, level)
    except Exception as error:
        raise RuntimeError(f"config: {type(error).__name__}: {error}") from error
    classes = list(dict.fromkeys(_model_classes(config)))
    if not classes:
        raise NoModelError(f"Transformers {transformers.__version__} has a config of {model_type!r} and no model.")
    errors = []
    for model_class in classes[:6]:
        try:
            if level < 2:
                raise LookupError("small enough")
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
            if size > _LARGEST:
                raise MemoryError(f"{size:,} parameters")
        except MemoryError as error:
            errors.append(f"{model_class.__name__}: {error}")
            continue
        except Exception:
            size = 0  # some classes cannot be made on the meta device
        try:
            config = small_config(model_type, level)
            torch.manual_seed(seed)
            return model_class._from_config(config).eval()
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__}: {str(error)[:160]}")
    raise RuntimeError("; ".join(errors))


def shake(model: nn.Module, seed: int = 5) -> None:
    """Moves norms and biases away from 1 and 0, and projections that are drawn as zeros, so that mistakes show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.numel() > 1_000_000 or not parameter.numel():
                continue  # embeddings, and prefixes of no tokens
            if not torch.isfinite(parameter).all():
                parameter.zero_()
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
            elif parameter.abs().max() < 1e-4:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
