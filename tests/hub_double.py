"""A loopback hub: a small HTTP server that speaks the Hugging Face Hub's API to its real client.

Repositories, LFS uploads, commits with an expected parent, trees and downloads; faults on request.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"
Files = dict[str, tuple[str, bytes]]  # path → (``lfs`` or ``file``, content)


@dataclass
class Repository:
    """Commits, the newest last: (id, message, files)."""

    private: bool
    commits: list[tuple[str, str, Files]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def add(self, message: str, files: Files) -> str:
        text = f"{len(self.commits)} {message} {sorted(files)}"
        revision = hashlib.sha1(text.encode()).hexdigest()
        self.commits.append((revision, message, files))
        return revision

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> Files:
        return self.commits[-1][2]

    def at(self, revision: str) -> Files | None:
        if revision == "main":
            return self.files
        return next((files for oid, _, files in self.commits if oid == revision), None)


@dataclass
class HubState:
    """Repositories by ``datasets/owner/name``, uploaded blobs, and the faults that are due.

    A fault is (part of the path, status, times). The status 0 closes the connection without an
    answer; with ``after`` the request is carried out first.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    faults: list[list[Any]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def fail(self, part: str, status: int, times: int = 1, *, after: bool = False) -> None:
        self.faults.append([part, status, times, after])

    def commits(self, repository: str) -> list[str]:
        """The messages of all commits but the one that made the repository."""
        return [message for _, message, _ in self.repositories[repository].commits[1:]]


class _Handler(BaseHTTPRequestHandler):
    hub: HubState
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def _answer(self, status: int, body: object = None, content: bytes | None = None) -> None:
        data = json.dumps(body).encode() if content is None else content
        self.send_response(status)
        for name, value in self._extra.items():
            self.send_header(name, value)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self) -> None:
        self._extra: dict[str, str] = {}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        for fault in self.hub.faults:
            part, status, times, after = fault
            if part in path and times:
                fault[2] -= 1
                if after:
                    self._act(path, body, quiet=True)
                if status:
                    self._answer(status, {"error": "a planned fault"})
                self.close_connection = status == 0
                return
        self._act(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _act(self, path: str, body: bytes, quiet: bool = False) -> None:
        status, answer, content = self._route(path, body)
        if not quiet:
            self._answer(status, answer, content)

    def _route(self, path: str, body: bytes) -> tuple[int, object, bytes | None]:
        hub, parts = self.hub, path.strip("/").split("/")
        if path.startswith("/blob/"):
            assert hashlib.sha256(body).hexdigest() == parts[1]
            hub.blobs[parts[1]] = body
            return 200, {}, None
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._extra = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return 401, {"error": "Invalid credentials in Authorization header"}, None
        if path == "/api/repos/create":
            asked = json.loads(body)
            kind = f"{asked.get('type', 'model')}s"
            key = f"{kind}/{asked['organization']}/{asked['name']}"
            if key in hub.repositories:
                return 409, {"error": "You already created this repo", "url": key}, None
            made = Repository(
                private=asked.get("visibility") == "private" or bool(asked.get("private"))
            )
            made.add("initial commit", {".gitattributes": ("file", b"*.parquet lfs\n")})
            hub.repositories[key] = made
            return 200, {"url": f"{hub.url}/{key}"}, None
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return 200, {"errors": [], "warnings": []}, None
        if parts[0] == "api":
            return self._api(parts[1:], body)
        prefix, owner, name, *rest = parts if parts[0] == "datasets" else ("models", *parts)
        repository = hub.repositories.get(f"{prefix}/{owner}/{name.removesuffix('.git')}")
        if repository is None:
            return self._missing()
        if rest[-1] == "batch":
            return 200, self._batch(json.loads(body)), None
        assert rest[0] == "resolve"
        files = repository.at(rest[1])
        found = (files or {}).get("/".join(rest[2:]))
        if found is None:
            self._extra = {"X-Error-Code": "EntryNotFound"}
            return 404, {"error": "Entry not found"}, None
        self._extra = {"ETag": f'"{hashlib.sha256(found[1]).hexdigest()}"'}
        self._extra |= {"X-Repo-Commit": rest[1]}
        return 200, None, found[1]

    def _missing(self) -> tuple[int, object, bytes | None]:
        self._extra = {"X-Error-Code": "RepoNotFound"}
        return 404, {"error": "Repository not found"}, None

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for one in asked["objects"]:
            known = one["oid"] in self.hub.blobs
            upload = {"upload": {"href": f"{self.hub.url}/blob/{one['oid']}"}}
            objects.append({**one, **({} if known else {"actions": upload})})
        return {"transfer": "basic", "objects": objects}

    def _api(self, parts: list[str], body: bytes) -> tuple[int, object, bytes | None]:
        kind, owner, name, *rest = parts
        repository = self.hub.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return self._missing()
        what = rest[0] if rest else "info"
        if what == "preupload":
            asked = json.loads(body)["files"]
            return 200, {"files": [self._mode(repository, one) for one in asked]}, None
        if what == "commit":
            return self._commit(f"{kind}/{owner}/{name}", repository, body)
        if what == "super-squash":
            repository.commits = [repository.commits[0], repository.commits[-1]]
            return 200, {}, None
        if what == "tag":
            name = json.loads(body)["tag"]
            if name in repository.tags:
                return 409, {"error": "Tag reference exists already"}, None
            repository.tags[name] = rest[1]
            return 200, {}, None
        if what == "tree":
            return 200, [_entry(path, *file) for path, file in repository.files.items()], None
        siblings = [{"rfilename": path} for path in repository.files]
        about = {"id": f"{owner}/{name}", "sha": repository.head, "private": repository.private}
        return 200, {**about, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}, None

    def _mode(self, repository: Repository, asked: dict[str, Any]) -> dict[str, Any]:
        large = asked["path"].endswith((".parquet", ".png", ".safetensors", ".gguf"))
        answer = {
            "path": asked["path"],
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
        }
        known = repository.files.get(asked["path"])
        return answer if known is None else {**answer, "oid": _entry(asked["path"], *known)["oid"]}

    def _commit(
        self, key: str, repository: Repository, body: bytes
    ) -> tuple[int, object, bytes | None]:
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.head):
            return (
                412,
                {"error": "A commit has happened since. Please refresh and try again."},
                None,
            )
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = ("file", base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                files[value["path"]] = ("lfs", self.hub.blobs[value["oid"]])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        revision = repository.add(header["summary"], files)
        url = f"{self.hub.url}/{key}/commit/{revision}"
        return 200, {"success": True, "commitOid": revision, "commitUrl": url}, None


def _entry(path: str, kind: str, content: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry = {"type": "file", "path": path, "size": len(content)}
    if kind == "lfs":
        lfs = {"oid": sha256, "size": len(content), "pointerSize": 130}
        return {**entry, "oid": sha256, "lfs": lfs}
    return {**entry, "oid": git}


@contextmanager
def serving_hub() -> Iterator[HubState]:
    """Serve a fresh hub on loopback."""
    state = HubState()
    handler = type("Handler", (_Handler,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
