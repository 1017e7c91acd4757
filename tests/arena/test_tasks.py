"""Examples of the arena follow their rules, are the same every time, and wrong data are refused."""

import json
import statistics

import pytest

from approx.arena.options import SIZES, ArenaStage
from approx.arena.tasks import PROCESSOR, halves, material
from approx.errors import ApproxError
from approx.tasks.listops import WORDS

TINY = SIZES["tiny"]


def value_of(words):
    """The value of an expression, by another way than the task's own: from the innermost bracket outwards."""
    words = list(words)
    rules = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda values: int(statistics.median(values)),
        "[SM": lambda values: sum(values) % 10,
    }
    while len(words) > 1:
        end = words.index("]")
        start = max(place for place in range(end) if words[place] in rules)
        words[start : end + 1] = [str(rules[words[start]]([int(word) for word in words[start + 1 : end]]))]
    return int(words[0])


def test_expressions_have_their_values_and_lengths():
    made = material("listops", TINY["listops"], None, "first")
    every = [*made.train, *made.held_out, *made.test]
    assert (len(made.train), len(made.held_out), len(made.test)) == (72, 8, 40)
    for example in every:
        words = [WORDS[symbol] for symbol in example.inputs["input_ids"]]
        assert value_of(words) == example.label
        assert 8 <= len(words) <= 32
    assert len({example.inputs["input_ids"] for example in every}) == len(every) - _shared(made)


def _shared(made):
    """Test expressions that also were drawn for training: each split is drawn by itself."""
    trained = {example.inputs["input_ids"] for example in [*made.train, *made.held_out]}
    return sum(example.inputs["input_ids"] in trained for example in made.test)


@pytest.mark.parametrize("name", ["listops", "image", "pathfinder"])
def test_generated_examples_are_the_same_every_time_and_classes_are_mixed(name):
    one, other = (material(name, TINY[name], None, "first") for _ in range(2))
    assert one.sha256 == other.sha256
    assert len({example.label for example in one.train}) > 1
    assert not {example.id for example in one.train} & {example.id for example in one.test}


def test_each_half_is_as_often_in_one_class_as_in_the_other():
    pairs = halves([(f"d{n}", f"{n}" * 10 + "é" * n) for n in range(1, 6)], 8)
    assert [one.label for one in pairs].count(1) == [one.label for one in pairs].count(0) == 5
    for side in ("input_ids", "second_ids"):
        by_class = [sorted(one.inputs[side] for one in pairs if one.label == label) for label in (0, 1)]
        assert by_class[0] == by_class[1]
    for one in pairs:
        assert (
            one.inputs["second_ids"]
            in {other.inputs["second_ids"] for other in pairs if other.group == one.group and other.label}
        ) == bool(one.label)
    assert max(len(one.inputs["input_ids"]) for one in pairs) == 8
    assert halves([("alone", "one text")], 8) == []


def write_texts(folder, name, count):
    rows = [{"text": f"{n} " + ("good film " if n % 2 else "bad film ") * 9, "label": n % 2} for n in range(count)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_texts_are_bytes_from_both_splits_or_one_file(tmp_path):
    write_texts(tmp_path, "train.jsonl", 60)
    write_texts(tmp_path, "test.jsonl", 20)
    made = material("text", TINY["text"], str(tmp_path), "first")
    assert (len(made.train) + len(made.held_out), len(made.test)) == (60, 20)
    assert all(len(one.inputs["input_ids"]) == 64 for one in made.train)
    one_file = material("text", TINY["text"], str(tmp_path / "train.jsonl"), "first")
    assert len(one_file.test) == 6
    assert "scored on 6 of its examples" in one_file.source
    assert not {one.id for one in one_file.test} & {one.id for one in [*one_file.train, *one_file.held_out]}


def test_retrieval_reads_texts_or_the_pairs_of_the_paper(tmp_path):
    write_texts(tmp_path, "train.jsonl", 60)
    write_texts(tmp_path, "test.jsonl", 20)
    made = material("retrieval", TINY["retrieval"], str(tmp_path), "first")
    assert made.source.startswith("a stand-in for the AAN papers: halves of one text or of two texts")
    assert {len([one for one in made.test if one.label == label]) for label in (0, 1)} == {20}
    for split in ("train", "test"):
        line = "1.0\tA\tB\tb'first \\xc3\\xa9'\tb'second'\n0.0\tA\tC\tplain\tother\n"
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(line * 20)
    official = material("retrieval", TINY["retrieval"], str(tmp_path), "first")
    assert official.source.startswith("the pairs of")
    (first, second) = official.task.encode(official.test[0], PROCESSOR)[0].values()
    assert bytes(symbol - 2 for symbol in first[1:].tolist()) == "first é".encode()
    assert len(second) == 1 + len("second")
    (tmp_path / "new_aan_pairs.test.tsv").write_text("2\tA\tB\tone\ttwo\n")
    with pytest.raises(ApproxError, match=r"new_aan_pairs.test.tsv, line 1: not a label 0 or 1"):
        material("retrieval", TINY["retrieval"], str(tmp_path), "first")


def test_wrong_data_are_refused(tmp_path):
    with pytest.raises(ApproxError, match="pathfinder draws its own pictures and cannot read"):
        material("pathfinder", TINY["pathfinder"], str(tmp_path), "first")
    with pytest.raises(ApproxError, match="pictures of CIFAR-10 have 1,024 pixels, and this size takes 256"):
        material("image", TINY["image"], str(tmp_path), "first")
    (tmp_path / "test.tsv").write_text("2\t[MIN 4 2 ]\n" * 3)
    with pytest.raises(ApproxError, match="looked for train"):
        material("listops", TINY["listops"], str(tmp_path), "first")
    with pytest.raises(ApproxError, match="cannot be shared by 3 heads"):
        material("listops", TINY["listops"], None, "first").task.encoder(
            ArenaStage(hidden=16, heads=3).of("listops"), 0
        )
