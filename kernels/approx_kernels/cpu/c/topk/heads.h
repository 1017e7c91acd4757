/* What both directions of exact top-k attention share. */
#pragma once

#include "vectors.h"
#include "dropout.h"
#include "largest.h"

/* Queries that meet a block of keys together, in strips that are whole tiles of a product. */
enum { STRIP = 24, ROWS = 4 * STRIP, BLOCK = 64 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, kept, causal, bf16, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    int32_t *top; /* [B, H, L, K]: the keys of each query, -1 where it has fewer */
    float scale;
    dropout dropout;
} problem;
SIZE_OF(topk, problem)

/* What a query's weight of a key is multiplied by. */
INLINE float stay(const problem *p, draw of, int64_t key) {
    return p->dropout.bound ? kept_key(&p->dropout, of, key) : 1.0f;
}

/* Scores become weights in place; a NaN among them is one in all. */
static void softmax(float *scores, int64_t count) {
    float most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    for (int64_t j = 0; j < count; j++) sum += scores[j] = expf(scores[j] - most);
    for (int64_t j = 0; j < count; j++) scores[j] /= sum;
}

static void read_query(const problem *p, int64_t b, int64_t h, int64_t i, int64_t wide, float *to) {
    read_row(p->q, p->bf16, b, h, i, p->size, to);
    for (int64_t d = 0; d < wide; d++) to[d] = d < p->size ? to[d] * p->scale : 0.0f;
}
