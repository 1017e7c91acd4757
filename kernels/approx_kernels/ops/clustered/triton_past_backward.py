"""Kernels of the gradients that keys and values before a boundary receive through the sums over them.

With L_c the logarithm of the mass at boundary c, and e_c, f_c, g_c the gradients of it, of the mean key and of the mean
value, a key j that is among the others from boundary b on has the weight w = exp(s_j - L_b) <= 1, and with

    F_c = f_c + exp(L_c - L_(c+1)) F_(c+1)     G_c = g_c + exp(L_c - L_(c+1)) G_(c+1)
    A_c = e_c - f_c.mean key - g_c.mean value + exp(L_c - L_(c+1)) A_(c+1)

it receives dv_j = w G_b and dk_j = w F_b + w (A_b + F_b.k_j + G_b.v_j) scale row.
"""

from __future__ import annotations

from approx_kernels.gpu.language import jit, tl
from approx_kernels.ops.clustered.triton_improved import gathered
from approx_kernels.ops.clustered.triton_past import LENGTHS, row_tile


@jit(do_not_specialize=LENGTHS)
def carry_back_kernel(
    Mass,
    MeanK,
    MeanV,
    A,
    F,
    G,
    rows,
    boundaries,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
):
    """Turn e, f and g of all boundaries into A, F and G, for one row, in place."""
    item, row = tl.cast(tl.program_id(0) // rows, tl.int64), tl.program_id(0) % rows
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    slot = (item * boundaries + boundaries - 1) * rows + row
    later, a = tl.load(Mass + slot), tl.zeros([], tl.float32)
    f, g = tl.zeros([WIDE_D], tl.float32), tl.zeros([WIDE_E], tl.float32)
    for _ in range(0, boundaries):
        mass = tl.load(Mass + slot)
        share, later = tl.exp2(mass - later), mass
        df = tl.load(F + slot * D + size, mask=size < D, other=0.0)
        dg = tl.load(G + slot * E + value, mask=value < E, other=0.0)
        mean_k = tl.load(MeanK + slot * D + size, mask=size < D, other=0.0)
        mean_v = tl.load(MeanV + slot * E + value, mask=value < E, other=0.0)
        a = a * share + tl.load(A + slot) - tl.sum(df * mean_k, 0) - tl.sum(dg * mean_v, 0)
        f, g = f * share + df, g * share + dg
        tl.store(A + slot, a)
        tl.store(F + slot * D + size, f, mask=size < D)
        tl.store(G + slot * E + value, g, mask=value < E)
        slot -= rows


@jit(do_not_specialize=LENGTHS)
def past_keys_kernel(
    Rows,
    K,
    V,
    Until,
    Mass,
    A,
    F,
    G,
    Added,
    dK,
    dV,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    dk_b,
    dk_h,
    dk_n,
    dv_b,
    dv_h,
    dv_n,
    H,
    rows,
    chunk,
    boundaries,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of BN keys and values of one chunk from rows that never had them among the largest, plus Added."""
    blocks = tl.cdiv(chunk, BN)
    item = tl.cast(tl.program_id(0) // blocks // boundaries, tl.int64)
    i, place = tl.program_id(0) // blocks % boundaries, tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    key = tl.where(place < chunk, i * chunk + place, -1)
    size, value = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    # float32, since sums over queries may be greater than a float16.
    k = gathered(K + item // H * k_b + item % H * k_h, key, k_n, D, WIDE_D).to(tl.float32)
    v = gathered(V + item // H * v_b + item % H * v_h, key, v_n, E, WIDE_E).to(tl.float32)
    dk, dv = tl.zeros([BN, WIDE_D], tl.float32), tl.zeros([BN, WIDE_E], tl.float32)
    if Added is not None:
        dk += gathered(Added + item * boundaries * chunk * (D + E), key, D + E, D, WIDE_D)
        dv += gathered(Added + item * boundaries * chunk * (D + E) + D, key, D + E, E, WIDE_E)
    factor = scale * 1.4426950408889634
    first = (item * boundaries + i) * rows
    for begin in range(0, rows, BM):
        c = begin + tl.arange(0, BM)
        own = row_tile(Rows + item * rows * D, c, rows, D, WIDE_D).to(tl.float32)
        f, g = row_tile(F + first * D, c, rows, D, WIDE_D), row_tile(G + first * E, c, rows, E, WIDE_E)
        a = tl.load(A + first + c, mask=c < rows, other=0.0)
        mass = tl.load(Mass + first + c, mask=c < rows, other=float("inf"))
        s = tl.dot(k, tl.trans(own), input_precision=PRECISION) * factor - mass[None, :]
        if Until is not None:
            there = (key >= 0)[:, None] & (c < rows)[None, :]
            until = tl.load(Until + (item * rows + c)[None, :] * boundaries * chunk + key[:, None], mask=there, other=0)
            s = tl.where(until == 0, s, float("-inf"))
        p = tl.exp2(s)
        ds = tl.dot(k, tl.trans(f), input_precision=PRECISION) + tl.dot(v, tl.trans(g), input_precision=PRECISION)
        ds = p * (ds + a[None, :]) * scale
        dk = tl.dot(p, f, dk, input_precision=PRECISION)
        dk = tl.dot(ds, own, dk, input_precision=PRECISION)
        dv = tl.dot(p, g, dv, input_precision=PRECISION)
    row = key.to(tl.int64)
    at = dK + item // H * dk_b + item % H * dk_h + row[:, None] * dk_n + size[None, :]
    tl.store(at, dk.to(dK.dtype.element_ty), mask=(key >= 0)[:, None] & (size < D)[None, :])
    at = dV + item // H * dv_b + item % H * dv_h + row[:, None] * dv_n + value[None, :]
    tl.store(at, dv.to(dV.dtype.element_ty), mask=(key >= 0)[:, None] & (value < E)[None, :])
