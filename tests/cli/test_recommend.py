"""`approx recommend` and `approx plan` without a plan, with real times: the form of the answer, not which one it is."""

from pathlib import Path

from approx.errors import Exit
from approx.evaluation import record

from .conftest import call


def test_prints_the_answer_and_the_next_command_and_writes_a_record_that_report_reads(base, data):
    about = ["recommend", base, "--task", "glue/sst2", "--data", data, "--lengths", "16,30", "--mechanisms", "local"]
    answer = call(*about, "-o", "out")
    assert answer.code == Exit.OK, answer.err
    first, *_, last = answer.out.splitlines()
    assert first.startswith(("Use ", "Stay exact: ", "Not settled: "))
    assert last.startswith("Next: approx ")
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
