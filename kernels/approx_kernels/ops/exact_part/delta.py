"""The gated delta rule in C on a CPU, where no gradient is needed, and by flash-linear-attention on a GPU."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.structs import Delta, address, rows_of
from approx_kernels.ops.exact_part.cpu import has_gradients
from approx_kernels.ops.linear.reference import continue_delta
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import needs_pytorch


def delta_in_c(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor, state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """`continue_delta` of [B, H, n, F], in one pass in C unless a gradient or another dtype needs the steps."""
    inputs = queries, keys, values, decays, rates, *(state or ())
    wide = any(x.dtype != torch.float32 for x in inputs)
    if wide or not keys.shape[2] or has_gradients(*inputs) or c_obstacle("linear/delta.c", queries):
        return continue_delta(queries, keys, values, decays, rates, state)
    steps = decays[..., 0].contiguous(), rates[..., 0].contiguous()
    out, written, sums, total = _follow_rule(queries, keys, values, *steps, *(state or (None, None)))
    return out, written, (sums, total)


def _empty(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    rates: Tensor,
    sums: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, size = queries.shape
    sizes = (length, values.shape[3]), (length,), (size, values.shape[3]), (1,)
    out, written, new, most = (queries.new_empty(batch, heads, *each) for each in sizes)
    return out, written, new, most


@custom_op(_empty)
def _follow_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    rates: Tensor,
    sums: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, written, new, most = _empty(queries, keys, values, decays, rates, sums, total)
    for x, earlier in ((new, sums), (most, total)):
        _ = x.zero_() if earlier is None else x.copy_(earlier)
    queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
    batch, heads, length, size = queries.shape
    number, count = torch.float32, keys.shape[2]
    places = (
        address(decays, number, batch, heads, count),
        address(rates, number, batch, heads, count),
        address(new, number, batch, heads, size, values.shape[3]),
        address(most, number, batch, heads, 1),
        address(written, number, batch, heads, length),
    )
    sizes = batch, heads, length, count, size, values.shape[3], torch.get_num_threads()
    call("linear/delta.c", "follow_rule", Delta(*sizes, *rows_of(queries, keys, values, out), *places))
    return out, written, new, most


# Head sizes that its kernels take.
_MOST_FEATURES = 256
# Tokens per chunk of `_written`.
_CHUNK = 64


@functools.cache
def _library() -> Callable[..., Any] | None:
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception:  # a package that is missing, broken, or made for another torch cannot be called
        return None


def fla_obstacle(q: Tensor, values: int) -> str | None:
    """Why flash-linear-attention cannot run the rule for queries q and values of a size, with the remedy; None if it can."""
    if not q.is_cuda:
        return f"a tensor is on the {q.device.type}; flash-linear-attention needs CUDA tensors. Move it to a GPU."
    if q.dtype not in (torch.float16, torch.bfloat16):
        return (
            f"a tensor is {q.dtype}; flash-linear-attention takes float16 and bfloat16. Convert it, or ask for 'auto'."
        )
    if max(q.shape[3], values) > _MOST_FEATURES:
        return f"a head size is above {_MOST_FEATURES}, the largest of flash-linear-attention. Ask for 'auto'."
    if why := needs_pytorch(q):
        return why
    if _library() is None:
        return "flash-linear-attention is not installed. pip install 'fla-core[cuda]'."
    return None


def delta_by_fla(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    rates: Tensor,
    state: tuple[Tensor, Tensor] | None,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """`continue_delta` of [B, H, n, F] by `chunk_gated_delta_rule`, on queries, keys and values rounded to 16 bits."""
    attend = _library()
    assert attend is not None, "fla_obstacle says so before"
    length, total = queries.shape[2], max(queries.shape[2], keys.shape[2])
    # It has a query for each key, and tokens before heads.
    parts = [F.pad(x, (0, 0, total - x.shape[2], 0)).transpose(1, 2) for x in (queries, keys, values, decays, rates)]
    sums, weight = state or (None, None)
    out, sums = attend(
        *(x.to(dtype).contiguous() for x in parts[:3]),
        g=parts[3][..., 0].contiguous(),
        beta=parts[4][..., 0].contiguous(),
        scale=1.0,
        initial_state=sums,
        output_final_state=True,
    )
    decays, rates = (x[..., 0].transpose(1, 2) for x in parts[3:])
    written = _written(decays, rates, weight)
    return (
        out.transpose(1, 2)[:, :, -length:].to(queries.dtype),
        written[..., -length:],
        (sums, written[..., -1:].clone()),
    )


def _written(decays: Tensor, rates: Tensor, weight: Tensor | None) -> Tensor:
    """`w_t = exp(a_t) w_{t-1} + b_t` of [B, H, n] after an earlier w, [B, H, 1]."""
    chunks = -(-decays.shape[-1] // _CHUNK)
    ends = chunks * _CHUNK - decays.shape[-1], 0
    decays, rates = (F.pad(x, ends).unflatten(-1, (chunks, _CHUNK)) for x in (decays, rates))
    decays = decays.cumsum(-1)
    apart = (decays[..., :, None] - decays[..., None, :]).tril().exp().tril()
    inside, kept = (apart @ rates[..., None])[..., 0], decays.exp()
    weight = torch.zeros_like(kept[..., 0, :1]) if weight is None else weight
    parts: list[Tensor] = []
    for chunk in range(chunks):
        parts.append(inside[..., chunk, :] + kept[..., chunk, :] * weight)
        weight = parts[-1][..., -1:]
    return torch.cat(parts, -1)[..., ends[0] :]
