"""Converted models give correct results under tracers, transforms, forward mode, counters, profilers and modes."""

import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from approx.conversion import surgery
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx_kernels.cpu.compile import compiler_obstacle
from forms import FORMS, SMALL
from zoo import tiny

CASES = [("GPT2Model" if causal else "BertModel", name) for name, causal in FORMS if name in MECHANISMS]
# Tracers warn about every shape that becomes a constant, which is intended here.
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
over_all = pytest.mark.parametrize(("family", "name"), CASES)
# The kinds: PyTorch's own attention, steps that can be followed, and one operator with and without parameters, buffers
# and token ids.
KINDS = ("sdpa", "local", "linear", "clustered", "longformer", "lsh", "adaptive-span")
over_kinds = pytest.mark.parametrize(("family", "name"), [case for case in CASES if case[1] in KINDS])
# Mechanisms that run PyTorch's own attention at this length, without kernels of ours.
PLAIN = ("full", "sdpa", "exact", "flash")
LENGTH = 24


class Net(nn.Module):
    """A converted model from tensors to a tensor, as tracers and transforms require."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.more = {"use_cache": False} if model.config.model_type.endswith("gpt2") else {}

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, **self.more)[0]

    def of_embeddings(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, attention_mask=mask, **self.more)[0]


@cache
def converted(family: str, name: str) -> Net:
    model = tiny(family, **({"n_layer": 1} if family == "GPT2Model" else {"num_hidden_layers": 1}))
    surgery.convert(model, Plan.of(name, **SMALL.get(name, {})), calibration=example_inputs(model, 40, batch=2))
    return Net(model).eval()


def draw(seed: int, padded: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 100, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, LENGTH - padded :] = 0
    return ids, mask


def numbers(net: Net, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return net(ids, mask)


def agree(actual: Tensor, expected: Tensor, mask: Tensor) -> None:
    """Compare real queries only, since outputs of padded ones are undefined."""
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@over_all
@pytest.mark.parametrize("padded", [0, 7])
@pytest.mark.sample(10)
def test_a_trace_is_right_for_other_inputs_and_masks_of_the_shape(family, name, padded):
    net = converted(family, name)
    with torch.no_grad():
        traced: Any = torch.jit.trace(net, draw(0, padded), check_trace=False)
        for inputs in (draw(0, padded), draw(1), draw(2, 3), draw(3, 11)):
            agree(traced(*inputs), numbers(net, *inputs), inputs[1])


@over_kinds
def test_vmap_equals_a_batch(family, name):
    net = converted(family, name)
    ids, mask = draw(0, 7)
    with torch.no_grad():
        mapped = torch.func.vmap(lambda one, real: net(one[None], real[None])[0])(ids, mask)
    agree(mapped, numbers(net, ids, mask), mask)


@over_kinds
def test_gradients_of_each_sample_are_those_of_autograd(family, name):
    net = converted(family, name)
    ids, mask = draw(0, 7)
    x = net.model.get_input_embeddings()(ids).detach()

    def loss(x: Tensor, real: Tensor) -> Tensor:
        return net.of_embeddings(x[None], real[None])[0].square().mul(real[:, None]).sum()

    slopes = torch.func.vmap(torch.func.grad(loss))(x, mask)
    for one, real, slope in zip(x, mask, slopes, strict=True):
        one = one.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(one, real), one)
        torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-4)


def test_refuses_second_derivatives_of_one_operator():
    mechanism = MECHANISMS["block"](2, 8, causal=False, scale=8**-0.5)
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    with pytest.raises(
        RuntimeError, match=r"The gradient of .*BlockAttention under torch\.func cannot be differentiated"
    ):
        torch.func.grad(lambda q: torch.func.grad(lambda q: mechanism(q, k, v).square().sum())(q).sum())(q)


@over_all
@pytest.mark.parametrize("way", ["torch.func", "dual level"])
@pytest.mark.sample(24)
def test_forward_and_reverse_mode_derivatives_agree(family, name, way):
    net = converted(family, name)
    ids, mask = draw(0, 7)
    x = net.model.get_input_embeddings()(ids).detach().requires_grad_()
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    out = net.of_embeddings(x, mask)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    (slope,) = torch.autograd.grad(out, x, grad)
    if way == "torch.func":
        actual, change, *_ = torch.func.jvp(lambda x: net.of_embeddings(x, mask), (x.detach(),), (tangent,))
    else:
        with forward_ad.dual_level():
            actual, change = forward_ad.unpack_dual(net.of_embeddings(forward_ad.make_dual(x.detach(), tangent), mask))
    agree(actual, out.detach(), mask)
    assert change is not None
    size = float((grad.norm() * change.norm()).detach())
    torch.testing.assert_close((grad * change).sum(), (slope * tangent).sum(), rtol=0, atol=1e-5 * size)


@over_kinds
@pytest.mark.sample(12)
def test_a_counter_of_operations_sees_layers_and_attention(family, name):
    net = converted(family, name)
    inputs = draw(0, 7)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = net(*inputs)
    agree(out, numbers(net, *inputs), inputs[1])
    layers = [each.weight.numel() for each in net.modules() if isinstance(each, nn.Linear | Conv1D)]
    products = 2 * inputs[0].numel() * sum(layers)
    if family == "BertModel":
        # Its pooler reads one token.
        products -= 2 * (LENGTH - 1) * 2 * net.model.pooler.dense.weight.numel()
    attention = counter.get_total_flops() - products
    (mechanism,) = (each for each in net.modules() if isinstance(each, Mechanism))
    # Plain steps count masked pairs, whole tiles, and blocks wider than these few tokens: six times as many for
    # `linear`.
    assert 0.3 < attention / (2 * mechanism.flops(LENGTH)) < 7


@over_kinds
@pytest.mark.sample(12)
def test_a_profiler_sees_the_operator_that_runs(family, name):
    net = converted(family, name)
    inputs = draw(0, 7)
    with torch.no_grad(), torch.profiler.profile() as profile:
        out = net(*inputs)
    agree(out, numbers(net, *inputs), inputs[1])
    ours = [event.key for event in profile.key_averages() if event.key.startswith("approx_kernels")]
    assert bool(ours) == (name not in PLAIN and compiler_obstacle() is None)


@over_kinds
def test_function_modes_and_inference_mode_change_nothing(family, name):
    net = converted(family, name)
    inputs = draw(0, 7)
    expected = numbers(net, *inputs)
    with torch.device("cpu"):
        agree(numbers(net, *inputs), expected, inputs[1])
    with torch.inference_mode():
        agree(net(*inputs).clone(), expected, inputs[1])


@over_kinds
def test_autocast_rounds_and_no_more(family, name):
    net = converted(family, name)
    inputs = draw(0, 7)
    with torch.autocast("cpu", torch.bfloat16):
        out = numbers(net, *inputs)
    # Rounded scores may choose other keys and buckets, so single numbers may differ by more; seven bits are 2^-8.
    real = inputs[1].bool()
    expected = numbers(net, *inputs)[real]
    assert float((out[real] - expected).norm() / expected.norm()) < 2e-2


@over_kinds
@pytest.mark.sample(12)
def test_meta_tensors_have_the_shape_of_the_output(family, name):
    net = converted(family, name)
    inputs = draw(0, 7)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = net(*(mode.from_tensor(x) for x in inputs))
    assert fake.shape == numbers(net, *inputs).shape


def test_a_layer_left_exact_is_observed_as_well():
    model = tiny("BertModel", num_hidden_layers=2)
    surgery.convert(model, Plan.of("local", layers="0", **SMALL["local"]))
    net = Net(model).eval()
    ids, mask = draw(0, 7)
    expected = numbers(net, ids, mask)
    with torch.no_grad():
        traced: Any = torch.jit.trace(net, draw(1), check_trace=False)
        agree(traced(ids, mask), expected, mask)
        agree(torch.func.vmap(lambda one, real: net(one[None], real[None])[0])(ids, mask), expected, mask)


@pytest.mark.slow
def test_trace_vmap_and_a_counter_work_in_one_process():
    script = f"""
        import torch
        from torch.utils.flop_counter import FlopCounterMode
        from seam.test_observers import agree, converted, draw, numbers

        for name in ("clustered", "longformer", "lsh"):
            net = converted("BertModel", name)
            with torch.no_grad():
                traced = torch.jit.trace(net, draw(0, 7), check_trace=False)
                for given in [draw(seed, seed) for seed in range({LENGTH})]:
                    agree(traced(*inputs), numbers(net, *inputs), given[1])
                ids, mask = draw(1, 3)
                agree(torch.func.vmap(lambda one, real: net(one[None], real[None])[0])(ids, mask), net(ids, mask), mask)
                with FlopCounterMode(display=False) as counter:
                    agree(net(ids, mask), numbers(net, ids, mask), mask)
                assert counter.get_total_flops() > 0
        print("ended well")
    """
    tests = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tests, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "ended well"), run.stderr[-2000:]
