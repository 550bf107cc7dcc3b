"""
A checkpoint's attention as modules without values: names and shapes make a tree that is surveyed like a live model.
"""

import re
from collections.abc import Container, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention import LOOKS_LIKE_ATTENTION, borrowed_from, layouts
from .sections import Section, section_of


__all__ = ["Holder", "add_borrowers", "attention_modules", "is_norm", "is_scale", "join", "query_key_holders"]

# Query and key norms of these model types multiply by 1 + weight; files do not say so.
_NORMS_AROUND_ONE = re.compile(
    r"(gemma3|minimax_m3_vl|qwen3_5|qwen3_5_moe|qwen3_next|qwen4_exp|step3p5|step3p7|t5gemma2)(_.*)?"
)


class Holder(NamedTuple):
    """What stands in for a module with a weight: its shape as the weight of a live module has it, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool = False  # of the module around it, outside any linear map


def query_key_holders(paths: set[str]) -> dict[str, set[str]]:
    """
    Attention modules that some layout of the table might match, with the modules in them that it speaks of.

    Args:
        paths (`set[str]`): Paths of the modules that hold tensors.

    Returns:
        `dict[str, set[str]]`: By path of the attention module, paths of its projections and of its norms.
    """
    found: dict[str, set[str]] = {}
    ends: dict[str, list[str]] = {}
    for path in paths:
        ends.setdefault(path.rpartition(".")[2], []).append(path)
    for layout in layouts():
        projections = [piece.path for piece in layout.pieces]
        parents = set.intersection(*(_holders_of(ends, name) for name in projections))
        for parent in parents:
            inside = {join(parent, name) for name in (*projections, *layout.norms, *layout.parameters)}
            found.setdefault(parent, set()).update(inside & paths)
    return found


def add_borrowers(attention: dict[str, set[str]], paths: set[str], config: PreTrainedConfig) -> None:
    """
    Adds attention modules that read the keys of another one, so that they have none in the files, or some that no
    forward reads.

    Args:
        attention (`dict[str, set[str]]`): What [`query_key_holders`] found; changed in place.
        paths (`set[str]`): Paths of the modules that hold tensors.
        config (`PreTrainedConfig`): The checkpoint's config.
    """
    lenders = {name: {path.removeprefix(f"{name}.") for path in inside} for name, inside in attention.items()}
    for path in {path.rpartition(".")[0] for path in paths}:
        if LOOKS_LIKE_ATTENTION.search(path.rpartition(".")[2]):
            names = lenders.get(borrowed_from(path, section_of(config, path)) or "", set())
            if inside := {join(path, name) for name in names} & paths:
                attention[path] = inside


def _holders_of(ends: Mapping[str, list[str]], name: str) -> set[str]:
    paths = [path for path in ends.get(name.rpartition(".")[2], ()) if f".{path}".endswith(f".{name}")]
    return {path.removesuffix(name).removesuffix(".") for path in paths}


def is_norm(path: str) -> bool:
    """Whether some layout calls the module at a path a norm whose gain is folded in."""
    name = path.rpartition(".")[2]
    return any(name in layout.norms for layout in layouts())


def is_scale(path: str) -> bool:
    """Whether some layout multiplies queries by the parameter at a path."""
    scales = (layout.query_scale for layout in layouts() if layout.query_scale is not None)
    return any(f".{path}".endswith(f".{name}") for scale in scales for name in scale.parameters)


def join(parent: str, name: str) -> str:
    """Path of a module in a module; the whole model has the empty path."""
    return f"{parent}.{name}" if parent else name


def attention_modules(
    holders: Mapping[str, Holder | None], attention: Mapping[str, set[str]], config: PreTrainedConfig
) -> list[tuple[str, nn.Module, Section | None]]:
    """
    Modules on the meta device in place of those that a live model would have, for [`survey_modules`].

    Args:
        holders (`Mapping[str, Holder | None]`): What each module with tensors holds, by path; `None` where nobody
            looked. Only those in or near attention are taken.
        attention (`Mapping[str, set[str]]`): Attention modules among them, as [`query_key_holders`] gives them.
        config (`PreTrainedConfig`): The checkpoint's config.

    Returns:
        `list[tuple[str, torch.nn.Module, Section | None]]`: Path, module and what the config says of it.
    """
    root = _empty("checkpoint")()
    for path, holder in holders.items():
        parent, _, own_name = path.rpartition(".")
        if not LOOKS_LIKE_ATTENTION.search(parent.rpartition(".")[2]) and not _is_inside(parent, attention):
            continue
        module = root
        for part in parent.split(".") if parent else ():
            if part not in module._modules:
                module.add_module(part, _empty(part)())
            module = module.get_submodule(part)
        if holder is not None and holder.is_parameter:
            module.register_parameter(own_name, _weight(holder))
            continue
        if holder is not None and is_norm(own_name):
            around_one = _NORMS_AROUND_ONE.fullmatch(section_of(config, parent).model_type or "") is not None
            filled: nn.Module = _Norm(holder, int(around_one))
        else:
            filled = _empty(own_name)()
            filled.register_parameter("weight", _weight(holder or Holder((0, 0), torch.float32)))
        before = module._modules.get(own_name)
        for child_name, child in before.named_children() if before is not None else ():
            filled.add_module(child_name, child)  # a module may hold tensors and modules
        for name, parameter in before.named_parameters(recurse=False) if before is not None else ():
            filled.register_parameter(name, parameter)
        module.add_module(own_name, filled)
    return [
        (name, module, section_of(config, name, _widths(holders, attention[name])) if name in attention else None)
        for name, module in root.named_modules()
    ]


def _is_inside(path: str, attention: Container[str]) -> bool:
    """Whether a path is that of an attention module or of something in it."""
    while path and path not in attention:
        path = path.rpartition(".")[0]
    return path in attention


def _widths(holders: Mapping[str, Holder | None], inside: set[str]) -> set[int]:
    return {size for path in inside if (holder := holders[path]) is not None for size in holder.shape}


def _weight(holder: Holder) -> nn.Parameter:
    return nn.Parameter(torch.empty(holder.shape, dtype=holder.dtype, device="meta"), requires_grad=False)


class _Module(nn.Module):
    """Base of the stand-ins; their classes bear the names of the attributes, which is all that a file tells."""


@cache
def _empty(name: str) -> type[nn.Module]:
    return type(name, (_Module,), {})


class _Norm(nn.Module):
    """A norm's gain, for [`AttentionLayer.query_key_weights`] to fold in."""

    def __init__(self, holder: Holder, offset: int):
        super().__init__()
        self.weight = _weight(holder)
        self.offset = offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * (self.weight + self.offset)
