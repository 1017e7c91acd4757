"""FlashAttention of its authors as an implementation of `flash_attention`: how it is called, and what it does not take."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from approx_kernels.dispatch.implementation import chosen
from approx_kernels.ops.exact.reference import materialised_attention
from approx_kernels.ops.flash.api import flash_attention
from approx_kernels.ops.flash.library import call, library, library_obstacle
from closeness import assert_close


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, deterministic=False):
    """What FlashAttention documents, for tensors anywhere: tokens before heads, the last query sees all keys."""
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = softmax_scale * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1 + k.shape[2] - q.shape[2]).bool(), -torch.inf)
    return (scores.softmax(3) @ v).transpose(1, 2)


def with_sums(*arguments, **settings):
    return flash_attn_func(*arguments, **settings), None


@pytest.mark.parametrize("attend", [flash_attn_func, with_sums])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "groups"), [(7, 4), (7, 2), (3, 1)])
def test_call_equals_the_reference(attend, causal, length, groups):
    q, k, v = (torch.randn(2, heads, n, 8).double() for heads, n in ((4, length), (groups, 7), (groups, 7)))
    # One whose last dimension is not contiguous, which FlashAttention refuses.
    k = k.mT.contiguous().mT
    wanted = materialised_attention(q, k, v, None, causal=causal, scale=0.3, dropout=0.0)
    torch.testing.assert_close(call(attend, q, k, v, causal=causal, scale=0.3), wanted)


def on_cuda(heads=2, size=64, values=64, dtype=torch.bfloat16):
    return [torch.empty(1, heads, 8, n, dtype=dtype, device="cuda") for n in (size, size, values)]


@pytest.mark.parametrize(
    ("drawn", "mask", "dropout", "words"),
    [
        ({}, True, 0.0, "skip no padding"),
        ({}, False, 0.1, "no dropout"),
        ({"dtype": torch.float32}, False, 0.0, "torch.float32; FlashAttention takes float16 and bfloat16"),
        ({"values": 32}, False, 0.0, "64 and 32"),
        ({"size": 20, "values": 20}, False, 0.0, "20 and 20"),
        ({"size": 264, "values": 264}, False, 0.0, "264 and 264"),
        ({}, False, 0.0, "fake or meta tensors"),
    ],
)
def test_obstacle_names_what_it_does_not_take(drawn, mask, dropout, words):
    with FakeTensorMode():
        q, k, v = on_cuda(**drawn)
        key_mask = torch.ones(1, 8, dtype=torch.bool, device="cuda") if mask else None
        assert words in str(library_obstacle(q, k, v, key_mask, dropout))


def test_refuses_the_library_on_a_cpu():
    q, k, v = torch.randn(3, 1, 2, 8, 64).unbind()
    with pytest.raises(ValueError, match=r"'library' of flash_attention cannot run: .* needs CUDA tensors"):
        flash_attention(q, k, v, causal=True, scale=0.3, impl="library")


@pytest.mark.parametrize(
    ("there", "capability", "name"),
    [
        (("flash_attn.cute", "flash_attn_interface"), (9, 0), "FlashAttention-4"),
        (("flash_attn.cute",), (10, 0), "FlashAttention-4"),
        (("flash_attn_interface",), (9, 0), "FlashAttention-3"),
        (("flash_attn_interface",), (10, 0), None),
        (("flash_attn.cute", "flash_attn_interface"), (8, 0), None),
        ((), (9, 0), None),
    ],
)
def test_library_is_the_best_that_is_installed_for_the_gpu(there, capability, name, monkeypatch):
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "kernels"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in there:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_func=flash_attn_func))
    found = library.__wrapped__(capability)
    assert (found and found.name) == name


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_installed_flashattention_equals_the_reference(dtype, causal):
    if library(torch.cuda.get_device_capability()) is None:
        pytest.skip("no FlashAttention-3 or -4 is installed")
    leaves = [torch.randn(2, 300, heads, 64, device="cuda", dtype=dtype).transpose(1, 2) for heads in (4, 2, 2)]

    def run(tensors, impl):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = flash_attention(*tensors, causal=causal, scale=0.125, impl=impl)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    wide, plain = run([x.double() for x in leaves], "reference"), run(leaves, "reference")
    computed = run(leaves, "auto")
    assert chosen()["flash_attention"] == "library"
    for name, *each in zip(("out", "dq", "dk", "dv"), computed, plain, wide, strict=True):
        assert_close(name, *each, factor=6.0)
