"""The CSV tables of a report: each value is in its own column."""

import csv
from pathlib import Path

from approx.publishing.report import write_report
from typed import record_of

MINILM = {"title": "MiniLM on SST-2 <script>alert('title')</script> & “quotes”", "checkpoint": "minilm-sst2"}


def table(record: dict, folder: Path, name: str) -> list[dict[str, str]]:
    write_report([record_of(record)], folder)
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_column_of_quality_holds_its_own_figure(record, tmp_path):
    entries = record["quality"][0]["variants"]
    entries[3] |= {"p_adjusted": 0.7, "approximated": {"examples": 40, "tokens": 0.081}}
    entries[3]["seeds"] = {"seeds": [0, 1], "scores": [0.9, 0.88], "mean": 0.89, "sd": 0.014, "low": 0.88, "high": 0.9}
    lines = table(record, tmp_path, "quality.csv")
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
    }


def test_every_column_of_speed_holds_its_own_figure(record, tmp_path):
    record["environment"]["gpu"] = "A GPU"
    row = record["speed"][3]
    row["variants"][0]["chosen"] = {"topk_attention": "cpu"}
    lines = table(record, tmp_path, "speed.csv")
    assert len(lines) == 5 * 6
    assert [line["role"] for line in lines[:6]] == ["base", "ceiling", *["variant"] * 4]
    base, ceiling, variant, *_, lost = lines[18:24]
    about = {**MINILM, "processor": "A Processor With a Name", "gpu": "A GPU", "device": "cpu", "dtype": "float32"}
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
    }
    assert (base["role"], base["name"], base["median_ms"]) == ("base", "default SDPA", "460.0")
    figures = ("median_ms", "p10_ms", "p90_ms", "peak_mb", "ratio", "low", "high", "share_of_ceiling", "verdict")
    nothing = {**dict.fromkeys(figures, ""), "samples": "0", "status": "out of memory", "chosen": ""}
    assert lost == {**about, "role": "variant", "name": "local <128> $x$", **nothing}


def test_no_name_is_a_formula_for_a_spreadsheet(record, tmp_path):
    record["title"] = "=HYPERLINK(1)"
    record["checkpoint"]["name"] = "@SUM(A1)"
    for name in ("quality.csv", "speed.csv"):
        line = table(record, tmp_path, name)[0]
        assert (line["title"], line["checkpoint"]) == ("'=HYPERLINK(1)", "'@SUM(A1)")
