/* Softmax in C, of whole rows or of what arrives of them piece by piece.

   A score of -INFINITY is not seen, and weighs nothing. A NaN is passed over in the search for the largest score, but
   its weight is NaN, and so is the sum. Rows are filled up with -INFINITY to whole vectors. */
#pragma once

#include "vectors.h"

INLINE void fill_up(int64_t n, float *scores) {
    for (int64_t j = n; j < padded(n); j++) scores[j] = -INFINITY;
}

/* The largest of n scores and `most`. */
INLINE float row_most(int64_t n, float *scores, float most) {
    vf tops = (vf){0} + most;
    fill_up(n, scores);
    for (int64_t j = 0; j < n; j += WIDTH) tops = larger(*(vf *)(scores + j), tops);
    return lane_most(tops);
}

/* Scores become weights relative to that of `most`; their sum is returned. */
INLINE float weigh_row(int64_t n, float most, float *scores) {
    /* Where nothing is seen, any finite number makes weights of 0. */
    vf origin = (vf){0} + (most == -INFINITY ? 0.0f : most), sums = {0};
    fill_up(n, scores);
    for (int64_t j = 0; j < n; j += WIDTH) sums += *(vf *)(scores + j) = vweight(*(vf *)(scores + j) - origin);
    return lane_sum(sums);
}

INLINE void softmax(int64_t n, float *scores) {
    float sum = weigh_row(n, row_most(n, scores, -INFINITY), scores);
    scale_row(n, 1.0f / sum, scores);
}

/* Let the largest score so far be `most`; the sum so far, and all else relative to it, shrinks by what is returned. */
INLINE float rescale(float most, float *top, float *sum) {
    if (!(most > *top)) return 1.0f;
    float fade = expf(*top - most);
    *top = most, *sum *= fade;
    return fade;
}

/* n more scores become weights relative to the largest so far, and join the sum; returned is what `rescale` returns. */
INLINE float softmax_step(int64_t n, float *scores, float *top, float *sum) {
    float fade = rescale(row_most(n, scores, *top), top, sum);
    *sum += weigh_row(n, *top, scores);
    return fade;
}

/* What outputs are divided by in the end: nothing seen is 0. */
INLINE float share_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
