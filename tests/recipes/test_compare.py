"""`compare.py`: which runs it makes, what it does when one fails, and how it goes on. Mostly on a recipe that writes
the record of a run without training."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import compare
import jobs
import mlm
import pytest
from arguments import RecipeError
from compare import ComparisonArguments, main, plan
from filelock import FileLock
from jobs import available_cores, launcher_words, run_record

from hf_symqk.comparison import compare_runs


RECIPES = Path(compare.__file__).parent

# The loss falls to a value that depends on arm, seed and rate alone. `--hang ARM` lets the runs of an arm wait.
FAKE = """
import json, os, pathlib, sys, time

FAILS = None
words = sys.argv[1:]
words = words[1:] if words[0].endswith(".yaml") else words
given = dict(zip((word[2:] for word in words[::2]), words[1::2]))
folder = pathlib.Path(given["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as file:
    start = {"words": sys.argv[1:], "omp": os.environ.get("OMP_NUM_THREADS"), "time": time.time()}
    file.write(json.dumps(start) + "\\n")
arm, seed, rate = given["qk_init"], int(given["seed"]), float(given.get("learning_rate", 1e-3))
record = {
    "recipe": "fake", "command": words, "qk_init": None if arm == "none" else {"scheme": arm}, "seed": seed,
    "arguments": {name: value for name, value in given.items() if name in ("block_size", "output_dir")},
    "learning_rate": rate, "max_steps": 4, "num_processes": 1, "data": {}, "versions": {}, "model": {},
    "status": "running", "metrics": {"eval_unigram_entropy": 5.0},
    "hashes": {"weights": f"w{seed}", "v": f"v{seed}", "qk": arm, "batches": f"b{seed}", "steps": 4},
}
(folder / "run.json").write_text(json.dumps(record))
if arm == FAILS:
    raise SystemExit("error: something to be mended")
while arm == given.get("hang"):
    time.sleep(0.1)
time.sleep(float(given.get("seconds", 0)))
end = 3.0 + seed / 10 - (0.2 if arm == "symmetric" else 0) - 100 * abs(rate - 2e-3)
log = [{"step": step, "loss": end + 4 - step, "eval_loss": end + 4 - step} for step in (1, 2, 3, 4)]
(folder / "trainer_state.json").write_text(json.dumps({"log_history": log, "global_step": 4, "max_steps": 4}))
(folder / "run.json").write_text(json.dumps(record | {"status": "finished"}))
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))
    return path


@pytest.fixture
def run_and_draw(recipe, tmp_path):
    """Runs the comparison in this process; the runs are processes of their own."""

    def start(*words):
        return main(["--recipe", str(recipe), "--launcher", "python", "--output_dir", str(tmp_path / "out"), *words])

    return start


@pytest.fixture
def run(run_and_draw, monkeypatch):
    """The same without the figure, which takes longer than all of the rest."""
    write = compare.write_comparison
    monkeypatch.setattr(compare, "write_comparison", lambda found, folder, figure: write(found, folder, figure=False))
    return run_and_draw


def starts(folder):
    """How often, and with what, the runs were started."""
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("out/runs/*/starts"))
    }


def test_pairs_and_their_comparison(run_and_draw, tmp_path, capsys):
    """Each arm with each seed, pairs first; recipe arguments are passed on; tables, figure and JSON are written."""
    outcomes = run_and_draw("--seeds", "0", "1", "--block_size", "32")
    assert [outcome.job.name for outcome in outcomes] == [
        "none--seed0",
        "symmetric--seed0",
        "none--seed1",
        "symmetric--seed1",
    ]
    assert all(outcome.finished for outcome in outcomes)
    (start,) = starts(tmp_path)["symmetric--seed1"]
    folder = tmp_path / "out" / "runs" / "symmetric--seed1"
    assert start["words"] == [
        *("--block_size", "32", "--qk_init", "symmetric", "--seed", "1", "--output_dir", str(folder))
    ]
    document = json.loads((tmp_path / "out" / "comparison" / "comparison.json").read_text())
    assert document["contrasts"][0]["held_out_difference"]["mean"] == pytest.approx(-0.2)
    assert (tmp_path / "out" / "comparison" / "comparison.png").stat().st_size > 1000
    assert "Differences, treated minus baseline" in capsys.readouterr().out


def test_finished_runs_are_not_repeated_and_seeds_can_be_added(run, tmp_path, capsys):
    """The same command does nothing but compare; other seeds join those that are there."""
    run("--seeds", "0")
    assert run("--seeds", "0") == []
    assert "finished already: none--seed0, symmetric--seed0" in capsys.readouterr().out
    run("--seeds", "1", "2")
    assert {name: len(times) for name, times in starts(tmp_path).items()} == {
        f"{arm}--seed{seed}": 1 for arm in ("none", "symmetric") for seed in (0, 1, 2)
    }
    document = json.loads((tmp_path / "out" / "comparison" / "comparison.json").read_text())
    assert document["contrasts"][0]["seeds"] == [0, 1, 2]


def test_failed_run_does_not_lose_the_others(run, recipe, tmp_path, capsys):
    """It is reported with the end of its log, left out of the comparison, and made again by the same command."""
    arms = ("--qk_init", "none", "symmetric", "independent", "--seeds", "0", "1")
    whole = recipe.read_text()
    recipe.write_text(whole.replace("FAILS = None", 'FAILS = "independent"'))
    outcomes = run(*arms)
    assert [outcome.job.name for outcome in outcomes if not outcome.finished] == [
        "independent--seed0",
        "independent--seed1",
    ]
    out = capsys.readouterr().out
    assert "independent--seed0: failed after" in out
    assert "exit status 1\n    error: something to be mended" in out
    assert "2 of 6 runs failed" in out
    assert "left out: " in out
    recipe.write_text(whole)
    assert [outcome.finished for outcome in run(*arms)] == [True, True]
    assert {name: len(times) for name, times in starts(tmp_path).items()}["none--seed0"] == 1


def test_recipe_that_ends_well_without_a_finished_run(run, recipe):
    """An exit status of 0 is not enough: what counts is the record."""
    recipe.write_text(recipe.read_text().replace('"status": "finished"', '"status": "running"'))
    with pytest.raises(RecipeError, match=r"Failed: none--seed0, symmetric--seed0"):
        run("--seeds", "0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block_size", "64"], r"block_size \('32' then, '64' now\)"),
        ([], r"block_size \('32' then, not given now\)"),
        (["--block_size", "32", "--fp16"], r"fp16 \(not given then, '' now\)"),
    ],
)
def test_runs_of_other_arguments_are_refused(run, tmp_path, words, message):
    """All runs of a folder enter the comparison: new ones with other arguments would be made for nothing."""
    run("--seeds", "0", "--block_size", "32")
    with pytest.raises(RecipeError, match=message):
        run("--seeds", "0", "1", *words)
    assert len(starts(tmp_path)) == 2


def test_file_of_arguments(run, tmp_path):
    """It goes to the recipe as its first word; what it says counts, and what the command says of arms and seeds
    overrules it."""
    path = tmp_path / "run.yaml"
    path.write_text("block_size: 32\nqk_init: none\nseed: 7\noutput_dir: elsewhere\n")
    run(str(path), "--seeds", "0", "--qk_init", "none", "symmetric")
    assert starts(tmp_path)["none--seed0"][0]["words"][0] == str(path)
    path.write_text("block_size: 64\n")
    with pytest.raises(RecipeError, match=r"block_size \(32 then, 64 now\)"):
        run(str(path), "--seeds", "0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "qk_init: {scheme: symmetric, layers: [0]}",
            r"""say --qk_init, as in none '\{"scheme": "symmetric", "layers""",
        ),
        ("qk_init: none", "say --qk_init, as in none …"),
        ("seed: 7", "say --seeds, as in 7 …"),
        ("resume_from_checkpoint: out/other", "leave it out"),
    ],
)
def test_file_of_arguments_that_says_what_is_compared(run, tmp_path, text, message):
    """Not overruled in silence: the runs would be others than the file describes."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        run(str(path))
    assert not starts(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps: 400", ["--max_steps", "400"]),
        ("weight_decay: 1.0e-3", ["--weight_decay", "1e-3"]),
        ("bf16: true", ["--bf16"]),
        ("bf16: true", ["--bf16", "True"]),
        ("lr_scheduler_type: linear", ["--lr_scheduler_type=linear"]),
    ],
)
def test_words_that_say_what_a_file_said(run, tmp_path, text, words):
    """The same value is the same, whether YAML read it or a command line did; another one is another one."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    run(str(path), "--seeds", "0")
    path.write_text("")
    assert run(str(path), "--seeds", "0", *words) == []
    with pytest.raises(RecipeError, match="not given now"):
        run(str(path), "--seeds", "0")


def test_learning_rates(run, tmp_path):
    """Each arm at each rate, in folders that say so; the comparison knows the best."""
    run("--seeds", "0", "--learning_rates", "1e-3", "2e-3")
    assert list(starts(tmp_path)) == [
        f"{arm}--lr{rate}--seed0" for arm in ("none", "symmetric") for rate in ("0.001", "0.002")
    ]
    document = json.loads((tmp_path / "out" / "comparison" / "comparison.json").read_text())
    assert {one["setting"] for one in document["contrasts"]} == {"own best rates", "equal rates"}


def test_a_rate_that_is_there_under_another_name(recipe, tmp_path):
    """Runs at the recipe's own rate, and runs at the same rate by --learning_rates, are the same runs: made twice,
    they could not be compared. The record of each says what it was."""
    runs = tmp_path / "runs"

    def known(name, rate, arm="none", status="finished"):
        record = {"status": status, "learning_rate": rate, "seed": 0}
        folder = runs / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({**record, "qk_init": None if arm == "none" else {"scheme": arm}}))
        (folder / "compare.json").write_text(json.dumps({"recipe": "mlm.py", "arguments": {}}))

    known("none--seed0", 2e-3)
    known("symmetric--seed0", 2e-3, "symmetric", status="failed")
    known("none--lr0.001--seed0", 1e-3)
    own = {"seeds": [0], "output_dir": str(tmp_path), "launcher": "python"}
    planned, finished = plan(ComparisonArguments(learning_rates=[1e-3, 2e-3, 4e-3], **own), [])
    assert finished == ["none--lr0.001--seed0", "none--seed0"]
    assert [job.name for job in planned] == [
        *("symmetric--lr0.001--seed0", "symmetric--seed0", "none--lr0.004--seed0", "symmetric--lr0.004--seed0"),
    ]
    # Without --learning_rates the rate is the recipe's default; with a file's or a flag's, that one.
    assert plan(ComparisonArguments(**own), [])[1] == ["none--seed0"]
    (runs / "none--seed0").rename(runs / "none--lr0.002--seed0")
    assert plan(ComparisonArguments(**own), [])[1] == ["none--lr0.002--seed0"]
    (runs / "symmetric--seed0" / "run.json").unlink()
    assert plan(ComparisonArguments(**own), ["--learning_rate", "1e-3"])[1] == ["none--lr0.001--seed0"]


def test_a_rate_that_is_not_the_one_of_then(recipe, tmp_path):
    """A default that has changed, or a name that is not what the run was."""
    folder = tmp_path / "runs" / "none--seed0"
    folder.mkdir(parents=True)
    record = {"status": "finished", "learning_rate": 1e-3, "seed": 0, "qk_init": None}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "compare.json").write_text(json.dumps({"recipe": "mlm.py", "arguments": {}}))
    with pytest.raises(RecipeError, match=r"another learning rate \(0\.001 then, 0\.002 now\)"):
        plan(ComparisonArguments(seeds=[0], output_dir=str(tmp_path), launcher="python"), [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_step", "4"], r"mlm\.py has no argument --max_step 4"),
        (["--learning_rate", "1e-3", "--no_such_flag"], "has no argument --no_such_flag"),
        (["file.yaml"], "unknown keys: max_step"),
        (["rate.yaml"], "learning_rate='fast' is no number"),
    ],
)
def test_arguments_that_the_recipe_does_not_know(tmp_path, monkeypatch, words, message):
    """Told once and before any run, not by every run at its start."""
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text("max_step: 4")
    Path("rate.yaml").write_text("learning_rate: fast")
    with pytest.raises(RecipeError, match=message):
        main(["--launcher", "python", *words])
    assert not list(tmp_path.glob("out/compare/runs/*"))


def test_one_initialisation(run, tmp_path):
    """Nothing to compare, which is told before the run; joined to another one it is welcome, and `none` stays the
    baseline."""
    with pytest.raises(RecipeError, match="none is the only initialisation"):
        run("--seeds", "0", "--qk_init", "none")
    assert not starts(tmp_path)
    run("--seeds", "0")
    run("--seeds", "0", "--qk_init", "independent")
    document = json.loads((tmp_path / "out" / "comparison" / "comparison.json").read_text())
    assert {one["treated"] for one in document["contrasts"]} == {"symmetric", "independent"}
    assert {one["baseline"] for one in document["contrasts"]} == {"none"}


def test_a_run_that_is_still_at_work(recipe, tmp_path):
    """Where compare.py was killed its runs live on: the same command must not write into their folders too."""
    folder = tmp_path / "out" / "runs" / "none--seed0"
    arguments = ComparisonArguments(str(recipe), seeds=[0], output_dir=str(tmp_path / "out"), launcher="python")
    end = tmp_path / "end"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(end)!r}).exists():\n    time.sleep(0.05)"
    folder.mkdir(parents=True)
    process = jobs._start(jobs.Job("none--seed0", folder, (sys.executable, "-c", wait)), 1)
    try:
        assert jobs.is_under_way(folder)  # though this process holds nothing of it
        with pytest.raises(RecipeError, match="still at work"):
            plan(arguments, [])
    finally:
        end.touch()
        process.wait(timeout=60)
    assert not jobs.is_under_way(folder)
    assert len(plan(arguments, [])[0]) == 2


def test_kept_experiments_can_be_added_to(monkeypatch):
    """The command that made them finds all their runs, and makes the seed that is added only."""
    monkeypatch.chdir(RECIPES.parent)
    arguments = ComparisonArguments(
        str(RECIPES / "mlm.py"),
        ["none", "symmetric", '{"scheme": "symmetric", "norm": "match"}', '{"symmetry": -1}'],
        [0, 8],
        output_dir=str(RECIPES / "experiments" / "encoder"),
        launcher="python",
    )
    assert len(plan(arguments, ["recipes/experiments/encoder.yaml"])[1]) == 8
    arguments.learning_rates = [4e-3]
    assert plan(arguments, ["recipes/experiments/encoder.yaml"])[0] == []


def test_json_initialisations_name_their_folders(recipe, tmp_path):
    """An object as the recipes take it; the word that reaches the recipe is the user's own."""
    word = '{"scheme": "symmetric", "distribution": "kaiming_uniform"}'
    arguments = ComparisonArguments(str(recipe), ["none", word], [3], output_dir=str(tmp_path / "out"))
    planned, _ = plan(arguments, [])
    assert planned[1].folder.name == "symmetric-kaiming_uniform--seed3"
    assert planned[1].command[planned[1].command.index("--qk_init") + 1] == word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "nowhere.py"], "no such script"),
        (["--qk_init", "none", "symetric"], "qk_init='symetric'"),
        (["--qk_init", "none", '{"scheme": '], "is not a JSON object"),
        (["--qk_init", "symmetric", '{"scheme": "symmetric"}'], "are the same initialisation"),
        (["--seeds", "1", "1"], "seeds names a value twice"),
        (["--jobs", "0"], "jobs=0"),
        (["--baseline", "plain"], "none of the arms: none, symmetric"),
        (["--launcher", "no-such-launcher"], "no program 'no-such-launcher'"),
        (["--launcher", ""], "launcher is empty"),
        (["--launcher", "'"], "cannot be read"),
        (["--seed", "3"], "give --seeds"),
        (["--learning_rates", "1", "--learning_rate", "2"], "both given"),
        (["--resume_from_checkpoint", "true"], "leave it out"),
        (["--seeds", "-1"], "-1 is no seed"),
        (["--seeds", "4294967296"], "4294967296 is no seed"),
        (["--learning_rates", "1e-3", "-1"], "-1 is no learning rate"),
        (["--learning_rates", "nan"], "nan is no learning rate"),
        (["--recipe", str(RECIPES / "dynamics.py")], "makes no runs"),
        (["word"], "belongs to no argument"),
        (["nowhere.yaml"], "does not exist"),
    ],
)
def test_arguments_that_cannot_be_used(run, tmp_path, words, message):
    """Before any run is started."""
    with pytest.raises(RecipeError, match=message):
        run(*words)
    assert not starts(tmp_path)


def test_folder_of_somebody_else(run, tmp_path):
    """A run that was made by hand is not taken for one of these."""
    folder = tmp_path / "out" / "runs" / "none--seed0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "finished"}')
    with pytest.raises(RecipeError, match=r"compare\.py did not start"):
        run()
    (folder / "run.json").write_text("{")
    with pytest.raises(RecipeError, match="no record of a run"):
        run()


def test_two_at_work_in_one_folder(run, tmp_path):
    """The second is refused: both would make the same runs."""
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".compare.lock"), pytest.raises(RecipeError, match="another compare"):
        run()


@pytest.mark.parametrize("chosen", [None, "3"])
def test_runs_at_once_share_the_cores(run, tmp_path, monkeypatch, chosen):
    """Two at a time overlap, each with its part of the cores, unless the user said how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    run("--seeds", "0", "--jobs", "2", "--seconds", "1")
    first, second = (times[0] for times in starts(tmp_path).values())
    assert first["omp"] == second["omp"] == (chosen or str(max(1, available_cores() // 2)))
    ends = [path.stat().st_mtime for path in (tmp_path / "out" / "runs").glob("*/trainer_state.json")]
    assert max(first["time"], second["time"]) < min(ends)


def test_a_checkpoint_is_gone_on_from(recipe, tmp_path):
    """A run that was cut short and left one does not begin anew; one that is not whole is passed over."""
    folder = tmp_path / "out" / "runs" / "none--seed0"
    for step, files in ((2, ("trainer_state.json", "rng_state.pth")), (4, ("model.safetensors",))):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        for name in files:
            (folder / f"checkpoint-{step}" / name).write_text("{}")
    arguments = ComparisonArguments(str(recipe), seeds=[0], output_dir=str(tmp_path / "out"))
    (first, second), _ = plan(arguments, ["--save_steps", "2"])
    assert first.command[-2:] == ("--resume_from_checkpoint", str(folder / "checkpoint-2"))
    assert "--resume_from_checkpoint" not in second.command


def test_launcher(monkeypatch):
    """Options stay with it; the program is that of this Python's environment."""
    words = launcher_words("python -X 'dev mode'")
    assert words == (str(Path(sys.executable).parent / "python"), "-X", "dev mode")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_ends_the_runs(recipe, tmp_path, number, status):
    """No run is left behind that nobody waits for; the finished ones stay finished."""
    command = [sys.executable, RECIPES / "compare.py", "--recipe", recipe, "--launcher", "python", "--seeds", "0"]
    out = tmp_path / "out"
    process = subprocess.Popen([*command, "--output_dir", out, "--hang", "symmetric"], stdout=subprocess.PIPE)
    record = out / "runs" / "symmetric--seed0" / "run.json"
    while not record.exists() or not record.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == status
    assert run_record(out / "runs" / "none--seed0")["status"] == "finished"
    assert run_record(record.parent)["status"] == "running"
    hanging = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(record.parent).encode() in _read(path) and int(path.parent.name) != os.getpid()
    ]
    assert not hanging


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_pairs_of_the_real_recipe(tmp_path, capsys):
    """mlm.py: pairs pass the check of their hashes, also those whose V is redrawn; a second command adds a seed and
    repeats nothing; a few steps teach nothing, and the report says so."""
    overrides = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
    small = ["--max_steps", "6", "--logging_steps", "1", "--eval_steps", "3", "--per_device_train_batch_size", "4"]
    words = ["--output_dir", str(tmp_path), "--launcher", "python", "--config_overrides", overrides, *small]
    symmetric, independent = (
        json.dumps({"scheme": scheme, "distribution": "kaiming_uniform"}) for scheme in ("symmetric", "independent")
    )
    first = main(["--qk_init", "none", symmetric, independent, "--seeds", "0", *words])
    assert [outcome.problem for outcome in first] == [""] * 3
    second = main(["--qk_init", "none", symmetric, "--seeds", "0", "1", *words])
    assert [outcome.job.name for outcome in second] == ["none--seed1", "symmetric-kaiming_uniform--seed1"]
    document = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert not any("Pairing" in line for line in document["notes"])
    found = {(one["treated"], one["baseline"]): one for one in document["contrasts"]}
    assert found["symmetric-kaiming_uniform", "none"]["seeds"] == [0, 1]
    assert found["symmetric-kaiming_uniform", "independent-kaiming_uniform"]["seeds"] == [0]
    assert all(one["verdict"].startswith("inconclusive") for one in found.values())
    assert "finished already: none--seed0, symmetric-kaiming_uniform--seed0" in capsys.readouterr().out


def test_runs_resumed_at_different_steps_are_a_pair(text_files, tmp_path):
    """As an interrupt leaves them, which meets each run elsewhere: they evaluate where the others do, and their
    losses are those of runs that were never interrupted."""
    small = ["--config_overrides", "hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=2"]
    small += ["--train_file", text_files["txt"], "--block_size", "16", "--vocab_size", "300", "--use_cpu"]
    small += ["--max_steps", "6", "--eval_steps", "6", "--logging_steps", "1", "--save_strategy", "steps"]
    small += ["--save_steps", "2", "--per_device_train_batch_size", "4", "--seed", "0"]
    for arm, step in (("none", 2), ("symmetric", 4)):
        words = [*small, "--qk_init", arm]
        mlm.main([*words, "--output_dir", str(tmp_path / "whole" / arm)])
        checkpoint = str(tmp_path / "whole" / arm / f"checkpoint-{step}")
        resumed = tmp_path / "resumed" / arm
        mlm.main([*words, "--output_dir", str(resumed), "--resume_from_checkpoint", checkpoint])
    whole, again = (compare_runs([tmp_path / name]) for name in ("whole", "resumed"))
    for one, other in zip(whole.runs, again.runs, strict=True):
        assert list(other.curves["eval_loss"].index) == [0, 6]
        assert other.curves["loss"].to_dict() == pytest.approx(one.curves["loss"].to_dict(), rel=1e-6)
