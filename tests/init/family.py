"""The members of the family that the tests go through, and the logits of a model's own forward pass."""

import copy
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from torch import Tensor, nn
from transformers import AttentionInterface, BertConfig, BertModel, PreTrainedModel

from hf_symqk import apply_qk_init, find_attention_layers
from hf_symqk.attention import AttentionLayer


__all__ = ["MEMBERS", "PER_HEAD", "attention_layer", "check_refusal", "dense_heads", "drawn_bert", "logits"]

MEMBERS: dict[str, Any] = {
    "half": {"symmetry": 0.5},
    "half_of_layer": {"symmetry": 0.5, "target": "layer"},
    "skew": {"symmetry": -1},
    "indefinite": "indefinite",
    "negative": "negative",
    "spectrum": "spectrum",
    "mimetic": "mimetic",
    "matched": {"norm": "match"},
    "matched_half": {"symmetry": 0.5, "target": "layer", "norm": "match"},
    "matched_redrawn": {"norm": "match", "distribution": "kaiming_uniform"},
}
# Members that say something of each head, which grouped keys cannot hold.
PER_HEAD = ("half", "spectrum", "mimetic")

_DRAWS = {
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "uniform": lambda weight: nn.init.uniform_(weight, -0.05, 0.05),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04),
}


def drawn_bert(draw: str = "normal", seed: int = 0, **values: Any) -> BertModel:
    """One layer of BERT whose Q, K and their biases are drawn as named."""
    torch.manual_seed(seed)
    small = {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 8}
    model = BertModel(BertConfig(**small | values))
    with torch.no_grad():
        for layer in find_attention_layers(model):
            for part in (layer.module.query, layer.module.key):
                _DRAWS[draw](part.weight)
                part.bias.normal_(std=0.02)
    return model


def attention_layer(model: nn.Module, index: int = 0) -> AttentionLayer:
    """One of the model's self-attention layers."""
    return [layer for layer in find_attention_layers(model) if layer.kind == "self"][index]


def check_refusal(name: str, qk_init: Any, message: str) -> None:
    """An option is refused at construction and on a finished model, whose weights and config stay as they are."""
    with pytest.raises(ValueError, match=message):
        BY_NAME[name].build(qk_init=qk_init)
    model = BY_NAME[name].build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        apply_qk_init(model, qk_init)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.qk_init is None


def dense_heads(model: nn.Module, index: int = 0) -> Tensor:
    """`W_q^h (W_k^g(h))ᵀ` multiplied out, `(H, D, D)` in fp64."""
    layer = attention_layer(model, index)
    with torch.no_grad(), layer.tensors("query", "key") as tensors:
        w_q, w_k = tensors["query"].weight.double(), tensors["key"].weight.double()
        return w_q.mT @ w_k.repeat_interleave(layer.heads.num_key_value_groups, 0)


_caught: list[Tensor] = []


def _catch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling=None, **kwargs: Any):
    groups = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # The product in fp64, so that what is left of a symmetry is the forward's rounding of queries and keys.
    _caught.append(query.double() @ key.double().repeat_interleave(groups, 1).mT * scaling)
    output = torch.zeros_like(query) if value.shape[-1] == query.shape[-1] else value.repeat_interleave(groups, 1)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("catch_logits", _catch)


@torch.no_grad()
def logits(model: PreTrainedModel, **inputs: Tensor) -> list[Tensor]:
    """Logits `(batch, H, N, N)` that each layer's own forward puts into the softmax, before any mask."""
    model.eval().set_attn_implementation("catch_logits")
    _caught.clear()
    model(**inputs)
    return list(_caught)
