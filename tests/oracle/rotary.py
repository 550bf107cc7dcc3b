"""
Which channels of a head a model's own forward rotates together: vectors go into an attention module at the
positions that the model gives its tokens, and the queries and keys that reach the softmax are held to W_q and W_k.

With `q_p = R_p W_q x` at position p and `k_s = S_s W_k y` at position s, a logit is `xᵀ W_qᵀ (R_pᵀ S_s) W_k y`. Which
channels `R_pᵀ S_s` mixes is what counts, in the order of the rows of W_q, whatever order the forward puts them in.

    python -m oracle.rotary --output rotary.jsonl            # from the folder `tests`
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_symqk.attention import AttentionLayer, channel_pairs, survey_attention
from hf_symqk.attention.calling import _POSITIONS, Call, Rerun
from hf_symqk.attention.responding import SIDES, Side, Stream, _aligned

from . import census
from .comparing import _direct_calls, _run
from .configs import LEVELS
from .rotating import reach, small_model


__all__ = ["Rotation", "Verdict", "describe", "examine", "rotations", "said"]

_TOLERANCE = 1e-4  # of the largest entry; the least squares over D ≥ E terms in fp32 leave about 1e-6
_PLACES = 96  # heads, windows and sequences that are looked at
_TOKENS = 9


class Rotation(NamedTuple):
    """
    What the forward does with the channels of the heads of one layer.

    Attributes:
        pairs (`tuple[tuple[int, int], ...]` or `None`): Channels that are rotated together, the lower one first;
            `None` where it could not be seen, or is no rotation of pairs.
        note (`str`): Where it was seen, or why not.
    """

    pairs: tuple[tuple[int, int], ...] | None
    note: str = ""


# By place in a caught tensor and by head: the maps R `(N, E', E)` of its channels at some tokens.
_Maps = dict[int, dict[int, Tensor]]


class _AtPositions(Rerun):
    """An attention module that is called again with the positions it was called with."""

    @staticmethod
    def _neutral(name: str, value: Any) -> Any:
        kept = Rerun._neutral(name, value)
        return value if isinstance(value, Tensor | tuple | list | dict) and kept is not None else kept


def rotations(model: PreTrainedModel, errors: list[str]) -> dict[str, tuple[AttentionLayer, Rotation]]:
    """
    Looks at every attention layer that a forward pass of a model reaches.

    Args:
        model (`PreTrainedModel`): A model of [`small_model`].
        errors (`list[str]`): Takes what inputs were not taken.

    Returns:
        `dict[str, tuple[AttentionLayer, Rotation]]`: By name of the layer.
    """
    layers = [layer for layer in survey_attention(model).layers if layer.problem is None]
    calls, *_ = _run(model, errors)
    reach(model, calls, [layer.name for layer in layers])
    return {layer.name: (layer, _seen(layer, calls)) for layer in layers}


def _seen(layer: AttentionLayer, calls: dict[str, Call]) -> Rotation:
    """What the forward does, called as the model calls it; or alone, where it is told no positions."""
    tries: Iterable[Call] = (calls[layer.name],) if layer.name in calls else ()
    if not tries:
        told = [name for name in inspect.signature(layer.module.forward).parameters if _POSITIONS.search(name)]
        if told:
            return Rotation(None, f"not reached, and takes {', '.join(told)}")
        tries = _direct_calls(layer, layer.input_width("query"))
    notes = ["not reached"]
    for call in itertools.islice(tries, 16):
        try:
            return _rotation(layer, call)
        except Exception as error:
            notes.append(f"{type(error).__name__}: {error}"[:200])
    return Rotation(None, notes[-1])


def _rotation(layer: AttentionLayer, call: Call) -> Rotation:
    width, key_width = layer.input_width("query"), layer.input_width("key")
    rerun = _AtPositions(layer.module, call, width if width == key_width else None)
    if not rerun.streams:
        return Rotation(None, "no hidden states among its arguments")
    with layer.query_key_weights() as (w_q, w_k):
        weights: dict[Side, Tensor] = {"query": w_q.double(), "key": w_k.double()}
    streams = [
        Stream(
            rerun, names, None if rerun.neutral[names[0]].shape[-1] == width else width if width == key_width else None
        )
        for names in rerun.streams
    ]
    seen: list[dict[Side, _Maps]] = [{} for _ in streams[0].zero]
    for stream in streams:
        for index, sides in enumerate(_maps(stream, weights)):
            for side, maps in sides.items():
                seen[index].setdefault(side, {}).update(maps)
    repeats = weights["query"].shape[0] // weights["key"].shape[0]
    products: list[Tensor] = []
    for one in seen:
        for place, heads in one.get("query", {}).items():
            keys = one.get("key", {}).get(place, {})
            # Rows of several heads may span the same space (queries of a low rank); those that meet are told by both.
            met = [head for head in heads if head // max(1, repeats) in keys]
            if len(met) == 1:
                turned, other = heads[met[0]], keys[met[0] // max(1, repeats)]
                products.append(torch.einsum("nae,maf->nmef", turned, other).flatten(0, 1))
    note = f"{len(products)} heads"
    if not products:
        # Keys that are another layer's, or convolved with those of other tokens.
        products = [
            torch.einsum("nae,maf->nmef", turned, turned).flatten(0, 1)
            for one in seen
            for heads in one.get("query", {}).values()
            if len(heads) == 1
            for turned in heads.values()
        ]
        note = f"queries of {len(products)} heads"
    if not products:
        return Rotation(None, "no queries or keys that are W_q or W_k times a hidden state")
    return _pairs(torch.cat(products), note)


def _maps(stream: Stream, weights: dict[Side, Tensor]) -> list[dict[Side, _Maps]]:
    """
    By softmax, side and place in the caught tensor: the head, and the maps R `(N, E', E)` of its channels at some
    tokens. Which head it is follows from the span of its rows.
    """
    # More of them than channels of a head, so that maps that are no product of R and W_q are noticed.
    number = min(stream.width, max(weight.shape[1] for weight in weights.values()) + 16)
    vectors = torch.randn(number, stream.width, generator=torch.Generator().manual_seed(6))
    inputs = (vector.expand(stream.slots, -1) for vector in vectors)
    columns: list[dict[Side, list[Tensor]]] = [{side: [] for side in SIDES} for _ in stream.zero]
    picked: dict[tuple[int, Side], tuple[Tensor, Tensor]] = {}
    for logits in stream.run_each(inputs):
        for index, (one, zero) in enumerate(zip(logits, stream.zero, strict=True)):
            for side in SIDES:
                if weights[side].shape[-1] != stream.width:
                    continue
                values = _aligned(one, side) - _aligned(zero, side)
                values = values.reshape(-1, *values.shape[-2:])
                if (index, side) not in picked:
                    picked[index, side] = (_some(len(values), _PLACES), _some(values.shape[1], _TOKENS))
                places, tokens = picked[index, side]
                columns[index][side].append(values[places][:, tokens])
    applied = {
        side: weight @ vectors.T.double() for side, weight in weights.items() if weight.shape[-1] == stream.width
    }
    inverse = {side: torch.linalg.pinv(weight) for side, weight in applied.items()}
    results: list[dict[Side, _Maps]] = []
    for index, sides in enumerate(columns):
        result: dict[Side, _Maps] = {}
        for side, values in sides.items():
            if not values:
                continue
            response = torch.stack(values, -1).double()  # (places, N, E', vectors)
            maps: _Maps = {}
            for place, own in zip(picked[index, side][0].tolist(), response, strict=True):
                scale = own.abs().max()
                if not scale > 0 or not torch.isfinite(own).all():
                    continue
                for head, (weight, back) in enumerate(zip(applied[side], inverse[side], strict=True)):
                    found = (_unturned(own, weight), own @ back if weight.shape[0] <= weight.shape[1] else None)
                    good = (turned for turned in found if turned is not None and _is_map(turned, weight, own))
                    if (turned := next(good, None)) is not None:
                        maps.setdefault(place, {})[head] = turned
            result[side] = maps
        results.append(result)
    return results


def _unturned(own: Tensor, weight: Tensor) -> Tensor | None:
    """
    Multiples of the identity: told apart from other maps also where few vectors or a weight that is nearly singular
    leave those open.
    """
    if own.shape[1:] != weight.shape:
        return None
    factors = (own * weight).sum((1, 2)) / weight.square().sum()
    return factors.view(-1, 1, 1) * torch.eye(weight.shape[0], dtype=weight.dtype)


def _is_map(turned: Tensor, weight: Tensor, own: Tensor) -> bool:
    return bool((turned @ weight - own).abs().max() < _TOLERANCE * own.abs().max())


def _some(number: int, most: int) -> Tensor:
    """Some indices, the first ones and others."""
    if number <= most:
        return torch.arange(number)
    near = most // 2
    rest = torch.linspace(near, number - 1, most - near).round().long()
    return torch.cat([torch.arange(near), rest])


def _pairs(products: Tensor, note: str) -> Rotation:
    """Pairs of channels that the products `(…, E, E)` mix; they must be rotations of pairs, and nothing else."""
    scales = products.abs().amax((1, 2), keepdim=True)
    products = products[scales.flatten() > 1e-3 * scales.max()]
    products = products / products.abs().amax((1, 2), keepdim=True)
    width = products.shape[-1]
    mixed = products.abs().amax(0) > _TOLERANCE
    mixed = mixed | mixed.T
    mixed.fill_diagonal_(False)
    partners = [row.nonzero().flatten().tolist() for row in mixed]
    if any(len(own) > 1 for own in partners):
        worst = max(range(width), key=lambda channel: len(partners[channel]))
        return Rotation(None, f"channel {worst} is mixed with {partners[worst][:8]}; {note}")
    pairs = tuple((channel, own[0]) for channel, own in enumerate(partners) if own and own[0] > channel)
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    turning = (products[:, first, first] - products[:, second, second]).abs().amax() if pairs else torch.zeros(())
    turning = (
        torch.maximum(turning, (products[:, first, second] + products[:, second, first]).abs().amax())
        if pairs
        else turning
    )
    if turning > _TOLERANCE:
        return Rotation(None, f"pairs {pairs[:3]} are no rotations: off by {float(turning):.2g}; {note}")
    rest = [channel for channel, own in enumerate(partners) if not own]
    alike = products[:, rest, rest]
    if len(rest) > 1 and (spread := (alike.amax(1) - alike.amin(1)).max()) > _TOLERANCE:
        return Rotation(None, f"channels {rest[:4]}… are scaled apart by {float(spread):.2g}; {note}")
    return Rotation(pairs, note)


class Verdict(NamedTuple):
    """
    What the package says of a layer, held to its forward.

    Attributes:
        outcome (`str`): `"proven"`; `"unseen"`: said, and the forward could not be looked at; `"refused"`; `"wrong"`.
        told (`str`): The pairs in words, or the refusal.
    """

    outcome: str
    told: str


def said(layer: AttentionLayer, rotation: Rotation) -> Verdict:
    """
    Holds what the package says to what the forward was seen to do.

    Args:
        layer ([`AttentionLayer`]): The layer.
        rotation ([`Rotation`]): What its forward was seen to do.

    Returns:
        [`Verdict`]
    """
    try:
        told = channel_pairs(layer)
    except ValueError as error:
        return Verdict("refused", str(error))
    pairs = sorted(zip(told.first, told.second, strict=True))
    if sorted({*told.first, *told.second, *told.rest}) != list(range(layer.heads.head_dim)):
        return Verdict("wrong", f"{pairs} and {told.rest} are not all channels once")
    if rotation.pairs is None:
        return Verdict("unseen", describe(pairs))
    return Verdict("proven" if pairs == sorted(rotation.pairs) else "wrong", describe(pairs))


def describe(pairs: Sequence[tuple[int, int]] | None) -> str:
    """Pairs in words, where they are regular."""
    if pairs is None:
        return "?"
    if not pairs:
        return "none"
    number, start = len(pairs), pairs[0][0]
    if list(pairs) == [(start + n, start + number + n) for n in range(number)]:
        return f"halves {start}+{2 * number}"
    if list(pairs) == [(start + 2 * n, start + 2 * n + 1) for n in range(number)]:
        return f"adjacent {start}+{2 * number}"
    return str(list(pairs))


def examine(model_type: str) -> Iterator[dict[str, Any]]:
    """One line for a type: of each layer which channels the forward rotates together."""
    yield from census.level_by_level(model_type, LEVELS[:3], _examine)


def _examine(model_type: str, level: int) -> dict[str, Any]:
    model = small_model(model_type, level)
    errors: list[str] = []
    try:
        found = rotations(model, errors)
    except ValueError as error:
        if "No attention layer" not in str(error):
            raise
        found = {}
    layers = [
        {
            "name": layer.name,
            "class": type(layer.module).__name__,
            "model_type": layer.model_type,
            "kind": layer.kind,
            "head_dim": layer.heads.head_dim,
            "pairs": rotation.pairs,
            "forward": describe(rotation.pairs),
            "note": rotation.note,
            **said(layer, rotation)._asdict(),
        }
        for layer, rotation in found.values()
    ]
    seen = sum(layer["pairs"] is not None for layer in layers)
    return {
        "type": model_type,
        "class": type(model).__name__,
        "level": level,
        "status": "all" if seen == len(layers) else "some" if seen else "none",
        "seen": seen,
        "layers": layers,
        "errors": errors[:4],
    }


if __name__ == "__main__":
    census.take(examine, __doc__)
