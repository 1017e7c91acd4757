"""Names that would be code or paths: of checkpoints, data, variants, titles and labels. They are shown as they are, everywhere."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from approx.cli import app
from tiny_study import tiny_checkpoint

pytestmark = pytest.mark.slow
# The second is one name of a folder too; the third leads out of any.
NAMES = {"script": "<script>alert(1)</script>", "image": "<img src=x onerror=alert(1)>`[a](b)", "path": "../../x"}


def call(*words: object) -> str:
    answer = CliRunner().invoke(app, [str(word) for word in words])
    assert answer.exit_code == 0, answer.stderr[-2000:]
    return answer.stdout


@pytest.fixture(scope="module", params=NAMES)
def study(request, tmp_path_factory) -> tuple[str, Path, str]:
    """A name; the folder with a run and a push of what has this name; and what was printed."""
    name = NAMES[request.param]
    around = tmp_path_factory.mktemp("around")
    home = around / "a" / "b"
    # As a path, the name of the first leads through two folders and that of the second out of this one.
    base, data = home / "in" / "deep" / name, home / "data" / "deep" / f"{name}.csv"
    tiny_checkpoint(base)
    config = json.loads((base / "config.json").read_text("utf-8"))
    config |= {"_name_or_path": name, "id2label": {"0": name, "1": "positive"}, "label2id": {name: 0, "positive": 1}}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (base / "README.md").write_text(
        f"---\nlicense: mit\nbase_model: {json.dumps(name)}\n---\n{name}\n", encoding="utf-8"
    )
    data.parent.mkdir(parents=True, exist_ok=True)
    with data.open("w", encoding="utf-8", newline="") as file:
        labels = (name, "positive") * 6
        csv.writer(file).writerows([("text", "label"), *((f"the film is {name}", label) for label in labels)])
    recipe = {
        "title": name,
        "notice": name,
        "checkpoint": str(base),
        "device": "cpu",
        "variants": {
            name: {"mechanism": "local", "settings": {"left": 1, "right": 1}},
            "other": {"mechanism": "linear"},
        },
        "evaluate": {"task": "text-classification", "data": str(data)},
        "bench": {"lengths": 8, "rounds": 3, "seconds": 0},
    }
    (home / "study.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    before = {path for path in around.rglob("*") if path.is_file()}
    said = call("run", home / "study.yaml", "-o", home / "out" / "run")
    said += call("inspect", base)
    (folder,) = (path for path in (home / "out" / "run" / "converted").iterdir() if path.name != "other")
    record = home / "out" / "run" / "record.json"
    said += call("push", folder, "me/model", "--record", record, "--dry-run", "-o", home / "out" / "pushed")
    said += call("report", record, "-o", home / "out" / "report")
    made = {path for path in around.rglob("*") if path.is_file()} - before
    assert {path.relative_to(home).parts[0] for path in made} == {"out"}
    return name, home / "out", said


class Page(HTMLParser):
    """The elements of a page and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.words = set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements |= {tag, *(key for key, _ in attrs if key.startswith("on"))}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def markup(text: str) -> str:
    """What a reader of Markdown takes for more than words: code and escaped characters are left out."""
    text = re.sub(r"(?m)^( {4}.*\n)+", "", text)
    text = re.sub(r"(?s)```.*?```", "", text)
    text = re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    return re.sub(r"\\.", "", text)


def test_the_page_shows_the_name_and_gets_no_element_from_it(study):
    name, out, _ = study
    for page in (out / "report" / "index.html", out / "run" / "report" / "index.html"):
        made = Page(page.read_text("utf-8"))
        assert made.elements.isdisjoint({"script", "img", "onerror"})
        assert name in "\n".join(made.words)


def test_markdown_shows_the_name_and_gets_no_markup_from_it(study):
    name, out, _ = study
    files = [out / "report" / "report.md", *out.rglob("README.md")]
    assert len(files) == 4, files
    for path in files:
        text = path.read_text("utf-8")
        head = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
        if head:
            # Data that the hub reads: the name is a value like others.
            assert yaml.safe_load(head[1])["base_model"] == name
            text = text[head.end() :]
        assert not re.search(r"<\w|</|script>|[]][(]b", markup(text)), path


def test_tables_hold_the_name_in_one_field(study):
    name, out, _ = study
    for table in ("quality.csv", "speed.csv"):
        with (out / "report" / table).open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        assert {line["title"] for line in lines} == {name}
        assert name in {value for line in lines for key, value in line.items() if key != "title"}
        assert all(None not in line and None not in line.values() for line in lines)


def test_the_terminal_shows_the_name_as_it_is(study):
    name, _, said = study
    assert name in said


def test_a_variant_is_in_a_folder_within_the_run(study):
    _, out, _ = study
    assert {path.name for path in (out / "run").iterdir()} == {
        "converted",
        "recipe.yaml",
        "record.json",
        "report",
        "stages",
        "outputs-0.parquet",
    }
    assert len(list((out / "run" / "converted").iterdir())) == 2
    assert list(out.parent.parent.iterdir()) == [out.parent]
