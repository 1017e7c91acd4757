"""A repository on a hub: what it holds, what a push would change, upload and download. Everything through huggingface_hub."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    errors,
    get_token,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.utils import validate_repo_id

from approx.errors import ApproxError
from approx.pushing import refusals
from approx.pushing.refusals import told
from approx.seam.manifest import MANIFEST

MAIN = "main"
_REQUESTS = "refs/pr/"


@dataclass
class Held:
    """What a branch of a repository holds.

    Attributes:
        commit: Its newest commit; None if it has none.
        private: Whether the repository is private.
        files: Path -> entry of huggingface_hub.
        exists: Whether the repository exists.
        branch: Whether the branch exists; a new one begins with the files of main.
    """

    commit: str | None = None
    private: bool = True
    files: dict[str, Any] = field(default_factory=dict)
    exists: bool = False
    branch: bool = False


@dataclass
class Changes:
    """What a push changes.

    Attributes:
        written: Paths that are new or differ.
        deleted: Paths of an earlier push that the folder has no longer.
        kept: Paths that are the same.
    """

    written: list[str]
    deleted: list[str]
    kept: list[str]


class Remote:
    """One repository of the hub at HF_ENDPOINT, with the token of the environment or of `hf auth login`."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo, self.revision, self.api = repo, revision or MAIN, HfApi()

    @property
    def pull_request(self) -> str | None:
        """Address of the pull request whose branch is written to; None for other branches."""
        number = self.revision.removeprefix(_REQUESTS)
        return f"{self.api.endpoint}/{self.repo}/discussions/{number}" if number != self.revision else None

    def user(self, *, reads_only: bool) -> str:
        """Name of the token's owner; the first call, so that a missing network or token shows at once.

        Raises:
            ApproxError: if there is no token, it is not valid, or it may only read and `reads_only` is false.
        """
        if get_token() is None:
            raise refusals.no_token()
        with told("Signing in", self.repo):
            who = self.api.whoami()
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read" and not reads_only:
            raise refusals.no_access(self.repo, " (its role is 'read')")
        return str(who.get("name"))

    def held(self, revision: str | None = None) -> Held:
        """What the branch holds now; a new branch begins with what main holds, and without a repository there is nothing."""
        asked = revision or self.revision
        with told("Reading the repository", self.repo):
            try:
                info = self.api.repo_info(self.repo)
            except errors.GatedRepoError:
                raise
            except errors.RepositoryNotFoundError:
                return Held()
            at, branch = info, True
            try:
                if asked != MAIN:
                    at = self.api.repo_info(self.repo, revision=asked)
            except errors.RevisionNotFoundError:
                branch = False
            try:
                entries = self.api.list_repo_tree(self.repo, recursive=True, revision=at.sha or MAIN)
                files = {one.path: one for one in entries if hasattr(one, "size")}
            except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError):
                # Some hubs have no tree before the first commit.
                files = {}
        return Held(at.sha, bool(info.private), files, exists=True, branch=branch)

    def refuse_unwritable(self, held: Held) -> None:
        """Check that the token may write to the repository; a new one is not checked.

        Raises:
            ApproxError: if it may not.
        """
        if not held.exists:
            return
        with told("Signing in", self.repo):
            try:
                self.api.auth_check(self.repo, write=True)
            except errors.HfHubHTTPError as error:
                # Not every hub answers this question; then the upload does.
                if error.response.status_code in (401, 403):
                    raise refusals.no_access(self.repo) from error

    def changes(self, folder: Path, held: Held) -> Changes:
        """Compare a folder with what a branch holds."""
        own = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        sealed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        kept = [name for name, path in own.items() if name in held.files and self._same(path, held, name, sealed)]
        earlier = self.manifest(held)
        return Changes(
            [name for name in own if name not in kept],
            sorted(name for name in earlier if name in held.files and name not in own),
            kept,
        )

    def edited(self, held: Held, changes: Changes) -> list[str]:
        """Files of an earlier push that were edited on the hub since, and that this push would write over or delete."""
        earlier = self.manifest(held)
        return [
            name
            for name in [*changes.written, *changes.deleted]
            if name in earlier and name in held.files and not self._has(held, name, earlier[name])
        ]

    def manifest(self, held: Held) -> dict[str, str]:
        """Path -> sha256 of the files of an earlier push; empty without one."""
        if MANIFEST not in held.files:
            return {}
        try:
            return dict(json.loads(self.read(held, MANIFEST))["files"])
        except (ValueError, KeyError, TypeError):
            return {}

    def read(self, held: Held, name: str) -> bytes:
        """The content of a file."""
        with told(f"Reading {name}", self.repo):
            return Path(hf_hub_download(self.repo, name, revision=held.commit or self.revision)).read_bytes()

    def create(self, held: Held, *, private: bool, create_pr: bool) -> Held:
        """Create the repository and the branch if they do not exist."""
        with told("Creating the repository", self.repo):
            if not held.exists:
                self.api.create_repo(self.repo, private=private, exist_ok=True)
            if not create_pr and self.revision != MAIN and not held.branch:
                self.api.create_branch(self.repo, branch=self.revision, exist_ok=True)
        return held if held.branch else self.held()

    def commit(
        self,
        folder: Path,
        changes: Changes,
        message: str,
        *,
        parent: str | None,
        create_pr: bool = False,
        revision: str | None = None,
    ) -> Any:
        """Upload and commit; returns the client's information about the commit.

        Raises:
            ApproxError: if the branch is no longer at `parent`, or the upload fails. Nothing is committed then.
        """
        operations = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name)) for name in changes.written),
            *(CommitOperationDelete(path_in_repo=name) for name in changes.deleted),
        ]
        with told("Uploading", self.repo, create_pr=create_pr):
            return self.api.create_commit(
                self.repo, operations, commit_message=message, revision=revision or self.revision, create_pr=create_pr,
                parent_commit=parent,
            )  # fmt: skip

    def pull_requests(self, user: str) -> list[str]:
        """Branches of the user's open pull requests; empty if the hub does not list them."""
        try:
            listed = self.api.get_repo_discussions(
                self.repo, author=user, discussion_type="pull_request", discussion_status="open"
            )
            return [f"{_REQUESTS}{one.num}" for one in listed]
        except Exception:
            # Opening one gives the error.
            return []

    def download(self, commit: str, folder: Path) -> Path:
        """Download a commit into an empty folder, past the client's cache."""
        with told("Downloading what was pushed", self.repo):
            return Path(snapshot_download(self.repo, revision=commit, local_dir=folder, token=get_token()))

    def _same(self, path: Path, held: Held, name: str, sealed: dict[str, str]) -> bool:
        entry = held.files[name]
        if entry.size != path.stat().st_size:
            return False
        if entry.lfs is not None:
            return entry.lfs.sha256 == sealed.get(name)
        content = path.read_bytes()
        if entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest():
            return True
        # Not every hub names files as git does.
        return self.read(held, name) == content

    def _has(self, held: Held, name: str, digest: str) -> bool:
        entry = held.files[name]
        return (
            entry.lfs.sha256 if entry.lfs is not None else hashlib.sha256(self.read(held, name)).hexdigest()
        ) == digest


def refuse_bad_names(repo: str, revision: str | None) -> None:
    """Check a model id, without a network.

    Raises:
        ApproxError: if it is not owner/name.
    """
    try:
        validate_repo_id(repo)
        wrong = "" if repo.count("/") == 1 else "it has no owner"
    except errors.HFValidationError as error:
        wrong = " ".join(str(error).split()).rstrip(".")
    if wrong:
        raise ApproxError(f"'{repo}' is not the name of a repository: {wrong}. The form is owner/name.")
    if revision is not None and not revision.strip():
        raise ApproxError("--revision is empty. Name a branch, or leave it out.")


def endpoint() -> str:
    """Address of the hub."""
    return constants.ENDPOINT
