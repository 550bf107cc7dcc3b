"""Sharded engines in real processes: the same weights and scores as in one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import BY_NAME, LAYERS
from transformers import BertModel

from hf_symqk import find_attention_layers


HERE = Path(__file__).parent


def torchrun(script: str, *arguments: str, processes: int = 2, **environment: str) -> None:
    """Runs a script of this folder in several processes and shows what they printed if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    result = subprocess.run(
        [*command, str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"


@pytest.mark.slow
def test_zero3(tmp_path):
    """
    Under ZeRO-3's partitioned construction only K differs from the plain init and is symmetric, on every rank; loaded
    weights stay; scores are those of whole tensors.
    """
    model = BertModel(BY_NAME["bert"].config())
    state = {name: value for name, value in model.state_dict().items() if "layer.1.attention.self" not in name}
    model.save_pretrained(tmp_path / "partial", state_dict=dict(state))  # it empties what it is given
    torchrun("distributed_zero3.py", str(tmp_path), DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    first, second = (torch.load(tmp_path / f"results_{rank}.pt") for rank in (0, 1))
    assert (first["rank"], second["rank"]) == (0, 1)
    for results in (first, second):
        for name in ("bert", "t5", "llama", "gpt_neox"):
            assert results[f"{name}/symmetric"] == pytest.approx([1] * len(results[f"{name}/symmetric"]), abs=1e-5)
            assert max(map(abs, results[f"{name}/None"])) < 0.5
            layers = [layer for layer in find_attention_layers(BY_NAME[name].build()) if layer.kind == "self"]
            holders = {f"{layer.name}.{layer.layout.key.module}.weight" for layer in layers}
            assert set(results[f"{name}/changed"]) == holders
            assert results[f"{name}/applied"], "apply_qk_init must do what construction does"
        assert results["redrawn"] == pytest.approx([1] * LAYERS, abs=1e-5)
        assert [value > 0.999 for value in results["loaded"]] == [False, True, False]
        kept = [name for name, value in state.items() if name in results["loaded_state"]]
        assert len(kept) > 20
        assert all(torch.equal(results["loaded_state"][name], state[name]) for name in kept)
    assert first["bert/None"] == second["bert/None"]
