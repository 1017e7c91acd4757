"""Settings of tasks: their exact bounds, and the defaults behind published scores."""

import inspect
import re

import pytest

from approx.errors import ApproxError, Exit
from approx.tasks import TASKS, open_task
from approx.tasks.text import tokenised

# Task, setting, minimum, maximum, and other settings that it needs.
BOUNDS = [
    ("squad", "window", 16, None, {"stride": 0}),
    ("squad", "stride", 0, 383, {}),
    ("squad", "stride", 0, 19, {"window": 20}),
    ("squad", "best", 1, None, {}),
    ("squad", "longest_answer", 1, None, {}),
    ("lm", "window", 2, None, {}),
    ("lm", "stride", 1, None, {}),
    ("lm", "stride", 1, 31, {"window": 32}),
    ("lm", "stretch", 1, None, {}),
    ("mlm", "window", 8, None, {}),
    ("mlm", "stretch", 1, None, {}),
    ("listops", "examples", 1, None, {}),
    ("listops", "seed", 0, None, {}),
    ("copy", "length", 4, 131_072, {}),
    ("copy", "symbols", 2, 52, {}),
    ("copy", "examples", 1, None, {}),
    ("copy", "seed", 0, None, {}),
    ("needle", "needles", 1, 32, {}),
    ("needle", "examples", 1, None, {}),
    ("needle", "seed", 0, None, {}),
    ("librispeech/dev-clean", "beams", 1, None, {}),
]
DEFAULTS = {
    "squad": {"window": None, "stride": 128, "best": 20, "longest_answer": 30, "no_answer_margin": 0.0},
    "lm": {"window": None, "stride": None, "stretch": 2000},
    "mlm": {"window": None, "hidden": 0.15, "stretch": 2000},
    "needle": {"length": 2048, "examples": 200, "needles": 8, "seed": 0},
    "copy": {"length": 128, "symbols": 10, "examples": 1000, "seed": 0},
    "listops": {"preset": "long-range-arena", "examples": 2000, "brackets": False, "seed": 0},
}


@pytest.mark.parametrize(("name", "setting", "least", "most", "others"), BOUNDS)
def test_a_whole_number_is_taken_within_its_bounds_and_refused_beyond(name, setting, least, most, others):
    for value in (least, most or 10**6):
        open_task(name, **{setting: value}, **others)
    message = f"Setting '{setting}' of the task '{name}' is {{}}; allowed is a whole number "
    message += f"at least {least}." if most is None else f"from {least} to {most}."
    for value in (least - 1, least + 0.5, *([] if most is None else [most + 1])):
        with pytest.raises(ApproxError, match=re.escape(message.format(value))) as caught:
            open_task(name, **{setting: value}, **others)
        assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("name", "splits"), [("needle", ("dev", "train")), ("copy", ("dev", "train")), ("listops", ("test", "train"))]
)
def test_a_row_that_is_made_depends_on_its_seed_and_split_but_not_on_others(name, splits):
    few, many = (open_task(name, examples=count) for count in (3, 9))
    whole, part = many.load(), many.load(limit=3)
    assert few.load().examples == part.examples == whole.examples[:3]
    assert len({example.id for example in whole.examples}) == 9
    assert (whole.name, whole.subset, part.subset, many.load(limit=10).subset) == (splits[0], False, True, False)
    texts = {
        open_task(name, examples=1, seed=seed).load(split=split).examples[0].inputs["text"]
        for seed in (0, 1)
        for split in splits
    }
    assert len(texts) == 4


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_published_scores(name):
    defaults = {each.name: each.default for each in inspect.signature(TASKS[name]).parameters.values()}
    assert defaults.items() >= DEFAULTS[name].items()


def test_language_modelling_needs_token_offsets():
    with pytest.raises(ApproxError, match=r"object does not give.*tokenizer\.json") as caught:
        tokenised(object(), "a text")
    assert caught.value.exit_code == Exit.UNSUPPORTED
