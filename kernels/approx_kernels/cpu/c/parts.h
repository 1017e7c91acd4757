/* float32 numbers in C as tiles hold them: as sums of bfloat16 numbers, where tiles multiply these (AMX). Three parts
   of 8 bits are all 24 of a float32. Of the nine products of two numbers the three smallest are less than half of the
   last bit; the other six, on tiles, take less time than one on the widest vectors. Products of infinities are NaN. */
#pragma once

#include "halves.h"

/* Rows of two tiles, and their bytes. */
enum { SPAN = 2 * SIDE, TILE = SIDE * DEPTH * 2 };

#if HAVE_TILES
/* Parts of a number. */
enum { PARTS = 3 };

/* 16 numbers, 8 of their 24 bits at a time, in the high halves of words; the largest parts are rounded, so that little
   is left for the others. */
INLINE void part(__m512 x, __m512i parts[PARTS]) {
    for (int i = 0; i < PARTS; i++) {
        __m512i bits = i + 1 < PARTS ? _mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000)) : (__m512i)x;
        parts[i] = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000));
        /* Nothing is left of what is infinite. */
        __mmask16 more = _mm512_cmp_ps_mask(x, (__m512)parts[i], _CMP_NEQ_UQ);
        x = _mm512_maskz_sub_ps(more, x, (__m512)parts[i]);
    }
}

/* The high halves of words, one vector after the other. */
INLINE __m512i highs(__m512i first, __m512i second) {
    const __m512i places = (__m512i)(__v32hi){1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                              33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(first, places, second);
}

/* 32 numbers as a row of two tiles of each part, 2 TILE bytes apart. */
INLINE void write_parts(__m512 first, __m512 second, char *to) {
    __m512i low[PARTS], high[PARTS];
    part(first, low), part(second, high);
    for (int p = 0; p < PARTS; p++) _mm512_store_si512(to + p * 2 * TILE, highs(low[p], high[p]));
}

/* Two tiles of a part of a left side, and of a right one. */
#define READ_LEFT(p)                           \
    READ_TILE(4, left + (p) * 2 * TILE, SIDE); \
    READ_TILE(5, left + (p) * 2 * TILE + TILE, SIDE)
#define READ_RIGHT(p)                           \
    READ_TILE(6, right + (p) * 2 * TILE, SIDE); \
    READ_TILE(7, right + (p) * 2 * TILE + TILE, SIDE)

/* Tiles 0 to 3 += two by two tiles of three parts, in an order in which every step has one side of the last; `multiply`
   adds the products of what was read. */
#define ADD_PARTS(multiply) \
    READ_LEFT(0);           \
    READ_RIGHT(2);          \
    multiply;               \
    READ_RIGHT(1);          \
    multiply;               \
    READ_LEFT(1);           \
    multiply;               \
    READ_RIGHT(0);          \
    multiply;               \
    READ_LEFT(2);           \
    multiply;               \
    READ_LEFT(0);           \
    multiply

/* Tiles 0 to 3 as a square [SPAN, SPAN]. */
INLINE void zero_square(void) {
    ZERO_TILE(0);
    ZERO_TILE(1);
    ZERO_TILE(2);
    ZERO_TILE(3);
}

INLINE void read_square(const float *from) {
    READ_TILE(0, from, SPAN);
    READ_TILE(1, from + SIDE, SPAN);
    READ_TILE(2, from + SIDE * SPAN, SPAN);
    READ_TILE(3, from + SIDE * SPAN + SIDE, SPAN);
}

INLINE void write_square(float *to) {
    WRITE_TILE(0, to, SPAN);
    WRITE_TILE(1, to + SIDE, SPAN);
    WRITE_TILE(2, to + SIDE * SPAN, SPAN);
    WRITE_TILE(3, to + SIDE * SPAN + SIDE, SPAN);
}
#elif WIDTH == 16
/* Tiles for as many numbers of float32 as one has of bfloat16. */
enum { PARTS = 2 };

/* 32 numbers as a row of two tiles each, 2 TILE bytes apart. */
INLINE void write_parts(__m512 first, __m512 second, char *to) {
    _mm512_store_ps(to, first), _mm512_store_ps(to + 2 * TILE, second);
}
#endif

/* A right side whose numbers are sums of `count` of bfloat16: as many right sides, one after the other. */
typedef struct {
    const uint32_t *pairs;
    int64_t count, apart, stride;
} split;

#if HAVE_TILES
/* Rows [depth, n], times a factor, as such, in memory that is to be freed; without it where there are no tiles,
   on which alone this is faster than float32, or it is not wanted. */
SHARED split split_rows(int wanted, int64_t count, int64_t depth, int64_t n, float factor, const float *rows,
                        int64_t stride) {
    split made = {.count = count, .apart = room(depth, n), .stride = padded(n)};
    float *memory = wanted && tiles_at_hand() ? floats(count * made.apart + depth * made.stride) : NULL;
    if (!memory) return made;
    float *left = memory + count * made.apart;
    memset(left, 0, sizeof(float) * depth * made.stride);
    for (int64_t d = 0; d < depth; d++)
        for (int64_t j = 0; j < n; j++) left[d * made.stride + j] = factor * rows[d * stride + j];
    for (int64_t p = 0; p < count; p++) {
        halve_pairs(depth, n, left, made.stride, (uint32_t *)memory + p * made.apart);
        rounding(depth * made.stride, left, left);
    }
    made.pairs = (uint32_t *)memory;
    return made;
}

/* c [m, n] = or += a [m, depth], numbers of bfloat16, by it; of enough rows for `begin_halves`. */
SHARED void split_product(int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, split b, float *c,
                          int64_t ldc, int add) {
    uint32_t left[LEFT_ROWS * LEFT_DEPTH / 2] __attribute__((aligned(64)));
    for (int64_t d = 0; d < depth; d += LEFT_DEPTH)
        for (int64_t i = 0; i < m; i += LEFT_ROWS) {
            int64_t rows = lesser(m - i, LEFT_ROWS), deep = lesser(depth - d, LEFT_DEPTH);
            halve_left(rows, deep, a + i * am + d, am, 1, left);
            for (int64_t p = 0; p < b.count; p++)
                multiply_left(rows, n, deep, left, b.pairs + p * b.apart + d / 2 * b.stride, b.stride, c + i * ldc, ldc,
                              add || d || p);
        }
}
#else
BEGIN_STAND_INS
INLINE split split_rows(int wanted, int64_t count, int64_t depth, int64_t n, float factor, const float *rows,
                        int64_t stride) {
    return (split){0};
}
INLINE void split_product(int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, split b, float *c,
                          int64_t ldc, int add) {}
END_STAND_INS
#endif
