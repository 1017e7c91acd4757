"""Predicted cost against counts by hand."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from approx.planning.anatomy import anatomy
from approx.planning.cost import Cost, predict
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from forms import ELU
from zoo import FAMILIES, UNNAMED, tiny


def facts(architecture, **changes):
    return anatomy(tiny(architecture, **changes).config, getattr(transformers, architecture))


def test_the_ceiling_is_attention_at_no_cost():
    cost = Cost(512, 6e9, 3e9, 1e9, 0, 0)
    assert cost.ceiling == pytest.approx(1.5)
    assert cost.speedup == pytest.approx(9 / 7)


@pytest.mark.parametrize("length", [7, 24, 512, 5000])
def test_what_bert_computes_outside_attention(length):
    hidden, inner, layers, labels = 32, 48, 3, 2
    each = 4 * hidden * hidden + 2 * hidden * inner
    expected = 2 * length * layers * each + 2 * (hidden * hidden + hidden * labels)
    assert facts("BertForSequenceClassification").flops_outside(length) == expected


def test_what_bert_computes_inside_attention():
    hidden, layers, length = 32, 3, 100
    (cost,) = predict(facts("BertModel"), {}, [length])
    assert cost.flops_exact == layers * 4 * length * length * hidden
    assert cost.flops_planned == cost.flops_exact


@pytest.mark.parametrize("architecture", [*FAMILIES, *UNNAMED])
def test_the_whole_forward_pass_is_accounted_for(architecture):
    # Eager attention computes every pair, even those that a causal mask hides; eager experts are counted one by one.
    model = tiny(architecture, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**example_inputs(model, 40))
    layout = facts(architecture)
    (cost,) = predict(layout, Plan.of("full").resolve(layout), [40])
    assert cost.flops_outside + cost.flops_planned == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_linear_attention_is_cheaper_where_inputs_are_long():
    layout = facts("BertModel")
    short, long = predict(layout, Plan.of("linear", **ELU).resolve(layout), [4, 4096])
    assert short.speedup < 1.01
    assert long.speedup > 5
    assert long.memory_planned < predict(layout, Plan.of("full").resolve(layout), [4096])[0].memory_planned
    assert long.speedup < long.ceiling


def test_a_plan_for_some_layers_costs_something_in_between():
    layout = facts("BertModel")
    (one,) = predict(layout, Plan.of("linear", layers="0", **ELU).resolve(layout), [4096])
    (all_,) = predict(layout, Plan.of("linear", **ELU).resolve(layout), [4096])
    assert 1 < one.speedup < all_.speedup


def test_exact_below_is_counted_as_exact_attention():
    layout = facts("BertModel")
    below, above = predict(layout, Plan.of("linear", exact_below=1000, **ELU).resolve(layout), [999, 1000])
    assert below.speedup == 1.0
    assert above.speedup > 1.0


def test_layers_of_fixed_length_cost_the_same_at_any_length():
    layout = facts("ViTForImageClassification")
    short, long = predict(layout, Plan.of("local", left=4, right=4).resolve(layout), [10, 10_000])
    assert short.flops_exact == long.flops_exact == 3 * 4 * 37 * 37 * 32
    assert short.ceiling == long.ceiling


def test_shared_keys_count_for_each_query_head():
    layout = facts("LlamaForCausalLM")
    assert {(site.heads, site.key_heads) for site in layout.sites} == {(4, 2)}
    (cost,) = predict(layout, {}, [64])
    assert cost.flops_exact == 3 * 4 * 4 * (64 * 65 // 2) * 8


def test_every_self_attention_is_a_layer_and_cross_attention_stays_outside():
    layout = facts("WhisperForConditionalGeneration")
    assert len(layout.sites) == 4
    assert layout.cross_attention == 2
    assert [site.fixed_length for site in layout.sites] == [24, 24, None, None]
