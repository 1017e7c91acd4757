"""Datasets of the hub, or a plain answer within seconds why there is none."""

from __future__ import annotations

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
    # Both are slow to import, and tasks on local files need neither.
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    asked = f"{dataset} ({config}, {split})"
    offline = datasets.config.HF_HUB_OFFLINE
    reachable = not offline and _reachable(datasets.config.HF_ENDPOINT)
    # Otherwise every file would be tried several times before the cache is looked at: half a minute.
    datasets.config.HF_HUB_OFFLINE = not reachable
    try:
        return datasets.load_dataset(dataset, config, split=split)
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        if offline:
            reason = "offline mode is on, and it is not in the local cache"
        elif not reachable:
            reason = f"{datasets.config.HF_ENDPOINT} cannot be reached, and it is not in the local cache"
        else:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ApproxError(
            f"The dataset {asked} could not be loaded: {reason}. "
            "Give the official files with --data DIR, or load the dataset once with a network.",
            Exit.UNAVAILABLE,
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _reachable(endpoint: str) -> bool:
    import httpx

    try:
        httpx.head(endpoint, timeout=_PATIENCE_SECONDS)
    except httpx.HTTPError:
        return False
    return True
