"""Open the two models of a comparison: the exact base, and what is compared with it."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from approx.checkpoints import checkpoint
from approx.errors import ApproxError
from approx.measuring.in_memory import in_memory
from approx.measuring.measure import open_all, under_exact_attention
from approx.planning import positions
from approx.recipe import BASE, CEILING


def open_pair(
    model: str | Any,
    against: str | Any | None,
    device: str,
    dtype: str,
    offline: bool,
    processor: Any = None,
    *,
    reads: bool = True,
    merge_adapter: bool = False,
) -> dict[str, checkpoint.Checkpoint]:
    """Open a model and the base to compare it with.

    Args:
        model: A folder, a hub model id, or `quickstart`; or a loaded model.
        against: The base; by default the model's own weights under exact attention. None for a stock model opens it alone.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        offline: Whether to use only local files and the hub's cache.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        reads: Whether loaded models will read inputs, which takes a processor.
        merge_adapter: Whether an adapter of PEFT beside the weights, or one whose folder is given, is merged into them.

    Returns:
        `exact` -> the base, then the label of the model -> the model.

    Raises:
        ApproxError: if one cannot be loaded, or the base is converted.
    """

    def opened(label: str, one: str | Any) -> checkpoint.Checkpoint:
        if not isinstance(one, str):
            return in_memory(one, processor, offline=offline, reads=reads)
        return open_all({label: one}, device, dtype, offline=offline, merge_adapter=merge_adapter)[label]

    base, label = opened(BASE, model if against is None else against), label_of(model)
    if base.source.converted:
        if against is not None:
            raise ApproxError(
                f"--against {base.source.name} is converted itself. Name the exact checkpoint it was made from."
            )
        own = base if isinstance(model, str) else replace(base, model=copy.deepcopy(model))
        base = under_exact_attention(own)
    elif against is None:
        return {BASE: base}
    return {BASE: base, label: opened(label, model)}


def with_extended_base(opened: Mapping[str, checkpoint.Checkpoint]) -> tuple[dict[str, checkpoint.Checkpoint], str]:
    """Extend the position table of the base to that of what is compared with it, as `convert --max-length` does.

    Returns:
        The models, and a note for the record.

    Raises:
        ApproxError: if the base takes as long inputs already, or has no table that can be extended.
    """
    base = opened[BASE]
    limits = [positions.limit(one.model.config) for one in opened.values()]
    before, longest = limits[0], max((one for one in limits if one is not None), default=None)
    if before is None or longest is None or longest <= before:
        takes = "any length" if before is None else f"{before:,} positions"
        raise ApproxError(
            f"{base.source.name} takes {takes}, and nothing that is compared with it takes more. Leave out --extend-base."
        )
    positions.extendable(base.model.config, base.source.name, longest)
    model = copy.deepcopy(base.model)
    positions.resize(model, longest)
    note = f"positions of {BASE} extended from {before:,} to {longest:,}"
    return {**opened, BASE: replace(base, model=model)}, note


def label_of(model: str | Any) -> str:
    """Name of a model in tables and records: its path without the parent folders."""
    label = Path(model).resolve().name if isinstance(model, str) else type(model).__name__
    return label if label not in (BASE, CEILING) else f"{label} (converted)"
