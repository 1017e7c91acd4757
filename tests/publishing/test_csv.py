"""The CSV tables of a report: each value is in its own column."""

import copy
import csv
import io
from pathlib import Path

import pytest

from approx.evaluation import record as record_files
from approx.evaluation.record import Record
from approx.publishing.report import quality_csv, speed_csv, write_report
from typed import record_of

ROOT = Path(__file__).resolve().parents[2]
CLUSTERED = "layers 0–4: clustered, clusters = 25; layers 5: sdpa, –"
MINILM = {"title": "MiniLM on SST-2 <script>alert('title')</script> & “quotes”", "checkpoint": "minilm-sst2"}


TABLES = {"quality.csv": quality_csv, "speed.csv": speed_csv}


def lines_of(record: Record, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(TABLES[name]([record]), newline="")))


def table(record: dict, name: str) -> list[dict[str, str]]:
    return lines_of(record_of(record), name)


def test_every_column_of_quality_holds_its_own_figure(record):
    entries = record["quality"][0]["variants"]
    entries[3] |= {"p_adjusted": 0.7, "approximated": {"examples": 40, "tokens": 0.081}}
    entries[3]["seeds"] = {"seeds": [0, 1], "scores": [0.9, 0.88], "mean": 0.89, "sd": 0.014, "low": 0.88, "high": 0.9}
    more = {
        "approximated_pairs": "",
        "settings": "",
        "notes": "",
        "tokens_median": "",
        "tokens_longest": "",
        "fast_products": "False",
    }
    lines = table(record, "quality.csv")
    assert [line["variant"] for line in lines] == [*(entry["name"] for entry in entries), "clustered 25"]
    about = {
        **MINILM,
        "split": "dev",
        "confidence": "0.95",
        "test": "exact McNemar",
        "p_value": "0.35",
        "margin": "0.005",
    }
    about |= {"verdict": "inconclusive"}
    sst2 = {"task": "glue/sst2", "metric": "accuracy", "examples": "872", "subset": "False", "truncated": "0"}
    assert lines[3] == {
        **about,
        **sst2,
        "variant": "local <128> $x$",
        "base_score": "0.8956",
        "score": "0.8945",
        "difference": "-0.0011",
        "low": "-0.009",
        "high": "0.007",
        "needed_examples": "2950",
        "p_adjusted": "0.7",
        "seeds": "2",
        "seeds_mean": "0.89",
        "seeds_sd": "0.014",
        "approximated_examples": "40",
        "approximated_tokens": "0.081",
        **more,
        "plan": "layers 0–4: local, window = 128; layers 5: sdpa, –",
    }
    unknown = ("needed_examples", "p_adjusted", "seeds", "seeds_mean", "seeds_sd")
    unknown += ("approximated_examples", "approximated_tokens")
    mrpc = {"task": "glue/mrpc", "metric": "f1", "examples": "100", "subset": "True", "truncated": "3"}
    assert lines[4] == {
        **about,
        **mrpc,
        "variant": "clustered 25",
        "base_score": "0.9",
        "score": "0.912",
        "difference": "0.012",
        "low": "-0.01",
        "high": "0.03",
        **dict.fromkeys(unknown, ""),
        **more,
        "plan": CLUSTERED,
    }


def test_every_column_of_speed_holds_its_own_figure(record):
    record["environment"]["gpu"] = "A GPU"
    row = record["speed"][3]
    row["variants"][0]["chosen"] = {"topk_attention": "cpu"}
    lines = table(record, "speed.csv")
    assert len(lines) == 5 * 6
    assert [line["role"] for line in lines[:6]] == ["base", "ceiling", *["variant"] * 4]
    base, ceiling, variant, *_, lost = lines[18:24]
    about = {**MINILM, "processor": "A Processor With a Name", "gpu": "A GPU", "device": "cpu", "dtype": "float32"}
    about |= {"new_tokens": "", "fast_products": "", "plan": ""}
    about |= {"threads": "2", "batch": "1", "length": "2048", "mode": "forward", "inputs": "real"}
    about |= {"baseline": "default SDPA", "samples": "12", "status": "ok"}
    assert ceiling == {
        **about,
        "role": "ceiling",
        "name": "attention removed",
        "median_ms": "200.0",
        "p10_ms": "194.0",
        "p90_ms": "210.0",
        "peak_mb": "100.0",
        "ratio": str(row["ceiling"]["ratio"]),
        "low": str(row["ceiling"]["interval"][0]),
        "high": str(row["ceiling"]["interval"][1]),
        **dict.fromkeys(("share_of_ceiling", "verdict", "chosen"), ""),
    }
    (entry, *_) = row["variants"]
    assert variant == {
        **about,
        "role": "variant",
        "name": "improved-clustered 25",
        "median_ms": "300.0",
        "p10_ms": str(entry["p10_ms"]),
        "p90_ms": str(entry["p90_ms"]),
        "peak_mb": "150.0",
        "ratio": str(entry["ratio"]),
        "low": str(entry["interval"][0]),
        "high": str(entry["interval"][1]),
        "share_of_ceiling": str(entry["share_of_ceiling"]),
        "verdict": "faster",
        "chosen": "topk_attention cpu",
        "plan": "layers 0–4: improved-clustered, clusters = 25, topk = 32; layers 5: sdpa, –",
    }
    assert (base["role"], base["name"], base["median_ms"]) == ("base", "default SDPA", "460.0")
    figures = ("median_ms", "p10_ms", "p90_ms", "peak_mb", "ratio", "low", "high", "share_of_ceiling", "verdict")
    nothing = {**dict.fromkeys(figures, ""), "samples": "0", "status": "out of memory", "chosen": ""}
    about["plan"] = "layers 0–4: local, window = 128; layers 5: sdpa, –"
    assert lost == {**about, "role": "variant", "name": "local <128> $x$", **nothing}


def test_no_name_is_a_formula_for_a_spreadsheet(record):
    record["title"] = "=HYPERLINK(1)"
    record["checkpoint"]["name"] = "@SUM(A1)"
    for name in ("quality.csv", "speed.csv"):
        line = table(record, name)[0]
        assert (line["title"], line["checkpoint"]) == ("'=HYPERLINK(1)", "'@SUM(A1)")


def keys(lines: list[dict[str, str]], measured: set[str]) -> list[tuple[str, ...]]:
    """What tells the rows of a table apart: all columns but the measured ones."""
    return [tuple(value for name, value in line.items() if name not in measured) for line in lines]


MEASURED = {"base_score", "score", "difference", "low", "high", "p_value", "verdict", "needed_examples", "p_adjusted"}
MEASURED |= {"seeds_mean", "seeds_sd", "truncated", "approximated_examples", "approximated_tokens"}
TIMED = {"median_ms", "p10_ms", "p90_ms", "peak_mb", "ratio", "low", "high", "share_of_ceiling", "verdict", "status"}
TIMED |= {"samples", "chosen"}


def test_one_task_at_two_lengths_has_two_keys_and_two_headings(record, tmp_path):
    short, other = record["quality"][0], copy.deepcopy(record["quality"][0])
    short["settings"], other["settings"] = {"length": 256, "examples": 872}, {"length": 2048, "examples": 872}
    record["quality"] = [short, other]
    write_report([record_of(record)], tmp_path)
    lines = table(record, "quality.csv")
    assert (tmp_path / "quality.csv").read_text("utf-8") == quality_csv([record_of(record)])
    found = keys(lines, MEASURED)
    assert len(set(found)) == len(found) == 8
    assert {line["settings"] for line in lines} == {
        '{"length": 256, "examples": 872}',
        '{"length": 2048, "examples": 872}',
    }
    page = (tmp_path / "index.html").read_text("utf-8")
    text = (tmp_path / "report.md").read_text("utf-8")
    for words in ("length 256; examples 872", "length 2,048; examples 872"):
        assert f"872 examples; {words}" in page
        assert f"glue/sst2, dev: 872 examples; {words}" in text
        # The figures of the summary are told apart too.
        assert f"(dev; {words})" in text


def test_both_tables_name_the_plans(record):
    quality, speed = (table(record, name) for name in ("quality.csv", "speed.csv"))
    assert {line["plan"] for line in quality if line["variant"] == "clustered 25"} == {CLUSTERED}
    assert {line["plan"] for line in speed if line["name"] == "clustered 25"} == {CLUSTERED}
    assert {line["plan"] for line in speed if line["role"] != "variant"} == {""}


@pytest.mark.parametrize("folder", sorted((ROOT / "reports").glob("*/report.json")), ids=lambda path: path.parent.name)
def test_no_two_rows_of_a_report_have_one_key(folder):
    record = record_files.load(folder)
    for name, measured in (("quality.csv", MEASURED), ("speed.csv", TIMED)):
        found = keys(lines_of(record, name), measured)
        assert len(set(found)) == len(found), name
