"""The table itself: rows of each arrangement, and registration."""

import itertools

import pytest
import torch

from hf_symqk.attention import (
    GatedRows,
    HeadRows,
    HeadShape,
    LatentRows,
    Projection,
    RowSelector,
    ShardedRows,
    layouts,
    register_qk_layout,
    unregister_qk_layout,
)


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
