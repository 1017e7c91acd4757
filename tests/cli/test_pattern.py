"""The command `approx pattern`."""

import pytest

from approx.errors import Exit

from .conftest import call

PICTURES = ["flow.png", "flow.svg", "steps.png", "steps.svg"]


def test_pattern_is_described_and_drawn(tmp_path):
    answer = call("pattern", "ltr", "--length", "1024")
    assert answer.code == 0, answer.err
    for figure in ("50,656", "49,632", "33 … 63", "4.73 %", "stride=32"):
        assert figure in answer.out
    assert "Pictures: pattern-ltr-1024/steps.svg" in answer.out
    assert sorted(path.name for path in (tmp_path / "pattern-ltr-1024").iterdir()) == PICTURES


def test_replaces_only_pictures_and_only_with_force(tmp_path):
    ask = ("pattern", "ltr", "-n", "9", "-o", "out")
    assert call(*ask).code == 0
    (tmp_path / "out" / "mine.txt").touch()
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused = call(*ask)
    assert (refused.code, "--force" in refused.err, refused.out) == (Exit.REFUSED, True, "")
    assert call(*ask, "--force").code == 0
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert call(*ask, "--force", "--node", "0").code == 0
    assert (tmp_path / "out" / "flow.svg").read_bytes() != before[tmp_path / "out" / "flow.svg"]


def test_json_is_one_object_with_everything_in_it(tmp_path):
    answer = call(
        "pattern", "strided", "--length", "200", "--causal", "--set", "stride=20", "--json", "-o", "pic tures"
    )
    assert answer.code == 0, answer.err
    figures = answer.json
    assert figures["settings"]["stride"] == 20
    assert (figures["length"], figures["causal"], len(figures["steps"])) == (200, True, 2)
    assert figures["flow"]["full_information"] is True
    assert sorted(figures["files"]) == [f"pic tures/{name}" for name in PICTURES]
    assert all((tmp_path / file).is_file() for file in figures["files"])


@pytest.mark.parametrize("name", ["local", "block", "strided", "fixed", "ltr", "rtl", "longformer", "bigbird", "sinks"])
@pytest.mark.parametrize("length", [1, 70])
def test_every_pattern_is_described_at_any_length(name, length, tmp_path):
    causal = ["--causal"] if name == "sinks" else []
    answer = call("pattern", name, "-n", str(length), "--no-draw", *causal)
    assert answer.code == 0, answer.err
    assert "full information" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_it_is_timed_against_exact_attention():
    speed = call("pattern", "block", "-n", "96", "--no-draw", "--measure", "--device", "cpu", "--json").json["speed"]
    (row,) = speed
    (ours,) = row["variants"]
    assert (row["length"], ours["name"], ours["status"]) == (96, "block", "ok")
    assert ours["ratio"] > 0


@pytest.mark.parametrize(
    ("words", "code", "fragment"),
    [
        (("strded", "-n", "9"), Exit.USAGE, "Did you mean 'strided'?"),
        (("linear", "-n", "9"), Exit.UNSUPPORTED, "has no pattern"),
        (("ltr",), Exit.USAGE, "--length"),
        (("ltr", "-n", "9000"), Exit.USAGE, "1 to 8192"),
        (("ltr", "-n", "9", "--causal"), Exit.UNSUPPORTED, "no causal form"),
        (("ltr", "-n", "9", "--set", "stride"), Exit.USAGE, "--set name=value"),
        (("ltr", "-n", "9", "--set", "stride=0"), Exit.USAGE, "'stride' is 0"),
        (("ltr", "-n", "9", "--block", "0"), Exit.USAGE, "--block"),
        (("ltr", "-n", "900", "--draw-length", "49"), Exit.USAGE, "1 to 48"),
        (("ltr", "-n", "900", "--node", "16"), Exit.USAGE, "0 to 15"),
        (("ltr", "-n", "9", "--measure", "--device", "tpu"), Exit.USAGE, "allowed are auto, cpu, cuda"),
    ],
)
def test_mistake_ends_in_one_line_and_leaves_no_files(words, code, fragment, tmp_path):
    answer = call("pattern", *words)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (code, "", 1), answer
    assert fragment in answer.err
    assert list(tmp_path.iterdir()) == []
