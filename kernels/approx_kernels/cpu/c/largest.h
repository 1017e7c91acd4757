/* The largest scores of a row in C, found in one pass over the scores. */
#pragma once

#include "vectors.h"

/* Candidates for the `kept` largest scores of a row, in the order of the keys: those not below a floor that at least
   `kept` scores reach. `room` is their capacity. */
typedef struct {
    float *scores, floor;
    int32_t *keys;
    int64_t count, kept, room;
    int32_t *ranks;
} candidates;

/* Those of some rows, of which `most` scores come at a time, in one piece of memory; NULL where there is none. */
static candidates *candidates_of(int64_t rows, int64_t kept, int64_t most) {
    int64_t room = padded(2 * kept + 2 * most);
    candidates *made = malloc(sizeof(candidates) * rows + 4 * room * (2 * rows + 1));
    if (!made) return NULL;
    int32_t *ranks = (int32_t *)(made + rows), *keys = ranks + room;
    float *scores = (float *)(keys + rows * room);
    for (int64_t r = 0; r < rows; r++, scores += room, keys += room)
        made[r] = (candidates){scores, -INFINITY, keys, 0, kept, room, ranks};
    return made;
}

/* Let scores of keys, the candidates' own or others, be candidates if they are not too low. */
INLINE void take(candidates *x, int64_t count, const float *scores, const int32_t *keys) {
#if WIDTH == 16
    for (int64_t i = 0; i < count; i += WIDTH) {
        __m512 at = _mm512_loadu_ps(scores + i);
        __m512i key = _mm512_loadu_si512(keys + i);
        __mmask16 in = _mm512_mask_cmp_ps_mask(first_lanes(count - i), at, _mm512_set1_ps(x->floor), _CMP_NLT_UQ);
        _mm512_storeu_ps(x->scores + x->count, _mm512_maskz_compress_ps(in, at));
        _mm512_storeu_si512(x->keys + x->count, _mm512_maskz_compress_epi32(in, key));
        x->count += __builtin_popcount(in);
    }
#else
    for (int64_t i = 0; i < count; i++) {
        float score = scores[i];
        int32_t key = keys[i];
        x->scores[x->count] = score, x->keys[x->count] = key;
        x->count += !(score < x->floor);
    }
#endif
}

/* Scores as whole numbers in the same order; a NaN is the largest. */
INLINE vi ranks(vf score) {
    vi bits = (vi)score;
    return (vi)choose(score == score, (vf)(bits ^ (bits >> 31 & INT32_MAX)), (vf)((vi){0} + INT32_MAX));
}

/* Drop all but the largest, the last ones among ties; keeps the order. */
static void settle(candidates *x) {
    int64_t count = x->count, reaching = count;
    if (count <= x->kept) return;
    for (int64_t i = 0; i < count; i += WIDTH) *(vi *)(x->ranks + i) = ranks(*(vf *)(x->scores + i));
    for (int64_t i = count; i < padded(count); i++) x->ranks[i] = INT32_MIN;
    /* The highest bound that enough of them reach, bit by bit, or one that no more reach. */
    int32_t bound = INT32_MIN;
    for (uint32_t bit = 1u << 31; bit && reaching > x->kept; bit >>= 1) {
        int32_t next = (int32_t)((uint32_t)bound + bit);
        int64_t above = 0;
        for (int64_t i = 0; i < count; i += WIDTH) above += count_true(*(vi *)(x->ranks + i) >= next);
        if (above >= x->kept) bound = next, reaching = above;
    }
    for (int64_t i = count; reaching > x->kept;)
        if (x->ranks[--i] == bound) x->ranks[i] = INT32_MIN, reaching--;
    int32_t bits = bound ^ (bound >> 31 & INT32_MAX);
    memcpy(&x->floor, &bits, sizeof(float)), x->count = 0;
    for (int64_t i = 0; x->count < x->kept; i++) {
        x->scores[x->count] = x->scores[i], x->keys[x->count] = x->keys[i];
        x->count += x->ranks[i] >= bound;
    }
}

/* The next scores of a row, of rising keys. Whole vectors of them are written. */
INLINE void offer(candidates *x, int64_t count, const float *scores, const int32_t *keys) {
    if (x->count + padded(count) > x->room) settle(x);
    take(x, count, scores, keys);
}
