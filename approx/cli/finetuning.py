"""The command that trains: finetune."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from approx.cli import options
from approx.cli.command import command
from approx.cli.stages import Stage
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError

if TYPE_CHECKING:
    from approx.checkpoints.history import KeptExact
    from approx.finetuning.finetune import Healing, Rehearsal
    from approx.finetuning.options import FinetuneStage

_STAGE = Stage(
    "approx.finetuning.options.FinetuneStage",
    panels={
        "Task": "task data settings text split streaming limit length min_length pack",
        "Training": "budget time_budget steps epochs batch_size accumulate learning_rate mechanism_learning_rate warm_up "
        "schedule weight_decay dropout validation evaluate_every patience",
        "Modes": "keep_exact train projections joint match transfer distill lora penalty",
        "Machine": "recompute bfloat16 report_to seed",
    },
    former={"max_steps": "steps"},
)


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the app."""
    command(
        app,
        "Convert",
        "approx finetune converted --task glue/sst2 --data SST-2 --time-budget 30m -o healed",
        "approx finetune converted --recover transfer,lora,task --task squad --data squad -o healed",
        "approx finetune longer --text corpus.txt --recover mlm --length 2048 -o healed",
        interrupted="Interrupted. The state after the last step is kept; run the same command with --resume to continue.",
        stage=_STAGE,
    )(finetune)


def finetune(
    terminal: Terminal,
    model: options.Model,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)] = None,
    stage: "FinetuneStage",
    teacher: Annotated[
        str | None,
        typer.Option(
            help="The exact model for distill. Default: the checkpoint's own weights with exact attention.",
            rich_help_panel="Modes",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be trained, and the time and memory it would take; write nothing."
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a training that was interrupted.")] = False,
    force: options.Force = False,
    device: options.Device = "auto",
    revision: options.Revision = None,
    offline: options.Offline = False,
    merge_adapter: options.MergeAdapter = False,
) -> None:
    """Train a converted checkpoint until it is as good as before, or an exact one for comparison."""
    from approx import api
    from approx.evaluation.evaluate import leads

    if output is None and not dry_run:
        raise ApproxError("No output folder was given. Name it with -o, or see what would be done with --dry-run.")
    about: dict[str, Any] = {
        "teacher": teacher,
        "revision": revision,
        "offline": offline,
        "merge_adapter": merge_adapter,
        "device": device,
    }
    if dry_run:
        shown = api.rehearse_finetuning(model, stage, **about)
        lines = _planned(shown)
    else:
        with terminal.progress() as bar:
            shown = api.finetune(
                model,
                output,
                stage,
                **about,
                resume=resume,
                force=force,
                progress=lambda what, done, total: bar(f"finetune {what}", done, total),
            )
        if not leads():
            return
        lines = _outcome(shown)
    terminal.result(shown, *lines)
    for note in shown.notes:
        terminal.note(note)


def _planned(planned: "Rehearsal") -> list[Any]:
    from approx.publishing import wording

    rows = [
        [
            phase.mode,
            f"{phase.steps:,}",
            str(phase.batch_size),
            f"{phase.learning_rate:.1e}",
            f"{phase.trained:,} of {phase.parameters:,}",
            wording.duration(phase.seconds),
            f"{phase.memory_mb:,.0f}",
        ]
        for phase in planned.phases
    ]
    return [
        *_kept(planned.kept_exact),
        table(["mode", "steps", "batch", "rate", "trained", "time", "MB"], rows),
        f"{planned.examples:,} training examples; {planned.held_out:,} more choose the best step by {planned.measure}.",
        "Time and memory from one step of each mode. Nothing was written.",
    ]


def _kept(kept: "KeptExact | None") -> list[Any]:
    """The layers that stay exact, and how far each layer moves the outputs."""
    if kept is None:
        return []
    rows = [[str(one.layer), one.mechanism, f"{one.divergence:.3g}", "yes" if one.kept else ""] for one in kept.layers]
    return [table(["layer", "mechanism", f"moves the outputs by ({kept.unit})", "stays exact"], rows), kept.sentence]


def _outcome(done: "Healing") -> list[Any]:
    from approx.cli.figures import checks_table
    from approx.publishing import wording

    rows = [
        [
            phase.mode,
            f"{phase.steps:,}",
            f"{phase.best_step:,}",
            f"{phase.parameters:,}",
            f"{phase.tokens:,}",
            wording.duration(phase.seconds),
            wording.ENDED[phase.ended],
        ]
        for phase in done.phases
    ]
    scores = [("exact attention, before training", done.exact), ("before", done.before), ("after", done.after)]
    lines = [
        *_kept(done.kept_exact),
        table(["mode", "steps", "best step", "trained", "tokens", "time", "ended by"], rows),
        *(
            [
                table(
                    [f"{done.measure} on {done.held_out:,} held-out training examples", "value"],
                    [[name, f"{value:.4f}"] for name, value in scores if value is not None],
                )
            ]
            if done.after is not None
            else []
        ),
    ]
    if done.checks:
        lines.append(checks_table(done.checks))
    return [
        *lines,
        f"Written to {done.output}. Score it on the task's own split: approx evaluate {done.output} --task …",
    ]
