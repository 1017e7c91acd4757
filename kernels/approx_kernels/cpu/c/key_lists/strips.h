/* Softmax attention to lists of keys that stand in some order, in C for processors with AVX-512. */
#pragma once

#include "key_lists/seen.h"

#if WIDTH == 16
/* The largest score of each lane so far; of a NaN and a number, the number. */
INLINE void highest(const float *scores, __m512 *left, __m512 *right) {
    for (int64_t j = 0; j < SPAN; j++, scores += SPAN) {
        *left = _mm512_max_ps(_mm512_load_ps(scores), *left);
        *right = _mm512_max_ps(_mm512_load_ps(scores + SIDE), *right);
    }
}

/* Lanes whose sums are out of bounds and would soon overflow. */
INLINE __mmask16 astray(const lanes *l) {
    __m512 sum = total(l);
    return _mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1p24f), _CMP_GT_OQ) |
           _mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1p-24f), _CMP_LT_OQ);
}

/* In lanes out of bounds that see anything, the largest score becomes the origin, and their sums are rescaled. */
INLINE void rise(const strips *s, lanes *l, __m512 top, int64_t half) {
    __m512 one = _mm512_set1_ps(1.0f);
    __mmask16 rising = astray(l) & _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    /* Sums that are still 0 stay 0, however far the origin moves. */
    __mmask16 some = rising & _mm512_cmp_ps_mask(l->sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    __m512 kept = _mm512_mask_mov_ps(one, some, whole_power(_mm512_sub_ps(l->origin, top)));
    l->origin = _mm512_mask_mov_ps(l->origin, rising, top);
    l->sum = _mm512_mul_ps(l->sum, kept), l->low = l->high = _mm512_setzero_ps();
    for (float *out = s->out + half; out < s->out + s->pairs * SQUARE; out += SPAN)
        _mm512_store_ps(out, _mm512_mul_ps(kept, _mm512_load_ps(out)));
}

/* Compute the weights of some groups again, after the first attempt left the bounds. */
static __attribute__((noinline)) void weigh_again(int wide, const problem *p, const strips *s, const strip *t,
                                                  const group *groups, int64_t count, char *weights, weighing *w) {
    __m512 left = _mm512_set1_ps(-INFINITY), right = left;
    for (int64_t g = 0; g < count; g++) {
        meet(wide, s, groups[g].at, s->again, NULL, 0);
        hide(p, s, t, groups[g], s->again);
        highest(s->again, &left, &right);
    }
    rise(s, &w->left, _mm512_mul_ps(w->factor, left), 0);
    rise(s, &w->right, _mm512_mul_ps(w->factor, right), SIDE);
    for (int64_t g = 0; g < count; g++) {
        meet(wide, s, groups[g].at, s->again, NULL, 0);
        hide(p, s, t, groups[g], s->again);
        w->scores = s->again, w->weights = weights + g * s->parts * 2 * TILE, w->done = 0;
        weigh_pairs(wide, w, SIDE);
    }
}

/* The state of queries before their lists: earlier parts, as one weight of 1, or the key at their own position. */
static void begin_lanes(const problem *p, const strips *s, const strip *t, const queries_of_block *w, lanes *left,
                        lanes *right) {
    float origin[SPAN] = {0}, sum[SPAN] = {0};
    int64_t row[SPAN] = {0};
    uint32_t which = 0;
    if (t->part || p->itself > 0.0f)
        for (int64_t i = 0; i < t->rows; i++) {
            int64_t query = token(t->queries, t->first + i), at = w->at[t->first - w->first + i];
            float score = -INFINITY;
            if (t->part) row[i] = query, score = p->lse[(t->b * p->heads + t->h) * p->length + query];
            else if (sees_itself(p, w, t->first - w->first + i)) {
                /* The strip's other memory is not in use yet. */
                read_scaled(p->q, p->bf16, t->b, t->h, NULL, query, 1, p->size, p->scale, s->again);
                row[i] = at, score = own_score(p, t->b, t->h, at, s->again, s->again + padded(p->size));
            }
            if (score == -INFINITY) continue;
            origin[i] = score * 1.44269504f, sum[i] = 1.0f, which |= 1u << i;
        }
    if (which) lay_outputs(p, s, t, t->part ? p->out : p->v, !t->part && p->bf16, row, which);
    else memset(s->out, 0, sizeof(float) * s->pairs * SQUARE);
    __m512 none = _mm512_setzero_ps();
    *left = (lanes){_mm512_loadu_ps(origin), _mm512_loadu_ps(sum), none, none};
    *right = (lanes){_mm512_loadu_ps(origin + SIDE), _mm512_loadu_ps(sum + SIDE), none, none};
}

/* Lanes without a state begin with the largest of their first scores. */
INLINE void begin_origin(lanes *l, __m512 top, __m512 factor) {
    __mmask16 fresh = _mm512_cmp_ps_mask(l->sum, _mm512_setzero_ps(), _CMP_EQ_OQ);
    fresh &= _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    l->origin = _mm512_mask_mul_ps(l->origin, fresh, factor, top);
}

/* Outputs of SIDE queries of a strip, and their normalisers: the logarithms, and relative to the largest weight. */
static void write_lanes(const problem *p, const strips *s, const strip *t, const lanes *l, __m512 top, int64_t half) {
    __m512 sums = total(l);
    __mmask16 any = _mm512_cmp_ps_mask(sums, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    __m512 share = _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), sums);
    int64_t head = head_of(p->out, t->b, t->h), rows = lesser(t->rows - half, SIDE);
    __m512 relative = _mm512_maskz_mul_ps(any, sums, whole_power(_mm512_sub_ps(l->origin, top)));
    float *lse = p->lse + (t->b * p->heads + t->h) * p->length, origins[SIDE], sum[SIDE], totals[SIDE];
    vf block[WIDTH];
    _mm512_storeu_ps(origins, l->origin), _mm512_storeu_ps(sum, sums), _mm512_storeu_ps(totals, relative);
    for (int64_t e = 0; e < p->values; e += SIDE) {
        for (int64_t i = 0; i < SIDE; i++)
            block[i] = (vf)_mm512_mul_ps(share, _mm512_load_ps(s->out + (e + i) * SPAN + half));
        transpose_block(block);
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = head + token(t->queries, t->first + half + i) * p->out.row + e;
            __mmask16 there = first_lanes(p->values - e);
            /* Buffers that parts add to are float32. */
            if (p->parts > 1 || !p->bf16) _mm512_mask_storeu_ps((float *)p->out.data + at, there, (__m512)block[i]);
            else _mm256_mask_storeu_epi16((uint16_t *)p->out.data + at, there, (__m256i)halves(block[i]));
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t query = token(t->queries, t->first + half + i);
        lse[query] = origins[i] * 0.69314718f + logf(sum[i]);
        if (p->totals) p->totals[(t->b * p->heads + t->h) * p->length + query] = totals[i];
    }
}

INLINE void attend_strip(const int wide, const problem *p, strips *s, const strip *t, const queries_of_block *q) {
    int64_t count = groups_of(p, t, q->block, s->list), had = 0;
    /* Products of a group share its pairs of keys. */
    const int64_t each = wide ? 24 : 4, step = s->parts * 2 * TILE;
    int64_t products = each * (s->deep + s->pairs), share = (SIDE + products - 1) / products;
    weighing w = {.factor = _mm512_set1_ps(p->scale * 1.44269504f)};
    begin_lanes(p, s, t, q, &w.left, &w.right);
    for (int64_t g = 0; g < count; g++)
        if (!s->packed[s->list[g].at]) pack_group(p, s, t, s->list[g].at), s->packed[s->list[g].at] = 1;
    pack_queries(p, s, t), read_stretches(p, s, t);
    __m512 left = _mm512_set1_ps(-INFINITY), right = left;
    if (count) {
        meet(wide, s, s->list[0].at, s->scores, NULL, 0);
        hide(p, s, t, s->list[0], s->scores);
        highest(s->scores, &left, &right);
        begin_origin(&w.left, left, w.factor), begin_origin(&w.right, right, w.factor);
    }
    for (int64_t start = 0; start < count; start += WAITING) {
        const group *groups = s->list + start, *earlier = groups - WAITING;
        int64_t some = lesser(WAITING, count - start), turn = start / WAITING % 2;
        char *weights = s->weights + turn * WAITING * step, *waiting = s->weights + !turn * WAITING * step;
        gather_sums(&w.left), gather_sums(&w.right);
        for (int64_t g = 0; g < WAITING; g++) {
            float *scores = s->scores + g % 2 * SQUARE, *next = s->scores + (g + 1) % 2 * SQUARE;
            w.scores = scores, w.weights = weights + g * step, w.done = g < some ? 0 : SIDE;
            if (start + g && g < some) hide(p, s, t, groups[g], scores);
            if (p->totals && g < some) highest(scores, &left, &right);
            if (start + g + 1 < count) meet(wide, s, groups[g + 1].at, next, &w, share);
            for (int64_t pair = g; had && pair < s->pairs; pair += WAITING)
                bring(wide, s, pair, earlier, had, waiting, &w, share);
            weigh_pairs(wide, &w, SIDE);
        }
        if (astray(&w.left) | astray(&w.right)) weigh_again(wide, p, s, t, groups, some, weights, &w);
        had = some;
    }
    for (int64_t pair = 0; had && pair < s->pairs; pair++) {
        int64_t start = count - had, turn = start / WAITING % 2;
        bring(wide, s, pair, s->list + start, had, s->weights + turn * WAITING * step, NULL, 0);
    }
    write_lanes(p, s, t, &w.left, _mm512_mul_ps(w.factor, left), 0);
    write_lanes(p, s, t, &w.right, _mm512_mul_ps(w.factor, right), SIDE);
}

/* Strips of a block. */
static void attend_block(const problem *p, strips *s, int64_t item, int64_t block) {
    queries_of_block q = {.block = block};
    strip t = {.b = item / p->heads, .h = item % p->heads};
    queries_from(p, t.b, t.h, &q);
    t.part = q.part, t.queries = q.order, t.keys = order_of(p, p->key_order, t.b, t.h, q.part, p->ranks);
    if (item != s->item || t.part != s->part) memset(s->packed, 0, s->groups);
    if (item != s->item && p->spans) fade(p, t.h, s->faded);
    s->item = item, s->part = t.part;
    for (int64_t first = 0; first < q.rows; first += SPAN) {
        t.first = q.first + first, t.rows = lesser(SPAN, q.rows - first);
        t.early = q.at[first], t.late = q.at[first + t.rows - 1];
        t.left = _mm512_maskz_loadu_epi32(first_lanes(t.rows), q.at + first);
        t.right = _mm512_maskz_loadu_epi32(first_lanes(t.rows - SIDE), q.at + first + SIDE);
        if (is_wide(p)) attend_strip(1, p, s, &t, &q);
        else attend_strip(0, p, s, &t, &q);
    }
}

/* Whether strips save time: not for lists of a few scattered keys, since strips and groups are computed whole. */
static int worth_strips(const problem *p) {
    if (p->dropout.bound || (HAVE_TILES && !tiles_at_hand()) || p->length < SIDE) return 0;
    if ((p->spans || p->totals) && p->scale <= 0.0f) return 0;
    int64_t listed = 0, computed = 0, begin, end;
    for (int64_t block = 0; block < (p->own ? p->own[p->batch * p->heads] : p->blocks); block++)
        for (int64_t first = p->starts[block]; first < p->starts[block + 1]; first += SPAN)
            for (int64_t e = p->first[block]; e < p->first[block + 1]; e++) {
                int64_t early = p->before + first % p->length, rows = lesser(SPAN, p->starts[block + 1] - first);
                range_of(p, p->entries + e, early, early + rows - 1, &begin, &end);
                if (begin >= end) continue;
                listed += rows * (end - begin);
                computed += SPAN * ((end + SPAN - 1) / SPAN * SPAN - begin / SPAN * SPAN);
            }
    /* The gain by strips, measured for dense lists. */
    return computed <= (HAVE_TILES ? 3.0 : is_wide(p) ? 1.25 : 2.0) * listed;
}

/* Heads are cut where there are few of them for the threads, and nothing follows from earlier parts. */
static int attend_strips(const problem *p) {
    int64_t items = p->batch * p->heads, cuts = p->parts > 1 ? 1 : greater(4 * p->threads / items, 1);
    int failed = 0;
#pragma omp parallel num_threads(p->threads) reduction(| : failed)
    {
        strips s;
        float *memory = begin_strips(p, &s);
        int half = begin_halves(1, SIDE);
        failed |= !memory;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < items * cuts; task++) {
            int64_t item = task / cuts, begin, end;
            blocks_of(p, item, &begin, &end);
            int64_t block = begin + task % cuts * (end - begin) / cuts;
            end = begin + (task % cuts + 1) * (end - begin) / cuts;
            for (; memory && block < end; block++) attend_block(p, &s, item, block);
        }
        end_halves(half), free(memory);
    }
    return failed;
}
#else
BEGIN_STAND_INS
INLINE int worth_strips(const problem *p) { return 0; }
INLINE int attend_strips(const problem *p) { return 1; }
END_STAND_INS
#endif
