"""Which projections of the table a module has, and of what shape. Nothing here reads a weight."""

import torch
from torch import nn

from .layouts import ComposedProjection, Projection
from .tensors import full_shape, linear_shape


__all__ = ["has_parameters", "has_projection", "piece_widths", "stored_widths", "weight_of"]


def weight_of(module: nn.Module, piece: Projection, name: str) -> nn.Parameter | None:
    """Parameter of a name (`piece.weight` or `piece.bias`) in the module that holds a piece, if it has one."""
    held = getattr(module.get_submodule(piece.module), name, None) if name else None
    return held if isinstance(held, nn.Parameter) else None


def stored_widths(module: nn.Module, projection: Projection | ComposedProjection) -> tuple[int, int]:
    """Output rows (of its last linear map) and input width (of its first) of a projection that the module has."""
    pieces = projection.pieces
    return piece_widths(module, pieces[-1])[0], piece_widths(module, pieces[0])[1]


def piece_widths(module: nn.Module, piece: Projection) -> tuple[int, int]:
    """Output rows and input width of one linear map."""
    shape = _shape(module, piece)
    assert shape is not None, "asked only of projections that `has_projection` has seen"
    rows, width = shape
    return (width, rows) if piece.transposed else (rows, width)


def has_projection(module: nn.Module, projection: Projection | ComposedProjection) -> bool:
    return all(_has(module, piece) for piece in projection.pieces)


def has_parameters(module: nn.Module, paths: tuple[str, ...]) -> bool:
    try:
        return all(isinstance(module.get_parameter(path), nn.Parameter) for path in paths)
    except AttributeError:
        return False


def _has(module: nn.Module, piece: Projection) -> bool:
    if piece.module and piece.module.partition(".")[0] not in module._modules:
        return False
    try:
        return _shape(module, piece) is not None
    except AttributeError:
        return False


def _shape(module: nn.Module, piece: Projection) -> torch.Size | None:
    if not piece.is_parameter:
        return linear_shape(module.get_submodule(piece.module))
    parameter = weight_of(module, piece, piece.weight)
    if parameter is None or len(shape := full_shape(parameter)) < 2:
        return None
    # One matrix a head is one matrix for all: the input's channels stand first (transposed) or last.
    return torch.Size((shape[0], shape[1:].numel()) if piece.transposed else (shape[:-1].numel(), shape[-1]))
