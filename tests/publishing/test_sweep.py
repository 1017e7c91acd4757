import csv
from dataclasses import replace

import pytest

from approx.evaluation.record import Quality, Record, Speed
from approx.publishing import sweep
from approx.publishing.sweep import Cell, Results, collect
from typed import part_of

MACHINE = {"processor": "a processor", "cores": 2, "threads": 2, "gpu": None}
MACHINE |= {"platform": "Linux", "python": "3.11", "torch": "2.13.0", "triton": "3.6.0"}
# The parts of an environment that speeds do not depend on.
ENVIRONMENT = {**MACHINE, "git_commit": "0123456789abcdef"}
TASK = {"task": "glue/sst2", "split": "dev", "metric": "accuracy", "fraction": True, "lower_is_better": False}
TASK |= {"examples": 10, "subset": False, "truncated": 0}
PLACE = {"batch": 1, "length": 512, "inputs": "real", "device": "cpu", "dtype": "float32", "mode": "forward"}
PLACE |= {"fast_products": False, "baseline": "default SDPA", "crowded": True}
TIMES = {"median_ms": 5.0, "p10_ms": 4.0, "p90_ms": 6.0, "peak_mb": 7.0, "ratio": 1.0, "interval": [0.9, 1.1]}
TIMES |= {"share_of_ceiling": 0.8, "verdict": "no clear gain", "status": "ok"}
BASE = {"scores": {"accuracy": 0.9}, "interval": [0.8, 1.0]}


def cell(kind: str, plan: str, *, difference: float = 0.0, seed: int | None = None, **environment) -> Cell:
    """A computed cell."""
    variant = {"name": plan, "difference": difference, "scores": {"accuracy": 0.9 + difference}, "p_value": 0.5}
    quality = {**TASK, "base": BASE, "variants": [{**variant, "interval": [-0.1, 0.1], "verdict": "inconclusive"}]}
    timed = {**TIMES, "name": plan, "ratio": 1 + difference}
    speed = {**PLACE, "base": {"median_ms": 5.5}, "variants": [timed]}
    made = part_of(
        Record,
        quality=[quality] if kind == "evaluate" else [],
        speed=[speed] if kind == "bench" else [],
        environment={**ENVIRONMENT, **environment},
    )
    return Cell("k", f"{kind} {plan}", kind, "base", plan, seed, record=made)


def failed(kind: str, plan: str, error: str, exit_code: int = 1) -> Cell:
    return replace(cell(kind, plan), error=error, exit_code=exit_code, record=None)


def task_of(one: Cell) -> Quality:
    assert one.record is not None
    return one.record.quality[0]


def row_of(one: Cell) -> Speed:
    assert one.record is not None
    return one.record.speed[0]


def results_of(*cells: Cell) -> Results:
    return collect(cells, {str(one.plan): {} for one in cells})


def test_speeds_of_different_machines_never_share_a_table():
    made = results_of(
        cell("evaluate", "slow"), cell("bench", "slow"), cell("bench", "quick", processor="another", difference=0.5)
    )
    here, there = sweep.layout(made)
    assert "a processor" in here.title
    assert "another" in there.title
    assert [row[0] for row in there.rows] == ["slow", "quick"]
    assert [row[-1] for row in here.rows] == ["1.00×"]
    assert [line["machine"] for table in (here, there) for line in table.lines] == [
        sweep.machine_words(row.machine) for row in made.speed for _ in range(1 + (row is made.speed[1]))
    ]
    # Plans timed on another machine have no speed in this table.
    assert [row[-1] for row in there.rows] == ["", "1.50×"]


def test_the_smallest_loss_comes_first_and_of_the_same_loss_the_fastest():
    made = results_of(
        cell("evaluate", "worse", difference=-0.3),
        cell("evaluate", "slow"),
        cell("evaluate", "quick"),
        cell("bench", "slow", difference=-0.5),
        cell("bench", "quick", difference=0.5),
    )
    (table,) = sweep.layout(made)
    assert [row[0] for row in table.rows] == ["quick", "slow", "worse"]
    assert table.columns[-1] == "×, 512 tokens"


def test_shows_mean_and_spread_over_seeds_and_lists_failures():
    made = results_of(
        cell("evaluate", "a", difference=-0.1, seed=0),
        cell("evaluate", "a", difference=-0.3, seed=1),
        failed("evaluate", "b", "a line\nand another"),
    )
    (row,) = made.quality
    assert round(row.loss, 6) == 0.2
    assert row.difference.sd == pytest.approx(0.141421, abs=1e-6)
    assert row.verdicts == {"inconclusive": 2}
    text = sweep.markdown("T", None, made)
    head, ruler, *_ = (line for line in text.splitlines() if line.startswith("|"))
    assert ruler == "| --- |" + " --: |" * (head.count("|") - 2)
    assert "| a | 70.0 | -20.0 | 14.14 | 2 |  | inconclusive |" in text
    assert "- evaluate b: a line and another" in text
    assert sweep.comma_separated(made).splitlines()[0].startswith("checkpoint,plan,task,split,metric")


def test_a_sweep_keeps_all_measurements_of_a_plan():
    lost = failed("bench", "b", "why", exit_code=4)
    cells = [cell("convert", "a"), cell("evaluate", "a", difference=-0.1, seed=3), lost, cell("bench", "a")]
    made = collect(cells, {"a": {"topk": 32}, "b": {"topk": 64}})
    about = {"checkpoint": "base", "plan": "a", "values": {"topk": 32}}
    of_seed = {"seed": 3, "scores": {"accuracy": 0.8}, "difference": -0.1, "interval": [-0.1, 0.1], "p_value": 0.5}
    assert made.to_data() == {
        "quality": [
            {
                **about,
                **TASK,
                "details": "",
                "base": 0.9,
                "score": {"mean": 0.8, "sd": None, "seeds": 1},
                "difference": {"mean": -0.1, "sd": None, "seeds": 1},
                "loss": 0.1,
                "interval": [-0.1, 0.1],
                "verdicts": {"inconclusive": 1},
                "by_seed": [{**of_seed, "verdict": "inconclusive"}],
            }
        ],
        "speed": [{**about, **PLACE, **TIMES, "base_ms": 5.5, "machine": MACHINE}],
        "failed": [{"key": "k", "title": "bench b", "checkpoint": "base", "error": "why", "exit_code": 4}],
    }


def test_every_column_of_the_table_and_of_its_csv_holds_its_own_figure():
    cells = [cell("evaluate", "a", difference=-0.1), cell("bench", "a", difference=0.25), cell("evaluate", "b")]
    made = collect(cells, {"a": {"topk": 32}, "b": {"clusters": 25}})
    (table,) = sweep.layout(made)
    assert table.title == (
        "base; glue/sst2, dev: 10 examples, exact attention 90.0; "
        "times exact attention's speed on a processor, 2 threads, torch 2.13.0"
    )
    assert table.columns == ["plan", "accuracy %", "difference", "sd", "seeds", "95 %", "verdict", "×, 512 tokens"]
    assert table.rows == [
        ["b", "90.0", "+0.0", "", "", "-10.00 … 10.00", "inconclusive", ""],
        ["a", "80.0", "-10.0", "", "", "-10.00 … 10.00", "inconclusive", "1.25×"],
    ]
    about = {"checkpoint": "base", "machine": "a processor, 2 threads, torch 2.13.0", "base": "0.9", "score_sd": ""}
    about |= {name: str(value) for name, value in TASK.items()} | {"details": "", "difference_sd": "", "seeds": "1"}
    about |= {"low": "-0.1", "high": "0.1", "verdict": "inconclusive"}
    assert list(csv.DictReader(sweep.comma_separated(made).splitlines())) == [
        {
            **about,
            "plan": "b",
            "score": "0.9",
            "difference": "0.0",
            "ratio, 512 tokens": "",
            "clusters": "25",
            "topk": "",
        },
        {
            **about,
            "plan": "a",
            "score": "0.8",
            "difference": "-0.1",
            "ratio, 512 tokens": "1.25",
            "clusters": "",
            "topk": "32",
        },
    ]
    assert sweep.markdown("T", "N", made).startswith("# T\n\n*N*\n\nbase; glue/sst2, dev: ")


def test_a_lower_is_better_score_keeps_its_units_and_direction():
    cells = [cell("evaluate", "more", difference=0.25), cell("evaluate", "less", difference=-0.25)]
    for one in cells:
        task_of(one).fraction, task_of(one).lower_is_better = False, True
    (table,) = sweep.layout(results_of(*cells))
    assert table.title.endswith("exact attention 0.900")
    assert table.columns[1] == "accuracy"
    assert [row[:3] for row in table.rows] == [["less", "0.650", "-0.250"], ["more", "1.150", "+0.250"]]
    assert table.rows[0][5] == "-0.1000 … 0.1000"


def test_verdicts_that_differ_between_seeds_are_counted():
    cells = [cell("evaluate", "a", seed=seed) for seed in (0, 1, 2)]
    task_of(cells[1]).variants[0].verdict = "no loss"
    (table,) = sweep.layout(results_of(*cells))
    assert table.rows[0][3:] == ["0.00", "3", "", "inconclusive (2 of 3), no loss (1 of 3)"]


def test_headings_of_speed_columns_name_their_differences():
    def columns(**change: object) -> list[str]:
        cells = [cell("bench", "a"), cell("bench", "a")]
        for name, value in change.items():
            setattr(row_of(cells[1]), name, value)
        (table,) = sweep.layout(results_of(*cells))
        return table.columns

    assert columns() == ["plan", "×, 512 tokens"]
    assert columns(length=64) == ["plan", "×, 64 tokens", "×, 512 tokens"]
    assert columns(batch=8)[1:] == [f"×, 512 tokens, batch {batch}, real, float32, cpu" for batch in (1, 8)]
    assert columns(dtype="bfloat16")[1] == "×, 512 tokens, batch 1, real, bfloat16, cpu"
    assert columns(fast_products=True)[2] == "×, 512 tokens, batch 1, real, float32, cpu, fast products"


@pytest.mark.parametrize(
    ("change", "shown"), [({"status": "out of memory", "ratio": None}, "out of memory"), ({}, "1.00×")]
)
def test_a_missing_speed_has_a_reason_and_its_plan_stays(change, shown):
    one = cell("bench", "a")
    for name, value in change.items():
        setattr(row_of(one).variants[0], name, value)
    (table,) = sweep.layout(results_of(one))
    assert table.rows == [["a", shown]]


def test_other_examples_or_checkpoints_have_a_separate_table():
    cells = [cell("evaluate", "a"), cell("evaluate", "b"), replace(cell("evaluate", "a"), checkpoint="large")]
    task_of(cells[1]).examples = 20
    tables = sweep.layout(results_of(*cells))
    assert [(len(table.rows), table.title.split(" examples")[0]) for table in tables] == [
        (1, "base; glue/sst2, dev: 10"),
        (1, "base; glue/sst2, dev: 20"),
        (1, "large; glue/sst2, dev: 10"),
    ]


def test_describes_a_machine_by_its_known_parts():
    place = {"gpu": "A GPU", "processor": None, "threads": 1, "torch": "2.13.0"}
    assert sweep.machine_words(place) == "A GPU, 1 thread, torch 2.13.0"


def test_a_bar_in_a_name_does_not_end_a_cell():
    assert "| a\\|b | 90.0 |" in sweep.markdown("T", None, results_of(cell("evaluate", "a|b")))


def test_one_task_with_two_settings_is_two_tables_and_not_two_seeds():
    cells = [cell("evaluate", "a"), cell("evaluate", "a")]
    for one, length in zip(cells, (256, 512), strict=True):
        task_of(one).settings = {"length": length}
    titles = [table.title for table in sweep.layout(results_of(*cells))]
    assert [title.partition("; length ")[2].partition(",")[0] for title in titles] == ["256", "512"]
