"""
Which channels are rotated together, told from type and config, against what the models' forward passes do. Quick: a
type a convention. Slow: every type.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_symqk.attention import channel_pairs, find_attention_layers
from hf_symqk.attention import rotary as rotary_module
from hf_symqk.attention.catching import catch_logits

from . import report
from .configs import OVERRIDES, model_types
from .rotary import describe, examine, rotations, said
from .rotating import small_model


# A type a convention, what its config is to say besides, and what each of its layers does with the channels of a head.
QUICK: list[tuple[str, dict[str, Any], list[str]]] = [
    ("bert", {}, ["none", "none"]),
    ("llama", {}, ["halves 0+32", "halves 0+32"]),
    ("gpt_neox", {}, ["halves 0+4", "halves 0+4"]),  # a quarter of the head, in rows that hold all parts
    ("gptj", {}, ["adjacent 0+8", "adjacent 0+8"]),
    ("roformer", {}, ["adjacent 0+16", "adjacent 0+16"]),
    ("glm", {}, ["adjacent 0+16", "adjacent 0+16"]),  # half of the head
    ("deepseek_v3", {}, ["adjacent 16+8", "adjacent 16+8"]),  # the end of latent keys, put in halves by the forward
    ("minicpm3", {}, ["halves 16+8", "halves 16+8"]),
    ("cohere2", {}, ["adjacent 0+32", "none"]),  # layers without positions
    ("smollm3", {"no_rope_layers": [0, 1]}, ["none", "halves 0+16"]),
    ("granite_swa", {"layer_rope_theta": [0, 10_000.0]}, ["none", "halves 0+16"]),
    ("exaone4", {"sliding_window": None, "layer_types": 2 * ["full_attention"]}, ["halves 0+16", "halves 0+16"]),
    ("falcon", {"alibi": True}, ["none", "none"]),
    ("zamba2", {"use_mem_rope": True}, ["halves 0+32"]),
    ("esm", {"position_embedding_type": "rotary"}, ["halves 0+16", "halves 0+16"]),
    ("wav2vec2-conformer", {}, ["none", "none"]),
    ("lfm3", {}, [str([(n, 16 + n) for n in range(8)]), "halves 0+32"]),  # some of the frequencies of all channels
    ("gemma4_vision", {}, 2 * [str([(16 * a + n, 16 * a + 8 + n) for a in (0, 1) for n in range(8)])]),  # two axes
    ("qwen2_vl_vision", {}, ["halves 0+16", "halves 0+16"]),
    ("t5gemma", {}, ["halves 0+32", "halves 0+32", "halves 0+32", "none", "halves 0+32", "none"]),  # cross-attention
]


@pytest.mark.parametrize(("model_type", "values", "expected"), QUICK, ids=lambda value: str(value)[:40])
def test_pairs_are_those_of_the_forward(model_type: str, values: dict[str, Any], expected: list[str]) -> None:
    """Vectors go into each layer at several positions: what mixes the channels of a head is what the package says."""
    with mock.patch.dict(OVERRIDES, {model_type: OVERRIDES.get(model_type, {}) | values}):
        model = small_model(model_type)
    found = rotations(model, [])
    assert [describe(rotation.pairs) for _, rotation in found.values()] == expected, found
    verdicts = [said(layer, rotation) for layer, rotation in found.values()]
    assert [verdict.outcome for verdict in verdicts] == ["proven"] * len(expected), verdicts


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        pytest.param("vjepa2", {}, marks=pytest.mark.slow),  # neighbours are turned by angles that differ
        ("wav2vec2-conformer", {"position_embeddings_type": "rotary"}),  # hidden states are turned, not queries
    ],
)
def test_what_is_no_rotation_is_refused(model_type: str, values: dict[str, Any]) -> None:
    """The forward does something else to queries and keys, which the message says."""
    with mock.patch.dict(OVERRIDES, {model_type: OVERRIDES.get(model_type, {}) | values}):
        model = small_model(model_type)
    for layer, rotation in rotations(model, []).values():
        assert rotation.pairs is None
        with pytest.raises(ValueError, match=rf"'{layer.name}'.*'{model_type}'.*its forward.*'symmetric'"):
            channel_pairs(layer)


@pytest.mark.parametrize("table", ["_ADJACENT", "_BY_LAYER", "_WIDTHS", "_WITHOUT_CONFIG"])
def test_a_wrong_table_is_noticed(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's own test: another order of pairs, layers that do not rotate, another width, no rotation."""
    model_type = {"_ADJACENT": "cohere2", "_BY_LAYER": "cohere2", "_WIDTHS": "gptj", "_WITHOUT_CONFIG": "gptj"}[table]
    entries = getattr(rotary_module, table)
    kept = {name: entries[name] for name in entries if name != model_type} if isinstance(entries, dict) else set()
    monkeypatch.setattr(rotary_module, table, kept)
    found = rotations(small_model(model_type), [])
    assert "wrong" in [said(layer, rotation).outcome for layer, rotation in found.values()]


@pytest.mark.parametrize(("model_type", "rotated"), [("llama", 32), ("gptj", 8), ("cohere2", 32), ("gpt_neox", 4)])
def test_what_the_pairs_are_for(model_type: str, rotated: int) -> None:
    """
    With W_k = W_q J and J a quarter turn of each pair, logits of any sequence are skew whatever its positions; with a
    quarter turn of other pairs they are not.
    """
    model = small_model(model_type)
    layer = find_attention_layers(model)[0]
    pairs = channel_pairs(layer)
    assert len(pairs.first) == rotated // 2
    asymmetry = {}
    for name, second in (("own", pairs.second), ("other", pairs.second[1:] + pairs.second[:1])):
        turn = torch.zeros(layer.heads.head_dim, layer.heads.head_dim)
        for sign, rows, columns in ((1.0, pairs.first, second), (-1.0, second, pairs.first)):
            turn[list(rows), list(columns)] = sign
        rest = torch.tensor(pairs.rest, dtype=torch.long)
        turn[rest[::2], rest[1::2]], turn[rest[1::2], rest[::2]] = 1.0, -1.0
        every = layer.heads.num_key_value_groups
        with layer.tensors("query", "key", write=True) as tensors:
            for query, key in zip(tensors["query"], tensors["key"], strict=True):
                if query is not None and key is not None:
                    key.copy_(torch.einsum("ef,hf...->he...", turn, query[::every]))
        with torch.no_grad(), catch_logits(model) as caught:
            model(torch.arange(5, 13)[None])
        logits = caught[0].query[:, ::every] @ caught[0].key.mT
        asymmetry[name] = float((logits + logits.mT).abs().max() / logits.abs().max())
    assert asymmetry["own"] < 1e-5  # sums of 32 products in fp32
    assert asymmetry["other"] > 0.1


PARTS = 12
# A quarter of the types; all of them: `python -m oracle.rotary --output x.jsonl`.
RUN = range(0, PARTS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("part", RUN)
def test_no_type_is_told_wrongly(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quarter of the model types: what a forward was seen to rotate together is what the package says."""
    monkeypatch.setattr(report, "examine", examine)
    output = tmp_path / "rotary.jsonl"
    report.run(model_types()[part::PARTS], output, seconds=25, workers=2)
    layers = [(name, layer) for name, record in report.read(output).items() for layer in record.get("layers", ())]
    wrong = [(name, layer) for name, layer in layers if layer["outcome"] == "wrong"]
    assert not wrong, json.dumps(wrong, indent=1)
    assert len({name for name, layer in layers if layer["outcome"] == "proven"}) > len(model_types()) / PARTS / 2
