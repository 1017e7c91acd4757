"""Arguments and options that several commands share, and the parsing of their values."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from approx import yaml_text
from approx.cli import names
from approx.errors import ApproxError, Exit
from approx.evaluation.tracking import Tracker

if TYPE_CHECKING:
    from approx.planning.plan import Plan

_CHECKPOINT, _PLAN, _TASK, _MACHINE = "Checkpoint", "Plan", "Task", "Machine"

Model = Annotated[str, typer.Argument(help="A folder, a hub model id, or 'quickstart'.", show_default=False)]
Out = Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)]
Records = Annotated[
    list[Path],
    typer.Argument(help="Records of evaluate, bench or run, or the folder of a run or sweep.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace existing output once the new one is complete.")]
Record = Annotated[Path | None, typer.Option("--output", "-o", help="Write the record to this JSON file.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub.", rich_help_panel=_CHECKPOINT)]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Use only local files and the hub's cache.", rich_help_panel=_CHECKPOINT),
]
BundleKernels = Annotated[
    bool,
    typer.Option(
        "--bundle-kernels",
        help="Put the C and Triton sources in the folder, as many files. By default the folder holds readable plain PyTorch "
        "and uses the kernels of an installed approx-attention.",
    ),
]
MergeAdapter = Annotated[
    bool,
    typer.Option(
        "--merge-adapter",
        help="Merge a PEFT adapter that is next to the weights, or named by its folder.",
        rich_help_panel=_CHECKPOINT,
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        help="What runs exported folders: torch, onnxruntime or openvino. Default: that of their format.",
        rich_help_panel=_CHECKPOINT,
    ),
]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        "--beside",
        help="A further checkpoint or exported folder to compare with the base; may be repeated.",
        rich_help_panel=_CHECKPOINT,
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Accept pickled weights, which can run code.", rich_help_panel=_CHECKPOINT),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Take along the code of the checkpoint's own tokenizer, which approx does not run. With --revision COMMIT.",
        rich_help_panel=_CHECKPOINT,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="The exact base to compare with. Default: the checkpoint's own weights with exact attention.",
        rich_help_panel=_CHECKPOINT,
    ),
]
Mechanism = Annotated[
    str | None,
    typer.Option(
        "--mechanism",
        "-m",
        help="One of `approx mechanisms`.",
        show_default=False,
        rich_help_panel=_PLAN,
        autocompletion=names.completed(names.mechanisms),
        callback=names.known("mechanism", names.mechanisms),
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the mechanism, e.g. clusters=25; `approx mechanisms NAME` lists them; may be repeated.",
        rich_help_panel=_PLAN,
    ),
]
Layers = Annotated[
    str,
    typer.Option(help="all, or numbers and ranges such as 0-5,8; -1 is the last layer.", rich_help_panel=_PLAN),
]
Heads = Annotated[
    str,
    typer.Option(
        help="all, or numbers and ranges such as 0-3,8; the other heads of these layers stay exact.",
        rich_help_panel=_PLAN,
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute", help="In training, compute attention again in the backward pass.", rich_help_panel=_PLAN
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        help="A text, or a recording for speech models, to fit mechanisms to and measure layer errors on. Default: built-in English text, or noise.",
        rich_help_panel=_PLAN,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan in YAML or JSON, instead of --mechanism.", rich_help_panel=_PLAN),
]
ExactBelow = Annotated[
    int, typer.Option(min=0, help="Inputs shorter than this many tokens keep exact attention.", rich_help_panel=_PLAN)
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1, help="Extend the position table to this many tokens.", show_default=False, rich_help_panel=_PLAN
    ),
]


NAMED_TASK: dict[str, Any] = {
    "autocompletion": names.completed(names.tasks),
    "callback": names.known("task", names.tasks, names.is_task),
}
"""What an option that names a task does besides."""


def task_option(about: str) -> Any:
    """The option that names a task, with what the command does with it."""
    return typer.Option(
        help=f"{about} `approx tasks` lists them.", show_default=False, rich_help_panel=_TASK, **NAMED_TASK
    )


Task = Annotated[str | None, task_option("A task, e.g. glue/sst2.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="The task's files in their official layout, a table (.csv, .tsv, .jsonl, .json, .parquet), or hub:OWNER/NAME.",
        rich_help_panel=_TASK,
    ),
]
TaskSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the task, e.g. length=1024 of needle; `approx tasks NAME` lists them; may be repeated.",
        rich_help_panel=_TASK,
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        help="Columns of a table or hub dataset that --data names, e.g. text=review,label=stars; `approx tasks NAME` lists them.",
        rich_help_panel=_TASK,
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        help="The class that each of the model's outputs stands for, in their order, by number or name: 1,0 where they are "
        "exchanged, or negative,positive. Default: matched by the names in config.json, or as numbered.",
        show_default=False,
        rich_help_panel=_TASK,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_MACHINE)]
Dtype = Annotated[
    str,
    typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.", rich_help_panel=_MACHINE),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="int8: round the weights of all models to 8 bits, by torchao on the CPU. Default: their own.",
        rich_help_panel=_MACHINE,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.", rich_help_panel=_MACHINE)]

ReportTo = Annotated[
    Tracker | None,
    typer.Option(
        help="Also report to tensorboard (in $TENSORBOARD_LOGGING_DIR or runs/tensorboard), trackio or wandb: a run for each model.",
        rich_help_panel=_MACHINE,
    ),
]


def read_plan(
    mechanism: str | None,
    settings: list[str] | None,
    layers: str,
    heads: str,
    file: Path | None,
    exact_below: int,
    recompute: bool,
) -> "Plan":
    """The plan that the options describe.

    Raises:
        ApproxError: if not exactly one of mechanism and file is given, or a setting is not name=value.
    """
    from approx.planning.plan import Plan, Rule

    if (mechanism is None) == (file is None):
        problem = "both were given" if file else "neither was given"
        raise ApproxError(f"Give either --mechanism or --plan; {problem}. `approx mechanisms` lists the mechanisms.")
    rule = Rule(mechanism or "", layers, read_settings(settings), exact_below, heads, recompute)
    if file is None:
        return Plan((rule,))
    if rule != Rule(""):
        raise ApproxError(
            "--set, --layers, --heads, --exact-below and --recompute belong to --mechanism. Write them into the plan "
            "file instead."
        )
    return Plan.read(file)


def read_settings(settings: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """Read `name=value` pairs; values are YAML, so `25` is a number and `true` a boolean."""
    read: dict[str, Any] = {}
    for text in settings or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ApproxError(
                f"'{option} {text}' was given; the form is {option} name=value, e.g. {option} clusters=25."
            )
        setting = name.strip().replace("-", "_")
        if setting in read:
            raise ApproxError(f"'{option} {name}=…' was given twice. Give it once.")
        try:
            read[setting] = yaml_text.load(value).data
        except yaml.YAMLError:
            read[setting] = value
    return read


def task_settings(settings: list[str] | None, columns: str | None, labels: str | None = None) -> dict[str, Any]:
    """The settings of a task from --set, --columns and --labels."""
    named = read_settings(columns.split(","), "--columns") if columns else {}
    read = read_settings(settings)
    if labels is not None and "labels" in read:
        raise ApproxError("The labels were given twice, with --labels and with --set labels=. Give them once.")
    more: dict[str, Any] = {} if labels is None else {"labels": labels}
    return read | more | ({"columns": {field: str(name) for field, name in named.items()}} if named else {})


def read_numbers(text: str, option: str, example: str = "512,2048") -> list[int]:
    """Read numbers such as `512,2048`.

    Args:
        text: The value of the option.
        option: Name of the option, for the error.
        example: A valid value, for the error.

    Raises:
        ApproxError: if the text is not a list of positive whole numbers.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ApproxError(
            f"'{option} {text}' was given; the form is whole numbers from 1, separated by commas: {option} {example}."
        )
    return numbers


def record_files(path: Path) -> list[Path]:
    """The records of a run or a sweep; a file is one itself.

    Raises:
        ApproxError: if a folder has no record.
    """
    if not path.is_dir():
        return [path]
    found = [path / "record.json"] if (path / "record.json").is_file() else sorted(path.glob("records/*.json"))
    if not found:
        raise ApproxError(
            f"{path} has no record.json: it is not the folder of a finished run or sweep. Give records, or finish it "
            "with --resume.",
            Exit.UNAVAILABLE,
        )
    return found


def record_file(path: Path) -> Path:
    """The only record of a run; a file is one itself.

    Raises:
        ApproxError: if a folder has no record, or several.
    """
    found = record_files(path)
    if len(found) > 1:
        raise ApproxError(f"{path} has {len(found)} records. Name one of them, e.g. {found[0]}.")
    return found[0]


def check_output(file: Path | None, force: bool) -> None:
    """Check that a file can be written, before long work starts.

    Raises:
        ApproxError: if the file exists and `force` is false, is a folder, or its folder is not writable.
    """
    if file is None:
        return
    if file.is_dir():
        raise ApproxError(f"{file} is a folder, but the output is a file. Choose another output.", Exit.REFUSED)
    if file.exists() and not force:
        raise ApproxError(f"{file} exists already. Choose another file, or replace it with --force.", Exit.REFUSED)
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ApproxError(
            f"{file} cannot be written: {folder} is not a writable folder. Choose another output.", Exit.UNAVAILABLE
        )
