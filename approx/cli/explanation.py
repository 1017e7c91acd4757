"""Commands that explain what there is: mechanisms, tasks."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import typer

from approx.cli import names
from approx.cli.command import command
from approx.cli.docstrings import arguments, description
from approx.cli.layers import settings_text
from approx.cli.tables import table
from approx.cli.terminal import Terminal
from approx.errors import ApproxError


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the app."""
    command(
        app,
        "Explain",
        "approx mechanisms",
        "approx mechanisms improved-clustered",
        "approx mechanisms --family gpt2",
    )(mechanisms)
    command(app, "Explain", "approx tasks", "approx tasks needle")(tasks)


def mechanisms(
    terminal: Terminal,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Explain this mechanism and each of its settings.",
            show_default=False,
            autocompletion=names.completed(names.mechanisms),
            callback=names.known("mechanism", names.mechanisms),
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Also show which mechanisms fit this family, e.g. bert or gpt2.",
            autocompletion=names.completed(names.families),
        ),
    ] = None,
) -> None:
    """List the mechanisms with what they support, when they are exact, and their papers; or explain one."""
    from approx.mechanisms import MECHANISMS
    from approx.planning.anatomy import attends_causally

    causal = None if family is None else attends_causally(family)
    rows = [_ability(one, causal) for one in MECHANISMS if name in (None, one)]
    abilities = ("bidirectional", "causal", "trainable")
    marks = [*abilities, *([] if family is None else ["fits"])]
    # Short words, so that an 80-column terminal shows them whole.
    headings = ["both ways", "causal", "trainable", *([] if family is None else [f"fits {family}"])]
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
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["compiles"], []).append(row["name"])
    reasons.pop("whole", None)
    notes = [f"Compiled as one operator: {', '.join(named)}. {reason}" for reason, named in reasons.items()]
    notes += [f"'{row['name']}' comes from the package {row['package']}." for row in rows if row["package"]]
    if name is not None:
        about = _mechanism(name)
        shown = [*about["description"], f"Exact when: {rows[0]['exact_when']}", _settings(about["settings"]), matrix]
        terminal.result({**rows[0], **about}, *shown, *notes)
        return
    papers = table(
        ["mechanism", "settings", "exact when", "source"],
        [[row["name"], settings_text(row["settings"]), row["exact_when"], row["source"]] for row in rows],
    )
    terminal.result({"mechanisms": rows}, matrix, *notes, papers)
    for line in MECHANISMS.broken():
        terminal.note(f"Warning: {line}")
    terminal.note("Next: approx mechanisms NAME explains the settings of one.")


def tasks(
    terminal: Terminal,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Explain this task and each of its settings.",
            show_default=False,
            autocompletion=names.completed(names.tasks),
            callback=names.known("task", names.tasks, names.is_task),
        ),
    ] = None,
) -> None:
    """List the tasks with what they measure, their metrics and where their data come from; or explain one."""
    from approx.tasks import TASKS, kind_of

    if name is None:
        every = [_task(one) for one in TASKS]
        rows = []
        for _, alike in groupby(every, key=lambda row: kind_of(row["name"])):
            group = list(alike)
            metrics = dict.fromkeys(metric for row in group for metric in row["metrics"])
            rows.append(
                [
                    ", ".join(row["name"] for row in group),
                    group[0]["description"][0],
                    ", ".join(metrics),
                    ", ".join(group[0]["settings"]) or "–",
                    group[0]["dataset"] or "–",
                ]
            )
        notes = [f"'{row['name']}' comes from the package {row['package']}." for row in every if row["package"]]
        terminal.result(
            {"tasks": every}, table(["task", "what it is", "metrics", "settings", "hub dataset"], rows), *notes
        )
        for line in TASKS.broken():
            terminal.note(f"Warning: {line}")
        terminal.note("Next: approx tasks NAME explains the metrics, settings and files of one.")
        return
    about, explained = _task(name), _metrics(name)
    metrics = table(
        ["metric", "unit", "default margin", "better", "meaning"],
        [[metric, *facts_of.values()] for metric, facts_of in explained.items()],
    )
    facts = {
        "Package": about["package"] or "",
        "Head": f"{about['head']} ({about['auto_class']})",
        "Classes": ", ".join(about["labels"]),
        "Hub dataset": about["dataset"] or "",
        "--data": about["data"],
        "--split": about["split"],
        "--columns": ", ".join(about["columns"]),
    }
    lines = [f"{title}: {text}" for title, text in facts.items() if text]
    terminal.result(
        {**about, "explained": explained}, *about["description"], *lines, metrics, _settings(about["settings"])
    )
    terminal.note(f"Next: approx evaluate MODEL --task {name}")


def _ability(name: str, causal: bool | None) -> dict[str, Any]:
    """What a mechanism can do, and whether it fits a family that attends causally or not, if one was asked for."""
    from approx.mechanisms import MECHANISMS

    kind, origin = MECHANISMS[name], MECHANISMS.origin(name)
    return {
        "name": name,
        "package": None if origin is None else origin.pinned,
        "bidirectional": kind.supports_bidirectional,
        "causal": kind.supports_causal,
        "decode": kind.supports_decode,
        "decode_state": kind.decode_state if kind.supports_causal else None,
        "padding": kind.padding,
        "gradient": kind.gradient,
        "compiles": kind.compiles,
        "trainable": kind.trainable,
        "settings": kind.defaults(),
        "exact_when": kind.exact_when,
        "source": kind.source,
        **({} if causal is None else {"fits": kind.supports_causal if causal else kind.supports_bidirectional}),
    }


def _mechanism(name: str) -> dict[str, Any]:
    from approx.mechanisms import MECHANISMS

    kind = MECHANISMS[name]
    make = partial(kind, 2, 16, causal=not kind.supports_bidirectional, scale=0.25)
    meanings, defaults = arguments(kind), kind.defaults()
    return {
        "description": description(kind),
        "settings": {one: _setting(make, one, value, meanings) for one, value in defaults.items()},
    }


def _task(name: str) -> dict[str, Any]:
    from approx.tasks import ORDER, SHARED, TASKS, kind_of, open_task, settings_of

    task, kind = open_task(name), kind_of(name)
    meanings, reading = ORDER | SHARED | arguments(kind), arguments(kind.read)
    return {
        "name": name,
        "package": None if (origin := TASKS.origin(name)) is None else origin.pinned,
        "description": description(kind),
        "head": task.head.name,
        "auto_class": task.head.auto_class,
        "metrics": list(task.metrics),
        "labels": list(task.labels),
        "dataset": task.dataset,
        "data": reading.get("data", "none: its examples are generated"),
        "split": reading.get("split", ""),
        "columns": [*task.fields, *task.optional_fields, "id", "group"] if task.fields else [],
        "settings": {
            one: _setting(partial(open_task, name), one, value, meanings) for one, value in settings_of(name).items()
        },
    }


def _metrics(name: str) -> dict[str, dict[str, str]]:
    from approx.tasks import open_task
    from approx.tasks.metrics import METRICS

    return {
        metric: {
            "unit": "percent" if made.fraction else "its own",
            "margin": f"{made.margin:g} {'points' if made.fraction else '% of the base'}",
            "better": "lower" if made.lower_is_better else "higher",
            "meaning": description(made)[0],
        }
        for metric in open_task(name).metrics
        for made in [METRICS[metric]]
    }


def _setting(make: Callable[..., Any], name: str, default: Any, meanings: dict[str, str]) -> dict[str, Any]:
    return {"default": default, "allowed": _allowed(make, name), "meaning": meanings.get(name, "")}


def _allowed(make: Callable[..., Any], setting: str) -> str:
    """The allowed values of a setting, as the message for a wrong value lists them; empty if all are allowed."""
    try:
        make(**{setting: object()})
    except ApproxError as error:
        return error.allowed
    except TypeError:
        return ""
    return ""


def _settings(settings: dict[str, dict[str, Any]]) -> Any:
    if not settings:
        return "It has no settings."
    rows = [[name, str(one["default"]), one["allowed"], one["meaning"]] for name, one in settings.items()]
    return table(["setting", "default", "allowed", "meaning, and when to change it"], rows)
