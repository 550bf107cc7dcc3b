"""Weights as they come out of files: dtypes, norms, adapters, packed forms, and what is read of them."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from architectures import BY_NAME
from hub_server import hub
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from hf_symqk import score_checkpoint, score_model
from hf_symqk.attention import find_attention_layers
from hf_symqk.checkpoint import find_checkpoint_layers
from hf_symqk.checkpoint.skeleton import _NORMS_AROUND_ONE


__all__ = ["hub"]

FILE = "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_stored_types_are_scored_as_loaded(dtype, tmp_path):
    """Every floating type gives what the loaded model of that type gives, bit for bit."""
    model = BY_NAME["llama"].build().to(dtype)
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_unscaled_fp8_is_what_it_says(dtype, tmp_path):
    model = BY_NAME["llama"].build()
    with torch.no_grad():
        for layer in find_attention_layers(model):
            for holder in (layer.holder("query"), layer.holder("key")):
                holder.weight.copy_(holder.weight.to(dtype))
    expected = score_model(model.to(torch.bfloat16))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / FILE)
    save_file({key: w.to(dtype) if re.search("[qk]_proj", key) else w for key, w in weights.items()}, tmp_path / FILE)
    assert score_checkpoint(tmp_path) == expected


def test_dtype_converts_before_scoring(tmp_path):
    model = BY_NAME["gpt_neox"].build()
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path, dtype=torch.float16) == score_model(model.half())


@pytest.mark.parametrize("config_class", ["Qwen3Config", "Gemma3TextConfig"])
def test_gains_of_norms_are_folded_in(config_class, tmp_path):
    """Files do not say whether a norm multiplies by w or by 1 + w; a live norm does."""
    values = BY_NAME["qwen3"].values
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**values)
    model = transformers.AutoModel.from_config(config)
    for key, parameter in model.named_parameters():
        if re.search("[qk]_norm", key):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


def test_norms_around_one_are_those_of_transformers():
    """The list of model types against the code of their attention: which norms of queries and keys are around one."""
    wrong = []
    for model_type in CONFIG_MAPPING_NAMES:
        name = model_type_to_module_name(model_type)
        path = Path(transformers.models.__path__[0], name, f"modeling_{name}.py")
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        around_one = {
            part.partition("(")[0]
            for part in re.split(r"\nclass ", source)
            if re.search(r"1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1", part)
        }
        used = set(re.findall(r"self\.(?:q|k|q_a|kv_a|query|key)_(?:layer)?norm = (\w+)\(", source))
        if bool(used & around_one) != bool(_NORMS_AROUND_ONE.fullmatch(model_type)):
            wrong.append(model_type)
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ["q_proj", "k_proj"]), ("gpt2", ["c_attn"]), ("vit", ["q_proj"]), ("modernbert", ["Wqkv"])],
)
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_are_scored_with_their_base(name, targets, use_dora, tmp_path):
    """An adapter's folder gives the scores of the adapted model, fused and transposed layouts alike."""
    model = BY_NAME[name].build()
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, use_dora=use_dora))
    torch.manual_seed(1)
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    scores, expected = score_checkpoint(tmp_path / "adapter"), score_model(adapted)
    base = score_checkpoint(tmp_path / "base")
    for layer, live, plain in zip(scores.layers, expected.layers, base.layers, strict=True):
        assert layer.head_symmetry == live.head_symmetry
        assert layer.directionality == live.directionality
        assert layer.symmetry != plain.symmetry
        assert f"base_model.model.{layer.name}" == live.name


def test_an_adapter_without_its_base_says_so(tmp_path):
    model = BY_NAME["llama"].build()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = None
    adapted.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        score_checkpoint(tmp_path)


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.fixture
def large():
    """Wider than the headers: 256 channels, so that rows and gaps matter."""
    wide = {"hidden_size": 256, "intermediate_size": 64}
    return {
        "llama": BY_NAME["llama"].config(**wide, num_attention_heads=8, head_dim=32),
        "bert": BY_NAME["bert"].config(**wide),
        "modernbert": BY_NAME["modernbert"].config(**wide),
        "phi3": BY_NAME["phi3"].config(**wide, num_attention_heads=4, num_key_value_heads=2),
        "gpt_neox": BY_NAME["gpt_neox"].config(**wide),
        "gpt2": BY_NAME["gpt2"].config(n_embd=256),
    }


# Of the fused tensors the rows of Q and K, where they lie together; else the tensor, up to its last such row.
_SHARE = {"llama": 1, "bert": 1, "modernbert": 2 / 3, "phi3": 6 / 8, "gpt_neox": 11 / 12, "gpt2": 1}


@pytest.mark.parametrize("name", list(_SHARE))
@pytest.mark.parametrize("shard", ["50GB", "600KB"], ids=["one file", "shards"])
def test_only_queries_and_keys_cross_the_network(name, shard, large, hub, tmp_path):
    """At most 1.05 of their bytes and the headers of the files that hold them; never a whole file."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(large[name])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    hub.add_repo("org/model", tmp_path)
    scores = score_checkpoint("org/model")
    assert scores == score_model(model)
    layers = find_checkpoint_layers(tmp_path).layers
    files = {tensor.file for layer in layers for tensor in layer.keys}
    needed = sum(tensor.nbytes for layer in layers for tensor in layer.keys) * _SHARE[name]
    headers = sum(8 + int.from_bytes((tmp_path / file).read_bytes()[:8], "little") for file in files)
    sent = hub.sent(r"\.safetensors")
    assert needed + headers <= sent <= 1.05 * needed + headers
    untouched = {path.name for path in tmp_path.glob("*.safetensors")} - files
    assert not any(hub.asked(re.escape(file), method="GET") for file in untouched)


def test_neighbours_are_read_together(large, hub, tmp_path):
    """BERT's key and query lie side by side but for a bias: one request a layer, not two."""
    model = transformers.AutoModel.from_config(large["bert"])
    model.save_pretrained(tmp_path)
    hub.add_repo("org/model", tmp_path)
    score_checkpoint("org/model")
    ranges = [request for request in hub.asked(r"\.safetensors", method="GET", server="storage") if request.range]
    assert len(ranges) == 2 + model.config.num_hidden_layers  # length of the header, header, layers


def test_interrupted_reading_goes_on(large, hub, tmp_path, monkeypatch):
    """Dropped connections and a busy server cost time, not the result."""
    monkeypatch.setattr("hf_symqk.checkpoint.ranges.BASE_WAIT", 0.01)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(large["llama"])
    model.save_pretrained(tmp_path)
    hub.add_repo("org/model", tmp_path)
    hub.add_fault(r"storage/.*safetensors", drop_after=1000, times=3)
    hub.add_fault(r"storage/.*safetensors", status=503, times=2)
    assert score_checkpoint("org/model") == score_model(model)


def test_pickles_are_fetched_whole_and_once(hub, tmp_path):
    """They cannot be read in part; the second time they come from the cache."""
    model = BY_NAME["bert"].build()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / FILE).unlink()
    hub.add_repo("org/model", tmp_path)
    assert score_checkpoint("org/model") == score_model(model)
    hub.clear()
    assert score_checkpoint("org/model") == score_model(model)
    assert hub.sent(r"\.bin") == 0
