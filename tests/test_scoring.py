"""From layers to scores: what the host waits for."""

import pytest
import torch
from architectures import BY_NAME
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_symqk import score_model


class MetaAsAccelerator(TorchFunctionMode):
    """Lets the meta device pass for one with values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.is_meta.__get__:
            return False
        return func(*args, **(kwargs or {}))


class Transfers(TorchDispatchMode):
    """Counts transfers to the host and lets them arrive as zeros. Other reads of values fail on the meta device."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_host = func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        if not to_host or not args[0].is_meta:
            return func(*args, **kwargs)
        self.number += 1
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "llama", "qwen3", "gpt_neox", "t5"])
def test_one_host_synchronisation_a_measurement(name, dtype):
    """On a device the host waits once for the scores of all layers and heads, grouped, folded norms or fused."""
    model = BY_NAME[name].build().to("meta", dtype)
    with MetaAsAccelerator(), Transfers() as transfers:
        scores = score_model(model)
    assert transfers.number == 1
    assert all(len(layer.head_symmetry) == layer.num_heads for layer in scores.layers)
    with MetaAsAccelerator(), Transfers(), pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        next(model.parameters()).sum().item()  # what would be a hidden wait cannot pass unseen
