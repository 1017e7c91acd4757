"""The page and the Markdown of handwritten records: what the golden file does not show."""

import re

import pytest

from approx.publishing import report
from approx.publishing.summary import conclude
from typed import known, record_of

SHOWN = re.compile(r"<[^>]+>|\s+")


def text(html: str) -> str:
    return " ".join(SHOWN.sub(" ", html).split())


def test_the_page_shows_intervals_shares_and_receipts_that_the_markdown_leaves_out(record):
    shown = text(report.html([record_of(record)]))
    assert "exact 89.56 % 87.35 to 91.41" in shown
    assert "1.53× 1.49 to 1.58 67 % of ceiling faster" in shown
    assert "improved-clustered 25 0 to 15 250 92.00 % 91.80 %" in shown
    assert "Receipt of local &lt;128&gt; $x$ { &#34;errors&#34;: {" in shown
    assert "Receipt of linear" not in shown
    assert "glue/sst2 (dev) against speed at 1,024 tokens on CPU" in shown


def test_shows_the_colour_of_a_variant_next_to_its_name(record):
    (section,) = re.findall(r"<article.*?</article>", report.html([record_of(record)]), flags=re.DOTALL)
    swatches = re.findall(r'background: (#\w+)" aria-hidden="true"></span>(linear|clustered 25)\b', section)
    colours = {
        name: {colour for colour, beside_name in swatches if beside_name == name} for name in ("linear", "clustered 25")
    }
    assert {name: len(values) for name, values in colours.items()} == {"linear": 1, "clustered 25": 1}
    assert colours["linear"] != colours["clustered 25"]


@pytest.mark.slow
def test_the_title_of_several_reports_is_their_number_and_each_can_be_reached(record):
    other = record | {"title": "Another machine"}
    shown = report.html([record_of(record), record_of(other)])
    assert "<title>2 reports</title>" in shown
    assert '<a href="#r2">Another machine</a>' in shown
    assert '<article id="r1">' in shown
    assert "<title>MiniLM on SST-2 &lt;script&gt;" in report.html([record_of(record)])
    assert report.markdown([record_of(record), record_of(other)]).count("# Another machine") == 1


def test_describes_a_checkpoint_under_its_name(record):
    record["checkpoint"] |= {"revision": "main", "weights_sha256": None, "positions": None}
    record["environment"] = {"gpu": "A GPU", "cores": 8, "unheard": 0}
    shown = report.markdown([record_of(record)])
    for line in (
        "- revision: main",
        "- positions: –",
        "- weights (sha256): –",
        "- GPU: A GPU",
        "- cores: 8",
        "- unheard: 0",
    ):
        assert line in shown.splitlines()


def test_markup_in_a_name_is_text_in_the_markdown(record):
    record["title"] = "a|b\n\\`*_[]<>#"
    assert report.markdown([record_of(record)]).startswith(r"# a\|b \\\`\*\_\[\]\<\>\#" + "\n\n")


def test_a_drawing_takes_the_colours_and_ids_of_its_page(record):
    shown = report.html([record_of(record)])
    (first, *_) = re.findall(r"<svg.*?</svg>", shown, flags=re.DOTALL)
    assert 'viewBox="0 0 374.4 288"' in first
    assert "currentColor" in first
    assert "var(--faint)" in first
    assert "#010203" not in shown
    assert "#040506" not in shown
    assert "<!--" not in first
    assert "xlink" not in first
    ids = re.findall(r'\bid="([^"]+)"', first)
    used = re.findall(r'href="#([^"]+)"', first) + re.findall(r"url\(#([^)]+)\)", first)
    assert all(name.startswith("r1-both-0-0-") for name in ids)
    assert set(used) <= set(ids)


def test_a_page_begins_with_the_answer_its_figures_and_one_plot(record):
    shown = report.html([record_of(record)])
    assert shown.index('class="advice"') < shown.index('class="figures"') < shown.index("<svg") < shown.index("<table")
    assert shown.count('id="r1-both-0-0-figure_1"') == 1
    # On a narrow screen every figure of a row has its name.
    assert 'data-label="difference"' in shown
    assert 'data-label="verdict"' in shown


def test_speeds_that_are_not_settled_have_no_empty_plot(record):
    record["quality"] = []
    for row in record["speed"]:
        # Exact attention against itself varies by more than half.
        row["spread"] = {"ratio": 1.0, "interval": [0.5, 2.0]}
    record["speed"] = record["speed"][:3]
    shown = report.html([record_of(record)])
    assert "No ratio is settled, so there is no plot." in shown
    assert "Speed relative to exact attention" not in shown


def test_examples_that_differ_by_rounding_are_not_shown_as_lost_and_empty_columns_are_left_out(record):
    alike = {"id": "e1", "input": "by rounding", "target": "", "base": "", "converted": ""}
    alike |= {"base_score": 0.5, "converted_score": 0.5 - 1e-9}
    for entry in record["quality"][0]["variants"]:
        entry["worst"] = [alike]
    assert "loses most" not in report.html([record_of(record)]) + report.markdown([record_of(record)])
    for entry in record["quality"][0]["variants"]:
        entry["worst"] = [alike | {"input": "lost", "converted_score": 0.25}, alike]
    html, markdown = report.html([record_of(record)]), report.markdown([record_of(record)])
    assert "by rounding" not in html + markdown
    assert "| lost | 50.00 % | 25.00 % |" in markdown
    assert 'data-label="target">' not in html


def test_the_worst_examples_of_the_chosen_variant_are_shown_as_text(record):
    lost = {"id": "e1", "input": "<img src=x> | a *film*", "target": "<b>", "base": "positive", "converted": "negative"}
    lost |= {"base_score": 1.0, "converted_score": 0.0}
    for entry in record["quality"][0]["variants"]:
        entry["worst"] = [lost | {"id": entry["name"], "input": f"{lost['input']} {entry['name']}"}]
    made = record_of(record)
    html, markdown = report.html([made]), report.markdown([made])
    chosen = known(conclude(made)).chosen
    assert "<img" not in html
    assert f"&lt;img src=x&gt; | a *film* {chosen}" in html
    assert html.count("a *film*") == markdown.count("a \\*film\\*") == 1
    assert f"on which {chosen} loses most" in text(html)
    assert (
        f"| \\<img src=x\\> \\| a \\*film\\* {chosen} | \\<b\\> | positive (100.00 %) | negative (0.00 %) |" in markdown
    )
