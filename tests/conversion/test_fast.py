"""Products at full speed around the call of a converted model, and exact attention at its fastest in it."""

from types import SimpleNamespace

import pytest
import torch

from approx.conversion import fast, surgery
from approx.conversion.fast import _rows, fast_products_for
from approx.conversion.inputs import example_inputs
from approx.conversion.plan import Plan
from approx.conversion.seam import IMPLEMENTATION, fastest_exact
from approx_kernels import compiled_layers, half_products, products, tiled_layers
from approx_kernels.c_language import library
from approx_kernels.few_rows_c import SOURCE
from approx_kernels.findings import instructions
from approx_kernels.layers import NOWHERE
from conversion.zoo import difference, outputs, tiny

with_tiles = pytest.mark.skipif(not tiled_layers.usable(), reason="no tiles for bfloat16 here, or no C compiler")


@pytest.fixture(autouse=True)
def worth_it_from_eight_rows(monkeypatch):
    for module in (products, compiled_layers):
        monkeypatch.setattr(module, "worth_rows", lambda *_: 8)
    for worth in ("worth_rows", "worth_tiles"):
        monkeypatch.setattr(f"approx.conversion.fast.{worth}", lambda *_: NOWHERE)
    monkeypatch.setattr(half_products, "least_rows", lambda dtype: dict.fromkeys(NOWHERE, 8))


def counted(monkeypatch, product):
    """The first sizes of what a product of layers is given, filled call by call."""
    computed, seen = getattr(fast, product), []

    def counting(x, *rest):
        seen.append(len(x))
        return computed(x, *rest)

    monkeypatch.setattr(fast, product, counting)
    return seen


def watched(model):
    """The states of the switch that the first layer sees, filled call by call."""
    seen = []
    next(iter(model.base_model.children())).register_forward_hook(lambda *_: seen.append(products._switch()))
    return seen


@pytest.mark.parametrize("mechanism", ["exact", "linear"])
def test_it_is_thrown_for_long_calls_of_converted_models_alone(mechanism):
    model = tiny("BertModel").eval()
    inputs = example_inputs(model, 20, batch=2)
    seen = watched(model)
    outputs(model, inputs)
    surgery.convert(model, Plan.of(mechanism))
    outputs(model, inputs)
    outputs(model, {name: x[:1, :4] for name, x in inputs.items()})
    assert seen == ["none", "bf16", "none"]
    assert products._switch() == "none"


def test_an_error_in_the_forward_puts_it_back():
    model = tiny("BertModel").eval()
    surgery.convert(model, Plan.of("exact"))

    def fail(*_):
        raise KeyboardInterrupt

    model.encoder.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        outputs(model, example_inputs(model, 20))
    assert products._switch() == "none"


def test_in_a_generation_the_prompt_is_fast_and_single_tokens_are_left():
    model = tiny("GPT2LMHeadModel").eval()
    ids = example_inputs(model, 20)["input_ids"]
    before = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    surgery.convert(model, Plan.of("exact"))
    seen = watched(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False), before)
    assert seen == ["bf16", "none", "none", "none"]


def test_training_that_computes_layers_again_ends_with_it_put_back():
    model = tiny("BertForSequenceClassification").train()
    surgery.convert(model, Plan.of("exact"))
    model.gradient_checkpointing_enable()
    inputs = example_inputs(model, 20, batch=2)
    model(**inputs, labels=torch.tensor([0, 1])).loss.backward()
    assert products._switch() == "none"
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2Model"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_graph_has_the_switch_thrown_around_it_if_compiled_in_place_and_in_each_layer_if_not(
    architecture, in_place, monkeypatch
):
    monkeypatch.setattr(compiled_layers, "found_tiles", lambda: NOWHERE)
    model = tiny(architecture).eval()
    surgery.convert(model, Plan.of("exact"))
    inputs, more = example_inputs(model, 20, batch=2), {} if architecture == "BertModel" else {"use_cache": False}
    expected, around, inside = outputs(model, inputs, **more), [], []
    thrown = compiled_layers.fast_products
    monkeypatch.setattr(compiled_layers, "fast_products", lambda *about: inside.append(about[0]) or thrown(*about))

    def told(graph, examples):
        return lambda *args: around.append(products._switch()) or graph(*args)

    torch._dynamo.reset()
    if in_place:
        model.compile(backend=told, fullgraph=True)
    whole = model if in_place else torch.compile(model, backend=told, fullgraph=True)
    for _ in range(2):
        # Where there are tiles for bfloat16 the switch rounds, which no probe would choose.
        found = outputs(whole, inputs, **more)
        assert difference(found, expected) < (1e-2 if "AMX" in instructions() else 1e-5)
    assert around == 2 * ["bf16" if in_place else "none"]
    assert set(inside) == (set() if in_place else {40})
    assert in_place or len(inside) >= 2 * 4 * model.config.num_hidden_layers
    assert products._switch() == "none"


@with_tiles
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_graph_has_its_layers_on_tiles(in_place, training, monkeypatch):
    limits = {layout: [8, 10**6] for layout in NOWHERE}
    monkeypatch.setattr(compiled_layers, "found_tiles", lambda: limits)
    monkeypatch.setattr(compiled_layers, "worth_tiles", lambda *_: limits)
    monkeypatch.setattr(products, "worth_rows", lambda *_: None)
    model = tiny("BertModel").eval()
    surgery.convert(model, Plan.of("linear"))
    inputs = example_inputs(model, 20, batch=2)

    def run(one):
        if not training:
            return outputs(one, inputs)
        model.zero_grad()
        one(**inputs).last_hidden_state.square().sum().backward()
        return [each.grad.clone() for each in model.encoder.parameters() if each.grad is not None]

    expected, rows, computed = run(model), [], compiled_layers.tiled_linear
    monkeypatch.setattr(compiled_layers, "tiled_linear", lambda x, *rest: rows.append(len(x)) or computed(x, *rest))
    torch._dynamo.reset()
    if in_place:
        model.compile(backend="aot_eager", fullgraph=True)
    assert (
        difference(run(model if in_place else torch.compile(model, backend="aot_eager", fullgraph=True)), expected)
        < 1e-4
    )
    assert len(rows) >= (3 if training else 1) * 4 * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((2, 20), torch.int64, 40),
        ((2, 20, 32), torch.float32, 40),
        ((2, 3, 32, 32), torch.float32, 192),
        ((2, 16000), torch.float32, 100),
    ],
    ids=["tokens", "embeddings", "pixels", "sound"],
)
def test_rows_of_an_input(shape, dtype, rows):
    assert _rows(torch.zeros(shape, dtype=dtype)) == rows


def test_inputs_may_be_given_by_place_or_not_at_all():
    model = tiny("BertModel")
    with fast_products_for(model, (torch.zeros(2, 20, dtype=torch.int64),), {}) as thrown:
        assert thrown
    with fast_products_for(model, (), {}) as thrown:
        assert not thrown


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2Model", "Wav2Vec2Model"])
def test_a_converted_model_of_16_bits_computes_in_float32_and_comes_closer(architecture, monkeypatch):
    model = tiny(architecture).eval()
    inputs = example_inputs(model, 4000 if architecture == "Wav2Vec2Model" else 20, batch=2)
    surgery.convert(model, Plan.of("exact"))
    exact = outputs(model, inputs)
    model.to(torch.bfloat16)
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    calls: list[torch.Size] = []
    computed = half_products._linear
    monkeypatch.setattr(half_products, "_linear", lambda x, *rest: calls.append(x.shape) or computed(x, *rest))
    wide = outputs(model, inputs)
    assert len(calls) >= 4 * model.config.num_hidden_layers
    calls.clear()
    monkeypatch.setattr(
        half_products, "least_rows", lambda dtype: dict.fromkeys((half_products.BY_OUTPUT, half_products.BY_INPUT))
    )
    plain = outputs(model, inputs)
    assert not calls
    # Both round what goes from layer to layer; what happens within one is the difference.
    assert difference(exact, wide) < 1.2 * difference(exact, plain) + 1e-3


@pytest.mark.parametrize(("architecture", "held"), [("LlamaForCausalLM", False), ("GPT2LMHeadModel", True)])
def test_few_rows_are_looked_at_only_where_layers_lie_as_those_of_gpt2(architecture, held, monkeypatch):
    monkeypatch.setattr(
        half_products, "least_rows", lambda dtype: {half_products.BY_OUTPUT: 64, half_products.BY_INPUT: 1}
    )
    model = tiny(architecture).to(torch.bfloat16).eval()
    with fast_products_for(model, (torch.zeros(2, 1, dtype=torch.int64),), {}) as holds:
        assert holds is held
    with fast_products_for(model, (torch.zeros(2, 32, dtype=torch.int64),), {}) as holds:
        assert holds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elsewhere_than_on_a_cpu_no_call_looks_through_the_model(dtype, monkeypatch):
    model = tiny("BertModel").to("meta", dtype)
    monkeypatch.setattr(type(model), "modules", lambda *_: pytest.fail("looked through"))
    with fast_products_for(model, (torch.zeros(2, 20, dtype=torch.int64),), {}) as holds:
        assert not holds


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_of_16_bits_trains_with_and_without_recomputation(checkpointing):
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("linear"))
    model.to(torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = example_inputs(model, 20, batch=2)
    with fast_products_for(model, (), inputs) as held:
        assert held is not checkpointing
    model(**inputs).last_hidden_state.float().square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())


@pytest.mark.parametrize("architecture", ["BertModel", "GPT2Model", "LlamaModel", "WhisperModel"])
def test_a_model_that_is_not_converted_attends_exactly_by_the_seam(architecture):
    model = tiny(architecture).eval()
    sound = architecture == "WhisperModel"
    inputs = example_inputs(model, 20, batch=1 if sound else 2, padded=0 if sound else 5)
    before, stock = outputs(model, inputs), model.config._attn_implementation
    with fastest_exact(model):
        assert model.config._attn_implementation == IMPLEMENTATION
        after = outputs(model, inputs)
    assert model.config._attn_implementation == stock
    mask = inputs.get("attention_mask", torch.ones(1, 1)).bool()
    real = mask if mask.shape == before[0].shape[:2] else slice(None)
    assert difference([before[0][real]], [after[0][real]]) < 1e-5


@pytest.mark.skipif(isinstance(library(SOURCE), str), reason="there is no C compiler here")
@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_tokens_that_are_decoded_are_computed_in_c(architecture, monkeypatch):
    model = tiny(architecture).eval()
    ids = example_inputs(model, 40)["input_ids"]
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **how)
    surgery.convert(model, Plan.of("exact"))
    rows = counted(monkeypatch, "few_rows_linear")
    monkeypatch.setattr("approx.conversion.fast.worth_rows", lambda *_: {layout: [1, 8] for layout in NOWHERE})
    assert torch.equal(model.generate(ids, **how), before)
    # The prompt has 40 rows; each of three more steps has one in all layers, and in the head.
    assert len(rows) > 3 * 4 * model.config.num_hidden_layers
    assert set(rows) == {1}
    assert not any("forward" in vars(module) for module in model.modules())


@with_tiles
@pytest.mark.parametrize("architecture", ["BertModel", "GPT2Model", "LlamaModel", "Wav2Vec2Model"])
def test_a_converted_model_on_tiles_is_the_same_to_float32(architecture, monkeypatch):
    model = tiny(architecture).eval()
    inputs = example_inputs(model, 30000 if architecture == "Wav2Vec2Model" else 40, batch=2)
    before = outputs(model, inputs)
    surgery.convert(model, Plan.of("exact"))
    monkeypatch.setattr("approx.conversion.fast.worth_tiles", lambda *_: {layout: [8, 10**6] for layout in NOWHERE})
    rows = counted(monkeypatch, "tiled_linear")
    assert difference(before, outputs(model, inputs)) < 1e-5
    assert len(rows) >= 4 * model.config.num_hidden_layers


def test_layers_of_a_model_with_compiled_parts_are_left_alone(monkeypatch):
    monkeypatch.setattr("approx.conversion.fast.worth_rows", lambda *_: {layout: [1, 80] for layout in NOWHERE})
    model = tiny("BertModel").eval()
    inputs = example_inputs(model, 20, batch=2)
    with fast_products_for(model, (), inputs) as held:
        assert held
    model.encoder.compile(backend="eager")
    with fast_products_for(model, (), inputs) as held:
        assert not held


@pytest.mark.parametrize(("told", "asked"), [(64, 64), (None, 768), ([64, 128], 768)])
def test_the_switch_is_asked_for_by_the_features_of_the_model(monkeypatch, told, asked):
    model, seen = tiny("BertModel").eval(), []
    inputs = example_inputs(model, 20, batch=2)
    monkeypatch.setattr(products, "worth_rows", seen.append)
    monkeypatch.setattr(model, "config", SimpleNamespace(hidden_size=told))
    with fast_products_for(model, (), inputs) as thrown:
        assert (thrown, seen) == (False, [asked])
