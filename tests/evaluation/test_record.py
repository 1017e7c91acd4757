"""Records are written atomically and read strictly, and the module does not import torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from approx.errors import ApproxError, Exit
from approx.evaluation import record as records
from approx.evaluation.record import Quality
from typed import part_of, record_of

ROOT = Path(__file__).resolve().parents[2]
RECORD = {
    "schema": 1,
    "title": "A small run",
    "notice": None,
    "command": "approx run",
    "seed": 0,
    "recipe": None,
    "checkpoint": {
        "name": "tiny",
        "revision": None,
        "weights_sha256": "0" * 64,
        "family": "bert",
        "parameters": 10,
        "layers": 2,
        "positions": 32,
    },
    "variants": [{"name": "linear", "layers": [], "verified": True, "receipt": None}],
    "quality": [
        {
            "task": "glue/sst2",
            "split": "dev",
            "metric": "accuracy",
            "examples": 1,
            "subset": True,
            "truncated": 0,
            "base": {"scores": {"accuracy": 1.0}, "interval": [0.2, 1.0]},
            "variants": [],
            "outputs": None,
        }
    ],
    "speed": [],
    "crossover": [],
    "environment": {},
}

MADE = record_of(RECORD)
SCORED = {**RECORD["quality"][0], "base": {"scores": {"accuracy": "high"}, "interval": [0.2, 1.0]}}


def test_a_record_comes_back_as_it_was(tmp_path):
    path = tmp_path / "new" / "folder" / "record.json"
    records.save(path, MADE)
    assert records.load(path) == MADE
    assert json.loads(path.read_text("utf-8")) == RECORD
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


@pytest.mark.parametrize("path", sorted((ROOT / "reports").glob("*/report.json")), ids=lambda path: path.parent.name)
def test_a_record_is_written_as_it_was_read(path, tmp_path):
    """The order of the keys, and the keys that an older version did not know."""
    records.save(tmp_path / "again.json", records.load(path))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_keys_of_a_later_version_are_kept(tmp_path):
    later = {**RECORD, "later": {"x": 1}, "quality": [{**RECORD["quality"][0], "also": [1.5]}]}
    (tmp_path / "later.json").write_text(json.dumps(later))
    records.save(tmp_path / "again.json", records.load(tmp_path / "later.json"))
    assert json.loads((tmp_path / "again.json").read_text("utf-8")) == later


def test_the_same_record_is_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        records.save(tmp_path / name, record_of(json.loads(json.dumps(RECORD))))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "title": ', "is damaged: .*line 1.*Make it again"),
        ("[]", "is not a record"),
        ('{"title": "x"}', "has no key 'schema'"),
        (json.dumps({**RECORD, "schema": 2}), "has schema 2, but this version of approx reads schema 1"),
        (
            json.dumps({"schema": 1, "title": "x"}),
            "is damaged: record: the key 'notice' is missing; .*'checkpoint' is missing; .*Make it again",
        ),
        (json.dumps({**RECORD, "quality": [{"task": "glue/sst2"}]}), r"record.quality\[0\]: the key 'base' is missing"),
        (
            json.dumps({**RECORD, "crossover": [{}]}),
            r"record.crossover\[0\]: the key 'batch' is missing; .*'dtype' is missing",
        ),
        (json.dumps({**RECORD, "speed": {}}), r"record.speed: a list is needed, found \{\}"),
        (
            json.dumps({**RECORD, "checkpoint": None}),
            "record.checkpoint: a mapping of keys and values is needed, found None",
        ),
        (json.dumps({**RECORD, "seed": float("nan")}), "is damaged: NaN is not a JSON number"),
        (
            json.dumps({**RECORD, "quality": [SCORED]}),
            r"quality\[0\].base.scores.accuracy: a number is needed, found 'high'",
        ),
    ],
)
def test_a_record_that_cannot_be_read_says_why(text, message, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ApproxError, match=message) as caught:
        records.load(path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    assert str(path) in str(caught.value)


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(ApproxError, match=r"nowhere\.json cannot be read: No such file"):
        records.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": float("nan")},
        {"environment": {"x": float("inf")}},
        {"schema_": 3},
        {"speed": [{}]},
        {"quality": [SCORED]},
        {"quality": [part_of(Quality).model_copy(update={"split": 1})]},
    ],
)
def test_refuses_to_write_unreadable_record(change, tmp_path):
    with pytest.raises(ApproxError) as caught:
        records.save(tmp_path / "record.json", MADE.model_copy(update=change))
    assert caught.value.exit_code == Exit.INTERNAL
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_old_record_survives_a_full_disk(call, tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    records.save(path, MADE)

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ApproxError, match=r"record\.json cannot be written: No space left on device"):
        records.save(path, MADE.model_copy(update={"title": "Another"}))
    monkeypatch.undo()
    assert records.load(path) == MADE
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_concurrent_writers_leave_one_whole_record(tmp_path, monkeypatch):
    path, sync, others = tmp_path / "record.json", os.fsync, ["Another"]

    def meanwhile(descriptor):
        while others:
            records.save(path, MADE.model_copy(update={"title": others.pop()}))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    records.save(path, MADE)
    assert others == []
    assert records.load(path) == MADE
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_names_output_path_that_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ApproxError, match="cannot be written"):
        records.save(tmp_path / "file" / "record.json", MADE)


def test_outputs_are_a_parquet_of_equal_columns(tmp_path):
    path = tmp_path / "outputs.parquet"
    records.write_outputs(path, {"id": ["dev-0", "dev-1"], "prediction/exact": [1, 0]})
    assert pyarrow.parquet.read_table(path).to_pydict() == {"id": ["dev-0", "dev-1"], "prediction/exact": [1, 0]}


def test_the_environment_names_what_a_measurement_depends_on():
    environment = records.environment(threads=2, gpu="a card")
    assert list(environment) == [
        *("approx", "torch", "transformers", "triton", "python", "platform", "processor", "cores", "threads"),
        *("gpu", "git_commit"),
    ]
    assert (environment["threads"], environment["gpu"]) == (2, "a card")
    assert environment["torch"]
    assert environment["processor"]
    json.dumps(environment)


def test_ignores_commit_of_a_surrounding_repository(tmp_path):
    """Simulate approx installed into an environment inside a repository."""
    package = tmp_path / "site-packages" / "approx"
    source = Path(records.__file__).parent.parent
    needed = ("errors", "validation", "yaml_text", "evaluation/record")
    for name in (f"{module}.py" for module in needed):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes((source / name).read_bytes())
        # Without it, a package folder of the same name comes first, anywhere on the path.
        (package / name).with_name("__init__.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    code = "from approx.evaluation.record import environment; print(environment()['git_commit'])"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.strip() == "None"


def test_records_and_statistics_need_no_torch():
    code = (
        "import sys, approx.evaluation.record, approx.evaluation.statistics\n"
        "approx.evaluation.record.environment()\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    root = Path(records.__file__).parent.parent.parent
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert process.stdout.strip() == "[]", process.stderr


def test_the_commit_is_named_and_whether_its_files_were_changed_since(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "record.py").write_text("first\n")
    for command in (["init", "-q"], ["add", "record.py"], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(records, "__file__", str(tmp_path / "record.py"))
    # Untracked files do not count.
    (tmp_path / "untracked").touch()
    assert records.environment()["git_commit"] == head
    (tmp_path / "record.py").write_text("second\n")
    assert records.environment()["git_commit"] == head + "+changes"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone says which cores a process may use")
def test_the_cores_are_those_that_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert records.environment()["cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_refuses_half_of_a_surrogate_pair_before_it_writes_or_reads(tmp_path):
    path = tmp_path / "record.json"
    records.save(path, MADE)
    before = path.read_bytes()
    with pytest.raises(ApproxError, match="holds half of a surrogate pair") as caught:
        records.save(path, MADE.model_copy(update={"title": "speed \ud800"}))
    assert caught.value.exit_code == Exit.INTERNAL
    assert path.read_bytes() == before
    path.write_text(json.dumps({**RECORD, "title": "speed \udfff"}))
    with pytest.raises(ApproxError, match=r"record\.json is damaged: it holds half of a surrogate pair") as caught:
        records.load(path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    # A whole pair is a character.
    path.write_text(json.dumps({**RECORD, "title": "speed \U0001f680"}))
    assert records.load(path).title == "speed \U0001f680"
