"""Beam search: the likeliest text over all paths, with an n-gram model read from ARPA files."""

import gzip
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.tasks import Example, open_task
from approx.tasks.beam_search import WordBonus, beam_search
from approx.tasks.ngram import END, read_ngram
from approx.tasks.recording import Recording
from tiny_speech import recogniser, speech_processor

ARPA = """\\data\\
ngram 1=6
ngram 2=3

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.2
-1.5\t</s>
-0.7\tA\t-0.5
-0.9\tCAB\t-0.25
-1.1\tCAP

\\2-grams:
-0.1\tA CAB
-0.3\t<s> A
-0.4\tCAB </s>

\\end\\
"""


@pytest.fixture
def arpa(tmp_path):
    path = tmp_path / "words.arpa"
    path.write_text(ARPA)
    return path


def probabilities(*rows):
    return np.log(np.asarray(rows) / np.sum(rows, axis=1, keepdims=True))


@given(st.lists(st.lists(st.floats(0.05, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_finds_the_text_with_the_likeliest_sum_of_paths(rows):
    frames, chances = probabilities(*rows), {}
    for path in itertools.product(range(3), repeat=len(rows)):
        text = tuple(character for character, _ in itertools.groupby(path) if character)
        score = sum(frame[character] for frame, character in zip(frames, path, strict=True))
        chances[text] = chances.get(text, 0) + math.exp(score)
    best = beam_search(frames, 0, beams=1000)
    assert chances[best] == pytest.approx(max(chances.values()))


def test_differs_from_the_likeliest_path():
    # The likeliest path is all blanks, with 0.36; "a" has three paths, with 0.64.
    assert beam_search(probabilities([0.6, 0.4], [0.6, 0.4]), 0, beams=2) == (1,)


@pytest.mark.parametrize(
    ("before", "word", "score"),
    [
        (("<s>",), "a", -0.3),
        (("<s>", "A"), "cab", -0.1),
        (("A",), "CAP", -0.5 - 1.1),
        (("<s>",), "CAB", -0.2 - 0.9),
        (("CAB",), "other", -0.25 - 1.0),
        (("other",), "A", -0.7),
        (("A", "CAB"), END, -0.4),
        (("CAP",), END, -1.5),
    ],
)
def test_an_n_gram_model_backs_off_to_fewer_words(arpa, before, word, score):
    assert read_ngram(arpa).score(before, word) == pytest.approx(score)


def test_models_are_read_packed_in_lower_case_and_without_a_word_for_unknown_ones(arpa, tmp_path):
    packed = tmp_path / "words.arpa.gz"
    packed.write_bytes(gzip.compress(ARPA.lower().encode()))
    assert read_ngram(packed).score(("A",), "CAB") == pytest.approx(-0.1)
    arpa.write_text(ARPA.replace("-1.0\t<unk>\n", ""))
    assert read_ngram(arpa).score((), "other") == pytest.approx(-1.5)


def test_a_model_of_single_words_is_whole(arpa):
    arpa.write_text("\\1-grams:\n-0.7 A\n-1.5 </s>\n\\end\\\n")
    assert read_ngram(arpa).score(("A",), "A") == pytest.approx(-0.7)


def test_words_decide_between_equal_sounds(arpa):
    # A C A B or P: the frames prefer P, the words prefer B.
    spelling, frames = ["<pad>", "|", "A", "B", "C", "P"], []
    for heard in ("A", "|", "C", "A", "BP"):
        chances = [0.01] * 6
        for letter, chance in zip(heard, (0.4, 0.5) if len(heard) == 2 else (0.9,), strict=True):
            chances[spelling.index(letter)] = chance
        frames.append(chances)
    heard = probabilities(*frames)

    def text(bonus=None):
        return "".join(spelling[index] for index in beam_search(heard, 0, 16, bonus))

    assert text() == "A|CAP"
    assert text(WordBonus(read_ngram(arpa), 0.5, 1.5, spelling, 1)) == "A|CAB"
    assert text(WordBonus(read_ngram(arpa), 0.0, 0.0, spelling, 1)) == "A|CAP"


def test_a_task_transcribes_by_beams(arpa, tmp_path):
    processor, config = speech_processor(tmp_path), recogniser().config
    letters = processor.tokenizer.get_vocab()
    outputs = torch.full((1, 7, 32), -6.0)
    for frame, heard in enumerate(["A", "|", "C", "A", "P", "<pad>", "P"]):
        outputs[0, frame, letters[heard]] = 0
    outputs[0, 4, letters["B"]] = outputs[0, 5, letters["B"]] = outputs[0, 6, letters["B"]] = -0.1
    spoken = Example("1-1-0000", {"recording": Recording("", 9_000, 16_000, "", b"")}, "A CAB")

    def said(**settings):
        task = open_task("librispeech/dev-clean", **settings)
        return task.predict(SimpleNamespace(logits=outputs), task.encode(spoken, processor), config)

    assert said() == ["A CAPP"]
    assert said(beams=16, ngram=str(arpa), ngram_weight=2.0) == ["A CAB"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beams": 0}, "allowed is a whole number at least 1"),
        ({"ngram": "words.arpa"}, "Set beams"),
        ({"beams": 8, "ngram": "nowhere.arpa"}, "nowhere.arpa cannot be read"),
        ({"beams": 8, "ngram_weight": "much"}, "allowed is a finite number"),
    ],
)
def test_rejects_impossible_settings(settings, words):
    with pytest.raises(ApproxError, match=words):
        open_task("librispeech/dev-clean", **settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no words"),
        ("two words\n", "has no words"),
        (ARPA.replace("-0.7\tA", "much\tA"), r"line 9: could not convert"),
        (ARPA.replace("A CAB", "A"), r"line 14: 1 words where 2 are expected"),
        (ARPA.replace("\\end\\", ""), "it has no \\\\end"),
        ("\\1-grams:\n-1 <unk>\n-99 <s>\n-1.5 </s>\n\\end\\\n", "has no words"),
        ("\\2-grams:\n-0.1 A CAB\n\\end\\\n", "has no words"),
    ],
    ids=["empty", "text", "no number", "one word", "cut", "no words of its own", "no single words"],
)
def test_damaged_models_are_named(arpa, text, words):
    arpa.write_text(text)
    with pytest.raises(ApproxError, match=words) as caught:
        read_ngram(arpa)
    assert caught.value.exit_code == Exit.UNAVAILABLE
