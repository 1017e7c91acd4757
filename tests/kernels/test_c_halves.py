"""Products in C whose factors are rounded to bfloat16: on tiles or vectors for them where there are any, as plain float32 elsewhere."""

import ctypes

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from approx_kernels.cpu.sources import expanded
from approx_kernels.dispatch.findings import instructions
from c_sources import compiled, needs_compiler

SOURCE = expanded(r"""
#include "parts.h"
int apply(int half, int across, int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, int64_t ak,
          const float *b, int64_t stride, int64_t row, int64_t column, float *c, int64_t ldc, int add) {
    float *memory = floats(room(depth, n));
    half = begin_halves(half, m);
    right r = across ? columns_right(half, n, depth, b, stride, memory) : rows_right(half, depth, n, b, stride, memory);
    multiply(m, padded(n) - column, depth - row, a, am, ak, r, row, column, c, ldc, add);
    end_halves(half), free(memory);
    return half;
}
int apply_split(int64_t count, int64_t m, int64_t n, int64_t depth, const float *a, const float *b, float *c, int64_t add) {
    split by = split_rows(1, count, depth, n, 1.5f, b, n);
    int half = begin_halves(by.pairs != NULL, m);
    if (half) split_product(m, n, depth, a, depth, by, c, padded(n), add);
    end_halves(half), free((void *)by.pairs);
    return half;
}
float rounded(float x) { return halved((vf){0} + x)[0]; }
int width(void) { return WIDTH; }
""")


def address(x):
    return ctypes.c_void_p(x.data_ptr())


def multiplied(left, right, sums, *, half, left_across, right_across, row=0, column=0):
    """sums or 0, plus left @ right from a row and a column on, and whether the factors were rounded."""
    library = compiled(SOURCE)
    (m, depth), n = left.shape, right.shape[1]
    wide = -(-n // library.width()) * library.width()
    a = (left.t() if left_across else left).contiguous()
    # Rows of the right factor that are not copied have a whole number of vectors.
    b = right.t().contiguous() if right_across else torch.nn.functional.pad(right, (0, wide - n))
    out = torch.full((m, wide - column), torch.nan)
    if sums is not None:
        out[:, : n - column] = sums
    steps = (1, a.stride(0)) if left_across else (a.stride(0), 1)
    where = (b.stride(0), row, column)
    sizes = [ctypes.c_int64(x) for x in (m, n, depth, *steps, *where, out.stride(0))]
    m_, n_, depth_, am, ak, stride, row_, column_, ldc = sizes
    how = (half, right_across, m_, n_, depth_, address(a), am, ak, address(b), stride, row_, column_)
    rounded = library.apply(*how, address(out), ldc, sums is not None)
    return out[:, : n - column], bool(rounded)


@needs_compiler
@settings(max_examples=300, deadline=None)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    depth=st.integers(1, 300),
    half=st.booleans(),
    left_across=st.booleans(),
    right_across=st.booleans(),
    adds=st.booleans(),
    row=st.integers(0, 8),
    column=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_products_are_exact_but_for_the_rounding_of_their_factors(
    m, n, depth, half, left_across, right_across, adds, row, column, seed
):
    generator = torch.Generator().manual_seed(seed)
    row, column = min(2 * row, (depth - 1) // 2 * 2), min(16 * column, (n - 1) // 16 * 16)
    left = torch.randn(m, depth - row, generator=generator)
    right = torch.randn(depth, n, generator=generator)
    sums = torch.randn(m, n - column, generator=generator) if adds else None
    whole = torch.nn.functional.pad(left, (0, row))
    made, rounded = multiplied(
        whole, right, sums, half=half, left_across=left_across, right_across=right_across, row=row, column=column
    )
    # Rows beyond the last whole tile are unchanged.
    assert rounded == (half and m >= 16 and instructions().endswith(("AMX", "BF16")))
    if rounded:
        left, right = left.bfloat16(), right.bfloat16()
    exact = left.double() @ right[row:, column:].double() + (0 if sums is None else sums)
    torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-5 * depth**0.5)


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 3),
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    depth=st.integers(1, 300),
    adds=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_numbers_in_parts_lose_eight_bits_less_with_each(count, m, n, depth, adds, seed):
    library = compiled(SOURCE)
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(m, depth, generator=generator).bfloat16().float()
    right = torch.randn(depth, n, generator=generator)
    sums = torch.randn(m, -(-n // library.width()) * library.width(), generator=generator)
    made, sizes = sums.clone(), map(ctypes.c_int64, (count, m, n, depth))
    ran = library.apply_split(*sizes, address(left), address(right), address(made), ctypes.c_int64(adds))
    assert bool(ran) == (m >= 16 and instructions().endswith("AMX"))
    if ran:
        exact = left.double() @ (1.5 * right.double()) + (sums[:, :n] if adds else 0)
        error = (made[:, :n] - exact).abs() / (1.5 * left.abs().double() @ right.abs().double() + 1)
        assert error.max() <= max(2.0 ** (-8 * count), 1e-6)


@needs_compiler
def test_numbers_are_rounded_as_pytorch_rounds_them():
    library = compiled(SOURCE)
    library.rounded.argtypes, library.rounded.restype = [ctypes.c_float], ctypes.c_float
    halfway = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
    for x in torch.cat([torch.randn(200), 1e30 * torch.randn(50), halfway]).tolist():
        assert library.rounded(x) == torch.tensor(x).bfloat16().item()


@needs_compiler
def test_releases_tiles_for_pytorch():
    a, b = torch.randn(2, 130, 130).bfloat16().unbind()
    before = a @ b
    for _ in range(3):
        multiplied(a.float(), b.float(), None, half=True, left_across=False, right_across=False)
        assert torch.equal(a @ b, before)
