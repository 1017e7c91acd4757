"""Commands on finished folders: verify, export."""

from typing import Annotated

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError, Exit

_PANEL = "Convert"
_VERIFY_STEPS, _EXPORT_STEPS = 5, 4


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(app, _PANEL, "approx verify converted", "approx verify me/my-model --revision main")(verify)
    command(
        app,
        _PANEL,
        "approx export converted -o program",
        "approx export converted --format onnx -o onnx --lengths 16,128,512",
        "approx export converted --format onnx --decode -o decoder",
        "approx export converted --format stock -o stock",
        "approx export converted --format openvino --quantize int8 -o openvino",
    )(export)


def verify(
    terminal: Terminal,
    folder: options.Model,
    accept: Annotated[
        bool, typer.Option("--accept", help="Accept edits of the card, config or tokenizer; never of weights or code.")
    ] = False,
    revision: options.Revision = None,
    offline: options.Offline = False,
) -> None:
    """Check a converted folder again: its files, code and numbers, and that its attention is really replaced."""
    from approx import api
    from approx.cli.figures import checks_table

    with terminal.progress() as bar:
        done = iter(range(_VERIFY_STEPS))
        found = api.verify(
            folder,
            accept=accept,
            revision=revision,
            offline=offline,
            progress=lambda step: bar(f"verify: {step}", next(done, _VERIFY_STEPS - 1), _VERIFY_STEPS),
        )
    diffs = found.diffs.values() if terminal.verbose else ()
    accepted = [f"Accepted: {', '.join(found.edited)}"] if found.accepted else []
    terminal.result(found, checks_table(found.checks), *diffs, *accepted)
    if failed := [check.name for check in found.checks if check.passed is False]:
        raise ApproxError(f"{folder} did not pass: {', '.join(failed)}.", Exit.VERIFICATION)


def export(
    terminal: Terminal,
    model: options.Model,
    output: options.Out,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="torch-export (model.pt2), onnx (model.onnx), openvino (model.xml), or stock: an ordinary checkpoint of "
            "transformers, if one of its architectures attends as this model does.",
        ),
    ] = "torch-export",
    quantize: Annotated[
        str | None, typer.Option(help="int8: weights in 8 bits, in onnx and openvino. Default: float32.")
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="In onnx: a program that reads new tokens and a state and returns logits and the next state, to write text.",
        ),
    ] = False,
    lengths: Annotated[
        str | None, typer.Option(help="Three lengths to compare at, in tokens. Default: 12,40,120.")
    ] = None,
    force: options.Force = False,
    revision: options.Revision = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Export a checkpoint without Python code of its own, as a program or as a stock checkpoint, and check it."""
    from approx.conversion import export as exporting
    from approx.conversion.stock import StockExported

    asked = None if lengths is None else options.read_numbers(lengths, "--lengths")
    with terminal.progress() as bar:
        done = iter(range(_EXPORT_STEPS))
        made = exporting.export(
            model,
            output,
            format=format_,
            quantize=quantize,
            decode=decode,
            lengths=asked,
            force=force,
            revision=revision,
            offline=offline,
            merge_adapter=merge_adapter,
            progress=lambda step: bar(f"export: {step}", next(done, _EXPORT_STEPS - 1), _EXPORT_STEPS),
        )
    rows = [[size, f"{error:.1e}"] for size, error in made.largest_relative_difference.items()]
    same = [] if made.equal_predictions is None else [f"Equal predictions: {made.equal_predictions:.1%}"]
    columns = ["batch x length", "largest relative difference"]
    shown = [table(columns, rows), *same, f"Written to {output}"]
    if made.relative_rms is not None:
        shown.insert(1, f"Root mean square of the differences: {made.relative_rms:.3f} of the outputs'")
    if made.state_bytes is not None:
        shown.append(f"State of one text: {made.state_bytes / 1e6:.2f} MB in {len(made.state or ())} tensors")
    if isinstance(made, StockExported):
        windows = f", with a window of {made.window} in layers {made.layers}" if made.window else ""
        shown.append(f"It is a {made.architecture} of transformers{windows}. Engines that serve models:")
        shown.append(table(["engine", "runs it"], [[name, runs] for name, runs in made.engines.items()]))
    terminal.result(made, *shown)
    for note in made.notes:
        terminal.note(note)
