import pytest
import yaml

from approx import yaml_text


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
def test_numbers_are_what_they_look_like(text, value):
    data, repeated = yaml_text.load(f"x: {text}")
    assert data == {"x": value}
    assert type(data["x"]) is type(value)
    assert not repeated


def test_a_key_given_twice_is_found_at_every_depth():
    _, repeated = yaml_text.load("a: 1\nb: {c: 1, c: 2}\na: 2\n")
    assert len(repeated) == 2
    assert "'a' is given twice" in " ".join(repeated)


def test_what_is_no_yaml_is_refused():
    with pytest.raises(yaml.YAMLError):
        yaml_text.load("a: [1")
