"""Whole tensors from DTensors, in a group of one process (more processes: test_distributed.py)."""

import pytest
import torch
import torch.distributed as dist
from architectures import BY_NAME
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_symqk import apply_qk_init, find_attention_layers, score_model
from hf_symqk.attention import full_shape, whole_parameters


@pytest.fixture
def mesh(tmp_path):
    """A gloo group of one process, gone after the test."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gpt_neox"])
def test_fully_sharded_model_scores_and_initialises_as_a_plain_one(name, mesh):
    """FSDP2 parameters are DTensors: the numbers are those of the plain model, and writing reaches the shards."""
    plain, sharded = BY_NAME[name].build(), BY_NAME[name].build()
    for layer in find_attention_layers(sharded):
        fully_shard(layer.module, mesh=mesh)
    assert all(
        isinstance(p, DTensor) for layer in find_attention_layers(sharded) for p in layer.holder("query").parameters()
    )
    assert score_model(sharded).to_dict()["layers"] == score_model(plain).to_dict()["layers"]
    apply_qk_init(plain)
    apply_qk_init(sharded)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert torch.equal(ours, theirs)


def test_reading_leaves_parameters_alone_and_writing_reaches_them():
    """A plain parameter is yielded itself, detached; in-place changes arrive."""
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    with whole_parameters([parameter], write=True) as whole:
        assert not whole[parameter].requires_grad
        whole[parameter][0] = 5
    assert parameter[0].tolist() == [5, 5]
    assert full_shape(parameter) == (2, 2)


def test_meta_parameters_have_no_values():
    """Asking for values of a model that was never materialised is an error that says so."""
    with (
        pytest.raises(ValueError, match="meta device"),
        whole_parameters([torch.nn.Parameter(torch.empty(2, device="meta"))]),
    ):
        pass
