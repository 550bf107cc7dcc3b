"""The README's Python runs as it stands there (on a small BERT), and its test command is the one that CI runs."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from architectures import BY_NAME
from tiny_training import Tokens
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM

import hf_symqk
from hf_symqk.attention import layouts, unregister_qk_layout


ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks(block, tmp_path, monkeypatch):
    """Each block runs by itself, given the names that the text around it speaks of."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    small = {name: value for name, value in BY_NAME["bert"].values.items() if name != "vocab_size"} | {
        "vocab_size": 99
    }
    original = transformers.BertConfig
    monkeypatch.setattr(transformers, "BertConfig", lambda **values: original(**(small | values)))
    model = AutoModelForMaskedLM.from_config(original(**small), qk_init="symmetric")
    names = {"hf_symqk": hf_symqk, "model": model, "data": Tokens(), "loader": DataLoader(Tokens(), batch_size=4)}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    if "plot_history" in block:
        from hf_symqk.history import ScoreHistory

        ScoreHistory(tmp_path / "out" / "qk_scores.csv", resumed_step=0).append(0, hf_symqk.score_model(model))
    before = {layout.name for layout in layouts()}
    try:
        exec(compile(block, "README.md", "exec"), names)
    finally:
        for name in {layout.name for layout in layouts()} - before:
            unregister_qk_layout(name)
    if "accelerator.log" in block:
        assert list((tmp_path / "out").glob("**/events.*"))
    if "plot_history" in block:
        assert (tmp_path / "history.png").stat().st_size > 1000


def test_ci_runs_the_command_of_the_readme():
    """CI looks the command up in the README: if it is reworded there, CI must still find it."""
    pattern = re.search(r"grep -m 1 -x '(.*)' README.md", (ROOT / ".ci" / "run").read_text()).group(1)
    assert re.search(rf"^{pattern}$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
