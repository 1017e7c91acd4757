"""Two records side by side."""

from approx.publishing.report import compare
from typed import record_of


def test_a_record_compared_with_itself_differs_in_nothing(record):
    made = compare(record_of(record), record_of(record))
    assert (made.differences, made.advice) == ([], [])
    assert {row.verdict for row in (*made.quality, *made.speed)} <= {"no clear difference", "not measured"}


def test_names_differences_with_both_values(record):
    before = record_of(record)
    first = record["variants"][0]
    first["layers"] = [{"layer": 0, "mechanism": "clustered", "settings": {"clusters": 7}}]
    first["verified"] = False
    record["environment"]["torch"] = "9.9"
    record["seed"] = 5
    differences = {name: (one, two) for name, one, two in compare(before, record_of(record)).differences}
    assert differences["torch"] == (before.environment["torch"], "9.9")
    assert differences["seed"] == (str(before.seed), "5")
    assert differences[f"checks of {first['name']}"] == ("verified", "not verified")
    assert differences[f"plan of {first['name']}"][1] == "layers 0: clustered, clusters = 7"
    assert len(differences) == 4


def test_scores_and_speeds_have_intervals_and_the_verdicts_of_both(record):
    before = record_of(record)
    name = before.quality[0].variants[0].name
    entry = record["quality"][0]["variants"][0]
    entry.update(difference=-0.3, interval=[-0.35, -0.25], verdict="loss beyond margin")
    for row in record["speed"]:
        for timed in row["variants"]:
            if timed["name"] == name and timed["ratio"]:
                timed.update(ratio=0.5, interval=[0.49, 0.51])
    made = compare(before, record_of(record))
    scored = next(row for row in made.quality if row.first == name)
    assert scored.verdict == "worse"
    assert "(−35.00 to −25.00), loss beyond margin" in scored.words[1]
    timed = [row for row in made.speed if row.first == name and row.values[1] is not None]
    assert {row.verdict for row in timed} == {"slower"}
    assert all(row.words[1] == "0.50× (0.49 to 0.51), slower" for row in timed)
    assert [(who, after.partition(":")[0]) for who, _, after in made.advice] == [(name, "do not use")]


def test_scores_of_other_examples_or_against_another_base_are_not_compared(record):
    before = record_of(record)
    record["quality"][0]["base"]["scores"] = {"accuracy": 0.5}
    assert "another base" in compare(before, record_of(record)).quality[0].verdict
    record["quality"][0]["examples"] += 1
    assert "other examples" in compare(before, record_of(record)).quality[0].verdict
