"""Attention by features on a CPU, both ways in C: one pass over queries, keys and values, sums in float32."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.cpu.compile import call
from approx_kernels.cpu.compile import obstacle as c_obstacle
from approx_kernels.cpu.structs import Linear, LinearBackward, address, rows_of
from approx_kernels.runtime.custom_op import custom_op
from approx_kernels.runtime.pytorch import without_autocast
from approx_kernels.tokens import beside, empty_gradients, empty_rows, in_order, sharing, summed, turns

# Maps of single numbers; exponentials are only of random rows. In the order of features.h.
FUSED = ("elu", "relu")
_MAPS = (*FUSED, "exp")


def features_obstacle(q: Tensor) -> str | None:
    """Why attention by the features implemented in C cannot run on such tensors, with the remedy; None if it can."""
    return c_obstacle("linear/forward.c", q) or c_obstacle("linear/backward.c", q)


def linear_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
    rows: Tensor | None = None,
    offsets: Tensor | None = None,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend: outputs, normalisers with eps, [B, H, L] in float32, and the logarithms of what these are relative to, which are 0
    except for the map `exp`, and are not differentiated. The backward pass stores only the inputs and recomputes their features.

    With random rows w, [F, D] or per head [H, F, D], features are `relu(w.x) + floor`, or for the map `exp`
    exp(w.x - |x|^2 / 2), those of queries times exponentials of the offsets, which have the shape of rows without D.
    """
    q, k, v = _laid_out(q, k, v)
    key_mask = None if key_mask is None else key_mask.contiguous()
    # Bottom-right: with L > S the first L - S queries precede all keys, and see none.
    blind = max(q.shape[2] - k.shape[2], 0) if causal else 0
    with without_autocast("cpu"):
        rows, offsets = _whole(rows), _whole(offsets)
        out, norms, bases = _attend(
            q[:, :, blind:], k, v, key_mask, rows, offsets, causal, feature_map, input_scale, eps, floor
        )
    if blind:
        return F.pad(out, (0, 0, blind, 0)), F.pad(norms, (blind, 0), value=eps), F.pad(bases, (blind, 0))
    return out, norms, bases


def linear_continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    *,
    feature_map: str,
    input_scale: float,
    eps: float,
    tops: Tensor | None = None,
    rows: Tensor | None = None,
    offsets: Tensor | None = None,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `linear_batch`, causal, after keys whose sums are [B, G, F, E + 1] float32; adds the new keys to them in
    place.

    With L > S the first L - S queries see only the earlier keys. For the map `exp` sums are relative to exponentials of
    the tops, [B, G, F], float32, which are overwritten likewise.
    """
    how: dict[str, Any] = {
        "feature_map": feature_map,
        "input_scale": input_scale,
        "eps": eps,
        "rows": rows,
        "offsets": offsets,
        "floor": floor,
    }
    if sharing(q, k) > 1 and q.shape[2] == 1:
        # A single query sees every key, so the query heads that share a key head act as queries of one head.
        out, norms = _continue(beside(q, k), k, v, key_mask, sums, tops, seen=True, **how)
        return out.reshape(*q.shape[:3], -1), norms.reshape(q.shape[:3])
    results = []
    *others, last = turns(q, k)
    for turn in others:
        kept = sums.clone(), None if tops is None else tops.clone()
        results.append(_continue(q[:, turn], k, v, key_mask, *kept, **how))
    # Each turn added the same keys to its copy of the sums.
    results.append(_continue(q[:, last], k, v, key_mask, sums, tops, **how))
    outs, norms = zip(*results, strict=True)
    return in_order(outs), in_order(norms)


def _continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
    tops: Tensor | None,
    *,
    rows: Tensor | None,
    offsets: Tensor | None,
    feature_map: str,
    input_scale: float,
    eps: float,
    floor: float,
    seen: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same for as many query heads as key heads; queries have `seen` all keys, or are the last tokens."""
    mask = None if key_mask is None else key_mask.contiguous()
    how = feature_map, input_scale, eps, floor
    return _attend_on(*_laid_out(q, k, v), mask, sums, tops, _whole(rows), _whole(offsets), seen, *how)


@custom_op(lambda q, k, v, *_: _empty(q, k, v), mutates=("sums", "tops"))
def _attend_on(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sums: Tensor,
    tops: Tensor | None,
    rows: Tensor | None,
    offsets: Tensor | None,
    seen: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
    floor: float,
) -> tuple[Tensor, Tensor]:
    out, norms = _empty(q, k, v)
    how = feature_map, input_scale, eps, floor
    blind = 0 if seen else max(q.shape[2] - k.shape[2], 0)
    if blind:
        few, norms = norms[:, :, :blind].contiguous(), norms[:, :, blind:].contiguous()
        parts = q[:, :, :blind], k[:, :, :0], v[:, :, :0], out[:, :, :blind], None
        call("linear/forward.c", "forward", _problem(*parts, rows, offsets, sums, tops, few, False, *how))
    parts = q[:, :, blind:], k, v, out[:, :, blind:], mask
    call("linear/forward.c", "forward", _problem(*parts, rows, offsets, sums, tops, norms, not seen, *how))
    return out, torch.cat([few, norms], 2) if blind else norms


def _laid_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    return q, k, v


def _whole(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.float().contiguous()


def _empty(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_with_bases(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, norms = _empty(q, k, v)
    return out, norms, norms.new_zeros(norms.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.how = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, grad: Tensor, grad_norms: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    grad_norms = None if grad_norms is None else grad_norms.contiguous()
    # Read once: with activation recomputation a second read fails.
    saved = ctx.saved_tensors
    dq, dk, dv = _attend_backward(grad, grad_norms, *saved, *ctx.how)
    k, v = saved[1:3]
    return dq, summed(dk, k.shape[1]), summed(dv, v.shape[1]), *[None] * 8


def _products(q: list[int], k: list[int], v: list[int], rows: list[int] | None, passes: int) -> int:
    """FLOPs of computing random features once, and of `passes` products of features and values."""
    features, random = (q[3], 0) if rows is None else (rows[-2], q[3] * rows[-2] * (q[2] + k[2]))
    return 2 * q[0] * q[1] * (random + passes * features * v[3])


def _count(q: list[int], k: list[int], v: list[int], mask: Any, rows: Any, *_: Any, out_shape: Any = None) -> int:
    return _products(q, k, v, rows, q[2] + k[2])


def _count_backward(
    grad: Any,
    norms: Any,
    q: list[int],
    k: list[int],
    v: list[int],
    mask: Any,
    rows: Any,
    *_: Any,
    out_shape: Any = None,
) -> int:
    return _products(q, k, v, rows, 2 * q[2] + 3 * k[2])


@custom_op(lambda grad, grad_norms, q, k, v, *_: empty_gradients(q, k, v), flops=_count_backward)
def _attend_backward(
    grad: Tensor,
    grad_norms: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    rows: Tensor | None,
    offsets: Tensor | None,
    causal: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    made = empty_gradients(q, k, v)
    how = causal, feature_map, input_scale, eps, floor
    problem = _problem(q, k, v, grad, key_mask, rows, offsets, None, None, grad_norms, *how)
    call("linear/backward.c", "backward", LinearBackward(problem, *rows_of(grad, *made)))
    return made


@custom_op(_empty_with_bases, flops=_count, backward=_gradients, save=_keep)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    rows: Tensor | None,
    offsets: Tensor | None,
    causal: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out, norms, bases = _empty_with_bases(q, k, v)
    features = q.shape[3] if rows is None else rows.shape[-2]
    sums = q.new_zeros(*q.shape[:2], features, v.shape[3] + 1, dtype=torch.float32)
    how = causal, feature_map, input_scale, eps, floor
    call("linear/forward.c", "forward", _problem(q, k, v, out, key_mask, rows, offsets, sums, None, norms, *how, bases))
    return out, norms, bases


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    key_mask: Tensor | None,
    rows: Tensor | None,
    offsets: Tensor | None,
    sums: Tensor | None,
    tops: Tensor | None,
    norms: Tensor | None,
    causal: bool,
    feature_map: str,
    input_scale: float,
    eps: float,
    floor: float,
    bases: Tensor | None = None,
) -> Linear:
    features, sets = (q.shape[3], 1) if rows is None else (rows.shape[-2], rows.shape[0] if rows.ndim == 3 else 1)
    sizes = (*q.shape[:3], k.shape[2], q.shape[3], features, v.shape[3])
    how = sets, causal, _MAPS.index(feature_map), q.dtype == torch.bfloat16, torch.get_num_threads()
    batch, heads, length, _ = q.shape
    drawn, number = (sets,) if rows is not None and rows.ndim == 3 else (), torch.float32
    places = (
        address(key_mask, torch.bool, batch, k.shape[2]),
        address(sums, number, batch, heads, features, v.shape[3] + 1),
        address(tops, number, batch, heads, features),
        address(rows, number, *drawn, features, q.shape[3]),
        address(offsets, number, *drawn, features),
        address(norms, number, batch, heads, length),
        address(bases, number, batch, heads, length),
    )
    return Linear(*sizes, *how, *rows_of(q, k, v, out), *places, input_scale, eps, floor)
