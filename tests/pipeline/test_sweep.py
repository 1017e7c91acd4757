import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import killable
from approx import grid
from approx.checkpoints.atomic_folder import claim
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.pipeline import sweep as stage
from approx.pipeline.store import Stage
from approx.publishing.report import write_report
from tiny_study import tiny_checkpoint, tiny_data


class Here:
    """An executor without processes that records its items."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def map(self, work, items, *, alone: bool = False) -> Iterator:
        for item in items:
            self.stages.append(item)
            yield item, work(item, None)


def swept(read: grid.Grid, out: Path) -> tuple[stage.Swept, list[str]]:
    """The result of a sweep, and the titles of the computed cells."""
    executor = Here()
    reported: list[tuple[str, int, int]] = []
    made = stage.sweep(
        read,
        out,
        stage.cells(read, out, command="approx sweep"),
        executor,
        progress=lambda *where: reported.append(where),
    )
    assert made.computed == len(executor.stages)
    assert [done for _, done, _ in reported] == sorted(done for _, done, _ in reported)
    assert {total for _, _, total in reported} == {max(reported[-1][1], 1)}
    assert {f"sweep: {one.name}" for one in executor.stages} <= {what for what, _, _ in reported}
    return made, [one.name for one in executor.stages]


def titles(read: grid.Grid) -> dict[str, str]:
    reported: list[tuple[str, int, int]] = []
    listed = stage.cells(read, Path("nowhere"), progress=lambda *where: reported.append(where))
    keys = {cell.name: cell.key for cell in listed}
    assert reported == [("open the base, read the data", done, 1) for done in (0, 1)]
    return keys


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A grid with two seeds of a random plan and two values of a deterministic one, timed at one length."""
    folder = tmp_path_factory.mktemp("sweep")
    text = f"""title: A tiny sweep
checkpoint: {tiny_checkpoint(folder / "base")}
variants:
  clustered: {{mechanism: clustered, layers: 0, settings: {{clusters: 2, bits: 8}}}}
  local: {{mechanism: local, settings: {{left: 1}}, grid: {{right: [1]}}}}
evaluate: {{task: glue/sst2, data: {tiny_data(folder)}, margin: 0.5}}
bench: {{lengths: 8, rounds: 3, seconds: 0}}
seeds: [0, 7]
device: cpu
"""
    (folder / "tiny.yaml").write_text(text, encoding="utf-8")
    return folder / "tiny.yaml"


@pytest.fixture
def edited(study, tmp_path):
    def edit(*change: str, more: str = "") -> grid.Grid:
        text = study.read_text("utf-8")
        assert not change or change[0] in text
        (tmp_path / "edited.yaml").write_text((text.replace(*change) if change else text) + more, encoding="utf-8")
        return grid.read(tmp_path / "edited.yaml")

    return edit


ALL = [
    "evaluate the exact base on glue/sst2",
    "convert clustered seed=0",
    "convert clustered seed=7",
    "convert local right=1",
    "evaluate clustered seed=0 on glue/sst2",
    "evaluate clustered seed=7 on glue/sst2",
    "evaluate local right=1 on glue/sst2",
    "bench clustered seed=0 at 8 tokens",
    "bench local right=1 at 8 tokens",
]


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory) -> tuple[stage.Swept, Path]:
    out = tmp_path_factory.mktemp("whole") / "out"
    made, computed = swept(grid.read(study), out)
    assert computed == ALL
    return made, out


def test_combines_seeds_and_sorts_plans_by_loss(whole):
    made, out = whole
    assert made.results.failed == []
    by_plan = {row.plan: row for row in made.results.quality}
    assert [one.seed for one in by_plan["clustered"].by_seed] == [0, 7]
    scores = [one.scores["accuracy"] for one in by_plan["clustered"].by_seed]
    assert by_plan["clustered"].score.mean == pytest.approx(sum(scores) / 2)
    assert by_plan["clustered"].difference.sd is not None
    # The plan is deterministic, so there is one seed, with its interval.
    assert by_plan["local right=1"].difference.sd is None
    assert by_plan["local right=1"].interval is not None
    assert by_plan["local right=1"].values == {"right": 1}
    assert [row.loss for row in made.results.quality] == sorted(row.loss for row in made.results.quality)
    assert {row.plan for row in made.results.speed} == {"clustered", "local right=1"}
    stored = json.loads((out / "sweep.json").read_text("utf-8"))
    assert stored | {"computed": made.computed} == made.data
    assert "| clustered |" in (out / "sweep.md").read_text("utf-8")
    assert (out / "sweep.csv").read_text("utf-8").startswith("checkpoint,plan,task")


def test_records_of_a_sweep_make_a_report(whole, tmp_path):
    files = sorted((whole[1] / "records").glob("*.json"))
    records = [record.load(file) for file in files]
    (quality,) = (one for one in records if one.quality)
    assert [v.name for v in quality.quality[0].variants] == [
        "clustered seed=0",
        "clustered seed=7",
        "local right=1",
    ]
    assert all(variant.verified for one in records for variant in one.variants)
    assert len(records) == 3
    write_report(records, tmp_path / "report")
    assert "clustered seed=7" in (tmp_path / "report" / "report.md").read_text("utf-8")


def test_a_second_sweep_computes_only_missing_cells(whole, study, tmp_path):
    out, read = shutil.copytree(whole[1], tmp_path / "out"), grid.read(study)
    keys = titles(read)
    (out / "stages" / ".left behind.tmp").touch()
    made, computed = swept(read, out)
    assert computed == []
    assert made.results.quality == whole[0].results.quality
    assert not list(out.glob("stages/.*"))
    (out / "stages" / f"{keys[ALL[4]]}.json").unlink()
    (out / "stages" / f"{keys[ALL[6]]}.json").write_text('{"schema": 1', encoding="utf-8")
    made, computed = swept(read, out)
    assert computed == [ALL[4], ALL[6]]
    assert made.results.quality == whole[0].results.quality
    # A converted folder that no cell needs is not made again.
    shutil.rmtree(out / "converted")
    assert swept(read, out)[1] == []


def test_a_failed_cell_stops_no_other_and_is_retried(whole, study, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / "out")
    read = grid.read(study)
    keys = titles(read)
    for title in ALL[4:7]:
        (out / "stages" / f"{keys[title]}.json").unlink()
    folder = out / "converted" / keys["convert clustered seed=7"][:16]
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    made, computed = swept(read, out)
    assert computed == ALL[4:7]
    (one,) = made.results.failed
    assert (one.title, one.exit_code) == (ALL[5], Exit.UNAVAILABLE)
    assert [len(row.by_seed) for row in made.results.quality] == [1, 1]
    assert ALL[5] in (out / "sweep.md").read_text("utf-8")
    # The removed folder is made again for the one cell that needs it.
    shutil.rmtree(folder)
    made, computed = swept(read, out)
    assert computed == [ALL[2], ALL[5]]
    assert made.results.failed == []
    assert made.results.quality == whole[0].results.quality


@pytest.mark.slow
def test_a_conversion_that_fails_takes_its_cells_with_it(edited, tmp_path):
    read = edited("settings: {left: 1}, grid: {right: [1]}", "settings: {left: 1, right: 2}")
    out = tmp_path / "out"
    claim(out, "sweep", "a sweep")
    (out / "converted").mkdir()
    # A file is in the place of the folder.
    (out / "converted" / titles(read)["convert local"][:16]).write_text("x", encoding="utf-8")
    made, computed = swept(read, out)
    assert computed == [*ALL[:3], "convert local", *ALL[4:6], ALL[7]]
    assert [one.title.split()[0] for one in made.results.failed] == ["convert", "evaluate", "bench"]
    assert {one.exit_code for one in made.results.failed} == {Exit.REFUSED}
    assert made.results.failed[1].error.startswith("Its conversion failed: ")


def test_a_key_depends_on_exactly_the_inputs_of_its_cell(study, edited, tmp_path):
    known = titles(grid.read(study))
    data = study.parent / "SST-2"
    moved = shutil.copytree(data, tmp_path / "elsewhere" / "SST-2")
    assert titles(edited(str(data), str(moved))) == known
    lines = (moved / "dev.tsv").read_text("utf-8").splitlines()
    (moved / "dev.tsv").write_text("\n".join([*lines[:-1], "very good\t1"]) + "\n", encoding="utf-8")
    other = titles(edited(str(data), str(moved)))
    assert {title for title in known if other[title] != known[title]} == {
        title for title in ALL if "convert" not in title
    }
    # Finished cells stay valid when the grid grows or a variant is renamed.
    grown = titles(edited("right: [1]", "right: [1, 2]"))
    assert known.items() <= grown.items()
    assert len(grown) == len(known) + 3
    assert set(titles(edited("  clustered:", "  groups:")).values()) == set(known.values())
    assert not set(titles(edited("bits: 8", "bits: 9")).values()) & {known[t] for t in ALL if "clustered" in t}
    # Each setting of a measurement is part of its key.
    for change, word in ((("margin: 0.5", "margin: 0.6"), "evaluate"), (("rounds: 3", "rounds: 4"), "bench")):
        other = titles(edited(*change))
        assert {title for title in known if other[title] != known[title]} == {t for t in ALL if t.startswith(word)}
    assert set(titles(edited(more="seed: 1\n")).values()).isdisjoint(known.values())


def test_names_every_mistake_once(edited):
    with pytest.raises(ApproxError) as caught:
        titles(edited("right: [1]", "rihgt: [1, 2]", more="sed: 3\n"))
    text = str(caught.value)
    assert "unknown key 'sed'. Did you mean 'seed'?" in text
    assert text.count("Did you mean 'right'") == 1


def test_refuses_a_folder_of_the_user(study, tmp_path):
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(ApproxError, match="is not a sweep of approx") as caught:
        stage.cells(grid.read(study), tmp_path)
    assert caught.value.exit_code == Exit.REFUSED


@pytest.mark.slow
def test_resumes_to_the_same_results_after_interruption_and_kill(whole, study, tmp_path):
    """Interrupt after the first cell and kill after the fourth, in separate processes; nothing is computed twice."""
    out = tmp_path / "out"
    before: dict[str, int] = {}
    for how, code, cells in ((signal.SIGINT, Exit.INTERRUPTED, 1), (signal.SIGKILL, -signal.SIGKILL, 4)):
        errors = tmp_path / how.name
        process = killable.start("sweep", study, "-o", out, "--jobs", 2, errors=errors)
        while len(list(out.glob("stages/*.json"))) < cells and process.is_alive():
            time.sleep(0.01)
        assert killable.ended(process, how) == code, errors.read_text("utf-8")
        assert "Finished cells are kept" in errors.read_text("utf-8") or how == signal.SIGKILL
        now = {path.name: path.stat().st_mtime_ns for path in out.glob("stages/*.json")}
        assert before.items() <= now.items()
        before = now
    made, computed = swept(grid.read(study), out)
    assert len(computed) == len(ALL) - len(before)
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("stages/*.json")}.items()
    assert made.results.quality == whole[0].results.quality
    assert not list(out.glob("stages/.*.tmp"))
