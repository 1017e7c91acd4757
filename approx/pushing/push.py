"""Push a converted folder to a hub, or write what would be pushed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from approx.pushing.licence import stated
from approx.pushing.rehearsal import rehearse
from approx.pushing.upload import Progress, Upload, upload_folder


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
    progress: Progress = lambda step, done, total: None,
) -> dict[str, Any]:
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
        dry_run: A folder to write what would be pushed into; nothing is sent.
        force: Whether files that were edited on the hub, or an existing `dry_run`, are written over.
        offline: With `dry_run`: whether the hub may not be asked for the licence of the base.
        agree: Called with what would be uploaded; false stops the push before anything is written.
        progress: Called with step, done and total.

    Returns:
        The outcome: url, commit, uploaded, identical, …; with `dry_run` the folder, its files and the card.

    Raises:
        ApproxError: if the folder, a record, the token or the repository is refused, the hub fails, or what comes back computes
            something else (exit code 6).
    """
    said = stated(base_model, license, language)
    paths = [Path(record) for record in records]
    if dry_run is not None:
        return rehearse(
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
        folder, repo, records=paths, public=public, create_pr=create_pr, revision=revision, message=message, force=force,
        said=said, agree=agree, progress=progress,
    )  # fmt: skip
