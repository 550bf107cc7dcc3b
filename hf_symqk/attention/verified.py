"""
What the forward passes of Transformers' own models have proven: for each model type, how its attention is found, which
of it agreed with the table head by head, what is left out and why. The data beside this module are written by
`tests/oracle/support.py` from what the oracle found; `SUPPORT.md` shows them.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from torch import nn

from .layouts import QKLayout, is_built_in


__all__ = [
    "FoundAttention",
    "OtherAttention",
    "Support",
    "TypeSupport",
    "describe_unverified",
    "is_verified",
    "load_support",
]

# What a comparison with the forward pass may come to, and still prove W_qk: `product` where the forward puts the
# channels of queries and keys alike in another order.
_PROOFS = {"proven", "product"}
# Whose forward passes the data speak of.
_PROVEN_PACKAGES = ("transformers.", "torch.nn.")


@dataclass(frozen=True)
class FoundAttention:
    """
    Layers of one kind that the table finds in a model of some type.

    Attributes:
        layout (`str`): Entry of the table.
        config (`str` or `None`): Model type of the config that speaks for the layers.
        kind (`str`): `"self"` or `"cross"`.
        module (`str`): Class of the attention modules.
        outcomes (`Mapping[str, int]`): How many layers of the small model came to what: `"proven"`, `"product"`,
            `"unproven"` or `"wrong"`.
        evidence (`str`): By which route queries and keys were caught, or why they were not.
        example (`str`): Path of the first of them.
        parameters (`tuple[str, ...]`): What holds parameters in them, by path.
    """

    layout: str
    config: str | None
    kind: str
    module: str
    outcomes: Mapping[str, int]
    evidence: str
    example: str
    parameters: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many layers there are in the small model."""
        return sum(self.outcomes.values())

    @property
    def proven(self) -> bool:
        """Whether every one of them agreed with the forward pass."""
        return set(self.outcomes) <= _PROOFS


@dataclass(frozen=True)
class OtherAttention:
    """Modules that the table does not find: their class, the path of the first, what they hold, and why."""

    module: str
    example: str
    parameters: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class TypeSupport:
    """
    What is known of one model type.

    Attributes:
        status (`str`): `"proven"`, `"partly proven"`, `"unproven"` (found, and nothing proves it), `"unsupported"`
            (softmax attention that the table does not know), `"no attention"` (nothing that is softmax over products
            of tokens) or `"not built"`.
        model (`str` or `None`): Class of the model that was built.
        level (`int`): How small it was (see `tests/oracle/configs.py`).
        found (`tuple[FoundAttention, ...]`): Layers that are scored.
        skipped (`tuple[OtherAttention, ...]`): What is no softmax over products of tokens.
        unsupported (`tuple[OtherAttention, ...]`): What is, or may be, and is not known.
        problem (`str`): What went wrong, if anything: why no model was built, or only part of it ran.
    """

    status: str
    model: str | None
    level: int
    found: tuple[FoundAttention, ...]
    skipped: tuple[OtherAttention, ...]
    unsupported: tuple[OtherAttention, ...]
    problem: str

    @property
    def layers(self) -> int:
        """Layers that are found in the small model."""
        return sum(found.count for found in self.found)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TypeSupport":
        """What a line of the data file says; what it leaves out is empty."""

        def read(kind: Any, name: str) -> Any:
            return tuple(kind(**{**one, "parameters": tuple(one["parameters"])}) for one in values.get(name, ()))

        return cls(
            values["status"],
            values.get("model"),
            values.get("level", 0),
            read(FoundAttention, "found"),
            read(OtherAttention, "skipped"),
            read(OtherAttention, "unsupported"),
            values.get("problem", ""),
        )


class Support:
    """
    The support table.

    Args:
        values (`Mapping[str, Any]`): Content of the data file.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.transformers: str = values["transformers"]
        self.lowest_transformers: str = values["lowest_transformers"]
        self.types = {name: TypeSupport.from_dict(one) for name, one in values["types"].items()}

    def proves(self, layout: str, model_type: str, kind: str) -> bool:
        """Whether all attention of this kind that the entry finds under configs of this type is proven."""
        return (layout, model_type, kind) in self.proven

    def proves_class(self, layout: str, module: str, kind: str) -> bool:
        """The same of a class of modules, whatever config speaks for it."""
        return (layout, module, kind) in self._by_class

    @functools.cached_property
    def proven(self) -> frozenset[tuple[Any, ...]]:
        """Layout, model type of the config that speaks for it, and kind of all attention that is proven."""
        return self._proven(lambda found: (found.layout, found.config, found.kind))

    @functools.cached_property
    def _by_class(self) -> frozenset[tuple[Any, ...]]:
        return self._proven(lambda found: (found.layout, found.module, found.kind))

    def _proven(self, key: Any) -> frozenset[tuple[Any, ...]]:
        # A class that a larger model holds and does not run may be proven in a model of its own; one mismatch is for
        # good. Files do not tell classes apart, so all that share the rest of the key have to be proven.
        classes: dict[tuple[Any, ...], list[FoundAttention]] = defaultdict(list)
        for one in self.types.values():
            for found in one.found:
                classes[found.layout, found.config, found.kind, found.module].append(found)
        proven: dict[tuple[Any, ...], bool] = {}
        for members in classes.values():
            good = any(one.proven for one in members) and not any("wrong" in one.outcomes for one in members)
            proven[key(members[0])] = proven.get(key(members[0]), True) and good
        return frozenset(name for name, good in proven.items() if good)


@functools.cache
def load_support() -> Support:
    """
    The support table that comes with the package.

    Returns:
        [`Support`]
    """
    text = files(__package__).joinpath("support.json").read_text(encoding="utf-8")
    return Support(json.loads(text))


def is_verified(layout: QKLayout, module: nn.Module, model_type: str | None, kind: str) -> bool:
    """
    Whether the forward pass of Transformers' own model has proven what the table says of a module.

    Args:
        layout ([`QKLayout`]): Entry of the table that it matches. One that somebody else registered is not proven.
        module (`torch.nn.Module`): The module, which has to run a forward of Transformers or PyTorch, not one of its
            own.
        model_type (`str` or `None`): Model type of the config that speaks for it. Without any, its class decides.
        kind (`str`): `"self"` or `"cross"`.

    Returns:
        `bool`
    """
    # The class that defines the forward: engines that shard (FSDP2) put classes of their own before it.
    runs = next(owner for owner in type(module).__mro__ if "forward" in vars(owner))
    # The class may be Transformers' and its forward somebody else's, who replaced it to make it faster.
    written_in = (runs.__module__, vars(runs)["forward"].__module__)
    if not is_built_in(layout) or not all(f"{name}.".startswith(_PROVEN_PACKAGES) for name in written_in):
        return False
    if model_type is None:
        return load_support().proves_class(layout.name, runs.__name__, kind)
    return load_support().proves(layout.name, model_type, kind)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Layer(Protocol):
    @property
    def layout(self) -> _Named: ...
    @property
    def kind(self) -> str: ...
    @property
    def model_type(self) -> str | None: ...
    @property
    def verified(self) -> bool: ...


def describe_unverified(layers: Iterable[_Layer]) -> str:
    """
    The warning for layers that no forward pass has proven.

    Args:
        layers (`Iterable`): Layers of a model or a checkpoint.

    Returns:
        `str`: Empty if all are proven. The same for a part of a model as for the whole, so that it is said once.
    """
    kinds = dict.fromkeys(
        f"{layer.kind}-attention of {'no model type' if layer.model_type is None else repr(layer.model_type)} "
        f"by layout {layer.layout.name!r}"
        for layer in layers
        if not layer.verified
    )
    if not kinds:
        return ""
    return (
        f"Unverified: {'; '.join(kinds)}. These layers have projections of known names, but no forward pass has "
        "proven that W_q and W_k are read from them rightly. `score_model(model, probe=True)` holds them to the "
        "model's own forward; `hf_symqk.register_qk_layout` describes them if they are read wrongly."
    )
