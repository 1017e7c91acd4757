"""Layers that move the outputs most stay exact: measured, chosen before training, and said everywhere."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from approx.checkpoints import checkpoint
from approx.checkpoints.history import KeptExact, LayerDivergence, read_receipt, trainings
from approx.conversion import surgery
from approx.conversion.calibration import exactly
from approx.conversion.convert import convert, revert
from approx.conversion.verify import verify
from approx.errors import ApproxError, Exit
from approx.evaluation.record import Trained
from approx.finetuning import finetune
from approx.finetuning.divergence import of_layers
from approx.finetuning.finetune import finetune_folder, prepare_training, rehearse
from approx.finetuning.trainer import without_targets
from approx.planning.plan import Plan
from approx.planning.rule import Rule
from approx.publishing.plots import training_table
from forms import HEDGEHOG
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_study import LABELS
from tiny_training import interrupt, model_of, options_of, trained, write_sst2
from typed import known

WINDOW = Plan.of("local", left=0, right=0)


def stock(matters: int | None) -> Any:
    """A BERT of two layers whose attention moves its outputs; of one layer, unless both matter, it adds nothing."""
    torch.manual_seed(0)
    model = tiny_model(2, LABELS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
        if matters is None:
            return model
        for name in ("weight", "bias"):
            model.get_parameter(f"bert.encoder.layer.{1 - matters}.attention.output.dense.{name}").zero_()
    return model


def converted(matters: int, plan: Plan = WINDOW) -> Any:
    model = stock(matters)
    surgery.convert(model, plan)
    return model


def layers_of(model: Any) -> list[int]:
    return [site["layer"] for site in model.config.approx["sites"].values()]


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.randint(4, 14, mask.shape), "attention_mask": mask.long()}


def test_the_divergence_of_a_layer_is_that_of_a_model_with_only_that_layer_converted():
    base = stock(None)
    batches = [batch_of(9, 5), batch_of(7)]
    whole = copy.deepcopy(base)
    surgery.convert(whole, WINDOW)
    before = {name: x.clone() for name, x in whole.state_dict().items()}
    expected = []
    for layer in range(2):
        one = copy.deepcopy(base)
        surgery.convert(one, Plan.of("local", layer, left=0, right=0))
        with torch.no_grad():
            apart = [
                F.kl_div(
                    one(**x).logits.double().log_softmax(-1), base(**x).logits.double().softmax(-1), reduction="none"
                )
                for x in batches
            ]
        expected.append(float(torch.cat(apart).sum(-1).mean()))
    for teacher in (None, base):
        found = of_layers(whole, batches, teacher)
        assert [one.layer for one in found] == [0, 1]
        assert [one.divergence for one in found] == pytest.approx(expected, rel=1e-3)
    assert {one.mechanism for one in found} == {"local"}
    assert min(expected) > 1e-3
    # Nothing of the model is changed: it runs as it was converted.
    assert all(torch.equal(x, before[name]) for name, x in whole.state_dict().items())
    assert whole.config.approx["sites"].keys() == {f"encoder.layer.{n}.attention.self" for n in (0, 1)}


@pytest.mark.parametrize("matters", [0, 1])
def test_the_layer_that_matters_most_stays_exact(matters, sst2, tmp_path):
    model = converted(matters)
    reported: list[tuple[str, int, int]] = []
    done = trained(
        model,
        tmp_path / "work",
        options_of(sst2, steps=2, keep_exact=1),
        progress=lambda *words: reported.append(words),
    )
    assert [n for what, n, total in reported if what == "compare the layers" and total == 72] == list(range(72))
    kept = done.kept_exact
    assert kept.numbers == [matters]
    assert layers_of(model) == [1 - matters]
    moved = {one.layer: one.divergence for one in kept.layers}
    assert moved[matters] > 1e-3
    assert moved[1 - matters] == 0.0
    assert (kept.unit, kept.inputs) == ("nats", 72)
    assert kept.sentence.startswith(f"Layer {matters} stays exact: converted alone, it moves the outputs by ")
    # The layer that is left changes nothing, so that the start scores as the exact model does.
    assert done.before == done.exact


def test_mechanisms_are_fitted_for_the_comparison_and_put_back(sst2):
    model = stock(None)
    surgery.convert(model, Plan.of("linear", **{**HEDGEHOG, "window": 1}))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    made = prepare_training(model, tiny_tokenizer(), options_of(sst2, keep_exact=1))
    kept = known(made.kept_exact)
    assert kept.steps == 10
    assert ", after 10 steps of transfer)." in kept.sentence
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    whole = stock(None)
    surgery.convert(whole, Plan.of("linear", **{**HEDGEHOG, "window": 1}))
    batches = [without_targets(made.data.batch([row], 0)) for row in range(kept.inputs)]
    as_converted = of_layers(whole, batches)
    assert all(fitted.divergence < 0.9 * one.divergence for fitted, one in zip(kept.layers, as_converted, strict=True))


def test_the_table_is_in_words_of_one_layer_and_of_several():
    layers = [LayerDivergence(n, "linear", x, kept=n in (1, 2)) for n, x in enumerate((0.06, 0.78, 0.67, 0.25))]
    assert KeptExact("nats", 20, layers).sentence == (
        "Layers 1, 2 stay exact: converted alone, they move the outputs by 0.78 and 0.67 nats, the others by at most "
        "0.25 (20 training inputs)."
    )
    assert json.loads(json.dumps(KeptExact("nats", 20, layers[:2]).layers[1].__dict__))["kept"] is True


def test_a_mode_without_anything_left_to_train_is_left_out(sst2, tmp_path):
    plan = Plan((Rule("local", settings={"left": 0, "right": 0}), Rule("linear", "1", {**HEDGEHOG, "window": 1})))
    options = options_of(sst2, recover=None, keep_exact=1, limit=24)
    for matters, modes in ((1, ["distill"]), (0, ["transfer", "distill"])):
        model = converted(matters, plan)
        made = prepare_training(model, tiny_tokenizer(), options)
        assert [phase.mode for phase in made.phases] == modes
        assert not [
            name for phase in made.phases for name in phase.trained if name not in dict(model.named_parameters())
        ]
    options = options_of(sst2, recover=["transfer"], keep_exact=1, limit=24)
    with pytest.raises(ApproxError, match="local has none"):
        prepare_training(converted(1, plan), tiny_tokenizer(), options)


def test_what_reads_tokens_still_gets_them(sst2, tmp_path):
    settings = {"window": 1, "global_tokens": "question", "separator": 4}
    model, again = stock(None), stock(None)
    surgery.convert(model, Plan.of("longformer", **settings))
    trained(model, tmp_path / "work", options_of(sst2, steps=1, keep_exact=1, limit=24))
    # The first token is global, so that the last layer does not change what is read of it.
    assert layers_of(model) == [1]
    inputs = batch_of(12)
    inputs["input_ids"][0, 3:] = 5
    inputs["input_ids"][0, 4] = 4
    surgery.convert(again, Plan.of("longformer", 1, **settings))
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        hidden = model.bert(**inputs)[0]
        assert torch.equal(hidden, again.bert(**inputs)[0])
        with exactly(model):
            assert not torch.allclose(hidden, model.bert(**inputs)[0])


@pytest.mark.parametrize(
    ("made", "options", "code", "message"),
    [
        (lambda: model_of(None), {"keep_exact": 1}, Exit.UNSUPPORTED, "chooses among converted layers"),
        (model_of, {"keep_exact": 2}, Exit.USAGE, "2 converted layers. Keep at most 1"),
        (model_of, {"keep_exact": 1, "limit": 8, "recover": ["task"]}, Exit.UNSUPPORTED, "no converted layer changes"),
    ],
)
def test_refuses_what_leaves_no_choice(made, options, code, message, sst2):
    model = made()
    if "limit" in options:
        surgery.revert(model)
        # A window as long as the inputs is exact.
        surgery.convert(model, Plan.of("local", left=40, right=40))
    with pytest.raises(ApproxError, match=message) as caught:
        prepare_training(model, tiny_tokenizer(), options_of(sst2, **options))
    assert caught.value.exit_code == code


def test_weights_that_were_trained_need_a_teacher(sst2):
    model = converted(0)
    step = {"action": "finetune", "approx": "1", "base": {"name": "b", "revision": None, "weights_sha256": "0"}}
    step |= {"recover": ["task"], "task": None, "data_sha256": "0", "examples": 1, "held_out": 1, "steps": 1}
    step |= {"seconds": 1.0, "seed": 0, "measure": "loss", "exact": None, "before": None, "after": None, "options": {}}
    model.config.approx["history"] = [step]
    with pytest.raises(ApproxError, match=r"not its base\. Name the base with --teacher"):
        prepare_training(model, tiny_tokenizer(), options_of(sst2, keep_exact=1))
    made = prepare_training(model, tiny_tokenizer(), options_of(sst2, keep_exact=1, limit=24), stock(0))
    assert known(made.kept_exact).numbers == [0]


def test_kept_layers_alone_may_meet_the_budget(sst2, tmp_path):
    model = converted(0)
    options = options_of(sst2, keep_exact=1, budget="loss<=0")
    state = {name: x.clone() for name, x in model.state_dict().items()}
    done = trained(model, tmp_path / "work", options)
    assert (done.phases, done.steps, done.helped) == ([], 0, None)
    assert layers_of(model) == [1]
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_a_resumed_training_keeps_the_same_layers_and_compares_none_again(sst2, tmp_path, monkeypatch):
    options = options_of(sst2, recover=["task"], steps=6, evaluate_every=2, keep_exact=1, limit=24)
    whole = trained(uninterrupted := converted(1), tmp_path / "whole", options)

    interrupt(converted(1), tmp_path / "work", options, 3)
    with pytest.raises(ApproxError, match="other options"):
        trained(converted(1), tmp_path / "work", options.model_copy(update={"keep_exact": None}), resume=True)
    with monkeypatch.context() as patch:
        patch.delattr(finetune.divergence, "of_layers")
        done = trained(model := converted(1), tmp_path / "work", options, resume=True)
    assert done.kept_exact == whole.kept_exact
    assert layers_of(model) == [0]
    assert all(torch.equal(x, uninterrupted.state_dict()[name]) for name, x in model.state_dict().items())


def test_a_training_of_a_version_without_the_option_goes_on(sst2, tmp_path):
    options = options_of(sst2, steps=6, evaluate_every=2)

    interrupt(model_of(), tmp_path / "work", options, 3)
    file = tmp_path / "work" / "training.json"
    state = json.loads(file.read_text())
    del state["about"]["options"]["keep_exact"], state["kept_exact"]
    file.write_text(json.dumps(state))
    assert trained(model_of(), tmp_path / "work", options, resume=True).steps == 6


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    stock(1).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    convert(folder / "base", folder / "converted", WINDOW)
    write_sst2(folder)
    return folder


def test_the_folder_says_which_layers_stay_exact_and_why(study, tmp_path):
    options = options_of(str(study / "SST-2"), steps=2, keep_exact=1)
    planned = rehearse(study / "converted", options)
    done = finetune_folder(study / "converted", tmp_path / "healed", options)
    assert done.kept_exact == planned.kept_exact
    assert all(check.passed is not False for check in done.checks)
    opened = checkpoint.load(tmp_path / "healed")
    assert layers_of(opened.model) == [0]
    assert [step.kept_exact for step in trainings(opened.model.config.approx)] == [done.kept_exact]
    receipt = read_receipt(tmp_path / "healed")
    assert receipt is not None
    assert (receipt.left, [part.layer for part in receipt.swapped], list(receipt.errors or {})) == ([1], [0], [0])
    sentence = known(done.kept_exact).sentence
    assert sentence in (tmp_path / "healed" / "README.md").read_text()
    details = {check.name: check.detail for check in verify(tmp_path / "healed").checks}
    assert sentence[1:].rstrip(".") in details["attention is really replaced"]
    stated = {key: value for key, value in done.to_data().items() if key in Trained.model_fields}
    row = training_table(Trained.model_validate({"name": "local, healed", **stated}))
    assert row["kept_exact"] == (
        f"Layers that stay exact, with what each moves the outputs by if it alone is converted (nats, 72 training inputs): "
        f"1 ({known(done.kept_exact).layers[1].divergence:.3f}); the others: 0 (0.000)."
    )
    revert(tmp_path / "healed", tmp_path / "base", force=True)
    assert not checkpoint.load(tmp_path / "base").source.converted
    # Again from there: of one converted layer none can be chosen.
    with pytest.raises(ApproxError, match=r"1 converted layer\. Leave it out"):
        finetune_folder(tmp_path / "healed", tmp_path / "again", options)
