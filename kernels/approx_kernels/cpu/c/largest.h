/* The largest scores of a row in C, found while the scores pass by. */
#pragma once

#include "vectors.h"

/* A heap with the least of its scores first; keys follow their scores. Everything below place `at` is in order. */
static void sink(float *scores, int32_t *keys, int64_t count, int64_t at) {
    float score = scores[at];
    int32_t key = keys[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && scores[child + 1] < scores[child]) child++;
        if (!(scores[child] < score)) break;
        scores[at] = scores[child], keys[at] = keys[child];
    }
    scores[at] = score, keys[at] = key;
}

/* Add a score to a list that is not full; once it is, the least stands first. */
SHARED void append(float *scores, int32_t *keys, int32_t *filled, int64_t kept, float score, int32_t key) {
    scores[*filled] = score, keys[(*filled)++] = key;
    for (int64_t at = kept / 2; *filled == kept && at-- > 0;) sink(scores, keys, kept, at);
}

/* Put a score in the place of the least of a full list. */
INLINE void replace(float *scores, int32_t *keys, int64_t kept, float score, int32_t key) {
    scores[0] = score, keys[0] = key;
    sink(scores, keys, kept, 0);
}
