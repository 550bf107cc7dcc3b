"""Schemes of users' own, through the door that the built-in ones came by."""

import copy

import pytest
import torch
from architectures import BY_NAME
from transformers import AutoConfig, AutoModel

import hf_symqk
from hf_symqk import SymmetricInit, apply_qk_init, register_qk_init, unregister_qk_init
from hf_symqk.init import LayerDraw, LayerRequest, schemes

from .family import attention_layer, drawn_bert


@pytest.fixture
def registered():
    """Registers schemes and takes them back."""
    names = []

    def register(**values):
        names.append(values["name"])
        return register_qk_init(**values)

    yield register
    for name in names:
        if name in schemes():
            unregister_qk_init(name)


def test_what_a_scheme_is_given(registered):
    """Both tensors to write, head counts, σ_k/σ_q, options, pairs of channels, and a generator that is repeatable."""
    seen: list[LayerDraw] = []

    def write(draw: LayerDraw) -> None:
        seen.append(draw)
        noise = torch.randn(draw.key.weight.shape, generator=draw.generator)
        draw.key.weight.copy_(noise * draw.options["spread"] * draw.ratio)
        draw.query.weight.mul_(2)

    registered(name="noise", write=write, rewrites=("query", "key"), options={"spread": 0.5, "kind": "any"})
    init = SymmetricInit("noise", options={"spread": 2})
    assert init.rewrites == ("query", "key")
    plain, changed = BY_NAME["t5"].build(), BY_NAME["t5"].build(qk_init=init)
    draw = seen[0]
    assert draw.heads == attention_layer(plain).heads
    assert draw.options == {"spread": 2.0, "kind": "any"}
    assert draw.ratio == pytest.approx(4, rel=0.1)
    assert draw.channel_pairs.rest == tuple(range(16))
    with attention_layer(plain).tensors("query") as before, attention_layer(changed).tensors("query", "key") as after:
        assert torch.equal(after["query"].weight, before["query"].weight * 2)
        assert after["key"].weight.std().item() == pytest.approx(2 * draw.ratio, rel=0.1)
        key = after["key"].weight.clone()
    with attention_layer(BY_NAME["t5"].build(qk_init=init)).tensors("key") as again:
        assert torch.equal(again["key"].weight, key)
    with attention_layer(BY_NAME["t5"].build(seed=1, qk_init=init)).tensors("key") as other:
        assert not torch.allclose(other["key"].weight, key)
    with attention_layer(changed, 1).tensors("key") as second:
        assert not torch.allclose(second["key"].weight, key), "each layer has a seed of its own"


def test_biases_are_not_given_where_a_distribution_drew_them(registered):
    """They differ between Q and K by intent; without a distribution they are the scheme's."""
    seen: list[LayerDraw] = []
    registered(name="look", write=seen.append)
    BY_NAME["bert"].build(qk_init="look")
    BY_NAME["bert"].build(qk_init={"scheme": "look", "distribution": "kaiming_uniform"})
    assert [draw.key.bias is None for draw in seen] == [False] * 3 + [True] * 3


def test_a_check_refuses_before_anything_is_written(registered):
    """For all layers first, with the layer's name and the scheme's reason."""

    def check(request: LayerRequest) -> None:
        if request.layer.index == 1 and request.symmetry < 1:
            raise ValueError("it is the second.")

    registered(name="not_the_second", write=lambda draw: draw.key.weight.zero_(), check=check, takes_symmetry=True)
    model = drawn_bert(num_hidden_layers=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"Scheme 'not_the_second' cannot serve 'encoder.layer.1.*it is the second"):
        apply_qk_init(model, {"scheme": "not_the_second", "symmetry": 0.5})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    apply_qk_init(model, "not_the_second")
    assert attention_layer(model, 1).module.key.weight.abs().max() == 0


def test_a_config_that_names_a_scheme_nobody_registered(registered, tmp_path):
    """It round-trips while it is registered; else the error lists those that are, and says what to import."""
    registered(name="mine", write=lambda draw: None, options={"table": [1, 2]})
    init = SymmetricInit("mine", options={"table": [3]})
    BY_NAME["bert"].build(qk_init=init).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).qk_init == init
    unregister_qk_init("mine")
    message = r"one of 'symmetric', 'independent', .*'mimetic', got 'mine'.*config.json.*hf_symqk.register_qk_init"
    for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "symmetric"}, r"'symmetric' is registered already"),
        ({"name": "my scheme"}, r"must be an identifier other than 'none', got 'my scheme'"),
        ({"name": "None"}, r"got 'None'"),
        ({"write": "symmetric"}, r"`write` must be a function of a LayerDraw, got 'symmetric'"),
        ({"rewrites": ("value",)}, r"`rewrites` must be"),
        ({"options": {"model": object()}}, r"'model' has to fit into config.json"),
    ],
)
def test_what_cannot_be_registered(values, message):
    """Duplicates, names that no argument or folder could hold, and declarations that mean nothing."""
    before = schemes()
    with pytest.raises(ValueError, match=message):
        register_qk_init(**{"name": "another", "write": lambda draw: None} | values)
    assert schemes() == before


def test_registration_is_by_keyword_and_undone_by_name():
    """As with layouts."""
    with pytest.raises(TypeError):
        hf_symqk.register_qk_init("another", lambda draw: None)
    with pytest.raises(KeyError):
        unregister_qk_init("nobody")
