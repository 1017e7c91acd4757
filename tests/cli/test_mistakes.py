"""Wrong input of every kind: one line on stderr that says how to fix it, and the documented exit code."""

import json
import resource
import shutil

import pytest

from approx.errors import Exit

from .conftest import call

TASK = ("--task", "glue/sst2", "--data", "{data}")
MISTAKES = [
    # Arguments.
    (("frobnicate",), Exit.USAGE, "No such command 'frobnicate'"),
    (("plam", "x"), Exit.USAGE, "Did you mean 'plan'?"),
    (("-v", "inspect", "{base}"), Exit.USAGE, "behind the command"),
    (("inspect",), Exit.USAGE, "Missing argument 'model'"),
    (("inspect", "{base}", "--jsn"), Exit.USAGE, "--json"),
    (("convert", "{base}", "-m", "linear"), Exit.USAGE, "Missing option '--output'"),
    (("evaluate", "{base}", *TASK, "--limit", "0"), Exit.USAGE, "--limit"),
    (("evaluate", "{base}", *TASK, "--limit", "x"), Exit.USAGE, "--limit"),
    (("evaluate", "{base}"), Exit.USAGE, "Missing option '--task'. A task, e.g. glue/sst2."),
    (("plan", "{base}", "-o", "p.json"), Exit.USAGE, "neither was given"),
    (("recommend", "{base}", "--task", "glue/sst"), Exit.USAGE, "Did you mean 'glue/sst2'?"),
    (("recommend", "{base}", *TASK, "--time-budget", "0s"), Exit.USAGE, "--time-budget"),
    (("recommend", "{base}", "--task", "glue/sst2", "--data", "nowhere"), Exit.UNAVAILABLE, "nowhere does not exist"),
    (("recommend", "{base}", *TASK, "--lengths", "99"), Exit.USAGE, "takes 32 positions"),
    (("recommend", "{base}", *TASK, "-o", "{data}/dev.tsv/r.json"), Exit.UNAVAILABLE, "cannot be written"),
    (("recommend", "{converted}", *TASK), Exit.REFUSED, "converted already"),
    (("plan", "{base}", "-m", "local", "--plan", "p.yaml"), Exit.USAGE, "both were given"),
    (("plan", "{base}", "--plan", "p.yaml", "--layers", "0"), Exit.USAGE, "belong to --mechanism"),
    (("plan", "{base}", "--plan", "none.yaml"), Exit.USAGE, "none.yaml cannot be read: No such file"),
    (("plan", "{base}", "-m", "local", "--set", "left"), Exit.USAGE, "--set name=value"),
    (
        ("plan", "{base}", "-m", "improved-clustered", "--set", "hash-bias=true", "--set", "hash_bias=true"),
        Exit.USAGE,
        "given twice",
    ),
    (("plan", "{base}", "-m", "local", "--lengths", "8,x"), Exit.USAGE, "--lengths 512,2048"),
    (
        ("bench", "{base}", "--batch-size", "0"),
        Exit.USAGE,
        "--batch-size[0]: a finite number of at least 1 is needed, found 0",
    ),
    (("bench", "{converted}", "--lengths", "99"), Exit.USAGE, "verted takes 32 positions"),
    # Plans.
    (("plan", "{base}", "-m", "clusterd"), Exit.USAGE, "Did you mean 'clustered'?"),
    (("plan", "{base}", "-m", "local", "--set", "lft=3"), Exit.USAGE, "Did you mean 'left'?"),
    (("plan", "{base}", "-m", "local", "--set", "left=-3"), Exit.USAGE, "'left' is -3"),
    (("plan", "{base}", "-m", "local", "--layers", "14"), Exit.USAGE, "the model has layers 0-1"),
    (("convert", "{base}", "-o", "out", "-m", "local", "--max-length", "8"), Exit.USAGE, "already takes 32 positions"),
    # Families and tasks.
    (("mechanisms", "--family", "brt"), Exit.USAGE, "Did you mean 'bert'?"),
    (("mechanisms", "--family", "wavlm"), Exit.UNSUPPORTED, "can be converted"),
    (("evaluate", "{base}", "--task", "glue/sst"), Exit.USAGE, "Did you mean 'glue/sst2'?"),
    (("evaluate", "{base}", "--task", "glue/rte", "--data", "{data}"), Exit.UNSUPPORTED, "not_entailment"),
    (
        ("evaluate", "{base}", "--task", "needle", "--set", "lenth=4"),
        Exit.USAGE,
        "'lenth'. Did you mean 'length'? Its settings are length, examples, needles, seed, labels.",
    ),
    (
        ("evaluate", "{base}", "--task", "glue/sst2", "--set", "foo=1"),
        Exit.USAGE,
        "has no setting 'foo'. Its settings are labels, encoding.",
    ),
    (("mechanisms", "locall"), Exit.USAGE, "Did you mean 'local'?"),
    (("tasks", "sst2"), Exit.USAGE, "Did you mean 'glue/sst2'?"),
    # Paths that do not exist, or exist already.
    (("inspect", "./nowhere"), Exit.UNAVAILABLE, "./nowhere does not exist"),
    (("inspect", "owner/name", "--offline"), Exit.UNAVAILABLE, "local cache (--offline)"),
    (("inspect", "{data}"), Exit.UNAVAILABLE, "config.json is missing"),
    (("evaluate", "{base}", "--task", "glue/sst2", "--data", "nowhere"), Exit.UNAVAILABLE, "nowhere does not exist"),
    (("report", "{data}/nan.json", "-o", "out"), Exit.UNAVAILABLE, "nan.json is damaged: NaN is not a JSON number"),
    (("report", "nowhere.json", "-o", "out"), Exit.UNAVAILABLE, "nowhere.json cannot be read"),
    (("revert", "{base}", "-o", "out"), Exit.REFUSED, "nothing to revert"),
    (("convert", "{converted}", "-o", "out", "-m", "linear"), Exit.REFUSED, "converted already"),
    (("plan", "{converted}", "-m", "linear"), Exit.REFUSED, "Plan for its base"),
    (("bench", "{converted}", "--against", "{converted}"), Exit.USAGE, "Name the exact checkpoint"),
    (("plan", "{base}", "-m", "linear", "-o", "{data}"), Exit.REFUSED, "is a folder"),
    (("evaluate", "{base}", *TASK, "-o", "{data}/dev.tsv/r.json"), Exit.UNAVAILABLE, "cannot be written"),
    (("evaluate", "{base}", *TASK, "-o", "."), Exit.REFUSED, "is a folder"),
    (("evaluate", "{base}", *TASK, "-o", "r.parquet"), Exit.USAGE, "the ending .json"),
    # Machines.
    (("evaluate", "{base}", *TASK, "--device", "tpu"), Exit.USAGE, "allowed are auto, cpu, cuda"),
    (("evaluate", "{base}", *TASK, "--dtype", "int8"), Exit.USAGE, "allowed are auto, float32"),
    # Recipes.
    (("run", "quikstart"), Exit.USAGE, "Give a YAML file, or one of:"),
    (("run", "{data}/dev.tsv"), Exit.USAGE, "dev.tsv"),
]


@pytest.mark.parametrize(
    ("words", "code", "fragment"),
    MISTAKES,
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_mistake_ends_in_one_line(words, code, fragment, base, converted, data, tmp_path):
    (tmp_path / "p.yaml").write_text("{mechanism: linear}", encoding="utf-8")
    (data / "nan.json").write_text('{"schema": 1, "seed": NaN}', encoding="utf-8")
    typed = [word.format(base=base, converted=converted, data=data) for word in words]
    answer = call(*typed)
    errors = [line for line in answer.err.splitlines() if not line.startswith("[")]
    assert (answer.code, len(errors), answer.out) == (code, 1, ""), answer
    assert errors[0].startswith("error: ")
    assert fragment in errors[0]
    # The same as JSON.
    as_json = call(*typed, "--json")
    assert as_json.json == {"error": errors[0].removeprefix("error: "), "exit_code": code}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.yaml"], "something was left behind"


@pytest.mark.parametrize("words", [("evaluate", *TASK), ("bench", "--lengths", "8")])
def test_a_missing_gpu_exits_with_4(words, base, data):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    typed = [word.format(data=data) for word in words]
    answer = call(typed[0], base, *typed[1:], "--device", "cuda")
    assert (answer.code, answer.err) == (
        Exit.MISSING,
        "error: The device is 'cuda', but torch sees no GPU. Use the device 'cpu'.\n",
    )


def test_several_mistakes_have_a_line_each(base):
    answer = call("plan", base, "-m", "local", "--layers", "14", "--set", "lft=3")
    lines = answer.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


def test_rejects_truncated_or_edited_folder(converted, data, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "cut")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["approx"]["sites"]["encoder.layer.0.attention.self"]["settings"]["left"] = 7
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    answer = call("evaluate", folder, "--task", "glue/sst2", "--data", data)
    assert (answer.code, "was edited: config.json" in answer.err) == (Exit.UNAVAILABLE, True), answer
    (folder / "approx_manifest.json").unlink()
    assert call("evaluate", folder, "--task", "glue/sst2", "--data", data).code == Exit.UNAVAILABLE


def test_full_disk_leaves_no_partial_plan(base, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files simulates a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, hard))
    try:
        answer = call("plan", base, "-m", "local", "-o", "plan.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (answer.code, answer.err.startswith("error: Disk full: ")) == (Exit.UNAVAILABLE, True), answer
    assert not list(tmp_path.iterdir())


def test_unexpected_exceptions_are_internal_errors_in_one_line(base, monkeypatch):
    from approx import api

    def broken(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(api, "inspect", broken)
    answer = call("inspect", base)
    assert answer.code == Exit.INTERNAL
    assert answer.err.startswith("error: Internal error: RuntimeError: two lines (test_mistakes.py, line")
    assert answer.err.count("\n") == 1
    assert "Traceback" in call("inspect", base, "--debug").err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PermissionError(13, "Permission denied", "x/y"), Exit.UNAVAILABLE, "x/y: Permission denied."),
        (ModuleNotFoundError("No module named 'scipy'"), Exit.MISSING, "No module named 'scipy'"),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "Interrupted."),
    ],
)
def test_errors_of_the_machine_are_not_internal(error, code, text, base, monkeypatch):
    from approx import api

    def broken(*_, **__):
        raise error

    monkeypatch.setattr(api, "inspect", broken)
    answer = call("inspect", base)
    assert (answer.code, text in answer.err) == (code, True), answer
