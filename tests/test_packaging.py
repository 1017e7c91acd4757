"""The content of the package, and that it runs as wheel, sdist, editable installation and plain checkout."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from approx.version import __version__, install

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# Top-level name in the wheel -> folder in a checkout.
HOMES = {"approx": "approx", "approx/recipes": "recipes", "approx_kernels": "kernels/approx_kernels"}
# Folders and files of a checkout that must not become top-level names in site-packages.
NOT_SHIPPED = ("bench", "cli", "examples", "kernels", "recipes", "reports", "tests", "tools")
# Dependencies without an import statement in our code.
BEHIND_OTHERS = {
    "pyarrow": "pandas and datasets write parquet through it",
}
IMPORT_ALL = """
import importlib, pkgutil
import approx, approx_kernels
for package in (approx, approx_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from transformers import BertModel, GPT2Model
print(approx.__file__, approx_kernels.__file__, sep="\\n")
"""
# A module in which every name exists and serves as class, function and decorator.
OBLIGING = """
class Obliging:
    def __init__(self, *arguments, **settings):
        pass

    def __call__(self, decorated):
        return decorated

def __getattr__(name):
    return Obliging
"""


def run(*command: str | Path, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """Standard output of a new process with `path` first on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-2000:]
    return result.stdout


def shipped_files() -> set[str]:
    """Paths in the wheel of all files in the checkout that belong in it."""
    files = set()
    for home, folder in HOMES.items():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file != ROOT / "recipes" / "README.md":
                files.add(f"{home}/{file.relative_to(ROOT / folder).as_posix()}")
    return files


def imported(*folders: str) -> set[str]:
    """Top-level names that the Python files of these folders import, without the standard library."""
    names = set()
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    here = {path.stem for folder in ("tests", "tools", "tools/mutants", "bench") for path in (ROOT / folder).iterdir()}
    local = {"approx", "approx_kernels", "bench", "cli", "docs", "examples", "reports", "tests"} | here
    return names - local - set(sys.stdlib_module_names)


def distributions(names: set[str]) -> set[str]:
    known = packages_distributions()
    return {canonicalize_name(one) for name in names for one in known.get(name, [name])[:1]}


def requirements(*extras: str) -> set[str]:
    lines = [line for extra in extras for line in PROJECT["project"]["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(line).name) for line in lines}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the checkout, so that building leaves nothing behind in the original."""
    copy = tmp_path_factory.mktemp("source") / "approx"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    return shutil.copytree(ROOT, copy, ignore=unwanted)


@pytest.fixture(scope="module")
def built(source) -> Path:
    """The folder with the sdist, and the wheel made from that sdist."""
    run("-m", "build", "--no-isolation", "--outdir", source / "dist", source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site-packages")
    wheel = next(built.glob("*.whl"))
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


@pytest.fixture(scope="module")
def hugging_face_kernels(tmp_path_factory) -> Path:
    """A folder with a package `kernels` that transformers mistakes for Hugging Face's and imports."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    folder = tmp_path_factory.mktemp("hugging-face")
    for name in ("kernels", "kernels/layer", "kernels/layer/mode"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"__version__ = {KERNELS_MIN_VERSION!r}\n{OBLIGING}")
    metadata = folder / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (metadata / "top_level.txt").write_text("kernels\n")
    return folder


def test_every_package_is_listed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {path.rpartition("/")[0] for path in shipped_files() if path.endswith(".py")}
    assert listed - {"approx.recipes"} == {folder.replace("/", ".") for folder in folders}


def test_every_dependency_is_declared_and_used():
    used = distributions(imported("approx", "kernels"))
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["dependencies"]}
    assert used - core - requirements("int8", "lm-eval", "onnx", "openvino", "train", "triton") == set()
    assert core - used - set(BEHIND_OTHERS) == set()


def test_the_dev_extra_holds_what_the_tests_import():
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["project"]["dependencies"]}
    assert (
        distributions(imported("tests", "tools", "bench", "examples"))
        - core
        - requirements("dev", "lm-eval", "mutants", "onnx", "train")
        == set()
    )


def test_the_wheel_holds_the_two_packages_and_nothing_else(built):
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"approx", "approx_kernels"}
    assert {name for name in names if ".dist-info/" not in name} == shipped_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_the_wheel_is_made_from(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {"pyproject.toml", "README.md", "LICENSE", "cli.py", "tests/test_packaging.py"} <= names
    homes = sorted(HOMES, key=len, reverse=True)
    for path in shipped_files():
        home = next(home for home in homes if path.startswith(home + "/"))
        assert HOMES[home] + path.removeprefix(home) in names


@pytest.mark.parametrize("installed_too", ["nothing", pytest.param("kernels of Hugging Face", marks=pytest.mark.slow)])
@pytest.mark.sample(1)
def test_the_wheel_runs_from_an_empty_folder(installed, hugging_face_kernels, tmp_path, installed_too):
    path = (installed, hugging_face_kernels) if installed_too != "nothing" else (installed,)
    files = run("-c", IMPORT_ALL, cwd=tmp_path, path=path).split()
    assert [Path(file).parent for file in files] == [installed / "approx", installed / "approx_kernels"]
    assert "quickstart" in run(
        "-c", "import importlib.resources as r; print(*r.files('approx.recipes').iterdir())", cwd=tmp_path, path=path
    )
    assert "Usage" in run("-c", "from approx.cli import main; main()", "--help", cwd=tmp_path, path=path)


@pytest.mark.parametrize("beside", ["nothing", pytest.param("kernels of Hugging Face", marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_the_checkout_runs_without_installation(source, hugging_face_kernels, tmp_path, beside):
    path = (hugging_face_kernels,) if beside != "nothing" else ()
    doorstep = f"import sys; sys.path.insert(0, {str(source)!r}); import cli\n"
    files = run("-c", doorstep + IMPORT_ALL, cwd=tmp_path, path=path).split()
    assert [Path(file).parent for file in files] == [source / "approx", source / "kernels" / "approx_kernels"]
    for folder in (source, tmp_path):
        assert "Usage" in run(source / "cli.py", "--help", cwd=folder, path=path)


@pytest.mark.sample(0)
def test_an_editable_installation_shows_the_two_packages_only(source, tmp_path):
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "site"]
    run("-m", "pip", "install", *options, "--editable", source, cwd=tmp_path)
    code = f"""
import importlib.util, site
site.addsitedir({str(tmp_path / "site")!r})
print(*(importlib.util.find_spec(name).origin for name in ("approx", "approx_kernels")))
print(*(name for name in {NOT_SHIPPED} if importlib.util.find_spec(name)))
"""
    (tmp_path / "empty").mkdir()
    # -S: the environment of this test may have an editable installation.
    ours, strangers = run("-S", "-c", code, cwd=tmp_path / "empty").splitlines()
    assert ours.split() == [str(source / home / "__init__.py") for home in ("approx", "kernels/approx_kernels")]
    assert strangers == ""


@pytest.mark.slow
def test_the_image_holds_what_the_package_is_made_from(tmp_path):
    """What the Dockerfile copies is installed as its `pip install` does, but for the dependencies."""
    steps = (ROOT / "Dockerfile").read_text("utf-8")
    for words in re.findall(r"^COPY (.+) (\S+)$", steps, re.MULTILINE):
        for name in words[0].split():
            source, target = ROOT / name, tmp_path / "approx" / words[1]
            target.mkdir(parents=True, exist_ok=True) if words[1] == "./" else target.parent.mkdir(exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, target)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "site"]
    run("-m", "pip", "install", *options, tmp_path / "approx", cwd=tmp_path)
    there = {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    assert shipped_files() <= there


def test_the_image_names_what_the_project_has():
    steps = (ROOT / "Dockerfile").read_text("utf-8")
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]+)"?$', steps, re.MULTILINE))
    shown = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(f"{arguments['PYTHON']}.0")
    extras = [arguments["EXTRAS"], *re.findall(r"--build-arg EXTRAS=(\S+)", shown)]
    assert {extra for named in extras for extra in named.split(",")} <= set(PROJECT["project"]["optional-dependencies"])
    torch = Requirement(next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch>")))
    for pinned in [arguments["TORCH"].split()[0], *re.findall(r"--build-arg TORCH=(\S+)", shown)]:
        assert torch.specifier.contains(pinned.removeprefix("torch=="))
        # It is the build that everything is tested with.
        assert pinned in (ROOT / ".ci" / "run").read_text("utf-8")
    assert set(re.findall(r'^ENTRYPOINT \["(.+)"\]$', steps, re.MULTILINE)) == set(PROJECT["project"]["scripts"])
    assert steps.index("USER approx") > steps.rindex("RUN ")


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    about = PROJECT["project"]
    assert (citation["version"], citation["license"]) == (__version__, about["license"])
    assert [one["name"] for one in citation["authors"]] == [one["name"] for one in about["authors"]]
    assert citation["keywords"] == about["keywords"]


@pytest.mark.parametrize("extra", ["lm-eval", "onnx", "openvino", "sweep", "train"])
def test_an_extra_is_installed_by_naming_its_packages(extra, monkeypatch):
    packages = PROJECT["project"]["optional-dependencies"][extra]
    assert {Requirement(word) for word in shlex.split(install(extra))[2:]} == set(map(Requirement, packages))

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    assert install(extra) == f"pip install '.[{extra}]' in the repository of approx"


@pytest.mark.parametrize("without", ["torch", "transformers", "matplotlib", "datasets", "scipy"])
def test_the_command_line_starts_without(without, tmp_path):
    code = f"import sys, approx.cli; print({without!r} in sys.modules)"
    assert run("-c", code, cwd=tmp_path, path=(ROOT, ROOT / "kernels")).strip() == "False"


def test_records_become_reports_without_torch(tmp_path):
    names = [f"approx.publishing.{file.stem}" for file in (ROOT / "approx/publishing").glob("[a-z]*.py")]
    names = sorted({*names, "approx.evaluation.record", "approx.evaluation.statistics"})
    code = f"import sys, {', '.join(names)}; print(*({{'torch', 'transformers'}} & set(sys.modules)))"
    assert run("-c", code, cwd=tmp_path, path=(ROOT, ROOT / "kernels")).strip() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["AutoModel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("BertModel", "GPT2LMHeadModel"))]
)
def test_transformers_stays_whole_after_importing_approx(name, tmp_path):
    # Registration happens while transformers is being imported, in an order that depends on the user's first import.
    code = f"import approx; from transformers import {name}; print({name}.__name__)"
    assert run("-c", code, cwd=tmp_path, path=(ROOT, ROOT / "kernels")).split() == [name]
