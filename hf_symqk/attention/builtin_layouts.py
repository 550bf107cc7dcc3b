"""
The entries of the layout table that come with the package, one a scheme. Each is held to the forward pass of the
models named beside it: basis vectors go in, and the queries and keys that reach the softmax have to be those of the
table, head by head (`tests/oracle`).
"""

from .layouts import GatedRows, HeadRows, Part, Projection, register_qk_layout


__all__: list[str] = []

_PARTS: tuple[Part, ...] = ("query", "key", "value")
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")

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
        query_norms=_QUERY_NORMS,
        key_norms=_KEY_NORMS,
    )

register_qk_layout(
    name="q_proj with a gate/k_proj",
    query=Projection("q_proj", GatedRows()),
    key=Projection("k_proj", HeadRows("key")),
    value=Projection("v_proj", HeadRows("value")),
    query_norms=_QUERY_NORMS,
    key_norms=_KEY_NORMS,
    model_types=["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"],
)


def _fused(
    module: str, order: tuple[Part, ...], *, interleaved: bool = False, transposed: bool = False
) -> list[Projection]:
    return [Projection(module, HeadRows(part, order, interleaved), transposed) for part in order]


# Fused projections: the same module name stands for different orders of rows, so the model types are listed.
for _name, _module, _storage, _types in (
    ("Wqkv", "Wqkv", {}, ["modernbert", "mpt"]),
    ("qkv_proj", "qkv_proj", {}, ["phi3", "phi4_multimodal"]),
    ("att_proj", "att_proj", {}, ["semantic", "coarse_acoustics", "fine_acoustics"]),
    (
        "qkv",
        "qkv",
        {},
        [
            "blip_2_vision_model",
            "blip_vision_model",
            "cohere_compass_vision",
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
            "vitdet",
        ],
    ),
    (
        "query_key_value (interleaved)",
        "query_key_value",
        {"interleaved": True},
        ["bloom", "gpt_neox", "gpt_neox_japanese", "persimmon"],
    ),
    ("in_proj (interleaved)", "in_proj", {"interleaved": True}, ["deberta"]),
    (
        "c_attn (Conv1D)",
        "c_attn",
        {"transposed": True},
        ["gpt2", "decision_transformer", "imagegpt", "openai-gpt"],
    ),
):
    _q, _k, _v = _fused(_module, _PARTS, **_storage)
    register_qk_layout(
        name=_name,
        query=_q,
        key=_k,
        value=_v,
        query_norms=_QUERY_NORMS,
        key_norms=_KEY_NORMS,
        model_types=_types,
    )

_k, _v = _fused("c_attn", ("key", "value"), transposed=True)
register_qk_layout(
    name="q_attn + c_attn (Conv1D, cross-attention)",
    query=Projection("q_attn", HeadRows("query"), transposed=True),
    key=_k,
    value=_v,
    model_types=["gpt2"],
)
