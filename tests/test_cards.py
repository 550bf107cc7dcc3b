"""Model cards: metadata that huggingface_hub reads back, and nothing that the run did not say."""

import json
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, hub
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from hf_symqk.cards import CARD, RECORD, SCORES_FIGURE, SCORES_TABLE, write_model_card


__all__ = ["hub"]

FINISHED: dict[str, Any] = {
    "recipe": "mlm",
    "command": ["--qk_init", '{"scheme": "symmetric", "layers": [0]}', "--seed", "3"],
    "arguments": {"seed": 3},
    "qk_init": {"scheme": "symmetric", "layers": [0]},
    "seed": 3,
    "learning_rate": 0.002,
    "max_steps": 600,
    "num_processes": 2,
    "data": {"source": "text that Python carries", "train_sequences": 17839},
    "versions": {"torch": "2.13.0", "python": "3.11.2"},
    "model": {"class": "BertForMaskedLM", "model_type": "bert", "num_parameters": 739072},
    "status": "finished",
    "hashes": {"weights": "ab" * 32, "batches": "cd" * 32, "steps": 600},
    "metrics": {
        "train_runtime": 206.2,
        "eval_loss": 3.51,
        "eval_runtime": 1.98,
        "eval_samples_per_second": 395.2,
        "eval_predicted_tokens": 7312,
        "eval_unigram_entropy": 5.208,
    },
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / RECORD).write_text(json.dumps(FINISHED))
    table = "layer,symmetry_first,symmetry_last\n00,1.0,0.0964\n01,-0.0001,0.5\nmedian,1.0,nan\n"
    (folder / SCORES_TABLE).write_text(table)
    return folder


def change(folder: Path, **values: Any) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | values))


def test_metadata(run: Path) -> None:
    """What the card's metadata say, read back from the file by huggingface_hub."""
    write_model_card(run)
    data = ModelCard.load(run / CARD).data
    assert data["library_name"] == "transformers"
    assert data.pipeline_tag == "fill-mask"
    assert data.model_name == "my-run"
    assert data.tags == ["hf_symqk", "qk-init", "mlm"]
    assert data.license is None
    [result] = data.eval_results
    assert (result.metric_type, result.metric_value) == ("loss", 3.51)
    assert result.dataset_name == "text that Python carries"


def test_text(run: Path) -> None:
    """The command can be pasted into a shell; init, scores with three digits, hashes and versions are in the text."""
    text = write_model_card(run, comparison="| a table |").text
    assert 'accelerate launch recipes/mlm.py --qk_init \'{"scheme": "symmetric", "layers": [0]}\' --seed 3' in text
    assert '`{"scheme": "symmetric", "layers": [0]}`' in text
    assert "| 00 | 1.000 | 0.096 |" in text
    assert "| 01 | 0.000 | 0.500 |" in text, "what rounds to zero has no sign"
    assert "| median | 1.000 | nan |" in text
    assert "| held-out loss | 3.51 |" in text
    assert f"`{'ab' * 32}`" in text
    assert "| train sequences | 17,839 |" in text
    assert "torch 2.13.0" in text
    assert "## Comparison\n\n| a table |" in text
    assert SCORES_FIGURE not in text
    assert "has not finished" not in text
    (run / SCORES_FIGURE).write_bytes(b"")
    assert f"]({SCORES_FIGURE})" in write_model_card(run).text


def test_tables_are_markdown(run: Path) -> None:
    """Rows of a table follow its head without a blank line between them, or they would be shown as text."""
    lines = write_model_card(run).text.splitlines()
    for number, line in enumerate(lines):
        if set(line) == {"|", "-"}:
            assert lines[number - 1].startswith("|")
            assert lines[number + 1].startswith("|")


@pytest.mark.parametrize(
    ("arguments", "datasets", "base_model"),
    [
        ({}, None, None),
        ({"dataset_name": "wikimedia/wikipedia"}, "wikimedia/wikipedia", None),
        ({"dataset_name": "."}, None, None),  # a folder
        ({"model_name_or_path": "org/model"}, None, "org/model"),
        ({"model_name_or_path": "."}, None, None),
        ({"model_name_or_path": "out/encoder/runs/none--seed0"}, None, None),  # no more there
    ],
)
def test_only_names_of_the_hub_are_links(run: Path, arguments: dict, datasets: Any, base_model: Any) -> None:
    """The Hub refuses metadata whose datasets or base models are no repository names; local paths are none."""
    change(run, arguments=arguments)
    data = write_model_card(run).data
    assert (data.datasets, data.base_model) == (datasets, base_model)


@pytest.mark.parametrize(
    ("arguments", "data", "expected"),
    [
        ({}, {}, (None, "builtin", None)),
        ({"train_file": "a.txt"}, {}, (None, "local", None)),
        ({"train_dir": "images"}, {}, (None, "local", None)),
        ({"dataset_name": "."}, {}, (None, "local", None)),
        (
            {"dataset_name": "wikimedia/wikipedia", "dataset_config_name": "20231101.en"},
            {},
            ("wikimedia/wikipedia", "wikimedia/wikipedia", "20231101.en"),
        ),
        # A task's own data, and a file of the same task.
        (
            {"task_name": "sst2"},
            {"dataset": "nyu-mll/glue", "dataset_config": "sst2"},
            ("nyu-mll/glue", "nyu-mll/glue", "sst2"),
        ),
        ({"task_name": "sst2", "train_file": "a.csv"}, {}, (None, "local", None)),
    ],
)
def test_results_are_of_the_data_that_were_read(run: Path, arguments: dict, data: dict, expected: tuple) -> None:
    """Leaderboards file a result under its dataset: one of a local file must not stand under a name of the Hub."""
    change(run, arguments=arguments, data={"source": "somewhere", **data})
    card = write_model_card(run).data
    [result] = card.eval_results
    assert (card.datasets, result.dataset_type, result.dataset_config) == expected


def test_plain_and_unfinished_runs_say_so(run: Path) -> None:
    """A card must not claim an initialisation or an end that the run did not have."""
    (run / SCORES_TABLE).unlink()
    change(run, qk_init=None, status="running", metrics={})
    card = write_model_card(run)
    assert "the model's own" in card.text
    assert "has not finished" in card.text
    assert "was not evaluated" in card.text
    assert "Scores of W_qk" not in card.text
    assert "qk-init-none" in card.data.tags
    assert card.data.eval_results is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run.json"),
        ("{", "is not JSON"),
        ("[]", "lacks everything"),
        ('{"status": ""}', "recipe, model"),
    ],
)
def test_what_is_no_run(tmp_path: Path, content: str | None, message: str) -> None:
    """A folder that no recipe wrote is named in the error, and no card is left there."""
    if content is not None:
        (tmp_path / RECORD).write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        write_model_card(tmp_path)
    assert not (tmp_path / CARD).exists()


def test_own_template(run: Path, tmp_path: Path) -> None:
    """A group's own template gets the same values."""
    template = tmp_path / "template.md"
    template.write_text("---\n{{ card_data }}\n---\n{{ title }} by {{ command }}")
    assert write_model_card(run, template=template, model_name="org/name").text.startswith("org/name by accelerate")


def test_only_measures_of_the_model_are_results(run: Path) -> None:
    """How many examples there are and what the most frequent class reaches are facts about the data."""
    measured = {"eval_loss": 0.2, "eval_accuracy": 0.9, "eval_examples": 359, "eval_majority_accuracy": 0.1}
    change(run, metrics={**measured, "eval_variance": 1.0, "eval_runtime": 1.0})
    card = write_model_card(run)
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == {
        "loss": 0.2,
        "accuracy": 0.9,
    }
    assert card.data.metrics == ["accuracy"]


def test_model_index_survives_the_round_trip(run: Path) -> None:
    """What the Hub builds its tables of results from holds name and results, and reads back as the same."""
    measured = {"eval_loss": 0.2, "eval_accuracy": 0.9, "eval_f1": 0.8}
    change(run, metrics=measured, model={"class": "BertForSequenceClassification"})
    card = write_model_card(run)
    index = card.data.to_dict()["model-index"]
    name, results = model_index_to_eval_results(index)
    assert name == "my-run"
    assert results == card.data.eval_results
    assert {result.metric_type: result.metric_value for result in results} == {"loss": 0.2, "accuracy": 0.9, "f1": 0.8}
    assert {result.task_type for result in results} == {"text-classification"}
    # Of one task and data set: one entry with all metrics, as the Hub shows them.
    assert len(index) == len(index[0]["results"]) == 1


@pytest.mark.parametrize("status", [200, 400])
def test_validator_of_the_hub(run: Path, hub: HubServer, status: int) -> None:
    """`ModelCard.validate` asks the Hub, whose rules are not in the library: here, that it is sent the card as it lies
    in the folder and that a refusal ends in an error. What the Hub says of it, it says to those who push."""
    write_model_card(run)
    hub.add_fault("/api/validate-yaml", method="POST", status=status)
    card = ModelCard.load(run / CARD)
    if status == 200:
        card.validate()
    else:
        with pytest.raises(ValueError, match="ordered"):
            card.validate()
    [request] = hub.asked("/api/validate-yaml")
    sent = json.loads(request.body)
    assert sent == {"repoType": "model", "content": (run / CARD).read_text()}
