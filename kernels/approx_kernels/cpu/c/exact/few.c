/* Softmax attention of a few queries in C, such as those of a decoding step: keys and values are read once, as they lie. */

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif
/* Keys that are weighed together; no sum is longer before it joins another. */
enum { BLOCK = 64 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, bf16, causal, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], or NULL where all keys are real */
    float scale;
} problem;
SIZE_OF(few_queries, problem)

typedef uint16_t vh __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* WIDTH numbers from `at` on. */
INLINE vf some(const int bf16, const void *row, int64_t at) {
    if (!bf16) return *(const vf *)((const float *)row + at);
    return (vf)(__builtin_convertvector(*(const vh *)((const uint16_t *)row + at), vi) << 16);
}

/* The products of a query with COUNT keys side by side, so that none waits for its own sum. */
INLINE void meet(const int bf16, const int count, int64_t size, const float *query, const char *rows, int64_t stride,
                 float *to) {
    vf sums[4];
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) sums[j] = (vf){0};
    for (int64_t d = 0; d < size; d += WIDTH) {
        vf left = *(const vf *)(query + d);
#pragma GCC unroll 4
        for (int j = 0; j < count; j++) sums[j] += left * some(bf16, rows + j * stride, d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) to[j] = lane_sum(sums[j]);
}

/* What the values of a block add to VECTORS vectors of an output, whose sums stay in registers meanwhile. */
INLINE void gather(const int bf16, const int vectors, int64_t count, const float *weights, const char *rows,
                   int64_t stride, int64_t at, float factor, float *out) {
    vf sums[8];
#pragma GCC unroll 8
    for (int x = 0; x < vectors; x++) sums[x] = (vf){0};
    for (int64_t j = 0; j < count; j++) {
        float weight = weights[j];
#pragma GCC unroll 8
        for (int x = 0; x < vectors; x++) sums[x] += weight * some(bf16, rows + j * stride, at + x * WIDTH);
    }
#pragma GCC unroll 8
    for (int x = 0; x < vectors; x++) {
        vf *to = (vf *)(out + at + x * WIDTH);
        *to = *to * factor + sums[x];
    }
}

/* Keys [first, first + count) of which a query sees the first `seen`, joined to what it has made of earlier ones. */
INLINE void join(const problem *p, const int bf16, int64_t b, int64_t h, int64_t first, int64_t count,
                 const float *query, float *most, float *sum, float *out) {
    float scores[BLOCK];
    int64_t bytes = bf16 ? 2 : 4;
    const char *k = (char *)p->k.data + bytes * (head_of(p->k, b, h) + first * p->k.row);
    const char *v = (char *)p->v.data + bytes * (head_of(p->v, b, h) + first * p->v.row);
    int64_t key_stride = bytes * p->k.row, value_stride = bytes * p->v.row, j = 0;
    for (; j + 4 <= count; j += 4) meet(bf16, 4, p->size, query, k + j * key_stride, key_stride, scores + j);
    for (; j < count; j++) meet(bf16, 1, p->size, query, k + j * key_stride, key_stride, scores + j);
    for (; j < BLOCK; j++) scores[j] = -INFINITY;
    if (p->mask)
        for (j = 0; j < count; j++)
            if (!p->mask[b * p->keys + first + j]) scores[j] = -INFINITY;
    float peak = *most;
    for (j = 0; j < count; j++) peak = scores[j] > peak || scores[j] != scores[j] ? scores[j] : peak;
    if (peak == -INFINITY) return;
    vf added = {0};
    for (j = 0; j < BLOCK; j += WIDTH) {
        vf score = *(vf *)(scores + j);
        vf weight = choose(score == -INFINITY, (vf){0}, vexp(score - peak));
        *(vf *)(scores + j) = weight;
        added += weight;
    }
    float factor = *most == -INFINITY ? 0.0f : vexp((vf){0} + (*most - peak))[0];
    *sum = *sum * factor + lane_sum(added);
    *most = peak;
    int64_t at = 0;
    for (; at + 8 * WIDTH <= p->values; at += 8 * WIDTH)
        gather(bf16, 8, count, scores, v, value_stride, at, factor, out);
    for (; at < p->values; at += WIDTH) gather(bf16, 1, count, scores, v, value_stride, at, factor, out);
}

/* The queries of `count` heads from h on, which read the same keys. */
INLINE void heads(const problem *p, const int bf16, int64_t b, int64_t h, int64_t count, float *queries, float *outs,
                  float *most, float *sums) {
    int64_t L = p->length, n = count * L;
    for (int64_t i = 0; i < n; i++) {
        float *query = queries + i * p->size;
        read_row(p->q, bf16, b, h + i / L, i % L, p->size, query);
        for (int64_t d = 0; d < p->size; d++) query[d] *= p->scale;
        memset(outs + i * p->values, 0, sizeof(float) * p->values);
        most[i] = -INFINITY, sums[i] = 0;
    }
    for (int64_t first = 0; first < p->keys; first += BLOCK)
        for (int64_t i = 0; i < n; i++) {
            int64_t seen = p->causal ? p->keys - L + i % L + 1 : p->keys;
            int64_t count = lesser(lesser(first + BLOCK, p->keys), seen) - first;
            if (count > 0)
                join(p, bf16, b, h, first, count, queries + i * p->size, most + i, sums + i, outs + i * p->values);
        }
    for (int64_t i = 0; i < n; i++) {
        scale_row(p->values, most[i] == -INFINITY ? 0.0f : 1.0f / sums[i], outs + i * p->values);
        write_row(p->out, bf16, b, h + i / L, i % L, p->values, outs + i * p->values);
    }
}

int few_queries(const problem *p) {
    int failed = 0;
    /* Heads that share keys read them together, unless threads would be left without any. */
    int64_t groups = p->heads / p->k.shared, count = p->batch * groups < p->threads ? 1 : p->k.shared;
    int64_t n = count * p->length, tasks = p->heads / count;
#pragma omp parallel num_threads(p->threads)
    {
        float *room = floats(n * (p->size + p->values + 2));
        float *outs = room + n * p->size, *most = outs + n * p->values;
#pragma omp for
        for (int64_t task = 0; task < p->batch * tasks; task++) {
            int64_t b = task / tasks, h = task % tasks * count;
            if (!room) failed = 1;
            else if (p->bf16) heads(p, 1, b, h, count, room, outs, most, most + n);
            else heads(p, 0, b, h, count, room, outs, most, most + n);
        }
        free(room);
    }
    return failed;
}
