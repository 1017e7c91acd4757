"""How far a plan is from the base on one part of the data, and what that costs in points."""

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from approx.finetuning.trainer import divergence_of_labels
from approx.measuring.measure import in_memory
from approx.searching.cost import Composer, Judge, _combined
from approx.searching.options import SearchStage
from approx.tasks import Example, open_task
from approx.tasks.task import Split
from tiny_classifier import WORDS, tiny_tokenizer
from zoo import tiny

from .conftest import CANDIDATES


@pytest.fixture(scope="module")
def judge(base, sentences):
    options = {
        "length": 48,
        "budget": "loss<=1",
        "task": "glue/sst2",
        "data": str(sentences),
        "split": "dev",
        "examples": 40,
    }
    return Judge(base, SearchStage(**options), 0)


@pytest.fixture(scope="module")
def converted(base, facts):
    composer = Composer(base, facts)
    return composer.make(composer.everywhere(CANDIDATES[0])).model


def logits(model, part):
    rows = torch.zeros(part.inputs, 2)
    for batch in part.batches:
        with torch.no_grad():
            rows[batch.rows] = model(**batch.inputs).logits
    return rows.double()


@pytest.mark.parametrize("name", ["search", "proof"])
def test_divergence_and_loss_use_the_chosen_part(judge, base, converted, name):
    part = getattr(judge, name)
    target, outputs = logits(base.model, part).log_softmax(-1), logits(converted, part).log_softmax(-1)
    apart = (target.exp() * (target - outputs)).sum(-1).numpy()
    found = judge.measure(converted, part)
    assert found.divergence == pytest.approx(apart.mean(), rel=1e-4)
    assert judge.divergences(converted, part) == pytest.approx(apart, rel=1e-3, abs=1e-6)
    labels = np.array([example.label for example in part.prepared.split.examples])
    owned = labels[part.prepared.owners]
    right = [(x.argmax(-1).numpy() == owned).astype(float) for x in (target, outputs)]
    # The loss is what the base has more, in points of accuracy.
    assert found.loss == pytest.approx(100 * (right[0].mean() - right[1].mean()))
    paired = 100 * (right[0] - right[1])
    assert found.error == pytest.approx(paired.std() / np.sqrt(len(paired)), rel=0.25)


def test_labels_that_do_not_exclude_each_other_are_compared_one_by_one(base, text, converted, monkeypatch):
    monkeypatch.setattr(base.model.config, "problem_type", "multi_label_classification")
    judge = Judge(base, SearchStage(length=24, budget="kl<=1", text=str(text), examples=4), 0)
    target, outputs = logits(base.model, judge.search), logits(converted, judge.search)
    expected = divergence_of_labels(outputs, target).numpy()
    assert judge.divergences(converted, judge.search) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_task_with_custom_outputs_computes_them_with_the_judged_model(judge, base, converted, monkeypatch):
    expected, models = judge.measure(converted, judge.search), []

    def outputs(self, model, inputs):
        models.append(model)
        return model(**inputs)

    monkeypatch.setattr(type(judge.task), "outputs", outputs)
    assert judge.measure(converted, judge.search) == expected
    assert models == [converted] * len(judge.search.batches)


def test_predictions_of_windows_are_combined_with_their_example():
    examples = [Example(str(n), {"context": text}, []) for n, text in enumerate(("the film", "an actor"))]
    read: Any = SimpleNamespace(split=Split("dev", examples, False), owners=[0, 1, 1])
    predictions = [{"spans": [(score, 0, end)], "none": 0.0} for score, end in ((1.0, 3), (1.0, 2), (2.0, 8))]
    assert _combined(open_task("squad"), read, predictions) == ["the", "an actor"]


def test_the_base_loses_nothing(judge, base):
    found = judge.measure(base.model, judge.search)
    assert (found.divergence, found.loss, found.error) == (0.0, 0.0, 0.0)


def test_outputs_of_the_base_are_computed_once_for_each_batch(base, text, converted):
    judge = Judge(base, SearchStage(length=24, budget="kl<=1", text=str(text), examples=4), 0)
    calls = []
    hook = base.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        first = judge.measure(converted, judge.search)
        assert judge.measure(converted, judge.search) == first
        assert len(calls) == 4
        judge.measure(converted, judge.proof)
        assert len(calls) == 8
    finally:
        hook.remove()
    assert (judge.unit, first.loss, first.error) == ("nats", None, None)


def test_units_are_those_of_the_metric(judge):
    assert judge.unit == "points"


def test_a_lower_perplexity_is_no_loss(tmp_path):
    torch.manual_seed(0)
    model = tiny("GPT2LMHeadModel", vocab_size=len(WORDS))
    file = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    file.write_text("\n\n".join(" ".join(random.choice(WORDS[4:], 30)) for _ in range(60)), encoding="utf-8")
    base = in_memory(model, tiny_tokenizer())
    stage = SearchStage(
        length=32,
        budget="loss<=1",
        task="lm",
        data=str(file),
        examples=20,
        settings={"window": 32, "stride": 16, "stretch": 128},
    )
    judge = Judge(base, stage, 0)
    assert judge.unit == "%"
    worse = tiny("GPT2LMHeadModel", vocab_size=len(WORDS))
    worse.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in worse.transformer.ln_f.parameters():
            parameter.mul_(8)
    found = judge.measure(worse, judge.search)
    assert found.loss is not None
    assert found.loss > 0
    # The same pair the other way round gains.
    turned = Judge(in_memory(worse, tiny_tokenizer()), stage, 0)
    gained = turned.measure(model, turned.search).loss
    assert gained is not None
    assert gained < 0
    # Both are percent of the base's score, so they are not the same number.
    assert (1 + found.loss / 100) * (1 + gained / 100) == pytest.approx(1, rel=1e-3)


def test_the_error_of_a_loss_counts_groups_and_not_their_copies(base, converted, tmp_path):
    """Twenty sentences, each three times in one group, are as good as twenty."""
    random = np.random.default_rng(1)
    rows = [f"{' '.join(random.choice(WORDS[4:], random.integers(6, 40)))}\t{random.integers(2)}" for _ in range(40)]
    copies = [f"{row}\t{number}" for number, row in enumerate(rows) for _ in range(3)]
    file = tmp_path / "grouped.tsv"
    file.write_text("\n".join(["text\tlabel\tgroup", *copies]) + "\n", encoding="utf-8")
    stage = SearchStage(length=48, budget="loss<=1", task="text-classification", data=str(file), examples=60)
    judge = Judge(base, stage, 0)
    part = judge.search
    assert part.prepared is not None
    labels = np.array([example.label for example in part.prepared.split.examples])[part.prepared.owners]
    right = [(logits(model, part).argmax(-1).numpy() == labels).astype(float) for model in (base.model, converted)]
    units = [example.unit for example in part.prepared.split.examples]
    lost = 100 * (right[0] - right[1])
    each = np.array([lost[units.index(unit)] for unit in dict.fromkeys(units)])
    assert len(each) == 20
    found = judge.measure(converted, part)
    assert found.loss == pytest.approx(lost.mean())
    assert found.error
    assert 0 < found.error == pytest.approx(each.std() / np.sqrt(20), rel=0.25)


def test_hash_follows_the_examples(base, sentences, text, tmp_path):
    task: dict[str, Any] = {"task": "glue/sst2", "data": str(sentences), "split": "dev", "budget": "loss<=1"}

    def of(seed: int = 0, **options: Any) -> str:
        return Judge(
            base, SearchStage(**{"length": 24, "examples": 12, "calibration": 10, **options}), seed
        ).examples_sha256

    first = of(**task)
    # The goal, the time and the proof change nothing.
    assert of(**{**task, "budget": "loss<=2", "length": 20, "proof": 30, "batch": 3}) == first
    copy = shutil.copytree(sentences, tmp_path / "SST-2")
    assert of(**{**task, "data": str(copy)}) == first
    rows = (copy / "dev.tsv").read_text().splitlines()
    turned = [rows[0], *(row[:-1] + str(1 - int(row[-1])) for row in rows[1:])]
    (copy / "dev.tsv").write_text("\n".join(turned) + "\n")
    others: list[dict[str, Any]] = [
        {"data": str(copy)},
        {"limit": 100},
        {"examples": 13},
        {"calibration": 11},
        {"min_length": 20},
        {"seed": 1},
    ]
    found = [of(**{**task, **other}) for other in others]
    of_text: dict[str, Any] = {"budget": "kl<=1", "text": str(text)}
    found += [of(**of_text), of(**{**of_text, "length": 20})]
    assert len({first, *found}) == 1 + len(found)
