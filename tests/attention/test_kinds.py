"""Role and direction of a layer, and whose keys it reads: what is told from names and config alone."""

import copy
from typing import Any

import pytest
import torch
import transformers
from architectures import BY_NAME, D

from hf_symqk import SymmetricInit, apply_qk_init, find_attention_layers, score_checkpoint, score_model
from hf_symqk.attention import select_layers
from hf_symqk.attention.kinds import kind_of


def config_of(model_type: str, **values: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **values)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("encoder.layer.0.attention.self", ("bert", {}), ("encoder", False)),
        ("encoder.layer.0.attention.self", ("bert", {"is_decoder": True}), ("decoder", True)),
        ("h.0.attn", ("gpt2", {}), ("decoder", True)),
        ("layers.0.self_attn", ("llama", {}), ("decoder", True)),
        ("layers.0.self_attn", ("gemma3_text", {}), ("decoder", True)),
        ("layers.0.self_attn", ("gemma3_text", {"use_bidirectional_attention": True}), ("encoder", False)),
        ("decoder.block.0.layer.0.SelfAttention", ("t5", {}), ("decoder", True)),
        ("encoder.block.0.layer.0.SelfAttention", ("t5", {}), ("encoder", False)),
        ("text_model.encoder.layers.0.self_attn", ("clip_text_model", {}), ("encoder", True)),
        ("vision_model.encoder.layers.0.self_attn", ("clip_vision_model", {}), ("encoder", False)),
        ("decoder.layers.0.self_attn", ("detr", {"use_timm_backbone": False}), ("decoder", False)),
        ("vlm.language_model.layers.0.self_attn", ("gemma", {"use_bidirectional_attention": True}), ("decoder", None)),
        ("h.0.attn", ("nobody_knows", None), (None, None)),
    ],
)
def test_from_path_and_config(name, config, expected):
    """What is not known is `None`, never a guess; a flag of the config overrules the model type."""
    model_type, values = config
    if values is None:
        told: Any = transformers.PreTrainedConfig()
        told.model_type = model_type
    else:
        told = config_of(model_type, **values)
    assert kind_of(name, "self", told) == expected
    assert kind_of(name, "cross", told) == (expected[0], None)


@pytest.mark.parametrize(
    ("name", "attention", "stacks"),
    [
        ("bart", "encoder", {"encoder"}),
        ("bart", "decoder", {"decoder"}),
        ("t5", "causal", {"decoder"}),
        ("whisper", "bidirectional", {"encoder"}),
        ("clip", "causal", {"text_model"}),
        ("clip", "bidirectional", {"vision_model"}),
    ],
)
def test_choices_reach_scores_and_init(name, attention, stacks, tmp_path):
    """One choice means the same layers for a model, its checkpoint and the init, and never cross-attention."""
    model = BY_NAME[name].build(qk_init=SymmetricInit(attention=attention))
    scores = score_model(model, attention=attention)
    assert set(scores.stacks) == stacks
    assert all(layer.symmetry > 0.999 for layer in scores.layers)
    others = [layer for layer in score_model(model, attention="all").layers if layer not in scores.layers]
    assert others
    assert all(layer.symmetry < 0.5 for layer in others)
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path, attention=attention) == scores


def test_a_choice_the_model_does_not_have_lists_what_it_has():
    with pytest.raises(
        ValueError, match=r"no causal self-attention layer .* only bidirectional self-attention \(encoder\)"
    ):
        select_layers(find_attention_layers(BY_NAME["bert"].build()), attention="causal")
    found = find_attention_layers(BY_NAME["t5"].build())
    with pytest.raises(ValueError, match=r"must be one of 'self', 'cross', 'all', 'encoder', 'decoder'"):
        select_layers(found, attention="both")  # type: ignore[arg-type]  # on purpose


# --- keys of another layer -------------------------------------------------------------------------------------------

_SHARED = {
    "hidden_size": D,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": 99,
    "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LENT = {"layers.4.self_attn": "layers.2.self_attn", "layers.5.self_attn": "layers.3.self_attn"}


def borrowing_model(model_type: str) -> Any:
    values = dict(_SHARED)
    if model_type == "gemma3n_text":
        values |= {"activation_sparsity_pattern": None, "laurel_rank": 8}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config_of(model_type, **values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))  # gains, so that one that is not folded in shows
    return model


borrowing = pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])


@borrowing
def test_borrowed_keys_are_those_of_the_forward(model_type):
    """
    The last layers read keys of the last layer of their kind before them: if that layer's k_proj changes, what reaches
    their softmax changes, as their scores do; k_proj of any other layer leaves their keys as they are.
    """
    model = borrowing_model(model_type)
    layers = {layer.name: layer for layer in find_attention_layers(model)}
    assert {name: layer.key_source for name, layer in layers.items() if layer.key_source} == _LENT
    tokens = torch.arange(3, 11)[None]

    def keys_read() -> dict[str, torch.Tensor]:
        read: dict[str, torch.Tensor] = {}

        def note(module, query, key, value, attention_mask=None, **kwargs):
            read[next(name for name, layer in layers.items() if layer.module is module)] = key
            return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](
                module, query, key, value, attention_mask, **kwargs
            )

        transformers.AttentionInterface.register("note_keys", note)
        transformers.AttentionMaskInterface.register("note_keys", transformers.masking_utils.sdpa_mask)
        model.set_attn_implementation("note_keys")
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        return read

    read = keys_read()
    for name, lender in _LENT.items():
        assert torch.equal(read[name], read[lender])
        before = score_model(model)
        weight = layers[lender].module.k_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))
        changed = {one.name for one, two in zip(before.layers, score_model(model).layers, strict=True) if one != two}
        assert changed == {name, lender}
        with torch.no_grad():
            weight.copy_(kept)


@borrowing
@pytest.mark.parametrize("unread", [False, True], ids=["absent", "in the file, unread"])
def test_borrowed_keys_of_a_checkpoint(model_type, unread, tmp_path):
    """A file may lack the keys of a borrower, or hold keys that no forward reads; both are scored as the model is."""
    from safetensors.torch import load_file, save_file

    model = borrowing_model(model_type)
    model.save_pretrained(tmp_path)
    if unread:
        tensors = load_file(tmp_path / "model.safetensors")
        for name, lender in _LENT.items():
            for part in ("k_proj", "k_norm"):
                tensors[f"{name}.{part}.weight"] = torch.randn_like(tensors[f"{lender}.{part}.weight"])
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    scores = score_checkpoint(tmp_path)
    assert scores == score_model(model)
    assert {layer.name: layer.key_source for layer in scores.layers if layer.key_source} == _LENT


def test_a_borrower_without_queries_is_a_broken_file(tmp_path):
    """What the lender gives is no excuse for what the borrower has to have itself."""
    from safetensors.torch import load_file, save_file

    borrowing_model("gemma3n_text").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.5.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor of layers.5.self_attn.q_proj"):
        score_checkpoint(tmp_path)


@borrowing
def test_borrowed_keys_cannot_be_made_from_several_queries(model_type):
    """Refused before anything is written, whatever would write them; layers with keys of their own can be chosen."""
    model = borrowing_model(model_type)
    before = copy.deepcopy(model.state_dict())
    for init in ("symmetric", SymmetricInit("independent", distribution="kaiming_uniform"), SymmetricInit(layers=[4])):
        with pytest.raises(ValueError, match=r"'layers.4.self_attn' reads the keys of 'layers.2.self_attn'"):
            apply_qk_init(model, init)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="reads the keys of"):
        transformers.AutoModel.from_config(model.config, qk_init="symmetric")
    apply_qk_init(model, SymmetricInit(layers=[0, 1, 2, 3]))
    symmetric = [layer.name for layer in find_attention_layers(model) if not layer.key_source]
    assert len(symmetric) == 4


def test_latent_keys_are_borrowed_before_they_are_expanded(tmp_path):
    """Mistral Large 4 lends the latent; each layer expands it with a projection of its own."""
    config = config_of(
        "mistral_large4_text",
        **{k: v for k, v in _SHARED.items() if k not in ("layer_types", "num_kv_shared_layers", "head_dim")}
        | {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 3,
            "kv_source_layers": [0, 1, 1],
            "no_rope_layers": [1, 1, 1],
            "indexer_types": ["full", "full", "full"],
        },
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    lender, layer = find_attention_layers(model)[1:]
    assert layer.key_source == lender.name == "layers.1.self_attn"
    with layer.query_key_weights() as (_, w_k):
        own, lent = layer.module.kv_b_proj.weight, lender.module.kv_a_proj_with_mqa.weight
        expected = own.unflatten(0, (4, -1))[:, :12] @ (lent[:20] * lender.module.kv_a_layernorm.weight[:, None])
        # Rounding of fp32 sums over 20 channels.
        torch.testing.assert_close(w_k[:, :12], expected, rtol=1e-4, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert score_checkpoint(tmp_path) == score_model(model)


def test_keys_of_another_model_are_left_out_with_the_reason():
    """An assistant reads the keys of the model that it assists: there is no W_qk in it."""
    model = borrowing_model("gemma4_text")
    model.config.num_kv_shared_layers = model.config.num_hidden_layers
    with pytest.raises(ValueError, match="its keys come from another model"):
        find_attention_layers(model)


def test_modules_that_layers_share_count_once():
    """ALBERT repeats one layer, Zamba2 one block at several depths: one W_qk, one entry."""
    assert len(find_attention_layers(BY_NAME["albert"].build())) == 1
