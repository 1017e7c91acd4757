"""The forward flash kernel: a tile of queries attends to one tile of keys after another."""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
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

# Kernels are not specialised on lengths, so that other lengths compile none; on `shared` they are, since nothing is
# divided where it is 1.
LENGTHS = ("H", "L", "S", "longest", "shift", "left", "right", "ramp", "rows_h")


@jit
def _fold(s, v, total, top, out, PRECISION: tl.constexpr):
    """Fold the scores of a tile into the running softmax."""
    new = tl.maximum(top, tl.max(s, 1))
    # A row that has seen nothing yet must not subtract infinity from infinity.
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    share = tl.exp2(top - safe)
    total = total * share + tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, out * share[:, None], input_precision=PRECISION)
    return total, new, out


@jit(do_not_specialize=LENGTHS)
def flash_forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    Total,
    Place,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Outputs and log-sum-exps of BM queries of a head of a sample; with Place also sums relative to the largest."""
    tiles = tl.cdiv(longest, BM)
    # Under a causal mask the last queries have the most work, so they start first.
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
    batch = tl.cast(batch, tl.int64)
    K += batch * k_b + tl.cast(head // shared, tl.int64) * k_h
    V += batch * v_b + tl.cast(head // shared, tl.int64) * v_h
    if KeyMask is not None:
        KeyMask += batch * S
    Q += batch * q_b + tl.cast(head, tl.int64) * q_h
    q = load_rows(Q, first, q_n, q_begin, q_end, D, WIDE_D, BM, True)
    row = first + tl.arange(0, BM)
    # Scores are logarithms to the base 2 from here on.
    factor = scale * 1.4426950408889634
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    out = tl.zeros([BM, WIDE_E], tl.float32)
    place = tl.full([BM], -1, tl.int32)

    begin, end, whole, after = walk(
        Bounds,
        Rows,
        Columns,
        head * rows_h + tile * 3,
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
        if PRECISION == "ieee":
            q = load_rows(Q, again(first, each), q_n, q_begin, q_end, D, WIDE_D, BM, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        v = load_rows(V, block * BN, v_n, k_begin, k_end, E, WIDE_E, BN, False)
        if Place is not None:
            place = tl.where(tl.max(s, 1) > top, block * BN + tl.argmax(s, 1), place)
        total, top, out = _fold(s, v, total, top, out, PRECISION)

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
            tl.arange(0, BM)[:, None],
            tl.arange(0, BN)[None, :],
            Rows is None,
        )
        # A list has no pair beyond the last key.
        if Rows is None or Bounds is not None:
            pairs = pairs & real_keys(column, k_begin, k_end, KeyMask)[None, :]
        k = load_rows(K, block * BN, k_n, k_begin, k_end, D, WIDE_D, BN, True)
        if PRECISION == "ieee":
            q = load_rows(Q, again(first, each), q_n, q_begin, q_end, D, WIDE_D, BM, True)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        if Spans is None:
            s = tl.where(pairs, s, float("-inf"))
        else:
            s = with_mass(s, pairs, mass(row[:, None], column[None, :], shift, span, ramp))
        v = load_rows(V, block * BN, v_n, k_begin, k_end, E, WIDE_E, BN, True)
        if Place is not None:
            place = tl.where(tl.max(s, 1) > top, block * BN + tl.argmax(s, 1), place)
        total, top, out = _fold(s, v, total, top, out, PRECISION)

    # Padded queries have attended to keys like all others.
    seen = (row >= q_begin) & (row < q_end) & (total > 0)
    out = tl.where(seen[:, None], out / tl.where(seen, total, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    Out += batch * o_b + tl.cast(head, tl.int64) * o_h
    store_rows(Out, first, o_n, past, out, E, WIDE_E, BM)
    tl.store(Lse + (batch * H + head) * L + row, lse, mask=row < past)
    if Place is not None:
        tl.store(Total + (batch * H + head) * L + row, tl.where(seen, total, 0.0), mask=row < past)
        tl.store(Place + (batch * H + head) * L + row, tl.where(seen, place, -1), mask=row < past)
