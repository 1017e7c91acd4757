"""Converted models compile without graph breaks, export, and have their FLOPs counted, traced or with attention as one operator."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils.flop_counter import FlopCounterMode

from approx.conversion import surgery
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx_kernels.dispatch import opaque
from c_sources import needs_compiler
from forms import FORMS, SMALL, draw, draw_mask, make
from zoo import difference, outputs, tiny

WHOLE = [name for name, kind in MECHANISMS.items() if kind.compiles == "whole"]
LISTED = [name for name in MECHANISMS if name not in WHOLE]
UNCACHED = {"BertModel": {}, "GPT2Model": {"use_cache": False}}
# Mechanisms that are one operator all compile the same way, so `make test` compiles a few of them.
FEW = ("clustered", "lsh", "linear", "performer")
CASES = [
    pytest.param(
        family, name, marks=[pytest.mark.slow] * (name in LISTED and (family == "GPT2Model" or name not in FEW))
    )
    for family in UNCACHED
    for name, causal in FORMS
    if causal == (family == "GPT2Model") and name in MECHANISMS
]
SHAPE = {"batch": 2, "heads": 4, "length": 24, "size": 8, "values": 8, "seed": 0}


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def convert(family, name):
    model = tiny(family, **({"n_layer": 1} if family == "GPT2Model" else {"num_hidden_layers": 1}))
    surgery.convert(model, Plan.of(name, **SMALL.get(name, {})), calibration=example_inputs(model, 40, batch=2))
    return model, example_inputs(model, 24, batch=2, padded=7)


def compiled(model, backend: Any = "eager", **more):
    return torch.compile(model, backend=backend, fullgraph=True, **more)


@pytest.mark.parametrize(("family", "name"), CASES)
@pytest.mark.sample(2)
def test_a_converted_model_compiles_without_a_break(family, name):
    model, inputs = convert(family, name)
    expected = outputs(model, inputs, **UNCACHED[family])
    assert difference(outputs(compiled(model), inputs, **UNCACHED[family]), expected) < 1e-5


# A compiler could trace `exact`, but would then miss the fastest way on the machine.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LISTED if name != "exact"])
def test_compilers_cannot_trace_mechanisms_listed_as_one_operator(name, monkeypatch):
    monkeypatch.setattr(MECHANISMS[name], "compiles", "whole")
    followed = []
    for causal in (causal for form, causal in FORMS if form == name):
        torch._dynamo.reset()
        mechanism = make(name, causal, heads=4, size=8)
        try:
            compiled(mechanism)(*draw(**SHAPE), draw_mask("arbitrary", **SHAPE))
        except (TorchDynamoException, RuntimeError):
            followed.append(False)
        else:
            followed.append(True)
    assert not all(followed), "it can be followed in every form: say that it compiles whole"


OPERATORS = [
    pytest.param(name, causal, marks=[pytest.mark.slow] * (causal or name not in FEW))
    for name, causal in FORMS
    if name in LISTED
]


@pytest.mark.parametrize(("name", "causal"), OPERATORS)
def test_one_operator_has_the_gradient_of_its_mechanism(name, causal):
    mechanism = make(name, causal, heads=4, size=8)
    mask = draw_mask("right", **SHAPE)
    runs = []
    for one in (mechanism, compiled(mechanism, "aot_eager")):
        leaves = [x.detach().requires_grad_() for x in draw(**SHAPE)]
        # Outputs of padded queries are undefined.
        out = one(*leaves, mask) * mask[:, None, :, None]
        learned = [*leaves, *mechanism.parameters()]
        runs.append([out, *torch.autograd.grad(out.square().sum(), learned)])
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["block", "exact"])
def test_mixed_dtypes_under_autocast_compile_too(name):
    mechanism = make(name, False, heads=4, size=8)
    # Rotary embeddings leave queries and keys in float32.
    q, k, v = draw(**SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        expected = mechanism(q, k, v.bfloat16())
        actual = compiled(mechanism, "aot_eager")(q, k, v.bfloat16())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=2e-2)


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    mechanism = make("block", False, heads=4, size=8)
    q, k, v = (x.detach().requires_grad_() for x in draw(**SHAPE))
    whole = compiled(lambda q, k, v: mechanism(q, k, v, dropout=0.5), "aot_eager")
    torch.manual_seed(0)
    first, again = whole(q, k, v), whole(q, k, v)
    assert difference([first.detach()], [again.detach()]) > 0.1
    # Outputs are linear in values, so their product with any gradient equals that of the values and their gradient.
    grad = torch.randn_like(first)
    (slope,) = torch.autograd.grad(first, v, grad)
    torch.testing.assert_close((slope * v).sum(), (grad * first).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["clustered", "longformer", "adaptive-span"])
def test_the_operator_passes_pytorchs_own_checks(name):
    mechanism = make(name, False, heads=4, size=8)
    q, k, v = (x.detach().requires_grad_() for x in draw(**SHAPE))
    state = [*mechanism.parameters(), *mechanism.buffers()]
    arguments = (q, k, v, draw_mask("right", **SHAPE), None, state, opaque.described(mechanism), False, 0.0)
    torch.library.opcheck(opaque.attend.operator, arguments)


@pytest.mark.slow
def test_parameters_get_gradients_through_the_operator():
    model, inputs = convert("BertModel", "adaptive-span")
    model.train()
    model.config.hidden_dropout_prob = 0.0
    compiled(model, "aot_eager")(**inputs).last_hidden_state.sum().backward()
    (fraction,) = model.encoder.layer[0].attention.self.mechanism.parameters()
    assert fraction.grad is not None


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param("GPT2Model" if causal else "BertModel", name, marks=[pytest.mark.slow] * (name not in FEW))
        for name, causal in FORMS
        if name in MECHANISMS
    ],
)
@pytest.mark.sample(2)
def test_a_converted_model_is_exported_saved_and_loaded(family, name, tmp_path):
    model, inputs = convert(family, name)
    expected = outputs(model, inputs, **UNCACHED[family])
    torch.export.save(torch.export.export(model, (), {**inputs, **UNCACHED[family]}), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    actual = outputs(program.module(), inputs, **UNCACHED[family])
    real = inputs["attention_mask"].bool()
    # Outputs of padded tokens are undefined.
    assert difference([actual[0][real], *actual[1:]], [expected[0][real], *expected[1:]]) < 1e-6
    called = [str(node.target) for node in program.graph.nodes]
    assert any("attend" in each for each in called) == (name not in WHOLE), "what is exported has its steps"


def listening(model, **more):
    """The compiled model, and a list to be filled with the calls in its graph."""
    called = []

    def keep(graph, examples):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    return compiled(model, keep, **more), called


@pytest.mark.slow
@pytest.mark.parametrize("family", ["BertModel", "GPT2Model", "LlamaModel"])
def test_unconverted_layers_use_the_fastest_way_in_a_graph_too(family):
    model = tiny(family)
    surgery.convert(model, Plan((Rule("sdpa", "0"),)))
    inputs = example_inputs(model, 24, batch=2, padded=7)
    more = {} if family == "BertModel" else {"use_cache": False}
    expected = outputs(model, inputs, **more)
    one, called = listening(model, dynamic=True)
    assert difference(outputs(one, inputs, **more), expected) < 1e-5
    assert sum("attend" in each for each in called) == 2
    # The operator would recompute its output for the gradient.
    called.clear()
    one(**inputs, **more)
    assert not any("attend" in each for each in called)
    program = torch.export.export(model, (), {**inputs, **more})
    assert not any("attend" in str(node.target) for node in program.graph.nodes)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in WHOLE if MECHANISMS[name].runs_c])
def test_a_compiled_model_runs_c_on_a_cpu(name, dtype):
    mechanism = make(name, False, heads=4, size=8).to(dtype)
    one, called = listening(mechanism)
    one(*(x.to(dtype) for x in draw(**SHAPE)))
    assert any("attend" in each for each in called) == (dtype == torch.float32)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_causal_model_without_a_mask_is_not_taken_for_packed_sequences(in_place):
    model, inputs = convert("GPT2Model", "linear")
    del inputs["attention_mask"]
    expected = outputs(model, inputs, use_cache=False)
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    one = model if in_place else compiled(model)
    assert difference(outputs(one, inputs, use_cache=False), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("family", "name"), [("BertModel", "linear"), ("GPT2Model", "block")])
def test_inductor_gives_the_same(family, name):
    model, inputs = convert(family, name)
    expected = outputs(model, inputs, **UNCACHED[family])
    assert difference(outputs(compiled(model, "inductor"), inputs, **UNCACHED[family]), expected) < 1e-4


@pytest.mark.parametrize(("name", "causal"), [form for form in FORMS if form[0] in MECHANISMS])
@pytest.mark.sample(12)
def test_counted_operations_equal_the_formula(name, causal):
    length = 512
    mechanism = MECHANISMS[name](2, 32, causal=causal, scale=32**-0.5)
    q, k, v = draw(batch=1, heads=2, length=length, size=32, values=32, seed=0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mechanism(q, k, v)
    # Kernels count pairs that a causal mask hides, and whole tiles.
    assert 0.5 < counter.get_total_flops() / mechanism.flops(length) < (4 if causal else 2)


def test_a_compiled_layer_is_counted_too():
    mechanism = make("block", False, heads=4, size=8)
    q, k, v = draw(**SHAPE)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        opaque.attend(q, k, v, None, None, [], opaque.described(mechanism), False, 0.0)
    assert counter.get_total_flops() == 2 * mechanism.flops(24)
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        opaque.attend(q, k, v, None, None, [], opaque.described(mechanism), False, 0.0)[0].sum().backward()
    assert counter.get_total_flops() == 4 * 2 * mechanism.flops(24)
    assert q.grad is not None
