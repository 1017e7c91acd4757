"""The backward flash kernels: weights are recomputed, once for the queries and once for the keys and values."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.flash.triton_forward import LENGTHS
from approx_kernels.ops.flash.triton_tiles import (
    again,
    load_rows,
    mass,
    real_keys,
    shown,
    store_rows,
    stretch,
    walk,
    window,
    with_mass,
)


@jit
def _logarithms(base, start, begin, end, ROWS: tl.constexpr):
    """Log-sum-exps to the base 2; +inf where there is none, which makes weights 0."""
    row = start + tl.arange(0, ROWS)
    lse = tl.load(base + row, mask=(row >= begin) & (row < end), other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@jit(do_not_specialize=LENGTHS)
def flash_queries_kernel(
    Q,
    K,
    V,
    Out,
    dOut,
    Lse,
    dLse,
    Place,
    Less,
    Delta,
    dQ,
    dSpans,
    Bounds,
    KeyMask,
    Spans,
    Rows,
    Columns,
    Tiles,
    Bits,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    o_b,
    o_h,
    o_n,
    g_b,
    g_h,
    g_n,
    dq_b,
    dq_h,
    dq_n,
    rows_h,
    H,
    shared,
    L,
    S,
    longest,
    shift,
    left,
    right,
    ramp,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of BM queries and of their span, and what the kernel for the keys reads of these queries.

    The queries of a tile of a block list are processed in PARTS of BM.
    """
    tiles = tl.cdiv(longest, BM)
    tile = tiles - 1 - tl.program_id(0) % tiles
    sample, head = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    q_begin, q_end, k_begin, k_end, holes = stretch(Bounds, sample, L, S)
    first, past = tile * BM, L
    batch = sample
    if PACKED:
        batch, first, past = 0 * sample, q_begin + tile * BM, q_end
    if first >= past:
        return
    left, right, whole_left, whole_right, span = window(Spans, head, left, right, ramp)
    batch, head_at = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    K += batch * k_b + tl.cast(head // shared, tl.int64) * k_h
    V += batch * v_b + tl.cast(head // shared, tl.int64) * v_h
    if KeyMask is not None:
        KeyMask += batch * S
    line = (batch * H + head) * L
    row = first + tl.arange(0, BM)
    Q += batch * q_b + head_at * q_h
    dOut += batch * g_b + head_at * g_h
    q = load_rows(Q, first, q_n, q_begin, q_end, D, WIDE_D, BM, True)
    grad = load_rows(dOut, first, g_n, q_begin, q_end, E, WIDE_E, BM, True)
    out = load_rows(Out + batch * o_b + head_at * o_h, first, o_n, q_begin, q_end, E, WIDE_E, BM, True)
    lse = _logarithms(Lse + line, first, q_begin, q_end, BM)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1) - tl.load(dLse + line + row, mask=row < past, other=0.0)
    delta = tl.where(lse == float("inf"), 0.0, delta)
    tl.store(Delta + line + row, delta, mask=row < past)
    if Place is not None:
        place = tl.load(Place + line + row, mask=row < past, other=-1)
        less = tl.load(Less + line + row, mask=row < past, other=0.0)
    factor = scale * 1.4426950408889634
    dq = tl.zeros([BM, WIDE_D], tl.float32)
    dspan = tl.zeros([BM], tl.float32)

    begin, end, whole, after = walk(
        Bounds,
        Rows,
        Columns,
        head * rows_h + tile // PARTS * 3,
        tl.maximum(first, q_begin) + shift,
        tl.minimum(first + BM, q_end) - 1 + shift,
        left,
        right,
        whole_left,
        whole_right,
        k_begin,
        k_end,
        holes != 0,
        BN,
    )

    for each in range(whole, after):
        block = each
        if Rows is not None:
            block = tl.load(Columns + each)
        k = load_rows(K, block * BN, k_n, k_begin, k_end, D, WIDE_D, BN, False)
        v = load_rows(V, block * BN, v_n, k_begin, k_end, E, WIDE_E, BN, False)
        if PRECISION == "ieee":
            q = load_rows(Q, again(first, each), q_n, q_begin, q_end, D, WIDE_D, BM, True)
            grad = load_rows(dOut, again(first, each), g_n, q_begin, q_end, E, WIDE_E, BM, True)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor - lse[:, None])
        ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if Place is not None:
            ds -= tl.where((block * BN + tl.arange(0, BN))[None, :] == place[:, None], less[:, None], 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    for each in tl.range(begin, end - (after - whole), num_stages=1):  # type: ignore[reportGeneralTypeIssues]  # a loop of Triton, not of Python
        block = each + tl.where(each < whole, 0, after - whole)
        kind = -1
        if Rows is not None:
            kind = tl.load(Tiles + block)
            block = tl.load(Columns + block)
        column = block * BN + tl.arange(0, BN)
        pairs = shown(
            row[:, None],
            column[None, :],
            shift,
            left,
            right,
            Bits,
            kind,
            (tile % PARTS * BM + tl.arange(0, BM))[:, None],
            tl.arange(0, BN)[None, :],
            Rows is None,
        )
        pairs = pairs & real_keys(column, k_begin, k_end, KeyMask)[None, :]
        if Rows is not None and Bounds is None:
            # Only here, since other rows have weight 0 by their log-sum-exps, and Triton 3.6 has no registers left.
            pairs = pairs & ((row >= q_begin) & (row < q_end))[:, None]
        k = load_rows(K, block * BN, k_n, k_begin, k_end, D, WIDE_D, BN, True)
        v = load_rows(V, block * BN, v_n, k_begin, k_end, E, WIDE_E, BN, True)
        if PRECISION == "ieee":
            q = load_rows(Q, again(first, each), q_n, q_begin, q_end, D, WIDE_D, BM, True)
            grad = load_rows(dOut, again(first, each), g_n, q_begin, q_end, E, WIDE_E, BM, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        if Spans is None:
            p = tl.exp2(tl.where(pairs, s, float("-inf")) - lse[:, None])
            ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        else:
            share = mass(row[:, None], column[None, :], shift, span, ramp)
            p = tl.exp2(with_mass(s, pairs, share) - lse[:, None])
            ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            # The mask grows with the span where it is above 0 and not clipped to 1; at the very edge of 1 it still
            # grows.
            rising = pairs & (share > 0) & (tl.abs(column[None, :] - row[:, None] - shift) >= span)
            dspan += tl.sum(tl.where(rising, ds / (tl.maximum(share, 1.2e-38) * ramp), 0.0), 1)
        if Place is not None:
            ds -= tl.where((block * BN + tl.arange(0, BN))[None, :] == place[:, None], less[:, None], 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    store_rows(dQ + batch * dq_b + head_at * dq_h, first, dq_n, past, dq * scale, D, WIDE_D, BM)
    if Spans is not None:
        tl.store(dSpans + line + row, dspan, mask=row < past)


@jit(do_not_specialize=LENGTHS)
def flash_keys_kernel(
    Q,
    K,
    V,
    dOut,
    Lse,
    Place,
    Less,
    Delta,
    dK,
    dV,
    Bounds,
    KeyMask,
    Spans,
    Rows,
    Columns,
    Tiles,
    Bits,
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
    dk_b,
    dk_h,
    dk_n,
    dv_b,
    dv_h,
    dv_n,
    rows_h,
    H,
    shared,
    L,
    S,
    longest,
    shift,
    left,
    right,
    ramp,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of BN keys and values; weights have keys as rows, as the products need them.

    The queries of a tile of a block list are processed in PARTS of BM.
    """
    tiles = tl.cdiv(longest, BN)
    tile = tl.program_id(0) % tiles
    sample, head = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    q_begin, q_end, k_begin, k_end, _ = stretch(Bounds, sample, L, S)
    first, past = tile * BN, S
    batch = sample
    if PACKED:
        batch, first, past = 0 * sample, k_begin + tile * BN, k_end
    if first >= past:
        return
    left, right, whole_left, whole_right, span = window(Spans, head, left, right, ramp)
    batch, head_at = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    Q += batch * q_b + head_at * q_h
    dOut += batch * g_b + head_at * g_h
    line = (batch * H + head) * L
    column = first + tl.arange(0, BN)
    own_keys = tl.cast(head // shared, tl.int64)
    k = load_rows(K + batch * k_b + own_keys * k_h, first, k_n, k_begin, k_end, D, WIDE_D, BN, True)
    v = load_rows(V + batch * v_b + own_keys * v_h, first, v_n, k_begin, k_end, E, WIDE_E, BN, True)
    factor = scale * 1.4426950408889634
    dk = tl.zeros([BN, WIDE_D], tl.float32)
    dv = tl.zeros([BN, WIDE_E], tl.float32)

    # A key is seen from where it would itself see if left and right were exchanged. Out-of-range keys are computed too;
    # their gradients are never stored.
    begin, end, whole, after = walk(
        Bounds,
        Rows,
        Columns,
        head * rows_h + tile * 3,
        tl.maximum(first, k_begin) - shift,
        tl.minimum(first + BN, k_end) - 1 - shift,
        right,
        left,
        whole_right,
        whole_left,
        q_begin,
        q_end,
        False,
        BM * PARTS,
    )

    for each in range(whole * PARTS, after * PARTS):
        block = each
        if Rows is not None:
            block = tl.load(Columns + each // PARTS) * PARTS + each % PARTS  # type: ignore[reportOperatorIssue]  # PARTS is a number
        q = load_rows(Q, block * BM, q_n, q_begin, q_end, D, WIDE_D, BM, False)
        grad = load_rows(dOut, block * BM, g_n, q_begin, q_end, E, WIDE_E, BM, False)
        lse = _logarithms(Lse + line, block * BM, q_begin, q_end, BM)
        delta = tl.load(Delta + line + block * BM + tl.arange(0, BM))
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = p * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        if Place is not None:
            at = line + block * BM + tl.arange(0, BM)
            # Not as a separate tile of mostly zeros, for which Triton 3.6 has no registers left.
            ds = tl.where(column[:, None] == tl.load(Place + at)[None, :], ds - tl.load(Less + at)[None, :], ds)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    for each in tl.range(begin * PARTS, (end - after + whole) * PARTS, num_stages=1):  # type: ignore[reportGeneralTypeIssues]  # a loop of Triton, not of Python
        block = each // PARTS + tl.where(each // PARTS < whole, 0, after - whole)
        kind = -1
        if Rows is not None:
            kind = tl.load(Tiles + block)
            block = tl.load(Columns + block) * PARTS + each % PARTS
        row = block * BM + tl.arange(0, BM)
        pairs = shown(
            row[None, :],
            column[:, None],
            shift,
            left,
            right,
            Bits,
            kind,
            (each % PARTS * BM + tl.arange(0, BM))[None, :],
            tl.arange(0, BN)[:, None],
            Rows is None,
        )
        q = load_rows(Q, block * BM, q_n, q_begin, q_end, D, WIDE_D, BM, True)
        grad = load_rows(dOut, block * BM, g_n, q_begin, q_end, E, WIDE_E, BM, True)
        lse = _logarithms(Lse + line, block * BM, q_begin, q_end, BM)
        delta = tl.load(Delta + line + row, mask=(row >= q_begin) & (row < q_end), other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
        if Spans is None:
            s = tl.where(pairs, s, float("-inf"))
        else:
            s = with_mass(s, pairs, mass(row[None, :], column[:, None], shift, span, ramp))
        p = tl.exp2(s - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = p * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        if Place is not None:
            place = tl.load(Place + line + row, mask=(row >= q_begin) & (row < q_end), other=-1)
            less = tl.load(Less + line + row, mask=(row >= q_begin) & (row < q_end), other=0.0)
            ds -= tl.where(column[:, None] == place[None, :], less[None, :], 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    if Bounds is not None:
        if KeyMask is not None:
            KeyMask += batch * S
        real = real_keys(column, k_begin, k_end, KeyMask)[:, None]
        dk, dv = tl.where(real, dk, 0.0), tl.where(real, dv, 0.0)
    store_rows(dK + batch * dk_b + head_at * dk_h, first, dk_n, past, dk * scale, D, WIDE_D, BN)
    store_rows(dV + batch * dv_b + head_at * dv_h, first, dv_n, past, dv, E, WIDE_E, BN)
