/* Dropout in C: a seed and the positions of query and key decide which weights are dropped, in any order. */
#pragma once

#include "vectors.h"

/* A weight is dropped if 24 bits of its hash are below the bound, 0 for none; others are multiplied by the factor. */
typedef struct {
    uint64_t seed;
    int32_t bound;
    float factor;
} dropout;
SIZE_OF(dropout, dropout)

/* A query's part of the hashes of its keys. */
typedef struct {
    uint32_t before, between;
} draw;

/* The finaliser of SplitMix64: each bit of the result depends on all bits. */
INLINE uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

INLINE draw draw_of(const dropout *d, int64_t item, int64_t query) {
    uint64_t x = mixed(mixed(d->seed + (uint64_t)item) + (uint64_t)query);
    return (draw){(uint32_t)x, (uint32_t)(x >> 32)};
}

/* The draws of n queries from one on; nothing where nothing is dropped. */
SHARED void draw_queries(const dropout *d, int64_t item, int64_t first, int64_t n, uint32_t *before,
                         uint32_t *between) {
    for (int64_t i = 0; d->bound && i < n; i++) {
        draw of = draw_of(d, item, first + i);
        before[i] = of.before, between[i] = of.between;
    }
}

/* 0 for the weights of dropped keys, the factor for others. The highest bits of a product depend on all lower ones. */
INLINE vf kept(const dropout *d, vu before, vu between, vu key) {
    vu x = key + before;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ between) * 0x846ca68bu;
    return choose((vi)(x >> 8) < d->bound, (vf){0}, (vf){0} + d->factor);
}

INLINE float kept_key(const dropout *d, draw of, int64_t key) {
    return d->bound ? kept(d, (vu){0} + of.before, (vu){0} + of.between, (vu){0} + (uint32_t)key)[0] : 1.0f;
}

/* Drop weights of a query in places from begin to end, whole vectors. */
INLINE void drop_row(const dropout *d, draw of, const int32_t *keys, int64_t begin, int64_t end, float *row) {
    for (int64_t c = begin; c < end; c += WIDTH)
        *(vf *)(row + c) *= kept(d, (vu){0} + of.before, (vu){0} + of.between, *(const vu *)(keys + c));
}

/* Drop weights of a query for `count` keys that stand one after another, in whole vectors. */
INLINE void drop_stretch(const dropout *d, draw of, int64_t first, int64_t count, float *row) {
    vu key = {0};
    for (int l = 0; l < WIDTH; l++) key[l] = (uint32_t)(first + l);
    for (int64_t c = 0; c < count; c += WIDTH, key += WIDTH)
        *(vf *)(row + c) *= kept(d, (vu){0} + of.before, (vu){0} + of.between, key);
}

/* Drop weights of the queries in the lanes, n, a multiple of a vector, for `count` such keys, [count, stride]. */
INLINE void drop_lanes(const dropout *d, const uint32_t *before, const uint32_t *between, int64_t n, int64_t first,
                       int64_t count, float *weights, int64_t stride) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < n; i += WIDTH)
            *(vf *)(weights + j * stride + i) *=
                kept(d, *(const vu *)(before + i), *(const vu *)(between + i), (vu){0} + (uint32_t)(first + j));
}
