"""A variant of a record: the mechanisms of a model, and the spans that its heads learned."""

import pytest
import torch

from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.conversion.calibration import mechanisms
from approx.measuring.variants import variant_of
from approx.planning.plan import Plan, Rule
from tiny_study import tiny_checkpoint

SPANS = {"max_span": 24, "ramp": 4}


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
