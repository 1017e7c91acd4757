"""Gradients of linear attention in C; features and pairs are computed again."""

from approx_kernels.linear.forward_c import HEADS

BACKWARD = (
    HEADS
    + r"""
typedef struct { problem all; tensor grad, dq, dk, dv; } backward_problem;

/* Gradients of inputs from those of their features. */
static void write_inputs(const problem *p, tensor to, int64_t b, int64_t h, int64_t first, int64_t rows,
                         const float *features, float *change) {
    int64_t size = padded(p->size);
    for (int64_t i = 0; i < rows; i++, features += size, change += size) {
        for (int64_t d = 0; d < size; d += WIDTH) {
            vf at = *(const vf *)(features + d), none = {0}, one = none + 1.0f, slope;
            if (p->relu) slope = choose(at > 0.0f, one, none);
            else slope = choose(at < 1.0f, at, one);
            *(vf *)(change + d) *= slope * p->input_scale;
        }
        write_row(to, p->bf16, b, h, first + i, p->size, change);
    }
}

static int gradients(const backward_problem *g, int64_t b, int64_t h) {
    const problem *p = &g->all;
    int64_t size = padded(p->size), width = padded(p->values), D = p->size, E = p->values, L = p->length;
    /* Rows of the state and of the gradient of it, each also transposed. */
    int64_t lying = D * width, standing = E * size;
    float *memory = floats(lying + 2 * standing + TOKENS * (5 * size + 3 * width) + CHUNK * (size + width) +
                           2 * CHUNK * CHUNK + 2 * size + 2 * L);
    if (!memory) return 1;
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
        int64_t rows = seen - first < TOKENS ? seen - first : TOKENS;
        read_keys(p, b, h, first, rows, rows, keys, values);
        for (int64_t i = 0; i < rows; i++) add_row(size, 1.0f, keys + i * size, total);
        product(E, size, rows, values, 1, width, keys, size, state, size, 1);
    }
    for (int64_t first = 0; first < L; first += step) {
        int64_t rows = L - first < step ? L - first : step;
        read_features(p, p->q, b, h, first, rows, queries);
        read_values(p, g->grad, b, h, first, rows, given);
        if (p->causal) {
            read_keys(p, b, h, seen + first, rows, CHUNK, keys, values);
            memset(given + rows * width, 0, sizeof(float) * (CHUNK - rows) * width);
        }
        for (int64_t i = 0; i < rows; i++) {
            if (p->causal) add_row(size, 1.0f, keys + i * size, total);
            memcpy(totals + i * size, total, sizeof(float) * size);
            inverse[first + i] = 1.0f / (dot(size, queries + i * size, total) + p->eps);
            for (int64_t e = 0; e < width; e += WIDTH) *(vf *)(given + i * width + e) *= inverse[first + i];
        }
        product(rows, size, E, given, width, 1, state, size, change, size, 0);
        if (p->causal) {
            transpose(CHUNK, E, values, width, other, CHUNK);
            past_pairs(E, given, width, other, pairs);
            product(rows, size, CHUNK, pairs, CHUNK, 1, keys, size, change, size, 1);
            product(E, size, rows, values, 1, width, keys, size, state, size, 1);
        } else
            product(D, width, rows, queries, 1, size, given, width, down, width, 1);
        for (int64_t i = 0; i < rows; i++) {
            float part = dot(size, queries + i * size, change + i * size) * inverse[first + i];
            share[first + i] = part;
            if (!p->causal) add_row(size, -part, queries + i * size, rise);
            add_row(size, -part, totals + i * size, change + i * size);
        }
        write_inputs(p, g->dq, b, h, first, rows, queries, change);
    }
    /* Keys are read by later queries, so their gradients are gathered from the end. */
    for (int64_t first = p->causal ? (L - 1) / CHUNK * CHUNK : -1; first >= 0; first -= CHUNK) {
        int64_t rows = L - first < CHUNK ? L - first : CHUNK;
        read_features(p, p->q, b, h, first, rows, queries);
        read_values(p, g->grad, b, h, first, rows, given);
        read_keys(p, b, h, seen + first, rows, CHUNK, keys, values);
        memset(queries + rows * size, 0, sizeof(float) * (CHUNK - rows) * size);
        memset(given + rows * width, 0, sizeof(float) * (CHUNK - rows) * width);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t e = 0; e < width; e += WIDTH) *(vf *)(given + i * width + e) *= inverse[first + i];
        transpose(CHUNK, E, values, width, other, CHUNK);
        past_pairs(E, given, width, other, pairs);
        transpose(CHUNK, D, keys, size, other, CHUNK);
        past_pairs(D, queries, size, other, weights);
        product(rows, size, E, values, width, 1, up, size, change, size, 0);
        product(rows, size, CHUNK, pairs, 1, CHUNK, queries, size, change, size, 1);
        product(rows, width, D, keys, size, 1, down, width, out, width, 0);
        product(rows, width, CHUNK, weights, 1, CHUNK, given, width, out, width, 1);
        product(E, size, rows, given, 1, width, queries, size, up, size, 1);
        product(D, width, rows, queries, 1, size, given, width, down, width, 1);
        for (int64_t i = rows - 1; i >= 0; i--) {
            add_row(size, -share[first + i], queries + i * size, rise);
            add_row(size, 1.0f, rise, change + i * size);
            write_row(g->dv, p->bf16, b, h, seen + first + i, E, out + i * width);
        }
        write_inputs(p, g->dk, b, h, seen + first, rows, keys, change);
    }
    transpose(D, E, down, width, up, size);
    for (int64_t first = 0; first < seen; first += TOKENS) {
        int64_t rows = seen - first < TOKENS ? seen - first : TOKENS;
        read_keys(p, b, h, first, rows, rows, keys, values);
        product(rows, size, E, values, width, 1, up, size, change, size, 0);
        product(rows, width, D, keys, size, 1, down, width, out, width, 0);
        for (int64_t i = 0; i < rows; i++) {
            add_row(size, 1.0f, rise, change + i * size);
            write_row(g->dv, p->bf16, b, h, first + i, E, out + i * width);
        }
        write_inputs(p, g->dk, b, h, first, rows, keys, change);
    }
    free(memory);
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
