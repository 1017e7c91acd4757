"""`approx search`: a plan that beats every uniform one, its files, its resumption, and what it refuses."""

import json
import re
import signal
import subprocess
import sys
from html import unescape

import pytest
from rich.table import Table

from approx.checkpoints.atomic_folder import locked_output
from approx.cli.search import _frontier
from approx.errors import Exit
from approx.evaluation import record
from approx.evaluation.record import FOUND
from approx.planning.plan import Plan
from approx.publishing.summary import conclude

from .conftest import call

NEEDLE = [
    "quickstart",
    "--task",
    "needle",
    "--set",
    "length=512",
    "--length",
    "1024",
    "--mechanisms",
    "local,clustered",
    "--limit",
    "90",
    "--calibration",
    "12",
    "--examples",
    "45",
    "--proof",
    "45",
    "--front",
    "1",
    "-q",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A finished search: the folder of its plan, and the answer of the command."""
    folder = tmp_path_factory.mktemp("search")
    return folder, call("search", *NEEDLE, "--budget", "loss<=5", "-o", folder / "plan.yaml", "--json")


@pytest.mark.slow
def test_mix_loses_less_than_uniform_plans_of_equal_speed(found):
    folder, answer = found
    assert answer.code == Exit.OK, answer.err
    assert answer.json["feasible"]
    assert answer.json["proof"]["loss"] <= 5
    mechanisms = [rule.mechanism for rule in Plan.read(folder / "plan.yaml").rules]
    assert len(set(mechanisms)) == 2, "the first layer needs only its neighbours, and the second one any key"
    task = record.load(folder / "plan-search" / "record.json").quality[0]
    losses = {one.name: -100 * one.difference for one in task.variants}
    assert losses.pop("found") <= 5
    assert all(losses[name] > 30 for name in ("local 32", "local 64", "local 128", "clustered 25"))
    assert all(one.approximated and one.approximated.examples for one in task.variants if one.name != "front 1")


def test_gives_every_layer_a_reason_and_separates_the_examples(found):
    folder, answer = found
    assert [layer["layer"] for layer in answer.json["layers"]] == [0, 1]
    text = (folder / "plan.yaml").read_text()
    assert all(f"# layer {layer}: " in text for layer in (0, 1))
    task = record.load(folder / "plan-search" / "record.json").quality[0]
    assert task.examples == 45
    assert "did not see" in task.notes[0]
    assert (folder / "plan-search" / "report" / "index.html").is_file()


def test_the_page_begins_with_what_was_found_beside_the_plans_it_was_compared_with(found):
    """The sentence, the table of variants and the answer of the command give the figures of the record."""
    folder, answer = found
    made = record.load(folder / "plan-search" / "record.json")
    page = (folder / "plan-search" / "report" / "index.html").read_text("utf-8")
    said = unescape(re.search(r'<p class="advice">(.*?)</p>', page, re.DOTALL)[1])  # pyright: ignore[reportOptionalSubscript]  # it has one
    _, table = page.split('<table class="sortable overview">')
    table, _ = table.split("</table>", 1)
    assert (
        page.index('class="advice"')
        < page.index('class="sortable overview"')
        < page.index("<h2", page.index("</table>"))
    )
    shown = {}
    for row in re.findall(r"<tr>(<th scope=\"row\".*?)</tr>", table, re.DOTALL):
        cells = [
            (sort, " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split()))
            for sort, text in re.findall(r'<t[hd][^>]*data-sort="([^"]*)">(.*?)</t[hd]>', row, re.DOTALL)
        ]
        shown[cells[0][0]] = cells
    assert set(shown) == {one.name for one in made.variants}
    assert next(iter(shown)) == conclude(made).chosen == FOUND  # pyright: ignore[reportOptionalMemberAccess]  # it has one
    assert FOUND in said or said.startswith("Stay exact")
    (task,), row = made.quality, made.speed[-1]
    for entry in task.variants:
        name, change, verdict, _ = shown[entry.name]
        assert name[1].startswith(entry.name)
        assert verdict[1] == entry.verdict
        if not entry.verdict.startswith("not tested"):
            assert float(change[0]) == pytest.approx(100 * entry.difference)
            assert change[1].startswith(f"{100 * entry.difference:+.1f}".replace("-", "−").replace("+0.0", "0.0"))
    for entry in row.variants:
        if (believed := row.believed(entry).ratio) is not None:
            assert shown[entry.name][3][1].startswith(f"{believed:.2f}× {row.length:,} tokens")
    assert -float(shown[FOUND][1][0]) == pytest.approx(answer.json["proof"]["loss"])
    # The table in the terminal has the same rows in the same order, with the layers of each plan.
    advice, plans = _frontier(row, folder / "plan-search" / "record.json")
    assert advice == said
    assert isinstance(plans, Table)
    marks, names, *_ = ([*column.cells] for column in plans.columns)
    assert list(zip(marks, names, strict=True)) == [("→" if name == FOUND else "", name) for name in shown]


@pytest.mark.slow
def test_another_budget_uses_the_sensitivities_of_the_first(found, tmp_path):
    folder, _ = found
    known = folder / "plan-search" / "sensitivities.json"
    answer = call(
        "search", *NEEDLE, "--speed", "1.01x", "--sensitivities", known, "-o", tmp_path / "fast.yaml", "--json"
    )
    assert answer.code in (Exit.OK, Exit.THRESHOLD), answer.err
    assert answer.json["proof"]["speed"] > 0
    assert (
        json.loads((tmp_path / "fast-search" / "sensitivities.json").read_text())["damages"]
        == json.loads(known.read_text())["damages"]
    )
    answer = call(
        "search", *NEEDLE, "--seed", "1", "--budget", "loss<=5", "--sensitivities", known, "-o", tmp_path / "other.yaml"
    )
    assert answer.code == Exit.REFUSED
    assert "other examples" in answer.err
    assert not (tmp_path / "other-search").exists()


def test_an_earlier_search_is_neither_overwritten_nor_mixed(found):
    folder, _ = found
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = call("search", *NEEDLE, "--budget", "loss<=5", "-o", folder / "plan.yaml")
    assert (again.code, "exists" in again.err) == (Exit.REFUSED, True)
    other = call("search", *NEEDLE, "--seed", "1", "--budget", "loss<=5", "-o", folder / "plan.yaml", "--resume")
    assert (other.code, "search of another model" in other.err) == (Exit.REFUSED, True)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_removes_the_plan_of_an_earlier_search_if_nothing_is_found(tmp_path):
    plan = tmp_path / "plan.yaml"
    about = [*NEEDLE, "--mechanisms", "local", "-o", plan]
    assert call("search", *about, "--budget", "loss<=95").code == Exit.OK
    assert plan.is_file()
    answer = call("search", *NEEDLE, "--mechanisms", "linear", "-o", plan, "--budget", "loss<=0", "--force")
    assert answer.code == Exit.THRESHOLD, answer.out
    assert not plan.exists()


def test_two_searches_do_not_write_one_output(tmp_path):
    with locked_output(tmp_path / "plan-search"):
        answer = call("search", *NEEDLE, "--budget", "loss<=5", "-o", tmp_path / "plan.yaml")
    assert (answer.code, "Another process is writing" in answer.err) == (Exit.REFUSED, True)
    assert not (tmp_path / "plan-search").exists()


@pytest.mark.slow
def test_exits_with_7_if_nothing_fits(found, tmp_path):
    folder, _ = found
    known = folder / "plan-search" / "sensitivities.json"
    about = ("--budget", "loss<=0", "--sensitivities", known, "-o", tmp_path / "plan.yaml")
    answer = call("search", *NEEDLE, *about, "--speed", "500x")
    assert answer.code == Exit.THRESHOLD
    assert "even without any attention is" in answer.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_writes_the_best_plan_so_far_and_resume_continues(tmp_path):
    plan = tmp_path / "plan.yaml"
    words = ["search", *NEEDLE[:-1], "--budget", "loss<=5", "-o", str(plan)]
    code = "from approx.cli import main; main()"
    running = subprocess.Popen(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "best so far" in line or "] prove" in line:
            running.send_signal(signal.SIGINT)
            break
    out, _ = running.communicate(timeout=300)
    assert running.returncode == Exit.INTERRUPTED, out
    assert "not proven" in plan.read_text()
    # As a process leaves it that was killed while it wrote.
    (tmp_path / "plan-search" / ".measured.json.0a1b.tmp").write_text('{"about"')
    answer = call(*words, "--resume", "--json", "-q")
    assert answer.code == Exit.OK, answer.err
    assert not list(tmp_path.rglob("*.tmp"))
    assert "not proven" not in plan.read_text()
    assert answer.json["feasible"]


WRONG = {
    "no goal": ([], Exit.USAGE, "Neither a loss nor a speed"),
    "two speeds": (["--speed", "2x", "--latency", "1ms"], Exit.USAGE, "Give one of them"),
    "loss without a task": (["--budget", "loss<=1"], Exit.USAGE, "no task was given"),
    "a budget of no form": (["--budget", "loss<1"], Exit.USAGE, "a budget such as loss<=0.5"),
    "a speed below one": (["--speed", "0.5x"], Exit.USAGE, "a speed-up above 1"),
    "a divergence with a task": (["--budget", "kl<=1", "--task", "needle"], Exit.USAGE, "is a divergence"),
    "task and text": (["--budget", "loss<=1", "--task", "needle", "--text", "x"], Exit.USAGE, "Both a task and a text"),
    "no such mechanism": (
        ["--budget", "loss<=1", "--task", "needle", "--mechanisms", "locl"],
        Exit.USAGE,
        "Did you mean 'local'",
    ),
    "a causal mechanism": (
        ["--budget", "loss<=1", "--task", "needle", "--mechanisms", "sinks"],
        Exit.UNSUPPORTED,
        "no bidirectional form",
    ),
    "a task without its head": (["--budget", "loss<=1", "--task", "squad"], Exit.UNSUPPORTED, "question"),
    "too long": (["--budget", "loss<=1", "--task", "needle", "--length", "4096"], Exit.USAGE, "takes 2048 positions"),
    "too few for gradients": (
        ["--budget", "loss<=1", "--task", "needle", "--calibration", "500"],
        Exit.USAGE,
        "only 100 compare plans",
    ),
    "too few examples": (
        ["--budget", "loss<=1", "--task", "needle", "--limit", "12"],
        Exit.UNAVAILABLE,
        "leaves 6 for the proof",
    ),
    "examples of no such length": (
        ["--budget", "loss<=1", "--task", "needle", "--min-length", "5000"],
        Exit.UNAVAILABLE,
        "has the 5000 tokens of --min-length",
    ),
    "a missing text": (["--budget", "kl<=1", "--text", "none.txt"], Exit.UNAVAILABLE, "cannot be read"),
    "no sensitivities": (
        ["--budget", "loss<=1", "--task", "needle", "--sensitivities", "none.json"],
        Exit.UNAVAILABLE,
        "none.json",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, code, message = WRONG[name]
    length = [] if "--length" in words else ["--length", "512"]
    answer = call("search", "quickstart", *length, *words, "-o", "plan.yaml", "-q")
    assert answer.code == code
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
