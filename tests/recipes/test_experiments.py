"""The experiments that are kept: what is printed of them is what their runs say."""

import itertools
import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "experiments"))

from keep import keep

from hf_symqk.comparison import compare_runs
from hf_symqk.comparison.writing import write_comparison


ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "recipes" / "experiments"
KEPT = sorted(path.name for path in EXPERIMENTS.iterdir() if (path / "runs").is_dir())
# Of an experiment that `symqk compare` was given more for than the folder.
OPTIONS = {"finetune": {"differing": ["model_name_or_path"], "pattern": r"(?P<arm>[^/]+)--seed\d+$"}}


def test_there_are_some():
    assert {"encoder", "decoder", "vision", "finetune"} <= set(KEPT)


@pytest.mark.parametrize("name", KEPT)
def test_report_is_that_of_the_runs(name, tmp_path, monkeypatch):
    """Tables and JSON come out of the kept runs again, digit by digit, and the page shows the tables."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(EXPERIMENTS / name)
    monkeypatch.chdir(tmp_path)  # runs are called as they were when they were made
    comparison = compare_runs([Path("out", name, "runs")], baseline="none", **OPTIONS.get(name, {}))
    written = write_comparison(comparison, "again", figure=False)
    kept = EXPERIMENTS / name / "comparison"
    for file in written:
        assert file.read_text() == (kept / file.name).read_text(), file.name
    page = (ROOT / "recipes" / "README.md").read_text()
    blocks = (kept / "comparison.md").read_text().split("\n\n")
    for title, table in itertools.pairwise(blocks):
        if title.startswith(("**Final loss", "**Differences, ", "**Final held-out", "**Differences in held-out")):
            assert table.strip() in page, title


def test_keeping_loses_nothing_that_is_compared(tmp_path):
    """Kept again, runs stay as they are; what a model or a log would add is left out; unfinished runs too."""
    source = tmp_path / "out"
    keep(EXPERIMENTS / "vision", source)
    run = next((source / "runs").iterdir())
    state = json.loads((run / "trainer_state.json").read_text())
    more = {"grad_norm": 1.0, "qk/symmetry/layer_00": 0.5, "eval_runtime": 2.0, "eval_model_preparation_time": 0.1}
    state["log_history"][0] |= more
    state["log_history"].append({"step": 7, "epoch": 1.0, **more})
    (run / "trainer_state.json").write_text(json.dumps({**state, "best_metric": None}))
    (run / "model.safetensors").write_bytes(b"much")
    unfinished = source / "runs" / "none--seed99"
    unfinished.mkdir()
    (unfinished / "run.json").write_text(json.dumps({"status": "running"}))
    names = keep(source, tmp_path / "kept")
    assert len(names) == len(list((EXPERIMENTS / "vision" / "runs").iterdir()))
    assert sorted(path.name for path in (tmp_path / "kept" / "runs" / run.name).iterdir()) == [
        "compare.json",
        "run.json",
        "trainer_state.json",
    ]
    # Runs that compare.py adds to a folder of kept ones are cut where they are.
    assert keep(source, source) == names
    assert (source / "runs" / run.name / "trainer_state.json").read_text() == (
        tmp_path / "kept" / "runs" / run.name / "trainer_state.json"
    ).read_text()
    without = tmp_path / "without"
    (without / "runs").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no comparison"):
        keep(without, tmp_path / "kept")
    for name in names:
        for file in ("run.json", "trainer_state.json"):
            kept = tmp_path / "kept" / "runs" / name / file
            assert kept.read_text() == (EXPERIMENTS / "vision" / "runs" / name / file).read_text()
