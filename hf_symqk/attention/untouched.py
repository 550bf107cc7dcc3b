"""Running a model without leaving a trace in it."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


__all__ = ["left_as_it_was"]


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """
    Inside, a model may be run and its modules called; afterwards, also after an error, it is what it was: modes,
    buffers, hooks and whatever its forward keeps in attributes, and the random state of Python, NumPy and PyTorch.
    No gradients are made, compiled code is not used, and sums are as exact as the weights' own type allows.

    Args:
        model (`torch.nn.Module`): The model.

    Yields:
        `None`
    """
    attributes = [(module, _shallow(vars(module))) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.callback(random.setstate, python_state)
        stack.callback(np.random.set_state, numpy_state)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            numbers = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=numbers, device_type=kind))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_exact(devices))
        if "torch._dynamo" in sys.modules:  # a slow import, without which nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_restore, attributes, buffers)
        yield


@contextmanager
def _exact(devices: set[torch.device]) -> Iterator[None]:
    """No shorter types than those of the weights, which autocast and the TensorFloat of accelerators use."""
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    with ExitStack() as stack:
        for kind in {device.type for device in devices} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if precision != "highest":
            stack.callback(torch.set_float32_matmul_precision, precision)
            torch.set_float32_matmul_precision("highest")
        if any(device.type == "cuda" for device in devices):
            kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
            stack.enter_context(cudnn.flags(**kept, allow_tf32=False))
        yield


def _shallow(values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes, and of those that are containers what they hold."""
    return {
        name: (value, value.copy() if isinstance(value, dict | list | set) else None) for name, value in values.items()
    }


def _restore(
    attributes: list[tuple[nn.Module, dict[str, tuple[Any, Any]]]], buffers: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for module, before in attributes:
        now = vars(module)
        for name in now.keys() - before.keys():
            del now[name]
        for name, (value, held) in before.items():
            now[name] = value
            if isinstance(value, list):
                value[:] = held
            elif isinstance(value, dict | set):
                value.clear()
                value.update(held)
    with torch.no_grad():
        for buffer, copy in buffers:
            if not torch.equal(buffer, copy):  # NaN counts as different, and is written again
                buffer.copy_(copy)
