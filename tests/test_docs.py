"""README.md and docs/: commands run or at least parse, links work, Python compiles, YAML is valid."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import approx
from approx import recipe as recipes
from approx.cli import app
from approx.cli.command import EXIT_CODES
from approx.errors import Exit
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from approx.tasks import known
from docs import site
from test_house import MAY_IMPORT

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
# All that the pages of docs/ lead to.
LINKED = [path for path in site.linked() if path.suffix == ".md" and site.QUOTED not in path.as_posix()]
NOTEBOOK = ROOT / "examples" / "first-steps.ipynb"
# Marks a block whose commands need the reader's own models, data or hardware.
EXAMPLE = "<!-- example:"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and whether it is marked as an example."""

    language: str
    text: str
    example: bool


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    made, before, language, lines = [], "", None, []
    for line in text.splitlines():
        if language is None and re.fullmatch(r"```\w+", line):
            language, lines = line[3:], []
        elif language is not None and line == "```":
            made.append(Block(language, "\n".join(lines), before.startswith(EXAMPLE)))
            language, before = None, ""
        elif language is not None:
            lines.append(line)
        else:
            before = line
    assert language is None, "a block is not closed"
    return made


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a block."""
    return [words for line in block.text.splitlines() if (words := shlex.split(line, comments=True))]


def run(*words: str) -> tuple[int, str]:
    """Exit code and output of one command line of approx."""
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


def mistake(words: list[str]) -> str | None:
    """The mistake in a command, as far as it shows without running it, or None."""
    if words[:2] == ["docker", "build"]:
        there = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
        named = [one.partition("=")[0] for before, one in pairwise(words) if before == "--build-arg"]
        return next((f"{name} is no argument of the Dockerfile" for name in named if name not in there), None)
    if words[:2] == ["docker", "run"]:
        image = next(place for place, word in enumerate(words) if word.startswith("approx"))
        return mistake(["approx", *words[image + 1 :]])
    if "approx" in words:
        ours = words[words.index("approx") + 1 :]
        # Unknown options are rejected even with --help.
        code, output = run(*ours, "--help")
        if code != 0:
            return output
        choices = dict(pairwise(ours))
        wrong = [
            f"{option} {choices[option]} does not exist"
            for option, exists in (("-m", MECHANISMS.__contains__), ("--task", known))
            if option in choices and not exists(choices[option])
        ]
        return wrong[0] if wrong else None
    if words[0] == "python":
        return None if (ROOT / words[1]).is_file() else f"{words[1]} does not exist"
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return None if words[1] in targets else f"{words[1]} is not a target"
    return None if words == ["pip", "install", "."] else f"{words[0]} is not a command that these pages use"


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    """Broken relative links of a page."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in slugs(path.read_text("utf-8"))):
            dead.append(target)
    return dead


def of(language: str) -> list[tuple[Path, Block]]:
    return [(page, block) for page in PAGES for block in blocks(page.read_text("utf-8")) if block.language == language]


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_the_readme_begins_with_the_two_commands_of_a_newcomer():
    first = next(block for block in blocks((ROOT / "README.md").read_text("utf-8")) if block.language == "bash")
    assert commands(first) == [["make", "demo"], ["make", "test"]]
    assert [mistake(words) for words in commands(first)] == [None, None]
    # Each says how long it takes.
    assert all(re.search(r"# .*: about \d+ minutes$", line) for line in first.text.splitlines())


def test_the_ci_runs_the_tests_as_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    (extraction,) = re.findall(r"^tests=.*$", script, re.MULTILINE)
    said = subprocess.run(
        ["bash", "-c", f'{extraction}; echo "$tests"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "make test\n"
    assert re.search(r"^\$tests\b", script, re.MULTILINE)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_exist(page):
    assert dead_links(page, page.read_text("utf-8")) == []


def test_a_dead_link_is_found():
    text = "[a](docs/README.md) [b](docs/nothing.md) [c](#no-heading) [d](https://example.org/nothing)\n# Heading"
    assert dead_links(ROOT / "README.md", text) == ["docs/nothing.md", "#no-heading"]


def test_the_site_has_every_page_and_what_they_link_to():
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} <= {
        page.relative_to(ROOT).as_posix() for page in LINKED
    }
    for name in ("CHANGELOG.md", "SECURITY.md", "reports/README.md", "reports/quickstart/report.md"):
        assert ROOT / name in LINKED
    assert ROOT / "docs" / "images" / "look.png" in site.linked()


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reference = (tmp_path / "site" / "docs" / "reference.html").read_text("utf-8")
    assert [name for name in approx.__all__ if name != "__version__" and f'id="approx.{name}"' not in reference] == []
    assert (tmp_path / "site" / "reports" / "quickstart" / "report.html").is_file()
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=.?https?:", page.read_text("utf-8")), page


def cells() -> list[tuple[str, str]]:
    """Kind and text of each cell of the notebook."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert [cell for cell in notebook["cells"] if cell.get("outputs")] == [], "outputs are stripped"
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def test_the_notebook_names_what_exists():
    assert dead_links(NOTEBOOK, "\n".join(text for kind, text in cells() if kind == "markdown")) == []
    lines = [line for kind, text in cells() if kind == "code" for line in text.splitlines()]
    assert [mistake(shlex.split(line[1:])) for line in lines if line.startswith("!")] == [None]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    code = "\n".join(text for kind, text in cells() if kind == "code")
    # As IPython, whose commands run in a shell; here its word `approx` is this checkout.
    code = re.sub(r"^!approx (.*)$", lambda found: f"run({shlex.split(found[1])})", code, flags=re.MULTILINE)
    start = "import subprocess, sys\n\n\ndef run(words):\n"
    start += f"    subprocess.run([sys.executable, {str(ROOT / 'cli.py')!r}, *words], check=True)\n\n\n"
    (tmp_path / "first_steps.py").write_text(start + code)
    path = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    command = [sys.executable, "first_steps.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "first-steps" / "report" / "index.html").is_file()
    assert (tmp_path / "first-steps" / "look" / "index.html").is_file()
    assert "improved-clustered" in done.stdout


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"({page.name})" not in index] == []


def test_commands_and_options_exist():
    examples = of("bash")
    assert len(examples) > 10
    wrong = {shlex.join(words): mistake(words) for _, block in examples for words in commands(block)}
    assert {line: said for line, said in wrong.items() if said} == {}


@pytest.mark.parametrize(
    "line",
    [
        "approx convert model -o out -m local --no-such-option",
        "approx no-such-command",
        "approx convert model -o out -m no-such-mechanism",
        "torchrun --nproc-per-node 4 --no-python approx evaluate model --task no-such-task",
        "python bench/nothing.py",
        "make nothing",
        "docker build --build-arg NOTHING=1 .",
        "docker run --rm approx-cuda no-such-command",
        "rm -r runs",
    ],
)
def test_finds_an_impossible_command(line):
    assert mistake(shlex.split(line))


def test_distinguishes_examples_from_commands_that_run():
    text = "<!-- example: yours -->\n```bash\na b  # c\n```\n\n```bash\nd\n```"
    assert [(block.example, commands(block)) for block in blocks(text)] == [(True, [["a", "b"]]), (False, [["d"]])]


def test_python_compiles():
    examples = of("python")
    assert examples
    for page, block in examples:
        compile(block.text, page.name, "exec")


def test_plans_and_recipes_are_accepted(tmp_path):
    kinds = set()
    for number, (_, block) in enumerate(of("yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.text, "utf-8")
        kinds.add(kind := "plan" if "rules" in yaml.safe_load(block.text) else "recipe")
        (Plan.read if kind == "plan" else recipes.read)(file)
    assert kinds == {"plan", "recipe"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    dict.fromkeys(page for page, block in of("bash") if not block.example),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_run_offline_on_the_embedded_model(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page.read_text("utf-8")):
        if block.language != "bash" or block.example:
            continue
        for program, *words in commands(block):
            if program == "approx":
                code, output = run(*words)
                assert code == 0, f"approx {shlex.join(words)}: {output[-2000:]}"


def test_the_map_of_the_house_is_the_one_that_is_enforced():
    rows = re.findall(r"^\| `([^`]+)` \| .+ \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    allowed_rooms = {room.rstrip("/"): set(allowed.split(", ")) for room, allowed in rows if "/" in room}
    rooms = {
        name.replace(".", "/")
        for name in MAY_IMPORT
        if name.count(".") == 1 and (ROOT / name.replace(".", "/")).is_dir()
    }
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "approx_kernels").glob("*/")}
    assert rooms | {name for name in kernels if "__" not in name} == {
        name for name in allowed_rooms if not name.endswith(".py")
    }
    for room, allowed in allowed_rooms.items():
        if room.startswith("kernels"):
            assert allowed == {"kernels"}
        elif room != "approx/cli":
            names = MAY_IMPORT[room.removesuffix(".py").replace("/", ".")].split()
            there = [name for name in names if _exists(name)]
            assert allowed == {re.sub("^approx_kernels", "kernels", name).removeprefix("approx.") for name in there}, (
                room
            )


def _exists(module: str) -> bool:
    """Whether a room exists."""
    path = ROOT / ("kernels" if module.startswith("approx_kernels") else "") / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_help_and_docs_explain_the_same_exit_codes():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "limits.md").read_text("utf-8"), re.MULTILINE)
    assert [int(code) for code, _ in rows] == [int(code) for code in EXIT_CODES] == sorted(Exit)
    assert all(text.startswith(EXIT_CODES[Exit(int(code))]) for code, text in rows)
