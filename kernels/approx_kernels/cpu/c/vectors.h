/* Vectors, exponentials and small matrix products in C, for whatever width the processor has. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* AVX-512 as all processors with it have it, but for the first. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX__)
#include <immintrin.h>
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define INLINE static inline __attribute__((always_inline))
/* Some of the files that have these functions do not call all of them. */
#define SHARED static __attribute__((unused))
/* How large a structure is, for structs.py. */
#define SIZE_OF(name, type) \
    int64_t size_of_##name(void) { return sizeof(type); }
/* What stands in for what a processor lacks takes the same arguments, and does not look at them. */
#define BEGIN_STAND_INS _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wunused-parameter\"")
#define END_STAND_INS _Pragma("GCC diagnostic pop")
typedef float vf __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Rows of whatever stands on the right of a product are whole vectors. */
INLINE int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

INLINE float *floats(int64_t n) {
    void *found = NULL;
    return posix_memalign(&found, 64, sizeof(float) * (n + WIDTH)) ? NULL : found;
}

INLINE vf choose(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }
/* Of a NaN and a number, the second. */
#if WIDTH == 16
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE float lane_sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float lane_most(vf x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE __mmask16 first_lanes(int64_t n) { return n >= WIDTH ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }
#else
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE float lane_sum(vf x) {
    float sum = 0.0f;
    for (int l = 0; l < WIDTH; l++) sum += x[l];
    return sum;
}
INLINE float lane_most(vf x) {
    float most = x[0];
    for (int l = 1; l < WIDTH; l++) most = x[l] > most ? x[l] : most;
    return most;
}
#endif

/* How many lanes of a comparison are true. */
INLINE int count_true(vi x) {
#if WIDTH == 16
    return __builtin_popcount(_mm512_movepi32_mask((__m512i)x));
#elif WIDTH == 8
    return __builtin_popcount((unsigned)_mm256_movemask_ps((__m256)x));
#else
    return -(x[0] + x[1] + x[2] + x[3]);
#endif
}

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows of n numbers below are whole vectors. */
INLINE void add_row(int64_t n, float factor, const float *from, float *to) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(to + d) += factor * *(const vf *)(from + d);
}

INLINE void scale_row(int64_t n, float factor, float *row) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(row + d) *= factor;
}

INLINE float row_sum(int64_t n, const float *row) {
    vf sums = {0};
    for (int64_t d = 0; d < n; d += WIDTH) sums += *(const vf *)(row + d);
    return lane_sum(sums);
}

INLINE float dot(int64_t n, const float *a, const float *b) {
    vf sums = {0};
    for (int64_t d = 0; d < n; d += WIDTH) sums += *(const vf *)(a + d) * *(const vf *)(b + d);
    return lane_sum(sums);
}

#if WIDTH == 16
/* A square of as many vectors as each has numbers, in place. */
INLINE void transpose_block(vf x[WIDTH]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int step = 0; step < 4; step++) {
        vf y[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) {
            y[2 * i] = (vf)_mm512_permutex2var_ps((__m512)x[i], low, (__m512)x[i + WIDTH / 2]);
            y[2 * i + 1] = (vf)_mm512_permutex2var_ps((__m512)x[i], high, (__m512)x[i + WIDTH / 2]);
        }
        memcpy(x, y, sizeof(y));
    }
}
#endif

/* from [rows, width] with that stride -> to [width, rows in whole vectors], 0 beyond them. */
SHARED void transpose(int64_t rows, int64_t width, const float *from, int64_t stride, float *to, int64_t stride_to) {
#if WIDTH == 16
    vf block[WIDTH];
    for (int64_t first = 0; first < padded(rows); first += WIDTH)
        for (int64_t d = 0; d < width; d += WIDTH) {
            for (int64_t i = 0; i < WIDTH; i++) {
                __mmask16 there = first + i < rows ? first_lanes(width - d) : 0;
                block[i] = (vf)_mm512_maskz_loadu_ps(there, from + (first + i) * stride + d);
            }
            transpose_block(block);
            for (int64_t e = 0; e < lesser(WIDTH, width - d); e++) *(vf *)(to + (d + e) * stride_to + first) = block[e];
        }
    return;
#endif
    for (int64_t first = 0; first < padded(rows); first += WIDTH)
        for (int64_t d = 0; d < width; d++)
            for (int64_t i = first; i < first + WIDTH; i++)
                to[d * stride_to + i] = i < rows ? from[i * stride + d] : 0.0f;
}

/* exp where x is at most half the logarithm of 2, or above that below 0. */
INLINE vf exp_near_0(vf x) {
    vf p = x * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    return p * x * x + x + 1.0f;
}

/* exp for x <= 80, within two roundings, 0 below -87; beyond, any number. NaN stays NaN. */
INLINE vf vexp(vf x) {
    vf shifted = x * 1.44269504f + 12582912.0f;
    vf n = shifted - 12582912.0f;
    vf p = exp_near_0(x - n * 0.693359375f + n * 2.12194440e-4f);
    return choose(x < -87.0f, (vf){0}, (vf)((vu)p + ((vu)shifted << 23)));
}

/* A weight, 1 at most: the exponential of a number that only rounding lifts above 0. NaN stays NaN. */
INLINE vf vweight(vf x) { return vexp(smaller((vf){0}, x)); }
INLINE float weight_of(float x) { return x > 0.0f ? 1.0f : expf(x); }

/* c[m][n] (+)= sum over p of a[m am + p ak] b[p][n], for a tile that stays in registers. */
INLINE void tile(const int rows, const int vectors, int64_t depth, const float *a, int64_t am, int64_t ak,
                 const float *b, int64_t ldb, float *c, int64_t ldc, int add) {
    vf sum[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int x = 0; x < vectors; x++) sum[r][x] = (vf){0};
    for (int64_t p = 0; p < depth; p++) {
        vf right[2];
#pragma GCC unroll 2
        for (int x = 0; x < vectors; x++) right[x] = *(const vf *)(b + p * ldb + x * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            float left = a[r * am + p * ak];
#pragma GCC unroll 2
            for (int x = 0; x < vectors; x++) sum[r][x] += left * right[x];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int x = 0; x < vectors; x++) {
            vf *to = (vf *)(c + r * ldc + x * WIDTH);
            *to = add ? (vf)(*to + sum[r][x]) : (vf)sum[r][x];
        }
}

#define TILES(vectors)                                                      \
    switch (m - i) {                                                        \
        case 1:                                                             \
            tile(1, vectors, deep, left, am, ak, right, ldb, to, ldc, add); \
            break;                                                          \
        case 2:                                                             \
            tile(2, vectors, deep, left, am, ak, right, ldb, to, ldc, add); \
            break;                                                          \
        case 3:                                                             \
            tile(3, vectors, deep, left, am, ak, right, ldb, to, ldc, add); \
            break;                                                          \
        case 4:                                                             \
            tile(4, vectors, deep, left, am, ak, right, ldb, to, ldc, add); \
            break;                                                          \
        case 5:                                                             \
            tile(5, vectors, deep, left, am, ak, right, ldb, to, ldc, add); \
            break;                                                          \
        default:                                                            \
            tile(6, vectors, deep, left, am, ak, right, ldb, to, ldc, add); \
    }

/* Terms of a sum that are added one to another before they join the others: long chains gather roundings. */
#define CHAIN 64

/* c [m, n] = or += a [m, depth] b [depth, n]; n is a multiple of a vector. */
SHARED void product(int64_t m, int64_t n, int64_t depth, const float *a, int64_t am, int64_t ak, const float *b,
                    int64_t ldb, float *c, int64_t ldc, int add) {
    int64_t p = 0;
    do {
        int64_t deep = depth - p < CHAIN ? depth - p : CHAIN;
        for (int64_t j = 0; j < n; j += 2 * WIDTH)
            for (int64_t i = 0; i < m; i += 6) {
                const float *left = a + i * am + p * ak, *right = b + p * ldb + j;
                float *to = c + i * ldc + j;
                if (n - j >= 2 * WIDTH) {
                    TILES(2)
                } else {
                    TILES(1)
                }
            }
        add = 1, p += CHAIN;
    } while (p < depth);
}
