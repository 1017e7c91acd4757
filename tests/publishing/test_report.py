"""The whole report: its files, that it is reproducible, and that it needs no other files."""

import csv
import itertools
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from approx.errors import ApproxError, Exit
from approx.evaluation import record as records
from approx.publishing.report import write_report
from typed import record_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = ("report.json", "report.md", "quality.csv", "speed.csv", "lengths.csv", "layers.csv", "index.html")
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Parses a page: tags with attributes, text, and whether all tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def report(record: dict, folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in write_report([record_of(record)], folder)}


@pytest.fixture
def page(files) -> Page:
    return Page(files["index.html"])


def test_writes_exactly_the_documented_files(record, tmp_path):
    (tmp_path / "deep" / "report").mkdir(parents=True)
    (tmp_path / "deep" / "report" / "index.html").write_text('older <meta name="generator" content="approx">')
    written = write_report([record_of(record | {"speed": []})], tmp_path / "deep" / "report")
    assert [path.name for path in written] == list(FILES)
    assert "older" not in written[-1].read_text("utf-8")
    assert sorted(path.name for path in (tmp_path / "deep" / "report").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", ["index.html", "report.md", "quality.csv"])
@pytest.mark.sample(1)
def test_replaces_foreign_files_only_with_force(record, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ApproxError, match="is not of a report") as refused:
        write_report([record_of(record)], tmp_path)
    assert refused.value.exit_code == Exit.REFUSED
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}
    write_report([record_of(record)], tmp_path, force=True)
    assert (tmp_path / name).read_text("utf-8") != "mine"


def test_the_record_next_to_the_page_equals_the_record(record, tmp_path, files):
    (tmp_path / "report.json").write_text(files["report.json"], "utf-8")
    assert records.load(tmp_path / "report.json") == record_of(record)


def test_the_same_record_gives_the_same_bytes_in_another_process(record, tmp_path, files):
    path = tmp_path / "record.json"
    records.save(path, record_of(record))
    program = (
        "import sys; from pathlib import Path; from approx.evaluation import record;"
        "from approx.publishing.report import write_report;"
        "write_report([record.load(Path(sys.argv[1]))], Path(sys.argv[2]));"
        "assert 'torch' not in sys.modules"
    )
    roots = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    for seed in ("1", "2"):
        again = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": roots, "TZ": "Asia/Tokyo", "LC_ALL": "C"}
        subprocess.run([sys.executable, "-c", program, path, again], check=True, env=environment, cwd=tmp_path)
        assert {name: (again / name).read_text("utf-8") for name in FILES} == files


def test_a_users_own_matplotlib_settings_change_nothing(record, tmp_path, files):
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        assert report(record, tmp_path / "again") == files


def test_the_page_loads_nothing_else(page, files):
    # The one that sorts a table; tests in a browser check that nothing else may run.
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "action", "srcset", "data"):
                assert (value or "").startswith("#") or value in FILES, (tag, name, value)
    for word in ("http:", "https:", "url(http", "@import", "//cdn"):
        assert word not in files["index.html"]


def test_the_page_is_well_formed_and_its_ids_are_unique(page):
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    known = set(ids)
    for _, attributes in page.tags:
        for name in ("href", "aria-labelledby"):
            if name in attributes:
                assert (attributes[name] or "").removeprefix("#") in known or attributes[name] in FILES


def test_figures_have_descriptions(page):
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    # Quality against speed for two tasks, speed, memory, and the errors of layers.
    assert len(drawings) == 5
    assert all(attributes["role"] == "img" and len(attributes["aria-label"] or "") > 40 for attributes in drawings)


def test_names_are_text_and_never_markup(page, files):
    assert "MiniLM on SST-2 <script>alert('title')</script> & “quotes”" in page.text
    assert "local <128> $x$" in page.text
    assert "<improved-clustered> & others" in page.text
    assert files["index.html"].count("<script>") == 1
    assert "<script>alert" not in files["index.html"]
    assert "<script>" not in files["report.md"]
    assert "\\<script\\>" in files["report.md"]


def test_the_notice_is_shown(page, files, record, tmp_path):
    assert record["notice"] in page.text
    assert record["notice"] in files["report.md"]
    # The record is older than some fields of verdicts.
    assert "Made by an earlier version, without intervals that count rare losses," in files["report.md"]
    plain = report(record | {"notice": None, "quality": []}, tmp_path / "plain")
    assert "Note." not in plain["index.html"] + plain["report.md"]


@pytest.mark.parametrize(
    "fact",
    [
        "1.53× faster at 2,048 tokens",
        "slower at 128–512 tokens (0.55–0.68× the speed of exact attention)",
        "Not settled: improved-clustered 25: it is faster at 2,048 tokens and above; no loss on glue/sst2",
        "runs at 4,096 tokens, where exact attention is out of memory",
        "out of memory at 2,048–4,096 tokens",
        "It loses 38.6 ± 3.9 points of accuracy on glue/sst2 (dev): a loss beyond the margin of 0.5 points.",
        "It scores the same ± 0.4 points of accuracy on glue/sst2 (dev): no loss, at a margin of 0.5 points.",
        "inconclusive at a margin of 0.5 points; about 3,000 examples would settle it",
        "It gains 1.2 ± 2.2 points of f1 on glue/mrpc (dev)",
        "100 examples, a subset, 3 of them truncated",
        "Quality was measured on inputs of fewer than 67 tokens, speed at up to 4,096",
        "Its speed was not measured. Its quality was not measured.",
        "not verified",
        "default SDPA",
        "A Processor With a Name",
        "approx run recipes/sample.yaml --title '<b>'",
    ],
)
def test_the_page_describes_the_measurements(page, fact):
    assert fact in page.text


def test_the_markdown_equals_the_stored_one(files):
    # After an intended change of the report, review the new text and replace the golden file.
    assert files["report.md"] == (HERE / "report.golden.md").read_text("utf-8")


def test_tables_of_the_markdown_have_as_many_cells_in_every_row(files):
    def cells(line: str) -> int:
        return line.replace("\\|", "").count("|")

    lines = files["report.md"].splitlines()
    tables = 0
    for above, line in itertools.pairwise(lines):
        if above.startswith("|") and line.startswith("|"):
            assert cells(above) == cells(line), line
        tables += line.startswith("|--")
    assert tables == 6


def test_names_missing_measurements(record, tmp_path):
    bare = report(record | {"quality": [], "speed": [], "crossover": [], "recipe": None}, tmp_path / "bare")
    for text in (Page(bare["index.html"]).text, bare["report.md"]):
        assert "Quality was not measured." in text
        assert "Speed was not measured." in text
    # The errors of layers are of the conversion, and stay.
    assert bare["index.html"].count("<svg") == 1


def test_a_row_without_ceiling_and_one_length_still_make_a_figure(record, tmp_path):
    row = record["speed"][1] | {"ceiling": None, "spread": None}
    shown = report(record | {"speed": [row]}, tmp_path / "one")["index.html"]
    # Quality against speed, speed, memory, and errors by layer.
    assert shown.count("<svg") == 4
    assert "ceiling: attention removed" not in shown


def test_reports_a_busy_machine(record, tmp_path):
    record["speed"][0]["crowded"] = True
    assert "Other programs used this machine's cores" in report(record, tmp_path / "c")["index.html"]


@pytest.mark.slow
def test_names_ops_that_ran_in_plain_pytorch(record, tmp_path):
    before = report(record, tmp_path / "before")["report.md"]
    assert "plain PyTorch" not in before
    assert "ran in" not in before
    for row in record["speed"][1:4]:
        row["variants"][0]["chosen"] = {"cluster_queries": "cpu", "topk_attention": "reference"}
    advice = ": improved-clustered 25 (topk_attention, 512–2,048 tokens)."
    shown = report(record, tmp_path / "after")
    assert advice in Page(shown["index.html"]).text
    assert advice.replace("_", "\\_") in shown["report.md"]
    assert "| ran in |" in shown["report.md"]
    lines = list(csv.DictReader(shown["speed.csv"].splitlines()))
    assert {line["chosen"] for line in lines} == {"", "cluster_queries cpu, topk_attention plain PyTorch"}
    for row in record["speed"]:
        row["variants"][0]["chosen"] = {"cluster_queries": "cpu"}
    assert "plain PyTorch" not in report(record, tmp_path / "fast")["report.md"]


@pytest.mark.slow
def test_records_of_different_machines_have_separate_figures(record, tmp_path):
    other = json.loads(json.dumps(record))
    other |= {"title": "Another machine", "speed": record["speed"][:2]}
    other["environment"]["processor"] = "Another Processor"
    write_report([record_of(record), record_of(other)], tmp_path)
    page = Page((tmp_path / "index.html").read_text("utf-8"))
    assert len([tag for tag, _ in page.tags if tag == "article"]) == 2
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 10
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert json.loads((tmp_path / "report.json").read_text("utf-8")) == [record, other]
    assert len(list(csv.DictReader((tmp_path / "speed.csv").open()))) == 5 * 6 + 2 * 6


def test_different_settings_of_one_machine_have_separate_figures(record, tmp_path):
    record["speed"] += [row | {"batch": 8} for row in record["speed"]]
    shown = report(record, tmp_path / "b")["index.html"]
    assert shown.count("Speed relative to exact attention against length") == 2
    assert "batch 8" in Page(shown).text


def test_no_records_and_no_folder_are_refused(record, tmp_path):
    with pytest.raises(ApproxError, match="at least one"):
        write_report([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ApproxError, match="cannot be written") as caught:
        write_report([record_of(record)], tmp_path / "file")
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_a_score_outside_zero_to_one_keeps_its_units(record, tmp_path):
    task, (entry, *_) = record["quality"][0], record["quality"][0]["variants"]
    entry |= {"scores": {"bits_per_byte": 1.584}, "difference": 0.35, "interval": [0.31, 0.39], "slices": []}
    entry |= {"margin": 0.01, "verdict": "loss beyond margin"}
    task |= {"metric": "bits_per_byte", "fraction": False, "lower_is_better": True, "variants": [entry]}
    task["base"] = {"scores": {"bits_per_byte": 1.234}, "interval": [1.2, 1.27]}
    write_report([record_of(record | {"quality": [task]})], tmp_path)
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "872 examples; lower is better. Differences are converted minus exact, in bits per byte." in text
    assert (
        "| improved-clustered 25 | 1.584 | +0.350 | 0.310 to 0.390 | 0.010 bits per byte (0.8 %) | loss beyond margin |"
        in text
    )
    assert "It has 0.350 ± 0.040 more bits per byte on glue/sst2 (dev)" in text
    assert "158" not in text.split("## Speed")[0]


def test_scores_of_one_split_at_several_lengths_have_labels(record, tmp_path):
    task = record["quality"][0]
    record["quality"] = [{**task, "notes": [f"read to {length} tokens"]} for length in ("512", "1,024")]
    text = report(record, tmp_path)["report.md"]
    assert "of accuracy on glue/sst2 (dev; read to 512 tokens): " in text
    assert "of accuracy on glue/sst2 (dev; read to 1,024 tokens): " in text


def test_tables_for_a_paper_and_plots_are_written_on_request(record, tmp_path):
    written = write_report([record_of(record)], tmp_path, formats=["latex", "svg"])
    names = {str(path.relative_to(tmp_path)) for path in written}
    assert {"tables.tex", "plots/quality-against-speed-0.svg", "plots/speed-0.svg", "plots/layers.svg"} <= names
    text = (tmp_path / "tables.tex").read_text("utf-8")
    assert r"linear & 50.92 \% & $-$38.64 & $-$42.50 to $-$34.70 & loss beyond margin \\" in text
    assert r"local $<$128$>$ \$x\$" in text
    assert "1.53$\\times$ (1.49 to 1.58)" in text
    for path in (tmp_path / "plots").glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(--" not in path.read_text("utf-8")
    with pytest.raises(ApproxError, match="has no format 'pdf'"):
        write_report([record_of(record)], tmp_path, formats=["pdf"])


def test_data_of_plots_that_an_earlier_report_had_do_not_stay(record, tmp_path):
    report(record, tmp_path)
    (row, *_) = csv.DictReader((tmp_path / "layers.csv").read_text("utf-8").splitlines())
    assert (row["variant"], row["layer"], float(row["error"])) == ("improved-clustered 25", "0", 0.03)
    bare = [variant | {"receipt": None} for variant in record["variants"]]
    write_report([record_of(record | {"variants": bare})], tmp_path)
    assert not (tmp_path / "layers.csv").exists()
    assert (tmp_path / "lengths.csv").exists()
