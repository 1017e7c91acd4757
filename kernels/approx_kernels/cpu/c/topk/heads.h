/* What both directions of exact top-k attention share. */
#pragma once

#include "rows.h"
#include "softmax.h"
#include "dropout.h"

/* Queries that meet a block of keys together, in strips that are whole tiles of a product. */
enum { STRIP = 24, ROWS = 4 * STRIP, BLOCK = 64 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, kept, causal, bf16, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    int32_t *top; /* [B, H, L, K]: the keys of each query, -1 where it has fewer */
    float scale;
    dropout dropout;
} problem;
SIZE_OF(topk, problem)
