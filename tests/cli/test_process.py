"""The command as a process, on checkpoints that models of Transformers saved: what goes where, and how it ends."""

import json
import os
import signal
import subprocess
import sys

import pytest
from architectures import BY_NAME
from hub_server import hub

from hf_symqk import QKScores, score_model
from hf_symqk.cli import main


__all__ = ["hub"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two checkpoints, and models of three architectures."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("bert", "llama", "t5"):
        BY_NAME[name].build().save_pretrained(root / name)
    for step in (10, 2):
        BY_NAME["bert"].build(seed=step).save_pretrained(root / "run" / f"checkpoint-{step}")
    return root


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    """Runs `python -m hf_symqk` with pipes for stdout and stderr."""
    return subprocess.run(
        [sys.executable, "-m", "hf_symqk", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", **variables},
    )


def said(process: subprocess.CompletedProcess) -> list[str]:
    """Lines that the command wrote to stderr; libraries may write others when they are imported."""
    return [line for line in process.stderr.splitlines() if line.startswith("symqk: ")]


def test_failure_beside_a_result(folder):
    """Status 1, one line on stderr, and stdout holds nothing but a JSON document of what could be scored."""
    process = run("scores", folder / "bert", folder / "nowhere", "--json")
    assert process.returncode == 1
    (scores,) = json.loads(process.stdout)
    assert len(scores["layers"]) == 3
    assert [line.startswith(f"symqk: {folder / 'nowhere'}: ") for line in said(process)] == [True]
    assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_piped_output(folder):
    """No colours, boxes, trailing blanks, wrapping or progress in a pipe, however narrow the terminal."""
    process = run("scores", folder / "llama", COLUMNS="20")
    assert process.returncode == 0
    assert said(process) == []
    assert "\x1b" not in process.stdout + process.stderr
    table = process.stdout.split("\n\n")[0].splitlines()
    assert len(table) == 1 + 3
    assert len({len(line) for line in table}) == 1
    assert not any(line != line.rstrip() for line in process.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--version"], 0),
        (["scores", "--help"], 0),
        (["architectures"], 0),
        ([], 2),
        (["scores"], 2),
        (["scores", "x", "--layers", "x"], 2),
        (["layouts", "nowhere"], 1),
    ],
)
def test_statuses(arguments, status, tmp_path):
    """What the shell sees; stdout is empty unless all went well, and no traceback is shown."""
    process = run(*arguments)
    assert process.returncode == status
    assert bool(process.stdout) == (status == 0)
    assert "Traceback" not in process.stderr


def test_scores_are_those_of_the_live_model(folder, capsys):
    """The command's JSON is what scoring the model gives."""
    assert main(["scores", str(folder / "t5"), "--json", "--heads"]) == 0
    scores = QKScores.from_dict(json.loads(capsys.readouterr().out))
    assert scores == score_model(BY_NAME["t5"].build())


def test_several_models_and_a_run(folder, capsys):
    """Rows of models know kind and parameters; a run folder is a history by step."""
    assert main(["scores", *(str(folder / name) for name in ("bert", "llama", "t5"))]) == 0
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == ["encoder", "decoder", "encoder-decoder"]
    assert main(["scores", str(folder / "run")]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["step", "2", "10"]


def test_null_band_is_shown(folder, capsys):
    """Checkpoints come with their null bands."""
    assert main(["scores", str(folder / "bert")]) == 0
    heading, first = capsys.readouterr().out.splitlines()[:2]
    assert heading.count("null 95 %") == 2
    assert first.count("…") == 2


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_interrupt_ends_the_waiting_too(shards, hub, tmp_path):
    """Ctrl-C while the Hub is asked again and again: threads that wait to try again do not hold the command."""
    BY_NAME["bert"].build().save_pretrained(tmp_path / "model", max_shard_size="20KB" if shards else "50GB")
    hub.add_repo("org/model", tmp_path / "model")
    hub.add_fault("storage/", status=503, headers={"Retry-After": "600"}, times=10**6)
    command = [sys.executable, "-m", "hf_symqk", "scores", "org/model"]
    process = subprocess.Popen(command, env=hub.environment(tmp_path / "cache"), stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "Trying again" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)  # a tenth of the wait that the server asked for
    assert process.returncode == 130
    assert "Traceback" not in rest
