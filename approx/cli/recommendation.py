"""The command that says which mechanism to take: recommend."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from approx.cli import options
from approx.cli.command import command, typed_command
from approx.cli.stages import Stage
from approx.cli.tables import table
from approx.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.table import Table

    from approx.pipeline.recommend import Recommended, Scored
    from approx.searching.options import RecommendStage

_STAGE = Stage(
    "approx.searching.options.RecommendStage",
    panels={
        "Task": "task data settings split limit truncate",
        "Search": "lengths mechanisms margin examples heal time_budget batch",
    },
    renamed={"batch": "--batch-size"},
)


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Convert",
        "approx recommend quickstart --task needle",
        "approx recommend my-model --task squad --data SQUAD --time-budget 20m -o recommended.json",
        "approx recommend my-model --data reviews.csv --columns text=review,label=stars",
        "approx recommend gpt2 --lengths 512,1024",
        stage=_STAGE,
    )(recommend)


def recommend(
    terminal: Terminal,
    model: options.Model,
    stage: "RecommendStage",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the record to this JSON file, or as record.json into this folder."),
    ] = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Say which mechanisms are worth it at the lengths of your data: how fast, how much they lose, and what would settle it."""
    from approx import api
    from approx.checkpoints.atomic_folder import locked_output
    from approx.evaluation import record

    file = output if output is None or output.suffix == ".json" else output / "record.json"
    options.check_output(file, force)
    with nullcontext() if file is None else locked_output(file), terminal.progress() as bar:
        # Another process may have written it meanwhile.
        options.check_output(file, force)
        found = api.recommend(
            model,
            stage,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            offline=offline,
            merge_adapter=merge_adapter,
            command=typed_command(),
            progress=bar,
            announce=terminal.note,
        )
        if file is not None:
            record.save(file, found.record)
    if file is not None:
        terminal.note(f"Record written to {file}; approx report {output} -o report makes a page of it")
    terminal.result(found.to_data(), *_shown(found, verbose=terminal.verbose))


def _shown(found: "Recommended", *, verbose: bool) -> "list[Table | str]":
    from approx.publishing import wording

    shown: list[Table | str] = [found.answer]
    if found.share is not None:
        shown.append(f"{wording.part(found.share)} of the inputs are that long.")
    if found.lengths is not None:
        shown.append(found.lengths.sentence)
    lengths = sorted(found.ceilings)
    blank = [""] * 5
    rows = [["no attention: the ceiling", *(wording.times(found.ceilings[length]) for length in lengths), *blank]]
    for one in found.tried:
        needed = ""
        if one.needed_examples is not None:
            needed = f"{wording.roughly(one.needed_examples)} examples"
            needed += f", {wording.duration(one.needed_seconds)}" if one.needed_seconds else ""
        speeds = [one.speeds.get(length) for length in lengths]
        rows.append(
            [
                one.name,
                *(wording.times(speed.ratio) if speed else "" for speed in speeds),
                wording.percent(one.share_of_ceiling),
                *(_change(scored) for scored in (one.without, one.healed)),
                needed,
                one.decision,
            ]
        )
    # Rows of what cannot help say nothing that the answer does not say.
    columns = ["", *(f"{wording.count(length)} tokens" for length in lengths)]
    after = ["of ceiling", "change as converted", "healed", "settled by", "advice"]
    title = "Speed against exact attention"
    if found.record.quality:
        task = found.record.quality[-1]
        title += f"; change of {wording.units(task)} on {task.task}, {wording.count(task.examples)} examples, with its 95 % interval"
    shown.append(table([*columns, *after], rows, title=title))
    if found.left_out:
        kinds = {
            reason: [name for name, why in found.left_out.items() if why == reason]
            for reason in found.left_out.values()
        }
        lines = [f"{', '.join(names)}: {reason}" for reason, names in kinds.items()]
        names = ", ".join(found.left_out)
        shown.append("\n".join(["Left out:", *lines]) if verbose else f"Left out: {names}; --verbose says why.")
    return [*shown, f"Next: {found.command}"]


def _change(scored: "Scored | None") -> str:
    """A difference with its interval: −2.0 (−4.7 to 0.7)."""
    from approx.publishing import wording

    if scored is None:
        return ""
    task, entry = scored
    return f"{wording.change(entry, task)} ({wording.between(entry.interval, 1 if task.fraction else 3, wording.scale(task))})"
