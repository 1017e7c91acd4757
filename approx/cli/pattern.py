"""The command that counts and draws sparse patterns: pattern."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from approx.cli import names, options
from approx.cli.command import command
from approx.cli.layers import settings_text
from approx.cli.tables import table
from approx.cli.terminal import Terminal


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Convert",
        "approx pattern ltr --length 1024",
        "approx pattern strided --length 4096 --set stride=64 --causal -o pictures",
        "approx pattern bigbird --length 2048 --measure --no-draw --json",
    )(pattern)


def pattern(
    terminal: Terminal,
    name: Annotated[
        str,
        typer.Argument(
            help="A mechanism that chooses keys by position, e.g. ltr or bigbird.",
            show_default=False,
            autocompletion=names.completed(names.mechanisms),
            callback=names.known("mechanism", names.mechanisms),
        ),
    ],
    length: Annotated[int, typer.Option("--length", "-n", help="Length in tokens, up to 8192.", show_default=False)],
    set_: options.Settings = None,
    causal: Annotated[bool, typer.Option("--causal", help="Use the causal form: queries see no later keys.")] = False,
    block: Annotated[int, typer.Option(min=1, help="Side of the counted tiles, in tokens.")] = 64,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for the pictures. Default: pattern-NAME-LENGTH.", show_default=False
        ),
    ] = None,
    no_draw: Annotated[bool, typer.Option("--no-draw", help="Write no pictures.")] = False,
    draw_length: Annotated[
        int,
        typer.Option(help="Length for drawing single pairs and paths if the pattern has more than 48 tokens."),
    ] = 16,
    node: Annotated[
        int | None, typer.Option(help="Highlight the paths of this position in the flow graph.", show_default=False)
    ] = None,
    force: options.Force = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also time the pattern against exact attention, with 12 heads of size 64.")
    ] = False,
    device: options.Device = "auto",
) -> None:
    """Count the pairs and tiles of a sparse pattern and draw its steps and information flow.

    Pictures of the steps and of the information-flow graph are written as SVG and PNG.
    """
    from approx.cli.figures import speed_tables
    from approx.patterns import find_pattern, study

    chosen = find_pattern(name, length, causal, options.read_settings(set_))
    folder = output or Path(f"pattern-{name}-{length}{'-causal' if causal else ''}")
    if not no_draw:
        study.refuse_existing(folder, force)
    timed_on = None
    if measure:
        # A slow import: torch and transformers.
        from approx.measuring.measure import choose_device

        timed_on = choose_device(device)
    files = [] if no_draw else study.draw(chosen, folder, length=draw_length, node=node)
    with terminal.progress() as bar:
        found = study.report(chosen, block=block, device=timed_on, progress=bar)
    written = [str(file) for file in files]
    drawn = [f"Pictures: {', '.join(written)}"] if files else []
    terminal.result(
        {**found.to_data(), "files": written},
        _counts(found.figures),
        _flow(found.figures),
        *speed_tables(found.speed),
        *drawn,
    )


def _counts(figures: dict[str, Any]) -> Table:
    several = len(figures["steps"]) > 1
    rows = [_row(f"step {number + 1}" if several else "", step) for number, step in enumerate(figures["steps"])]
    if several:
        rows += [_row("merged", figures["merged"]), ["sum of steps", f"{figures['edges']:,}", "", "", "", "", ""]]
    whole = figures["length"] ** 2
    form = "causal" if figures["causal"] else "bidirectional"
    rows.append(
        [f"exact, {form}", f"{figures['exact_edges']:,}", "", _share(figures["exact_edges"] / whole), "", "", ""]
    )
    settings = figures["settings"] | ({} if figures["stride"] is None else {"stride": figures["stride"]})
    tiles = f"tiles of {figures['block']}"
    return table(
        ["", "edges", "keys a query sees", "of all pairs", tiles, f"{tiles}, rewritten", ""],
        rows,
        title=f"{figures['pattern']} over {figures['length']:,} tokens, {form}: {settings_text(settings)}",
    )


def _row(name: str, counts: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{counts['edges']:,}",
        "{min} … {max}, mean {mean:.1f}".format(**counts["in_degree"]),
        _share(counts["density"]),
        _share(counts["block_density"]),
        _share(counts["rewritten"]["block_density"]),
        counts["rewritten"]["by"],
    ]


def _flow(figures: dict[str, Any]) -> Table:
    flow = figures["flow"]
    of = "earlier positions reached" if figures["causal"] else "positions reached"
    rows = [["the steps in their order" if len(figures["steps"]) > 1 else "one layer", _share(flow["coverage"])]]
    if flow["coverage_reversed"] is not None:
        rows.append(["the steps reversed", _share(flow["coverage_reversed"])])
        mode = figures["settings"].get("mode", "merged")
        rows += [
            [f"{number} layer{'s'[: number > 1]}, mode {mode}", _share(share)]
            for number, share in enumerate(flow["coverage_by_layer"], start=1)
        ]
    rows.append(["full information", "yes" if flow["full_information"] else "no"])
    for load in figures["load"]:
        between = f"after step {load['after_step']}" if len(figures["steps"]) > 1 else "between two layers"
        rows.append(
            [
                f"load of a position {between}",
                f"{_share(load['min'])} … {_share(load['max'])} (the most at {load['at']}), mean {_share(load['mean'])}",
            ]
        )
        rows.append([f"paths of a pair {between}", f"{load['ways']:.3g} on average"])
    return table(["information flow", of], rows)


def _share(value: float) -> str:
    return f"{100 * value:.3g} %" if value < 0.9995 or value == 1 else f"{100 * value:.6g} %"
