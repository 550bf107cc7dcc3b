"""The decoder recipe: what it leaves, what pairs of runs share, that splits and resumes change nothing.

What it shares with the encoder recipe (arguments, text, reports, bad input) is tested with that one.
"""

import json
import sys

import clm
import pandas as pd
import pytest
from arguments import RecipeError
from launching import in_processes
from test_mlm import ROOT, SMALL, history, launch, record, words
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_symqk


@pytest.fixture(scope="module")
def finished(text_files, tmp_path_factory, cache_folder):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache_folder)
        folder = tmp_path_factory.mktemp("run")
        return clm.main(words(text_files["txt"], folder)), folder


def test_output_folder_is_complete(finished, capsys):
    trainer, folder = finished
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert saved.config.qk_init.scheme == "symmetric"
    table = pd.read_csv(folder / "qk_scores_first_last.csv", dtype={"layer": str}).set_index("layer")
    assert table["symmetry_first"].tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    scores = [layer.symmetry for layer in hf_symqk.score_model(saved).layers]
    assert table["symmetry_last"].tolist()[:2] == pytest.approx(scores, abs=1e-6)
    results = json.loads((folder / "all_results.json").read_text())
    assert results["eval_loss"] == history(trainer, "eval_loss")[-1]
    # Every token of a block is predicted but its first.
    assert results["eval_predicted_tokens"] == 31 * len(trainer.eval_dataset)
    assert results["eval_loss"] > results["eval_unigram_entropy"] > 0
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"
    assert (record(folder)["recipe"], record(folder)["status"]) == ("clm", "finished")


@pytest.mark.parametrize(
    "model",
    [
        ("--config_overrides", SMALL),
        # Fewer key heads, and biases.
        ("--model_type", "qwen2", "--config_overrides", f"{SMALL},num_key_value_heads=2"),
        # Fused and transposed; dropout draws from the generator too.
        ("--model_type", "gpt2", "--config_overrides", "n_embd=32,n_layer=2,n_head=4"),
    ],
    ids=["llama", "qwen2", "gpt2"],
)
def test_plain_baseline_differs_in_queries_and_keys_only(text_files, tmp_path, model):
    hashes = {}
    for scheme in ("symmetric", "none"):
        more = (*model, "--qk_init", scheme)
        trainer = clm.main(words(text_files["txt"], tmp_path / scheme, *more, steps=2))
        hashes[scheme] = record(tmp_path / scheme)["hashes"]
        assert len(history(trainer, "loss")) == 2
    assert {name for name, value in hashes["none"].items() if hashes["symmetric"][name] != value} == {"qk"}


@pytest.mark.parametrize("streaming", [(), ("--streaming", "--stream_validation_documents", "6")])
def test_accumulation_changes_nothing(text_files, tmp_path, streaming):
    losses, fingerprints = [], []
    for batch, accumulation in (("8", "1"), ("2", "4")):
        folder = tmp_path / batch
        split = ("--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation)
        trainer = clm.main(words(text_files["jsonl"], folder, *streaming, *split))
        losses.append(history(trainer, "loss") + history(trainer, "grad_norm") + history(trainer, "eval_loss"))
        fingerprints.append(record(folder)["hashes"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert fingerprints[0] == fingerprints[1]


def test_resumed_run_continues_the_same_curve(text_files, tmp_path):
    save = ("--save_strategy", "steps", "--save_steps", "31", "--eval_steps", "100")
    whole = clm.main(words(text_files["txt"], tmp_path, *save, steps=40))
    assert whole.state.epoch > 1
    more = (*save, "--resume_from_checkpoint", str(tmp_path / "checkpoint-31"))
    resumed = clm.main(words(text_files["txt"], tmp_path / "resumed", *more, steps=40))
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=1e-6)
    assert record(tmp_path / "resumed")["hashes"] == record(tmp_path)["hashes"]


def test_spaced_characters_are_another_text(finished, text_files, tmp_path):
    _, folder = finished
    spaced = clm.main(words(text_files["txt"], tmp_path, "--character_spaced", "--do_eval", "false", steps=1))
    text = spaced.processing_class.decode(spaced.train_dataset[0]["input_ids"])
    assert all(text[place] == " " for place in range(1, 11, 2))
    assert record(tmp_path)["data"]["train_sequences"] > record(folder)["data"]["train_sequences"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model_type", "modernbert"), "not a decoder.*mlm.py trains it"),
        (("--model_type", "bert", "--config_overrides", ""), "is an encoder.*is_decoder=true"),
        (("--block_size", "1024"), "block_size=1024 is above the 512 positions"),
        (("--mlm_probability", "0.2"), "--mlm_probability"),
        (("--model_type", "mamba", "--config_overrides", "hidden_size=32,num_hidden_layers=1"), "attention"),
    ],
)
def test_bad_input_ends_before_training(text_files, tmp_path, more, message, monkeypatch):
    monkeypatch.setattr(clm.TokenWeightedTrainer, "train", None)
    with pytest.raises(RecipeError, match=message):
        clm.main(words(text_files["txt"], tmp_path, *more))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
def test_default_command(tmp_path):
    script = str(ROOT / "recipes" / "clm.py")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", script]
    done = launch(*command, "--max_steps", "6", "--logging_steps", "3", cache=tmp_path / "cache", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "model: LlamaForCausalLM" in done.stdout
    assert done.stdout.count("nats a token") == 1
    assert record(tmp_path / "out" / "clm")["hashes"]["sequences"] == 6 * 32


@pytest.mark.slow
def test_two_processes_run_the_recipe(text_files, tmp_path):
    command = [*in_processes(2), str(ROOT / "recipes" / "clm.py")]
    for streaming in ((), ("--streaming", "--stream_validation_documents", "6")):
        losses, hashes = [], []
        # Two processes with two accumulated batches of 2, and one with one of 8.
        for name, prefix, batch, accumulation in (
            ("two", command, "2", "2"),
            ("one", [sys.executable, command[-1]], "8", "1"),
        ):
            folder = tmp_path / (name + "".join(streaming[:1]))
            flags = [*words(text_files["txt"], folder, *streaming), "--per_device_train_batch_size", batch]
            flags += ["--gradient_accumulation_steps", accumulation]
            done = launch(*prefix, *flags, cache=tmp_path / name, folder=tmp_path, ACCELERATE_USE_CPU="true")
            assert done.returncode == 0, done.stderr[-3000:]
            log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
            losses.append([entry[key] for key in ("loss", "eval_loss") for entry in log if key in entry])
            hashes.append(record(folder)["hashes"])
        assert len(losses[0]) == 4 + 3
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert hashes[0] == hashes[1]
