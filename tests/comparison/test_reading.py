"""Which runs are found in folders and files, and what is said of those that cannot be used."""

import json
import re

import pytest

from hf_symqk.comparison import ComparisonError, compare_runs
from hf_symqk.comparison.curve_files import read_curves
from hf_symqk.comparison.runs import arm_name, independent_twin, read_folders

from .making import STEPS, falling, record, state, write_run


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("symmetric-seed0", ("symmetric", 0, None)),
        ("seed_12/symmetric-kaiming_uniform--lr1e-3--seed3", ("symmetric-kaiming_uniform", 3, 1e-3)),
        ("none_lr0.002_seed1", ("none", 1, 2e-3)),
        ("none/seed4", ("none", 4, None)),
        ("plain", ("plain", None, None)),
    ],
)
def test_arm_seed_and_rate_of_a_folder(tmp_path, name, identity):
    """Runs of any Trainer are told apart by what their folders are called."""
    folder = tmp_path / name
    write_run(folder, state(falling(3.0)))
    ((run,), left_out, _) = read_folders([folder])
    assert (run.arm, run.seed, run.learning_rate) == identity
    assert left_out == []


def test_initialisations_have_names_of_their_own():
    """Signs, fractions, levels and options tell arms apart; a name fits into a folder's, however many its layers."""
    profile = [round(-0.9 + number / 29, 6) for number in range(48)]
    inits = [
        {"scheme": "symmetric"},
        *({"scheme": "symmetric", "symmetry": value} for value in (0.5, -0.5, 0.05, 5e-07, -1.0, 0.0)),
        *(
            {"scheme": "symmetric", "symmetry": values}
            for values in ([0.5, -0.5], [-0.5, 0.5], profile, profile[::-1])
        ),
        {"scheme": "symmetric", "symmetry": {"encoder": 0.5, "decoder": [0.5, -0.25]}},
        {"scheme": "symmetric", "symmetry": 0.5, "target": "layer"},
        {"scheme": "symmetric", "symmetry": 0.5, "target": "layer", "norm": "match"},
        {"scheme": "symmetric", "norm": "match"},
        {"scheme": "symmetric", "layers": [0, 1]},
        {"scheme": "mimetic"},
        {"scheme": "mimetic", "options": {"alpha": 0.5}},
        {"scheme": "mimetic", "options": {"beta": 0.5}},
    ]
    names = [arm_name(init) for init in inits]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w.-]{1,100}", name) for name in names)
    assert names[1:4] == ["symmetric-symmetry_0.5", "symmetric-symmetry_-0.5", "symmetric-symmetry_0.05"]
    assert "symmetric-norm_match-symmetry_0.5-target_layer" in names
    assert "mimetic-options_alpha_0.5" in names


@pytest.mark.parametrize(
    ("arm", "twin"),
    [
        ("symmetric", None),
        ("none", None),
        ("symmetric-kaiming_uniform", "independent-kaiming_uniform"),
        ("symmetric-kaiming_uniform-layers_0_1", "independent-kaiming_uniform-layers_0_1"),
        ("symmetric-symmetry_-0.5", None),
        ("symmetric-kaiming_uniform-norm_match-symmetry_-0.5_1e-07-target_layer", "independent-kaiming_uniform"),
        ("mimetic-kaiming_uniform-options_alpha_0.5", "independent-kaiming_uniform"),
        ("independent-kaiming_uniform", None),
    ],
)
def test_the_independent_twin(arm, twin):
    """It has the same distribution and layers, and nothing that it cannot have."""
    assert independent_twin(arm) == twin


def test_pattern(tmp_path):
    """Other names are read by a pattern of the user's."""
    folder = write_run(tmp_path / "exp7_B_s3", state(falling(3.0)))
    ((run,), _, _) = read_folders([folder], r"exp\d+_(?P<arm>\w)_s(?P<seed>\d+)")
    assert (run.arm, run.seed) == ("B", 3)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", "no regular expression"), (r"seed(?P<seed>\d)", "it needs arm"), (r"(?P<arm>zzz)", "is not found in")],
)
def test_pattern_that_cannot_be_meant(tmp_path, pattern, message):
    """Said with the pattern, before anything is compared."""
    folder = write_run(tmp_path / "none-seed0", state(falling(3.0)))
    with pytest.raises(ComparisonError, match=message):
        read_folders([folder], pattern)


def test_record_wins_over_the_name(tmp_path):
    """What a recipe wrote down is what was run, whatever the folder is called; its log is read in full."""
    said = record({"scheme": "symmetric", "layers": [0]}, seed=5)
    folder = write_run(tmp_path / "none-seed0", state(falling(3.0), {200: 3.5}, {10: 1.0}), said)
    ((run,), _, arms) = read_folders([folder])
    assert (run.arm, run.seed, run.learning_rate, run.entropy) == ("symmetric-layers_0", 5, 1e-3, 5.2)
    assert arms == ["symmetric-layers_0"]
    scores = {"qk/symmetry/median", "qk/directionality/median"}
    assert set(run.curves) == {"loss", "eval_loss", "learning_rate", *scores}
    assert run.curves["loss"].index.tolist() == list(STEPS)
    assert run.curves["loss"].iloc[-1] == 3.0


def test_evaluation_after_training_does_not_count(tmp_path):
    """It repeats that of the last step, or is of the best step's weights: a minimum, chosen on the held-out data."""
    logged = state(falling(3.0), {200: 3.5})
    logged["log_history"].append({"step": 200, "eval_loss": 3.25})
    ((run,), _, _) = read_folders([write_run(tmp_path / "none", logged)])
    assert run.curves["eval_loss"].to_dict() == {200: 3.5}


@pytest.mark.parametrize("entry", [{"step": None, "loss": 1.0}, "text", {"step": 3, "loss": "low"}])
def test_a_log_that_is_none_is_named(tmp_path, entry):
    logged = state(falling(3.0), {200: 3.5})
    logged["log_history"].append(entry)
    with pytest.raises(ComparisonError, match=r"none.*not what `Trainer` writes"):
        read_folders([write_run(tmp_path / "none", logged)])


def test_a_column_that_diverged_keeps_its_steps(tmp_path):
    """Else the losses before it diverged would be compared; an empty cell alone is a step that was not logged."""
    file = tmp_path / "curves.csv"
    file.write_text("step,small,small--symmetric\n1,4,4\n2,3,\n3,2.5,nan\n4,2,NaN\n")
    runs = {run.arm: run.curves["loss"] for run in read_curves(file)}
    assert list(runs["symmetric"].index) == [1, 3, 4]
    assert runs["symmetric"].isna().tolist() == [False, True, True]


def test_folder_of_runs_and_state_in_a_checkpoint(tmp_path):
    """One folder stands for the runs in it; where only checkpoints hold a state the last one is read, by number."""
    write_run(tmp_path / "runs" / "none-seed0", state(falling(3.0)))
    for step in (90, 200):
        write_run(
            tmp_path / "runs" / "symmetric-seed0" / f"checkpoint-{step}",
            state(falling(2.5), steps=[one for one in STEPS if one <= step]) | {"max_steps": 200},
        )
    (tmp_path / "runs" / "notes").mkdir()
    runs, left_out, _ = read_folders([tmp_path / "runs"])
    assert [run.arm for run in runs] == ["none", "symmetric"]
    assert left_out == []
    assert runs[1].curves["loss"].index[-1] == 200


@pytest.mark.parametrize("status", ["running", "failed"])
def test_unfinished_runs_are_left_out_by_name(tmp_path, status):
    """A run that is not over has no final loss; the others are compared."""
    for arm, init in (("none", None), ("symmetric", {"scheme": "symmetric"})):
        write_run(tmp_path / f"{arm}-0", state(falling(3.0)), record(init))
    (tmp_path / "none-1").mkdir()
    (tmp_path / "none-1" / "run.json").write_text(json.dumps(record(None, 1, status=status)))
    comparison = compare_runs([tmp_path])
    assert [contrast.seeds for contrast in comparison.contrasts] == [(0,)]
    (line,) = comparison.left_out
    assert "none-1" in line
    assert status in line


def test_run_of_a_trainer_that_was_stopped(tmp_path):
    """Without a record the state itself says that the run is not over; early stopping is an end."""
    unfinished = state(falling(3.0)) | {"max_steps": 500}
    write_run(tmp_path / "none-seed0", unfinished)
    stopped = {"TrainerControl": {"args": {"should_training_stop": True}}}
    write_run(tmp_path / "none-seed1", unfinished | {"stateful_callbacks": stopped})
    runs, left_out, _ = read_folders([tmp_path])
    assert [run.seed for run in runs] == [1]
    assert left_out == [f"{tmp_path / 'none-seed0'}: stopped at step 200 of 500"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "holds no run"),
        ("file.txt", "neither a folder"),
        ("nowhere", "there is no"),
        ("broken", "cannot be read"),
        ("gone", "finished run without trainer_state"),
    ],
)
def test_what_holds_no_run(tmp_path, name, message):
    """Each with the path and what was looked for."""
    for folder in ("empty", "broken", "gone"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "broken" / "trainer_state.json").write_text("{")
    (tmp_path / "gone" / "run.json").write_text(json.dumps(record()))
    with pytest.raises(ComparisonError, match=message) as caught:
        read_folders([tmp_path / name])
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("small,small--symmetric", [("small", "none", None), ("small", "symmetric", None)]),
        ("a--b--none--seed1,a--b--symmetric--seed1", [("a--b", "none", 1), ("a--b", "symmetric", 1)]),
        ("none--seed0,symmetric--seed0", [("", "none", 0), ("", "symmetric", 0)]),
        ("small--seed2,small--symmetric--seed2", [("small", "none", 2), ("small", "symmetric", 2)]),
    ],
)
def test_columns_of_a_file(tmp_path, header, found):
    """The setting, the arm and the seed stand in the name of the column."""
    path = tmp_path / "curves.csv"
    path.write_text(f"step,{header}\n10,3,3\n20,2,1\n")
    assert [(run.group, run.arm, run.seed) for run in read_curves(path)] == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch,a,b\n1,2,3\n", "no column 'step'; its columns are epoch, a, b"),
        ("step,a\n1,2\n", "fewer than two columns"),
        ("step,a,a,b\n1,2,3,4\n", "several columns 'a': name each its own way"),
        ("step,a,b,step\n1,2,3,4\n", "several columns 'step'"),
        ("", "cannot be read: No columns"),
        ("step,a,b\n1,2,3\n2,1,1\n", "no 'none' beside another arm"),
        ("step,a,a--symmetric\n1,x,3\n", "a has values that are no numbers"),
        ("step,a,a--symmetric\n2,1,3\n1,1,3\n", "do not increase"),
        ("step,a,a--symmetric\n,1,3\n", "a step is missing"),
        ("step,a,a--symmetric\n1,,3\n2,,3\n", "is empty"),
        ("", "cannot be read"),
    ],
)
def test_file_that_cannot_be_meant(tmp_path, text, message):
    """One error each, with the file and the columns."""
    path = tmp_path / "curves.csv"
    path.write_text(text)
    with pytest.raises(ComparisonError, match=message) as caught:
        read_curves(path)
    assert str(path) in str(caught.value)
