"""Observers of the operations of a call, and which implementation then runs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from approx_kernels.ops.clustered.api import causal_clustered_attention
from approx_kernels.ops.clustering.api import draw_centroids
from approx_kernels.ops.exact.compiled import compiled_few
from approx_kernels.ops.linear.api import linear_decode
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.patterns.api import local_attention
from approx_kernels.runtime import pytorch
from approx_kernels.runtime.pytorch import Observer, needs_pytorch, observed, unreadable
from approx_kernels.tokens import stretches
from c_sources import needs_compiler

X = torch.arange(6.0).view(2, 3)


class Marked(Tensor):
    pass


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Seen:
    """Records the observers and the resulting choice at each call."""

    def __call__(self, x: Tensor) -> Tensor:
        self.who, self.unreadable, self.why = observed(x), unreadable(x), needs_pytorch(x)
        return x * 2


def in_context(context):
    def run(seen):
        with context() as made:
            seen(made.from_tensor(X) if isinstance(made, FakeTensorMode) else X)

    return run


def dual(seen):
    with forward_ad.dual_level():
        seen(forward_ad.make_dual(X, X))


OBSERVERS = {
    "trace": (Observer.TRACE, lambda seen: torch.jit.trace(seen.__call__, X, check_trace=False)),
    "vmap": (Observer.TRANSFORM, lambda seen: torch.func.vmap(seen)(X)),
    "grad": (Observer.TRANSFORM, lambda seen: torch.func.grad(lambda x: seen(x).sum())(X)),
    "jvp": (Observer.TANGENTS, lambda seen: torch.func.jvp(seen, (X,), (X,))),
    "jacfwd": (Observer.TANGENTS, lambda seen: torch.func.jacfwd(seen)(X)),
    "dual level": (Observer.TANGENTS, dual),
    "functionalize": (Observer.DISPATCH_MODE, lambda seen: torch.func.functionalize(seen)(X)),
    "make_fx": (Observer.NUMBERLESS, lambda seen: make_fx(seen)(X)),
    "fake tensors": (Observer.NUMBERLESS, in_context(FakeTensorMode)),
    "a meta tensor": (Observer.NUMBERLESS, lambda seen: seen(X.to("meta"))),
    "a subclass": (Observer.SUBCLASS, lambda seen: seen(X.as_subclass(Marked))),
    "a counter": (Observer.DISPATCH_MODE, in_context(lambda: FlopCounterMode(display=False))),
    "a dispatch mode": (Observer.DISPATCH_MODE, in_context(Listening)),
    "a function mode": (Observer.FUNCTION_MODE, in_context(lambda: torch.device("cpu"))),
    "a profiler": (Observer.PROFILER, in_context(torch.profiler.profile)),
}
NUMBERLESS = (Observer.TRACE, Observer.TRANSFORM, Observer.NUMBERLESS)
WATCHING = (Observer.FUNCTION_MODE, Observer.PROFILER)


def heads(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, 24, 16, generator=generator) for _ in range(3)]


def local(q: Tensor, k: Tensor, v: Tensor, impl: str = "auto") -> Tensor:
    return local_attention(q, k, v, left=3, right=2, scale=0.25, impl=impl)


@pytest.mark.parametrize("name", OBSERVERS)
def test_detects_each_observer_while_it_is_active(name):
    who, run = OBSERVERS[name]
    seen = Seen()
    run(seen)
    assert (seen.who, seen.unreadable) == (who, who in NUMBERLESS)
    assert (seen.why is None) == (who in WATCHING)
    seen(X)
    assert (seen.who, seen.unreadable, seen.why) == (None, False, None)


def test_a_compiler_is_noticed():
    actual = torch.compile(lambda x: x * (observed(x) is Observer.COMPILER), backend="eager", fullgraph=True)(X)
    assert torch.equal(actual, X)


def test_gradients_and_inference_observe_nothing():
    assert observed(torch.nn.Parameter(X.clone()), None) is None
    with torch.inference_mode():
        assert observed(X) is None


def test_a_version_that_hides_its_observers_counts_as_observed(monkeypatch):
    q, k, v = heads()
    expected = local(q, k, v)
    monkeypatch.setattr(pytorch, "_sees_all", False)
    assert observed(X) is Observer.UNKNOWN
    assert needs_pytorch(X) is not None
    torch.testing.assert_close(local(q, k, v), expected, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", ["vmap", "jvp", "a counter", "trace"])
def test_an_explicit_choice_of_c_refuses_observers(name):
    q, k, v = heads()

    class Asking(Seen):
        def __call__(self, x: Tensor) -> Tensor:
            local(q, k, v, impl="cpu")
            return x

    with pytest.raises(ValueError, match=r"observes the operations, and only sees those of PyTorch\. Ask for 'auto'"):
        OBSERVERS[name][1](Asking())


def test_a_trace_calls_none_of_our_operators():
    q, k, v = heads()
    traced: Any = torch.jit.trace(local, (q, k, v), check_trace=False)
    kinds = {node.kind().split("::")[0] for node in traced.graph.nodes()}
    assert kinds <= {"aten", "prim"}
    assert not [node for node in traced.graph.nodes() if node.kind() == "prim::PythonOp"]
    other: Any = heads(1)
    torch.testing.assert_close(traced(*other), local(*other), rtol=1e-5, atol=1e-6)


def test_stretches_are_views_of_the_numbers_for_every_observer():
    x = torch.randn(1, 2, 9, 4)
    bounds = [(0, 5), (3, 9)]
    expected = [x[:, :, begin:end] for begin, end in bounds]
    changes = torch.func.jvp(lambda x: stretches(x, bounds), (x,), (x,))[1]
    for parts in (stretches(x, bounds), changes):
        for one, other in zip(parts, expected, strict=True):
            assert torch.equal(one, other)


def causal_lsh(variant, **more):
    q, k, v = heads()
    drawn = draw_projections(q.shape[3], rounds=2, variant=variant, causal=True, seed=0)
    kind = {"projections": drawn, "variant": variant, "cluster": 4, "dedup": False, "scale": 0.3}
    return lsh_attention(q, q if variant == "shared" else k, v, causal=True, **kind, **more, impl="cpu")


def sorted_lsh(variant):
    q, k, v = heads()
    drawn = draw_projections(q.shape[3], rounds=2, variant=variant, causal=False, seed=0)
    kind = {"projections": drawn, "variant": variant, "cluster": 4, "buckets": 4, "dedup": False, "scale": 0.3}
    return lsh_attention(q, q if variant == "shared" else k, v, causal=False, **kind, impl="cpu")


def clustered_past():
    q, k, v = heads()
    centroids, selectors = draw_centroids(q.shape[1], q.shape[3], clusters=3, seed=0)
    form = {"centroids": centroids, "selectors": selectors, "chunk": 4, "topk": 2, "scale": 0.3}
    return causal_clustered_attention(q, k, v, **form, impl="cpu")


def decoded(**form):
    q, k, v = heads()
    _, state = linear_decode(q, k, v, **form, impl="cpu")
    return linear_decode(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, state, **form, impl="cpu")[0]


def few():
    q, k, v = heads()
    q = q[:, :, :2]
    return compiled_few(q, k, v, None, causal=True, scale=0.3)


@needs_compiler
@pytest.mark.parametrize(
    ("call", "operators"),
    [
        (lambda: causal_lsh("asymmetric"), {"hash_tokens", "find_stretches", "attend"}),
        (lambda: causal_lsh("shared"), {"nearest_buckets", "find_stretches", "attend"}),
        (lambda: sorted_lsh("asymmetric"), {"sort_tokens", "attend"}),
        (lambda: sorted_lsh("shared"), {"nearest_buckets", "sort_codes", "attend"}),
        (clustered_past, {"nearest_of_heads", "attend"}),
        (decoded, {"attend_on", "step"}),
        (few, {"few"}),
    ],
    ids=["lsh causal", "lsh shared causal", "lsh", "lsh shared", "clustered causal", "linear decoded", "few queries"],
)
def test_a_profiler_sees_every_call_of_c(call, operators):
    expected = call()
    with torch.profiler.profile() as profile:
        actual = call()
    seen = {each.key.partition("::")[2] for each in profile.key_averages() if each.key.startswith("approx_kernels")}
    assert seen == operators
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
