"""Commands on a folder whose every place for code holds some: none of it runs, and none of it goes along."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

import approx
from approx.checkpoints.manifest import seal
from approx.errors import ApproxError, Exit

from .conftest import call

QUICK = ("--rounds", "3", "--seconds", "0")
TASK = ("--task", "glue/sst2", "--data", "{data}")
# The words of a command, and its exit code.
COMMANDS = [
    (("inspect", "{folder}"), Exit.OK),
    (("plan", "{folder}"), Exit.REFUSED),
    (("plan", "{folder}", "-m", "linear"), Exit.REFUSED),
    (("verify", "{folder}"), Exit.VERIFICATION),
    (("verify", "{folder}", "--accept"), Exit.VERIFICATION),
    (("convert", "{folder}", "-m", "linear", "-o", "{out}"), Exit.REFUSED),
    (("revert", "{folder}", "-o", "{out}"), Exit.OK),
    (("evaluate", "{folder}", *TASK), Exit.OK),
    (("bench", "{folder}", "--lengths", "8", *QUICK), Exit.OK),
    (("predict", "{folder}", "very dull"), Exit.OK),
    (("generate", "{folder}", "--prompt", "very dull"), Exit.UNSUPPORTED),
    (("search", "{folder}", *TASK, "--budget", "loss<=5", "--length", "8", "-o", "{out}.yaml"), Exit.REFUSED),
    (
        (
            "finetune",
            "{folder}",
            "--task",
            "glue/sst2",
            "--data",
            "{train}",
            "--recover",
            "task",
            "--steps",
            "1",
            "-o",
            "{out}",
        ),
        Exit.OK,
    ),
    (("push", "{folder}", "me/model", "--dry-run", "--offline", "-o", "{out}"), Exit.VERIFICATION),
    (("run", "{recipe}", "-o", "{out}"), Exit.REFUSED),
]


@pytest.fixture
def hostile(converted, tmp_path) -> Path:
    """A converted folder with code in every place where a library may look for it, and a manifest that is right."""
    folder = shutil.copytree(converted, tmp_path / "hostile")
    line = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for path in [*folder.glob("*.py")]:
        path.write_text(line + path.read_text("utf-8"), encoding="utf-8")
    for name in (
        "__init__.py",
        "mine.py",
        "sub/mine.py",
        "custom_generate/generate.py",
        "torch.py",
        "sitecustomize.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(line)
    for name, settings in {
        "config.json": {"custom_pipelines": {"mine": {"impl": "mine.Mine", "pt": ["AutoModel"]}}},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, f"{folder / 'sub'}--mine.Mine"]}},
        "processor_config.json": {"auto_map": {"AutoProcessor": "mine.Mine"}},
        "preprocessor_config.json": {
            "auto_map": {"AutoFeatureExtractor": "mine.Mine", "AutoImageProcessor": "mine.Mine"}
        },
    }.items():
        path = folder / name
        before = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(before | settings))
    seal(folder)
    return folder


@pytest.mark.parametrize(("words", "code"), COMMANDS, ids=lambda value: value[0] if isinstance(value, tuple) else None)
@pytest.mark.sample(8)
def test_no_command_runs_code_of_a_folder(words, code, hostile, base, data, tmp_path, monkeypatch):
    # As a user would who looks at it from inside.
    monkeypatch.chdir(hostile)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"title: x\ncheckpoint: {hostile}\nvariants: {{linear: {{mechanism: linear}}}}\n"
        f"evaluate: {{task: glue/sst2, data: {data}, margin: 0.5}}\ndevice: cpu\n"
    )
    train = shutil.copytree(data, tmp_path / "glue" / "SST-2")
    shutil.copyfile(data / "dev.tsv", train / "train.tsv")
    places = {"train": train, "folder": hostile, "base": base, "data": data, "out": tmp_path / "out", "recipe": recipe}
    answer = call(*(word.format(**places) for word in words))
    assert not (tmp_path / "ran").exists()
    assert answer.code == code, answer.err
    written = [path.relative_to(tmp_path) for path in (tmp_path / "out").rglob("*.json")]
    assert not [name for name in written if "mine" in (tmp_path / name).read_text("utf-8")]
    code_there = {path.name for path in (tmp_path / "out").rglob("*.py")}
    assert not code_there & {"mine.py", "generate.py", "torch.py", "sitecustomize.py", "__init__.py"}


def test_loading_in_python_runs_no_code_of_a_folder(hostile, tmp_path):
    approx.load(str(hostile))
    for trusted in (None, False):
        # The converted families of the installed package come first.
        transformers.AutoModelForSequenceClassification.from_pretrained(hostile, trust_remote_code=trusted)
    with pytest.raises(ApproxError, match="code that approx did not write"):
        approx.push(hostile, "me/model", dry_run=tmp_path / "out", offline=True)
    assert not approx.verify(hostile).accepted
    assert not (tmp_path / "ran").exists()
