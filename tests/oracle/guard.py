"""
What a release of Transformers changes: model types that the support data do not know, and attention that is no longer
found as it was. Models are built on the meta device and only looked at, so that all types take minutes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_symqk.attention import survey_attention
from hf_symqk.attention.verified import FoundAttention, Support, TypeSupport

from .building import NoModelError, build
from .report import about_layer
from .support import group_layers


__all__ = ["changed_attention", "new_attention", "report_failures"]

WAY_OUT = """
What to do, from the folder `tests`:
  1. python -m oracle.report --output oracle.jsonl --types TYPE --again     # is it found, does its forward agree?
  2. What is not found, or wrong, gets an entry (or the type is added to the `model_types` of one) in
     hf_symqk/attention/builtin_layouts.py; names that other modules look for stand in finding.py and norms.py.
  3. python -m oracle.report --output oracle.jsonl && python -m oracle.support oracle.jsonl     # all types
"""


def report_failures(support: Support, lines: Iterable[str]) -> str:
    """
    The message of a failed guard.

    Args:
        support ([`Support`]): The data that the package carries.
        lines (`Iterable[str]`): What was noticed.

    Returns:
        `str`: Empty if nothing was.
    """
    lines = list(lines)
    if not lines:
        return ""
    here = Version(transformers.__version__)
    about = f"Transformers {here} is installed; the support data are of {support.transformers}"
    if here > Version(support.transformers):
        about += ", which is older, so the release may have brought this"
    return "\n".join([f"{about}.", *lines, WAY_OUT])


def new_attention(support: Support, model_types: Iterable[str]) -> Iterator[str]:
    """
    Model types with attention that the data do not cover.

    Args:
        support ([`Support`]): The data that the package carries.
        model_types (`Iterable[str]`): Model types of the installed Transformers.

    Yields:
        `str`: A line on each kind of attention of a type that is not in the data; nothing on types without.
    """
    for model_type in sorted(set(model_types) - set(support.types)):
        try:
            model = _build(model_type, 0)
        except NoModelError:
            continue
        except Exception as error:
            yield f"{model_type}: is new, and no small model of it can be built to look at: {error}"
            continue
        found, left_out = _survey(model)
        for one in found:
            yield (
                f"{model_type}: is new; {one.count} {one.kind}-attention layers are found by layout {one.layout!r}, "
                f"which nothing proves for it: {_about(one)}"
            )
        for line in left_out:
            yield f"{model_type}: is new, and no layout describes {line.strip()}"


def changed_attention(support: Support, model_type: str) -> Iterator[str]:
    """
    Attention of a model type that is not found as the data say.

    Args:
        support ([`Support`]): The data that the package carries.
        model_type (`str`): A type that is in the data and in the installed Transformers.

    Yields:
        `str`: A line on each kind of layer that is gone, new, fewer, more, or of other parameters.
    """
    known = support.types[model_type]
    if known.status == "not built":
        return
    try:
        model = _build(model_type, known.level, known.model)
    except Exception as error:
        yield f"{model_type}: could be built when the data were taken ({known.model}), now {error}"
        return
    here, left_out = _survey(model)
    before, after = ({_key(one): one for one in found} for found in (known.found, here))
    modules = dict(model.named_modules())
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if new is None:
            yield f"{model_type}: no longer found: {_about(before[key])}; {_now(modules, before[key], left_out)}"
        elif old is None:
            yield f"{model_type}: found now and not in the data, by layout {new.layout!r}: {_about(new)}"
        elif old.parameters != new.parameters:
            gone, added = (
                ", ".join(sorted(set(one) - set(other))) or "none"
                for one, other in ((old.parameters, new.parameters), (new.parameters, old.parameters))
            )
            yield f"{model_type}: {new.module} ({new.example}) holds other parameters: gone {gone}; new {added}"
        elif (old.count, old.example) != (new.count, new.example):
            yield (
                f"{model_type}: {old.count} layers of {old.module} from {old.example} on were found by layout "
                f"{old.layout!r}, now {new.count} from {new.example} on"
            )


def _build(model_type: str, level: int, wanted: str | None = None) -> nn.Module:
    """A small model without values; with them where its class cannot be made without, or another one comes out."""
    try:
        with torch.device("meta"):
            model = build(model_type, level)
        if wanted in (None, type(model).__name__):
            return model
    except NoModelError:
        raise
    except RuntimeError:
        pass
    return build(model_type, level)


def _survey(model: nn.Module) -> tuple[tuple[FoundAttention, ...], list[str]]:
    try:
        survey = survey_attention(model)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if " with " in line and " (model type " in line]
        return (), lines
    modules = dict(model.named_modules())
    described: list[dict[str, Any]] = [
        {"name": layer.name, "class": type(modules[layer.name]).__name__, **about_layer(layer)}
        for layer in survey.layers
        if layer.problem is None
    ]
    left_out = [*survey.left_out, *(layer.problem for layer in survey.layers if layer.problem is not None)]
    found = TypeSupport.from_dict({"status": "unproven", "found": group_layers(described)}).found
    return found, left_out


def _key(one: FoundAttention) -> tuple[Any, ...]:
    return one.layout, one.config, one.kind, one.module


def _about(one: FoundAttention) -> str:
    return f"{one.module} ({one.example}, model type {one.config!r}) with parameters {', '.join(one.parameters)}"


def _now(modules: dict[str, nn.Module], old: FoundAttention, left_out: list[str]) -> str:
    """What stands where a layer was."""
    module = modules.get(old.example)
    if module is None:
        lines = "; ".join(line.strip() for line in left_out)
        return f"{old.example} is gone{f', and left out are {lines}' if lines else ''}"
    holders = sorted({name.rpartition(".")[0] or name for name, _ in module.named_parameters()})
    return f"{old.example} is now {type(module).__name__} with parameters {', '.join(holders)}"
