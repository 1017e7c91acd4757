"""Check a search: the rank correlation of predicted and measured damage over random plans, and the area under its front.

    python bench/search.py MODEL plan-search --options '{"task": "squad", "length": 384, "budget": "loss<=0.5"}'

The options are those of the search, whose folder holds its sensitivities. The area (hypervolume) is that of all
speeds and losses that some measured plan beats, with 1x and `--worst` points as its corner, for uniform plans alone and
with the found ones.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy import stats

from approx.checkpoints.checkpoint import load
from approx.evaluation import record
from approx.evaluation.record import Record
from approx.progress import silent
from approx.searching.options import SearchStage
from approx.searching.search import SENSITIVITIES, Search, loss_in_points
from approx.validation import build


def correlation(search: Search, count: int, seed: int) -> tuple[float, float]:
    """Rank correlation of predicted damage with measured divergence and with measured loss, over random plans."""
    table = search.damages()
    random = np.random.default_rng(seed)
    predicted, divergences, losses = [], [], []
    while len(predicted) < count:
        share = random.random()
        plan = []
        for damages in table:
            usable = np.flatnonzero(np.isfinite(damages[:-1]))
            plan.append(int(random.choice(usable)) if random.random() < share else len(damages) - 1)
        if all(choice == table.shape[1] - 1 for choice in plan):
            continue
        choices = search.trials.choices(tuple(plan))
        measured = search.judge.measure(search.composer.make(choices).model, search.judge.search)
        predicted.append(sum(float(table[site, choice]) for site, choice in enumerate(plan)))
        divergences.append(measured.divergence)
        losses.append(measured.loss)
        print(
            f"{len(predicted)}: predicted {predicted[-1]:.4g}, divergence {measured.divergence:.4g}, loss {measured.loss}"
        )
    return _ranks(predicted, divergences), _ranks(predicted, losses)


def _ranks(first: list[float], second: list[float]) -> float:
    return float(np.corrcoef([stats.rankdata(first), stats.rankdata(second)])[0, 1])


def area(points: Iterable[tuple[float, float]], worst: float) -> float:
    """The area of all (speed, loss) that some point beats, from (1, worst) on."""
    total, least = 0.0, worst
    ordered = sorted((point for point in points if point[0] > 1), reverse=True)
    for number, (speed, loss) in enumerate(ordered):
        least = min(least, max(loss, 0.0))
        lower = ordered[number + 1][0] if number + 1 < len(ordered) else 1.0
        total += (speed - lower) * (worst - least)
    return total


def points(made: Record) -> dict[str, tuple[float, float]]:
    """Speed-up and loss in points of each plan of a search's record."""
    task, row = made.quality[0], made.speed[0]
    speeds = {one.name: one.ratio for one in row.variants}
    return {
        one.name: (speed, loss_in_points(task, one.name)[0])
        for one in task.variants
        if (speed := speeds.get(one.name)) is not None
    }


def main() -> None:
    """Print both figures, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path, help="the folder of the search")
    parser.add_argument("--options", required=True, help="options of the search as JSON, as in a recipe")
    parser.add_argument("--plans", type=int, default=50, help="random plans")
    parser.add_argument("--worst", type=float, default=20.0, help="loss at the corner of the area, in points")
    parser.add_argument("-o", "--output", type=Path, help="file for the figures")
    asked = parser.parse_args()
    stage = build(SearchStage, "search", **json.loads(asked.options))
    search = Search(load(asked.model), stage, asked.folder, resume=True, seed=0, progress=silent)
    search.know(asked.folder / SENSITIVITIES)
    figures: dict[str, float | int] = {"plans": asked.plans}
    if asked.plans:
        with_divergence, with_loss = correlation(search, asked.plans, seed=1)
        figures |= {"rank correlation with divergence": with_divergence, "rank correlation with loss": with_loss}
    measured = points(record.load(asked.folder / "record.json"))
    uniform = {one.name for one in search.candidates}
    figures["area of uniform plans"] = area((one for name, one in measured.items() if name in uniform), asked.worst)
    figures["area of all plans"] = area(measured.values(), asked.worst)
    text = json.dumps(figures, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
