"""Whether a push to a repository would be allowed: what can be known before there is a folder to push."""

from approx.errors import ApproxError, Exit
from approx.pushing.licence import told_by_the_hub
from approx.pushing.privacy import is_private, private_here
from approx.pushing.remote import Held, Remote, refuse_bad_names
from approx.seam.manifest import MANIFEST


def refuse_bad_words(repo: str, revision: str | None, message: str | None) -> None:
    """Check what a user says of a push, without a network.

    Raises:
        ApproxError: if `repo` is not owner/name, the revision is empty, or the message holds something private.
    """
    refuse_bad_names(repo, revision)
    if is_private(message or "", private_here()):
        raise ApproxError("The message holds a secret or a path of this machine. Write one that everybody may read.")


def check_permission(
    repo: str, *, base: str | None, public: bool = False, create_pr: bool = False, revision: str | None = None
) -> None:
    """Ask the hub whether a push would be allowed, long before it.

    Args:
        repo, public, create_pr, revision: As for `approx.push`.
        base: Model id of the base, if it is from the hub.

    Raises:
        ApproxError: if the hub cannot be reached, there is no token or it may not write, the repository holds another model or
            is public unexpectedly, or the base is gated and the push public.
    """
    hub = Remote(repo, revision)
    hub.user(reads_only=create_pr)
    refuse_surprises(hub, hub.held(), public=public, create_pr=create_pr, force=False)
    if base is not None and public:
        told_by_the_hub(base, public=True)


def refuse_surprises(hub: Remote, held: Held, *, public: bool, create_pr: bool, force: bool) -> None:
    """Raise if the token may not write, or the repository is public against the user's expectation, or is another model's."""
    if held.exists and not held.private and not public:
        raise ApproxError(
            f"{hub.repo} exists and is public, but pushes are private without --public. Say --public, or choose another name.",
            Exit.REFUSED,
        )
    ours = MANIFEST in held.files
    models = [name for name in held.files if name == "config.json" or name.endswith((".safetensors", ".bin"))]
    if models and not ours and not force:
        raise ApproxError(
            f"{hub.repo} holds another model ({models[0]}) that approx did not push. Choose another name, or write over it with --force.",
            Exit.REFUSED,
        )
    if not create_pr:
        hub.refuse_unwritable(held)
