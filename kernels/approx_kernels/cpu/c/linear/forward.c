/* Outputs of attention by features in C: one pass over keys, one over queries, or both at once where it is causal. */

#include "linear/heads.h"

static int attend(const problem *p, const float *across, split parts, int64_t b, int64_t h) {
    head x;
    int64_t size = padded(p->features), width = padded(p->values), F = p->features, E = p->values;
    float *memory = begin(&x, p, across, b, h,
                          (F + 2 * TOKENS) * width + (2 * TOKENS + 1) * size + CHUNK * CHUNK + room(TOKENS, width) +
                              room(F, width) + room(size, CHUNK));
    if (!memory) return 1;
    int half = begin_halves(p->bf16, p->length);
    /* Two parts: their rounding errors in a logarithm are far below those of its inputs. */
    split own = split_rows(half && p->rows && p->sets > 1, 2, p->size, F, p->input_scale, x.across, size);
    if (half) x.parts = own.pairs ? own : parts;
    float *state = memory, *values = state + F * width, *out = values + TOKENS * width, *keys = out + TOKENS * width;
    float *queries = keys + TOKENS * size, *total = queries + TOKENS * size, *other = total + size;
    float *pairs = other + room(size, CHUNK), *given = pairs + CHUNK * CHUNK, *held = given + room(TOKENS, width);
    float *sums = p->sums + (b * p->heads + h) * F * (E + 1);
    memset(state, 0, sizeof(float) * F * width), memset(total, 0, sizeof(float) * size);
    for (int64_t f = 0; f < F; f++) {
        memcpy(state + f * width, sums + f * (E + 1), sizeof(float) * E);
        total[f] = sums[f * (E + 1) + E];
    }
    /* A single query sees every key, its own too. */
    int64_t seen = p->causal && p->length > 1 ? p->keys - p->length : p->keys;
    for (int64_t first = 0; first < seen; first += TOKENS) {
        int64_t rows = lesser(TOKENS, seen - first);
        read_keys(&x, first, rows, keys, values);
        if (lift(&x, first, rows, keys)) shrink_rows(&x, width, state), multiply_row(size, x.fall, total);
        relate(&x, first, rows, rows, keys, values);
        add_keys(&x, rows, keys, queries, total);
        right kept = rows_right(half, rows, width, values, width, given);
        multiply(F, width, rows, keys, 1, size, kept, 0, 0, state, width, 1);
    }
    right past = {0};
    int64_t step = seen < p->keys ? CHUNK : TOKENS;
    for (int64_t first = 0, rows; first < p->length; first += rows) {
        rows = lesser(step, p->length - first);
        if (seen < p->keys) {
            read_keys(&x, seen + first, rows, keys, values);
            if (lift(&x, seen + first, 1, keys)) shrink_rows(&x, width, state), multiply_row(size, x.fall, total);
            rows = near(&x, seen + first, rows, keys);
            relate(&x, seen + first, rows, CHUNK, keys, values);
        }
        read_queries(&x, first, rows, queries);
        if (!first || seen < p->keys) past = rows_right(half, F, width, state, width, held);
        multiply(rows, width, F, queries, size, 1, past, 0, 0, out, width, 0);
        if (seen < p->keys) {
            memset(queries + rows * size, 0, sizeof(float) * (CHUNK - rows) * size);
            right kept = rows_right(half, rows, width, values, width, given);
            past_pairs(F, queries, size, columns_right(half, CHUNK, F, keys, size, other), pairs);
            for (int64_t i = 0, strip = strip_of(kept); i < rows; i += strip)
                multiply(lesser(strip, rows - i), width, lesser(i + strip, rows), pairs + i * CHUNK, CHUNK, 1, kept, 0,
                         0, out + i * width, width, 1);
            multiply(F, width, rows, keys, 1, size, kept, 0, 0, state, width, 1);
        }
        for (int64_t i = 0; i < rows; i++) {
            float weight = dot(size, queries + i * size, total);
            if (seen < p->keys) weight += row_sum(CHUNK, pairs + i * CHUNK);
            weight += p->eps;
            if (p->norms) p->norms[(b * p->heads + h) * p->length + first + i] = weight;
            scale_row(width, 1.0f / weight, out + i * width);
            write_row(p->out, p->bf16, b, h, first + i, E, out + i * width);
        }
        if (seen < p->keys) add_keys(&x, rows, keys, queries, total);
    }
    if (lift(&x, 0, 0, NULL)) shrink_rows(&x, width, state), multiply_row(size, x.fall, total);
    for (int64_t f = 0; f < F; f++) {
        memcpy(sums + f * (E + 1), state + f * width, sizeof(float) * E);
        sums[f * (E + 1) + E] = total[f];
    }
    if (p->tops) memcpy(p->tops + (b * p->heads + h) * F, x.top, sizeof(float) * F);
    end_halves(half), free(memory), free((void *)own.pairs);
    return 0;
}

int forward(const problem *p) {
    float *across = both_ways(p);
    if (!across) return 1;
    split parts = split_rows(p->bf16 && p->rows && p->sets == 1, 2, p->size, p->features, p->input_scale, across,
                             padded(p->features));
    int failed = ANY_HEAD_FAILS(p, attend(p, across, parts, b, h));
    free(across), free((void *)parts.pairs);
    return failed;
}
