"""
Time of spectral scores of heads against dense decompositions of the same matrices.

    python benchmarks/spectra.py [--threads 1] [--repeats 3] [--quick] [--json results.json]

See README.md beside this file for how to read the table.
"""

import argparse
import time

import torch
from bilinear import take_turns
from report import Result, argument_parser, facts, ms, show
from torch import Tensor

from hf_symqk.scoring import head_forms


def dense_spectrum(w: Tensor) -> tuple[Tensor, Tensor]:
    """What the scores are made of, from a matrix that is there."""
    return torch.linalg.eigvals(w), torch.linalg.svdvals(w)


def compare(width: int, heads: int, groups: int, head_dim: int, repeats: int) -> list[Result]:
    """All heads of a layer against one head multiplied out; dense heads all cost the same."""
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = (0.02 * torch.randn(count, head_dim, width, generator=generator) for count in (heads, groups))
    dense = (w_q[0].T @ w_k[0]).double()
    ours = take_turns({"": lambda: head_forms(w_q, w_k).spectral_scores()}, repeats)[""]
    # One turn, which takes minutes at full size: nothing that warming up would save shows in it.
    start = time.perf_counter()
    dense_spectrum(dense)
    theirs = (time.perf_counter() - start) * heads
    what = f"D = {width}, E = {head_dim}, H = {heads}, G = {groups}"
    return [Result(what, ms(ours), ms(theirs), theirs / ours, "≥ 20x faster", theirs >= 20 * ours)]


def main(arguments: argparse.Namespace) -> None:
    about = facts(arguments, dtype="float64", repeats=arguments.repeats)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    size = (256, 4, 2, 16) if arguments.quick else (4096, 8, 2, 128)
    show(compare(*size, arguments.repeats), about, arguments.json)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each variant")
    main(parser.parse_args())
