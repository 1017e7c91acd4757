"""Switching off what mechanisms estimate: what is left, what that shows, and a model that is as before."""

import copy
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

import approx
from approx.conversion import surgery
from approx.errors import ApproxError
from approx.evaluation.inputs import Ablation
from approx.evaluation.quality import ablated
from approx.evaluation.record import Quality, QualityVariant
from approx.evaluation.statistics import use_of
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.publishing.report import html, markdown
from approx.publishing.tables import quality_table
from approx.tasks import Example, open_task
from tiny_classifier import WORDS
from tiny_decoder import tiny_gpt2, words
from typed import known, part_of


@pytest.fixture
def text(tmp_path):
    (tmp_path / "test.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS[4:], 900)))
    return str(tmp_path / "test.txt")


def converted(*rules: Rule, weight: float | None = None) -> Any:
    """A decoder whose linear layers weigh far keys by a factor, given by its logarithm; untrained without it."""
    model = tiny_gpt2()
    surgery.convert(model, Plan(rules), calibration=example_inputs(model, 64))
    for name, gate in model.named_parameters():
        if name.endswith("query_gate") and weight is not None:
            gate.data.zero_()[:, -1] = weight
    return model


LINEAR = Rule("linear", "all", settings={"window": 8, "sinks": 2})


def measured(model: Any, text: str, **more: Any) -> tuple[Quality, QualityVariant]:
    base = tiny_gpt2()
    made = approx.evaluate(
        model, "lm", against=base, processor=words(), data=text, ablate=True, settings={"stretch": 200}, **more
    )
    (task,) = made.quality
    entry = task.variants[0]
    for page in (html([made]), markdown([made])):
        assert f"{entry.name}, {known(entry.ablated).part} off" in page
    return task, entry


def test_a_linear_part_without_weight_is_reported_as_unused(text):
    task, entry = measured(converted(LINEAR, weight=-40.0), text)
    cut = known(entry.ablated)
    assert (cut.part, cut.layers, cut.verdict) == ("linear part", [0, 1, 2], "the linear part is unused")
    assert cut.scores["bits_per_byte"] == pytest.approx(entry.scores["bits_per_byte"], rel=1e-6)
    (row,) = quality_table(task)["rows"][0]["more"]
    assert row["name"] == f"{entry.name}, linear part off"
    assert row["text"].startswith("the linear part is unused; with it 0.000 bits per byte (")


def test_a_linear_part_with_weight_is_scored_without_it(text, tmp_path):
    model = converted(LINEAR, weight=1.0)
    before = copy.deepcopy(model.state_dict())
    _, entry = measured(model, text, outputs=tmp_path / "outputs.parquet")
    cut = known(entry.ablated)
    # What is left is attention to the first tokens and the last ones.
    sinks = tiny_gpt2(mechanism="sinks", window=8, sinks=2)
    _, expected = measured(sinks, text)
    assert cut.scores == pytest.approx(expected.scores, rel=1e-5)
    assert known(cut.difference) == pytest.approx(entry.scores["bits_per_byte"] - cut.scores["bits_per_byte"])
    assert cut.verdict in {"the linear part helps", "the linear part harms"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    columns = pyarrow.parquet.read_table(tmp_path / "outputs.parquet").column_names
    assert f"prediction without estimates/{entry.name}" in columns


@pytest.mark.parametrize(
    ("mechanism", "settings", "why"),
    [
        ("sinks", {"window": 8}, "its mechanisms weigh or skip each key and estimate none"),
        ("linear", {"window": 0, "sinks": 0}, "have no exact key besides what they estimate"),
    ],
)
def test_says_why_there_is_nothing_to_switch_off(text, mechanism, settings, why):
    task, entry = measured(converted(Rule(mechanism, "all", settings=settings)), text)
    cut = known(entry.ablated)
    assert (cut.scores, cut.difference, cut.layers) == ({}, None, [])
    assert cut.verdict.startswith("nothing to switch off: ")
    assert why in cut.verdict
    assert quality_table(task)["rows"][0]["more"][0]["score"] == "–"


def test_a_hybrid_keeps_its_other_layers_and_mixed_parts_have_one_name():
    mixed = converted(
        Rule("linear", "0", settings={"window": 8}),
        Rule("performer", "1", settings={"window": 8}),
        Rule("sinks", "2", settings={"window": 8}),
    )
    found = surgery.estimates(mixed)
    assert (found.part, found.layers, found.why) == ("estimated part", [0, 1], "")
    kinds = [type(block.attn.mechanism) for block in mixed.transformer.h]
    with surgery.without_estimates(mixed):
        names = [type(block.attn.mechanism).__name__ for block in mixed.transformer.h]
    assert names == ["ExactKeys", "ExactKeys", "SinksAttention"]
    assert [type(block.attn.mechanism) for block in mixed.transformer.h] == kinds
    assert surgery.estimates(tiny_gpt2()).why == "the model is not converted"


def test_generates_without_estimates():
    # `linear` decodes from a state, `lsh` from a cache with notes.
    for rule in (LINEAR, Rule("lsh", "all", settings={"window": 8})):
        model, sinks = converted(rule), tiny_gpt2(mechanism="sinks", window=8, sinks=rule.settings.get("sinks", 0))
        ids = torch.arange(4, 14)[None]
        ways: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 12,
            "do_sample": False,
            "pad_token_id": 0,
        }
        whole = model.generate(ids, **ways)
        with surgery.without_estimates(model):
            assert torch.equal(model.generate(ids, **ways), sinks.generate(ids, **ways))
        assert torch.equal(model.generate(ids, **ways), whole)


def test_only_a_converted_model_has_estimates(text):
    with pytest.raises(ApproxError, match=r"is not converted\. Leave out --ablate"):
        approx.evaluate(tiny_gpt2(), "lm", processor=words(), data=text, ablate=True)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((-0.004, 0.003), "the linear part is unused"),
        ((0.0, 0.0), "the linear part is unused"),
        ((-0.02, 0.003), "no effect of the linear part shows"),
        (None, "no effect of the linear part shows"),
        ((0.001, 0.004), "the linear part helps by less than the margin"),
        ((0.004, 0.02), "the linear part helps"),
        ((-0.02, -0.001), "the linear part harms"),
        ((-0.002, -0.001), "the linear part harms by less than the margin"),
    ],
)
def test_verdict_follows_from_interval_and_margin(interval, verdict):
    assert use_of("linear part", interval, 0.01) == verdict


@pytest.mark.parametrize(
    ("changed", "verdict"), [(0, "unused"), (1, "no effect"), (30, "helps")], ids=["none", "few", "many"]
)
def test_the_share_of_answers_that_need_the_part_decides(changed, verdict):
    task, examples = open_task("glue/sst2"), [Example(str(row), {}, 1) for row in range(100)]
    entry = part_of(QualityVariant, margin=0.01, verdict="no loss")
    off: Any = None
    whole, without = [1] * 100, [0] * changed + [1] * (100 - changed)
    cut = ablated(task, examples, Ablation("linear part", [0], off), entry, whole, without, seed=0)
    assert verdict in cut.verdict
    assert cut.scores == {"accuracy": 1 - changed / 100}
    assert known(cut.difference) == pytest.approx(changed / 100)
    entry.verdict = "not tested: exact on 95 % of these inputs"
    again = ablated(task, examples, Ablation("linear part", [0], off), entry, whole, without, seed=0)
    assert again.verdict == entry.verdict
