"""What a recipe does around training must not end a run that is otherwise well."""

import logging
from pathlib import Path

import accelerate
import pytest
import reporting
import running
import torch
from arguments import RecipeError
from resuming import checkpoint_to_resume, newest_checkpoint
from transformers import TrainingArguments

import hf_symqk


def test_scores_that_cannot_be_had_end_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A weight that cannot be read costs the table of scores, and is said."""

    def fail(model: object) -> None:
        raise ValueError("gains of a kind that is not known")

    monkeypatch.setattr(hf_symqk, "score_model", fail)
    with caplog.at_level(logging.WARNING):
        assert running._scores(None) is None
    assert "gains of a kind" in caplog.text


def test_a_card_that_cannot_be_written_ends_no_run(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    """The run is over: neither a picture nor a text makes a failure of it, and the model is still pushed."""
    (tmp_path / "qk_scores.csv").write_text("no history\n")
    with caplog.at_level(logging.WARNING):
        reporting.write_card(tmp_path)
    assert "no figure" in caplog.text
    assert "no model card" in caplog.text


def test_accelerate_searches_for_a_package_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer step asks each time; the answer stays what it is, however many runs a process makes."""
    searches = []

    def search() -> bool:
        searches.append(1)
        return False

    monkeypatch.setattr(accelerate.optimizer, "is_lomo_available", search)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD([parameter], lr=0.5))
    for _ in range(2):
        running._remember_lookup()
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert parameter.tolist() == [0, 0]
    assert len(searches) == 1


WHOLE = ("trainer_state.json", "rng_state.pth", "optimizer.pt", "model.safetensors")


def checkpoint(folder: Path, files: tuple[str, ...] = WHOLE, content: str = "{}") -> str:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text(content)
    return str(folder)


def arguments(folder: Path, given: str | None, **more: bool) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), resume_from_checkpoint=given, use_cpu=True, **more)


def test_the_newest_whole_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """`Trainer` takes the one of the highest number, also where an interrupt left it without half of its files; 100
    is more than 20, and a folder of another name is none."""
    assert newest_checkpoint(tmp_path) is None
    checkpoint(tmp_path / "checkpoint-20")
    whole = checkpoint(tmp_path / "checkpoint-100")
    checkpoint(tmp_path / "checkpoint-120", WHOLE[1:])
    checkpoint(tmp_path / "checkpoint-140", content='{"log_history": [')
    checkpoint(tmp_path / "checkpoint-best")
    assert str(newest_checkpoint(tmp_path)) == whole
    assert checkpoint_to_resume(arguments(tmp_path, "True", do_train=True)) == whole


@pytest.mark.parametrize("given", [None, "false"])
def test_no_checkpoint_is_asked_for(tmp_path: Path, given: str | None) -> None:
    checkpoint(tmp_path / "checkpoint-20")
    assert checkpoint_to_resume(arguments(tmp_path, given)) is None


def test_checkpoints_that_training_cannot_go_on_from(tmp_path: Path) -> None:
    """Each is named with what it lacks. One without the optimizer's state would train on as another run does; to be
    evaluated, it serves."""
    model_only = checkpoint(tmp_path / "checkpoint-20", (WHOLE[0], WHOLE[3]))
    unfinished = checkpoint(tmp_path / "checkpoint-30", WHOLE[1:])
    wrong = {
        "true": "holds no finished checkpoint",
        str(tmp_path / "nowhere"): "there is no such folder",
        model_only: "without the state of its training",
        unfinished: r"no whole trainer_state\.json",
    }
    for given, message in wrong.items():
        with pytest.raises(RecipeError, match=message):
            checkpoint_to_resume(arguments(tmp_path, given, do_train=True))
    assert checkpoint_to_resume(arguments(tmp_path, model_only, do_eval=True)) == model_only
