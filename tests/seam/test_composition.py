"""Composition: groups of heads, exact attention on short inputs, recomputation, calibration, and captured mass."""

import pytest
import torch
import transformers

from approx.conversion import surgery, verify
from approx.errors import ApproxError
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import HeadGroups
from approx.planning.anatomy import anatomy
from approx.planning.cost import predict
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.seam.dispatch import build
from forms import ELU, KINDS, SMALL
from zoo import difference, outputs, tiny

# Of the four heads of the tiny models 0 and 2 are local, 1 stays exact and 3 is linear.
MIXED = Plan(
    (
        Rule("local", heads="0-2", settings={"left": 2, "right": 1}),
        Rule("sdpa", heads="1"),
        Rule("linear", heads="-1", settings=ELU),
    )
)


def mechanisms(model):
    return [model.base_model.get_submodule(path).mechanism for path in model.config.approx["sites"]]


def draw(heads=4, length=12, size=8):
    return (torch.randn(2, heads, length, size) for _ in range(3))


@pytest.mark.parametrize("causal", [False, True])
def test_each_group_of_heads_attends_by_itself(causal):
    model = tiny("GPT2Model" if causal else "BertModel")
    surgery.convert(model, MIXED)
    groups = mechanisms(model)[0]
    q, k, v = draw()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 9:] = False
    joined, weights = groups(q, k, v, mask), groups.weights(q, k, mask)
    each = {"local": ([0, 2], {"left": 2, "right": 1}), "sdpa": ([1], {}), "linear": ([3], ELU)}
    for name, (heads, settings) in each.items():
        alone = MECHANISMS[name](len(heads), 8, causal=causal, scale=groups.scale, **settings)
        torch.testing.assert_close(joined[:, heads], alone(q[:, heads], k[:, heads], v[:, heads], mask))
        torch.testing.assert_close(weights[:, heads], alone.weights(q[:, heads], k[:, heads], mask))


@pytest.mark.parametrize(
    "order", [[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[0, 3], [1, 2]], [[1, 3], [0, 2]], [[0, 1, 3], [2]]]
)
def test_heads_keep_their_order(order):
    q, k, v = draw()
    exact = MECHANISMS["sdpa"](4, 8, causal=False, scale=0.3)
    groups = HeadGroups([(heads, MECHANISMS["sdpa"](len(heads), 8, causal=False, scale=0.3)) for heads in order])
    torch.testing.assert_close(groups(q, k, v), exact(q, k, v))
    assert groups.flops(100) == exact.flops(100)


@pytest.mark.parametrize(
    "heads", [[[0, 1], [1, 2, 3]], [[0, 1], [3]], [[0, 1], [2, 3, 4]]], ids=["twice", "missing", "too many"]
)
def test_rejects_groups_that_miss_or_repeat_heads(heads):
    site = {"heads": 4, "head_dim": 8, "causal": False, "scale": 0.3}
    site["groups"] = [{"heads": some, "mechanism": "sdpa", "settings": {}} for some in heads]
    with pytest.raises(ApproxError, match="must name each of 0-3 once"):
        build(site)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "Wav2Vec2ForCTC", "LlamaForCausalLM"])
def test_groups_of_heads_pass_the_checks_and_come_back_from_their_folder(architecture, tmp_path):
    model = tiny(architecture)
    assert verify.exact_limit(model, MIXED).passed
    receipt = surgery.convert(model, MIXED)
    swapped = [(part.layer, part.heads, part.mechanism) for part in receipt.swapped[:3]]
    assert swapped == [(0, "0,2", "local"), (0, "1", "sdpa"), (0, "3", "linear")]
    before = outputs(model)
    assert verify.padding(model).passed
    assert verify.causality(model).passed in (True, None)
    model.save_pretrained(tmp_path)
    if architecture == "LlamaForCausalLM":
        assert verify.fresh_process(tmp_path, model).passed
    assert difference(outputs(type(model).from_pretrained(tmp_path)), before) == 0.0
    assert "class LinearAttention" in (tmp_path / "approx_mechanisms_linear.py").read_text("utf-8")
    surgery.revert(model)
    assert difference(outputs(model), outputs(tiny(architecture))) == 0.0


@pytest.mark.parametrize(
    "plan",
    [
        MIXED,
        # Every group has a bounded state, of the same kind or of two kinds.
        Plan((Rule("local", settings={"left": 3}), Rule("linear", heads="1,3", settings=ELU))),
        Plan((Rule("linear", settings=ELU), Rule("performer", heads="0", settings={"features": 16}))),
    ],
    ids=["on a cache", "ring and recurrent", "recurrent"],
)
def test_groups_of_heads_generate_what_they_generate_without_a_cache(plan):
    model = tiny("GPT2LMHeadModel")
    surgery.convert(model, plan)
    inputs = example_inputs(model, 9, batch=2)
    ways = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, "num_beams": 2, "do_sample": False}
    with_cache = model.generate(**inputs, use_cache=True, **ways)
    assert torch.equal(with_cache, model.generate(**inputs, use_cache=False, **ways))


def test_a_compiled_layer_of_groups_gives_the_same():
    model = tiny("BertModel")
    surgery.convert(model, MIXED)
    before = outputs(model)
    torch._dynamo.reset()
    assert difference(outputs(torch.compile(model, backend="eager")), before) < 1e-6


def test_the_cost_of_groups_is_that_of_their_heads():
    layout = anatomy(tiny("BertModel").config, transformers.BertModel)
    half, none, whole = (
        predict(layout, Plan.of("linear", heads=heads, exact_below=below, **ELU).resolve(layout), [1000])[0]
        for heads, below in (("0,2", 0), ("0,2", 2000), ("all", 0))
    )
    assert half.flops_planned == (whole.flops_planned + half.flops_exact) / 2
    assert none.flops_planned == none.flops_exact


def test_a_short_input_leaves_no_trace_in_a_long_one():
    model = tiny("BertModel")
    short, long = example_inputs(model, 10), example_inputs(model, 30)
    exact = outputs(model, short), outputs(model, long)
    plan = Plan((Rule("linear", "0-1", ELU, exact_below=20), Rule("linear", "2", ELU, heads="0-1", exact_below=20)))
    surgery.convert(model, plan)
    assert difference(outputs(model, short), exact[0]) < 1e-6
    first = outputs(model, long)
    assert difference(first, exact[1]) > 1e-4
    assert difference(outputs(model, short), exact[0]) < 1e-6
    assert difference(outputs(model, long), first) == 0.0


def test_each_group_of_heads_has_its_own_limit():
    model = tiny("BertModel")
    plan = Plan(
        (
            Rule("linear", heads="0", exact_below=8, settings=ELU),
            Rule("linear", heads="2", exact_below=20, settings=ELU),
        )
    )
    surgery.convert(model, plan)
    (groups, *_) = mechanisms(model)
    exact, linear = (
        MECHANISMS[name](4, 8, causal=False, scale=groups.scale, **MECHANISMS[name].published)
        for name in ("sdpa", "linear")
    )
    for length, swapped in ((7, []), (8, [0]), (19, [0]), (20, [0, 2])):
        q, k, v = draw(length=length)
        expected = exact(q, k, v)
        expected[:, swapped] = linear(q, k, v)[:, swapped]
        torch.testing.assert_close(groups(q, k, v), expected)


def saved_bytes_and_gradients(mechanism, dropout):
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in draw(length=64)]
    storages = {}

    def note(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = mechanism(*leaves, dropout=dropout)
    out.square().sum().backward()
    return sum(storages.values()), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["full", "local", "improved-clustered"])
def test_recomputing_saves_memory_and_changes_no_gradient(name, dropout):
    mechanism = KINDS[name](4, 8, causal=False, scale=0.3, **SMALL.get(name, {}))
    plain, expected = saved_bytes_and_gradients(mechanism, dropout)
    mechanism.recompute = True
    saved, gradients = saved_bytes_and_gradients(mechanism, dropout)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    # Only q, k and v.
    assert saved == 3 * 2 * 4 * 64 * 8 * 4 < plain
    assert saved_bytes_and_gradients(mechanism.eval(), 0.0)[0] > saved


def test_recomputes_layers_and_groups_of_a_plan(tmp_path):
    model = tiny("BertModel")
    surgery.convert(model, Plan((Rule("full", recompute=True), Rule("local", "0", heads="1-2", recompute=True))))
    model.save_pretrained(tmp_path)
    for one in (model, type(model).from_pretrained(tmp_path)):
        assert [each.recompute for each in mechanisms(one)[0].groups] == [True, True]
        assert [each.recompute for each in mechanisms(one)[1:]] == [True, True]
    calls = []
    mechanisms(model)[1].register_forward_pre_hook(lambda *_: calls.append(1))
    for training, expected in ((False, 1), (True, 2)):
        model.train(training)
        calls.clear()
        model(**example_inputs(model, 10)).last_hidden_state.sum().backward()
        assert len(calls) == expected


def test_settings_that_steps_share_over_layers_are_written_out():
    model = tiny("BertModel", num_hidden_layers=5)
    plan = Plan(
        (
            Rule("strided", settings={"mode": "interleave", "stride": 3}),
            Rule("local", "1"),
            Rule("sdpa", "3", heads="0"),
        )
    )
    receipt = surgery.convert(model, plan)
    steps = {part.layer: part.settings["step"] for part in receipt.swapped if part.mechanism == "strided"}
    # The rank counts only layers with the mechanism.
    assert steps == {0: 1, 2: 2, 3: 1, 4: 2}
    assert plan.to_data()[0]["settings"]["mode"] == "interleave"
