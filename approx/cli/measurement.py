"""Commands that measure and tell: evaluate, bench, report, run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from approx.cli import options
from approx.cli.terminal import Terminal, command, table, typed_command
from approx.errors import ApproxError, Exit
from approx.recipe import BenchStage, EvaluateStage

_PANEL = "Measure"


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(app, _PANEL, "approx evaluate converted --against quickstart --task needle --limit 40")(evaluate)
    command(app, _PANEL, "approx bench converted --against quickstart --lengths 512,2048 -o speed.json")(bench)
    command(app, _PANEL, "approx report runs/quickstart/record.json -o report")(report)
    command(app, _PANEL, "approx run quickstart -o runs/quickstart; approx run recipes/minilm-sst2.yaml --resume")(run)


def evaluate(
    terminal: Terminal,
    model: options.Model,
    task: options.Task = None,
    against: options.Against = None,
    data: options.Data = None,
    split: Annotated[str | None, typer.Option(help="Which split; the task's own default without it.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many examples; a subset is labelled so.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 32,
    margin: Annotated[float, typer.Option(min=0, help="Loss in points that would be acceptable.")] = 1.0,
    fail_over: Annotated[
        bool, typer.Option("--fail-over", help="Exit with 7 if the loss is beyond the margin.")
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut inputs that are longer than the positions.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the task, e.g. --set length=1024.")
    ] = None,
    output: options.Record = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offline: options.Offline = False,
) -> None:
    """Score a checkpoint on a task, against its base on the same examples in the same order."""
    from approx.evaluation import record
    from approx.pipeline import stages

    if task is None:
        raise ApproxError("No task was given. Name one with --task, e.g. --task glue/sst2.")
    stage = EvaluateStage(task, data, split, limit, batch_size, margin, truncate, options.read_settings(set_))
    _refuse_existing(output, force)
    with terminal.progress() as bar:
        made = stages.evaluate(
            model, stage, against=against, outputs=None if output is None else output.with_suffix(".parquet"),
            seed=seed, device=device, dtype=dtype, offline=offline, command=typed_command(), progress=bar,
        )  # fmt: skip
    if output is not None:
        record.save(output, made)
    terminal.result(made, *map(_quality_table, made["quality"]))
    verdicts = [variant["verdict"] for entry in made["quality"] for variant in entry["variants"]]
    if fail_over and "loss beyond margin" in verdicts:
        raise ApproxError(f"The loss on {task} is beyond the margin of {margin} points.", Exit.THRESHOLD)


def bench(
    terminal: Terminal,
    model: options.Model,
    against: options.Against = None,
    lengths: Annotated[str, typer.Option(help="Tokens per sequence.")] = "128,512",
    batch: Annotated[str, typer.Option(help="Sequences per call.")] = "1",
    max_length: Annotated[
        int | None, typer.Option(help="Extend the positions to so many tokens, for the timing only.")
    ] = None,
    task: options.Task = None,
    data: options.Data = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds at least.")] = 12,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of rounds at least, per length and batch size.")] = 1.0,
    output: options.Record = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    offline: options.Offline = False,
) -> None:
    """Time a checkpoint side by side with exact attention and with no attention at all (the ceiling).

    Inputs are the texts of --task where it is given, random tokens otherwise.
    """
    from approx.evaluation import record
    from approx.pipeline import stages

    texts = None if task is None else EvaluateStage(task, data)
    stage = BenchStage(
        options.read_numbers(lengths, "--lengths"), options.read_numbers(batch, "--batch"), max_length,
        "synthetic" if texts is None else "real", rounds, seconds,
    )  # fmt: skip
    _refuse_existing(output, force)
    with terminal.progress() as bar:
        made = stages.bench(
            model, stage, against=against, texts=texts, seed=seed, device=device, dtype=dtype, offline=offline,
            command=typed_command(), progress=bar,
        )  # fmt: skip
    if output is not None:
        record.save(output, made)
    terminal.result(made, _speed_table(made["speed"]))


def report(
    terminal: Terminal,
    records: Annotated[list[Path], typer.Argument(help="Records of evaluate, bench or run.", show_default=False)],
    output: options.Out,
) -> None:
    """Turn records into JSON, Markdown, CSV and one offline HTML page."""
    from approx.evaluation import record
    from approx.publishing.report import write_report

    written = write_report([record.load(path) for path in records], output)
    terminal.result({"files": [str(path) for path in written]}, *map(str, written))


def run(
    terminal: Terminal,
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that comes with the package.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run; runs/NAME without it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start anew, deleting an earlier run.")] = False,
    offline: options.Offline = False,
) -> None:
    """Carry a recipe out: convert every variant, evaluate, bench, record, report."""
    from approx import recipe as recipes
    from approx.pipeline.run import run as run_recipe

    path = recipes.find(recipe)
    read = recipes.read(path)
    folder = output or Path("runs") / path.stem
    with terminal.progress() as bar:
        made = run_recipe(
            read, folder, resume=resume, force=force, offline=offline, command=typed_command(), progress=bar
        )
    parts: list[Any] = [read.notice] if read.notice else []
    parts += map(_quality_table, made["quality"])
    parts += [_speed_table(made["speed"])] if made["speed"] else []
    terminal.result(made, *parts, f"Record: {folder / 'record.json'}", f"Report: {folder / 'report' / 'index.html'}")


def _refuse_existing(output: Path | None, force: bool) -> None:
    if output is not None and output.exists() and not force:
        raise ApproxError(f"{output} exists already. Choose another file, or replace it with --force.", Exit.REFUSED)


def _quality_table(entry: dict[str, Any]) -> Table:
    subset = ", a subset" if entry["subset"] else ""
    cut = f", {entry['truncated']} of them cut" if entry["truncated"] else ""
    title = f"{entry['task']}, {entry['split']}: {entry['examples']} examples{subset}{cut}"
    rows = table("", entry["metric"], "difference", "95 % interval", "verdict", title=title)
    rows.add_row(
        "exact", _points(entry["base"]["scores"][entry["metric"]]), "", _interval(entry["base"]["interval"], 100), ""
    )
    for row in entry["variants"]:
        needed = f" (needs about {row['needed_examples']} examples)" if row["needed_examples"] else ""
        rows.add_row(
            row["name"], _points(row["scores"][entry["metric"]]), f"{100 * row['difference']:+.1f}",
            _interval(row["interval"], 100), row["verdict"] + needed,
        )  # fmt: skip
    return rows


def _speed_table(speed: list[dict[str, Any]]) -> Table:
    rows = table(
        "batch",
        "tokens",
        "",
        "median ms",
        "ratio",
        "95 % interval",
        "of the ceiling",
        "peak MB",
        "verdict",
        title="Speed",
    )
    for entry in speed:
        timed = [("exact", entry["base"])]
        if entry["ceiling"]:
            timed.append(("attention-free (ceiling)", entry["ceiling"]))
        timed += [(row["name"], row) for row in entry["variants"]]
        for number, (name, row) in enumerate(timed):
            share = row.get("share_of_ceiling")
            rows.add_row(
                "" if number else str(entry["batch"]),
                "" if number else str(entry["length"]),
                name,
                _number(row["median_ms"], 2),
                _number(row.get("ratio"), 2, "×"),
                _interval(row.get("interval"), 1),
                "" if share is None else f"{share:.0%}",
                _number(row.get("peak_mb"), 0),
                row["status"] if row["status"] != "ok" else row.get("verdict") or "",
            )
        rows.add_section()
    return rows


def _points(score: float) -> str:
    return f"{100 * score:.1f}"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _interval(interval: list[float] | None, factor: float) -> str:
    return "" if interval is None else f"{factor * interval[0]:.2f} … {factor * interval[1]:.2f}"
