"""
The guard against the next release of Transformers: a model type with attention that the support data do not cover, or
a parameter with another name, is a failure that says which and what to do. The guard is tested itself.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModel, BertModel, PreTrainedConfig, PreTrainedModel

from hf_symqk.attention.verified import Support, load_support

from . import guard
from .configs import model_types
from .guard import changed_attention, new_attention, report_failures
from .support import lowest_transformers


ROOT = Path(__file__).parents[2]
PARTS = 6
# One type a family of layouts, and one that holds others.
A_FEW = ("bert", "gpt2", "llama", "t5", "deepseek_v3", "siglip")


def _here() -> set[str]:
    """Types that both the data and the installed Transformers know."""
    return set(load_support().types) & set(model_types())


def test_every_model_type_with_attention_is_covered() -> None:
    """A new model type has to be looked at before its scores can be called proven."""
    support = load_support()
    assert not (message := report_failures(support, new_attention(support, model_types()))), message


@pytest.mark.parametrize("model_type", A_FEW)
def test_a_few_types_are_found_as_before(model_type: str) -> None:
    """Layouts, numbers of layers, paths and parameter names, without waiting for the slow suite."""
    support = load_support()
    assert not (message := report_failures(support, changed_attention(support, model_type))), message


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_types_are_found_as_before(part: int) -> None:
    """The same of every type."""
    support = load_support()
    lines = [line for name in sorted(_here())[part::PARTS] for line in changed_attention(support, name)]
    assert not (message := report_failures(support, lines)), message


def test_versions_agree() -> None:
    """The lowest version is stated once, in pyproject.toml; data, page and README say the same."""
    support = load_support()
    lowest = lowest_transformers()
    assert support.lowest_transformers == lowest
    assert Version(support.transformers) >= Version(lowest)
    for page in ("hf_symqk/attention/SUPPORT.md", "README.md"):
        stated = re.findall(r"Transformers ≥ ([\d.]*\d)", (ROOT / page).read_text(encoding="utf-8"))
        assert set(stated) == {lowest}, page


# --- the guard itself ------------------------------------------------------------------------------------------------


class _NewConfig(PreTrainedConfig):
    model_type = "of_the_next_release"
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4


class _NewAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.wqk = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.wv = nn.Linear(config.hidden_size, config.hidden_size)


class _KnownAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(config.hidden_size, config.hidden_size))


class _NewModel(PreTrainedModel):
    config_class = _NewConfig
    attention: type[nn.Module] = _NewAttention

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.attention(config) for _ in range(config.num_hidden_layers))
        self.post_init()


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model type that Transformers knows and the data do not."""
    mappings = (transformers.CONFIG_MAPPING, transformers.MODEL_MAPPING)
    before = [dict(mapping._extra_content) for mapping in mappings]
    AutoConfig.register("of_the_next_release", _NewConfig)
    AutoModel.register(_NewConfig, _NewModel)
    yield
    for mapping, content in zip(mappings, before, strict=True):
        mapping._extra_content = content


@pytest.mark.usefixtures("next_release")
@pytest.mark.parametrize(
    ("attention", "parts"),
    [
        (_NewAttention, ["no layout describes", "layers.0 and 1 more: _NewAttention", "with wqk, wv"]),
        (_KnownAttention, ["found by layout 'q_proj/k_proj'", "_KnownAttention (layers.0", "k_proj, q_proj, v_proj"]),
    ],
)
def test_a_new_type_is_noticed(attention: type[nn.Module], parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a layout fits its names or none does: the message has the type, the module, its parameters, the way."""
    monkeypatch.setattr(_NewModel, "attention", attention)
    support = load_support()
    message = report_failures(support, new_attention(support, [*support.types, "of_the_next_release"]))
    assert f"data are of {support.transformers}" in message
    for part in ["of_the_next_release: is new", *parts, "python -m oracle.report", "builtin_layouts.py"]:
        assert part in message


@pytest.mark.usefixtures("next_release")
def test_a_new_type_without_attention_is_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another convolutional network must not stop anybody."""
    monkeypatch.setattr(_NewModel, "attention", lambda self, config: nn.Sequential(nn.Conv2d(3, 8, 3)))
    assert list(new_attention(load_support(), ["of_the_next_release"])) == []


def _renamed(model: BertModel) -> None:
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.query_map = attention.query
        del attention.query


def _packed(model: BertModel) -> None:
    for layer in model.encoder.layer:
        layer.attention.self.q_norm = nn.LayerNorm(8)


def _moved(model: BertModel) -> None:
    model.encoder.layers = model.encoder.layer
    del model.encoder.layer


def _shorter(model: BertModel) -> None:
    del model.encoder.layer[1:]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_renamed, ["no longer found: BertSelfAttention (encoder.layer.0.attention.self", "key, query_map, value"]),
        (_packed, ["holds other parameters: gone none; new q_norm"]),
        (_moved, ["encoder.layer.0.attention.self on were found", "from encoder.layers.0.attention.self on"]),
        (_shorter, ["2 layers of BertSelfAttention", "now 1 from"]),
    ],
)
def test_what_a_release_changes_is_noticed(change: Any, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of other names, further ones, other paths, fewer layers: each with module and names."""
    build = guard.build

    def changed(*args: Any) -> nn.Module:
        model = build(*args)
        change(model)
        return model

    support = load_support()
    assert list(changed_attention(support, "bert")) == []
    monkeypatch.setattr(guard, "build", changed)
    message = report_failures(support, changed_attention(support, "bert"))
    for part in ["bert: ", *parts]:
        assert part in message


def test_a_newer_release_is_said_to_be_one() -> None:
    """Whoever reads the failure should look at the release first."""
    older = Support({"transformers": "5.0.0", "lowest_transformers": "5.0", "types": {}})
    assert "data are of 5.0.0, which is older" in report_failures(older, ["bert: something"])
    assert report_failures(older, []) == ""


def test_what_was_built_has_to_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that can no longer be looked at does not pass for one that is unchanged; one that never could does."""

    def refuse(*args: Any) -> nn.Module:
        raise RuntimeError("config: no such field")

    monkeypatch.setattr(guard, "build", refuse)
    (line,) = changed_attention(load_support(), "bert")
    assert "could be built when the data were taken (BertModel), now config: no such field" in line
    never = Support({"transformers": "1", "lowest_transformers": "1", "types": {"x": {"status": "not built"}}})
    assert list(changed_attention(never, "x")) == []


def test_building_without_values() -> None:
    """Looking at all types in minutes rests on it."""
    assert next(guard._build("bert", 0).parameters()).device == torch.device("meta")
