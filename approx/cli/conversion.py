"""Commands that plan and convert: inspect, plan, convert, revert."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.layers import layer_table, settings_text
from approx.cli.tables import table
from approx.cli.terminal import Terminal

if TYPE_CHECKING:
    from approx.checkpoints.history import Conversion, Receipt, Swapped, Training
    from approx.inspection import Inspected, Layer

_PANEL = "Convert"
_STEPS = 7


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(app, _PANEL, "approx inspect quickstart", "approx inspect bert-base-uncased --json")(inspect)
    command(
        app,
        _PANEL,
        "approx plan quickstart -m improved-clustered --set clusters=25 --lengths 512,2048",
        "approx plan quickstart -m local --layers 0 -o plan.yaml",
        "approx plan quickstart",
    )(plan)
    command(
        app,
        _PANEL,
        "approx convert quickstart -m local --set left=64 --set right=64 -o converted",
        "approx convert quickstart --plan plan.yaml --max-length 4096 -o longer",
    )(convert)
    command(app, _PANEL, "approx revert converted -o base")(revert)


def inspect(
    terminal: Terminal,
    model: options.Model,
    revision: options.Revision = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Show a checkpoint's architecture and its attention sites; only its config is read."""
    from approx import api

    checkpoint = api.inspect(model, revision=revision, offline=offline, merge_adapter=merge_adapter)
    state = "converted" if checkpoint.converted else "stock"
    head = (
        f"{checkpoint.name}: {checkpoint.architecture} ({checkpoint.family}, {state}), {checkpoint.parameters:,} parameters, "
        f"positions: {_positions(checkpoint)}"
    )
    sites = layer_table(
        checkpoint.layers,
        {
            "heads": lambda line: _heads(line[0]),
            "head size": lambda line: str(line[0].head_dim),
            "kind": lambda line: "causal" if line[0].causal else "bidirectional",
            "positions": lambda line: _always(line[0]) if checkpoint.fixed_positions is None else "",
            "window": lambda line: _window(line[0]),
        },
        verbose=terminal.verbose,
        group="group",
        kind=("heads", "key_heads", "head_dim", "causal", "fixed_positions", "window", "kept"),
    )
    notes = [f"Made by: {_entry(step)}" for step in checkpoint.history]
    notes += checkpoint.stays
    if checkpoint.cross_attention:
        notes.append(f"{checkpoint.cross_attention} cross-attention modules always stay exact.")
    terminal.result(checkpoint, head, sites, *notes)
    if checkpoint.converted:
        terminal.note(_measure(model))
    else:
        fitting = f"approx mechanisms --family {checkpoint.family}"
        terminal.note(f"Next: approx plan {shlex.quote(model)} -m NAME; `{fitting}` lists the mechanisms that fit.")


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
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Show which layers a plan changes, its cost at each length, and the ceiling: the speed without attention; without a plan only that."""
    from approx import api
    from approx.publishing import wording
    from approx_kernels.runtime.atomic_file import write_whole

    plain = (mechanism, plan_file, set_ or None, layers, heads, exact_below, recompute, output)
    chosen = None
    if plain != (None, None, None, "all", "all", 0, False, None):
        chosen = options.read_plan(mechanism, set_, layers, heads, plan_file, exact_below, recompute)
    counted = options.read_numbers(lengths, "--lengths")
    options.check_output(output, force)
    planned = api.plan(model, chosen, counted, revision=revision, offline=offline, merge_adapter=merge_adapter)
    costs = table(
        ["tokens", "GFLOP outside", "GFLOP exact", "GFLOP planned", "MB exact", "MB planned", "predicted", "ceiling"],
        [
            [
                wording.length(str(cost.length), cost.seconds),
                *(f"{flops / 1e9:.2f}" for flops in (cost.flops_outside, cost.flops_exact)),
                f"{cost.flops_planned / 1e9:.2f}" if chosen else "",
                f"{cost.memory_exact / 1e6:.2f}",
                f"{cost.memory_planned / 1e6:.2f}" if chosen else "",
                f"{cost.speedup:.2f}×" if chosen else "",
                f"{cost.ceiling:.2f}×",
            ]
            for cost in planned.costs
        ],
        title="Counted operations of one forward pass of one sequence, and its peak memory in float32 on top of weights and inputs; "
        "`approx bench` measures time and memory",
    )
    if chosen is None:
        terminal.result(planned.to_data(), costs, *planned.warnings)
        terminal.note(f"Next: {shlex.join(['approx', 'recommend', model])} --task NAME --data FILE")
        return
    if output is not None:
        write_whole(output, chosen.to_json() if output.suffix == ".json" else chosen.to_yaml())
        terminal.note(f"Plan written to {output}")
    terminal.result(
        planned.to_data(), layer_table(planned.layers, {}, verbose=terminal.verbose), costs, *planned.warnings
    )
    options_used = {
        "-m": mechanism,
        "--layers": layers,
        "--heads": heads,
        "--plan": plan_file,
        "--exact-below": exact_below,
    }
    defaults = {"--layers": "all", "--heads": "all", "--exact-below": 0}
    if output is not None:
        options_used, set_, recompute = {"--plan": output}, None, False
    words = [word for name, value in options_used.items() if value != defaults.get(name) for word in (name, str(value))]
    words += [word for setting in set_ or [] for word in ("--set", setting)] + ["--recompute"] * recompute
    terminal.note(f"Next: {shlex.join(['approx', 'convert', model, *words, '-o', 'converted'])}")


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
    merge_adapter: options.MergeAdapter = False,
    allow_pickle: options.AllowPickle = False,
    bundle_kernels: options.BundleKernels = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Replace the attention of a checkpoint and write a verified folder that stock transformers can load."""
    from approx.cli.figures import checks_table
    from approx.conversion import convert as conversion
    from approx.planning.anatomy import ranges

    chosen = options.read_plan(mechanism, set_, layers, heads, plan_file, exact_below, recompute)
    with terminal.progress() as bar:
        done = iter(range(_STEPS))
        receipt = conversion.convert(
            model,
            output,
            chosen,
            max_length=max_length,
            calibrate=calibrate,
            force=force,
            revision=revision,
            offline=offline,
            allow_pickle=allow_pickle,
            merge_adapter=merge_adapter,
            bundle_kernels=bundle_kernels,
            trust_remote_code=trust_remote_code,
            progress=lambda step: bar(f"convert: {step}", next(done, _STEPS - 1), _STEPS),
        )
    left = [f"Left exact: layers {ranges(receipt.left)}"] if receipt.left else []
    terminal.result(
        {"output": str(output), **receipt.model_dump()},
        _swapped(terminal, receipt),
        f"Layer errors measured on {receipt.measured_on}.",
        checks_table(receipt.checks),
        *left,
        *(f"Warning: {warning}" for warning in receipt.warnings),
        f"Written to {output}",
    )
    for note in receipt.notes:
        terminal.note(note)
    terminal.note(_measure(str(output)))


def revert(terminal: Terminal, folder: options.Model, output: options.Out, force: options.Force = False) -> None:
    """Restore the base checkpoint of a converted folder, bit-identical if nothing was trained."""
    from approx.conversion import convert as conversion

    conversion.revert(folder, output, force=force)
    terminal.result({"output": str(output)}, f"Base checkpoint of {folder} written to {output}")


def _measure(folder: str) -> str:
    """The next step with a converted folder."""
    place = shlex.quote(folder)
    return f"Next: approx evaluate {place} --task NAME (`approx tasks` lists them); approx bench {place}"


def _swapped(terminal: Terminal, receipt: "Receipt") -> Any:
    # Errors are measured per layer, so of several groups of heads only the first line shows them.
    first = {part.layer: part.heads for part in reversed(receipt.swapped)}

    def figures(by_layer: dict[int, float]) -> "Callable[[list[Swapped]], str]":
        def cell(line: "list[Swapped]") -> str:
            layers = [part.layer for part in line if part.heads == first[part.layer]]
            values = sorted({f"{by_layer[layer]:.3f}" for layer in layers if layer in by_layer})
            return " … ".join(values[:1] + values[1:][-1:]) or ("–" if layers else "")

        return cell

    more = {"relative output error": figures(receipt.errors or {})}
    if receipt.captured_mass:
        more["captured mass"] = figures(receipt.captured_mass)
    return layer_table(receipt.swapped, more, verbose=terminal.verbose)


def _positions(checkpoint: "Inspected") -> str:
    """How long inputs may be: a limit, one length for all, or seconds of sound."""
    if checkpoint.fixed_positions is not None:
        return f"always {checkpoint.fixed_positions}"
    if checkpoint.seconds_per_position is not None:
        return f"no limit, {checkpoint.seconds_per_position * 1e3:g} ms of sound each"
    return str(checkpoint.positions or "no limit")


def _always(site: "Layer") -> str:
    return "" if site.fixed_positions is None else f"always {site.fixed_positions}"


def _window(site: "Layer") -> str:
    return "" if site.window is None else f"{'' if site.causal else '±'}{site.window:,}"


def _heads(site: "Layer") -> str:
    shared = "" if site.heads == site.key_heads else f" ({site.key_heads} for keys)"
    return f"{site.heads}{shared}"


def _entry(step: "Conversion | Training") -> str:
    if step.action == "finetune":
        on = step.task or "plain text"
        kept = "" if step.kept_exact is None else f" {step.kept_exact.sentence}"
        return f"finetune from {step.base.name}: {','.join(step.recover)} on {on}, {step.steps:,} steps (approx {step.approx}).{kept}"
    rules = "; ".join(
        f"{rule['mechanism']} on layers {rule['layers']}{_of_heads(rule)} {settings_text(rule.get('settings') or {})}".strip()
        for rule in step.plan
    )
    longer = f", positions extended to {step.max_length}" if step.max_length else ""
    text = f", calibrated on {step.calibration.name}" if step.calibration else ""
    return f"{step.action} from {step.base.name}: {rules}{longer}{text} (approx {step.approx})"


def _of_heads(rule: dict[str, Any]) -> str:
    return f", heads {rule['heads']}" if "heads" in rule else ""
