"""Performer attention: the decrease of its error, the effect of orthogonal rows, recurrent = chunked = parallel."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from approx.conversion import surgery
from approx.mechanisms.exact import FullAttention
from approx.mechanisms.performer import PerformerAttention
from approx.planning.plan import Plan
from approx.seam.dispatch import build
from forms import plain
from zoo import tiny

SIZE = 32
FEATURES = [64, 128, 256, 512, 1024, 2048, 4096]


def make(*, causal=False, **settings):
    """Features only, unless the settings say otherwise."""
    settings = {"estimator": "positive", "floor": 0.0} | settings
    return PerformerAttention(2, SIZE, causal=causal, scale=SIZE**-0.5, **plain("performer", settings))


def drawn(norm, *, length=64):
    """Queries and keys with the given scaled squared norm, and values."""
    q, k, v = torch.randn(3, 1, 2, length, SIZE).unbind()
    q, k = (F.normalize(x, dim=-1) * norm**0.5 * SIZE**0.25 for x in (q, k))
    return q, k, v


def errors(q, k, v, seeds, **settings):
    """Relative error for each number of features, root mean square over seeds."""
    exact = FullAttention(2, SIZE, causal=False, scale=SIZE**-0.5)(q, k, v)
    relative = [
        [((make(features=features, seed=seed, **settings)(q, k, v) - exact).norm() / exact.norm()) for seed in seeds]
        for features in FEATURES
    ]
    return torch.tensor(relative).square().mean(1).sqrt()


def slope(values):
    return np.polyfit(np.log(FEATURES), values.log().numpy(), 1)[0]


# Real heads have scaled squared norms from about 1 upwards; the variance grows exponentially with them, so that larger
# ones would need impractically many features to reach the asymptotic regime.
@pytest.mark.parametrize("norm", [0.5, 1.0, 1.4])
def test_the_error_falls_as_the_root_of_the_number_of_features(norm):
    measured = errors(*drawn(norm), seeds=range(6))
    assert slope(measured) == pytest.approx(-0.5, abs=0.1), measured


@pytest.mark.parametrize("norm", [1.0, 4.0])
def test_orthogonal_rows_have_less_error(norm):
    tensors = drawn(norm)
    orthogonal = errors(*tensors, seeds=range(4))
    independent = errors(*tensors, seeds=range(4), orthogonal=False)
    assert (orthogonal < independent).float().mean() > 0.8
    assert orthogonal.log().mean() < independent.log().mean()


def test_training_redraws_at_its_interval_and_two_processes_agree():
    q, k, v = drawn(4.0)
    first, twin, resumed = (make(features=64, redraw_every=3, seed=2**63 - 1) for _ in range(3))
    begun, original, changed = first.projection.clone(), first.projection.clone(), []
    for step in range(1, 8):
        for mechanism in (first, twin):
            mechanism.after_step(step)
        if not torch.equal(first.projection, original):
            original = first.projection.clone()
            changed.append(step)
        assert torch.equal(first(q, k, v), twin(q, k, v))
    assert changed == [3, 6]
    assert not torch.equal(original, begun)
    assert first.settings == twin.settings == make(features=64, redraw_every=3, seed=2**63 - 1).settings
    # Resuming after step 5 draws at step 6 what an uninterrupted run would.
    resumed.after_step(6)
    assert torch.equal(resumed.projection, original)
    still = make(features=64)
    before = still.projection.clone()
    still.after_step(3)
    assert torch.equal(still.projection, before)


def test_a_converted_model_notifies_its_mechanisms_of_each_step():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("performer", layers="0,2", features=8, redraw_every=2))
    rows = [x for name, x in model.named_buffers() if name.endswith("projection")]
    begun = [x.clone() for x in rows]
    model.step_attention(1)
    assert all(torch.equal(x, y) for x, y in zip(rows, begun, strict=True))
    model.step_attention(2)
    assert not any(torch.equal(x, y) for x, y in zip(rows, begun, strict=True))


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_warns_of_necessary_fine_tuning(kernel):
    assert "until it is fine-tuned" in (make(kernel=kernel).warning or "")


def real_like(*, length=200, seed=0):
    """Queries and keys like those of trained heads, far from the origin and along few directions, and values."""
    generator = torch.Generator().manual_seed(seed)
    stretch = torch.logspace(0.3, -1, SIZE)
    q, k, v = torch.randn(3, 1, 2, length, SIZE, generator=generator).unbind()
    return q * stretch * 0.6 + 0.5, k * stretch.sqrt() * 0.6 - 1.0, v


def error(mechanism, q, k, v):
    exact = FullAttention(2, SIZE, causal=mechanism.causal, scale=SIZE**-0.5)(q, k, v)
    return float((mechanism(q, k, v) - exact).norm() / exact.norm())


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_fitting_to_one_text_lowers_the_error_on_another(causal):
    fitted, text = {}, real_like(seed=1)
    for name, settings in {
        "plain": {},
        "oprf": {"estimator": "oprf"},
        "sderf": {"estimator": "sderf"},
        "aderf": {"estimator": "aderf"},
        "default": {"estimator": "aderf", "floor": None},
    }.items():
        errors_by_seed = []
        for seed in range(4):
            mechanism = make(causal=causal, features=64, seed=seed, **settings)
            if mechanism.takes_calibration:
                mechanism.calibrate(*real_like())
            errors_by_seed.append(error(mechanism, *text))
        fitted[name] = sum(errors_by_seed) / len(errors_by_seed)
    assert sorted(fitted.values(), reverse=True) == list(fitted.values()), fitted


def test_the_fitted_share_is_the_best_of_each_head_and_leaves_a_gradient():
    text = real_like()
    mechanism = make(features=32, estimator="aderf", floor=None)
    assert mechanism.takes_calibration
    assert not mechanism.needs_calibration
    assert mechanism.share.tolist() == [0.5, 0.5]
    mechanism.calibrate(*text)
    best = error(mechanism, *text)
    for change in ([0.03, 0.0], [0.0, 0.03], [-0.03, 0.0], [0.0, -0.03]):
        other = make(features=32, estimator="aderf", floor=None)
        other.load_state_dict(mechanism.state_dict())
        other.share += torch.tensor(change)
        assert error(other, *text) > best
    # Attention so sharp that 2 features cannot represent it.
    hopeless = make(features=2, floor=None)
    hopeless.calibrate(30 * text[0], 30 * text[1], text[2])
    assert 0.7 < hopeless.share.min() < hopeless.share.max() == pytest.approx(0.9)


def test_a_floor_is_a_share_of_uniform_attention():
    q, k, v = drawn(4.0)
    estimate, half, whole = (make(features=64, floor=floor)(q, k, v) for floor in (0.0, 0.5, 1.0))
    torch.testing.assert_close(whole, v.mean(2, keepdim=True).expand_as(v))
    torch.testing.assert_close(half, (estimate + whole) / 2)
    assert torch.equal(make(features=64, estimator="aderf", floor=0.5)(q, k, v), make(features=64, floor=0.5)(q, k, v))


def test_padding_is_not_fitted_to():
    q, k, v = real_like(length=40)
    mask = torch.rand(1, 40) < 0.6
    first, other = (make(features=32, estimator="aderf", floor=None) for _ in range(2))
    padded, real = ~mask[:, None, :, None], mask[0]
    first.calibrate(q.masked_fill(padded, 1e3), k.masked_fill(padded, 1e3), v.masked_fill(padded, 1e3), mask)
    other.calibrate(q[:, :, real], k[:, :, real], v[:, :, real])
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], msg=name)
    before = {name: x.clone() for name, x in first.state_dict().items()}
    first.calibrate(q, k, v, torch.zeros_like(mask))
    assert all(torch.equal(x, before[name]) for name, x in first.state_dict().items())


def test_a_converted_model_is_fitted_only_with_a_calibration_batch():
    inputs = {"input_ids": torch.arange(40)[None]}
    plan = Plan.of("performer", features=8)
    fitted, plain = tiny("BertModel"), tiny("BertModel")
    surgery.convert(fitted, plan, calibration=inputs)
    surgery.convert(plain, plan)
    state = {name: x for name, x in plain.state_dict().items() if name.endswith(("curvature", "share"))}
    assert state
    for name, x in state.items():
        assert x.eq(0.0 if name.endswith("curvature") else 0.5).all()
        assert not torch.equal(fitted.state_dict()[name], x)


def test_a_layer_of_an_earlier_version_keeps_its_features():
    site = {"heads": 2, "head_dim": SIZE, "causal": False, "scale": SIZE**-0.5, "mechanism": "performer"}
    stated = {"features": 64, "orthogonal": True, "kernel": "softmax", "seed": 3, "redraw_every": 0}
    old, q_k_v = build({**site, "settings": stated}), drawn(4.0)
    assert isinstance(old, PerformerAttention)
    assert list(old.state_dict()) == ["projection"]
    assert torch.equal(old(*q_k_v), make(features=64, seed=3)(*q_k_v))
