"""Choosing layers: by kind, by index, per stack."""

import pytest
from architectures import BY_NAME

from hf_symqk import find_attention_layers
from hf_symqk.attention import select_layers


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1), ("decoder", 2)]),
        ({"layers": [1]}, [("encoder", 1), ("decoder", 1)]),
        ({"layers": {"decoder": [2, 0]}}, [("decoder", 0), ("decoder", 2)]),
        ({"attention": "cross", "layers": {"decoder_cross": [1]}}, [("decoder_cross", 1)]),
    ],
)
def test_choices(choice, expected):
    """A sequence counts in every stack, a mapping in the stacks it names; the model's order is kept."""
    found = find_attention_layers(BY_NAME["bart"].build())
    chosen = select_layers(found, **choice)
    key = [(layer.stack, layer.index) for layer in chosen]
    assert sorted(key) == sorted(expected)
    assert chosen == [layer for layer in found if layer in chosen]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layers": [2]}, r"asks for \[2\] of stack 'encoder'; this model has 'encoder': layers 0 to 1; 'decoder'"),
        ({"layers": {"text": [0]}}, r"names the stack 'text'; this model has 'encoder'"),
        ({"attention": "both"}, r"must be one of 'self', 'cross', 'all', .*got 'both'"),
    ],
)
def test_choices_that_the_model_does_not_have(choice, message):
    """One error that names the choices."""
    with pytest.raises(ValueError, match=message):
        select_layers(find_attention_layers(BY_NAME["bart"].build()), **choice)
