"""
A Hub on this machine: speaks the protocol of model repositories as far as `huggingface_hub` uses it to read, from
local folders, and logs what was asked of it. Large files are redirected to a second port, as the Hub redirects them
to a storage host, with addresses that can expire. Faults can be ordered for the requests to come.

```python
from hub_server import hub  # a fixture: server, client and cache belong together

def test_it(hub, tmp_path):
    hub.add_repo("org/model", tmp_path / "model", revision="v1")
    score_checkpoint("org/model", revision="v1")
    assert hub.sent(r"model\\.safetensors") == ...
```
"""

import contextlib
import hashlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants


__all__ = ["Fault", "HubServer", "Request", "connected", "hub"]

# Files of these kinds are kept in large-file storage, whatever their size, as the Hub's own .gitattributes say.
LARGE_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
BLOCK = 1 << 16


@dataclass
class Request:
    """One request as it came in, and what went out."""

    server: str  # "hub" or "storage"
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0  # bytes of the body
    body: bytes = b""  # what came in

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Fault:
    """
    What goes wrong with the next `times` requests whose path matches `pattern` (a regular expression, searched for in
    "hub/org/model/resolve/…" and "storage/org/model/…").
    """

    pattern: str
    method: str | None = "GET"
    times: float = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None  # bytes of the body after which the connection is cut
    hide_length: bool = False  # the end of the connection is the end of the body
    delay: float = 0.0  # seconds before the answer
    ignore_range: bool = False


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    blob_id: str
    sha256: str

    @property
    def is_large(self) -> bool:
        return self.path.name.endswith(LARGE_FILES)

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.blob_id

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"size": self.size, "blob_id": self.blob_id, "lfs": None}
        if self.is_large:
            described["lfs"] = {"size": self.size, "sha256": self.sha256, "pointerSize": 134}
        return described


@dataclass
class _Repo:
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    token: str | None = None

    def files(self, revision: str) -> tuple[str, dict[str, _File]] | None:
        commit = self.revisions.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


class HubServer:
    """A Hub and its storage host, each on a port of its own; runs inside a `with` block."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._repos: dict[str, _Repo] = {}
        self._faults: list[Fault] = []
        self._signature = 0
        self._lock = threading.Lock()
        self._servers = [_Server(("127.0.0.1", 0), handler, self) for handler in (_HubHandler, _StorageHandler)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> "HubServer":
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From now on connections are refused."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.shutdown()
            server.server_close()
        # Connections that the client keeps open would still be served.
        huggingface_hub.close_session()

    def add_repo(
        self,
        repo_id: str,
        folder: Path,
        *,
        revision: str = "main",
        gated: bool = False,
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """
        Commits the present files of a folder and lets `revision` stand for them; returns the commit. The files are
        not copied. With `gated` or `private`, only requests with `token` may read.
        """
        files = {path.relative_to(folder).as_posix(): _hash(path) for path in folder.rglob("*") if path.is_file()}
        listing = json.dumps([(name, files[name].sha256) for name in sorted(files)])
        commit = hashlib.sha1(f"{repo_id} {listing}".encode()).hexdigest()
        repo = self._repos.setdefault(repo_id, _Repo())
        repo.commits[commit] = files
        repo.revisions[revision] = commit
        repo.gated, repo.private, repo.token = gated, private, token
        return commit

    def remove_revision(self, repo_id: str, revision: str) -> None:
        """Deletes a branch or tag; its commit stays."""
        del self._repos[repo_id].revisions[revision]

    def add_fault(self, pattern: str, **faults: Any) -> None:
        """Orders a [`Fault`]."""
        self._faults.append(Fault(pattern, **faults))

    def expire_links(self) -> None:
        """Addresses at the storage host that were signed so far are answered with 403."""
        self._signature += 1

    def clear(self) -> None:
        """Forgets the requests so far."""
        self.requests.clear()

    def asked(self, pattern: str = "", *, method: str | None = None, server: str | None = None) -> list[Request]:
        """The requests so far whose path matches."""
        return [
            request
            for request in list(self.requests)
            if re.search(pattern, request.path)
            and method in (None, request.method)
            and server in (None, request.server)
        ]

    def sent(self, pattern: str = "", **which: Any) -> int:
        """Bytes of the bodies of answers so far."""
        return sum(request.sent for request in self.asked(pattern, **which))

    def environment(self, cache: Path) -> dict[str, str]:
        """The environment of a process that shall use this Hub."""
        own = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        dropped = ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE")
        return {key: value for key, value in os.environ.items() if key not in dropped} | own

    def _take_fault(self, request: Request) -> Fault:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                matches = re.search(fault.pattern, request.server + request.path)
                if fault.times > 0 and matches and fault.method in (None, request.method):
                    fault.times -= 1
                    return fault
        return Fault("")


@contextlib.contextmanager
def connected(server: HubServer, cache: Path, *, token: str | None = None, offline: bool = False) -> Iterator[None]:
    """
    Lets `huggingface_hub` in this process talk to the server alone, with a cache and a token of its own. Needed
    because it reads `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE` when it is imported.
    """
    environment = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"} | {"NO_PROXY": "127.0.0.1"}
    if token is not None:
        environment["HF_TOKEN"] = token
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    origins = {huggingface_hub.utils._http._url_origin(server.endpoint)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        for holder, name, value in [
            (constants, "ENDPOINT", server.endpoint),
            (constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
            (constants, "HF_HUB_CACHE", str(cache)),
            (constants, "HF_TOKEN_PATH", str(cache / "no_token")),
            (constants, "HF_HUB_OFFLINE", offline),
            (constants, "HF_HUB_DISABLE_TELEMETRY", True),
            (huggingface_hub.hf_api.api, "endpoint", server.endpoint),
            (huggingface_hub.utils._http, "_HUB_ORIGINS", frozenset(origins)),
        ]:
            stack.enter_context(mock.patch.object(holder, name, value))
        huggingface_hub.close_session()  # a client made before may know a proxy
        stack.callback(huggingface_hub.close_session)
        yield


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that `huggingface_hub` in this process is connected to, with an empty cache in `hub_cache`."""
    with HubServer() as server, connected(server, tmp_path / "hub_cache"):
        yield server


def _hash(path: Path) -> _File:
    size = path.stat().st_size
    blob, content = hashlib.sha1(f"blob {size}\0".encode()), hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            blob.update(block)
            content.update(block)
    return _File(path, size, blob.hexdigest(), content.hexdigest())


def _count_parameters(files: dict[str, _File]) -> dict[str, Any] | None:
    """What the Hub says of the safetensors files at the root of a repository; `None` if there are none."""
    counts: dict[str, int] = {}
    for name, file in files.items():
        if not name.endswith(".safetensors") or "/" in name:
            continue
        try:
            with open(file.path, "rb") as opened:
                header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), file.size)))
            for key, entry in header.items():
                if key != "__metadata__":
                    counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + math.prod(entry["shape"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return None  # the Hub says nothing of files that it cannot parse
    return {"parameters": counts, "total": sum(counts.values())} if counts else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], hub: HubServer) -> None:
        super().__init__(address, handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up in the middle of an answer; that is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    name = ""

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.request_log = Request(
            self.name,
            self.command,
            self.path,
            {key.lower(): value for key, value in self.headers.items()},
            body=self.body,
        )
        self.fault = self.server.hub._take_fault(self.request_log)
        time.sleep(self.fault.delay)
        if self.fault.status is not None:
            self.answer(self.fault.status, b'{"error": "ordered"}', self.fault.headers)
        else:
            self.respond(unquote(urlsplit(self.path).path), self.path.partition("?")[0])

    do_HEAD = do_POST = do_GET

    def respond(self, path: str, raw_path: str) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the console."""

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.start(status, len(body), headers or {})
        if self.command != "HEAD":
            self.put(body)

    def answer_json(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str, message: str) -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def start(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.request_log.status = status
        self.send_response(status)
        ending = {"Connection": "close"} if self.fault.hide_length else {"Content-Length": str(length)}
        for key, value in (ending | headers).items():
            self.send_header(key, value)
        self.end_headers()

    def put(self, block: bytes) -> None:
        # Counted before it is sent: a client that has everything finds everything counted.
        self.request_log.sent += len(block)
        self.wfile.write(block)

    def answer_file(self, file: _File, headers: dict[str, str]) -> None:
        start, end, status = 0, file.size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and not self.fault.ignore_range:
            start, end, status = int(asked[1]), min(int(asked[2] or file.size - 1) + 1, file.size), 206
            if start >= file.size:
                return self.answer(416, b"", {"Content-Range": f"bytes */{file.size}"})
            headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{file.size}"}
        self.start(
            status, end - start, headers | {"Accept-Ranges": "bytes", "ETag": f'"{file.etag}"'} | self.fault.headers
        )
        if self.command == "HEAD":
            return None
        left = end - start
        if self.fault.drop_after is not None:
            left = min(left, self.fault.drop_after)
            self.close_connection = True
        with open(file.path, "rb") as opened:
            opened.seek(start)
            while left and (block := opened.read(min(BLOCK, left))):
                self.put(block)
                left -= len(block)
        return None


class _HubHandler(_Handler):
    name = "hub"
    API = re.compile(r"/api/models/([^/]+(?:/[^/]+)?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?")
    FILE = re.compile(r"/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)")

    def respond(self, path: str, raw_path: str) -> None:
        # Matched before decoding: the / in a revision refs/pr/1 is %2F.
        if match := self.API.fullmatch(raw_path):
            repo_id, kind, revision, inner = match.groups()
        elif match := self.FILE.fullmatch(raw_path):
            (repo_id, revision, inner), kind = match.groups(), "resolve"
        else:
            return self.answer(404)
        revision, inner = unquote(revision or "main"), unquote(inner or "")
        repo = self.server.hub._repos.get(repo_id)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        allowed = repo is not None and given == repo.token
        if repo is None or (repo.private and not allowed):
            return self.refuse(404 if given else 401, "RepoNotFound", "Repository not found")
        found = repo.files(revision)
        if found is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        if kind == "resolve":
            if repo.gated and not allowed:
                return self.refuse(403 if given else 401, "GatedRepo", f"Access to model {repo_id} is restricted.")
            return self.resolve(repo_id, commit, inner, files)
        if kind == "tree":
            return self.answer_json(_tree(files, inner, "recursive=true" in self.path.lower()))
        if kind == "paths-info":
            paths = parse_qs(self.body.decode())["paths"]
            return self.answer_json([_entry(name, files[name]) for name in paths if name in files])
        return self.info(repo_id, repo, commit, files)

    def info(self, repo_id: str, repo: _Repo, commit: str, files: dict[str, _File]) -> None:
        blobs = "blobs=true" in self.path.lower()
        siblings = []
        for name in sorted(files):
            described = files[name].describe()
            described["blobId"] = described.pop("blob_id")
            siblings.append({"rfilename": name} | (described if blobs else {}))
        info = {"id": repo_id, "sha": commit, "siblings": siblings, "private": repo.private}
        info["gated"] = "manual" if repo.gated else False
        if (safetensors := _count_parameters(files)) is not None:
            info["safetensors"] = safetensors
        self.answer_json(info)

    def resolve(self, repo_id: str, commit: str, name: str, files: dict[str, _File]) -> None:
        headers = {"X-Repo-Commit": commit}
        file = files.get(name)
        if file is None:
            return self.answer(
                404, b"", headers | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            )
        if not file.is_large:
            return self.answer_file(file, headers)
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.sha256}"'}
        hub = self.server.hub
        location = f"{hub.storage}/{repo_id}/{commit}/{quote(name)}?signature={hub._signature}"
        return self.answer(302, b"", headers | {"Location": location})


class _StorageHandler(_Handler):
    name = "storage"
    FILE = re.compile(r"/([^/]+(?:/[^/]+)?)/([0-9a-f]{40})/(.+)")

    def respond(self, path: str, raw_path: str) -> None:
        hub = self.server.hub
        if "authorization" in self.request_log.headers:
            # As the storage hosts do: two ways of authorisation at once are refused.
            return self.answer(400, b"Only one auth mechanism allowed")
        match = self.FILE.fullmatch(path)
        if match is None or not self.path.endswith(f"?signature={hub._signature}"):
            return self.answer(403, b"Request has expired")
        repo_id, commit, name = match.groups()
        return self.answer_file(hub._repos[repo_id].commits[commit][name], {})


def _entry(name: str, file: _File) -> dict[str, Any]:
    described = file.describe()
    entry = {"type": "file", "path": name, "size": file.size, "oid": file.blob_id}
    if described["lfs"] is not None:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    return entry


def _tree(files: dict[str, _File], folder: str, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for name in sorted(files):
        if not name.startswith(prefix):
            continue
        first, _, rest = name.removeprefix(prefix).partition("/")
        if rest:
            path = prefix + first
            entries[path] = {
                "type": "directory",
                "path": path,
                "size": 0,
                "oid": hashlib.sha1(path.encode()).hexdigest(),
            }
        if recursive or not rest:
            entries[name] = _entry(name, files[name])
    return list(entries.values())
