"""A handwritten record with every case that a report must show."""

import copy

import pytest
from matplotlib.figure import Figure

from approx.publishing import patterns
from approx.publishing.report import write_report
from typed import record_of


def _timing(median: float | None, **more) -> dict:
    if median is None:
        figures = dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "peak_mb"))
        return {**figures, "samples": 0, "status": "out of memory", "ratio": None, "interval": None, **more}
    figures = {"median_ms": median, "p10_ms": median * 0.97, "p90_ms": median * 1.05, "peak_mb": median / 2}
    return {**figures, "samples": 12, "rejected": 1, "status": "ok", **more}


def _variant(name: str, base: float | None, median: float | None, ceiling: float | None, width: float = 0.03) -> dict:
    if base is None or median is None:
        return _timing(median, name=name, ratio=None, interval=None, share_of_ceiling=None, verdict=None)
    ratio = base / median
    interval = [ratio * (1 - width), ratio * (1 + width)]
    verdict = "faster" if ratio >= 1.03 and interval[0] > 1 else "no clear gain"
    share = ratio / ceiling if ceiling else None
    return _timing(median, name=name, ratio=ratio, interval=interval, share_of_ceiling=share, verdict=verdict)


def _row(length: int, base: float | None, free: float | None, variants: dict[str, float | None]) -> dict:
    ratio = base / free if base and free else None
    ceiling = None
    if free is not None:
        ceiling = _timing(free, ratio=ratio, interval=[ratio * 0.98, ratio * 1.02] if ratio else None)
    about = {"device": "cpu", "dtype": "float32", "threads": 2, "batch": 1, "length": length, "mode": "forward"}
    spread = {"ratio": 1.001, "interval": [0.985, 1.018]} if base else {"ratio": None, "interval": None}
    return {
        **about,
        "inputs": "real",
        "baseline": "default SDPA",
        "base": {key: value for key, value in _timing(base).items() if key not in ("ratio", "interval")},
        "ceiling": ceiling,
        "spread": spread,
        "variants": [_variant(name, base, median, ratio) for name, median in variants.items()],
    }


def _quality(name: str, score: float, difference: float, low: float, high: float, verdict: str, **more) -> dict:
    slices = [
        {"from": 0, "to": 16, "examples": 250, "base": 0.92, "converted": 0.918},
        {"from": 16, "to": 67, "examples": 622, "base": 0.885, "converted": 0.88},
    ]
    return {
        "name": name,
        "scores": {"accuracy": score},
        "difference": difference,
        "interval": [low, high],
        "confidence": 0.95,
        "test": "exact McNemar",
        "p_value": 0.0001 if verdict == "loss beyond margin" else 0.35,
        "margin": 0.005,
        "verdict": verdict,
        "needed_examples": None,
        "slices": slices,
        **more,
    }


_ERRORS = {str(layer): 0.03 * (layer + 1) for layer in range(5)}


def _plan(name: str, mechanism: str, settings: dict, **more) -> dict:
    layers = [{"layer": layer, "mechanism": mechanism, "settings": settings} for layer in range(5)]
    layers.append({"layer": 5, "mechanism": "sdpa", "settings": {}})
    return {
        "name": name,
        "layers": layers,
        "verified": True,
        "receipt": {"swapped": [0, 1, 2, 3, 4], "errors": _ERRORS},
        **more,
    }


RECORD = {
    "schema": 1,
    "title": "MiniLM on SST-2 <script>alert('title')</script> & “quotes”",
    "notice": "A demonstration, not a benchmark.",
    "command": "approx run recipes/sample.yaml --title '<b>'",
    "seed": 7,
    "recipe": {"text": "title: sample\nmechanisms:\n  - <improved-clustered> & others\n", "sha256": "ab" * 32},
    "checkpoint": {
        "name": "minilm-sst2",
        "revision": None,
        "weights_sha256": "cd" * 32,
        "family": "bert",
        "parameters": 22_713_986,
        "layers": 6,
        "positions": 4096,
    },
    "variants": [
        _plan("improved-clustered 25", "improved-clustered", {"clusters": 25, "topk": 32}),
        _plan("clustered 25", "clustered", {"clusters": 25}),
        _plan("linear", "linear", {}, verified=False, receipt=None),
        _plan("local <128> $x$", "local", {"window": 128}, receipt={"errors": _ERRORS, "captured_mass": {"0": 0.987}}),
        _plan("reservoir", "reservoir", {"size": 64}),
    ],
    "quality": [
        {
            "task": "glue/sst2",
            "split": "dev",
            "metric": "accuracy",
            "examples": 872,
            "subset": False,
            "truncated": 0,
            "base": {"scores": {"accuracy": 0.8956}, "interval": [0.8735, 0.9141]},
            "variants": [
                _quality("improved-clustered 25", 0.8956, 0.0, -0.004, 0.004, "no loss"),
                _quality("clustered 25", 0.8922, -0.0034, -0.0049, -0.0002, "loss within margin"),
                _quality("linear", 0.5092, -0.3864, -0.425, -0.347, "loss beyond margin"),
                _quality("local <128> $x$", 0.8945, -0.0011, -0.009, 0.007, "inconclusive", needed_examples=2950),
            ],
            "outputs": "sst2.parquet",
        },
        {
            "task": "glue/mrpc",
            "split": "dev",
            "metric": "f1",
            "examples": 100,
            "subset": True,
            "truncated": 3,
            "base": {"scores": {"accuracy": 0.86, "f1": 0.9}, "interval": [0.85, 0.94]},
            "variants": [
                {
                    **_quality("clustered 25", 0.0, 0.012, -0.01, 0.03, "inconclusive"),
                    "scores": {"accuracy": 0.87, "f1": 0.912},
                    "slices": [],
                }
            ],
            "outputs": None,
        },
    ],
    "speed": [
        _row(
            128,
            12.0,
            11.99,
            {"improved-clustered 25": 22.0, "clustered 25": 18.0, "linear": 12.1, "local <128> $x$": 12.4},
        ),
        _row(
            512,
            60.0,
            50.0,
            {"improved-clustered 25": 88.0, "clustered 25": 66.0, "linear": 53.0, "local <128> $x$": 57.0},
        ),
        _row(
            1024,
            150.0,
            100.0,
            {"improved-clustered 25": 152.0, "clustered 25": 125.0, "linear": 107.0, "local <128> $x$": 112.0},
        ),
        _row(
            2048,
            460.0,
            200.0,
            {"improved-clustered 25": 300.0, "clustered 25": 255.0, "linear": 220.0, "local <128> $x$": None},
        ),
        _row(
            4096,
            None,
            400.0,
            {"improved-clustered 25": 600.0, "clustered 25": 530.0, "linear": 440.0, "local <128> $x$": None},
        ),
    ],
    "crossover": [
        {"name": "improved-clustered 25", "batch": 1, "dtype": "float32", "device": "cpu", "length": 2048},
        {"name": "clustered 25", "batch": 1, "dtype": "float32", "device": "cpu", "length": 1024},
        {"name": "linear", "batch": 1, "dtype": "float32", "device": "cpu", "length": 512},
        {"name": "local <128> $x$", "batch": 1, "dtype": "float32", "device": "cpu", "length": None},
    ],
    "environment": {
        "approx": "0.1.0",
        "torch": "2.13.0+cpu",
        "transformers": "5.23.0",
        "triton": None,
        "python": "3.11.2",
        "platform": "Linux-x86_64",
        "processor": "A Processor With a Name",
        "cores": 2,
        "threads": 2,
        "gpu": None,
        "git_commit": "0123456789abcdef",
    },
}


@pytest.fixture
def record() -> dict:
    """A copy of the record that a test may change, as plain data."""
    return copy.deepcopy(RECORD)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, str]:
    """The report of the unchanged record: name and text of every file."""
    written = write_report([record_of(RECORD)], tmp_path_factory.mktemp("report"))
    return {path.name: path.read_text("utf-8") for path in written}


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures drawn during the test, as matplotlib objects."""
    drawn: list[Figure] = []

    def keep(figure: Figure, suffixes: list[str]) -> dict[str, bytes]:
        drawn.append(figure)
        return {}

    monkeypatch.setattr(patterns, "_files", keep)
    return drawn
