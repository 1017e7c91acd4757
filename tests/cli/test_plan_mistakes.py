"""Mistakes in plans: all are reported at once, a line each, with the right exit code."""

import json

import pytest

from approx.errors import Exit
from zoo import tiny

from .conftest import call


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Three causal layers of four heads."""
    folder = tmp_path_factory.mktemp("gpt2") / "base"
    tiny("GPT2LMHeadModel").save_pretrained(folder)
    return folder


MISTAKES = [
    ("-m stridedd", Exit.USAGE, ["Did you mean 'strided'?"]),
    ("-m ltr", Exit.UNSUPPORTED, ["'ltr' has no causal form", "layers 0-2"]),
    ("-m bigbird --heads 1", Exit.UNSUPPORTED, ["'bigbird' has no causal form"]),
    ("-m local --exact-below 8", Exit.UNSUPPORTED, ["a growing cache would mix both"]),
    ("-m sinks --set window=0", Exit.USAGE, ["'window' is 0; allowed is a whole number of at least 1"]),
    ("-m linear --set window=-1", Exit.USAGE, ["'window' is -1"]),
    ("-m longformer --set window=0", Exit.USAGE, ["'window' is 0"]),
    ("-m block --set size=0", Exit.USAGE, ["'size' is 0"]),
    ("-m strided --set mode=sometimes", Exit.USAGE, ["'mode' is 'sometimes'", "interleave"]),
    ("-m clustered --set clusters=0", Exit.USAGE, ["'clusters' is 0"]),
    ("-m exact-topk --set topk=0", Exit.USAGE, ["'topk' is 0"]),
    ("-m performer --set seed=1.5", Exit.USAGE, ["'seed' is 1.5", "a whole number"]),
    ("-m lsh --set seed=-1", Exit.USAGE, ["'seed' is -1"]),
    ("-m improved-clustered --set seed=first", Exit.USAGE, ["'seed' is 'first'"]),
    ("-m local --heads 4", Exit.USAGE, ["Head 4 does not exist: layers 0-2 have heads 0-3"]),
    ("-m local --heads=-5", Exit.USAGE, ["Head -5 does not exist"]),
    ("-m local --heads 0-2,2", Exit.USAGE, ["Heads '0-2,2' name head 2 twice"]),
    ("-m local --heads 3-1", Exit.USAGE, ["Heads '3-1' run backwards", "'1-3'"]),
    ("-m local --heads first", Exit.USAGE, ["'first' is not a head number or range"]),
    ("--plan p.yaml --heads 1", Exit.USAGE, ["belong to --mechanism"]),
    ("--plan p.yaml --recompute", Exit.USAGE, ["belong to --mechanism"]),
]


@pytest.mark.parametrize(("words", "code", "fragments"), MISTAKES, ids=[words for words, *_ in MISTAKES])
def test_mistake_in_a_plan_ends_in_one_line(words, code, fragments, gpt2, tmp_path):
    (tmp_path / "p.yaml").write_text("{mechanism: linear}", encoding="utf-8")
    for command in (("plan", gpt2), ("convert", gpt2, "-o", "out")):
        answer = call(*command, *words.split())
        (line,) = (line for line in answer.err.splitlines() if not line.startswith("["))
        assert (answer.code, answer.out) == (code, ""), answer
        assert line.startswith("error: ")
        assert all(fragment in line for fragment in fragments), line
    assert [path.name for path in tmp_path.iterdir()] == ["p.yaml"]


def test_names_all_mistakes_of_a_plan_at_once(gpt2, tmp_path):
    rules = [
        {"mechanism": "clustered", "heads": "0-9", "settings": {"clusters": 0, "iterations": 0, "seed": "x"}},
        {"mechanism": "local", "layers": 7, "heads": "1,1", "settings": {"left": -1, "right": 1.5}},
        {"mechanism": "exact-topk", "layers": 0, "settings": {"topk": 0, "tpk": 3}},
        {"mechanism": "ltr", "layers": 1},
    ]
    (tmp_path / "p.json").write_text(json.dumps(rules), encoding="utf-8")
    answer = call("plan", gpt2, "--plan", "p.json")
    fragments = [
        "Head 9",
        "Layer 7",
        "'1,1' name head 1 twice",
        "'clusters' is 0",
        "'iterations' is 0",
        "'seed' is 'x'",
    ]
    fragments += ["'left' is -1", "'right' is 1.5", "no setting 'tpk'", "'ltr' has no causal form"]
    lines = answer.err.splitlines()
    assert (answer.code, len(lines)) == (Exit.USAGE, len(fragments)), answer.err
    for fragment in fragments:
        assert sum(fragment in line for line in lines) == 1, fragment
    rules[0]["recompute"], rules[1]["heads"] = "yes", [0, 1]
    (tmp_path / "p.json").write_text(json.dumps(rules), encoding="utf-8")
    lines = call("plan", gpt2, "--plan", "p.json").err.splitlines()
    assert ["1.recompute: true or false is needed" in lines[0], "2.heads: 'all', a number" in lines[1]] == [True, True]


def test_layers_on_both_sides_of_an_exact_one_are_no_range(gpt2):
    lines = call("convert", gpt2, "-m", "local", "--layers", "0,2", "-o", "two").out.splitlines()
    assert [line.split()[:2] for line in lines if " local " in line] == [["0,2", "local"]]
    assert "Left exact: layers 1" in lines


def test_rules_may_overlap_and_the_last_one_wins(gpt2):
    answer = call("plan", gpt2, "-m", "local", "--heads", "0-1", "--layers", "1", "-o", "p.yaml", "--json")
    heads = {part["layer"]: part["heads"] for part in answer.json["layers"]}
    assert heads == {0: "all", 1: "2-3", 2: "all"}
    again = call("plan", gpt2, "--plan", "p.yaml", "--json").json
    assert again == answer.json
    lines = call("plan", gpt2, "-m", "local", "--heads", "0,2-3").out.splitlines()
    shown = [line.split()[:4] for line in lines if "(heads" in line]
    assert shown == [["0-2", "local", "(heads", "0,2-3)"], ["0-2", "sdpa", "(heads", "1)"]]


@pytest.mark.parametrize(
    ("written", "code", "fragment"),
    [
        (None, Exit.UNAVAILABLE, "text.txt cannot be read: No such file"),
        (b"\xff\xfe\x00", Exit.UNAVAILABLE, "line 1: byte 0x00 is not utf-16"),
        (b" \n", Exit.UNAVAILABLE, "text.txt cannot be read: it is empty"),
        # The tiny decoder has no tokenizer; transformers makes an empty one.
        (b"the film is good", Exit.UNAVAILABLE, "the vocabulary is missing"),
    ],
)
def test_rejects_unusable_calibration_text(written, code, fragment, gpt2, tmp_path):
    if written is not None:
        (tmp_path / "text.txt").write_bytes(written)
    answer = call("convert", gpt2, "-o", "out", "-m", "clustered", "--calibrate", "text.txt")
    errors = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert (answer.code, len(errors)) == (code, 1), answer
    assert fragment in errors[0]
    assert not (tmp_path / "out").exists()


def test_a_decoder_is_calibrated_without_any_text(gpt2):
    assert call("convert", gpt2, "-o", "out", "-m", "clustered", "--set", "clusters=3").code == 0


def test_warns_of_a_conversion_that_never_approximates(base):
    answer = call("convert", base, "-o", "out", "-m", "local")
    assert answer.code == 0, answer.err
    assert "the model takes no more than 32: they never approximate." in answer.out


def test_convert_shows_calibration_text_mass_and_warnings(base, tmp_path):
    (tmp_path / "my own.txt").write_text("the film is good, not bad. very dull\n" * 50, encoding="utf-8")
    words = ("convert", base, "-m", "local", "--set", "left=2", "--set", "right=2", "--heads", "0", "--recompute")
    answer = call(*words, "-o", "one", "--calibrate", "my own.txt")
    assert answer.code == 0, answer.err
    assert "captured mass" in answer.out
    receipt = json.loads((tmp_path / "one" / "approx_receipt.json").read_text("utf-8"))
    assert all(0 < mass < 1 for mass in receipt["captured_mass"].values())
    # The text is longer than the positions.
    assert set(receipt["measured_at"].values()) == {32}
    assert "measured on 32 tokens a row, my own.txt." in answer.out
    card = (tmp_path / "one" / "README.md").read_text("utf-8")
    assert "measured on 32 tokens a row, my own.txt." in card
    assert f"| {receipt['errors']['0']:.3f} | {receipt['captured_mass']['0']:.3f} |" in card
    assert [(part["heads"], part["recompute"]) for part in receipt["swapped"][:2]] == [("0", True), ("1", False)]
    config = json.loads((tmp_path / "one" / "config.json").read_text("utf-8"))
    calibration = config["approx"]["history"][0]["calibration"]
    assert calibration["name"] == "my own.txt"
    assert len(calibration["sha256"]) == 64
    answer = call("inspect", "one")
    assert "local on layers all, heads 0 left=2, right=2, calibrated on my own.txt" in answer.out
    answer = call("convert", base, "-o", "two", "-m", "lsh", "--set", "variant=shared", "--layers", "0")
    assert "Warning: lsh with variant 'shared'" in " ".join(answer.out.split())
    assert "captured mass" not in call("convert", base, "-o", "three", "-m", "linear").out
