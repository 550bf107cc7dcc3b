"""Inputs for one forward pass of a model for which none were given: its own dummy inputs, or made from its config."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


__all__ = ["example_inputs"]

_BATCH, _TOKENS = 2, 8
# In the order in which they are looked for in a forward's signature.
_MAIN = ("input_ids", "pixel_values", "input_values", "input_features")


def example_inputs(model: nn.Module, speaking: nn.Module) -> Iterator[dict[str, Tensor]]:
    """
    Inputs to try, one after the other.

    Args:
        model (`torch.nn.Module`): The model that is run.
        speaking (`torch.nn.Module`): What knows its inputs: itself, or the Transformers model in it.

    Yields:
        `dict[str, torch.Tensor]`: Keyword arguments of a forward pass; nothing where the signature asks for arguments
        that are not known here.
    """
    parameters = inspect.signature(model.forward).parameters
    if all(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        parameters = inspect.signature(speaking.forward).parameters
    makers = _makers(getattr(speaking, "config", None), speaking)
    both_sides = getattr(getattr(speaking, "config", None), "is_encoder_decoder", False) is True
    further = ["decoder_input_ids"] if both_sides and "decoder_input_ids" in parameters else []
    example = next((t for t in speaking.parameters() if t.is_floating_point()), torch.empty(0))

    def made(names: list[str]) -> dict[str, Tensor]:
        tensors = {name: makers[name]() for name in dict.fromkeys(names)}
        return {name: t.to(example) if t.is_floating_point() else t.to(example.device) for name, t in tensors.items()}

    main = getattr(speaking, "main_input_name", None)
    mains = [main] if isinstance(main, str) else list(main or ())
    dummy = getattr(speaking, "dummy_inputs", None)
    if isinstance(dummy, Mapping) and set(mains) <= set(dummy):
        given = {name: value.to(example.device) for name, value in dummy.items() if isinstance(value, Tensor)}
        yield given | made([name for name in further if name not in given])
    present = [name for name in _MAIN if name in parameters]
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if any(name not in makers for name in needed):
        return
    usual = [name for name in mains if name in makers and name in parameters] or present[:1]
    for names in ([*needed, *usual, *further], [*needed, *present, *further]):
        if names:
            yield made(names)


def _makers(config: Any, model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def first(*names: str, default: int, parts: tuple[str, ...] = ()) -> Any:
        holders = [config, *(getattr(config, part, None) for part in parts)]
        values = (getattr(holder, name, None) for holder in holders for name in names)
        return next((value for value in values if value is not None), default)

    def integers() -> Tensor:
        embedding = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
        known = 100 if embedding is None else embedding.num_embeddings
        vocabulary = first("vocab_size", default=known, parts=("text_config",))
        # Small ones are often special: padding, start and end.
        low = min(5, vocabulary - 1)
        return torch.randint(low, max(vocabulary, low + 1), (_BATCH, _TOKENS), generator=generator)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def image() -> Tensor:
        vision = ("vision_config",)
        size = first("image_size", "img_size", default=224, parts=vision)
        if isinstance(size, Mapping):
            size = (size["height"], size["width"])
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return floats(_BATCH, first("num_channels", "in_channels", "in_chans", default=3, parts=vision), height, width)

    def spectrum() -> Tensor:
        mels = first("num_mel_bins", "feature_size", default=80)
        return floats(_BATCH, mels, 2 * first("max_source_positions", default=50))

    return {
        "input_ids": integers,
        "decoder_input_ids": integers,
        "pixel_values": image,
        "input_values": lambda: floats(_BATCH, 8000),
        "input_features": spectrum,
        "attention_mask": lambda: torch.ones(_BATCH, _TOKENS, dtype=torch.long),
        "inputs_embeds": lambda: floats(_BATCH, _TOKENS, first("hidden_size", "d_model", default=64)),
    }
