"""The parts of a measurement: device, base, margin, lengths, and the record."""

import copy
import json
from typing import Any

import pytest
import torch

from approx.checkpoints.receipt import RECEIPT, Check, Receipt
from approx.conversion import convert
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.measuring import measure, variants
from approx.planning.plan import Plan, Rule
from approx.recipe import BASE
from tiny_study import tiny_checkpoint, tiny_data
from typed import known


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, a variant with one exact layer, and data."""
    folder = tmp_path_factory.mktemp("measure")
    base = tiny_checkpoint(folder / "base")
    convert.convert(base, folder / "variant", Plan((Rule("local", "1", settings={"left": 1, "right": 1}),)))
    return base, folder / "variant", tiny_data(folder)


@pytest.fixture
def opened(folders):
    base, variant, _ = folders
    return measure.open_all({BASE: str(base), "local": str(variant)}, "cpu", "auto")


def logits(model):
    ids = torch.arange(2, 8).repeat(2, 1)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_whatever_the_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert measure.choose_device("auto") == measure.choose_device("cpu") == "cpu"
    with pytest.raises(ApproxError, match="torch sees no GPU") as told:
        measure.choose_device("cuda")
    assert told.value.exit_code == Exit.MISSING


def test_processes_of_one_machine_take_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measure.choose_device("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert measure.choose_device("auto") == measure.choose_device("cuda") == "cuda:1"
    assert measure.choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "told"), [("tpu", "auto", "device 'tpu'"), ("cpu", "int8", "dtype 'int8'")]
)
def test_other_devices_and_dtypes_are_refused(folders, device, dtype, told):
    with pytest.raises(ApproxError, match=f"The {told} is unknown; allowed are"):
        measure.open_all({BASE: str(folders[0])}, device, dtype)


def test_a_dtype_that_is_asked_for_is_that_of_the_model(folders):
    (one,) = measure.open_all({BASE: str(folders[0])}, "cpu", "bfloat16").values()
    assert one.model.dtype == torch.bfloat16


def test_under_exact_attention_a_variant_computes_what_its_base_does(opened):
    base, variant = opened.values()
    assert not torch.allclose(logits(variant.model), logits(base.model), atol=1e-6)
    exact = measure.under_exact_attention(variant)
    torch.testing.assert_close(logits(exact.model), logits(base.model), rtol=0, atol=1e-6)
    assert exact.source.name == f"{variant.source.name} with exact attention"
    assert not exact.source.converted


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (EvaluateStage(task="glue/sst2", data="here", streaming=True), "glue/sst2 come from here"),
        (EvaluateStage(task="needle", streaming=True), "needle are generated, or come from files"),
    ],
)
def test_only_what_a_hub_holds_is_streamed(stage, words):
    with pytest.raises(
        ApproxError, match=f"Only hub datasets can be streamed, but the examples of {words}. Leave out streaming"
    ):
        measure.task_of(stage)
    assert measure.task_of(stage.model_copy(update={"streaming": False})).name == stage.task
    assert measure.task_of(EvaluateStage(task="glue/sst2", streaming=True)).name == "glue/sst2"


def test_a_batch_is_as_large_as_asked_for_or_chosen():
    assert EvaluateStage(task="needle", batch_size=7).inputs_per_batch == 7
    assert EvaluateStage(task="needle", batch_size="auto").inputs_per_batch is None


def test_a_margin_in_points_is_one_of_fractions_where_the_metric_is_one(opened, folders, own_cache):
    stage = EvaluateStage(task="glue/sst2", data=str(folders[2]), margin=2.5, limit=12)
    told = []
    how: dict[str, Any] = {"seed": 3, "outputs": None, "progress": lambda *what: told.append(what)}
    entry = measure.measure_quality(opened, stage, **how, fresh=True)
    assert [variant.margin for variant in entry.variants] == [0.025]
    unasked = measure.measure_quality(opened, stage.model_copy(update={"margin": None}), **how, fresh=True)
    assert [variant.margin for variant in unasked.variants] == [0.01]
    assert entry.fast_products is False
    assert not any("fast float32" in note for note in entry.notes)
    assert {stage for stage, _, _ in told} == {"evaluate glue/sst2"}
    assert told[-1][1] == told[-1][2] > 0
    # With fresh, nothing is stored.
    assert not [path for path in own_cache.rglob("*") if path.is_file() and "compiled" not in path.parts]
    measure.measure_quality(opened, stage, **how, fresh=False)
    assert [path for path in own_cache.rglob("*") if path.is_file() and "compiled" not in path.parts]


def test_draws_of_variants_are_scored_anew_and_the_base_has_none(opened, folders):
    stage = EvaluateStage(task="glue/sst2", data=str(folders[2]), limit=12, seeds=2)
    entry = measure.measure_quality(opened, stage, seed=0, outputs=None, fresh=True, progress=measure.silent)
    assert [variant.name for variant in entry.variants] == ["local"]


@pytest.mark.parametrize(("label", "name"), [(BASE, "base"), ("local", "variant")])
def test_lengths_beyond_the_positions_are_refused_by_the_name_of_the_model(opened, label, name):
    chosen = opened if label == BASE else {BASE: opened["local"], "local": opened["local"]}
    chosen = {BASE: opened[BASE]} if label == BASE else chosen
    with pytest.raises(ApproxError, match=rf"Length 33 is too long: .*{name} takes 32 positions.*--max-length 33"):
        measure.measure_speed(chosen, BenchStage(lengths=[8, 33]), None, seed=0, progress=measure.silent)


def test_timing_extends_positions_of_copies_and_leaves_the_models(opened):
    before = {label: copy.deepcopy(one.model.state_dict()) for label, one in opened.items()}
    stage = BenchStage(lengths=[8, 40], max_length=40, inputs="synthetic", rounds=3, seconds=0)
    told = []
    rows = measure.measure_speed(opened, stage, None, seed=0, progress=lambda *what: told.append(what))
    assert [row.length for row in rows] == [8, 40]
    assert all(row.inputs == "synthetic" and row.fast_products is False for row in rows)
    assert all([variant.name for variant in row.variants] == ["local"] for row in rows)
    assert all(known(known(row.ceiling).median_ms) > 0 for row in rows)
    assert told == [("bench batch 1, 8 tokens", 0, 2), ("bench batch 1, 40 tokens", 1, 2), ("bench", 2, 2)]
    for label, one in opened.items():
        assert one.model.config.max_position_embeddings == 32
        assert all(torch.equal(x, before[label][name]) for name, x in one.model.state_dict().items())


def test_texts_of_another_kind_of_input_are_refused(opened, folders):
    texts = EvaluateStage(task="librispeech/dev-clean", data=str(folders[2]))
    with pytest.raises(ApproxError, match=r"makes input_values, but .*base takes input_ids") as told:
        measure.measure_speed(opened, BenchStage(lengths=[8]), texts, seed=0, progress=measure.silent)
    assert told.value.exit_code == Exit.UNSUPPORTED


def test_a_record_names_the_base_its_variants_and_their_checks(opened, folders):
    made = measure.make_record(opened, title="a title", seed=5, command="typed", notice="read this")
    base = opened[BASE]
    assert (made.title, made.seed, made.command, made.notice) == ("a title", 5, "typed", "read this")
    assert (made.quality, made.speed, made.crossover, made.recipe) == ([], [], [], None)
    assert made.checkpoint.weights_sha256 == base.weights_sha256
    assert made.checkpoint.parameters == sum(x.numel() for x in base.model.parameters())
    assert (made.checkpoint.layers, made.checkpoint.positions) == (2, 32)
    assert made.environment["threads"] == torch.get_num_threads()
    (variant,) = made.variants
    settings = {"left": 1, "right": 1}
    (layer,) = variant.layers
    assert (layer.layer, layer.mechanism) == (1, "local")
    assert settings.items() <= layer.settings.items()
    assert variant.verified is True
    assert variant.receipt == json.loads((folders[1] / RECEIPT).read_text())


@pytest.mark.parametrize(
    ("passed", "verified"), [([True, None], True), ([True, False], False), ([], False), (None, False)]
)
def test_a_variant_is_verified_if_it_has_checks_and_none_failed(opened, monkeypatch, passed, verified):
    checks = [Check("one", each, "") for each in passed or []]
    receipt = None if passed is None else Receipt(swapped=[], left=[], cross_attention=0, added=[], checks=checks)
    monkeypatch.setattr(variants, "read_receipt", lambda folder: receipt)
    (variant,) = measure.make_record(opened, title="", seed=0, command="").variants
    assert variant.verified is verified
    assert variant.receipt == (None if receipt is None else receipt.model_dump(mode="json"))
