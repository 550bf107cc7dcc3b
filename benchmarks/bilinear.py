"""
Time and memory of `W_qk` scores against dense products, and of the init against a plain `from_config`.

    python benchmarks/bilinear.py [--threads 1] [--repeats 7] [--quick] [--json results.json]

Every ratio comes from one run: the compared variants take turns, and each counts with its fastest turn, since another
process on the machine can only make a turn slower. See README.md beside this file for how to read the table.
"""

import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from report import Result, argument_parser, facts, mib, ms, show
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel

from hf_symqk import plugin
from hf_symqk.scoring import head_forms, layer_form


GAMMA = 2.0


# --- measuring ----------------------------------------------------------------------------------------------------


def take_turns(variants: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Fastest of `repeats` turns of each variant in seconds, after one turn each to warm up."""
    gc.collect()
    best = dict.fromkeys(variants, math.inf)
    for turn in range(repeats + 1):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


class PeakMemory(TorchDispatchMode):
    """
    Most bytes alive at once in storages that operations made while the mode was on; what existed before does not
    count. A storage leaves the count when the last tensor on it is freed. Scratch inside one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def peak_memory(call: Callable[[], object]) -> int:
    with PeakMemory() as memory:
        call()
    return memory.peak


def product_rates(sizes: Iterable[int], repeats: int) -> dict[int, float]:
    """Operations per second of square fp32 matrix products, by size."""
    factors = {size: torch.randn(size, size) for size in sizes}
    times = take_turns(
        {str(size): partial(torch.mm, factor, factor) for size, factor in factors.items()},
        repeats,
    )
    return {size: 2 * size**3 / times[str(size)] for size in factors}


# --- dense formulas -----------------------------------------------------------------------------------------------


def dense_scores(w: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetry and directionality of a matrix that is there, as one would write them."""
    symmetry = (w * w.T).sum() / (w * w).sum()
    rows, columns = (_excess(torch.linalg.vector_norm(w, dim=dim)) for dim in (1, 0))
    return symmetry, (rows - columns) / (rows + columns)


def _excess(norms: Tensor) -> Tensor:
    return (norms - norms.mean() - GAMMA * norms.std()).clamp(min=0).sum()


def dense_heads(w_q: Tensor, w_k: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each head multiplied out, one at a time."""
    return [dense_scores(query.T @ key) for query, key in zip(w_q, w_k, strict=True)]


def dense_layer(w_q: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
    """The layer multiplied out, the keys of a group repeated for its query heads."""
    w_k = w_k.repeat_interleave(w_q.shape[0] // w_k.shape[0], dim=0)
    return dense_scores(w_q.flatten(0, 1).T @ w_k.flatten(0, 1))


# --- comparisons --------------------------------------------------------------------------------------------------


def compare_scores(width: int, heads: int, groups: int, head_dim: int, repeats: int) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    w_q, w_k, w_shared = (
        0.02 * torch.randn(count, head_dim, width, generator=generator) for count in (heads, heads, groups)
    )
    rates = product_rates(sorted({width // 4, width // 2, width}), repeats)
    fastest = max(rates, key=lambda size: rates[size])
    bound = 10 * width * head_dim**2 * heads / rates[fastest]
    few = max(1, heads // 8)  # dense heads all cost the same: an eighth of them is measured

    def dense_few() -> object:
        return dense_heads(w_q[:few], w_k[:few])

    calls: dict[str, Callable[[], object]] = {
        "heads": lambda: head_forms(w_q, w_k).scores(GAMMA),
        "shared": lambda: head_forms(w_q, w_shared).scores(GAMMA),
        "grouped": lambda: layer_form(w_q, w_shared).scores(GAMMA),
        "layer": lambda: layer_form(w_q, w_k).scores(GAMMA),
        "dense heads": dense_few,
        "dense grouped": lambda: dense_layer(w_q, w_shared),
        "dense layer": lambda: dense_layer(w_q, w_k),
    }
    # The products once more with the scores, so that a slow spell of the machine hits both.
    product = torch.randn(fastest, fastest)
    times = take_turns({**calls, "product": lambda: product @ product}, repeats)
    bound = min(bound, 10 * width * head_dim**2 * heads * times["product"] / (2 * fastest**3))
    times["dense heads"] *= heads / few
    peaks = {name: peak_memory(call) for name, call in calls.items()}

    def faster(what: str, ours: str, dense: str, target: float) -> Result:
        ratio = times[dense] / times[ours]
        goal = f"≥ {target:g}x faster"
        return Result(f"{what}: time", ms(times[ours]), ms(times[dense]), ratio, goal, ratio >= target)

    def slower(what: str, ours: float, against: float, target: float) -> Result:
        return Result(what, ms(ours), ms(against), ours / against, f"≤ {target:g}", ours <= target * against)

    def smaller(what: str, ours: str, dense: str, target: float) -> Result:
        ratio = peaks[ours] / peaks[dense]
        met = ratio < target
        return Result(f"{what}: extra memory", mib(peaks[ours]), mib(peaks[dense]), ratio, f"< {target:g}", met)

    print(
        "fp32 products, Gop/s: " + ", ".join(f"{size}³ {rate / 1e9:.0f}" for size, rate in rates.items()),
        f"one head's AᵀA {_skinny_rate(w_q[0], repeats) / 1e9:.0f}; the bound below takes {fastest}³ at its fastest.",
        sep=", ",
    )
    name = f"heads, H = {heads}"
    return [
        faster(f"{name}, against dense", "heads", "dense heads", 20),
        smaller(f"{name}, against dense", "heads", "dense heads", 1 / 20),
        slower(f"{name}, against 10·D·E²·H operations: time", times["heads"], bound, 1.5),
        slower(f"{name} on G = {groups} keys, against the same bound: time", times["shared"], bound, 1.5),
        faster(f"layer, G = {groups}, against dense", "grouped", "dense grouped", 3),
        smaller(f"layer, G = {groups}, against dense", "grouped", "dense grouped", 0.5),
        slower("layer, R = H·E, against dense: time", times["layer"], times["dense layer"], 1.1),
        smaller("layer, R = H·E, against dense", "layer", "dense layer", 0.5),
    ]


def _skinny_rate(head: Tensor, repeats: int) -> float:
    return 2 * head.shape[0] ** 2 * head.shape[1] / take_turns({"": lambda: head @ head.T}, repeats)[""]


def compare_init(config: BertConfig, repeats: int) -> list[Result]:
    """`from_config` with the option, without it, and without the plugin, taking turns; and the hook's own time."""
    inside: list[float] = []

    def build(**options: Any) -> None:
        AutoModelForMaskedLM.from_config(config, **options)

    def build_unregistered() -> None:
        plugin.unregister()
        try:
            build()
        finally:
            plugin.register()

    def build_watched() -> None:
        # What the hook adds: the time of the hooked step, less that of the original step inside it.
        original = vars(PreTrainedModel)["initialize_weights"]
        spent = dict.fromkeys(("hooked", "inner"), 0.0)
        inner = _watched(original.__wrapped__, spent, "inner")
        hooked = _watched(plugin._wrap_initialize_weights(inner), spent, "hooked")
        with patch.object(PreTrainedModel, "initialize_weights", hooked):
            build(qk_init="symmetric")
        inside.append(spent["hooked"] - spent["inner"])

    times = take_turns(
        {
            "unregistered": build_unregistered,
            "plain": build,
            "symmetric": lambda: build(qk_init="symmetric"),
            "watched": build_watched,
        },
        repeats,
    )
    results = []
    for what, ours, against in (
        ("from_config, symmetric against plain", times["symmetric"], times["plain"]),
        ("from_config, symmetric against no plugin", times["symmetric"], times["unregistered"]),
        ("from_config, plain against no plugin", times["plain"], times["unregistered"]),
    ):
        ratio = ours / against
        results.append(Result(what, ms(ours), ms(against), ratio, "≤ 1.02", ratio <= 1.02))
    hook = min(inside)
    share = hook / times["unregistered"]
    results.append(
        Result(
            "time inside the hook, of from_config", ms(hook), ms(times["unregistered"]), share, "< 0.02",
            share < 0.02,
        )
    )  # fmt: skip
    return results


def _watched(function: Callable[..., None], spent: dict[str, float], name: str) -> Callable[..., None]:
    def timed(*args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        function(*args, **kwargs)
        spent[name] += time.perf_counter() - start

    return timed


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="turns of each variant; the fastest counts")
    arguments = parser.parse_args()
    width, heads, groups, head_dim = (256, 8, 2, 32) if arguments.quick else (4096, 32, 8, 128)
    shape = {"width": width, "heads": heads, "groups": groups, "head_dim": head_dim}
    about = facts(arguments, repeats=arguments.repeats, **shape)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    config = BertConfig()
    if arguments.quick:
        config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    with torch.no_grad():
        results = compare_scores(width, heads, groups, head_dim, arguments.repeats)
    results += compare_init(config, arguments.repeats)
    show(results, about, arguments.json)


if __name__ == "__main__":
    main()
