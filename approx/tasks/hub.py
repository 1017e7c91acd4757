"""Load datasets from the hub, or report within seconds why they are not available."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from approx.errors import ApproxError, Exit

_PATIENCE_SECONDS = 5.0


def load_rows(dataset: str, config: str | None, split: str, *, streaming: bool = False) -> Any:
    """Load one split of a hub dataset, from the local cache if the hub cannot be reached.

    Args:
        dataset: Id of the dataset: `nyu-mll/glue`.
        config: Its configuration: `sst2`; None if it has only one.
        split: The dataset's own name of the split: `validation`.
        streaming: Download rows while they are read and store none; otherwise download all splits of the configuration.

    Returns:
        A `datasets.Dataset`, or for streaming a `datasets.IterableDataset`, to be read through `streamed`.

    Raises:
        ApproxError: if the dataset is neither on the hub nor in the cache, with the reason.
    """
    # Slow imports that tasks on local files do not need.
    from datasets import config as settings
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    wanted = f"{dataset} ({', '.join(filter(None, (config, split)))})"
    offline = settings.HF_HUB_OFFLINE
    online = not offline and reachable(settings.HF_ENDPOINT)
    # Otherwise every file is retried several times before the cache is used, which takes half a minute.
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
            f"The dataset {wanted} could not be loaded: {reason}. Give the official files with --data DIR, or "
            f"{'connect to the network' if streaming else 'load the dataset once with a network connection'}.",
            Exit.UNAVAILABLE,
        ) from None
    finally:
        settings.HF_HUB_OFFLINE = offline


def read_rows(dataset: str, config: str | None, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split of a hub dataset; when streaming, only the rows that are read are downloaded.

    Raises:
        ApproxError: see `load_rows` and `streamed`.
    """
    rows = load_rows(dataset, config, split, streaming=streaming)
    yield from streamed(rows, dataset) if streaming else rows


def streamed(rows: Any, dataset: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset while it downloads.

    Raises:
        ApproxError: if the download fails.
    """
    try:
        yield from rows
    # The libraries for the different kinds of storage have no common exception.
    except Exception as error:
        raise ApproxError(
            f"The download of {dataset} failed: {' '.join(str(error).split())[:200] or type(error).__name__}. Try "
            "again, or give the official files with --data DIR.",
            Exit.UNAVAILABLE,
        ) from error


def reachable(endpoint: str) -> bool:
    """Whether a hub responds within seconds."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError:
        # An error status is a response.
        return True
    except OSError:
        return False
    return True
