/* Softmax attention of a few queries in C, such as those of a decoding step: keys and values are read once, in
   place. */

#include "rows.h"
#include "softmax.h"

/* Keys that are weighed together; longer sums are added in parts. */
enum { BLOCK = 64 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, bf16, causal, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], or NULL where all keys are real */
    float scale;
} problem;
SIZE_OF(few_queries, problem)

/* The products of a query with COUNT keys side by side, so that none waits for its own sum. */
INLINE void meet(const int bf16, const int count, int64_t size, const float *query, tensor k, int64_t at, float *to) {
    vf sums[4];
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) sums[j] = (vf){0};
    for (int64_t d = 0; d < size; d += WIDTH) {
        vf left = *(const vf *)(query + d);
#pragma GCC unroll 4
        for (int j = 0; j < count; j++) sums[j] += left * numbers(bf16, k.data, at + j * k.row + d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) to[j] = lane_sum(sums[j]);
}

/* Add the values of a block to VECTORS vectors of an output, whose sums stay in registers meanwhile. */
INLINE void gather(const int bf16, const int vectors, int64_t count, const float *weights, tensor v, int64_t at,
                   float fade, float *out) {
    vf sums[8];
#pragma GCC unroll 8
    for (int x = 0; x < vectors; x++) sums[x] = (vf){0};
    for (int64_t j = 0; j < count; j++, at += v.row) {
        float weight = weights[j];
#pragma GCC unroll 8
        for (int x = 0; x < vectors; x++) sums[x] += weight * numbers(bf16, v.data, at + x * WIDTH);
    }
#pragma GCC unroll 8
    for (int x = 0; x < vectors; x++) {
        vf *to = (vf *)(out + x * WIDTH);
        *to = *to * fade + sums[x];
    }
}

/* Add the keys [first, first + count) to the running softmax of a query. */
INLINE void join(const problem *p, const int bf16, int64_t b, int64_t h, int64_t first, int64_t count,
                 const float *query, float *most, float *sum, float *out) {
    float scores[BLOCK];
    int64_t keys = head_of(p->k, b, h) + first * p->k.row, values = head_of(p->v, b, h) + first * p->v.row, j = 0;
    for (; j + 4 <= count; j += 4) meet(bf16, 4, p->size, query, p->k, keys + j * p->k.row, scores + j);
    for (; j < count; j++) meet(bf16, 1, p->size, query, p->k, keys + j * p->k.row, scores + j);
    if (p->mask)
        for (j = 0; j < count; j++)
            if (!p->mask[b * p->keys + first + j]) scores[j] = -INFINITY;
    float fade = softmax_step(count, scores, most, sum);
    /* Padding before the first real key is not read. */
    if (*sum == 0.0f) return;
    int64_t at = 0;
    for (; at + 8 * WIDTH <= p->values; at += 8 * WIDTH)
        gather(bf16, 8, count, scores, p->v, values + at, fade, out + at);
    for (; at < p->values; at += WIDTH) gather(bf16, 1, count, scores, p->v, values + at, fade, out + at);
}

/* The queries of `count` heads from h on, which read the same keys. */
INLINE void heads(const problem *p, const int bf16, int64_t b, int64_t h, int64_t count, float *queries, float *outs,
                  float *most, float *sums) {
    int64_t L = p->length, n = count * L;
    for (int64_t i = 0; i < n; i++) {
        read_scaled(p->q, bf16, b, h + i / L, NULL, i % L, 1, p->size, p->scale, queries + i * p->size);
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
        scale_row(p->values, share_of(sums[i]), outs + i * p->values);
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
