"""Commands before anything is measured: mechanisms, inspect, plan, convert, revert."""

from pathlib import Path
from typing import Annotated, Any

import typer

from approx.cli import options
from approx.cli.terminal import Terminal, command, table
from approx.errors import ApproxError, Exit

_PANEL = "Convert"


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(app, _PANEL, "approx mechanisms --family gpt2")(mechanisms)
    command(app, _PANEL, "approx inspect quickstart")(inspect)
    command(
        app, _PANEL, "approx plan quickstart -m improved-clustered --set clusters=25 --lengths 512,2048 -o plan.yaml"
    )(plan)
    command(app, _PANEL, "approx convert quickstart -m local --set left=64 --layers 0 -o converted")(convert)
    command(app, _PANEL, "approx revert converted -o base")(revert)


def mechanisms(
    terminal: Terminal,
    family: Annotated[str | None, typer.Option(help="Say what fits this family, e.g. bert or gpt2.")] = None,
) -> None:
    """List the mechanisms: what each can do, where it is exact, and its paper."""
    from approx.conversion.support import support

    rows = support(family)
    abilities = ("bidirectional", "causal", "decode", "trainable")
    matrix = table("mechanism", *abilities, *([f"fits {family}"] if family else []), "settings")
    papers = table("mechanism", "exact when", "source")
    for row in rows:
        marks = ["yes" if row[key] else "–" for key in abilities]
        marks += ["yes" if row["fits"] else "no"] if family else []
        matrix.add_row(row["name"], *marks, _settings(row["settings"]))
        papers.add_row(row["name"], row["exact_when"], row["source"])
    terminal.result(rows, matrix, papers)


def inspect(
    terminal: Terminal, model: options.Model, revision: options.Revision = None, offline: options.Offline = False
) -> None:
    """Say what a checkpoint is and where its attention lives, from its config alone."""
    from approx.pipeline import stages

    found = stages.inspect(model, revision=revision, offline=offline)
    state = "converted" if found["converted"] else "stock"
    limit = found["positions"] or "no limit"
    head = (
        f"{found['name']}: {found['architecture']} ({found['family']}, {state}), {found['parameters']:,} parameters, "
        f"positions: {limit}"
    )
    sites = table("layer", "module", "heads", "head size", "kind", "mechanism", "settings")
    for site in found["layers"]:
        shared = "" if site["heads"] == site["key_heads"] else f" ({site['key_heads']} for keys)"
        sites.add_row(
            str(site["layer"]), site["path"], f"{site['heads']}{shared}", str(site["head_dim"]), "causal" if site["causal"] else "bidirectional",
            site["mechanism"] or "exact", _settings(site["settings"]),
        )  # fmt: skip
    notes = (
        [f"{found['cross_attention']} cross-attention modules always stay exact."] if found["cross_attention"] else []
    )
    terminal.result(found, head, sites, *notes)


def plan(
    terminal: Terminal,
    model: options.Model,
    mechanism: options.Mechanism = None,
    set_: options.Settings = None,
    layers: options.Layers = "all",
    plan_file: options.PlanFile = None,
    exact_below: options.ExactBelow = 0,
    lengths: Annotated[str, typer.Option(help="Tokens to count the cost at.")] = "128,512,2048,8192",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this YAML or JSON file.")
    ] = None,
    force: options.Force = False,
    revision: options.Revision = None,
    offline: options.Offline = False,
) -> None:
    """Show what a plan does to each layer, what it costs at each length, and the most that attention can gain."""
    from approx.pipeline import stages

    chosen = options.read_plan(mechanism, set_, layers, plan_file, exact_below)
    found = stages.plan(model, chosen, options.read_numbers(lengths, "--lengths"), revision=revision, offline=offline)
    layers_planned = table("layer", "module", "mechanism", "settings")
    for row in found["layers"]:
        layers_planned.add_row(str(row["layer"]), row["path"], row["mechanism"] or "exact", _settings(row["settings"]))
    costs = table(
        "tokens", "GFLOP outside", "GFLOP exact", "GFLOP planned", "MB exact", "MB planned", "predicted", "ceiling",
        title="One forward pass of one sequence, counted; `approx bench` measures it",
    )  # fmt: skip
    for c in found["costs"]:
        giga = [f"{c[key] / 1e9:.2f}" for key in ("flops_outside", "flops_exact", "flops_planned")]
        mega = [f"{c[key] / 1e6:.2f}" for key in ("memory_exact", "memory_planned")]
        costs.add_row(str(c["length"]), *giga, *mega, f"{c['speedup']:.2f}×", f"{c['ceiling']:.2f}×")
    terminal.result(found, layers_planned, costs, *found["warnings"])
    if output is not None:
        if output.exists() and not force:
            raise ApproxError(
                f"{output} exists already. Choose another file, or replace it with --force.", Exit.REFUSED
            )
        output.write_text(chosen.to_json() if output.suffix == ".json" else chosen.to_yaml(), encoding="utf-8")
        terminal.note(f"Plan written to {output}")


def convert(
    terminal: Terminal,
    model: options.Model,
    output: options.Out,
    mechanism: options.Mechanism = None,
    set_: options.Settings = None,
    layers: options.Layers = "all",
    plan_file: options.PlanFile = None,
    exact_below: options.ExactBelow = 0,
    max_length: options.MaxLength = None,
    force: options.Force = False,
    revision: options.Revision = None,
    offline: options.Offline = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Accept pickled weights; they can run code.")
    ] = False,
) -> None:
    """Exchange the attention of a checkpoint and write a folder that stock transformers loads, verified."""
    from approx.conversion import make

    chosen = options.read_plan(mechanism, set_, layers, plan_file, exact_below)
    steps = 8
    with terminal.progress() as bar:
        done = iter(range(steps))
        receipt = make.convert(
            model, output, chosen, max_length=max_length, force=force, revision=revision, offline=offline,
            allow_pickle=allow_pickle, progress=lambda step: bar(f"convert: {step}", next(done, steps), steps),
        )  # fmt: skip
    swapped = table("layer", "mechanism", "settings", "relative output error")
    for site in receipt["swapped"]:
        swapped.add_row(
            str(site["layer"]),
            site["mechanism"],
            _settings(site["settings"]),
            f"{receipt['errors'][site['layer']]:.3f}",
        )
    checks = table("check", "", "found")
    for check in receipt["checks"]:
        checks.add_row(
            check["name"], {True: "passed", False: "FAILED", None: "does not apply"}[check["passed"]], check["detail"]
        )
    left = (
        f"Left exact: layers {', '.join(map(str, receipt['left']))}." if receipt["left"] else "No layer was left exact."
    )
    terminal.result({"output": str(output), **receipt}, swapped, checks, left, f"Written to {output}")
    for note in receipt["notes"]:
        terminal.note(note)


def revert(terminal: Terminal, folder: options.Model, output: options.Out, force: options.Force = False) -> None:
    """Write the base checkpoint of a converted folder again, bit-identical if nothing was trained."""
    from approx.conversion import make

    make.revert(folder, output, force=force)
    terminal.result({"output": str(output)}, f"The base checkpoint of {folder} is written to {output}")


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "–"
