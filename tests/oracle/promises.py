"""
What the package promises of every model in which it finds attention: files score like the model, the symmetric start
is symmetric and leaves all else as it was drawn, what was saved is loaded bit by bit, and reading changes nothing.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_symqk
from hf_symqk.attention import AttentionLayer, survey_attention
from hf_symqk.init import require_servable
from hf_symqk.plugin import register, unregister

from .building import build, shake
from .configs import small_config


__all__ = ["PROMISES", "Finding", "keep_promises"]

PROMISES = ("init", "reading", "checkpoint", "load")
_SEED = 0
_TOLD = ("role", "causal", "verified")
_TOLERANCE = 1e-5  # of a symmetry score; sums of fp32 products


class Finding(NamedTuple):
    """
    What came of one promise.

    Attributes:
        outcome (`str`): `"kept"`; `"told"`: the scores are the model's, but not what is said of a layer's role,
            direction or proof; `"rounded"`: but for the last digits of scores; `"partly"`: of the layers that can
            be served, the others being refused by name; `"refused"`: with an error that names module and reason,
            before anything changed; `"elsewhere"`: broken alike without this package; `"broken"`.
        note (`str`): The refusal, or what is broken.
    """

    outcome: Literal["kept", "told", "rounded", "partly", "refused", "elsewhere", "broken"]
    note: str = ""


State = dict[str, Tensor]


def keep_promises(model_type: str, level: int = 0) -> dict[str, Finding]:
    """
    Holds the package to its promises for one model type.

    Args:
        model_type (`str`): A key of `CONFIG_MAPPING`.
        level (`int`, *optional*, defaults to 0): How small (see [`small_config`]).

    Returns:
        `dict[str, Finding]`: By promise (`PROMISES`); empty if the table finds no layer.

    Raises:
        RuntimeError: if the model cannot be built.
    """
    plain = build(model_type, level, _SEED)
    try:
        survey_attention(plain)
    except ValueError:
        return {}
    findings = {}
    findings["init"], model = init_is_symmetric_and_alone(plain, model_type, level)
    shake(model)
    findings["reading"] = reading_changes_nothing(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except Exception as error:
            told = Finding("elsewhere", f"save_pretrained: {_told(error)}")
            return findings | dict.fromkeys(("checkpoint", "load"), told)
        findings["checkpoint"] = files_score_like_the_model(model, Path(folder))
        findings["load"] = loading_is_exact(model, Path(folder))
    return findings


# --- the symmetric start ------------------------------------------------------------------------------------------


def init_is_symmetric_and_alone(
    plain: PreTrainedModel, model_type: str, level: int
) -> tuple[Finding, PreTrainedModel]:
    """
    The symmetric start against the same seed without it. Also gives a model with the option in its config, whose
    keys are those of the plain one again.
    """
    try:
        model, random = _drawn(plain, model_type, level, "symmetric")
    except ValueError as error:
        return _refusal(plain, model_type, level, error)
    except Exception as error:
        return Finding("broken", _told(error)), plain
    return Finding(*_compare_start(plain, model, random, model_type, level)), model


def _drawn(plain: PreTrainedModel, model_type: str, level: int, qk_init: Any = None) -> tuple[PreTrainedModel, Tensor]:
    """Another model of the class of the plain one, from the same seed, and the random state after it is made."""
    config = small_config(model_type, level)
    torch.manual_seed(_SEED)
    keywords = {} if qk_init is None else {"qk_init": qk_init}
    model = type(plain)._from_config(config, **keywords).eval()
    return model, torch.get_rng_state()


def _refusal(
    plain: PreTrainedModel, model_type: str, level: int, error: ValueError
) -> tuple[Finding, PreTrainedModel]:
    """Whether a refusal names what it is about, comes before anything is written, and leaves a way out that works."""
    told = str(error)
    names = [name for name, _ in plain.named_modules() if name]
    if not any(name in told for name in names) and "The model has no " not in told:
        return Finding("broken", f"refused without a name: {told}"), plain
    before = _state(plain)
    try:
        hf_symqk.apply_qk_init(plain, "symmetric")
    except ValueError as second:
        if str(second).splitlines()[-1] != told.splitlines()[-1]:
            return Finding("broken", f"from_config refuses with {told!r}, apply_qk_init with {str(second)!r}"), plain
    except Exception as second:
        return Finding("broken", f"apply_qk_init: {_told(second)}"), plain
    else:
        return Finding("broken", f"apply_qk_init does what from_config refuses: {told}"), plain
    if changed := _differences(before, _state(plain)):
        return Finding("broken", f"refused after writing {', '.join(changed[:3])}: {told}"), plain
    if getattr(plain.config, "qk_init", None) is not None:
        return Finding("broken", f"refused, and recorded in the config: {told}"), plain
    chosen: dict[str, list[int]] = {}
    for layer in _servable(plain):
        chosen.setdefault(layer.stack, []).append(layer.index)
    if not chosen:
        return Finding("refused", told), plain
    try:
        model, random = _drawn(plain, model_type, level, hf_symqk.SymmetricInit(layers=chosen))
    except Exception as third:
        return Finding("broken", f"refused ({told}), and with layers={chosen}: {_told(third)}"), plain
    outcome, note = _compare_start(plain, model, random, model_type, level)
    return Finding("partly" if outcome == "kept" else outcome, f"{note} {told}".strip()), model


def _servable(model: PreTrainedModel) -> list[AttentionLayer]:
    """Layers of self-attention that the scheme can serve alone."""

    def can_be_served(layer: AttentionLayer) -> bool:
        try:
            require_servable([layer], hf_symqk.SymmetricInit())
        except ValueError:
            return False
        return layer.kind == "self" and layer.problem is None

    return list(filter(can_be_served, survey_attention(model).layers))


def _compare_start(
    plain: PreTrainedModel, model: PreTrainedModel, random: Tensor, model_type: str, level: int
) -> tuple[Literal["kept", "broken"], str]:
    """
    Everything but the keys of the chosen layers is that of the plain model, and these make them symmetric. The keys
    of the plain model are put back on the way, so that nothing of the option but its record in the config is left.
    """
    if getattr(model.config, "qk_init", None) is None:
        return "broken", "the option is not in the config"
    option = model.config.qk_init
    scores = hf_symqk.score_model(model, layers=option.layers, null_band=False)
    for scored in scores.layers:
        alone = scored.head_symmetry if scored.num_heads == scored.num_key_value_heads else ()
        if not all(abs(value - 1) < _TOLERANCE for value in (scored.symmetry, *alone)):
            return "broken", f"{scored.name}: symmetry {scored.symmetry}, heads {alone}"
    written = {scored.name for scored in scores.layers}
    pairs = zip(survey_attention(plain).layers, survey_attention(model).layers, strict=True)
    for ours, theirs in pairs:
        if ours.name not in written:
            continue
        with ours.tensors("key") as source, theirs.tensors("key", write=True) as target, torch.no_grad():
            target["key"].weight.copy_(source["key"].weight)
            if target["key"].bias is not None and source["key"].bias is not None:
                target["key"].bias.copy_(source["key"].bias)
    again, plain_random = _drawn(plain, model_type, level)
    # What a class leaves as it finds it in memory differs between any two models.
    undrawn = set(_differences(_state(plain), _state(again)))
    changed = [name for name in _differences(_state(plain), _state(model)) if name not in undrawn]
    if changed:
        return "broken", f"also changes {', '.join(changed[:4])}"
    if not torch.equal(random, plain_random):
        return "broken", "leaves another random state"
    return "kept", ""


# --- reading ------------------------------------------------------------------------------------------------------


def reading_changes_nothing(model: PreTrainedModel) -> Finding:
    """Parameters, buffers, modes and random state are the same after a model is scored."""
    modes = [module.training for module in model.modules()]
    before, random = _state(model), torch.get_rng_state()
    try:
        hf_symqk.score_model(model, attention="all")
    except ValueError as error:
        return Finding("refused", _told(error))
    if changed := _differences(before, _state(model)):
        return Finding("broken", f"changes {', '.join(changed[:4])}")
    if modes != [module.training for module in model.modules()]:
        return Finding("broken", "changes the mode of modules")
    if not torch.equal(random, torch.get_rng_state()):
        return Finding("broken", "leaves another random state")
    return Finding("kept")


# --- files --------------------------------------------------------------------------------------------------------


def files_score_like_the_model(model: PreTrainedModel, folder: Path) -> Finding:
    """Files that the model was saved to have its scores, exactly, or are refused by name."""
    try:
        live = hf_symqk.score_model(model, attention="all", null_band=False)
    except ValueError as error:
        return Finding("refused", f"live: {_told(error)}")
    try:
        stored = hf_symqk.score_checkpoint(folder, attention="all", null_band=False)
    except ValueError as error:
        return Finding("refused", str(error).replace(f"{folder}", "…")[:500])
    except Exception as error:
        return Finding("broken", _told(error))
    if stored == live:
        return Finding("kept")
    ours, theirs = ({layer.name: layer for layer in scores.layers} for scores in (live, stored))
    missing, more = (sorted(one.keys() - other.keys()) for one, other in ((ours, theirs), (theirs, ours)))
    if missing or more:
        return Finding("broken", f"without {missing[:3]} of {len(missing)}, and with {more[:3]} of {len(more)}")
    told: dict[str, Any] = {}
    for name, layer in ours.items():
        fields = {k: (v, getattr(theirs[name], k)) for k, v in vars(layer).items() if v != getattr(theirs[name], k)}
        told |= {f"{name}: {k}": fields.pop(k) for k in _TOLD if k in fields}
        if not all(map(_nearly, *zip(*fields.values(), strict=True))) if fields else False:
            return Finding("broken", f"{name}: {fields}"[:400])
    if [layer.name for layer in stored.layers] == [layer.name for layer in live.layers]:
        return Finding("told", f"{told}"[:400]) if told else Finding("rounded")
    if stored.model_type != live.model_type:
        return Finding("broken", f"model type {stored.model_type!r} instead of {live.model_type!r}")
    return Finding("broken", "other order of layers")


def loading_is_exact(model: PreTrainedModel, folder: Path) -> Finding:
    """What was saved comes back bit by bit, with the option in the config and without its effect."""
    option = getattr(model.config, "qk_init", None)
    written = json.loads((folder / "config.json").read_text()).get("qk_init")
    if written != (None if option is None else option.to_dict()):
        return Finding("broken", f"qk_init in config.json is {written}, in the model {option}")
    try:
        loaded = type(model).from_pretrained(folder)
    except Exception as error:
        with _without_plugin(folder):
            try:
                type(model).from_pretrained(folder)
            except Exception as alike:
                return Finding("elsewhere", f"from_pretrained: {_told(alike)}")
        return Finding("broken", f"from_pretrained: {_told(error)}")
    changed = _differences(_state(model), _state(loaded))
    if getattr(loaded.config, "qk_init", None) != option:
        return Finding("broken", f"the loaded model has qk_init={loaded.config.qk_init}")
    if not changed:
        return Finding("kept")
    with _without_plugin(folder):
        bare = type(model).from_pretrained(folder)
    ours = [name for name in changed if name not in _differences(_state(model), _state(bare))]
    if ours:
        return Finding("broken", f"changes {', '.join(ours[:4])}")
    return Finding("elsewhere", f"loads other values of {', '.join(changed[:4])} ({len(changed)} in all)")


@contextmanager
def _without_plugin(folder: Path) -> Iterator[None]:
    """Transformers as it is, and a config that knows no option."""
    file = folder / "config.json"
    text = file.read_text()
    values = json.loads(text)
    values.pop("qk_init", None)
    file.write_text(json.dumps(values))
    unregister()
    try:
        yield
    finally:
        register()
        file.write_text(text)


# --- helpers ------------------------------------------------------------------------------------------------------


def _state(model: PreTrainedModel) -> State:
    """Copies of all parameters and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _differences(one: State, other: State) -> list[str]:
    """Names of tensors that are not the same bits."""
    return [name for name in {**one, **other} if not _alike(one.get(name), other.get(name))]


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _nearly(one: Any, other: Any) -> bool:
    """Whether scores differ by the order of sums alone."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_nearly, one, other))
    if not (isinstance(one, float) and isinstance(other, float)):
        return False
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(one) and math.isnan(other))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
