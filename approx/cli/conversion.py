"""Commands that plan and convert: mechanisms, inspect, plan, convert, revert."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.layers import layer_table, settings_text
from approx.cli.terminal import Terminal, table

_PANEL = "Convert"
_STEPS = 7


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(app, _PANEL, "approx mechanisms", "approx mechanisms --family gpt2")(mechanisms)
    command(app, _PANEL, "approx inspect quickstart", "approx inspect bert-base-uncased --json")(inspect)
    command(
        app,
        _PANEL,
        "approx plan quickstart -m improved-clustered --set clusters=25 --lengths 512,2048",
        "approx plan quickstart -m local --layers 0 -o plan.yaml",
    )(plan)
    command(
        app,
        _PANEL,
        "approx convert quickstart -m local --set left=64 --set right=64 -o converted",
        "approx convert quickstart --plan plan.yaml --max-length 4096 -o longer",
    )(convert)
    command(app, _PANEL, "approx revert converted -o base")(revert)


def mechanisms(
    terminal: Terminal,
    family: Annotated[
        str | None, typer.Option(help="Also show which mechanisms fit this family, e.g. bert or gpt2.")
    ] = None,
) -> None:
    """List the mechanisms with what they support, when they are exact, and their papers."""
    from approx.planning.support import support

    rows = support(family)
    abilities = ("bidirectional", "causal", "trainable")
    marks = [*abilities, *([] if family is None else ["fits"])]
    headings = [*abilities, *([] if family is None else [f"fits {family}"])]
    matrix = table(
        ["mechanism", *headings, "decodes from", "padding", "gradient", "compiles"],
        [
            [
                row["name"],
                *("yes" if row[mark] else "–" for mark in marks),
                row["decode_state"] if row["decode"] else "–",
                row["padding"],
                row["gradient"],
                "whole" if row["compiles"] == "whole" else "as one operator",
            ]
            for row in rows
        ],
    )
    papers = table(
        ["mechanism", "settings", "exact when", "source"],
        [[row["name"], settings_text(row["settings"]), row["exact_when"], row["source"]] for row in rows],
    )
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["compiles"], []).append(row["name"])
    reasons.pop("whole", None)
    notes = [f"Compiled as one operator: {', '.join(names)}. {reason}" for reason, names in reasons.items()]
    terminal.result(rows, matrix, *notes, papers)


def inspect(
    terminal: Terminal, model: options.Model, revision: options.Revision = None, offline: options.Offline = False
) -> None:
    """Show a checkpoint's architecture and its attention sites; only its config is read."""
    from approx import api

    checkpoint = api.inspect(model, revision=revision, offline=offline)
    state = "converted" if checkpoint["converted"] else "stock"
    head = (
        f"{checkpoint['name']}: {checkpoint['architecture']} ({checkpoint['family']}, {state}), {checkpoint['parameters']:,} parameters, "
        f"positions: {checkpoint['positions'] or 'no limit'}"
    )
    sites = layer_table(
        [{**part, "heads": part["group"], "counted": _heads(part)} for part in checkpoint["layers"]],
        {
            "heads": lambda line: line[0]["counted"],
            "head size": lambda line: str(line[0]["head_dim"]),
            "kind": lambda line: "causal" if line[0]["causal"] else "bidirectional",
        },
        verbose=terminal.verbose,
    )
    notes = [f"Made by: {_entry(entry)}" for entry in checkpoint["history"]]
    if checkpoint["cross_attention"]:
        notes.append(f"{checkpoint['cross_attention']} cross-attention modules always stay exact.")
    terminal.result(checkpoint, head, sites, *notes)


def plan(
    terminal: Terminal,
    model: options.Model,
    mechanism: options.Mechanism = None,
    set_: options.Settings = None,
    layers: options.Layers = "all",
    heads: options.Heads = "all",
    plan_file: options.PlanFile = None,
    exact_below: options.ExactBelow = 0,
    recompute: options.Recompute = False,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to count the cost at, in tokens.")
    ] = "128,512,2048,8192",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this YAML or JSON file.")
    ] = None,
    force: options.Force = False,
    revision: options.Revision = None,
    offline: options.Offline = False,
) -> None:
    """Show which layers a plan changes, its cost at each length, and the ceiling: the speed without attention."""
    from approx import api
    from approx_kernels.runtime.atomic_file import write_whole

    chosen = options.read_plan(mechanism, set_, layers, heads, plan_file, exact_below, recompute)
    counted = options.read_numbers(lengths, "--lengths")
    options.check_output(output, force)
    prediction = api.plan(model, chosen, counted, revision=revision, offline=offline)
    costs = table(
        ["tokens", "GFLOP outside", "GFLOP exact", "GFLOP planned", "MB exact", "MB planned", "predicted", "ceiling"],
        [
            [
                str(cost["length"]),
                *(f"{cost[key] / 1e9:.2f}" for key in ("flops_outside", "flops_exact", "flops_planned")),
                *(f"{cost[key] / 1e6:.2f}" for key in ("memory_exact", "memory_planned")),
                *(f"{cost[key]:.2f}×" for key in ("speedup", "ceiling")),
            ]
            for cost in prediction["costs"]
        ],
        title="Counted operations of one forward pass of one sequence; `approx bench` measures its time",
    )
    if output is not None:
        write_whole(output, chosen.to_json() if output.suffix == ".json" else chosen.to_yaml())
        terminal.note(f"Plan written to {output}")
    terminal.result(
        prediction, layer_table(prediction["layers"], {}, verbose=terminal.verbose), costs, *prediction["warnings"]
    )


def convert(
    terminal: Terminal,
    model: options.Model,
    output: options.Out,
    mechanism: options.Mechanism = None,
    set_: options.Settings = None,
    layers: options.Layers = "all",
    heads: options.Heads = "all",
    plan_file: options.PlanFile = None,
    exact_below: options.ExactBelow = 0,
    recompute: options.Recompute = False,
    calibrate: options.Calibrate = None,
    max_length: options.MaxLength = None,
    force: options.Force = False,
    revision: options.Revision = None,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    bundle_kernels: options.BundleKernels = False,
) -> None:
    """Replace the attention of a checkpoint and write a verified folder that stock transformers can load."""
    from approx.cli.figures import checks_table
    from approx.conversion import convert as conversion

    chosen = options.read_plan(mechanism, set_, layers, heads, plan_file, exact_below, recompute)
    with terminal.progress() as bar:
        done = iter(range(_STEPS))
        receipt = conversion.convert(
            model, output, chosen, max_length=max_length, calibrate=calibrate, force=force, revision=revision,
            offline=offline, allow_pickle=allow_pickle, bundle_kernels=bundle_kernels,
            progress=lambda step: bar(f"convert: {step}", next(done, _STEPS - 1), _STEPS),
        )  # fmt: skip
    left = [f"Left exact: layers {', '.join(map(str, receipt['left']))}"] if receipt["left"] else []
    terminal.result(
        {"output": str(output), **receipt},
        _swapped(terminal, receipt),
        f"Layer errors measured on {receipt['measured_on']}.",
        checks_table(receipt["checks"]),
        *left,
        *(f"Warning: {warning}" for warning in receipt["warnings"]),
        f"Written to {output}",
    )
    for note in receipt["notes"]:
        terminal.note(note)


def revert(terminal: Terminal, folder: options.Model, output: options.Out, force: options.Force = False) -> None:
    """Restore the base checkpoint of a converted folder, bit-identical if nothing was trained."""
    from approx.conversion import convert as conversion

    conversion.revert(folder, output, force=force)
    terminal.result({"output": str(output)}, f"Base checkpoint of {folder} written to {output}")


def _swapped(terminal: Terminal, receipt: dict[str, Any]) -> Any:
    # Errors are measured per layer: where heads differ, they are shown beside the first group.
    first = {part["layer"]: part["heads"] for part in reversed(receipt["swapped"])}

    def figures(by_layer: dict[int, float]) -> Callable[[list[dict[str, Any]]], str]:
        def cell(line: list[dict[str, Any]]) -> str:
            layers = [part["layer"] for part in line if part["heads"] == first[part["layer"]]]
            values = sorted({f"{by_layer[layer]:.3f}" for layer in layers if layer in by_layer})
            return " … ".join(values[:1] + values[1:][-1:]) or ("–" if layers else "")

        return cell

    more = {"relative output error": figures(receipt["errors"])}
    if receipt["captured_mass"]:
        more["captured mass"] = figures(receipt["captured_mass"])
    return layer_table(receipt["swapped"], more, verbose=terminal.verbose)


def _heads(site: dict[str, Any]) -> str:
    shared = "" if site["heads"] == site["key_heads"] else f" ({site['key_heads']} for keys)"
    return f"{site['heads']}{shared}"


def _entry(entry: dict[str, Any]) -> str:
    if entry["action"] == "finetune":
        on = entry["task"] or "plain text"
        return f"finetune from {entry['base']['name']}: {','.join(entry['recover'])} on {on}, {entry['steps']:,} steps (approx {entry['approx']})"
    rules = "; ".join(
        f"{rule['mechanism']} on layers {rule['layers']}{_of_heads(rule)} {settings_text(rule.get('settings') or {})}".strip()
        for rule in entry["plan"]
    )
    longer = f", positions extended to {entry['max_length']}" if entry.get("max_length") else ""
    text = f", calibrated on {entry['calibration']['name']}" if entry.get("calibration") else ""
    return f"{entry['action']} from {entry['base']['name']}: {rules}{longer}{text} (approx {entry['approx']})"


def _of_heads(rule: dict[str, Any]) -> str:
    return f", heads {rule['heads']}" if "heads" in rule else ""
