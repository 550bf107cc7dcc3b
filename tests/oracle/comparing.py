"""The table against the forward pass: W_q and W_k of every head, by value."""

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_symqk.attention import AttentionLayer, ComposedProjection, survey_attention
from hf_symqk.attention.catching import catch_logits
from hf_symqk.attention.probing import Call, ProbedAttention, ProbingError, capture_calls, probe_attention

from .inputs import InputTries


__all__ = ["Verdict", "compare_layer", "compare_model"]

_TOLERANCE = 2e-4  # relative to the largest weight; norms with eps 1e-5 alone make 1e-5

# What probing says of a response that no matrix for one token can give.
_MIXED = re.compile(r"not linear|other tokens reach the same place|meets several keys")

Outcome = Literal["proven", "product", "wrong", "unproven"]


class Verdict(NamedTuple):
    """
    What the forward pass says about one layer of the table.

    Attributes:
        outcome (`str`): `"proven"`: W_q and W_k of every head are those of the forward up to one factor each.
            `"product"`: only every W_q^h W_k^h is (channels are permuted alike in both). `"wrong"`: neither.
            `"unproven"`: the forward could not be probed.
        factors (`tuple[float, float]` or `None`): By what the forward multiplies W_q and W_k of the table.
        note (`str`): Route, or what went wrong.
    """

    outcome: Outcome
    factors: tuple[float, float] | None
    note: str


def _factor(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The one factor c of `theirs = c · ours`, and what is left, relative to the largest value."""
    factor = float((ours * theirs).sum() / (ours * ours).sum())
    return factor, float((theirs - factor * ours).abs().max() / theirs.abs().max())


def compare_layer(layer: AttentionLayer, probed: list[ProbedAttention]) -> Verdict:
    """
    Holds a layer of the table to what the forward pass was seen to do.

    Args:
        layer ([`AttentionLayer`]): The layer.
        probed (`list[ProbedAttention]`): Every softmax of its module; each has to agree.

    Returns:
        [`Verdict`]: The worst of them.
    """
    order = ("wrong", "product", "proven")

    def rank(verdict: Verdict) -> int:
        return order.index(verdict.outcome)

    with layer.query_key_weights() as (w_q, w_k):
        w_q, w_k = w_q.float(), w_k.float()
        verdicts = [_compare(w_q, w_k, one) for one in probed]
    # A matrix of logits may be read both ways (images to text, text to images): one W_qk, and its transpose.
    both = [[m for m, other in enumerate(probed) if m == n or _is_mirror(one, other)] for n, one in enumerate(probed)]
    return min((max((verdicts[m] for m in pair), key=rank) for pair in both), key=rank)


def _is_mirror(one: ProbedAttention, other: ProbedAttention) -> bool:
    pairs = ((one.query, other.key), (one.key, other.query))
    # The scale goes with the queries of one of the two.
    return all(a.shape == b.shape and _factor(a, b)[1] < _TOLERANCE for a, b in pairs)


def _compare(w_q: Tensor, w_k: Tensor, probed: ProbedAttention) -> Verdict:
    route = f"{probed.route}, {probed.slots} slots, {probed.kind}"
    grouped = len(w_q) // len(w_k) if len(w_q) % len(w_k) == 0 else 0
    # Key heads of the forward count once each, those of the table as it has them: compared as query heads read them.
    heads = len(probed.query)
    probed = probed._replace(key=probed.key.repeat_interleave(heads // len(probed.key), 0))
    if grouped:
        w_k = w_k.repeat_interleave(grouped, 0)
    if not grouped or len(probed.query) != len(w_q) or len(probed.key) != len(w_k):
        here, there = (f"{len(one)}/{len(two)}" for one, two in ((w_q, w_k), (probed.query, probed.key)))
        return Verdict("wrong", None, f"{here} heads in the table, {there} in the forward; {route}")
    if w_q.shape == probed.query.shape and w_k.shape == probed.key.shape:
        (scale_q, error_q), (scale_k, error_k) = _factor(w_q, probed.query), _factor(w_k, probed.key)
        if error_q < _TOLERANCE and error_k < _TOLERANCE and scale_q > 0 and scale_k > 0:
            return Verdict("proven", (scale_q, scale_k), route)
        note = f"off by {error_q:.2g} in q, {error_k:.2g} in k; {route}"
    else:
        shapes = [tuple(one.shape) for one in (w_q, w_k, probed.query, probed.key)]
        note = "shapes {}, {} against {}, {}; {}".format(*shapes, route)
    widths = (w_q.shape[-1], w_k.shape[-1]) == (probed.query.shape[-1], probed.key.shape[-1])
    if widths and len(w_q) >= len(w_k):
        repeats = max(1, len(w_q) // len(w_k))
        ours = torch.einsum("hed,hef->hdf", w_q, w_k.repeat_interleave(repeats, 0))
        theirs = torch.einsum("hed,hef->hdf", probed.query, probed.key.repeat_interleave(repeats, 0))
        factor, error = _factor(ours, theirs)
        if error < _TOLERANCE and factor > 0:
            return Verdict("product", (factor, 1.0), route)
        note = f"product off by {error:.2g}; {note}"
    return Verdict("wrong", None, note)


class Comparison(NamedTuple):
    """
    A model: its layers and their verdicts, and softmaxes that ran outside of them, by class: those between tokens
    (`unknown`), those whose queries or keys are no linear map of one token (`mixed`: convolved, hashed, pooled), and
    those whose queries or keys are not projected from tokens (`other`: learned queries).
    """

    layers: list[AttentionLayer]
    verdicts: dict[str, Verdict]
    unknown: dict[str, str]
    mixed: dict[str, str]
    other: dict[str, str]
    left_out: list[str]
    errors: list[str]


def compare_model(model: PreTrainedModel) -> Comparison:
    """
    Holds every layer that the table finds in a model to the model's own forward pass.

    Args:
        model (`PreTrainedModel`): A small model in eval mode.

    Returns:
        [`Comparison`]
    """
    errors: list[str] = []
    try:
        survey = survey_attention(model)
        layers, left_out = survey.layers, survey.left_out
    except ValueError as error:
        layers, left_out = [], str(error).splitlines()[1:-1]
    calls, met, keys = _run(model, errors)
    verdicts: dict[str, Verdict] = {}
    by_name = {layer.name: layer for layer in layers}
    for layer in layers:
        if layer.key_source and {layer.name, layer.key_source} <= calls.keys():
            lender = by_name[layer.key_source]
            verdicts[layer.name] = _borrowers_verdict(layer, lender, calls[lender.name], keys)
            continue
        # Where the model's forward broke off before this layer, one of the same class was called the same way.
        alike = (calls[n] for n, m in model.named_modules() if type(m) is type(layer.module) and n in calls)
        call = calls.get(layer.name) or next(alike, None)
        verdicts[layer.name] = _verdict(layer, call)
    known = {layer.name for layer in layers}
    unknown: dict[str, str] = {}
    mixed: dict[str, str] = {}
    other: dict[str, str] = {}
    modules = dict(model.named_modules())
    for name in met:
        if any(f"{name}.".startswith(f"{k}.") or f"{k}.".startswith(f"{name}.") for k in known):
            continue
        owner = name
        while owner and not any(parameter.ndim > 1 for parameter in modules[owner].parameters()):
            owner = owner.rpartition(".")[0]
        if any(f"{owner}.".startswith(f"{k}.") for k in known):
            continue
        kind = type(modules[owner]).__name__
        children = ", ".join(child for child, _ in modules[owner].named_children())
        if any(f"{kind} ({children})" in kinds for kinds in (unknown, mixed, other)):
            continue  # one of a kind is enough, and probing takes long where windows are many
        try:
            probed = probe_attention(modules[owner], calls[owner])[0]
            heads, width = probed.query.shape[:2]
            found = f"H {heads} G {probed.num_key_value_heads} E {width} {probed.kind} {probed.route}"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:200]
        kinds = other if "No softmax" in found else mixed if _MIXED.search(found) else unknown
        kinds.setdefault(f"{kind} ({children})", f"{owner}: {found}")
    return Comparison(layers, verdicts, unknown, mixed, other, left_out, errors)


def _verdict(layer: AttentionLayer, call: Call | None) -> Verdict:
    if layer.problem:
        return Verdict("unproven", None, f"problem: {layer.problem}")
    try:
        width, key_width = layer.input_width("query"), layer.input_width("key")
    except Exception as error:
        return Verdict("unproven", None, f"{type(error).__name__}: {error}"[:300])
    # Keys of another width come from an argument of another width.
    widths = (width, None) if width == key_width else (None,)
    notes = [] if call is not None else ["not reached"]
    for attempt in [*([call] if call is not None else []), *_direct_calls(layer, width)]:
        for known_width in widths:
            try:
                verdict = compare_layer(layer, probe_attention(layer.module, attempt, width=known_width))
                return verdict if attempt is call else verdict._replace(note=verdict.note + ", alone")
            except ProbingError as error:
                notes.append(f"{error}"[:300])
                if attempt is call and "not linear" in notes[-1]:
                    return Verdict("unproven", None, notes[-1])  # and would not be if it ran alone
                break
            except Exception as error:
                notes.append(f"{type(error).__name__}: {error}"[:300])
    return Verdict("unproven", None, "; ".join(notes[:2]))


def _borrowers_verdict(layer: AttentionLayer, lender: AttentionLayer, call: Call, keys: dict[str, Tensor]) -> Verdict:
    """
    What the forward says of a layer that reads another one's keys. It makes none from its hidden states, so it is
    probed in the forward of that other layer, with its own queries; and in the model's forward both have to read the
    same keys (where each makes its keys of something that is shared, its own part of that is in the probed forward).
    """
    together = copy.copy(lender.module)
    together._modules = {**lender.module._modules, **layer.holding._modules}
    try:
        verdict = compare_layer(layer, probe_attention(together, call))
    except Exception as error:
        return Verdict("unproven", None, f"{type(error).__name__}: {error}"[:300])
    shared = not isinstance(layer.projection("key"), ComposedProjection)
    if shared and not (layer.name in keys and torch.equal(keys[layer.name], keys[lender.name])):
        return Verdict("wrong", None, f"reads other keys than those of {lender.name!r}")
    return verdict._replace(note=f"{verdict.note}, keys of {lender.name}")


def _run(model: PreTrainedModel, errors: list[str]) -> tuple[dict[str, Call], list[str], dict[str, Tensor]]:
    """
    Calls of all modules: of the model's forward, then of the models inside it that it did not reach; the modules in
    which softmax runs, and their keys.
    """
    names = {module: name for name, module in model.named_modules()}
    calls: dict[str, Call] = {}
    met: list[str] = []
    keys: dict[str, Tensor] = {}
    complete: set[str] = set()
    towers = [module for module in model.modules() if isinstance(module, PreTrainedModel)]

    def attempt(tower: PreTrainedModel, inputs: dict[str, Any]) -> Exception | None:
        failure = None
        with torch.no_grad(), capture_calls({n: m for m, n in names.items()}) as seen, catch_logits(tower) as caught:
            try:
                tower(**inputs)
            except Exception as error:
                failure = error
        # What ran before an error is as good, unless another run gets further.
        for name, call in seen.items():
            if name not in calls or (failure is None and name not in complete):
                calls[name] = call
        if failure is None:
            complete.update(seen)
        for logits in caught:
            if logits.module in names:
                met.append(names[logits.module])
                keys[names[logits.module]] = logits.key
        return failure

    for tower in towers:
        prefix = names[tower]
        if tower is not model and (prefix in complete or any(name.startswith(prefix + ".") for name in complete)):
            continue
        tries = InputTries(tower)
        for inputs in tries:
            failure = attempt(tower, inputs)
            if failure is None:
                for further in tries.further(inputs):
                    attempt(tower, further)
                break
            errors.append(f"{type(tower).__name__}: {type(failure).__name__}: {failure}"[:200])
            tries.failed(inputs, failure)
    return calls, list(dict.fromkeys(met)), keys


def _direct_calls(layer: AttentionLayer, width: int) -> Iterator[Call]:
    """Arguments for an attention module alone, where the model around it cannot be run."""
    module = layer.module
    parameters = inspect.signature(module.forward).parameters
    generator = torch.Generator().manual_seed(2)
    tokens = 4
    dims = dict.fromkeys((layer.heads.head_dim, _rotary_width(module), layer.heads.head_dim // 2))
    for shape in ((2, tokens, width), (tokens, width), (1, 4, 4, width), (1, width, 4, 4)):
        hidden = torch.randn(shape, generator=generator)
        for dim in (*(d for d in dims if d), None, 0):  # 0: without positions, where they need not be given
            for lead in ((1, tokens), (tokens,), (1, 1, tokens)):
                if not dim and lead != (1, tokens):
                    continue
                kwargs: dict[str, Any] = {}
                for name, parameter in parameters.items():
                    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                        continue
                    needed = parameter.default is inspect.Parameter.empty
                    if dim == 0 and not needed and "position" in name:
                        continue
                    if "position_embeddings" in name and dim is None and shape[0] == 2:
                        kwargs[name] = torch.randn(1, 2 * tokens - 1, width, generator=generator)  # relative
                    elif name in ("position_embeddings", "rotary_pos_emb", "rotary_emb"):
                        if dim:
                            kwargs[name] = (torch.ones(*lead, dim), torch.zeros(*lead, dim))
                        elif needed:
                            kwargs[name] = None
                    elif name == "freqs_cis" and dim:
                        kwargs[name] = torch.ones(*lead, dim // 2, dtype=torch.complex64)
                    elif name == "cu_seqlens":
                        kwargs[name] = torch.tensor([0, tokens], dtype=torch.int32)
                    elif name == "position_ids":
                        kwargs[name] = torch.zeros(hidden.shape[:-1], dtype=torch.long)
                    elif name in ("key_value_states", "encoder_hidden_states") and layer.kind == "cross":
                        other = torch.randn(2, 5, layer.input_width("key"), generator=generator)
                        kwargs[name] = other
                    elif needed and ("mask" in name or "bias" in name or "past" in name or "cache" in name):
                        kwargs[name] = None
                    elif needed and name in ("batch_size", "seq_len", "height", "width"):
                        kwargs[name] = 2
                    elif needed and name in ("alibi",):
                        kwargs[name] = torch.zeros(2 * layer.heads.num_attention_heads, 1, tokens)
                    elif needed and layer.kind == "cross" and name in ("key", "value"):
                        # Twice as many, since rotations of queries are repeated for the keys of several images.
                        leading = [*shape[:-2], 2 * tokens]
                        kwargs[name] = torch.randn([*leading, layer.input_width("key")], generator=generator)
                    elif needed:
                        # One tensor is one stream; other arguments are other streams.
                        same = layer.kind == "self" and name in ("query", "key", "value")
                        kwargs[name] = hidden if same else hidden.clone()
                yield Call((), kwargs)


def _rotary_width(module: nn.Module) -> int | None:
    for name in ("qk_rope_head_dim", "rotary_dim", "rotary_ndims", "rope_head_dim"):
        value = getattr(module, name, None) or getattr(getattr(module, "config", None), name, None)
        if isinstance(value, int):
            return value
    return None
