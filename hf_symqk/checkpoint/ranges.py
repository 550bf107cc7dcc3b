"""
Parts of a file read straight into a buffer: of one on this disk, and of one on the Hub by HTTP ranges.
"""

import email.utils
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, parse_ratelimit_headers


__all__ = [
    "LIBRARY_NAME",
    "NoRangesError",
    "RemoteFile",
    "files_below",
    "first_line",
    "read_file",
    "reading_threads",
    "repeat",
]

logger = logging.getLogger(__name__)

LIBRARY_NAME = "hf_symqk"

# A request is given up after this many failures in a row, none of which brought a byte.
MAX_FAILURES = 6
# Seconds before the first repetition, doubled each time up to the longest one, unless the server names a time itself.
BASE_WAIT = 1.0
LONGEST_WAIT = 30.0
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# What a storage host may answer once a signed address has expired.
EXPIRED_STATUSES = frozenset({400, 401, 403, 404, 410})


class NoRangesError(Exception):
    """The server cannot give a part of the file."""


class _InterruptedError(Exception):
    """A failure that the HTTP client does not report as one, but that is worth another try."""


class _ExpiredError(_InterruptedError):
    """The signed address of a file does not work any more."""


class RemoteFile:
    """
    One file on the Hub. Large files lie on a storage host, which the Hub signs an address for: it is asked for once
    and used for all ranges until it expires. May be read from several threads at once.

    Args:
        url (`str`): Address of the file on the Hub, at a commit.
        name (`str`): What messages call it.
        size (`int`, *optional*): Its size, if known.
        token (`str` or `bool`, *optional*): Access token, as in `huggingface_hub`.
    """

    def __init__(self, url: str, name: str, size: int | None, token: str | bool | None) -> None:
        self.url = url
        self.name = name
        self.token = token
        self._size = size
        self._location: str | None = None
        self._lock = threading.Lock()

    def size(self) -> int:
        """Size in bytes, asked for if it is not known."""
        if self._size is None:
            repeat(f"asking for {self.name}", self._locate)
        if self._size is None:
            raise OSError(f"{_origin(self.url)} does not say how large {self.name} is.")
        return self._size

    def read(self, start: int, buffer: memoryview) -> None:
        """
        Fills the buffer with the bytes from `start` on. What fails is repeated with growing waits, going on at the
        byte where it stopped.

        Raises:
            NoRangesError: The server answers with the whole file.
            OSError: It failed too often; missing and gated files raise what `huggingface_hub` raises.
            ValueError: The file ends before.
        """
        end = start + len(buffer)
        if end > self.size():
            raise short_file(self.name, start, len(buffer), self.size())
        done = failures = 0
        while done < len(buffer):
            before = done
            try:
                for chunk in self._stream(start + done, end):
                    if len(chunk) > len(buffer) - done:
                        raise OSError(f"{_origin(self.url)} sent more of {self.name} than bytes {start}-{end - 1}.")
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
                if done < len(buffer):
                    raise _InterruptedError(f"the answer ended after {done - before} of {len(buffer) - before} bytes")
            except (HTTPError, _InterruptedError) as error:
                if not is_transient(error):
                    raise
                failures = failures + 1 if done == before else 1
                what = f"bytes {start + done}-{end - 1} of {self.name}"
                if failures >= MAX_FAILURES:
                    raise OSError(
                        f"Reading {what} failed {failures} times, the last time with: {first_line(error)}"
                    ) from error
                if failures > 1 or not isinstance(error, _ExpiredError):  # a new address is to be had at once
                    pause(f"reading {what}", error, failures)

    def _locate(self) -> str:
        with self._lock:  # one thread asks, the others wait for its answer
            if self._location is None:
                metadata = get_hf_file_metadata(
                    self.url, token=self.token, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, library_name=LIBRARY_NAME
                )
                self._location = metadata.location
                self._size = metadata.size if self._size is None else self._size
            return self._location

    def _forget(self, location: str) -> None:
        with self._lock:
            if self._location == location:
                self._location = None

    def _stream(self, start: int, end: int) -> Iterator[bytes]:
        """One request for the bytes from `start` up to `end`; gives them as they come in."""
        location = self._locate()
        on_hub = _origin(location) == _origin(self.url)
        # A signed address carries its permission; the token is for the Hub alone.
        headers = build_hf_headers(token=self.token if on_hub else False, library_name=LIBRARY_NAME)
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with get_session().stream(
            "GET", location, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        ) as response:
            if not on_hub and response.status_code in EXPIRED_STATUSES:
                self._forget(location)
                raise _ExpiredError(f"{_origin(location)} answered {response.status_code}")
            if response.status_code == 416:
                stored = response.headers.get("Content-Range", "").rpartition("/")[2]
                raise short_file(self.name, start, end - start, stored or "fewer")
            hf_raise_for_status(response)
            self._check_range(response, start, end)
            yield from response.iter_raw()

    def _check_range(self, response: Any, start: int, end: int) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise NoRangesError("it answers with compressed data")
        if response.status_code != 206:
            if start == 0 and end == self._size:
                return
            raise NoRangesError(f"it answers with the whole file (status {response.status_code})")
        answer = response.headers.get("Content-Range", "").strip()
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer)
        if found is None or (int(found[1]), int(found[2])) != (start, end - 1):
            raise OSError(f"Asked for bytes {start}-{end - 1} of {self.name}, the server answered with {answer!r}.")
        if found[3] not in ("*", str(self._size)):
            raise OSError(f"{self.name} has {self._size} bytes according to the Hub, {found[3]} where it is stored.")


def is_transient(error: Exception) -> bool:
    """Whether a request that failed with this error may succeed if repeated."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    # Other errors of the HTTP client are those of transport: time-outs, connections refused or dropped.
    return not isinstance(error, HfHubHTTPError) or error.response.status_code in RETRIED_STATUSES


def repeat(what: str, request: Callable[[], Any]) -> Any:
    """Makes a request until it succeeds or has failed too often."""
    failures = 0
    while True:
        try:
            return request()
        except HTTPError as error:
            failures += 1
            if not is_transient(error) or failures >= MAX_FAILURES:
                raise
            pause(what, error, failures)


def pause(what: str, error: Exception, failures: int) -> None:
    """Waits for as long as the server says, otherwise twice as long as the time before."""
    wait = _named_wait(error.response.headers) if isinstance(error, HfHubHTTPError) else None
    if wait is None:
        wait = min(BASE_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
    logger.warning("Failed: %s (%s). Trying again in %.1f s.", what, first_line(error), wait)
    gone = getattr(_thread, "gone", None)
    if gone is None:
        time.sleep(wait)
    elif gone.wait(wait):
        raise ReadingGivenUpError(f"Nobody waits for {what} any more.")


class ReadingGivenUpError(OSError):
    """What stops threads that read for somebody who has left."""


_thread = threading.local()


@contextmanager
def reading_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Threads to read with; those that wait to try again stop when the block is left by an error or by Ctrl-C."""
    gone = threading.Event()
    pool = ThreadPoolExecutor(number, initializer=partial(setattr, _thread, "gone", gone))
    try:
        yield pool
    except BaseException:
        gone.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _named_wait(headers: Any) -> float | None:
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def first_line(error: Exception) -> str:
    """What an error says, without the advice below it."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def short_file(name: str, start: int, count: int, size: int | str) -> ValueError:
    """The error of a file that ends too early."""
    return ValueError(
        f"{name} is too short: {count} bytes were expected from position {start} on, but it has {size} bytes. "
        "It was probably cut off while being copied or downloaded; download it again."
    )


def read_file(path: Path, name: str, start: int, buffer: memoryview) -> None:
    """
    Fills the buffer with the bytes of a local file from `start` on.

    Raises:
        ValueError: The file ends before; the message calls it `name`.
    """
    view = buffer.cast("B")
    done = 0
    # Not mapped into memory: pages of a mapped file would count as this process's memory.
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise short_file(name, start, len(view), path.stat().st_size)
            done += count


def files_below(folder: Path) -> list[str]:
    """Names of all files in a folder and the folders in it, hidden folders left out, relative to it and sorted."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in files]
    return sorted(found)
