"""One cell of a sweep by itself: what it is called, what is kept of it, how it fails."""

import json
from pathlib import Path

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.pipeline import sweep_cell
from approx.pipeline.sweep_cell import Cell, Workshop, compute, failed
from approx.planning.plan import Plan, Rule
from tiny_study import tiny_checkpoint, tiny_data

TASK, GRID = EvaluateStage(task="needle"), BenchStage(lengths=[8, 16])


@pytest.fixture
def shop(tmp_path) -> Workshop:
    return Workshop(tmp_path / "sweep", "a title", None, None, "cpu", "auto", 0, True, "typed")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cells") / "base")


@pytest.mark.parametrize(
    ("cell", "title"),
    [
        (Cell("convert", "k", "base", "p", label="linear"), "convert linear"),
        (Cell("base", "k", "base", stage=TASK), "evaluate the exact base on needle"),
        (Cell("evaluate", "k", "base", "p", label="linear", stage=TASK), "evaluate linear on needle"),
        (Cell("bench", "k", "base", "p", label="linear", stage=GRID), "bench linear at 8, 16 tokens"),
    ],
)
def test_a_cell_says_in_words_what_it_is(cell, title):
    assert cell.title == title


def test_a_conversion_is_missing_without_its_folder_and_done_with_it(shop, base):
    rules = Plan((Rule("linear", "1"),)).to_data()
    cell = Cell("convert", "0123456789abcdef" * 2, str(base), "one", rules, label="linear")
    assert shop.state(cell) == "missing"
    made = compute(shop, cell, None)
    assert (made["status"], made["exit_code"], made["error"]) == ("done", 0, None)
    assert shop.state(cell) == "done"
    folder = shop.out / "converted" / "0123456789abcdef"
    assert shop.converted(cell.key) == folder
    kept = (folder / "config.json").stat().st_mtime_ns
    # What is there is whole, and not made again.
    assert compute(shop, cell, None)["status"] == "done"
    assert (folder / "config.json").stat().st_mtime_ns == kept
    folder.rename(folder.with_name("elsewhere"))
    assert shop.state(cell) == "missing"


def test_a_measured_cell_keeps_a_record_under_the_label_it_has_now(shop, base, tmp_path):
    rules = Plan((Rule("linear", "1"),)).to_data()
    conversion = Cell("convert", "c" * 32, str(base), "one", rules, label="linear")
    compute(shop, conversion, None)
    stage = EvaluateStage(task="glue/sst2", data=str(tiny_data(tmp_path)), limit=4)
    parts = {"rules": rules, "stage": stage, "folder": conversion.key}
    cell = Cell("evaluate", "e" * 32, str(base), "one", label="linear", **parts)
    threads = torch.get_num_threads()
    made = compute(shop, cell, threads)
    assert made["seconds"] > 0
    assert made["stage"]["limit"] == 4
    assert made["record"]["title"] == "a title"
    assert made["record"]["speed"] == []
    assert (shop.out / "cells" / f"{cell.key}.parquet").is_file()
    renamed = Cell("evaluate", "e" * 32, str(base), "two", label="features", **parts)
    found = shop.read(renamed)
    assert found is not None
    assert (found["plan"], found["title"]) == ("two", "evaluate features on glue/sst2")
    assert [one["name"] for one in found["record"]["variants"]] == ["features"]
    assert [one["name"] for one in found["record"]["quality"][0]["variants"]] == ["features"]
    alone = compute(shop, Cell("base", "b" * 32, str(base), stage=stage), None)
    assert alone["record"]["variants"] == []


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "failed"),
        ({"schema": 0}, "missing"),
        ({"key": "another"}, "missing"),
    ],
)
def test_only_the_outcome_of_the_cell_itself_counts(shop, change, state):
    cell = Cell("evaluate", "k" * 32, "base", "one", label="linear", stage=TASK)
    failed(shop, cell, ApproxError("no such task", Exit.UNSUPPORTED))
    file = shop.out / "cells" / f"{cell.key}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert shop.state(cell) == state


@pytest.mark.parametrize("text", ["", "{", "[1, 2]"])
def test_a_damaged_outcome_is_none(shop, text):
    cell = Cell("evaluate", "k" * 32, "base", "one", stage=TASK)
    failed(shop, cell, ValueError())
    (shop.out / "cells" / f"{cell.key}.json").write_text(text)
    assert shop.read(cell) is None
    assert shop.state(cell) == "missing"


def test_an_error_of_the_user_keeps_its_words_and_exit_code(shop):
    made = compute(shop, Cell("evaluate", "k" * 32, str(shop.out / "nowhere"), "one", stage=TASK), None)
    assert (made["status"], made["exit_code"]) == ("failed", Exit.UNAVAILABLE)
    assert "nowhere" in made["error"]
    assert made["record"] is None
    assert "traceback" not in made
    assert shop.state(Cell("evaluate", "k" * 32, "", stage=TASK)) == "failed"


def test_an_error_of_ours_is_told_in_one_line_with_its_traceback(shop, monkeypatch):
    def broken(*_):
        raise RuntimeError("two\n  lines")

    monkeypatch.setattr(sweep_cell, "_measure", broken)
    made = compute(shop, Cell("bench", "k" * 32, "base", "one", stage=GRID), None)
    assert (made["error"], made["exit_code"]) == ("RuntimeError: two lines", Exit.INTERNAL)
    assert "in broken" in made["traceback"]


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (ApproxError("no room", Exit.MISSING), "no room", Exit.MISSING),
        (KeyError("lost"), "KeyError: 'lost'", Exit.INTERNAL),
    ],
)
def test_a_cell_that_could_not_begin_has_failed(shop, error, text, code):
    made = failed(shop, Cell("bench", "k" * 32, "base", "one", stage=GRID), error)
    assert (made["status"], made["error"], made["exit_code"]) == ("failed", text, code)


def test_it_computes_with_the_threads_that_it_is_given(shop):
    before = torch.get_num_threads()
    try:
        compute(shop, Cell("evaluate", "k" * 32, str(shop.out), "one", stage=TASK), 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
