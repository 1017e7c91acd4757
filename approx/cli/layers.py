"""Tables of layers; without --verbose, identical layers without others between them share a line."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from approx.cli.tables import table


def layer_table(
    parts: Sequence[Any],
    more: dict[str, Callable[[list[Any]], str]],
    *,
    verbose: bool,
    group: str = "heads",
    kind: Sequence[str] = (),
) -> Table:
    """The mechanism of each layer, or of each group of heads where they differ.

    Args:
        parts: One entry per layer or group of its heads, in order, with `layer`, `mechanism` (None is exact),
            `settings` and `path`.
        more: Further columns: heading -> function from the entries of a line to its cell.
        verbose: Show a line for each layer, with its module.
        group: The attribute of an entry that names its heads.
        kind: Attributes in which layers of one model may differ, besides their attention.
    """
    # Imported here, since it imports PyTorch.
    from approx.planning.anatomy import ranges

    layers = [list(same) for _, same in groupby(parts, key=lambda part: part.layer)]

    def alike(layer: list[Any]) -> Any:
        return (
            layer[0].layer
            if verbose
            else [[getattr(part, key) for key in (group, "mechanism", "settings", *kind)] for part in layer]
        )

    # Adjacent layers with the same groups of heads share one line per group.
    lines = [list(line) for _, run in groupby(layers, key=alike) for line in zip(*run, strict=True)]
    columns = ["layers", "mechanism", "settings", *more, *(["module"] if verbose else [])]
    rows = [
        [
            ranges(part.layer for part in line),
            (line[0].mechanism or "exact")
            + ("" if (heads := getattr(line[0], group)) == "all" else f" (heads {heads})"),
            settings_text(line[0].settings),
            *(cell(line) for cell in more.values()),
            *([line[0].path] if verbose else []),
        ]
        for line in lines
    ]
    return table(columns, rows)


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as typed on the command line; the mechanism chooses those that are `auto` for each input."""
    return ", ".join(f"{name}={'auto' if value is None else value}" for name, value in sorted(settings.items()))
