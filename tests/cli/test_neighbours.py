"""Every command leaves alone what stands beside its output, whatever its name, with and without --force."""

import json

import pytest

from approx.checkpoints.atomic_folder import CLAIM
from approx.errors import Exit
from conftest import ROOT
from tiny_study import tiny_recipe

from .conftest import call

TASK = ("--task", "glue/sst2", "--data", "{data}")
SHORT = ("--lengths", "8", "--batch-size", "1", "--rounds", "3", "--seconds", "0")
# Command -> its words; what it writes is in OUTPUTS.
COMMANDS = {
    "convert": ("convert", "{base}", "-m", "linear", "-o", "out"),
    "revert": ("revert", "{converted}", "-o", "out"),
    "push": ("push", "{converted}", "me/model", "--dry-run", "-o", "out", "--offline"),
    "export": ("export", "{converted}", "-o", "out"),
    "evaluate": ("evaluate", "{base}", *TASK, "-o", "out.json"),
    "bench": ("bench", "{base}", *SHORT, "-o", "out.json"),
    "plan": ("plan", "{base}", "-m", "linear", "-o", "out.json"),
    "run": ("run", "{recipe}", "-o", "out"),
    "sweep": ("sweep", "{grid}", "-o", "out"),
    "finetune": ("finetune", "{converted}", *TASK, "--recover", "task", "--steps", "2", "-o", "out"),
    "report": ("report", "{record}", "-o", "out"),
    "search": ("search", "{base}", *TASK, "--length", "8", "--budget", "loss<=90", "-o", "out.yaml"),
}
OUTPUTS = ("out", "out.json", "out.yaml", "out-search")
RECORD = ROOT / "reports" / "quickstart" / "report.json"
GRID = """title: One
checkpoint: {base}
variants: {{local: {{mechanism: local, grid: {{left: [1], right: [2]}}}}}}
evaluate: {{task: glue/sst2, data: {data}, margin: 0.5}}
device: cpu
"""
# Every name that is made beside an output, with numbers as users write them too.
NAMES = [
    *(
        "out.tmp-1",
        "out.tmp-12345678",
        "out.tmp-new",
        "out.old-1",
        "out.old-20241127",
        "out.old-20241127120000",
        "out.old-²",
    ),
    *(
        "out.failed",
        "out.failed-2",
        ".out.lock",
        ".out.json.lock",
        ".out-search.lock",
        "out.json.tmp",
        "out.record",
        ".approx-x",
    ),
    *(
        f".out.json.{'0' * 32}.tmp",
        ".out.json.x.tmp",
        "approx_manifest.json.tmp",
        "search",
        "training",
        "report",
        "report.json",
        "index.html",
        "best.yaml",
        "search.json",
        "measured.json",
        "record.json",
        "stages",
        "out-search-2",
        "out-search.old",
    ),
]
# These stop a command, since it needs the name for itself.
IN_THE_WAY = {
    "finetune": ["out.training"],
    "evaluate": ["out.parquet"],
    "search": ["out-search"],
}


def words_of(name, base, converted, data, place):
    (place / "grid.yaml").write_text(GRID.format(base=base, data=data), encoding="utf-8")
    recipe = tiny_recipe(place / "recipe.yaml", base, data)
    known = {"base": base, "converted": converted, "data": data, "recipe": recipe, "grid": place / "grid.yaml"}
    known["record"] = RECORD
    if name == "finetune":
        lines = (data / "dev.tsv").read_text("utf-8").splitlines()
        (place / "train.tsv").write_text("\n".join([lines[0], *lines[1:] * 4]) + "\n", encoding="utf-8")
        known["data"] = place / "train.tsv"
    return [word.format(**known) for word in COMMANDS[name]]


def contents(place):
    """Everything but the output itself: path -> content."""
    return {
        path.relative_to(place).as_posix(): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
        if path.relative_to(place).parts[0] not in OUTPUTS
    }


def put(place, names, folders):
    for name in names:
        if folders:
            (place / name).mkdir()
            (place / name / "config.json").write_text(json.dumps(name))
        else:
            (place / name).write_text(name)


@pytest.mark.parametrize("folders", [True, False], ids=["folders", "files"])
@pytest.mark.parametrize(
    "name",
    [
        *("convert", "evaluate", "bench", "plan", "push", "report"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("revert", "export", "run", "sweep", "finetune", "search")
        ),
    ],
)
@pytest.mark.sample(2)
def test_keeps_neighbours_of_every_name(name, folders, base, converted, data, tmp_path):
    words = words_of(name, base, converted, data, tmp_path)
    if name == "evaluate":
        assert call(*words).code == 0
    put(tmp_path, NAMES, folders)
    before = contents(tmp_path)
    # Evaluations and sweeps repeat nothing; sweep knows no --force.
    for force in ([] if name == "evaluate" else [[]]) + ([] if name == "sweep" else [["--force"]]):
        answer = call(*words, *force)
        # Whether anything is faster at 8 tokens is chance.
        assert answer.code in ((0, Exit.THRESHOLD) if name == "search" else (0,)), answer.err
        after = contents(tmp_path)
        if name == "evaluate":
            after["out.parquet"] = before["out.parquet"]
        assert after == before


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
@pytest.mark.parametrize(("name", "taken"), [(name, one) for name, names in IN_THE_WAY.items() for one in names])
@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_name_that_is_taken_is_refused(name, taken, folder, force, base, converted, data, tmp_path):
    words = words_of(name, base, converted, data, tmp_path)
    put(tmp_path, [taken], folder)
    before = contents(tmp_path)
    answer = call(*words, *force)
    assert answer.code == Exit.REFUSED, answer.err
    assert taken in answer.err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_search_keeps_folders_and_plans_of_the_user(force, base, data, tmp_path):
    words = [
        "search",
        base,
        "--task",
        "glue/sst2",
        "--data",
        data,
        "--length",
        "8",
        "--speed",
        "1.1x",
        "-o",
        "plan.yaml",
    ]
    (tmp_path / "plan-search" / "report").mkdir(parents=True)
    (tmp_path / "plan-search" / "record.json").write_text("mine")
    before = contents(tmp_path)
    for more in ([], ["--resume"]):
        if not (more and force):
            answer = call(*words, *more, *force)
            assert answer.code == Exit.REFUSED, answer.err
            assert "record.json" in answer.err
    assert contents(tmp_path) == before
    (tmp_path / "other.yaml").write_text("mine")
    if not force:
        answer = call(*words[:-1], "other.yaml", "--resume")
        assert (answer.code, "other.yaml exists" in answer.err) == (Exit.REFUSED, True), answer.err


@pytest.mark.parametrize("name", ["run", "sweep", "convert", "revert", "export", "push"])
def test_force_keeps_a_folder_of_the_user_under_the_name_of_the_output(name, base, converted, data, tmp_path):
    words = words_of(name, base, converted, data, tmp_path)
    for inside in ("recipe.yaml", "records/mine.json", "stages/x.json", "config.json", f"{CLAIM}/x"):
        (tmp_path / "out" / inside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / inside).write_text("{}")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for force in [[], *([] if name == "sweep" else [["--force"]])]:
        answer = call(*words, *force)
        assert answer.code == Exit.REFUSED, answer.err
        assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
