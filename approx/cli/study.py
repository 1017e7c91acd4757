"""Commands about recipes: run, init."""

import math
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from approx.cli import names, options
from approx.cli.command import command, scrubbed
from approx.cli.layers import settings_text
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError
from approx.evaluation import tracking

if TYPE_CHECKING:
    from approx.pushing.push import NotPushed, Pushed

_PANEL = "Measure"
_REPLACE = "Instead of the recipe's"
_DEMONSTRATION = "needle"
_TEMPLATE = """\
# A recipe. See what it would do with `approx run {file} --dry-run`, and run it with `approx run {file}`.
title: My study
# A folder, a hub model id, or quickstart.
{checkpoint}
# Name: plan. `approx mechanisms` lists the mechanisms, `approx mechanisms NAME` explains the settings of one.
variants:
  improved-clustered 25: {{mechanism: improved-clustered, settings: {{clusters: 25, topk: 32}}}}
  local 64 in the first layer: {{mechanism: local, layers: 0, settings: {{left: 64, right: 64}}}}
# Base and variants are compared on these tasks. `approx tasks` lists them, `approx tasks NAME` explains one.
{enough}
evaluate:
  - {task}
  # Your own table: {{task: text-classification, data: reviews.csv, settings: {{columns: {{text: review, label: stars}}}}}}
# They are timed at these lengths, in tokens.
bench:
  - {{lengths: [128, 256]}}
# Variants may be trained, and are then measured before and after; exact trains the base in the same way.
# heal:
#   - {{task: glue/sst2, data: GLUE/SST-2, steps: 300, exact: true}}
seed: 0
device: auto
"""


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(
        app,
        _PANEL,
        "approx run quickstart",
        "approx run study.yaml -o runs/study --resume",
        "approx run study.yaml --report-to wandb",
        "approx run minilm-sst2 --checkpoint my-model --data GLUE/SST-2 --limit 200",
        "approx run heal-spans --checkpoint gpt2 --data lm=test.txt --data runs/gpt2/text.txt=train.txt --dry-run",
        interrupted="Interrupted. Finished stages are kept; run the same command with --resume to continue.",
    )(run)
    command(app, _PANEL, "approx init", "approx init study.yaml --checkpoint my-model --task glue/sst2 --data SST-2")(
        init
    )


def run(
    terminal: Terminal,
    recipe: Annotated[
        str,
        typer.Argument(
            help="A YAML file, or the name of a recipe that comes with the package, e.g. quickstart.",
            show_default=False,
            autocompletion=names.completed(names.recipes),
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run. Default: runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete an earlier run and start over.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="Use this checkpoint instead of the recipe's.", rich_help_panel=_REPLACE)
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Use these files instead of the recipe's; in a recipe of several tasks TASK=PATH, or OLDPATH=PATH for any file "
            "that it names. May be repeated.",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate on this many examples, the first ones.", rich_help_panel=_REPLACE),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and list its stages; compute nothing.")
    ] = False,
    no_push: Annotated[
        bool,
        typer.Option("--no-push", help="Send nothing: write the folders that the recipe pushes into push/ of the run."),
    ] = False,
    report_to: options.ReportTo = None,
    offline: options.Offline = False,
) -> None:
    """Run a recipe: convert every variant, evaluate and time it, write record and report, push."""
    from approx import recipe as recipes
    from approx.cli.figures import quality_tables, speed_tables
    from approx.pipeline.run import run as run_recipe
    from approx.publishing.summary import recommendation

    tracking.refuse_missing(report_to)
    path = recipes.find(recipe)
    read = recipes.replaced(recipes.read(path), checkpoint=checkpoint, data=data or (), limit=limit)
    if dry_run:
        from approx.pipeline.run import check

        check(read, offline=offline)
        stages = _stages(read)
        listed = [dict(zip(("stage", "what", "how"), row, strict=True)) for row in stages]
        terminal.result(
            {"checkpoint": read.checkpoint, "stages": listed},
            table(["stage", "", "how"], stages, title=f"{read.title}: {read.checkpoint}"),
            "Nothing was computed.",
        )
        return
    folder = output or Path("runs") / path.stem
    pushed: list[Pushed | NotPushed] = []
    if no_push and not read.push:
        raise ApproxError(f"--no-push was given, but {path} has no 'push'. Leave it out.")
    with terminal.progress() as bar:
        made = run_recipe(
            read,
            folder,
            resume=resume,
            force=force,
            offline=offline,
            send=not no_push,
            pushed=pushed.append,
            # Without --resume, so that the command reproduces the record.
            command=scrubbed(shlex.join(["approx", "run", recipe, *_overrides(checkpoint, data, limit)])),
            progress=bar,
        )
    tables = [*(shown for entry in made.quality for shown in quality_tables(entry)), *speed_tables(made.speed)]
    files = [f"Record: {folder / 'record.json'}", f"Report: {folder / 'report' / 'index.html'}"]
    files += [outcome.summary for outcome in pushed]
    terminal.result(made.to_data(), *([read.notice] if read.notice else []), *recommendation(made), *tables, *files)
    if report_to is not None:
        terminal.note(tracking.report(made.title, [made], report_to))
    lines = [outcome.summary for outcome in pushed] if terminal.json_output else []
    for note in dict.fromkeys([*lines, *(note for outcome in pushed for note in outcome.notes)]):
        terminal.note(note)


def init(
    terminal: Terminal,
    file: Annotated[Path, typer.Argument(help="The YAML file to write.")] = Path("study.yaml"),
    checkpoint: Annotated[str, typer.Option(help="A folder, a hub model id, or 'quickstart'.")] = "quickstart",
    task: options.Task = None,
    data: options.Data = None,
    force: options.Force = False,
) -> None:
    """Write a recipe with comments, to be edited and run."""
    from approx_kernels.runtime.atomic_file import write_whole

    options.check_output(file, force)
    stage: dict[str, Any] = {"task": task or _DEMONSTRATION, **({} if data is None else {"data": data})}
    measured, enough = _settling(stage["task"])
    stage |= measured
    if task is None:
        stage["settings"] = {"length": 512, "examples": measured["limit"]}
    flow = partial(yaml.safe_dump, default_flow_style=True, sort_keys=False, width=math.inf)
    named = yaml.safe_dump({"checkpoint": checkpoint}).strip()
    text = _TEMPLATE.format(file=shlex.quote(str(file)), checkpoint=named, task=flow(stage).strip(), enough=enough)
    write_whole(file, text)
    terminal.result({"file": str(file)}, f"Written to {file}")
    terminal.note(f"Next: edit it, then approx run {shlex.quote(str(file))} --dry-run")


def _settling(task: str) -> tuple[dict[str, Any], str]:
    """Margin and limit of a first evaluation, and a comment that says what they can show."""
    from approx.evaluation.statistics import fewest_examples
    from approx.tasks import TASKS, open_task
    from approx.tasks.metrics import METRICS

    if task not in TASKS:
        # Only the other package's harness knows the metric.
        return {}, "# All examples are used; limit: 100 would take the first 100."
    metric = METRICS[open_task(task).metrics[0]]
    if not metric.fraction:
        name = metric.key.replace("_", " ")
        return {"margin": metric.margin}, f"# The margin is the loss that you accept, in percent of the base's {name}."
    fewest = fewest_examples(metric.margin / 100)
    # Twice as many as needed if no answer changes.
    return {"margin": metric.margin, "limit": -(-2 * fewest // 100) * 100}, (
        f"# The margin is the loss that you accept, in points. To show that no more is lost takes {fewest:,} examples "
        "if nothing changes on any\n# of them, and more if something does; the report says how many. limit takes the "
        "first of the data."
    )


def _overrides(checkpoint: str | None, data: list[str] | None, limit: int | None) -> list[str]:
    pairs = [("--checkpoint", checkpoint), *(("--data", one) for one in data or []), ("--limit", limit)]
    return [word for name, value in pairs if value is not None for word in (name, str(value))]


def _stages(recipe: Any) -> list[list[str]]:
    """Kind, what and where of each stage, in their order."""
    rows = [
        [
            "convert",
            name,
            "; ".join(f"{rule.mechanism} on layers {rule.layers} {settings_text(rule.settings)}" for rule in rules),
        ]
        for name, rules in recipe.variants.items()
    ]
    rows += [
        ["heal", ", ".join(stage.variants or recipe.variants), f"on {stage.task or 'text'}, {_where(stage)}"]
        for stage in recipe.heal
    ]
    rows += [["evaluate", stage.task, _where(stage)] for stage in recipe.evaluate]
    rows += [
        ["bench", f"lengths {', '.join(map(str, stage.lengths))}", f"batches {', '.join(map(str, stage.batches))}"]
        for stage in recipe.bench
    ]
    rows += [
        [
            "push",
            stage.variant or next(iter(recipe.variants)),
            f"to {stage.repo}, {'public' if stage.public else 'private'}",
        ]
        for stage in recipe.push
    ]
    return rows


def _where(stage: Any) -> str:
    limited = f", the first {stage.limit:,} examples" if stage.limit else ""
    files = getattr(stage, "text", None) or [stage.data or "of its own source"]
    return f"data {', '.join(map(str, files))}{limited}"
