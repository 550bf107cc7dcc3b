"""Which tensors a checkpoint has, in which files: indices are read here, and the headers that are asked for."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .headers import DTYPES, Header, read_header
from .ranges import reading_threads
from .sources import Source


__all__ = ["StoredTensor", "WeightFiles", "read_json"]

# In the order in which Transformers looks for them; where there is an adapter, it is what the folder is about.
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_WHOLE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_PICKLES = (".bin", ".pt", ".pth")
# What else may lie there, by the end of its name.
_OTHER_FORMATS = {
    ".gguf": "GGUF",
    ".msgpack": "Flax",
    ".h5": "TensorFlow",
    ".onnx": "ONNX",
    ".distcp": "a distributed checkpoint of PyTorch (FSDP, DCP)",
    ".nemo": "NeMo",
    ".npz": "NumPy",
}
_HEADERS_AT_ONCE = 8


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """
    A tensor in a file.

    Attributes:
        key (`str`): Its name there.
        source (`Source`), file (`str`): Where the file is, and its name there.
        dtype (`torch.dtype`), shape (`tuple[int, ...]`): Of the tensor as it is stored.
        start (`int`): Position of its first byte in the file, where it lies there row by row.
        tensor (`torch.Tensor` or `None`): The tensor, mapped into memory, where the file has no such place.
    """

    key: str
    source: Source
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    tensor: Tensor | None = None

    def rows(self, first: int, last: int, parts: int) -> "StoredTensor":
        """Some of several equal parts of the rows, `first` to `last`, as a tensor of its own."""
        if parts == 1:
            return self
        if not self.shape or self.shape[0] % parts:
            raise ValueError(f"{self.source.name}: {self.key!r} in {self.file} has {self.shape}, not {parts} parts.")
        size = self.shape[0] // parts
        shape = ((last - first) * size, *self.shape[1:])
        mapped = None if self.tensor is None else self.tensor[first * size : last * size]
        start = self.start + first * (self.nbytes // parts)
        return StoredTensor(self.key, self.source, self.file, self.dtype, shape, start, mapped)

    def as_matrix(self) -> "StoredTensor":
        """The same entries as a matrix whose rows are those of the first dimension."""
        shape = (self.shape[0], prod(self.shape[1:]))
        mapped = None if self.tensor is None else self.tensor.flatten(1)
        return StoredTensor(self.key, self.source, self.file, self.dtype, shape, self.start, mapped)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def read_json(source: Source, file: str) -> dict[str, Any]:
    """
    Reads a small JSON file of a checkpoint.

    Args:
        source (`Source`): Where the checkpoint is.
        file (`str`): Name of the file.

    Returns:
        `dict[str, Any]`

    Raises:
        ValueError: if it does not hold a JSON object.
    """
    try:
        values = json.loads(source.fetch(file).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source.name}: {file} is not a JSON file ({error}).") from error
    if not isinstance(values, dict):
        raise ValueError(f"{source.name}: {file} does not hold a JSON object but a {type(values).__name__}.")
    return values


class WeightFiles:
    """
    The weight files of a checkpoint.

    Args:
        source (`Source`): Where the checkpoint is.
        file (`str`, *optional*): The file to read, an index or a file of weights; by default the one that Transformers
            would read.

    Raises:
        ValueError: if there are no weights that can be read, naming what is there instead; if an index is broken or
            names a file that is not there.
    """

    def __init__(self, source: Source, file: str | None = None):
        self.source = source
        self._files = source.files()
        self.entry = file or self._choose()
        self._headers: dict[str, Header] = {}
        self._pickles: dict[str, dict[str, Tensor]] = {}
        self._index = read_json(source, self.entry) if self.entry.endswith(".json") else None
        self.files = self._weight_map()

    @property
    def is_adapter(self) -> bool:
        """Whether these are the weights of a PEFT adapter."""
        return self.entry.rpartition("/")[2] in _ADAPTERS

    def _choose(self) -> str:
        found = next((name for name in (*_ADAPTERS, *_WHOLE) if name in self._files), None)
        if found is not None:
            return found
        others = [name for name in self._files if name.endswith(".safetensors") and "/" not in name]
        indices = [name for name in self._files if name.endswith(".safetensors.index.json") and "/" not in name]
        if len(indices) == 1:
            return indices[0]
        if len(others) == 1:
            return others[0]
        if others:
            raise ValueError(
                f"{self.source.name} holds several files of weights and no index ({', '.join(others[:6])}); give the "
                "path of the one to score."
            )
        formats = {kind for name in self._files for end, kind in _OTHER_FORMATS.items() if name.endswith(end)}
        there = ", ".join(self._files[:8]) or "no file at all"
        instead = f"its weights are {' and '.join(sorted(formats))}, which is not read here" if formats else there
        raise ValueError(
            f"{self.source.name} holds none of {', '.join(_WHOLE)}: {instead}. Score the model that it was made "
            "from, or load it and use `score_model`."
        )

    def _weight_map(self) -> dict[str, str]:
        """File by key."""
        where = f"{self.source.name}: {self.entry}"
        if self._index is None:
            kind = next((kind for end, kind in _OTHER_FORMATS.items() if self.entry.endswith(end)), None)
            if kind is not None:
                raise ValueError(f"{where} is {kind}, which is not read here. Score the model that it was made from.")
            return dict.fromkeys(self._keys_of(self.entry), self.entry)
        files = self._index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f"{where} has no `weight_map` from tensor names to file names.")
        folder = self.entry.rpartition("/")[0]
        files = {key: f"{folder}/{name}" if folder else name for key, name in files.items()}
        there = set(self._files)
        missing = {name: key for key, name in files.items() if name not in there}
        if missing:
            name, key = next(iter(missing.items()))
            raise ValueError(
                f"{where} says that {key!r} is in {name}, which is not there ({len(missing)} of "
                f"{len(set(files.values()))} files missing). Download the checkpoint again."
            )
        return files

    @cached_property
    def num_parameters(self) -> int | None:
        """Entries of all floating point tensors, as far as what was read says; else what the Hub says, or `None`."""
        total = ((self._index or {}).get("metadata") or {}).get("total_parameters")
        if isinstance(total, int):
            return total
        files = set(self.files.values())
        if files <= {*self._headers, *self._pickles}:
            stored = [tensor for file in files for tensor in self._tensors_of(file).values()]
            floating = sum(prod(tensor.shape) for tensor in stored if tensor.dtype.is_floating_point)
            # Integers are a few buffers, or else weights that a quantiser has packed, which would have to be unpacked.
            if sum(prod(tensor.shape) for tensor in stored) <= 1.01 * floating:
                return floating
        return self.source.num_parameters

    def describe(self, keys: Iterable[str]) -> dict[str, StoredTensor]:
        """
        Looks up tensors, reading the headers of the files that hold them and of no others.

        Args:
            keys (`Iterable[str]`): Names of tensors.

        Returns:
            `dict[str, StoredTensor]`: By key.

        Raises:
            ValueError: if a file is broken, or lacks a tensor that the index puts there.
        """
        keys = list(keys)
        files = dict.fromkeys(self.files[key] for key in keys)
        with reading_threads(_HEADERS_AT_ONCE) as pool:
            tensors = dict(zip(files, pool.map(self._tensors_of, files), strict=True))
        for key in keys:
            if key not in tensors[self.files[key]]:
                raise ValueError(
                    f"{self.source.name}: {self.entry} says that {key!r} is in {self.files[key]}, which does not hold "
                    "it. Download the checkpoint again."
                )
        return {key: tensors[self.files[key]][key] for key in keys}

    def _keys_of(self, file: str) -> list[str]:
        return list(self._tensors_of(file))

    def _tensors_of(self, file: str) -> dict[str, StoredTensor]:
        if file.endswith(_PICKLES):
            if file not in self._pickles:
                self._pickles[file] = _open_pickle(self.source.fetch(file), f"{self.source.name}: {file}")
            return {
                key: StoredTensor(key, self.source, file, tensor.dtype, tuple(tensor.shape), tensor=tensor)
                for key, tensor in self._pickles[file].items()
            }
        if file not in self._headers:
            self._headers[file] = read_header(self.source, file)
        return {
            # What PyTorch has no type for stays bytes; forms that hold such are refused by their other tensors.
            key: StoredTensor(
                key, self.source, file, DTYPES[slot.dtype].torch_dtype or torch.uint8, slot.shape, slot.start
            )
            for key, slot in self._headers[file].slots.items()
        }


def _open_pickle(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a file that `torch.save` wrote, mapped into memory where its format allows that."""
    try:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            held = torch.load(path, map_location="cpu", weights_only=True)  # before torch 1.6 files were no archives
    except Exception as error:  # torch raises whatever reading and unpickling raise
        code = "weights_only" in str(error) or "WeightsUnpickler" in str(error)
        why = (
            "torch refuses to load it because it holds code, not only tensors, which could do anything when run"
            if code
            else "torch cannot read it; it is broken or cut short, download it again"
        )
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{name}: {why} ({reason}).") from error
    by_name = held if isinstance(held, dict) else {}
    tensors = {key: value for key, value in by_name.items() if isinstance(value, Tensor)}
    if not tensors:
        inside = ", ".join(map(str, list(by_name)[:6])) or type(held).__name__
        raise ValueError(f"{name} holds no tensors by name but {inside}; save the model's `state_dict()`.")
    return tensors
