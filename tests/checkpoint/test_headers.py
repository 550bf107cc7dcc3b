"""Headers of safetensors files: as the library reads them, from two reads; broken files are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_symqk.checkpoint.headers import DTYPES, read_header
from hf_symqk.checkpoint.sources import LocalSource


TENSORS = {
    "q.weight": torch.arange(12.0).reshape(3, 4),
    "k.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "scale": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.zeros(0, 7),
}
FILE = "model.safetensors"


class CountingSource(LocalSource):
    """Notes which bytes are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[int, int]] = []

    def read(self, file: str, start: int, buffer: memoryview) -> None:
        self.reads.append((start, len(buffer)))
        super().read(file, start, buffer)


@pytest.fixture
def source(tmp_path: Path) -> CountingSource:
    save_file(TENSORS, tmp_path / FILE, {"format": "pt"})
    return CountingSource(tmp_path)


def test_slots_are_where_the_library_finds_the_tensors(source: CountingSource) -> None:
    header = read_header(source, FILE)
    content = source.fetch(FILE).read_bytes()
    assert header.metadata == {"format": "pt"}
    with safe_open(source.fetch(FILE), "pt") as expected:
        assert set(header.slots) == set(expected.keys())
        for key, slot in header.slots.items():
            assert slot.key == key
            assert slot.dtype == expected.get_slice(key).get_dtype()
            assert slot.shape == tuple(expected.get_slice(key).get_shape())
            stored = content[slot.start : slot.end]
            assert stored == bytes(expected.get_tensor(key).reshape(-1).view(torch.uint8).tolist())


def test_nothing_but_the_header_is_read(source: CountingSource) -> None:
    # Over HTTP each of these is one request, and every byte more would be paid for by each shard of a model.
    read_header(source, FILE)
    length = int.from_bytes(source.fetch(FILE).read_bytes()[:8], "little")
    assert source.reads == [(0, 8), (8, length)]


@pytest.mark.parametrize("name", DTYPES)
def test_the_dtype_table_is_that_of_the_library(name: str, tmp_path: Path) -> None:
    # Width and torch type of each name against what safetensors makes of a file with it. Eight values of any width are
    # whole bytes. Its binding has no tensors of some of these types; their widths it checks all the same.
    bits, dtype = DTYPES[name]
    write_file(tmp_path / FILE, {"x": {"dtype": name, "shape": [8], "data_offsets": [0, bits]}}, bytes(bits))
    assert read_header(LocalSource(tmp_path), FILE).slots["x"].dtype == name
    with safe_open(tmp_path / FILE, "pt") as opened:
        assert opened.get_slice("x").get_dtype() == name
        if dtype is not None:
            assert opened.get_tensor("x").dtype == dtype
            assert opened.get_tensor("x").nbytes == bits


def write_file(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


BROKEN_ENTRIES = {
    "no offsets": ({"x": {"dtype": "F32", "shape": [2]}}, "'x' has no dtype, shape and data_offsets"),
    "not an object": ({"x": [1, 2]}, "'x' has no dtype, shape and data_offsets"),
    "unknown dtype": ({"x": entry(dtype="F7")}, "'x' is of the dtype 'F7', which is none of BOOL, "),
    "negative shape": ({"x": entry(shape=[-2])}, r"'x' has the shape \[-2\]"),
    "shape of text": ({"x": entry(shape=["2"])}, r"'x' has the shape \['2'\]"),
    "offsets backwards": ({"x": entry(data_offsets=[8, 0])}, r"'x' has the offsets \[8, 0\]"),
    "size and shape differ": ({"x": entry(shape=[3])}, "'x' of shape .3. and dtype F32 takes 12 bytes, but .* span 8"),
    "half a byte": ({"x": entry(dtype="F4", shape=[17])}, "'x' of shape .17. and dtype F4 takes 8.5 bytes, but"),
    "ends beyond the file": ({"x": entry(shape=[4], data_offsets=[0, 16])}, "'x' ends at byte .*: it is cut off"),
    "a hole": ({"x": entry(shape=[1], data_offsets=[4, 8])}, "'x' begins at byte"),
    "an overlap": ({"x": entry(), "y": entry(data_offsets=[0, 8])}, "'y' begins at byte"),
    "bytes left over": ({"x": entry(shape=[1], data_offsets=[0, 4])}, "its tensors end at byte .* but the file has"),
    "not a mapping": ([1], "its header is not a JSON object"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "x": entry()}, "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN_ENTRIES)
def test_broken_headers_are_refused_as_by_the_library(case: str, tmp_path: Path) -> None:
    header, message = BROKEN_ENTRIES[case]
    write_file(tmp_path / FILE, header, bytes(8))
    with pytest.raises(ValueError, match=rf"(?s)model.safetensors of .*{message}.*download it again"):
        read_header(LocalSource(tmp_path), FILE)
    with pytest.raises((SafetensorError, OSError)), safe_open(tmp_path / FILE, "pt"):
        pass


NOT_SAFETENSORS = {
    "empty": (b"", "it is empty; download it again"),
    "seven bytes": (b"1234567", "it has 7 bytes"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n",
        'Git LFS pointer, not the weights; run "git lfs pull"',
    ),
    "a zip archive": (b"PK\x03\x04" + bytes(range(60)), "announce a header of"),
    "an error page": (b"<!doctype html><html></html>", "announce a header of"),
    "header cut off": ((504).to_bytes(8, "little") + b"{" * 500, "announce a header of 504 bytes .* cut off"),
    "not JSON": ((8).to_bytes(8, "little") + b"{'x': 1}", "its header is not JSON"),
    "not text": ((8).to_bytes(8, "little") + b'{"\xff\xfe": 1', "its header is not JSON"),
}


@pytest.mark.parametrize("case", NOT_SAFETENSORS)
def test_other_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = NOT_SAFETENSORS[case]
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=rf"model.safetensors of .*{message}"):
        read_header(LocalSource(tmp_path), FILE)


def test_a_file_cut_off_in_its_data_names_the_tensor(source: CountingSource) -> None:
    path = source.fetch(FILE)
    content = path.read_bytes()
    last = max(read_header(source, FILE).slots.values(), key=lambda slot: slot.end)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"the tensor '{last.key}' ends at byte {last.end}, but the file has"):
        read_header(source, FILE)
