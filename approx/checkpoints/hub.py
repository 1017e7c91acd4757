"""Download checkpoints from the hub, or report quickly why that fails."""

from pathlib import Path

from huggingface_hub import HfApi, errors, snapshot_download

from approx.errors import ApproxError, Exit

_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.py", "*.md", "*.jinja"]
# Licences have all kinds of names.
_PATTERNS += [
    "[Ll][Ii][Cc][Ee]*",
    "[Nn][Oo][Tt][Ii][Cc][Ee]*",
    "[Cc][Oo][Pp][Yy][Ii][Nn][Gg]*",
    "[Uu][Ss][Ee]_[Pp][Oo][Ll]*",
]
# A converted folder has its code beside the weights; what is in folders below has nothing to do with it.
_IGNORED = ["*/*.py"]
# Some networks drop packets silently, and the client would wait for minutes by default.
_SECONDS = 10


def download(name: str, *, revision: str | None, offline: bool, allow_pickle: bool) -> tuple[Path, str]:
    """Download a model from the hub into the local cache.

    Args:
        name: Model id.
        revision: Branch, tag or commit; None for the main branch.
        offline: Whether to use only the cache.
        allow_pickle: Whether to download pickled weights too.

    Returns:
        The local folder, and the commit.

    Raises:
        ApproxError: if it does not exist, access is denied, or the hub does not answer.
    """
    asked, reachable = revision, True
    try:
        if not offline:
            revision, reachable = _commit(name, revision)
        patterns = [*_PATTERNS, "pytorch_model*.bin"] if allow_pickle else _PATTERNS
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED,
                local_files_only=offline or not reachable,
            )
        )
    except errors.RepositoryNotFoundError:
        raise ApproxError(
            f"'{name}' was not found, or you have no access: it is not a local folder, and the hub does not list it. "
            "Check the name; for a private model run `hf auth login` or set HF_TOKEN.",
            Exit.UNAVAILABLE,
        ) from None
    except errors.RevisionNotFoundError:
        raise ApproxError(
            f"'{name}' has no revision '{asked}'. Leave --revision out, or name one.", Exit.UNAVAILABLE
        ) from None
    except errors.HFValidationError:
        raise ApproxError(
            f"'{name}' is neither a folder nor a valid model id of the hub (owner/name).", Exit.UNAVAILABLE
        ) from None
    except errors.LocalEntryNotFoundError:
        why = "(--offline)" if offline else "either, and the hub cannot be reached"
        raise ApproxError(
            f"'{name}' is not a local folder, and it is not in the hub's local cache {why}. Give the path of a folder, or "
            "connect to the network.",
            Exit.UNAVAILABLE,
        ) from None
    except Exception as error:
        # Which HTTP library raises here depends on the version of the client.
        raise ApproxError(
            f"'{name}' could not be downloaded: {type(error).__name__}: {' '.join(str(error).split())[:200]} Try again; finished "
            "downloads stay in the cache.",
            Exit.UNAVAILABLE,
        ) from error
    return folder, folder.name


def listed(name: str, commit: str) -> list[str] | None:
    """Names of all files that a commit of a repository holds; None if the hub does not answer.

    Args:
        name: Model id.
        commit: The commit.
    """
    try:
        found = HfApi().model_info(name, revision=commit, timeout=_SECONDS).siblings
    except Exception:
        # Whatever went wrong, the list is not known.
        return None
    return [one.rfilename for one in found or []]


def _commit(name: str, revision: str | None) -> tuple[str | None, bool]:
    """The commit of a revision, and whether the hub answered; if not, the cache may still have it."""
    try:
        return HfApi().model_info(name, revision=revision, timeout=_SECONDS).sha, True
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception:
        # Any network or server error: fall back to the cache, whose error mentions the network.
        return revision, False
