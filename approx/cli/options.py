"""Arguments and options that several commands share, and how their values are read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from approx.errors import ApproxError

if TYPE_CHECKING:
    from approx.conversion.plan import Plan

Model = Annotated[str, typer.Argument(help="A folder, a model id of the hub, or 'quickstart'.", show_default=False)]
Out = Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there, once the new one is complete.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the hub.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use local files and the hub's cache only.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto (what the checkpoint says), float32, bfloat16 or float16.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
Mechanism = Annotated[
    str | None, typer.Option("--mechanism", "-m", help="See `approx mechanisms`.", show_default=False)
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the mechanism, e.g. --set clusters=25; may be repeated.")
]
Layers = Annotated[str, typer.Option(help="all, or numbers and ranges such as 0-5,8; -1 is the last layer.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan in YAML or JSON, instead of --mechanism.")]
MaxLength = Annotated[int | None, typer.Option(help="Extend the position table to so many tokens.", show_default=False)]
ExactBelow = Annotated[int, typer.Option(help="Inputs shorter than this many tokens keep exact attention.")]
Task = Annotated[str | None, typer.Option(help="A task, e.g. glue/sst2.", show_default=False)]
Data = Annotated[str | None, typer.Option(help="The task's files in their official layout: a folder or a file.")]
Against = Annotated[str | None, typer.Option(help="The exact base to compare with.", show_default=False)]
Record = Annotated[Path | None, typer.Option("--output", "-o", help="Write the record to this JSON file.")]


def read_plan(
    mechanism: str | None, settings: list[str] | None, layers: str, file: Path | None, exact_below: int
) -> "Plan":
    """The plan that the options of a command describe.

    Raises:
        ApproxError: if there is none or two, or a setting is not of the form name=value.
    """
    from approx.conversion.plan import Plan

    if (mechanism is None) == (file is None):
        found = "both were given" if file else "neither was given"
        raise ApproxError(f"Give either --mechanism or --plan; {found}. `approx mechanisms` lists the mechanisms.")
    if file is not None:
        if settings or layers != "all" or exact_below:
            raise ApproxError(
                "--set, --layers and --exact-below belong to --mechanism. Write them into the plan file instead."
            )
        return Plan.read(file)
    return Plan.of(str(mechanism), layers, exact_below=exact_below, **read_settings(settings))


def read_settings(settings: list[str] | None) -> dict[str, Any]:
    """Read `name=value` pairs; values are read as YAML, so numbers, true and false are what they look like."""
    read: dict[str, Any] = {}
    for text in settings or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ApproxError(f"'--set {text}' was given; the form is --set name=value, e.g. --set clusters=25.")
        if name in read:
            raise ApproxError(f"'--set {name}=…' was given twice. Give it once.")
        try:
            read[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            read[name.strip().replace("-", "_")] = value
    return read


def read_numbers(text: str, option: str) -> list[int]:
    """Read `512,2048` as numbers.

    Raises:
        ApproxError: if it is anything else.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ApproxError(
            f"'{option} {text}' was given; the form is whole numbers from 1, separated by commas: {option} 512,2048."
        )
    return numbers
