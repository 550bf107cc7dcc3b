"""Channel pairs of layers that no forward pass speaks for are refused; `tests/oracle` holds all others to theirs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaModel

from hf_symqk.attention import AttentionLayer, channel_pairs, find_attention_layers
from hf_symqk.attention.rotary import ChannelPairs


@pytest.fixture
def layer() -> AttentionLayer:
    """Heads of 8 channels."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32)
    return find_attention_layers(LlamaModel(config))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"verified": False},
            r"'layers\.0\.self_attn' \(LlamaAttention, model type 'llama'\): .*forward.*'symmetric'",
        ),
        ({"model_type": None}, r"model type None\): .*'symmetric'"),
        ({"model_type": "vjepa2"}, r"different angles.*'symmetric'"),
        ({"problem": "its heads do not fit"}, "its heads do not fit"),
    ],
)
def test_what_is_not_known_is_refused(layer: AttentionLayer, change: dict, message: str) -> None:
    """Never guessed from names: a forward of somebody else may rotate other channels."""
    with pytest.raises(ValueError, match=message):
        channel_pairs(replace(layer, **change))


@pytest.mark.parametrize(
    ("parameters", "first", "second", "rest"),
    [
        (None, (), (), tuple(range(8))),
        ({"rope_theta": 1e4}, (0, 1, 2, 3), (4, 5, 6, 7), ()),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, (0, 1), (2, 3), (4, 5, 6, 7)),
        # 3 of 8 channels: embeddings count every second of them, which makes two frequencies.
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.4}, (0, 1), (2, 3), (4, 5, 6, 7)),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, (0, 1), (4, 5), (2, 3, 6, 7)),
    ],
)
def test_width_is_that_of_the_config(
    layer: AttentionLayer, parameters: dict | None, first: tuple, second: tuple, rest: tuple
) -> None:
    """As many channels as the config says, the others in order."""
    config = SimpleNamespace(rope_parameters=parameters)
    pairs = channel_pairs(replace(layer, config=config))
    assert pairs == ChannelPairs(first, second, rest)
    assert pairs.rotary == bool(first)


def test_an_unknown_type_of_layer_is_refused(layer: AttentionLayer) -> None:
    """Where a config tells rotations apart by types of layers, one of no known type is not one without rotation."""
    config = SimpleNamespace(rope_parameters={"full_attention": {"rope_theta": 1e4}, "sliding_attention": None})
    with pytest.raises(ValueError, match=r"'layers\.0\.self_attn'.*full_attention, sliding_attention.*none"):
        channel_pairs(replace(layer, config=config))


def test_a_width_that_is_no_pairs_is_refused(layer: AttentionLayer) -> None:
    """More channels than a head has: the config is not what the forward reads."""
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 2.0})
    with pytest.raises(ValueError, match=r"'layers\.0\.self_attn'.*16 of 8 channels"):
        channel_pairs(replace(layer, config=config))
