"""What healing gives back: the table of docs/healing.md, from the records named heal-*."""

from pathlib import Path

from approx.evaluation.options import BASE
from approx.evaluation.record import QualityVariant, Record, Trained
from approx.publishing import wording
from approx.recipe import HEALED, TRAINED
from approx.tasks.metrics import METRICS
from reports import sources

_BEGIN, _END = "<!-- healed: made by reports/refresh.py -->", "<!-- end of healed -->"


def in_page(page: str, records: Path) -> str:
    """The page with its table made again between its markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tables = [table(sources.opened(records, path.name), path.name) for path in sorted(records.glob("heal-*"))]
    return "\n".join([f"{before}{_BEGIN}", *tables, f"{_END}{after}"])


def table(made: Record, name: str) -> str:
    """One record: a row for each variant, with its score before and after training, for each of its tasks."""
    rows = [
        f"**{made.title}**",
        "",
        "| attention | without training | healed | against exact attention | training |",
        "|---|--:|--:|--:|---|",
    ]
    trained = {one.name: one for one in made.trainings}
    for entry in made.quality:
        metric = entry.metric
        scored = {one.name: one for one in entry.variants}
        exact = entry.base.scores[metric]
        if len(made.quality) > 1:
            rows.append(f"| *{entry.task}, {entry.split}* | | | | |")
        after = scored.get(TRAINED)
        cells = [_score(metric, exact), "–" if after is None else _with_interval(metric, after)]
        text = ""
        if after is not None:
            text = f"{against(metric, after.scores[metric], exact)}, {_direction(metric, after)}"
        rows.append(f"| {BASE} | {' | '.join(cells)} | {text} | {_training(trained.get(TRAINED))} |")
        for variant in made.variants:
            healed = scored.get(variant.name + HEALED)
            if healed is None:
                continue
            value = healed.scores[metric]
            cells = [
                _with_interval(metric, scored[variant.name]),
                _with_interval(metric, healed),
                f"{against(metric, value, exact)}, {_direction(metric, healed)}",
                _training(trained.get(healed.name)),
            ]
            rows.append(f"| {variant.name} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", f"From {sources.where(made, name, '../reports')}.", ""])


def against(metric: str, value: float, exact: float) -> str:
    """A score beside that of exact attention: the share kept, or how much more of what should be small."""
    if not METRICS[metric].lower_is_better:
        return f"{100 * value / exact:.1f} % kept"
    if METRICS[metric].fraction:
        return f"{100 * (value - exact):+.1f} points"
    return f"{100 * (value / exact - 1):+.1f} %"


def _score(metric: str, value: float) -> str:
    return f"{100 * value:.1f}" if METRICS[metric].fraction else f"{value:.3f}"


def _with_interval(metric: str, variant: QualityVariant) -> str:
    score = _score(metric, variant.scores[metric])
    if variant.interval is None:
        return score
    scale, digits = (100, 1) if METRICS[metric].fraction else (1, 4)
    low, high = (scale * end for end in variant.interval)
    exact = "" if wording.tested(variant) else "; attention is exact on these inputs"
    return f"{score} ({low:+.{digits}f} … {high:+.{digits}f}{exact})"


def _direction(metric: str, variant: QualityVariant) -> str:
    """Whether the interval of a difference is all on one side of exact attention."""
    if variant.interval is None:
        return "no interval"
    low, high = variant.interval if METRICS[metric].lower_is_better else (-variant.interval[1], -variant.interval[0])
    return "worse" if low > 0 else "better" if high < 0 else "no clear change"


def _training(trained: Trained | None) -> str:
    if trained is None:
        return ""
    parts = [f"{phase.mode} {wording.count(phase.steps)} steps" for phase in trained.phases]
    return f"{', '.join(parts)}; {wording.duration(sum(phase.seconds for phase in trained.phases))}"
