/* Common to both directions of causal clustered attention in C: strips of queries, and listed keys. */
#pragma once

#include "halves.h"
#include "rows.h"
#include "softmax.h"
#include "dropout.h"

/* Queries that are multiplied with the keys of their chunk together, and listed keys that are processed together. */
enum { STRIP = 32, TOGETHER = 4 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, rows, chunk, kept, bf16, threads;
    tensor q, k, v, centroids, out; /* centroids are float32, [B, H, R, D] */
    const int32_t *groups; /* [B, H, L], the centroid of each query */
    /* Kept for the backward pass, or NULL: the largest score of each query, [B, H, L], and at each of N boundaries the
       keys that a centroid lists, [B, H, N, R, K], and of all others the largest score and the sum of exponentials
       relative to it, [B, H, N, R]. */
    float *most, *peak, *mass;
    int32_t *top;
    float scale;
    dropout dropout;
} problem;
SIZE_OF(causal_clustered, problem)

/* The number of chunks that have a next one; a boundary lies between the two. */
INLINE int64_t boundaries(const problem *p) { return (p->keys - 1) / p->chunk; }

/* Draws of the queries of a strip; of nothing where nothing is dropped. */
typedef struct {
    uint32_t before[STRIP], between[STRIP];
} draws;

static void draw_strip(const problem *p, int64_t item, int64_t at, int64_t deep, draws *to) {
    memset(to, 0, sizeof(draws));
    draw_queries(&p->dropout, item, at, deep, to->before, to->between);
}

INLINE draw drawn(const draws *of, int64_t i) { return (draw){of->before[i], of->between[i]}; }

/* The draw of a centroid: dropout of its weights for the rest is the same for all later queries. */
INLINE draw draw_of_centroid(const problem *p, int64_t item, int64_t r) {
    return draw_of(&p->dropout, p->batch * p->heads + item, r);
}

/* Drop weights [seen, STRIP] of a strip in its chunk. */
static void drop_near(const problem *p, const draws *of, int64_t begin, int64_t seen, int64_t deep, float *weights) {
    if (p->dropout.bound) drop_lanes(&p->dropout, of->before, of->between, padded(deep), begin, seen, weights, STRIP);
}

/* Products [seen, STRIP] of the rows of a chunk with those of a strip, for which these stand in `standing`. */
static void meet(int half, int64_t seen, int64_t deep, int64_t n, const float *chunk, const float *rows,
                 float *standing, float *to) {
    right strip = columns_right(half, deep, n, rows, padded(n), standing);
    multiply(seen, padded(deep), n, chunk, padded(n), 1, strip, 0, 0, to, STRIP, 0);
}

/* The last of the seen keys are those of the strip's own tokens, some of which a query must not see. */
static void hide_later(int64_t seen, int64_t deep, float *scores) {
    for (int64_t late = 1; late < deep; late++)
        for (int64_t i = 0; i < late; i++) scores[(seen - deep + late) * STRIP + i] = -INFINITY;
}

/* Products of a row with listed rows, several at a time, so that none waits for its own sum; writes whole vectors. */
static void listed_products(int64_t n, const int32_t *list, int64_t count, const float *row, const float *rows,
                            float *to) {
    for (int64_t j = 0; j < count; j += TOGETHER) {
        const float *with[TOGETHER];
        vf sums[TOGETHER] = {{0}};
        for (int i = 0; i < TOGETHER; i++) with[i] = rows + list[lesser(j + i, count - 1)] * n;
        for (int64_t d = 0; d < n; d += WIDTH)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++) sums[i] += *(const vf *)(row + d) * *(const vf *)(with[i] + d);
        for (int i = 0; i < TOGETHER; i++) to[j + i] = lane_sum(sums[i]);
    }
}

/* Add weighted listed rows to a row. */
static void add_listed(int64_t n, const int32_t *list, int64_t count, const float *weights, const float *rows,
                       float *to) {
    for (int64_t j = 0; j < count; j += TOGETHER) {
        const float *from[TOGETHER];
        float factors[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) {
            from[i] = rows + list[lesser(j + i, count - 1)] * n;
            factors[i] = j + i < count ? weights[j + i] : 0.0f;
        }
        for (int64_t d = 0; d < n; d += WIDTH) {
            vf sum = *(vf *)(to + d);
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++) sum += factors[i] * *(const vf *)(from[i] + d);
            *(vf *)(to + d) = sum;
        }
    }
}
