"""
Run by test_distributed.py under torchrun: construction, loading, scoring and initialising under DeepSpeed ZeRO-3,
where parameters arrive empty and partitioned.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from architectures import BY_NAME
from launching import leave_group
from transformers import AutoModel
from transformers.integrations import HfDeepSpeedConfig

import hf_symqk
from hf_symqk import apply_qk_init, score_model


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    assert torch.distributed.get_world_size() == 2
    results: dict[str, object] = {"rank": torch.distributed.get_rank()}
    settings = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    for name in ("bert", "t5", "llama", "gpt_neox"):
        states = {}
        for qk_init in (None, "symmetric"):
            model = BY_NAME[name].build(qk_init=qk_init)
            assert all(parameter.shape == (0,) for parameter in model.parameters()), "ZeRO-3 did not partition"
            states[qk_init] = whole_state(model)
            scores = score_model(model)
            results[f"{name}/{qk_init}"] = [layer.symmetry for layer in scores.layers]
            assert all(parameter.shape == (0,) for parameter in model.parameters()), "scoring left something gathered"
        results[f"{name}/changed"] = [
            parameter
            for parameter in states[None]
            if not torch.equal(states[None][parameter], states["symmetric"][parameter])
        ]
        applied = apply_qk_init(BY_NAME[name].build())
        results[f"{name}/applied"] = all(
            torch.equal(value, states["symmetric"][key]) for key, value in whole_state(applied).items()
        )
    redraw = {"scheme": "symmetric", "distribution": "kaiming_uniform"}
    results["redrawn"] = [layer.symmetry for layer in score_model(BY_NAME["bert"].build(qk_init=redraw)).layers]
    loaded = AutoModel.from_pretrained(folder / "partial", qk_init="symmetric")
    results["loaded"] = [layer.symmetry for layer in score_model(loaded).layers]
    results["loaded_state"] = whole_state(loaded)
    torch.save(results, folder / f"results_{results['rank']}.pt")
    del settings  # Transformers holds it by a weak reference: it lives as long as construction under ZeRO-3 is meant


if __name__ == "__main__":
    assert hf_symqk.register  # imported for its hooks
    main(Path(sys.argv[1]))
    leave_group()
