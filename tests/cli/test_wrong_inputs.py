"""Wrong files, settings and outputs: lines that say what is wrong, the right exit code, and nothing written."""

import shutil
from pathlib import Path

import pytest

from approx.errors import Exit
from bad_checkpoints import CHECKPOINTS, file

from .conftest import call

TASK = ("--task", "glue/sst2", "--data")
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


RECIPES = {
    "empty": ("", "is not a mapping"),
    "a list": ("[1, 2]", "is not a mapping"),
    "a word": ("hello", "is not a mapping"),
    "cut off": ("a: [1, 2\nb: }", "is not valid YAML"),
    "tabs": ("checkpoint:\n\t- x", "cannot start any token"),
    "a key twice": ("title: x\ntitle: y\n", "the key 'title' is given twice"),
    "a bomb": (BOMB, "its aliases stand for"),
    "a value in itself": ("title: &a [*a]\n", "contains itself through an alias"),
    "many digits": ("title: 0x" + "f" * 9_000, "found a number of more than 4,300 digits"),
    "code": ("title: !!python/object/apply:os.mkdir [ran]\n", "could not determine a constructor"),
    "binary": (b"\0\1\2\xff", "not UTF-8 text"),
    "Latin-1": ("title: café".encode("latin-1"), "not UTF-8 text"),
    "UTF-16": ("title: x".encode("utf-16"), "not UTF-8 text"),
    "2 MB": ("title: " + "x" * 2_000_000, "has at most 1,000,000"),
    "deep": ("[" * 3000 + "]" * 3000, "recursion"),
    "an unknown alias": ("title: *x\n", "undefined alias"),
    "wrong types": ("title: 3\n", "title: text is needed, found 3"),
    "an unknown key": ("titel: x\n", "unknown key 'titel'"),
    "no measurement": ("title: x\n", "nothing is measured"),
    "a margin that is no number": ("title: x\nevaluate: {task: lm, margin: .nan}\n", "a finite number is needed"),
    "an unknown mode": ("title: x\nheal: {recover: [mend]}\n", "one of transfer, distill"),
}
DATA = {
    "empty": ("", "0 rows"),
    "a header alone": ("sentence\tlabel\n", "Give a file with a row for each example"),
    "no labels": ("sentence\nfine\n", "no column label"),
    "an unknown label": ("sentence\tlabel\nfine\t7\n", "line 2: unknown label '7'"),
    "a column too many": ("sentence\tlabel\nfine\tx\t1\n", "line 2: 3 columns where 2 are expected"),
    "other columns": ("text\tgold\nfine\t1\n", "no column sentence, label"),
    "binary": (b"\0\xff" * 50, "byte 0xff is not UTF-8"),
    "Latin-1": (
        "sentence\tlabel\ncafé\t1\n".encode("latin-1"),
        "line 2: byte 0xe9 is not UTF-8; in cp1252 the place reads",
    ),
}
RECORDS = {
    "empty": ("", "is damaged"),
    "a list": ("[]", "has no key 'schema'"),
    "null": ("null", "has no key 'schema'"),
    "cut off": ('{"schema": 1, "ti', "is damaged"),
    "of the future": ('{"schema": 99}', "this version of approx reads schema"),
    "binary": (b"\xff\0", "is damaged"),
}
# Options of a conversion to linear attention.
CONVERT = [
    (("--set", "window=1.5"), "allowed is a whole number"),
    (("--set", "window=nan"), "allowed is a whole number"),
    (("--set", "eps="), "a finite number above 0"),
    (("--set", "window=99999999999999999999"), "allowed is a whole number"),
    (("--set", "=3"), "the form is --set name=value"),
    (("--set", ""), "the form is --set name=value"),
    (("--set", "feature_map=7"), "allowed is one of elu"),
    (("--set", "eps=inf"), "a finite number above 0"),
    (("--set", "eps=-1"), "a finite number above 0"),
    (("--set", "nope=1"), "Settings of 'linear': feature_map"),
    (("--layers", "a"), "'a'"),
    (("--layers", ""), "Layers are ''"),
    (("--layers", "1-0"), "1-0"),
    (("--heads", "9"), "9"),
    (("--exact-below", "-1"), "--exact-below"),
    (("--max-length", "0"), "--max-length"),
    (("--max-length", "1e3"), "--max-length"),
    (("--max-length", "99999999999"), "more than 10,000,000 positions"),
    (("--revision", "x"), "which has no revisions"),
    (("--plan", "nowhere.yaml"), "both were given"),
]
# The rest: the words typed, the exit code, part of the message.
OTHERS = [
    (("inspect", ""), 5, "name of the checkpoint is empty"),
    (("inspect", "/"), 5, "config.json is missing"),
    (("inspect", "a/b/c"), 5, "a/b/c does not exist"),
    (("inspect", "../../x"), 5, "../../x"),
    (("inspect", "<script>/x"), 5, "'<script>/x' is neither"),
    (("inspect", "\x1b[31m/x"), 5, r"'\x1b[31m/x' is neither"),
    (("inspect", "x" * 400), 5, "xxx"),
    (("evaluate", "{base}", *TASK, "{data}", "--margin", "nan"), 2, "--margin"),
    (("evaluate", "{base}", *TASK, "{data}", "--margin", "inf"), 2, "a finite number is needed"),
    (("evaluate", "{base}", *TASK, "{data}", "--split", "nope"), 5, "another --split"),
    (
        ("evaluate", "{base}", *TASK, "{data}", "--batch-size", "0"),
        2,
        "--batch-size: a finite number of at least 1 or auto is needed, found 0",
    ),
    (("evaluate", "{base}", *TASK, "{data}", "--seeds", "0"), 2, "--seeds"),
    (("evaluate", "{base}", *TASK, "{data}", "--set", "foo=1"), 2, "foo"),
    (("evaluate", "{base}", *TASK, "{data}", "--against", "./nowhere"), 5, "./nowhere does not exist"),
    (("bench", "{base}", "--lengths", ""), 2, "--lengths"),
    (("bench", "{base}", "--lengths", "8,8,"), 2, "--lengths"),
    (("bench", "{base}", "--lengths", "99999999"), 2, "takes 32 positions"),
    (("bench", "{base}", "--rounds", "0"), 2, "--rounds"),
    (("finetune", "{base}", "-o", "out"), 2, "Training needs examples"),
    (("finetune", "{base}", "-o", "out", *TASK, "{data}"), 5, "train.tsv"),
    (("finetune", "{base}", "-o", "out", *TASK, "{data}", "--recover", "mend"), 2, "found 'mend'"),
    (("finetune", "{base}", "-o", "out", *TASK, "{data}", "--recover", "transfer"), 3, "is exact already"),
    (("finetune", "{base}", "-o", "out", *TASK, "{data}", "--steps", "0"), 2, "--steps: a finite number of at least 1"),
    (("finetune", "{base}", "-o", "out", *TASK, "{data}", "--time-budget", "soon"), 2, "found 'soon'"),
    (("push", "{base}", "me/x", "--dry-run"), 8, "is not converted"),
    (("push", "{converted}", "not a name", "--dry-run"), 2, "The form is owner/name"),
    (("verify", "{base}"), 8, "nothing to verify"),
    (("export", "{converted}", "-o", "out", "--lengths", "x"), 2, "--lengths"),
    (("pattern", "ltr", "-n", "0"), 2, "allowed is 1 to 8192"),
    (("sweep", "nowhere.yaml"), 2, "nowhere.yaml"),
]
OUTPUTS = {
    "a file": (lambda place: (place / "out").write_text("mine"), 8, "is a file"),
    "a full folder": (lambda place: ((place / "out").mkdir(), (place / "out" / "mine").touch()), 8, "exists already"),
    "a link to nowhere": (lambda place: (place / "out").symlink_to(place / "gone"), 8, "is a symbolic link"),
    "below a file": (lambda place: (place / "out").parent.joinpath("out").write_text("mine"), 8, "is a file"),
}


def refused(answer, code, fragment):
    """The lines of a refusal."""
    # Progress, and a note of the first compilation on a machine.
    errors = [line for line in answer.err.splitlines() if not line.startswith(("[", "Compiling C"))]
    assert (answer.code, answer.out) == (Exit(code), ""), answer
    assert errors, answer
    assert all(line.startswith("error: ") for line in errors), answer
    assert fragment in answer.err, answer
    return errors


def files(place):
    return {path.relative_to(place).as_posix() for path in place.rglob("*")}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(kind, base, tmp_path):
    edit, code, fragment = CHECKPOINTS[kind]
    edit(shutil.copytree(base, tmp_path / "bad"))
    before = files(tmp_path)
    assert len(refused(call("convert", "bad", "-o", "out", "-m", "linear"), code, fragment)) == 1
    assert files(tmp_path) == before


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_bad_recipe_is_refused(command, kind, tmp_path):
    content, fragment = RECIPES[kind]
    file("recipe.yaml", content)(tmp_path)
    refused(call(command, "recipe.yaml", "-o", "out"), Exit.USAGE, fragment)
    assert files(tmp_path) == {"recipe.yaml"}


@pytest.mark.parametrize("kind", DATA)
def test_bad_data_are_refused(kind, base, tmp_path):
    content, fragment = DATA[kind]
    file("dev.tsv", content)(tmp_path)
    assert len(refused(call("evaluate", base, *TASK, "dev.tsv", "-o", "q.json"), Exit.UNAVAILABLE, fragment)) == 1
    assert files(tmp_path) == {"dev.tsv"}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_bad_record_is_refused(kind, tmp_path):
    content, fragment = RECORDS[kind]
    file("record.json", content)(tmp_path)
    assert len(refused(call("report", "record.json", "-o", "out"), Exit.UNAVAILABLE, fragment)) == 1
    assert files(tmp_path) == {"record.json"}


@pytest.mark.parametrize(
    ("words", "fragment"), CONVERT, ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else ""
)
def test_a_wrong_option_of_a_conversion_is_refused(words, fragment, base, tmp_path):
    refused(call("convert", base, "-m", "linear", "-o", "out", *words), Exit.USAGE, fragment)
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("words", "code", "fragment"), OTHERS, ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None
)
def test_rejects_a_wrong_name(words, code, fragment, base, converted, data, tmp_path):
    typed = [word.format(base=base, converted=converted, data=data) for word in words]
    assert len(refused(call(*typed), code, fragment)) == 1
    assert files(tmp_path) == set()


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize(
    "words", [("convert", "{base}", "-m", "linear"), ("revert", "{converted}"), ("export", "{base}")]
)
def test_an_output_in_the_way_is_left_alone(words, kind, base, converted, tmp_path):
    make, code, fragment = OUTPUTS[kind]
    make(tmp_path)
    before = files(tmp_path)
    refused(call(*(word.format(base=base, converted=converted) for word in words), "-o", "out"), code, fragment)
    assert files(tmp_path) == before


def test_an_output_inside_its_input_is_refused(base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    before = files(tmp_path)
    refused(call("convert", "base", "-m", "linear", "-o", "base/inside"), Exit.REFUSED, "lies inside the input")
    refused(call("convert", "base", "-m", "linear", "-o", "base", "--force"), Exit.REFUSED, "was not written by approx")
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["with space", "ünïcödé 文", "two\nlines", "<script>", "-dash", "a'b\"c"])
@pytest.mark.sample(2)
def test_strange_names_of_outputs_work(name, base, tmp_path):
    answer = call("convert", base, "-m", "linear", "-o", f"./{name}")
    assert answer.code == Exit.OK, answer
    assert call("inspect", f"./{name}").code == Exit.OK
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_table_has_enough_rows():
    rows = [*CHECKPOINTS, *RECIPES, *RECIPES, *DATA, *RECORDS, *CONVERT, *OTHERS, *OUTPUTS]
    assert len(rows) > 140
    assert not Path("ran").exists()
