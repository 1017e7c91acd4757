"""What the tests of all Triton kernels share: inputs, results and gradients against float64, spoilt outputs, and common rules.

Kernels run under Triton's interpreter, which takes a second for a few dozen tokens, or on a GPU where there is one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_DEVICE = [pytest.mark.gpu] if DEVICE == "cuda" else []
# Triton's interpreter cannot multiply bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
multiplies_bfloat16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cannot multiply bfloat16")
by_direction = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
NAMES = ("out", "dq", "dk", "dv", "dmix")

# Called with q, k, v and perhaps more to differentiate in, `key_mask`, `impl` and settings.
Attend = Callable[..., Tensor]


def draw(length, keys, *, size=16, values=16, heads=1, batch=1, dtype=torch.float32) -> Any:
    """Random q, k and v; heads of a token are contiguous in memory, as in a model."""
    shapes = (length, size), (keys, size), (keys, values)
    return [torch.randn(batch, n, heads, d).to(DEVICE, dtype).transpose(1, 2) for n, d in shapes]


def run(attend: Attend, tensors, key_mask=None, impl="triton", grad=None, **how) -> list[Tensor]:
    """Outputs, and the gradients in all tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves, key_mask=key_mask, impl=impl, **how)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype).expand_as(out))]


def check(attend: Attend, tensors, key_mask=None, *, factor: float | Sequence[float], **how) -> None:
    """Compare outputs and gradients with the reference in float64; `factor` as for `assert_close`, one for all or for each."""
    factors = [factor] * len(NAMES) if isinstance(factor, int | float) else factor
    wide = run(attend, [x.double() for x in tensors], key_mask, "reference", **how)
    plain, computed = (run(attend, tensors, key_mask, impl, **how) for impl in ("reference", "triton"))
    for name, allowed, *each in zip(NAMES, factors, computed, plain, wide, strict=False):
        assert_close(name, *each, factor=allowed)


def spoilt(make: Callable[..., Any], whole: int = 2**31 - 1) -> Callable[..., Any]:
    """The same function, whose new tensors are full of NaN, or of a whole number where their dtype has it."""

    def made(*arguments: Any, **how: Any) -> Any:
        out = make(*arguments, **how)
        for x in (out,) if isinstance(out, Tensor) else out:
            if x.is_floating_point():
                x.fill_(torch.nan)
            elif x.dtype != torch.bool and torch.iinfo(x.dtype).min <= whole <= torch.iinfo(x.dtype).max:
                x.fill_(whole)
        return out

    return made


def check_strides(attend: Attend, heads=1, **how) -> None:
    """Memory layout changes no bit of outputs and gradients."""
    q, k, v = draw(20, 20, heads=heads)
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k)]
    spread = v.repeat(1, 1, 2, 1)[:, :, ::2]
    leaves = [x.requires_grad_() for x in (*odd, spread)]
    out = attend(*leaves, impl="triton", **how)
    # The gradient of a sum is an expanded scalar.
    computed = [out, *torch.autograd.grad(out.sum(), leaves)]
    expected = run(attend, (q, k, spread.contiguous()), grad=torch.ones(1, device=DEVICE), **how)
    assert all(torch.equal(*each) for each in zip(computed, expected, strict=True))


def check_repeats(attend: Attend, length=50, dtype: torch.dtype = torch.float16, **how) -> None:
    """Two calls give the same bits."""
    tensors = draw(length, length, dtype=dtype)
    one, two = (run(attend, tensors, **how) for _ in range(2))
    assert all(torch.equal(*each) for each in zip(one, two, strict=True))


def check_compiles(attend: Attend, tensors: Sequence[Tensor], key_mask=None, same=torch.equal, **how) -> None:
    """`torch.compile` takes it whole, and outputs and gradients are the `same`."""
    leaves = [x.requires_grad_() for x in tensors]

    def call(*leaves: Tensor) -> Tensor:
        return attend(*leaves, key_mask=key_mask, impl="triton", **how)

    # Not dynamic: a setting that differs from the last one compiled would be taken for one that may vary.
    out, expected = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)(*leaves), call(*leaves)
    assert same(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)]
    assert all(same(*each) for each in zip(*grads, strict=True))
