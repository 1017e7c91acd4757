from approx.publishing import sweep

ENVIRONMENT = {"processor": "a processor", "cores": 2, "threads": 2, "gpu": None, "torch": "2.13.0"}
BASE = {"scores": {"accuracy": 0.9}, "interval": [0.8, 1.0]}


def entry(kind: str, plan: str, *, difference: float = 0.0, seed: int | None = None, **environment) -> dict:
    """One outcome of a cell, as they are kept."""
    variant = {"name": plan, "difference": difference, "scores": {"accuracy": 0.9 + difference}, "p_value": 0.5}
    task = {"task": "glue/sst2", "split": "dev", "metric": "accuracy", "examples": 10, "subset": False, "truncated": 0}
    task |= {"fraction": True, "lower_is_better": False}
    quality = {**task, "base": BASE, "variants": [{**variant, "interval": [-0.1, 0.1], "verdict": "inconclusive"}]}
    place = {"batch": 1, "length": 512, "inputs": "real", "device": "cpu", "dtype": "float32", "mode": "forward"}
    timed = {"name": plan, "ratio": 1 + difference, "status": "ok", "median_ms": 5.0, "interval": [0.9, 1.1]}
    speed = {**place, "base": {"median_ms": 5.0}, "variants": [timed]}
    made = {
        "quality": [quality] if kind == "evaluate" else [],
        "speed": [speed] if kind == "bench" else [],
        "environment": {**ENVIRONMENT, **environment},
    }
    about = {"key": "k", "kind": kind, "title": f"{kind} {plan}", "checkpoint": "base", "plan": plan, "seed": seed}
    return {**about, "status": "done", "record": made, "error": None, "exit_code": 0}


def table_of(*outcomes: dict) -> dict:
    return sweep.collect(outcomes, {one["plan"]: {} for one in outcomes})


def test_speeds_of_different_machines_never_share_a_table():
    made = table_of(
        entry("evaluate", "slow"), entry("bench", "slow"), entry("bench", "quick", processor="another", difference=0.5)
    )
    here, there = sweep.layout(made)
    assert "a processor" in here["title"]
    assert "another" in there["title"]
    assert [row[0] for row in there["rows"]] == ["slow", "quick"]
    assert [row[-1] for row in here["rows"]] == ["1.00×"]
    assert [line["machine"] for table in (here, there) for line in table["lines"]] == [
        sweep.machine_words(entry["machine"]) for entry in made["speed"] for _ in range(1 + (entry is made["speed"][1]))
    ]
    # What was timed elsewhere has no speed here.
    assert [row[-1] for row in there["rows"]] == ["", "1.50×"]


def test_the_smallest_loss_comes_first_and_of_the_same_loss_the_fastest():
    made = table_of(
        entry("evaluate", "worse", difference=-0.3),
        entry("evaluate", "slow"),
        entry("evaluate", "quick"),
        entry("bench", "slow", difference=-0.5),
        entry("bench", "quick", difference=0.5),
    )
    (table,) = sweep.layout(made)
    assert [row[0] for row in table["rows"]] == ["quick", "slow", "worse"]
    assert table["columns"][-1] == "×, 512 tokens"


def test_seeds_come_to_a_mean_and_its_spread_and_failures_are_listed():
    failed = {**entry("evaluate", "b"), "status": "failed", "error": "a line\nand another", "record": None}
    made = table_of(
        entry("evaluate", "a", difference=-0.1, seed=0), entry("evaluate", "a", difference=-0.3, seed=1), failed
    )
    (row,) = made["quality"]
    assert round(row["loss"], 6) == 0.2
    assert round(row["difference"]["sd"], 6) == 0.141421
    assert row["verdicts"] == {"inconclusive": 2}
    text = sweep.markdown({"title": "T", "notice": None, **made})
    head, ruler, *_ = (line for line in text.splitlines() if line.startswith("|"))
    assert ruler == "| --- |" + " --: |" * (head.count("|") - 2)
    assert "| a | 70.0 | -20.0 | 14.14 | 2 |  | inconclusive |" in text
    assert "- evaluate b: a line and another" in text
    assert sweep.comma_separated(made).splitlines()[0].startswith("checkpoint,plan,task,split,metric")
