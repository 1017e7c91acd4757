"""The Python API: defaults, names of checkpoints, errors."""

from typing import Any

import pytest
import torch

from approx import api
from approx.checkpoints import checkpoint
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BASE, CEILING, BenchStage, EvaluateStage
from approx.finetuning.options import FinetuneStage
from approx.measuring.measure import label_of
from approx.planning.plan import Plan, Rule
from tiny_study import tiny_checkpoint, tiny_data
from typed import known

OF_ANOTHER_COMMAND: Any = EvaluateStage(task="needle")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A stock checkpoint, a converted one with the reserved name `exact`, and data."""
    folder = tmp_path_factory.mktemp("stages")
    stock = tiny_checkpoint(folder / "stock")
    opened = checkpoint.load(str(stock))
    surgery.convert(opened.model, Plan((Rule("clustered", "1", settings={"clusters": 2, "bits": 8}),)))
    opened.model.save_pretrained(folder / BASE)
    checkpoint.processor(opened.source).save_pretrained(folder / BASE)
    return str(stock), str(folder / BASE), str(tiny_data(folder))


@pytest.mark.slow
def test_a_record_of_speed_stores_the_options(study):
    steps = []
    made = api.bench(
        study[1],
        BenchStage(lengths=[8], rounds=3, seconds=0.0),
        seed=5,
        device="cpu",
        command="typed",
        progress=lambda *at: steps.append(at),
    )
    assert (made.title, made.seed, made.command) == (f"Speed of {BASE} (converted)", 5, "typed")
    assert [one.name for one in made.variants] == [f"{BASE} (converted)"]
    assert [(row.length, row.batch, row.inputs) for row in made.speed] == [(8, 1, "synthetic")]
    assert made.quality == []
    what, done, total = steps[-1]
    assert (what, done) == ("bench batch 1, 8 tokens", total)


def test_distinguishes_only_names_that_every_report_has():
    assert [label_of(f"some/{name}") for name in (BASE, CEILING, "mine")] == [
        f"{BASE} (converted)",
        f"{CEILING} (converted)",
        "mine",
    ]


def test_scores_draws_of_random_mechanisms_and_refuses_them_for_a_stock_checkpoint(study):
    stock, converted, data = study
    asked = {"data": data, "limit": 4, "seeds": 2, "seed": 5, "device": "cpu", "command": "typed"}
    with pytest.raises(ApproxError, match=r"Several seeds need a converted checkpoint, but .*stock is not converted"):
        api.evaluate(stock, "glue/sst2", **asked)
    stage = EvaluateStage(task="glue/sst2", data=data, limit=4, seeds=2)
    made = api.evaluate(converted, stage, against=stock, seed=5, device="cpu", command="typed")
    assert (made.title, made.seed, made.command) == (f"{BASE} (converted) on glue/sst2", 5, "typed")
    (entry,) = made.quality
    assert len(known(entry.variants[0].seeds).scores) == 2
    assert made.speed == []


def test_a_base_that_is_converted_itself_is_refused(study):
    with pytest.raises(ApproxError, match=r"is converted itself\. Name the exact checkpoint"):
        api.evaluate(study[0], "glue/sst2", against=study[1], data=study[2], device="cpu")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: api.evaluate("nowhere", "needle", limt=3), "evaluate: unknown key 'limt'. Did you mean 'limit'?"),
        (lambda: api.evaluate("nowhere", "needle", limit=0), "evaluate.limit: a finite number of at least 1"),
        (lambda: api.evaluate("nowhere", "needle", margin=float("nan")), "evaluate.margin: a finite number"),
        (lambda: api.evaluate("nowhere", "needel"), "Did you mean 'needle'?"),
        (lambda: api.bench("nowhere", []), "bench.lengths: at least one is needed"),
        (lambda: api.bench("nowhere", [8], rounds=1), "bench.rounds: a finite number of at least 3"),
        (lambda: api.bench("nowhere", [8], second=1), "bench: unknown key 'second'. Did you mean 'seconds'?"),
        (lambda: api.finetune("nowhere", "out", OF_ANOTHER_COMMAND), "finetune: a FinetuneStage or its options"),
        (
            lambda: api.finetune("nowhere", "out", FinetuneStage(), steps=1),
            "finetune: a FinetuneStage was passed, and steps besides",
        ),
        (lambda: api.evaluate("nowhere", EvaluateStage(task="needel")), "Did you mean 'needle'?"),
    ],
)
def test_names_a_wrong_option_before_it_opens_anything(call, sentence):
    with pytest.raises(ApproxError) as caught:
        call()
    assert sentence in str(caught.value)
    assert caught.value.exit_code == Exit.USAGE


def test_a_model_in_memory_is_evaluated_as_its_folder_is(study, own_cache):
    stock, converted, data = study
    asked = {"data": data, "limit": 8, "device": "cpu"}
    opened = checkpoint.load(converted)
    processor = checkpoint.processor(opened.source)
    before = {name: tensor.clone() for name, tensor in opened.model.state_dict().items()}
    made = api.evaluate(opened.model, "glue/sst2", processor=processor, **asked)
    assert not (own_cache / "outputs").exists()
    assert [one.name for one in made.variants] == ["ApproxBertForSequenceClassification"]
    assert [(one.layer, one.mechanism) for one in made.variants[0].layers] == [(1, "clustered")]
    # The base is its own weights under exact attention, and the model does not change.
    assert opened.model.state_dict().keys() == before.keys()
    assert type(opened.model).__name__ == "ApproxBertForSequenceClassification"
    of_folder = api.evaluate(converted, "glue/sst2", **asked)
    against = api.evaluate(
        opened.model, "glue/sst2", against=checkpoint.load(stock).model, processor=processor, **asked
    )
    scores = [(one.quality[0].base.scores, one.quality[0].variants[0].scores) for one in (made, of_folder, against)]
    assert scores[0] == scores[1] == scores[2]


@pytest.mark.slow
def test_a_model_in_memory_is_timed(study):
    opened = checkpoint.load(study[1])
    quick = {"rounds": 3, "seconds": 0.0, "device": "cpu"}
    random = api.bench(opened.model, [8], **quick)
    assert [(row.length, row.inputs, len(row.variants)) for row in random.speed] == [(8, "synthetic", 1)]
    with pytest.raises(ApproxError, match="needs its tokenizer"):
        api.bench(opened.model, [8], task="glue/sst2", data=study[2], **quick)
    # The folder's tokenizer, by the folder's name.
    real = api.bench(opened.model, [8], task="glue/sst2", data=study[2], processor=study[0], **quick)
    assert [(row.length, row.inputs) for row in real.speed] == [(8, "real")]


def test_a_processor_may_be_a_folder(study, tmp_path):
    opened = checkpoint.load(study[1])
    tokenizer_only = tmp_path / "tokenizer"
    checkpoint.processor(opened.source).save_pretrained(tokenizer_only)
    asked = {"data": study[2], "limit": 4, "device": "cpu"}
    made = [
        api.evaluate(opened.model, "glue/sst2", processor=one, **asked).quality[0].base.scores
        for one in (checkpoint.processor(opened.source), str(tokenizer_only), tokenizer_only)
    ]
    assert made[0] == made[1] == made[2]
    with pytest.raises(ApproxError, match="nowhere does not exist"):
        api.evaluate(opened.model, "glue/sst2", processor="./nowhere", **asked)


def test_a_model_in_memory_needs_its_processor_and_no_wrapper(study):
    model = checkpoint.load(study[0]).model
    with pytest.raises(ApproxError, match="needs its tokenizer"):
        api.evaluate(model, "glue/sst2", data=study[2])
    with pytest.raises(ApproxError, match="'processor' is of type int; a tokenizer"):
        api.evaluate(model, "glue/sst2", data=study[2], processor=3)
    with pytest.raises(ApproxError, match="A Sequential cannot be measured"):
        api.evaluate(torch.nn.Sequential(model), "glue/sst2", processor=object(), data=study[2])
