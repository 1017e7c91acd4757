"""Learned spans in a report: the table, the picture, and nothing where no model has spans."""

from approx.publishing import report, wording
from approx.publishing.plots import spans_figure, spans_table
from typed import record_of


def spanned(record):
    record["variants"][0]["layers"] = [
        {"layer": 0, "mechanism": "adaptive-span", "settings": {}, "spans": [0.0, 100.0], "operations": 0.25},
        {"layer": 1, "mechanism": "adaptive-span", "settings": {}, "spans": [50.0, 512.0], "operations": 0.5},
    ]
    return record_of(record)


def test_the_table_has_the_mean_the_ends_and_the_operations(record):
    made = spanned(record)
    (row,) = spans_table(made.variants)
    assert row == {
        "name": made.variants[0].name,
        "mean": "165.5",
        "shortest": "0",
        "longest": "512",
        "operations": "37.5 %",
    }
    assert f"| {wording.cell(row['name'])} | 165.5 | 0 | 512 | 37.5 % |" in report.markdown([made])


def test_the_picture_shows_each_head(record):
    made = spanned(record)
    drawn = spans_figure(made.variants, "r1-spans")
    assert drawn is not None
    assert drawn in report.html([made])
    longer = made.model_copy(deep=True)
    longer.variants[0].layers[0].spans = [0.0, 101.0]
    assert spans_figure(longer.variants, "r1-spans") != drawn


def test_a_record_without_spans_has_no_section(record):
    made = record_of(record)
    assert spans_table(made.variants) == []
    assert spans_figure(made.variants, "spans") is None
    assert "Attention spans" not in report.html([made]) + report.markdown([made])
