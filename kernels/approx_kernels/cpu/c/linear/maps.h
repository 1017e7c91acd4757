/* Features of rows in C that take all numbers of a row: softmaxes, and what is learned for each head. */
#pragma once

#include "halves.h"
#include "rows.h"
#include "softmax.h"

enum { TOKENS = 64 };
enum { ELU, RELU, SOFTMAX, T2R, HEDGEHOG };

typedef struct {
    int64_t batch, heads, length, size, map, bf16, threads;
    tensor out, x;
    const float *weight; /* [H, D, D], of T2R with the bias below it, [H, D + 1, D]; NULL where nothing is learned */
    float scale;
} problem;
SIZE_OF(linear_map, problem)

/* The softmax of a row times `sign`, whole vectors, of which `n` numbers count. */
static void signed_softmax(int64_t n, float sign, const float *row, float *to) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(to + d) = *(const vf *)(row + d) * sign;
    softmax(n, to);
}

static int map_head(const problem *p, int64_t b, int64_t h) {
    int64_t D = p->size, size = padded(D), rows = D + (p->map == T2R);
    float *memory = floats(2 * TOKENS * size + (rows + 2) * size + room(D, D));
    if (!memory) return 1;
    float *inputs = memory, *heights = inputs + TOKENS * size, *weight = heights + TOKENS * size;
    float *features = weight + rows * size, *other = features + size, *held = other + size;
    memset(weight, 0, sizeof(float) * rows * size);
    if (p->weight)
        for (int64_t r = 0; r < rows; r++) memcpy(weight + r * size, p->weight + (h * rows + r) * D, sizeof(float) * D);
    right by = rows_right(0, D, D, weight, size, held);
    for (int64_t first = 0; first < p->length; first += TOKENS) {
        int64_t n = lesser(TOKENS, p->length - first);
        read_scaled(p->x, p->bf16, b, h, NULL, first, n, D, p->scale, inputs);
        if (p->weight) multiply(n, size, D, inputs, size, 1, by, 0, 0, heights, size, 0);
        for (int64_t i = 0; i < n; i++) {
            const float *row = (p->weight ? heights : inputs) + i * size;
            if (p->map == T2R)
                for (int64_t d = 0; d < size; d += WIDTH)
                    *(vf *)(features + d) = larger(*(const vf *)(row + d) + *(vf *)(weight + D * size + d), (vf){0});
            else signed_softmax(D, 1.0f, row, features);
            write_row(p->out, p->bf16, b, h, first + i, D, features);
            if (p->map != HEDGEHOG) continue;
            signed_softmax(D, -1.0f, row, other);
            tensor beside = p->out;
            beside.data = (char *)beside.data + (p->bf16 ? 2 : 4) * D;
            write_row(beside, p->bf16, b, h, first + i, D, other);
        }
    }
    free(memory);
    return 0;
}

int map_rows(const problem *p) { return ANY_HEAD_FAILS(p, map_head(p, b, h)); }
