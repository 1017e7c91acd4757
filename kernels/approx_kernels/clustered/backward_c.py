"""Clustered attention in C, backward: what the forward pass did not keep is computed again, block by block."""

from approx_kernels.clustered.heads_c import HEADS

BACKWARD = (
    HEADS
    + r"""
typedef struct { problem all; tensor grad, dq, dk, dv; } backward_problem;

typedef struct {
    const backward_problem *p;
    float *dq, *dk, *dv;    /* [n, D], [S, D], [S, E] */
    float *shared, *mass;    /* gradients of what the mean queries attend to beside their largest keys, and of the mass */
} grads;

/* What comes back through the keys that each query weighs itself; sums up what the others receive. */
static int through_members(const head *x, grads *g, int64_t item) {
    int64_t width = padded(x->kept), size = x->size, wide = x->values, c, i, r;
    int64_t lists = width * (3 * size + 3 * wide) + MEMBERS * (2 * size + 2 * wide + 2 * width);
    float *keys = floats(lists);
    if (!keys) return 0;
    memset(keys, 0, sizeof(float) * lists);
    float *across = keys + width * size, *values = across + width * size, *values_across = values + width * wide;
    float *dkeys = values_across + width * wide, *dvalues = dkeys + width * size;
    float *queries = dvalues + width * wide, *dqueries = queries + MEMBERS * size;
    float *outputs = dqueries + MEMBERS * size, *grad = outputs + MEMBERS * wide;
    float *weights = grad + MEMBERS * wide, *change = weights + MEMBERS * width;
    for (c = 0; c < x->clusters; c++) {
        int64_t place = item * x->all->most_clusters + c, end = x->first[c + 1];
        const int32_t *top = x->all->top + place * x->all->kept;
        float mass = x->all->mass[place], *shared = g->shared + c * wide;
        if (x->kept && x->first[c] < end) {
            gather_keys(x, top, keys, across, values, width);
            transpose(values, x->kept, x->all->values, wide, values_across, width);
            memset(dkeys, 0, sizeof(float) * width * (size + wide));
        }
        for (int64_t from = x->first[c]; from < end; from += MEMBERS) {
            int64_t rows = end - from < MEMBERS ? end - from : MEMBERS;
            for (r = 0; r < rows; r++) {
                int64_t at = token(x->queries_at, x->order[from + r]);
                float *row = grad + r * wide;
                read_row(g->p->grad, x->all->bf16, x->b, x->h, at, x->all->values, row);
                for (i = 0; i < wide; i++) shared[i] += row[i];
            }
            if (!x->kept) continue;
            for (r = 0; r < rows; r++) {
                read_query(x, x->order[from + r], queries + r * size);
                for (i = 0; i < size; i++) queries[r * size + i] *= x->all->scale;
            }
            product(rows, width, x->all->size, queries, size, 1, across, width, weights, width, 0);
            softmax_rows(weights, rows, x->kept, width);
            product(rows, wide, x->kept, weights, width, 1, values, wide, outputs, wide, 0);
            product(rows, width, x->all->values, grad, wide, 1, values_across, width, change, width, 0);
            product(x->kept, wide, rows, weights, 1, width, grad, wide, dvalues, wide, 1);
            for (r = 0; r < rows; r++) {
                float along = 0;
                for (i = 0; i < wide; i++) along += grad[r * wide + i] * outputs[r * wide + i];
                g->mass[c] += along;
                for (i = 0; i < width; i++)
                    change[r * width + i] = mass * weights[r * width + i] * (change[r * width + i] - along);
            }
            product(x->kept, size, rows, change, 1, width, queries, size, dkeys, size, 1);
            product(rows, size, x->kept, change, width, 1, keys, size, dqueries, size, 0);
            for (r = 0; r < rows; r++)
                for (i = 0; i < size; i++) g->dq[x->order[from + r] * size + i] = x->all->scale * dqueries[r * size + i];
        }
        for (r = 0; x->first[c] < end && r < x->kept; r++) {
            for (i = 0; i < size; i++) g->dk[top[r] * size + i] += dkeys[r * size + i];
            for (i = 0; i < wide; i++) g->dv[top[r] * wide + i] += mass * dvalues[r * wide + i];
        }
    }
    free(keys);
    return 1;
}

/* What comes back through the rows of weights of the mean queries. */
static int through_means(const head *x, grads *g, int64_t item) {
    int64_t lanes = x->lanes, size = x->size, wide = x->values, c, j, e;
    float *keys = floats(BLOCK * (size + wide + 2 * lanes) + 2 * lanes + wide * lanes + x->clusters * size);
    int64_t *next = malloc(sizeof(int64_t) * 2 * x->clusters);
    if (!keys || !next) { free(keys), free(next); return 0; }
    float *values = keys + BLOCK * size, *weights = values + BLOCK * wide, *change = weights + BLOCK * lanes;
    float *along = change + BLOCK * lanes, *sums = along + lanes, *across = sums + lanes, *dmeans = across + wide * lanes;
    memset(keys, 0, sizeof(float) * BLOCK * (size + wide));
    memset(dmeans, 0, sizeof(float) * x->clusters * size);
    memset(across, 0, sizeof(float) * wide * lanes);
    transpose(g->shared, x->clusters, wide, wide, across, lanes);
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
        int64_t count = score_block(x, begin, keys, weights);
        for (j = 0; j < count; j++) read_value(x, begin + j, values + j * wide);
        product(count, lanes, x->all->values, values, wide, 1, across, lanes, change, lanes, 0);
        for (c = 0; c < x->clusters; c++) {
            const int32_t *top = tops + c * x->all->kept;
            int64_t i = next[c];
            for (; i < x->kept && top[i] < begin + count; i++) change[(top[i] - begin) * lanes + c] = g->mass[c];
            next[x->clusters + c] = i;
        }
        for (j = 0; j < count; j++)
            for (c = 0; c < lanes; c += WIDTH) {
                vf *weight = (vf *)(weights + j * lanes + c), *moved = (vf *)(change + j * lanes + c);
                *weight = vexp(*weight - *(vf *)(sums + c));
                *moved = *weight * (*moved - *(vf *)(along + c));
            }
        for (c = 0; c < x->clusters; c++) {
            const int32_t *top = tops + c * x->all->kept;
            for (; next[c] < next[x->clusters + c]; next[c]++) weights[(top[next[c]] - begin) * lanes + c] = 0;
        }
        product(count, wide, x->clusters, weights, lanes, 1, g->shared, wide, g->dv + begin * wide, wide, 1);
        product(count, size, x->clusters, change, lanes, 1, x->means, size, g->dk + begin * size, size, 1);
        product(x->clusters, size, count, change, 1, lanes, keys, size, dmeans, size, 1);
    }
    for (j = 0; j < x->n; j++) {
        c = x->groups[j];
        float share = x->all->scale / (x->first[c + 1] - x->first[c]);
        for (e = 0; e < size; e++) g->dq[j * size + e] += share * dmeans[c * size + e];
    }
    free(keys), free(next);
    return 1;
}

static int backward_head(const backward_problem *p, int64_t item) {
    const problem *all = &p->all;
    head x;
    grads g = {.p = p};
    int failed = 1;
    int64_t i;
    if (gather(&x, all, item)) {
        int64_t numbers = (x.n + x.keys) * x.size + x.keys * x.values + x.clusters * (x.values + 1);
        if ((g.dq = floats(numbers))) {
            memset(g.dq, 0, sizeof(float) * numbers);
            g.dk = g.dq + x.n * x.size, g.dv = g.dk + x.keys * x.size;
            g.shared = g.dv + x.keys * x.values, g.mass = g.shared + x.clusters * x.values;
            failed = !through_members(&x, &g, item) || !through_means(&x, &g, item);
        }
    }
    for (i = 0; !failed && i < x.n; i++)
        write_row(p->dq, all->bf16, x.b, x.h, token(x.queries_at, i), all->size, g.dq + i * x.size);
    for (i = 0; !failed && i < x.keys; i++) {
        int64_t at = token(x.keys_at, i);
        write_row(p->dk, all->bf16, x.b, x.h, at, all->size, g.dk + i * x.size);
        write_row(p->dv, all->bf16, x.b, x.h, at, all->values, g.dv + i * x.values);
    }
    release(&x), free(g.dq);
    return failed;
}

int backward(const backward_problem *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->all.threads) reduction(| : failed)
    for (int64_t item = 0; item < p->all.batch * p->all.heads; item++)
        if (p->all.clusters[item / p->all.heads]) failed |= backward_head(p, item);
    return failed;
}
"""
)
