"""
Attention that the table does not know, found by running the model: which modules reach a softmax over tokens, and what
their forward does with basis vectors.

Shape legend: `D` width of the input, `H` query heads, `G` key heads, `E` head width.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .calling import Call, capture_calls
from .catching import catch_logits
from .example_inputs import example_inputs
from .finding import (
    LOOKS_LIKE_ATTENTION,
    UnknownAttentionError,
    list_left_out,
    match_modules,
    outermost_model,
    walk_modules,
)
from .heads import WAY_OUT
from .layer import AttentionLayer
from .placing import place_layers
from .probing import NoLogitsError, NoStreamsError, ProbedAttention, ProbingError, probe_attention
from .rows import HeadShape
from .tensors import is_sharded
from .untouched import left_as_it_was


__all__ = ["ProbedLayer", "ProbedLayout", "ProbedSurvey", "probe_model", "survey_by_probing"]

_GIVE_INPUTS = (
    "Give `inputs=`, a dict of what its forward takes (two or more sequences of two or more tokens, or two or more "
    "images or recordings)."
)


@dataclass(frozen=True)
class ProbedLayout:
    """Stands in the place of an entry of the table: where the queries and keys were caught."""

    route: str

    @property
    def name(self) -> str:
        """`"probed"` and the route."""
        return f"probed ({self.route})"


@dataclass(frozen=True, eq=False)
class ProbedLayer:
    """
    One attention layer whose W_q and W_k were found by its response to basis vectors.

    Attributes:
        name (`str`): Dotted path of the attention module in the model.
        layout ([`ProbedLayout`]): Where queries and keys were caught.
        heads ([`HeadShape`]): Head counts of what was caught.
        kind (`str`): `"self"` if queries and keys come from one argument of the module, else `"cross"`.
        query (`torch.Tensor`), key (`torch.Tensor`): W_q `(H, E, D)` and W_k `(G, E, D)`.
        problem (`str` or `None`): Why there is no W_q and W_k; whoever chooses the layer is told.
        stack (`str`), index (`int`): Where it stands, as an [`AttentionLayer`] does.
        role (`None`), causal (`None`), key_source (`str`): What a forward pass on basis vectors does not tell.
    """

    name: str
    layout: ProbedLayout
    heads: HeadShape
    kind: Literal["self", "cross"]
    query: Tensor
    key: Tensor
    problem: str | None = None
    stack: str = ""
    index: int = 0
    role: None = None
    causal: None = None
    key_source: str = ""

    @property
    def verified(self) -> bool:
        """Whether a forward pass has proven W_q and W_k: always, they come from it."""
        return True

    @property
    def model_type(self) -> None:
        """No config speaks for it."""
        return None

    @property
    def read_once(self) -> bool:
        """Whether reading Q and K takes other processes: never, they are here."""
        return False

    @contextmanager
    def query_key_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """
        W_q `(H, E, D)` and W_k `(G, E, D)`.

        Yields:
            `tuple[torch.Tensor, torch.Tensor]`
        """
        yield self.query, self.key


class ProbedSurvey(NamedTuple):
    """A model's attention: layers that the table or probing gave, and a line on each kind of module that is none."""

    layers: list[AttentionLayer | ProbedLayer]
    left_out: list[str]


def survey_by_probing(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> ProbedSurvey:
    """
    [`survey_attention`], and where no entry of the table fits (or its head counts do not), probing: the model is run
    once, then each unknown module that reached a softmax is run on basis vectors. The model is left as it was.

    Args:
        model (`torch.nn.Module`): A live model, wrapped or not, with whole weights.
        inputs (`Mapping[str, Any]`, *optional*): Keyword arguments of one forward pass. By default the model's
            `dummy_inputs`, or inputs made from its config.

    Returns:
        [`ProbedSurvey`]: A layer whose response is not linear has a `problem`.

    Raises:
        ValueError: if the model cannot be run, is sharded, or has no attention layer at all.
    """
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ProbingError(f"`inputs` must map names of arguments to values, got {type(inputs).__name__}.")
    modules = list(walk_modules(model))
    found, skipped = match_modules(modules)
    readable: list[AttentionLayer] = [layer for layer in found if layer.problem is None]
    known = [layer for layer in readable if layer.verified]
    guesses = {layer.name: layer for layer in readable if not layer.verified}
    if is_sharded(model):
        raise ProbingError(
            f"{type(model).__name__} is sharded; probing runs its attention modules one by one and needs whole "
            "weights. Score it without `probe`, or before it is sharded."
        )
    probed, _ = _probe_model(model, inputs, [*(layer.name for layer in known), *skipped])
    by_name = {name: module for name, module, _ in modules}
    layers: list[AttentionLayer | ProbedLayer] = [*known]
    reasons = dict(skipped)
    for name, result in probed.items():
        guess = guesses.get(name)
        if isinstance(result, ProbedAttention):
            agrees = guess is not None and _agrees(guess, result)
            layers.append(replace(guess, verified=True) if guess and agrees else _layer(name, result))
            guesses.pop(name, None)
        elif guess is not None:
            continue  # it stays what it was, unverified
        elif not isinstance(result, NoLogitsError | NoStreamsError):
            layers.append(_unreadable(name, by_name[name], result))
        elif LOOKS_LIKE_ATTENTION.search(type(by_name[name]).__name__):
            reasons[name] = str(result)
    layers += guesses.values()
    left_out = list_left_out(modules, layers, reasons, "no softmax over its tokens was met in the forward pass")
    if not layers:
        raise UnknownAttentionError(
            f"The forward pass of {type(model).__name__} reaches no softmax over products of queries and keys. "
            "Modules looked at:\n" + ("\n".join(left_out[:12]) or "  none that looks like attention") + f"\n{WAY_OUT}"
        )
    return ProbedSurvey(place_layers(layers), left_out)


def _agrees(layer: AttentionLayer, probed: ProbedAttention) -> bool:
    """Whether the table's W_q and W_k are those of the forward, up to a factor that it puts on either."""
    with torch.no_grad(), layer.query_key_weights() as (w_q, w_k):
        pairs = [(w_q.float(), probed.query.float()), (w_k.float(), probed.key.float())]
        return all(_is_multiple(ours, theirs) for ours, theirs in pairs)


def _is_multiple(ours: Tensor, theirs: Tensor) -> bool:
    if theirs.shape[0] % ours.shape[0] == 0:
        ours = ours.repeat_interleave(theirs.shape[0] // ours.shape[0], 0)  # key heads that the forward repeats
    if ours.shape != theirs.shape:
        return False
    factor = (ours * theirs).sum() / ours.square().sum()
    # fp32 sums over D terms leave about 1e-6 of the largest response.
    return bool(factor > 0) and bool((theirs - factor * ours).abs().max() <= 1e-4 * theirs.abs().max())


def _layer(name: str, probed: ProbedAttention) -> ProbedLayer:
    heads = HeadShape(*probed.query.shape[:1], *probed.key.shape[:2])
    return ProbedLayer(name, ProbedLayout(probed.route), heads, probed.kind, probed.query, probed.key)


def _unreadable(name: str, module: nn.Module, error: ProbingError) -> ProbedLayer:
    parameters = [path for path, parameter in module.named_parameters() if parameter.ndim > 1]
    named = ", ".join(parameters[:6]) + (f" and {len(parameters) - 6} more" if len(parameters) > 6 else "")
    problem = (
        f"{name or '(root)'!r} ({type(module).__name__} with {named}) matches no known layout, and probing its "
        f"forward pass gives no W_q and W_k: {error}. {WAY_OUT}"
    )
    nothing = torch.empty(0)
    return ProbedLayer(name, ProbedLayout("failed"), HeadShape(0, 0, 0), "self", nothing, nothing, problem)


# --- from a forward pass to the modules that project queries and keys ------------------------------------------------


Probed = ProbedAttention | ProbingError


def probe_model(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> dict[str, Probed]:
    """
    W_q and W_k of every attention module that a forward pass of the model reaches, found by probing alone, whether the
    table knows it or not. The model is left as it was.

    Args:
        model (`torch.nn.Module`):
            A live model with whole weights.
        inputs (`Mapping[str, Any]`, *optional*):
            Keyword arguments of one forward pass; two or more sequences of two or more tokens. By default the model's
            `dummy_inputs`, or inputs made from its config.

    Returns:
        `dict[str, ProbedAttention | ProbingError]`: By name of the module, in the order in which they run; an error
        where a softmax was met whose queries or keys are not linear in the hidden states. Several softmaxes of one
        module have names of their own.

    Raises:
        ProbingError: if the model cannot be run, or no softmax is met.
    """
    results, met = _probe_model(model, inputs, ())
    if not met:
        raise ProbingError(f"The forward pass of {type(model).__name__} reaches no softmax over tokens.")
    return results


def _probe_model(
    model: nn.Module, inputs: Mapping[str, Any] | None, leave_out: Collection[str]
) -> tuple[dict[str, Probed], list[str]]:
    """Results by name, without the modules named in `leave_out`; and the modules in which a softmax was met."""
    modules = {name: module for name, module, _ in walk_modules(model)}
    with left_as_it_was(model):
        calls, met = _run(modules, inputs)
        # A softmax around a module that has none itself is that module's; else it is another one.
        silent = [other for other in leave_out if not any(_stands_in(name, other) for name in met)]
        apart = [name for name in met if not any(_stands_in(name, other) for other in leave_out)]
        unknown = [name for name in apart if not any(_stands_in(other, name) for other in silent)]
        probes: dict[str, list[ProbedAttention] | ProbingError] = {}
        found: dict[str, dict[str, list[ProbedAttention] | ProbingError]] = {}
        for name in unknown:
            owner, result = _climb(name, modules, calls, probes)
            found.setdefault(owner, {})[name] = result
    results: dict[str, Probed] = {}
    for owner, places in found.items():
        several = [(name, one) for name, ones in places.items() if isinstance(ones, list) for one in ones]
        errors = [result for result in places.values() if isinstance(result, ProbingError)]
        if len(several) == 1:
            results[owner] = several[0][1]
        for number, (name, one) in enumerate(several if len(several) > 1 else ()):
            results[name if name not in results else f"{name}#{number + 1}"] = one
        if errors and not several:
            results[owner] = errors[0]
    return results, met


def _stands_in(name: str, other: str) -> bool:
    return not other or f"{name}.".startswith(f"{other}.")


def _run(modules: Mapping[str, nn.Module], inputs: Mapping[str, Any] | None) -> tuple[dict[str, Call], list[str]]:
    """How each module is called in a forward pass, and the innermost modules that reach a softmax."""
    model = modules[""]
    speaking = outermost_model(model) or model
    tries = example_inputs(model, speaking) if inputs is None else iter([dict(inputs)])
    names = {module: name for name, module in modules.items()}
    failure: Exception | None = None
    described = ""
    model.eval()
    for attempt in tries:
        with capture_calls(modules) as calls, catch_logits(model) as caught:
            try:
                model(**attempt)
            except Exception as error:  # whatever a model's own code raises
                if failure is None:
                    failure, described = error, _described(attempt)
                continue
        met = [names[logits.module] for logits in caught if logits.module in names]
        return calls, list(dict.fromkeys(met))
    kind = type(model).__name__
    if failure is None:
        raise ProbingError(f"{kind} has to be run, and no inputs can be made from its signature. {_GIVE_INPUTS}")
    origin = "the given inputs" if inputs is not None else "inputs made for it"
    raise ProbingError(
        f"{kind} cannot be run with {origin} ({described}): {type(failure).__name__}: "
        f"{str(failure).rstrip('.')}. {_GIVE_INPUTS}"
    ) from failure


def _described(inputs: Mapping[str, Any]) -> str:
    shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _climb(
    name: str,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, Call],
    probes: dict[str, list[ProbedAttention] | ProbingError],
) -> tuple[str, list[ProbedAttention] | ProbingError]:
    """
    The module that projects the queries and keys of a softmax: the innermost one, or one around it, where that is
    handed queries and keys, holds no matrices or takes no hidden states.
    """
    owner = name
    while True:
        if any(parameter.ndim > 1 for parameter in modules[owner].parameters()):
            if owner not in probes:
                probes[owner] = _probe(modules[owner], calls[owner])
            result = probes[owner]
            if isinstance(result, list):
                place = name[len(owner) :].removeprefix(".")
                here = [one for one in result if one.place == place]
                if here and not any(one.is_handed_over for one in here):
                    return owner, _distinct(here)
                result = NoLogitsError(f"{type(modules[owner]).__name__} has no queries and keys of its own.")
            elif not isinstance(result, NoStreamsError):
                return owner, result
        else:
            result = NoStreamsError(f"{type(modules[owner]).__name__} holds no matrices.")
        if not owner:
            return owner, result
        owner = owner.rpartition(".")[0]


def _probe(module: nn.Module, call: Call) -> list[ProbedAttention] | ProbingError:
    try:
        return probe_attention(*_in_full_precision(module, call))
    except ProbingError as error:
        return error
    except Exception as error:  # whatever a module's own code raises when it is run alone
        return ProbingError(f"{type(module).__name__} cannot be run alone: {type(error).__name__}: {error}")


def _in_full_precision(module: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A copy in fp32 of a module in half precision, whose rounding would hide whether it is linear."""
    halves = (torch.bfloat16, torch.float16)
    if not any(tensor.dtype in halves for tensor in module.parameters()):
        return module, call
    args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype in halves else t, (call.args, call.kwargs))
    return copy.deepcopy(module).float(), Call(args, kwargs)


def _distinct(probed: list[ProbedAttention]) -> list[ProbedAttention]:
    """One of those that have the same W_q and W_k (a module that computes its logits in parts)."""
    kept: list[ProbedAttention] = []
    for one in probed:
        pairs = (((one.query, other.query), (one.key, other.key)) for other in kept)
        if not any(all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-6) for a, b in both) for both in pairs):
            kept.append(one)
    return kept
