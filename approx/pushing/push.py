"""Push a converted folder to a hub: check it, upload it, load it again; or write its files to a folder."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, overload

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing, refuse_overlap
from approx.checkpoints.manifest import MANIFEST, check_seal
from approx.conversion import verify
from approx.conversion.convert import CARD, Publication
from approx.errors import ApproxError, Exit
from approx.progress import Progress, silent
from approx.pushing import folder, remote
from approx.pushing.folder import Checked
from approx.pushing.remote import (
    Changes,
    Remote,
    RemoteState,
    licence,
    refuse_bad_words,
    refuse_surprises,
    stated,
    unlicensed,
)
from approx.version import __version__

_STEPS = 6
_PINNED = re.compile(r'"revision": "([0-9a-f]{7,64})"')
_CARD_FILES = (CARD, MANIFEST)


@dataclass(frozen=True)
class Upload:
    """What a push would do, shown before it does it.

    Attributes:
        repo: Model id.
        endpoint: The hub.
        revision: The branch.
        new: Whether the repository is created.
        private: Whether the repository is, or will be, private.
        create_pr: Whether a pull request is opened.
        files: Each file with its size in bytes.
        written: Names of the files that are new or differ.
        deleted: Names of files of an earlier push that are deleted.
        left: Names of files of the folder that are not pushed.
        card: Text of the model card.
        notes: What else the user should know.
    """

    repo: str
    endpoint: str
    revision: str
    new: bool
    private: bool
    create_pr: bool
    files: list[tuple[str, int]]
    written: list[str]
    deleted: list[str]
    left: list[str]
    card: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pushed:
    """The outcome of a push.

    Attributes:
        repo: Model id.
        url: Address of the model, or of the pull request.
        commit: Commit of the hub that holds the files.
        pull_request: Address of the pull request; None without one.
        private: Whether the repository is private.
        uploaded: Names of the files that were uploaded.
        deleted: Names of files of an earlier push that were deleted.
        identical: Whether the hub had the same files already, so that nothing was uploaded.
        check: How the outputs of the downloaded copy compare with those of the folder.
        notes: What else the user should know.
    """

    repo: str
    url: str
    commit: str | None
    pull_request: str | None
    private: bool
    uploaded: list[str]
    deleted: list[str]
    identical: bool
    check: str
    notes: list[str]

    @property
    def summary(self) -> str:
        """What happened, in a sentence."""
        if self.identical:
            return f"{self.url} is identical already; nothing was uploaded."
        return f"Pushed to {self.url} ({'private' if self.private else 'public'}), commit {self.commit}."


@dataclass(frozen=True)
class NotPushed:
    """The folder that a push would upload.

    Attributes:
        output: Its path.
        files: Each file with its size in bytes.
        left: Names of files of the converted folder that are not pushed.
        card: Text of the model card.
        notes: What else the user should know.
    """

    output: str
    files: dict[str, int]
    left: list[str]
    card: str
    notes: list[str]

    @property
    def summary(self) -> str:
        """What happened, in a sentence."""
        return f"Written to {self.output}; nothing was sent."


def upload_folder(
    name: str | Path,
    repo: str,
    *,
    records: Sequence[Path] = (),
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    force: bool = False,
    said: Mapping[str, Any] = MappingProxyType({}),
    agree: Callable[[Upload], bool] = lambda upload: True,
    progress: Progress = silent,
) -> Pushed:
    """Push a converted folder to a hub, download it again, and compare the outputs of both.

    Args:
        name: The folder.
        repo: Model id, owner/name; created if it does not exist.
        records: Records of this folder, whose results the card shows.
        public: Whether a new repository is public.
        create_pr: Whether to open a pull request instead of writing to the branch.
        revision: The branch; created if it does not exist.
        message: Message of the commit.
        force: Whether files that were edited on the hub, or belong to another model, are written over.
        said: Fields of the card that the user states.
        agree: Called with what will be done; false stops the push before anything is written.
        progress: Called with the step, steps done and steps in all.

    Returns:
        The outcome.

    Raises:
        ApproxError: if the folder, a record, the token or the repository is refused, the hub fails, or the downloaded copy
            computes something else (exit code 6).
    """
    refuse_bad_words(repo, revision, message)
    steps = iter(range(_STEPS))

    def step(what: str) -> None:
        progress(f"push: {what}", next(steps, _STEPS - 1), _STEPS)

    step("checking the folder")
    checked = folder.check(name)
    verify.begin()
    hub = Remote(repo, revision)
    step("signing in")
    user = hub.user(reads_only=create_pr)
    fields = licence(checked, said, public=public)
    with TemporaryDirectory(prefix="approx-push-") as temporary:
        staged = Path(temporary, "folder")
        staged.mkdir()
        published = folder.stage(checked, staged, repo, records, licence=fields, said=said, copies=False)
        step("comparing with the repository")
        state = _state(hub, user, staged, create_pr=create_pr)
        refuse_surprises(hub, state, public=public, create_pr=create_pr, force=force)
        published = _pinned(hub, state, checked, staged, published)
        changes = hub.changes(staged, state)
        # A new branch does not touch edits on main.
        if not (force or create_pr or not state.branch) and (edited := hub.edited(state, changes)):
            raise ApproxError(
                f"{repo} was edited on the hub since it was pushed: {', '.join(edited)}. Take the edits over, or write "
                "over them with --force.",
                Exit.REFUSED,
            )
        identical = state.branch and not (changes.written or changes.deleted) and published.revision is not None
        upload = _upload(hub, state, checked, staged, changes, public=public, create_pr=create_pr)
        if not identical and not agree(upload):
            raise ApproxError("Nothing was uploaded.", Exit.REFUSED)
        commit, request, ref = state.commit, hub.pull_request, hub.revision
        if not identical:
            step("uploading")
            words = message or f"Upload with approx {__version__}"
            commit, request, ref = _written(
                hub, state, checked, staged, changes, published, words, public=public, create_pr=create_pr
            )
        step("downloading and comparing")
        check = _compared(hub, checked, str(commit or ref), Path(temporary, "again"))
    return Pushed(
        repo=repo,
        url=request or f"{remote.endpoint()}/{repo}",
        commit=commit,
        pull_request=request,
        private=upload.private,
        uploaded=changes.written,
        deleted=changes.deleted,
        identical=identical,
        check=check.detail,
        notes=upload.notes,
    )


def _state(hub: Remote, user: str, staged: Path, *, create_pr: bool) -> RemoteState:
    """The state of the branch; for a pull request, of one left open with the same files by an interrupted push."""
    state = hub.state()
    for ref in hub.pull_requests(user) if create_pr and state.exists else []:
        other = hub.state(ref)
        if not set(hub.changes(staged, other).written) - set(_CARD_FILES):
            hub.revision = ref
            return other
    return state


def _pinned(hub: Remote, state: RemoteState, checked: Checked, staged: Path, published: Publication) -> Publication:
    """Pin the commit that the hub's card pins, if the model in that commit equals the local one."""
    if CARD not in state.files:
        return published
    found = _PINNED.search(hub.read(state, CARD).decode("utf-8", "replace"))
    candidates = [found[1]] if found else [state.commit] if state.commit else []
    for commit in candidates:
        try:
            then = hub.state(commit)
        except ApproxError:
            # The commit no longer exists: the history was squashed.
            continue
        if then.branch and not set(hub.changes(staged, then).written) - set(_CARD_FILES):
            pinned = replace(published, revision=commit)
            folder.pin(checked, staged, pinned)
            return pinned
    return published


def _upload(
    hub: Remote, state: RemoteState, checked: Checked, staged: Path, changes: Changes, *, public: bool, create_pr: bool
) -> Upload:
    notes = checked.notes + unlicensed(staged)
    if state.exists and state.private and public:
        notes.append(f"{hub.repo} exists and is private, and stays so; change that in its settings on the hub.")
    return Upload(
        repo=hub.repo,
        endpoint=remote.endpoint(),
        revision=hub.revision,
        new=not state.exists,
        private=state.private if state.exists else not public,
        create_pr=create_pr,
        files=folder.tree(staged),
        written=changes.written,
        deleted=changes.deleted,
        left=checked.left,
        card=(staged / CARD).read_text(encoding="utf-8"),
        notes=notes,
    )


def _written(
    hub: Remote,
    state: RemoteState,
    checked: Checked,
    staged: Path,
    changes: Changes,
    published: Publication,
    message: str,
    *,
    public: bool,
    create_pr: bool,
) -> tuple[str, str | None, str]:
    """Commit the files, and then the card that pins that commit; the commit, and the address and branch of a pull request."""
    opens = create_pr and hub.pull_request is None
    ready = hub.create(state, private=not public, create_pr=opens)
    commit, request, ref = ready.commit, hub.pull_request, hub.revision
    if published.revision is None:
        made = hub.commit(staged, changes, message, parent=ready.commit, create_pr=opens)
        commit, request = made.oid, made.pr_url
        ref = made.pr_revision or ref
        folder.pin(checked, staged, replace(published, revision=commit))
        changes = Changes(list(_CARD_FILES), [], [])
    elif not (changes.written or changes.deleted):
        # The new branch equals main.
        return str(commit), request, ref
    made = hub.commit(staged, changes, f"{message}: the card pins {str(commit)[:12]}", parent=commit, revision=ref)
    return made.oid, request, ref


def _compared(hub: Remote, checked: Checked, commit: str, target: Path) -> Any:
    """Download what was pushed, load it in a process without approx, and compare its outputs with those here."""
    downloaded = hub.download(commit, target)
    problem = ""
    try:
        check_seal(downloaded)
        check = verify.fresh_process(downloaded, checked.opened.model)
        problem = "" if check.passed else check.detail
    except ApproxError as error:
        check, problem = None, str(error)
    if problem:
        raise ApproxError(
            f"{hub.repo} was uploaded, but its downloaded copy differs: {problem} Push it again with --force.",
            Exit.VERIFICATION,
        )
    return check


def write_only(
    name: str | Path,
    repo: str,
    out: Path,
    *,
    records: Sequence[Path] = (),
    public: bool = False,
    force: bool = False,
    offline: bool = False,
    said: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress = silent,
) -> NotPushed:
    """Write the folder that a push would upload; nothing is sent.

    Args:
        name, repo, records, public, progress: As for `approx.push`.
        out: The folder to write.
        force: Whether an existing `out` is replaced.
        offline: Whether the hub may not be asked for the licence of the base.
        said: Fields of the card that the user states.

    Returns:
        The folder, its files and the card.

    Raises:
        ApproxError: if the folder or a record is refused, or `out` cannot be written.
    """
    remote.refuse_bad_names(repo, None)
    refuse_existing(out, force=force)
    progress("push: checking the folder", 0, 2)
    checked = folder.check(name)
    refuse_overlap(checked.opened.source.folder, out)
    try:
        fields, notes = ({} if offline else licence(checked, said, public=public)), []
    except ApproxError as error:
        if error.exit_code == Exit.REFUSED:
            raise
        fields, notes = {}, [str(error)]
    progress("push: writing", 1, 2)
    with atomic_folder(out, force=force) as target:
        folder.stage(checked, target, repo, records, licence=fields, said=said, copies=True)
    return NotPushed(
        output=str(out),
        files=dict(folder.tree(out)),
        left=checked.left,
        card=(out / CARD).read_text(encoding="utf-8"),
        notes=checked.notes + notes + unlicensed(out),
    )


@overload
def push(
    folder: str | Path,
    repo: str,
    *,
    records: Sequence[str | Path] = (),
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    dry_run: None = None,
    force: bool = False,
    offline: bool = False,
    agree: Callable[[Upload], bool] = lambda upload: True,
    progress: Progress = silent,
) -> Pushed: ...
@overload
def push(
    folder: str | Path,
    repo: str,
    *,
    records: Sequence[str | Path] = (),
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    dry_run: str | Path,
    force: bool = False,
    offline: bool = False,
    agree: Callable[[Upload], bool] = lambda upload: True,
    progress: Progress = silent,
) -> NotPushed: ...
def push(
    folder: str | Path,
    repo: str,
    *,
    records: Sequence[str | Path] = (),
    public: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    dry_run: str | Path | None = None,
    force: bool = False,
    offline: bool = False,
    agree: Callable[[Upload], bool] = lambda upload: True,
    progress: Progress = silent,
) -> Pushed | NotPushed:
    """Push a converted folder to the hub at HF_ENDPOINT, download it again, and compare the outputs of both.

    Args:
        folder: The converted folder.
        repo: Model id, owner/name; created if it does not exist.
        records: Records of this folder, whose results the card shows.
        public: Whether a new repository is public.
        create_pr: Whether to open a pull request instead of writing to the branch.
        revision: The branch; created if it does not exist.
        message: Message of the commit.
        base_model: Model id of the base on the hub, for a model that was converted from a local copy.
        license: The licence, by the hub's name; by default that of the base, where it is known.
        language: Codes of the languages; by default those of the base, where they are known.
        dry_run: A folder to write the files into instead of pushing them.
        force: Whether files that were edited on the hub, or an existing `dry_run`, are written over.
        offline: With `dry_run`: whether the hub may not be asked for the licence of the base.
        agree: Called with what would be uploaded; false stops the push before anything is written.
        progress: Called with step, done and total.

    Returns:
        The outcome; with `dry_run` the folder, its files and the card.

    Raises:
        ApproxError: if the folder, a record, the token or the repository is refused, the hub fails, or the downloaded copy
            computes something else (exit code 6).
    """
    said = stated(base_model, license, language)
    paths = [Path(record) for record in records]
    if dry_run is not None:
        return write_only(
            folder,
            repo,
            Path(dry_run),
            records=paths,
            public=public,
            force=force,
            offline=offline,
            said=said,
            progress=progress,
        )
    return upload_folder(
        folder,
        repo,
        records=paths,
        public=public,
        create_pr=create_pr,
        revision=revision,
        message=message,
        force=force,
        said=said,
        agree=agree,
        progress=progress,
    )
