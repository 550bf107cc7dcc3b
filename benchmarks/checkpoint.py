"""
Time and memory of `score_checkpoint` against loading the model and multiplying heads out, and against FactoredMatrix.

    python benchmarks/checkpoint.py [--threads 1] [--repeats 3] [--quick] [--json results.json]
        [--transformer-lens FOLDER]

A checkpoint with the names and shapes of a LLaMA-3-8B, cut to 4 layers and a smaller vocabulary, is written to a
temporary folder (2.3 GB in shards of 1 GB). Each variant runs in processes of its own, which take turns; the fastest
counts. See README.md beside this file for how to read the table, and how to install TransformerLens.
"""

import argparse
import importlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Result, argument_parser, facts, mib, ms, show
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


# Imports that not every process needs stand where they are used: the time of whole processes is measured too.
Config = dict[str, Any]  # config.json
Scores = list[tuple[list[float], list[float]]]  # symmetry and directionality of each head, by layer
INDEX = "model.safetensors.index.json"


# --- the checkpoint -----------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, sizes: Mapping[str, int], shard_size: int) -> None:
    """Weights of a random model, shard by shard: it never exists as a whole."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_dict({**sizes, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    files: dict[str, int] = {}
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) + 2 * shape.numel() > shard_size and shards[-1]:
            _write_shard(folder, len(shards), shards[-1])
            shards[-1] = {}
            shards.append({})
        shards[-1][name] = (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        files[name] = len(shards)
    _write_shard(folder, len(shards), shards[-1])
    size = 2 * sum(shape.numel() for shape in shapes.values())
    weight_map = {name: _shard_name(number) for name, number in files.items()}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / _shard_name(number), metadata={"format": "pt"})


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def read_config(folder: Path) -> Config:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def query_key_names(config: Config) -> Iterator[tuple[str, str]]:
    for layer in range(config["num_hidden_layers"]):
        query, key = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for name in "qk")
        yield query, key


def split_heads(weight: Tensor, config: Config) -> Tensor:
    return weight.float().unflatten(0, (-1, config["head_dim"]))


# --- what is compared, each in its own process --------------------------------------------------------------------

# A variant imports what it uses, and returns what is timed.
Variant = Callable[[Path, Config], Callable[[], Any]]


def ours(folder: Path, config: Config) -> Callable[[], Scores]:
    import hf_symqk

    def score() -> Scores:
        scores = hf_symqk.score_checkpoint(folder)
        return [(list(layer.head_symmetry), list(layer.head_directionality)) for layer in scores.layers]

    return score


def load_and_multiply(folder: Path, config: Config, **options: Any) -> Callable[[], Scores]:
    from bilinear import dense_scores
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()

    def score() -> Scores:
        model = AutoModel.from_pretrained(folder, **options)
        results: Scores = []
        for layer in model.layers:
            w_q, w_k = (split_heads(getattr(layer.self_attn, name).weight, config) for name in ("q_proj", "k_proj"))
            group = w_q.shape[0] // w_k.shape[0]
            heads = [dense_scores(query.T @ w_k[head // group]) for head, query in enumerate(w_q)]
            symmetry, directionality = zip(*heads, strict=True)
            results.append((torch.stack(symmetry).tolist(), torch.stack(directionality).tolist()))
        return results

    return score


def factored_matrices(folder: Path, config: Config) -> Callable[[], Scores]:
    factored_matrix = importlib.import_module("transformer_lens").FactoredMatrix
    files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]

    def read(name: str) -> Tensor:
        with safe_open(folder / files[name], framework="pt") as file:
            return file.get_tensor(name)

    def score() -> Scores:
        results: Scores = []
        for names in query_key_names(config):
            w_q, w_k = (split_heads(read(name), config) for name in names)
            matrix = factored_matrix(w_q.mT, w_k.repeat_interleave(w_q.shape[0] // w_k.shape[0], dim=0))
            symmetry = (matrix @ matrix).BA.diagonal(dim1=-2, dim2=-1).sum(-1) / matrix.norm() ** 2
            norms = matrix.collapse_r().norm(dim=-1), matrix.collapse_l().norm(dim=-2)
            rows, columns = (
                (x - x.mean(-1, keepdim=True) - 2 * x.std(-1, keepdim=True)).clamp(min=0).sum(-1) for x in norms
            )
            results.append((symmetry.tolist(), ((rows - columns) / (rows + columns)).tolist()))
        return results

    return score


def read_only(folder: Path, config: Config) -> Callable[[], int]:
    """The bytes of Q and K into fresh memory, one tensor after another, and nothing else."""

    def read() -> int:
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        total = 0
        for names in query_key_names(config):
            tensors = []  # one layer's at a time
            for name in names:
                with (folder / files[name]).open("rb", buffering=0) as file:
                    length = int.from_bytes(file.read(8), "little")
                    start, end = json.loads(file.read(length))[name]["data_offsets"]
                    tensors.append(torch.empty(end - start, dtype=torch.uint8))
                    file.seek(8 + length + start)
                    total += file.readinto(tensors[-1].numpy().data)
        return total

    return read


OURS, DENSE, DENSE_FP32 = "score_checkpoint", "from_pretrained + dense heads", "the same with dtype=float32"
FACTORED, READ = "FactoredMatrix", "reading alone"
VARIANTS: dict[str, Variant] = {
    OURS: ours,
    DENSE: load_and_multiply,
    DENSE_FP32: partial(load_and_multiply, dtype=torch.float32),
    FACTORED: factored_matrices,
    READ: read_only,
}


# --- processes ----------------------------------------------------------------------------------------------------


def run_variant(name: str, folder: Path, idle: bool) -> None:
    """Inside a process: imports, one timed call (none if idle), and the results as JSON."""
    with torch.no_grad():
        call = VARIANTS[name](folder, read_config(folder))
        start = time.perf_counter()
        result = None if idle else call()
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": peak_memory(), "result": result}))


def peak_memory() -> int:
    """Most bytes that this process had in memory at once, mapped parts of files included."""
    try:
        # Unlike `getrusage`, this starts anew with the program: there a child counts its parent's peak as its own.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_process(name: str, folder: Path, arguments: argparse.Namespace, idle: bool = False) -> dict[str, Any]:
    command = [sys.executable, __file__, "--variant", name, "--folder", str(folder)]
    command += ["--threads", str(torch.get_num_threads()), *(["--idle"] if idle else [])]
    paths = [str(arguments.transformer_lens or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    start = time.perf_counter()
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(process.stderr.strip().splitlines()[-1])
    return {**json.loads(process.stdout.splitlines()[-1]), "whole": seconds}


def measure(folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], float]:
    """By variant: seconds of the call and of the whole process, extra memory, results; and the rate of products."""
    from bilinear import product_rates

    baselines: dict[str, int] = {}
    for name in VARIANTS:
        try:
            baselines[name] = in_process(name, folder, arguments, idle=True)["peak"]
        except RuntimeError as error:
            if name != FACTORED:
                raise
            print(f"{name} is left out, TransformerLens cannot be imported ({error}). {INSTALL}")
    size = read_config(folder)["hidden_size"]
    measured: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(("seconds", "whole", "memory"), math.inf) for name in baselines
    }
    rate = 0.0
    for _ in range(arguments.repeats):
        for name, baseline in baselines.items():
            turn = in_process(name, folder, arguments)
            best = measured[name]
            best.update({part: min(best[part], turn[part]) for part in ("seconds", "whole")}, result=turn["result"])
            best["memory"] = min(best["memory"], turn["peak"] - baseline)
        rate = max(rate, *product_rates((size // 4, size // 2, size), 2).values())
    return measured, rate


INSTALL = (
    "Install it beside this environment: `pip install --no-deps --target FOLDER transformer_lens beartype "
    "fancy_einsum jaxtyping typeguard wadler_lindig`, and give `--transformer-lens FOLDER`."
)


# --- comparison ---------------------------------------------------------------------------------------------------


def compare(folder: Path, arguments: argparse.Namespace) -> list[Result]:
    config = read_config(folder)
    measured, rate = measure(folder, arguments)
    mine = measured[OURS]
    rows: list[Result] = []
    for other in (name for name in (DENSE, DENSE_FP32, FACTORED) if name in measured):
        _check(mine["result"], measured[other]["result"], other)
        for what, part, write, goal, met in (
            ("time", "seconds", ms, "≥ 10x faster", lambda ratio: ratio >= 10),
            ("time with start and imports", "whole", ms, "", bool),
            ("extra peak memory", "memory", mib, "≥ 5x smaller", lambda ratio: ratio > 5),
        ):
            left, right = mine[part], measured[other][part]
            target = goal if other == DENSE else ""
            rows.append(
                Result(f"{what}, against {other}", write(left), write(right), right / left, target, met(right / left))
            )
    # Heads at rank E, and the layer at the rank of its keys.
    rank, keys = config["head_dim"], config["num_key_value_heads"]
    squares = config["num_attention_heads"] * rank**2 + (keys * rank) ** 2
    operations = 10 * config["hidden_size"] * squares * config["num_hidden_layers"]
    reading, bound = measured[READ]["seconds"], operations / rate
    print(
        f"reading Q and K alone takes {ms(reading)} ({mib(measured[READ]['result'])}, from the page cache), "
        f"{operations / 1e9:.0f} Gop at {rate / 1e9:.0f} Gop/s take {ms(bound)}"
    )
    ratio, both = mine["seconds"] / (reading + bound), ms(reading + bound)
    rows.append(Result("time, against reading + products", ms(mine["seconds"]), both, ratio, "≤ 1.5", ratio <= 1.5))
    return rows


def _check(mine: Scores, theirs: Scores, other: str) -> None:
    """Both have to have computed the same; float32 leaves far less than a hundredth between them."""
    for left, right in zip(mine, theirs, strict=True):
        difference = (torch.tensor(left) - torch.tensor(right)).abs().max().item()
        if not difference < 1e-2:
            raise RuntimeError(f"{other} differs from {OURS} by {difference}")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each variant; the fastest counts")
    parser.add_argument("--transformer-lens", type=Path, metavar="FOLDER", help="where TransformerLens is installed")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        facts(arguments)
        run_variant(arguments.variant, arguments.folder, arguments.idle)
        return
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if arguments.quick:
        shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    shape |= {"num_hidden_layers": 4, "vocab_size": 512 if arguments.quick else 32000}
    shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    about = facts(arguments, repeats=arguments.repeats, **shape)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, shard_size=2**20 if arguments.quick else 10**9)
        results = compare(Path(folder), arguments)
    show(results, about, arguments.json)


if __name__ == "__main__":
    main()
