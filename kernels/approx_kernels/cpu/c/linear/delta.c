/* The gated delta rule in C: a state that each key fades, and in which it replaces what the state holds for it. Forward only. */

#include "rows.h"

/* Tokens whose pairs are computed together. */
enum { BLOCK = 32 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, threads;
    tensor q, k, v, out; /* float32 */
    const float *decays, *rates; /* [B, H, S], logarithms of decays, and shares that are replaced */
    float *sums, *total, *written; /* [B, H, F, E], the state, and [B, H], what it has written, both updated; [B, H, L], the latter at each query */
} problem;
SIZE_OF(delta, problem)

/* Rows from one on, of which those before the first are 0. */
static void read_from(tensor x, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t size, float *to) {
    int64_t none = lesser(rows, greater(0, -first));
    memset(to, 0, sizeof(float) * none * padded(size));
    if (none < rows) read_rows(x, 0, b, h, NULL, first + none, rows - none, size, to + none * padded(size));
}

static int attend(const problem *p, int64_t b, int64_t h) {
    int64_t F = p->size, E = p->values, size = padded(F), width = padded(E), at = b * p->heads + h;
    /* Both end together. */
    int64_t tokens = greater(p->length, p->keys), ahead = tokens - p->keys, unasked = tokens - p->length;
    float *memory = floats(F * width + BLOCK * (3 * size + 3 * width + 2 * BLOCK));
    if (!memory) return 1;
    float *sums = memory, *keys = sums + F * width, *queries = keys + BLOCK * size, *across = queries + BLOCK * size;
    float *values = across + size * BLOCK, *held = values + BLOCK * width, *out = held + BLOCK * width;
    float *pairs = out + BLOCK * width, *asked = pairs + BLOCK * BLOCK;
    float *state = p->sums + at * F * E;
    double total = p->total[at];
    memset(sums, 0, sizeof(float) * F * width), memset(keys, 0, sizeof(float) * BLOCK * size);
    for (int64_t f = 0; f < F; f++) memcpy(sums + f * width, state + f * E, sizeof(float) * E);
    for (int64_t first = 0; first < tokens; first += BLOCK) {
        int64_t rows = lesser(BLOCK, tokens - first);
        float faded[BLOCK] __attribute__((aligned(64))) = {0}, decays[BLOCK] = {0}, rates[BLOCK] = {0};
        read_from(p->k, b, h, first - ahead, rows, F, keys);
        read_from(p->v, b, h, first - ahead, rows, E, values);
        read_from(p->q, b, h, first - unasked, rows, F, queries);
        for (int64_t i = 0; i < rows; i++) {
            int64_t key = first + i - ahead;
            if (key >= 0) decays[i] = p->decays[at * p->keys + key], rates[i] = p->rates[at * p->keys + key];
            faded[i] = (i ? faded[i - 1] : 0.0f) + decays[i];
        }
        transpose(BLOCK, F, keys, size, across, BLOCK);
        product(rows, BLOCK, F, keys, size, 1, across, BLOCK, pairs, BLOCK, 0);
        product(rows, BLOCK, F, queries, size, 1, across, BLOCK, asked, BLOCK, 0);
        product(rows, width, F, keys, size, 1, sums, width, held, width, 0);
        product(rows, width, F, queries, size, 1, sums, width, out, width, 0);
        for (int64_t i = 0; i < rows; i++) {
            float *row = held + i * width, *new = values + i * width, since = expf(faded[i]);
            for (int64_t j = 0; j < BLOCK; j += WIDTH) {
                vf apart = vweight(faded[i] - *(vf *)(faded + j));
                *(vf *)(pairs + i * BLOCK + j) *= apart, *(vf *)(asked + i * BLOCK + j) *= apart;
            }
            scale_row(width, since, row), scale_row(width, since, out + i * width);
            if (i) product(1, width, i, pairs + i * BLOCK, BLOCK, 1, values, width, row, width, 1);
            add_row(width, -1.0f, row, new), scale_row(width, rates[i], new);
            product(1, width, i + 1, asked + i * BLOCK, BLOCK, 1, values, width, out + i * width, width, 1);
            total = exp((double)decays[i]) * total + rates[i];
            int64_t query = first + i - unasked;
            if (query < 0) continue;
            p->written[at * p->length + query] = (float)total;
            write_row(p->out, 0, b, h, query, E, out + i * width);
        }
        for (int64_t i = 0; i < rows; i++) scale_row(size, expf(faded[rows - 1] - faded[i]), keys + i * size);
        /* A factor near 1 is rounded, in the same direction at every block. */
        add_row(F * width, expm1f(faded[rows - 1]), sums, sums);
        product(F, width, rows, keys, 1, size, values, width, sums, width, 1);
    }
    for (int64_t f = 0; f < F; f++) memcpy(state + f * E, sums + f * width, sizeof(float) * E);
    p->total[at] = (float)total;
    free(memory);
    return 0;
}

int follow_rule(const problem *p) { return ANY_HEAD_FAILS(p, attend(p, b, h)); }
