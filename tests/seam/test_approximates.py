"""The lengths from which a converted model reports approximation match its outputs, row by row of a padded batch."""

import pytest
import torch

from approx.conversion import surgery
from approx.planning.plan import Plan, Rule
from forms import ELU
from zoo import tiny

LENGTHS = (30, 17, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)

PLANS = {
    "local": Plan.of("local", left=6, right=9),
    "improved-clustered": Plan.of("improved-clustered", clusters=4, topk=9),
    "clustered": Plan.of("clustered", clusters=5),
    "lsh": Plan.of("lsh", cluster=6, rounds=1),
    "never": Plan.of("exact"),
    "always but for one token": Plan.of("linear", **ELU),
    "one layer": Plan.of("local", "2", left=2, right=2),
    "the earliest layer counts": Plan(
        (Rule("local", "0", {"left": 20, "right": 20}), Rule("local", "1", {"left": 4, "right": 4}))
    ),
    "the earliest head counts": Plan(
        (Rule("local", "all", {"left": 4, "right": 4}, heads="1"), Rule("exact", "all", heads="0,2,3"))
    ),
    "steps by heads": Plan.of("strided", stride=6, mode="heads"),
}


def padded(lengths):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 101, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def differing(model, plan, lengths):
    """For each row, whether the converted model's outputs at real tokens differ from the base's."""
    inputs = padded(lengths)
    with torch.inference_mode():
        before = model(**inputs)[0]
        surgery.convert(model, plan)
        after = model(**inputs)[0]
    gap = (after - before).abs().amax(2) * inputs["attention_mask"]
    return (gap.amax(1) > 1e-5).tolist()


@pytest.mark.parametrize(("family", "name"), [*(("BertModel", name) for name in PLANS), ("GPT2Model", "local")])
def test_exactly_the_named_rows_differ_from_the_base(family, name):
    # Uneven attention, so that dropping a key shows.
    model = tiny(family, initializer_range=0.5)
    differs = differing(model, PLANS[name], LENGTHS)
    assert [model.approximates(length, max(LENGTHS)) for length in LENGTHS] == differs
    assert any(differs) == (name != "never")


def test_exact_below_is_decided_by_the_longest_row_of_a_batch():
    plan = Plan.of("local", left=3, right=3, exact_below=10)
    for lengths in ((10, 7, 5, 4), (9, 7, 5, 4)):
        model = tiny("BertModel", initializer_range=0.5)
        differs = differing(model, plan, lengths)
        assert [model.approximates(length, max(lengths)) for length in lengths] == differs
        assert any(differs) == (max(lengths) == 10)


def test_trained_spans_count_as_they_stand():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("adaptive-span", max_span=40, ramp=2))
    assert [model.approximates(length, 60) for length in (41, 42)] == [False, True]
    with torch.no_grad():
        model.base_model.encoder.layer[1].attention.self.mechanism.fraction[2] = 0.25
    assert [model.approximates(length, 60) for length in (11, 12)] == [False, True]
