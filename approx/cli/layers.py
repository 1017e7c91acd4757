"""Layers as people read them: those in a row that are alike in one line, each on its own with --verbose."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from approx.cli.terminal import table


def layer_table(
    sites: Sequence[dict[str, Any]], more: dict[str, Callable[[list[dict[str, Any]]], str]], *, verbose: bool
) -> Table:
    """Which layer has which mechanism.

    Args:
        sites: One entry a layer, in their order, with `layer`, `mechanism` (None is exact), `settings` and `path`.
        more: Further columns: heading -> what to say of the entries of one line.
        verbose: A line for each layer, with the module it is.
    """

    def alike(site: dict[str, Any]) -> Any:
        return site["layer"] if verbose else (site["mechanism"], repr(site["settings"]))

    lines = [list(group) for _, group in groupby(sites, key=alike)]
    columns = ["layers", "mechanism", "settings", *more, *(["module"] if verbose else [])]
    rows = [
        [
            _span([site["layer"] for site in line]),
            line[0]["mechanism"] or "exact",
            settings_text(line[0]["settings"]),
            *(say(line) for say in more.values()),
            *([line[0]["path"]] if verbose else []),
        ]
        for line in lines
    ]
    return table(columns, rows)


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as a person would type them; unset ones are chosen by the mechanism for each input."""
    return ", ".join(f"{name}={'auto' if value is None else value}" for name, value in sorted(settings.items()))


def _span(layers: list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
