"""Files of another kind than the task reads are refused in words that help."""

import json

import pytest

from approx.errors import ApproxError, Exit
from approx.tasks import open_task
from approx.tasks.recording import Recording


def test_a_file_of_squad_1_is_not_scored_as_squad_2(tmp_path):
    question = {"id": "a", "question": "Who?", "answers": [{"text": "he", "answer_start": 0}]}
    path = tmp_path / "questions.json"

    def write(**more: bool) -> None:
        paragraph = {"context": "he is", "qas": [question | more]}
        path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}), encoding="utf-8")

    write()
    assert len(open_task("squad").load(path).examples) == 1
    with pytest.raises(ApproxError, match=r"is of SQuAD 1\.1.*Use the task squad") as caught:
        open_task("squad_v2").load(path)
    assert caught.value.exit_code == Exit.UNAVAILABLE
    write(is_impossible=False)
    assert len(open_task("squad_v2").load(path).examples) == 1


def test_names_only_the_file_of_a_damaged_recording():
    with pytest.raises(ApproxError, match=r"talk\.flac is not a readable recording") as caught:
        Recording.of("talk.flac", b"text")
    assert "object at" not in str(caught.value)
