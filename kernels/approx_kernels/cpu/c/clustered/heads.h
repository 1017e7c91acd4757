/* Common to both directions of clustered attention in C: one head of one sample, and its inputs. */
#pragma once

#include "halves.h"
#include "rows.h"
#include "softmax.h"
#include "dropout.h"

/* Keys of a block, whose data stay in a core's own cache. */
#define BLOCK 128
/* Queries of one cluster that share one product. */
#define MEMBERS 32

typedef struct {
    int64_t batch, heads, length, keys, size, values, most_clusters, kept, bf16, threads;
    tensor q, k, v, out;
    const int32_t *query_tokens, *key_tokens; /* [B, L] and [B, S], real ones first; NULL where all are real */
    const int64_t *queries, *real_keys, *clusters; /* [B] */
    const int32_t *groups; /* [B, H, L], of the real queries */
    float *rest, *sums, *mass; /* [B, H, C, E], [B, H, C], [B, H, C] */
    int32_t *top; /* [B, H, C, K] */
    float scale;
    dropout dropout;
} problem;
SIZE_OF(clustered, problem)

/* One head of one sample, its queries sorted by cluster. */
typedef struct {
    const problem *all;
    int64_t b, h, n, keys, clusters, lanes, size, values, kept;
    const int32_t *keys_at, *groups;
    int32_t *first, *order; /* cluster c has places first[c] up to first[c + 1]; order[place] is the token there */
    float *means,
        *residues; /* mean queries, scaled, [C, D]; their rounding errors, NULL where these do not matter */
    int half;
    uint32_t *before, *between; /* draws of the clusters, [C]; of nothing where nothing is dropped */
} head;

static void release(head *x) { end_halves(x->half), free(x->first), free(x->means); }

/* Queries from one place on, scaled. */
static void read_queries(const head *x, int64_t from, int64_t rows, float *to) {
    read_scaled(x->all->q, x->all->bf16, x->b, x->h, x->order, from, rows, x->all->size, x->all->scale, to);
}

/* Real keys, or values, from one on. */
static void read_block(const head *x, tensor from, int64_t begin, int64_t count, int64_t size, float *to) {
    read_rows(from, x->all->bf16, x->b, x->h, x->keys_at, begin, count, size, to);
}

/* Keys and values of a list. */
static void read_list(const head *x, const int32_t *list, float *keys, float *values) {
    const problem *all = x->all;
    for (int64_t j = 0; j < x->kept; j += BLOCK) {
        int64_t count = lesser(BLOCK, x->kept - j);
        int32_t at[BLOCK];
        for (int64_t i = 0; i < count; i++) at[i] = (int32_t)token(x->keys_at, list[j + i]);
        read_rows(all->k, all->bf16, x->b, x->h, at, 0, count, all->size, keys + j * x->size);
        read_rows(all->v, all->bf16, x->b, x->h, at, 0, count, all->values, values + j * x->values);
    }
}

/* Sort the queries of one head by cluster and average them; 0 where there is no memory. */
static int gather(head *x, const problem *all, int64_t item) {
    int64_t b = item / all->heads, c, d, i;
    *x = (head){.all = all, .b = b, .h = item % all->heads};
    x->n = all->queries[b], x->keys = all->real_keys[b], x->clusters = all->clusters[b];
    x->lanes = padded(x->clusters), x->size = padded(all->size), x->values = padded(all->values);
    /* A query that is its own cluster is exact by itself. */
    x->kept = x->clusters == x->n ? 0 : all->kept < x->keys ? all->kept : x->keys;
    x->keys_at = all->key_tokens ? all->key_tokens + b * all->keys : NULL;
    x->groups = all->groups + item * all->length;
    x->half = begin_halves(all->bf16, all->length);
    const int32_t *queries_at = all->query_tokens ? all->query_tokens + b * all->length : NULL;
    int64_t means = x->clusters * x->size;
    x->first = calloc(x->clusters + 2 + x->n + 2 * x->lanes, sizeof(int32_t));
    x->means = floats(2 * means + MEMBERS * x->size);
    if (!x->first || !x->means) return 0;
    x->order = x->first + x->clusters + 2;
    x->before = (uint32_t *)x->order + x->n, x->between = x->before + x->lanes;
    draw_queries(&all->dropout, item, 0, x->clusters, x->before, x->between);
    /* Counted two places on, so that after the sort first[c] is where c begins. */
    for (i = 0; i < x->n; i++) x->first[x->groups[i] + 2]++;
    for (c = 0; c < x->clusters; c++) x->first[c + 2] += x->first[c + 1];
    for (i = 0; i < x->n; i++) x->order[x->first[x->groups[i] + 1]++] = (int32_t)token(queries_at, i);
    memset(x->means, 0, sizeof(float) * means);
    float *members = x->means + 2 * means;
    for (c = 0; c < x->clusters; c++) {
        float *mean = x->means + c * x->size;
        int64_t end = x->first[c + 1], count = end - x->first[c];
        for (int64_t from = x->first[c]; from < end; from += MEMBERS) {
            int64_t rows = lesser(MEMBERS, end - from);
            read_queries(x, from, rows, members);
            for (i = 0; i < rows; i++) add_row(x->size, 1, members + i * x->size, mean);
        }
        for (d = 0; d < x->size; d++) mean[d] /= count ? count : 1;
    }
    /* Rounding must not decide which keys have the highest scores. */
    x->residues = x->half && x->kept ? x->means + means : NULL;
    if (x->residues) rounding(means, x->means, x->residues);
    return 1;
}

/* Softmax of scores [members, keys] in place, columns from `kept` on becoming 0. */
static void softmax_rows(float *scores, int64_t rows, int64_t kept, int64_t width) {
    for (int64_t r = 0; r < rows; r++) softmax(kept, scores + r * width);
}

/* Drop weights of the members in rows from `from` on, [members, width], for the places of their cluster's list. */
static void drop_members(const head *x, int64_t from, int64_t rows, int64_t width, float *weights) {
    const problem *p = x->all;
    int64_t item = (p->batch + x->b) * p->heads + x->h;
    for (int64_t r = 0; r < rows; r++)
        drop_stretch(&p->dropout, draw_of(&p->dropout, item, from + r), 0, width, weights + r * width);
}
