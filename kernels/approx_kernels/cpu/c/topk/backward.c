/* Exact top-k attention in C, backward: scores of the kept keys are computed again. */

#include "topk/heads.h"

typedef struct {
    problem all;
    tensor grad, dq, dk, dv;
} backward_problem;
SIZE_OF(topk_backward, backward_problem)

static int gradients(const backward_problem *g, int64_t b, int64_t h) {
    const problem *p = &g->all;
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, K = p->kept, wide = padded(K);
    float *memory = floats(2 * S * (size + values) + 2 * size + values + 3 * wide);
    if (!memory) return 1;
    float *keys = memory, *rows = keys + S * size, *dk = rows + S * values, *dv = dk + S * size,
          *query = dv + S * values;
    float *dq = query + size, *grad = dq + size, *weights = grad + values, *change = weights + wide,
          *stays = change + wide;
    memset(dk, 0, sizeof(float) * S * (size + values));
    read_rows(p->k, p->bf16, b, h, NULL, 0, S, p->size, keys);
    read_rows(p->v, p->bf16, b, h, NULL, 0, S, p->values, rows);
    for (int64_t i = 0; i < p->length; i++) {
        const int32_t *top = p->top + ((b * p->heads + h) * p->length + i) * K;
        draw of = draw_of(&p->dropout, b * p->heads + h, i);
        int64_t count = 0;
        float share = 0;
        while (count < K && top[count] >= 0) count++;
        read_scaled(p->q, p->bf16, b, h, NULL, i, 1, p->size, p->scale, query);
        read_rows(g->grad, p->bf16, b, h, NULL, i, 1, p->values, grad);
        memset(dq, 0, sizeof(float) * size);
        /* A query without a gradient, such as padding that holds NaN, gives none to its keys. */
        int64_t asked = 0;
        for (int64_t e = 0; e < p->values; e++) asked += grad[e] != 0.0f;
        count = asked ? count : 0;
        for (int64_t j = 0; j < count; j++) weights[j] = dot(size, query, keys + top[j] * size);
        softmax(count, weights);
        for (int64_t j = 0; j < count; j++) stays[j] = kept_key(&p->dropout, of, top[j]);
        for (int64_t j = 0; j < count; j++)
            share += weights[j] * (change[j] = stays[j] * dot(values, grad, rows + top[j] * values));
        for (int64_t j = 0; j < count; j++) {
            float much = weights[j] * (change[j] - share);
            add_row(size, much, keys + top[j] * size, dq), add_row(size, much, query, dk + top[j] * size);
            add_row(values, stays[j] * weights[j], grad, dv + top[j] * values);
        }
        scale_row(size, p->scale, dq);
        write_row(g->dq, p->bf16, b, h, i, p->size, dq);
    }
    write_rows(g->dk, p->bf16, b, h, NULL, 0, S, p->size, dk);
    write_rows(g->dv, p->bf16, b, h, NULL, 0, S, p->values, dv);
    free(memory);
    return 0;
}

int backward(const backward_problem *g) { return ANY_HEAD_FAILS(&g->all, gradients(g, b, h)); }
