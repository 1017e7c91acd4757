"""The rules of the house: who may import whom, what is said about a mechanism.

Every rule is a function of source text, so that each is also shown here to fail on a text that breaks it.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from approx.mechanisms import MECHANISMS

ROOT = Path(__file__).resolve().parent.parent
HOMES = {"approx": ROOT / "approx", "approx_kernels": ROOT / "kernels" / "approx_kernels"}

# The rooms that each room may import besides itself. A module belongs to the longest matching prefix.
MAY_IMPORT = {
    "approx_kernels": "",
    "approx.errors": "",
    "approx.version": "",
    "approx.paths": "approx.errors",
    "approx.registry": "approx.errors",
    "approx.yaml_text": "approx.errors",
    "approx.text_file": "approx.errors",
    "approx.validation": "approx.errors approx.yaml_text",
    "approx.registration": "",
    "approx.progress": "",
    "approx.mechanisms": "approx.errors approx.registry approx_kernels",
    "approx.seam": "approx.errors approx.mechanisms approx_kernels",
    "approx.checkpoints": "approx.errors approx.paths approx.version approx.validation approx.planning.positions approx.seam approx.mechanisms approx_kernels",
    "approx.planning": "approx.errors approx.validation approx.yaml_text approx.seam approx.mechanisms approx_kernels",
    "approx.conversion": "approx.errors approx.paths approx.text_file approx.version approx.planning approx.checkpoints approx.seam approx.mechanisms approx_kernels",
    "approx.tasks": "approx.errors approx.registry approx.text_file approx.version",
    "approx.evaluation": "approx.errors approx.paths approx.validation approx.version approx.tasks approx_kernels.runtime.cache_folder approx_kernels.runtime.atomic_file approx_kernels.runtime.processor",
    "approx.finetuning": "approx.errors approx.progress approx.paths approx.validation approx.version approx.evaluation approx.tasks approx.conversion approx.planning approx.checkpoints approx.seam approx_kernels",
    "approx.recipe": "approx.errors approx.validation approx.yaml_text approx.evaluation.options approx.finetuning.options approx.planning.rule approx.pushing.options approx.searching.options",
    "approx.grid": "approx.errors approx.validation approx.recipe approx.planning.rule",
    "approx.measuring": "approx.errors approx.progress approx.version approx.text_file approx.recipe approx.evaluation approx.tasks approx.conversion approx.planning approx.checkpoints approx.seam approx_kernels",
    "approx.searching": "approx.errors approx.progress approx.text_file approx.validation approx.recipe approx.measuring approx.finetuning approx.evaluation approx.tasks approx.conversion approx.planning approx.checkpoints approx.seam approx.mechanisms approx_kernels",
    "approx.publishing": "approx.errors approx.paths approx.registry approx.version approx.evaluation.record approx_kernels.runtime.atomic_file",
    "approx.pushing": "approx.errors approx.progress approx.paths approx.validation approx.version approx.publishing approx.evaluation.record approx.tasks approx.conversion approx.checkpoints approx.seam",
    "approx.patterns": "approx.errors approx.progress approx.mechanisms approx.publishing approx.evaluation.bench approx.evaluation.options approx.evaluation.record approx_kernels",
    "approx.looking": "approx.errors approx.progress approx.publishing approx.measuring approx.tasks approx.conversion approx.planning approx.checkpoints approx.seam approx.mechanisms approx_kernels",
    "approx.doctor": "approx.errors approx.progress approx.version approx.measuring approx.tasks approx_kernels",
    "approx.pipeline": "approx.errors approx.progress approx.paths approx.version approx.recipe approx.grid approx.searching approx.pushing approx.publishing approx.measuring approx.finetuning approx.evaluation approx.conversion approx.planning approx.checkpoints approx.tasks approx_kernels",
    "approx.arena": "approx.errors approx.progress approx.validation approx.pipeline.store approx.publishing approx.finetuning approx.evaluation approx.tasks approx.conversion approx.planning approx.checkpoints approx.mechanisms approx_kernels",
    "approx.inspection": "approx.errors approx.evaluation.record approx.planning approx.checkpoints",
    "approx.api": "approx.inspection approx.arena approx.pipeline approx.looking approx.searching approx.errors approx.progress approx.validation approx.evaluation.options approx.evaluation.record approx.recipe approx.pushing approx.publishing approx.measuring approx.finetuning approx.conversion approx.planning approx.checkpoints approx.tasks",
    "approx.cli": "approx approx_kernels.runtime.atomic_file",
    "approx": "approx",
}

# These rooms are used without torch, or must import fast.
WITHOUT_TORCH = (
    "approx.publishing",
    "approx.evaluation.options",
    "approx.evaluation.record",
    "approx.evaluation.statistics",
    "approx.finetuning.options",
    "approx.arena.options",
    "approx.pushing.options",
    "approx.searching.options",
    "approx.recipe",
    "approx.grid",
    "approx.errors",
)
# These rooms are copied into converted checkpoints, where only torch is guaranteed; triton is optional.
TRAVELLING = ("approx_kernels", "approx.mechanisms", "approx.seam", "approx.errors")
FORBIDDEN_NAMES = {"utils", "common", "core", "helpers", "misc"}


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Names of all imports of a module, in functions too: `from a.b import c` gives `a.b.c`."""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = parts[: len(parts) - node.level + 1] if node.level else []
            stem = ".".join([*start, *([node.module] if node.module else [])])
            names += [f"{stem}.{alias.name}" for alias in node.names]
    return names


def broken_import_rules(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence for each forbidden import of a module."""
    room = max((name for name in MAY_IMPORT if within(module, name)), key=len)
    travels = any(within(module, name) for name in TRAVELLING)
    torchless = any(within(module, name) for name in WITHOUT_TORCH)
    speaks = within(module, "approx.cli")
    wrong = []
    for target in imports(source, module, is_package):
        top = target.split(".")[0]
        ours = top in HOMES
        if ours and not any(within(target, allowed) for allowed in [room, *MAY_IMPORT[room].split()]):
            wrong.append(f"{module} may not import {target}")
        if within(target, "approx.cli") and not speaks:
            wrong.append(f"{module} imports {target}, but nobody imports cli")
        shared = any(within(target, f"approx.mechanisms.{name}") for name in ("mechanism", "sparse", "exact_part"))
        sibling = within(target, "approx.mechanisms") and not shared
        if sibling and within(module, "approx.mechanisms") and not is_package:
            wrong.append(f"{module} imports {target}, but no mechanism imports another")
        if (
            travels
            and not ours
            and top
            not in sys.stdlib_module_names
            | {"torch", "triton", *(["transformers"] if within(module, "approx.seam") else [])}
        ):
            wrong.append(f"{module} imports {target}, but a checkpoint carries it to where only torch is")
        # The `__init__.py` of a package stays behind.
        if travels and target in NAMES and not is_package:
            wrong.append(f"{module} imports the module {target}; in a checkpoint only names in modules can be imported")
        if torchless and top in {"torch", "transformers", "triton"}:
            wrong.append(f"{module} imports {target}, but must do without torch")
        if top in {"click", "typer"} and not speaks:
            wrong.append(f"{module} imports {target}, but only cli speaks to the terminal")
    return wrong


def machine_paths(text: str) -> list[str]:
    """Absolute paths that exist only on one machine."""
    return re.findall(r"(?<![\w./:}>~-])/(?:home|mnt|opt|root|tmp|Users|var|work|workspace)/[\w.-]+", text)


def python_files() -> list[Path]:
    folders = [
        ROOT / name for name in ("approx", "kernels", "tests", "tools", "bench", "examples", "recipes", "reports")
    ]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    return sorted(files)


def modules() -> list[tuple[str, Path]]:
    """Dotted name and file of every module of the two packages."""
    named = []
    for package, folder in HOMES.items():
        for file in sorted(folder.rglob("*.py")):
            inner = file.relative_to(folder).with_suffix("").parts
            named.append((".".join([package, *(part for part in inner if part != "__init__")]), file))
    return named


NAMES = {name for name, _ in modules()}


def silent_or_untyped(*arguments: str, text: str | None = None) -> list[str]:
    """Ruff's findings on missing docstrings, missing annotations and print, with pyproject's exceptions."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", *arguments]
    result = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return [line for line in result.stdout.splitlines() if re.search(r" (ANN|D1|T20)\d+ ", line)]


@pytest.mark.parametrize(("module", "file"), modules(), ids=[name for name, _ in modules()])
def test_imports_keep_the_rules(module, file):
    assert broken_import_rules(file.read_text("utf-8"), module, file.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("approx_kernels.ops.linear.reference", "from approx.errors import ApproxError"),
        ("approx_kernels.ops.linear.reference", "import transformers"),
        ("approx_kernels.ops.linear.reference", "from approx_kernels.ops.linear import decode"),
        ("approx_kernels.ops.linear.reference", "def f():\n    import approx_kernels.ops.linear.decode"),
        ("approx.errors", "import numpy"),
        ("approx.mechanisms.linear", "from approx.mechanisms.exact import FullAttention"),
        ("approx.mechanisms.linear", "from .full import FullAttention"),
        ("approx.mechanisms.linear", "from approx.mechanisms import MECHANISMS"),
        ("approx.mechanisms.linear", "def f():\n    from transformers import AutoModel"),
        ("approx.tasks.glue", "from approx.evaluation.statistics import bootstrap"),
        ("approx.planning.plan", "from approx.tasks import TASKS"),
        ("approx.evaluation.evaluate", "from approx.planning.plan import Plan"),
        ("approx.evaluation.evaluate", "from ..conversion import plan"),
        ("approx.evaluation.statistics", "import torch.nn as nn"),
        ("approx.finetuning.task", "import approx.mechanisms.exact"),
        ("approx.publishing.report", "from approx.evaluation.bench import bench"),
        ("approx.publishing.report", "from approx.conversion.convert import write"),
        ("approx.publishing.report", "if True:\n    import torch"),
        ("approx.publishing.report", "from approx.pushing.push import push"),
        ("approx.pushing.push", "from approx.evaluation.bench import bench"),
        ("approx.recipe", "from approx.pipeline import run"),
        ("approx.pipeline", "from approx.cli import app"),
        ("approx.pipeline", "from approx.mechanisms import MECHANISMS"),
        ("approx.pipeline", "import typer"),
        ("approx.planning.plan", "from approx import convert"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert broken_import_rules(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "approx_kernels.ops.linear.triton",
            "import torch\ntry:\n    import triton\nexcept ImportError:\n    pass",
        ),
        (
            "approx.mechanisms.linear",
            "from approx.mechanisms.mechanism import Mechanism\nfrom approx_kernels.ops.linear import op",
        ),
        ("approx.publishing.report", "from approx.evaluation.record import Record"),
        ("approx.pushing.push", "import transformers\nfrom approx.conversion.convert import write_card"),
        ("approx.cli", "import typer\nfrom approx.pipeline import run"),
    ],
)
def test_an_allowed_import_is_left_alone(module, source):
    assert broken_import_rules(source, module) == []


def test_no_module_has_a_meaningless_name():
    assert [
        file for file in python_files() if FORBIDDEN_NAMES & set(file.relative_to(ROOT).with_suffix("").parts)
    ] == []


def test_the_folder_kernels_stays_a_plain_folder():
    # With an __init__.py it would shadow Hugging Face's package of that name and break `import transformers`.
    assert [path.name for path in (ROOT / "kernels").iterdir() if path.name != "__pycache__"] == ["approx_kernels"]


def test_public_names_are_documented_and_typed_and_only_cli_prints():
    assert silent_or_untyped("approx", "kernels") == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("D103", "def widen(x: int) -> int:\n    return x\n"),
        ("ANN001", 'def widen(x) -> int:\n    """Widen."""\n    return x\n'),
        ("T201", 'print("done")\n'),
    ],
)
def test_a_name_that_breaks_those_rules_is_found(rule, source):
    lines = silent_or_untyped("--stdin-filename", "approx/evaluation/sample.py", "-", text=source)
    assert any(rule in line for line in lines)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_declares_its_facts(name):
    mechanism = MECHANISMS[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    attributes = {attribute for owner in mechanism.__mro__[:-2] for attribute in vars(owner)}
    for attribute in ("source", "exact_when", "supports_causal", "supports_decode", "trainable"):
        assert attribute in attributes, f"{mechanism.__name__}.{attribute} is not set"
    assert len(mechanism.source) > 10
    assert mechanism.exact_when.strip()
    assert mechanism.__doc__, f"{mechanism.__name__} has no docstring"
    assert mechanism.__doc__.strip()


def test_nothing_names_a_path_of_one_machine():
    files = [file for file in python_files() if file != Path(__file__)]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    written = {".csv", ".html", ".json", ".md", ".svg", ".yaml"}
    files += [file for name in ("recipes", "reports") for file in (ROOT / name).rglob("*") if file.suffix in written]
    by_file = {str(file.relative_to(ROOT)): machine_paths(file.read_text("utf-8")) for file in files}
    assert {name: paths for name, paths in by_file.items() if paths} == {}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('open("/home/ada/model")', ["/home/ada"]),
        ("saved to /mnt/x.json", ["/mnt/x.json"]),
        ("https://example.org/home/ada and ../mnt/x and OUT.mnt/x and {folder}/mnt/x", []),
    ],
)
def test_a_path_of_one_machine_is_found(text, paths):
    assert machine_paths(text) == paths
