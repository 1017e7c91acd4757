"""A repository on a hub: what it holds, whether a push is allowed, what it would change, and what a hub's errors mean."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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

from approx.checkpoints.manifest import MANIFEST
from approx.conversion.convert import CARD, inherited
from approx.errors import ApproxError, Exit, shown
from approx.pushing.folder import Checked
from approx.pushing.privacy import is_private, private_here

_QUOTA = re.compile(r"quota|storage|limit|billing|payment|too large", re.IGNORECASE)
# How the client reports a card that the hub does not accept.
_REJECTED = "Invalid metadata in README.md"
_AGAIN = "Run the same command again: what was uploaded is not uploaded twice."
_MOST = 200


@contextlib.contextmanager
def hub_errors(doing: str, repo: str, *, create_pr: bool = False) -> Iterator[None]:
    """Turn errors of the hub's client into an `ApproxError`.

    Args:
        doing: What is being done, such as "Uploading".
        repo: Model id.
        create_pr: Whether a pull request is being opened.

    Raises:
        ApproxError: in place of the client's errors.
    """
    try:
        yield
    except (ApproxError, KeyboardInterrupt):
        raise
    except Exception as error:
        # The client's version decides which HTTP library raises, and uploads wrap its errors.
        chain = _chain(error)
        answered = next((one for one in chain if isinstance(one, errors.HfHubHTTPError)), None)
        if _REJECTED in str(error):
            # The client's message lists the mistakes; the response adds nothing.
            answered = None
        said = " ".join(_clean(str(one)) for one in chain)
        made = _answered(answered, doing, repo, said, create_pr=create_pr) if answered else _silent(error, doing, said)
        raise made from error


def _silent(error: Exception, doing: str, said: str) -> ApproxError:
    """The error if the hub did not answer, or the client cannot read its answer."""
    if "xet" in said and "404" in said:
        return ApproxError(
            f"{doing}: {constants.ENDPOINT} has no Xet storage, through which the client uploads. Set "
            "HF_HUB_DISABLE_XET=1 and run the same command again.",
            Exit.UNAVAILABLE,
        )
    if isinstance(error, errors.LocalTokenNotFoundError):
        return no_token()
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return ApproxError(
            f"{doing} needs the hub, but HF_HUB_OFFLINE is set. Unset it, or see what would be pushed with --dry-run.",
            Exit.UNAVAILABLE,
        )
    if "LFS batch" in said and _QUOTA.search(said):
        return _quota(doing, said)
    if _REJECTED in said:
        return ApproxError(
            f"{doing}: the hub rejects the model card ({said[:_MOST]}). Correct the card of the base, and convert "
            "again.",
            Exit.VERIFICATION,
        )
    return ApproxError(
        f"{doing}: {constants.ENDPOINT} cannot be reached or breaks off ({type(error).__name__}: {said[:_MOST]}). "
        f"Check the network and HF_ENDPOINT. {_AGAIN}",
        Exit.UNAVAILABLE,
    )


def _answered(error: errors.HfHubHTTPError, doing: str, repo: str, said: str, *, create_pr: bool) -> ApproxError:
    """The error for an answer with a status."""
    status = error.response.status_code
    why = _clean(error.server_message or "").rstrip(".")
    because = f" ({why})" if why else ""
    if "xet" in str(error.response.url) and status == 404:
        return _silent(error, doing, "xet 404")
    if isinstance(error, errors.GatedRepoError):
        return ApproxError(
            f"{doing}: {repo} is gated, and this token has no access. Accept its terms at {constants.ENDPOINT}/{repo}, "
            "then run the same command again.",
            Exit.UNAVAILABLE,
        )
    if status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
        return ApproxError(
            f"{doing}: {constants.ENDPOINT} does not accept the token. Get a new one with `hf auth login`, or correct "
            "HF_TOKEN.",
            Exit.UNAVAILABLE,
        )
    if create_pr and status in (400, 403, 404, 405, 501) and not isinstance(error, errors.RepositoryNotFoundError):
        return ApproxError(
            f"{doing}: {repo} takes no pull requests{because}. Leave out --create-pr, and name a branch with "
            "--revision if you like.",
            Exit.UNSUPPORTED,
        )
    if status in (402, 413, 507) or (status == 403 and _QUOTA.search(why)):
        return _quota(doing, why or f"status {status}")
    if status == 403:
        return no_access(repo, because)
    if isinstance(error, errors.RevisionNotFoundError):
        return ApproxError(f"{doing}: {repo} has no such revision{because}. Leave out --revision.", Exit.UNAVAILABLE)
    if isinstance(error, errors.RepositoryNotFoundError):
        return ApproxError(
            f"{doing}: {repo} was not found, or this token has no access to it. Check the name and the token.",
            Exit.UNAVAILABLE,
        )
    if status in (409, 412):
        return changed(repo)
    if status == 429:
        return ApproxError(
            f"{doing}: {constants.ENDPOINT} takes no more calls for now (429){because}. Wait some minutes. {_AGAIN}",
            Exit.UNAVAILABLE,
        )
    return ApproxError(f"{doing}: {constants.ENDPOINT} failed with {status}{because}. {_AGAIN}", Exit.UNAVAILABLE)


def no_token() -> ApproxError:
    """The error without a token."""
    return ApproxError(
        "Pushing needs an access token, and there is none. Run `hf auth login`, or set HF_TOKEN.", Exit.UNAVAILABLE
    )


def no_access(repo: str, because: str = "") -> ApproxError:
    """The error of a token that may not write."""
    return ApproxError(
        f"This token may not write to {repo}{because}. Take one with write access, push to your own namespace, or "
        "offer the files with --create-pr.",
        Exit.UNAVAILABLE,
    )


def changed(repo: str) -> ApproxError:
    """The error of a repository that changed while it was compared."""
    return ApproxError(
        f"{repo} changed while this push ran, so nothing was written over it. Run the same command again and look at "
        "what it shows.",
        Exit.REFUSED,
    )


def _quota(doing: str, why: str) -> ApproxError:
    return ApproxError(
        f"{doing}: the hub has no room for these files ({why[:_MOST].rstrip('.')}). Free or buy storage there, or push "
        "to another namespace.",
        Exit.UNAVAILABLE,
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _clean(text: str) -> str:
    """One line, without the token: a server may echo it."""
    token = get_token()
    return " ".join((text.replace(token, "…") if token else text).split())


_FIELDS = ("license", "license_name", "license_link", "language")
# The hub's form: `apache-2.0`; `en`, `zh-Hant` or `multilingual`.
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]+)*|multilingual|code")


def stated(base_model: str | None, license: str | None, language: str | Sequence[str] | None) -> dict[str, Any]:
    """Fields of a card that the user states.

    Raises:
        ApproxError: if one is not valid on the hub.
    """
    fields: dict[str, Any] = {}
    if base_model is not None:
        try:
            validate_repo_id(base_model)
        except errors.HFValidationError:
            raise ApproxError(
                f"--base-model is {shown(base_model)}, which no model of the hub is called. The form is owner/name."
            ) from None
        fields |= {"base_model": base_model, "base_model_relation": "finetune"}
    if license is not None:
        if not _LICENCE.fullmatch(license):
            raise ApproxError(
                f"--license is {shown(license)}, but the hub's names of licences are like apache-2.0, mit or other."
            )
        fields["license"] = license
    languages = [language] if isinstance(language, str) else [*(language or [])]
    if wrong := [one for one in languages if not _LANGUAGE.fullmatch(one)]:
        raise ApproxError(f"--language is {shown(wrong[0])}; give codes such as en, de or zh-Hant, or multilingual.")
    if languages:
        fields["language"] = languages[0] if len(languages) == 1 else languages
    return fields


def licence(checked: Checked, said: Mapping[str, Any], *, public: bool) -> dict[str, Any]:
    """Fields that the hub's card of the base adds to a card without a licence.

    Args:
        checked: The folder.
        said: What the user states, from `stated`.
        public: Whether the model becomes public.

    The hub is asked only if the folder's card has no licence, or if the model becomes public.

    Raises:
        ApproxError: if the base is gated and the push public, or its card may not be read, or the hub does not answer.
    """
    base = said.get("base_model") or (checked.base.name if checked.base.revision else None)
    known = "license" in {**inherited(checked.opened.source.folder / CARD), **said}
    if base is None or (known and not public):
        return {}
    return licence_from_hub(base, public=public)


def licence_from_hub(base: str, *, public: bool) -> dict[str, Any]:
    """Licence and language of a base on the hub; empty if it is no longer there.

    Raises:
        ApproxError: if the base is gated and the push public, or its card may not be read, or the hub does not answer.
    """
    with hub_errors("Reading the licence of the base", base):
        try:
            info = HfApi().model_info(base)
        except errors.GatedRepoError:
            raise
        except errors.RepositoryNotFoundError:
            # It was deleted or is private to others, so go on without its fields.
            return {}
    if info.gated and public:
        raise ApproxError(
            f"The base {base} is gated: its owner decides who gets it, so a model made from it is not pushed with "
            "--public. Push it privately, or ask the owner.",
            Exit.REFUSED,
        )
    said = info.card_data.to_dict() if info.card_data else {}
    return {key: said[key] for key in _FIELDS if said.get(key)}


def unlicensed(staged: Path) -> list[str]:
    """A note if the card of a folder has no licence."""
    if "license" in inherited(staged / CARD):
        return []
    return ["No licence is known, so the card names none, and nobody else may use the model."]


MAIN = "main"
_REQUESTS = "refs/pr/"


@dataclass
class RemoteState:
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
        deleted: Paths of an earlier push that are no longer in the folder.
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
            raise no_token()
        with hub_errors("Signing in", self.repo):
            who = self.api.whoami()
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read" and not reads_only:
            raise no_access(self.repo, " (its role is 'read')")
        return str(who.get("name"))

    def state(self, revision: str | None = None) -> RemoteState:
        """The files and the newest commit of the branch: those of main for a new branch, none for a new repository."""
        asked = revision or self.revision
        with hub_errors("Reading the repository", self.repo):
            try:
                info = self.api.repo_info(self.repo)
            except errors.GatedRepoError:
                raise
            except errors.RepositoryNotFoundError:
                return RemoteState()
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
        return RemoteState(at.sha, bool(info.private), files, exists=True, branch=branch)

    def refuse_unwritable(self, state: RemoteState) -> None:
        """Check that the token may write to the repository; a new one is not checked.

        Raises:
            ApproxError: if it may not.
        """
        if not state.exists:
            return
        with hub_errors("Signing in", self.repo):
            try:
                self.api.auth_check(self.repo, write=True)
            except errors.HfHubHTTPError as error:
                # Some hubs lack this endpoint; there the upload fails instead.
                if error.response.status_code in (401, 403):
                    raise no_access(self.repo) from error

    def changes(self, folder: Path, state: RemoteState) -> Changes:
        """Compare a folder with what a branch holds."""
        local = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        sealed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        unchanged = [
            name for name, path in local.items() if name in state.files and self._same(path, state, name, sealed)
        ]
        earlier = self.manifest(state)
        return Changes(
            [name for name in local if name not in unchanged],
            sorted(name for name in earlier if name in state.files and name not in local),
            unchanged,
        )

    def edited(self, state: RemoteState, changes: Changes) -> list[str]:
        """Files of an earlier push that were edited on the hub since, and that this push would write over or delete."""
        earlier = self.manifest(state)
        return [
            name
            for name in [*changes.written, *changes.deleted]
            if name in earlier and name in state.files and not self._has(state, name, earlier[name])
        ]

    def manifest(self, state: RemoteState) -> dict[str, str]:
        """Path -> sha256 of the files of an earlier push; empty without one."""
        if MANIFEST not in state.files:
            return {}
        try:
            return dict(json.loads(self.read(state, MANIFEST))["files"])
        except (ValueError, KeyError, TypeError):
            return {}

    def read(self, state: RemoteState, name: str) -> bytes:
        """The content of a file."""
        with hub_errors(f"Reading {name}", self.repo):
            return Path(hf_hub_download(self.repo, name, revision=state.commit or self.revision)).read_bytes()

    def create(self, state: RemoteState, *, private: bool, create_pr: bool) -> RemoteState:
        """Create the repository and the branch if they do not exist."""
        with hub_errors("Creating the repository", self.repo):
            if not state.exists:
                self.api.create_repo(self.repo, private=private, exist_ok=True)
            if not create_pr and self.revision != MAIN and not state.branch:
                self.api.create_branch(self.repo, branch=self.revision, exist_ok=True)
        return state if state.branch else self.state()

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
        with hub_errors("Uploading", self.repo, create_pr=create_pr):
            return self.api.create_commit(
                self.repo,
                operations,
                commit_message=message,
                revision=revision or self.revision,
                create_pr=create_pr,
                parent_commit=parent,
            )

    def pull_requests(self, user: str) -> list[str]:
        """Branches of the user's open pull requests; empty if the hub does not list them."""
        try:
            listed = self.api.get_repo_discussions(
                self.repo, author=user, discussion_type="pull_request", discussion_status="open"
            )
            return [f"{_REQUESTS}{one.num}" for one in listed]
        except Exception:
            # A failure shows when one is opened.
            return []

    def download(self, commit: str, folder: Path) -> Path:
        """Download a commit into an empty folder, past the client's cache."""
        with hub_errors("Downloading what was pushed", self.repo):
            return Path(snapshot_download(self.repo, revision=commit, local_dir=folder, token=get_token()))

    def _same(self, path: Path, state: RemoteState, name: str, sealed: dict[str, str]) -> bool:
        entry = state.files[name]
        if entry.size != path.stat().st_size:
            return False
        if entry.lfs is not None:
            return entry.lfs.sha256 == sealed.get(name)
        content = path.read_bytes()
        if entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest():
            return True
        # Some hubs have other blob ids than git.
        return self.read(state, name) == content

    def _has(self, state: RemoteState, name: str, digest: str) -> bool:
        entry = state.files[name]
        return (
            entry.lfs.sha256 if entry.lfs is not None else hashlib.sha256(self.read(state, name)).hexdigest()
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


def refuse_bad_words(repo: str, revision: str | None, message: str | None) -> None:
    """Check the arguments of a push without a network.

    Raises:
        ApproxError: if `repo` is not owner/name, the revision is empty, or the message holds something private.
    """
    refuse_bad_names(repo, revision)
    if is_private(message or "", private_here()):
        raise ApproxError("The message holds a secret or a path of this machine. Write one that everybody may read.")


def check_permission(
    repo: str, *, base: str | None, public: bool = False, create_pr: bool = False, revision: str | None = None
) -> None:
    """Ask the hub in advance whether a push would be allowed.

    Args:
        repo, public, create_pr, revision: As for `approx.push`.
        base: Model id of the base, if it is from the hub.

    Raises:
        ApproxError: if the hub cannot be reached, there is no token or it may not write, the repository holds another
            model or is public unexpectedly, or the base is gated and the push public.
    """
    hub = Remote(repo, revision)
    hub.user(reads_only=create_pr)
    refuse_surprises(hub, hub.state(), public=public, create_pr=create_pr, force=False)
    if base is not None and public:
        licence_from_hub(base, public=True)


def refuse_surprises(hub: Remote, state: RemoteState, *, public: bool, create_pr: bool, force: bool) -> None:
    """Raise if the token may not write, or the repository is unexpectedly public or holds another model."""
    if state.exists and not state.private and not public:
        raise ApproxError(
            f"{hub.repo} exists and is public, but pushes are private without --public. Say --public, or choose "
            "another name.",
            Exit.REFUSED,
        )
    ours = MANIFEST in state.files
    models = [name for name in state.files if name == "config.json" or name.endswith((".safetensors", ".bin"))]
    if models and not ours and not force:
        raise ApproxError(
            f"{hub.repo} holds another model ({models[0]}) that approx did not push. Choose another name, or write "
            "over it with --force.",
            Exit.REFUSED,
        )
    if not create_pr:
        hub.refuse_unwritable(state)
