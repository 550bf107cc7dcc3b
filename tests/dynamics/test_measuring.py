"""
The update of W_qk against autograd, which never sees it: gradients of the parameters that W_q and W_k are, and of a
matrix of zeros that is added to W_qk in the forward pass. Everything else (modes, gradients, hooks, random state) is
left alone.
"""

import copy
from contextlib import contextmanager

import pytest
import torch
import transformers
from architectures import BY_NAME, VOCAB, D
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import hf_symqk
from hf_symqk import find_attention_layers, qk_updates
from hf_symqk.attention.tapping import tap_logits


TOKENS = torch.randint(5, VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))
MASKED = torch.where(torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < 0.3, 4, TOKENS)
PADDING = torch.ones_like(TOKENS)
PADDING[1, 5:] = 0
MASKED_LM = {
    "input_ids": MASKED,
    "labels": TOKENS.masked_fill(MASKED == TOKENS, -100),
    "attention_mask": PADDING,
}
CAUSAL_LM = {"input_ids": TOKENS, "labels": TOKENS}
# Nothing is predicted from padding, whose queries see no token: there kinds of attention differ.
LEFT_PADDED = {**CAUSAL_LM, "attention_mask": PADDING.flip(1), "labels": TOKENS.clone()}
LEFT_PADDED["labels"][1, :3] = -100
SEQUENCES = {"input_ids": MASKED, "labels": TOKENS[:, :5].contiguous(), "attention_mask": PADDING}
IMAGES = {
    "pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3)),
    "labels": torch.tensor([0, 1, 1]),
}
# Without rotary positions, the logits being `scale · (x W_q + b_q) (x W_k + b_k)ᵀ` and what does not depend on it.
DIRECT = {
    "bert, masked": ("bert", "AutoModelForMaskedLM", MASKED_LM, {}),
    "bert as a decoder": ("bert", "AutoModelForCausalLM", CAUSAL_LM, {"is_decoder": True}),
    "vit": ("vit", "AutoModelForImageClassification", IMAGES, {}),
    "gpt2": ("gpt2", "AutoModelForCausalLM", LEFT_PADDED, {}),
    "gpt2, scaled by layer": ("gpt2", "AutoModelForCausalLM", CAUSAL_LM, {"scale_attn_by_inverse_layer_idx": True}),
    "t5, both sides": ("t5", "AutoModelForSeq2SeqLM", SEQUENCES, {}),
    "bart": ("bart", "AutoModelForSeq2SeqLM", SEQUENCES, {}),
    "bloom": ("bloom", "AutoModelForCausalLM", CAUSAL_LM, {}),  # baddbmm with a factor
    "albert": ("albert", "AutoModelForMaskedLM", MASKED_LM, {}),  # one module, called by every layer
    "one key head": ("gpt_bigcode_one_key_head", "AutoModelForCausalLM", CAUSAL_LM, {}),
}
# In fp64, but that some models take their softmax in fp32 whatever their weights are (ViT, Llama).
EXACT = 1e-6
SCALES = {"t5, both sides": 1.0, "gpt_neo": 1.0}


def build(name: str, auto_class: str, dtype: torch.dtype = torch.float64, **overrides) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = BY_NAME[name].config(**overrides)
    model = getattr(transformers, auto_class).from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # also biases, which models start at 0
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def in_dtype(batch: dict, dtype: torch.dtype) -> dict:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def gradients(model: nn.Module, batch: dict) -> nn.Module:
    """A copy of a model whose parameters are their own gradients, by autograd and whatever attention it uses."""
    runs = copy.deepcopy(model).eval()
    runs(**batch).loss.backward()
    for parameter in runs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return runs


def with_bias(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`(heads, D + 1, E)`: weights whose last row is the bias."""
    bias = torch.zeros(weight.shape[:2], dtype=weight.dtype) if bias is None else bias
    return torch.cat([weight.mT, bias.unsqueeze(1)], 1)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def errors(model: nn.Module, batch: dict) -> dict[str, float]:
    """How far contracting the update with the projections is from autograd's gradients of these, at worst."""
    updates = qk_updates(model, batch)
    worst: dict[str, float] = {}
    layers = [find_attention_layers(held) for held in (model, gradients(model, batch))]
    by_name = {layer.name: layer for layer in updates.layers}
    for layer, of_gradients in zip(*layers, strict=True):
        if layer.kind != "self":
            continue
        form = by_name[layer.name].extended_head_forms.to_dense()
        with layer.tensors("query", "key") as weights, of_gradients.tensors("query", "key") as slopes:
            w_q, w_k = (with_bias(*weights[part]) for part in ("query", "key"))
            g_q, g_k = (with_bias(*slopes[part]) for part in ("query", "key"))
            groups = layer.heads.num_key_value_groups
            by_query = form @ w_k.repeat_interleave(groups, 0)
            by_key = (form.mT @ w_q).unflatten(0, (-1, groups)).sum(1)
            without = (form[:, :-1, :-1].mT @ w_q[:, :-1]).unflatten(0, (-1, groups)).sum(1)
            if weights["query"].bias is None:  # then nobody knows the gradient of a bias
                by_query, by_key, g_q, g_k = (tensor[:, :-1] for tensor in (by_query, by_key, g_q, g_k))
            found = {
                "query": relative(by_query, g_q),
                "key": relative(by_key, g_k),
                "key without ones": relative(without, g_k[:, : without.shape[1]]),
            }
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in found.items()}
    return worst


@pytest.mark.parametrize("case", DIRECT)
def test_contracted_with_the_projections_it_gives_their_gradients(case):
    """Of weights and biases, query head by query head, summed over those of a key head."""
    name, auto_class, batch, overrides = DIRECT[case]
    model = build(name, auto_class, **overrides)
    found = errors(model, in_dtype(batch, torch.float64))
    assert found["query"] < EXACT
    assert found["key"] < EXACT
    updates = qk_updates(model, in_dtype(batch, torch.float64))
    for number, layer in enumerate(updates.layers):
        expected = SCALES.get(case, layer.head_dim**-0.5) / (number + 1 if "scaled" in case else 1)
        assert layer.scale == pytest.approx(expected, rel=EXACT)
        assert layer.relation == "direct"


FP32 = {case: DIRECT[case] for case in ("bert, masked", "gpt2", "t5, both sides", "vit")} | {
    # These do part of their attention in fp32 alone.
    "gpt2, upcast": ("gpt2", "AutoModelForCausalLM", CAUSAL_LM, {"reorder_and_upcast_attn": True}),
    "gpt_neo": ("gpt_neo", "AutoModelForCausalLM", CAUSAL_LM, {}),
}


@pytest.mark.parametrize("case", FP32)
def test_in_fp32(case):
    """To 1e-5, which fp32 sums leave room for."""
    name, auto_class, batch, overrides = FP32[case]
    model = build(name, auto_class, torch.float32, **overrides)
    found = errors(model, batch)
    assert found["query"] < 1e-5
    assert found["key"] < 1e-5
    layer = qk_updates(model, batch).layers[0]
    assert layer.scale == pytest.approx(SCALES.get(case, layer.head_dim**-0.5), rel=1e-5)


def test_biases_need_the_channel_of_ones():
    """Without it W_k's gradient is far off where queries have a bias, and right where they have none."""
    with_biases = errors(build("gpt2", "AutoModelForCausalLM"), CAUSAL_LM)
    assert with_biases["key"] < EXACT < 0.1 < with_biases["key without ones"]
    assert errors(build("t5", "AutoModelForSeq2SeqLM"), SEQUENCES)["key without ones"] < EXACT


# --- rotary positions ---------------------------------------------------------------------------------------------


def rotation(config: transformers.PreTrainedConfig, width: int, offset: int) -> torch.Tensor:
    """`R_o` with `(R_i q) · (R_j k) = q R_o kᵀ`, channels paired by halves, written down anew."""
    theta = config.rope_parameters["rope_theta"]
    angles = offset * theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.zeros(width, width, dtype=torch.float64)
    half = width // 2
    for pair, angle in enumerate(angles):
        turn[pair, pair] = turn[pair + half, pair + half] = angle.cos()
        turn[pair, pair + half], turn[pair + half, pair] = angle.sin(), -angle.sin()
    return turn.mT


@pytest.mark.parametrize(("name", "overrides"), [("llama", {}), ("gemma2", {})])
def test_rotary_positions_are_one_form_an_offset(name, overrides, monkeypatch):
    """
    Forms of all offsets add up to that of contents, and contracted each with its own rotation they give the gradients
    of W_q and of grouped W_k; the form of contents alone does not. Gemma 2 caps its logits: no one scale holds there.
    """
    if name == "gemma2":
        config = transformers.Gemma2Config(
            **BY_NAME["llama"].values | {"query_pre_attn_scalar": 9, "attn_logit_softcapping": 0.5}
        )
        torch.manual_seed(0)
        model = transformers.Gemma2ForCausalLM(config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    else:
        model = build(name, "AutoModelForCausalLM", **overrides)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    whole = qk_updates(model, batch)
    offsets = range(-TOKENS.shape[1] + 1, 1)
    parts = {offset: qk_updates(model, batch, offset=offset) for offset in offsets}
    slopes = find_attention_layers(gradients(model, batch))
    for number, (layer, of_gradients) in enumerate(zip(find_attention_layers(model), slopes, strict=True)):
        assert whole.layers[number].relation == "rotated"
        if name == "gemma2":
            assert whole.layers[number].scale is None
        else:
            assert whole.layers[number].scale == pytest.approx(layer.heads.head_dim**-0.5, rel=EXACT)
        forms = {offset: part.layers[number].head_forms.to_dense() for offset, part in parts.items()}
        content = whole.layers[number].head_forms.to_dense()
        assert relative(sum(forms.values()), content) < 1e-12
        groups = layer.heads.num_key_value_groups
        turns = {offset: rotation(model.config, layer.heads.head_dim, offset) for offset in offsets}
        with layer.tensors("query", "key") as weights, of_gradients.tensors("query", "key") as expected:
            w_q, w_k = weights["query"].weight.mT, weights["key"].weight.mT.repeat_interleave(groups, 0)
            g_q, g_k = expected["query"].weight.mT, expected["key"].weight.mT
            by_query = sum(forms[offset] @ w_k @ turns[offset].mT for offset in offsets)
            by_key = sum(forms[offset].mT @ w_q @ turns[offset] for offset in offsets)
            assert relative(by_query, g_q) < EXACT
            assert relative(by_key.unflatten(0, (-1, groups)).sum(1), g_k) < EXACT
            assert relative(content @ w_k, g_q) > 0.01


# --- a matrix of zeros added to W_qk ------------------------------------------------------------------------------


@contextmanager
def added_to_logits(model: nn.Module, scales: dict[str, float]):
    """
    Adds `scale · x Δ_h xᵀ` to the logits of each layer, x the input of its attention module; Δ `(H, D, D)` are zeros.
    """
    layers = {layer.module: layer for layer in find_attention_layers(model) if layer.kind == "self"}
    width = {layer.name: layer.input_width("query") for layer in layers.values()}
    deltas = {
        layer.name: torch.zeros(
            layer.heads.num_attention_heads,
            width[layer.name],
            width[layer.name],
            dtype=model.dtype,
            requires_grad=True,
        )
        for layer in layers.values()
    }
    hidden = {}

    def note(module, args, kwargs):
        hidden[module] = args[0] if args else kwargs["hidden_states"]

    def attention(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if module in layers:
            x, delta = hidden[module].unsqueeze(1), deltas[layers[module].name]
            logits = logits + scales[layers[module].name] * (x @ delta @ x.mT)
        if attention_mask is not None:
            logits = logits + attention_mask
        if kwargs.get("position_bias") is not None:
            logits = logits + kwargs["position_bias"]
        weights = logits.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("test_delta", attention)
    AttentionMaskInterface.register("test_delta", eager_mask)
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in layers]
    model.set_attn_implementation("test_delta")
    yield deltas
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "auto_class", "batch"),
    [
        ("bert", "AutoModelForMaskedLM", MASKED_LM),
        ("gpt2", "AutoModelForCausalLM", LEFT_PADDED),
        ("llama", "AutoModelForCausalLM", CAUSAL_LM),
        ("qwen3", "AutoModelForCausalLM", CAUSAL_LM),  # query and key norms
        ("vit", "AutoModelForImageClassification", IMAGES),
    ],
)
def test_it_is_the_gradient_of_a_matrix_that_is_added_to_w_qk(name, auto_class, batch):
    """
    The definition itself, with rotary positions and norms in the way too: logits `… + scale · x_i Δ x_jᵀ`, and the
    form of each head is `∂ loss / ∂ Δ` at Δ = 0.
    """
    model, batch = build(name, auto_class).eval(), in_dtype(batch, torch.float64)
    updates = qk_updates(model, batch)
    scales = {layer.name: layer.scale for layer in updates.layers}
    with added_to_logits(model, scales) as deltas:
        slopes = dict(zip(deltas, torch.autograd.grad(model(**batch).loss, list(deltas.values())), strict=True))
    assert len(updates.layers) == len(slopes) > 0
    for layer in updates.layers:
        assert relative(layer.head_forms.to_dense(), slopes[layer.name]) < EXACT
        assert relative(layer.form.to_dense(), slopes[layer.name].sum(0)) < EXACT
        assert layer.head_forms.rank <= max(batch["labels"].numel(), D), "as many terms as tokens, or channels"


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("deberta_v2", "direct"),  # products with projected positions reach the softmax too
        ("xlnet", "other"),  # weights that an einsum multiplies by, tokens before sequences
        ("deepseek_v3", "other"),  # latent queries and keys
        ("qwen3", "other"),
        ("codegen", "rotated"),
        ("falcon_one_key_head", "direct"),
        ("mpt", "direct"),
    ],
)
def test_what_stands_in_between_is_said(name, relation):
    """
    And whichever way queries and keys are laid down, β sums to 0 over the context of each prediction, as a softmax
    makes it, while it does not over the predictions of a context: rows and columns are not mixed up.
    """
    architecture = BY_NAME[name]
    model = architecture.build().double()
    updates = qk_updates(model, architecture.inputs(architecture), loss=lambda o, b: o.last_hidden_state.sin().sum())
    for layer in updates.layers:
        assert layer.relation == relation
        assert layer.weights.as_context.shape == (layer.num_heads, 2, 7)
        form = layer.extended_head_forms.to_dense()
        assert form[..., -1].norm() < EXACT * form[:, -1].norm()


class OtherAttention(nn.Module):
    """PyTorch's own attention, whose weights are no linear layer's, by the routes that it takes."""

    def __init__(self, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, dtype=torch.float64)
        nn.init.normal_(self.attention.in_proj_bias)
        self.need_weights = need_weights

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden, hidden, hidden, need_weights=self.need_weights)[0].cos().sum()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_attention(batch_first, need_weights):
    """One parameter for Q, K and V, tokens or sequences first, and `scaled_dot_product_attention` called directly."""
    model = OtherAttention(batch_first, need_weights)
    hidden = torch.randn(3, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (layer,) = qk_updates(model, {"hidden": hidden}, loss=lambda outputs, batch: outputs).layers
    assert layer.weights.as_context.shape == (4, *((3, 5) if batch_first else (5, 3)))
    model(hidden).backward()
    weight, bias = model.attention.in_proj_weight, model.attention.in_proj_bias
    (w_q, w_k), (g_q, g_k) = (
        [with_bias(w, b) for w, b in zip(part[0].view(3, 4, 8, 32)[:2], part[1].view(3, 4, 8)[:2], strict=True)]
        for part in ((weight.data, bias.data), (weight.grad, bias.grad))
    )
    form = layer.extended_head_forms.to_dense()
    assert relative(form @ w_k, g_q) < EXACT
    assert relative(form.mT @ w_q, g_k) < EXACT
    assert layer.scale == pytest.approx(8**-0.5, rel=EXACT)


# --- the model is only read ---------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> tuple:
    """What a measurement could leave in a model and around it."""
    modules = list(model.modules())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules]
    values = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    slopes = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    return (
        [m.training for m in modules],
        [sorted(vars(m)) for m in modules],
        hooks,
        flags,
        model.config._attn_implementation,
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        [value.tolist() for value in values],
        [None if slope is None else slope.tolist() for slope in slopes],
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    """Modes (a part in evaluation), gradients that are there, dropout's random state; also after an error."""
    model = build("bert", "AutoModelForMaskedLM", torch.float32)
    model.bert.encoder.layer[0].eval()
    model(**MASKED_LM).loss.backward()
    before = state_of(model)

    def loss(outputs, batch):
        if fails:
            raise RuntimeError("in the middle")
        return outputs.loss

    with torch.no_grad():
        expected = state_of(model)
        if fails:
            with pytest.raises(RuntimeError, match="in the middle"):
                qk_updates(model, MASKED_LM, loss=loss)
        else:
            qk_updates(model, MASKED_LM, loss=loss)
        assert state_of(model) == expected
    assert state_of(model) == before


def test_frozen_weights_and_wrappers_change_nothing():
    """The update is that of W_qk, whether anything else is trained; what wraps a model is looked through."""
    model = build("gpt2", "AutoModelForCausalLM")
    expected = [layer.form.to_dense() for layer in qk_updates(model, CAUSAL_LM).layers]
    compiled = torch.compile(model, backend="eager")
    found = [layer.form.to_dense() for layer in qk_updates(compiled, CAUSAL_LM).layers]
    found += [layer.form.to_dense() for layer in qk_updates(model.requires_grad_(False), CAUSAL_LM).layers]
    for one, other in zip(found, expected * 2, strict=True):
        assert torch.equal(one, other)


def test_autocast_is_not_used():
    """Neither a context around the call nor what accelerate puts around a forward for mixed precision."""
    from accelerate.utils import convert_outputs_to_fp32

    model = build("bert", "AutoModelForMaskedLM", torch.float32)
    expected = qk_updates(model, MASKED_LM).layers[0].form.to_dense()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(qk_updates(model, MASKED_LM).layers[0].form.to_dense(), expected)
    model._original_forward = model.forward
    wrapped = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = convert_outputs_to_fp32(wrapped.__get__(model))
    patched = model.__dict__["forward"]
    assert torch.equal(qk_updates(model, MASKED_LM).layers[0].form.to_dense(), expected)
    assert model.__dict__["forward"] is patched


# --- refusals -----------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Keys see the token before them, behind projections of known names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.num_heads, self.head_dim = 2, 8

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        key = self.k_proj(hidden)
        key = key + key.roll(1, dims=1)
        query, key = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q_proj(hidden), key))
        return (query @ key.mT).softmax(-1).square().sum()


class Linear(Mixing):
    """No softmax."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.q_proj(hidden) @ self.k_proj(hidden).mT).square().sum()


def last(outputs, batch):
    return outputs


@pytest.mark.parametrize(
    ("make", "batch", "options", "message"),
    [
        (lambda: nn.ModuleDict({"a": Mixing()})["a"], None, {}, "other tokens reach its keys before they meet"),
        (Linear, None, {}, "ran no softmax over products of its queries and keys"),
        (lambda: build("bert", "AutoModelForMaskedLM", torch.float16), MASKED_LM, {}, "weights in fp16"),
        (lambda: build("bert", "AutoModelForMaskedLM"), {"input_ids": TOKENS}, {}, "gives no loss .* Put `labels`"),
        (lambda: build("bert", "AutoModelForMaskedLM"), {"ids": TOKENS}, {}, r"cannot be run with the batch \(ids\)"),
        (lambda: build("bert", "AutoModelForMaskedLM"), [], {}, "holds no batch"),
        (lambda: build("bert", "AutoModelForMaskedLM"), [TOKENS], {}, "must be a mapping .* got Tensor"),
        (lambda: build("bert", "AutoModelForMaskedLM"), MASKED_LM, {"layers": [7]}, "asks for"),
        (lambda: build("bert", "AutoModelForMaskedLM"), MASKED_LM, {"loss": lambda o, b: o.logits}, "of one number"),
        (
            lambda: build("bert", "AutoModelForMaskedLM"),
            MASKED_LM,
            {"loss": lambda o, b: o.loss.detach()},
            "has no gradient",
        ),
        (
            lambda: build("bert", "AutoModelForMaskedLM"),
            MASKED_LM,
            {"memory_gib": 1e-6},
            "attention logits of a batch.* take .* more than `memory_gib`",
        ),
        (  # more than the logits: 5 · 8 bytes · 3 sequences · 4 heads · 7 · 7 tokens · 3 layers
            lambda: build("bert", "AutoModelForMaskedLM"),
            MASKED_LM,
            {"memory_gib": 80_000 / 2**30},
            "updates of .* layers up to .* take .* GiB beside .* of attention logits; .* more than `memory_gib`",
        ),
    ],
)
def test_refusals(make, batch, options, message):
    """What cannot be measured is said, by name, with a way out."""
    if batch is None:
        batch, options = {"hidden": torch.randn(2, 4, 16)}, {"loss": last}
    with pytest.raises(ValueError, match=message):
        qk_updates(make(), batch, **options)


BERT = ("bert", "AutoModelForMaskedLM", MASKED_LM)
LLAMA = ("llama", "AutoModelForCausalLM", CAUSAL_LM)
T5 = ("t5", "AutoModelForSeq2SeqLM", SEQUENCES)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (BERT, {"layers": []}, r"`layers` = \[\] asks for no layer"),
        *((BERT, {"offset": offset}, "`offset` must be a whole number") for offset in (True, 1.0, "1")),
        (BERT, {"offset": 7}, r"`offset` = 7: no sequence is long enough for two tokens of 'bert\.encoder"),
        (BERT, {"offset": -7}, "`offset` = -7: no sequence is long enough"),
        (LLAMA, {"offset": 1}, r"'model\.layers\.0\.self_attn' is causal, no token sees one that comes after"),
        (T5, {"offset": 0, "attention": "cross"}, "is cross-attention, whose queries and keys stand in two"),
        (BERT, {"loss": 3}, "`loss` must be a function of outputs and batch, got 3"),
    ],
)
def test_options_that_cannot_be_meant(case, options, message):
    """Zeros would be measured, or something else than was asked for."""
    name, auto_class, batch = case
    with pytest.raises(ValueError, match=message):
        qk_updates(build(name, auto_class), batch, **options)


def test_offsets_that_some_batches_are_too_short_for():
    """The longest distances are measured where they are; short batches beside add nothing."""
    model = build("bert", "AutoModelForMaskedLM")
    short = {name: value[:, :3].contiguous() for name, value in (MASKED_LM | {"labels": TOKENS}).items()}
    found = qk_updates(model, [MASKED_LM, short], offset=-6).layers[0].form.to_dense()
    alone = qk_updates(model, MASKED_LM, offset=-6).layers[0].form.to_dense()
    assert alone.abs().max() > 0
    assert torch.allclose(found, alone)


@pytest.mark.parametrize(("name", "auto_class", "batch"), [BERT, LLAMA])
def test_nothing_to_predict(name, auto_class, batch):
    """All labels left out, or all that a causal loss looks at."""
    model = build(name, auto_class)
    with pytest.raises(ValueError, match="All 21 labels of the batch are -100: nothing is predicted"):
        qk_updates(model, {**batch, "labels": torch.full_like(TOKENS, -100)})
    if name == "llama":
        first = torch.full_like(TOKENS, -100)
        first[:, 0] = 5
        with pytest.raises(ValueError, match=r"The loss is nan.* No weight .* not finite was found; .*\(all -100\)"):
            qk_updates(model, {**batch, "labels": first})


def test_weights_that_are_not_finite():
    """By name, and not as if other tokens reached the queries; also where the loss does not see them."""
    model = build("bert", "AutoModelForMaskedLM")
    query = model.bert.encoder.layer[1].attention.self.query
    query.weight.data[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"The weight 'bert\.encoder\.layer\.1\.attention\.self\.query\.weight' is not"
    ):
        qk_updates(model, MASKED_LM)
    with pytest.raises(ValueError, match="has no update of W_qk: its queries are not all finite numbers"):
        qk_updates(
            model,
            {**MASKED_LM, "output_hidden_states": True},
            loss=lambda outputs, batch: outputs.hidden_states[1].square().sum(),
        )


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_are_counted_before_they_are_there(name, attention):
    """The limit is met by the product that would pass it: no product of that size is made."""
    auto_class, batch = ("AutoModelForMaskedLM", MASKED_LM) if name == "bert" else ("AutoModelForCausalLM", CAUSAL_LM)
    model = build(name, auto_class, attn_implementation=attention)
    layers = len(find_attention_layers(model))
    heads = model.config.num_attention_heads
    a_layer = 5 * 8 * 3 * heads * 7 * 7  # 5 numbers of 8 bytes
    asked: list[int] = []
    with tap_logits(model.eval(), [], asked.append), torch.enable_grad():
        model(**batch)
    assert max(asked) == layers * a_layer
    assert asked[0] == a_layer

    def limit(size: int) -> None:
        if size > a_layer:
            raise MemoryError

    with pytest.raises(MemoryError), tap_logits(model, [], limit) as taps, torch.enable_grad():
        model(**batch)
    assert len(taps.logits) == 1


def test_public_names():
    """Those that the package promises."""
    assert {"qk_updates", "QKUpdates", "LayerUpdate", "TermWeights"} <= set(hf_symqk.__all__)
