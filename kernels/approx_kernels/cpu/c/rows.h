/* Rows of tensors of float32 or bfloat16 in C: how they are read and written. */
#pragma once

#include "bfloat16.h"

/* A tensor [B, H, n, size] of floats or bfloat16, whose last dimension lies in one piece. */
typedef struct {
    void *data;
    int64_t batch, head, row, shared;
} tensor;
SIZE_OF(rows, tensor)

/* Where the rows of a head begin, of which `shared` heads in turn have the same. */
INLINE int64_t head_of(tensor x, int64_t b, int64_t h) { return b * x.batch + h / x.shared * x.head; }

/* The numbers of a tensor's data from one on: a vector of them, and one. */
INLINE vf numbers(const int bf16, const void *data, int64_t at) {
    return bf16 ? whole(*(const vh *)((const uint16_t *)data + at)) : *(const vf *)((const float *)data + at);
}

INLINE float number(const int bf16, const void *data, int64_t at) {
    if (!bf16) return ((const float *)data)[at];
    return whole((vh){0} + ((const uint16_t *)data)[at])[0];
}

INLINE void read_row(tensor x, int bf16, int64_t b, int64_t h, int64_t i, int64_t size, float *to) {
    int64_t at = head_of(x, b, h) + i * x.row, d = 0;
    if (!bf16) {
        memcpy(to, (float *)x.data + at, sizeof(float) * size);
        return;
    }
    for (; d + WIDTH <= size; d += WIDTH) *(vf *)(to + d) = numbers(1, x.data, at + d);
    for (; d < size; d++) to[d] = number(1, x.data, at + d);
}

INLINE void write_row(tensor x, int bf16, int64_t b, int64_t h, int64_t i, int64_t size, const float *from) {
    int64_t at = head_of(x, b, h) + i * x.row, d = 0;
    if (!bf16) {
        memcpy((float *)x.data + at, from, sizeof(float) * size);
        return;
    }
    uint16_t *to = (uint16_t *)x.data + at;
    for (; d + WIDTH <= size; d += WIDTH) *(vh *)(to + d) = halves(*(const vf *)(from + d));
    for (; d < size; d++) to[d] = halves((vf){0} + from[d])[0];
}

INLINE int64_t token(const int32_t *tokens, int64_t i) { return tokens ? tokens[i] : i; }

/* Rows of neighbouring tokens lie pages apart, where no processor looks ahead by itself. */
#define AHEAD 8

INLINE void prefetch_row(tensor x, int bf16, int64_t b, int64_t h, int64_t i, int64_t size) {
    int64_t bytes = bf16 ? 2 : 4;
    const char *row = (char *)x.data + bytes * (head_of(x, b, h) + i * x.row);
    for (int64_t d = 0; d < bytes * size; d += 64) __builtin_prefetch(row + d);
}

/* n rows of a head from one on, in the order of `tokens` or, without any, of the tensor; zeros up to whole vectors. */
SHARED void read_rows(tensor x, int bf16, int64_t b, int64_t h, const int32_t *tokens, int64_t first, int64_t n,
                      int64_t size, float *to) {
    int64_t wide = padded(size);
    for (int64_t i = first; i < first + n; i++, to += wide) {
        if (i + AHEAD < first + n) prefetch_row(x, bf16, b, h, token(tokens, i + AHEAD), size);
        read_row(x, bf16, b, h, token(tokens, i), size, to);
        for (int64_t d = size; d < wide; d++) to[d] = 0.0f;
    }
}

/* The same, times a factor. */
SHARED void read_scaled(tensor x, int bf16, int64_t b, int64_t h, const int32_t *tokens, int64_t first, int64_t n,
                        int64_t size, float factor, float *to) {
    read_rows(x, bf16, b, h, tokens, first, n, size, to);
    if (factor != 1.0f) scale_row(n * padded(size), factor, to);
}

/* The reverse of reading. */
SHARED void write_rows(tensor x, int bf16, int64_t b, int64_t h, const int32_t *tokens, int64_t first, int64_t n,
                       int64_t size, const float *from) {
    for (int64_t i = first; i < first + n; i++, from += padded(size))
        write_row(x, bf16, b, h, token(tokens, i), size, from);
}

/* Whether something fails for any head `h` of any sample `b` of a problem, on its threads. */
#define ANY_HEAD_FAILS(problem, attempt)                                                                             \
    ({                                                                                                               \
        int64_t heads = (problem)->heads, items = (problem)->batch * heads;                                          \
        int failed = 0, threads = (int)(problem)->threads;                                                           \
        _Pragma("omp parallel for schedule(dynamic) num_threads(threads) reduction(| : failed)") for (int64_t item = \
                                                                                                          0;         \
                                                                                                      item < items;  \
                                                                                                      item++) {      \
            int64_t b = item / heads, h = item % heads;                                                              \
            failed |= (attempt);                                                                                     \
        }                                                                                                            \
        failed;                                                                                                      \
    })
