"""What every init promises of the weights, and the symmetric one of its scores, on each architecture."""

import copy
import math

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, INIT_ARCHITECTURES, IRREGULAR, LAYERS, Architecture
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

import hf_symqk
from hf_symqk import SymmetricInit, apply_qk_init, find_attention_layers, score_model
from hf_symqk.attention import HeadRows, Projection

from .family import MEMBERS, PER_HEAD, check_refusal


def build_pair(architecture: Architecture, qk_init, seed: int = 0, **kwargs):
    """A plain model and an initialised one under one seed, and the random state that each left behind."""
    plain = architecture.build(seed, **kwargs)
    plain_state = torch.get_rng_state()
    changed = architecture.build(seed, qk_init=qk_init, **kwargs)
    return plain, changed, plain_state, torch.get_rng_state()


def assert_equal_but_for(plain: PreTrainedModel, changed: PreTrainedModel, parts: tuple[str, ...] = ("key",)) -> None:
    """Every parameter and buffer bit-equal, except the given parts of self-attention layers."""
    plain, changed = copy.deepcopy(plain), copy.deepcopy(changed)
    for model in (plain, changed):
        for layer in find_attention_layers(model):
            if layer.kind == "self":
                with layer.tensors(*parts, write=True) as tensors:
                    for weight, bias in tensors.values():
                        weight.zero_()
                        if bias is not None:
                            bias.zero_()
    ours, theirs = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (changed, plain))
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


architectures = pytest.mark.parametrize("architecture", INIT_ARCHITECTURES, ids=lambda a: a.name)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_symmetry_is_one_and_nothing_else_changes(architecture: Architecture):
    """
    Protects the promise as a whole: with the same seed only K differs from the plain init, the random state after
    construction is the same, and every head form (the layer form, with grouped keys) is symmetric.
    """
    plain, changed, plain_state, state = build_pair(architecture, "symmetric")
    assert torch.equal(plain_state, state)
    assert_equal_but_for(plain, changed)
    for layer in score_model(changed).layers:
        # Both factors are the same numbers: what is left is the rounding of fp32 sums.
        assert layer.symmetry == pytest.approx(1, abs=1e-5)
        if layer.num_heads == layer.num_key_value_heads:
            assert layer.head_symmetry == pytest.approx([1] * layer.num_heads, abs=1e-5)
    assert max(abs(layer.symmetry) for layer in score_model(plain).layers) < 0.5, "the plain init must not pass for it"


@architectures
@pytest.mark.parametrize("member", MEMBERS)
def test_members_change_what_they_say_and_take_no_randomness(architecture: Architecture, member: str):
    """
    The rest of the family: with the same seed only what `rewrites` names differs from the plain init, the random
    state is the same, the same seed gives the same, and what a layer cannot hold is refused.
    """
    init = SymmetricInit.from_value(MEMBERS[member])
    if member in PER_HEAD and architecture.name == "llama":
        with pytest.raises(ValueError, match=r"'layers.0.self_attn' .*6 query heads"):
            architecture.build(qk_init=init)
        return
    plain, changed, plain_state, state = build_pair(architecture, init)
    assert torch.equal(plain_state, state)
    assert_equal_but_for(plain, changed, parts=init.rewrites)
    assert ("query" in init.rewrites) == (member == "mimetic" or member.startswith("matched"))
    for layer, before, again in zip(
        *(find_attention_layers(model) for model in (changed, plain, architecture.build(qk_init=init))), strict=True
    ):
        with layer.tensors("query", "key") as t, before.tensors("query", "key") as b, again.tensors("key") as a:
            assert torch.equal(t["key"].weight, a["key"].weight)
            for part in ("query", "key"):
                written = layer.kind == "self" and part in init.rewrites
                assert torch.equal(t[part].weight, b[part].weight) != written


@architectures
def test_keys_keep_their_own_scale(architecture: Architecture):
    """K's standard deviation is that of the model's own K draw: a plain copy of Q would shrink T5's logits √E-fold."""
    # Wide enough that chance (1/√(2n) relative, n ≥ 2,300 weights a layer) stays below the 8 % tolerance.
    plain, changed, _, _ = build_pair(architecture, "symmetric")
    for before, after in zip(find_attention_layers(plain), find_attention_layers(changed), strict=True):
        with before.tensors("key", "query") as old, after.tensors("key", "query") as new:
            assert new["key"].weight.std().item() == pytest.approx(old["key"].weight.std().item(), rel=0.08)
            if architecture.name == "t5" and after.kind == "self":
                ratio = (new["key"].weight / new["query"].weight).mean().item()
                assert ratio == pytest.approx(math.sqrt(after.heads.head_dim), rel=0.08)
            elif after.kind == "self" and after.heads.num_key_value_groups == 1:
                assert torch.equal(new["key"].weight, new["query"].weight), "drawn alike: the ratio is exactly 1"


@architectures
def test_query_and_key_stay_two_parameters(architecture: Architecture):
    """They share no storage (unless fused) and differ after one optimiser step."""
    model = architecture.build(qk_init="symmetric").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    output = model(**architecture.inputs(architecture))
    tensors = [value for value in output.to_tuple() if isinstance(value, torch.Tensor) and value.requires_grad]
    sum(tensor.float().pow(2).sum() for tensor in tensors).backward()
    optimizer.step()
    for layer in find_attention_layers(model):
        if layer.kind == "self":
            with layer.tensors("query", "key") as parts:
                query, key = parts["query"].weight, parts["key"].weight
                assert query.data_ptr() != key.data_ptr()
                r = layer.heads.num_key_value_groups
                expected = query.unflatten(0, (-1, r)).sum(1) / math.sqrt(r)
                assert not torch.allclose(key / key.norm(), expected / expected.norm(), rtol=1e-6, atol=0)


def test_grouped_keys_leave_heads_distinct():
    """With grouped keys the layer form is symmetric and the heads of a group are not made equal."""
    model = BY_NAME["llama"].build(qk_init="symmetric")
    layer = find_attention_layers(model)[0]
    with layer.tensors("query", "key") as tensors:
        groups = tensors["query"].weight.unflatten(0, (2, 3))
        assert torch.allclose(tensors["key"].weight, groups.sum(1) / math.sqrt(3), atol=1e-7)
        assert not torch.allclose(groups[:, 0], groups[:, 1])
    scores = score_model(model).layers[0]
    assert scores.symmetry == pytest.approx(1, abs=1e-5)
    assert max(scores.head_symmetry) < 0.95


def test_symmetric_norm_is_root_two_above_independent():
    """Scale must not be mistaken for symmetry: the norm of a symmetric form is √2 above an independent one."""
    config = BY_NAME["bert"].config(hidden_size=256, num_attention_heads=4)
    plain, changed, _, _ = build_pair(BY_NAME["bert"], "symmetric", config=config)
    ratios = [
        b / a
        for x, y in zip(score_model(plain).layers, score_model(changed).layers, strict=True)
        for a, b in zip(x.head_frobenius_norm, y.head_frobenius_norm, strict=True)
    ]
    # E‖W_q W_qᵀ‖² / E‖W_q W_kᵀ‖² = (D + E + 1)/D = 1.25 for D = 256, E = 64; 2 for the layer form with R = D.
    assert sum(ratios) / len(ratios) == pytest.approx(math.sqrt(1 + 65 / 256), rel=0.02)
    layers = [
        y.frobenius_norm / x.frobenius_norm
        for x, y in zip(score_model(plain).layers, score_model(changed).layers, strict=True)
    ]
    assert sum(layers) / len(layers) == pytest.approx(math.sqrt(2), rel=0.02)


def test_biases_follow_where_both_exist():
    """K's bias is Q's where both exist (grouped as the weights are); a bias without partner stays as it is."""
    for name in ("bert", "qwen2", "whisper"):
        model = BY_NAME[name].build()
        layers = [layer for layer in find_attention_layers(model) if layer.kind == "self"]
        before = []
        for layer in layers:
            with layer.tensors("query", "key", write=True) as tensors:
                for tensor in tensors.values():
                    if tensor.bias is not None:
                        tensor.bias.normal_()
                before.append(tensors["query"].bias.clone())
        apply_qk_init(model)
        for layer, b_q in zip(layers, before, strict=True):
            with layer.tensors("query", "key") as tensors:
                assert torch.equal(tensors["query"].bias, b_q)
                if name == "whisper":
                    assert tensors["key"].bias is None
                else:
                    r = layer.heads.num_key_value_groups
                    expected = b_q.unflatten(0, (-1, r)).sum(1) / math.sqrt(r)
                    torch.testing.assert_close(tensors["key"].bias, expected)


@pytest.mark.parametrize("layers", [[0, 2], (2, 0, 0)])
def test_layers_choose(layers):
    """Only the named layers change."""
    model = BY_NAME["bert"].build(qk_init=SymmetricInit(layers=layers))
    assert [round(layer.symmetry, 3) == 1 for layer in score_model(model).layers] == [True, False, True]


def test_layers_choose_per_stack():
    """Indices count within a named stack, whichever class is built around the stacks."""
    for auto_class in ("AutoModel", "AutoModelForSeq2SeqLM"):
        architecture = Architecture(**{**vars(BY_NAME["bart"]), "auto_class": auto_class})
        model = architecture.build(qk_init={"layers": {"encoder": [1], "decoder": [0, 2]}})
        done = [(layer.stack, layer.index) for layer in score_model(model).layers if round(layer.symmetry, 3) == 1]
        assert done == [("encoder", 1), ("decoder", 0), ("decoder", 2)]


def test_attention_chooses():
    """`attention="all"` reaches cross-attention, `"cross"` only that."""
    for attention, expected in (("self", {"self"}), ("cross", {"cross"}), ("all", {"self", "cross"})):
        model = BY_NAME["t5"].build(qk_init=SymmetricInit(attention=attention))
        layers = score_model(model, attention="all").layers
        assert {layer.kind for layer in layers if layer.symmetry > 0.999} == expected
        assert all(layer.symmetry < 0.5 for layer in layers if layer.kind not in expected)


@architectures
@pytest.mark.parametrize("scheme", ["symmetric", "independent"])
def test_distribution_redraws_and_takes_no_randomness(architecture: Architecture, scheme: str):
    """
    `distribution="kaiming_uniform"` is PyTorch's ±1/√D for Q, K, V and unequal biases; the random state and every
    other weight stay those of the plain init, and with "independent" it is that change of scale alone.
    """
    qk_init = SymmetricInit(scheme=scheme, distribution="kaiming_uniform")
    plain, changed, plain_state, state = build_pair(architecture, qk_init)
    assert torch.equal(plain_state, state)
    assert_equal_but_for(plain, changed, parts=("query", "key", "value"))
    again = architecture.build(0, qk_init=qk_init)
    other = architecture.build(1, qk_init=qk_init)
    for layer, same, different in zip(*map(find_attention_layers, (changed, again, other)), strict=True):
        if layer.kind != "self":
            continue
        with layer.tensors("query", "key", "value") as t, same.tensors("query") as s, different.tensors("query") as d:
            assert torch.equal(t["query"].weight, s["query"].weight), "the same seed must draw the same"
            assert not torch.equal(t["query"].weight, d["query"].weight), "another seed must draw anew"
            bound = layer.input_width("query") ** -0.5
            for part in t.values():
                if scheme == "symmetric" and part is t["key"] and layer.heads.num_key_value_groups > 1:
                    continue  # a sum of uniform weights
                assert part.weight.abs().max() <= bound
                # Uniform in ±b has std b/√3; n ≥ 768 weights give it to 1.6 % (one standard error), here 5 of them.
                assert part.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.08)
                if part.bias is not None:
                    assert 0 < part.bias.abs().max() <= bound
            if t["query"].bias is not None and t["key"].bias is not None:
                assert not torch.equal(t["query"].bias.flatten()[:4], t["key"].bias.flatten()[:4])
    symmetric = [layer.symmetry > 0.999 for layer in score_model(changed).layers]
    assert all(symmetric) if scheme == "symmetric" else not any(symmetric)


def test_half_precision_models():
    """`dtype=bfloat16`: K equals Q bit by bit where they are drawn alike, and the layer form is symmetric."""
    for name in ("bert", "llama", "t5"):
        model = BY_NAME[name].build(qk_init="symmetric", dtype=torch.bfloat16)
        assert all(layer.symmetry == pytest.approx(1, abs=2e-3) for layer in score_model(model).layers)


def test_apply_to_an_existing_model_equals_construction():
    """`apply_qk_init` does to an existing model what `from_config(qk_init=…)` does to a new one, and records it."""
    for name in ("bert", "t5", "llama"):
        built = BY_NAME[name].build(qk_init="symmetric")
        plain = BY_NAME[name].build()
        parameters = list(plain.parameters())
        assert apply_qk_init(plain, "symmetric") is plain
        assert all(a is b for a, b in zip(parameters, plain.parameters(), strict=True)), "an optimizer holds these"
        assert all(torch.equal(a, b) for a, b in zip(built.parameters(), plain.parameters(), strict=True))
        assert plain.config.qk_init == SymmetricInit()


def test_unseen_layout_works_by_one_registration():
    """Finding, scoring and initialising know a new layout by one entry, without another line."""

    class Attention(nn.Module):
        num_heads, head_dim = 3, 8

        def __init__(self):
            super().__init__()
            self.to_vkq = nn.Linear(24, 72)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Attention() for _ in range(2)])

    order = ("value", "key", "query")
    torch.manual_seed(0)
    model = Model()
    with pytest.raises(ValueError, match="to_vkq"):
        score_model(model)
    entry = {part: Projection("to_vkq", HeadRows(part, order)) for part in order}
    hf_symqk.register_qk_layout(name="unseen", **entry)
    try:
        with pytest.raises(ValueError, match="'unseen' is registered already"):
            hf_symqk.register_qk_layout(name="unseen", **entry)
        attention = model.blocks[1]
        weight = attention.to_vkq.weight.detach().clone()
        w_q, w_k = weight[48:], weight[24:48]
        dense = w_q.T @ w_k
        expected = ((dense * dense.T).sum() / dense.square().sum()).item()
        assert score_model(model).layers[1].symmetry == pytest.approx(expected, abs=1e-5)
        apply_qk_init(model, "symmetric")
        assert torch.equal(attention.to_vkq.weight, torch.cat([weight[:24], w_q, w_q]))
        assert score_model(model).summary()["symmetry"]["median"] == pytest.approx(1, abs=1e-5)
    finally:
        hf_symqk.unregister_qk_layout("unseen")


IRREGULAR_AND_WRITABLE = [
    architecture for architecture in IRREGULAR if not architecture.name.startswith(("deepseek", "axk2"))
]


@pytest.mark.parametrize("architecture", IRREGULAR_AND_WRITABLE, ids=lambda a: a.name)
def test_irregular_layouts_keep_the_promise(architecture: Architecture):
    """Interleaved, sharded, three-dimensional and scaled weights: only K changes, and every form is symmetric."""
    plain, changed, plain_state, state = build_pair(architecture, "symmetric")
    assert torch.equal(plain_state, state)
    assert_equal_but_for(plain, changed)
    for layer in score_model(changed).layers:
        assert layer.symmetry == pytest.approx(1, abs=1e-5)  # rounding of fp32 sums


def test_linear_attention_beside_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """A hybrid's softmax layers are served without being listed, and a warning says what is not."""
    said: list[str] = []
    monkeypatch.setattr(hf_symqk.init.applying.logger, "warning_once", said.append)  # it says a thing once a process
    model = BY_NAME["qwen3_next"].build(qk_init="symmetric")
    assert any("leaves as they are" in text and "GatedDeltaNet" in text for text in said)
    assert [layer.symmetry for layer in score_model(model).layers] == pytest.approx([1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "qk_init", "message"),
    [
        ("bert", SymmetricInit(layers=[1, 7]), r"asks for \[7\] of stack ''; this model has '': layers 0 to 2"),
        (
            "bert",
            SymmetricInit(layers={"encoder": [0]}),
            r"names the stack 'encoder'; this model has '': layers 0 to 2",
        ),
        ("bart", SymmetricInit(layers=[2]), r"asks for \[2\] of stack 'encoder'.*'decoder': layers 0 to 2"),
        (
            "bert",
            SymmetricInit(attention="cross"),
            r"no cross-attention layer .* only bidirectional self-attention \(encoder\)",
        ),
        ("deepseek_v3", "symmetric", r"layers.0.self_attn.*query weight .* is a product \(q_a_proj, q_b_proj\)"),
        ("deepseek_v2", "symmetric", r"layers.0.self_attn.*key weight .*kv_b_proj.*scored but not initialised"),
        ("axk2", "symmetric", r"query weight .* is a product \(q_a_proj, q_gate_proj\)"),
    ],
)
def test_options_the_model_does_not_have_are_refused_before_writing(name, qk_init, message):
    """Out-of-range layers and unknown stacks are errors that name the choices, and nothing has been written."""
    check_refusal(name, qk_init, message)


def test_layers_that_the_scheme_cannot_serve_are_refused_before_writing():
    """Queries and keys from streams of two widths, or a Q that is all zero: an error before anything is written."""

    class Attention(nn.Module):
        num_heads, head_dim = 2, 4

        def __init__(self, width):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(width, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Attention(8), Attention(6)])

    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layers.1.*queries are made from 8 channels and its keys from 6"):
        apply_qk_init(model, SymmetricInit(attention="all"))
    with pytest.raises(ValueError, match=r"`distribution` redraws V too, and .*layers.0.* has none where layout"):
        apply_qk_init(model, SymmetricInit(distribution="kaiming_uniform"))
    model.layers[1] = Attention(8)
    nn.init.zeros_(model.layers[1].q_proj.weight)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layers.1.*query weight is all zero"):
        apply_qk_init(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        (
            "segformer",
            {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16},
            r"(?s)to reach every layer, but .*sequence_reduction mixes tokens before",
        ),
        (
            "reformer",
            {
                "attn_layers": ["lsh"],
                "hidden_size": 32,
                "feed_forward_size": 16,
                "num_attention_heads": 2,
                "vocab_size": 99,
                "axial_pos_embds": False,
            },
            r"(?s)No attention layer .*query_key",
        ),
    ],
)
def test_keys_that_are_no_projection_of_their_own_are_refused(model_type, values, message):
    """Convolved keys, and keys that are the queries: there is no W_k to write, and the error says where."""
    config = AutoConfig.for_model(model_type, **values)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_config(config, qk_init="symmetric")


def test_causal_model_with_untouched_generation():
    """A model with generation config builds and generates as before."""
    model = AutoModelForCausalLM.from_config(BY_NAME["llama"].config(), qk_init="symmetric")
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False).shape == (1, 4)
    assert AutoModel.from_config(model.config).config.qk_init == SymmetricInit()
    assert len(score_model(model).layers) == LAYERS
