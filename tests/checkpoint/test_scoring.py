"""`score_checkpoint` against `score_model`, and against everything that can be wrong with files."""

import json

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file

from hf_symqk import score_checkpoint, score_model


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("storage", ["one file", "shards", "pickle", "pickled shards", "names of modules"])
def test_equals_the_loaded_model(architecture, storage, tmp_path):
    """Whatever the names in files, the storage and the order of tensors: scores, names, stacks, bands, all equal."""
    model = architecture.build()
    _save(model, tmp_path, storage)
    expected = score_model(model, attention="all")
    scores = score_checkpoint(tmp_path, attention="all")
    assert scores == expected
    assert scores.family == expected.family
    assert scores.num_parameters == expected.num_parameters


def _save(model, folder, storage):
    sharded = {"max_shard_size": "20KB"} if "shards" in storage else {}
    model.save_pretrained(folder, **sharded)
    if storage == "names of modules":
        tensors = {tensor.data_ptr(): (key, tensor) for key, tensor in model.state_dict().items()}  # tied ones once
        save_file({key: tensor.contiguous() for key, tensor in tensors.values()}, folder / "model.safetensors")
    if "pickle" in storage:
        for file in folder.glob("*.safetensors"):
            torch.save(
                load_file(file), folder / (file.name.replace("model", "pytorch_model").replace("safetensors", "bin"))
            )
            file.unlink()
        for index in folder.glob("*.index.json"):
            content = json.loads(index.read_text())
            content["weight_map"] = {
                key: file.replace("model", "pytorch_model").replace("safetensors", "bin")
                for key, file in content["weight_map"].items()
            }
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
            index.unlink()
