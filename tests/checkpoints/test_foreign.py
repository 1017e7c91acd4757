"""Code in a converted folder, or named by it, is found wherever it hides, and never runs."""

import json
import shutil
from pathlib import Path

import pytest

from approx.checkpoints import checkpoint, foreign
from approx.checkpoints.manifest import seal
from approx.conversion import convert, verify
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan
from tiny_study import tiny_checkpoint

CANARY = "import pathlib; pathlib.Path({!r}).touch()\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    convert.convert(tiny_checkpoint(folder / "base"), folder / "converted", Plan.of("local", left=2, right=2))
    return folder / "converted"


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "converted")


def change(file: Path, **settings) -> None:
    data = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(data | settings), encoding="utf-8")


def mapped(folder: Path, where: str) -> None:
    """Let every class of the model come from another module."""
    config = json.loads((folder / "config.json").read_text())
    changed = {auto: where + name.rpartition(".")[2] for auto, name in config["auto_map"].items()}
    change(folder / "config.json", auto_map=changed)


def copied(folder: Path, place: Path, code: str) -> None:
    """The code of the folder with another line, elsewhere."""
    place.mkdir(exist_ok=True)
    for path in folder.glob("*.py"):
        (place / path.name).write_text(code + path.read_text("utf-8"), encoding="utf-8")


def edited(folder: Path, code: str) -> None:
    model = next(folder.glob("modeling_*.py"))
    model.write_text(code + model.read_text("utf-8"), encoding="utf-8")


def in_a_subfolder(folder: Path, code: str) -> None:
    copied(folder, folder / "sub", code)
    mapped(folder, f"{folder / 'sub'}--modeling_approx_bert.")


def in_an_absolute_folder(folder: Path, code: str) -> None:
    copied(folder, folder.parent / "elsewhere", code)
    mapped(folder, f"{folder.parent / 'elsewhere'}--modeling_approx_bert.")


def in_a_neighbour_file(folder: Path, code: str) -> None:
    (folder / "more.py").write_text(code + next(folder.glob("modeling_*.py")).read_text("utf-8"), encoding="utf-8")
    mapped(folder, "more.")


def under_a_name_that_looks_alike(folder: Path, code: str) -> None:
    # A Cyrillic letter.
    (folder / "mod\u0435ling_approx_bert.py").write_text(code + next(folder.glob("modeling_*.py")).read_text("utf-8"))
    mapped(folder, "mod\u0435ling_approx_bert.")


def behind_a_link(folder: Path, code: str) -> None:
    copied(folder, folder.parent / "linked", code)
    (folder / "sub").symlink_to(folder.parent / "linked")


def as_generation(folder: Path, code: str) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code + "def generate(model, **more): pass\n")


def as_tokenizer(folder: Path, code: str) -> None:
    (folder / "mine.py").write_text(code)
    change(folder / "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": [None, "mine.Mine"]})


def as_processor(folder: Path, code: str) -> None:
    change(folder / "processor_config.json", auto_map={"AutoProcessor": "someone/else--mine.Mine"})


def as_pipeline(folder: Path, code: str) -> None:
    change(folder / "config.json", custom_pipelines={"mine": {"impl": "mine.Mine", "pt": ["AutoModel"]}})


def as_module(folder: Path, code: str) -> None:
    (folder / "mine.py").write_text(code)
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "mine.Mine"}]))


def as_activation(folder: Path, code: str) -> None:
    change(folder / "config.json", sentence_transformers={"activation_fn": "mine.Mine"})


def as_another_kind_of_file(folder: Path, code: str) -> None:
    for name in ("__init__.py", "more.PTH", "approx_seam.cpython-311-x86_64-linux-gnu.so", "libmore.so.1"):
        (folder / name).write_text(code)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "approx_seam.cpython-311.pyc").write_text(code)


def with_other_line_ends(folder: Path, code: str) -> None:
    model = next(folder.glob("modeling_*.py"))
    model.write_bytes(model.read_bytes().replace(b"\n", b"\r\n"))


def without_a_map(folder: Path, code: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))


PLACES = [
    edited,
    in_a_subfolder,
    in_an_absolute_folder,
    in_a_neighbour_file,
    under_a_name_that_looks_alike,
    behind_a_link,
    as_generation,
    as_tokenizer,
    as_processor,
    as_pipeline,
    as_module,
    as_activation,
    as_another_kind_of_file,
    with_other_line_ends,
    without_a_map,
]
# Changes that an earlier version could have written; they do not run either.
COULD_BE_OLDER = (edited, with_other_line_ends, without_a_map)


@pytest.mark.parametrize("hide", PLACES)
@pytest.mark.sample(7)
def test_finds_code_wherever_it_hides_and_runs_none(folder, tmp_path, monkeypatch, hide):
    hide(folder, CANARY.format(str(tmp_path / "ran")))
    # Whoever writes the folder writes its manifest too.
    seal(folder)
    # Other tests check the numbers of the folder.
    monkeypatch.setattr(verify, "_model_checks", lambda *arguments, **more: [])
    found = verify.verify(folder)
    code = next(check for check in found.checks if check.name == "code is what this version writes")
    assert code.passed is False
    assert found.diffs
    # The version in the history proves nothing: what no version ever wrote is wrong under any name.
    config = json.loads((folder / "config.json").read_text())
    config["approx"]["history"][0]["approx"] = "0.0.1"
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder)
    code = verify.verify(folder).checks[1]
    assert code.passed is (None if hide in COULD_BE_OLDER else False)
    assert not (tmp_path / "ran").exists()
    model = checkpoint.load(folder, offline=True).model
    check = verify.fresh_process(folder, model)
    assert check.passed is False
    assert "not run" in check.detail
    assert not (tmp_path / "ran").exists()


def test_compares_only_code(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "records").mkdir()
    (folder / "records" / "record.json").write_text("{}")
    source = checkpoint.locate(folder)
    assert foreign.differences(folder, source.config, source.stock_class) == {}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a.py", True),
        ("A.PY", True),
        ("a.py ", True),
        ("a.py.", True),
        ("a.so", True),
        ("a.so.1.2", True),
        ("a.pyc", True),
        ("a.p\uff59", True),
        ("a.json", False),
        ("py", False),
        ("a.pytorch", False),
        ("a.py.metadata", False),
    ],
)
def test_recognises_code_by_its_suffix(name, code):
    assert foreign.is_code(name) is code


def test_settings_nested_too_deeply_are_refused(folder):
    (folder / "processor_config.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    with pytest.raises(ApproxError, match=r"processor_config\.json is nested more than") as caught:
        foreign.references(folder)
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_kernel_of_the_hub_is_refused_before_it_is_loaded(made, tmp_path):
    base = shutil.copytree(made.parent / "base", tmp_path / "base")
    change(base / "config.json", attn_implementation="someone/kernel")
    with pytest.raises(ApproxError, match="sets attn_implementation to 'someone/kernel'") as caught:
        checkpoint.load(base)
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_code_that_changes_after_the_comparison_does_not_run(folder, tmp_path, monkeypatch):
    model = checkpoint.load(folder, offline=True).model
    compare = verify.differences

    def and_then_change(*arguments):
        found = compare(*arguments)
        edited(folder, CANARY.format(str(tmp_path / "ran")))
        return found

    monkeypatch.setattr(verify, "differences", and_then_change)
    assert verify.fresh_process(folder, model).passed
    assert not (tmp_path / "ran").exists()
