"""
`score_model(..., probe=True)`: attention that no entry of the table fits is scored by what its forward does, or
refused by name; the model is what it was before.
"""

import copy
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from hf_symqk import apply_qk_init, score_model
from hf_symqk.bilinear import BilinearForm
from hf_symqk.scores import LayerScores


D, H, G, E, LAYERS, VOCAB = 20, 4, 2, 6, 2, 40

Forms = tuple[Tensor, Tensor]  # W_q (H, E, D), W_k (H, E, D)


class Mixer(nn.Module):
    """Third-party attention, one projection of all: what each kind below does to it is what the table cannot know."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(D, self.rows)
        self.back = nn.Linear(H * E, D)
        for bias in (self.all.bias, self.back.bias):
            nn.init.normal_(bias)  # or a forgotten one would not show

    rows = 3 * H * E

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `(B, H, N, E)`, from rows in the order value, key, query."""
        value, key, query = self.all(hidden).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def weights(self) -> Forms:
        _, key, query = self.all.weight.detach().view(3, H, E, D)
        return query, key

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-1, -2) / math.sqrt(E)).softmax(-1) @ value

    def forward(self, hidden: Tensor) -> Tensor:
        return self.back(self.attend(*self.split(hidden)).transpose(1, 2).flatten(2))


class Interleaved(Mixer):
    """Rows of a head stand apart: channel first, then head, then part."""

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.all(hidden).unflatten(-1, (E, H, 3)).permute(4, 0, 3, 1, 2)
        return query, key, value

    def weights(self) -> Forms:
        query, key, _ = self.all.weight.detach().view(E, H, 3, D).permute(2, 1, 0, 3)
        return query, key


class Grouped(Mixer):
    """Key heads that each serve two query heads in a row, given to PyTorch's own function."""

    rows = (H + 2 * G) * E

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.all(hidden).unflatten(-1, (H + 2 * G, E)).transpose(1, 2)
        query, key, value = heads.split([H, G, G], 1)
        return query, key, value

    def weights(self) -> Forms:
        query, key, _ = self.all.weight.detach().view(-1, E, D).split([H, G, G])
        return query, key.repeat_interleave(H // G, 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


class Strided(Grouped):
    """Key heads that serve every second query head, by broadcasting."""

    def weights(self) -> Forms:
        query, key = super().weights()
        return query, key[:: H // G].repeat(H // G, 1, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = query.unflatten(1, (H // G, G)) @ key[:, None].mT
        return (logits.softmax(-1) @ value[:, None]).flatten(1, 2)


class OwnNorm(nn.Module):
    """Root mean square of channels, with a gain that is added to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(0.3 * torch.randn(E))

    def forward(self, states: Tensor) -> Tensor:
        return states * states.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (1 + self.gain)


class Normed(Mixer):
    """Queries through a norm of its own class, keys through a function: the gains alone are part of W_qk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm()
        self.gain = nn.Parameter(torch.rand(E) + 0.5)

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(hidden)
        return self.norm(query), F.rms_norm(key, (E,), self.gain), value

    def weights(self) -> Forms:
        query, key = super().weights()
        return query * (1 + self.norm.gain.detach())[:, None], key * self.gain.detach()[:, None]


class Folded(Mixer):
    """The scale is put on the queries, so that it is part of what is caught."""

    scale = E**-0.5

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(hidden)
        return query * E**-0.5, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)


class Alibi(Mixer):
    """Distances are added to the logits, with einsum over unnamed leading dimensions."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        places = torch.arange(query.shape[-2])
        distances = (places[None] - places[:, None]).abs() * -torch.rand(H, 1, 1, generator=torch.Generator())
        logits = torch.einsum("...qe,...ke->...qk", query, key) / math.sqrt(E) + distances
        return torch.einsum("...qk,...ke->...qe", logits.softmax(-1), value)


class KeysFirst(Mixer):
    """Keys stand on the left, and the softmax sums over rows."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (key @ query.mT / math.sqrt(E)).softmax(-2).mT @ value


class KeysFirstTurned(Mixer):
    """Keys stand on the left, and the product is turned before the softmax."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.softmax((key @ query.mT).transpose(2, 3) / math.sqrt(E), dim=3) @ value


class Rotary(Mixer):
    """Rotations by positions that the module makes itself, one frequency a pair of channels."""

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(hidden)
        angles = torch.arange(hidden.shape[1])[:, None] * 10.0 ** -torch.arange(E // 2).repeat(2)

        def rotate(states: Tensor) -> Tensor:
            first, second = states.chunk(2, -1)
            return states * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

        return rotate(query), rotate(key), value


class ChannelsFirst(Mixer):
    """Channels before tokens, and batches folded into heads."""

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (part.flatten(0, 1) for part in self.split(hidden.mT))
        weights = torch.baddbmm(torch.zeros(1, 1, 1), query, key.mT, alpha=E**-0.5).softmax(-1)
        return self.back(torch.bmm(weights, value).unflatten(0, (-1, H)).transpose(1, 2).flatten(2)).mT


class Core(nn.Module):
    """Holds a matrix (biases of distances), but is handed queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Parameter(torch.randn(64, 64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + self.distances[: q.shape[-2], : k.shape[-2]]).softmax(-1) @ v


class Nested(Mixer):
    """The softmax runs in an inner module: W_q and W_k are those of the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.core(query, key, value)


class Windows(Mixer):
    """Blocks of tokens look at their own block and the one before: a key is laid down twice."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        blocks = [part.unflatten(2, (-1, 2)).transpose(1, 2) for part in (query, key, value)]
        before = [F.pad(part, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1] for part in blocks[1:]]
        keys, values = (torch.cat(pair, -2) for pair in zip(before, blocks[1:], strict=True))
        return ((blocks[0] @ keys.mT).softmax(-1) @ values).transpose(1, 2).flatten(2, 3)


LINEAR = [
    *(Mixer, Interleaved, Grouped, Strided, Normed, Folded, Alibi),
    *(KeysFirst, KeysFirstTurned, Rotary, ChannelsFirst, Nested, Windows),
]


class Block(nn.Module):
    def __init__(self, kind: type[Mixer]) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D), kind()
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.norm(hidden)
        mixed = self.mix(mixed.mT).mT if isinstance(self.mix, ChannelsFirst) else self.mix(mixed)
        return hidden + mixed + self.down(self.up(hidden).relu())


class Plain(nn.Module):
    """A model of nobody's library: tokens in, logits out."""

    def __init__(self, *kinds: type[Mixer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).log_softmax(-1)


def tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))}


def check(layer: LayerScores, weights: Forms, scale: float = 1.0) -> None:
    """Scores of a layer and of its heads are those of the dense products."""
    query, key = (weight.double() for weight in weights)
    whole = BilinearForm(scale * query.flatten(0, 1).mT, key.flatten(0, 1).mT)
    heads = BilinearForm(scale * query.mT, key.mT)
    metrics = {
        "symmetry": BilinearForm.symmetry_score,
        "directionality": BilinearForm.directionality_score,
        "frobenius_norm": BilinearForm.frobenius_norm,
    }
    for name, metric in metrics.items():
        # W_q and W_k come back to 1e-6; scores of fp32 products.
        assert getattr(layer, name) == pytest.approx(metric(whole).item(), rel=1e-4, abs=1e-5), name
        assert getattr(layer, f"head_{name}") == pytest.approx(metric(heads).tolist(), rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("kind", LINEAR)
def test_unknown_attention_is_scored_by_its_forward(kind: type[Mixer]) -> None:
    """Whatever the order of rows, the grouping, the operation or the norm: the scores are those of W_q and W_k."""
    model = Plain(kind, kind)
    scores = score_model(model, probe=True, inputs=tokens())
    assert [(layer.name, layer.stack, layer.index) for layer in scores.layers] == [
        (f"blocks.{index}.mix", "", index) for index in range(LAYERS)
    ]
    for layer, block in zip(scores.layers, model.blocks, strict=True):
        assert layer.layout.startswith("probed ("), layer.layout
        assert (layer.kind, layer.num_heads, layer.head_dim) == ("self", H, E)
        assert layer.num_key_value_heads == (G if kind is Grouped else H)
        check(layer, block.mix.weights(), kind.scale)


class Convolved(Mixer):
    """Keys that three tokens reach."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Conv1d(H * E, H * E, 3, padding=1)

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(hidden)
        mixed = self.across(key.transpose(1, 2).flatten(2).mT).mT
        return query, mixed.unflatten(-1, (H, E)).transpose(1, 2), value


class Bent(Mixer):
    """Queries through a ReLU."""

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(hidden)
        return query.relu(), key, value


class Modulated(nn.Module):
    """Projects in the block, after a scale that comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(D, 3 * D)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        query, key, value = self.all(hidden * (1 + condition)).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value)


class Guided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, D), Modulated()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.mix(hidden, hidden.mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Plain(Mixer, Convolved), r"'blocks\.1\.mix' \(Convolved with all\.weight, back\.weight, across"),
        (lambda: Plain(Bent, Mixer), r"'blocks\.0\.mix' \(Bent with all\.weight, back\.weight\).*query: .*not linear"),
        (Guided, r"'mix' \(Modulated with all\.weight\).*not linear, since it depends on 'condition'"),
    ],
)
def test_what_is_not_linear_is_refused_by_name(make: Callable[[], nn.Module], named: str) -> None:
    """One error with the module, its parameters and the reason; never a number for what is no W_qk."""
    with pytest.raises(ValueError, match=f"(?s){named}.*register_qk_layout"):
        score_model(make(), probe=True, inputs=tokens())


def test_layers_can_be_chosen_around_one_that_is_refused() -> None:
    """The error says how to go without the layer, and that works."""
    model = Plain(Mixer, Convolved)
    with pytest.raises(ValueError, match="Choose other layers with `layers`"):
        score_model(model, probe=True, inputs=tokens())
    (layer,) = score_model(model, probe=True, inputs=tokens(), layers=[0]).layers
    check(layer, model.blocks[0].mix.weights())


class LinearAttention(Mixer):
    """No softmax: products of feature maps."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.elu(query) @ (F.elu(key).mT @ value)


class LearnedQueryAttention(Mixer):
    """Queries that are parameters: no two tokens meet."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(H, 8, E))

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, key, value = super().split(hidden)
        return self.queries, key, value


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LinearAttention, "no softmax over its tokens was met"),
        (
            LearnedQueryAttention,
            "No softmax of LearnedQueryAttention has queries and keys that depend on hidden states",
        ),
    ],
)
def test_what_is_no_softmax_between_tokens_is_listed(kind: type[Mixer], reason: str) -> None:
    """It stands among the skipped with its reason, beside layers that are scored; alone, it is an error."""
    scores = score_model(Plain(Mixer, kind), probe=True, inputs=tokens())
    assert [layer.name for layer in scores.layers] == ["blocks.0.mix"]
    (line,) = scores.skipped
    assert line.startswith("blocks.1.mix")
    assert reason in line
    with pytest.raises(ValueError, match=f"(?s)no softmax over products of queries and keys.*{reason}"):
        score_model(Plain(kind), probe=True, inputs=tokens())


class RemoteConfig(PreTrainedConfig):
    model_type = "remote_attention"
    vocab_size = VOCAB


class RemoteAttention(nn.Module):
    """Code of a repository: parameters of its own instead of linear maps, Transformers' attention functions."""

    is_causal = False

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__()
        self.config = config
        self.to_query = nn.Parameter(0.2 * torch.randn(D, H, E))
        self.to_key = nn.Parameter(0.2 * torch.randn(D, G, E))

    def weights(self) -> Forms:
        query, key = (weight.detach().permute(1, 2, 0) for weight in (self.to_query, self.to_key))
        return query, key.repeat_interleave(H // G, 0)

    def forward(self, hidden: Tensor, source: Tensor) -> Tensor:
        query = torch.einsum("bnd,dhe->bhne", hidden, self.to_query)
        key = torch.einsum("bnd,dhe->bhne", source, self.to_key)
        attention = AttentionInterface().get_interface(self.config._attn_implementation, eager)
        output, _ = attention(self, query, key, key, None, scaling=0.3)
        return output.flatten(2) @ self.to_query.flatten(1).T


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    key, value = (part.repeat_interleave(H // G, 1) for part in (key, value))
    return ((query @ key.mT * scaling).softmax(-1) @ value).transpose(1, 2), None


class RemoteLayer(nn.Module):
    def __init__(self, config: RemoteConfig) -> None:
        super().__init__()
        self.own, self.other = RemoteAttention(config), RemoteAttention(config)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        hidden = hidden + self.own(hidden, hidden)
        return hidden + self.other(hidden, memory)


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(RemoteLayer(config) for _ in range(LAYERS))
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = memory = self.embed(input_ids)
        memory = memory.flip(1)
        for layer in self.layers:
            hidden = layer(hidden, memory)
        return hidden


def remote(dtype: torch.dtype = torch.float32) -> RemoteModel:
    torch.manual_seed(0)
    return RemoteModel(RemoteConfig()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_remote_code_runs_on_its_dummy_inputs(dtype: torch.dtype) -> None:
    """No inputs are needed where Transformers has some; self and cross are told apart; half precision is no bar."""
    model = remote(dtype)
    scores = score_model(model, probe=True, attention="all")
    assert [(layer.name, layer.kind, layer.stack, layer.index) for layer in scores.layers] == [
        ("layers.0.own", "self", "", 0),
        ("layers.0.other", "cross", "cross", 0),
        ("layers.1.own", "self", "", 1),
        ("layers.1.other", "cross", "cross", 1),
    ]
    for layer in scores.layers:
        assert (layer.layout, layer.num_key_value_heads) == ("probed (interface)", G)
        check(layer, model.get_submodule(layer.name).weights())
    assert [layer.kind for layer in score_model(model, probe=True).layers] == ["self", "self"]


@pytest.mark.parametrize("name", ["bert", "whisper", "clip", "t5"])
def test_what_the_table_knows_is_read_as_ever(name: str) -> None:
    """With and without probing, scores of known models are the same, and inputs are found for them."""
    model = BY_NAME[name].build()
    assert score_model(model, probe=True, attention="all") == score_model(model, attention="all")


def test_known_and_unknown_layers_stand_in_one_stack() -> None:
    """A model half of whose layers the table knows: indices count all, each layer is read its own way."""
    model = BY_NAME["bert"].build().eval()

    class Wrapped(Mixer):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            wide = nn.functional.pad(hidden_states[..., :D], (0, 0))
            return nn.functional.pad(super().forward(wide), (0, hidden_states.shape[-1] - D)), None

    attention = Wrapped()
    model.encoder.layer[1].attention.self = attention
    scores = score_model(model, probe=True)
    assert [(layer.index, layer.layout.partition(" ")[0]) for layer in scores.layers] == [
        (0, "query/key"),
        (1, "probed"),
        (2, "query/key"),
    ]
    wide = [F.pad(weight, (0, model.config.hidden_size - D)) for weight in attention.weights()]
    check(scores.layers[1], (wide[0], wide[1]))
    assert scores.layers[0] == score_model(BY_NAME["bert"].build()).layers[0]


class Forgetful(Mixer):
    """Keeps what it saw, draws random numbers and writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden)
        self.last = hidden
        self.steps += 1
        torch.rand(1), random.random(), np.random.rand()
        return super().forward(hidden)


class Breaking(Forgetful):
    def forward(self, hidden: Tensor) -> Tensor:
        super().forward(hidden)
        raise RuntimeError("out of order")


@pytest.mark.parametrize("kind", [Forgetful, Breaking])
def test_the_model_is_only_read(kind: type[Forgetful]) -> None:
    """Also after an error: weights, gradients, mode, buffers, hooks, attributes, random states are what they were."""
    model = Plain(kind, Mixer).train()
    model.blocks[1].eval()
    loss = Plain.forward(Plain(Mixer), **tokens()).sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls: list[None] = []
    handle = model.register_forward_hook(lambda *_: calls.append(None))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if kind is Breaking:
        with pytest.raises(ValueError, match=r"Plain cannot be run with the given inputs \(tokens.*out of order"):
            score_model(model, probe=True, inputs=tokens())
    else:
        score_model(model, probe=True, inputs=tokens())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) and p.requires_grad for p in model.parameters())
    assert modes == [module.training for module in model.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert model.blocks[0].mix.seen == []
    assert list(model._forward_hooks) == [handle.id]
    assert not any(m._forward_pre_hooks or (m._forward_hooks and m is not model) for m in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_attention_implementation_is_what_it_was() -> None:
    """Probing puts its own function into the config, and takes it out again."""
    model = remote()
    before = model.config._attn_implementation, model(torch.ones(1, 4, dtype=torch.long))
    score_model(model, probe=True)
    assert model.config._attn_implementation == before[0]
    assert torch.equal(model(torch.ones(1, 4, dtype=torch.long)), before[1])


def test_inputs_that_do_not_fit_are_named() -> None:
    """The model's own error, what it was run with, and the way out."""
    model = Plain(Mixer)
    with pytest.raises(ValueError, match=r"no inputs can be made from its signature. Give `inputs=`"):
        score_model(model, probe=True)
    with pytest.raises(ValueError, match=r"cannot be run with the given inputs \(nothing \(2,\)\): TypeError.*Give"):
        score_model(model, probe=True, inputs={"nothing": torch.ones(2)})
    with pytest.raises(ValueError, match="`inputs` must map names of arguments to values, got list"):
        score_model(model, probe=True, inputs=[1])  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="`inputs` are what the model is run with by `probe=True`"):
        score_model(model, inputs=tokens())


def test_inputs_are_made_from_any_config() -> None:
    """A plain module with a config and images: no class of Transformers says what it takes."""

    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(image_size=8, num_channels=1)
            self.patches, self.mix = nn.Conv2d(1, D, 2, 2), Mixer()

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.mix(self.patches(pixel_values).flatten(2).mT)

    model = Pictures()
    (layer,) = score_model(model, probe=True).layers
    check(layer, model.mix.weights())


def test_unknown_models_are_told_of_probing() -> None:
    """The error of scoring names `probe=True`; that of the init does not pretend that it could serve such a model."""
    model = Plain(Mixer)
    with pytest.raises(ValueError, match=r"register_qk_layout.*score_model\(model, probe=True\)"):
        score_model(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"register_qk_layout.*can be scored .*but not initialised"):
        apply_qk_init(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Compiled code would hide what reaches the softmax, and names are those of the model inside."""
    model = Plain(Mixer)
    (layer,) = score_model(wrap(model), probe=True, inputs=tokens()).layers
    assert layer == score_model(model, probe=True, inputs=tokens()).layers[0]


def test_sharded_weights_are_refused() -> None:
    """Modules that run one by one would wait for other processes, or multiply by parts."""
    model = Plain(Mixer)
    model.head.weight.ds_id = 0  # what marks a parameter that DeepSpeed has partitioned
    with pytest.raises(ValueError, match=r"Plain is sharded; probing .* needs whole weights"):
        score_model(model, probe=True, inputs=tokens())


def test_short_types_of_the_caller_do_not_hide_linearity() -> None:
    """Under autocast, or with products of shorter types, rounding would look like a response that is not linear."""
    model = Plain(Mixer)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (layer,) = score_model(model, probe=True, inputs=tokens(), heads=False, null_band=False).layers
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    # The scores themselves are products in the caller's types; what is asked here is that W_q and W_k were found.
    assert layer.layout == "probed (matmul)"


class NamedLikeTheTable(Mixer):
    """Projections with names of the table, and nothing that says how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(D, H * E), nn.Linear(D, H * E)

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key = (part(hidden).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q_proj, self.k_proj))
        return query, key, key

    def weights(self) -> Forms:
        query, key = (part.weight.detach().view(H, E, D) for part in (self.q_proj, self.k_proj))
        return query, key


def test_heads_that_nothing_tells_are_seen_in_the_forward() -> None:
    """An entry that fits a module's names and not its head counts is no reading of it either."""
    model = Plain(NamedLikeTheTable)
    with pytest.raises(ValueError, match="neither the module nor its config says how many heads"):
        score_model(model)
    (layer,) = score_model(model, probe=True, inputs=tokens()).layers
    assert layer.num_heads == H
    check(layer, model.blocks[0].mix.weights())
