"""Pages in a browser, on a phone and a desktop, light and dark: nothing is cut, loaded or wrong, and all of it can be used."""

import base64
import hashlib
import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from approx.publishing.report import write_report
from reports.refresh import BROWSERS, PICTURE, RECORDS, ROOT, SHOWN, page_of_picture
from typed import record_of

LOOKS = [f"look/{path.name}" for path in sorted((RECORDS / "look").glob("*.html"))]
# Text that lies beyond the screen or beyond its own box, and boxes that scroll sideways without saying so.
CLIPPED = """() => {
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const one of document.querySelectorAll("main *")) {
    if (one.closest("details:not([open]) > :not(summary), pre, .lines, .small-heads") || one.closest("svg") !== null) continue;
    const box = one.getBoundingClientRect(), scroll = one.closest(".scroll");
    const what = `${one.tagName} ${one.textContent.trim().slice(0, 40)}`;
    if (box.width && (box.right > width + 1 || box.left < -1) && !scroll) found.push(`beyond the screen: ${what}`);
    const hides = getComputedStyle(one).overflowX !== "visible";
    if (one !== scroll && hides && one.scrollWidth > one.clientWidth + 1) found.push(`cut: ${what}`);
  }
  return found;
}"""
# At any width the columns that matter are seen without scrolling.
SEEN = """() => [...document.querySelectorAll(".overview, .stacked table")].flatMap((table) => {
  const room = table.closest(".scroll");
  const wanted = [...table.querySelectorAll('[data-label="difference"], [data-label="verdict"], [data-label="test"], [data-label$="tokens"], .overview td')];
  const edge = room.getBoundingClientRect().right + 1;
  return wanted.filter((cell) => cell.getBoundingClientRect().right > edge).map((cell) => cell.textContent.trim());
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser of the system, or the one that `playwright install chromium` fetched."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as run:
        launched = run.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    spec = importlib.util.find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("axe.min.js").read_text("utf-8")


def opened(browser: Browser, path: Path, width: int, scheme: str) -> tuple[Page, list[str]]:
    """A page, and what it complained about or asked for."""
    page = browser.new_page(
        viewport={"width": width, "height": 844}, color_scheme="dark" if scheme == "dark" else "light"
    )
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.extend([request.url] * (not request.url.startswith(("file:", "data:")))))
    page.goto(path.resolve().as_uri())
    return page, wrong


def serious(page: Page, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("() => axe.run({resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:120]} {one['nodes'][0]['failureSummary'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def checked(browser: Browser, path: Path, width: int, scheme: str, axe: str) -> Page:
    page, wrong = opened(browser, path, width, scheme)
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(SEEN) == []
    assert serious(page, axe) == []
    assert wrong == []
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", [*(f"{name}/index.html" for name in SHOWN), *LOOKS])
@pytest.mark.sample(4)
def test_committed_pages_can_be_read_and_used(browser, axe, name, width, scheme):
    checked(browser, RECORDS / name, width, scheme, axe).close()


def test_a_query_of_a_committed_look_shows_its_lines_alone(browser):
    page, _ = opened(browser, RECORDS / LOOKS[0], 1280, "light")
    groups = page.locator(".lines").first.locator("svg").first.locator("g")

    def shown() -> list[str]:
        return groups.evaluate_all("(all) => all.slice(0, 9).map((one) => getComputedStyle(one).opacity)")

    assert set(shown()) == {"1"}
    page.locator('.lines input[value="3"]').first.check(force=True)
    assert [place for place, opacity in enumerate(shown()) if opacity == "1"] == [3]
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_every_part_of_a_page_can_be_read_and_used(browser, axe, record, tmp_path, width):
    other = record | {"title": "Another machine", "seed": 8}
    write_report([record_of(record), record_of(other)], tmp_path)
    page = checked(browser, tmp_path / "index.html", width, "dark", axe)
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.close()


def test_the_table_of_variants_is_sorted_by_the_heading_that_is_pressed(browser, record, tmp_path):
    write_report([record_of(record)], tmp_path)
    page, _ = opened(browser, tmp_path / "index.html", 1280, "light")
    speed = page.locator(".overview th button", has_text="speed")
    cells = ".overview tbody td:last-child"

    def shown() -> list[str]:
        return page.eval_on_selector_all(cells, "(all) => all.map((one) => one.dataset.sort)")

    speed.click()
    values = [float(one) for one in shown() if one]
    assert values == sorted(values, reverse=True)
    speed.click()
    assert [float(one) for one in shown() if one] == values[::-1]
    # What was not measured is last in both directions.
    assert shown()[-1] == ""
    assert page.locator('.overview th[aria-sort="ascending"]').count() == 1
    page.close()


def test_the_one_script_of_a_page_is_named_by_its_hash(files):
    (script,) = re.findall(r"<script>(.*?)</script>", files["index.html"], flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in files["index.html"]


def test_the_picture_of_the_readme_is_of_the_page_as_it_is():
    page = (RECORDS / "quickstart" / "index.html").read_bytes()
    assert page_of_picture(PICTURE) == hashlib.sha256(page).hexdigest(), "run python reports/refresh.py"
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text("utf-8")
