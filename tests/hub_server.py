"""A small Hub for tests: what huggingface_hub and transformers ask for to push a model and to load it again.

Repositories and their commits are kept in memory. A branch moves at the end of the commit call only, as on the Hub.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

OWNER, READER = "hf_owner", "hf_reader"  # tokens of `someone` with write permission, and of `somebody` without
USERS = {OWNER: "someone", READER: "somebody"}
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


class Commit(NamedTuple):
    oid: str
    files: dict[str, bytes]


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> Commit:
        content = repr((len(self.commits), sorted(files.items()))).encode()
        self.commits.append(Commit(hashlib.sha1(content).hexdigest(), files))
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        return next((c for c in reversed(self.commits) if revision in ("main", c.oid)), None)


@dataclass
class Hub:
    """What the server knows.

    Args:
        url (`str`): Where it listens.
        repositories (`dict`): By `user/name`.
        large_files (`dict`): Uploaded large files by their SHA-256, whether or not a commit has them.
        requests (`list`): Method and path of each request, in order.
        unknown (`list`): Requests that it has no answer to.
        broken (`set`): Steps in the middle of which it drops the connection: `"upload"` of a large file, `"commit"`, or
            the `"answer"` to a commit that was made.
        on_break (`Callable`): Called where it drops the connection, before it does.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    on_break: Callable[[], object] = bool


@contextmanager
def running_hub():
    """A [`Hub`] that listens on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RefusedError(Exception):
    """Ends a request with a status and, where the Hub gives one, its code of the error."""

    def __init__(self, status: int, message: str, code: str | None = None):
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args):
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def answer(self, method: str) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.hub.requests.append(f"{method} {path}")
        self.unread = int(self.headers.get("Content-Length", 0))
        for verb, pattern, respond in _ROUTES:
            if verb == method and (match := re.fullmatch(pattern, path)):
                return self.respond(respond, match.groupdict())
        self.hub.unknown.append(f"{method} {path}")
        self.send(404, {"error": "unknown endpoint"})

    def respond(self, endpoint, arguments: dict[str, str]) -> None:
        try:
            endpoint(self, **arguments)
        except _RefusedError as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self.send(refused.status, {"error": refused.message}, headers)

    do_GET, do_HEAD, do_POST, do_PUT = (  # noqa: N815
        lambda self, method=method: self.answer(method) for method in ("GET", "HEAD", "POST", "PUT")
    )

    def body(self) -> bytes:
        size, self.unread = self.unread, 0
        return self.rfile.read(size)

    def send(self, status: int, content, headers: dict[str, str] | None = None) -> None:
        self.body()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def drop(self) -> None:
        self.hub.on_break()
        self.unread = 0
        self.close_connection = True

    # Who asks, and for what.

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in USERS:
            raise _RefusedError(401, "Invalid credentials in Authorization header")
        return USERS.get(token)

    def check_may_write(self, namespace: str) -> None:
        user = self.user()
        if user is None:
            raise _RefusedError(401, "Invalid username or password.")
        if user != namespace or user != USERS[OWNER]:
            raise _RefusedError(403, f"Forbidden: you don't have the rights to write to {namespace}")

    def repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and self.user() != name.split("/")[0]):
            raise _RefusedError(404 if self.user() else 401, "Repository not found", "RepoNotFound")
        return found

    def commit_at(self, name: str, revision: str) -> Commit:
        found = self.repository(name).at(revision)
        if found is None:
            raise _RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    # Endpoints that write.

    def whoami(self):
        user = self.user()
        if user is None:
            raise _RefusedError(401, "Invalid username or password.")
        self.send(200, {"type": "user", "name": user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self):
        asked = json.loads(self.body())
        namespace = asked.get("organization") or self.user()
        name = f"{namespace}/{asked['name']}"
        self.check_may_write(namespace)
        answer = {"url": f"{self.hub.url}/{name}", "id": name}
        if name in self.hub.repositories:
            return self.send(409, {"error": "You already created this model repo", **answer})
        repository = self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
        repository.commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        self.send(200, answer)

    def validate(self):
        header = re.match(r"---\n(.*?)\n---\n", json.loads(self.body())["content"], re.DOTALL)
        try:
            valid = header is not None and isinstance(yaml.safe_load(header[1]), dict)
        except yaml.YAMLError:
            valid = False
        self.send(200 if valid else 400, {"errors": [] if valid else [{"message": "metadata"}], "warnings": []})

    def preupload(self, repo, revision):
        files = self.commit_at(repo, revision).files
        self.check_may_write(repo.split("/")[0])
        answer = []
        for file in json.loads(self.body())["files"]:
            path, mode = file["path"], "lfs" if _is_large(file["path"]) else "regular"
            oid = _oid(path, files[path]) if path in files else None
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send(200, {"files": answer})

    def lfs_batch(self, repo):
        self.check_may_write(repo.split("/")[0])
        objects = json.loads(self.body())["objects"]
        for each in objects:
            if each["oid"] not in self.hub.large_files:
                upload = {"href": f"{self.hub.url}/{repo}/lfs/{each['oid']}"}
                each["actions"] = {"upload": upload, "verify": {"href": f"{upload['href']}/verify"}}
        self.send(200, {"transfer": "basic", "objects": objects})

    def lfs_upload(self, repo, oid):
        if "upload" in self.hub.broken:
            self.rfile.read(self.unread // 2)
            return self.drop()
        content = self.body()
        if hashlib.sha256(content).hexdigest() != oid:
            raise _RefusedError(400, "content does not match its SHA-256")
        self.hub.large_files[oid] = content
        self.send(200, {})

    def lfs_verify(self, repo, oid):
        if json.loads(self.body()) != {"oid": oid, "size": len(self.hub.large_files.get(oid, b""))}:
            raise _RefusedError(400, "not what was uploaded")
        self.send(200, {})

    def commit(self, repo, revision):
        self.check_may_write(repo.split("/")[0])
        lines = [json.loads(line) for line in self.body().splitlines()]
        if "commit" in self.hub.broken:
            return self.drop()
        files = dict(self.commit_at(repo, revision).files)
        for line in lines[1:]:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.large_files[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise _RefusedError(400, f"unknown operation {key}")
        made = self.repository(repo).commit(files)
        if "answer" in self.hub.broken:
            return self.drop()
        self.send(
            200, {"success": True, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{made.oid}"}
        )

    # Endpoints that read.

    def info(self, repo, revision=None):
        commit = self.commit_at(repo, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        private = self.repository(repo).private
        self.send(200, {"id": repo, "sha": commit.oid, "private": private, "siblings": siblings, "tags": []})

    def tree(self, repo, revision, folder=None):
        commit = self.commit_at(repo, revision)
        prefix = f"{folder}/" if folder else ""
        inside = {path: content for path, content in commit.files.items() if path.startswith(prefix)}
        if not inside:
            raise _RefusedError(404, f"{folder} does not exist", "EntryNotFound")
        recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        entries = {}
        for path, content in inside.items():
            below = path.removeprefix(prefix).split("/")
            if recursive or len(below) == 1:
                entry = {"type": "file", "path": path, "size": len(content), "oid": _git_oid(content)}
                lfs = {"lfs": {"oid": _oid(path, content), "size": len(content), "pointerSize": 130}}
                entries[path] = entry | (lfs if _is_large(path) else {})
            else:
                name = prefix + below[0]
                entries[name] = {"type": "directory", "path": name, "oid": _git_oid(name.encode()), "size": 0}
        self.send(200, list(entries.values()))

    def resolve(self, repo, revision, path):
        commit = self.commit_at(repo, revision)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            refused = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.send(404, {"error": "Entry not found"}, headers | refused)
        content, status = commit.files[path], 200
        headers |= {"ETag": f'"{_oid(path, content)}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self.send(status, content, headers)


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _oid(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if _is_large(path) else _git_oid(content)


_MODEL = rf"/api/models/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"
_LARGE_FILE = rf"/{_REPO}/lfs/(?P<oid>\w+)"
_ROUTES = (
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", rf"{_MODEL}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", _LARGE_FILE, _Handler.lfs_upload),
    ("POST", rf"{_LARGE_FILE}/verify", _Handler.lfs_verify),
    ("POST", rf"{_MODEL}/commit/{_REVISION}", _Handler.commit),
    ("GET", _MODEL, _Handler.info),
    ("GET", rf"{_MODEL}/revision/{_REVISION}", _Handler.info),
    ("GET", rf"{_MODEL}/tree/{_REVISION}(/(?P<folder>.+))?", _Handler.tree),
    ("HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", _Handler.resolve),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", _Handler.resolve),
)
