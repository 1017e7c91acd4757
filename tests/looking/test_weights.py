"""Attention weights of every mechanism from unit values, against float64 and against the receipts of a conversion."""

import math

import pytest
import torch

import approx
from approx.conversion.verify import layer_damage
from approx.looking import weights as looking
from approx.looking.weights import weights
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from approx.seam.observe import Call, observe
from zoo import error_of, example_inputs, tiny

FORMS = {"bidirectional": "BertForSequenceClassification", "causal": "LlamaForCausalLM"}
CASES = [(name, form, variant) for name, kind in MECHANISMS.items() for form in FORMS for variant in kind.examples]


def converted(name: str, architecture: str, **settings):
    model = tiny(architecture)
    approx.convert(model, Plan((Rule(name, "all", settings),)), calibration=example_inputs(model, 40))
    return model


def seen(model, length: int = 50, *, block: int = 1, of_heads: tuple[int, ...] = ()):
    """Each self-attention call with its weights, and the inputs."""
    inputs = example_inputs(model, length, seed=3)
    found = []
    with (
        observe(model, lambda call: found.append((call, weights(call, block, block, of_heads)))),
        torch.inference_mode(),
    ):
        model.base_model(**inputs)
    return found, inputs


def softmax(call: Call) -> torch.Tensor:
    """Exact weights in float64, [H, L, S]."""
    sharing = call.q.shape[1] // call.k.shape[1]
    q, k = call.q[0].double(), call.k[0].double().repeat_interleave(sharing, 0)
    scores = call.scale * q @ k.mT
    if call.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


def able():
    """Mechanisms with a form and a variant of settings, where there is one."""
    for name, form, variant in CASES:
        kind = MECHANISMS[name]
        settings = kind.examples[variant]
        causal = form == "causal"
        if not getattr(kind, f"supports_{form}"):
            continue
        if error_of(
            lambda kind=kind, causal=causal, settings=settings: kind(4, 8, causal=causal, scale=0.3, **settings)
        ):
            continue
        yield pytest.param(name, form, settings, id=f"{name}-{form}-{variant or 'plain'}")


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "form", "settings"), [*able()])
def test_weights_times_values_are_the_outputs_and_rows_sum_to_one(name, form, settings):
    model = converted(name, FORMS[form], **settings)
    found, inputs = seen(model)
    damage = layer_damage(model, inputs)
    for call, made in found:
        assert torch.allclose(made.exact.double(), softmax(call), atol=1e-5)
        assert made.reproduced < 1e-5
        if made.approximate is None:
            continue
        # The delta rule is not normalised, and features that are all 0 leave the rows of `t2r` empty.
        if call.mechanism.averages and settings.get("feature_map") != "t2r":
            assert torch.allclose(made.approximate.sum(-1), torch.ones(()), atol=1e-4)
        if MECHANISMS[name].always_exact:
            assert torch.allclose(made.approximate.double(), softmax(call), atol=1e-5)
            assert torch.allclose(made.kept, torch.ones(()), atol=1e-4)
        together = torch.minimum(made.exact, made.approximate.clamp(min=0)).sum((1, 2)) / made.exact.sum((1, 2))
        assert torch.allclose(made.kept, together, atol=1e-4)
        lost = damage[call.layer]
        out, target = (
            call.output[0].double(),
            softmax(call) @ call.v[0].double().repeat_interleave(call.q.shape[1] // call.k.shape[1], 0),
        )
        assert torch.allclose(
            made.error.double(), (out - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1), atol=1e-4
        )
        if lost.captured_mass is None:
            assert made.captured.isnan().all()
        else:
            assert float(made.captured.mean()) == pytest.approx(lost.captured_mass, abs=1e-4)


@pytest.mark.parametrize("name", ["local", "strided", "longformer", "sinks"])
def test_a_pattern_has_no_weight_outside_of_it(name):
    form = "bidirectional" if MECHANISMS[name].supports_bidirectional else "causal"
    model = converted(name, FORMS[form], **MECHANISMS[name].examples[""])
    for call, made in seen(model)[0]:
        allowed = call.mechanism.pattern(50).any(0)
        assert not allowed.all()
        assert made.approximate[:, ~allowed].abs().max() == 0
        assert (made.approximate[:, allowed] > 0).any()


def test_blocks_are_means_over_queries_of_sums_over_keys():
    model = converted("clustered", FORMS["bidirectional"], clusters=4)
    single, blocks = (seen(model, 50, block=block)[0][1][1] for block in (1, 7))
    for fine, coarse in ((single.exact, blocks.exact), (single.approximate, blocks.approximate)):
        assert coarse.shape == (4, 8, 8)
        sums = torch.stack([part.sum(-1) for part in fine.split(7, 2)], 2)
        means = torch.stack([part.mean(1) for part in sums.split(7, 1)], 1)
        assert torch.allclose(coarse, means, atol=1e-6)
    assert torch.allclose(single.kept, blocks.kept)


@pytest.mark.parametrize("name", ["clustered", "strided", "linear"])
def test_shares_of_long_inputs_are_near_those_of_all_keys(name, monkeypatch):
    model = converted(name, FORMS["bidirectional"], **MECHANISMS[name].examples[""])
    whole = seen(model, 60)[0]
    monkeypatch.setattr(looking, "MEASURED_WHOLE", 32)
    monkeypatch.setattr(looking, "SAMPLED", 20)
    some = seen(model, 60)[0]
    for (_, all_keys), (_, sampled) in zip(whole, some, strict=True):
        assert (sampled.measured, sampled.reproduced) == (40, None)
        assert torch.equal(sampled.exact, all_keys.exact)
        assert torch.allclose(sampled.approximate, all_keys.approximate, atol=1e-6)
        assert torch.allclose(sampled.error, all_keys.error)
        assert torch.allclose(sampled.kept, all_keys.kept, atol=0.05)
        assert torch.allclose(sampled.captured, all_keys.captured, atol=0.05, equal_nan=True)


def test_far_shares_are_the_weight_beyond_window_and_first_tokens():
    model = converted("linear", FORMS["causal"], window=4, sinks=2)
    call, made = seen(model)[0][1]
    far = torch.ones(50, 50, dtype=torch.bool).tril(-4)
    far[:, :2] = False
    assert torch.allclose(made.far[0].double(), (softmax(call) * far).sum(-1), atol=1e-5)
    assert torch.allclose(made.far[1], (made.approximate * far).sum(-1), atol=1e-5)


def test_estimates_of_exact_weights_lie_on_the_diagonal():
    model = converted("performer", FORMS["bidirectional"], features=64)
    made = seen(model, 50, of_heads=(1,))[0][1][1]
    found = made.estimates[1]
    difference = made.approximate[1].double() - made.exact[1].double()
    assert found.relative == pytest.approx(float(difference.norm() / made.exact[1].double().norm()), rel=1e-5)
    assert all(low <= middle <= high for low, middle, high in zip(found.low, found.middle, found.high, strict=True))


def test_groups_of_heads_are_each_measured_by_their_own_mechanism():
    model = tiny(FORMS["bidirectional"])
    approx.convert(model, Plan((Rule("local", "all", {"left": 3, "right": 3}, heads="0-1"),)))
    call, made = seen(model)[0][0]
    assert torch.allclose(made.approximate[2:].double(), softmax(call)[2:], atol=1e-5)
    assert torch.allclose(made.kept[2:], torch.ones(()), atol=1e-5)
    assert (made.kept[:2] < 0.5).all()
    assert made.captured.isnan().tolist() == [False, False, True, True]
