"""The vision recipe from its command line: what it leaves, what two arms share, resuming, streams, bad input."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import vit
from arguments import RecipeError
from launching import in_processes
from PIL import Image
from test_mlm import ROOT, launch
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_symqk


SMALL = "hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2"


def words(output_dir, *more, steps=4):
    return [
        *("--output_dir", str(output_dir), "--config_overrides", SMALL, "--per_device_train_batch_size", "8"),
        *("--logging_steps", "1", "--max_steps", str(steps), "--eval_steps", "100", "--eval_on_start", "false"),
        *("--use_cpu", "--disable_tqdm", "true", *more),
    ]


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return vit.main(words(folder)), folder


def test_output_folder_is_complete(finished):
    _, folder = finished
    results = json.loads((folder / "all_results.json").read_text())
    assert results["eval_examples"] == 359
    assert 0 <= results["eval_accuracy"] <= 1
    assert 0.1 < results["eval_majority_accuracy"] < 0.13
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label[3] == "3"
    processor = AutoImageProcessor.from_pretrained(folder)
    assert processor.size["height"] == 8
    image = Image.fromarray(np.zeros((8, 8), dtype=np.uint8))
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 1, 8, 8)
    table = pd.read_csv(folder / "qk_scores_first_last.csv", dtype={"layer": str}).set_index("layer")
    assert table["symmetry_first"].tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    last = [layer.symmetry for layer in hf_symqk.score_model(model).layers]
    assert table["symmetry_last"].tolist()[:2] == pytest.approx(last, abs=1e-6)
    assert "torchvision" not in sys.modules


def test_arms_differ_in_queries_and_keys_only(finished, tmp_path):
    _, folder = finished
    vit.main(words(tmp_path, "--qk_init", "none"))
    plain, symmetric = record(tmp_path), record(folder)
    for name in ("weights", "v", "batches"):
        assert plain["hashes"][name] == symmetric["hashes"][name] is not None
    assert plain["hashes"]["qk"] != symmetric["hashes"]["qk"]
    assert plain["data"] == symmetric["data"]


def test_resumed_run_continues_the_same_curve(tmp_path):
    """The 1,438 digits in steps of 512: the checkpoint lies in the second epoch."""
    more = ("--per_device_train_batch_size", "512", "--save_strategy", "steps", "--save_steps", "4")
    whole = vit.main(words(tmp_path, *more, steps=6))
    assert whole.state.epoch == 2
    resumed = vit.main(
        words(tmp_path / "more", *more, "--resume_from_checkpoint", str(tmp_path / "checkpoint-4"), steps=6)
    )
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=1e-6)
    assert record(tmp_path)["hashes"]["batches"] == record(tmp_path / "more")["hashes"]["batches"]
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(value, resumed.model.state_dict()[name], rtol=1e-5, atol=1e-7), name


def test_stream_of_a_folder(tmp_path):
    for name, level in (("dark", 20), ("light", 230)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (9, 9), (level + number,) * 3).save(tmp_path / "images" / name / f"{number}.png")
    more = ("--train_dir", str(tmp_path / "images"), "--streaming", "--stream_validation_examples", "4")
    more += ("--config_overrides", f"{SMALL},image_size=8,patch_size=4,num_channels=3")
    trainer = vit.main(words(tmp_path / "out", *more))
    assert len(history(trainer, "loss")) == 4
    assert record(tmp_path / "out")["data"]["train_examples"] is None
    assert trainer.model.config.id2label == {0: "dark", 1: "light"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model_type", "bert"), r"not an image classifier\. Vision Transformers are: .*vit"),
        (("--model_type", "resnet"), "image_size"),
        (("--config_overrides", "patch_size=3"), "patch_size=3 does not divide image_size=8"),
        (("--config_overrides", "num_attention_heads=3"), "num_attention_heads=3"),
        (("--config_overrides", "num_channels=4"), "num_channels=4: choose 1"),
        (("--config_overrides", "patch_sise=2"), "no 'patch_sise'.*patch_size"),
        (("--qk_init", "symetric"), "symetric"),
        (("--image_column", "img"), "no column 'img': it has image, label"),
        (("--validation_split_percentage", "0"), "no image is held out"),
    ],
)
def test_bad_input_ends_before_training(tmp_path, more, message, monkeypatch):
    monkeypatch.setattr(vit.ExampleWeightedTrainer, "train", None)
    with pytest.raises(RecipeError, match=message):
        vit.main(words(tmp_path, *more))


@pytest.mark.slow
def test_two_processes_run_the_recipe(tmp_path):
    command = [*in_processes(2), str(ROOT / "recipes" / "vit.py")]
    runs = {}
    for name, prefix, batch in (("two", command, "256"), ("one", [sys.executable, command[-1]], "512")):
        flags = [*words(tmp_path / name), "--per_device_train_batch_size", batch]
        done = launch(*prefix, *flags, cache=tmp_path / "cache", folder=tmp_path, ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("held-out loss") == 1
        log = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        runs[name] = (
            record(tmp_path / name),
            [[entry[k] for entry in log if k in entry] for k in ("loss", "eval_loss")],
        )
    assert (runs["one"][0]["num_processes"], runs["two"][0]["num_processes"]) == (1, 2)
    assert runs["one"][0]["hashes"] == runs["two"][0]["hashes"]
    for one, two in zip(runs["one"][1], runs["two"][1], strict=True):
        assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
def test_default_run_learns_the_digits(tmp_path):
    """The defaults as they are, from the launcher."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", str(ROOT / "recipes" / "vit.py")]
    done = launch(*command, cache=tmp_path / "cache", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "vit" / "all_results.json").read_text())
    assert results["eval_accuracy"] > 0.95
