"""Softmax attention of bfloat16 to lists of keys that stand in their order, in C for processors with tiles (AMX)."""

from approx_kernels.key_lists.groups_c import GROUPS

STRIPS = (
    GROUPS
    + r"""
#if HAVE_TILES
/* Keys of an entry that queries from position `early` to `late` see. */
INLINE void range_of(const entry *e, int64_t early, int64_t late, int64_t *begin, int64_t *end) {
    *begin = greater(e->begin, early + e->low), *end = lesser(e->end, late + e->high + 1);
}

/* The groups that a strip sees, in which somebody is real. */
static int64_t groups_of(const problem *p, int64_t b, int64_t block, int64_t early, int64_t late, group *list) {
    int64_t count = 0, begin, end;
    for (int64_t e = p->first[block]; e < p->first[block + 1]; e++) {
        range_of(p->entries + e, early, late, &begin, &end);
        for (int64_t at = begin / SPAN; at * SPAN < end; at++)
            if (real_keys(p, b, at * SPAN)) list[count++] = (group){(int32_t)at, (int32_t)e};
    }
    return count;
}

/* Scores of what queries from position `early` on do not see become minus infinity. */
static __attribute__((noinline)) void hide(const problem *p, int64_t b, int64_t early, group g, float *scores) {
    const entry *e = p->entries + g.entry;
    int64_t first = (int64_t)g.at * SPAN;
    uint32_t real = real_keys(p, b, first);
    int whole = first >= e->begin && first + SPAN <= e->end && first - early >= e->low + SPAN - 1;
    if (whole && first + SPAN - 1 - early <= e->high && real == ~0u) return;
    for (int64_t j = 0; j < SPAN; j++, scores += SPAN) {
        int64_t key = first + j, from = greater(key - e->high - early, 0), to = lesser(key - e->low - early, SPAN - 1);
        int seen = (real >> j & 1) && key >= e->begin && key < e->end && from <= to;
        uint32_t hidden = seen ? ~(~0u << from & ~0u >> (SPAN - 1 - to)) : ~0u;
        _mm512_mask_store_ps(scores, hidden & 0xffff, _mm512_set1_ps(-INFINITY));
        _mm512_mask_store_ps(scores + SIDE, hidden >> SIDE, _mm512_set1_ps(-INFINITY));
    }
}

/* The largest score of each lane so far; of a NaN and a number, the number. */
INLINE void highest(const float *scores, __m512 *left, __m512 *right) {
    for (int64_t j = 0; j < SPAN; j++, scores += SPAN) {
        *left = _mm512_max_ps(_mm512_load_ps(scores), *left);
        *right = _mm512_max_ps(_mm512_load_ps(scores + SIDE), *right);
    }
}

/* Lanes whose sums are out of bounds, and would not stay numbers for long. */
INLINE __mmask16 astray(const lanes *l) {
    __m512 sum = _mm512_add_ps(l->low, l->high);
    return _mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1p24f), _CMP_GT_OQ) |
           _mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1p-24f), _CMP_LT_OQ);
}

/* The largest score becomes the origin of lanes astray that see anything, and all that they have summed up follows. */
INLINE void rise(const strips *s, lanes *l, __m512 sums, __m512 top, int64_t half) {
    __m512 one = _mm512_set1_ps(1.0f);
    __mmask16 rising = astray(l) & _mm512_cmp_ps_mask(top, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __m512 kept = _mm512_mask_scalef_ps(one, rising, one, _mm512_sub_ps(l->origin, top));
    l->origin = _mm512_mask_mov_ps(l->origin, rising, top);
    l->low = _mm512_mul_ps(sums, kept), l->high = _mm512_setzero_ps();
    for (float *out = s->out + half; out < s->out + s->pairs * SQUARE; out += SPAN)
        _mm512_store_ps(out, _mm512_mul_ps(kept, _mm512_load_ps(out)));
}

/* Weights of some groups again, when the first attempt left the bounds. */
static __attribute__((noinline)) void weigh_again(const problem *p, const strips *s, int64_t b, int64_t early,
                                                  const group *groups, int64_t count, char *weights, weighing *w,
                                                  __m512 left_sums, __m512 right_sums) {
    __m512 left = _mm512_set1_ps(-INFINITY), right = left;
    for (int64_t g = 0; g < count; g++) {
        meet(s, groups[g].at, s->again, NULL, 0);
        hide(p, b, early, groups[g], s->again);
        highest(s->again, &left, &right);
    }
    rise(s, &w->left, left_sums, _mm512_mul_ps(w->factor, left), 0);
    rise(s, &w->right, right_sums, _mm512_mul_ps(w->factor, right), SIDE);
    for (int64_t g = 0; g < count; g++) {
        meet(s, groups[g].at, s->again, NULL, 0);
        hide(p, b, early, groups[g], s->again);
        w->scores = s->again, w->weights = weights + g * 2 * TILE, w->done = 0;
        weigh_pairs(w, SPAN / 2);
    }
}

/* Outputs of SIDE queries of a strip, and the logarithms of their normalisers. */
static void write_lanes(const problem *p, const strips *s, int64_t b, int64_t h, int64_t first, int64_t rows,
                        const lanes *l, int64_t half) {
    __m512 sums = _mm512_add_ps(l->low, l->high);
    __mmask16 any = _mm512_cmp_ps_mask(sums, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    __m512 share = _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), sums);
    uint16_t *to = (uint16_t *)p->out.data + b * p->out.batch + h * p->out.head + first * p->out.row;
    float *lse = p->lse + (b * p->heads + h) * p->length + first, origins[SIDE], sum[SIDE];
    vf block[WIDTH];
    for (int64_t e = 0; e < p->values; e += SIDE) {
        for (int64_t i = 0; i < SIDE; i++)
            block[i] = (vf)_mm512_mul_ps(share, _mm512_load_ps(s->out + (e + i) * SPAN + half));
        transpose_block(block);
        for (int64_t i = 0; i < rows; i++)
            _mm256_mask_storeu_epi16(to + i * p->out.row + e, first_lanes(p->values - e),
                                     (__m256i)_mm512_cvtneps_pbh((__m512)block[i]));
    }
    _mm512_storeu_ps(origins, l->origin), _mm512_storeu_ps(sum, sums);
    for (int64_t i = 0; i < rows; i++) lse[i] = origins[i] * 0.69314718f + logf(sum[i]);
}

static void attend_strip(const problem *p, strips *s, int64_t b, int64_t h, int64_t block, int64_t first,
                         int64_t rows) {
    int64_t early = p->before + first, count = groups_of(p, b, block, early, early + rows - 1, s->list), had = 0;
    /* Products of a group, four to a square, share its pairs of keys. */
    int64_t squares = s->deep + s->pairs, share = (SPAN / 2 + 4 * squares - 1) / (4 * squares);
    for (int64_t g = 0; g < count; g++)
        if (!s->packed[s->list[g].at]) pack_group(p, s, b, h, s->list[g].at), s->packed[s->list[g].at] = 1;
    pack_queries(p, s, b, h, first, rows);
    memset(s->out, 0, sizeof(float) * s->pairs * SQUARE);
    weighing w = {.factor = _mm512_set1_ps(p->scale * 1.44269504f)};
    if (count) {
        __m512 lowest = _mm512_set1_ps(-INFINITY), left = lowest, right = lowest;
        meet(s, s->list[0].at, s->scores, NULL, 0);
        hide(p, b, early, s->list[0], s->scores);
        highest(s->scores, &left, &right);
        w.left.origin = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(left, lowest, _CMP_NEQ_UQ), w.factor, left);
        w.right.origin = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(right, lowest, _CMP_NEQ_UQ), w.factor, right);
    }
    for (int64_t start = 0; start < count; start += WAITING) {
        const group *groups = s->list + start, *earlier = groups - WAITING;
        int64_t some = lesser(WAITING, count - start), turn = start / WAITING % 2;
        char *weights = s->weights + turn * WAITING * 2 * TILE, *waiting = s->weights + !turn * WAITING * 2 * TILE;
        __m512 left = _mm512_add_ps(w.left.low, w.left.high), right = _mm512_add_ps(w.right.low, w.right.high);
        w.left.low = left, w.right.low = right, w.left.high = w.right.high = _mm512_setzero_ps();
        for (int64_t g = 0; g < WAITING; g++) {
            float *scores = s->scores + g % 2 * SQUARE, *next = s->scores + (g + 1) % 2 * SQUARE;
            w.scores = scores, w.weights = weights + g * 2 * TILE, w.done = g < some ? 0 : SPAN / 2;
            if (start + g && g < some) hide(p, b, early, groups[g], scores);
            if (start + g + 1 < count) meet(s, groups[g + 1].at, next, &w, share);
            for (int64_t pair = g; had && pair < s->pairs; pair += WAITING)
                bring(s, pair, earlier, had, waiting, &w, share);
            weigh_pairs(&w, SPAN / 2);
        }
        if (astray(&w.left) | astray(&w.right)) weigh_again(p, s, b, early, groups, some, weights, &w, left, right);
        had = some;
    }
    for (int64_t pair = 0; had && pair < s->pairs; pair++) {
        int64_t start = count - had, turn = start / WAITING % 2;
        bring(s, pair, s->list + start, had, s->weights + turn * WAITING * 2 * TILE, NULL, 0);
    }
    write_lanes(p, s, b, h, first, lesser(rows, SIDE), &w.left, 0);
    write_lanes(p, s, b, h, first + SIDE, rows - SIDE, &w.right, SIDE);
}

/* Memory of a thread, in one piece; NULL where there is none. */
static float *begin_strips(const problem *p, strips *s) {
    int64_t most = 0;
    for (int64_t block = 0; block < p->blocks; block++) {
        int64_t own = 0;
        for (int64_t e = p->first[block]; e < p->first[block + 1]; e++)
            own += greater(p->entries[e].end - p->entries[e].begin, 0) / SPAN + 2;
        most = greater(most, own);
    }
    *s = (strips){.groups = (p->keys + SPAN - 1) / SPAN, .deep = (p->size + DEPTH - 1) / DEPTH,
                  .pairs = (p->values + SPAN - 1) / SPAN, .item = -1};
    int64_t words = TILE / 2, keys = s->groups * s->deep * words, values = s->groups * s->pairs * words;
    int64_t squares = 3 + s->pairs, rest = padded(2 * most) + padded((s->groups + 3) / 4);
    float *memory = floats(keys + values + (s->deep + 2 * WAITING) * words + squares * SQUARE + rest);
    if (!memory) return NULL;
    float *at = memory;
    s->keys = (char *)at, at += keys;
    s->values = (char *)at, at += values;
    s->queries = (char *)at, at += s->deep * words;
    s->weights = (char *)at, at += 2 * WAITING * words;
    s->scores = at, at += 2 * SQUARE;
    s->again = at, at += SQUARE;
    s->out = at, at += s->pairs * SQUARE;
    s->list = (group *)at, at += padded(2 * most);
    s->packed = (uint8_t *)at;
    return memory;
}

/* Whether strips save time: not where lists are of keys here and there, for groups are computed whole. */
static int worth_strips(const problem *p) {
    if (!p->bf16 || p->own || p->query_order || p->key_order || p->spans || p->dropout.bound || p->itself > 0.0f) return 0;
    if (!tiles_at_hand() || p->length < SIDE) return 0;
    int64_t listed = 0, computed = 0, begin, end;
    for (int64_t block = 0; block < p->blocks; block++)
        for (int64_t first = p->starts[block]; first < p->starts[block + 1]; first += SPAN)
            for (int64_t e = p->first[block]; e < p->first[block + 1]; e++) {
                int64_t late = p->before + lesser(first + SPAN, p->starts[block + 1]) - 1;
                range_of(p->entries + e, p->before + first, late, &begin, &end);
                if (begin >= end) continue;
                listed += end - begin, computed += (end + SPAN - 1) / SPAN * SPAN - begin / SPAN * SPAN;
            }
    return computed <= 2 * listed;
}

/* Heads are cut where there are few of them for the threads. */
static int attend_strips(const problem *p) {
    int64_t items = p->batch * p->heads, cuts = lesser(greater(4 * p->threads / items, 1), p->blocks);
    int failed = 0;
#pragma omp parallel num_threads(p->threads) reduction(| : failed)
    {
        strips s;
        float *memory = begin_strips(p, &s);
        int half = begin_halves(1, SIDE);
        failed |= !memory;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < items * cuts; task++) {
            int64_t item = task / cuts, block = task % cuts * p->blocks / cuts, last = (task % cuts + 1) * p->blocks / cuts;
            if (!memory) continue;
            if (item != s.item) memset(s.packed, 0, s.groups), s.item = item;
            for (; block < last; block++)
                for (int64_t first = p->starts[block]; first < p->starts[block + 1]; first += SPAN) {
                    int64_t rows = lesser(SPAN, p->starts[block + 1] - first);
                    attend_strip(p, &s, item / p->heads, item % p->heads, block, first, rows);
                }
        }
        end_halves(half), free(memory);
    }
    return failed;
}
#else
INLINE int worth_strips(const problem *p) { return 0; }
INLINE int attend_strips(const problem *p) { return 1; }
#endif
"""
)
