"""Write the folder that a push would upload, without uploading it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing, refuse_overlap
from approx.conversion.card import CARD
from approx.errors import ApproxError, Exit
from approx.pushing import folder, remote
from approx.pushing.licence import licence, unlicensed


def rehearse(
    name: str | Path,
    repo: str,
    out: Path,
    *,
    records: Sequence[Path] = (),
    public: bool = False,
    force: bool = False,
    offline: bool = False,
    said: Mapping[str, Any] = MappingProxyType({}),
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> dict[str, Any]:
    """Write the folder that a push would upload; nothing is sent.

    Args:
        name, repo, records, public, progress: As for `approx.push`.
        out: The folder to write.
        force: Whether an existing `out` is replaced.
        offline: Whether the hub may not be asked for the licence of the base.
        said: Fields of the card that the user states.

    Returns:
        The folder, its files with sizes, the card, and notes.

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
    return {
        "output": str(out),
        "files": dict(folder.tree(out)),
        "left": checked.left,
        "card": (out / CARD).read_text(encoding="utf-8"),
        "notes": checked.notes + notes + unlicensed(out),
    }
