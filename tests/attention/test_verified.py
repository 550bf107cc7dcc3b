"""
Which layers are marked `verified`: those whose layout the forward pass of Transformers' own model has proven, and no
others. A layer that is read by a guess must never pass for one that is known.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlavaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils import logging

from hf_symqk import QKScores, apply_qk_init, find_attention_layers, score_checkpoint, score_model
from hf_symqk.attention import (
    HeadRows,
    Projection,
    describe_unverified,
    register_qk_layout,
    survey_attention,
    unregister_qk_layout,
)
from hf_symqk.attention.verified import Support, load_support


SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}


class OwnConfig(PreTrainedConfig):
    model_type = "somebodys_own"
    hidden_size: int = 48
    num_attention_heads: int = 4


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(48, 48))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([OwnAttention(), OwnAttention()])
        self.post_init()


def _verified(model: nn.Module) -> set[bool]:
    return {layer.verified for layer in survey_attention(model).layers}


def test_known_types_are_verified() -> None:
    """Every small architecture of the tests has been proven; without this all marks below could be `False`."""
    for name in ("bert", "gpt2", "llama", "t5"):
        scores = score_model(BY_NAME[name].build())
        assert scores.unverified == []
        assert scores.to_pandas()["verified"].all()


def test_names_alone_prove_nothing() -> None:
    """A generic entry fits any module of its names; the scores, their tables and files and one warning say so."""
    with pytest.warns(RuntimeWarning, match="Unverified") as caught:
        scores = score_model(OwnModel(OwnConfig()))
    (message,) = {str(warning.message) for warning in caught}
    assert len(caught) == 1
    for part in ("self-attention of 'somebodys_own' by layout 'q_proj/k_proj'", "probe=True", "register_qk_layout"):
        assert part in message
    assert scores.unverified == ["layers.0", "layers.1"]
    assert not scores.to_pandas()["verified"].any()
    assert not scores.to_pandas(heads=True)["verified"].any()
    assert "unverified" in str(scores)
    assert [layer["verified"] for layer in scores.to_dict()["layers"]] == [False, False]


def test_a_registered_layout_proves_nothing() -> None:
    """Whoever registers a layout says how it is, and no forward pass has agreed, whatever the model type."""
    model = BertModel(BertConfig(**SMALL))
    register_qk_layout(
        name="of a third party",
        query=Projection("key", HeadRows("query")),
        key=Projection("query", HeadRows("key")),
        model_types=["bert"],
    )
    try:
        assert _verified(model) == {False}
    finally:
        unregister_qk_layout("of a third party")
    assert _verified(model) == {True}


class _Unchanged(BertSelfAttention):
    pass


class _OtherForward(BertSelfAttention):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.flip(-1), **kwargs)


@pytest.mark.parametrize(("own", "expected"), [(_Unchanged, True), (_OtherForward, False)])
def test_a_forward_of_ones_own_is_not_the_one_that_was_proven(own: type[BertSelfAttention], expected: bool) -> None:
    """Code of a repository may call itself `bert` and do something else with `query` and `key`."""
    model = BertModel(BertConfig(**SMALL))
    for layer in model.encoder.layer:
        layer.attention.self.__class__ = own
    assert _verified(model) == {expected}


@pytest.mark.parametrize(("text_type", "expected"), [("llama", {True}), ("somebodys_own", {True, False})])
def test_the_config_that_speaks_for_a_layer_decides(text_type: str, expected: set[bool]) -> None:
    """LLaVA's text model is proven as what it is, not as part of LLaVA, and so is what stands in its place."""
    part = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    text = LlamaConfig(**part, num_key_value_heads=2, vocab_size=99)
    model = AutoModel.from_config(
        LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **part, "image_size": 16, "patch_size": 8},
            text_config=text,
        )
    )
    for layer in model.language_model.layers:
        layer.self_attn.config = type("Config", (LlamaConfig,), {"model_type": text_type})(
            **part, num_key_value_heads=2
        )
    assert _verified(model) == expected


def test_modules_without_a_config() -> None:
    """What has a config brings it along; else the class has to be one that was proven wherever it stands."""
    assert _verified(nn.ModuleList([LlamaAttention(LlamaConfig(**SMALL), 0)])) == {True}
    own = nn.ModuleList([OwnAttention()])
    own[0].num_heads = 4
    assert _verified(own) == {False}
    assert "of no model type" in describe_unverified(survey_attention(own).layers)


def test_a_wrong_layer_anywhere_takes_the_mark_from_its_kind() -> None:
    """What is proven in one model and wrong in another is not proven; what one model does not reach, another may."""

    def found(outcome: str, module: str = "FooAttention", kind: str = "self") -> dict[str, Any]:
        about = {"layout": "q/k", "config": "foo", "evidence": "", "example": "layers.0", "parameters": ["k", "q"]}
        return {**about, "kind": kind, "module": module, "outcomes": {outcome: 1}}

    def proves(*members: dict[str, Any], kind: str = "self") -> bool:
        types = {str(number): {"status": "proven", "found": [one]} for number, one in enumerate(members)}
        values = {"transformers": "5.24.0", "lowest_transformers": "5.24", "types": types}
        return Support(values).proves("q/k", "foo", kind)

    assert proves(found("proven"))
    assert proves(found("product"))
    assert proves(found("proven"), found("unproven"))
    assert not proves(found("unproven"))
    assert not proves(found("proven"), found("wrong"))
    # Files do not tell classes apart, but kinds.
    assert not proves(found("proven"), found("unproven", module="BarAttention"))
    assert proves(found("proven"), found("unproven", module="BarAttention", kind="cross"))
    assert not proves(found("proven"), kind="cross")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"auto_map": {"AutoModel": "modeling_own.OwnBert"}, "architectures": ["OwnBert"]}, False),
        # Many repositories still carry the code that they came with before Transformers knew their type.
        ({"auto_map": {"AutoModel": "modeling_bert.BertModel"}, "architectures": ["BertModel"]}, True),
        ({"model_type": "somebodys_own"}, False),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checkpoints(changes: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    """A file is marked as the model would be; one of code of its own is not, whatever its type is called."""
    model = BertModel(BertConfig(**SMALL))
    model.save_pretrained(tmp_path)
    if not changes:
        assert score_checkpoint(tmp_path) == score_model(model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert {layer.verified for layer in score_checkpoint(tmp_path).layers} == {expected}


def test_files_of_scores(tmp_path: Path) -> None:
    """The mark is kept; a file that does not have it says nothing, so its layers are not called verified."""
    scores = score_model(BertModel(BertConfig(**SMALL)))
    scores.to_json(tmp_path / "scores.json")
    assert QKScores.from_json(tmp_path / "scores.json") == scores
    values = scores.to_dict()
    for layer in values["layers"]:
        del layer["verified"]
    assert QKScores.from_dict(values).unverified == [layer.name for layer in scores.layers]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """What is logged once a text."""
    texts: dict[str, None] = {}
    monkeypatch.setattr(
        logging.logging.Logger, "warning_once", lambda self, text: texts.setdefault(text), raising=False
    )
    return texts


def test_finding_and_initialising_say_it_once(said: dict[str, None]) -> None:
    """The callback looks for the layers at every measurement, and a model and its parts are initialised apart."""
    model = OwnModel(OwnConfig())
    for _ in range(3):
        find_attention_layers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_qk_init(model, "symmetric")
    assert len([text for text in said if text.startswith("Unverified")]) == 1


def test_the_data_are_read_once() -> None:
    """Finding layers has to stay fast: the table is parsed with the first model alone."""
    assert load_support() is load_support()


class _Runs(OwnAttention):
    """Reads the projections as the generic entry says, or with another order of the query's rows."""

    def __init__(self, flipped: bool = False) -> None:
        super().__init__()
        self.num_heads, self.flipped = 4, flipped

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = (getattr(self, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj"))
        q = q.flip(-1) if self.flipped else q
        q, k, v = (x.unflatten(-1, (4, 12)).transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("flipped", "layout"), [(False, "q_proj/k_proj"), (True, "probed (sdpa)")])
def test_probing_proves_or_replaces(flipped: bool, layout: str) -> None:
    """The way out that the warning names: what agrees keeps its layout, what does not is read from the forward."""
    torch.manual_seed(0)
    model = nn.Sequential(_Runs(flipped))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score_model(model, probe=True, inputs={"input": torch.randn(2, 5, 48)})
    assert [(layer.layout, layer.verified) for layer in scores.layers] == [(layout, True)]


def test_a_forward_that_somebody_replaced_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that make models faster put functions of their own into Transformers' classes."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not run here")

    model = AutoModel.from_config(LlamaConfig(**SMALL))
    assert all(layer.verified for layer in survey_attention(model).layers)
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    assert not any(layer.verified for layer in survey_attention(model).layers)
