"""Running one model over a split: batches that do not fit in memory, and further seeds."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate, predict, prepare
from approx.evaluation.options import EvaluateOptions
from approx.tasks import Example, Split, open_task
from approx.tasks.glue import Glue
from tiny_classifier import tiny_model, tiny_tokenizer
from typed import known

SST2 = open_task("glue/sst2")
SPLIT = Split("dev", [Example(str(row), {"text": "good " * (row + 1)}, row % 2) for row in range(7)], True)


class Parrot(torch.nn.Module):
    """A model that predicts whether the length of an input plus a number is odd; large batches do not fit."""

    def __init__(self, largest: int = 100, more: int = 0) -> None:
        super().__init__()
        self.config, self.dtype, self.sizes = tiny_model(2).config, torch.float32, []
        self.largest, self.more = largest, more

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: torch.Tensor) -> SimpleNamespace:
        self.sizes.append(len(input_ids))
        if len(input_ids) > self.largest:
            raise torch.OutOfMemoryError("out of memory")
        odd = (attention_mask.sum(1) + self.more) % 2
        return SimpleNamespace(logits=torch.nn.functional.one_hot(odd, 2).float())


def test_a_batch_for_which_memory_does_not_suffice_is_halved_until_it_fits():
    subject = Subject("parrot", Parrot(largest=2), tiny_tokenizer())
    prepared = prepare([subject], SST2, SPLIT, batch_size=7)
    # The words are between two special tokens.
    assert predict(subject, SST2, prepared, halve=True) == [(row + 1) % 2 for row in range(7)]
    assert subject.model.sizes == [7, 3, 1, 2, 4, 2, 2]
    with pytest.raises(ApproxError, match=r"a batch of 7 inputs of up to 9 tokens.*--batch-size") as caught:
        predict(subject, SST2, prepared)
    assert caught.value.exit_code == Exit.MISSING


def test_scores_further_seeds_one_by_one():
    raised = []

    @contextmanager
    def reseeded(by: int):
        raised.append(by)
        yield Subject("other", Parrot(more=by), tiny_tokenizer())

    class Given(Glue):
        def check(self, model: object) -> None:
            """Skip the check, since the fake model has no head."""

        def load(self, *_, **__) -> Split:
            return SPLIT

    subjects = {
        "exact": Subject("exact", Parrot(), tiny_tokenizer()),
        "drawn": Subject("drawn", Parrot(), tiny_tokenizer(), reseeded=reseeded),
        "fixed": Subject("fixed", Parrot(), tiny_tokenizer()),
    }
    seen = []
    entry = evaluate(
        subjects, Given("sst2"), EvaluateOptions(seeds=3), progress=lambda done, total: seen.append((done, total))
    )
    drawn, fixed = entry.variants
    # Labels are 0, 1, 0, …: the model itself is always wrong, with seed + 1 always right, with seed + 2 wrong again.
    assert raised == [1, 2]
    assert drawn.scores["accuracy"] == 0.0
    assert known(drawn.seeds).scores == [0.0, 1.0, 0.0]
    assert known(drawn.seeds).mean == pytest.approx(1 / 3)
    assert (known(drawn.seeds).low, known(drawn.seeds).high) == (0.0, 1.0)
    assert known(fixed.seeds).scores == []
    assert seen[-1] == (7 * 5, 7 * 5)
