"""
The hooks into Transformers; the only file that changes anything outside this package.

`register()` (run on import) gives Transformers seven things, and `unregister()` takes them back without a trace:

- every config has an attribute `qk_init`, kept as plain JSON values, so that the config saves, prints and copies;
- `from_config(config, qk_init=...)` puts the option into a copy of the config;
- `from_pretrained(..., qk_init=...)` applies it to layers whose Q and K the checkpoint does not have, and says so if
  there are none;
- the step in which `post_init` (or loading, or DeepSpeed ZeRO-3's construction) draws weights applies the option to
  the layers it has just drawn;
- a Trainer puts a callback that asks for it (`runs_before_trackers`) before those that hand logs to trackers;
- a Trainer shows each batch to a callback that asks for it (`watches_batches`), labels and all;
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
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed as deepspeed_integration
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from .attention import AttentionLayer, survey_attention
from .init import SymmetricInit, choose_layers, write_init
from .scores import METRICS, SPECTRAL_METRICS


__all__ = ["register", "unregister"]

_ORIGINAL, _HOOKED, _SELF = (f"__hf_symqk_{mark}__" for mark in ("original", "hooked", "self"))


# --- the config attribute -----------------------------------------------------------------------------------------


class _QKInitAttribute:
    """`config.qk_init`: a `SymmetricInit` to the reader, JSON values in the config's `__dict__`."""

    def __get__(self, config: PreTrainedConfig | None, owner: type) -> Any:
        if config is None:
            return self
        value = config.__dict__.get("qk_init")
        return None if value is None else self._read(config, value)

    def __set__(self, config: PreTrainedConfig, value: Any) -> None:
        if value is None:
            config.__dict__.pop("qk_init", None)
        else:
            option = self._read(config, value)
            config.__dict__["qk_init"] = option.to_dict() if isinstance(option, SymmetricInit) else option

    @staticmethod
    def _read(config: PreTrainedConfig, value: Any) -> Any:
        try:
            return SymmetricInit.from_value(value)
        except (TypeError, ValueError):
            if type(config).__module__.startswith("transformers."):
                raise
            return value  # a config of somebody else's, who means something else by the name

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
        # `from_pretrained`. The option has to be among those: in the config it would look like one saved there.
        if "_from_auto" in kwargs and kwargs.get("return_unused_kwargs") and kwargs.get("qk_init") is not None:
            qk_init = kwargs.pop("qk_init")
            config, unused = original.__get__(None, cls)(*args, **kwargs)
            return config, {**unused, "qk_init": qk_init}
        return original.__get__(None, cls)(*args, **kwargs)

    return classmethod(from_pretrained)


# --- the step that draws weights ----------------------------------------------------------------------------------

# Modules whose own parameters were drawn and not written since: the parameters' version counters after the draw.
_drawn: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
# Attention written while it was a part: the whole still has to see whether that is all that its option means.
_written_in_part: WeakSet[nn.Module] = WeakSet()


def _wrap_initialize_weights(original: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    @functools.wraps(original)
    def initialize_weights(model: PreTrainedModel) -> None:
        # Freshness has to be read before: loading has flagged parameters, earlier construction has flagged modules,
        # and what runs now flags the rest.
        undrawn = [module for module in model.modules() if _is_undrawn(module)]
        original(model)
        _drawn.update((module, _versions(module)) for module in undrawn)
        _apply_options(model, is_part=_is_under_construction(model))

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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "from_pretrained" and code.co_filename == __file__:
            return False  # a checkpoint that a constructor loads is a model of its own
        if code.co_name == "__init__" and code.co_argcount:
            around = frame.f_locals.get(code.co_varnames[0])
            if isinstance(around, PreTrainedModel) and around is not model:
                return True
        frame = frame.f_back
    return False


def _apply_options(model: PreTrainedModel, is_part: bool) -> None:
    """
    Applies the option of the model, and options that parts of it have of their own, to layers just drawn.

    A part of a model under construction (`is_part`) only does what the whole would do just so: an option that names
    stacks or layers, or a part without known attention, waits for the whole.
    """
    request = None if is_part else _request.get()
    claimed: set[nn.Module] = set()
    # Inner first: what speaks for itself is not overruled from around it.
    for part, init in reversed(_scopes(model, request)):
        if (is_part and init.needs_whole_model) or not any(_is_fresh(module) for module in part.modules()):
            continue
        try:
            survey = survey_attention(part)
        except ValueError:
            if is_part or not init.changes_weights:
                continue
            raise
        fresh = [
            layer
            for layer in survey.layers
            if layer.module not in claimed and all(_is_fresh(holder) for holder in _holders(layer))
        ]
        if not fresh and not any(layer.module in _written_in_part for layer in survey.layers):
            continue  # everything came from a checkpoint, for which an option that was saved with it asks nothing
        chosen = choose_layers(survey, init)
        written = [layer for layer in chosen if layer in fresh]
        write_init(written, init, survey.layers)
        claimed.update(layer.module for layer in chosen)
        (_written_in_part.update if is_part else _written_in_part.difference_update)(claimed)
        for layer in written:
            for holder in _holders(layer):
                _drawn.pop(holder, None)
        if request is not None and part is model and written:
            request.layers = len(written)
            model.config.qk_init = init


def _scopes(model: PreTrainedModel, request: _Request | None) -> list[tuple[PreTrainedModel, SymmetricInit]]:
    """The models in a model that have an option other than the one around them, from the outside in."""
    scopes: list[tuple[PreTrainedModel, SymmetricInit]] = []
    inherited: dict[str, SymmetricInit | None] = {}
    for path, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            outer = next((inherited[prefix] for prefix in _prefixes(path) if prefix in inherited), None)
            own = request.init if request is not None and part is model else part.config.qk_init
            own = own if isinstance(own, SymmetricInit) else None  # a foreign config may mean something else by it
            inherited[path] = own if own is not None else outer
            # Parts that share their model's config (or a copy of it) belong to it; only another option is their own.
            if own is not None and own != outer:
                scopes.append((part, own))
    return scopes


def _prefixes(path: str) -> Iterable[str]:
    """Paths of the modules around one, from the nearest out to the root `""`; nothing for the root itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _holders(layer: AttentionLayer) -> set[nn.Module]:
    return layer.holders("query", "key")


def _is_fresh(module: nn.Module) -> bool:
    return module in _drawn and _drawn[module] == _versions(module)


# --- the Trainer's callbacks --------------------------------------------------------------------------------------

_SINGLE_SCORES = re.compile(rf"/(update_)?({'|'.join((*METRICS, *SPECTRAL_METRICS))})/(?!median$)")


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
        if getattr(added, "watches_batches", False):
            register()  # by now there is a Trainer class to hook into

    return add_callback


def _wrap_training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_step(trainer: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        for callback in trainer.callback_handler.callbacks:
            if getattr(callback, "watches_batches", False):
                callback.on_batch(trainer, inputs, num_items_in_batch)
        return original(trainer, model, inputs, num_items_in_batch)

    return training_step


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


def _patches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    # The Trainer is a slow import, which is left to those who train.
    trainer = sys.modules.get("transformers.trainer")
    return [*_PATCHES, *([(trainer.Trainer, "training_step", _wrap_training_step)] if trainer else [])]


def register() -> None:
    """
    Puts the hooks into Transformers. Importing `hf_symqk` does this; calling it again, or reloading the package,
    changes nothing: a hook is never put upon a hook. What other libraries have put around a hook meanwhile stays.
    """
    for owner, name, wrap in _patches():
        current = owner.__dict__[name]
        hook = _hook_in(current)
        if hook is not None and hook is not _function(current):
            # Inside somebody's wrapper: perhaps a hook of another copy of this module, which has state of its own.
            setattr(hook, _HOOKED, _function(wrap(getattr(hook, _ORIGINAL))))
        else:
            setattr(owner, name, _hooked(current if hook is None else getattr(hook, _ORIGINAL), wrap))
    setattr(PreTrainedConfig, "qk_init", _QKInitAttribute())  # noqa: B010 (no declared attribute to assign to)


def unregister() -> None:
    """
    Restores Transformers exactly; a hook that another library has wrapped since stays inside that wrapper and does
    nothing. Models and configs made meanwhile stay as they are; a `qk_init` in a config is then a plain attribute that
    nothing reads.
    """
    for owner, name, _ in _patches():
        hook = _hook_in(owner.__dict__[name])
        if hook is None:
            continue
        setattr(hook, _HOOKED, _function(getattr(hook, _ORIGINAL)))
        if hook is _function(owner.__dict__[name]):
            setattr(owner, name, getattr(hook, _ORIGINAL))
    if "qk_init" in PreTrainedConfig.__dict__:
        delattr(PreTrainedConfig, "qk_init")


def _hooked(original: Any, wrap: Callable[[Any], Any]) -> Any:
    """The original with a hook in front, which does `wrap(original)` or whatever `_HOOKED` is set to later."""

    @functools.wraps(_function(original))
    def hook(*args: Any, **kwargs: Any) -> Any:
        return getattr(hook, _HOOKED)(*args, **kwargs)

    # Marks on the hook itself, so that another copy of this module (reloaded, imported anew) finds it. A wrapper that
    # somebody makes of it copies the marks, but `_SELF` then points elsewhere.
    for mark, value in ((_ORIGINAL, original), (_HOOKED, _function(wrap(original))), (_SELF, hook)):
        setattr(hook, mark, value)
    return classmethod(hook) if isinstance(original, classmethod) else hook


def _hook_in(attribute: Any) -> Any:
    """The hook in a chain of wrappers, `None` if there is none."""
    function = _function(attribute)
    while function is not None:
        if getattr(function, _SELF, None) is function:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def _function(attribute: Any) -> Any:
    return getattr(attribute, "__func__", attribute)
