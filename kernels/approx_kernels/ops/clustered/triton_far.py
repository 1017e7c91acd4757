"""Kernels of causal attention to keys before the chunk: tiles of one row and chunk share the keys gathered for it.

Lists hold the queries of a row by chunk, so that those which weigh the same key themselves are contiguous.
"""

# Triton's type stubs mistake tensors for constants, and branches on constants for branches at run time.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.clustered.triton_improved import gathered, members

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "rows", "kept", "chunk", "boundaries")


@jit
def _list(Begins, rows, boundaries):
    """Head, row and chunk of a program, and the range of its queries in the list."""
    lists = rows * (boundaries + 1)
    item, each = tl.cast(tl.program_id(0) // lists, tl.int64), tl.program_id(0) % lists
    begin = Begins + item * (lists + 1) + each
    return item, each // (boundaries + 1), each % (boundaries + 1), tl.load(begin), tl.load(begin + 1)


@jit
def _vector(X, slot, there, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """One row as float32; zeros where it is not there."""
    column = tl.arange(0, WIDTH)
    return tl.load(X + slot * SIZE + column, mask=column < tl.where(there, SIZE, 0), other=0.0).to(tl.float32)


@jit(do_not_specialize=LENGTHS)
def far_kernel(
    Q,
    K,
    V,
    Near,
    NearLse,
    Rows,
    Top,
    Mass,
    MeanK,
    MeanV,
    Order,
    Begins,
    Out,
    Lse,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    n_b,
    n_h,
    n_n,
    o_b,
    o_h,
    o_n,
    H,
    L,
    rows,
    kept,
    boundaries,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Outputs of the queries of one row and chunk: keys inside, earlier keys with own weights, and the row's sums."""
    item, row, c, first, last = _list(Begins, rows, boundaries)
    if first >= last:
        return
    K += item // H * k_b + item % H * k_h
    V += item // H * v_b + item % H * v_h
    head_q, head_n = item // H * q_b + item % H * q_h, item // H * n_b + item % H * n_h
    Order += item * L
    slot, value = (item * boundaries + c - 1) * rows + row, tl.arange(0, WIDE_E)
    own = _vector(Rows, item * rows + row, row >= 0, D, WIDE_D)
    mean_k, mean_v = _vector(MeanK, slot, c > 0, D, WIDE_D), _vector(MeanV, slot, c > 0, E, WIDE_E)
    # There are no keys before the first chunk.
    mass = tl.load(Mass + slot, mask=c > 0, other=float("-inf"))
    factor = scale * 1.4426950408889634
    for start in range(first, last, BM):
        inside = start + tl.arange(0, BM) < last
        place = tl.load(Order + start + tl.arange(0, BM), mask=inside, other=0).to(tl.int64)
        q = members(Q + head_q, Order, start, last, q_n, D, WIDE_D, BM)
        near = members(Near + head_n, Order, start, last, n_n, E, WIDE_E, BM).to(tl.float32)
        logs = tl.load(NearLse + item * L + place, mask=inside, other=0.0) * 1.4426950408889634
        rest = mass + tl.sum((q.to(tl.float32) - own[None, :]) * mean_k[None, :], 1) * factor
        top = tl.maximum(logs, rest)
        share, shared = tl.exp2(logs - top), tl.exp2(rest - top)
        total, out = share + shared, near * share[:, None] + mean_v[None, :] * shared[:, None]
        for begin in range(0, tl.where(c > 0, kept, 0), BK):
            key = tl.load(Top + slot * kept + begin + tl.arange(0, BK), mask=begin + tl.arange(0, BK) < kept, other=-1)
            k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
            s = tl.where((key >= 0)[None, :], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            p, share = tl.exp2(s - new[:, None]), tl.exp2(top - new)
            total, top = total * share + tl.sum(p, 1), new
            out = tl.dot(p.to(v.dtype), v, out * share[:, None], input_precision=PRECISION)
        at = Out + item // H * o_b + item % H * o_h + place[:, None] * o_n + value[None, :]
        out = (out / total[:, None]).to(Out.dtype.element_ty)
        tl.store(at, out, mask=inside[:, None] & (value < E)[None, :])
        tl.store(Lse + item * L + start + tl.arange(0, BM), top + tl.log2(total), mask=inside)


@jit(do_not_specialize=LENGTHS)
def far_queries_kernel(
    Q,
    K,
    V,
    Near,
    NearLse,
    Rows,
    Top,
    Mass,
    MeanK,
    MeanV,
    Order,
    Begins,
    Out,
    Lse,
    dOut,
    dQ,
    dNear,
    dNearLse,
    dMass,
    dMeanK,
    dMeanV,
    Delta,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    n_b,
    n_h,
    n_n,
    o_b,
    o_h,
    o_n,
    g_b,
    g_h,
    g_n,
    dq_b,
    dq_h,
    dq_n,
    dn_b,
    dn_h,
    dn_n,
    H,
    L,
    rows,
    kept,
    boundaries,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of the queries of one row and chunk, of their outputs inside it, and of the row's sums."""
    item, row, c, first, last = _list(Begins, rows, boundaries)
    K += item // H * k_b + item % H * k_h
    V += item // H * v_b + item % H * v_h
    head_q, head_n = item // H * q_b + item % H * q_h, item // H * n_b + item % H * n_h
    head_o, head_g = item // H * o_b + item % H * o_h, item // H * g_b + item % H * g_h
    Order += item * L
    slot = (item * boundaries + c - 1) * rows + row
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    own = _vector(Rows, item * rows + row, row >= 0, D, WIDE_D)
    mean_k, mean_v = _vector(MeanK, slot, c > 0, D, WIDE_D), _vector(MeanV, slot, c > 0, E, WIDE_E)
    mass = tl.load(Mass + slot, mask=c > 0, other=float("-inf"))
    factor = scale * 1.4426950408889634
    dmass = tl.zeros([BM], tl.float32)
    dmean_k, dmean_v = tl.zeros([WIDE_D], tl.float32), tl.zeros([WIDE_E], tl.float32)
    for start in range(first, last, BM):
        inside = start + tl.arange(0, BM) < last
        place = tl.load(Order + start + tl.arange(0, BM), mask=inside, other=0).to(tl.int64)
        q = members(Q + head_q, Order, start, last, q_n, D, WIDE_D, BM)
        grad = members(dOut + head_g, Order, start, last, g_n, E, WIDE_E, BM)
        wide = grad.to(tl.float32)
        delta = tl.sum(wide * members(Out + head_o, Order, start, last, o_n, E, WIDE_E, BM).to(tl.float32), 1)
        lse = tl.load(Lse + item * L + start + tl.arange(0, BM), mask=inside, other=float("inf"))
        tl.store(Delta + item * L + start + tl.arange(0, BM), delta, mask=inside)

        near = members(Near + head_n, Order, start, last, n_n, E, WIDE_E, BM).to(tl.float32)
        logs = tl.load(NearLse + item * L + place, mask=inside, other=0.0)
        share = tl.exp2(logs * 1.4426950408889634 - lse)
        at = dNear + item // H * dn_b + item % H * dn_h + place[:, None] * dn_n + value[None, :]
        dnear = (wide * share[:, None]).to(dNear.dtype.element_ty)
        tl.store(at, dnear, mask=inside[:, None] & (value < E)[None, :])
        tl.store(dNearLse + item * L + place, share * (tl.sum(wide * near, 1) - delta), mask=inside)

        away = q.to(tl.float32) - own[None, :]
        shared = tl.exp2(mass + tl.sum(away * mean_k[None, :], 1) * factor - lse)
        change = shared * (tl.sum(wide * mean_v[None, :], 1) - delta)
        dmass += change
        dmean_k += tl.sum(change[:, None] * away, 0)
        dmean_v += tl.sum(shared[:, None] * wide, 0)
        dq = change[:, None] * mean_k[None, :]
        for begin in range(0, tl.where(c > 0, kept, 0), BK):
            key = tl.load(Top + slot * kept + begin + tl.arange(0, BK), mask=begin + tl.arange(0, BK) < kept, other=-1)
            k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
            p = tl.where((key >= 0)[None, :], tl.exp2(s - lse[:, None]), 0.0)
            ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        at = dQ + item // H * dq_b + item % H * dq_h + place[:, None] * dq_n + size[None, :]
        tl.store(at, (dq * scale).to(dQ.dtype.element_ty), mask=inside[:, None] & (size < D)[None, :])
    # Store zeros for empty chunks too.
    if c > 0:
        tl.store(dMass + slot, tl.sum(dmass, 0))
        tl.store(dMeanK + slot * D + size, dmean_k * scale, mask=size < D)
        tl.store(dMeanV + slot * E + value, dmean_v, mask=value < E)


@jit(do_not_specialize=LENGTHS)
def far_keys_kernel(
    Q,
    K,
    V,
    Rows,
    Until,
    Mass,
    A,
    F,
    G,
    Order,
    Begins,
    Lse,
    Delta,
    dOut,
    Added,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    g_b,
    g_h,
    g_n,
    H,
    L,
    rows,
    chunk,
    boundaries,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    WIDE_R: tl.constexpr,
    BM: tl.constexpr,
):
    """Gradients of one key and value, from queries that weigh it themselves and from rows that dropped it since."""
    keys = tl.cast(boundaries, tl.int64) * chunk
    item, j = tl.program_id(0) // keys, tl.program_id(0) % keys
    enters = (j // chunk + 1).to(tl.int32)
    Q += item // H * q_b + item % H * q_h
    dOut += item // H * g_b + item % H * g_h
    Order += item * L
    Begins += item * (rows * (boundaries + 1) + 1)
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    k = tl.load(K + item // H * k_b + item % H * k_h + j * k_n + size, mask=size < D, other=0.0).to(tl.float32)
    v = tl.load(V + item // H * v_b + item % H * v_h + j * v_n + value, mask=value < E, other=0.0).to(tl.float32)
    dk, dv = tl.zeros([WIDE_D], tl.float32), tl.zeros([WIDE_E], tl.float32)
    factor = scale * 1.4426950408889634
    for group in range(0, rows, WIDE_R):
        c = group + tl.arange(0, WIDE_R)
        until = tl.load(Until + (item * rows + c) * keys + j, mask=c < rows, other=0).to(tl.int32)
        row = tl.min(tl.where(until > 0, c, rows), 0)
        while row < rows:
            leaves = tl.sum(tl.where(c == row, until, 0), 0)
            first = tl.load(Begins + row * (boundaries + 1) + enters)
            last = tl.load(Begins + row * (boundaries + 1) + leaves)
            for start in range(first, last, BM):
                inside = start + tl.arange(0, BM) < last
                q = members(Q, Order, start, last, q_n, D, WIDE_D, BM).to(tl.float32)
                grad = members(dOut, Order, start, last, g_n, E, WIDE_E, BM).to(tl.float32)
                at = item * L + start + tl.arange(0, BM)
                lse = tl.load(Lse + at, mask=inside, other=float("inf"))
                delta = tl.load(Delta + at, mask=inside, other=0.0)
                p = tl.exp2(tl.sum(q * k[None, :], 1) * factor - lse)
                ds = p * (tl.sum(grad * v[None, :], 1) - delta) * scale
                dk += tl.sum(ds[:, None] * q, 0)
                dv += tl.sum(p[:, None] * grad, 0)
            if leaves <= boundaries:
                slot = (item * boundaries + leaves - 1) * rows + row
                own = _vector(Rows, item * rows + row, row >= 0, D, WIDE_D)
                f, g = _vector(F, slot, row >= 0, D, WIDE_D), _vector(G, slot, row >= 0, E, WIDE_E)
                p = tl.exp2(tl.sum(own * k, 0) * factor - tl.load(Mass + slot))
                ds = p * (tl.load(A + slot) + tl.sum(f * k, 0) + tl.sum(g * v, 0)) * scale
                dk += p * f + ds * own
                dv += p * g
            row = tl.min(tl.where((until > 0) & (c > row), c, rows), 0)
    at = Added + tl.program_id(0).to(tl.int64) * (D + E)
    tl.store(at + size, dk, mask=size < D)
    tl.store(at + D + value, dv, mask=value < E)
