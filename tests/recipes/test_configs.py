"""The files that recipes and launcher take: each is read by what reads it, says what it should, and runs."""

import csv
import importlib
import io
import json
import re
import sys
import zipfile

import clm
import mlm
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from argument_parsing import parse_arguments
from arguments import DataArguments, MaskingArguments, ModelArguments, RecipeError, TokenizerArguments
from test_mlm import ROOT, launch, record
from transformers import TrainingArguments


CONFIGS = ROOT / "recipes" / "configs"
LAUNCHERS = ROOT / "recipes" / "accelerate"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
WIDTHS = {"04": (256, 4), "12": (768, 12), "24": (1024, 16)}
SOURCES = {
    "jigsaw": {"train_file": "jigsaw-toxic-comment-classification-challenge.zip", "text_column": "comment_text"},
    "wikipedia": {"dataset_name": "wikimedia/wikipedia", "dataset_config_name": "20231101.en", "streaming": True},
    "redpajama": {"dataset_name": "DKYoon/SlimPajama-6B", "streaming": True},
}


def read(preset, *more):
    recipe = mlm if preset.startswith("encoder") else clm
    kinds = (ModelArguments, TokenizerArguments, DataArguments, MaskingArguments, TrainingArguments)
    words = [str(CONFIGS / f"{preset}.yaml"), "--use_cpu", *more]
    parsed = parse_arguments(kinds, recipe.DEFAULTS, words)
    return {name: value for values in parsed.filled for name, value in vars(values).items()}


def test_there_is_a_preset_for_each_model_and_text():
    assert (
        sorted(f"{kind}_{layers}_{data}" for kind in ("encoder", "decoder") for layers in WIDTHS for data in SOURCES)
        == PRESETS
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_say_what_was_published(preset):
    kind, layers, data = preset.split("_")
    content, values = (CONFIGS / f"{preset}.yaml").read_text(), read(preset)
    # The command in the first line is the one that runs it.
    script = "mlm" if kind == "encoder" else "clm"
    assert content.splitlines()[0] == f"# accelerate launch recipes/{script}.py recipes/configs/{preset}.yaml"
    assert values["output_dir"] == f"out/{preset}"
    published = {
        "max_steps": 200_000,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 8,
        "learning_rate": 5e-5,
        "warmup_steps": 200,
        "weight_decay": 0.01,
        "mlm_probability": 0.15,
        "block_size": 512,
        "character_spaced": False,
        "model_type": "bert",
        "fp16": True,
        **SOURCES[data],
    }
    assert {name: values[name] for name in published} == published
    width, heads = WIDTHS[layers]
    assert values["config_overrides"] == {
        "num_hidden_layers": int(layers),
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        **({"is_decoder": True} if kind == "decoder" else {}),
    }


@pytest.mark.parametrize(
    ("recipe", "more", "launcher"),
    [
        (mlm, [str(CONFIGS / "encoder_04_wikipedia.yaml")], "no"),
        (clm, ["--fp16"], "no"),
        (mlm, [], "fp16"),
    ],
    ids=["preset", "argument", "accelerate launch --mixed_precision"],
)
def test_fp16_on_a_cpu_is_refused(recipe, more, launcher, tmp_path, monkeypatch):
    """Accelerate would compute in float32 and say nothing (1.15)."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr(recipe.TokenWeightedTrainer, "train", None)
    with pytest.raises(RecipeError, match=r"fp16 needs an accelerator.*--fp16 false"):
        recipe.main([*more, "--use_cpu", "--output_dir", str(tmp_path)])


# Those with 4 layers run quickly; the others do the same with more layers.
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if "_04_" in name else pytest.mark.slow) for name in PRESETS]
)
def test_dry_run(preset, documents, tokenizer, tmp_path):
    """
    Two steps of each preset on local text. What this machine cannot do is overridden: the data and the tokenizer come
    from files (no network), fp16 is off (a recipe refuses it on a CPU), widths, batches and blocks are small. Number
    of layers, optimizer, schedule and everything else are the preset's.
    """
    recipe = importlib.import_module("mlm" if preset.startswith("encoder") else "clm")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    overrides = {**read(preset)["config_overrides"], "hidden_size": 96, "intermediate_size": 64}
    column = read(preset)["text_column"]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({column: document}) + "\n" for document in documents))
    trainer = recipe.main(
        [
            *(str(CONFIGS / f"{preset}.yaml"), "--max_steps", "2", "--output_dir", str(tmp_path / "out")),
            *("--fp16", "false", "--use_cpu", "--disable_tqdm", "true"),
            *("--train_file", str(text), "--stream_validation_documents", "6"),
            *("--tokenizer_name", str(tmp_path / "tokenizer"), "--config_overrides", json.dumps(overrides)),
            *("--per_device_train_batch_size", "2", "--block_size", "64", "--dataloader_num_workers", "0"),
        ]
    )
    run = record(tmp_path / "out")
    assert (run["status"], run["hashes"]["sequences"]) == ("finished", 2 * 2 * 8)
    assert trainer.model.config.num_hidden_layers == int(preset.split("_")[1])
    assert run["metrics"]["eval_loss"] > 0
    assert run["arguments"]["warmup_steps"] == 200


def test_jigsaw_as_downloaded(tmp_path, tokenizer, documents, monkeypatch):
    """The preset as its only argument but for what the machine needs: the archive lies in the working folder."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        table = io.StringIO()
        rows = [["id", "comment_text", "toxic"], *([str(n), text, "0"] for n, text in enumerate(documents))]
        csv.writer(table).writerows(rows)
        archive.writestr("train.csv", table.getvalue())
    with zipfile.ZipFile(tmp_path / SOURCES["jigsaw"]["train_file"], "w") as archive:
        archive.writestr("test.csv.zip", b"not looked at")
        archive.writestr("train.csv.zip", inner.getvalue())
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    overrides = {**read("encoder_04_jigsaw")["config_overrides"], "hidden_size": 96, "intermediate_size": 64}
    mlm.main(
        [
            *(str(CONFIGS / "encoder_04_jigsaw.yaml"), "--max_steps", "1", "--fp16", "false", "--use_cpu"),
            *("--tokenizer_name", str(tmp_path / "tokenizer"), "--config_overrides", json.dumps(overrides)),
            *("--per_device_train_batch_size", "2", "--block_size", "64", "--dataloader_num_workers", "0"),
        ]
    )
    run = record(tmp_path / "out" / "encoder_04_jigsaw")
    assert run["data"]["source"] == SOURCES["jigsaw"]["train_file"]
    assert run["data"]["held_out_sequences"] > 0


EXPECTED = {
    "cpu": (DistributedType.NO, 1, 1),
    "one_gpu": (DistributedType.NO, 1, 1),
    "ddp": (DistributedType.MULTI_GPU, 4, 1),
    "fsdp2": (DistributedType.FSDP, 4, 1),
    "zero3": (DistributedType.DEEPSPEED, 4, 1),
    "two_nodes": (DistributedType.MULTI_GPU, 8, 2),
}


def test_there_is_a_launch_configuration_for_each_way():
    assert {path.stem for path in LAUNCHERS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_launcher_takes_the_configuration(name, monkeypatch):
    """As far as a machine without GPUs can go: accelerate reads the file and prepares the environment it describes."""
    monkeypatch.chdir(ROOT)
    path = f"recipes/accelerate/{name}.yaml"
    config = load_config_from_file(path)
    assert (config.distributed_type, config.num_processes, config.num_machines) == EXPECTED[name]
    arguments = launch_command_parser().parse_args(["--config_file", path, "recipes/mlm.py", "--max_steps", "2"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    # Precision is the recipe's argument (--bf16, --fp16), in one place.
    assert arguments.mixed_precision == "no"
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(arguments)
        assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
        settings = json.loads((ROOT / environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
        assert settings["zero_optimization"]["stage"] == 3
    elif arguments.use_fsdp or arguments.multi_gpu:
        environment = prepare_multi_gpu_env(arguments)
        if arguments.use_fsdp:
            assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_VERSION"]) == ("true", "2")
        assert arguments.nproc_per_node == str(EXPECTED[name][1] // EXPECTED[name][2])
        if EXPECTED[name][2] > 1:
            assert (arguments.nnodes, int(arguments.node_rank)) == ("2", 0)
    else:
        _, environment = prepare_simple_launcher_cmd_env(arguments)
        assert environment["ACCELERATE_USE_CPU"] == ("True" if name == "cpu" else "False")


@pytest.mark.slow
def test_cpu_configuration_runs(text_files, tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(LAUNCHERS / "cpu.yaml"), str(ROOT / "recipes" / "mlm.py"), "--max_steps", "2"]
    command += ["--train_file", text_files["txt"], "--vocab_size", "300"]
    done = launch(*command, cache=tmp_path / "cache", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert record(tmp_path / "out" / "mlm")["status"] == "finished"


def test_every_launch_configuration_is_described():
    readme = (ROOT / "recipes" / "README.md").read_text()
    for path in [*LAUNCHERS.glob("*.yaml"), *(CONFIGS / "parts").glob("*.yaml")]:
        assert re.search(rf"`[^`]*{path.name}`", readme), path.name
