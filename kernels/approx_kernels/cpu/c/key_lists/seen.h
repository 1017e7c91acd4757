/* Which groups of keys a strip of queries sees, in C, and which of their keys are hidden. */
#pragma once

#include "key_lists/groups.h"

#if WIDTH == 16
/* Ranks of an entry's keys that some query at these positions sees; distances of tokens do not bound ranks. */
INLINE void range_of(const problem *p, const entry *e, int64_t early, int64_t late, int64_t *begin, int64_t *end) {
    *begin = p->own ? e->begin : greater(e->begin, early + e->low);
    *end = p->own ? e->end : lesser(e->end, late + e->high + 1);
}

/* Distances at which a head has any weight left. */
INLINE int64_t reach_of(const problem *p, int64_t h) {
    int64_t all = p->keys + p->length;
    return p->spans ? whole_span(p->spans[h] + p->ramp, all) : all;
}

/* The reduction of a head's scores by distance, up to where no weight is left. */
static void fade(const problem *p, int64_t h, float *faded) {
    int64_t reach = reach_of(p, h);
    for (int64_t away = 0; away <= reach; away++) {
        float left = (p->spans[h] + p->ramp - away) / p->ramp;
        faded[away] = left <= 0.0f ? -INFINITY : left < 1.0f ? logf(left) / p->scale : 0.0f;
    }
}

/* The groups that a strip sees and that have real keys. */
static int64_t groups_of(const problem *p, const strip *t, int64_t block, group *list) {
    int64_t count = 0, reach = reach_of(p, t->h), begin, end;
    for (int64_t e = p->first[block]; e < p->first[block + 1]; e++) {
        const entry *seen = p->entries + e;
        range_of(p, seen, t->early, t->late, &begin, &end);
        if (p->spans) begin = greater(begin, t->early - reach + 1), end = lesser(end, t->late + reach);
        for (int64_t at = begin / SPAN; at * SPAN < end; at++) {
            int64_t low, high;
            positions_of(p, t, at * SPAN, &low, &high);
            if (low - t->late > seen->high || high - t->early < seen->low || !real_keys(p, t, at * SPAN)) continue;
            list[count++] = (group){(int32_t)at, (int32_t)e};
        }
    }
    return count;
}

/* A score less what distance takes; minus infinity where the key is not seen. */
INLINE void hide_lanes(const problem *p, const strips *s, int64_t reach, __m512i at, int32_t key, __mmask16 seen,
                       float *scores) {
    if (p->spans) {
        __m512i away = _mm512_abs_epi32(_mm512_sub_epi32(at, _mm512_set1_epi32(key)));
        away = _mm512_min_epi32(away, _mm512_set1_epi32((int32_t)reach));
        _mm512_store_ps(scores, _mm512_add_ps(_mm512_load_ps(scores), _mm512_i32gather_ps(away, s->faded, 4)));
    }
    _mm512_mask_store_ps(scores, ~seen, _mm512_set1_ps(-INFINITY));
}

/* What a strip sees in earlier parts. */
static void read_stretches(const problem *p, const strips *s, const strip *t) {
    int64_t item = t->b * p->heads + t->h;
    for (int64_t r = 0; p->stretches && r < t->part; r++)
        for (int64_t side = 0; side < 2; side++) {
            const int32_t *from = part_of(p, p->stretches, side, r, item, p->length);
            int32_t *to = s->stretches + (2 * r + side) * SPAN;
            for (int64_t i = 0; i < t->rows; i++) to[i] = from[token(t->queries, t->first + i)];
        }
}

/* Which queries of a strip an earlier part has shown the key at a rank. */
INLINE uint32_t shown_before(const problem *p, const strips *s, const strip *t, int64_t rank) {
    if (!p->stretches || !t->part) return 0;
    uint32_t shown = 0;
    int64_t item = t->b * p->heads + t->h;
    int32_t entry = part_of(p, p->places, 0, t->part, item, p->ranks)[rank];
    for (int64_t r = 0; r < t->part; r++) {
        __m512i at = _mm512_set1_epi32(part_of(p, p->places, 1, r, item, p->ranks)[entry]);
        const int32_t *low = s->stretches + 2 * r * SPAN, *end = low + SPAN;
        __mmask16 left = _mm512_cmpge_epi32_mask(at, _mm512_loadu_si512(low));
        __mmask16 right = _mm512_cmpge_epi32_mask(at, _mm512_loadu_si512(low + SIDE));
        left = _mm512_mask_cmplt_epi32_mask(left, at, _mm512_loadu_si512(end));
        right = _mm512_mask_cmplt_epi32_mask(right, at, _mm512_loadu_si512(end + SIDE));
        shown |= (uint32_t)right << SIDE | left;
    }
    return shown;
}

/* Scores of a group that a strip does not see as they are. */
static __attribute__((noinline)) void hide(const problem *p, const strips *s, const strip *t, group g, float *scores) {
    const entry *e = p->entries + g.entry;
    int64_t first = (int64_t)g.at * SPAN, reach = reach_of(p, t->h), low, high;
    uint32_t real = real_keys(p, t, first);
    positions_of(p, t, first, &low, &high);
    int near = !p->spans || greater(high - t->early, t->late - low) <= p->spans[t->h];
    int inside = first >= e->begin && first + SPAN <= e->end && high - t->early <= e->high && low - t->late >= e->low;
    if (near && inside && real == ~0u && !screens(p, t->part)) return;
    for (int64_t j = 0; j < SPAN; j++, scores += SPAN) {
        int listed = (real >> j & 1) && first + j >= e->begin && first + j < e->end;
        int32_t key = (int32_t)(listed && p->own ? t->keys[first + j] : first + j);
        __m512i from = _mm512_set1_epi32(key - e->high), to = _mm512_set1_epi32(key - e->low);
        __mmask16 left = _mm512_cmpge_epi32_mask(t->left, from) & _mm512_cmple_epi32_mask(t->left, to);
        __mmask16 right = _mm512_cmpge_epi32_mask(t->right, from) & _mm512_cmple_epi32_mask(t->right, to);
        if (p->itself < 0.0f) {
            left = _mm512_mask_cmpneq_epi32_mask(left, t->left, _mm512_set1_epi32(key));
            right = _mm512_mask_cmpneq_epi32_mask(right, t->right, _mm512_set1_epi32(key));
        }
        uint32_t before = listed ? shown_before(p, s, t, first + j) : 0;
        left &= ~before, right &= ~(before >> SIDE);
        hide_lanes(p, s, reach, t->left, key, listed ? left : 0, scores);
        hide_lanes(p, s, reach, t->right, key, listed ? right : 0, scores + SIDE);
    }
}
#endif
