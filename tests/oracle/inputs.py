"""Inputs for one forward pass of any model: from its signature and config, and from what it says of wrong ones."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel


__all__ = ["InputTries", "inputs_of"]

# Names under which configs keep the number of streams of codes that stand beside each other in one sequence.
_CODES = ("num_codebooks", "num_channels")
_MELS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim", "input_feat_size")
_FEATURES = ("input_features", "input_values", "audio_mel")
_IMAGES = ("pixel_values", "pixel_values_videos")
# Optional arguments that some attention waits for.
_FURTHER = (("encoder_hidden_states",), ("protein_input_ids", "protein_attention_mask"))


def _first(config: Any, *names: str, default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _part(config: PreTrainedConfig, *names: str) -> Any:
    return next((part for name in names if (part := getattr(config, name, None)) is not None), None)


def _image(config: Any) -> tuple[int, int, int]:
    size = _first(config, "image_size", "img_size", "input_size", default=None)
    if size is None:
        size = _first(getattr(config, "backbone_config", None), "image_size", default=64)
    if isinstance(size, dict):
        size = (size.get("height", 64), size.get("width", 64))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = _first(config, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
    return (channels if isinstance(channels, int) else 3), height, width


class _Makers:
    """Tensors by the names that forward passes give their arguments."""

    def __init__(self, model: PreTrainedModel, batch: int, tokens: int) -> None:
        self.config: Any = model.config
        self.vision = _part(self.config, "vision_config", "image_config") or self.config
        self.audio = _part(self.config, "audio_config", "speech_config", "encoder_config") or self.config
        self.batch, self.tokens = batch, tokens
        self.vocabulary = min(100, int(_first(self.config, "vocab_size", default=100) or 100))
        self.generator = torch.Generator().manual_seed(1)
        width = _first(self.config, "hidden_size", "d_model", default=64)
        mels = _first(
            self.audio,
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "mel_dim",
            "input_feat_size",
            default=80,
        )
        frames = 2 * _first(self.audio, "max_source_positions", default=50)
        context = self._context()
        self.makers: dict[str, Callable[[], Tensor]] = {
            "input_ids": lambda: self.integers(batch, tokens),
            "task_inputs": lambda: self.integers(batch, _first(self.config, "task_seq_len", default=tokens)),
            "decoder_input_ids": lambda: self.integers(batch, tokens - 2),
            "pixel_values": lambda: self.floats(batch, *_image(self.vision)),
            "pixel_values_videos": lambda: self.floats(batch, 4, *_image(self.vision)),
            "pixel_position_ids": lambda: _grid(batch, 6),
            "input_values": lambda: self.floats(batch, 8000),
            "input_features": lambda: self.floats(batch, mels, frames),
            "audio_mel": lambda: self.floats(batch, frames, mels),
            "audio_mel_mask": lambda: torch.zeros(batch, frames, dtype=torch.bool),
            "input_features_mask": lambda: torch.ones(batch, frames, dtype=torch.bool),
            "hidden_states": lambda: self.floats(batch, tokens, width),
            "encoder_hidden_states": lambda: self.floats(batch, tokens, self._other_width(width)),
            "inputs_embeds": lambda: self.floats(batch, tokens, width),
            "protein_input_ids": lambda: self.integers(batch, tokens).clamp(max=20),
            "protein_attention_mask": lambda: torch.ones(batch, tokens, dtype=torch.long),
            "context_hidden_states": lambda: self.floats(batch, tokens, width),
            "noise_embeds": lambda: self.floats(batch, tokens, width),
            "query_embeds": lambda: self.floats(batch, tokens, width),
            "inputs": lambda: self.floats(batch, tokens, _first(self.config, "d_model", default=width)),
            "bbox": lambda: torch.zeros(batch, tokens, 4, dtype=torch.long),
            "attention_mask": lambda: torch.ones(batch, tokens, dtype=torch.long),
            "past_values": lambda: self.floats(batch, context),
            "past_time_features": lambda: self.floats(
                batch, context, _first(self.config, "num_time_features", default=0)
            ),
            "past_observed_mask": lambda: torch.ones(batch, context),
            "future_values": lambda: self.floats(batch, _first(self.config, "prediction_length", default=8)),
            "future_time_features": lambda: self.floats(
                batch,
                _first(self.config, "prediction_length", default=8),
                _first(self.config, "num_time_features", default=0),
            ),
        }

    def integers(self, *shape: int) -> Tensor:
        low = min(5, self.vocabulary - 1)
        return torch.randint(low, max(self.vocabulary, low + 1), shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _context(self) -> int:
        lags = getattr(self.config, "lags_sequence", None)
        return _first(self.config, "context_length", default=32) + (max(lags) if lags else 0)

    def _other_width(self, width: int) -> int:
        return _first(self.config, "encoder_hidden_size", "cross_attention_hidden_size", default=width)


def _grid(batch: int, side: int) -> Tensor:
    """Places (x, y) of the patches of a square image `(B, side², 2)`."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([columns, rows], -1).flatten(0, 1).expand(batch, -1, -1)


def inputs_of(model: PreTrainedModel, batch: int = 2, tokens: int = 8) -> dict[str, Tensor]:
    """
    Inputs of one forward pass, by the names in its signature.

    Args:
        model (`PreTrainedModel`): The model.
        batch (`int`, *optional*, defaults to 2): Sequences, images or recordings.
        tokens (`int`, *optional*, defaults to 8): Tokens of text.

    Returns:
        `dict[str, torch.Tensor]`
    """
    parameters = inspect.signature(model.forward).parameters
    makers = dict(_Makers(model, batch, tokens).makers)
    if "pixel_position_ids" in parameters:  # patches instead of images
        patch = 3 * int(_first(model.config, "patch_size", default=16)) ** 2
        makers["pixel_values"] = lambda: torch.randn(batch, 36, patch, generator=torch.Generator().manual_seed(1))
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    wanted = [name for name in required if name in makers]
    main = getattr(model, "main_input_name", "input_ids")
    mains = [main] if isinstance(main, str) else list(main)
    usual = ("input_ids", "decoder_input_ids", "pixel_values", "input_values", "input_features", "bbox")
    wanted += [name for name in (*mains, *usual) if name in parameters and name in makers]
    wanted += [name for name in ("future_values", "future_time_features") if name in parameters]
    return {name: makers[name]() for name in dict.fromkeys(wanted)}


class InputTries:
    """
    Inputs to try one after the other, until a forward pass takes them. After a failure, what it said decides what is
    tried next.

    Args:
        model (`PreTrainedModel`): The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        inputs = inputs_of(model)
        self.model = model
        self.queue: list[dict[str, Tensor]] = [inputs] if inputs else []
        self.alone = [{name: value} for name, value in inputs.items()] if len(inputs) > 1 else []
        self.seen: set[str] = set()
        self.makers = _Makers(model, 2, 8).makers

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.queue or self.alone:
            inputs = self.queue.pop(0) if self.queue else self.alone.pop(0)
            shapes = str({name: tuple(value.shape) for name, value in inputs.items()} | {"ids": _largest_id(inputs)})
            if shapes not in self.seen and len(self.seen) < 16:
                self.seen.add(shapes)
                yield inputs

    def further(self, inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Inputs that were taken, and an optional one that may reach more of the model."""
        parameters = inspect.signature(self.model.forward).parameters
        for names in _FURTHER:
            if all(name in parameters and name not in inputs for name in names):
                yield inputs | {name: self.makers[name]() for name in names}

    def failed(self, inputs: dict[str, Tensor], error: Exception) -> None:
        """
        Adds what might be taken instead.

        Args:
            inputs (`dict[str, torch.Tensor]`): What was not taken.
            error (`Exception`): Why.
        """
        changed = [inputs | change for change in self._changes(inputs, str(error))]
        self.queue = changed + self.queue

    def _changes(self, inputs: dict[str, Tensor], message: str) -> Iterator[dict[str, Tensor]]:
        features = {n: v for n, v in inputs.items() if v.is_floating_point() and v.ndim >= 2}
        images = {n: v for n, v in features.items() if n in _IMAGES}
        sounds = {n: v for n, v in features.items() if n in _FEATURES}
        product = re.search(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", message)
        if product is not None:
            has, wants = map(int, product.groups())
            for name, value in features.items():
                if value.ndim == 3 and value.shape[-1] != value.shape[1] and name in _FEATURES:
                    yield {name: value.mT}  # time before channels
                width, left = divmod(value.shape[-1] * wants, has)
                if not left and 0 < width < 100_000:
                    yield {name: torch.randn(*value.shape[:-1], width, generator=torch.Generator().manual_seed(3))}
        added = re.search(r"a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dim\w+ 2", message)
        if added is not None:
            has, wants = map(int, added.groups())
            for name, value in sounds.items():
                if value.ndim == 3 and value.shape[-1] == has:
                    yield {name: torch.randn(*value.shape[:-1], wants, generator=torch.Generator().manual_seed(3))}
        unpacked = re.search(r"(?:expected|got) (\d), (?:got|but got) (\d)|a (\d)D", message)
        if unpacked is not None or "Dimension out of range" in message:
            for name, value in images.items():
                if value.ndim == 4:  # pairs of images, or frames
                    frames = int(_first(self.model.config, "num_frames", "frames", default=2))
                    yield {name: value[:, None].expand(-1, frames, -1, -1, -1).clone()}
            for name, value in sounds.items():
                if value.ndim == 3:
                    yield {name: value.mT[:, None].clone()}
        missing = re.search(r"(\w+) must be given", message)
        if missing is not None and missing.group(1) in self.makers and missing.group(1) not in inputs:
            yield {missing.group(1): self.makers[missing.group(1)]()}
        if "to have 1 channels" in message or "Expected 2D (unbatched) or 3D" in message:
            yield from ({name: value[:, None]} for name, value in sounds.items() if value.ndim == 2)
        if "index out of range" in message:
            yield {n: v.clamp(max=3) for n, v in inputs.items() if not v.is_floating_point() and n.endswith("ids")}
        if "must match the size" in message or "is invalid for input of size" in message or "index" in message:
            for name, value in inputs.items():
                codes = [_first(self.model.config, code, default=0) for code in _CODES]
                wanted = re.findall(r"\((\d+)\) at non-singleton|\[\d+, (\d+), -1\]", message)
                codes += [int(number) for found in wanted for number in found if number]
                if name.endswith("input_ids") and value.ndim == 2:
                    yield from (
                        {name: value[..., None].expand(-1, -1, count).clone()}
                        for count in codes
                        if isinstance(count, int) and count > 1
                    )
        if features and not product and unpacked is None:
            yield from ({name: value.mT} for name, value in sounds.items() if value.ndim == 3)


def _largest_id(inputs: dict[str, Tensor]) -> int:
    return max((int(v.max()) for v in inputs.values() if not v.is_floating_point() and v.numel()), default=0)
