/* Gradients of softmax attention to listed keys in C; weights are recomputed from their normalisers. */

#include "key_lists/tiles.h"

typedef struct {
    problem all;
    tensor grad, dq, dk, dv;
    float *dspans;
    const float *dtotals, *dlse; /* [B, H, L]; NULL where nobody asks */
} backward_problem;
SIZE_OF(key_lists_backward, backward_problem)

/* Turn scores of a query into weights and gradients of weights into those of scores; returns the span's, times the
   ramp. */
INLINE float weigh(const keys_of_block *t, int64_t begin, int64_t end, int32_t position, float lse, float share,
                   float *row, float *change) {
    /* The query saw nothing: the mask left no weight. */
    lse = lse == -INFINITY ? 0.0f : lse;
    vf longer = {0};
    for (int64_t c = begin; c < end; c += WIDTH) {
        vf above = *(vf *)(row + c) - lse, grad = *(vf *)(change + c) - share;
        /* A weight that distance reduces may be above 1 before. */
        vf weight = t->soft ? vexp(smaller((vf){0} + 80.0f, above)) : vweight(above);
        if (t->partial) weight = choose(seen(t, c, position), weight, (vf){0});
        if (t->soft) {
            vf left = left_over(t, c, position);
            longer += choose(left <= 1.0f, weight * grad, (vf){0});
            weight = smaller((vf){0} + 1.0f, weight * smaller(left, (vf){0} + 1.0f));
        }
        *(vf *)(row + c) = weight;
        *(vf *)(change + c) = grad * weight;
    }
    return lane_sum(longer);
}

/* Gradients of a query by the key and the value at its own position, and of these. */
static void itself(const problem *p, int64_t b, int64_t h, int64_t at, float lse, float share, float kept,
                   const float *query, const float *grad, float *key, float *value, float *dq, float *dk, float *dv) {
    float weight = weight_of(own_score(p, b, h, at, query, key) - lse), change = -share;
    read_rows(p->v, p->bf16, b, h, NULL, at, 1, p->values, value);
    change += kept * dot(p->values, grad, value);
    add_row(p->values, kept * weight, grad, dv);
    add_row(p->size, weight * change, key, dq), add_row(p->size, weight * change, query, dk);
}

/* For each query, the key in its block's list with the largest score; -1 if it sees none. */
static void find_largest(const problem *p, int64_t b, int64_t h, const queries_of_block *w, int half,
                         const float *queries, float *keys, float *standing, float *scores, int64_t *which) {
    int64_t size = padded(p->size), most = half ? HALF_STRIP : STRIP, passed = 0;
    float top[ROWS];
    for (int64_t i = 0; i < w->rows; i++) top[i] = -INFINITY, which[i] = -1;
    for (keys_of_block t = keys_from(p, b, h, w, NULL); next_keys(p, b, w, &t); passed += t.count) {
        read_rows(p->k, p->bf16, b, h, t.key, 0, t.count, p->size, keys);
        right asked = columns_right(half, t.count, p->size, keys, size, standing);
        for (int64_t strip = 0; strip < w->rows; strip += most) {
            int64_t deep = lesser(most, w->rows - strip), begin, end;
            columns(&t, w->at[strip], w->at[strip + deep - 1], &begin, &end);
            if (begin >= end) continue;
            multiply(deep, end - begin, p->size, queries + strip * size, size, 1, asked, 0, begin, scores + begin, KEYS,
                     0);
            for (int64_t i = strip; i < strip + deep; i++)
                for (int64_t c = begin; c < lesser(end, t.count); c++) {
                    float score = scores[(i - strip) * KEYS + c];
                    if (score > top[i] && t.from[c] <= w->at[i] && t.to[c] >= w->at[i])
                        top[i] = score, which[i] = passed + c;
                }
        }
    }
}

static int gradients(const backward_problem *g, int64_t b, int64_t h) {
    const problem *p = &g->all;
    int64_t size = padded(p->size), width = padded(p->values), D = p->size, E = p->values;
    int64_t rooms = room(D, KEYS) + room(E, KEYS) + room(KEYS, D) + room(HALF_STRIP, D) + room(HALF_STRIP, E);
    float *memory = floats(2 * (ROWS + KEYS) * (size + width) + rooms + 2 * HALF_STRIP * KEYS + ROWS + p->parts * KEYS);
    float *sums = floats(p->keys * (size + width));
    if (!memory || !sums) return free(memory), free(sums), 1;
    float *queries = memory, *given = queries + ROWS * size, *out = given + ROWS * width, *dq = out + ROWS * width;
    float *keys = dq + ROWS * size, *values = keys + KEYS * size, *dk = values + KEYS * width, *dv = dk + KEYS * size;
    float *standing = dv + KEYS * width, *standing_values = standing + room(D, KEYS);
    float *lying = standing_values + room(E, KEYS), *lying_queries = lying + room(KEYS, D);
    float *lying_grads = lying_queries + room(HALF_STRIP, D), *weights = standing + rooms;
    float *change = weights + HALF_STRIP * KEYS, *share = change + HALF_STRIP * KEYS;
    float *value_sums = sums + p->keys * size, longer = 0.0f;
    const float *lse = p->lse + (b * p->heads + h) * p->length;
    int narrow = p->bf16 && p->parts == 1, half = begin_halves(p->bf16, p->length);
    int64_t most = half ? HALF_STRIP : STRIP, largest[ROWS], passed = 0;
    float raised[ROWS];
    memset(sums, 0, sizeof(float) * p->keys * (size + width));
    queries_of_block w;
    int64_t last;
    for (blocks_of(p, b * p->heads + h, &w.block, &last); w.block < last; w.block++) {
        queries_from(p, b, h, &w);
        read_scaled(p->q, p->bf16, b, h, w.order, w.first, w.rows, D, p->scale, queries);
        read_scaled(g->grad, p->bf16, b, h, w.order, w.first, w.rows, E, 1.0f, given);
        read_scaled(p->out, p->bf16, b, h, w.order, w.first, w.rows, E, 1.0f, out);
        memset(dq, 0, sizeof(float) * w.rows * size);
        for (int64_t i = 0; i < w.rows; i++) {
            share[i] = dot(width, given + i * width, out + i * width);
            /* As normalisers are relative to the largest weight, that key's score gets the negative sum of all
               gradients. */
            int64_t at = (b * p->heads + h) * p->length + token(w.order, w.first + i);
            if (g->dtotals) raised[i] = g->dtotals[at] * p->totals[at], share[i] -= raised[i];
            if (g->dlse) share[i] -= g->dlse[at];
            if (!sees_itself(p, &w, i)) continue;
            float kept = kept_key(&p->dropout, draw_at(p, b, h, &w, i), w.at[i]);
            itself(p, b, h, w.at[i], lse[token(w.order, w.first + i)], share[i], kept, queries + i * size,
                   given + i * width, keys, values, dq + i * size, sums + w.at[i] * size, value_sums + w.at[i] * width);
        }
        if (g->dtotals) find_largest(p, b, h, &w, half, queries, keys, standing, weights, largest);
        passed = 0;
        for (keys_of_block t = keys_from(p, b, h, &w, (int32_t *)(share + ROWS)); next_keys(p, b, &w, &t);
             passed += t.count) {
            read_rows(p->k, p->bf16, b, h, t.key, 0, t.count, D, keys);
            read_rows(p->v, p->bf16, b, h, t.key, 0, t.count, E, values);
            right asked = columns_right(half, t.count, D, keys, size, standing);
            right kept = columns_right(half, t.count, E, values, width, standing_values);
            right found = rows_right(half, t.count, D, keys, size, lying);
            memset(dk, 0, sizeof(float) * t.count * size), memset(dv, 0, sizeof(float) * t.count * width);
            for (int64_t strip = 0; strip < w.rows; strip += most) {
                int64_t deep = lesser(most, w.rows - strip), begin, end;
                columns(&t, w.at[strip], w.at[strip + deep - 1], &begin, &end);
                if (begin >= end) continue;
                float *asking = queries + strip * size, *outer = given + strip * width;
                right queries_right = rows_right(half, deep, D, asking, size, lying_queries);
                right grads_right = rows_right(half, deep, E, outer, width, lying_grads);
                multiply(deep, end - begin, D, asking, size, 1, asked, 0, begin, weights + begin, KEYS, 0);
                multiply(deep, end - begin, E, outer, width, 1, kept, 0, begin, change + begin, KEYS, 0);
                for (int64_t i = 0; p->dropout.bound && i < deep; i++)
                    drop_row(&p->dropout, draw_at(p, b, h, &w, strip + i), t.key, begin, end, change + i * KEYS);
                for (int64_t i = 0; i < deep; i++) {
                    screen(p, &w, strip + i, begin, end, &t);
                    longer += weigh(&t, begin, end, w.at[strip + i], lse[token(w.order, w.first + strip + i)],
                                    share[strip + i], weights + i * KEYS, change + i * KEYS);
                }
                for (int64_t i = 0; g->dtotals && i < deep; i++) {
                    int64_t c = largest[strip + i] - passed;
                    if (c >= begin && c < end) change[i * KEYS + c] -= raised[strip + i];
                }
                for (int64_t i = 0; p->dropout.bound && i < deep; i++)
                    drop_row(&p->dropout, draw_at(p, b, h, &w, strip + i), t.key, begin, end, weights + i * KEYS);
                int64_t count = lesser(end, t.count) - begin;
                multiply(deep, size, count, change + begin, KEYS, 1, found, begin, 0, dq + strip * size, size, 1);
                multiply(count, size, deep, change + begin, 1, KEYS, queries_right, 0, 0, dk + begin * size, size, 1);
                multiply(count, width, deep, weights + begin, 1, KEYS, grads_right, 0, 0, dv + begin * width, width, 1);
            }
            for (int64_t c = 0; c < t.count; c++) {
                add_row(size, 1.0f, dk + c * size, sums + t.key[c] * size);
                add_row(width, 1.0f, dv + c * width, value_sums + t.key[c] * width);
            }
        }
        for (int64_t i = 0; i < w.rows; i++) {
            scale_row(size, p->scale, dq + i * size);
            /* Earlier parts of the softmax have stored theirs; the queries are no longer needed. */
            if (w.part) read_rows(g->dq, 0, b, h, w.order, w.first + i, 1, D, queries);
            if (w.part) add_row(size, 1.0f, queries, dq + i * size);
        }
        write_rows(g->dq, narrow, b, h, w.order, w.first, w.rows, D, dq);
    }
    if (p->spans) g->dspans[b * p->heads + h] = longer / p->ramp;
    write_rows(g->dk, p->bf16, b, h, NULL, 0, p->keys, D, sums);
    write_rows(g->dv, p->bf16, b, h, NULL, 0, p->keys, E, value_sums);
    end_halves(half), free(memory), free(sums);
    return 0;
}

int backward(const backward_problem *g) {
    return in_bounds(&g->all) ? ANY_HEAD_FAILS(&g->all, gradients(g, b, h)) : OUT_OF_BOUNDS;
}
