import json

import pytest

from ..evaluation.test_tracking import read
from .conftest import call

GRID = """title: A tiny sweep
checkpoint: {base}
variants: {{local: {{mechanism: local, settings: {{left: 2}}, grid: {{right: [2]}}}}}}
evaluate: {{task: glue/sst2, data: {data}}}
device: cpu
"""


@pytest.fixture
def study(base, data, tmp_path):
    (tmp_path / "tiny.yaml").write_text(GRID.format(base=base, data=data), encoding="utf-8")
    return tmp_path / "tiny.yaml"


def test_a_dry_run_lists_the_cells_and_writes_nothing(study, tmp_path):
    answer = call("sweep", study, "--dry-run")
    assert answer.code == 0, answer.err
    assert "3 cells: 3 missing" in answer.out
    listed = call("sweep", study, "--dry-run", "--json", "--quiet").json["cells"]
    assert [cell["cell"] for cell in listed] == [
        "evaluate the exact base on glue/sst2",
        "convert local right=2",
        "evaluate local right=2 on glue/sst2",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_sweeps_in_processes_and_computes_nothing_the_second_time(study, tmp_path):
    answer = call("sweep", study, "--jobs", "2")
    assert answer.code == 0, answer.err
    assert "3 of 3 cells were computed" in answer.out
    assert "local right=2" in answer.out
    made = json.loads((tmp_path / "runs" / "tiny" / "sweep.json").read_text("utf-8"))
    again = call("sweep", study, "--json")
    assert again.json == {**made, "computed": 0}
    assert call("report", *(tmp_path / "runs" / "tiny" / "records").iterdir(), "-o", "report").code == 0
    pytest.importorskip("tensorboard")
    assert call("sweep", study, "--report-to", "tensorboard").code == 0
    (folder,) = (tmp_path / "runs" / "tensorboard").iterdir()
    assert {name for name, run in read(folder).items() if "glue/sst2/accuracy" in run} == {"exact", "local-right=2"}


@pytest.mark.slow
def test_jobs_of_a_cluster_give_the_same_results(study, tmp_path):
    pytest.importorskip("submitit")
    words = ("sweep", study, "-o", "out", "--executor", "submitit", "--set-executor", "cluster=local")
    answer = call(*words, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["computed"] == 3
    assert answer.json["failed"] == []
    assert list((tmp_path / "out" / "jobs").iterdir())


@pytest.mark.slow
def test_names_failed_cells_with_their_exit_code(study, tmp_path):
    converted = call("sweep", study, "-o", "out", "--dry-run", "--json").json["cells"][1]["key"]
    (tmp_path / "out" / "converted").mkdir(parents=True)
    (tmp_path / "out" / "converted" / converted[:16]).write_text("in the way", encoding="utf-8")
    answer = call("sweep", study, "-o", "out")
    assert answer.code == 8
    assert "2 cells failed" in answer.err
    assert "Failed: convert local right=2" in answer.err
    assert "2 of 3 cells were computed" in answer.out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("nowhere.yaml",), 2, "Grid nowhere.yaml does not exist"),
        (("needle-gird",), 2, "Did you mean 'needle-grid'?"),
        (("tiny.yaml", "--executor", "slurm"), 2, "allowed are local, submitit"),
        (("tiny.yaml", "--set-executor", "timeout_min=60"), 2, "local takes --jobs only"),
        (("tiny.yaml", "--executor", "submitit", "--set-executor", "x"), 2, "the form is --set-executor name=value"),
        (("tiny.yaml", "-o", "."), 8, "is not a sweep of approx"),
    ],
)
def test_names_mistakes_before_any_work(study, words, code, text):
    answer = call("sweep", *words)
    assert (answer.code, text in answer.err) == (code, True), answer.err
