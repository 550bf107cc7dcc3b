"""
Small models in which rotations of queries and keys show, and inputs that reach the layers of towers that take patches,
codes or recordings of their own.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_symqk.attention.calling import Call, capture_calls
from hf_symqk.attention.catching import catch_logits

from .building import build
from .configs import OVERRIDES


__all__ = ["reach", "small_model"]

_SLOWEST = 0.05  # radians a position: what turns more slowly would not be seen in eight tokens
# What the shrunk configs get wrong about rotation: widths of their own that have to fit the others.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts": 16},
    # A head no wider than the rank of its queries, half of it rotated.
    "deepseek_v4": {**OVERRIDES["deepseek_v4"], "head_dim": 16, "partial_rotary_factor": 0.5},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4, 4]}
    },
    "longcat_flash": {"head_dim": 8},
    "step3p5": {"sliding_window": 16},
}


def small_model(model_type: str, level: int = 0) -> PreTrainedModel:
    """
    A small model with random weights, in which rotations show.

    Args:
        model_type (`str`): A key of `CONFIG_MAPPING`.
        level (`int`, *optional*, defaults to 0): How small (see [`small_config`]).

    Returns:
        `PreTrainedModel`: In eval mode.
    """
    with mock.patch.dict(OVERRIDES, _OVERRIDES):
        model = build(model_type, level)
    _prepare(model)
    return model


def _prepare(model: nn.Module) -> None:
    """Makes every channel that rotates do so visibly within a few tokens, and no W_q or W_k zero."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "layer_rope_theta", None) is None:  # rotations that are looked up by what they are
                _quicken(getattr(config, "rope_parameters", None))
        for name, buffer in model.named_buffers():
            if "inv_freq" in name and buffer.is_floating_point():
                buffer.copy_(torch.where(buffer > 0, buffer.clamp(min=_SLOWEST), buffer))
                _share(model.get_submodule(name.rpartition(".")[0]), buffer.shape[-1])
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.numel() and not parameter.abs().max() > 1e-4:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def _quicken(parameters: Any) -> None:
    """The same of frequencies that are worked out in the forward pass."""
    if isinstance(parameters, dict):
        parameters |= {"rope_theta": 100.0} if "rope_theta" in parameters else {}
        for values in parameters.values():
            _quicken(values)


def _share(embedding: nn.Module, channels: int) -> None:
    """Shares of several axes (M-RoPE) that fit heads as narrow as these, in the proportions of the model's own."""
    shares = getattr(embedding, "mrope_section", None)
    if isinstance(shares, list | tuple) and sum(shares) != channels:
        third = channels // 3
        embedding.mrope_section = [channels - third * (len(shares) - 1), *[third] * (len(shares) - 1)]


def _further(tower: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Inputs that `inputs.py` does not make: patches with the shapes of their images, and what few towers take."""
    generator = torch.Generator().manual_seed(4)
    names = list(inspect.signature(tower.forward).parameters)
    shapes = next((name for name in ("grid_thw", "image_grid_thw") if name in names), None)
    kernels = [
        p
        for name, p in tower.named_parameters()
        if re.search(r"(patch_emb\w*|embeddings\.proj)\.", name) and p.ndim > 1
    ]
    if shapes is not None and kernels:
        images = torch.tensor([[2, 4, 4]])
        image = next((name for name in ("pixel_values", "hidden_states") if name in names), names[0])
        kernel = kernels[0].shape[1:]
        side = int(getattr(tower.config, "patch_size", 1)) * int(getattr(tower.config, "spatial_merge_size", 1))
        for shape in ((kernel.numel(),), kernel, (side, side, 3)):
            patches = torch.randn(32, *shape, generator=generator)
            merged = {"merge_sizes": torch.ones(1, dtype=torch.long)} if "merge_sizes" in names else {}
            yield from ({image: values, shapes: images, **merged} for values in (patches, patches.unsqueeze(0)))
    if "num_patches" in names:
        width = tower.config.hidden_size
        yield {"inputs_embeds": torch.randn(2, 8, width, generator=generator), "num_patches": 4}
    if "input_values" in names:
        yield {"input_values": torch.randn(2, 1, 8000, generator=generator)}
    if "input_ids" in names and (codes := getattr(tower.config, "num_channels", None)):
        yield {"input_ids": torch.randint(5, 100, (2, 8, codes), generator=generator)}


def reach(model: PreTrainedModel, calls: dict[str, Call], wanted: list[str]) -> None:
    """Adds calls of layers that nothing has reached so far."""
    for prefix, tower in model.named_modules():
        if not isinstance(tower, PreTrainedModel):
            continue
        modules = {".".join(filter(None, (prefix, name))): module for name, module in tower.named_modules()}
        for inputs in _further(tower):
            if not any(name in modules and name not in calls for name in wanted):
                break
            # What ran before an error is as good.
            with torch.no_grad(), capture_calls(modules) as seen, catch_logits(tower), suppress(Exception):
                tower(**inputs)
            for name, call in seen.items():
                calls.setdefault(name, call)
