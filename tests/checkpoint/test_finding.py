"""Broken, incomplete and foreign checkpoints: one clear error each that names the file and the tensor."""

import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
import transformers
from architectures import BY_NAME
from oracle.building import build
from safetensors.torch import load_file, save_file

from hf_symqk import score_checkpoint, score_model
from hf_symqk.attention import HeadRows, Projection, register_qk_layout, unregister_qk_layout
from hf_symqk.checkpoint import find_checkpoint_layers


FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A LLaMA with grouped keys, in one file."""
    BY_NAME["llama"].build().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path):
    """The same in many files with an index."""
    BY_NAME["llama"].build().save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def _edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _edit_weights(folder, edit):
    weights = load_file(folder / FILE)
    edit(weights)
    save_file(weights, folder / FILE)


def _drop(key):
    return lambda weights: weights.pop(key)


def _refuse(folder, *texts):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, texts))) as caught:
        score_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_key_missing_in_one_layer_is_named(folder):
    """The layer must not just be left out of the scores."""
    _edit_weights(folder, _drop("layers.1.self_attn.k_proj.weight"))
    _refuse(folder, FILE, "layers.1.self_attn.k_proj")


@pytest.mark.parametrize("number", [1, 2], ids=["in the middle", "at the end"])
def test_a_missing_layer_is_named(folder, number):
    """A model cut short, or with a hole, gives no summary of the rest."""
    _edit_weights(folder, lambda weights: [weights.pop(key) for key in list(weights) if f"layers.{number}." in key])
    _refuse(folder, FILE, f"layer {number}", "3 layers")


@pytest.mark.parametrize(
    "part", ["self_attn.q_norm", "self_attn.q_norm self_attn.q_proj self_attn.k_proj self_attn.k_norm"]
)
def test_what_a_layer_lacks_is_named(part, tmp_path):
    """A norm that is missing would not be folded in, a layer without attention would not be counted: both silently."""
    BY_NAME["qwen3"].build().save_pretrained(tmp_path)
    _edit_weights(tmp_path, lambda weights: [weights.pop(f"layers.1.{name}.weight") for name in part.split()])
    _refuse(tmp_path, "layers.1.self_attn")


def test_layers_that_predict_further_tokens_are_left_out(folder):
    """They come with a model and are not loaded with it, under two names."""
    expected = score_checkpoint(folder).layers
    _edit_config(folder, num_hidden_layers=2, num_nextn_predict_layers=1)
    _edit_weights(folder, lambda weights: weights.update({"mtp.layers.1.q_proj.weight": torch.zeros(4, 4)}))
    scores = score_checkpoint(folder)
    assert scores.layers == expected[:2]
    assert scores.skipped == (
        "mtp: predicts tokens after the next one",
        "layers.2: predicts tokens after the next one",
    )


def test_norms_of_unknown_model_types_are_warned_of(tmp_path):
    """A file does not say whether they multiply by w or 1 + w."""
    BY_NAME["qwen3"].build().save_pretrained(tmp_path)
    _edit_config(tmp_path, model_type="somebodys_own")
    with pytest.warns(RuntimeWarning, match="somebodys_own.*1 \\+ w"):
        score_checkpoint(tmp_path)


def test_heads_that_the_config_does_not_explain_are_refused(tmp_path):
    """
    ConvBERT halves its heads by a setting of its own, which is known of that type alone: in another one, 4 heads of
    half the width would be wrong ones.
    """
    config = transformers.ConvBertConfig(**BY_NAME["bert"].values, head_ratio=2)
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)
    _edit_config(tmp_path, model_type="another_convbert")
    _refuse(tmp_path, "4 heads", "24 rows")


def test_numbers_that_json_does_not_have(tmp_path):
    """Transformers writes infinity in a way of its own."""
    BY_NAME["llama"].build().save_pretrained(tmp_path)
    _edit_config(tmp_path, time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert find_checkpoint_layers(tmp_path).config.time_step_limit == [0.0, float("inf")]


# Models with a head whose names, unlike those of the base alone, or whose tensors Transformers changes on load.
_HEADED = {
    "BertForMaskedLM": ("BertConfig", BY_NAME["bert"].values),
    "ViTForImageClassification": ("ViTConfig", BY_NAME["vit"].values),
    "SegformerForSemanticSegmentation": (
        "SegformerConfig",
        {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 16},
    ),
    "NomicBertForMaskedLM": ("NomicBertConfig", BY_NAME["bert"].values),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **BY_NAME["llama"].values},
            "vision_config": {"model_type": "clip_vision_model", **BY_NAME["vit"].values},
        },
    ),
}


@pytest.mark.parametrize("name", list(_HEADED))
def test_names_of_models_with_heads(name, tmp_path):
    """Prefixes, old names and tensors that Transformers splits: the same layers under the same names."""
    config_class, values = _HEADED[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config_class)(**values))
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


def test_a_missing_shard_is_named(shards):
    """Nothing is scored before all files of the index are seen to be there."""
    index = json.loads((shards / f"{FILE}.index.json").read_text())["weight_map"]
    name = next(file for key, file in index.items() if "k_proj" in key)
    (shards / name).unlink()
    _refuse(shards, f"{FILE}.index.json", name, "not there")


def test_a_shard_that_lacks_a_tensor_is_named(shards):
    """The index promises what the file does not hold."""
    path = shards / f"{FILE}.index.json"
    content = json.loads(path.read_text())
    names = sorted(set(content["weight_map"].values()))
    key = "layers.0.self_attn.q_proj.weight"
    content["weight_map"][key] = next(name for name in names if name != content["weight_map"][key])
    path.write_text(json.dumps(content))
    _refuse(shards, key, content["weight_map"][key])


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(shards, text):
    (shards / f"{FILE}.index.json").write_text(text)
    _refuse(shards, f"{FILE}.index.json")


def test_a_truncated_file_is_named(folder):
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-1000])
    _refuse(folder, FILE, "cut off")


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_broken_config_is_named(folder, text):
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    _refuse(folder, "config.json")


def test_without_config_there_are_no_heads(folder):
    (folder / "config.json").unlink()
    _refuse(folder, "config.json", "heads")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hidden_size": 96}, "hidden_size=96"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}, "12 query heads"),
        ({"num_hidden_layers": 5}, "5 layers"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_config_that_disagrees_with_shapes_is_refused(folder, values, named):
    """Wrong head counts give scores that look like any others."""
    _edit_config(folder, **values)
    _refuse(folder, named)


def test_unknown_model_types_are_read_by_their_names(folder):
    """A repository with code of its own: config and names are enough, the code is not run."""
    expected = score_checkpoint(folder)
    _edit_config(folder, model_type="somebodys_own", auto_map={"AutoModel": "modeling_own.OwnModel"})
    (folder / "modeling_own.py").write_text("raise SystemExit('code of the repository was run')")
    scores = score_checkpoint(folder)
    # Nobody has proven them by a forward pass, whatever the names.
    unknown = {"verified": False, "role": None, "causal": None}
    assert scores.layers == tuple(replace(layer, **unknown) for layer in expected.layers)
    assert all(layer.verified for layer in expected.layers)
    assert scores.model_type == "somebodys_own"


def test_parts_of_unknown_model_types_have_their_own_heads(tmp_path):
    """A head count is taken from the part of the config that the path names, and never from another."""
    architecture = BY_NAME["clip"]
    model = architecture.build()
    model.save_pretrained(tmp_path)
    _edit_config(
        tmp_path,
        model_type="somebodys_own",
        text_config={"num_attention_heads": 4, "hidden_size": 48},
        vision_config={"num_attention_heads": 3, "hidden_size": 48},
    )
    told = [(layer.name, layer.num_heads, layer.symmetry) for layer in score_checkpoint(tmp_path).layers]
    assert told == [(layer.name, layer.num_heads, layer.symmetry) for layer in score_model(model).layers]
    _edit_config(tmp_path, text_config=None, lower_config={"num_attention_heads": 4, "hidden_size": 48})
    with pytest.raises(ValueError, match=r"text_model.*vision_config, lower_config"):
        score_checkpoint(tmp_path, layers={"text_model": [0]})


@pytest.mark.parametrize(
    ("file", "format"),
    [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("flax_model.msgpack", "Flax"),
        ("tf_model.h5", "TensorFlow"),
        ("__0_0.distcp", "distributed checkpoint"),
    ],
)
def test_other_formats_are_named(folder, file, format):
    (folder / FILE).rename(folder / file)
    _refuse(folder, format)
    _refuse(folder / file, format)


def test_packed_weights_are_named(folder):
    """4-bit weights that cannot be unpacked are no reason to say that there is no attention."""

    def pack(weights):
        for layer in range(3):
            weight = weights.pop(f"layers.{layer}.self_attn.q_proj.weight")
            weights[f"layers.{layer}.self_attn.q_proj.W_q"] = weight.to(torch.uint8)

    _edit_weights(folder, pack)
    _refuse(folder, "layers.0.self_attn.q_proj", "HQQ")


def test_several_files_without_an_index_are_not_guessed(folder):
    (folder / FILE).rename(folder / "model.fp16.safetensors")
    assert len(score_checkpoint(folder).layers) == 3  # one is enough to tell
    (folder / "other.safetensors").write_bytes((folder / "model.fp16.safetensors").read_bytes())
    _refuse(folder, "several files", "model.fp16.safetensors, other.safetensors")
    assert len(score_checkpoint(folder / "model.fp16.safetensors").layers) == 3


class _Code:
    def __reduce__(self):
        return (print, ("code was run",))


def test_pickles_with_code_are_refused(folder, capsys):
    """By torch, before anything runs; the error says why."""
    (folder / FILE).unlink()
    torch.save({"layers.0.self_attn.q_proj.weight": _Code()}, folder / "pytorch_model.bin")
    _refuse(folder, "pytorch_model.bin", "code")
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps([1])], ids=["empty", "text", "list"])
def test_broken_pickles_are_named(folder, content):
    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    _refuse(folder, "pytorch_model.bin")


def test_pickles_of_the_old_format_are_read(folder):
    """Before torch 1.6 files were no archives and cannot be mapped."""
    expected = score_checkpoint(folder)
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / FILE).unlink()
    assert score_checkpoint(folder) == expected


def test_other_layers_are_not_read(folder):
    """What is not asked for may even be unreadable."""
    with torch.no_grad():

        def spoil(weights):
            weights["layers.2.self_attn.q_proj.qweight"] = torch.zeros(4, 4, dtype=torch.int32)

        _edit_weights(folder, spoil)
    assert [layer.index for layer in score_checkpoint(folder, layers=[0, 1]).layers] == [0, 1]
    _refuse(folder, "layers.2.self_attn.q_proj", "qweight")


def test_layers_say_what_they_are_made_of(tmp_path):
    """`symqk layouts` shows these."""
    BY_NAME["qwen3"].build().save_pretrained(tmp_path)
    survey = find_checkpoint_layers(tmp_path)
    assert [layer.name for layer in survey.layers] == [f"layers.{number}.self_attn" for number in range(3)]
    keys = {tensor.key.rpartition("self_attn.")[2]: tensor.shape for tensor in survey.layers[0].keys}
    assert keys == {
        "q_proj.weight": (96, 48),
        "k_proj.weight": (32, 48),
        "q_norm.weight": (16,),
        "k_norm.weight": (16,),
    }


def test_unserved_attention_is_listed(tmp_path):
    """A layer of another kind among known ones is neither scored nor forgotten."""
    BY_NAME["llama"].build().save_pretrained(tmp_path)

    def add(weights):
        weights["mixer.linear_attn.in_proj_qkvz.weight"] = torch.zeros(8, 48)
        weights["mixer.linear_attn.out_proj.weight"] = torch.zeros(48, 8)

    _edit_weights(tmp_path, add)
    scores = score_checkpoint(tmp_path)
    assert len(scores.layers) == 3
    assert len(scores.skipped) == 1
    assert "mixer.linear_attn" in scores.skipped[0]


def test_what_only_the_live_model_knows_is_refused(folder):
    """Some forwards multiply keys by what is in no file, or count heads otherwise than the config: an error."""
    register_qk_layout(
        name="live only",
        query=Projection("q_proj", HeadRows("query")),
        key=Projection("k_proj", HeadRows("key")),
        file_types=["other"],
    )
    try:
        _refuse(
            folder, "layers.0.self_attn", "'live only' of model type 'llama'", "only the live model", "score_model"
        )
    finally:
        unregister_qk_layout("live only")


@pytest.mark.parametrize("key", ["layer.1.rel_attn.q", "layer.1.rel_attn.k"])
def test_a_parameter_missing_in_one_layer_is_named(key, tmp_path):
    """Weights outside any linear map are held to the same completeness."""
    BY_NAME["xlnet"].build().save_pretrained(tmp_path)
    _edit_weights(tmp_path, lambda weights: weights.pop(next(name for name in weights if name.endswith(key))))
    _refuse(tmp_path, FILE, key)


def test_a_missing_norm_between_two_projections_is_named(tmp_path):
    """Its gain is part of latent keys."""
    BY_NAME["deepseek_v3"].build().save_pretrained(tmp_path)
    _edit_weights(tmp_path, _drop("layers.1.self_attn.kv_a_layernorm.weight"))
    _refuse(tmp_path, FILE, "layers.1.self_attn.kv_a_layernorm")


def test_layers_may_share_an_indexer(tmp_path):
    """Its norms are called as those of queries and keys, and are no part of W_qk: nothing is missing without them."""
    model = build("hy_v4")
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


def test_layers_that_are_counted_as_several(tmp_path):
    """LongCat's `num_hidden_layers` counts two attentions a layer: half of them are not missing, only unknown here."""
    values = {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 8}
    small = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 1}
    config = transformers.LongcatFlashConfig(
        **{"vocab_size": 99, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 16}, **values, **small, **experts
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    _refuse(tmp_path, "longcat_flash", "what only the live model knows")


def test_a_backbone_does_not_get_the_heads_of_the_model_around_it(tmp_path):
    """MaskFormer's Swin has other heads in each stage, one of them as wide as the decoder: widths cannot tell."""
    model = build("maskformer")
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


def test_sides_that_count_heads_by_kind(tmp_path):
    """LW-DETR's decoder has `decoder_self_attention_heads`; those of the encoder would split it otherwise."""
    model = build("lw_detr")
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


@pytest.mark.parametrize("depths", [[1, 1, 3, 2], [2, 2, 1, 1]])
def test_stages_of_different_lengths_are_complete(depths, tmp_path):
    """A stage that is shorter than another lacks nothing: Swin's usual depths (2, 2, 6, 2) were taken for a loss."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=depths, num_heads=[1, 2, 4, 8], window_size=2
    )
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)
