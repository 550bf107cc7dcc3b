"""
The header of a safetensors file: which tensors it holds, of which type and shape, and at which bytes. Nothing else of
the file is read.

A file is 8 bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape, data_offsets) and the
data, to which the offsets relate. The `safetensors` library reads headers of whole local files only, so the checks it
makes are repeated here.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from .sources import Source


__all__ = ["DTYPES", "Header", "TensorSlot", "read_header"]


class StoredDtype(NamedTuple):
    bits: int
    torch_dtype: torch.dtype | None
    """`None` if the installed PyTorch has no such type."""


def _stored(bits: int, name: str) -> StoredDtype:
    return StoredDtype(bits, getattr(torch, name, None))


# Every dtype that safetensors knows. F4 counts single values, of which PyTorch packs two into one element; the 6-bit
# types have no counterpart in it.
DTYPES: dict[str, StoredDtype] = {
    "BOOL": _stored(8, "bool"),
    "U8": _stored(8, "uint8"),
    "I8": _stored(8, "int8"),
    "U16": _stored(16, "uint16"),
    "I16": _stored(16, "int16"),
    "U32": _stored(32, "uint32"),
    "I32": _stored(32, "int32"),
    "U64": _stored(64, "uint64"),
    "I64": _stored(64, "int64"),
    "F16": _stored(16, "float16"),
    "BF16": _stored(16, "bfloat16"),
    "F32": _stored(32, "float32"),
    "F64": _stored(64, "float64"),
    "C64": _stored(64, "complex64"),
    "F8_E4M3": _stored(8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": _stored(8, "float8_e4m3fnuz"),
    "F8_E5M2": _stored(8, "float8_e5m2"),
    "F8_E5M2FNUZ": _stored(8, "float8_e5m2fnuz"),
    "F8_E8M0": _stored(8, "float8_e8m0fnu"),
    "F6_E2M3": StoredDtype(6, None),
    "F6_E3M2": StoredDtype(6, None),
    "F4": _stored(4, "float4_e2m1fn_x2"),
}

# The limit of safetensors itself.
LONGEST_HEADER = 100_000_000
LFS_POINTER = b"version https://git-lfs"
DOWNLOAD_AGAIN = "download it again"


class TensorSlot(NamedTuple):
    """
    Where a tensor lies. `start` and `end` are positions in the file, `dtype` is the name that safetensors gives it (a
    key of `DTYPES`).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """
    Args:
        slots (`dict[str, TensorSlot]`): The tensors of the file by name, in the order of the header.
        metadata (`dict[str, str]`): The free-form part of the header.
    """

    slots: dict[str, TensorSlot]
    metadata: dict[str, str]


def read_header(source: Source, file: str) -> Header:
    """
    Reads the header of a safetensors file: two reads, of 8 bytes and of the header.

    Args:
        source ([`Source`]): Where the file lies.
        file (`str`): Its name there.

    Returns:
        [`Header`]

    Raises:
        ValueError: The file is empty, cut off, a Git LFS pointer or not a safetensors file; the message names the file
            (and the tensor) and says what to do.
    """
    size = source.size(file)

    def refuse(problem: str, remedy: str = DOWNLOAD_AGAIN) -> NoReturn:
        raise ValueError(f"{file} of {source.name} cannot be read: {problem}; {remedy}.")

    if size == 0:
        refuse("it is empty")
    if size < 8:
        refuse(f"it has {size} bytes, fewer than any safetensors file")
    prefix = _read(source, file, 0, 8)
    if prefix == LFS_POINTER[:8]:
        start = _read(source, file, 0, min(size, len(LFS_POINTER)))
        if start == LFS_POINTER:
            refuse(
                "it is a Git LFS pointer, not the weights", 'run "git lfs pull" in the folder, or download the file'
            )
    length = int.from_bytes(prefix, "little")
    if length > min(size - 8, LONGEST_HEADER):
        # What one gets for an error page, a pickle or a zip archive under this name, too.
        refuse(
            f"its first 8 bytes announce a header of {length} bytes in a file of {size} bytes, so it is cut off or "
            "not a safetensors file"
        )
    text = _read(source, file, 8, length)
    try:
        content = json.loads(text)
    except ValueError as error:  # also that of bytes that are not UTF-8
        raise ValueError(
            f"{file} of {source.name} cannot be read: its header is not JSON ({error}); {DOWNLOAD_AGAIN}."
        ) from error
    if not isinstance(content, dict):
        refuse("its header is not a JSON object")
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse("the __metadata__ of its header is not a mapping of strings")

    slots = {}
    for key, entry in content.items():
        slot = _parse_slot(key, entry, 8 + length)
        if isinstance(slot, str):
            refuse(f"the tensor {key!r} {slot}")
        slots[key] = slot
    position = 8 + length
    for slot in sorted(slots.values(), key=lambda slot: (slot.start, slot.end)):
        if slot.end > size:
            refuse(f"the tensor {slot.key!r} ends at byte {slot.end}, but the file has {size} bytes: it is cut off")
        if slot.start != position:
            refuse(f"the tensor {slot.key!r} begins at byte {slot.start}, though the one before ends at {position}")
        position = slot.end
    if position != size:
        refuse(f"its tensors end at byte {position}, but the file has {size} bytes")
    return Header(slots, metadata)


def _read(source: Source, file: str, start: int, count: int) -> bytes:
    buffer = bytearray(count)
    source.read(file, start, memoryview(buffer))
    return bytes(buffer)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_slot(key: str, entry: Any, data_start: int) -> TensorSlot | str:
    """The slot, or what is wrong with it."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "has no dtype, shape and data_offsets in the header"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        return f"is of the dtype {dtype!r}, which is none of {', '.join(DTYPES)}"
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        return f"has the shape {shape!r}"
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        return f"has the offsets {offsets!r}"
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        span = offsets[1] - offsets[0]
        return f"of shape {shape} and dtype {dtype} takes {bits / 8:g} bytes, but its offsets span {span}"
    return TensorSlot(key, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])
