"""
The hooks into Transformers; the only file that changes anything outside this package.

`register()` (run on import) gives Transformers six things, and `unregister()` takes them back without a trace:

- every config has an attribute `qk_init`, kept in the config as plain JSON values, so that it saves, prints and
copies;
- `from_config(config, qk_init=...)` puts the option into a copy of the config;
- `from_pretrained(..., qk_init=...)` applies it to layers whose Q and K the checkpoint does not have, and says so if
there
  are none;
- the step in which `post_init` (or loading, or DeepSpeed ZeRO-3's construction) draws weights applies the option to
the
  layers it has just drawn;
- a Trainer puts a callback that asks for it (`runs_before_trackers`) before those that hand logs to trackers;
- the Trainer's console shows medians of W_qk scores, and leaves the values of single layers to trackers and files.
"""

import copy
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed as deepspeed_integration
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from .attention import AttentionLayer
from .init import SymmetricInit, choose_layers, write_init
from .scores import METRICS


__all__ = ["register", "unregister"]

_ORIGINAL = "__hf_symqk_original__"


# --- the config attribute -----------------------------------------------------------------------------------------


class _QKInitAttribute:
    """`config.qk_init`: a `SymmetricInit` to the reader, JSON values in the config's `__dict__`."""

    def __get__(self, config: PreTrainedConfig | None, owner: type) -> Any:
        if config is None:
            return self
        value = config.__dict__.get("qk_init")
        return None if value is None else SymmetricInit.from_value(value)

    def __set__(self, config: PreTrainedConfig, value: Any) -> None:
        if value is None:
            config.__dict__.pop("qk_init", None)
        else:
            config.__dict__["qk_init"] = SymmetricInit.from_value(value).to_dict()

    def __delete__(self, config: PreTrainedConfig) -> None:
        try:
            del config.__dict__["qk_init"]
        except KeyError:
            raise AttributeError("qk_init") from None


# --- the keyword --------------------------------------------------------------------------------------------------


@dataclass
class _Request:
    """A `qk_init` keyword of `from_pretrained` on its way to the step that draws what the checkpoint lacks."""

    init: SymmetricInit
    layers: int = 0


_request: ContextVar[_Request | None] = ContextVar("hf_symqk_request", default=None)


def _wrap_from_config(original: classmethod) -> classmethod:
    @functools.wraps(original.__func__)
    def _from_config(cls: type[PreTrainedModel], config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
        qk_init = kwargs.pop("qk_init", None)
        if qk_init is not None:
            config = copy.deepcopy(config)  # the caller's config stays as it is
            config.qk_init = qk_init
        return original.__get__(None, cls)(config, **kwargs)

    return classmethod(_from_config)


def _wrap_from_pretrained(original: classmethod) -> classmethod:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        qk_init = kwargs.pop("qk_init", None)
        if qk_init is None:
            return original.__get__(None, cls)(*args, **kwargs)
        request = _Request(SymmetricInit.from_value(qk_init))
        token = _request.set(request)
        try:
            loaded = original.__get__(None, cls)(*args, **kwargs)
        finally:
            _request.reset(token)
        if not request.layers:
            warnings.warn(
                f"`qk_init` changes nothing here: the checkpoint holds Q or K of every layer that {request.init} "
                "speaks of, and loaded weights are never touched. `hf_symqk.apply_qk_init` overwrites them.",
                UserWarning,
                stacklevel=2,
            )
        return loaded

    return classmethod(from_pretrained)


def _wrap_auto_config_from_pretrained(original: classmethod) -> classmethod:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: type[AutoConfig], *args: Any, **kwargs: Any) -> Any:
        # Auto models load the config with their own keywords and hand the unused ones to the model's
        # `from_pretrained`. The option has to be among those: in the config it would look like one that was saved
        # there.
        if "_from_auto" in kwargs and kwargs.get("return_unused_kwargs") and kwargs.get("qk_init") is not None:
            qk_init = kwargs.pop("qk_init")
            config, unused = original.__get__(None, cls)(*args, **kwargs)
            return config, {**unused, "qk_init": qk_init}
        return original.__get__(None, cls)(*args, **kwargs)

    return classmethod(from_pretrained)


# --- the step that draws weights ----------------------------------------------------------------------------------

# Modules whose own parameters were drawn and not written since: their parameters' version counters just after the
# draw.
_drawn: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def _wrap_initialize_weights(original: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    @functools.wraps(original)
    def initialize_weights(model: PreTrainedModel) -> None:
        # Freshness has to be read before: loading has flagged parameters, earlier construction has flagged modules,
        # and what runs now flags the rest.
        undrawn = [module for module in model.modules() if _is_undrawn(module)]
        original(model)
        _drawn.update((module, _versions(module)) for module in undrawn)
        # A part of a model under construction waits for the whole, which knows its stacks and carries its option.
        if not _is_under_construction(model):
            _apply_options(model)

    return initialize_weights


def _is_undrawn(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    return (
        bool(parameters)
        and not getattr(module, "_is_hf_initialized", False)
        and not any(parameter.is_meta or getattr(parameter, "_is_hf_initialized", False) for parameter in parameters)
    )


def _versions(module: nn.Module) -> tuple[int, ...]:
    # Tensors made in inference mode count no versions (and nothing trains them).
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in module.parameters(recurse=False))


def _is_under_construction(model: PreTrainedModel) -> bool:
    """
    Whether another model is being constructed around this one. Only the call stack knows for certain: a model
    announces neither that its construction began nor that it failed, so any record kept beside it can go stale and
    would then silence the option for good.
    """
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            around = frame.f_locals.get(code.co_varnames[0])
            if isinstance(around, PreTrainedModel) and around is not model:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _apply_options(model: PreTrainedModel) -> None:
    """Applies the option of the model, and options that parts of it have of their own, to layers just drawn."""
    request = _request.get()
    scopes: list[tuple[PreTrainedModel, SymmetricInit]] = []
    inherited: dict[str, SymmetricInit | None] = {}
    for path, part in model.named_modules():
        outer = next((inherited[prefix] for prefix in _prefixes(path) if prefix in inherited), None)
        if isinstance(part, PreTrainedModel):
            own = request.init if request is not None and part is model else part.config.qk_init
            inherited[path] = own if own is not None else outer
            # Parts that share their model's config (or a copy of it) belong to it; only another option is their own.
            if own is not None and own != outer:
                scopes.append((part, own))
    claimed: set[nn.Module] = set()
    for part, init in reversed(scopes):  # inner first: what speaks for itself is not overruled from around it
        layers = choose_layers(part, init)
        fresh = [layer for layer in layers if layer.module not in claimed and _is_fresh(layer)]
        claimed.update(layer.module for layer in layers)
        write_init(fresh, init)
        for layer in fresh:
            for holder in _holders(layer):
                _drawn.pop(holder, None)
        if request is not None and part is model and fresh:
            request.layers = len(fresh)
            model.config.qk_init = init


def _prefixes(path: str) -> Iterable[str]:
    """Paths of the modules around one, from the nearest out to the root `""`; nothing for the root itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _holders(layer: AttentionLayer) -> list[nn.Module]:
    names = dict.fromkeys((layer.layout.query.module, layer.layout.key.module))
    return [layer.module.get_submodule(name) for name in names]


def _is_fresh(layer: AttentionLayer) -> bool:
    return all(_drawn.get(holder) == _versions(holder) for holder in _holders(layer))


# --- the Trainer's callbacks --------------------------------------------------------------------------------------

_SINGLE_SCORES = re.compile(rf"/({'|'.join(METRICS)})/(?!median$)")


def _wrap_add_callback(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_callback(handler: CallbackHandler, callback: Any) -> None:
        original(handler, callback)
        added = handler.callbacks[-1]
        if getattr(added, "runs_before_trackers", False):
            # Trackers' callbacks stand before a user's and read the logs before those could add to them. The flow
            # callback stays first: it decides what happens at a step.
            flow = [isinstance(known, DefaultFlowCallback) for known in handler.callbacks]
            handler.callbacks.insert(flow.index(True) + 1 if any(flow) else 0, handler.callbacks.pop())
            added.on_added(handler)

    return add_callback


def _wrap_console_on_log(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_log(
        callback: Any, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        shown = None if logs is None else {k: value for k, value in logs.items() if not _SINGLE_SCORES.search(k)}
        original(callback, args, state, control, logs=shown, **kwargs)

    return on_log


# --- putting the hooks in and out ---------------------------------------------------------------------------------

_PATCHES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (PreTrainedModel, "_from_config", _wrap_from_config),
    (PreTrainedModel, "from_pretrained", _wrap_from_pretrained),
    (PreTrainedModel, "initialize_weights", _wrap_initialize_weights),
    (AutoConfig, "from_pretrained", _wrap_auto_config_from_pretrained),
    (deepspeed_integration, "initialize_weights_zero3", _wrap_initialize_weights),
    (CallbackHandler, "add_callback", _wrap_add_callback),
    (ProgressCallback, "on_log", _wrap_console_on_log),
    (PrinterCallback, "on_log", _wrap_console_on_log),
)


def register() -> None:
    """
    Puts the hooks into Transformers. Importing `hf_symqk` does this; calling it again, or reloading the package,
    changes nothing: a hook is never put upon a hook.
    """
    for owner, name, wrap in _PATCHES:
        original = _unwrapped(owner.__dict__[name])
        wrapper = wrap(original)
        setattr(getattr(wrapper, "__func__", wrapper), _ORIGINAL, original)
        setattr(owner, name, wrapper)
    setattr(PreTrainedConfig, "qk_init", _QKInitAttribute())  # noqa: B010 (no declared attribute to assign to)


def unregister() -> None:
    """
    Restores Transformers exactly. Models and configs made meanwhile stay as they are; a `qk_init` in a config is then
    a plain attribute that nothing reads.
    """
    for owner, name, _ in _PATCHES:
        setattr(owner, name, _unwrapped(owner.__dict__[name]))
    if "qk_init" in PreTrainedConfig.__dict__:
        delattr(PreTrainedConfig, "qk_init")


def _unwrapped(function: Any) -> Any:
    # The mark is on the hook itself, so that it is found by another copy of this module too (reloaded, imported anew).
    return getattr(getattr(function, "__func__", function), _ORIGINAL, function)
