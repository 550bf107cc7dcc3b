"""
The entries of the layout table that come with the package, one a scheme. Each is held to the forward pass of the
models named beside it: basis vectors go in, and the queries and keys that reach the softmax have to be those of the
table, head by head (`tests/oracle`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .layouts import ComposedProjection, LearnedScale, Projection, register_qk_layout
from .rows import GatedRows, HeadRows, LatentRows, Part, PerHeadRows, RowSelector, ShardedRows, WholeRows


__all__: list[str] = []

_PARTS: tuple[Part, ...] = ("query", "key", "value")
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "layer_norm_q", "q_ln")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "layer_norm_k", "k_ln")
_NORMS: dict[str, Any] = {"query_norms": _QUERY_NORMS, "key_norms": _KEY_NORMS}

# Separate projections are split the same way by every model that uses these names. The modules' own head counts and
# shapes are checked against each other, so that a model which packs more into one of them is refused, not misread.
for _query, _key, _value in (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa-v2, SEW-D, ProphetNet
    ("linear_q", "linear_k", "linear_v"),  # conformers
    ("Wq", "Wk", "Wv"),  # CTRL
    ("to_q", "to_k", "to_v"),  # the diffusion transformer of Qwen2.5-Omni
    ("project_q", "project_k", "project_v"),  # CPM-Ant
    ("q_head", "k_head", "v_head"),  # Funnel
):
    register_qk_layout(
        name=f"{_query}/{_key}",
        query=Projection(_query, HeadRows("query")),
        key=Projection(_key, HeadRows("key")),
        value=Projection(_value, HeadRows("value")),
        **_NORMS,
    )

register_qk_layout(
    name="q_proj/k_proj, normalised before",  # norms of these names stand before the projections, as others do
    query=Projection("q_proj", HeadRows("query")),
    key=Projection("k_proj", HeadRows("key")),
    value=Projection("v_proj", HeadRows("value")),
    model_types=["blt", "blt_local_encoder", "blt_local_decoder"],
)
register_qk_layout(
    # A module of its own holds each linear map. Gemma's clips what goes in and out, if a checkpoint has bounds for it;
    # the forms are those of what lies within. Others do more than these: the types are listed.
    name="q_proj/k_proj, wrapped",
    query=Projection("q_proj.linear", HeadRows("query")),
    key=Projection("k_proj.linear", HeadRows("key")),
    value=Projection("v_proj.linear", HeadRows("value")),
    model_types=["gemma4_vision", "kyutai_speech_to_text", "moshi"],
    **_NORMS,
)
register_qk_layout(
    name="q/k, one head",  # blocks of image and audio tokenizers, whose channels are not split
    query=Projection("q", HeadRows("query")),
    key=Projection("k", HeadRows("key")),
    value=Projection("v", HeadRows("value")),
    model_types=["apertus1p5_vision_tokenizer", "chameleon_vqgan", "janus_vqgan", "wavtokenizer"],
    num_heads=1,
)
# Positions have projections of their own: the forms are those of the contents, to whose logits theirs are added.
register_qk_layout(
    name="q_content_proj/k_content_proj",
    query=Projection("q_content_proj", HeadRows("query")),
    key=Projection("k_content_proj", HeadRows("key")),
    value=Projection("v_proj", HeadRows("value")),
    model_types=["conditional_detr"],
)
for _kind in ("self_attn", "cross_attn"):
    register_qk_layout(
        name=f"{_kind}_query_content_proj/{_kind}_key_content_proj",
        query=Projection(f"{_kind}_query_content_proj", HeadRows("query")),
        key=Projection(f"{_kind}_key_content_proj", HeadRows("key")),
        value=Projection(f"{_kind}_value_proj", HeadRows("value")),
        model_types=["dab-detr"],
        num_heads=f"{_kind}.attention_heads",
    )
register_qk_layout(
    name="query/key_protein",  # Evolla, whose released models attend to proteins alone of the three that it knows
    query=Projection("query", HeadRows("query")),
    key=Projection("key_protein", HeadRows("key")),
    value=Projection("value_protein", HeadRows("value")),
)
register_qk_layout(
    name="to_q/to_kv",  # conformers of Granite Speech
    query=Projection("to_q", HeadRows("query")),
    key=Projection("to_kv", HeadRows("key", ("key", "value"))),
    value=Projection("to_kv", HeadRows("value", ("key", "value"))),
    **_NORMS,
)
register_qk_layout(
    name="q_proj with a gate/k_proj",
    query=Projection("q_proj", GatedRows()),
    key=Projection("k_proj", HeadRows("key")),
    value=Projection("v_proj", HeadRows("value")),
    model_types=[
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp",
        "qwen4_exp_text",
    ],
    **_NORMS,
)
# GroundingDINO's attention between images and text: one matrix of logits for both directions. Its head count is half
# of what the config says of other modules.
register_qk_layout(
    name="vision_proj/text_proj",
    query=Projection("vision_proj", HeadRows("query")),
    key=Projection("text_proj", HeadRows("key")),
    file_types=["grounding-dino", "mm-grounding-dino"],
)


def _fused(module: str, rows: list[RowSelector], **storage: Any) -> dict[str, Any]:
    projections = [Projection(module, selector, **storage) for selector in rows]
    return dict(zip(_PARTS, projections, strict=True))


def _order(*order: Part, interleaved: bool = False) -> list[RowSelector]:
    return [HeadRows(part, order, interleaved) for part in _PARTS]


def _sharded(*order: Part) -> list[RowSelector]:
    return [ShardedRows(part, order, 4) for part in _PARTS]


# Parameters of the attention module itself.
register_qk_layout(
    name="q/k (parameters)",
    query=Projection("", HeadRows("query"), transposed=True, weight="q", bias=""),
    key=Projection("", HeadRows("key"), transposed=True, weight="k", bias=""),
    value=Projection("", HeadRows("value"), transposed=True, weight="v", bias=""),
    model_types=["xlnet"],
)
register_qk_layout(
    name="in_proj_weight",  # torch's own `nn.MultiheadAttention`
    **_fused("", _order(*_PARTS), weight="in_proj_weight", bias="in_proj_bias"),
    # Modules of others have head counts of their own, which only the live module knows.
    file_types=[
        "bridgetower",
        "bridgetower_vision_model",
        "mask2former",
        "oneformer",
        "siglip2_vision_model",
        "siglip_vision_model",
    ],
)

# Fused projections: the same module name stands for different orders of rows, so the model types are listed.
for _name, _module, _rows, _storage, _types in (
    ("Wqkv", "Wqkv", _order(*_PARTS), {}, ["modernbert", "mpt"]),
    ("qkv_proj", "qkv_proj", _order(*_PARTS), {}, ["phi3", "phi4_multimodal"]),
    (
        "att_proj",
        "att_proj",
        _order(*_PARTS),
        {},
        ["bark", "semantic", "coarse_acoustics", "fine_acoustics"],
    ),
    (
        "qkv",
        "qkv",
        _order(*_PARTS),
        {},
        [
            "blip_2_vision_model",
            "blip_vision_model",
            "cohere_compass_vision",
            "deepseek_ocr2_sam_vision_model",
            "dots3_note_vision_encoder",
            "ernie4_5_vl_moe_vision",
            "exaone4_5_vision",
            "glm4v_moe_vision",
            "glm4v_vision",
            "glm5_next_vision",
            "glm_image_vision",
            "glm_ocr_vision",
            "got_ocr2_vision",
            "instructblip_vision_model",
            "instructblipvideo_vision_model",
            "mgp-str",
            "pp_chart2table_vision",
            "pp_formulanet_vision",
            "qwen2_5_vl_vision",
            "qwen2_vl_vision",
            "qwen3_5_moe_vision",
            "qwen3_5_vision",
            "qwen3_omni_moe_vision_encoder",
            "qwen3_vl_moe_vision",
            "qwen3_vl_vision",
            "qwen4_exp_vision",
            "sam_hq_vision_model",
            "sam_vision_model",
            "seggpt",
            "slanext_vision",
            "timesformer",
            "unlimited_ocr_sam_vision_model",
            "vitdet",
        ],
    ),
    (
        "query_key_value (interleaved)",
        "query_key_value",
        _order(*_PARTS, interleaved=True),
        {},
        ["bloom", "falcon", "gpt_neox", "gpt_neox_japanese", "persimmon"],
    ),
    ("in_proj (interleaved)", "in_proj", _order(*_PARTS, interleaved=True), {}, ["deberta"]),
    ("c_attn (interleaved)", "c_attn", _order(*_PARTS, interleaved=True), {}, ["gpt_bigcode"]),
    (
        "c_attn (Conv1D)",
        "c_attn",
        _order(*_PARTS),
        {"transposed": True},
        ["gpt2", "gpt-sw3", "decision_transformer", "imagegpt", "openai-gpt", "clvp", "clvp_decoder"],
    ),
    (
        "qkv_proj (shards)",
        "qkv_proj",
        _sharded("query", "value", "key"),
        {},
        ["codegen"],
    ),
):
    register_qk_layout(name=_name, **_fused(_module, _rows, **_storage), **_NORMS, model_types=_types)

register_qk_layout(
    name="qkv (stages)",  # each stage has a width and a number of heads, which only the live module knows
    **_fused("qkv", _order(*_PARTS)),
    model_types=["florence_vision", "hiera", "sam2_hiera_det_model"],
    file_types=(),
)
# LeViT, whose batch norms stand between projections and heads.
register_qk_layout(
    name="queries_keys_values",
    query=Projection("queries_keys_values.linear", PerHeadRows(0), batch_norm="queries_keys_values.batch_norm"),
    key=Projection("queries_keys_values.linear", PerHeadRows(1), batch_norm="queries_keys_values.batch_norm"),
    model_types=["levit"],
    file_types=(),
)
register_qk_layout(
    name="queries/keys_values",
    query=Projection("queries.linear", HeadRows("query"), batch_norm="queries.batch_norm"),
    key=Projection("keys_values.linear", PerHeadRows(0), batch_norm="keys_values.batch_norm"),
    model_types=["levit"],
    file_types=(),
)

_key_value: tuple[Part, ...] = ("key", "value")
register_qk_layout(
    name="q_attn + c_attn (Conv1D, cross-attention)",
    query=Projection("q_attn", HeadRows("query"), transposed=True),
    key=Projection("c_attn", HeadRows("key", _key_value), transposed=True),
    value=Projection("c_attn", HeadRows("value", _key_value), transposed=True),
    model_types=["gpt2"],
)

# --- latent attention: keys, and mostly queries, that go through a narrower space -----------------------------------

# The types are listed: others normalise and scale more than this says.
_LATENT = [
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm5_next_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_text",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "sarvam_mla",
    "youtu",
]
_LATENT_KEY = ComposedProjection(
    down=Projection("kv_a_proj_with_mqa", LatentRows("latent")),
    up=Projection("kv_b_proj", LatentRows("key")),
    norm="kv_a_layernorm",
    shared=Projection("kv_a_proj_with_mqa", LatentRows("shared")),
    scale="mla_scale_kv_lora",
)
# LongCat multiplies its keys by a factor that only the live module has.
_LATENT_IN_FILES = [name for name in _LATENT if name != "longcat_flash"]


def _latent_query(norm: str) -> ComposedProjection:
    return ComposedProjection(Projection("q_a_proj", WholeRows()), Projection("q_b_proj", HeadRows("query")), norm)


register_qk_layout(
    name="q_proj + latent keys",
    query=Projection("q_proj", HeadRows("query")),
    key=_LATENT_KEY,
    model_types=_LATENT,
    file_types=_LATENT_IN_FILES,
)
register_qk_layout(
    name="latent queries and keys",
    query=_latent_query("q_a_layernorm"),
    key=_LATENT_KEY,
    model_types=_LATENT,
    file_types=_LATENT_IN_FILES,
)
register_qk_layout(
    name="latent queries with a gate, latent keys",
    query=ComposedProjection(
        Projection("q_a_proj", WholeRows()), Projection("q_gate_proj", PerHeadRows()), "q_a_layernorm", twice=True
    ),
    key=_LATENT_KEY,
    model_types=["axk2"],
)
register_qk_layout(
    name="latent queries and keys, all normalised",
    query=_latent_query("q_a_layernorm"),
    key=replace(_LATENT_KEY, scale="kv_lora_scale", shared_norm="k_rope_only_layernorm"),
    model_types=["dots3_note_text"],
    file_types=(),  # the factor on the keys is the live module's
)
register_qk_layout(
    name="q_proj + latent keys, heads scaled",
    query=Projection("q_proj", HeadRows("query")),
    key=_LATENT_KEY,
    query_scale=LearnedScale(("softmax_scaling.bias",), lambda bias: bias),
    model_types=["mistral_large4_text"],
)
# Keys of single tokens; besides them, some layers have keys of a kind of their own for groups of tokens.
register_qk_layout(
    name="latent queries/kv_proj",
    query=_latent_query("q_a_norm"),
    key=Projection("kv_proj", HeadRows("key")),
    query_norms=("q_b_norm",),
    key_norms=("kv_norm",),
    model_types=["deepseek_v4"],
    file_types=(),
)

# --- projections that stand before torch's own attention, which projects again (Aria) -------------------------------


def _projected_twice(first: str, part: Part) -> ComposedProjection:
    inner = Projection("multihead_attn", HeadRows(part, _PARTS), weight="in_proj_weight", bias="in_proj_bias")
    return ComposedProjection(Projection(first, WholeRows()), inner)


register_qk_layout(
    name="q_proj/k_proj + in_proj_weight",
    query=_projected_twice("q_proj", "query"),
    key=_projected_twice("k_proj", "key"),
    file_types=["aria"],
)

# --- queries that are multiplied by something learned ----------------------------------------------------------------

_SCALES: tuple[tuple[str, Callable[[Tensor], Tensor], list[str]], ...] = (
    ("scaling", F.softplus, ["timesfm", "timesfm2_5"]),
    (
        "per_dim_scale",
        F.softplus,
        ["videoprism", "videoprism_text_model", "videoprism_vision_model", "gemma3n_audio"],
    ),
    ("sqk", lambda sqk: sqk.square(), ["dory"]),
)
for _parameter, _formula, _types in _SCALES:
    register_qk_layout(
        name=f"q_proj/k_proj, queries scaled by {_parameter}",
        query=Projection("q_proj", HeadRows("query")),
        key=Projection("k_proj", HeadRows("key")),
        value=Projection("v_proj", HeadRows("value")),
        query_norms=(*_QUERY_NORMS, "query_norm", "query_ln"),
        key_norms=(*_KEY_NORMS, "key_norm", "key_ln"),
        query_scale=LearnedScale((_parameter,), _formula),
        model_types=_types,
    )
register_qk_layout(
    name="q_proj/k_proj, wrapped, queries scaled by per_dim_scale",
    query=Projection("q_proj.linear", HeadRows("query")),
    key=Projection("k_proj.linear", HeadRows("key")),
    value=Projection("v_proj.linear", HeadRows("value")),
    query_scale=LearnedScale(("per_dim_scale",), F.softplus),
    model_types=["gemma4_audio"],
)
