"""What the drawings of a report hold: points, bands, labels and scales as matplotlib has them before it draws."""

from collections.abc import Callable

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from approx.publishing import plots
from approx.publishing.summary import speed_groups


@pytest.fixture
def drawn(monkeypatch) -> Callable[..., Axes]:
    """Call one of the module's figures; the axes that it filled."""
    kept: list[Axes] = []

    def keep(identity: str, description: str, paint: Callable[[Axes], None], inches: tuple[float, float]) -> str:
        axes = Figure(figsize=inches).add_subplot()
        paint(axes)
        kept.append(axes)
        return description

    monkeypatch.setattr(plots, "draw", keep)

    def call(figure: Callable[..., object], *arguments: object) -> Axes:
        figure(*arguments, "id")
        return kept[-1]

    return call


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in axes.lines}  # type: ignore[arg-type]  # data of lines are pairs of sequences


def test_speed_is_drawn_as_it_was_measured(record, drawn):
    (rows,) = speed_groups(record)
    axes = drawn(plots.speed_figure, rows, record)
    found = lines(axes)
    for name in ("improved-clustered 25", "clustered 25", "linear"):
        measured = [
            (row["length"], entry["ratio"]) for row in rows for entry in row["variants"] if entry["name"] == name
        ]
        assert found[name] == [(length, ratio) for length, ratio in measured if ratio]
    assert found["ceiling: attention removed"] == [(row["length"], row["ceiling"]["ratio"]) for row in rows[:4]]
    assert [x for x, _ in found["local <128> $x$: out of memory"]] == [2048, 4096]
    assert [text.get_text() for text in axes.texts] == ["exact: out of memory"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length (tokens)", "speed relative to exact attention")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    low, high = axes.get_ylim()
    assert low <= 0.7 < 1.5 <= high
    bands = [band.get_paths()[0].vertices for band in axes.collections]
    noise = bands[0]
    assert noise[:, 1].min() == 0.985  # type: ignore[index]  # vertices are an array
    assert noise[:, 1].max() == 1.018  # type: ignore[index]  # as above
    # One band for each variant with a speed, as wide as its interval, and the base against itself.
    assert len(bands) == 5
    interval = rows[0]["variants"][0]["interval"]
    at_first = bands[1][bands[1][:, 0] == 128]  # type: ignore[index]  # as above
    assert sorted({round(float(y), 9) for y in at_first[:, 1]}) == sorted(round(end, 9) for end in interval)  # type: ignore[index]  # as above


def test_quality_is_drawn_against_the_speed_of_the_longest_row_with_most_of_both(record, drawn):
    (rows,) = speed_groups(record)
    task = record["quality"][0]
    axes = drawn(plots.quality_figure, task, rows, record)
    points = {str(box.get_label()): tuple(map(float, box.lines[0].get_xydata()[0])) for box in axes.containers}  # type: ignore[attr-defined]  # they are error bars
    row = next(row for row in rows if row["length"] == 1024)
    ratios = {entry["name"]: entry["ratio"] for entry in row["variants"]}
    assert points == {
        entry["name"]: (pytest.approx(ratios[entry["name"]]), pytest.approx(100 * entry["difference"]))
        for entry in task["variants"]
    }
    assert axes.get_ylabel() == "change in accuracy (points)"
    assert axes.get_xlabel() == "speed relative to exact attention at 1,024 tokens"
    assert not axes.yaxis_inverted()
    margin = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (margin.y0, margin.y1) == (pytest.approx(-0.5), pytest.approx(0.5))
    # A loss of 39 points beside one of 0.1: logarithmic beyond two points.
    assert axes.get_yscale() == "symlog"


def test_less_is_better_points_up_and_a_score_that_is_no_fraction_is_not_in_points(record, drawn):
    (rows,) = speed_groups(record)
    task = record["quality"][0] | {"metric": "bits_per_byte", "fraction": False, "lower_is_better": True}
    axes = drawn(plots.quality_figure, task, rows, record)
    assert axes.get_ylabel() == "change in bits per byte"
    assert axes.yaxis_inverted()
    assert axes.get_yscale() == "linear"


def test_without_both_a_quality_and_a_speed_there_is_no_drawing(record):
    (rows,) = speed_groups(record)
    task = record["quality"][0] | {"variants": [entry | {"name": "x"} for entry in record["quality"][0]["variants"]]}
    assert plots.quality_figure(task, rows, record, "id") is None


def test_variants_of_one_mechanism_share_a_colour_and_not_a_marker(record):
    layers = [{"layer": 0, "mechanism": "sdpa", "settings": {}}] * 3
    layers += [{"layer": 3, "mechanism": "local", "settings": {}}]
    variants = [{"name": name, "layers": layers} for name in ("a", "b")]
    styles = plots._styles({"variants": variants})
    assert {colour for colour, _ in styles.values()} == {plots.COLOURS["local"]}
    assert len({marker for _, marker in styles.values()}) == 2
