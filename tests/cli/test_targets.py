"""Which checkpoints arguments mean: models to compare and steps of a run must not be taken for each other."""

import pytest
import typer

from hf_symqk.cli.options import parse_layers
from hf_symqk.cli.targets import find_targets


@pytest.fixture
def run(tmp_path):
    """A run folder of three checkpoints, beside what a Trainer leaves there too."""
    for step in (1000, 500, 20):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-best").mkdir()
    (tmp_path / "run" / "qk_scores.csv").touch()
    return tmp_path / "run"


def test_models_stay_in_order():
    """Several names are models to compare, in the order given, one revision for all."""
    targets = find_targets(["b", "a", "b/checkpoint-1"], revision="v1")
    assert targets.run is None
    assert [(target.name, target.revision, target.step) for target in targets.checkpoints] == [
        ("b", "v1", None),
        ("a", "v1", None),
        ("b/checkpoint-1", "v1", None),
    ]


def test_a_run_is_its_checkpoints_by_step(run):
    """A folder of checkpoints and the list that a shell makes of them mean the same; steps sort as numbers."""
    folder = find_targets([str(run)])
    listed = find_targets([f"{run}/checkpoint-{step}/" for step in (1000, 20, 500)])
    for targets in (folder, listed):
        assert targets.run == str(run)
        assert [target.step for target in targets.checkpoints] == [20, 500, 1000]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_a_model_is_a_model(run, file):
    """The model saved at the end of a run is not hidden by the checkpoints beside it."""
    (run / file).touch()
    targets = find_targets([str(run)])
    assert targets.run is None
    assert [target.name for target in targets.checkpoints] == [str(run)]


def test_checkpoints_of_two_runs_are_models(run, tmp_path):
    """Equal steps of different runs are compared, not mixed into one history; neither is one checkpoint a history."""
    other = tmp_path / "other" / "checkpoint-500"
    other.mkdir(parents=True)
    assert find_targets([str(run / "checkpoint-500"), str(other)]).run is None
    assert find_targets([str(other)]).run is None


@pytest.mark.parametrize(
    ("revisions", "steps"),
    [("step1000,step20", [20, 1000]), (" stage1-step300-tokens5B , main-7,", [7, 300]), ("checkpoint_12", [12])],
)
def test_revisions_are_steps(revisions, steps):
    """The step is the number after the word, or the only one; spaces and a comma too many do not matter."""
    targets = find_targets(["who/what"], revisions=revisions)
    assert targets.run == "who/what"
    assert [target.step for target in targets.checkpoints] == steps
    assert {target.model for target in targets.checkpoints} == {"who/what"}
    assert all(target.name == f"who/what@{target.revision}" for target in targets.checkpoints)


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (["a", "b"], {"revisions": "step1"}, "of one model, got 2"),
        (["a"], {"revisions": "step1", "revision": "main"}, "not both"),
        (["a"], {"revisions": "step1,main"}, "'main' does not say which step"),
        (["a"], {"revisions": "v1.2"}, "'v1.2' does not say which step"),
        (["a"], {"revisions": ","}, "names no revision"),
        (["a"], {"revisions": "step1-a,step1-b"}, "a@step1-a and a@step1-b are both of step 1"),
    ],
)
def test_revisions_that_cannot_be_meant(models, options, message):
    """Each is refused by name before anything is fetched."""
    with pytest.raises(typer.BadParameter, match=message):
        find_targets(models, **options)


def test_runs_that_cannot_be_meant(run):
    """A run among models, revisions of a folder, and a checkpoint given twice are refused."""
    with pytest.raises(typer.BadParameter, match=r"is a training run .* give one run, or the checkpoints"):
        find_targets([str(run), "a"])
    with pytest.raises(typer.BadParameter, match="is a local path"):
        find_targets([str(run)], revisions="step1")
    with pytest.raises(typer.BadParameter, match="both of step 20"):
        find_targets([f"{run}/checkpoint-20", f"{run}/checkpoint-20/"])


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (None, None),
        ("0,1, 5", [0, 1, 5]),
        ("0-2,4", [0, 1, 2, 4]),
        ("encoder:0,1;decoder:2-3;", {"encoder": [0, 1], "decoder": [2, 3]}),
    ],
)
def test_layers(text, choice):
    """Lists, ranges with both ends, and stacks."""
    assert parse_layers(text) == choice


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "-1", "3-1", "encoder:", "encoder:0;1", "encoder:0;encoder:1", "0:1:2x"]
)
def test_layers_that_cannot_be_read(text):
    """Nothing is dropped from a choice that is only half understood."""
    with pytest.raises(typer.BadParameter, match="cannot be read; write '0,1,2'"):
        parse_layers(text)
