"""
A PEFT adapter together with the checkpoint that it was trained on: LoRA, DoRA and modules that were trained whole.

Nothing is read here. [`read_adapter`] takes `adapter_config.json` and the tensors that its file lists; the [`Adapter`]
tells what it does to modules of the base, which tensors that takes, and what the weight becomes.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..attention.lora import adapted_weight
from .unpacking import StoredTensor


__all__ = ["PREFIX", "Adapter", "AdapterPart", "read_adapter"]

PREFIX = "base_model.model."
_DOWN, _UP, _MAGNITUDE, _WHOLE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "weight"
# Biases are no part of W_qk.
_HARMLESS = frozenset(("bias", "base_layer.bias", "lora_B.bias"))

# Settings that leave the weight what LoRA or DoRA makes of it, or are accounted for below. Another one that is set is
# refused: PEFT has variants of LoRA that differ in nothing but a setting.
_KNOWN_SETTINGS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_type", "peft_version"),
        *("inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora"),
        *("fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "bias", "lora_bias", "modules_to_save", "init_lora_weights", "runtime_config"),
        *("trainable_token_indices", "target_parameters", "ensure_weight_tying"),
        *("eva_config", "megatron_core", "qalora_group_size", "loftq_config"),  # read only beside others
    )
)
# Initialisations that leave the base alone. PEFT repeats the others when it loads the adapter, which changes the base.
_KNOWN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

_MERGE = "Load it with PEFT, merge it (`merge_and_unload`), save the model and score that."


@dataclass(frozen=True)
class AdapterPart:
    """
    What an adapter does to one module.

    Attributes:
        tensors (`Mapping[str, StoredTensor]`):
            What has to be read of the adapter, by name below the module path.
        scaling (`float` or `None`):
            What B A is multiplied by; `None` where the module was trained whole.
    """

    tensors: Mapping[str, StoredTensor]
    scaling: float | None

    @property
    def needs_base(self) -> bool:
        """Whether the base's weight has to be read too."""
        return self.scaling is not None

    def weight(self, read: Mapping[str, Tensor], base: Tensor | None = None, *, transposed: bool = False) -> Tensor:
        """
        The effective weight.

        Args:
            read (`Mapping[str, torch.Tensor]`):
                Values of `tensors`, by the same names.
            base (`torch.Tensor`, *optional*):
                The base's weight, where the part `needs_base`.
            transposed (`bool`, *optional*, defaults to `False`):
                Whether that is stored (inputs, outputs). As in PEFT the module decides this (GPT-2's `Conv1D`), not
                `fan_in_fan_out` of the configuration.

        Returns:
            `torch.Tensor`: Of the shape of the base's weight.

        Raises:
            ValueError: if the shapes do not go together.
        """
        if self.scaling is None:
            whole = read[_WHOLE]
            if base is not None and base.shape != whole.shape:
                raise self._misfit(_WHOLE, base)
            return whole
        if base is None:
            raise ValueError(f"{self.tensors[_DOWN].key}: the base's weight is needed beside it.")
        down, up = read[_DOWN], read[_UP]
        shape = (up.shape[0], down.shape[1])
        if tuple(base.shape) != (shape[::-1] if transposed else shape):
            raise self._misfit(_UP, base)
        return adapted_weight(
            base, down, up, scaling=self.scaling, magnitude=read.get(_MAGNITUDE), transposed=transposed
        )

    def _misfit(self, name: str, base: Tensor) -> ValueError:
        shapes = ", ".join(f"{tensor.key} {tuple(tensor.shape)}" for tensor in self.tensors.values())
        return ValueError(
            f"{self.tensors[name].key} does not fit the base's weight of shape {tuple(base.shape)}: the adapter holds "
            f"{shapes}. Score it with the base that it was trained on."
        )


@dataclass(frozen=True)
class Adapter:
    """
    A LoRA or DoRA adapter; [`read_adapter`] makes it.

    Attributes:
        config (`Mapping[str, Any]`): Its `adapter_config.json`.
        modules (`Mapping[str, Mapping[str, StoredTensor]]`): Its tensors, by module path as the adapter has it and by
            name below that.
    """

    config: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, StoredTensor]] = field(repr=False)

    def parts(self, paths: Collection[str], others: Iterable[str] = ()) -> dict[str, AdapterPart]:
        """
        What the adapter does to modules of the base. Base and adapter may differ in a prefix (`bert.`, `model.`): the
        longer path has to end with the shorter one, and no other may.

        Args:
            paths (`Collection[str]`):
                Paths of the modules that matter: query and key projections, and their norms.
            others (`Iterable[str]`, *optional*):
                Paths of the base's other modules, which an adapter may touch as well.

        Returns:
            `dict[str, AdapterPart]`: By path, of `paths` alone; modules that the adapter leaves alone are not in it.

        Raises:
            ValueError: if a module of the adapter that looks like one of `paths` matches none or several of the base,
                or holds something whose effect on the weight is not known here.
        """
        known = {*paths, *others}
        last_names = {path.rpartition(".")[2] for path in paths}
        endings: dict[str, list[str]] = {}
        for path in known:
            for ending in _endings(path):
                endings.setdefault(ending, []).append(path)
        found: dict[str, str] = {}
        for own in self.modules:
            matches = [own] if own in known else _matches(own, known, endings)
            if len(matches) != 1:
                if own.rpartition(".")[2] in last_names:
                    raise self._unmatched(own, matches)
                continue
            if matches[0] in paths:
                if matches[0] in found:
                    raise self._unmatched(own, [matches[0], f"{found[matches[0]]} (of the adapter)"])
                found[matches[0]] = own
        for name in self.config.get("target_parameters") or ():
            if any(_ends_with(f"{path}.{_WHOLE}", name) or _ends_with(name, f"{path}.{_WHOLE}") for path in paths):
                raise ValueError(f"The adapter has target_parameters {name!r}, not read here. {_MERGE}")
        parts = {path: self._part(own) for path, own in found.items()}
        return {path: part for path, part in parts.items() if part is not None}

    def _unmatched(self, own: str, matches: list[str]) -> ValueError:
        what = f"several ({', '.join(sorted(matches))})" if matches else "none"
        key = next(iter(self.modules[own].values())).key
        return ValueError(
            f"The adapter's {key!r} matches {what} of the base's modules. Score it with the base that it was trained "
            f"on, or: {_MERGE}"
        )

    def _part(self, own: str) -> AdapterPart | None:
        tensors = {name: tensor for name, tensor in self.modules[own].items() if name not in _HARMLESS}
        names = set(tensors)
        if not names:
            return None
        if names == {_WHOLE} and self._is_saved_whole(own):
            return AdapterPart(tensors, None)
        if names != {_DOWN, _UP, *([_MAGNITUDE] if self.config.get("use_dora") else [])}:
            keys = ", ".join(sorted(tensor.key for tensor in tensors.values()))
            raise ValueError(
                f"The adapter holds {keys}, which its configuration (use_dora "
                f"{bool(self.config.get('use_dora'))}, modules_to_save {self.config.get('modules_to_save')}) does not "
                f"explain. {_MERGE}"
            )
        return AdapterPart(tensors, self._scaling(own, tensors[_DOWN]))

    def _is_saved_whole(self, own: str) -> bool:
        """A module or one around it is in `modules_to_save`."""
        around = own.split(".")
        paths = [".".join(around[: count + 1]) for count in range(len(around))]
        return any(_ends_with(path, name) for path in paths for name in self.config.get("modules_to_save") or ())

    def _scaling(self, own: str, down: StoredTensor) -> float:
        rank = _of_pattern(self.config.get("rank_pattern"), own, self.config.get("r", 8))
        alpha = _of_pattern(self.config.get("alpha_pattern"), own, self.config.get("lora_alpha", 8))
        if down.shape[0] != rank:
            raise ValueError(
                f"{down.key} has {down.shape[0]} rows, but adapter_config.json gives the module rank {rank}. They are "
                "not of one adapter."
            )
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank


def read_adapter(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Adapter:
    """
    Takes a PEFT adapter apart.

    Args:
        config (`Mapping[str, Any]`):
            Its `adapter_config.json`.
        tensors (`Mapping[str, StoredTensor]`):
            What its file of weights holds, by key.

    Returns:
        [`Adapter`]

    Raises:
        ValueError: if it is neither LoRA nor DoRA, or has a setting under which weights are not what LoRA and DoRA
            make of them.
    """
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        raise ValueError(f"The adapter is of peft_type {peft_type!r}; only LORA (with DoRA) is read here. {_MERGE}")
    unknown = {name: value for name, value in config.items() if value and name not in _KNOWN_SETTINGS}
    init = config.get("init_lora_weights")
    if init not in _KNOWN_INITS:
        unknown["init_lora_weights"] = init
    if unknown:
        settings = ", ".join(f"{name} = {value!r}" for name, value in unknown.items())
        raise ValueError(f"What {settings} of adapter_config.json does to weights is not known here. {_MERGE}")
    modules: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in tensors.items():
        path, name = _split(key.removeprefix(PREFIX))
        modules.setdefault(path, {})[name] = tensor
    return Adapter(config, modules)


def _split(key: str) -> tuple[str, str]:
    """Module path and the rest: what PEFT put below the module, or a parameter's name."""
    inside = re.fullmatch(r"(.*?)\.((?:lora_|base_layer\.).*)", key)
    path, name = inside.groups() if inside else key.rpartition(".")[::2]
    return path, _MAGNITUDE if name == f"{_MAGNITUDE}.weight" else name


def _endings(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _ends_with(path: str, ending: str) -> bool:
    return path == ending or path.endswith(f".{ending}")


def _matches(own: str, known: Collection[str], endings: Mapping[str, list[str]]) -> list[str]:
    """Paths that end with the adapter's, or else those that it ends with."""
    return endings.get(own) or [ending for ending in _endings(own) if ending in known][:1]


def _of_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """The value of the first pattern that matches, as PEFT looks them up."""
    matching = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", path))
    return next(matching, default)
