"""The table itself: rows of each arrangement, and registration."""

import importlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_symqk.attention import (
    GatedRows,
    HeadRows,
    HeadShape,
    LatentRows,
    PerHeadRows,
    Projection,
    RowSelector,
    ShardedRows,
    layouts,
    register_qk_layout,
    unregister_qk_layout,
)
from hf_symqk.scoring import score_model


# The package has the function `layouts` under the module's name.
table: Any = importlib.import_module("hf_symqk.attention.layouts")


HEADS = HeadShape(num_attention_heads=4, num_key_value_heads=2, head_dim=3)
EVEN = HeadShape(num_attention_heads=4, num_key_value_heads=4, head_dim=3)


@pytest.mark.parametrize(
    ("rows", "heads", "total", "first_rows"),
    [
        (HeadRows("query"), HEADS, 12, [0, 3, 6, 9]),
        (HeadRows("key"), HEADS, 6, [0, 3]),
        (HeadRows("query", ("query", "key", "value")), HEADS, 24, [0, 3, 6, 9]),
        (HeadRows("key", ("query", "key", "value")), HEADS, 24, [12, 15]),
        (HeadRows("value", ("query", "key", "value")), HEADS, 24, [18, 21]),
        (HeadRows("key", ("key", "value")), HEADS, 12, [0, 3]),
        (HeadRows("query", ("query", "key", "value"), interleaved=True), EVEN, 36, [0, 9, 18, 27]),
        (HeadRows("key", ("query", "key", "value"), interleaved=True), EVEN, 36, [3, 12, 21, 30]),
        (HeadRows("query", ("query", "key", "value"), interleaved=True), HEADS, 24, [0, 3, 12, 15]),
        (HeadRows("key", ("query", "key", "value"), interleaved=True), HEADS, 24, [6, 18]),
        (HeadRows("value", ("query", "key", "value"), interleaved=True), HEADS, 24, [9, 21]),
        (ShardedRows("query", ("query", "value", "key"), 2), EVEN, 36, [0, 3, 18, 21]),
        (ShardedRows("key", ("query", "value", "key"), 2), EVEN, 36, [12, 15, 30, 33]),
        (GatedRows(), HEADS, 24, [0, 6, 12, 18]),
    ],
)
def test_rows(rows: RowSelector, heads: HeadShape, total: int, first_rows: list[int]):
    """Each arrangement takes the rows that its docstring draws, of weights and biases; if evenly spaced, as a view."""
    weight = torch.arange(total * 2.0).view(total, 2)
    bias = torch.arange(float(total))
    assert [number for number in range(2 * total) if rows.fits(number, heads)] == [total]
    assert rows.select(bias, heads)[:, 0].tolist() == first_rows
    assert rows.select(bias, heads).tolist() == [[first, first + 1, first + 2] for first in first_rows]
    assert torch.equal(rows.select(weight, heads)[..., 0] / 2, rows.select(bias, heads))
    even = [second - first for first, second in itertools.pairwise(first_rows)]
    is_view = rows.select(weight, heads).untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert is_view == (len(set(even)) <= 1)


def test_latent_rows():
    """The first projection holds what goes on and what all heads share, the second keys and values head by head."""
    heads = HeadShape(num_attention_heads=2, num_key_value_heads=2, head_dim=5, shared_head_dim=2)
    down, up = torch.arange(7), torch.arange(2 * (3 + 4))
    assert LatentRows("latent").select(down, heads).tolist() == [[0, 1, 2, 3, 4]]
    assert LatentRows("shared").select(down, heads).tolist() == [[5, 6]]
    assert LatentRows("key").select(up, heads).tolist() == [[0, 1, 2], [7, 8, 9]]
    assert LatentRows("key").fits(14, heads)
    assert not LatentRows("key").fits(13, heads)
    assert not LatentRows("key").fits(6, heads), "no values"
    assert not LatentRows("latent").fits(2, heads), "nothing goes on"


def test_per_head_rows():
    """Parts of width E stand first in every head, whatever width the rest has; without a rest it is another scheme."""
    heads = HeadShape(num_attention_heads=2, num_key_value_heads=2, head_dim=3)
    rows = torch.arange(16)
    assert PerHeadRows().select(rows, heads).tolist() == [[0, 1, 2], [8, 9, 10]]
    assert PerHeadRows(1).select(rows, heads).tolist() == [[3, 4, 5], [11, 12, 13]]
    assert PerHeadRows(1).fits(16, heads)
    assert not PerHeadRows(1).fits(12, heads), "nothing beside"
    assert not PerHeadRows(1).fits(15, heads), "not the same for both heads"
    assert not PerHeadRows().fits(16, HEADS), "grouped keys are no part of a query head"


def test_part_must_be_in_order():
    """A selector that can never select is refused."""
    with pytest.raises(ValueError, match=r"`part` 'query' is not in `order` \('key', 'value'\)"):
        HeadRows("query", ("key", "value"))


def test_fused_layouts_name_their_models():
    """Rows of a fused projection stand in many orders: an entry without model types would misread somebody's model."""
    for layout in layouts():
        last = layout.query.pieces[-1].path, layout.key.pieces[-1].path
        # torch's own attention orders its rows the same way for everybody.
        own = all(path.endswith("in_proj_weight") for path in last)
        assert last[0] != last[1] or layout.model_types or own, layout.name


def test_later_registrations_are_tried_first():
    """An own layout wins over a built-in one that matches the same module names."""
    own = register_qk_layout(
        name="own", query=Projection("q_proj", HeadRows("query")), key=Projection("k_proj", HeadRows("key"))
    )
    try:
        assert layouts()[0] is own
    finally:
        unregister_qk_layout("own")
    assert own not in layouts()
    with pytest.raises(KeyError):
        unregister_qk_layout("own")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts packages with entry points on the path, as `pip install` would, and has the table read them anew."""
    before = dict(table._LAYOUTS)
    monkeypatch.setattr(table, "_loaded", set())
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def add(package: str, point: str, source: str) -> None:
        (tmp_path / f"{package}.py").write_text(source)
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{table.ENTRY_POINTS}]\nmodel = {point}\n")
        modules.append(package)

    yield add
    table._LAYOUTS.clear()
    table._LAYOUTS.update(before)
    for module in modules:
        sys.modules.pop(module, None)


_REGISTERS = """
from hf_symqk.attention import HeadRows, Projection, register_qk_layout

def register():
    register_qk_layout(
        name={name!r}, query=Projection("wq", HeadRows("query")), key=Projection("wk", HeadRows("key"))
    )
"""


def test_entry_points_are_loaded_once_and_stay_behind_own_layouts(install):
    """A package brings layouts, as a function or a module; what was registered by hand before is still tried first."""
    install("symqk_function", "symqk_function:register", _REGISTERS.format(name="by function"))
    install("symqk_module", "symqk_module", _REGISTERS.format(name="by module") + "\nregister()\n")
    register_qk_layout(name="own", query=Projection("a", HeadRows("query")), key=Projection("b", HeadRows("key")))
    assert "symqk_function" not in sys.modules, "not before the table is read"
    names = [layout.name for layout in layouts()]
    assert names[0] == "own"
    assert set(names[1:3]) == {"by function", "by module"}
    assert [layout.name for layout in layouts()] == names
    unregister_qk_layout("by function")
    assert "by function" not in [layout.name for layout in layouts()], "loaded once"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('no such thing')", "ImportError: no such thing"),
        ("", "AttributeError"),
        (
            _REGISTERS.format(name="half") + "\n_whole = register\n"
            "def register():\n    _whole()\n    raise KeyError('the other half')",
            "KeyError: 'the other half'",
        ),
        (_REGISTERS.format(name="Wqkv"), "ValueError: A layout named 'Wqkv' is registered already"),
    ],
    ids=["import", "attribute", "half way", "duplicate"],
)
def test_a_broken_entry_point_is_one_warning(install, source, message):
    """It names the package and the error, adds nothing, and hides neither the others nor the table."""
    before = [layout.name for layout in layouts()]
    table._loaded.clear()
    install("symqk_broken", "symqk_broken:register", source)
    install("symqk_whole", "symqk_whole:register", _REGISTERS.format(name="whole"))
    with pytest.warns(RuntimeWarning) as caught:
        names = [layout.name for layout in layouts()]
    assert len(caught) == 1
    assert "package 'symqk_broken'" in str(caught[0].message)
    assert message in str(caught[0].message)
    assert names == ["whole", *before]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layouts()


class _RemoteConfig(PreTrainedConfig):
    model_type = "somebodys_remote_code"

    def __init__(self, heads_of_queries: int = 4, **kwargs) -> None:
        self.heads_of_queries, self.hidden_size = heads_of_queries, 16
        super().__init__(**kwargs)


class _RemoteAttention(nn.Module):
    """Keys first, then queries, in one projection: no built-in layout knows it."""

    def __init__(self, config: _RemoteConfig) -> None:
        super().__init__()
        self.n_kq_heads = config.heads_of_queries
        self.to_kq = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.to_values = nn.Linear(config.hidden_size, config.hidden_size)


class _RemoteModel(PreTrainedModel):
    config_class = _RemoteConfig

    def __init__(self, config: _RemoteConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(_RemoteAttention(config) for _ in range(2))
        self.post_init()


def test_models_of_remote_code_are_served():
    """A class of somebody's own, as `trust_remote_code=True` makes it: refused by name at first, scored once told."""
    torch.manual_seed(0)
    model = _RemoteModel(_RemoteConfig())
    with pytest.raises(ValueError, match=r"_RemoteAttention \(model type 'somebodys_remote_code'\) with to_kq"):
        score_model(model)
    order = ("key", "query")
    register_qk_layout(
        name="somebody's",
        query=Projection("to_kq", HeadRows("query", order)),
        key=Projection("to_kq", HeadRows("key", order)),
        model_types=["somebodys_remote_code"],
        num_heads="n_kq_heads",
    )
    try:
        scores = score_model(model)
        w_k, w_q = model.blocks[1].to_kq.weight.detach().chunk(2)
        w = w_q.T @ w_k
        assert scores.layers[1].num_heads == 4
        assert scores.layers[1].symmetry == pytest.approx(float((w * w.T).sum() / (w * w).sum()), abs=1e-6)
    finally:
        unregister_qk_layout("somebody's")
