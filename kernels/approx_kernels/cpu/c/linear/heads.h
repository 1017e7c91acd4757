/* What both directions of linear attention share: the heads of a problem. */
#pragma once

#include "linear/features.h"

/* Rows of a chunk that share a product: tiles would be half empty if these were few, and nothing gained. */
INLINE int64_t strip_of(right by) { return by.pairs ? CHUNK : STRIP; }

/* Products of each row with the rows up to its own, which stand across, [CHUNK, CHUNK]; 0 beyond. */
static void past_pairs(int64_t depth, const float *rows, int64_t stride, right others, float *pairs) {
    memset(pairs, 0, sizeof(float) * CHUNK * CHUNK);
    for (int64_t i = 0, strip = strip_of(others); i < CHUNK; i += strip) {
        multiply(strip, i + strip, depth, rows + i * stride, stride, 1, others, 0, 0, pairs + i * CHUNK, CHUNK, 0);
        for (int64_t r = i; r < i + strip; r++)
            for (int64_t j = r + 1; j < i + strip; j++) pairs[r * CHUNK + j] = 0.0f;
    }
}
