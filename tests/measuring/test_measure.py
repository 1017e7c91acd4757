"""The parts of a measurement: device, base, margin, lengths, and the record."""

import copy
import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from approx.checkpoints.history import RECEIPT, Check, Receipt
from approx.conversion import convert, surgery
from approx.errors import ApproxError, Exit
from approx.evaluation.bench import crossover
from approx.evaluation.evaluate import fingerprint
from approx.evaluation.options import BASE, CEILING, BenchStage, EvaluateStage
from approx.evaluation.record import Quality, RecipeText, Speed, Trained
from approx.measuring import measure
from approx.measuring.measure import computed_by, identity, in_memory
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.progress import silent
from approx.seam.attention_free import attention_free
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_speech import recogniser, some_utterances, speech_processor, write_utterances
from tiny_study import LABELS, SENTENCES, tiny_checkpoint, tiny_data
from typed import known, part_of
from zoo import tiny


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
    with pytest.raises(ApproxError, match="torch sees no GPU") as caught:
        measure.choose_device("cuda")
    assert caught.value.exit_code == Exit.MISSING


def test_processes_of_one_machine_take_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measure.choose_device("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert measure.choose_device("auto") == measure.choose_device("cuda") == "cuda:1"
    assert measure.choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "message"), [("tpu", "auto", "device 'tpu'"), ("cpu", "int8", "dtype 'int8'")]
)
def test_other_devices_and_dtypes_are_refused(folders, device, dtype, message):
    with pytest.raises(ApproxError, match=f"The {message} is unknown; allowed are"):
        measure.open_all({BASE: str(folders[0])}, device, dtype)


def test_loads_the_model_in_the_requested_dtype(folders):
    (one,) = measure.open_all({BASE: str(folders[0])}, "cpu", "bfloat16").values()
    assert one.model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("hardware", "dtype", "said"), [(False, "auto", True), (True, "auto", False), (False, "float32", False)]
)
def test_half_precision_that_the_processor_lacks_is_said_to_be_slow(
    hardware, dtype, said, tmp_path, monkeypatch, caplog
):
    model = tiny("BertModel").bfloat16()
    model.save_pretrained(tmp_path / "half")
    monkeypatch.setattr(measure, "multiplies_bfloat16", lambda: hardware)
    with caplog.at_level("INFO", "approx.measuring"):
        measure.open_all({BASE: str(tmp_path / "half")}, "cpu", dtype)
    assert ("stored in bfloat16" in caplog.text and "--dtype float32" in caplog.text) == said


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
def test_streams_only_hub_datasets(stage, words):
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
    steps = []
    how: dict[str, Any] = {"seed": 3, "outputs": None, "progress": lambda *what: steps.append(what)}
    entry = measure.measure_quality(opened, stage, **how, fresh=True)
    assert [variant.margin for variant in entry.variants] == [0.025]
    unasked = measure.measure_quality(opened, stage.model_copy(update={"margin": None}), **how, fresh=True)
    assert [variant.margin for variant in unasked.variants] == [0.01]
    assert entry.fast_products is False
    assert not any("fast float32" in note for note in entry.notes)
    assert {stage for stage, _, _ in steps} == {"evaluate glue/sst2"}
    assert steps[-1][1] == steps[-1][2] > 0
    # With fresh, nothing is stored.
    assert not [path for path in own_cache.rglob("*") if path.is_file() and "compiled" not in path.parts]
    measure.measure_quality(opened, stage, **how, fresh=False)
    assert [path for path in own_cache.rglob("*") if path.is_file() and "compiled" not in path.parts]


def test_scores_further_draws_of_variants_but_not_of_the_base(opened, folders):
    stage = EvaluateStage(task="glue/sst2", data=str(folders[2]), limit=12, seeds=2)
    entry = measure.measure_quality(opened, stage, seed=0, outputs=None, fresh=True, progress=silent)
    assert [variant.name for variant in entry.variants] == ["local"]


@pytest.mark.parametrize(("label", "name"), [(BASE, "base"), ("local", "variant")])
def test_lengths_beyond_the_positions_are_refused_by_the_name_of_the_model(opened, label, name):
    chosen = opened if label == BASE else {BASE: opened["local"], "local": opened["local"]}
    chosen = {BASE: opened[BASE]} if label == BASE else chosen
    with pytest.raises(ApproxError, match=rf"Length 33 is too long: .*{name} takes 32 positions.*--max-length 33"):
        next(measure.measure_speed(chosen, BenchStage(lengths=[8, 33]), None, seed=0, progress=silent))


@pytest.mark.slow
def test_timing_extends_positions_of_copies_and_leaves_the_models(opened):
    before = {label: copy.deepcopy(one.model.state_dict()) for label, one in opened.items()}
    stage = BenchStage(lengths=[8, 40], max_length=40, inputs="synthetic", rounds=3, seconds=0)
    steps = []
    rows = list(measure.measure_speed(opened, stage, None, seed=0, progress=lambda *what: steps.append(what)))
    assert [row.length for row in rows] == [8, 40]
    assert all(row.inputs == "synthetic" and row.fast_products is False for row in rows)
    assert all([variant.name for variant in row.variants] == ["local"] for row in rows)
    assert all(known(known(row.ceiling).median_ms) > 0 for row in rows)
    assert list(dict.fromkeys(what for what, _, _ in steps)) == [
        f"bench batch 1, {length} tokens ({row} of 2)" for row, length in ((1, 8), (2, 40))
    ]
    for label, one in opened.items():
        assert one.model.config.max_position_embeddings == 32
        assert all(torch.equal(x, before[label][name]) for name, x in one.model.state_dict().items())


def test_texts_of_another_kind_of_input_are_refused(opened, folders):
    texts = EvaluateStage(task="librispeech/dev-clean", data=str(folders[2]))
    with pytest.raises(ApproxError, match=r"makes input_values, but .*base takes input_ids") as caught:
        next(measure.measure_speed(opened, BenchStage(lengths=[8]), texts, seed=0, progress=silent))
    assert caught.value.exit_code == Exit.UNSUPPORTED


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
    monkeypatch.setattr(measure, "read_receipt", lambda folder: receipt)
    (variant,) = measure.make_record(opened, title="", seed=0, command="").variants
    assert variant.verified is verified
    assert variant.receipt == (None if receipt is None else receipt.model_dump(mode="json"))


def drawing() -> Any:
    """A model whose mechanisms draw random numbers."""
    model = tiny_model(2, LABELS)
    surgery.convert(model, Plan.of("clustered", clusters=2, bits=8, frozen=False))
    return in_memory(model, tiny_tokenizer())


def test_passes_all_options_to_the_evaluation_of_every_model(opened, tmp_path, monkeypatch):
    opened, asked = {**opened, "drawn": drawing()}, {}

    def evaluate(subjects: Any, task: Any, stage: Any, **more: Any) -> Quality:
        asked.update(more, subjects=subjects, task=task, stage=stage)
        return part_of(Quality, task=stage.task, notes=["read"], margin=None)

    monkeypatch.setattr(measure, "evaluate", evaluate)
    for seeds in (1, 3):
        stage = EvaluateStage(
            task="text-classification", data="a/file.csv", settings={"labels": "a,b"}, seeds=seeds, limit=5
        )
        entry = measure.measure_quality(
            opened, stage, seed=7, outputs=tmp_path / "outputs", fresh=seeds == 3, progress=silent
        )
        assert (entry.notes, entry.settings, entry.fast_products) == (["read"], {"labels": "a,b"}, False)
        assert (asked["seed"], asked["outputs"], str(asked["data"])) == (7, tmp_path / "outputs", "a/file.csv")
        assert (asked["stage"], asked["device"], asked["task"].labels) == (stage, torch.device("cpu"), ("a", "b"))
        assert (asked["ledgers"] is None) == (seeds == 3)
        subjects = asked["subjects"]
        assert {label: one.name for label, one in subjects.items()} == {label: label for label in opened}
        assert all(one.model is opened[label].model for label, one in subjects.items())
        assert [one.approximates is None for one in subjects.values()] == [True, False, False]
        assert [one.approximated_pairs is None for one in subjects.values()] == [True, False, False]
        assert subjects["local"].approximates(8, 8)
        assert not subjects["local"].approximates(2, 2)
        # Only what draws has other draws, and the base is exact.
        assert [one.reseeded is not None for one in subjects.values()] == [False, False, seeds == 3]
        assert len({one.identity for one in subjects.values()}) == 3
        assert all(subject.processor("the film") for subject in subjects.values())


def test_a_base_that_is_converted_itself_has_no_draws(monkeypatch):
    opened = {BASE: drawing()}
    seen: list[Any] = []
    monkeypatch.setattr(
        measure, "evaluate", lambda subjects, task, stage, **more: seen.append(subjects) or part_of(Quality)
    )
    stage = EvaluateStage(task="glue/sst2", data="here", seeds=3)
    measure.measure_quality(opened, stage, seed=0, outputs=None, fresh=True, progress=silent)
    assert seen[0][BASE].reseeded is None


def timed(opened: Any, stage: BenchStage, monkeypatch: Any, texts: Any = None, seed: int = 0) -> tuple[Any, Any]:
    """What is given to the timing, and the rows that are made of one row of three tokens."""
    asked: dict[str, Any] = {}

    def bench(contenders: Any, stage: Any, **more: Any) -> Any:
        asked.update(more, contenders=contenders, stage=stage)
        return [part_of(Speed, length=length) for length in stage.lengths]

    monkeypatch.setattr(measure, "bench", bench)
    rows = list(measure.measure_speed(opened, stage, texts, seed=seed, progress=silent))
    return SimpleNamespace(**asked), rows


def test_the_base_is_timed_in_its_ways_and_without_attention(opened, monkeypatch):
    asked, rows = timed(opened, BenchStage(lengths=[8, 16], inputs="synthetic"), monkeypatch, seed=3)
    base, variant = (one.model for one in opened.values())
    inputs = asked.make_inputs(2, 8)
    assert {name: x.tolist() for name, x in inputs.items()} == {
        name: x.tolist() for name, x in example_inputs(base, 8, batch=2, seed=3).items()
    }
    with torch.no_grad():
        exact, converted = base(**inputs).logits, variant(**inputs).logits
        with attention_free(base):
            free = base(**inputs).logits
        said = {one.name: one.run(inputs).logits for one in asked.contenders}
    assert not torch.equal(exact, converted)
    assert not torch.equal(exact, free)
    assert [(one.name, one.role) for one in asked.contenders] == [
        (BASE, "base"),
        ("fastest way", "exact"),
        (CEILING, "ceiling"),
        ("local", "variant"),
    ]
    for name, due in ((BASE, exact), ("fastest way", exact), (CEILING, free), ("local", converted)):
        torch.testing.assert_close(said[name], due, rtol=0, atol=1e-6)
    assert (asked.seed, asked.device, asked.dtype) == (3, torch.device("cpu"), "float32")
    assert [(row.length, row.seconds, row.fast_products) for row in rows] == [(8, None, False), (16, None, False)]
    with torch.no_grad():
        assert set(asked.chosen_in(lambda: base(**inputs))) <= {"attention"}


def test_the_fastest_way_is_switched_on_for_its_own_contender(opened, monkeypatch):
    inside = []

    @contextmanager
    def noted(model: Any) -> Any:
        inside.append(model)
        yield

    monkeypatch.setattr(measure, "fastest_exact", noted)
    asked, _ = timed(opened, BenchStage(lengths=[8], inputs="synthetic"), monkeypatch)
    for one in asked.contenders:
        with torch.no_grad():
            one.run(asked.make_inputs(1, 8))
        assert inside == ([] if one.name == BASE else [opened[BASE].model])


def test_images_have_one_length_and_sounds_have_seconds(monkeypatch):
    for architecture, lengths, seconds in (
        ("ViTForImageClassification", [37], None),
        # Strides of 4 and 2 samples, of which there are 16,000 in a second.
        ("Wav2Vec2ForCTC", [8, 16], 8 / 16_000),
    ):
        base = {BASE: in_memory(tiny(architecture), None, reads=False)}
        asked, rows = timed(base, BenchStage(lengths=[8, 16], inputs="synthetic"), monkeypatch)
        assert asked.stage.lengths == lengths
        assert [row.seconds for row in rows] == [seconds and pytest.approx(seconds * length) for length in lengths]


@pytest.mark.parametrize("wanted", [False, True])
def test_fast_products_apply_to_every_model_and_are_recorded(opened, folders, wanted, monkeypatch):
    tasks: list[Any] = []
    monkeypatch.setattr(
        measure, "products_for", lambda models, wanted: tasks.append(([*models], wanted)) or nullcontext()
    )
    _, rows = timed(opened, BenchStage(lengths=[8], inputs="synthetic", fast_products=wanted), monkeypatch)
    assert [row.fast_products for row in rows] == [wanted]
    stage = EvaluateStage(task="glue/sst2", data=str(folders[2]), limit=4, fast_products=wanted)
    subjects: list[Any] = []
    monkeypatch.setattr(
        measure, "evaluate", lambda several, *more, **ways: subjects.append(several) or part_of(Quality, notes=["a"])
    )
    entry = measure.measure_quality(opened, stage, seed=0, outputs=None, fresh=True, progress=silent)
    assert (entry.fast_products, entry.notes) == (wanted, ["a", *["fast float32 products"] * wanted])
    models = [one.model for one in opened.values()]
    assert tasks == [(models, wanted), (models, wanted)]
    fast = fingerprint(identity(opened["local"]), computed_by(torch.device("cpu"), fast_products=wanted))
    assert subjects[0]["local"].identity == fast


def test_inputs_are_texts_and_recordings_of_the_task(opened, folders, tmp_path, monkeypatch):
    texts = EvaluateStage(task="glue/sst2", data=str(folders[2]), split="dev", limit=2)
    asked, _ = timed(opened, BenchStage(lengths=[8]), monkeypatch, texts)
    rows = asked.make_inputs(1, 32)["input_ids"][0].tolist()
    tokenizer = tiny_tokenizer()
    content = [token for text in SENTENCES[:2] for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert rows == [2, *(content * 5)[:30], 3]
    write_utterances(tmp_path / "dev-clean", some_utterances(2))
    model = recogniser().bfloat16()
    speech = {BASE: in_memory(model, speech_processor(tmp_path / "vocabulary"))}
    sounds = EvaluateStage(task="librispeech/dev-clean", data=str(tmp_path))
    asked, _ = timed(speech, BenchStage(lengths=[8]), monkeypatch, sounds)
    heard = asked.make_inputs(2, 40)["input_values"]
    assert (heard.dtype, heard.shape[0]) == (torch.bfloat16, 2)
    with torch.no_grad():
        assert model(heard).logits.shape[1] == 40


def test_inputs_are_images_of_the_task_in_the_dtype_of_the_model(tmp_path, monkeypatch):
    model = tiny("ViTForImageClassification").bfloat16()
    size = model.config.image_size
    reader = transformers.ViTImageProcessor(size={"height": size, "width": size})
    for number in range(2):
        (tmp_path / "test" / f"LABEL_{number}").mkdir(parents=True)
        Image.new("RGB", (24, 24), (90 * number, 10, 10)).save(tmp_path / "test" / f"LABEL_{number}" / "a.png")
    images = EvaluateStage(task="image-classification", data=str(tmp_path / "test"))
    asked, _ = timed({BASE: in_memory(model, reader)}, BenchStage(lengths=[8]), monkeypatch, images)
    seen = asked.make_inputs(3, 37)["pixel_values"]
    assert (seen.dtype, tuple(seen.shape)) == (torch.bfloat16, (3, 3, size, size))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_a_record_holds_the_measurements(opened):
    stage = BenchStage(lengths=[8, 16], inputs="synthetic", rounds=3, seconds=0)
    rows = list(measure.measure_speed(opened, stage, None, seed=0, progress=silent))
    trainings = [part_of(Trained, name="local", before=0.5)]
    quality = [part_of(Quality, task="glue/sst2", examples=9)]
    recipe = part_of(RecipeText, text="a recipe")
    made = measure.make_record(
        opened, title="", seed=0, command="", quality=quality, speed=rows, trainings=trainings, recipe=recipe
    )
    assert (made.speed, made.trainings, made.recipe) == (rows, trainings, recipe)
    assert [one.examples for one in made.quality] == [9]
    assert made.crossover == crossover(rows)
    assert len(made.crossover) == 1
    assert made.checkpoint.name == opened[BASE].source.name
    assert made.checkpoint.revision is None
    assert made.environment["gpu"] is None
