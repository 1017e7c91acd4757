"""A small hub in this process, for tests of `approx push`: the calls that huggingface_hub makes, and faults on demand."""

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import yaml

from hub_state import Hub, Repo, ids


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    """Answers one call; `hub` is set by `serve`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        call = f"{self.command} {path}"
        self.hub.calls.append(call)
        fault = next((one for one in self.hub.faults if one.times > 0 and re.search(one.where, call)), None)
        try:
            if fault:
                fault.times -= 1
                time.sleep(fault.seconds)
                if fault.status == 0 and not fault.after and not fault.seconds:
                    self._cut()
                    return
            if fault is None or fault.after or (fault.status == 0 and fault.seconds):
                status, headers, body = self._route(path)
            if fault and fault.status:
                raise RefusedError(fault.status, fault.code, fault.message)
            if fault and fault.after:
                self._cut()
                return
        except RefusedError as refused:
            self._drain()
            text = json.dumps({"error": refused.message or refused.code}).encode()
            more = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(refused.status, {k: v for k, v in more.items() if v}, text)
            return
        self._send(status, headers, body)

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(2)

    def _drain(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = self._read()
        return self._body

    def _read(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        with suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        # One connection serves several calls.
        self.__dict__.pop("_body", None)

    def _json(self, data: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(data).encode()

    def _user(self) -> tuple[str, str]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise RefusedError(401, message="Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def _repo(self, repo_id: str, *, write: bool = False) -> Repo:
        repo = self.hub.repos.get(repo_id)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        owner, role = self.hub.tokens.get(token, ("", ""))
        mine = repo_id.split("/")[0] == owner
        if repo is None or (repo.private and not mine):
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        asks_for_a_review = "create_pr=1" in self.path and token
        if write and not (mine and role == "write") and not asks_for_a_review:
            raise RefusedError(403, message="You don't have the rights to write here")
        return repo

    def _route(self, path: str) -> tuple[int, dict[str, str], bytes]:
        body = self._drain()
        if path == "/api/whoami-v2":
            name, role = self._user()
            return self._json({"type": "user", "name": name, "auth": {"accessToken": {"role": role}}})
        if path == "/api/validate-yaml":
            return self._validated(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/repos/delete":
            asked = json.loads(body)
            del self.hub.repos[f"{asked['organization']}/{asked['name']}"]
            return self._json({})
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            if hashlib.sha256(body).hexdigest() != found[1]:
                raise RefusedError(400, message="The content is not that of this name")
            self.hub.objects[found[1]] = body
            return self._json({})
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._repo(found[1], write=True)
            return self._batch(json.loads(body))
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
            return self._resolve(self._repo(found[1]), found[2], found[3])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/(.+))?)?", path):
            kind = found[2] or "revision"
            action = getattr(self, f"_do_{kind.replace('-', '_')}", None)
            if action is None:
                raise RefusedError(404, message="Not found")
            return action(found[1], found[3] or "main", body)
        raise RefusedError(404, message="Not found")

    def _create(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        name, role = self._user()
        owner = asked.get("organization") or name
        if owner != name or role != "write":
            raise RefusedError(403, message="You don't have the rights to create a model under this namespace")
        repo_id = f"{owner}/{asked['name']}"
        if repo_id in self.hub.repos:
            raise RefusedError(409, message="You already created this model repo")
        self.hub.create(repo_id, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return self._json({"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id})

    def _batch(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        objects = []
        for one in asked["objects"]:
            described = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.objects:
                described["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}"}}
            objects.append(described)
        return self._json({"transfer": "basic", "objects": objects})

    def _at(self, repo_id: str, revision: str) -> tuple[Repo, str]:
        repo = self._repo(repo_id)
        oid = repo.find(revision)
        if oid is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, oid

    def _do_revision(self, repo_id: str, revision: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        repo, oid = self._at(repo_id, revision)
        names = [{"rfilename": name} for name in repo.commits[oid]]
        card = repo.commits[oid].get("README.md", b"").decode()
        data = {"license": found[1]} if (found := re.search(r"^license: (\S+)$", card, re.MULTILINE)) else {}
        about = {"id": repo_id, "sha": oid, "private": repo.private, "gated": repo.gated, "tags": [], "cardData": data}
        return self._json({**about, "siblings": names})

    def _do_auth_check(self, repo_id: str, kind: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self._repo(repo_id, write=kind == "write")
        return self._json({})

    def _validated(self, card: str) -> tuple[int, dict[str, str], bytes]:
        """Check the metadata of a card as far as a hub's own rules are known."""
        found = re.match(r"---\n(.*?)\n---(?:\n|$)", card, re.DOTALL)
        try:
            data = yaml.safe_load(found[1]) if found else {}
            wrong = [] if isinstance(data, dict) else ["the metadata are not a mapping"]
        except yaml.YAMLError as error:
            data, wrong = {}, [str(error)]
        if not wrong:
            wrong += [
                f'"{key}" must be a string'
                for key in ("license", "license_name", "pipeline_tag")
                if not isinstance(data.get(key, ""), str)
            ]
            wrong += [
                f'"{key}" must be an array'
                for key in ("datasets", "metrics", "tags")
                if not isinstance(data.get(key, []), list)
            ]
            names = data.get("base_model", [])
            wrong += [
                f'"base_model" with value "{one}" is not valid'
                for one in ([names] if isinstance(names, str) else names)
                if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", one)
            ]
        answer = json.dumps({"errors": [{"message": one} for one in wrong], "warnings": []}).encode()
        return (400 if wrong else 200), {"Content-Type": "application/json"}, answer

    def _do_tree(self, repo_id: str, revision: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        repo = self._repo(repo_id)
        # A branch may have slashes, and so may the folder behind it.
        steps = revision.split("/")
        splits = (("/".join(steps[:n]), "/".join(steps[n:])) for n in range(len(steps), 0, -1))
        ref, inside = next(((ref, inside) for ref, inside in splits if repo.find(ref)), (revision, ""))
        repo, oid = self._at(repo_id, ref)
        listed = {
            name: content for name, content in repo.commits[oid].items() if not inside or name.startswith(f"{inside}/")
        }
        if inside and not listed:
            raise RefusedError(404, "EntryNotFound", f"{inside} does not exist on {ref}")
        asked = parse_qs(urlparse(self.path).query)
        if asked.get("recursive", ["true"])[0].lower() in ("false", "0"):
            depth = inside.count("/") + 1 if inside else 0
            listed = {name: content for name, content in listed.items() if name.count("/") == depth}
        start = int(asked.get("cursor", ["0"])[0])
        page = [self._listed(name, content) for name, content in [*listed.items()][start : start + self.hub.page]]
        status, headers, answer = self._json(page)
        if start + self.hub.page < len(listed):
            address = f"{self.hub.endpoint}{urlparse(self.path).path}"
            recursive = asked.get("recursive", ["true"])[0]
            headers["Link"] = f'<{address}?recursive={recursive}&cursor={start + self.hub.page}>; rel="next"'
        return status, headers, answer

    def _listed(self, name: str, content: bytes) -> dict[str, Any]:
        blob, sha256 = ids(content)
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
        return entry | (
            {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}} if _large(name, len(content)) else {}
        )

    def _do_preupload(self, repo_id: str, revision: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self._repo(repo_id, write=True)
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if _large(one["path"], one["size"]) else "regular",
                "shouldIgnore": False,
            }
            for one in json.loads(body)["files"]
        ]
        return self._json({"files": files})

    def _do_branch(self, repo_id: str, name: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        repo = self._repo(repo_id, write=True)
        if name in repo.refs:
            raise RefusedError(409, message="Reference already exists")
        repo.refs[name] = repo.refs["main"]
        return self._json({})

    def _do_discussions(self, repo_id: str, rest: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        repo = self._repo(repo_id)
        if not self.hub.pull_requests:
            raise RefusedError(404, message="Not found")
        made = {
            "title": "",
            "author": {"name": self._user()[0]},
            "createdAt": "2026-01-01T00:00:00.000Z",
            "status": "open",
            "repo": {"name": repo_id, "type": "model"},
            "isPullRequest": True,
        }
        listed = [{**made, "num": int(ref.rpartition("/")[2])} for ref in repo.refs if ref.startswith("refs/pr/")]
        return self._json({"discussions": listed, "count": len(listed), "start": 0})

    def _do_commit(self, repo_id: str, revision: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        repo = self._repo(repo_id, write=True)
        review = parse_qs(urlparse(self.path).query).get("create_pr") == ["1"]
        if review and not self.hub.pull_requests:
            raise RefusedError(403, message="Discussions are disabled for this repo")
        lines = [json.loads(line) for line in body.splitlines()]
        parent, asked = repo.find(revision), lines[0]["value"]
        if parent is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if not review and asked.get("parentCommit") not in (None, parent):
            raise RefusedError(412, message="A commit has happened since. Please refresh and try again.")
        files = dict(repo.commits[parent])
        for line in lines[1:]:
            one = line["value"]
            if line["key"] == "file":
                files[one["path"]] = base64.b64decode(one["content"])
            elif line["key"] == "lfsFile":
                if one["oid"] not in self.hub.objects:
                    raise RefusedError(400, message=f"The large file {one['path']} was not uploaded")
                files[one["path"]] = self.hub.objects[one["oid"]]
            elif line["key"] == "deletedFile":
                del files[one["path"]]
        ref = f"refs/pr/{1 + sum(ref.startswith('refs/pr/') for ref in repo.refs)}" if review else unquote(revision)
        oid = repo.commit(ref, files, asked["summary"])
        url = f"{self.hub.endpoint}/{repo_id}"
        request = {"pullRequestUrl": f"{url}/discussions/{ref.rpartition('/')[2]}"} if review else {}
        return self._json({"commitOid": oid, "commitUrl": f"{url}/commit/{oid}", **request})

    def _resolve(self, repo: Repo, revision: str, name: str) -> tuple[int, dict[str, str], bytes]:
        oid = repo.find(revision)
        if oid is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if repo.gated:
            raise RefusedError(403, "GatedRepo", "Access to this model is restricted")
        if name not in repo.commits[oid]:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        content = repo.commits[oid][name]
        return 200, {"X-Repo-Commit": oid, "ETag": f'"{ids(content)[_large(name, len(content))]}"'}, content


def _large(name: str, size: int) -> bool:
    return name.endswith(".safetensors") or size > 10_000_000


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that were killed."""


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Start a hub at a free port of this machine; `shutdown` and `server_close` end it."""
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
