"""Finding W_q and W_k: proven by the model's own attention weights, not by our reading of its source."""

import re

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, BY_NAME, LAYERS, Architecture
from oracle.building import build
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    GroundingDinoConfig,
    LlavaConfig,
    LxmertConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    ReformerConfig,
    SegformerConfig,
)
from transformers.models.grounding_dino.modeling_grounding_dino import GroundingDinoBiMultiHeadAttention

from hf_symqk import apply_qk_init, find_attention_layers, score_model
from hf_symqk.attention import AttentionLayer, survey_attention


def _randomise(model: PreTrainedModel) -> None:
    """Logits of order 1 and biases that are not zero, so that a wrong row or a dropped bias shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for layer in find_attention_layers(model):
            with layer.tensors("query", "key", write=True) as tensors:
                for weight, bias in tensors.values():
                    weight.normal_(std=weight.shape[-1] ** -0.5)
                    if bias is not None:
                        bias.normal_()
    for module in model.modules():
        if type(module).__name__ == "T5Attention" and module.has_relative_attention_bias:
            nn.init.zeros_(module.relative_attention_bias.weight)  # not part of W_qk


def _logits_of_forward(model: PreTrainedModel, inputs: dict[str, torch.Tensor], layers: list[AttentionLayer]) -> dict:
    """Per layer: the streams that its module was given, and the attention weights that it returned."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def hook(layer: AttentionLayer):
        def record(module, args, kwargs, output):
            queries = args[0] if args else kwargs["hidden_states"]
            named = [kwargs.get(name) for name in ("key_value_states", "encoder_hidden_states")]
            other = next((value for value in (*named, *args[1:2]) if value is not None), None)
            keys = queries if layer.kind == "self" else other
            shape = (queries.shape[1], keys.shape[1])
            weights = [tensor for tensor in output if isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == shape]
            weights = [tensor for tensor in weights if tensor.ndim == 4]
            # T5 returns its position bias too; weights are the ones that sum to 1.
            (weights,) = [w for w in weights if torch.allclose(w.sum(-1), torch.ones(()), atol=1e-4)]
            seen[layer.name] = (queries, keys, weights)

        return record

    handles = [layer.module.register_forward_hook(hook(layer), with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_weights_of_the_table_give_the_attention_of_the_forward_pass(architecture: Architecture, monkeypatch):
    """
    Protects every layout: log-attention differences `log a_ij − log a_i0` of the model's own eager forward must be
    those of `scale · (x_i W_q^h + b_q)(x_j W_k^g(h) + b_k)ᵀ` with W_q, W_k, b and h → g(h) from the table, by value.
    """
    model = architecture.build(attn_implementation="eager").eval()
    _randomise(model)
    if architecture.name == "bloom":  # ALiBi is not part of W_qk
        monkeypatch.setattr(
            "transformers.models.bloom.modeling_bloom._get_alibi_slopes", lambda heads, device: torch.zeros(heads)
        )
    if architecture.name == "qwen3":  # with QK-norm logits are no bilinear form; what is compared here is the layout
        for layer in model.layers:
            layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    layers = find_attention_layers(model)
    assert {layer.stack for layer in layers} == set(architecture.stacks)
    seen = _logits_of_forward(model, architecture.inputs(architecture), layers)
    assert set(seen) == {layer.name for layer in layers}, "the forward pass did not reach every layer that was found"
    for layer in layers:
        queries, keys, weights = seen[layer.name]
        with layer.tensors("query", "key") as tensors:
            (w_q, b_q), (w_k, b_k) = tensors["query"], tensors["key"]
            q = torch.einsum("bnd,hed->bhne", queries, w_q) + (0 if b_q is None else b_q[None, :, None])
            k = torch.einsum("bnd,ged->bgne", keys, w_k) + (0 if b_k is None else b_k[None, :, None])
        k = k.repeat_interleave(layer.heads.num_key_value_groups, dim=1)
        scale = architecture.scale or layer.heads.head_dim**-0.5
        expected = scale * q @ k.mT
        assert weights.shape == expected.shape
        visible = weights > 1e-12  # causal masks
        observed = weights.clamp(min=1e-30).log()
        difference = (observed - observed[..., :1]) - (expected - expected[..., :1])
        # fp32 softmax and its logarithm: 1e-6 relative to logits of up to about 20.
        assert difference[visible & visible[..., :1]].abs().max() < 1e-3
        assert expected.std() > 0.1, "logits too flat to prove anything"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_weights_are_views(architecture: Architecture):
    """No copies: what is yielded shares storage with the model's parameters."""
    model = architecture.build()
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for layer in find_attention_layers(model):
        with layer.tensors("query", "key", "value") as tensors:
            assert all(t.weight.untyped_storage().data_ptr() in storages for t in tensors.values())


def test_head_models_name_layers_as_their_base_does():
    """`layers={"encoder": …}` and logged keys must not depend on the head around the base model."""
    for name, heads in (
        ("bert", ("AutoModelForMaskedLM", "AutoModelForSequenceClassification")),
        ("t5", ("AutoModelForSeq2SeqLM",)),
        ("bart", ("AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification")),
        ("clip", ("AutoModelForZeroShotImageClassification",)),
        ("llama", ("AutoModelForCausalLM",)),
    ):
        base = [(layer.stack, layer.index, layer.kind) for layer in find_attention_layers(BY_NAME[name].build())]
        for head in heads:
            model = Architecture(**{**vars(BY_NAME[name]), "auto_class": head}).build()
            assert [(layer.stack, layer.index, layer.kind) for layer in find_attention_layers(model)] == base


def test_composite_models_name_their_towers():
    """A tower inside a composite model is a stack of its own, and indices count within it."""
    config = LlavaConfig(
        text_config=BY_NAME["llama"].config().to_dict(),
        vision_config={**BY_NAME["clip"].config().vision_config.to_dict(), "model_type": "clip_vision_model"},
    )
    layers = find_attention_layers(AutoModel.from_config(config))
    places = {stack: [layer.index for layer in layers if layer.stack == stack] for stack in {x.stack for x in layers}}
    assert places == {"vision_tower": [0, 1], "language_model": list(range(LAYERS))}


def test_wrappers_do_not_change_names():
    """DDP, torch.compile and checkpoint wrappers put names of their own between those of the model."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = BY_NAME["bert"].build()
    names = [layer.name for layer in find_attention_layers(model)]
    assert [layer.name for layer in find_attention_layers(Wrapper(model))] == names
    assert [layer.name for layer in find_attention_layers(torch.compile(model))] == names


def test_shared_layers_count_once():
    """ALBERT runs one module three times."""
    model = BY_NAME["albert"].build()
    assert model.config.num_hidden_layers == LAYERS
    assert len(find_attention_layers(model)) == 1


# Its queries and keys share one weight, which is no layout of two.
_REFORMER = {
    "attn_layers": ["lsh"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_head_size": 8,
    "axial_pos_embds": False,
    "vocab_size": 9,
}


def test_nothing_found_says_what_was_looked_at():
    """An unknown layout is an error that names the module and its projections, never an empty result."""
    model = AutoModel.from_config(ReformerConfig(**_REFORMER))
    for function in (find_attention_layers, score_model):
        with pytest.raises(
            ValueError, match=r"LSHSelfAttention \(model type 'reformer'\) with query_key, value"
        ) as raised:
            function(model)
        assert "query/key" in str(raised.value)
        assert "register_qk_layout" in str(raised.value)
    with pytest.raises(ValueError, match="none that looks like attention"):
        find_attention_layers(nn.Linear(2, 2))


def test_left_out_attention_is_named_in_a_warning(caplog):
    """A model of which only a part is known is scored, and what is left out is said."""

    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.known = BY_NAME["bert"].build()
            self.unknown = AutoModel.from_config(ReformerConfig(**_REFORMER))

    logger = "hf_symqk.attention.finding"
    import transformers.utils.logging as hf_logging

    hf_logging.enable_propagation()
    try:
        with caplog.at_level("WARNING", logger=logger):
            layers = find_attention_layers(Strange())
    finally:
        hf_logging.disable_propagation()
    assert len(layers) == LAYERS
    assert "Left out of Strange" in caplog.text
    assert "LSHSelfAttention" in caplog.text


def test_heads_that_do_not_fit_are_refused():
    """A projection with rows that the head counts do not explain is an error with the numbers, not a guess."""
    model = AutoModel.from_config(BertConfig(**BY_NAME["bert"].values))
    attention = model.encoder.layer[1].attention.self
    attention.num_attention_heads = 5
    with pytest.raises(
        ValueError, match=r"encoder.layer.1.attention.self.*query has 48 rows.*5 query heads.*width 12"
    ):
        score_model(model)
    attention.num_attention_heads = 4
    attention.key = nn.Linear(48, 36)  # 3 key heads for 4 query heads
    with pytest.raises(ValueError, match="key has 36 rows"):
        apply_qk_init(model)
    assert [layer.index for layer in score_model(model, layers=[0, 2]).layers] == [0, 2], "the others can be had"


def test_cross_attention_under_other_names():
    """LXMERT's layers between language and vision read two streams, whatever the module is called."""
    config = LxmertConfig(
        hidden_size=48, num_attention_heads=4, intermediate_size=40, vocab_size=99, l_layers=1, x_layers=1, r_layers=1
    )
    layers = find_attention_layers(AutoModel.from_config(config))
    kinds = {layer.name: layer.kind for layer in layers}
    assert kinds["encoder.x_layers.0.visual_attention.att"] == "cross"
    assert kinds["encoder.x_layers.0.lang_self_att.self"] == "self"


def test_what_is_no_softmax_over_tokens_is_left_out():
    """Linear attention has modules of the same names; it is not scored as if it were softmax attention."""
    values = BY_NAME["qwen2"].values | {"pad_token_id": None, "layer_types": ["linear_attention", "full_attention"]}
    config = OlmoHybridConfig(**values | {"num_hidden_layers": 2})
    survey = survey_attention(AutoModel.from_config(config))
    assert [layer.name for layer in survey.layers] == ["layers.1.self_attn"]
    assert any("GatedDeltaNet" in line for line in survey.left_out)


@pytest.mark.parametrize(
    ("config_class", "values"),
    [
        ("YosoConfig", BY_NAME["bert"].values),
        ("MraConfig", BY_NAME["bert"].values),
        ("xLSTMConfig", {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 99}),
        (
            "AutoformerConfig",
            {"prediction_length": 4, "context_length": 8, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1},
        ),
    ],
)
def test_other_functions_of_queries_and_keys_are_refused(config_class, values):
    """Hashing, multi-resolution products, exponential gates, correlations over time: none of them is a softmax."""
    model = AutoModel.from_config(getattr(transformers, config_class)(**values))
    with pytest.raises(ValueError, match="no softmax over products of queries and keys"):
        find_attention_layers(model)


def test_keys_of_a_reduced_image_are_left_out():
    """Segformer convolves the tokens of its keys in all stages but the last: W_q W_kᵀ is not what attention sees."""
    survey = survey_attention(AutoModel.from_config(SegformerConfig(depths=[1, 1, 1, 1])))
    assert [layer.name for layer in survey.layers] == ["stages.3.blocks.0.attention"]
    (line,) = survey.left_out
    assert line.endswith("sequence_reduction mixes tokens before queries and keys meet")


def test_pooling_heads_are_cross_attention_and_leave_names_alone():
    """A learned probe asks and tokens answer; the towers are called as if the head were not there."""
    model = BY_NAME["siglip"].build()
    layers = find_attention_layers(model)
    assert [layer.name for layer in layers if layer.kind == "cross"] == ["vision_model.head.attention"]
    config = BY_NAME["siglip"].config()
    config.vision_config.vision_use_head = False
    without = find_attention_layers(AutoModel.from_config(config))
    assert {(x.name, x.stack, x.index) for x in without} == {
        (x.name, x.stack, x.index) for x in layers if x.kind == "self"
    }


def test_attention_between_images_and_text_is_cross_attention():
    """GroundingDINO's fusion layers, whose streams have one width."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fusion_layer = nn.Module()
            self.fusion_layer.attn = GroundingDinoBiMultiHeadAttention(GroundingDinoConfig())

    (layer,) = find_attention_layers(nn.ModuleList([Layer()]))
    assert (layer.layout.name, layer.kind) == ("vision_proj/text_proj", "cross")
    assert (layer.heads.num_attention_heads, layer.heads.head_dim) == (4, 256)


@pytest.mark.parametrize("name", ["falcon_grouped", "gpt_bigcode_one_key_head", "codegen", "xlnet", "siglip"])
def test_what_is_written_arrives(name):
    """Also where heads are no view of the rows, or the weight has three dimensions; other rows stay."""
    model = BY_NAME[name].build()
    for layer in find_attention_layers(model):
        with layer.tensors("query", "key", "value") as tensors:
            before = {part: tensor.weight.clone() for part, tensor in tensors.items()}
        with layer.tensors("query", write=True) as tensors:
            tensors["query"].weight.mul_(2)
        with layer.tensors("query", "key", "value") as tensors:
            assert torch.equal(tensors["query"].weight, 2 * before["query"])
            assert torch.equal(tensors["key"].weight, before["key"])
            assert torch.equal(tensors["value"].weight, before["value"])


def test_products_cannot_be_written():
    """Latent keys are a product of two weights; there is no one weight to write to."""
    layer = find_attention_layers(BY_NAME["deepseek_v3"].build())[0]
    for write in (lambda: layer.tensors("key", write=True).__enter__(), lambda: layer.holder("key")):
        with pytest.raises(ValueError, match=r"a product \(kv_a_proj_with_mqa, kv_b_proj\)"):
            write()


def test_convolved_keys_are_left_out():
    """Inkling convolves its keys over the tokens: no token has a W_k of its own, whatever names say."""
    with pytest.raises(ValueError, match="k_sconv mixes tokens"):
        survey_attention(build("inkling_text"))


def test_assignments_to_groups_are_left_out():
    """GroupViT's groups compete for tokens, all heads in one: no attention of a query over keys."""
    survey = survey_attention(build("groupvit_vision_model"))
    assert not any(layer.name.endswith(".assign") for layer in survey.layers)
    assert any(".assign" in line for line in survey.left_out)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("sam2_hiera_det_model", "each query is pooled from those of several tokens"),
        ("florence_vision", "Florence2VisionChannelAttention .*: no softmax over products"),
        ("inkling2_text", "k_proj.sconv mixes tokens"),
        ("cvt", "convolution_projection_query mixes tokens"),
        ("jetmoe", "queries are routed through experts"),
        ("moshi_depth", "q_proj.linear holds several matrices"),
        ("swiftformer", "Additive.*: no softmax over products"),
        ("zaya", "conv_qk_depthwise mixes tokens"),
        ("reformer", "queries and keys are hashed"),
    ],
)
def test_what_no_layout_can_serve_is_left_out_with_the_reason(model_type, reason):
    """Attention that has no W_q and W_k of single tokens is never a silent miss, even inside wrapping modules."""
    with torch.device("meta"):
        model = build(model_type, level=2 if model_type == "reformer" else 0)
    try:
        left_out = survey_attention(model).left_out
    except ValueError as error:
        left_out = str(error).splitlines()
    assert any(re.search(reason, line) for line in left_out), left_out


def test_attention_beside_that_has_no_conv_of_its_own_is_found():
    """Nyströmformer convolves its values, GroupViT attends before it assigns: softmax attention all the same."""
    assert len(survey_attention(build("nystromformer")).layers) == 2
    names = [layer.name for layer in survey_attention(build("groupvit_vision_model")).layers]
    assert any("pre_assign_attn" in name for name in names)


def test_heads_of_a_stage_come_from_the_module():
    """Each stage of Florence-2's tower has a number of heads of its own, which its config gives by lists."""
    with torch.device("meta"):
        model = build("florence_vision", level=1)
    for layer in survey_attention(model).layers:
        assert layer.heads.num_attention_heads == layer.module.num_heads
    assert len({layer.input_width("query") for layer in survey_attention(model).layers}) > 1


def test_batch_norms_and_groups_of_channels_cannot_be_written():
    """What is read through a batch norm, or from a block-diagonal matrix, has no rows to write to; it says so."""
    layer = find_attention_layers(build("levit"))[0]
    with pytest.raises(ValueError, match=r"go through queries_keys_values.batch_norm.*not initialised"):
        layer.tensors("query", "key", write=True).__enter__()
    layer = find_attention_layers(build("squeezebert"))[0]
    with pytest.raises(ValueError, match=r"Conv1d \(convolution in groups\) can be read but not written"):
        layer.tensors("query", "key", write=True).__enter__()
