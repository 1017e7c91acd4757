"""approx generate and approx predict on the command line."""

import pytest

from tiny_decoder import save, tiny_gpt2

from .conftest import call


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return save(tiny_gpt2(mechanism="linear"), tmp_path_factory.mktemp("decoder") / "linear")


def test_generate_shows_both_texts_and_the_first_difference(decoder):
    words = ("generate", decoder, "--prompt", "the film", "--prompt", "not bad", "--max-new-tokens", "6")
    shown = call(*words)
    assert shown.code == 0, shown.err
    assert shown.out.count("is the first that differs") + shown.out.count("tokens of linear are those of exact") == 2
    for text in ("the film (2 tokens)", "not bad (2 tokens)", "tokens/s", "cache, MB", "exact", "linear"):
        assert text in shown.out
    answer = call(*words, "--json").json
    assert [one["prompt"] for one in answer["prompts"]] == ["the film", "not bad"]
    assert list(answer["prompts"][0]["continuations"]) == ["exact", "linear"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "No prompt was given. Give one with --prompt"),
        (("--prompt", "good", "--temperature", "2"), "only with --sample"),
        (("--prompt", "good", "--max-new-tokens", "99"), "at most 63 new tokens"),
    ],
)
def test_generate_reports_mistakes(decoder, words, message):
    answer = call("generate", decoder, *words)
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_predict_shows_labels_side_by_side(base, converted):
    shown = call("predict", converted, "the film is good", "very dull", "--against", base)
    assert shown.code == 0, shown.err
    for text in ("the film is good", "very dull", "exact", "con verted", "negative", "positive"):
        assert text in shown.out
    answer = call("predict", converted, "the film is good", "--json").json
    assert answer["inputs"][0]["predictions"].keys() == {"exact", "con verted"}
    wrong = call("predict", converted, "good", "--question", "who?")
    assert wrong.code == 2
    assert "takes no --question" in wrong.err


def test_bench_decodes(decoder):
    quick = ("--mode", "generate", "--new-tokens", "3", "--lengths", "8", "--rounds", "3", "--seconds", "0")
    answer = call("bench", decoder, *quick)
    assert answer.code == 0, answer.err
    for text in ("Decoding of 3 tokens", "tokens/s", "cache MB", "prompt"):
        assert text in answer.out
