/* Clustered attention in C, backward: what the forward pass did not store is recomputed, block by block. */

#include "clustered/heads.h"

typedef struct {
    problem all;
    tensor grad, dq, dk, dv;
} backward_problem;
SIZE_OF(clustered_backward, backward_problem)

typedef struct {
    tensor grad;
    float *dq, *dk, *dv; /* [n, D], sorted as the queries are; [S, D], [S, E] */
    float *shared, *mass; /* gradients of the mean queries' outputs without their largest keys, and of the mass */
} grads;

/* Gradients through the keys that each query weighs itself; sums up those of the others. */
static int through_members(const head *x, grads *g, int64_t item) {
    int64_t width = padded(x->kept), size = x->size, wide = x->values, c, i, r;
    int64_t lists = width * (3 * size + 3 * wide) + MEMBERS * (size + 2 * wide + 3 * width);
    float *keys = floats(lists);
    if (!keys) return 0;
    memset(keys, 0, sizeof(float) * lists);
    float *across = keys + width * size, *values = across + width * size, *values_across = values + width * wide;
    float *dkeys = values_across + width * wide, *dvalues = dkeys + width * size;
    float *outputs = dvalues + width * wide, *weights = outputs + MEMBERS * wide, *change = weights + MEMBERS * width;
    float *queries = change + MEMBERS * width, *grad = queries + MEMBERS * size;
    float *used = x->all->dropout.bound ? grad + MEMBERS * wide : weights;
    for (c = 0; c < x->clusters; c++) {
        int64_t place = item * x->all->most_clusters + c, end = x->first[c + 1];
        const int32_t *top = x->all->top + place * x->all->kept;
        float mass = x->all->mass[place], *shared = g->shared + c * wide;
        if (x->kept && x->first[c] < end) {
            read_list(x, top, keys, values);
            transpose(x->kept, x->all->size, keys, size, across, width);
            transpose(x->kept, x->all->values, values, wide, values_across, width);
            memset(dkeys, 0, sizeof(float) * width * (size + wide));
        }
        for (int64_t from = x->first[c]; from < end; from += MEMBERS) {
            int64_t rows = end - from < MEMBERS ? end - from : MEMBERS;
            read_rows(g->grad, x->all->bf16, x->b, x->h, x->order, from, rows, x->all->values, grad);
            for (r = 0; r < rows; r++) add_row(wide, 1.0f, grad + r * wide, shared);
            if (!x->kept) continue;
            read_queries(x, from, rows, queries);
            product(rows, width, x->all->size, queries, size, 1, across, width, weights, width, 0);
            softmax_rows(weights, rows, x->kept, width);
            product(rows, width, x->all->values, grad, wide, 1, values_across, width, change, width, 0);
            if (used != weights) {
                memcpy(used, weights, sizeof(float) * rows * width);
                drop_members(x, from, rows, width, used), drop_members(x, from, rows, width, change);
            }
            product(rows, wide, x->kept, used, width, 1, values, wide, outputs, wide, 0);
            product(x->kept, wide, rows, used, 1, width, grad, wide, dvalues, wide, 1);
            for (r = 0; r < rows; r++) {
                float along = dot(wide, grad + r * wide, outputs + r * wide);
                g->mass[c] += along;
                for (i = 0; i < width; i++)
                    change[r * width + i] = mass * weights[r * width + i] * (change[r * width + i] - along);
            }
            product(x->kept, size, rows, change, 1, width, queries, size, dkeys, size, 1);
            product(rows, size, x->kept, change, width, 1, keys, size, g->dq + from * size, size, 0);
        }
        for (r = 0; x->first[c] < end && r < x->kept; r++) {
            add_row(size, 1.0f, dkeys + r * size, g->dk + top[r] * size);
            add_row(wide, mass, dvalues + r * wide, g->dv + top[r] * wide);
        }
    }
    free(keys);
    return 1;
}

/* Drop weights of mean queries for a block of keys, [keys, C]. */
static void drop_block(const head *x, int64_t begin, int64_t count, float *weights) {
    drop_lanes(&x->all->dropout, x->before, x->between, x->lanes, begin, count, weights, x->lanes);
}

/* Gradients through the weights of the mean queries. */
static int through_means(const head *x, grads *g, int64_t item) {
    int64_t lanes = x->lanes, size = x->size, wide = x->values, c, j, e;
    int64_t blocks = BLOCK * (2 * lanes + size + wide);
    float *weights = floats(blocks + 2 * lanes + (size + wide) * lanes + x->clusters * size);
    int64_t *next = malloc(sizeof(int64_t) * 2 * x->clusters);
    if (!weights || !next) {
        free(weights), free(next);
        return 0;
    }
    float *change = weights + BLOCK * lanes;
    float *along = change + BLOCK * lanes, *sums = along + lanes, *across = sums + lanes,
          *dmeans = across + wide * lanes;
    float *turned = dmeans + x->clusters * size, *keys = turned + size * lanes, *values = keys + BLOCK * size;
    memset(dmeans, 0, sizeof(float) * x->clusters * size);
    memset(across, 0, sizeof(float) * wide * lanes);
    transpose(x->clusters, wide, g->shared, wide, across, lanes);
    transpose(x->clusters, x->all->size, x->means, size, turned, lanes);
    const float *mass = x->all->mass + item * x->all->most_clusters;
    const int32_t *tops = x->all->top + item * x->all->most_clusters * x->all->kept;
    for (c = 0; c < lanes; c++) along[c] = 0, sums[c] = 1e30f;
    for (c = 0; c < x->clusters; c++) {
        int64_t place = item * x->all->most_clusters + c;
        const float *rest = x->all->rest + place * x->all->values;
        for (e = 0; e < x->all->values; e++) along[c] += g->shared[c * wide + e] * rest[e];
        if (x->kept) along[c] += g->mass[c] * mass[c];
        sums[c] = x->all->sums[place];
        next[c] = x->first[c] < x->first[c + 1] ? 0 : x->kept;
    }
    for (int64_t begin = 0; begin < x->keys; begin += BLOCK) {
        int64_t count = lesser(BLOCK, x->keys - begin);
        read_block(x, x->all->k, begin, count, x->all->size, keys);
        read_block(x, x->all->v, begin, count, x->all->values, values);
        product(count, lanes, x->all->size, keys, size, 1, turned, lanes, weights, lanes, 0);
        product(count, lanes, x->all->values, values, wide, 1, across, lanes, change, lanes, 0);
        if (x->all->dropout.bound) drop_block(x, begin, count, change);
        for (c = 0; c < x->clusters; c++) {
            const int32_t *top = tops + c * x->all->kept;
            int64_t i = next[c];
            for (; i < x->kept && top[i] < begin + count; i++) change[(top[i] - begin) * lanes + c] = g->mass[c];
            next[x->clusters + c] = i;
        }
        for (j = 0; j < count; j++)
            for (c = 0; c < lanes; c += WIDTH) {
                vf *weight = (vf *)(weights + j * lanes + c), *moved = (vf *)(change + j * lanes + c);
                *weight = vweight(*weight - *(vf *)(sums + c));
                *moved = *weight * (*moved - *(vf *)(along + c));
            }
        for (c = 0; c < x->clusters; c++) {
            const int32_t *top = tops + c * x->all->kept;
            for (; next[c] < next[x->clusters + c]; next[c]++) weights[(top[next[c]] - begin) * lanes + c] = 0;
        }
        if (x->all->dropout.bound) drop_block(x, begin, count, weights);
        product(count, wide, x->clusters, weights, lanes, 1, g->shared, wide, g->dv + begin * wide, wide, 1);
        product(count, size, x->clusters, change, lanes, 1, x->means, size, g->dk + begin * size, size, 1);
        product(x->clusters, size, count, change, 1, lanes, keys, size, dmeans, size, 1);
    }
    for (c = 0; c < x->clusters; c++)
        for (j = x->first[c]; j < x->first[c + 1]; j++)
            for (e = 0; e < size; e++) {
                float *to = g->dq + j * size + e;
                *to = x->all->scale * (*to + dmeans[c * size + e] / (x->first[c + 1] - x->first[c]));
            }
    free(weights), free(next);
    return 1;
}

static int backward_head(const backward_problem *p, int64_t b, int64_t h) {
    const problem *all = &p->all;
    int64_t item = b * all->heads + h;
    head x;
    grads g = {0};
    int failed = 1;
    if (gather(&x, all, item)) {
        int64_t numbers = (x.n + x.keys) * x.size + x.keys * x.values + x.clusters * (x.values + 1);
        g.dq = floats(numbers);
        if (g.dq) {
            memset(g.dq, 0, sizeof(float) * numbers);
            g.dk = g.dq + x.n * x.size, g.dv = g.dk + x.keys * x.size, g.shared = g.dv + x.keys * x.values;
            g.mass = g.shared + x.clusters * x.values, g.grad = p->grad;
            failed = !through_members(&x, &g, item) || !through_means(&x, &g, item);
        }
    }
    if (!failed) {
        write_rows(p->dq, all->bf16, x.b, x.h, x.order, 0, x.n, all->size, g.dq);
        write_rows(p->dk, all->bf16, x.b, x.h, x.keys_at, 0, x.keys, all->size, g.dk);
        write_rows(p->dv, all->bf16, x.b, x.h, x.keys_at, 0, x.keys, all->values, g.dv);
    }
    release(&x), free(g.dq);
    return failed;
}

int backward(const backward_problem *p) {
    return ANY_HEAD_FAILS(&p->all, p->all.clusters[b] && backward_head(p, b, h));
}
