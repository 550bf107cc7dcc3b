"""W_q and W_k from the forward pass alone: right where it is linear, refused where it is not, no trace left behind."""

import math

import pytest
import torch
from architectures import BY_NAME, Architecture
from torch import Tensor, nn
from torch.nn import functional as F

from hf_symqk import find_attention_layers
from hf_symqk.attention.probed import probe_model
from hf_symqk.attention.probing import Call, ProbedAttention, ProbingError, probe_attention


D, H, E = 12, 3, 4


def probed(architecture: Architecture) -> tuple[dict, dict[str, ProbedAttention]]:
    model = architecture.build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # gains of 1 would hide one that is forgotten
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    results = probe_model(model, architecture.inputs(architecture))
    return {layer.name: layer for layer in find_attention_layers(model)}, results


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("bert", "interface"),
        ("albert", "interface"),
        ("bart", "interface"),
        ("t5", "interface"),
        ("whisper", "interface"),
        ("gpt_neo", "matmul"),
        ("gptj", "interface"),
        ("qwen3", "interface"),
        ("gpt2_with_cross_attention", "interface"),
        ("modernbert", "interface"),
        ("phi3", "interface"),
        ("gpt_neox", "interface"),
        ("bloom", "matmul"),
        ("clip", "interface"),
    ],
)
def test_probing_finds_what_the_table_says(name: str, route: str):
    """
    Two independent ways to W_q and W_k, by value: the table, and basis vectors sent through the forward pass. Where
    the forward puts the scale on the queries instead of the logits (Whisper) the factor is 1/√E, else 1.
    """
    layers, results = probed(BY_NAME[name])
    assert set(results) == set(layers)
    for path, result in results.items():
        assert isinstance(result, ProbedAttention), result
        layer = layers[path]
        factor = layer.heads.head_dim**-0.5 if name == "whisper" else 1.0
        with layer.query_key_weights() as (w_q, w_k):
            # fp32 products; a norm's eps of 1e-6 beside a length of 1.
            torch.testing.assert_close(result.query, factor * w_q.float(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(result.key, w_k.float(), rtol=1e-4, atol=1e-6)
        assert result.num_key_value_heads == layer.heads.num_key_value_heads
        assert (result.kind, result.route, result.slots) == (layer.kind, route, "all")


class Toy(nn.Module):
    """Attention with every step open to change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, H * E), nn.Linear(D, H * E)

    def queries(self, hidden: Tensor) -> Tensor:
        return self.first(hidden).unflatten(-1, (H, E)).transpose(1, 2)

    def keys(self, hidden: Tensor) -> Tensor:
        return self.second(hidden).unflatten(-1, (H, E)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(E)).softmax(-1) @ key

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(self.queries(hidden), self.keys(hidden))


class Einsum(Toy):
    """Tokens first, as in XLNet."""

    def forward(self, hidden: Tensor) -> Tensor:
        query, key = (part(hidden).unflatten(-1, (H, E)) for part in (self.first, self.second))
        return torch.einsum("ibnd,jbnd->bnij", query, key).softmax(-1)


class Scaled(Toy):
    """Torch's own function."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key)


class Unnamed(Toy):
    """Leading dimensions without names, tokens before heads (LongT5)."""

    def forward(self, hidden: Tensor) -> Tensor:
        query, key = (part(hidden).unflatten(-1, (H, E)) for part in (self.first, self.second))
        return torch.einsum("...qhd,...khd->...hqk", query, key).softmax(-1)


class Flat(Toy):
    """Heads in the batch dimension, a mask added in place."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        logits = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
        logits += 0.0
        return F.softmax(logits.view(-1, H, *logits.shape[1:]), dim=-1, dtype=torch.float32)


class WithPositions(Toy):
    """A second product, of queries with keys of positions, is added before the softmax."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        positions = torch.randn(key.shape, generator=torch.Generator().manual_seed(1))
        return (query @ key.mT + query @ positions.mT).softmax(-1)


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        (Toy, "matmul"),
        (Einsum, "matmul"),
        (Unnamed, "matmul"),
        (Scaled, "sdpa"),
        (Flat, "matmul"),
        (WithPositions, "matmul"),
    ],
)
def test_routes(kind: type[Toy], route: str):
    """Whichever operation makes the logits, the same weights are found; products with positions are not taken."""
    module = kind()
    hidden = torch.randn(2, 5, D)
    (result,) = probe_attention(module, Call((hidden,), {}))
    assert result.route == route
    torch.testing.assert_close(result.query, module.first.weight.detach().view(H, E, D))
    torch.testing.assert_close(result.key, module.second.weight.detach().view(H, E, D))
    torch.testing.assert_close(result.query_bias, module.first.bias.detach().view(H, E))


def test_torch_multi_head_attention():
    """Torch's module hides its products behind a function of its own; one tensor under three names is one stream."""
    module = nn.MultiheadAttention(D, H, batch_first=True).eval()
    hidden = torch.randn(2, 5, D)
    (result,) = probe_attention(module, Call((hidden, hidden, hidden), {"need_weights": False}))
    query, key, _ = module.in_proj_weight.detach().chunk(3)
    torch.testing.assert_close(result.query / result.query.norm(), query.view(H, E, D) / query.norm())
    torch.testing.assert_close(result.key / result.key.norm(), key.view(H, E, D) / key.norm())
    assert result.kind == "self"
    (cross,) = probe_attention(module, Call((hidden, torch.randn(2, 7, D), torch.randn(2, 7, D)), {}))
    assert cross.kind == "cross"


class Later(Toy):
    """The first token takes part in no softmax: queries and keys are those of the second half."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return super().attend(query[:, :, 3:], key[:, :, 3:])


def test_another_token_is_asked_where_the_first_takes_no_part():
    """Streams of tokens that are attended apart (ProphetNet) are probed at a token of each."""
    module = Later()
    (result,) = probe_attention(module, Call((torch.randn(1, 5, D),), {}))
    torch.testing.assert_close(result.query, module.first.weight.detach().view(H, E, D))
    torch.testing.assert_close(result.key, module.second.weight.detach().view(H, E, D))


class Masked(Toy):
    """A mask of the batch goes into the queries' scale, so that a batch cannot grow without it."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        assert len(mask) == len(hidden)
        angles = torch.arange(hidden.shape[1])[:, None].float()  # makes each token's map its own
        return self.attend(self.queries(hidden) * mask[:, None] * (1 + angles), self.keys(hidden) * (1 + angles))


@pytest.mark.parametrize("batch", [1, 2])
def test_several_basis_vectors_run_in_one_batch(batch: int, monkeypatch: pytest.MonkeyPatch):
    """Other arguments grow with the batch; the weights are the same, and the module runs far less often."""
    module = Masked()
    runs = []
    monkeypatch.setattr(module, "queries", lambda hidden: (runs.append(len(hidden)), Toy.queries(module, hidden))[1])
    call = Call((torch.randn(batch, 5, D),), {"mask": torch.ones(batch, 5, 1)})
    (result,) = probe_attention(module, call)
    torch.testing.assert_close(result.query, module.first.weight.detach().view(H, E, D))
    assert max(runs) > 2 * batch or batch == 1
    assert len(runs) < 20 or batch == 1  # one by one it takes D + 14


class Nonlinear(Toy):
    """Queries through a ReLU."""

    def queries(self, hidden: Tensor) -> Tensor:
        return super().queries(hidden).relu()


class UnitLength(Toy):
    """Queries divided by a length that no module stands for."""

    def queries(self, hidden: Tensor) -> Tensor:
        query = super().queries(hidden)
        return query / query.norm(dim=-1, keepdim=True)


class Mixing(Toy):
    """Keys that are means over tokens."""

    def keys(self, hidden: Tensor) -> Tensor:
        return super().keys(hidden).cumsum(2)


class Fixed(Toy):
    """Learned queries: no attention between tokens."""

    def queries(self, hidden: Tensor) -> Tensor:
        return super().queries(torch.ones_like(hidden))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Nonlinear, r"Nonlinear, query: the response is not linear"),
        (UnitLength, r"UnitLength, query: the response is not linear"),
        (Fixed, r"No softmax of Fixed has queries and keys that depend on hidden states"),
    ],
)
def test_what_is_not_linear_is_refused(kind: type[Toy], message: str):
    """f(2x) = 2 f(x) is asked before anything is called W_q: garbage cannot come back as a weight."""
    with pytest.raises(ProbingError, match=message):
        probe_attention(kind(), Call((torch.randn(2, 5, D),), {}))


def test_keys_mixed_from_several_tokens_are_refused():
    """A key that more than one token reaches is not `W_k x`, even where it is linear."""
    with pytest.raises(ProbingError, match="key"):
        probe_attention(Mixing(), Call((torch.randn(1, 5, D),), {}))


class Rotated(Toy):
    """Rotates queries and keys by position, which it is given or makes itself."""

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if position_embeddings is None:
            angles = torch.arange(hidden.shape[1])[:, None] * torch.ones(E)
            position_embeddings = (angles.cos(), angles.sin())
        cosines, sines = position_embeddings

        def rotate(states: Tensor) -> Tensor:
            first, second = states.chunk(2, -1)
            return states * cosines + torch.cat((-second, first), -1) * sines

        return self.attend(rotate(self.queries(hidden)), rotate(self.keys(hidden)))


@pytest.mark.parametrize("given", [True, False])
def test_rotations_are_left_out(given: bool):
    """Positions that are handed over are set to 0; where the module makes them itself, its first token stands at 0."""
    module = Rotated()
    angles = torch.arange(5)[:, None] * torch.ones(E)
    call = Call((torch.randn(2, 5, D),), {"position_embeddings": (angles.cos(), angles.sin())} if given else {})
    (result,) = probe_attention(module, call)
    assert result.slots == ("all" if given else "first")
    torch.testing.assert_close(result.query, module.first.weight.detach().view(H, E, D))
    torch.testing.assert_close(result.key, module.second.weight.detach().view(H, E, D))


def test_repeated_key_heads_count_once():
    """A forward that repeats key heads for the query heads that read them has as many as it had before."""

    class Grouped(Toy):
        def keys(self, hidden: Tensor) -> Tensor:
            return super().keys(hidden)[:, :1].expand(-1, H, -1, -1)

    (result,) = probe_attention(Grouped(), Call((torch.randn(2, 5, D),), {}))
    assert result.query.shape[0] == H
    assert result.num_key_value_heads == result.key.shape[0] == 1


@pytest.mark.parametrize("name", ["qwen3", "gpt_neo"])
def test_probing_leaves_no_trace(name: str):
    """Attention implementation, hooks, modes, weights and outputs are what they were."""
    architecture = BY_NAME[name]
    model = architecture.build().train()
    inputs = architecture.inputs(architecture)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    probe_model(model, inputs)
    assert model.training
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_without_softmax_is_refused():
    """Nothing to probe is an error, not an empty result."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden)

    with pytest.raises(ProbingError, match="Nothing reaches no softmax over tokens"):
        probe_model(Nothing(), {"hidden": torch.randn(2, 5, D)})
