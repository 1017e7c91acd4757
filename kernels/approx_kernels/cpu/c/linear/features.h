/* Features of queries and keys in C, made where their products need them, and never stored.

   Random features are exponentials of `w.x - |x|^2 / 2`, which no float32 holds; they are relative to the largest that
   each of them has had among the keys so far. Sums over keys shrink as these rise. */
#pragma once

#include "parts.h"
#include "rows.h"
#include "softmax.h"

enum { TOKENS = 64, CHUNK = 32, STRIP = 16 };
enum { ELU, RELU, EXP };
/* How far a feature's logarithm may rise above its reference: exp(60) times any sum here is a float32, and query
   features that underflow below exp(-87) meet at most exp(60), which is negligible next to weights of 1. */
#define RISE 60.0f
/* Below every logarithm, and finite, so that differences of it are numbers. */
#define LOWEST -8e37f

typedef struct {
    int64_t batch, heads, length, keys, size, features, values, sets, causal, map, bf16, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    float *sums; /* [B, H, F, E + 1] */
    float *tops; /* [B, H, F], what sums of exponentials are relative to */
    const float *
        rows; /* [sets, F, D], of random features, of all heads or of each; NULL where each number has one of its own */
    const float *offsets; /* [sets, F], added to the logarithms of queries' features; NULL for none */
    float *norms; /* [B, H, L], normalisers of queries, or the gradients of these; NULL where nobody asks */
    float *bases; /* [B, H, L], logarithms of what exponential features of queries are relative to; NULL if not asked for */
    float input_scale, eps, floor;
} problem;
SIZE_OF(linear, problem)

/* One head of one sample. */
typedef struct {
    const problem *all;
    int64_t b, h, size, width, wide; /* features, values and inputs in whole vectors */
    const float *across, *along; /* random rows, [D, F] and [F, D] */
    const float *offsets; /* [F]; or nothing */
    float *asking, *asked; /* inputs of queries and keys, [TOKENS, D] */
    float *top, *higher, *fall; /* [F]: what features are relative to, the largest so far, the ratio of the two */
    split parts; /* the rows across, scaled, for inputs of bfloat16 on tiles; or nothing */
} head;

INLINE int real(const head *x, int64_t j) { return !x->all->mask || x->all->mask[x->b * x->all->keys + j]; }

INLINE void multiply_row(int64_t n, const float *by, float *row) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(row + d) *= *(const vf *)(by + d);
}

/* Numbers of a set of random rows, as `both_ways` lays them out. */
INLINE int64_t set_size(const problem *p) {
    return p->size * padded(p->features) + (p->rows ? p->features * padded(p->size) : 0);
}

/* Each set of random rows as columns, [D, F], then as rows, [F, D], in whole vectors; NULL where there is no memory. */
static float *both_ways(const problem *p) {
    int64_t size = padded(p->features), wide = padded(p->size), D = p->size, F = p->rows ? p->features : 0;
    int64_t sets = p->rows ? p->sets : 1, all = sets * set_size(p);
    float *made = floats(all);
    if (!made) return NULL;
    memset(made, 0, sizeof(float) * all);
    for (int64_t s = 0; s < sets; s++) {
        const float *rows = p->rows + s * F * D;
        float *across = made + s * set_size(p), *along = across + D * size;
        for (int64_t f = 0; f < F; f++)
            for (int64_t d = 0; d < D; d++) across[d * size + f] = along[f * wide + d] = rows[f * D + d];
    }
    return made;
}

/* Begin a head: memory for its own work and, returned, for `more` floats; NULL where there is none. */
static float *begin(head *x, const problem *p, const float *across, int64_t b, int64_t h, int64_t more) {
    int64_t F = p->features, size = padded(F), wide = padded(p->size);
    float *memory = floats(more + 2 * TOKENS * wide + 3 * size);
    if (!memory) return NULL;
    float *asking = memory + more, *top = asking + 2 * TOKENS * wide;
    int64_t set = p->sets > 1 ? h : 0;
    if (p->rows) across += set * set_size(p);
    *x = (head){p,
                b,
                h,
                size,
                padded(p->values),
                wide,
                across,
                across + p->size * size,
                p->offsets ? p->offsets + set * F : NULL,
                asking,
                asking + TOKENS * wide,
                top,
                top + size,
                top + 2 * size,
                {0}};
    /* The padding of the last vector never rises. */
    for (int64_t f = 0; f < size; f++)
        x->higher[f] = x->top[f] = f >= F ? 0.0f : p->tops ? p->tops[(b * p->heads + h) * F + f] : LOWEST;
    return memory;
}

static void read_values(const head *x, tensor from, int64_t first, int64_t rows, float *to) {
    read_rows(from, x->all->bf16, x->b, x->h, NULL, first, rows, x->all->values, to);
}

/* Features of rows; of exponentials, products with the random rows. */
static void map_rows(const head *x, tensor from, int64_t first, int64_t rows, float *inputs, float *to) {
    const problem *p = x->all;
    int parts = x->parts.pairs != NULL;
    read_scaled(from, p->bf16, x->b, x->h, NULL, first, rows, p->size, parts ? 1.0f : p->input_scale,
                p->rows ? inputs : to);
    if (parts) {
        split_product(rows, x->size, p->size, inputs, x->wide, x->parts, to, x->size, 0);
        scale_row(rows * x->wide, p->input_scale, inputs);
    } else if (p->rows) {
        product(rows, x->size, p->size, inputs, x->wide, 1, x->across, x->size, to, x->size, 0);
    }
    if (p->map == EXP) return;
    for (int64_t i = 0; i < rows; i++, to += x->size) {
        for (int64_t d = 0; d < x->size; d += WIDTH) {
            vf at = *(vf *)(to + d), none = {0}, above = choose(at < 0.0f, none, at);
            if (p->map == ELU) above += vexp(choose(at < 0.0f, at, none));
            *(vf *)(to + d) = above + p->floor;
        }
        for (int64_t d = p->features; d < x->size; d++) to[d] = 0.0f;
    }
}

/* Features of queries; of exponentials such that the largest of each query is 1, for keys relative to `top`. */
static void read_queries(const head *x, int64_t first, int64_t rows, float *to) {
    map_rows(x, x->all->q, first, rows, x->asking, to);
    if (x->all->map != EXP) return;
    for (int64_t i = 0; i < rows; i++, to += x->size) {
        for (int64_t d = 0; x->offsets && d < x->all->features; d++) to[d] += x->offsets[d];
        add_row(x->size, 1.0f, x->top, to);
        float most = row_most(x->all->features, to, -INFINITY);
        if (x->all->bases) x->all->bases[(x->b * x->all->heads + x->h) * x->all->length + first + i] = most;
        weigh_row(x->all->features, most, to);
    }
}

/* Values of keys and their features; of exponentials, the logarithms. */
static void read_keys(const head *x, int64_t first, int64_t rows, float *keys, float *values) {
    map_rows(x, x->all->k, first, rows, x->asked, keys);
    read_values(x, x->all->v, first, rows, values);
    if (x->all->map != EXP) return;
    for (int64_t i = 0; i < rows; i++) {
        float half = dot(x->wide, x->asked + i * x->wide, x->asked + i * x->wide) / 2;
        for (int64_t d = 0; d < x->size; d += WIDTH) *(vf *)(keys + i * x->size + d) -= half;
    }
}

/* Logarithms become features relative to `top`; keys and values are 0 where padded, and from `rows` up to `full`. */
static void relate(const head *x, int64_t first, int64_t rows, int64_t full, float *keys, float *values) {
    for (int64_t i = 0; i < full; i++, keys += x->size, values += x->width) {
        if (i >= rows || !real(x, first + i)) {
            memset(keys, 0, sizeof(float) * x->size), memset(values, 0, sizeof(float) * x->width);
        } else if (x->all->map == EXP) {
            for (int64_t d = 0; d < x->size; d += WIDTH)
                *(vf *)(keys + d) = vexp(*(vf *)(keys + d) - *(vf *)(x->top + d));
            for (int64_t d = x->all->features; d < x->size; d++) keys[d] = 0.0f;
        }
    }
}

INLINE void raise_higher(head *x, const float *logs) {
    for (int64_t d = 0; d < x->size; d += WIDTH)
        *(vf *)(x->higher + d) = larger(*(const vf *)(logs + d), *(vf *)(x->higher + d));
}

/* Make features relative to other logarithms; sums have to be multiplied by `fall`, if it is not 1 everywhere. */
static int move_top(head *x, const float *to) {
    vi moved = {0};
    for (int64_t d = 0; d < x->size; d += WIDTH) {
        vf old = *(vf *)(x->top + d), new = *(const vf *)(to + d);
        moved |= old != new;
        *(vf *)(x->fall + d) = vexp(choose(old < new, old - new, new - old));
        *(vf *)(x->top + d) = new;
    }
    return count_true(moved) > 0;
}

/* Make features relative to the largest logarithms so far, including these keys'. */
static int lift(head *x, int64_t first, int64_t rows, const float *logs) {
    if (x->all->map != EXP) return 0;
    for (int64_t i = 0; i < rows; i++)
        if (real(x, first + i)) raise_higher(x, logs + i * x->size);
    return move_top(x, x->higher);
}

/* How many of some keys, after the first one, do not rise too far; they count at the next lift. A query must not depend
   on later keys, not even by rounding, so a key that rises too far changes only what follows. */
static int64_t near(head *x, int64_t first, int64_t rows, const float *logs) {
    if (x->all->map != EXP) return rows;
    for (int64_t i = 0; i < rows; i++, logs += x->size) {
        if (!real(x, first + i)) continue;
        vi far = {0};
        for (int64_t d = 0; d < x->size; d += WIDTH) far |= *(const vf *)(logs + d) - *(vf *)(x->top + d) > RISE;
        if (count_true(far)) return i;
        raise_higher(x, logs);
    }
    return rows;
}

/* Features of some keys are added up before they join the total: one by one, small ones would all round the same
   way. */
static void add_keys(const head *x, int64_t rows, const float *keys, float *part, float *total) {
    memset(part, 0, sizeof(float) * x->size);
    for (int64_t i = 0; i < rows; i++) add_row(x->size, 1.0f, keys + i * x->size, part);
    add_row(x->size, 1.0f, part, total);
}

/* Sums over keys, [F, n], with the logarithms that they are relative to. */
static void shrink_rows(const head *x, int64_t n, float *sums) {
    for (int64_t f = 0; f < x->all->features; f++) scale_row(n, x->fall[f], sums + f * n);
}

/* The same, [n, F]. */
SHARED void shrink_columns(const head *x, int64_t n, float *sums) {
    for (int64_t i = 0; i < n; i++) multiply_row(x->size, x->fall, sums + i * x->size);
}
