"""Datasets of the hub, or a plain answer within seconds why there is none."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from approx.errors import ApproxError, Exit

_PATIENCE_SECONDS = 5.0


def load_rows(dataset: str, config: str, split: str) -> Any:
    """Load one split of a hub dataset, from the local cache where the hub cannot be reached.

    Args:
        dataset: Its id, `nyu-mll/glue`.
        config: Its configuration, `sst2`.
        split: As the dataset names it, `validation`.

    Returns:
        A `datasets.Dataset`.

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
        return load_dataset(dataset, config, split=split)
    except (OSError, ValueError, HfHubHTTPError, DatasetsError) as error:
        if offline:
            reason = "offline mode is on, and it is not in the local cache"
        elif not online:
            reason = f"{settings.HF_ENDPOINT} cannot be reached, and it is not in the local cache"
        else:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ApproxError(
            f"The dataset {asked} could not be loaded: {reason}. "
            "Give the official files with --data DIR, or load the dataset once with a network.",
            Exit.UNAVAILABLE,
        ) from None
    finally:
        settings.HF_HUB_OFFLINE = offline


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
