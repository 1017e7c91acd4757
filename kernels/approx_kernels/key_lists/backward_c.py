"""Gradients of softmax attention to listed keys in C; weights are computed again from their normalisers."""

from approx_kernels.key_lists.forward_c import TILES

BACKWARD = (
    TILES
    + r"""
typedef struct { problem all; tensor grad, dq, dk, dv; float *dspans; } backward_problem;

/* Scores of a query become weights, and gradients of weights those of scores; returns that of the span, times the ramp. */
INLINE float weigh(const keys_of_block *t, int64_t begin, int64_t end, int32_t position, float lse, float share,
                   float *row, float *change) {
    /* It saw nothing: no weight is left after the mask. */
    lse = lse == -INFINITY ? 0.0f : lse;
    vf longer = {0};
    for (int64_t c = begin; c < end; c += WIDTH) {
        vf weight = vexp(*(vf *)(row + c) - lse), grad = *(vf *)(change + c) - share;
        if (t->partial) weight = choose(seen(t, c, position), weight, (vf){0});
        if (t->soft) {
            vf left = left_over(t, c, position);
            longer += choose(left <= 1.0f, weight * grad, (vf){0});
            weight *= -larger(-left, (vf){0} - 1.0f);
        }
        *(vf *)(row + c) = weight;
        *(vf *)(change + c) = grad * weight;
    }
    float sum = 0.0f;
    for (int l = 0; l < WIDTH; l++) sum += longer[l];
    return sum;
}

static int gradients(const backward_problem *g, int64_t b, int64_t h) {
    const problem *p = &g->all;
    int64_t size = padded(p->size), width = padded(p->values), D = p->size, E = p->values;
    float *memory = floats(2 * (ROWS + KEYS) * (size + width) + (D + E) * KEYS + 2 * STRIP * KEYS + ROWS);
    float *sums = floats(p->keys * (size + width));
    if (!memory || !sums) { free(memory), free(sums); return 1; }
    float *queries = memory, *given = queries + ROWS * size, *out = given + ROWS * width, *dq = out + ROWS * width;
    float *keys = dq + ROWS * size, *values = keys + KEYS * size, *dk = values + KEYS * width, *dv = dk + KEYS * size;
    float *standing = dv + KEYS * width, *weights = standing + (D + E) * KEYS, *change = weights + STRIP * KEYS;
    float *share = change + STRIP * KEYS, *value_sums = sums + p->keys * size, longer = 0.0f;
    const float *lse = p->lse + (b * p->heads + h) * p->length;
    int half = p->bf16 && p->parts == 1;
    memset(sums, 0, sizeof(float) * p->keys * (size + width));
    for (int64_t block = 0; block < p->blocks; block++) {
        int64_t part = p->starts[block] / p->length, first = p->starts[block] % p->length;
        int64_t rows = p->starts[block + 1] - p->starts[block], early = first + p->before;
        const int32_t *order = order_of(p, p->query_order, b, h, part, p->length);
        read_queries(p->q, p->bf16, b, h, order, first, rows, D, p->scale, queries);
        read_queries(g->grad, p->bf16, b, h, order, first, rows, E, 1.0f, given);
        read_queries(p->out, p->bf16, b, h, order, first, rows, E, 1.0f, out);
        memset(dq, 0, sizeof(float) * rows * size);
        for (int64_t i = 0; i < rows; i++) {
            share[i] = 0.0f;
            for (int64_t e = 0; e < E; e++) share[i] += given[i * width + e] * out[i * width + e];
        }
        keys_of_block t = keys_from(p, b, h, block);
        while (next_keys(p, b, block, early, early + rows - 1, &t)) {
            gather(p, p->k, b, h, &t, D, keys), gather(p, p->v, b, h, &t, E, values);
            upright(t.count, D, keys, standing), upright(t.count, E, values, standing + D * KEYS);
            memset(dk, 0, sizeof(float) * t.count * size), memset(dv, 0, sizeof(float) * t.count * width);
            for (int64_t strip = 0; strip < rows; strip += STRIP) {
                int64_t deep = lesser(STRIP, rows - strip), begin, end;
                columns(&t, early + strip, early + strip + deep - 1, &begin, &end);
                if (begin >= end) continue;
                float *asking = queries + strip * size, *outer = given + strip * width;
                product(deep, end - begin, D, asking, size, 1, standing + begin, KEYS, weights + begin, KEYS, 0);
                product(deep, end - begin, E, outer, width, 1, standing + D * KEYS + begin, KEYS, change + begin, KEYS,
                        0);
                for (int64_t i = 0; i < deep; i++)
                    longer += weigh(&t, begin, end, (int32_t)(early + strip + i), lse[token(order, first + strip + i)],
                                    share[strip + i], weights + i * KEYS, change + i * KEYS);
                int64_t count = lesser(end, t.count) - begin;
                product(deep, size, count, change + begin, KEYS, 1, keys + begin * size, size, dq + strip * size, size,
                        1);
                product(count, size, deep, change + begin, 1, KEYS, asking, size, dk + begin * size, size, 1);
                product(count, width, deep, weights + begin, 1, KEYS, outer, width, dv + begin * width, width, 1);
            }
            for (int64_t c = 0; c < t.count; c++) {
                float *to = sums + t.key[c] * size, *there = value_sums + t.key[c] * width;
                for (int64_t d = 0; d < size; d += WIDTH) *(vf *)(to + d) += *(vf *)(dk + c * size + d);
                for (int64_t e = 0; e < width; e += WIDTH) *(vf *)(there + e) += *(vf *)(dv + c * width + e);
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t d = 0; d < size; d += WIDTH) *(vf *)(dq + i * size + d) *= p->scale;
            /* Earlier parts of the softmax have left theirs; queries are needed no more. */
            if (part) read_row(g->dq, 0, b, h, token(order, first + i), D, queries);
            for (int64_t d = 0; part && d < D; d++) dq[i * size + d] += queries[d];
            write_row(g->dq, half, b, h, token(order, first + i), D, dq + i * size);
        }
    }
    if (p->spans) g->dspans[b * p->heads + h] = longer / p->ramp;
    for (int64_t j = 0; j < p->keys; j++) {
        write_row(g->dk, p->bf16, b, h, j, D, sums + j * size);
        write_row(g->dv, p->bf16, b, h, j, E, value_sums + j * width);
    }
    free(memory), free(sums);
    return 0;
}

int backward(const backward_problem *g) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(g->all.threads) reduction(| : failed)
    for (int64_t item = 0; item < g->all.batch * g->all.heads; item++)
        failed |= gradients(g, item / g->all.heads, item % g->all.heads);
    return failed;
}
"""
)
