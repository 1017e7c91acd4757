"""The state of the hub of the tests: repositories, large files, tokens, and what goes wrong."""

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote

Files = dict[str, bytes]


@dataclass
class Fault:
    """What goes wrong, and where.

    Attributes:
        where: Regular expression for "METHOD path".
        status: Status of the answer; 0 cuts the connection without one.
        code: The hub's X-Error-Code.
        message: The hub's X-Error-Message.
        times: How often; the calls after that succeed.
        seconds: Time before anything is answered.
        after: Whether the call is carried out before it fails, as when only the answer is lost.
    """

    where: str
    status: int = 0
    code: str = ""
    message: str = ""
    times: int = 1_000
    seconds: float = 0.0
    after: bool = False


@dataclass
class Repo:
    """A repository: commits by id, and what branches and pull requests point to."""

    private: bool
    gated: bool | str = False
    commits: dict[str, Files] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, files: Files, message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message} {ref}".encode()).hexdigest()
        self.commits[oid], self.refs[ref] = files, oid
        self.messages.append(message)
        return oid

    def find(self, revision: str) -> str | None:
        revision = unquote(revision)
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The state of the hub.

    Attributes:
        tokens: Token -> name of its owner and its role.
        repos: Id -> repository.
        objects: sha256 -> content of a large file.
        faults: What goes wrong.
        calls: "METHOD path" of every call.
        pull_requests: Whether they are possible.
        page: Files in one page of a listing.
    """

    tokens: dict[str, tuple[str, str]] = field(default_factory=dict)
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    pull_requests: bool = True
    page: int = 1_000
    endpoint: str = ""

    def create(self, repo_id: str, *, private: bool = True, gated: bool | str = False) -> Repo:
        repo = self.repos[repo_id] = Repo(private, gated)
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return repo

    def uploads(self) -> list[str]:
        """Calls that change something."""
        return [call for call in self.calls if re.match(r"PUT|POST .*(/commit/|/create$|/branch/)", call)]


# Every page of a tree asks for them again, and a hub computes them once.
@lru_cache(64)
def ids(content: bytes) -> tuple[str, str]:
    """Git's id of a file, and its SHA-256."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), hashlib.sha256(content).hexdigest()
