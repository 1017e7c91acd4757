"""Inputs for timing: real tokens and sounds, joined and cut to size."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.timing import sound_inputs, text_inputs
from approx.tasks import Example, open_task
from approx.tasks.glue import Glue
from approx.tasks.task import Encoding
from tiny_classifier import tiny_tokenizer

SST2 = open_task("glue/sst2")
CLS, SEP = 2, 3
# The tokens of "the film", "is" and "not very good".
CONTENT = [4, 5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Limit memory to a gigabyte: the stream is infinite, so a wrongly cut row would take all memory."""
    resource, status = pytest.importorskip("resource"), Path("/proc/self/status")
    if not status.exists():
        yield
        return
    current = next(
        int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmData:")
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (current + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def made(batch: int, length: int, processor: object = None) -> list[list[int]]:
    texts = [Example(text, {"text": text}, 0) for text in ("the film", "is", "not very good")]
    make = text_inputs(SST2, texts, processor or tiny_tokenizer(), "cpu")
    inputs = make(batch, length)
    assert list(inputs) == ["input_ids"]
    assert inputs["input_ids"].shape == (batch, length)
    return inputs["input_ids"].tolist()


def test_texts_are_joined_between_the_special_tokens_and_go_on_from_row_to_row():
    assert made(2, 5) == [[CLS, *CONTENT[:3], SEP], [CLS, *CONTENT[3:], SEP]]


def test_texts_that_are_too_short_are_used_again():
    assert made(1, 16) == [[CLS, *CONTENT, *CONTENT, *CONTENT[:2], SEP]]


@pytest.mark.parametrize(("length", "expected"), [(1, [CLS]), (2, [CLS, SEP]), (3, [CLS, 4, SEP])])
def test_short_rows_have_the_special_tokens_first(length, expected):
    assert made(1, length) == [expected]


def test_rows_begin_and_end_as_the_tokenizer_has_it():
    plain = tiny_tokenizer()
    plain.backend_tokenizer.post_processor = None
    assert made(2, 3, plain) == [CONTENT[:3], CONTENT[3:]]


def test_single_special_token_comes_first():
    class Marked(Glue):
        def encode(self, example: Example, processor: object, max_length: int | None = None) -> list[Encoding]:
            return [{"input_ids": [CLS]}, {"input_ids": [4, 5]}]

    make = text_inputs(Marked("sst2"), [Example("a", {"text": ""}, 0)], tiny_tokenizer(), "cpu")
    assert make(1, 4)["input_ids"].tolist() == [[CLS, 4, 5, 4]]


def test_texts_of_nothing_but_special_tokens_are_refused():
    with pytest.raises(ApproxError, match="The texts of glue/sst2 have no tokens to time on") as caught:
        text_inputs(SST2, [Example("a", {"text": ""}, 0)], tiny_tokenizer(), "cpu")
    assert caught.value.exit_code == Exit.UNAVAILABLE


class Sounds(Glue):
    """Recordings that are already decoded."""

    input_name = "input_values"

    def encode(self, example: Example, processor: object, max_length: int | None = None) -> list[Encoding]:
        return [{"input_values": example.inputs["sound"]}]

    def collate(self, encodings: list[Encoding], processor: object) -> dict[str, torch.Tensor]:
        return {"input_values": torch.tensor([encodings[0]["input_values"]])}


def test_recordings_are_joined_and_cut_to_as_many_samples_as_give_the_positions():
    examples = [Example("a", {"sound": [1.0, 2.0, 3.0]}, ""), Example("b", {"sound": [4.0, 5.0]}, "")]
    make = sound_inputs(Sounds("sst2"), examples, None, lambda length: 2 * length, "cpu", torch.float64)
    values = make(2, 2)["input_values"]
    assert values.dtype == torch.float64
    # Short recordings are repeated.
    assert values.tolist() == [[1, 2, 3, 4], [5, 1, 2, 3]]
    assert make(1, 1)["input_values"].tolist() == [[1, 2]]
    assert make(1, 5)["input_values"].tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5]]
