"""The pages in reports/ and the README match the records, and their verdicts are right."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from approx.errors import ApproxError
from approx.evaluation import record
from approx.evaluation.record import Record
from reports import clustered_paper, long_documents, push_example, sources
from reports.long_documents import Point
from typed import part_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_pages_and_readme_are_made_from_the_records():
    done = subprocess.run([sys.executable, "reports/refresh.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example_of_a_push_equals_a_dry_run(tmp_path):
    push_example.main(tmp_path)
    # Sizes change with every line of the code that travels; the card and the names do not.
    assert (tmp_path / "card.md").read_text("utf-8") == (push_example.OUT / "card.md").read_text("utf-8")
    made, stored = (
        re.findall("^[|] (`.+`) [|]", (folder / "files.md").read_text("utf-8"), flags=re.MULTILINE)
        for folder in (tmp_path, push_example.OUT)
    )
    assert made == stored != []


@pytest.mark.parametrize(
    ("published", "left", "said"),
    [
        (0.97, (0.96, 1.01), "holds"),
        (0.01, (0.2, 0.4), "holds"),
        (0.97, (0.90, 0.96), "open: the interval allows both"),
        (0.97, (0.80, 0.90), "does not hold: here it loses part of the score"),
        (0.01, (0.96, 0.99), "does not hold: here it keeps the score"),
        (0.97, (0.40, 0.60), "does not hold: the interval lies outside"),
    ],
)
def test_a_finding_of_the_paper_holds_where_the_whole_interval_is_of_its_class(published, left, said):
    assert clustered_paper.verdict(published, left).startswith(said)


def test_the_papers_rows_are_found_by_their_plans_and_not_by_their_names():
    made = record.load(ROOT / "reports" / "minilm-sst2" / "report.json")
    for entry in (*made.quality[0].variants, *made.variants):
        entry.name = {"improved-clustered 25": "a", "clustered 25": "b"}.get(entry.name, entry.name)
    rows = clustered_paper.rows({"glue/sst2": made})
    assert [(row.name, row.variant.name) for row in rows] == [("improved-clustered", "a"), ("clustered", "b")]
    for layer in made.variants[0].layers:
        layer.settings["clusters"] = 100
    assert [row.name for row in clustered_paper.rows({"glue/sst2": made})] == ["clustered"]


def test_a_page_says_which_of_the_papers_tasks_was_not_measured():
    made = record.load(ROOT / "reports" / "minilm-sst2" / "report.json")
    *_, rest = clustered_paper.page({"glue/sst2": made}, {"glue/sst2": "minilm-sst2"}).partition("not measured here")
    assert "| squad | 90.4 | 87.6 | 0.6 |" in rest
    assert "| glue/sst2 | 94.7" not in rest


def a_record(times: dict[tuple[str, int], float], scores: dict[tuple[str, int], float]) -> Record:
    """Two lengths, exact attention and one other."""
    quality = [
        {
            "task": "documents",
            "metric": "accuracy",
            "examples": 200,
            "truncated": 2048 - length,
            "base": {"scores": {"accuracy": scores["exact", length]}, "interval": [0.8, 0.95]},
            "variants": [{"name": "local", "scores": {"accuracy": scores["local", length]}, "interval": [-0.02, 0.01]}],
        }
        for length in (512, 2048)
    ]
    speed = [
        {
            "length": length,
            "batch": 1,
            "base": {"median_ms": times["exact", length]},
            "variants": [{"name": "local", "median_ms": times["local", length]}],
        }
        for length in (512, 2048)
        if times
    ]
    stages = "".join(
        f"  - {{task: documents, data: x/reviews.jsonl, max_length: {length}}}\n" for length in (512, 2048)
    )
    return part_of(
        Record,
        title="Long",
        command="approx run x",
        recipe={"text": f"evaluate:\n{stages}"},
        quality=quality,
        speed=speed,
        checkpoint={"family": "bert", "layers": 6, "positions": 2048},
        environment={"processor": "p", "threads": 2, "torch": "2", "approx": "1", "git_commit": "0123456789"},
    )


TIMES = {("exact", 512): 10.0, ("local", 512): 11.0, ("exact", 2048): 90.0, ("local", 2048): 50.0}
SCORES = {("exact", 512): 0.88, ("local", 512): 0.88, ("exact", 2048): 0.93, ("local", 2048): 0.92}


def test_length_and_approximation_pay_off_together_where_nothing_quicker_scores_as_high():
    text = long_documents.page(a_record(TIMES, SCORES), "long")
    assert (
        "pay off together with `local` at 2,048 tokens (92.0 %, 50 ms; +4.0 (-2.0 … +10.0) points against exact" in text
    )
    assert "None of these gains is more than chance may give." in text
    assert "More than chance, each taken by itself: `local` at 2,048." in long_documents.page(
        a_record(TIMES, {**SCORES, ("local", 2048): 0.97}), "long"
    )
    assert (
        "From [long](../long/report.md), `approx run x`, approx 1 at 0123456, an earlier version: its report says what it lacks."
        in text
    )
    assert "| local | 88.0 (-2.0 … +1.0) | 11 | **92.0** (-2.0 … +1.0) | 50 |" in text
    assert "1,536 at 512, 0 at 2,048" in text
    worse = {**SCORES, ("local", 2048): 0.88}
    assert "pay off together **nowhere**" in long_documents.page(a_record(TIMES, worse), "long")
    assert "Not timed yet" in long_documents.page(a_record({}, SCORES), "long")


def test_a_table_fails_where_its_record_is_older_than_its_verdicts(tmp_path, monkeypatch):
    listed = tmp_path / "older.toml"
    monkeypatch.setattr(sources, "OLDER", listed)
    listed.write_text("")
    shutil.copytree(ROOT / "reports" / "long-documents", tmp_path / "long-documents")
    with pytest.raises(
        ApproxError, match=r"'long-documents' is older than chance, .*, which its table needs. Make it again"
    ):
        sources.opened(tmp_path, "long-documents")
    fields = ["rare", "pairs", "chance", "grouped_by", "windows"]
    listed.write_text(f"[long-documents]\nlacks = {json.dumps(fields)}\n")
    assert sources.opened(tmp_path, "long-documents").quality
    listed.write_text(f"[long-documents]\nlacks = {json.dumps([*fields, 'margin'])}\n")
    with pytest.raises(ApproxError, match="lists margin of the record 'long-documents', which has it"):
        sources.opened(tmp_path, "long-documents")


def test_the_interval_between_two_shares_is_the_published_one():
    # Example (a) of Newcombe 1998, method 10.
    assert long_documents.newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_best_points_rise_in_time_and_in_score():
    points = [Point("a", 1, 0.9, 5.0), Point("b", 1, 0.9, 4.0), Point("c", 1, 0.8, 4.5), Point("d", 1, 0.95, None)]
    assert [point.name for point in long_documents.best(points)] == ["b"]
    assert [point.name for point in long_documents.best([*points, Point("e", 1, 0.91, 5.0)])] == ["b", "e"]


def test_the_advice_on_fine_tuning_follows_from_the_records():
    advice = next(
        line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.startswith("| time to fine-tune")
    )
    (entry,) = record.load(ROOT / "reports" / "heal-squad-linear" / "report.json").quality
    scores = {one.name: one.scores["answer_f1"] / entry.base.scores["answer_f1"] for one in entry.variants}
    performer, linear = (f"{100 * scores[f'{name}, healed']:.0f}" for name in ("performer", "linear"))
    assert f"back to {performer} and {linear} % of its F1 on {entry.examples} SQuAD questions" in advice
