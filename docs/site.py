"""Hooks of mkdocs.yml: the site mirrors the repository, with every file that a page links to, and gets an API reference.

`docs/*.md` are the first pages; what they link to elsewhere in the repository comes along, so that the links work in both places.
"""

import re
from pathlib import Path
from typing import Any

try:
    import griffe  # pyright: ignore[reportMissingImports] # of the extra `site`
except ImportError:
    # Tests read links here without the extra `site`.
    griffe: Any = None

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "docs/reference.md"
# Pages that quote what is uploaded elsewhere, where their links lead.
QUOTED = "reports/push-example/"
_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
# Classmethods that make a plan are part of the API; other members are reached through what the functions return.
_MEMBERS = {"Plan": ["of", "read"]}
_OPTIONS = (
    "approx.finetuning.options.FinetuneStage",
    "approx.evaluation.options.EvaluateStage",
    "approx.evaluation.options.BenchStage",
    "approx.searching.options.SearchStage",
    "approx.searching.options.RecommendStage",
)
_RESULTS = (
    "approx.evaluation.record.Record",
    "approx.finetuning.finetune.Healing",
    "approx.searching.outcome.Searched",
    "approx.pipeline.recommend.Recommended",
)


def links(page: Path) -> list[str]:
    """Targets of the relative links and pictures of a page."""
    text = _BLOCK.sub("", page.read_text("utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", target)]


def linked() -> list[Path]:
    """The pages of `docs/`, and every file that they lead to, directly or by other pages."""
    found: dict[Path, None] = {}
    todo = sorted((ROOT / "docs").glob("*.md"))
    while todo:
        page = todo.pop(0)
        if page in found or not page.is_file():
            continue
        found[page] = None
        if page.suffix == ".md" and not page.relative_to(ROOT).as_posix().startswith(QUOTED):
            todo += [(page.parent / file).resolve() for target in links(page) if (file := target.partition("#")[0])]
    return list(found)


def reference() -> str:
    """The page that lists the public Python API, for mkdocstrings."""
    import approx

    names = sorted(name for name in approx.__all__ if not name.startswith("__"))
    return "\n".join(
        [
            "# API reference\n\nWhat `import approx` offers; [Python API](python.md) shows it at work.\n",
            *(f"::: approx.{name}\n    options: {{members: {_MEMBERS.get(name, False)}}}" for name in names),
            "\n## Options\n\nA stage holds the options of a function and of the command of its name.\n",
            *(f"::: {name}" for name in _OPTIONS),
            "\n## Results\n",
            *(f"::: {name}" for name in _RESULTS),
            "\n## Exit codes\n",
            "::: approx.errors.Exit\n    options: {members: true, members_order: source}",
        ]
    )


class PlainTypes(griffe.Extension if griffe else object):  # pyright: ignore[reportGeneralTypeIssues] # as above
    """Shows of options' types what they accept, without how that is checked."""

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        """Take the type out of `Annotated[…]`."""
        attr.annotation = _plain(attr.annotation)


def _plain(annotation: Any) -> Any:
    if isinstance(annotation, griffe.ExprBinOp):
        return griffe.ExprBinOp(_plain(annotation.left), annotation.operator, _plain(annotation.right))
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        return _plain(annotation.slice.elements[0])
    return annotation


def on_config(config: Any) -> None:
    """Make the menu of the index of `docs/`."""
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = [
        {title: ("docs" / Path(file)).as_posix() if "/" not in file else file.removeprefix("../")}
        for title, file in re.findall(r"^\| \[(.+?)\]\((\S+\.md)\) \|", index, re.MULTILINE)
    ]
    more = [{"Contributing": "CONTRIBUTING.md"}, {"Changelog": "CHANGELOG.md"}, {"Security": "SECURITY.md"}]
    reference = [{"API reference": REFERENCE}, {"Reports": "reports/README.md"}]
    config.nav = [
        {"Start": "README.md"},
        {"Documentation": [{"All pages": "docs/README.md"}, *pages]},
        *reference,
        *more,
    ]


def on_files(files: Any, config: Any) -> None:
    """Take the files at their places in the repository instead of those of `docs/`."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports] # as above

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in linked():
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, REFERENCE, content=reference()))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str | None:
    """Show quoted pages as their source."""
    if page.file.src_uri.startswith(QUOTED):
        return f"# {page.file.name}\n\n````markdown\n{markdown}\n````\n"
    return None
