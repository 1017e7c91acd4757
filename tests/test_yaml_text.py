import pytest
import yaml

from approx import yaml_text
from approx.errors import ApproxError, shown
from approx.mechanisms.mechanism import whole_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("2E3", 2000.0),
        ("-.5e1", -5.0),
        ("1.5", 1.5),
        ("12", 12),
        ("e5", "e5"),
        ("1e", "1e"),
        ("0x1e", 30),
    ],
)
def test_reads_numbers_as_yaml_1_2(text, value):
    document = yaml_text.load(f"x: {text}")
    assert document.data == {"x": value}
    assert type(document.data["x"]) is type(value)
    assert not list(document.repeated)


def test_finds_a_repeated_key_at_every_depth():
    document = yaml_text.load("a: 1\nb: {c: 1,\n  c: 2}\nd: &d [{e: 1, e: 2}]\nf: *d\na: 2\n")
    assert sorted(document.repeated) == [(3, "c"), (4, "e"), (6, "a")]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 1),
        (("a",), 1),
        (("b", 0), 3),
        (("b", 1, "c"), 5),
        (("b", 7), 2),
        (("b", 1, "c", "d"), 5),
        (("e",), 6),
        (("e", "x"), 1),
    ],
)
def test_every_value_has_its_line(path, line):
    document = yaml_text.load("a: &a {x: 1}\nb:\n  - 1\n  - y: 2\n    c: 3\ne: *a\n")
    assert document.line(path) == line


@pytest.mark.parametrize(
    "text",
    ["a: [1", "!!binary aGk=", "!!set {a}", "!!int ''", "!!bool maybe", "!!timestamp 2024-01-01", "[" * 5000, "[a]: b"],
)
def test_rejects_invalid_yaml(text):
    with pytest.raises(yaml.YAMLError):
        yaml_text.load(text)


def test_dates_are_text_as_in_json():
    assert yaml_text.load("a: 2024-01-01\nb: [2001-12-14t21:59:43.10-05:00]").data == {
        "a": "2024-01-01",
        "b": ["2001-12-14t21:59:43.10-05:00"],
    }


def test_keys_that_override_merged_ones_are_not_repeated():
    document = yaml_text.load("a: &a {b: 1, c: 2}\nd:\n  <<: *a\n  b: 3\n")
    assert document.data["d"] == {"b": 3, "c": 2}
    assert document.repeated == ()
    assert document.line(["d", "b"]) == 4
    assert document.line(["d", "c"]) == 1
    assert yaml_text.load("a: &a {b: 1}\nd:\n  <<: *a\n  b: 3\n  b: 4\n").repeated == ((5, "b"),)


def doubled(times, first="[1]", merge=False):
    """A text whose values are twice those of the line before."""
    lines = [f"a0: &a0 {first}"]
    for number in range(times):
        twice = f"[*a{number}, *a{number}]"
        lines.append(
            f"a{number + 1}: &a{number + 1} {{<<: {twice}, b: *a{number}}}"
            if merge
            else f"a{number + 1}: &a{number + 1} {twice}"
        )
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (doubled(60), "its aliases stand for"),
        (doubled(30, "{c: 1}", merge=True), "its aliases stand for"),
        (doubled(150), "its aliases stand for"),
        ("a: &a {b: *a}", "contains itself"),
        ("[" * 101 + "]" * 101, "nested"),
        ("a: " + "{b: " * 150 + "1" + "}" * 150, "nested"),
    ],
)
def test_refuses_exploding_aliases_and_deep_nesting(text, said):
    with pytest.raises(yaml.YAMLError, match=said):
        yaml_text.load(text)


def test_reads_many_values_that_are_all_written_out():
    assert len(yaml_text.load("\n".join(f"- {number}" for number in range(20_000))).data) == 20_000


def test_a_value_in_a_message_is_short_however_much_it_repeats():
    value = ["x"]
    for _ in range(60):
        value = [value, value]
    assert len(shown(value)) <= 60
    assert shown([1, 2, "three"]) == "[1, 2, 'three']"
    assert shown(16**9_000) == "a number of more than 4,300 digits"
    with pytest.raises(ApproxError, match=r"Setting 'window' is \[\[\["):
        whole_number("window", value, 1)
