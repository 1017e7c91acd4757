/* Vectors, exponentials and small matrix products in C, for whatever width the processor has. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX__)
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
INLINE float lane_sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float lane_most(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
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

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* Rows of n numbers below are whole vectors. */
INLINE void add_row(int64_t n, float factor, const float *from, float *to) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(to + d) += factor * *(const vf *)(from + d);
}

INLINE void scale_row(int64_t n, float factor, float *row) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(row + d) *= factor;
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
            __mmask16 there = width - d < WIDTH ? (1u << (width - d)) - 1 : 0xffff;
            for (int64_t i = 0; i < WIDTH; i++)
                block[i] = (vf)_mm512_maskz_loadu_ps(first + i < rows ? there : 0, from + (first + i) * stride + d);
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

/* exp for x <= 80, within two roundings; beyond, any number. NaN stays NaN. */
INLINE vf vexp(vf x) {
    x = larger((vf){0} - 87.0f, x);
    vf shifted = x * 1.44269504f + 12582912.0f;
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vf)((vu)p + ((vu)shifted << 23));
}

/* The exponential of what is 0 at most, but for what rounding made of it: a weight, 1 at most. NaN stays NaN. */
INLINE vf vweight(vf x) { return vexp(-larger((vf){0}, -x)); }
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

/* A tensor [B, H, n, size] of floats or bfloat16, whose last dimension lies in one piece. */
typedef struct {
    void *data;
    int64_t batch, head, row, shared;
} tensor;
SIZE_OF(rows, tensor)

/* Where the rows of a head begin, of which `shared` heads in turn have the same. */
INLINE int64_t head_of(tensor x, int64_t b, int64_t h) { return b * x.batch + h / x.shared * x.head; }

/* The rows from one on. */
INLINE tensor from_row(tensor x, int bf16, int64_t first) {
    x.data = (char *)x.data + (bf16 ? 2 : 4) * first * x.row;
    return x;
}

INLINE void read_row(tensor x, int bf16, int64_t b, int64_t h, int64_t i, int64_t size, float *to) {
    int64_t at = head_of(x, b, h) + i * x.row;
    if (!bf16) {
        memcpy(to, (float *)x.data + at, sizeof(float) * size);
        return;
    }
    const uint16_t *from = (uint16_t *)x.data + at;
    int64_t d = 0;
#if WIDTH == 16
    for (; d + WIDTH <= size; d += WIDTH)
        *(vi *)(to + d) = (vi)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((void *)(from + d))), 16);
#endif
    for (; d < size; d++) {
        uint32_t bits = (uint32_t)from[d] << 16;
        memcpy(to + d, &bits, 4);
    }
}

INLINE void write_row(tensor x, int bf16, int64_t b, int64_t h, int64_t i, int64_t size, const float *from) {
    int64_t at = head_of(x, b, h) + i * x.row;
    if (!bf16) {
        memcpy((float *)x.data + at, from, sizeof(float) * size);
        return;
    }
    uint16_t *to = (uint16_t *)x.data + at;
    int64_t d = 0;
#if defined(__AVX512BF16__)
    for (; d + WIDTH <= size; d += WIDTH)
        _mm256_storeu_si256((void *)(to + d), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + d)));
#endif
    for (; d < size; d++) {
        uint32_t bits;
        memcpy(&bits, from + d, 4);
        /* To the nearest, ties to even; a NaN stays one. */
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[d] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
    }
}

INLINE int64_t token(const int32_t *tokens, int64_t i) { return tokens ? tokens[i] : i; }

/* Rows of neighbouring tokens lie pages apart, where no processor looks ahead by itself. */
#define AHEAD 8

/* Some tokens of a head, the first n where none are named, padded with zeros to `wide`. */
SHARED void read_rows(tensor x, int bf16, int64_t b, int64_t h, const int32_t *tokens, int64_t n, int64_t size,
                      int64_t wide, float *to) {
    int64_t bytes = bf16 ? 2 : 4, start = head_of(x, b, h);
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) {
            const char *next = (char *)x.data + bytes * (start + token(tokens, i + AHEAD) * x.row);
            for (int64_t d = 0; d < bytes * size; d += 64) __builtin_prefetch(next + d);
        }
        read_row(x, bf16, b, h, token(tokens, i), size, to + i * wide);
        for (int64_t d = size; d < wide; d++) to[i * wide + d] = 0;
    }
}

/* The reverse. */
SHARED void write_rows(tensor x, int bf16, int64_t b, int64_t h, const int32_t *tokens, int64_t n, int64_t size,
                       int64_t wide, const float *from) {
    for (int64_t i = 0; i < n; i++) write_row(x, bf16, b, h, token(tokens, i), size, from + i * wide);
}
