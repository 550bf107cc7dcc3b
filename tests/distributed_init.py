"""
Run by test_distributed.py under torchrun: every member of the family written to a model that FSDP2 has sharded, or
that ZeRO-3 has partitioned, against the same in one process. Each rank leaves the names of what differs.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from architectures import BY_NAME
from init.family import MEMBERS, PER_HEAD
from launching import leave_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_symqk import apply_qk_init


CASES = {
    "fsdp2": [
        (name, member)
        for name in ("bert", "t5", "llama", "gpt2")
        for member in MEMBERS
        if not (name == "llama" and member in PER_HEAD)
    ],
    # Construction takes long there: what needs randomness, writes W_q, or measures.
    "zero3": [("bert", "half"), ("bert", "spectrum"), ("t5", "mimetic"), ("llama", "matched_half")],
}


State = dict[str, Tensor]


def sharded_by_fsdp2(name: str, member: str) -> tuple[State, State]:
    """Whole weights before and after."""
    model = BY_NAME[name].build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    before = {key: parameter.full_tensor().detach().clone() for key, parameter in model.named_parameters()}
    apply_qk_init(model, MEMBERS[member])
    return before, {key: parameter.full_tensor() for key, parameter in model.named_parameters()}


def partitioned_by_zero3(name: str, member: str) -> tuple[State, State]:
    """Whole weights of a plain model and of one that was constructed with the member."""
    import deepspeed

    states = []
    for qk_init in (None, MEMBERS[member]):
        model = BY_NAME[name].build(qk_init=qk_init)
        assert all(parameter.shape == (0,) for parameter in model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            states.append({key: parameter.detach().clone() for key, parameter in model.named_parameters()})
    return states[0], states[1]


def differing(before: State, after: State, model: nn.Module, member: str) -> list[str]:
    """Names of weights that one process, starting from the same, gives other values."""
    expected = dict(model.named_parameters())
    assert after.keys() == expected.keys() == before.keys()
    with torch.no_grad():
        for key, parameter in expected.items():
            parameter.copy_(before[key])
    apply_qk_init(model, MEMBERS[member])
    assert not all(torch.equal(before[key], after[key]) for key in before)
    return [key for key, value in after.items() if not torch.equal(value, expected[key])]


def main(engine: str, folder: Path) -> None:
    cases = CASES[engine]
    # Before ZeRO-3 is on, which reaches every construction.
    alone = {case: BY_NAME[case[0]].build() for case in cases}
    if engine == "fsdp2":
        dist.init_process_group("gloo")
        make, settings = sharded_by_fsdp2, None
    else:
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed(dist_backend="gloo")
        make = partitioned_by_zero3
        settings = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert dist.get_world_size() == 2
    results = {"/".join(case): differing(*make(*case), alone[case], case[1]) for case in cases}
    (folder / f"differing_{dist.get_rank()}.json").write_text(json.dumps(results))
    del settings  # Transformers holds it by a weak reference: it lives as long as construction under ZeRO-3 is meant


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    leave_group()
