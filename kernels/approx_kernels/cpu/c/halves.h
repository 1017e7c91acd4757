/* Products in C whose factors are rounded to bfloat16, where the processor has tiles (AMX) or vectors (AVX512-BF16) for
   them; float32 elsewhere.

   Sums are float32. Only what comes from 16-bit inputs is computed so. */
#pragma once

#include "bfloat16.h"

/* The right side of products: [depth, n], unchanged, or rounded with two rows in each word. */
typedef struct {
    const float *rows;
    uint32_t *pairs;
    int64_t stride;
} right;

/* Words of memory for a right side that may be rounded; products may begin anywhere in it. */
INLINE int64_t room(int64_t depth, int64_t n) { return (depth + 64) * padded(n); }

#if HAVE_PAIRS
/* Rows and depth of what is rounded at once. */
enum { LEFT_ROWS = 2 * SIDE, LEFT_DEPTH = 128 };

/* Two vectors side by side, and one in the low, one in the high halves of words. */
INLINE __m512i beside(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }
INLINE __m512i paired(__m512 low, __m512 high) {
    const __m512i places = (__m512i)(__v32hi){0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(places, beside(low, high));
}

/* [rows, depth], numbers of a row side by side -> words [rows, depth / 2], 0 beyond the depth. */
static void halve_rows(int64_t rows, int64_t depth, const float *from, int64_t stride, uint32_t *to,
                       int64_t stride_to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < depth; d += DEPTH) {
            const float *at = from + i * stride + d;
            __m512 a = _mm512_maskz_loadu_ps(first_lanes(depth - d), at);
            __m512 b = _mm512_maskz_loadu_ps(first_lanes(depth - d - WIDTH), at + WIDTH);
            _mm512_storeu_si512(to + i * stride_to + d / 2, beside(a, b));
        }
}

/* Two rows of [depth, n] from column j on as words; 0 beyond. */
INLINE __m512i two_rows(int64_t depth, int64_t n, const float *from, int64_t stride, int64_t d, int64_t j) {
    const float *at = from + d * stride + j;
    __m512 low = _mm512_maskz_loadu_ps(d < depth ? first_lanes(n - j) : 0, at);
    return paired(low, _mm512_maskz_loadu_ps(d + 1 < depth ? first_lanes(n - j) : 0, at + stride));
}

/* [depth, n] -> words [depth / 2, n], 0 up to where a product may read. */
static void halve_pairs(int64_t depth, int64_t n, const float *from, int64_t stride, uint32_t *to) {
    int64_t wide = padded(n), deep = (depth + DEPTH - 1) / DEPTH * DEPTH + DEPTH;
    for (int64_t d = 0; d < deep; d += 2)
        for (int64_t j = 0; j < wide; j += WIDTH)
            _mm512_storeu_si512(to + d / 2 * wide + j, two_rows(depth, n, from, stride, d, j));
}

/* [n, depth] -> words [depth / 2, n], 0 up to where a product may read. */
static void halve_across(int64_t n, int64_t depth, const float *from, int64_t stride, uint32_t *to) {
    int64_t wide = padded(n), deep = (depth + DEPTH - 1) / DEPTH * DEPTH + DEPTH;
    vf block[WIDTH];
    for (int64_t j = 0; j < wide; j += WIDTH)
        for (int64_t d = 0; d < deep; d += DEPTH) {
            int64_t there = d < depth ? lesser(WIDTH, n - j) : 0;
            halve_rows(there, lesser(DEPTH, depth - d), from + j * stride + d, stride, (uint32_t *)block, WIDTH);
            for (int64_t i = there; i < WIDTH; i++) block[i] = (vf){0};
            transpose_block(block);
            for (int i = 0; i < WIDTH; i++) *(vf *)(to + (d / 2 + i) * wide + j) = block[i];
        }
}

/* The left side of a product, a[m am + p ak] -> words [m, depth / 2]; am or ak is 1. */
static void halve_left(int64_t m, int64_t depth, const float *a, int64_t am, int64_t ak, uint32_t *to) {
    if (ak == 1) {
        halve_rows(m, depth, a, am, to, LEFT_DEPTH / 2);
        return;
    }
    vf block[WIDTH];
    for (int64_t i = 0; i < m; i += WIDTH)
        for (int64_t d = 0; d < depth; d += DEPTH) {
            for (int64_t e = 0; e < WIDTH; e++) block[e] = (vf)two_rows(depth, m, a, ak, d + 2 * e, i);
            transpose_block(block);
            for (int64_t e = 0; e < WIDTH; e++) *(vf *)(to + (i + e) * (LEFT_DEPTH / 2) + d / 2) = block[e];
        }
}

#if HAVE_TILES
#define READ_TILE(t, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(at), "r"(4 * (int64_t)(stride)) : "memory")
#define WRITE_TILE(t, at, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(at), "r"(4 * (int64_t)(stride)) : "memory")
#define ADD_PRODUCT(t, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #t::: "memory")
#define ZERO_TILE(t) __asm__ volatile("tilezero %%tmm" #t::: "memory")

/* Tiles of sums: two by two, or what is left of them; rows beyond the last pass through memory of their own. */
#define BEGIN_SUM(t, r, x)                                                                   \
    if (!add) ZERO_TILE(t);                                                                  \
    else if (rows - r >= SIDE) READ_TILE(t, c + r * ldc + j + x, ldc);                       \
    else {                                                                                   \
        for (int64_t e = 0; e < rows - r; e++) edge[e] = *(vf *)(c + (r + e) * ldc + j + x); \
        READ_TILE(t, edge, SIDE);                                                            \
    }
#define END_SUM(t, r, x)                                                                     \
    if (rows - r >= SIDE) WRITE_TILE(t, c + r * ldc + j + x, ldc);                           \
    else {                                                                                   \
        WRITE_TILE(t, edge, SIDE);                                                           \
        for (int64_t e = 0; e < rows - r; e++) *(vf *)(c + (r + e) * ldc + j + x) = edge[e]; \
    }

/* c [rows, n] = or += left [rows, deep] by rows of a right side. */
static void multiply_left(int64_t rows, int64_t n, int64_t deep, const uint32_t *left, const uint32_t *pairs,
                          int64_t stride, float *c, int64_t ldc, int add) {
    vf edge[SIDE];
    for (int64_t j = 0; j < n; j += 2 * SIDE) {
        int lower = rows > SIDE, wider = n - j > SIDE;
        BEGIN_SUM(0, 0, 0)
        if (wider) { BEGIN_SUM(1, 0, SIDE) }
        if (lower) { BEGIN_SUM(2, SIDE, 0) }
        if (lower && wider) { BEGIN_SUM(3, SIDE, SIDE) }
        for (int64_t d = 0; d < deep; d += DEPTH) {
            const uint32_t *b = pairs + d / 2 * stride + j;
            READ_TILE(4, left + d / 2, LEFT_DEPTH / 2);
            READ_TILE(6, b, stride);
            ADD_PRODUCT(0, 4, 6);
            if (wider) {
                READ_TILE(7, b + SIDE, stride);
                ADD_PRODUCT(1, 4, 7);
            }
            if (lower) {
                READ_TILE(5, left + SIDE * (LEFT_DEPTH / 2) + d / 2, LEFT_DEPTH / 2);
                ADD_PRODUCT(2, 5, 6);
            }
            if (lower && wider) ADD_PRODUCT(3, 5, 7);
        }
        END_SUM(0, 0, 0)
        if (wider) { END_SUM(1, 0, SIDE) }
        if (lower) { END_SUM(2, SIDE, 0) }
        if (lower && wider) { END_SUM(3, SIDE, SIDE) }
    }
}
#else
/* Some rows by one or two vectors: sums that stay in registers. */
INLINE void sum_pairs(const int rows, const int vectors, int64_t words, const uint32_t *left, const uint32_t *pairs,
                      int64_t stride, float *c, int64_t ldc, int add) {
    __m512 sum[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int x = 0; x < vectors; x++)
            sum[r][x] = add ? _mm512_loadu_ps(c + r * ldc + x * SIDE) : _mm512_setzero_ps();
    for (int64_t w = 0; w < words; w++, pairs += stride) {
        __m512bh right[2];
#pragma GCC unroll 2
        for (int x = 0; x < vectors; x++) right[x] = (__m512bh)_mm512_loadu_si512(pairs + x * SIDE);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)left[r * (LEFT_DEPTH / 2) + w]);
#pragma GCC unroll 2
            for (int x = 0; x < vectors; x++) sum[r][x] = _mm512_dpbf16_ps(sum[r][x], pair, right[x]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int x = 0; x < vectors; x++) _mm512_storeu_ps(c + r * ldc + x * SIDE, sum[r][x]);
}

#define SUM_PAIRS(rows)                                                                    \
    do {                                                                                   \
        const uint32_t *at = left + r * (LEFT_DEPTH / 2), *b = pairs + j;                  \
        float *to = c + r * ldc + j;                                                       \
        if (n - j > SIDE) sum_pairs(rows, 2, (deep + 1) / 2, at, b, stride, to, ldc, add); \
        else sum_pairs(rows, 1, (deep + 1) / 2, at, b, stride, to, ldc, add);              \
        r += rows;                                                                         \
    } while (0)

/* c [rows, n] = or += left [rows, deep] by rows of a right side. */
static void multiply_left(int64_t rows, int64_t n, int64_t deep, const uint32_t *left, const uint32_t *pairs,
                          int64_t stride, float *c, int64_t ldc, int add) {
    for (int64_t j = 0; j < n; j += 2 * SIDE)
        for (int64_t r = 0; r < rows;)
            if (rows - r >= 8) SUM_PAIRS(8);
            else if (rows - r >= 4) SUM_PAIRS(4);
            else if (rows - r >= 2) SUM_PAIRS(2);
            else SUM_PAIRS(1);
}
#endif

/* c [m, n] = or += a [m, depth] by rows of a right side from an even one on. */
static void half_product(int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, int64_t ak,
                         const uint32_t *pairs, int64_t stride, float *c, int64_t ldc, int add) {
    uint32_t left[LEFT_ROWS * LEFT_DEPTH / 2] __attribute__((aligned(64)));
    int64_t p = 0;
    do {
        int64_t deep = lesser(depth - p, LEFT_DEPTH);
        for (int64_t i = 0; i < m; i += LEFT_ROWS) {
            int64_t rows = lesser(m - i, LEFT_ROWS);
            halve_left(rows, deep, a + i * am + p * ak, am, ak, left);
            multiply_left(rows, n, deep, left, pairs + p / 2 * stride, stride, c + i * ldc, ldc, add);
        }
        add = 1, p += LEFT_DEPTH;
    } while (p < depth);
}
#else
BEGIN_STAND_INS
INLINE void halve_pairs(int64_t depth, int64_t n, const float *from, int64_t stride, uint32_t *to) {}
INLINE void halve_across(int64_t n, int64_t depth, const float *from, int64_t stride, uint32_t *to) {}
INLINE void half_product(int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, int64_t ak,
                         const uint32_t *pairs, int64_t stride, float *c, int64_t ldc, int add) {}
END_STAND_INS
#endif

/* Rows [depth, n] for the right of products; rounded, in `memory`. */
INLINE right rows_right(int half, int64_t depth, int64_t n, const float *rows, int64_t stride, float *memory) {
    if (!half) return (right){rows, NULL, stride};
    halve_pairs(depth, n, rows, stride, (uint32_t *)memory);
    return (right){NULL, (uint32_t *)memory, padded(n)};
}

/* Columns [n, depth] for the right of products, in `memory`. */
INLINE right columns_right(int half, int64_t n, int64_t depth, const float *columns, int64_t stride, float *memory) {
    if (half) halve_across(n, depth, columns, stride, (uint32_t *)memory);
    else transpose(n, depth, columns, stride, memory, padded(n));
    return half ? (right){NULL, (uint32_t *)memory, padded(n)} : (right){memory, NULL, padded(n)};
}

/* c [m, n] = or += a [m, depth] by a right side from a row, an even one, and a column on; n is whole vectors. */
INLINE void multiply(int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, int64_t ak, right b, int64_t row,
                     int64_t column, float *c, int64_t ldc, int add) {
    if (b.pairs) half_product(m, n, depth, a, am, ak, b.pairs + row / 2 * b.stride + column, b.stride, c, ldc, add);
    else product(m, n, depth, a, am, ak, b.rows + row * b.stride + column, b.stride, c, ldc, add);
}
