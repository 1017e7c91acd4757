"""The plots of a report: points, bands, labels and scales, as matplotlib objects."""

import base64
import io
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from approx.evaluation.record import QualityVariant, Record, Speed
from approx.mechanisms import MECHANISMS
from approx.publishing import plots
from approx.publishing.summary import speed_groups
from approx.publishing.sweep import OverSeeds, QualityRow
from typed import part_of, parts_of, record_of


@pytest.fixture
def drawn(monkeypatch) -> Callable[..., Axes]:
    """Draw a figure of the module and return its axes."""
    all_axes: list[Axes] = []

    def keep(identity: str, description: str, paint: Callable[[Axes], None], inches: tuple[float, float]) -> str:
        axes = Figure(figsize=inches).add_subplot()
        paint(axes)
        all_axes.append(axes)
        return description

    monkeypatch.setattr(plots, "draw", keep)

    def call(figure: Callable[..., object], *arguments: object) -> Axes:
        figure(*arguments, "id")
        return all_axes[-1]

    return call


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in axes.lines}  # type: ignore[arg-type]  # data of lines are pairs of sequences


def test_draws_measured_speeds(record, drawn):
    record = record_of(record)
    (rows,) = speed_groups(record.speed)
    axes = drawn(plots.speed_figure, rows, record)
    curves = lines(axes)
    for name in ("improved-clustered 25", "clustered 25", "linear"):
        measured = [(row.length, entry.ratio) for row in rows for entry in row.variants if entry.name == name]
        assert curves[name] == [(length, ratio) for length, ratio in measured if ratio]
    assert curves["ceiling"] == [(row.length, row.ceiling and row.ceiling.ratio) for row in rows[:4]]
    assert [x for x, _ in curves["local <128> $x$: lost"]] == [2048, 4096]
    named = [
        *("exact", "ceiling", "improved-clustered 25", "clustered 25", "linear"),
        "local <128> $x$, then out of memory",
    ]
    assert sorted(text.get_text() for text in axes.texts) == sorted([*named, "exact: out of memory"])
    heights = sorted(text.xyann[1] for text in axes.texts if text.get_text() in named)  # type: ignore[attr-defined]  # annotations
    # No name is over another.
    assert all(upper - lower > 0.06 for lower, upper in itertools.pairwise(heights))
    assert [line.get_data()[0][0] for line in axes.lines if line.get_marker() == "|"] == [2048, 1024, 512]  # type: ignore[index]  # data are sequences
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length (tokens)", "speed relative to exact attention")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert list(axes.get_xticks()) == [128, 512, 1024, 2048, 4096]
    assert axes.get_xlim() == (128 / 1.12, 4096 * 1.12)
    assert axes.xaxis.get_major_formatter()(2048) == "2,048"
    assert list(axes.get_xticks(minor=True)) == list(axes.get_yticks(minor=True)) == []
    bands = [band.get_paths()[0].vertices for band in axes.collections]
    noise = bands[0]
    assert noise[:, 1].min() == 0.985  # type: ignore[index]  # vertices are an array
    assert noise[:, 1].max() == 1.018  # type: ignore[index]  # as above
    # One band for each variant with a speed, as wide as its interval, and the base against itself.
    assert len(bands) == 5
    interval = rows[0].variants[0].interval or ()
    at_first = bands[1][bands[1][:, 0] == 128]  # type: ignore[index]  # as above
    assert sorted({round(float(y), 9) for y in at_first[:, 1]}) == sorted(round(end, 9) for end in interval)  # type: ignore[index]  # as above


def test_one_length_has_a_row_for_each_variant_with_the_fastest_on_top(record, drawn):
    row = record["speed"][0]
    timed = row["variants"][0]
    ratios = {"slow": 0.8, "quick": 1.4, "middling": 1.1}
    row["variants"] = [
        timed | {"name": name, "ratio": x, "interval": [x - 0.05, x + 0.05]} for name, x in ratios.items()
    ]
    lost = {"name": "large", "status": "out of memory", "median_ms": None, "ratio": None, "interval": None}
    row["variants"].append(timed | lost)
    axes = drawn(plots.speed_figure, parts_of(Speed, row), record_of(record))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["large (out of memory)", "slow", "middling", "quick"]
    marks = [line.get_data() for line in axes.lines if line.get_marker() == "o"]
    assert [(float(x[0]), int(y[0])) for x, y in marks] == [(0.8, 1), (1.1, 2), (1.4, 3)]
    ends = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 1.8]
    assert [float(x[1] - x[0]) for x in ends] == pytest.approx([0.1] * 3)
    assert axes.get_xlabel() == "speed relative to exact attention at 128 tokens"


def test_the_axis_of_ratios_covers_all_values_and_one(record, drawn):
    row = record["speed"][0]
    slow, quick = (row | {"length": length, "ceiling": None, "spread": None} for length in (64, 128))
    near = drawn(plots.speed_figure, parts_of(Speed, row), record_of(record))
    assert near.get_xlim() == (pytest.approx(0.52, abs=0.03), 2.0)
    slow["variants"] = [row["variants"][0] | {"ratio": 0.03, "interval": [0.025, 0.035]}]
    quick["variants"] = [row["variants"][0] | {"ratio": 65.0, "interval": [60.0, 70.0]}]
    axes = drawn(plots.speed_figure, parts_of(Speed, slow, quick), record_of(record))
    low, high = axes.get_ylim()
    assert low <= 0.025 < 70 <= high
    ticks = [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32, 64, 128]
    assert list(axes.get_yticks()) == [tick for tick in ticks if low <= tick <= high]
    words = [axes.yaxis.get_major_formatter()(tick) for tick in (0.25, 0.5, 1, 2, 16)]
    assert words == ["0.25×", "0.5×", "1×", "2×", "16×"]


def test_quality_is_drawn_against_the_speed_of_the_longest_row_with_most_of_both(record, drawn):
    record = record_of(record)
    (rows,) = speed_groups(record.speed)
    task = record.quality[0]
    axes = drawn(plots.quality_figure, task, rows, record)
    names = {entry.name for entry in task.variants}
    points = {name: places[0] for name, places in lines(axes).items() if name in names}
    row = next(row for row in rows if row.length == 1024)
    ratios = {entry.name: entry.ratio for entry in row.variants}
    assert points == {
        entry.name: (pytest.approx(ratios[entry.name]), pytest.approx(100 * entry.difference))
        for entry in task.variants
    }
    assert axes.get_ylabel() == "change in accuracy (points)"
    assert axes.get_xlabel() == "speed relative to exact attention at 1,024 tokens"
    assert not axes.yaxis_inverted()
    margin = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (margin.y0, margin.y1) == (pytest.approx(-0.5), pytest.approx(0.5))
    # A loss of 39 points beside one of 0.1: logarithmic beyond two points.
    assert axes.get_yscale() == "symlog"
    assert set(axes.get_yticks()) <= {-50, -20, -10, -5, -2, -1, 0, 1, 2}
    assert 0 in axes.get_yticks()
    assert [axes.yaxis.get_major_formatter()(tick) for tick in (-50, 0, 1)] == ["−50", "0", "+1"]
    assert list(axes.get_xticks()) == [1, 2]
    low, high = axes.get_xlim()
    assert low == pytest.approx(0.7)
    assert high == pytest.approx(2.0)
    # A point's bars are its intervals, of speed and of quality.
    bars = axes.containers[list(points).index("linear")]
    across, up = (bar.get_segments()[0].tolist() for bar in bars.lines[2])  # type: ignore[attr-defined]  # they are error bars
    (entry,) = (entry for entry in row.variants if entry.name == "linear")
    assert [x for x, _ in across] == pytest.approx(entry.interval)
    assert [y for _, y in up] == pytest.approx([-42.5, -34.7])


def test_small_differences_have_a_plain_axis_with_a_digit_and_no_interval_no_bar(record, drawn):
    task = record["quality"][0] | {"variants": [record["quality"][0]["variants"][0] | {"interval": None}]}
    made = record_of(record | {"quality": [task]})
    axes = drawn(plots.quality_figure, made.quality[0], made.speed, made)
    assert axes.get_yscale() == "linear"
    assert axes.yaxis.get_major_formatter()(0.25) == "+0.2"
    (bars,) = axes.containers
    assert bars.lines[2][1].get_segments()[0].tolist()[0] == pytest.approx(
        bars.lines[2][1].get_segments()[0].tolist()[1]
    )  # type: ignore[attr-defined]  # as above


def test_a_long_name_is_cut(record, drawn):
    name = "a" * 41
    for row in record["speed"][:2]:
        row["variants"] = [row["variants"][0] | {"name": name}]
    record["variants"] = [record["variants"][0] | {"name": name}]
    made = record_of(record)
    assert "a" * 27 + "…" in [text.get_text() for text in drawn(plots.speed_figure, made.speed[:2], made).texts]
    (label,) = drawn(plots.speed_figure, made.speed[:1], made).get_yticklabels()
    assert label.get_text() == "a" * 27 + "…"


def test_the_caption_lists_shown_and_omitted_variants(record):
    record = record_of(record)
    task = record.quality[0]
    (_, caption) = plots.quality_figure(task, record.speed, record, "id") or ("", "")
    assert caption == (
        "glue/sst2 (dev) against speed at 1,024 tokens on CPU, float32, 2 threads, batch 1. "
        "The vertical scale is logarithmic beyond ±2 points. The task's own inputs have fewer than 67 tokens."
    )
    row = record.speed[0]
    for length, labelled in ((66, False), (67, True)):
        drawn = plots.quality_figure(task, [row.model_copy(update={"length": length})], record, "id")
        assert drawn is not None
        assert ("own inputs" in drawn[1]) is labelled


def test_every_colour_belongs_to_a_mechanism_and_can_be_seen_on_white_and_on_black():
    colours = {name: kind.colour for name, kind in MECHANISMS.items() if kind.colour}
    assert plots._facts("colour") == colours
    every = [*colours.values(), *plots._OTHER_COLOURS]
    # Exact attention has two names.
    assert len(set(every)) == len(every) - 1
    for colour in every:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        # About the contrast of 3 to 1 that WCAG 2.2 requires of graphics.
        assert 1.05 / (luminance + 0.05) > 2.9
        assert (luminance + 0.05) / 0.05 > 2.9


def test_lower_is_better_points_up_and_other_scores_keep_their_units(record, drawn):
    record = record_of(record)
    (rows,) = speed_groups(record.speed)
    units = {"metric": "bits_per_byte", "fraction": False, "lower_is_better": True}
    task = record.quality[0].model_copy(update=units)
    axes = drawn(plots.quality_figure, task, rows, record)
    assert axes.get_ylabel() == "change in bits per byte"
    assert axes.yaxis_inverted()
    assert axes.get_yscale() == "linear"


def test_draws_nothing_without_both_quality_and_speed(record):
    record = record_of(record)
    (rows,) = speed_groups(record.speed)
    others = [entry.model_copy(update={"name": "x"}) for entry in record.quality[0].variants]
    task = record.quality[0].model_copy(update={"variants": others})
    assert plots.quality_figure(task, rows, record, "id") is None


def test_variants_of_one_mechanism_share_a_colour_but_no_marker(record):
    layers = [{"layer": 0, "mechanism": "sdpa", "settings": {}}] * 3
    layers += [{"layer": 3, "mechanism": "local", "settings": {}}]
    variants = [{"name": name, "layers": layers} for name in ("a", "b")]
    styles = plots._styles(part_of(Record, variants=variants))
    assert {colour for colour, _ in styles.values()} == {MECHANISMS["local"].colour}
    assert len({marker for _, marker in styles.values()}) == 2


def test_a_margin_far_beyond_all_differences_does_not_cover_the_plot(record):
    for entry in record["quality"][0]["variants"]:
        entry |= {"margin": 40.0}
    made = record_of(record)
    drawn = plots.quality_figure(made.quality[0], made.speed, made, "x")
    assert drawn is not None
    assert "is not shown" in drawn[1]


def test_points_have_their_names_beside_them_and_the_chosen_one_a_ring(record, drawn):
    made = record_of(record)
    axes = drawn(partial(plots.quality_figure, chosen="linear"), made.quality[0], made.speed, made)
    names = {text.get_text(): text.get_fontweight() for text in axes.texts}
    assert set(names) <= {"exact", "improved-clustered 25", "clustered 25", "linear", "local <128> $x$"}
    assert {name for name, weight in names.items() if weight == "bold"} == {"linear"}
    points = lines(axes)
    assert points["chosen"] == points["linear"]
    (exact,) = (line for line in axes.lines if line.get_label() == "exact")
    assert exact.get_color() == MECHANISMS["sdpa"].colour


def test_names_that_have_no_room_are_in_the_caption(record):
    entry, timed = record["quality"][0]["variants"][0], record["speed"][2]["variants"][0]
    names = [f"variant number {number}" for number in range(30)]
    record["variants"] = [record["variants"][0] | {"name": name} for name in names]
    record["quality"] = [record["quality"][0] | {"variants": [entry | {"name": name} for name in names]}]
    record["speed"] = [record["speed"][2] | {"variants": [timed | {"name": name} for name in names]}]
    made = record_of(record)
    (_, caption) = plots.quality_figure(made.quality[0], made.speed, made, "id") or ("", "")
    assert "Without a name for lack of room: variant number" in caption


def test_memory_is_drawn_against_length(record, drawn):
    made = record_of(record)
    (rows,) = speed_groups(made.speed)
    axes = drawn(plots.memory_figure, rows, made)
    assert lines(axes)["exact"] == [(row.length, row.base.peak_mb) for row in rows if row.base.peak_mb]
    assert lines(axes)["linear"][-1] == (4096, 220.0)
    assert plots.memory_figure(rows[:1], made, "id") is None


def test_layers_are_a_heat_map_with_a_row_for_each_variant_that_has_errors(record, drawn):
    made = record_of(record)
    axes = drawn(plots.layers_figure, made.variants)
    measured = [variant.name for variant in made.variants if (variant.receipt or {}).get("errors")]
    assert [label.get_text() for label in axes.get_yticklabels()] == measured
    assert [text.get_text() for text in axes.texts][:5] == ["3", "6", "9", "12", "15"]
    assert plots.layers_figure([], "id") is None


def test_inputs_are_drawn_with_the_share_that_is_approximated(record, drawn):
    for entry in record["quality"][0]["variants"][:2]:
        entry["approximated"] = {"examples": 436, "tokens": 0.6, "pairs": 0.25}
    made = record_of(record)
    axes = drawn(plots.lengths_figure, made.quality[0], made)
    shares, lengths = axes.child_axes
    assert [bar.get_width() for bar in shares.patches] == [50.0, 25.0] * 2  # type: ignore[attr-defined]  # they are bars
    assert [bar.get_height() for bar in lengths.patches] == [250, 622]  # type: ignore[attr-defined]  # as above
    assert [label.get_text() for label in lengths.get_xticklabels()] == ["0–15", "16–66"]
    assert plots.lengths_figure(made.quality[1], made, "id") is None


def test_a_sweep_is_small_multiples_with_the_interval_of_each_plan(monkeypatch):
    tasks = ("one", "two")
    rows = [
        part_of(
            QualityVariant,
            name=plan,
            difference=change,
            interval=[change - 0.01, change + 0.01],
            scores={},
            verdict="x",
        )
        for plan, change in (("local 8", 0.0), ("linear", -0.1))
    ]
    made = [
        QualityRow(
            *("base", row.name, {}, task, "dev", "accuracy", True, False, 10, False, 0, "", 0.9),
            *(OverSeeds(0.9, None, 1), OverSeeds(row.difference, None, 1), -row.difference, row.interval, {}, []),
        )
        for task in tasks
        for row in rows
    ]
    seen: list[Any] = []

    def keep(identity: str, description: str, paint: Callable[[Axes], None], inches: tuple[float, float]) -> str:
        axes = Figure(figsize=inches).add_subplot()
        paint(axes)
        seen.append(axes)
        return "<svg ></svg>"

    monkeypatch.setattr(plots, "draw", keep)
    assert plots.sweep_picture([]) is None
    assert "http://www.w3.org/2000/svg" in (plots.sweep_picture(made) or "")
    panels = seen[0].child_axes
    assert [panel.get_title() for panel in panels] == ["base: one", "base: two"]
    for panel in panels:
        bars = {tuple(round(float(x), 6) for x in line.get_xdata()): line.get_color() for line in panel.lines[1::2]}
        assert list(bars) == [(-1.0, 1.0), (-11.0, -9.0)]
        assert list(bars.values()) == [MECHANISMS["local"].colour, MECHANISMS["linear"].colour]


def test_an_image_of_a_page_has_a_palette_and_the_same_pixels():
    values = np.linspace(0, 1, 30).reshape(5, 6)

    def paint(axes: Axes) -> None:
        axes.imshow(values, cmap="viridis", interpolation="none")

    drawing, _ = plots.draw_files("one", "a picture", paint, (3, 3))
    (text,) = re.findall(r"data:image/png;base64,([^\"]+)", drawing)
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        assert image.mode == "P"
        pixels = np.asarray(image.convert("RGBA"))
    assert np.array_equal(pixels, colormaps["viridis"](values, bytes=True))


def test_letters_of_drawings_are_shared_and_all_else_stays():
    def paint(axes: Axes) -> None:
        axes.plot([1, 2], "o")

    drawings = [plots.draw_files(name, name, paint, (3, 3))[0] for name in ("one", "two")]
    outlines: dict[str, str] = {}
    shared = [plots.share_outlines(drawing, outlines) for drawing in drawings]
    assert sum(map(len, shared)) < 0.7 * sum(map(len, drawings))
    assert len(outlines) == len(set(outlines.values()))
    for before, after in zip(drawings, shared, strict=True):
        assert before.count("<use") == after.count("<use")
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', after)) <= {
            *outlines.values(),
            *re.findall(r'id="([^"]+)"', after),
        }
