"""Kernels of improved clustered attention: tiles of queries of a cluster share its gathered keys and values."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl

# Kernels are not specialised on lengths, so that other lengths compile none.
LENGTHS = ("H", "L", "S", "most", "kept", "parts")


@jit
def members(X, Order, start, last, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Rows of BM members of a cluster; zeros behind the last one."""
    slot, column = start + tl.arange(0, BM), tl.arange(0, WIDTH)
    row = tl.load(Order + slot, mask=slot < last, other=0).to(tl.int64)
    inside = (slot < last)[:, None] & (column < SIZE)[None, :]
    return tl.load(X + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@jit
def gathered(X, key, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of the keys of a cluster; zeros where there is none."""
    column = tl.arange(0, WIDTH)
    at = X + key.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=(key >= 0)[:, None] & (column < SIZE)[None, :], other=0.0)


@jit
def _centroid_weights(mean, k, key, factor, lse):
    """Weights of the mean query for keys of its cluster."""
    s = tl.sum(mean[None, :] * k.to(tl.float32), 1) * factor
    return tl.exp2(tl.where(key >= 0, s - lse, float("-inf")))


@jit(do_not_specialize=LENGTHS)
def improved_kernel(
    Q,
    K,
    V,
    Means,
    Shared,
    Lse,
    Top,
    Order,
    Begins,
    Out,
    OwnLse,
    Mass,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    s_b,
    s_h,
    s_n,
    o_b,
    o_h,
    o_n,
    H,
    L,
    most,
    kept,
    parts,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Outputs of every n-th tile of a cluster's queries: own weights within the mass, and the remainder."""
    line = tl.cast(tl.program_id(0) // parts, tl.int64)
    part, item, c = tl.program_id(0) % parts, line // most, line % most
    first, last = tl.load(Begins + item * (most + 1) + c), tl.load(Begins + item * (most + 1) + c + 1)
    if first + part * BM >= last:
        return
    batch, head = item // H, item % H
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    Out += batch * o_b + head * o_h
    Order += item * L
    Top += line * kept
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    mean = tl.load(Means + line * D + size, mask=size < D, other=0.0).to(tl.float32)
    shared = tl.load(Shared + batch * s_b + head * s_h + c * s_n + value, mask=value < E, other=0.0).to(tl.float32)
    lse = tl.load(Lse + line) * 1.4426950408889634
    factor = scale * 1.4426950408889634
    for start in range(first + part * BM, last, parts * BM):
        q = members(Q, Order, start, last, q_n, D, WIDE_D, BM)
        total, top = tl.zeros([BM], tl.float32), tl.full([BM], float("-inf"), tl.float32)
        own = tl.zeros([BM, WIDE_E], tl.float32)
        mass, less = tl.zeros([BK], tl.float32), tl.zeros([WIDE_E], tl.float32)
        for begin in range(0, kept, BK):
            key = tl.load(Top + begin + tl.arange(0, BK), mask=begin + tl.arange(0, BK) < kept, other=-1)
            k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
            s = tl.where((key >= 0)[None, :], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            # After the real keys of a sample, whole parts may have none.
            safe = tl.where(new == float("-inf"), 0.0, new)
            p, share = tl.exp2(s - safe[:, None]), tl.exp2(top - safe)
            total, top = total * share + tl.sum(p, 1), new
            own = tl.dot(p.to(v.dtype), v, own * share[:, None], input_precision=PRECISION)
            weights = _centroid_weights(mean, k, key, factor, lse)
            mass += weights
            less += tl.sum(weights[:, None] * v.to(tl.float32), 0)
        share = tl.sum(mass, 0)
        out = own * (share / total)[:, None] + (shared - less)[None, :]
        inside = start + tl.arange(0, BM) < last
        row = tl.load(Order + start + tl.arange(0, BM), mask=inside, other=0).to(tl.int64)
        at = Out + row[:, None] * o_n + value[None, :]
        tl.store(at, out.to(Out.dtype.element_ty), mask=inside[:, None] & (value < E)[None, :])
        tl.store(OwnLse + item * L + start + tl.arange(0, BM), top + tl.log2(total), mask=inside)
        tl.store(Mass + line, share)


@jit
def _own_weights(q, k, key, logs, factor, PRECISION: tl.constexpr):
    """Weights of queries (rows) for the keys of their cluster (columns)."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    return tl.where((key >= 0)[None, :], tl.exp2(s - logs[:, None]), 0.0)


@jit(do_not_specialize=LENGTHS)
def improved_queries_kernel(
    Q,
    K,
    V,
    dOut,
    Top,
    Order,
    Begins,
    OwnLse,
    Mass,
    dQ,
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
    g_b,
    g_h,
    g_n,
    o_b,
    o_h,
    o_n,
    H,
    L,
    most,
    kept,
    parts,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of queries, and for each the product of its own output and the gradient of its output."""
    line = tl.cast(tl.program_id(0) // parts, tl.int64)
    part, item, c = tl.program_id(0) % parts, line // most, line % most
    first, last = tl.load(Begins + item * (most + 1) + c), tl.load(Begins + item * (most + 1) + c + 1)
    if first + part * BM >= last:
        return
    batch, head = item // H, item % H
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    dOut += batch * g_b + head * g_h
    dQ += batch * o_b + head * o_h
    Order += item * L
    Top += line * kept
    size, mass, factor = tl.arange(0, WIDE_D), tl.load(Mass + line), scale * 1.4426950408889634
    for start in range(first + part * BM, last, parts * BM):
        slot = start + tl.arange(0, BM)
        q = members(Q, Order, start, last, q_n, D, WIDE_D, BM)
        grad = members(dOut, Order, start, last, g_n, E, WIDE_E, BM)
        logs = tl.load(OwnLse + item * L + slot, mask=slot < last, other=float("inf"))
        delta = tl.zeros([BM], tl.float32)
        for begin in range(0, kept, BK):
            key = tl.load(Top + begin + tl.arange(0, BK), mask=begin + tl.arange(0, BK) < kept, other=-1)
            k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
            p = _own_weights(q, k, key, logs, factor, PRECISION)
            delta += tl.sum(p * tl.dot(grad, tl.trans(v), input_precision=PRECISION), 1)
        dq = tl.zeros([BM, WIDE_D], tl.float32)
        for begin in range(0, kept, BK):
            key = tl.load(Top + begin + tl.arange(0, BK), mask=begin + tl.arange(0, BK) < kept, other=-1)
            k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
            p = _own_weights(q, k, key, logs, factor, PRECISION)
            ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * mass
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        inside = slot < last
        row = tl.load(Order + slot, mask=inside, other=0).to(tl.int64)
        at = dQ + row[:, None] * o_n + size[None, :]
        tl.store(at, (dq * scale).to(dQ.dtype.element_ty), mask=inside[:, None] & (size < D)[None, :])
        tl.store(Delta + item * L + slot, delta, mask=inside)


@jit(do_not_specialize=LENGTHS)
def improved_keys_kernel(
    Q,
    K,
    V,
    Means,
    Lse,
    dOut,
    Top,
    Order,
    Begins,
    OwnLse,
    Mass,
    Delta,
    dK,
    dV,
    dMeans,
    dShared,
    dLse,
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
    most,
    kept,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """A cluster's part of the gradients of its keys and values, and the gradients of its mean query and its row."""
    line = tl.cast(tl.program_id(0), tl.int64)
    item, c = line // most, line % most
    first, last = tl.load(Begins + item * (most + 1) + c), tl.load(Begins + item * (most + 1) + c + 1)
    batch, head = item // H, item % H
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    dOut += batch * g_b + head * g_h
    Order += item * L
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    mean = tl.load(Means + line * D + size, mask=size < D, other=0.0).to(tl.float32)
    lse, factor = tl.load(Lse + line) * 1.4426950408889634, scale * 1.4426950408889634
    # An empty cluster has no mass, and adds no gradients.
    mass = tl.load(Mass + line, mask=first < last, other=0.0)
    deltas, grads = tl.zeros([BM], tl.float32), tl.zeros([WIDE_E], tl.float32)
    for start in range(first, last, BM):
        slot = start + tl.arange(0, BM)
        deltas += tl.load(Delta + item * L + slot, mask=slot < last, other=0.0)
        grad = members(dOut, Order, start, last, g_n, E, WIDE_E, BM)
        grads += tl.sum(grad.to(tl.float32), 0)
    dmass = tl.sum(deltas, 0)
    dmean, dlse = tl.zeros([WIDE_D], tl.float32), tl.zeros([BK], tl.float32)
    for begin in range(0, kept, BK):
        place = begin + tl.arange(0, BK)
        key = tl.load(Top + line * kept + place, mask=place < kept, other=-1)
        k, v = gathered(K, key, k_n, D, WIDE_D), gathered(V, key, v_n, E, WIDE_E)
        dk, dv = tl.zeros([BK, WIDE_D], tl.float32), tl.zeros([BK, WIDE_E], tl.float32)
        for start in range(first, last, BM):
            slot = start + tl.arange(0, BM)
            q = members(Q, Order, start, last, q_n, D, WIDE_D, BM)
            grad = members(dOut, Order, start, last, g_n, E, WIDE_E, BM)
            logs = tl.load(OwnLse + item * L + slot, mask=slot < last, other=float("inf"))
            delta = tl.load(Delta + item * L + slot, mask=slot < last, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
            p = tl.where((key >= 0)[:, None], tl.exp2(s - logs[None, :]), 0.0) * mass
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            ds = p * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        weights = _centroid_weights(mean, k, key, factor, lse)
        ds = weights * (dmass - tl.sum(v.to(tl.float32) * grads[None, :], 1))  # pyright: ignore[reportOperatorIssue]  # a sum is a tensor
        dv -= weights[:, None] * grads[None, :]
        dk += ds[:, None] * mean[None, :]
        dmean += tl.sum(ds[:, None] * k.to(tl.float32), 0)
        dlse -= ds
        inside, at = place < kept, line * kept + place
        tl.store(dK + at[:, None] * D + size[None, :], dk * scale, mask=inside[:, None] & (size < D)[None, :])
        tl.store(dV + at[:, None] * E + value[None, :], dv, mask=inside[:, None] & (value < E)[None, :])
    tl.store(dMeans + line * D + size, (dmean * scale).to(dMeans.dtype.element_ty), mask=size < D)
    tl.store(dShared + line * E + value, grads.to(dShared.dtype.element_ty), mask=value < E)
    tl.store(dLse + line, tl.sum(dlse, 0))
