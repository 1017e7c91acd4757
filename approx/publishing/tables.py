"""The tables of the report, as formatted text shared by the page and the Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from approx.evaluation.record import (
    Crossover,
    Quality,
    QualityVariant,
    Ratio,
    Speed,
    SpeedVariant,
    Timing,
    Variant,
    WorstExample,
)
from approx.publishing import wording
from approx.publishing.summary import PAYS, standing, variant_of, worthwhile_from

_AT_CHANCE, _BELOW_CHANCE = "at chance", "worse than chance"
# Other standings are even.
_TONES = {**dict.fromkeys(PAYS, "good"), "slower": "bad", "out of memory": "bad"}


def quality_table(task: Quality) -> dict[str, Any]:
    """Format one task: a row for exact attention and one for each variant."""
    metric = task.metric
    scale, digits = wording.scale(task), 2 if task.fraction else 3
    others = [name for name in task.base.scores if name != metric]
    rows = [
        {
            "name": entry.name,
            "score": wording.score(entry.scores.get(metric), task),
            "others": [wording.score(entry.scores.get(name), task) for name in others],
            "difference": wording.signed(entry.difference * scale, digits),
            "interval": wording.between(entry.interval, digits, scale),
            "test": entry.test,
            "p_value": _p_value(entry.p_value),
            "p_adjusted": None if entry.p_adjusted is None else _p_value(entry.p_adjusted),
            "margin": wording.margin(entry, task),
            "verdict": ", ".join(
                filter(None, (entry.verdict, _against_chance(entry.scores.get(metric), None, entry.at_chance, task)))
            ),
            "needed": wording.needed(entry, task),
            "tone": wording.tone(entry),
            "approximated": wording.approximated(entry, task),
            "worst": [
                shown
                for one in entry.worst
                # Some are worse by rounding alone.
                if (shown := _worst(one, task))
                and (shown["base"], shown["base_score"]) != (shown["converted"], shown["converted_score"])
            ],
            "more": [row for row in (_ablated(entry, task), _over_seeds(entry, task)) if row],
        }
        for entry in task.variants
    ]
    confidences = {wording.percent(entry.confidence) for entry in task.variants}
    return {
        "task": task.task,
        "split": task.split,
        "metric": metric,
        "others": others,
        "examples": "; ".join([wording.share_of_examples(task), *wording.rows(task)]),
        "units": "points" if task.fraction else wording.units(task),
        "better": "lower is better" if task.lower_is_better else "higher is better",
        "confidence": ", ".join(sorted(confidences)) or wording.percent(0.95),
        "base": {
            "score": wording.score(task.base.scores.get(metric), task),
            "others": [wording.score(task.base.scores.get(name), task) for name in others],
            "interval": wording.between(task.base.interval, digits, scale),
            "verdict": _against_chance(task.base.scores.get(metric), task.base.interval, task.base.at_chance, task),
        },
        "chance": None if task.chance is None else wording.score(task.chance, task),
        "rows": rows,
        "adjusted": any(row["p_adjusted"] for row in rows),
        "carried": _carried(task),
        "slices": _slices(task),
        "sliced_by": task.sliced_by or "tokens",
        "slice_metric": task.slice_metric or metric,
        "tokens": task.tokens
        and f"{wording.count(task.tokens.median)} tokens at the median, {wording.count(task.tokens.longest)} at most",
    }


def _worst(one: WorstExample, task: Quality) -> dict[str, str]:
    """An example that was lost, with what both models predicted and scored on it; no score where there is none."""

    def score(value: float | None) -> str:
        return "" if value is None else wording.score(value, task)

    return {
        "input": one.input or one.id,
        "target": one.target,
        "base": one.base,
        "converted": one.converted,
        "base_score": score(one.base_score),
        "converted_score": score(one.converted_score),
    }


def _against_chance(score: float | None, interval: Sequence[float] | None, flagged: bool, task: Quality) -> str:
    """`at chance`, or `worse than chance` if the interval is wholly beyond it; empty for a score that is better."""
    if not flagged:
        return ""
    if task.chance is None or score is None:
        return _AT_CHANCE
    # Records store no interval of a variant's score; the base's is as wide.
    ends = interval
    if ends is None and task.base.interval is not None:
        middle = task.base.scores.get(task.metric, score)
        ends = [end - middle + score for end in task.base.interval]
    worse = ends is not None and (ends[0] > task.chance if task.lower_is_better else ends[1] < task.chance)
    return _BELOW_CHANCE if worse else _AT_CHANCE


def speed_table(rows: list[Speed], crossovers: Iterable[Crossover]) -> dict[str, Any]:
    """Format one setting: a row per length with the ratio of every variant, and all times.

    Args:
        rows: Entries of "speed" that differ only in length, shortest first.
        crossovers: The record's "crossover".
    """
    names = list(dict.fromkeys(entry.name for row in rows for entry in row.variants))
    about = (rows[0].batch, rows[0].dtype, rows[0].device, rows[0].mode)
    crossed = {
        entry.name: entry.length
        for entry in crossovers
        if (entry.batch, entry.dtype, entry.device, entry.mode) == about
    }
    pays = [worthwhile_from(rows, name) for name in names]
    times = [line for row in rows for line in _times(row)]
    return {
        "setting": wording.setting(rows[0]),
        "inputs": rows[0].inputs,
        "names": names,
        "summary": [_summary(row, names) for row in rows],
        "crossover": [_from(crossed.get(name)) for name in names],
        "pays_from": [_from(length) for length in pays],
        "times": times,
        "decodes": rows[0].mode == "generate",
        "reads": any(row.base.prompt_ms is not None for row in rows),
        "implementations": any(line["implementations"] for line in times),
        "plain": _plain(rows, names),
        "crowded": any(row.crowded for row in rows),
    }


def plan_lines(variant: Variant) -> list[dict[str, str]]:
    """Group layers with the same mechanism and settings."""
    groups: dict[tuple[str, str], list[int]] = {}
    for layer in variant.layers:
        settings = ", ".join(f"{key} = {value}" for key, value in layer.settings.items())
        heads = f" (heads {layer.heads})" if layer.heads != "all" else ""
        groups.setdefault((layer.mechanism + heads, settings), []).append(layer.layer)
    lines = [
        {"layers": wording.layer_ranges(layers), "mechanism": mechanism, "settings": settings or wording.NOTHING}
        for (mechanism, settings), layers in groups.items()
    ]
    if variant.runtime is None:
        return lines
    runs = f"runs in {variant.runtime}"
    whole = {"layers": "all", "mechanism": "exact", "settings": runs}
    return [line | {"settings": f"{line['settings']}; {runs}"} for line in lines] or [whole]


def plan_words(variant: Variant) -> str:
    """The plan of a variant in one line: layers 0–3: clustered, clusters = 25."""
    lines = (f"layers {line['layers']}: {line['mechanism']}, {line['settings']}" for line in plan_lines(variant))
    return "; ".join(lines) or "exact"


def layer_error_table(variants: list[Variant]) -> dict[str, Any] | None:
    """Format the error of each converted layer: a row per variant, a column per layer; None if none was measured.

    The receipts hold the relative error of a layer's attention output, and the captured mass of mechanisms that drop
    keys.
    """
    receipts = [(variant.name, variant.receipt or {}) for variant in variants]
    measured = [(name, receipt) for name, receipt in receipts if receipt.get("errors")]
    if not measured:
        return None
    layers = sorted({int(layer) for _, receipt in measured for layer in receipt["errors"]})
    rows = []
    for name, receipt in measured:
        captured = receipt.get("captured_mass") or {}
        cells = [
            {
                "error": wording.percent(receipt["errors"].get(str(layer))),
                "kept": wording.percent(captured[str(layer)], 1) if captured.get(str(layer)) is not None else None,
            }
            for layer in layers
        ]
        rows.append({"name": name, "measured": wording.measured(receipt), "cells": cells})
    return {"layers": layers, "rows": rows, "masses": any(cell["kept"] for row in rows for cell in row["cells"])}


def _summary(row: Speed, names: list[str]) -> dict[str, Any]:
    base, ceiling = row.base, row.ceiling
    return {
        "length": wording.length(wording.count(row.length), row.seconds),
        "base": f"{wording.milliseconds(base.median_ms)} ms" if base.status == "ok" else base.status,
        "ceiling": wording.times(row.believed(ceiling).ratio) if ceiling else wording.NOTHING,
        "cells": [_cell(row, variant_of(row.variants, name)) for name in names],
    }


def _cell(row: Speed, entry: SpeedVariant | None) -> dict[str, Any]:
    kind = standing(row, entry)
    believed = row.believed(entry) if entry else None
    share = row.share(entry) if entry else None
    return {
        "ratio": wording.times(believed.ratio if believed else None),
        "interval": wording.between(believed.interval) if believed and believed.interval else None,
        "share": wording.percent(share) if share is not None else None,
        "verdict": kind,
        "tone": _TONES.get(kind, "even"),
    }


def _from(length: int | None) -> str:
    return f"{wording.count(length)} tokens" if length else "none"


def _times(row: Speed) -> list[dict[str, str]]:
    entries: list[tuple[str, Timing]] = [(f"exact ({row.baseline})", row.base)]
    if row.default:
        entries.append(("exact (default SDPA)", row.default))
    if row.ceiling:
        entries.append(("ceiling: attention removed", row.ceiling))
    entries += [(entry.name, entry) for entry in row.variants]
    return [
        {
            "length": wording.length(wording.count(row.length), row.seconds),
            "name": name,
            "median": wording.milliseconds(entry.median_ms),
            "quantiles": f"{wording.milliseconds(entry.p10_ms)} to {wording.milliseconds(entry.p90_ms)}"
            if entry.p10_ms is not None
            else wording.NOTHING,
            "ratio": wording.times(entry.ratio if isinstance(entry, Ratio) else None),
            "interval": wording.between(entry.interval if isinstance(entry, Ratio) else None),
            "peak": wording.milliseconds(entry.peak_mb),
            "samples": _samples(entry),
            "implementations": wording.implementations(entry),
            "status": entry.status,
            **(_decoded(entry) if row.mode == "generate" else {}),
        }
        for name, entry in entries
    ]


def _decoded(entry: Timing) -> dict[str, str]:
    figures = {"rate": entry.tokens_per_second, "cache": entry.cache_mb, "prompt": entry.prompt_ms}
    return {name: wording.milliseconds(figure) for name, figure in figures.items()}


def _plain(rows: list[Speed], names: list[str]) -> list[str]:
    """The variants that ran an op in plain PyTorch, with the lengths: lsh (lsh_attention, 512–2,048 tokens)."""
    at: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for entry in row.variants:
            for op, way in (entry.chosen or {}).items():
                if way in wording.PLAIN:
                    at.setdefault((entry.name, op), []).append(row.length)
    measured = [row.length for row in rows]
    return [
        f"{name} ({op}, {wording.lengths(at[name, op], measured)})"
        for name, op in sorted(at, key=lambda one: (names.index(one[0]), one[1]))
    ]


def _samples(entry: Timing) -> str:
    if "samples" not in entry.model_fields_set:
        return wording.NOTHING
    return f"{entry.samples} ({entry.rejected} rejected)" if entry.rejected else str(entry.samples)


def _slices(task: Quality) -> list[dict[str, str]]:
    return [
        {
            "name": entry.name,
            "range": f"{wording.count(part.from_)} to {wording.count(None if part.to is None else part.to - 1)}",
            "examples": wording.count(part.examples),
            "base": wording.score(part.base, task),
            "converted": wording.score(part.converted, task),
        }
        for entry in task.variants
        for part in entry.slices
    ]


def _carried(task: Quality) -> list[dict[str, str]]:
    """A row for each model that read texts in order: what it kept, and how long a token took."""
    kept = [("exact", task.base.carried), *((entry.name, entry.carried) for entry in task.variants)]
    return [
        {
            "name": name,
            "state": f"{one.state_bytes / 1e6:,.3f} MB",
            "reached": wording.count(one.reached),
            "tokens": wording.count(one.tokens),
            "time": f"{1e3 * one.seconds / max(one.tokens, 1):,.3g} ms",
        }
        for name, one in kept
        if one is not None
    ]


def _ablated(entry: QualityVariant, task: Quality) -> dict[str, str] | None:
    """A row for the score with the estimates switched off; None if nobody asked for it."""
    cut = entry.ablated
    if cut is None:
        return None
    score = cut.scores.get(task.metric)
    apart = None if score is None else (score - task.base.scores[task.metric]) * wording.scale(task)
    return {
        "name": f"{entry.name}, {cut.part} off",
        "score": wording.score(score, task),
        "difference": wording.signed(apart, 2 if task.fraction else 3),
        "text": wording.use(cut, task),
    }


def _over_seeds(entry: QualityVariant, task: Quality) -> dict[str, str] | None:
    """A row for the variation of the score over seeds; None if only one seed was scored."""
    seeds = entry.seeds
    if not seeds:
        return None
    if seeds.mean is None or seeds.low is None or seeds.high is None:
        text = "the same with every seed: nothing in it is random"
        return {"name": f"{entry.name}, over seeds", "score": "", "difference": "", "text": text}
    scale, digits = wording.scale(task), 2 if task.fraction else 3
    sd = None if seeds.sd is None else seeds.sd * scale
    return {
        "name": f"{entry.name}, over {len(seeds.scores)} seeds",
        "score": f"{wording.score(seeds.mean, task)} ± {wording.decimal(sd, digits)}",
        "difference": wording.signed((seeds.mean - task.base.scores[task.metric]) * scale, digits),
        "text": f"scores {wording.between((seeds.low, seeds.high), digits, scale)}",
    }


def _p_value(value: float | None) -> str:
    if value is None:
        return wording.NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
