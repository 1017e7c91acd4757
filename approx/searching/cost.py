"""The time of each candidate at each site, measured in the whole model; kept per machine and version."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from approx.errors import ApproxError, Exit
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.evaluation.prediction_cache import fingerprint
from approx.evaluation.record import environment
from approx.evaluation.record_speed import Speed
from approx.measuring.identity import computed_by, identity
from approx.measuring.measure import Progress, measure_speed
from approx.planning.anatomy import Site
from approx.recipe import BASE
from approx.searching.candidates import Candidate
from approx.searching.composition import Choice, Composer
from approx.searching.options import SearchStage
from approx_kernels.runtime.atomic_file import write_whole
from approx_kernels.runtime.cache_folder import cache_folder

# The base as it is, beside the fastest exact attention.
_UNCHANGED = "unchanged"
_ROUNDS, _SECONDS = 8, 0.5


@dataclass(frozen=True)
class Costs:
    """Median times of one forward pass, in milliseconds.

    Attributes:
        exact: With the fastest exact attention.
        unchanged: Of the base as it is.
        ceiling: Without attention.
        saved: What a candidate adds at each site, [sites, candidates], mostly negative; infinite where it cannot be used.
            The last candidate is to change nothing.
        crowded: Whether other programs took part of the machine.
    """

    exact: float
    unchanged: float
    ceiling: float
    saved: NDArray[np.float64]
    crowded: bool

    def speed(self, milliseconds: float) -> float:
        """The speed-up of a time over the fastest exact attention."""
        return self.exact / milliseconds


def measure(
    composer: Composer, candidates: Sequence[Candidate], stage: SearchStage, *, seed: int, progress: Progress
) -> Costs:
    """Time every candidate at all sites of a kind at once, beside the base and the base without attention.

    Times are medians of interleaved rounds. Sites are of a kind if they have the same heads and the same form.

    Raises:
        ApproxError: if the length does not fit the positions, or memory runs out.
    """
    base = composer.base
    kinds: dict[tuple[Any, ...], list[Site]] = {}
    for site in composer.anatomy.sites:
        kinds.setdefault((site.heads, site.key_heads, site.head_dim, site.causal, site.fixed_length), []).append(site)
    timed: dict[str, tuple[Candidate, list[Site]]] = {}
    for number, sites in enumerate(kinds.values()):
        for one in candidates:
            if one.on(sites[0]):
                timed[f"{one.name} ({number})"] = (one, sites)
    # The key already includes a hash of the code.
    machine = {
        key: value for key, value in environment(torch.get_num_threads()).items() if key not in ("approx", "git_commit")
    }
    about = fingerprint(
        identity(base), [(label, one.rule.to_dict(), one.heads) for label, (one, _) in timed.items()],
        stage.length, stage.batch, stage.task, stage.data, stage.settings, stage.split,
        computed_by(base.model.device), machine, seed,
    )  # fmt: skip
    kept = cache_folder() / "search" / f"{about}.json"
    medians = _kept(kept, timed)
    if medians is None:
        medians = _medians(composer, timed, stage, seed=seed, progress=progress)
        if not medians["crowded"]:
            _keep(kept, medians)
    saved = np.full((len(composer.anatomy.sites), len(candidates) + 1), np.inf)
    saved[:, -1] = 0.0
    names = {one.name: column for column, one in enumerate(candidates)}
    for label, (one, sites) in timed.items():
        for site in sites:
            saved[site.layer, names[one.name]] = (medians[label] - medians[_UNCHANGED]) / len(sites)
    return Costs(medians[BASE], medians[_UNCHANGED], medians["ceiling"], saved, bool(medians["crowded"]))


def race(models: Mapping[str, Any], stage: SearchStage, *, seed: int, rounds: int, progress: Progress) -> Speed:
    """Time models, the base first, at the length of a search.

    Raises:
        ApproxError: as for `measure`.
    """
    texts = None
    if stage.task is not None:
        texts = EvaluateStage(task=stage.task, data=stage.data, settings=stage.settings, split=stage.split, limit=64)
    grid = BenchStage(
        lengths=[stage.length], batches=[stage.batch], rounds=rounds, seconds=_SECONDS,
        inputs="synthetic" if texts is None else "real",
    )  # fmt: skip
    return measure_speed(models, grid, texts, seed=seed, progress=progress)[0]


def _medians(
    composer: Composer,
    timed: Mapping[str, tuple[Candidate, list[Site]]],
    stage: SearchStage,
    *,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    models = {BASE: composer.base, _UNCHANGED: replace(composer.base)}
    for label, (one, sites) in timed.items():
        choices = [
            Choice(one, range(one.heads or 0)) if site in sites else Choice(None) for site in composer.anatomy.sites
        ]
        models[label] = composer.make(choices)
    row = race(models, stage, seed=seed, rounds=_ROUNDS, progress=progress)
    if row.base.median_ms is None or row.ceiling is None or row.ceiling.median_ms is None:
        raise ApproxError(
            f"Exact attention ran out of memory at {stage.length} tokens, so there is nothing to compare with. Search at a shorter "
            "--length or a smaller --batch-size.",
            Exit.MISSING,
        )
    medians: dict[str, Any] = {BASE: row.base.median_ms, "ceiling": row.ceiling.median_ms, "crowded": row.crowded}
    medians |= {one.name: np.inf if one.median_ms is None else one.median_ms for one in row.variants}
    return medians


def _kept(path: Any, timed: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        medians = json.loads(path.read_text(encoding="utf-8"))
        return medians if medians.keys() >= {BASE, "ceiling", _UNCHANGED, "crowded", *timed} else None
    except (OSError, ValueError, AttributeError):
        return None


def _keep(path: Any, medians: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(medians))
