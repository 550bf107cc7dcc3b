"""
A checkpoint's attention as modules without values: names and shapes make a tree that is surveyed like a live model.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention import LOOKS_LIKE_ATTENTION, layouts
from .sections import Section, section_of


__all__ = ["Holder", "attention_modules", "is_norm", "join", "query_key_holders"]

# Query and key norms of these model types multiply by 1 + weight; files do not say so.
_NORMS_AROUND_ONE = re.compile(
    r"(gemma3|minimax_m3_vl|qwen3_5|qwen3_5_moe|qwen3_next|qwen4_exp|step3p5|step3p7|t5gemma2)(_.*)?"
)


class Holder(NamedTuple):
    """What stands in for a module with a weight: its shape as the weight of a live module has it, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def query_key_holders(paths: set[str]) -> dict[str, set[str]]:
    """
    Attention modules that some layout of the table might match, with the modules in them that it speaks of.

    Args:
        paths (`set[str]`): Paths of the modules that hold tensors.

    Returns:
        `dict[str, set[str]]`: By path of the attention module, paths of its projections and of its norms.
    """
    found: dict[str, set[str]] = {}
    for layout in layouts():
        projections = (layout.query.module, layout.key.module)
        parents = set.intersection(*(_holders_of(paths, name) for name in projections))
        for parent in parents:
            inside = {join(parent, name) for name in (*projections, *layout.query_norms, *layout.key_norms)}
            found.setdefault(parent, set()).update(inside & paths)
    return found


def _holders_of(paths: set[str], name: str) -> set[str]:
    ending = f".{name}"
    return {path.removesuffix(name).removesuffix(".") for path in paths if path == name or path.endswith(ending)}


def is_norm(path: str) -> bool:
    """Whether some layout calls the module at a path a query or key norm."""
    name = path.rpartition(".")[2]
    return any(name in (*layout.query_norms, *layout.key_norms) for layout in layouts())


def join(parent: str, name: str) -> str:
    """Path of a module in a module; the whole model has the empty path."""
    return f"{parent}.{name}" if parent else name


def attention_modules(
    holders: Mapping[str, Holder | None], config: PreTrainedConfig
) -> list[tuple[str, nn.Module, Section | None]]:
    """
    Modules on the meta device in place of those that a live model would have, for [`survey_modules`].

    Args:
        holders (`Mapping[str, Holder | None]`): What each module with tensors holds, by path; `None` where nobody
            looked. Only those in or near attention are taken.
        config (`PreTrainedConfig`): The checkpoint's config.

    Returns:
        `list[tuple[str, torch.nn.Module, Section | None]]`: Path, module and what the config says of it.
    """
    attention = query_key_holders(set(holders))
    root = _empty("checkpoint")()
    for path, holder in holders.items():
        parent, _, own_name = path.rpartition(".")
        if parent not in attention and not LOOKS_LIKE_ATTENTION.search(parent.rpartition(".")[2]):
            continue
        module = root
        for part in parent.split(".") if parent else ():
            if part not in module._modules:
                module.add_module(part, _empty(part)())
            module = module.get_submodule(part)
        filled = _filled(own_name, holder, section_of(config, parent))
        before = module._modules.get(own_name)
        for child_name, child in before.named_children() if before is not None else ():
            filled.add_module(child_name, child)  # a module may hold tensors and modules
        module.add_module(own_name, filled)
    return [
        (name, module, section_of(config, name, _widths(module, attention[name])) if name in attention else None)
        for name, module in root.named_modules()
    ]


def _widths(module: nn.Module, inside: set[str]) -> set[int]:
    children = (module.get_submodule(path.rpartition(".")[2]) for path in inside)
    return {size for child in children for weight in child.parameters() for size in weight.shape}


class _Module(nn.Module):
    """Base of the stand-ins; their classes bear the names of the attributes, which is all that a file tells."""


@cache
def _empty(name: str) -> type[nn.Module]:
    return type(name, (_Module,), {})


class _Norm(nn.Module):
    """A norm's gain, for [`AttentionLayer.query_key_weights`] to fold in."""

    def __init__(self, holder: Holder, offset: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(holder.shape, dtype=holder.dtype, device="meta"), requires_grad=False)
        self.offset = offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * (self.weight + self.offset)


def _filled(name: str, holder: Holder | None, section: Section) -> nn.Module:
    if holder is not None and is_norm(name):
        return _Norm(holder, int(_NORMS_AROUND_ONE.fullmatch(section.model_type or "") is not None))
    module = _empty(name)()
    holder = holder or Holder((0, 0), torch.float32)
    module.weight = nn.Parameter(torch.empty(holder.shape, dtype=holder.dtype, device="meta"), requires_grad=False)
    return module
