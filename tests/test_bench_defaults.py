"""Choosing defaults from a record of settings: the rules, and that every swept setting exists."""

import pytest

from approx.mechanisms import MECHANISMS
from bench.defaults import SWEEPS, best, cases, report


def made(swept, results):
    """A record of one swept setting of `clustered`: value -> (error, ms) on each of two data sets."""
    names = ("short", "long")
    rows = [
        {
            "mechanism": "clustered",
            "swept": swept,
            "value": value,
            "found": {name: {"error": error, "ms": ms} for name, (error, ms) in zip(names, pairs, strict=True)},
        }
        for value, pairs in results.items()
    ]
    return {"sources": [{"name": name} for name in names], "cases": rows}


@pytest.mark.parametrize(
    ("swept", "results", "now", "chosen"),
    [
        ("iterations", {1: [(0.3, 1), (0.2, 1)], 3: [(0.2, 2), (0.1, 2)], 10: [(0.2, 4), (0.1, 4)]}, 10, 3),
        ("iterations", {1: [(0.2, 1), (0.2, 1)], 10: [(0.2, 4), (0.1, 4)]}, 10, 10),
        ("topk", {8: [(0.1, 1), (0.1, 1)], 32: [(0.2, 2), (0.2, 2)]}, 32, 8),
        ("topk", {8: [(0.3, 1), (0.1, 1)], 32: [(0.2, 2), (0.2, 2)]}, 32, 32),
        ("clusters", {None: [(0.2, 2), (0.2, 2)], 25: [(0.3, 1), (0.1, 1)]}, None, None),
        ("hash_bias", {True: [(0.2, 2), (0.2, 2)], False: [(0.199, 1.99), (0.199, 1.99)]}, True, True),
    ],
)
def test_a_default_moves_only_where_nothing_is_lost(swept, results, now, chosen):
    assert best(made(swept, results), "clustered", swept, now) == chosen


def test_settings_that_are_swept_exist_and_the_page_names_them(tmp_path):
    for mechanism, sweeps in SWEEPS.items():
        assert set(sweeps) <= set(MECHANISMS[mechanism].defaults())
    source = {"name": "texts", "texts": 1, "tokens": [10, 20], "sdpa_ms": 3.0}
    rows = [case | {"found": {"texts": {"error": 0.5, "ms": 2.0}}} for case in cases()]
    record = {
        "command": "python bench/defaults.py",
        "seeds": 1,
        "crowded": True,
        "sources": [source],
        "cases": rows,
        "environment": {"processor": "a processor", "torch": "2"},
    }
    page = report(record, tmp_path)
    assert all(f"## {mechanism}" in page for mechanism in SWEEPS)
    assert "the times are rough" in page
    assert "`clusters` auto, " in page
    assert "`clusters` nothing, since the default, auto, was not measured" in report(
        record | {"cases": [row for row in rows if row["value"] != "auto"]}, tmp_path
    )
    assert (tmp_path / "defaults.svg").read_text(encoding="utf-8").startswith("<?xml")
