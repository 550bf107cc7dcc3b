"""Sharded engines in real processes: the same weights and scores as in one process."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from architectures import BY_NAME, LAYERS
from launching import in_processes
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertModel

from hf_symqk import QKScores, find_attention_layers, score_model
from hf_symqk.history import read_history


HERE = Path(__file__).parent


def torchrun(script: str, *arguments: str, processes: int = 2, timeout: int = 600, **environment: str) -> None:
    """Runs a script of this folder in several processes and shows what they printed if it fails."""
    result = subprocess.run(
        [*in_processes(processes), str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
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


def on_cpu(engine: str) -> dict[str, str]:
    """Environment in which an engine runs without an accelerator; told so itself, accelerate leaves DeepSpeed out."""
    return {"DS_ACCELERATOR": "cpu"} if engine.startswith("zero3") else {"ACCELERATE_USE_CPU": "true"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_members_of_the_family_under_an_engine(engine, tmp_path):
    """Bit by bit what one process writes, on each rank: also where randomness, W_q or a norm comes in."""
    torchrun("distributed_init.py", engine, str(tmp_path), **on_cpu(engine))
    for rank in (0, 1):
        results = json.loads((tmp_path / f"differing_{rank}.json").read_text())
        assert len(results) == {"fsdp2": 37, "zero3": 4}[engine]
        assert {case: names for case, names in results.items() if names} == {}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3", "zero3_persistent"])
def test_callback_under_an_engine(engine, tmp_path):
    """
    In a Trainer of two processes the scores that rank 0 logs are those that one process gives for the whole weights,
    at the start (a symmetric model) and at the end (the saved one); the worker asserts that the engine really ran.
    Updates are measured by rank 0 alone, where it has whole weights; else training goes on without them.
    """
    torchrun("distributed_training.py", engine, str(tmp_path), "no", **on_cpu(engine))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["0"]["qk/symmetry/layer_02"] == pytest.approx(1, abs=1e-5)
    expected = score_model(AutoModelForMaskedLM.from_pretrained(tmp_path / "trained")).to_log(heads=True)
    assert {key: rows["3"][key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert rows["3"]["qk/symmetry/median"] < 0.999, "training must have moved something"
    assert ("qk/update_symmetry/layer_00_head_01" in rows["3"]) == (engine == "ddp")
    history = read_history(tmp_path / "out")
    assert len(history) == 3 * LAYERS * (1 + 4), "one process writes the history"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
@pytest.mark.parametrize("broken", ["computation", "dequantisation"])
def test_a_failure_on_one_rank_does_not_hang_the_others(engine, broken, tmp_path):
    """Rank 1 fails in the computation, or between gathering and it: training ends, and rank 0's scores stand."""
    # 60 s for training itself; starting two processes that import everything takes as long again on a busy machine.
    torchrun("distributed_training.py", engine, str(tmp_path), broken, timeout=150, **on_cpu(engine))
    rows = json.loads((tmp_path / "rows.json").read_text())
    expected = score_model(AutoModelForMaskedLM.from_pretrained(tmp_path / "trained")).to_log()
    assert {key: rows["3"][key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_loss_that_waits_for_other_processes_is_not_computed_alone(tmp_path):
    """Updates are measured by one process: not with a loss in which it would wait for the others for ever."""
    torchrun("distributed_training.py", "ddp", str(tmp_path), "gathering", timeout=150, **on_cpu("ddp"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert "qk/symmetry/median" in rows["3"]
    assert not any("update_" in key for key in rows["3"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3", "tp_bert", "tp_llama", "tp_transformers"])
def test_score_model_in_a_plain_loop(engine, tmp_path):
    """
    Without a Trainer each of two processes gets the scores that one process gives for the whole weights: on a model
    that accelerate prepared and a loop trained, and on one that torch or Transformers split by heads. The worker
    asserts that the engine really ran.
    """
    torchrun("distributed_loop.py", engine, str(tmp_path), **on_cpu(engine))
    first, second = (QKScores.from_json(tmp_path / f"scores_{rank}.json") for rank in (0, 1))
    assert first == second
    if engine in ("tp_llama", "tp_transformers"):
        model = AutoModelForCausalLM.from_config(BY_NAME["llama"].config())
    else:
        model = AutoModelForMaskedLM.from_config(BY_NAME["bert"].config(tie_word_embeddings=False))
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    expected = score_model(model)
    assert [layer.name for layer in first.layers] == [layer.name for layer in expected.layers]
    values, expected_values = (scores.to_log(heads=True) for scores in (first, expected))
    assert values == pytest.approx(expected_values, rel=1e-5, abs=1e-5)
    norms = [layer.frobenius_norm for layer in first.layers]
    assert norms == pytest.approx([layer.frobenius_norm for layer in expected.layers], rel=1e-5)
    if engine != "tp_transformers":  # which only loads
        assert values["qk/symmetry/median"] < 0.999, "training must have moved something"


@pytest.mark.slow
def test_fsdp1_is_refused(tmp_path):
    """Under FSDP1 every rank is told to use FSDP2, by an error from `score_model` and by one warning of a callback."""
    torchrun("distributed_loop.py", "fsdp1", str(tmp_path), **on_cpu("fsdp1"))
    assert sorted(path.name for path in tmp_path.glob("done_*")) == ["done_0", "done_1"]
