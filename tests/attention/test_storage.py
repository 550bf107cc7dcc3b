"""Effective weights from adapters and quantised layers: what the model's forward multiplies by, not what is stored."""

import copy

import pytest
import torch
from architectures import BY_NAME
from torch import nn

from hf_symqk import apply_qk_init, find_attention_layers, score_model
from hf_symqk.attention import linear_shape, whole_linears


def scores_of(model: nn.Module) -> list[tuple[float, ...]]:
    return [(x.symmetry, x.directionality, x.frobenius_norm, *x.head_symmetry) for x in score_model(model).layers]


def close(ours: list, theirs: list, tolerance: float = 1e-5) -> bool:
    return all(a == pytest.approx(b, rel=tolerance, abs=tolerance) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def peft():
    """The adapter library; part of the test extra."""
    return pytest.importorskip("peft")


def adapted(peft, name: str, targets: list[str] | str, adapters: tuple[str, ...] = ("default",), **options):
    """A model with adapters whose B is not zero, so that they matter."""
    model = BY_NAME[name].build()
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, lora_dropout=0.3, **options)
    wrapped = peft.get_peft_model(model, config, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        wrapped.add_adapter(adapter, peft.LoraConfig(r=2, lora_alpha=5, target_modules=targets, **options))
    torch.manual_seed(11)
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key:
                parameter.copy_(parameter.abs() + 0.3 * torch.rand_like(parameter))
    return wrapped


@pytest.mark.parametrize(
    ("name", "targets", "options"),
    [
        ("bert", ["query"], {}),
        ("bert", ["query", "key"], {"use_dora": True}),
        ("bert", ["key"], {"use_rslora": True}),
        ("llama", ["q_proj", "k_proj"], {}),
        ("gpt2", ["c_attn"], {"fan_in_fan_out": True}),
        ("gpt2", ["c_attn"], {"fan_in_fan_out": True, "use_dora": True}),
        ("gpt_neox", ["query_key_value"], {}),
    ],
)
def test_lora_scores_the_effective_weight(peft, name, targets, options):
    """Scores equal those of the model that PEFT itself merges, and nothing has been merged, changed or switched."""
    model = adapted(peft, name, targets, **options).train()
    before = copy.deepcopy(model.state_dict())
    base = scores_of(BY_NAME[name].build())
    ours = scores_of(model)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(getattr(module, "merged", False) for module in model.modules())
    theirs = scores_of(copy.deepcopy(model).merge_and_unload())
    assert close(ours, theirs)
    assert not close(ours, base, 1e-2), "an adapter that changes nothing proves nothing"


@pytest.mark.parametrize("dora", [False, True])
def test_several_and_disabled_and_merged_adapters(peft, dora):
    """Only active adapters count, together or alone; disabled ones do not; merged ones count once."""
    model = adapted(peft, "bert", ["query", "key"], adapters=("one", "two"), use_dora=dora)
    plain = scores_of(BY_NAME["bert"].build())
    seen = {}
    for active in ("one", "two", ["one", "two"]):
        model.base_model.set_adapter(active)
        ours = scores_of(model)
        names = active if isinstance(active, list) else [active]
        theirs = scores_of(copy.deepcopy(model).merge_and_unload(adapter_names=names))
        assert close(ours, theirs)
        seen[str(active)] = ours
    assert seen["one"] != seen["two"] != seen["['one', 'two']"]
    with model.disable_adapter():
        assert close(scores_of(model), plain)
    model.base_model.set_adapter("one")
    model.merge_adapter()
    assert close(scores_of(model), seen["one"])
    model.unmerge_adapter()


def test_effective_weights_are_those_of_the_forward(peft):
    """Two DoRA adapters at once: the weight that is read is the one that the layer's own forward applies."""
    model = adapted(peft, "bert", ["query"], adapters=("one", "two"), use_dora=True).eval()
    model.base_model.set_adapter(["one", "two"])
    holder = find_attention_layers(model)[0].holder("query")
    with whole_linears([holder]) as linears, torch.no_grad():
        weight = linears[holder].weight
        identity = torch.eye(weight.shape[1])
        response = (holder(identity) - holder(torch.zeros_like(identity))).T
    torch.testing.assert_close(weight, response, rtol=1e-4, atol=1e-5)


def test_unknown_adapters_are_refused_by_name(peft):
    """An adapter that is no LoRA is an error that names it, not the base weight passed off as the whole."""
    model = peft.get_peft_model(
        BY_NAME["bert"].build(), peft.OFTConfig(target_modules=["query"], oft_block_size=4, r=0)
    )
    with pytest.raises(ValueError, match=r"Adapter 'default' is a peft.tuners.oft.*merge_and_unload"):
        score_model(model)


def test_adapters_cannot_be_initialised_over(peft):
    """The init writes parameters; with an adapter in front of them it says so before anything is written."""
    model = adapted(peft, "bert", r".*layer\.1\..*query")  # the layer before it must not have been written either
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match=r"encoder.layer.1.attention.self' holds Q or K as PEFT adapter, which can be scored but not written",
    ):
        apply_qk_init(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_would_be_lost_is_not_written(peft):
    """An effective weight is computed for reading: writing to it would reach no parameter, so it is refused."""
    holder = find_attention_layers(adapted(peft, "bert", ["query"]))[0].holder("query")
    with pytest.raises(ValueError, match="can be read but not written"), whole_linears([holder], write=True):
        pass


def quantise_with_bitsandbytes(model: nn.Module, bits: int) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for layer in find_attention_layers(model):
        for name in ("query", "key"):
            linear = getattr(layer.module, name)
            if bits == 4:
                packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, quant_type="nf4")
                packed.weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4")
            else:
                packed = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False)
                packed.weight = bnb.nn.Int8Params(
                    linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False
                )
            packed.bias = linear.bias
            setattr(layer.module, name, packed.to("cpu"))


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_is_dequantised(bits):
    """4- and 8-bit weights score as what they stand for: close to the originals, equal to their dequantised values."""
    model = BY_NAME["bert"].build()
    with torch.no_grad():
        for layer in find_attention_layers(model):
            layer.module.key.weight.add_(layer.module.query.weight)
    original = scores_of(model)
    quantise_with_bitsandbytes(model, bits)
    holder = find_attention_layers(model)[0].holder("query")
    assert not holder.weight.is_floating_point(), "the weight must really be packed"
    assert linear_shape(holder) == (48, 48)
    ours = scores_of(model)
    assert close(ours, original, 0.2 if bits == 4 else 0.02)
    assert not close(ours, original, 1e-6), "packed weights cannot be the originals"
    with whole_linears([holder]) as linears, torch.no_grad():
        weight = linears[holder].weight.float()
        identity = torch.eye(48)
        response = (holder(identity) - holder(torch.zeros_like(identity))).T
    # bitsandbytes' own matmul on the identity, which rounds activations to 8 bits or products to half precision.
    torch.testing.assert_close(weight, response.float(), rtol=0, atol=2e-3)


def test_torchao_is_dequantised():
    """torchao's tensor class claims to be floating point; its own `dequantize` gives the values."""
    torchao = pytest.importorskip("torchao.quantization")
    model = BY_NAME["bert"].build()
    with torch.no_grad():
        for layer in find_attention_layers(model):
            layer.module.key.weight.add_(layer.module.query.weight)
    original = scores_of(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    holder = find_attention_layers(model)[0].holder("key")
    assert type(holder.weight.data).__module__.startswith("torchao")
    ours = scores_of(model)
    assert close(ours, original, 0.02)
    assert not close(ours, original, 1e-7)


def test_packed_weights_are_refused_by_name():
    """A packed format that cannot be read is one error naming class and content; integers are never scored."""

    class GPTQLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_features = self.out_features = 48
            self.register_buffer("qweight", torch.zeros(6, 48, dtype=torch.int32))
            self.register_buffer("scales", torch.zeros(1, 48))

    class ScaledLinear(nn.Linear):
        def __init__(self):
            super().__init__(48, 48)
            self.weight = nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)
            self.register_buffer("weight_scale_inv", torch.ones(1, 1))

    for packed, held in ((GPTQLinear(), r"qweight \(int32\), scales"), (ScaledLinear(), r"weight \(float8_e4m3fn\)")):
        model = BY_NAME["bert"].build()
        model.encoder.layer[1].attention.self.query = packed
        with pytest.raises(ValueError, match=rf"{type(packed).__name__} stores its weight as {held}"):
            score_model(model)


def test_fsdp1_is_refused():
    """FSDP1 keeps no shaped parameters: one clear refusal that names the way out."""
    model = BY_NAME["bert"].build()
    model.encoder.layer[0].attention.self.query.weight._fsdp_flattened = True  # what FSDP1 marks its parameters with
    with pytest.raises(ValueError, match=r"FSDP1.*fsdp_version: 2"):
        score_model(model)
