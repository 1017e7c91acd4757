/* Linear attention of one query in C: reads the sums over earlier keys, adds its own pairs, and updates the sums. */

#include "linear/maps.h"

typedef struct {
    int64_t batch, heads, shared, keys, size, features, values, map, leaving, bf16, threads;
    tensor q, k, v, out; /* of the query, and of the keys that are not in the sums */
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    const float *query_map, *key_map; /* as `weight` of a problem */
    const float *mix; /* [H]: pairs weigh mix exp(scale q.k - largest); NULL: by the features of both */
    float *sums; /* [B, H / shared, F, E + 1], to which the first key is added where it is `leaving` the pairs */
    float scale, input_scale, eps;
} step;
SIZE_OF(linear_step, step)

/* Rows of sums and of what is learned are not whole vectors. */
INLINE void add_some(int64_t n, float factor, const float *from, float *to) {
    int64_t d = 0;
    for (; d + WIDTH <= n; d += WIDTH) *(vf *)(to + d) += factor * *(const vf *)(from + d);
    for (; d < n; d++) to[d] += factor * from[d];
}

/* Features of one row, zeros up to whole vectors. */
static void map_one(const step *p, const float *weight, int64_t h, const float *row, float *heights, float *to) {
    int64_t D = p->size, wide = padded(D);
    for (int64_t d = 0; d < wide; d++) heights[d] = weight ? 0.0f : p->input_scale * row[d];
    if (weight) {
        weight += h * (D + (p->map == T2R)) * D;
        for (int64_t d = 0; d < D; d++) add_some(D, p->input_scale * row[d], weight + d * D, heights);
    }
    if (p->map == T2R) add_some(D, 1.0f, weight + D * D, heights);
    if (p->map == SOFTMAX || p->map == HEDGEHOG) signed_softmax(D, 1.0f, heights, to);
    if (p->map == HEDGEHOG) {
        float other[wide] __attribute__((aligned(64)));
        signed_softmax(D, -1.0f, heights, other);
        memcpy(to + D, other, sizeof(float) * wide);
    }
    if (p->map == ELU || p->map == RELU || p->map == T2R)
        for (int64_t d = 0; d < wide; d += WIDTH) {
            vf at = *(vf *)(heights + d), none = {0}, above = choose(at < 0.0f, none, at);
            if (p->map == ELU) above += vexp(choose(at < 0.0f, at, none));
            *(vf *)(to + d) = above;
        }
    for (int64_t f = p->features; f < padded(p->features); f++) to[f] = 0.0f;
}

INLINE int real(const step *p, int64_t b, int64_t j) { return !p->mask || p->mask[b * p->keys + j]; }

/* Products of a query with keys, where those are real. */
INLINE void meet_keys(const int bf16, const step *p, int64_t b, int64_t h, const float *query, float *scores) {
    int64_t at = head_of(p->k, b, h), D = p->size;
    for (int64_t j = 0; j < p->keys; j++, at += p->k.row) {
        if (!real(p, b, j)) continue;
        vf sums = {0};
        int64_t d = 0;
        for (; d + WIDTH <= D; d += WIDTH) sums += *(const vf *)(query + d) * numbers(bf16, p->k.data, at + d);
        float rest = 0.0f;
        for (; d < D; d++) rest += query[d] * number(bf16, p->k.data, at + d);
        scores[j] = p->scale * (lane_sum(sums) + rest);
    }
}

/* Keys whose values are added up before they join the others, since long chains accumulate rounding errors. */
enum { SOME = 16 };

/* Some vectors of the values of some keys times weights, in registers. */
INLINE void weigh_some(const int vectors, const int bf16, const step *p, int64_t b, int64_t first, int64_t at,
                       const float *weights, float *out) {
    vf sums[4] = {{0}};
    for (int64_t j = first; j < lesser(first + SOME, p->keys); j++, at += p->v.row) {
        if (!real(p, b, j)) continue;
#pragma GCC unroll 4
        for (int x = 0; x < vectors; x++) sums[x] += weights[j] * numbers(bf16, p->v.data, at + x * WIDTH);
    }
#pragma GCC unroll 4
    for (int x = 0; x < vectors; x++) *(vf *)(out + x * WIDTH) += sums[x];
}

/* The values of real keys times weights, and after them the weights. */
INLINE void weigh_values(const int bf16, const step *p, int64_t b, int64_t h, const float *weights, float *out) {
    int64_t E = p->values;
    for (int64_t j = 0; j < p->keys; j += SOME) {
        int64_t at = head_of(p->v, b, h) + j * p->v.row, e = 0;
        for (; e + 4 * WIDTH <= E; e += 4 * WIDTH) weigh_some(4, bf16, p, b, j, at + e, weights, out + e);
        for (; e + WIDTH <= E; e += WIDTH) weigh_some(1, bf16, p, b, j, at + e, weights, out + e);
        float sum = 0.0f;
        for (int64_t i = j; i < lesser(j + SOME, p->keys); i++, at += p->v.row) {
            if (!real(p, b, i)) continue;
            for (int64_t d = e; d < E; d++) out[d] += weights[i] * number(bf16, p->v.data, at + d);
            sum += weights[i];
        }
        out[E] += sum;
    }
}

/* The last of the heads that share sums adds to them. */
static int attend_one(const step *p, int64_t b, int64_t h, int last) {
    int64_t D = p->size, E = p->values, F = p->features, wide = padded(D), width = padded(E + 1);
    float *memory = floats(3 * wide + 2 * padded(F) + 2 * (wide + width) + padded(p->keys));
    if (!memory) return 1;
    float *query = memory, *key = query + wide, *heights = key + wide, *asking = heights + wide;
    float *asked = asking + padded(F) + wide, *out = asked + padded(F) + wide, *value = out + width;
    float *weights = value + width, *sums = p->sums + (b * p->heads + h) / p->shared * F * (E + 1);
    read_rows(p->q, p->bf16, b, h, NULL, 0, 1, D, query);
    map_one(p, p->query_map, h, query, heights, asking);
    memset(out, 0, sizeof(float) * width);
    int leaving = last && p->leaving && real(p, b, 0);
    if (leaving || !p->mix) {
        read_rows(p->k, p->bf16, b, h, NULL, 0, 1, D, key);
        map_one(p, p->key_map, h, key, heights, asked);
        read_row(p->v, p->bf16, b, h, 0, E, value), value[E] = 1.0f;
    }
    for (int64_t f = 0; f < F; f++) {
        add_some(E + 1, asking[f], sums + f * (E + 1), out);
        if (leaving) add_some(E + 1, asked[f], value, sums + f * (E + 1));
    }
    if (p->mix) {
        for (int64_t j = 0; j < p->keys; j++) weights[j] = -INFINITY;
        if (p->bf16) meet_keys(1, p, b, h, query, weights);
        else meet_keys(0, p, b, h, query, weights);
        weigh_row(p->keys, row_most(p->keys, weights, -INFINITY), weights);
        scale_row(p->keys, p->mix[h], weights);
    } else weights[0] = dot(padded(F), asking, asked);
    if (p->bf16) weigh_values(1, p, b, h, weights, out);
    else weigh_values(0, p, b, h, weights, out);
    float weight = p->mix ? (out[E] < p->eps ? p->eps : out[E]) : out[E] + p->eps;
    scale_row(width, 1.0f / weight, out);
    write_row(p->out, p->bf16, b, h, 0, E, out);
    free(memory);
    return 0;
}

int attend_newest(const step *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < p->batch * p->heads / p->shared; item++)
        for (int64_t h = item * p->shared; h < (item + 1) * p->shared; h++)
            failed |= attend_one(p, h / p->heads, h % p->heads, h + 1 == (item + 1) * p->shared);
    return failed;
}
