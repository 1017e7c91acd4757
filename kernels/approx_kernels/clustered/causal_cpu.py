"""Causal clustered attention on a CPU: forward in C, and backward through the plain form, computed once more."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from approx_kernels.c_language import Rows, address, check, library, rows_of
from approx_kernels.c_language import obstacle as c_obstacle
from approx_kernels.clustered.causal import causal_samples
from approx_kernels.clustered.causal_c import CAUSAL
from approx_kernels.clustering import nearest_centroids


class _Problem(ctypes.Structure):
    """`problem` of causal_c.py."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "keys", "size", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "chunk", "kept", "bf16", "threads")),
        *((name, Rows) for name in ("q", "k", "v", "centroids", "out")),
        ("groups", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


def obstacle(q: Tensor, dropout: float) -> str | None:
    """Why causal clustered attention cannot run in C, with the remedy; None where it can."""
    if dropout:
        return "it drops no weights. Set the dropout of attention to 0, or ask for 'auto'."
    return c_obstacle(CAUSAL, q)


def causal_samples_in_c(
    q: Tensor, k: Tensor, v: Tensor, *, centroids: Tensor, selectors: Tensor, chunk: int, topk: int, scale: float
) -> Tensor:
    """As `causal_samples`, without dropout."""
    with torch.autocast("cpu", enabled=False):
        return _Causal.apply(q, k.to(q.dtype), v.to(q.dtype), centroids, selectors, chunk, topk, scale)  # pyright: ignore[reportReturnType]  # what forward returns


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        centroids: Tensor,
        selectors: Tensor,
        chunk: int,
        topk: int,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.settings = {"centroids": centroids, "selectors": selectors, "chunk": chunk, "topk": topk, "scale": scale}
        batch, heads, length, size = q.shape
        rows = centroids.detach().float().expand(batch, -1, -1, -1)
        groups = nearest_centroids(q, selectors)
        if length < rows.shape[2]:
            # The few queries of a decoding step each bring the row of their centroid, and no other is computed.
            rows = rows.gather(2, groups[..., None].expand(-1, -1, -1, size))
            groups = torch.arange(length).expand_as(groups)
        q, k, v, rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, rows))
        groups = groups.int().contiguous()
        # As models want it next, tokens before heads. One key at least is left to the sums, so that they are never empty.
        out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
        sizes = (*q.shape[:3], k.shape[2], size, v.shape[3], rows.shape[2], max(chunk, topk + 1), topk)
        places = (*map(rows_of, (q, k, v, rows, out)), address(groups))
        problem = _Problem(*sizes, q.dtype == torch.bfloat16, torch.get_num_threads(), *places, scale)
        found = library(CAUSAL)
        assert not isinstance(found, str), f"checked by the op: {found}"
        check(found.forward(ctypes.byref(problem)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # named arguments there
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = causal_samples(inputs[0], inputs[1], inputs[2], **ctx.settings, dropout=0.0)
        return *torch.autograd.grad(out, inputs, grad), *[None] * 5
