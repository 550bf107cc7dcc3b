"""
Protects: an adapter read from its files gives the weights that PEFT itself computes with, and what is not LoRA or
DoRA, or does not belong to the base, is an error that names it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_symqk.checkpoint.adapter import Adapter, AdapterPart, read_adapter


peft = pytest.importorskip("peft")


@dataclass(frozen=True)
class Stored:
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    return {key: Stored(key, torch.float32, tuple(shape)) for key, shape in shapes.items()}


def bert() -> PreTrainedModel:
    return BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=50,
        )
    )


def gpt2() -> PreTrainedModel:
    # Cross-attention has a square Conv1D (q_attn), whose shape does not tell its orientation.
    return GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, add_cross_attention=True))


MODELS = {
    "bert": (bert, ["query", "key"]),
    "llama": (llama, ["q_proj", "k_proj"]),
    "gpt2": (gpt2, ["c_attn", "q_attn"]),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 6},
    "dora": {"use_dora": True},
    "dora, rslora": {"use_dora": True, "use_rslora": True},
    "patterns": {
        "rank_pattern": {r"0\..*(query|q_proj|c_attn)": 3, "key": 5},
        "alpha_pattern": {r".*1\..*": 20, "k_proj": 40},
    },
    "gaussian, biases": {"init_lora_weights": "gaussian", "bias": "all"},
}


def save(model: PreTrainedModel, settings: dict[str, Any], folder: Path) -> nn.Module:
    """Adapts the model, with weights that are not PEFT's initial zeros, and saves the adapter."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 7, **settings}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "magnitude" in name or "modules_to_save" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    adapted.save_pretrained(folder)
    return adapted


def load(folder: Path) -> tuple[Adapter, dict[str, Tensor]]:
    values = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return read_adapter(config, stored({key: tuple(value.shape) for key, value in values.items()})), values


def effective(part: AdapterPart, values: dict[str, Tensor], base: Tensor, transposed: bool) -> Tensor:
    read = {name: values[tensor.key] for name, tensor in part.tensors.items()}
    return part.weight(read, base, transposed=transposed)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("settings", SETTINGS)
# The base's checkpoint may have a prefix more or less than the model that was adapted.
@pytest.mark.parametrize("prefix", ["", "model.", "-"])
def test_the_effective_weight_is_the_one_that_peft_merges(model_name, settings, prefix, tmp_path):
    torch.manual_seed(0)
    make, targets = MODELS[model_name]
    model = make()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    modules = [name for name, module in model.named_modules() if name.rpartition(".")[2] in targets]
    others = [name for name, module in model.named_modules() if name and name not in modules]
    adapted = save(model, {"target_modules": targets, **SETTINGS[settings]}, tmp_path)

    def in_base(path: str) -> str:
        return path.partition(".")[2] if prefix == "-" else prefix + path

    adapter, values = load(tmp_path)
    parts = adapter.parts([in_base(path) for path in modules], [in_base(path) for path in others])
    assert set(parts) == {in_base(path) for path in modules}
    merged = dict(adapted.merge_and_unload().named_parameters())
    for path in modules:
        weight = base[f"{path}.weight"]
        matrix = effective(parts[in_base(path)], values, weight, transposed=model_name == "gpt2")
        assert not torch.allclose(matrix, weight, atol=1e-2)
        # Both in float32; PEFT multiplies the scaling in at another place: a few roundings of entries of about 1.
        torch.testing.assert_close(matrix, merged[f"{path}.weight"].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("saved", ["k_proj", "self_attn"])
def test_modules_that_were_trained_whole_replace_the_base(saved, tmp_path):
    torch.manual_seed(0)
    model = llama()
    paths = [f"model.layers.{index}.self_attn.{name}_proj" for index in (0, 1) for name in "qk"]
    targets = ["q_proj"] if saved == "k_proj" else ["up_proj"]
    adapted = save(model, {"target_modules": targets, "modules_to_save": [saved]}, tmp_path)
    adapter, values = load(tmp_path)
    parts = adapter.parts(paths)
    merged = dict(adapted.merge_and_unload().named_parameters())
    whole = [path for path in paths if saved == "self_attn" or path.endswith("k_proj")]
    assert [path for path in paths if not parts[path].needs_base] == whole
    for path in whole:
        read = {name: values[tensor.key] for name, tensor in parts[path].tensors.items()}
        torch.testing.assert_close(parts[path].weight(read), merged[f"{path}.weight"].detach(), rtol=0, atol=0)


LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def lora(*paths: str) -> dict[str, Stored]:
    keys = [f"base_model.model.{path}.lora_" for path in paths]
    return stored({f"{key}{side}.weight": shape for key in keys for side, shape in (("A", (2, 8)), ("B", (8, 2)))})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_qalora": True}, "use_qalora = True"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens = \[1, 2\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
        ({"of_the_future": "on"}, "of_the_future = 'on'"),
    ],
)
def test_what_is_not_lora_or_dora_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=f"{named}.*merge_and_unload"):
        read_adapter({**LORA, **changes}, lora("a.q_proj"))


PATHS = ("encoder.layers.0.q_proj", "decoder.layers.0.q_proj")


@pytest.mark.parametrize(
    ("tensors", "changes", "named"),
    [
        (lora("layers.0.q_proj"), {}, "layers.0.q_proj.lora_A.weight' matches several .*decoder.*encoder"),
        (lora("layers.1.q_proj"), {}, "layers.1.q_proj.lora_A.weight' matches none"),
        (lora("a.encoder.layers.0.q_proj", "encoder.layers.0.q_proj"), {}, "matches several"),
        (lora(PATHS[0]), {"use_dora": True}, "q_proj.lora_A.weight.*use_dora True"),
        (lora(PATHS[0]), {"r": 3}, "lora_A.weight has 2 rows.*rank 3"),
        (lora(PATHS[0]), {"target_parameters": ["0.q_proj.weight"]}, "target_parameters '0.q_proj.weight'"),
        (lora(PATHS[0]) | stored({f"{PATHS[0]}.lora_diag": (2,)}), {}, "q_proj.lora_diag"),
        (lora(PATHS[0]) | stored({f"{PATHS[0]}.lora_magnitude_vector": (8,)}), {}, "lora_magnitude_vector.*use_dora"),
        (stored({f"base_model.model.{PATHS[0]}.weight": (8, 8)}), {}, "q_proj.weight.*modules_to_save None"),
    ],
)
def test_tensors_that_do_not_belong_are_named(tensors, changes, named):
    adapter = read_adapter({**LORA, **changes}, tensors)
    with pytest.raises(ValueError, match=named):
        adapter.parts(PATHS)


def test_what_the_adapter_does_to_other_modules_is_no_matter():
    biases = stored({f"base_model.model.{PATHS[1]}.base_layer.bias": (8,)})
    adapter = read_adapter(LORA, lora(PATHS[0], "lm_head", "encoder.layers.0.up_proj") | biases)
    assert set(adapter.parts(PATHS, ["encoder.layers.0.up_proj"])) == {PATHS[0]}


def test_a_base_of_another_width_is_named():
    part = read_adapter(LORA, lora(PATHS[0])).parts(PATHS)[PATHS[0]]
    read = {name: torch.zeros(tensor.shape) for name, tensor in part.tensors.items()}
    with pytest.raises(ValueError, match=r"q_proj.lora_B.weight does not fit .*\(8, 16\)"):
        part.weight(read, torch.zeros(8, 16))
