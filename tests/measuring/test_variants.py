"""A variant of a record: the mechanisms of a model, and the spans that its heads learned."""

from typing import Any

import pytest
import torch

from approx.checkpoints import checkpoint
from approx.conversion import convert, surgery
from approx.conversion.calibration import mechanisms
from approx.measuring.measure import in_memory, variant_of
from approx.planning.plan import Plan, Rule
from tiny_study import tiny_checkpoint
from zoo import tiny

SPANS: dict[str, Any] = {"max_span": 24, "ramp": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base") / "base", positions=32)


def opened(base, out, *rules):
    convert.convert(base, out, Plan(rules))
    return checkpoint.load(out)


def test_the_spans_of_every_head_and_their_operations(base, tmp_path):
    one = opened(base, tmp_path / "out", Rule("adaptive-span", settings=SPANS))
    first, second = mechanisms(one.model)
    with torch.no_grad():
        first.get_parameter("fraction").fill_(1.0)
        second.get_parameter("fraction").copy_(torch.tensor([0.0, 0.5]))
    made = variant_of("spans", one)
    assert [layer.spans for layer in made.layers] == [[24.0, 24.0], [0.0, 12.0]]
    wide, narrow = (layer.operations for layer in made.layers)
    assert wide is not None
    assert narrow is not None
    assert 0 < narrow <= wide <= 1


def test_spans_that_cover_every_input_cost_what_exact_attention_does(base, tmp_path):
    one = opened(base, tmp_path / "out", Rule("adaptive-span", settings={"max_span": 64}))
    assert [layer.operations for layer in variant_of("spans", one).layers] == [1.0, 1.0]


def test_only_the_heads_with_spans_have_them(base, tmp_path):
    one = opened(base, tmp_path / "out", Rule("adaptive-span", "0", heads="1", settings=SPANS), Rule("local", "1"))
    exact, spanned, local = variant_of("mixed", one).layers
    assert spanned.spans == [24.0]
    assert {"spans", "operations"} & {*exact.to_data(), *local.to_data()} == set()


def test_layers_are_in_the_order_of_the_model_however_their_paths_sort():
    model = tiny("BertForSequenceClassification", num_hidden_layers=12)
    surgery.convert(model, Plan.of("local", left=1, right=1))
    layers = variant_of("many", in_memory(model, None, reads=False)).layers
    assert [layer.layer for layer in layers] == list(range(12))
    assert all(layer.to_data().get("heads") is None for layer in layers)


def test_an_unconverted_model_has_nothing_to_verify():
    made = variant_of("stock", in_memory(tiny("BertForSequenceClassification"), None, reads=False))
    assert (made.verified, made.receipt, made.layers) == (True, None, [])


@pytest.mark.parametrize(("architecture", "length"), [("BertForSequenceClassification", 64), ("HubertForCTC", 1024)])
def test_operations_are_a_share_of_those_of_exact_attention_at_the_longest_input(architecture, length):
    model = tiny(architecture)
    surgery.convert(model, Plan.of("adaptive-span", **SPANS))
    one = in_memory(model, None, reads=False)
    spanned = mechanisms(model)[0]
    kind: Any = type(spanned)
    exact = kind(spanned.heads, spanned.head_dim, causal=spanned.causal, scale=spanned.scale, max_span=length, ramp=4)
    with torch.no_grad():
        exact.get_parameter("fraction").fill_(1.0)
    layer = variant_of("spans", one).layers[0]
    assert layer.operations == pytest.approx(spanned.flops(length) / exact.flops(length), rel=0.02)
