"""Join records of the same weights and plans, so that quality and speed that were measured apart give one answer."""

import json
from collections.abc import Sequence
from typing import Any

from approx.errors import ApproxError
from approx.evaluation.record_model import Quality, Record, Variant
from approx.evaluation.record_speed import Speed

# What speeds depend on; records whose machines differ in it stay apart.
_MACHINE = ("processor", "cores", "threads", "gpu", "platform", "python", "torch", "triton")


def joined(records: Sequence[Record]) -> list[Record]:
    """Join each record to the first one of the same models, where both can stand in one section.

    Models are the same if their weights and plans are, whatever their names. Records stay apart if they have scores of
    the same examples, or speeds of different machines or of the same lengths.

    Raises:
        ApproxError: if a record is there twice.
    """
    made: list[Record] = []
    for number, record in enumerate(records):
        if record in records[:number]:
            raise ApproxError(f"The record '{record.title}' was given twice. Give each record once.")
        place = next((place for place, other in enumerate(made) if _fit(other, record)), None)
        if place is None:
            made.append(record)
        else:
            made[place] = _join(made[place], record)
    return made


def same_models(one: Record, other: Record) -> dict[str, str]:
    """Names of the models of `other` -> those of `one`, for models with the same weights and plan."""
    known = {_model(variant, one): variant.name for variant in one.variants}
    return {variant.name: known[key] for variant in other.variants if (key := _model(variant, other)) in known}


def same_machine(one: Record, other: Record) -> bool:
    """Whether the speeds of two records can be compared."""
    return all(one.environment.get(key) == other.environment.get(key) for key in _MACHINE)


def _model(variant: Variant, record: Record) -> str:
    # Older records know the weights of the base only.
    weights = variant.weights_sha256 or record.checkpoint.weights_sha256 or f"unknown, of record {id(record)}"
    plan = [layer.model_dump(include={"layer", "heads", "mechanism", "settings"}) for layer in variant.layers]
    return json.dumps([weights, plan], sort_keys=True)


def _fit(one: Record, other: Record) -> bool:
    names = same_models(one, other)
    whole = names and len(names) == min(len(one.variants), len(other.variants))
    scored = {_examples(task) for task in one.quality} & {_examples(task) for task in other.quality}
    timed = {_setting(row) for row in one.speed} & {_setting(row) for row in other.speed}
    apart = one.speed and other.speed and not same_machine(one, other)
    return bool(whole) and not scored and not timed and not apart


def _examples(task: Quality) -> tuple[Any, ...]:
    return task.task, task.split, task.examples, *task.notes


def _setting(row: Speed) -> tuple[Any, ...]:
    return row.device, row.dtype, row.threads, row.batch, row.mode, row.inputs, row.fast_products, row.length


def _join(one: Record, other: Record) -> Record:
    names = same_models(one, other)

    def renamed(part: Any) -> Any:
        return part.model_copy(update={"name": names.get(part.name, part.name)})

    def with_names(part: Any) -> Any:
        return part.model_copy(update={"variants": [renamed(entry) for entry in part.variants]})

    # The machine matters for speeds; scores hardly depend on it.
    timed = other if other.speed and not one.speed else one
    added = [renamed(variant) for variant in other.variants if variant.name not in names]
    return one.model_copy(
        update={
            "title": "; ".join(dict.fromkeys((one.title, other.title))),
            "notice": " ".join(dict.fromkeys(text for text in (one.notice, other.notice) if text)) or None,
            "command": "\n".join(dict.fromkeys((one.command, other.command))),
            "recipe": one.recipe or other.recipe,
            "variants": [*one.variants, *added],
            "quality": [*one.quality, *map(with_names, other.quality)],
            "speed": [*one.speed, *map(with_names, other.speed)],
            "crossover": [*one.crossover, *map(renamed, other.crossover)],
            "trainings": [*one.trainings, *(new for new in map(renamed, other.trainings) if new not in one.trainings)],
            "environment": timed.environment,
        }
    )
