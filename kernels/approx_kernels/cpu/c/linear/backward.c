/* Gradients of attention by features in C; features and pairs are recomputed. */

#include "linear/heads.h"

typedef struct {
    problem all;
    tensor grad, dq, dk, dv;
} backward_problem;
SIZE_OF(linear_backward, backward_problem)

/* Gradients of inputs from those of their features; `lengths` where their own length is part of these. */
static void write_inputs(const head *x, tensor to, int64_t first, int64_t rows, const float *features, float *change,
                         float *inputs, int lengths) {
    const problem *p = x->all;
    for (int64_t i = 0; i < rows; i++) {
        float *row = change + i * x->size, sum = 0.0f;
        for (int64_t d = 0; d < x->size; d += WIDTH) {
            vf at = *(const vf *)(features + i * x->size + d), none = {0}, one = none + 1.0f, slope;
            if (p->map == EXP) slope = at;
            else if (p->map == RELU) slope = choose(at > p->floor, one, none);
            else slope = choose(at < 1.0f, at, one);
            *(vf *)(row + d) *= slope * p->input_scale;
        }
        if (!p->rows) write_row(to, p->bf16, x->b, x->h, first + i, p->size, row);
        if (!lengths) continue;
        for (int64_t d = 0; d < p->features; d++) sum += row[d];
        scale_row(x->wide, -sum, inputs + i * x->wide);
    }
    if (!p->rows) return;
    product(rows, x->wide, p->features, change, x->size, 1, x->along, x->wide, inputs, x->wide, lengths);
    for (int64_t i = 0; i < rows; i++) write_row(to, p->bf16, x->b, x->h, first + i, p->size, inputs + i * x->wide);
}

static int gradients(const backward_problem *g, const float *across, int64_t b, int64_t h) {
    const problem *p = &g->all;
    head x;
    int64_t size = padded(p->features), width = padded(p->values), F = p->features, E = p->values, L = p->length;
    int exponential = p->map == EXP;
    /* Rows of the state and of the gradient of it, each also transposed. */
    int64_t lying = F * width, standing = E * size;
    float *memory = begin(&x, p, across, b, h,
                          lying + 2 * standing + TOKENS * (4 * size + 3 * width) + CHUNK * (size + width) +
                              2 * CHUNK * CHUNK + 2 * size + 2 * L);
    /* The logarithms that the features of each chunk are relative to, after the keys before all chunks. A chunk may be
       one token; memory that is not written costs nothing. */
    float *tops = malloc(sizeof(float) * (exponential ? (p->causal ? L + 1 : 1) * size : 1));
    int64_t *starts = malloc(sizeof(int64_t) * (L + 1)), chunks = 0;
    if (!memory || !tops || !starts) return free(memory), free(tops), free(starts), 1;
    float *state = memory, *up = state + standing, *down = up + standing, *queries = down + lying;
    float *keys = queries + TOKENS * size, *change = keys + TOKENS * size, *totals = change + TOKENS * size;
    float *values = totals + TOKENS * size, *given = values + TOKENS * width, *out = given + TOKENS * width;
    float *other = out + TOKENS * width, *pairs = other + CHUNK * (size + width), *weights = pairs + CHUNK * CHUNK;
    float *total = weights + CHUNK * CHUNK, *rise = total + size, *inverse = rise + size, *share = inverse + L;
    memset(state, 0, sizeof(float) * standing), memset(up, 0, sizeof(float) * standing);
    memset(down, 0, sizeof(float) * lying);
    memset(total, 0, sizeof(float) * size), memset(rise, 0, sizeof(float) * size);

    int64_t seen = p->causal ? p->keys - L : p->keys, step = p->causal ? CHUNK : TOKENS;
    for (int64_t first = 0; first < seen; first += TOKENS) {
        int64_t rows = lesser(TOKENS, seen - first);
        read_keys(&x, first, rows, keys, values);
        if (lift(&x, first, rows, keys)) shrink_columns(&x, E, state), multiply_row(size, x.fall, total);
        relate(&x, first, rows, rows, keys, values);
        add_keys(&x, rows, keys, queries, total);
        product(E, size, rows, values, 1, width, keys, size, state, size, 1);
    }
    if (exponential) memcpy(tops, x.top, sizeof(float) * size);
    for (int64_t first = 0, rows; first < L; first += rows) {
        rows = lesser(step, L - first);
        if (p->causal) {
            read_keys(&x, seen + first, rows, keys, values);
            if (lift(&x, seen + first, 1, keys)) shrink_columns(&x, E, state), multiply_row(size, x.fall, total);
            rows = near(&x, seen + first, rows, keys);
            relate(&x, seen + first, rows, CHUNK, keys, values);
            starts[chunks++] = first;
            if (exponential) memcpy(tops + chunks * size, x.top, sizeof(float) * size);
        }
        read_queries(&x, first, rows, queries);
        read_values(&x, g->grad, first, rows, given);
        if (p->causal) memset(given + rows * width, 0, sizeof(float) * (CHUNK - rows) * width);
        /* As in add_keys, what a chunk adds to a sum is added up apart. */
        memset(other, 0, sizeof(float) * size);
        for (int64_t i = 0; i < rows; i++) {
            float *sum = totals + i * size;
            memcpy(sum, total, sizeof(float) * size);
            if (p->causal) add_row(size, 1.0f, keys + i * size, other), add_row(size, 1.0f, other, sum);
            inverse[first + i] = 1.0f / (dot(size, queries + i * size, sum) + p->eps);
            scale_row(width, inverse[first + i], given + i * width);
        }
        if (p->causal) memcpy(total, totals + (rows - 1) * size, sizeof(float) * size);
        product(rows, size, E, given, width, 1, state, size, change, size, 0);
        if (p->causal) {
            past_pairs(E, given, width, columns_right(0, CHUNK, E, values, width, other), pairs);
            product(rows, size, CHUNK, pairs, CHUNK, 1, keys, size, change, size, 1);
            product(E, size, rows, values, 1, width, keys, size, state, size, 1);
        } else product(F, width, rows, queries, 1, size, given, width, down, width, 1);
        for (int64_t i = 0; i < rows; i++) {
            float part = dot(size, queries + i * size, change + i * size) * inverse[first + i];
            if (p->norms) part -= p->norms[(b * p->heads + h) * L + first + i];
            share[first + i] = part;
            if (!p->causal) add_row(size, -part, queries + i * size, other);
            add_row(size, -part, totals + i * size, change + i * size);
        }
        if (!p->causal) add_row(size, 1.0f, other, rise);
        write_inputs(&x, g->dq, first, rows, queries, change, x.asking, 0);
    }
    starts[chunks] = L;
    /* Keys are read by later queries, so their gradients are gathered from the end. */
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        int64_t first = starts[chunk], rows = starts[chunk + 1] - first;
        if (exponential && move_top(&x, tops + (chunk + 1) * size)) {
            shrink_columns(&x, E, up), shrink_rows(&x, width, down);
            multiply_row(size, x.fall, rise);
        }
        read_queries(&x, first, rows, queries);
        read_values(&x, g->grad, first, rows, given);
        read_keys(&x, seen + first, rows, keys, values);
        relate(&x, seen + first, rows, CHUNK, keys, values);
        memset(queries + rows * size, 0, sizeof(float) * (CHUNK - rows) * size);
        memset(given + rows * width, 0, sizeof(float) * (CHUNK - rows) * width);
        for (int64_t i = 0; i < rows; i++) scale_row(width, inverse[first + i], given + i * width);
        past_pairs(E, given, width, columns_right(0, CHUNK, E, values, width, other), pairs);
        past_pairs(F, queries, size, columns_right(0, CHUNK, F, keys, size, other), weights);
        product(rows, size, E, values, width, 1, up, size, change, size, 0);
        product(rows, size, CHUNK, pairs, 1, CHUNK, queries, size, change, size, 1);
        product(rows, width, F, keys, size, 1, down, width, out, width, 0);
        product(rows, width, CHUNK, weights, 1, CHUNK, given, width, out, width, 1);
        product(E, size, rows, given, 1, width, queries, size, up, size, 1);
        product(F, width, rows, queries, 1, size, given, width, down, width, 1);
        memset(other, 0, sizeof(float) * size);
        for (int64_t i = rows - 1; i >= 0; i--) {
            add_row(size, -share[first + i], queries + i * size, other);
            add_row(size, 1.0f, rise, change + i * size), add_row(size, 1.0f, other, change + i * size);
            write_row(g->dv, p->bf16, b, h, seen + first + i, E, out + i * width);
        }
        add_row(size, 1.0f, other, rise);
        write_inputs(&x, g->dk, seen + first, rows, keys, change, x.asked, exponential);
    }
    if (exponential && move_top(&x, tops)) shrink_rows(&x, width, down), multiply_row(size, x.fall, rise);
    transpose(F, E, down, width, up, size);
    for (int64_t first = 0; first < seen; first += TOKENS) {
        int64_t rows = lesser(TOKENS, seen - first);
        read_keys(&x, first, rows, keys, values);
        relate(&x, first, rows, rows, keys, values);
        product(rows, size, E, values, width, 1, up, size, change, size, 0);
        product(rows, width, F, keys, size, 1, down, width, out, width, 0);
        for (int64_t i = 0; i < rows; i++) {
            add_row(size, 1.0f, rise, change + i * size);
            write_row(g->dv, p->bf16, b, h, first + i, E, out + i * width);
        }
        write_inputs(&x, g->dk, first, rows, keys, change, x.asked, exponential);
    }
    free(memory), free(tops), free(starts);
    return 0;
}

int backward(const backward_problem *g) {
    float *across = both_ways(&g->all);
    int failed = !across || ANY_HEAD_FAILS(&g->all, gradients(g, across, b, h));
    free(across);
    return failed;
}
