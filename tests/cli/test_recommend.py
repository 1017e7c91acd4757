"""`approx recommend` and `approx plan` without a plan, with real times: the form of the answer, not which one it is."""

import shlex
from pathlib import Path

import pytest

from approx.errors import Exit
from approx.evaluation import record

from .conftest import call, check_parses


def test_prints_the_answer_and_the_next_command_and_writes_a_record_that_report_reads(base, data):
    about = ["recommend", base, "--task", "glue/sst2", "--data", data, "--lengths", "16,30", "--mechanisms", "local"]
    answer = call(*about, "-o", "out")
    assert answer.code == Exit.OK, answer.err
    first, *_, last = answer.out.splitlines()
    assert first.startswith(("Use ", "Stay exact: ", "Not settled: "))
    check_parses(last.removeprefix("Next: "))
    assert "no attention: the ceiling" in answer.out
    made = record.load(Path("out/record.json"))
    assert [row.length for row in made.speed] == [16, 30] or len(made.speed) == 1
    assert call("report", "out", "-o", "page").code == Exit.OK
    again = call(*about, "-o", "out")
    assert (again.code, "exists already" in again.err) == (Exit.REFUSED, True)


def test_a_plan_without_a_mechanism_shows_the_ceiling(base):
    answer = call("plan", base, "--lengths", "16,32")
    assert (answer.code, "ceiling" in answer.out, "planned" in answer.out) == (Exit.OK, True, False)
    assert "approx recommend" in answer.err
    found = call("plan", base, "--json").json
    assert (found["plan"], found["costs"][0]["speedup"]) == (None, 1.0)
    assert all(layer["mechanism"] is None for layer in found["layers"])


DATA = [
    "--task",
    "text-classification",
    "--data",
    "d.csv",
    "--columns",
    "text=a,label=b",
    "--set",
    "labels=a,b",
    "--split",
    "dev",
]


@pytest.mark.parametrize(
    "line",
    [
        "approx recommend m --task needle --data FILE",
        shlex.join(
            ["approx", "recommend", "m", *DATA, "--lengths", "4,8", "--mechanisms", "local", "--time-budget", "20m"]
        ),
        shlex.join(
            ["approx", "recommend", "m", *DATA, "--mechanisms", "local", "--examples", "900", "--time-budget", "20m"]
        ),
        shlex.join(["approx", "search", "m", *DATA, "--budget", "loss<=1", "--length", "512", "-o", "plan.yaml"]),
        shlex.join(["approx", "finetune", "converted", "--recover", "transfer", *DATA, "-o", "healed"]),
        "approx convert m -m local --set left=4 --exact-below 512 -o converted && approx evaluate converted --task needle --data MORE",
        "approx convert m --plan plan.yaml -o converted",
        "approx export converted --format stock -o stock",
        "approx plan m -m local",
        "approx plan m --lengths 512,2048",
        "approx evaluate m --against b --task needle --limit 900 -o scores.json --force",
        "approx bench m --against b --lengths 3000 -o times.json --force",
        "approx search m --task needle --budget 'loss<=1' --length 512 -o plan.yaml --proof 900 --force",
        "approx run study.yaml --limit 4000 -o runs/more-examples",
        "approx run study.yaml --dry-run",
        "approx report out -o report",
        "approx mechanisms --family bert",
    ],
)
def test_the_forms_of_the_next_command_have_options_that_exist(line):
    check_parses(line)


def test_a_command_with_an_option_that_does_not_exist_does_not_parse():
    with pytest.raises(Exception, match="No such option"):
        check_parses("approx convert m --plans plan.yaml -o converted")
