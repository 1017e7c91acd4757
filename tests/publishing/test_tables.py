"""The cells of a report's tables."""

import pytest

from approx.evaluation.record import Crossover, Quality, Speed, Variant
from approx.publishing.tables import layer_error_table, plan_lines, quality_table, speed_table
from typed import part_of, parts_of

# Entries of a record with three seeds, and without randomness.
DRAWN = {"seeds": [0, 1, 2], "scores": [0.88, 0.9, 0.89], "mean": 0.89, "sd": 0.01, "low": 0.88, "high": 0.9}
FIXED = {"seeds": [], "scores": [], "mean": None, "sd": None, "low": None, "high": None}


def test_every_cell_of_a_table_of_quality_holds_its_own_figure(record):
    task = record["quality"][1] | {"notes": ["read to 512 tokens"]}
    (entry,) = task["variants"]
    entry |= {
        "p_adjusted": 0.0001,
        "needed_examples": 250,
        "approximated": {"examples": 25, "tokens": 0.4, "pairs": 0.3},
    }
    assert quality_table(part_of(Quality, **task)) == {
        "task": "glue/mrpc",
        "split": "dev",
        "metric": "f1",
        "others": ["accuracy"],
        "examples": "100 examples, a subset, 3 of them truncated; read to 512 tokens",
        "tokens": None,
        "units": "points",
        "better": "higher is better",
        "confidence": "95 %",
        "base": {"score": "90.00 %", "others": ["86.00 %"], "interval": "85.00 to 94.00", "verdict": ""},
        "chance": None,
        "rows": [
            {
                "name": "clustered 25",
                "score": "91.20 %",
                "others": ["87.00 %"],
                "difference": "+1.20",
                "interval": "−1.00 to 3.00",
                "test": "exact McNemar",
                "p_value": "0.350",
                "p_adjusted": "< 0.001",
                "margin": "0.5 points",
                "verdict": "inconclusive",
                "needed": "about 250 examples",
                "tone": "even",
                "approximated": "25 % of inputs, 30 % of pairs",
                "more": [],
                "worst": [],
            }
        ],
        "adjusted": True,
        "slices": [],
        "sliced_by": "tokens",
        "slice_metric": "f1",
        "carried": [],
    }


def test_chance_has_a_row_and_a_model_at_chance_is_marked(record):
    task = record["quality"][1] | {"chance": 0.5}
    task["base"] = task["base"] | {"at_chance": True}
    task["variants"][0]["at_chance"] = True
    table = quality_table(part_of(Quality, **task))
    assert (table["chance"], table["base"]["verdict"]) == ("50.00 %", "at chance")
    assert table["rows"][0]["verdict"] == "inconclusive, at chance"


def test_a_score_outside_zero_to_one_keeps_its_units_in_every_cell(record):
    task = record["quality"][0] | {"metric": "accuracy_loss", "fraction": False, "lower_is_better": True}
    task["base"] = {"scores": {"accuracy_loss": 1.5}, "interval": [1.25, 1.75]}
    task["variants"] = [task["variants"][1] | {"scores": {"accuracy_loss": 1.4966}, "seeds": DRAWN | {"mean": 1.4966}}]
    table = quality_table(part_of(Quality, **task | {"sliced_by": "position", "slice_metric": "top_1"}))
    assert (table["units"], table["better"]) == ("accuracy loss", "lower is better")
    assert table["base"] == {"score": "1.500", "others": [], "interval": "1.250 to 1.750", "verdict": ""}
    (row,) = table["rows"]
    cells = [row[name] for name in ("score", "difference", "interval", "margin")]
    assert cells == ["1.497", "−0.003", "−0.005 to 0.000", "0.005 accuracy loss (0.3 %)"]
    (drawn,) = row["more"]
    assert (drawn["score"], drawn["difference"]) == ("1.497 ± 0.010", "−0.003")
    assert drawn["text"] == "scores 0.880 to 0.900"
    assert (table["sliced_by"], table["slice_metric"]) == ("position", "top_1")
    assert [(part["base"], part["converted"]) for part in table["slices"]] == [("0.920", "0.918"), ("0.885", "0.880")]


def test_slices_show_first_and_last_length(record):
    assert quality_table(part_of(Quality, **record["quality"][0]))["slices"][:2] == [
        {
            "name": "improved-clustered 25",
            "range": "0 to 15",
            "examples": "250",
            "base": "92.00 %",
            "converted": "91.80 %",
        },
        {
            "name": "improved-clustered 25",
            "range": "16 to 66",
            "examples": "622",
            "base": "88.50 %",
            "converted": "88.00 %",
        },
    ]


def test_variation_over_seeds_has_a_separate_row(record):
    task = record["quality"][0]
    for entry, seeds in zip(task["variants"], (DRAWN, FIXED, None, None), strict=True):
        entry["seeds"] = seeds
    (drawn,), (fixed,), unasked, *_ = (row["more"] for row in quality_table(part_of(Quality, **task))["rows"])
    assert drawn == {
        "name": "improved-clustered 25, over 3 seeds",
        "score": "89.00 % ± 1.00",
        "difference": "−0.56",
        "text": "scores 88.00 to 90.00",
    }
    text = "the same with every seed: nothing in it is random"
    assert fixed == {"name": "clustered 25, over seeds", "score": "", "difference": "", "text": text}
    assert unasked == []


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0.0, "< 0.001"), (0.00099, "< 0.001"), (0.001, "0.001"), (0.0456, "0.046")]
)
def test_a_p_value_is_rounded_but_never_to_zero(record, value, shown):
    task = record["quality"][1]
    task["variants"][0]["p_value"] = value
    table = quality_table(part_of(Quality, **task))
    assert table["rows"][0]["p_value"] == shown
    assert not table["adjusted"]


def test_a_table_of_quality_without_variants_has_its_title(record):
    table = quality_table(part_of(Quality, **record["quality"][0] | {"variants": []}))
    assert (table["confidence"], table["rows"], table["slices"], table["adjusted"]) == ("95 %", [], [], False)


def test_every_cell_of_a_table_of_speed_holds_its_own_figure(record):
    row = record["speed"][3] | {"baseline": "SDPA math", "variants": record["speed"][3]["variants"][2:]}
    row["default"] = row["base"] | {"median_ms": 480.0, "ratio": 0.958, "interval": [0.95, 0.97], "rejected": 0}
    row["variants"][0]["chosen"] = {"linear_attention": "cpu"}
    about = {"batch": 1, "dtype": "float32", "device": "cpu"}
    elsewhere = [{**about, "name": "linear", "length": 64} | other for other in ({"batch": 2}, {"dtype": "bfloat16"})]
    crossovers = [*record["crossover"], *elsewhere, {**about, "name": "linear", "length": 512}]
    table = speed_table(parts_of(Speed, row), parts_of(Crossover, *crossovers))
    assert {name: table[name] for name in ("setting", "inputs", "names", "crossover", "pays_from")} == {
        "setting": "CPU, float32, 2 threads, batch 1",
        "inputs": "real",
        "names": ["linear", "local <128> $x$"],
        "crossover": ["512 tokens", "none"],
        "pays_from": ["2,048 tokens", "none"],
    }
    (line,) = table["summary"]
    faster = {"ratio": "2.09×", "interval": "2.03 to 2.15", "share": "91 %", "verdict": "faster", "tone": "good"}
    lost = {"ratio": "–", "interval": None, "share": None, "verdict": "out of memory", "tone": "bad"}
    assert line == {"length": "2,048", "base": "460 ms", "ceiling": "2.30×", "cells": [faster, lost]}
    measured = {"length": "2,048", "samples": "12 (1 rejected)", "implementations": "", "status": "ok"}
    assert table["times"] == [
        measured
        | {"name": "exact (SDPA math)", "median": "460", "quantiles": "446 to 483", "peak": "230"}
        | {"ratio": "–", "interval": "–"},
        measured
        | {"name": "exact (default SDPA)", "median": "480", "quantiles": "446 to 483", "peak": "230"}
        | {"ratio": "0.96×", "interval": "0.95 to 0.97", "samples": "12"},
        measured
        | {"name": "ceiling: attention removed", "median": "200", "quantiles": "194 to 210", "peak": "100"}
        | {"ratio": "2.30×", "interval": "2.25 to 2.35"},
        measured
        | {"name": "linear", "median": "220", "quantiles": "213 to 231", "peak": "110"}
        | {"ratio": "2.09×", "interval": "2.03 to 2.15", "implementations": "linear_attention cpu"},
        {"length": "2,048", "name": "local <128> $x$", "median": "–", "quantiles": "–", "peak": "–", "samples": "0"}
        | {"ratio": "–", "interval": "–", "implementations": "", "status": "out of memory"},
    ]
    assert (table["implementations"], table["plain"], table["crowded"]) == (True, [], False)


def test_every_standing_has_words_and_a_tone_of_its_own(record):
    cells = [cell for row in speed_table(parts_of(Speed, *record["speed"]), [])["summary"] for cell in row["cells"]]
    said = {cell["verdict"]: cell["tone"] for cell in cells}
    assert said == {
        "slower": "bad",
        "faster": "good",
        "no clear gain": "even",
        "exact out of memory": "good",
        "out of memory": "bad",
    }
    short = [record["speed"][0], record["speed"][1] | {"variants": record["speed"][1]["variants"][1:]}]
    missing = speed_table(parts_of(Speed, *short), [])["summary"][1]["cells"][0]
    assert missing == {"ratio": "–", "interval": None, "share": None, "verdict": "not measured", "tone": "even"}


def test_lists_ops_in_plain_pytorch_by_variant_then_by_op(record):
    first, second = record["speed"][0]["variants"][:2]
    first["chosen"] = {"topk_attention": "tiles", "cluster_queries": "reference"}
    second["chosen"] = {"cluster_queries": "reference", "topk_attention": "cpu"}
    assert speed_table(parts_of(Speed, *record["speed"]), [])["plain"] == [
        "improved-clustered 25 (cluster_queries, 128 tokens)",
        "improved-clustered 25 (topk_attention, 128 tokens)",
        "clustered 25 (cluster_queries, 128 tokens)",
    ]


def test_partly_converted_layers_have_a_separate_line():
    layers = [{"layer": 0, "mechanism": "linear", "settings": {}, "heads": "0–3"}]
    layers += [{"layer": layer, "mechanism": "linear", "settings": {}} for layer in (1, 2)]
    assert plan_lines(part_of(Variant, layers=layers)) == [
        {"layers": "0", "mechanism": "linear (heads 0–3)", "settings": "–"},
        {"layers": "1–2", "mechanism": "linear", "settings": "–"},
    ]


def test_layer_errors_are_under_their_layer():
    receipt = {"errors": {"2": 0.034, "10": 0.5}, "captured_mass": {"10": 0.0}, "measured_on": "512 tokens a row"}
    other = {"errors": {"0": 0.01}, "captured_mass": None}
    variants = parts_of(
        Variant, {"name": "a", "receipt": receipt}, {"name": "b", "receipt": other}, {"name": "c", "receipt": None}
    )
    assert layer_error_table(variants) == {
        "layers": [0, 2, 10],
        "rows": [
            {
                "name": "a",
                "measured": "512 tokens a row",
                "cells": [
                    {"error": "–", "kept": None},
                    {"error": "3 %", "kept": None},
                    {"error": "50 %", "kept": "0.0 %"},
                ],
            },
            {
                "name": "b",
                "measured": "unknown",
                "cells": [{"error": "1 %", "kept": None}, *[{"error": "–", "kept": None}] * 2],
            },
        ],
        "masses": True,
    }
    assert layer_error_table(variants[1:])["masses"] is False  # type: ignore[index]  # one was measured
    assert layer_error_table(variants[2:]) is None
