"""The wording of numbers and results."""

import pytest

from approx.evaluation.record import Quality, QualityVariant, Record, Speed, Timing, Variant
from approx.mechanisms import MECHANISMS
from approx.publishing import wording
from approx.publishing.plots import colours
from approx.publishing.summary import speed_groups, standing, worthwhile_from
from approx.publishing.tables import plan_lines
from approx_kernels.dispatch import implementation
from typed import part_of, parts_of, record_of


def test_plain_pytorch_has_the_name_that_the_kernels_use():
    assert wording.PLAIN == implementation.PLAIN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (wording.count(12345), "12,345"),
        (wording.count(None), "–"),
        (wording.roughly(1600), "1,600"),
        (wording.roughly(100), "100"),
        (wording.roughly(101), "110"),
        (wording.roughly(1509), "1,600"),
        (wording.roughly(7), "7"),
        (wording.decimal(None), "–"),
        (wording.decimal(-0.004), "0.00"),
        (wording.decimal(0.5), "0.50"),
        (wording.decimal(-1234.5, 1), "−1,234.5"),
        (wording.signed(0.004), "0.00"),
        (wording.signed(0.5), "+0.50"),
        (wording.signed(-0.5), "−0.50"),
        (wording.signed(0.0), "0.00"),
        (wording.signed(None), "–"),
        (wording.percent(None), "–"),
        (wording.percent(0.25), "25 %"),
        (wording.percent(0.8956, 2), "89.56 %"),
        (wording.milliseconds(1234.4), "1,234"),
        (wording.milliseconds(0.01234), "0.0123"),
        (wording.milliseconds(99.96), "100"),
        (wording.milliseconds(100), "100"),
        (wording.milliseconds(100.4), "100"),
        (wording.milliseconds(1.5), "1.5"),
        (wording.milliseconds(None), "–"),
        (wording.times(0.551), "0.55×"),
        (wording.times(9.994), "9.99×"),
        (wording.times(10.0), "10.0×"),
        (wording.times(12.34), "12.3×"),
        (wording.times(None), "–"),
        (wording.between(None), "–"),
        (wording.between([0.951, 1.2]), "0.95 to 1.20"),
        (wording.between([1.0, 2.0], 3), "1.000 to 2.000"),
        (wording.between([-0.01, 0.02], scale=100), "−1.00 to 2.00"),
        (wording.span([1.5, 1.2]), "1.20–1.50×"),
        (wording.span([1.5]), "1.50×"),
        (wording.lengths([128], [128, 512]), "128 tokens"),
        (wording.lengths([512, 128, 2048], [128, 512, 1024, 2048]), "128–512 and 2,048 tokens"),
        (wording.lengths([128, 1024, 4096], [128, 512, 1024, 2048, 4096]), "128, 1,024 and 4,096 tokens"),
        (wording.layer_ranges([3, 0, 1, 2, 8]), "0–3, 8"),
        (wording.layer_ranges([0, 2, 4, 5]), "0, 2, 4–5"),
    ],
)
def test_numbers(text: str, expected: str):
    assert text == expected


@pytest.mark.parametrize(
    ("difference", "interval", "expected"),
    [
        (-0.003, [-0.007, 0.001], "loses 0.3 ± 0.4 points of accuracy"),
        (0.01, [-0.01, 0.02], "gains 1.0 ± 2.0 points of accuracy"),
        (-0.0002, [-0.004, 0.004], "scores the same ± 0.4 points of accuracy"),
        (0.0, [-0.0001, 0.0001], "scores the same ± 0.01 points of accuracy"),
        (0.0, [-0.0005, 0.0005], "scores the same ± 0.1 points of accuracy"),
        # The wider side is shown.
        (0.01, [-0.03, 0.02], "gains 1.0 ± 4.0 points of accuracy"),
        (0.0, [-0.02, 0.001], "scores the same (between −2.0 and +0.1) points of accuracy"),
        (-0.034, [-0.655, -0.019], "loses 3.4 points of accuracy (between −65.5 and −1.9)"),
        (0.0003, [0.0002, 0.0004], "gains 0.03 ± 0.01 points of accuracy"),
        (-0.003, None, "loses 0.3 points of accuracy, measured on a single example or group,"),
        (0.0, None, "scores the same, measured on a single example or group,"),
    ],
)
def test_a_difference_in_words(difference: float, interval: list[float] | None, expected: str):
    assert (
        wording.loss(
            part_of(QualityVariant, difference=difference, interval=interval), part_of(Quality, metric="accuracy")
        )
        == expected
    )


def test_a_difference_of_other_scores_keeps_their_units():
    base = {"scores": {"bits_per_byte": 1.0}, "interval": None}
    task = part_of(Quality, metric="bits_per_byte", fraction=False, lower_is_better=True, base=base)
    worse = {"difference": 0.0213, "interval": [0.0113, 0.0313], "margin": 0.01, "verdict": "loss beyond margin"}
    entry = part_of(QualityVariant, **worse)
    assert wording.loss(entry, task) == "has 0.021 ± 0.010 more bits per byte"
    alone = entry.model_copy(update={"interval": None, "difference": -0.0213})
    assert wording.loss(alone, task) == "has 0.021 fewer bits per byte, measured on a single example or group,"
    assert wording.verdict(entry, task) == "a loss beyond the margin of 0.010 bits per byte (1.0 %)"
    assert wording.change(entry, task) == "+0.021"
    assert wording.score(1.2345, task) == "1.234"
    assert wording.score(1.2345, task, 0) == "1.2"
    fewer = part_of(QualityVariant, **worse | {"difference": -0.02, "interval": [-0.03, -0.01]})
    assert wording.loss(fewer, task) == "has 0.020 ± 0.010 fewer bits per byte"
    assert (
        wording.loss(fewer, task.model_copy(update={"metric": "masked_loss"})) == "has 0.020 ± 0.010 less masked loss"
    )
    much = part_of(QualityVariant, **worse | {"difference": 0.5, "interval": [0.45, 0.55]})
    assert wording.loss(much, task) == "has 0.5 ± 0.1 more bits per byte"
    lopsided = part_of(QualityVariant, **worse | {"difference": 0.0336, "interval": [0.019, 0.655]})
    assert wording.loss(lopsided, task) == "has 0.034 more bits per byte (between +0.019 and +0.655)"
    higher = part_of(Quality, metric="score", fraction=False)
    assert wording.loss(entry, higher) == "gains 0.021 ± 0.010 score"


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("no loss", "no loss, at a margin of 0.5 points"),
        ("loss within margin", "a loss, within the margin of 0.5 points"),
        ("loss beyond margin", "a loss beyond the margin of 0.5 points"),
        ("inconclusive", "inconclusive at a margin of 0.5 points; about 250 examples would settle it"),
        ("not tested: exact on all of these inputs", "not tested: exact on all of these inputs"),
    ],
)
def test_a_verdict_shows_its_margin(verdict: str, said: str):
    entry = part_of(QualityVariant, verdict=verdict, margin=0.005, needed_examples=250)
    assert wording.verdict(entry, part_of(Quality, metric="accuracy", examples=10)) == said


def test_a_change_is_rounded_and_in_units_of_its_task():
    assert wording.change(part_of(QualityVariant, difference=-0.0034), part_of(Quality, metric="accuracy")) == "−0.3"
    assert wording.units(part_of(Quality, metric="exact_match")) == "points of exact match"


def test_describes_the_examples_of_a_score():
    assert wording.share_of_examples(part_of(Quality, examples=1000)) == "1,000 examples"
    text = part_of(Quality, examples=1000, subset=True, truncated=1200, notes=["read to 512 tokens", "no titles"])
    assert wording.share_of_examples(text) == (
        "1,000 examples, a subset, 1,200 of them truncated; read to 512 tokens; no titles"
    )


def test_lists_implementations_by_op():
    chosen = {"topk_attention": "tiles", "cluster_queries": "cpu", "lsh_attention": "reference"}
    assert wording.implementations(part_of(Timing, chosen=chosen)) == (
        "cluster_queries cpu, lsh_attention plain PyTorch, topk_attention plain PyTorch"
    )
    assert wording.implementations(part_of(Timing, chosen=None)) == wording.implementations(part_of(Timing)) == ""


def test_the_setting_names_what_matters():
    row = {"device": "cuda", "dtype": "bfloat16", "threads": 8, "batch": 4, "mode": "generate", "new_tokens": 16}
    assert wording.setting(part_of(Speed, **row)) == "CUDA, bfloat16, batch 4, decoding 16 tokens"
    row |= {"device": "cpu", "threads": 1, "mode": "forward"}
    assert wording.setting(part_of(Speed, **row)) == "CPU, bfloat16, 1 thread, batch 4"
    fast = part_of(Speed, **row | {"threads": 2, "fast_products": True})
    assert wording.setting(fast).endswith("2 threads, batch 4, fast products")


def row(length: int = 128, base: str = "ok", **entry) -> Speed:
    variant = {"name": "v", "status": "ok", "ratio": 1.5, "interval": [1.4, 1.6], "verdict": "faster"} | entry
    return part_of(Speed, length=length, base={"status": base}, variants=[variant])


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (row(), "faster"),
        # Verdicts of older records are made again from their figures.
        (row(verdict="exact is better here"), "faster"),
        (row(ratio=1.02, interval=[1.01, 1.03]), "slight gain"),
        (row(ratio=1.0, interval=[0.9, 1.1]), "no clear gain"),
        (row(ratio=0.5, interval=[0.45, 0.6]), "slower"),
        (row(ratio=2.27, interval=[1.37, 7.33]), "not settled: the machine was busy"),
        (row(status="out of memory", ratio=None, interval=None), "out of memory"),
        (row(base="out of memory", ratio=None, interval=None), "exact out of memory"),
        (row(base="out of memory", status="out of memory", ratio=None, interval=None), "out of memory"),
        (row(ratio=None, interval=None), "not measured"),
    ],
)
def test_standing(measured: Speed, expected: str):
    assert standing(measured, measured.variants[0]) == expected


def test_it_pays_from_where_it_stays_better():
    slow, busy = {"ratio": 0.9, "interval": [0.8, 0.95]}, {"ratio": 0.9, "interval": [0.4, 0.95]}
    assert worthwhile_from([row(128), row(256, **slow), row(512), row(1024)], "v") == 512
    assert worthwhile_from([row(128), row(256, **slow)], "v") is None
    assert worthwhile_from([row(128), row(256)], "v") == 128
    assert worthwhile_from([row(128)], "missing") is None
    assert worthwhile_from([row(128), row(256, **busy), row(512)], "v") == 128
    assert worthwhile_from([row(128, **busy)], "v") is None


def test_groups_rows_that_differ_only_in_length(record):
    mixed = [record["speed"][1], record["speed"][0], record["speed"][0] | {"threads": 1}]
    groups = speed_groups(parts_of(Speed, *mixed))
    assert [[(row.threads, row.length) for row in rows] for rows in groups] == [[(2, 128), (2, 512)], [(1, 128)]]
    changes = ({"device": "cuda"}, {"dtype": "bfloat16"}, {"batch": 8}, {"mode": "train"}, {"inputs": "synthetic"})
    rows = [record["speed"][0], record["speed"][0] | {"fast_products": False}]
    rows += [record["speed"][0] | change for change in (*changes, {"fast_products": True})]
    assert [len(group) for group in speed_groups(parts_of(Speed, *rows))] == [2, *[1] * 6]
    assert speed_groups([]) == []


@pytest.mark.parametrize("exact", [name for name, kind in MECHANISMS.items() if kind.always_exact])
def test_exact_layers_do_not_count_for_the_colour(exact):
    layers = [
        {"layer": number, "mechanism": name, "settings": {}} for number, name in enumerate([exact] * 2 + ["clustered"])
    ]
    record = part_of(Record, variants=[{"name": "mixed", "layers": layers}])
    assert colours(record) == {"mixed": MECHANISMS["clustered"].colour}


def test_a_mechanism_keeps_its_colour(record):
    chosen = colours(record_of(record))
    assert chosen["improved-clustered 25"] == MECHANISMS["improved-clustered"].colour
    assert chosen["clustered 25"] == MECHANISMS["clustered"].colour
    # An unknown mechanism has a colour too, which does not depend on the other variants.
    alone = colours(record_of(record | {"variants": record["variants"][-1:]}))
    assert alone["reservoir"] == chosen["reservoir"]
    # What a damaged record measures but does not describe has one as well.
    assert alone.keys() == chosen.keys()
    exact = {"name": "same", "layers": [{"layer": 0, "mechanism": "sdpa", "settings": {}}]}
    assert colours(part_of(Record, variants=[exact, {"name": "none", "layers": []}])) == {
        "same": MECHANISMS["sdpa"].colour,
        "none": MECHANISMS["full"].colour,
    }


def test_merges_adjacent_layers_of_a_plan(record):
    assert plan_lines(part_of(Variant, **record["variants"][0])) == [
        {"layers": "0–4", "mechanism": "improved-clustered", "settings": "clusters = 25, topk = 32"},
        {"layers": "5", "mechanism": "sdpa", "settings": "–"},
    ]


def test_shows_needed_examples_in_groups_of_equal_size():
    entry, task = part_of(QualityVariant, needed_examples=1200), part_of(Quality, examples=300, groups=20)
    assert wording.needed(entry, part_of(Quality, examples=300)) == "about 1,200 examples"
    assert wording.needed(entry, task) == "about 1,200 examples of 80 groups"
    assert wording.needed(part_of(QualityVariant, needed_examples=None), task) is None
