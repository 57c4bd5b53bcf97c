"""A Hugging Face Hub on this machine, over real HTTP: the API, files behind a redirect, ranges, checksums, and faults.

It answers what huggingface_hub's own client asks for, and counts what it was asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_HOLLOW = 1 << 28
LARGE = {".safetensors", ".bin"}
"""Suffixes of files that are stored by their SHA-256, as with LFS."""


@dataclass
class Repo:
    """A folder that is served as a repository of one commit."""

    folder: Path
    gated: bool = False
    private: bool = False

    @property
    def files(self) -> dict[str, Path]:
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in found}

    @property
    def commit(self) -> str:
        told = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in self.files.items()]
        return hashlib.sha1(repr(told).encode()).hexdigest()


@dataclass(frozen=True)
class Asked:
    """One request, and how many bytes of a body went back."""

    method: str
    path: str
    span: str
    token: str
    status: int
    nbytes: int


@dataclass
class Hub:
    """``fault``: called with method and path of each request; a status in place of the answer, with Retry-After, or
    "cut" for a body that ends early, or None."""

    url: str = ""
    cdn: str = ""
    """Another host, where large files are."""
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    latency: float = 0.0
    ranges: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    """In place of those that an answer would have."""
    revisions: dict[str, str] = field(default_factory=dict)
    """Further names of the commit → repository."""
    token: str = "hf_right"
    fault: Callable[[str, str], int | str | None] = lambda method, path: None
    sums: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def sha256(self, path: Path) -> str:
        key = (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        if key not in self.sums:
            hollow = key[1] > _HOLLOW  # a sparse file, whose zeros nobody hashes
            self.sums[key] = hashlib.sha256(str(path).encode() if hollow else path.read_bytes()).hexdigest()
        return self.sums[key]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    with _server(hub, "127.0.0.1") as hub.url, _server(hub, "127.0.0.2") as hub.cdn:
        yield hub


@contextmanager
def _server(hub: Hub, host: str) -> Iterator[str]:
    server = _Server((host, 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may hang up
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    cut = False
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        time.sleep(self.hub.latency)
        path = urlsplit(self.path).path
        match self.hub.fault(self.command, path):
            case int(status):
                self._send(status, headers={"Retry-After": "0"})
            case fault:
                self.cut = fault == "cut"
                self._route(path)

    def _route(self, path: str) -> None:
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            return self._file(self.hub.repos[found[1]].files[found[2]])
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        found = found or re.fullmatch(r"/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        found = found and [unquote(part) for part in ("", *found.groups())]
        repo = self.hub.repos.get(found[1]) if found else None
        if found is None or repo is None or (repo.private and self._token() != self.hub.token):
            return self._error(404 if self._token() else 401, "RepoNotFound", "Repository not found")
        if found[3] not in ("main", repo.commit) and self.hub.revisions.get(found[3]) != found[1]:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {found[3]}")
        if found[2] == "resolve":
            return self._resolve(found[1], repo, found[4])
        blobs = bool(parse_qs(urlsplit(self.path).query).get("blobs"))
        self._json(self._info(found[1], repo, blobs) if found[2] == "revision" else self._tree(repo))

    def _info(self, name: str, repo: Repo, blobs: bool) -> object:
        def sibling(file: str, path: Path) -> dict[str, object]:
            told: dict[str, object] = {"rfilename": file}
            if blobs:
                told |= {"size": path.stat().st_size, "blobId": self.hub.sha256(path)[:40]}
                if path.suffix in LARGE:
                    told["lfs"] = {"sha256": self.hub.sha256(path), "size": path.stat().st_size, "pointerSize": 134}
            return told

        base = {"id": name, "sha": repo.commit, "private": repo.private, "gated": "manual" if repo.gated else False}
        more = {"downloads": 0, "likes": 0, "tags": []}
        return {**base, **more, "siblings": [sibling(file, path) for file, path in repo.files.items()]}

    def _tree(self, repo: Repo) -> object:
        def entry(file: str, path: Path) -> dict[str, object]:
            size, sha256 = path.stat().st_size, self.hub.sha256(path)
            told: dict[str, object] = {"type": "file", "path": file, "size": size, "oid": sha256[:40]}
            if path.suffix in LARGE:
                told["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
            return told

        return [entry(file, path) for file, path in repo.files.items()]

    def _resolve(self, name: str, repo: Repo, file: str) -> None:
        if repo.gated and self._token() != self.hub.token:
            return self._error(403 if self._token() else 401, "GatedRepo", f"Access to model {name} is restricted")
        path = repo.files.get(file)
        if path is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": repo.commit}
        if path.suffix not in LARGE:
            return self._file(path, {**headers, "ETag": f'"{self.hub.sha256(path)[:40]}"'})
        headers |= {"X-Linked-Etag": f'"{self.hub.sha256(path)}"', "X-Linked-Size": str(path.stat().st_size)}
        self._send(302, headers={**headers, "Location": f"{self.hub.cdn}/cdn/{name}/{file}"})

    def _file(self, path: Path, headers: dict[str, str] | None = None) -> None:
        size = path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        own = {"Accept-Ranges": "bytes", "ETag": f'"{self.hub.sha256(path)}"', **(headers or {})}
        if not span or not self.hub.ranges:
            return self._send(200, path.read_bytes(), own)
        begin, end = int(span[1]), min(int(span[2] or size) + 1, size)
        with path.open("rb") as file:
            file.seek(begin)
            self._send(206, file.read(end - begin), {**own, "Content-Range": f"bytes {begin}-{end - 1}/{size}"})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, headers={"X-Error-Code": code, "X-Error-Message": message})

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), **self.hub.headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = b"" if self.command == "HEAD" else body[: len(body) // 2] if self.cut else body
        span = self.headers.get("Range", "")
        self.hub.asked.append(Asked(self.command, unquote(self.path), span, self._token(), status, len(sent)))
        self.wfile.write(sent)
        if self.cut and body:
            self.close_connection = True
