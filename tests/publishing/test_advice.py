"""The recommendation: quality and speed together, in the first lines."""

import pytest

from approx.evaluation.record import Record
from approx.publishing.summary import advice, answer, conclude, figures, next_step, overview, recommendation
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
    assert [one.sentence for one in advice(made)] == [f"v: {said}"]
    assert recommendation(made) == [answer(made)]


def test_a_low_ceiling_rules_every_variant_out():
    """With variants or without: a recommendation that times only the ceiling agrees with reports that time more."""
    rows = speed("v", {512: 1.04})
    rows[0] |= {
        "base": {"status": "ok", "samples": 9},
        "ceiling": {"status": "ok", "ratio": 1.05, "interval": [1.04, 1.06], "samples": 9},
    }
    why = "attention is 5 % of the time at 512 tokens, so that no mechanism can gain more than 1.05×."
    alone = [rows[0] | {"variants": []}]
    for made in (record("v", tasks=[quality("v")], rows=rows), record(rows=alone)):
        assert recommendation(made) == [answer(made)] == [f"Stay exact: {why}"]
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
    assert recommendation(made)[0].lower().startswith(decision)


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
    assert first.startswith("Use fast at 512 tokens: 2.00× the speed of exact attention, no loss on needle")
    assert [line.split(":")[0] for line in rest] == ["slow", "fast", "wrong"]
    first, *_ = recommendation(record("slow", "wrong", tasks=tasks[2:]))
    assert first == "Not settled: slow: its quality was not measured; its speed was not measured."
    first, *_ = recommendation(record("slow", "wrong", tasks=[tasks[0], tasks[2]], rows=speed("slow", {512: 0.5})))
    # Whether it is faster was not measured.
    assert first.startswith("Stay exact: wrong loses 88.0 ± 4.0 points of accuracy on needle")
    assert recommendation(record()) == []


def test_the_least_of_losses_is_judged_by_the_worst_task_of_each_variant():
    def lost(task: str, **differences: float) -> dict:
        beyond = "loss beyond margin"
        rows = [quality(name, beyond, difference=x, interval=[x, x]) for name, x in differences.items()]
        return rows[0] | {"task": task, "variants": [row["variants"][0] for row in rows]}

    tasks = [lost("short", good=-0.3, bad=-0.1), lost("long", good=-0.2, bad=-0.6)]
    rows = [
        one | {"variants": one["variants"] + two["variants"]}
        for one, two in zip(speed("good", RISING), speed("bad", RISING), strict=True)
    ]
    said = answer(record("bad", "good", tasks=tasks, rows=rows))
    assert "the least loss is that of good, which loses 30.0" in said
    assert "on short at a margin" in said


def open_question(name: str, difference: float, needed: int | None, task: str = "needle", **more) -> dict:
    interval = [difference - 0.03, difference + 0.03]
    return quality(name, "inconclusive", difference=difference, interval=interval, needed_examples=needed) | {
        "task": task,
        "examples": 200,
        "settings": {},
        **more,
    }


def test_what_is_open_longest_decides_and_no_part_says_otherwise():
    """The sentence, the advice, the number, the table and the next step all name the same task and number."""
    tasks = [open_question("v", 0.0, 300, "short"), open_question("v", -0.002, 4000, "long", subset=True)]
    made = record("v", tasks=tasks, rows=speed("v", RISING)).model_copy(update={"command": "approx run study.yaml"})
    assert answer(made).endswith("on long at a margin of 1.0 points; needs about 4,000 examples.")
    (one,) = advice(made)
    assert "its quality on long is inconclusive at a margin of 1.0 points; about 4,000 examples" in one.reason
    (row,) = overview(made)
    assert (row.task, row.change, row.verdict) == ("long", ("−0.2", pytest.approx(-0.2)), ("inconclusive", "even"))
    assert (row.decision, row.ratio, row.at) == ("not settled", ("2.50×", 2.5), "2,048 tokens")
    assert [figure.value for figure in figures(made, "v")] == ["2.50×", "−0.2", "1,024"]
    step = known(next_step(made))
    assert step.command == "approx run study.yaml --limit 4000 -o runs/more-examples"
    assert step.text == "Scoring 4,000 examples would settle it:"


def test_the_most_promising_of_those_that_are_not_settled_is_named():
    """A faster variant within the margin comes before one that fewer examples would settle, most likely as a loss."""
    tasks = [open_question("likely", 0.0, 900), open_question("lost", -0.08, 100), open_question("slow", 0.0, 50)]
    rows = [
        row | {"variants": [*row["variants"], *other["variants"]]}
        for row, other in zip(speed("likely", RISING), speed("lost", RISING), strict=True)
    ]
    assert known(conclude(record("lost", "slow", "likely", tasks=tasks, rows=rows))).chosen == "likely"
    # A page about a search is about what it found.
    found = [*tasks, open_question("found", -0.02, 5000)]
    assert known(conclude(record("lost", "likely", "found", tasks=found, rows=rows))).chosen == "found"


@pytest.mark.parametrize(
    ("command", "task", "step"),
    [
        ("approx evaluate m --task x --limit 50", {"subset": True}, "approx evaluate m --task x --limit 900"),
        ("approx search m --proof=50 --task x", {"subset": True}, "approx search m --task x --proof 900 --force"),
        ("python study.py", {"subset": True}, ""),
        ("approx evaluate m --task x", {"subset": False, "split": "dev"}, ""),
        (
            "approx run study.yaml",
            {"settings": {"length": 64, "examples": 200}},
            "approx convert base -m linear --set window=0 -o converted && approx evaluate converted --task needle "
            "--set length=64 --set examples=900",
        ),
    ],
)
def test_says_what_to_run_where_nothing_can_be_said(command, task, step):
    made = record("v", tasks=[open_question("v", 0.0, 900, **task)], rows=speed("v", RISING))
    layer = {"layer": 0, "mechanism": "linear", "settings": {"window": 0, "gate": None, "update": "sum"}}
    checkpoint = {"name": "base", "layers": 1}
    made = part_of(Record, **made.to_data() | {"command": command, "checkpoint": checkpoint})
    made.variants[0].layers = part_of(Record, variants=[{"name": "v", "layers": [layer]}]).variants[0].layers
    found = known(next_step(made))
    assert found.command == step
    assert ("all 200 examples of dev were scored" in found.text) is (task.get("split") == "dev")


def test_what_was_not_measured_is_measured_next():
    scored = record("v", tasks=[quality("v")]).model_copy(update={"command": "approx evaluate m --against b --task x"})
    assert known(next_step(scored)).command == "approx bench m --against b --lengths 3000"
    timed = record("v", rows=speed("v", RISING)).model_copy(update={"command": "approx bench m --lengths 512"})
    assert known(next_step(timed)).command == "approx evaluate m --task NAME"
    assert next_step(record("v", tasks=[quality("v")], rows=speed("v", RISING))) is None


def test_commands_that_measure_again_may_replace_what_they_wrote():
    """Without --force they would refuse, and the value of an option is no model."""
    task = open_question("v", 0.0, 900, subset=True)
    made = record("v", tasks=[task], rows=speed("v", RISING))
    made = made.model_copy(update={"command": "approx evaluate m --task x --limit 50 -o scores.json"})
    assert known(next_step(made)).command == "approx evaluate m --task x --limit 900 -o scores.json --force"
    timed = record("v", rows=speed("v", RISING)).model_copy(update={"command": "approx bench --against b m"})
    assert known(next_step(timed)).command == ""
