"""Turn what a hub or the network answers into one sentence that says what to do."""

import contextlib
import re
from collections.abc import Iterator

from huggingface_hub import constants, errors, get_token

from approx.errors import ApproxError, Exit

_QUOTA = re.compile(r"quota|storage|limit|billing|payment|too large", re.IGNORECASE)
# How the client reports a card that the hub does not accept.
_REJECTED = "Invalid metadata in README.md"
_AGAIN = "Run the same command again: what was uploaded is not uploaded twice."
_MOST = 200


@contextlib.contextmanager
def told(doing: str, repo: str, *, create_pr: bool = False) -> Iterator[None]:
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
        # Which HTTP library raises depends on the version of the client, and uploads wrap its errors.
        chain = _chain(error)
        answered = next((one for one in chain if isinstance(one, errors.HfHubHTTPError)), None)
        if _REJECTED in str(error):
            # The client names the mistakes itself; the answer behind it has no more.
            answered = None
        said = " ".join(_clean(str(one)) for one in chain)
        made = _answered(answered, doing, repo, said, create_pr=create_pr) if answered else _silent(error, doing, said)
        raise made from error


def _silent(error: Exception, doing: str, said: str) -> ApproxError:
    """The error if the hub answered nothing, or nothing that the client understands."""
    if "xet" in said and "404" in said:
        return ApproxError(
            f"{doing}: {constants.ENDPOINT} has no Xet storage, through which the client uploads. Set HF_HUB_DISABLE_XET=1 and "
            "run the same command again.",
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
            f"{doing}: the hub rejects the model card ({said[:_MOST]}). Correct the card of the base, and convert again.",
            Exit.VERIFICATION,
        )
    return ApproxError(
        f"{doing}: {constants.ENDPOINT} cannot be reached or breaks off ({type(error).__name__}: {said[:_MOST]}). Check the network "
        f"and HF_ENDPOINT. {_AGAIN}",
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
            f"{doing}: {repo} is gated, and this token has no access. Accept its terms at {constants.ENDPOINT}/{repo}, then run "
            "the same command again.",
            Exit.UNAVAILABLE,
        )
    if status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
        return ApproxError(
            f"{doing}: {constants.ENDPOINT} does not accept the token. Get a new one with `hf auth login`, or correct HF_TOKEN.",
            Exit.UNAVAILABLE,
        )
    if create_pr and status in (400, 403, 404, 405, 501) and not isinstance(error, errors.RepositoryNotFoundError):
        return ApproxError(
            f"{doing}: {repo} takes no pull requests{because}. Leave out --create-pr, and name a branch with --revision if you like.",
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
        f"This token may not write to {repo}{because}. Take one with write access, push to your own namespace, or offer the files "
        "with --create-pr.",
        Exit.UNAVAILABLE,
    )


def changed(repo: str) -> ApproxError:
    """The error of a repository that changed while it was compared."""
    return ApproxError(
        f"{repo} changed while this push ran, so nothing was written over it. Run the same command again and look at what it "
        "shows.",
        Exit.REFUSED,
    )


def _quota(doing: str, why: str) -> ApproxError:
    return ApproxError(
        f"{doing}: the hub has no room for these files ({why[:_MOST].rstrip('.')}). Free or buy storage there, or push to another "
        "namespace.",
        Exit.UNAVAILABLE,
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _clean(text: str) -> str:
    """One line, without the token, which a server could repeat."""
    token = get_token()
    return " ".join((text.replace(token, "…") if token else text).split())
