import json
import os
import subprocess
import sys
from pathlib import Path

import mlm
import pandas as pd
import pytest
import torch
from arguments import RecipeError
from examples import BlockDataset
from huggingface_hub import ModelCard
from launching import in_processes
from transformers import AutoModelForMaskedLM, AutoTokenizer, TrainerCallback

import hf_symqk


ROOT = Path(__file__).resolve().parents[2]
SMALL = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4"


def words(text_file, output_dir, *more, steps=4):
    return [
        *("--train_file", text_file, "--output_dir", str(output_dir), "--vocab_size", "300", "--block_size", "32"),
        *("--config_overrides", SMALL, "--per_device_train_batch_size", "8", "--logging_steps", "1"),
        *("--max_steps", str(steps), "--eval_steps", "2", "--use_cpu", "--disable_tqdm", "true", *more),
    ]


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.fixture(scope="module")
def finished(text_files, tmp_path_factory, cache_folder):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache_folder)
        folder = tmp_path_factory.mktemp("run")
        return mlm.main(words(text_files["txt"], folder)), folder


def test_output_folder_is_complete(finished):
    trainer, folder = finished
    config = json.loads((folder / "config.json").read_text())
    assert config["qk_init"]["scheme"] == "symmetric"
    state = json.loads((folder / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4]
    scored = [entry for entry in state["log_history"] if "qk/symmetry/median" in entry]
    assert scored[0]["step"] == 0
    assert scored[0]["qk/symmetry/layer_01"] == pytest.approx(1, abs=1e-5)
    assert scored[-1]["step"] == 4

    table = pd.read_csv(folder / "qk_scores_first_last.csv", dtype={"layer": str}).set_index("layer")
    assert list(table.index) == ["00", "01", "median"]
    assert table["symmetry_first"].tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    saved = AutoModelForMaskedLM.from_pretrained(folder)
    scores = [layer.symmetry for layer in hf_symqk.score_model(saved).layers]
    assert table["symmetry_last"].tolist()[:2] == pytest.approx(scores, abs=1e-6)
    assert max(scores) < 0.99999

    results = json.loads((folder / "all_results.json").read_text())
    assert results["eval_loss"] == history(trainer, "eval_loss")[-1]
    assert results["train_seconds_to_first_step"] > 0
    saved_tokenizer = AutoTokenizer.from_pretrained(folder)
    assert saved_tokenizer("the key")["input_ids"] == trainer.processing_class("the key")["input_ids"]


def test_record_of_the_run(finished, text_files):
    """What other tools read of a run: everything that tells it apart, and what it ended with."""
    trainer, folder = finished
    run = record(folder)
    assert (run["recipe"], run["status"], run["seed"], run["num_processes"]) == ("mlm", "finished", 42, 1)
    assert (run["learning_rate"], run["max_steps"], run["resumed_from"]) == (2e-3, 4, None)
    assert run["command"] == words(text_files["txt"], folder)
    assert run["qk_init"] == {"scheme": "symmetric"}
    # Given ones and the recipe's own; not those that are given with their default.
    assert {"vocab_size", "block_size", "max_steps", "use_cpu", "weight_decay"} <= set(run["arguments"])
    assert not {"qk_init", "seed", "lr_scheduler_type", "mlm_probability"} & set(run["arguments"])
    assert run["data"]["train_sequences"] == len(trainer.train_dataset)
    assert run["data"]["held_out_sequences"] == len(trainer.eval_dataset)
    assert run["data"]["source"] == text_files["txt"]
    assert run["model"]["class"] == "ModernBertForMaskedLM"
    assert run["model"]["num_parameters"] == trainer.model.num_parameters()
    assert set(run["versions"]) == {"hf_symqk", "torch", "transformers", "accelerate", "datasets", "python"}
    results = json.loads((folder / "all_results.json").read_text())
    assert run["metrics"]["eval_loss"] == results["eval_loss"]
    assert run["metrics"]["train_loss"] == results["train_loss"]
    assert (run["hashes"]["steps"], run["hashes"]["sequences"]) == (4, 32)
    assert {len(run["hashes"][name]) for name in ("weights", "qk", "v", "batches")} == {64}
    assert run["started"] <= run["finished"]


def test_model_card_of_the_run(finished):
    """Each run describes itself, and pushing it does not put the Trainer's draft in the card's place."""
    trainer, folder = finished
    card = ModelCard.load(folder / "README.md")
    assert {"hf_symqk", "qk-init", "mlm"} <= set(card.data.tags)
    [result] = [result for result in card.data.eval_results if result.metric_type == "loss"]
    assert result.metric_value == pytest.approx(history(trainer, "eval_loss")[-1])
    assert (folder / "qk_scores.png").stat().st_size > 1000
    assert "qk_scores.png" in card.content
    trainer.create_model_card(model_name="draft")
    assert (folder / "README.md").read_text() == card.content


def test_failed_run_says_so(text_files, tmp_path, monkeypatch):
    """A comparison of many runs has to tell a run that broke down from one that is still going."""
    original = mlm.TokenWeightedTrainer.training_step

    def break_down(self, *args):
        assert record(tmp_path)["status"] == "running"
        if self.state.global_step == 2:
            raise FloatingPointError("the third step")
        return original(self, *args)

    monkeypatch.setattr(mlm.TokenWeightedTrainer, "training_step", break_down)
    with pytest.raises(FloatingPointError):
        mlm.main(words(text_files["txt"], tmp_path))
    run = record(tmp_path)
    assert (run["status"], run["error"]) == ("failed", "FloatingPointError: the third step")
    assert not list(tmp_path.glob(".run.json*"))


def test_no_evaluation_is_repeated(finished):
    trainer, _ = finished
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert steps == [0, 2, 4]


def test_plain_baseline_differs_in_keys_only(finished, text_files, tmp_path):
    class Recorder(TrainerCallback):
        weights = None

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            Recorder.weights = {name: value.clone() for name, value in model.state_dict().items()}

    seen, starts = {}, {}
    original_batch, original_init = BlockDataset.__getitems__, mlm.TokenWeightedTrainer.__init__

    for scheme in ("symmetric", "none"):
        batches = seen[scheme] = []

        def remember(self, indices, batches=batches):
            rows = original_batch(self, indices)
            batches.append([(index, row["labels"].tolist()) for index, row in zip(indices, rows, strict=True)])
            return rows

        def with_recorder(self, **kwargs):
            original_init(self, **{**kwargs, "callbacks": [*kwargs["callbacks"], Recorder()]})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockDataset, "__getitems__", remember)
            patch.setattr(mlm.TokenWeightedTrainer, "__init__", with_recorder)
            mlm.main(words(text_files["txt"], tmp_path / scheme, "--qk_init", scheme))
        starts[scheme] = Recorder.weights
    assert seen["symmetric"] == seen["none"]
    assert len(seen["none"]) > 10
    differing = {name for name in starts["none"] if not torch.equal(starts["none"][name], starts["symmetric"][name])}
    assert differing == {"model.layers.0.attn.Wqkv.weight", "model.layers.1.attn.Wqkv.weight"}
    for name in differing:
        plain, symmetric = starts["none"][name].chunk(3), starts["symmetric"][name].chunk(3)
        assert torch.equal(plain[0], symmetric[0])
        assert torch.equal(plain[2], symmetric[2])
        assert torch.equal(symmetric[0], symmetric[1])
    assert json.loads((tmp_path / "none" / "config.json").read_text()).get("qk_init") is None
    plain, symmetric = (record(tmp_path / scheme)["hashes"] for scheme in ("none", "symmetric"))
    assert {name for name in plain if plain[name] != symmetric[name]} == {"qk"}
    assert record(tmp_path / "none")["qk_init"] is None


def test_held_out_masks_do_not_follow_the_seed(finished, text_files, tmp_path):
    trainer, folder = finished
    other = mlm.main(words(text_files["txt"], tmp_path, "--seed", "7", steps=4))
    for index in range(len(trainer.eval_dataset)):
        one, two = trainer.eval_dataset[index], other.eval_dataset[index]
        assert torch.equal(one["input_ids"], two["input_ids"])
        assert torch.equal(one["labels"], two["labels"])
    assert not torch.equal(trainer.train_dataset[0]["labels"], other.train_dataset[0]["labels"])
    one, two = record(folder)["hashes"], record(tmp_path)["hashes"]
    assert {name for name in one if one[name] == two[name]} == {"steps", "sequences"}


def test_resumed_run_continues_the_same_curve(text_files, tmp_path):
    # 25 steps an epoch: the checkpoint lies in the second.
    save = ("--save_strategy", "steps", "--save_steps", "31", "--eval_steps", "100")
    whole = mlm.main(words(text_files["txt"], tmp_path, *save, steps=55))
    assert whole.state.epoch > 2
    assert whole.train_dataset.epoch == 2
    checkpoint = str(tmp_path / "checkpoint-31")
    more = (*save, "--resume_from_checkpoint", checkpoint)
    resumed = mlm.main(words(text_files["txt"], tmp_path / "resumed", *more, steps=55))
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=1e-6)
    first, second = record(tmp_path), record(tmp_path / "resumed")
    assert second["hashes"] == first["hashes"]
    assert second["resumed_from"] == checkpoint
    # Nothing is evaluated where the whole run evaluates nothing.
    held_out = [[e["step"] for e in one.state.log_history if "eval_loss" in e] for one in (whole, resumed)]
    assert held_out == [[0, 55], [0, 55]]
    tables = [pd.read_csv(folder / "qk_scores_first_last.csv") for folder in (tmp_path, tmp_path / "resumed")]
    pd.testing.assert_frame_equal(*tables)


@pytest.mark.parametrize("workers", [("0", "1"), ("1", "0")])
def test_stream_and_its_resume(text_files, tmp_path, workers):
    """With another number of workers than before, too."""
    more = ("--streaming", "--stream_validation_documents", "6", "--save_strategy", "steps", "--save_steps", "12")
    more += ("--shuffle_buffer_size", "20", "--eval_steps", "100", "--dataloader_num_workers")
    whole = mlm.main(words(text_files["jsonl"], tmp_path, *more, workers[0], steps=16))
    more += (workers[1], "--resume_from_checkpoint", str(tmp_path / "checkpoint-12"))
    resumed = mlm.main(words(text_files["jsonl"], tmp_path / "resumed", *more, steps=16))
    assert record(tmp_path / "resumed")["hashes"] == record(tmp_path)["hashes"]
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=1e-6)
    assert len(history(whole, "loss")) == 16


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--block_size", "1024"), "block_size=1024 is above the 512 positions"),
        (("--block_size", "500", "--validation_split_percentage", "2"), "do not fill one block of 500 tokens"),
        (("--model_type", "gpt2"), "not a masked-language-model encoder.*clm.py trains it"),
        (("--config_overrides", "num_attention_heads=3"), "num_attention_heads=3"),
        (("--text_column", "body"), "no column 'body'"),
        (("--qk_init", "symetric"), "symetric"),
        (("--validation_split_percentage", "0"), "no text is held out"),
        (("--do_predict",), "do_predict"),
        (("--do_train", "false", "--do_eval", "false", "--eval_strategy", "no"), "nothing to do"),
        (("--streaming", "--max_steps", "-1"), "streaming needs --max_steps"),
        (("--streaming", "--dataloader_num_workers", "2"), "one reader"),
    ],
)
def test_bad_input_ends_before_training(text_files, tmp_path, more, message, monkeypatch):
    monkeypatch.setattr(mlm.TokenWeightedTrainer, "train", None)
    with pytest.raises(RecipeError, match=message):
        mlm.main(words(text_files["txt"], tmp_path, *more))


def test_resuming_between_two_logged_losses(text_files, tmp_path):
    """The loss logged at step 8 is the mean of steps 5 to 8 for a run resumed at 6, too: raw speed-ups read such
    points. What `Trainer` reports of its own call stays that of the steps made in it."""
    save = ("--save_strategy", "steps", "--save_steps", "6", "--logging_steps", "4", "--eval_steps", "100")
    whole = mlm.main(words(text_files["txt"], tmp_path, *save, steps=8))
    more = (*save, "--resume_from_checkpoint", str(tmp_path / "checkpoint-6"))
    resumed = mlm.main(words(text_files["txt"], tmp_path / "resumed", *more, steps=8))
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=1e-6)
    each = mlm.main(words(text_files["txt"], tmp_path / "each", "--eval_steps", "100", steps=8))
    losses = history(each, "loss")
    assert history(whole, "loss")[1] == pytest.approx(sum(losses[4:]) / 4, rel=1e-5)
    assert history(resumed, "train_loss")[-1] == pytest.approx(sum(losses[6:]) / 2, rel=1e-5)


def test_unusable_checkpoint_leaves_a_finished_run_as_it_was(finished, text_files):
    """Told in one line, before anything is written."""
    _, folder = finished
    before = (folder / "run.json").read_text()
    for given, message in (("nowhere", "no such folder"), ("true", "no finished checkpoint")):
        with pytest.raises(RecipeError, match=message):
            mlm.main(words(text_files["txt"], folder, "--resume_from_checkpoint", given))
    assert (folder / "run.json").read_text() == before


def test_evaluation_of_a_checkpoint(text_files, tmp_path):
    """Its weights are evaluated, not fresh ones, and what the run logged stays."""
    more = ("--save_strategy", "steps", "--save_steps", "2", "--learning_rate", "0.05")
    trained = mlm.main(words(text_files["txt"], tmp_path, *more))
    state = (tmp_path / "trainer_state.json").read_text()
    more = ("--do_train", "false", "--resume_from_checkpoint", str(tmp_path / "checkpoint-2"))
    mlm.main(words(text_files["txt"], tmp_path, *more))
    first, second, _ = history(trained, "eval_loss")
    assert abs(first - second) > 0.01
    assert json.loads((tmp_path / "all_results.json").read_text())["eval_loss"] == pytest.approx(second, abs=1e-6)
    assert (tmp_path / "trainer_state.json").read_text() == state


def test_nothing_is_held_out_of_one_document(text_files, tmp_path):
    """What the error of a document that cannot be split advises."""
    more = ("--sample_by", "document", "--validation_split_percentage", "0", "--do_eval", "false")
    trainer = mlm.main(words(text_files["txt"], tmp_path, *more, steps=1))
    assert trainer.state.global_step == 1
    assert record(tmp_path)["data"]["held_out_sequences"] == 0


def test_evaluation_only(text_files, tmp_path):
    trainer = mlm.main(words(text_files["txt"], tmp_path, "--do_train", "false"))
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results["eval_loss"] > results["eval_unigram_entropy"] > 0
    assert not (tmp_path / "run.json").exists()  # the record is one of training
    assert trainer.state.global_step == 0


def test_training_without_held_out_text(text_files, tmp_path):
    trainer = mlm.main(words(text_files["txt"], tmp_path, "--validation_split_percentage", "0", "--do_eval", "false"))
    assert len(history(trainer, "loss")) == 4
    assert history(trainer, "eval_loss") == []
    assert "eval_loss" not in json.loads((tmp_path / "all_results.json").read_text())


def launch(*command, cache, folder, **environment):
    environment = {
        **os.environ,
        "HF_DATASETS_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_error_at_the_command_line_is_one_line(text_files, tmp_path):
    done = launch(
        sys.executable, str(ROOT / "recipes" / "mlm.py"), "--train_file", "none.txt", cache=tmp_path, folder=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "error: train_file='none.txt' does not exist."
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_default_command(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", str(ROOT / "recipes" / "mlm.py")]
    command += ["--max_steps", "6", "--logging_steps", "3"]
    done = launch(*command, cache=tmp_path / "cache", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "out" / "mlm"
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "trainer_state.json", "all_results.json"} <= files
    table = pd.read_csv(folder / "qk_scores_first_last.csv", dtype={"layer": str})
    assert list(table["layer"]) == ["00", "01", "02", "03", "median"]
    assert table["symmetry_first"].tolist() == pytest.approx([1] * 5, abs=1e-5)
    for row in table["layer"]:
        assert any(line.split()[:1] == [row] for line in done.stdout.splitlines()), done.stdout
    assert "6/6" in done.stderr  # progress
    # From the cache (`benchmarks/recipes.py` measures how soon the first step then comes).
    again = launch(*command, cache=tmp_path / "cache", folder=tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "Tokenizing" not in again.stderr


@pytest.mark.slow
def test_two_processes_run_the_recipe(text_files, tmp_path):
    command = [*in_processes(2), str(ROOT / "recipes" / "mlm.py")]
    losses = {}
    for streaming in ((), ("--streaming", "--stream_validation_documents", "6")):
        for name, prefix, batch in (("two", command, "4"), ("one", [sys.executable, command[-1]], "8")):
            folder = tmp_path / (name + "".join(streaming[:1]))
            flags = [*words(text_files["txt"], folder, *streaming), "--per_device_train_batch_size", batch]
            done = launch(*prefix, *flags, cache=tmp_path / name, folder=tmp_path, ACCELERATE_USE_CPU="true")
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.count("held-out loss") == 1
            log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
            losses[name] = [[entry[key] for entry in log if key in entry] for key in ("loss", "eval_loss")]
        assert len(losses["one"][0]) == 4
        one, two = (record(tmp_path / (name + "".join(streaming[:1]))) for name in ("one", "two"))
        assert one["hashes"] == two["hashes"]
        assert (one["num_processes"], two["num_processes"]) == (1, 2)
        for one, two in zip(losses["one"], losses["two"], strict=True):
            assert two == pytest.approx(one, rel=1e-3)
