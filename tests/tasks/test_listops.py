"""ListOps: correct values, reproducible rows, lengths within the preset, and the published files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from approx.errors import ApproxError
from approx.tasks import open_task
from approx.tasks.listops import DIGITS, OPERATORS, WORDS, evaluate, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MIN 4 7 2 ]", 2),
        ("[MAX 4 [MIN 9 8 ] 2 ]", 8),
        ("[MED 1 9 4 ]", 4),
        ("[MED 1 4 ]", 2),
        ("[SM 8 7 6 ]", 1),
        ("( ( ( [SM 8 ) [MAX 1 2 ] ) ] )", 0),
        ("7", 7),
    ],
)
def test_expressions_have_the_values_of_the_rules(text, value):
    assert evaluate(parse(text.split())) == value


@pytest.mark.parametrize("text", ["[MIN 4", "4 ]", "[MIN ]", "1 2", "", "[MIN x ]"])
def test_rejects_malformed_expressions(text):
    with pytest.raises(ValueError, match=r"expression|unknown word"):
        parse(text.split())


@given(seed=st.integers(0, 2**20))
def test_generated_rows_are_expressions_with_their_values(seed):
    split = open_task("listops", preset="original", examples=8, seed=seed).load()
    texts = [example.inputs["text"] for example in split.examples]
    assert len(set(texts)) == 8
    for example in split.examples:
        words = example.inputs["text"].split()
        assert set(words) <= set(OPERATORS) | set(DIGITS) | {"]"}
        assert evaluate(parse(words)) == example.label


def test_brackets_are_all_that_bracketed_rows_have_besides():
    plain, bracketed = (
        open_task("listops", examples=1, brackets=brackets).load().examples[0].inputs["text"].split()
        for brackets in (False, True)
    )
    assert [word for word in bracketed if word not in "()"] == plain


def test_long_expressions_have_the_lengths_of_their_preset():
    lengths = [len(example.inputs["text"].split()) for example in open_task("listops", examples=10).load().examples]
    assert all(500 < length < 2000 for length in lengths)


def test_both_published_layouts_are_read(tmp_path):
    (tmp_path / "basic_test.tsv").write_text("Source\tTarget\n( ( ( [MIN 4 ) 2 ) ] )\t2\n")
    (tmp_path / "train_d20s.tsv").write_text("2\t( ( ( [MIN 4 ) 2 ) ] )\n")
    for split in ("test", "train"):
        (example,) = open_task("listops").load(tmp_path, split).examples
        assert (example.inputs["text"], example.label) == ("[MIN 4 2 ]", 2)


@pytest.mark.parametrize("line", ["x\t[MIN 4 2 ]", "2 [MIN 4 2 ]", "2\t[MIN four ]", "2\t"])
def test_damaged_lines_are_named(tmp_path, line):
    (tmp_path / "test.tsv").write_text(f"2\t[MIN 4 2 ]\n{line}\n")
    with pytest.raises(ApproxError, match=r"test.tsv, line 2: not an expression with a value"):
        open_task("listops").load(tmp_path)


def test_unknown_presets_splits_and_files_are_refused(tmp_path):
    with pytest.raises(ApproxError, match=r"no preset 'lra'\. Known: original, long-range-arena"):
        open_task("listops", preset="lra")
    with pytest.raises(ApproxError, match="Unknown split 'dev'"):
        open_task("listops").load(split="dev")
    with pytest.raises(ApproxError, match=r"looked for test\*\.tsv .*found no tsv"):
        open_task("listops").load(tmp_path)


def test_the_published_values_are_the_ones_of_the_rules(shared_data):
    examples = open_task("listops", brackets=True).load(shared_data / "listops", limit=1000).examples
    assert set(WORDS) >= {word for example in examples for word in example.inputs["text"].split()}
    assert all(evaluate(parse(example.inputs["text"].split())) == example.label for example in examples)
