"""Mechanisms and tasks of other installed packages: CONTRIBUTING's works as it stands, a broken one breaks nothing else."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import transformers

import approx
from approx.cli import names
from approx.errors import ApproxError, Exit
from approx.mechanisms import BUILT_IN, MECHANISMS, Mechanism
from approx.planning.plan import Plan
from approx.registry import class_defaults, class_facts
from approx.tasks import TASKS, open_task

from .conftest import call

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def shown(marker, language):
    """The block of CONTRIBUTING below a marker."""
    (block,) = re.findall(rf"<!-- {marker} -->\n```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return block


MECHANISM, PROJECT = shown("mechanism", "python"), shown("entry point", "toml")


def add_package(folder, name, version="1.0", *, code="", **groups):
    """Lay a package into a folder as an installation does: its module and its metadata."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    metadata = folder / f"{module}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        f"[approx.{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the path; what is added to it is found at the next look-up, and forgotten after the test."""
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    for registry in (MECHANISMS, TASKS):
        registry.read_again()
    yield folder
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).parent == folder:
            del sys.modules[name]
    monkeypatch.undo()
    importlib.invalidate_caches()
    for registry in (MECHANISMS, TASKS):
        registry.read_again()


def add_dilated(folder):
    project = tomllib.loads(PROJECT)["project"]
    points = project["entry-points"]["approx.mechanisms"]
    add_package(folder, project["name"], project["version"], code=MECHANISM, mechanisms=points)


@pytest.fixture
def dilated(packages):
    add_dilated(packages)
    return packages


@pytest.fixture
def converted(dilated, tmp_path):
    answer = call("convert", "quickstart", "-o", tmp_path / "converted", "-m", "dilated", "--set", "window=2")
    assert answer.code == 0, answer.err
    return tmp_path / "converted"


def other_process(code, folder, *, path=""):
    environment = {**os.environ, "PYTHONPATH": str(path), "HF_MODULES_CACHE": str(folder.parent / "modules")}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder.parent)


def test_the_mechanism_of_the_guide_takes_eighty_lines():
    assert MECHANISM.count("\n") + PROJECT.count("\n") <= 80


@pytest.mark.slow
def test_the_mechanism_of_the_guide_passes_the_contract(tmp_path):
    add_dilated(tmp_path)
    suite = [f"tests/mechanisms/test_{name}.py" for name in ("contract", "limits", "grouped_keys", "padding", "state")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite, "-k", "dilated"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    (passed,) = re.findall(r"(\d+) passed", ran.stdout)
    assert int(passed) > 150


def test_the_mechanism_of_the_guide_is_explained_planned_and_drawn(dilated, tmp_path):
    listed = call("mechanisms")
    assert "'dilated' comes from the package approx-dilated==1.0." in listed.out
    rows = {row["name"]: row["package"] for row in call("mechanisms", "--json").json["mechanisms"]}
    assert {name: package for name, package in rows.items() if package} == {"dilated": "approx-dilated==1.0"}
    about = call("mechanisms", "dilated", "--json").json
    assert about["settings"]["dilation"]["meaning"] == "Tokens from one of them to the next, 1 or more."
    plan = call("plan", "quickstart", "-m", "dilated", "--set", "dilation=3", "--json")
    assert plan.code == 0, plan.err
    drawn = call("pattern", "dilated", "--length", "100", "--set", "window=8", "-o", tmp_path / "pictures", "--json")
    assert drawn.code == 0, drawn.err
    # One key on each side at distances 2, 4, …, 16 and the query's own.
    assert drawn.json["edges"] == 100 + 2 * sum(100 - 2 * step for step in range(1, 9))


def test_the_mechanism_of_the_guide_is_converted_verified_and_timed(converted):
    card = (converted / "README.md").read_text()
    assert "`dilated` of `approx-dilated==1.0`" in card
    assert sorted(path.name for path in converted.glob("*.py")) == [
        "approx_seam_internals.py",
        "configuration_approx_bert.py",
        "modeling_approx_bert.py",
    ]
    verified = call("verify", converted, "--json")
    assert verified.code == 0, verified.err
    checks = {check["name"]: check for check in verified.json["checks"]}
    code = checks["code is what this version writes"]
    assert code["passed"] is None
    assert code["detail"].endswith("does not know and these checks run: 'dilated' of approx-dilated==1.0")
    assert checks["reload with the packages it needs is bit-equal"]["passed"]
    timed = call("bench", converted, "--lengths", "64", "--rounds", "3", "--json")
    assert timed.code == 0, timed.err


def test_a_mixed_plan_keeps_its_package_and_saves_from_memory(dilated, tmp_path):
    model = approx.load("quickstart").model
    rules = [{"layers": 0, "mechanism": "local"}, {"layers": 1, "mechanism": "dilated"}]
    approx.convert(model, Plan.parse(rules))
    sites = list(model.config.approx["sites"].values())
    assert [site.get("package") for site in sites] == [None, "approx-dilated==1.0"]
    inputs = torch.arange(5, 45)[None]
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    with torch.inference_mode():
        assert torch.equal(again.eval()(inputs)[0], model.eval().base_model(inputs)[0])


def test_kernels_are_not_bundled_with_code_of_others(dilated, tmp_path):
    answer = call("convert", "quickstart", "-o", tmp_path / "out", "-m", "dilated", "--bundle-kernels")
    assert answer.code == Exit.UNSUPPORTED
    assert "cannot carry the code of 'dilated', which is in another package" in answer.err
    assert not (tmp_path / "out").exists()


LOAD = """
import sys, transformers
try:
    transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("loaded", *(name for name in sys.modules if name == "approx_dilated"))
"""
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("approx", "approx_kernels"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_a_folder_that_needs_a_package_names_it_where_it_is_missing(converted, dilated):
    assert other_process(LOAD, converted, path=dilated).stdout.strip() == "loaded approx_dilated"
    without = other_process(LOAD, converted)
    assert without.stdout.startswith(
        "ApproxError The mechanism 'dilated' of this checkpoint is code of the package approx-dilated==1.0"
    )
    stock = other_process(ABSENT + LOAD, converted, path=dilated)
    assert stock.stdout.startswith(
        "ImportError This checkpoint attends by code that is not in its folder: 'dilated' of the package"
    )
    assert re.search(
        r"pip install approx-dilated==1\.0; and approx-attention>=[\d.]+,<\d+\. No package index", stock.stdout
    )
    assert "plain PyTorch" not in stock.stderr


def test_an_uninstalled_package_is_named_by_every_command(converted, packages, monkeypatch):
    monkeypatch.syspath_prepend(packages)
    for path in packages.glob("*.dist-info/*"):
        path.unlink()
    for path in packages.glob("*.dist-info"):
        path.rmdir()
    importlib.invalidate_caches()
    MECHANISMS.read_again()
    for words in (
        ("verify", converted),
        ("bench", converted, "--lengths", "16"),
        ("revert", converted, "-o", "reverted"),
    ):
        answer = call(*words)
        assert answer.code == Exit.MISSING, answer.err
        assert "pip install approx-dilated==1.0" in answer.err


def test_a_package_name_in_a_config_is_checked(converted):
    config = converted / "config.json"
    config.write_text(config.read_text().replace("approx-dilated==1.0", "evil; rm -rf ~"))
    answer = call("inspect", converted)
    assert answer.code == Exit.UNAVAILABLE
    assert "package" in answer.err


TASK = '''
from approx.tasks import TASKS
from approx.tasks.needle import Needle

class Haystack(Needle):
    """The needle again."""
    name = "haystack"
'''


def test_a_task_of_another_package_is_opened_listed_and_explained(packages):
    add_package(packages, "approx-hay", code=TASK, tasks={"haystack": "approx_hay:Haystack"})
    assert type(open_task("haystack")).__name__ == "Haystack"
    assert "'haystack' comes from the package approx-hay==1.0." in call("tasks").out
    assert call("tasks", "haystack", "--json").json["package"] == "approx-hay==1.0"
    assert call("tasks", "needle", "--json").json["package"] is None


BROKEN = {
    "import error": ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "no such class": ("", "AttributeError: module 'approx_broken' has no attribute 'Broken'"),
    "incomplete": (
        "from approx.mechanisms import Mechanism\nclass Broken(Mechanism):\n    def forward(self): ...",
        "Broken does not define source, exact_when, supports_decode, approximates_from, exact_settings, flops, memory. "
        "CONTRIBUTING.md",
    ),
    "abstract": (
        "from approx.mechanisms import Mechanism\nclass Broken(Mechanism, abstract=True): ...",
        "Broken does not define source",
    ),
    "not a mechanism": ("Broken = 3", "TypeError: 3 is not a subclass of approx.mechanisms.Mechanism"),
    "exits": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_mechanism_is_one_line_and_breaks_nothing_else(case, packages):
    code, why = BROKEN[case]
    add_package(packages, "approx-broken", "0.3", code=code, mechanisms={"broken": "approx_broken:Broken"})
    add_dilated(packages)
    listed = call("mechanisms")
    assert listed.code == 0
    assert "dilated" in listed.out
    assert "broken" not in list(MECHANISMS)
    (line,) = [line for line in listed.err.splitlines() if "Warning" in line]
    assert line.startswith("Warning: The mechanism 'broken' of the package approx-broken==0.3 cannot be used: ")
    assert why in line
    assert line.endswith("Update the package, or uninstall it: pip uninstall approx-broken")
    for words in (("mechanisms", "broken"), ("plan", "quickstart", "-m", "broken")):
        answer = call(*words)
        assert answer.code == Exit.MISSING
        assert "approx-broken==0.3 cannot be used" in answer.err
    with pytest.raises(ApproxError, match=r"approx-broken==0\.3"):
        Plan.of("broken")
    assert Plan.of("dilated").rules[0].mechanism == "dilated"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "from approx.tasks import Task\nclass Broken(Task):\n    groups = None",
            "Broken does not define collate, encode, predict, read, targets",
        ),
        ("Broken = len", "neither a subclass of approx.tasks.Task nor a functools.partial of one"),
    ],
    ids=["incomplete", "not a task"],
)
def test_a_broken_task_is_one_line_and_breaks_nothing_else(code, why, packages):
    add_package(packages, "approx-broken", code=code, tasks={"broken": "approx_broken:Broken"})
    answer = call("tasks")
    assert answer.code == 0
    assert "squad" in answer.out
    (line,) = [line for line in answer.err.splitlines() if "Warning" in line]
    assert why in line
    with pytest.raises(ApproxError, match=r"approx-broken==1\.0") as caught:
        open_task("broken")
    assert caught.value.exit_code == Exit.MISSING


def test_a_name_that_is_taken_is_reported_and_not_replaced(packages):
    ours = MECHANISMS["local"]
    add_package(packages, "approx-broken", code=MECHANISM, mechanisms={"local": "approx_broken:DilatedAttention"})
    MECHANISMS.read_again()
    assert MECHANISMS["local"] is ours
    assert MECHANISMS.origin("local") is None
    (line,) = MECHANISMS.broken()
    assert "'local' of the package approx-broken==1.0 is not used, because approx has one of that name" in line


def test_two_packages_with_one_name_are_both_refused(dilated):
    add_package(dilated, "approx-other", code=MECHANISM, mechanisms={"dilated": "approx_other:DilatedAttention"})
    (line,) = MECHANISMS.broken()
    assert "approx-dilated==1.0 and approx-other==1.0 both define it. Uninstall one of them." in line
    assert "dilated" not in list(MECHANISMS)
    with pytest.raises(ApproxError, match="both define it"):
        Plan.of("dilated")


def test_a_name_that_cannot_be_typed_is_refused(packages):
    add_package(packages, "approx-broken", code=MECHANISM, mechanisms={"Bad Name": "approx_broken:DilatedAttention"})
    (line,) = MECHANISMS.broken()
    assert "its name is not lower-case letters and digits" in line


def test_names_are_known_without_importing_other_packages(packages):
    add_package(packages, "approx-broken", code="raise SystemExit(3)", mechanisms={"broken": "approx_broken:Broken"})
    assert Plan.of("local").rules
    assert "broken" in names.mechanisms()
    assert "approx_broken" not in sys.modules


def test_an_unknown_mechanism_of_a_plan_names_the_nearest(dilated):
    with pytest.raises(ApproxError, match=r"Unknown mechanism 'dilatde' in the plan\. Did you mean 'dilated'\?"):
        Plan.of("dilatde")


def test_facts_of_classes_are_those_that_the_classes_have():
    for attribute in ("always_exact", "colour"):
        facts = class_facts("approx.mechanisms", "BUILT_IN", attribute)
        for name, kind in MECHANISMS.items():
            assert facts.get(name, getattr(Mechanism, attribute)) == getattr(kind, attribute)


def test_defaults_of_classes_are_those_of_their_constructors():
    assert class_defaults("approx.mechanisms", "BUILT_IN") == {name: MECHANISMS[name].defaults() for name in BUILT_IN}
