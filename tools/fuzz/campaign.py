"""A campaign: cases of all kinds for so many seconds, what failed made smaller and written, the figures."""

import json
import platform
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz.cases import FOUND, Case, Verdict, judged, read, stored
from fuzz.kinds import KINDS
from fuzz.minimise import minimised
from fuzz.place import made
from fuzz.workers import Order, Worker, each, workers

_SMALLER_SECONDS = 60


def campaign(
    seed: int, seconds: float, jobs: int, scratch: Path, folder: Path, only: list[str] | None, output: Path | None
) -> int:
    """Run; 0 if nothing failed, else 1."""
    template = made(scratch / "place")
    whole = only or list(KINDS)
    _read_undamaged(template, whole)
    tell(f"seed {seed}: {len(whole)} kinds of files, {jobs} processes, {seconds:.0f} seconds")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures: dict[str, list[tuple[Order, Case, Verdict]]] = defaultdict(list)

    def count(order: Order, case: Case, verdict: Verdict, _: float) -> None:
        counts[case.kind][verdict.status] += 1
        if verdict.status == "failed":
            if verdict.where not in failures:
                tell(f"FAILED: {verdict.where} ({order})")
            failures[verdict.where].append((order, case, verdict))

    began = time.monotonic()
    with workers(template, jobs) as crew:
        orders = _orders(seed, began + seconds, whole, spent := defaultdict(float))

        def timed(order: Order, case: Case, verdict: Verdict, took: float) -> None:
            spent[case.kind] += took
            count(order, case, verdict, took)

        each(crew, orders, timed)
        took = time.monotonic() - began
        written = [_written(crew[0], found, folder) for found in failures.values()]
    total = sum(sum(one.values()) for one in counts.values())
    tell(f"{total:,} inputs in {took:.0f} seconds, {len(failures)} kinds of failures (seed {seed})")
    for file, (where, found) in zip(written, failures.items(), strict=True):
        tell(f"  {len(found)} times {where}: {file}")
    for kind in whole:
        tell(f"{kind}: {dict(counts[kind])}, {1000 * spent[kind] / max(1, sum(counts[kind].values())):.0f} ms each")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(_figures(seed, took, jobs, counts, failures), indent=1) + "\n", encoding="utf-8")
    return int(bool(failures))


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def _read_undamaged(template: Path, kinds: list[str]) -> None:
    """Check that what is not damaged is read, and load what every process needs."""
    place, wrong = template.with_name("copy"), []
    shutil.copytree(template, place)
    for kind in kinds:
        for pattern in KINDS[kind].targets:
            files = [path for path in template.glob(pattern) if path.is_file()]
            assert files, f"{kind}: no file {pattern}"
            for file in files:
                verdict = judged(Case(kind, str(file.relative_to(template)), file.read_bytes()), place, template)
                wrong += [] if verdict.status == "read" else [f"{kind}, {file.name}: {verdict.where} {verdict.detail}"]
    assert not wrong, "\n".join(wrong)


def _orders(seed: int, until: float, kinds: list[str], spent: dict[str, float]) -> Iterator[Order]:
    """Cases of the kind that has had the least of its share of the time."""
    numbers: Counter[str] = Counter()
    while time.monotonic() < until:
        kind = min(kinds, key=lambda one: (spent[one] / KINDS[one].share, numbers[one]))
        yield kind, seed, numbers[kind]
        numbers[kind] += 1
        # Until its answer comes, so that both processes do not take the same slow kind.
        spent[kind] += 1e-3


def _written(worker: Worker, found: list[tuple[Order, Case, Verdict]], folder: Path) -> Path:
    """Make the smallest case of a failure smaller, and write it with its traceback."""
    _, case, verdict = min(found, key=lambda one: len(one[1].content or b""))
    until = time.monotonic() + _SMALLER_SECONDS

    def fails(content: bytes) -> bool:
        if time.monotonic() > until:
            return False
        worker.ask(Case(case.kind, case.target, content))
        return worker.answer()[1].where == verdict.where

    if case.content is not None and not verdict.where.startswith("a hang"):
        case = Case(case.kind, case.target, minimised(case.content, fails))
    file = stored(case, folder)
    file.with_suffix(".txt").write_text(verdict.detail, encoding="utf-8", errors="replace")
    return file


def _figures(
    seed: int, seconds: float, jobs: int, counts: dict[str, Counter[str]], failures: dict[str, Any]
) -> dict[str, Any]:
    return {
        "seed": seed,
        "seconds": round(seconds),
        "processes": jobs,
        "python": platform.python_version(),
        "inputs": sum(sum(one.values()) for one in counts.values()),
        "kinds": {kind: {name: counts[kind][name] for name in ("read", "refused", "failed")} for kind in KINDS},
        "failures": {where: len(found) for where, found in failures.items()},
        "fixed": dict(sorted(Counter(case.kind for case in read(FOUND)).items())),
    }
