"""The hooks into Transformers: every way to hand over the option, the right moment, and leaving without a trace."""

import copy
import functools
import importlib
import json
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, BY_NAME, INIT_ARCHITECTURES, Architecture
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertPreTrainedModel,
    CLIPModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from transformers.integrations import deepspeed as deepspeed_integration
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback

import hf_symqk
from hf_symqk import SymmetricInit, find_attention_layers, score_model


architectures = pytest.mark.parametrize("architecture", INIT_ARCHITECTURES, ids=lambda a: a.name)
BERT = BY_NAME["bert"]


def symmetric_layers(model: PreTrainedModel) -> list[bool]:
    return [layer.symmetry > 0.999 for layer in score_model(model).layers]


def assert_same_weights(a: PreTrainedModel, b: PreTrainedModel) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# --- ways to hand the option over ---------------------------------------------------------------------------------


@architectures
def test_from_config_keyword(architecture: Architecture):
    """`Auto*.from_config(config, qk_init=…)` works and leaves the caller's config alone; other keywords still pass."""
    config = architecture.config()
    before = copy.deepcopy(config.to_dict())
    model = getattr(transformers, architecture.auto_class).from_config(
        config, qk_init="symmetric", dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert config.to_dict() == before
    assert "qk_init" not in vars(config)
    assert config.qk_init is None
    assert all(layer.symmetry == pytest.approx(1, abs=2e-3) for layer in score_model(model).layers)
    assert model.config.qk_init == SymmetricInit()
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


@architectures
def test_option_in_the_config(architecture: Architecture):
    """A config with the option serves the model class itself as well as `from_config`."""
    config = architecture.config(qk_init=SymmetricInit())
    plain = architecture.build(3)
    torch.manual_seed(3)
    direct = type(plain)(config)
    assert all(symmetric_layers(direct))
    assert_same_weights(direct, architecture.build(3, config=config))
    assert_same_weights(direct, architecture.build(3, qk_init="symmetric"))


@architectures
def test_config_saves_prints_copies_and_reads_back(architecture: Architecture, tmp_path):
    """A config that holds a SymmetricInit object behaves like any other, and config.json holds plain JSON."""
    init = SymmetricInit(layers=[0], attention="self")
    config = architecture.config(qk_init=init)
    assert config.qk_init == init
    assert '"qk_init"' in repr(config)
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    assert copy.deepcopy(config).qk_init == init
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["qk_init"] == {"scheme": "symmetric", "layers": [0]}
    assert AutoConfig.from_pretrained(tmp_path).qk_init == init
    assert type(config).from_pretrained(tmp_path).qk_init == init
    config.qk_init = None
    assert "qk_init" not in config.to_dict()


def test_auto_config_keyword(tmp_path):
    """`AutoConfig.from_pretrained(path, qk_init=…)`, which Transformers would drop silently, reaches the config."""
    BERT.config().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, qk_init="symmetric")
    assert config.qk_init == SymmetricInit()
    assert all(symmetric_layers(AutoModel.from_config(config)))
    config, unused = AutoConfig.from_pretrained(tmp_path, qk_init="independent", return_unused_kwargs=True, foo=1)
    assert config.qk_init == SymmetricInit("independent")
    assert unused == {"foo": 1}
    config = BertConfig.from_pretrained(tmp_path, qk_init={"scheme": "symmetric", "layers": [2]})
    assert config.qk_init == SymmetricInit(layers=[2])


# --- the right moment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("bert", "AutoModelForSequenceClassification"),
        ("roberta", "AutoModelForTokenClassification"),
        ("vit", "AutoModelForImageClassification"),
        ("gpt2", "AutoModelForCausalLM"),
        ("modernbert", "AutoModelForMaskedLM"),
        ("llama", "AutoModelForCausalLM"),
        ("gpt_neox", "AutoModelForCausalLM"),
        ("clip", "AutoModelForZeroShotImageClassification"),
        ("t5", "AutoModelForSeq2SeqLM"),
        ("bart", "AutoModelForSeq2SeqLM"),
        ("bart", "AutoModelForSequenceClassification"),
    ],
)
def test_head_models_are_initialised_once_at_the_right_moment(name, auto_class, monkeypatch):
    """A head around a base model, inner models carrying the same config: each layer is written once."""
    written = []
    original = hf_symqk.plugin.write_init
    monkeypatch.setattr(
        hf_symqk.plugin, "write_init", lambda layers, *rest: (written.extend(layers), original(layers, *rest))
    )
    architecture = Architecture(**{**vars(BY_NAME[name]), "auto_class": auto_class})
    model = architecture.build(qk_init="symmetric")
    expected = [layer.module for layer in find_attention_layers(model) if layer.kind == "self"]
    assert {layer.module for layer in written} == set(expected)
    assert len(written) == len(expected), "each layer once"
    assert all(symmetric_layers(model))
    written.clear()
    type(model)(architecture.config(qk_init="symmetric"))
    assert len(written) == len(expected)
    written.clear()
    model.init_weights()  # everything is initialised already: nothing is drawn, nothing is written
    assert written == []


def test_composite_models_whose_parts_do_not_carry_the_option():
    """CLIP's and LLaVA's towers are built from sub-configs; the composite's option reaches both, stack by stack."""
    clip = CLIPModel(BY_NAME["clip"].config(qk_init={"layers": {"vision_model": [0]}}))
    done = [(x.stack, x.index) for x in score_model(clip).layers if x.symmetry > 0.999]
    assert done == [("vision_model", 0)]
    config = LlavaConfig(
        text_config=BY_NAME["llama"].config().to_dict(),
        vision_config={**BY_NAME["clip"].config().vision_config.to_dict(), "model_type": "clip_vision_model"},
    )
    for auto_class in (AutoModel, transformers.AutoModelForImageTextToText):
        assert all(symmetric_layers(auto_class.from_config(config, qk_init="symmetric")))


def test_a_part_with_an_option_of_its_own():
    """A sub-config's own option holds for its tower only, and is not overruled by the one around it."""
    config = BY_NAME["clip"].config()
    config.text_config.qk_init = "symmetric"
    scores = score_model(AutoModel.from_config(config)).layers
    assert {x.stack for x in scores if x.symmetry > 0.999} == {"text_model"}
    config.text_config.qk_init = "independent"
    scores = score_model(AutoModel.from_config(config, qk_init="symmetric")).layers
    assert {x.stack for x in scores if x.symmetry > 0.999} == {"vision_model"}


def test_trained_parts_of_a_new_model_are_not_touched():
    """A model put together from one that was trained and one that is new: only what was just drawn gets the scheme."""
    trained = BertModel(BERT.config())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    before = copy.deepcopy(trained.state_dict())
    decoder = BERT.config(is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(trained.config, decoder)
    config.qk_init = "symmetric"
    decoder_model = transformers.AutoModelForCausalLM.from_config(decoder)
    model = EncoderDecoderModel(config=config, encoder=trained, decoder=decoder_model)
    assert all(torch.equal(value, before[key]) for key, value in model.encoder.state_dict().items())
    assert not any(symmetric_layers(model.encoder))


def test_a_failed_construction_leaves_nothing_behind():
    """An exception inside one construction must not silence the option for the models built after it."""

    class Broken(BertForMaskedLM):
        def __init__(self, config):
            super(BertForMaskedLM, self).__init__(config)
            self.bert = BertModel(config)
            raise RuntimeError("half-way")

    kept = None
    try:
        Broken(BERT.config(qk_init="symmetric"))
    except RuntimeError as error:
        kept = error  # its traceback keeps the frames, and so the half-built model, alive
    assert kept is not None
    assert all(symmetric_layers(BertModel(BERT.config(qk_init="symmetric"))))


@architectures
def test_meta_device_then_to_empty_then_init_weights(architecture: Architecture):
    """Building on the meta device, `to_empty` and `init_weights` gives what direct construction gives."""
    config = architecture.config(qk_init="symmetric")
    with torch.device("meta"):
        model = architecture.build(config=config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    assert all(symmetric_layers(model))
    with torch.device("meta"):
        reference = architecture.build(config=architecture.config())
    reference.to_empty(device="cpu")
    torch.manual_seed(0)
    reference.init_weights()
    ours = dict(model.named_parameters())
    names = [name for name, value in reference.named_parameters() if not torch.equal(value, ours[name])]
    layers = [layer for layer in find_attention_layers(reference) if layer.kind == "self"]
    holders = {f"{layer.name}.{layer.layout.key.module}" for layer in layers}
    # CLIP's init leaves its logit scale to the constructor, so `to_empty` leaves it to chance.
    assert {name.rpartition(".")[0] for name in names if name != "logit_scale"} == holders


def test_a_model_around_that_never_initialises(tmp_path):
    """A class of a user's own that forgets `post_init`: the base model inside it has its option all the same."""

    class Around(BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = BertModel(config)

    assert all(symmetric_layers(Around(BERT.config(qk_init="symmetric"))))


def test_a_checkpoint_loaded_inside_a_constructor(tmp_path):
    """It is a model of its own: the keyword reaches the layers that it lacks, and nothing is said to be in vain."""
    BertModel(BERT.config()).save_pretrained(tmp_path)

    class Around(BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = BertModel.from_pretrained(tmp_path, num_hidden_layers=5, qk_init="symmetric")
            self.post_init()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`qk_init` changes nothing")
        model = Around(BERT.config())
    assert symmetric_layers(model) == [False, False, False, True, True]


def test_unknown_attention_beside_a_known_part_is_refused():
    """Wherever the known part sits, an option for all layers does not pass over attention that is not known."""

    class WeirdAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed = torch.nn.Linear(48, 96)

    class Around(BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = BertModel(config)
            self.extra = WeirdAttention()
            self.post_init()

    with pytest.raises(ValueError, match=r"(?s)to reach every layer, but .*extra: WeirdAttention"):
        Around(BERT.config(qk_init="symmetric"))
    assert all(symmetric_layers(Around(BERT.config(qk_init={"layers": [0, 1, 2]}))))


def test_an_option_that_changes_nothing_never_refuses():
    """`"independent"` is the plain init: comparisons need no special case for models without attention."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    assert AutoModel.from_config(config, qk_init="independent").config.qk_init == SymmetricInit("independent")
    with pytest.raises(ValueError, match="No attention layer of ResNetModel"):
        AutoModel.from_config(config, qk_init="symmetric")


def test_helpers_named_after_attention_are_no_attention():
    """Output projections and pooling heads do not stand in the way of an option for all layers."""
    lxmert = transformers.LxmertConfig(
        hidden_size=48, num_attention_heads=4, intermediate_size=40, vocab_size=99, l_layers=1, x_layers=1, r_layers=1
    )
    small = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    siglip = transformers.SiglipVisionConfig(**small, image_size=16, patch_size=8)
    for config in (lxmert, siglip):
        assert all(symmetric_layers(AutoModel.from_config(config, qk_init="symmetric")))


def test_an_option_for_all_layers_refuses_a_model_known_in_part():
    """
    A composite of which one tower is known: initialising that one alone would be half of what was asked for. Naming
    layers says which half is meant.
    """
    config = LlavaConfig(
        text_config=BY_NAME["llama"].config().to_dict(),
        vision_config={  # whose queries are pooled
            "model_type": "hiera",
            "embed_dim": 24,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 2, 2, 2],
            "image_size": [32, 32],
        },
    )
    with pytest.raises(
        ValueError, match=r"(?s)to reach every layer, but .*HieraMaskUnitAttention.*SymmetricInit\(layers=...\)"
    ) as raised:
        AutoModel.from_config(config, qk_init="symmetric")
    assert "register_qk_layout" in str(raised.value)
    stack = find_attention_layers(AutoModel.from_config(config))[0].stack
    model = AutoModel.from_config(config, qk_init={"layers": {stack: [0, 1, 2]}})
    assert symmetric_layers(model) == [layer.stack == stack for layer in find_attention_layers(model)]


# --- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_save_and_load_is_bit_equal(architecture: Architecture, tmp_path):
    """Loaded weights are never touched, whatever the saved config says; a saved option alone does not warn."""
    model = architecture.build(qk_init="symmetric")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(tmp_path)
    auto_class = getattr(transformers, architecture.auto_class)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = auto_class.from_pretrained(tmp_path)
    assert_same_weights(model, loaded)
    assert loaded.config.qk_init == SymmetricInit()


def test_loads_bit_equal_without_the_plugin(tmp_path):
    """What the plugin saved is a plain checkpoint: a process that never imports it reads the same bits."""
    model = BY_NAME["t5"].build(qk_init="symmetric")
    model.save_pretrained(tmp_path)
    script = f"""
        import sys, torch
        from transformers import AutoConfig, AutoModel
        model = AutoModel.from_pretrained({str(tmp_path)!r})
        torch.save(model.state_dict(), {str(tmp_path / "loaded.pt")!r})
        assert AutoConfig.from_pretrained({str(tmp_path)!r}).qk_init == {{"scheme": "symmetric"}}
        assert "hf_symqk" not in sys.modules
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True, timeout=120
    )
    loaded = torch.load(tmp_path / "loaded.pt")
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("auto", [True, False])
def test_keyword_on_a_complete_checkpoint_changes_nothing_and_warns(auto, tmp_path):
    """`from_pretrained(…, qk_init=…)` cannot mean to overwrite trained weights; it says what would."""
    model = AutoModelForMaskedLM.from_config(BERT.config())
    model.save_pretrained(tmp_path)
    model_class = AutoModelForMaskedLM if auto else BertForMaskedLM
    with pytest.warns(UserWarning, match=r"`qk_init` changes nothing here.*apply_qk_init"):
        loaded = model_class.from_pretrained(tmp_path, qk_init="symmetric")
    assert_same_weights(model, loaded)
    assert loaded.config.qk_init is None, "the config must not claim what was not done"


@pytest.mark.parametrize("auto", [True, False])
def test_keyword_reaches_layers_that_the_checkpoint_lacks(auto, tmp_path):
    """Only layers whose Q and K are both missing get the scheme; the head's task does not matter."""
    base = AutoModel.from_config(BERT.config())
    state = base.state_dict()
    for name in list(state):
        if "layer.1.attention.self" in name and ("query" in name or "key" in name):
            del state[name]
        if name.startswith("encoder.layer.2.attention.self.key."):
            del state[name]
    base.save_pretrained(tmp_path, state_dict=state)
    model_class = AutoModelForMaskedLM if auto else BertForMaskedLM
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = model_class.from_pretrained(tmp_path, qk_init="symmetric")
    assert symmetric_layers(loaded) == [False, True, False], "layer 2 has its Q from the checkpoint"
    assert loaded.config.qk_init == SymmetricInit()
    same = loaded.bert.state_dict()
    assert [name for name, value in state.items() if name in same and not torch.equal(value, same[name])] == []


@pytest.mark.parametrize("quantised", ["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao"])
@pytest.mark.parametrize("keyword", [False, True])
def test_complete_checkpoints_load_quantised(quantised, keyword, tmp_path):
    """An option saved in the config (or given again) does not stand in the way of loading packed weights."""
    BertModel(BERT.config(qk_init="symmetric")).save_pretrained(tmp_path)
    if quantised == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        settings = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes")
        settings = transformers.BitsAndBytesConfig(**{f"load_in_{quantised[-4:]}": True})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`qk_init` changes nothing")
        if keyword:
            with pytest.raises(UserWarning, match="`qk_init` changes nothing"):
                BertModel.from_pretrained(tmp_path, quantization_config=settings, qk_init="symmetric")
            return
        model = BertModel.from_pretrained(tmp_path, quantization_config=settings)
    query = model.encoder.layer[0].attention.self.query.weight
    assert not query.is_floating_point() or type(query.data).__module__.startswith("torchao")
    # Q and K hold the same numbers and are packed alike.
    assert [layer.symmetry for layer in score_model(model).layers] == pytest.approx([1] * 3, abs=1e-4)


def test_complete_checkpoints_load_into_less_than_was_saved(tmp_path):
    """Fewer layers, or the encoder alone: the saved option names what is not there, and nothing has to be drawn."""
    BertModel(BERT.config(qk_init={"layers": [2]})).save_pretrained(tmp_path / "bert")
    model = BertModel.from_pretrained(tmp_path / "bert", num_hidden_layers=2)
    assert len(score_model(model).layers) == 2
    for number, option in enumerate(({"layers": {"decoder": [1]}}, {"attention": "cross"})):
        T5ForConditionalGeneration(BY_NAME["t5"].config(qk_init=option)).save_pretrained(tmp_path / f"t5_{number}")
        encoder = transformers.T5EncoderModel.from_pretrained(tmp_path / f"t5_{number}")
        assert len(score_model(encoder).layers) == 2


def test_saved_option_reaches_layers_that_the_checkpoint_lacks(tmp_path):
    """A deeper model grown from a checkpoint: the option in its config holds for the layers that are drawn anew."""
    BertModel(BERT.config(num_hidden_layers=2, qk_init="independent")).save_pretrained(tmp_path)
    config = BertConfig.from_pretrained(tmp_path, num_hidden_layers=4, qk_init="symmetric")
    model = BertModel.from_pretrained(tmp_path, config=config)
    assert symmetric_layers(model) == [False, False, True, True]


# --- in and out ---------------------------------------------------------------------------------------------------


def hooked() -> dict:
    """Everything that the plugin lays hands on, as it stands."""
    places = {
        PreTrainedModel: ("_from_config", "from_pretrained", "initialize_weights", "post_init", "init_weights"),
        PreTrainedConfig: ("qk_init", "__init__", "__setattr__", "from_dict", "to_dict", "from_pretrained"),
        AutoConfig: ("from_pretrained",),
        deepspeed_integration: ("initialize_weights_zero3",),
        CallbackHandler: ("add_callback", "on_log"),
        ProgressCallback: ("on_log",),
        PrinterCallback: ("on_log",),
    }
    return {(owner, name): vars(owner).get(name) for owner, names in places.items() for name in names}


def test_unregister_restores_transformers_exactly():
    """After `unregister()` each hooked attribute is the object that it was in a process without the plugin."""
    registered = hooked()
    try:
        hf_symqk.unregister()
        for key, value in hooked().items():
            function = getattr(value, "__func__", value)
            module = getattr(function, "__module__", "")
            assert value is None or module.startswith(("transformers.", "huggingface_hub.")), key
        assert "qk_init" not in vars(PreTrainedConfig)
        restored = hooked()
        hf_symqk.unregister()
        assert hooked() == restored, "taking out twice is taking out once"
        assert not any(symmetric_layers(AutoModel.from_config(BERT.config(qk_init={"scheme": "symmetric"}))))
    finally:
        hf_symqk.register()
    assert hooked().keys() == registered.keys()
    hf_symqk.unregister()
    assert hooked() == restored
    hf_symqk.register()


def test_importing_twice_and_reloading_patch_once():
    """A hook is never put upon a hook, by reloading or by importing a second copy of the package."""
    depth = 0
    before = BERT.build(qk_init="symmetric")
    importlib.reload(hf_symqk.plugin)
    importlib.reload(hf_symqk)
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "hf_symqk"}
    try:
        importlib.import_module("hf_symqk")
        function = PreTrainedModel.initialize_weights
        while (inner := getattr(function, "__hf_symqk_original__", None)) is not None:
            function, depth = inner, depth + 1
        assert depth == 1
        assert function.__module__ == "transformers.modeling_utils"
        sys.modules["hf_symqk"].unregister()
        assert PreTrainedModel.initialize_weights is function
    finally:
        sys.modules.update(saved)
        hf_symqk.register()
    assert_same_weights(before, BERT.build(qk_init="symmetric"))


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_plain_models_are_those_of_plain_transformers(architecture: Architecture):
    """Without the option the plugin changes neither weights nor random state of any construction."""
    ours = architecture.build(5)
    state = torch.get_rng_state()
    hf_symqk.unregister()
    try:
        theirs = architecture.build(5)
    finally:
        hf_symqk.register()
    assert torch.equal(state, torch.get_rng_state())
    assert_same_weights(ours, theirs)


def test_wrappers_of_other_libraries_stay():
    """What somebody else has put around a hook survives; inside it the hook works once, or not at all."""
    calls = []
    ours = PreTrainedModel.initialize_weights

    @functools.wraps(ours)
    def theirs(model):
        calls.append(type(model).__name__)
        return ours(model)

    PreTrainedModel.initialize_weights = theirs
    try:
        hf_symqk.register()
        assert PreTrainedModel.initialize_weights is theirs
        assert all(symmetric_layers(AutoModel.from_config(BERT.config(), qk_init="symmetric")))
        hf_symqk.unregister()
        assert PreTrainedModel.initialize_weights is theirs
        assert not any(symmetric_layers(AutoModel.from_config(BERT.config(qk_init={"scheme": "symmetric"}))))
        hf_symqk.register()
        assert all(symmetric_layers(AutoModel.from_config(BERT.config(), qk_init="symmetric")))
        assert len(calls) == 3
        saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "hf_symqk"}
        try:
            importlib.import_module("hf_symqk")  # another copy, with state of its own
            assert all(symmetric_layers(AutoModel.from_config(BERT.config(), qk_init="symmetric")))
        finally:
            sys.modules.update(saved)
            hf_symqk.register()
    finally:
        PreTrainedModel.initialize_weights = ours
    hf_symqk.unregister()
    assert not hasattr(PreTrainedModel.initialize_weights, "__hf_symqk_original__")
    hf_symqk.register()


def test_foreign_configs_keep_an_attribute_of_that_name():
    """A config class of somebody else's may mean something else by `qk_init`; it is neither refused nor changed."""

    class Foreign(PreTrainedConfig):
        model_type = "foreign"

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.qk_init = 0.02

    for value in (0.02, "orthogonal", {"std": 0.1}):
        config = Foreign()
        config.qk_init = value
        assert config.qk_init == value
        assert config.to_dict()["qk_init"] == value


def test_t5_parts_share_the_option():
    """T5 gives its stacks copies of the config; they are one model with one option."""
    model = T5ForConditionalGeneration(BY_NAME["t5"].config(qk_init={"layers": {"decoder": [1]}}))
    assert [(x.stack, x.index) for x in score_model(model).layers if x.symmetry > 0.999] == [("decoder", 1)]
