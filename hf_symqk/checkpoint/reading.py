"""
Reads parts of tensors: several at once, neighbours in one piece, and the next layers while one is scored, within a
bound on what is held.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import tqdm
from torch import Tensor

from .ranges import reading_threads
from .sources import Source
from .weights import StoredTensor


__all__ = ["Need", "Reader"]

_AT_ONCE = 8
_PIECE = 8 * 2**20
# Gaps that cost less than a request of their own are read along, up to a fiftieth of what they lie between.
_GAP = 2**16
_GAP_SHARE = 50
# Whatever the layers' size, this much may be read ahead.
_AHEAD = 64 * 2**20


@dataclass(frozen=True)
class Need:
    """
    Bytes of one tensor that are needed.

    Args:
        tensor (`StoredTensor`): The tensor.
        spans (`tuple[tuple[int, int], ...]`, *optional*): First byte and first byte after, counted from the tensor's
            own start, in ascending order; the whole tensor by default.
    """

    tensor: StoredTensor
    spans: tuple[tuple[int, int], ...] = ()

    def absolute(self) -> list[tuple[int, int]]:
        """The spans as positions in the file."""
        start = self.tensor.start
        return [(start + first, start + last) for first, last in self.spans or ((0, self.tensor.nbytes),)]


class _Target(NamedTuple):
    start: int  # in the file
    end: int
    tensor: Tensor  # the whole tensor, as it lies in the file from `origin`
    origin: int

    def view(self, start: int, end: int) -> memoryview:
        flat = self.tensor.reshape(-1).view(torch.uint8).numpy()
        return memoryview(flat)[start - self.origin : end - self.origin]  # type: ignore[arg-type]  # arrays are buffers from 3.12 on


@dataclass
class _Batch:
    """What is needed together, and what has arrived of it."""

    needs: Sequence[Need]
    futures: list[Future] = field(default_factory=list)
    tensors: dict[StoredTensor, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(last - first for need in self.needs for first, last in need.absolute())

    @property
    def is_local(self) -> bool:
        return all(need.tensor.source.local_path(need.tensor.file) is not None for need in self.needs)

    @property
    def slack(self) -> int:
        """How much larger the tensors would be in fp32."""
        floating = [need for need in self.needs if need.tensor.dtype.is_floating_point]
        return sum(
            need.tensor.nbytes * (4 - need.tensor.dtype.itemsize) // need.tensor.dtype.itemsize for need in floating
        )


class Reader:
    """
    Reads tensors from files.

    Args:
        name (`str`): How the progress bar calls what is read.
    """

    def __init__(self, name: str):
        self.name = name
        self._batches: list[_Batch] = []
        self._pool: ThreadPoolExecutor | None = None
        self._bar: Any = None
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, batches: Sequence[Sequence[Need]]) -> Iterator[None]:
        """
        Plans what [`~Reader.take`] will ask for, so that it is read ahead, in parallel and with a progress bar (on a
        terminal, as `huggingface_hub` shows them).

        Args:
            batches (`Sequence[Sequence[Need]]`): What is needed together, in the order in which it will be taken.
        """
        self._batches = [_Batch(needs) for needs in batches]
        total = sum(batch.nbytes for batch in self._batches)
        with (
            reading_threads(_AT_ONCE) as self._pool,
            tqdm(total=total, unit="B", unit_scale=True, desc=self.name, disable=None, delay=0.5) as self._bar,
        ):
            try:
                yield
            finally:
                self._batches, self._pool, self._bar = [], None, None

    def take(self, needs: Sequence[Need]) -> dict[StoredTensor, Tensor]:
        """
        Tensors with their values. Bytes that were not asked for are not initialised.

        Args:
            needs (`Sequence[Need]`): One of the batches that were planned, or anything else, which is read at once.

        Returns:
            `dict[StoredTensor, torch.Tensor]`

        Raises:
            OSError: if something cannot be read.
        """
        position = next((place for place, batch in enumerate(self._batches) if batch.needs is needs), None)
        if position is None or self._pool is None:
            with self.reading([needs]):
                return self.take(needs)
        batch = self._batches[position]
        self._start(batch)
        budget = max(_AHEAD, batch.slack)
        for following in self._batches[position + 1 :]:
            budget -= following.nbytes
            if budget < 0 or following.is_local:  # a disk is fast enough, and its cache is no memory of ours
                break
            self._start(following)
        for future in batch.futures:
            future.result()
        tensors, batch.tensors, batch.futures = batch.tensors, {}, []
        return tensors

    def _start(self, batch: _Batch) -> None:
        if batch.tensors or self._pool is None:
            return
        targets: dict[tuple[Source, str], list[_Target]] = {}
        for need in batch.needs:
            stored = need.tensor
            if stored.tensor is not None:
                batch.tensors[stored] = stored.tensor
                continue
            tensor = torch.empty(stored.shape, dtype=stored.dtype)
            batch.tensors[stored] = tensor
            targets.setdefault((stored.source, stored.file), []).extend(
                _Target(start, end, tensor, stored.start) for start, end in need.absolute()
            )
        for (source, file), parts in targets.items():
            for piece in _pieces(sorted(parts, key=lambda part: part.start)):
                batch.futures.append(self._pool.submit(self._read, source, file, *piece))

    def _read(self, source: Source, file: str, start: int, end: int, targets: list[_Target]) -> None:
        views = [
            (max(target.start, start), target.view(max(target.start, start), min(target.end, end)))
            for target in targets
        ]
        try:
            if len(views) == 1 and len(views[0][1]) == end - start:
                source.read(file, start, views[0][1])
            else:
                scratch = memoryview(bytearray(end - start))
                source.read(file, start, scratch)
                for first, view in views:
                    view[:] = scratch[first - start : first - start + len(view)]
        except HfHubHTTPError:
            raise  # says itself what was asked for and why it was refused
        except (OSError, ValueError) as error:
            kind = ValueError if isinstance(error, ValueError) else OSError
            raise kind(f"{source.name}: bytes {start} to {end} of {file} cannot be read: {error}") from error
        bar = self._bar
        if bar is not None:
            with self._lock:
                bar.update(sum(len(view) for _, view in views))


def _pieces(targets: list[_Target]) -> Iterator[tuple[int, int, list[_Target]]]:
    """Cuts sorted targets into what is read in one go: neighbours together, but no more than a piece at once."""
    merged: list[list[_Target]] = []
    for target in targets:
        before = merged[-1] if merged else []
        gap = target.start - before[-1].end if before else 0
        span = target.end - before[0].start if before else 0
        if before and gap <= min(_GAP, span // _GAP_SHARE):
            before.append(target)
        else:
            merged.append([target])
    for group in merged:
        for start in range(group[0].start, group[-1].end, _PIECE):
            end = min(start + _PIECE, group[-1].end)
            inside = [target for target in group if target.start < end and target.end > start]
            if inside:
                yield start, end, inside
