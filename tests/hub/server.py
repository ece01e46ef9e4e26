"""A hub on the loopback: models and datasets made of a few bytes, every request on record, faults on order."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE_SUFFIXES = (".parquet", ".safetensors", ".gz", ".npy", ".bin", ".zst")  # kept as LFS objects, as the hub does
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
LARGE = re.compile(r"/large/([0-9a-f]{64})/([^/]+/[^/]+)/(.+)$")  # where large files really lie
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Asked:
    """One request that came in."""

    method: str
    path: str
    token: str  # of the Authorization header; "": none came
    range: str = ""
    query: str = ""


@dataclass
class Fault:
    """What goes wrong with a repository, or with one file of it."""

    kind: str  # status | half | wrong | silent | deaf (serves no parts)
    status: int = 0
    times: int = 1 << 30


@dataclass
class Repo:
    """The commits of one repository, oldest first: hash -> files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    tags: dict[str, str] = field(default_factory=dict[str, str])

    def commit(self, revision: str) -> str | None:
        if revision == "main":
            return list(self.commits)[-1]
        return revision if revision in self.commits else self.tags.get(revision)


class LoopbackHub:
    """Start it, add repositories, point HF_ENDPOINT at `url`."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.asked: list[Asked] = []
        self.sent_bytes = 0  # of bodies
        self.faults: dict[tuple[str, str], Fault] = {}
        self.allowed_token = ""  # private repositories ask for it
        self.private: set[str] = set()
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """From now on connections are refused."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        self._server.shutdown()
        with self.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, files: Mapping[str, str | bytes], *, kind: str = "datasets", tag: str = "") -> str:
        """A new commit, whole; returns its hash."""
        content = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        repo = self.repos.setdefault((kind, name), Repo())
        seed = json.dumps([name, len(repo.commits), sorted((path, sha256(data)) for path, data in content.items())])
        commit = hashlib.sha1(seed.encode()).hexdigest()
        repo.commits[commit] = content
        self.large |= {sha256(data): data for path, data in content.items() if is_large(path)}
        if tag:
            repo.tags[tag] = commit
        return commit

    def fail(self, name: str, fault: Fault, *, file: str = "") -> None:
        """Make every request for a repository go wrong, or those for one file of it."""
        self.faults[name, file] = fault

    def heal(self) -> None:
        self.faults.clear()

    def forget(self) -> None:
        """Count from zero."""
        self.asked.clear()
        self.sent_bytes = 0

    def fetched(self, name: str) -> list[str]:
        """The files whose content was asked for, each as often as it was."""
        paths = [asked.path for asked in self.asked if asked.method == "GET"]
        plain = [(match[2], match[4]) for match in map(FILE.fullmatch, paths) if match]
        large = [(match[2], match[3]) for match in map(LARGE.fullmatch, paths) if match]
        return [urllib.parse.unquote(file) for repo, file in plain + large if repo == name]

    def fault(self, name: str, file: str) -> Fault | None:
        """The fault that hits this request; it is used up by one."""
        with self.lock:
            for key in ((name, file), (name, "")):
                found = self.faults.get(key)
                if found and found.times > 0:
                    found.times -= 1
                    return found
        return None


@functools.lru_cache(4096)
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(LARGE_SUFFIXES)


def etag(path: str, data: bytes) -> str:
    """As the hub names content: LFS objects by SHA-256, small files by their git hash."""
    return sha256(data) if is_large(path) else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    """One line of a listing."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, Any] = {"type": "file", "oid": git, "size": len(data), "path": path}
    if is_large(path):
        found["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return found


def tree(files: Mapping[str, bytes], under: str, *, recursive: bool) -> list[dict[str, Any]]:
    """What lies in a folder."""
    prefix = f"{under}/" if under else ""
    found: list[dict[str, Any]] = []
    folders: set[str] = set()
    for path, data in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        inner = path[len(prefix) :].split("/")
        depth = len(inner) if recursive else min(len(inner), 2)
        folders |= {prefix + "/".join(inner[:size]) for size in range(1, depth)}
        if recursive or len(inner) == 1:
            found.append(entry(path, data))
    return found + [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders)]


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

    def setup(self) -> None:
        super().setup()
        with self.hub.lock:
            self.hub.connections.add(self.connection)

    def finish(self) -> None:
        with self.hub.lock:
            self.hub.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a client that has had enough
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        address = urllib.parse.urlparse(self.path)
        path = address.path
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        with self.hub.lock:
            self.hub.asked.append(Asked(self.command, path, token, self.headers.get("Range") or "", address.query))
        if large := LARGE.fullmatch(path):
            self._large(large[1])
            return
        api, file = API.fullmatch(path), FILE.fullmatch(path)
        kind, name = (
            (api[1], api[2]) if api else ("datasets" if file and file[1] else "models", file[2] if file else "")
        )
        fault = self.hub.fault(name, urllib.parse.unquote(file[4]) if file else "")
        if fault and fault.kind in ("status", "silent") and self._refused(fault):
            return
        repo = self.hub.repos.get((kind, name))
        if repo is None or (name in self.hub.private and token != self.hub.allowed_token):
            status = 404 if repo is None else 401
            self._error(status, "RepoNotFound", "Repository not found")
            return
        commit = repo.commit(urllib.parse.unquote((api[4] or "main") if api else file[3] if file else ""))
        if commit is None:
            self._error(404, "RevisionNotFound", "Invalid rev id")
        elif api:
            self._listing(name, commit, repo.commits[commit], what=api, query=address.query, fault=fault)
        elif file:
            self._file(name, urllib.parse.unquote(file[4]), commit, files=repo.commits[commit], fault=fault)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        sent = json.loads(body) if body.startswith(b"{") else urllib.parse.parse_qs(body.decode())
        self.posted: list[str] = sent.get("paths", [])
        self.do_GET()

    def _refused(self, fault: Fault) -> bool:
        if fault.kind == "silent":
            self.hub.stopping.wait()
            self.close_connection = True
            return True
        code = {401: "RepoNotFound", 403: "GatedRepo", 404: "RepoNotFound"}.get(fault.status, "")
        self._error(fault.status, code, "as ordered")
        return True

    def _listing(
        self,
        name: str,
        commit: str,
        files: Mapping[str, bytes],
        *,
        what: re.Match[str],
        query: str,
        fault: Fault | None,
    ) -> None:
        if what[3] == "tree":
            found: Any = tree(files, urllib.parse.unquote(what[5] or ""), recursive="recursive=true" in query.lower())
            if not found:
                self._error(404, "EntryNotFound", "no such folder")
                return
        elif what[3] == "paths-info":
            found = [entry(path, files[path]) for path in self.posted if path in files]
        else:
            found = {
                "id": name, "modelId": name, "sha": commit, "private": name in self.hub.private, "gated": False,
                "disabled": False, "downloads": 0, "likes": 0, "tags": [], "lastModified": DATE, "createdAt": DATE,
                "siblings": [{"rfilename": path} for path in sorted(files)],
            }  # fmt: skip
        self._answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, fault)

    def _file(
        self, name: str, path: str, commit: str, *, files: Mapping[str, bytes], fault: Fault | None
    ) -> None:  # fmt: skip
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path not in files:
            self._error(404, "EntryNotFound", "Entry not found", headers)
            return
        data = files[path]
        if is_large(path) and fault is None:  # the hub sends the client on to another host, where the token must not go
            place = f"http://localhost:{self.hub.port}/large/{sha256(data)}/{name}/{urllib.parse.quote(path)}"
            linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data)), "Location": place}
            self._answer(302, b"", headers | linked)
            return
        headers["ETag"] = f'"{etag(path, data)}"'
        self._content(data, headers, fault)

    def _large(self, digest: str) -> None:
        if digest in self.hub.large:
            self._content(self.hub.large[digest], {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}, None)
        else:
            self._error(404, "", "no such object")

    def _content(self, data: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        if fault and fault.kind == "wrong":
            data = bytes(byte ^ 0x20 for byte in data)
        status, part = 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part and not (fault and fault.kind == "deaf"):
            first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        self._answer(status, data, headers | {"Content-Type": "application/octet-stream"}, fault)

    def _error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        said = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        self._answer(status, json.dumps({"error": message}).encode(), {**said, **(headers or {})})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.kind == "half":
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)
        self.hub.sent_bytes += len(body)
