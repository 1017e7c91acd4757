"""Join records of the same weights and plans, so that quality and speed that were measured apart give one answer."""

import json
from collections.abc import Sequence
from typing import Any

from approx.errors import ApproxError
from approx.evaluation.record_model import Quality, Record, Variant
from approx.evaluation.record_speed import Speed
from approx.publishing import wording

# What speeds depend on; records whose machines differ in it stay apart.
_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")


def joined(records: Sequence[Record]) -> list[Record]:
    """Join records of the same models, where they can stand in one section.

    Models are the same if their weights and plans are, whatever their names.

    Raises:
        ApproxError: if a record is there twice.
    """
    made: list[Record] = []
    for number, record in enumerate(records):
        if record in records[:number]:
            raise ApproxError(f"The record '{record.title}' was given twice. Give each record once.")
        place = len(made)
        # What a record has grown to may fit one that it did not fit before.
        while (found := next((n for n, other in enumerate(made) if not hindrance(other, record)), None)) is not None:
            place, record = found, _join(made.pop(found), record)
        made.insert(place, record)
    return made


def apart(records: Sequence[Record]) -> list[list[str]]:
    """Why each record shares its section with none of the others: a sentence for each reason."""
    told = []
    for one in records:
        reasons: dict[str, list[str]] = {}
        for other in records:
            if other is not one and (reason := hindrance(one, other)):
                reasons.setdefault(reason, []).append(other.title)
        told.append([f"Apart from {'; '.join(titles)}: {reason}." for reason, titles in reasons.items()])
    return told


def hindrance(one: Record, other: Record) -> str | None:
    """Why two records cannot share a section; None if they can."""
    names = same_models(one, other)
    if not names:
        return _no_model(one, other)
    if len(names) < min(len(one.variants), len(other.variants)):
        return f"only {', '.join(names)} has the same weights and plan in both"
    if {variant.name for variant in other.variants if variant.name not in names} & {one.name for one in one.variants}:
        return "they give one name to different models"
    if (one.checkpoint.family, one.checkpoint.layers) != (other.checkpoint.family, other.checkpoint.layers):
        return "their bases differ"
    bases = one.checkpoint.weights_sha256, other.checkpoint.weights_sha256
    if one.quality and other.quality and bases[0] != bases[1]:
        return "their scores are compared with different bases"
    if twice := {_examples(task) for task in one.quality} & {_examples(task) for task in other.quality}:
        return f"both have scores of {min(twice)[0]}"
    if one.speed and other.speed and not same_machine(one, other):
        return "their speeds are of different machines or versions"
    if again := {_setting(row) for row in one.speed} & {_setting(row) for row in other.speed}:
        return f"both have speeds at {wording.count(min(again)[-1])} tokens"
    return None


def same_models(one: Record, other: Record) -> dict[str, str]:
    """Names of the models of `other` -> those of `one`, for models with the same weights and plan."""
    known = {_model(variant, one): variant.name for variant in one.variants}
    return {variant.name: known[key] for variant in other.variants if (key := _model(variant, other)) in known}


def same_machine(one: Record, other: Record) -> bool:
    """Whether the speeds of two records can be compared."""
    return all(one.environment.get(key) == other.environment.get(key) for key in _MACHINE)


def _model(variant: Variant, record: Record) -> str:
    return _weights(variant, record) + _plan(variant)


def _weights(variant: Variant, record: Record) -> str:
    # Older records know the weights of the base only.
    return variant.weights_sha256 or record.checkpoint.weights_sha256 or f"unknown, of record {id(record)}"


def _plan(variant: Variant) -> str:
    plan = [layer.model_dump(include={"layer", "heads", "mechanism", "settings"}) for layer in variant.layers]
    return json.dumps(plan, sort_keys=True)


def _no_model(one: Record, other: Record) -> str:
    if not one.variants or not other.variants:
        return "one of them has no converted model"
    plans = [{_plan(variant) for variant in record.variants} for record in (one, other)]
    weights = [{_weights(variant, record) for variant in record.variants} for record in (one, other)]
    if plans[0] & plans[1]:
        return "their models have the same plan, but not the same weights"
    if weights[0] & weights[1]:
        return "their models have the same weights, but not the same plan"
    return "their models have other weights and another plan"


def _examples(task: Quality) -> tuple[Any, ...]:
    return task.task, task.split, task.examples, task.details


def _setting(row: Speed) -> tuple[Any, ...]:
    return row.device, row.dtype, row.threads, row.batch, row.mode, row.inputs, row.fast_products, row.length


def _join(one: Record, other: Record) -> Record:
    names = same_models(one, other)

    def renamed(part: Any) -> Any:
        return part.model_copy(update={"name": names.get(part.name, part.name)})

    def with_names(part: Any) -> Any:
        return part.model_copy(update={"variants": [renamed(entry) for entry in part.variants]})

    # The machine matters for speeds, which scores hardly depend on; the base for scores.
    timed = other if other.speed and not one.speed else one
    scored = other if other.quality and not one.quality else one
    added = [renamed(variant) for variant in other.variants if variant.name not in names]
    return one.model_copy(
        update={
            "title": "; ".join(dict.fromkeys((one.title, other.title))),
            "notice": " ".join(dict.fromkeys(text for text in (one.notice, other.notice) if text)) or None,
            "command": "\n".join(dict.fromkeys((one.command, other.command))),
            "recipe": one.recipe or other.recipe,
            "checkpoint": scored.checkpoint,
            "variants": [*one.variants, *added],
            "quality": [*one.quality, *map(with_names, other.quality)],
            "speed": [*one.speed, *map(with_names, other.speed)],
            "crossover": [*one.crossover, *map(renamed, other.crossover)],
            "trainings": [*one.trainings, *(new for new in map(renamed, other.trainings) if new not in one.trainings)],
            "environment": timed.environment,
        }
    )
