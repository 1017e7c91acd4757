"""The recommendation: quality and speed together, in the first lines."""

import pytest

from approx.evaluation.record import Record
from approx.publishing.summary import advice, answer, conclude, recommendation
from typed import known, part_of


def quality(name: str, verdict: str = "no loss", longest: int = 3000, **more) -> dict:
    entry = {"name": name, "difference": -0.88, "interval": [-0.92, -0.84], "margin": 0.01, "verdict": verdict} | more
    return {
        "task": "needle",
        "metric": "accuracy",
        "tokens": {"longest": longest},
        "sliced_by": "x",
        "variants": [entry],
    }


def speed(name: str, ratios: dict[int, float], width: float = 0.02) -> list[dict]:
    about = {"device": "cpu", "dtype": "float32", "threads": 2, "batch": 1, "mode": "forward", "inputs": "real"}
    return [
        {
            **about,
            "length": length,
            "base": {"status": "ok"},
            "variants": [
                {"name": name, "status": "ok", "ratio": ratio, "interval": [ratio * (1 - width), ratio * (1 + width)]}
            ],
        }
        for length, ratio in ratios.items()
    ]


def record(*names: str, tasks=(), rows=(), verified: bool = True) -> Record:
    layers = [{"layer": 0, "mechanism": "linear"}]
    variants = [{"name": name, "layers": layers, "verified": verified} for name in names]
    return part_of(Record, variants=variants, quality=list(tasks), speed=list(rows))


RISING = {512: 0.8, 1024: 1.5, 2048: 2.5}
LOST = "do not use: it loses 88.0 ± 4.0 points of accuracy on needle, beyond the margin of 1.0 points."


@pytest.mark.parametrize(
    ("entry", "ratios", "said"),
    [
        ({}, RISING, "use at 1,024 tokens and above (2.50×): no loss on needle at a margin of 1.0 points."),
        ({}, {512: 1.5}, "use at every measured length (1.50×): no loss on needle at a margin of 1.0 points."),
        # Fast, and 88 points worse.
        ({"verdict": "loss beyond margin"}, RISING, LOST),
        ({"verdict": "loss beyond margin"}, {}, LOST),
        ({}, {512: 0.8, 1024: 1.01}, "stay exact: no gain at any measured length, up to 1,024 tokens."),
        (
            {},
            {512: 1.5, 1024: 0.8},
            "stay exact: its gain does not last to the longest measured length, 1,024 tokens.",
        ),
        (
            {"verdict": "inconclusive"},
            RISING,
            "not settled: it is faster at 1,024 tokens and above; its quality on needle is inconclusive at a margin of "
            "1.0 points.",
        ),
        (
            {"longest": 500},
            RISING,
            "not settled: it is faster at 1,024 tokens and above; no loss on needle at a margin of 1.0 points; its "
            "quality was measured on inputs of fewer than 501 tokens only.",
        ),
        ({}, {}, "not settled: no loss on needle at a margin of 1.0 points; its speed was not measured."),
    ],
)
def test_advice_weighs_quality_and_speed(entry, ratios, said):
    made = record("v", tasks=[quality("v", **entry)], rows=speed("v", ratios))
    assert recommendation(made) == [f"v: {said}"]


def test_a_low_ceiling_rules_every_variant_out():
    """With variants or without: a recommendation that times only the ceiling agrees with reports that time more."""
    rows = speed("v", {512: 1.04})
    rows[0] |= {
        "base": {"status": "ok", "samples": 9},
        "ceiling": {"status": "ok", "ratio": 1.05, "interval": [1.04, 1.06], "samples": 9},
    }
    why = "attention is 5 % of the time at 512 tokens, so that no mechanism can gain more than 1.05×."
    alone = [rows[0] | {"variants": []}]
    assert recommendation(record("v", tasks=[quality("v")], rows=rows)) == [f"v: stay exact: {why}"]
    for made in (record("v", tasks=[quality("v")], rows=rows), record(rows=alone)):
        assert answer(made) == f"Stay exact: {why}"
    rows[0]["ceiling"] |= {"ratio": 1.5, "interval": [1.4, 1.6]}
    assert recommendation(record(rows=[rows[0] | {"variants": []}])) == []
    assert known(conclude(record("v", tasks=[quality("v")], rows=rows))).decision == "use"


@pytest.mark.parametrize(
    ("entry", "ratios", "decision", "said"),
    [
        (
            {"verdict": "no loss", "difference": 0.0, "interval": [-0.008, 0.008]},
            RISING,
            "use",
            "Use v at 1,024 tokens and above: 2.50× the speed of exact attention, no loss on needle (it scores the same ± 0.8 "
            "points of accuracy, margin 1.0 points); below, keep exact attention.",
        ),
        (
            {"verdict": "loss beyond margin"},
            RISING,
            "stay exact",
            "Stay exact: v is faster, but it loses 88.0 ± 4.0 points of accuracy on needle at a margin of 1.0 points.",
        ),
        ({}, {512: 0.8}, "stay exact", "Stay exact: no gain at any measured length, up to 512 tokens."),
        (
            {"verdict": "inconclusive", "difference": -0.02, "interval": [-0.05, 0.01], "needed_examples": 1650},
            RISING,
            "not settled",
            "Not settled: v loses 2.0 ± 3.0 points of accuracy on needle at a margin of 1.0 points; needs about 1,700 examples, "
            "12 min.",
        ),
    ],
)
def test_the_answer_words_what_the_record_concludes(entry, ratios, decision, said):
    made = record("v", tasks=[quality("v", **entry)], rows=speed("v", ratios))
    assert known(conclude(made)).decision == decision
    assert answer(made, lambda name, examples: "12 min") == said
    refused = "do not use" if "verdict" in entry else "stay exact"
    words = {"use": "use", "stay exact": refused}.get(str(decision), str(decision))
    assert words in recommendation(made)[0]


def test_names_open_questions_of_busy_machines_and_missing_measurements():
    busy = speed("v", {512: 2.0}, width=0.5)
    (one,) = advice(record("v", tasks=[quality("v")], rows=busy))
    assert (one.decision, "its speed is not settled: the machine was busy" in one.reason) == ("not settled", True)
    (one,) = advice(record("v", rows=speed("v", RISING)))
    assert one.reason == "it is faster at 1,024 tokens and above; its quality was not measured"
    (one,) = advice(record("v"))
    assert one.reason == "its quality was not measured; its speed was not measured"
    (one,) = advice(record("v", tasks=[quality("v")], rows=speed("v", RISING), verified=False))
    assert one.decision == "do not use"


def test_a_model_at_chance_is_named():
    exact = quality("v") | {"chance": 0.5, "base": {"scores": {"accuracy": 0.5}, "interval": None, "at_chance": True}}
    (one,) = advice(record("v", tasks=[exact], rows=speed("v", RISING)))
    assert one.decision == "not settled"
    assert "exact attention itself scores no better than chance on needle (50.00 %)" in one.reason
    lost = quality("v", verdict="loss beyond margin", at_chance=True) | {"chance": 0.1}
    (one,) = advice(record("v", tasks=[lost]))
    assert one.reason.endswith(", and scores no better than chance (10.00 %)")


def test_the_best_variant_is_the_fastest_of_those_to_use():
    tasks = [quality("slow"), quality("fast"), quality("wrong", verdict="loss beyond margin")]
    rows = [*speed("slow", {512: 1.5}), *speed("fast", {512: 2.0}), *speed("wrong", {512: 4.0})]
    joined = [rows[0] | {"variants": [one for row in rows for one in row["variants"]]}]
    first, *rest = recommendation(record("slow", "fast", "wrong", tasks=tasks, rows=joined))
    assert first == "Best: fast: use at every measured length (2.00×): no loss on needle at a margin of 1.0 points."
    assert [line.split(":")[0] for line in rest] == ["slow", "wrong"]
    first, *_ = recommendation(record("slow", "wrong", tasks=tasks[2:]))
    assert first.startswith("Nothing is recommended yet")
    first, *_ = recommendation(record("slow", "wrong", tasks=[tasks[0], tasks[2]], rows=speed("slow", {512: 0.5})))
    assert first == "Stay exact: no variant is both faster and good enough."
    assert recommendation(record()) == []
