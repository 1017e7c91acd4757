"""Datasets of the hub, or a plain answer within seconds why there is none."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from approx.errors import ApproxError, Exit

_PATIENCE_SECONDS = 5.0


def load_rows(dataset: str, config: str, split: str, *, streaming: bool = False) -> Any:
    """Load one split of a hub dataset, from the local cache where the hub cannot be reached.

    Args:
        dataset: Its id, `nyu-mll/glue`.
        config: Its configuration, `sst2`.
        split: As the dataset names it, `validation`.
        streaming: Download rows as they are read and keep none; otherwise all splits of the configuration are downloaded.

    Returns:
        A `datasets.Dataset`, or for streaming a `datasets.IterableDataset`; read that one through `streamed`.

    Raises:
        ApproxError: if it is neither on the hub nor in the cache, with the reason.
    """
    # Slow to import, and tasks on local files need none of it.
    from datasets import config as settings
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    asked = f"{dataset} ({config}, {split})"
    offline = settings.HF_HUB_OFFLINE
    online = not offline and reachable(settings.HF_ENDPOINT)
    # Otherwise every file would be tried several times before the cache is looked at: half a minute.
    settings.HF_HUB_OFFLINE = not online
    try:
        return load_dataset(dataset, config, split=split, streaming=streaming)
    except (OSError, ValueError, HfHubHTTPError, DatasetsError) as error:
        absent = "" if streaming else ", and it is not in the local cache"
        if offline:
            reason = f"offline mode is on{absent}"
        elif not online:
            reason = f"{settings.HF_ENDPOINT} cannot be reached{absent}"
        else:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ApproxError(
            f"The dataset {asked} could not be loaded: {reason}. Give the official files with --data DIR, or "
            f"{'connect to the network' if streaming else 'load the dataset once with a network'}.",
            Exit.UNAVAILABLE,
        ) from None
    finally:
        settings.HF_HUB_OFFLINE = offline


def read_rows(dataset: str, config: str, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
    """The rows of a split of a hub dataset, one by one; streamed, no more is downloaded than what is read.

    Raises:
        ApproxError: as `load_rows` and `streamed` do.
    """
    rows = load_rows(dataset, config, split, streaming=streaming)
    yield from streamed(rows, dataset) if streaming else rows


def streamed(rows: Any, dataset: str) -> Iterator[dict[str, Any]]:
    """The rows of a dataset that is downloaded while it is read.

    Raises:
        ApproxError: if the download breaks off.
    """
    try:
        yield from rows
    # What the libraries for the many kinds of storage raise has nothing in common.
    except Exception as error:
        raise ApproxError(
            f"The download of {dataset} broke off: {' '.join(str(error).split())[:200] or type(error).__name__}. Try again, or "
            "give the official files with --data DIR.",
            Exit.UNAVAILABLE,
        ) from error


def reachable(endpoint: str) -> bool:
    """Whether a hub answers at all, within seconds."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError:
        # A refusal is an answer.
        return True
    except OSError:
        return False
    return True
