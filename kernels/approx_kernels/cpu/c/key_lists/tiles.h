/* Blocks of queries and the keys that they see, in C: common to both passes of attention to lists of keys. */
#pragma once

#include "parts.h"
#include "rows.h"
#include "dropout.h"

/* The result of a call whose blocks or lists are wrong; 1 is the result without memory. */
enum { OUT_OF_BOUNDS = 2 };

/* Strips of rows are whole tiles of a product, and skip the columns that none of them sees. */
enum { STRIP = 24, HALF_STRIP = 32, ROWS = 8 * STRIP, KEYS = 128 };

/* Keys from begin to end; the query at position i sees key j of them where low <= j - i <= high. Queries and keys are
   counted by their ranks where they have an order, and distances too, unless each head has lists of its own. */
typedef struct {
    int32_t begin, end, low, high;
} entry;

typedef struct {
    int64_t batch, heads, length, keys, ranks, size, values, before, blocks, parts, own_orders, bf16, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    const int64_t *own; /* [B H + 1]: first block of each head; NULL where all have the same */
    const int64_t
        *starts; /* first query of each block, and the end of the last; ROWS queries at most; P times L of a head */
    const int64_t *first; /* first entry of each block, and the end of the last */
    const entry *entries;
    const int32_t *query_order, *key_order; /* tokens by rank, [P, B H or 1, n]; NULL where each has its own */
    const int32_t
        *stretches; /* [2, P, B H, L]: the ranks that queries see in each part, the first and the end; NULL where a
                                 key counts in each part that shows it, and not in the first of them alone */
    const int32_t
        *places; /* [2, P, B H, ranks]: entries by rank, which are the same in all parts, and ranks of entries */
    float *lse; /* [B, H, L] */
    float *totals; /* [B, H, L], normalisers relative to the largest weight; NULL if unused */
    const float *spans; /* [H]: weights fall to 0 from that distance on; NULL where they do not */
    float scale, ramp,
        itself; /* how often a query sees the key at its own position besides its lists; below 0 not even there */
    dropout dropout;
} problem;
SIZE_OF(key_lists, problem)

/* Some queries with one list of keys: where they stand in the order of their part, and their positions, which rise. */
typedef struct {
    int64_t block, part, first, rows;
    const int32_t *order;
    int32_t at[ROWS];
} queries_of_block;

/* Some keys that a block of queries sees; the query at position i sees key j where from[j] <= i <= to[j]. */
typedef struct {
    int64_t item, entry, next, count;
    int partial, soft, screened;
    float span, ramp;
    int32_t reach, *ranks; /* [P, KEYS], in earlier parts */
    const int32_t *order;
    int32_t key[KEYS], place[KEYS], from[KEYS], to[KEYS], shown[KEYS];
} keys_of_block;

/* Ranks of one part of the softmax as tokens. */
INLINE const int32_t *order_of(const problem *p, const int32_t *order, int64_t b, int64_t h, int64_t part, int64_t n) {
    if (!order) return NULL;
    return order + (p->own_orders ? (part * p->batch + b) * p->heads + h : part) * n;
}

/* An array with an entry for each query, or each rank, of a head in a part: the first such array, or the second. */
INLINE const int32_t *part_of(const problem *p, const int32_t *of, int64_t second, int64_t part, int64_t item,
                              int64_t n) {
    return of + ((second * p->parts + part) * p->batch * p->heads + item) * n;
}

/* Whether keys of a list may be hidden from some queries of a part, wherever they stand. */
INLINE int screens(const problem *p, int64_t part) { return p->itself < 0.0f || (p->stretches && part); }

/* The blocks of a head, from the first to before the second. */
INLINE void blocks_of(const problem *p, int64_t item, int64_t *begin, int64_t *end) {
    *begin = p->own ? p->own[item] : 0, *end = p->own ? p->own[item + 1] : p->blocks;
}

/* Whether blocks cut the queries of each part into pieces of ROWS at most, lists name keys that there are, and sums of
   positions and distances stay below 2^31. */
static int in_bounds(const problem *p) {
    int64_t heads = p->own ? p->batch * p->heads : 1, blocks = p->own ? p->own[heads] : p->blocks;
    const int64_t far = 1 << 30, most = greater(p->ranks, p->keys);
    if (blocks < 1 || blocks > p->blocks || p->starts[0] || p->starts[blocks] != heads * p->parts * p->length) return 0;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t start = p->starts[block], rows = p->starts[block + 1] - start;
        if (rows < 1 || rows > ROWS || start % p->length + rows > p->length || p->first[block + 1] < p->first[block])
            return 0;
    }
    if (p->first[0] || p->before + p->length >= far || most >= far || p->before <= -far) return 0;
    for (const entry *e = p->entries; e < p->entries + p->first[blocks]; e++)
        if (e->begin < 0 || e->end > p->ranks || most - e->low > INT32_MAX || most - e->high > INT32_MAX) return 0;
    return 1;
}

static void queries_from(const problem *p, int64_t b, int64_t h, queries_of_block *w) {
    const int64_t *starts = p->starts + w->block;
    int64_t start = starts[0] - (p->own ? (b * p->heads + h) * p->parts * p->length : 0);
    w->part = start / p->length, w->first = start % p->length, w->rows = starts[1] - starts[0];
    w->order = order_of(p, p->query_order, b, h, w->part, p->length);
    for (int64_t i = 0; i < w->rows; i++)
        w->at[i] = (int32_t)(p->before + (p->own ? token(w->order, w->first + i) : w->first + i));
}

/* A distance rounded up, from 0 to all; NaN and infinity span all. */
INLINE int64_t whole_span(float span, int64_t all) {
    return span <= 0.0f ? 0 : span < (float)all ? lesser((int64_t)ceilf(span), all) : all;
}

static keys_of_block keys_from(const problem *p, int64_t b, int64_t h, const queries_of_block *w, int32_t *ranks) {
    keys_of_block t = {.entry = p->first[w->block], .order = order_of(p, p->key_order, b, h, w->part, p->ranks)};
    t.item = b * p->heads + h, t.screened = screens(p, w->part), t.ranks = ranks;
    t.reach = INT32_MAX;
    if (!p->spans) return t;
    t.soft = 1, t.span = p->spans[h], t.ramp = p->ramp;
    int64_t all = p->keys + p->length, reach = whole_span(t.span + t.ramp, all);
    if (reach < all) t.reach = (int32_t)reach - 1;
    return t;
}

/* Where a key of some part ranks in the earlier ones. */
INLINE void rank_earlier(const problem *p, int64_t part, int64_t rank, keys_of_block *t) {
    if (!p->stretches || !part) return;
    int32_t entry = part_of(p, p->places, 0, part, t->item, p->ranks)[rank];
    for (int64_t r = 0; r < part; r++)
        t->ranks[r * KEYS + t->count] = part_of(p, p->places, 1, r, t->item, p->ranks)[entry];
}

/* The next keys of a block; 0 when there are no more. */
static int64_t next_keys(const problem *p, int64_t b, const queries_of_block *w, keys_of_block *t) {
    int64_t early = w->at[0], late = w->at[w->rows - 1];
    t->count = 0, t->partial = t->screened;
    for (; t->entry < p->first[w->block + 1]; t->entry++, t->next = 0) {
        const entry *e = p->entries + t->entry;
        int64_t low = greater(e->low, -(int64_t)t->reach), high = lesser(e->high, t->reach);
        int64_t begin = greater(e->begin, t->next), end = e->end;
        if (!p->own) begin = greater(begin, early + low), end = lesser(end, late + high + 1);
        for (int64_t rank = begin; rank < end; rank++) {
            int64_t key = token(t->order, rank), j = p->own ? key : rank;
            if (p->mask && !p->mask[b * p->keys + key]) continue;
            if (t->count == KEYS) {
                t->next = rank;
                return KEYS;
            }
            t->partial |= j - high > early || j - low < late;
            rank_earlier(p, w->part, rank, t);
            t->key[t->count] = (int32_t)key, t->place[t->count] = (int32_t)j;
            t->from[t->count] = (int32_t)(j - high), t->to[t->count++] = (int32_t)(j - low);
        }
    }
    /* No query sees the padding of the last vector. */
    for (int64_t c = t->count; c % WIDTH; c++)
        t->partial = 1, t->from[c] = INT32_MAX, t->to[c] = INT32_MIN, t->place[c] = 0;
    return t->count;
}

/* A query counts the key at its own position in the first part alone. */
INLINE int sees_itself(const problem *p, const queries_of_block *w, int64_t i) {
    return p->itself > 0.0f && !w->part && w->at[i] >= 0;
}

/* Its score, raised as if it were seen that often; the key is stored in a row of whole vectors. */
INLINE float own_score(const problem *p, int64_t b, int64_t h, int64_t at, const float *query, float *key) {
    read_rows(p->k, p->bf16, b, h, NULL, at, 1, p->size, key);
    return logf(p->itself) + dot(p->size, query, key);
}

/* Each part of the softmax has its own dropout. */
INLINE draw draw_at(const problem *p, int64_t b, int64_t h, const queries_of_block *w, int64_t i) {
    return draw_of(&p->dropout, (w->part * p->batch + b) * p->heads + h, token(w->order, w->first + i));
}

/* Columns of a tile that any query from position `early` to `late` sees, as whole vectors. */
INLINE void columns(const keys_of_block *t, int64_t early, int64_t late, int64_t *begin, int64_t *end) {
    *begin = 0, *end = padded(t->count);
    if (!t->partial) return;
    while (*begin < t->count && (t->from[*begin] > late || t->to[*begin] < early)) ++*begin;
    int64_t last = t->count;
    while (last > *begin && (t->from[last - 1] > late || t->to[last - 1] < early)) last--;
    *begin = *begin / WIDTH * WIDTH, *end = padded(last);
}

/* Find the keys that no part hides from a query: its own, and keys that an earlier part has shown. */
INLINE void screen(const problem *p, const queries_of_block *w, int64_t i, int64_t begin, int64_t end,
                   keys_of_block *t) {
    if (!t->screened) return;
    int32_t query = token(w->order, w->first + i);
    for (int64_t c = begin; c < end; c += WIDTH) {
        vi shown = (vi){0} == 0;
        if (p->itself < 0.0f) shown = *(vi *)(t->place + c) != w->at[i];
        for (int64_t r = 0; p->stretches && r < w->part; r++) {
            vi rank = *(vi *)(t->ranks + r * KEYS + c);
            shown &= (rank < part_of(p, p->stretches, 0, r, t->item, p->length)[query]) |
                     (rank >= part_of(p, p->stretches, 1, r, t->item, p->length)[query]);
        }
        *(vi *)(t->shown + c) = shown;
    }
}

INLINE vi seen(const keys_of_block *t, int64_t c, int32_t position) {
    vi near = (*(const vi *)(t->from + c) <= position) & (*(const vi *)(t->to + c) >= position);
    if (t->screened) near &= *(const vi *)(t->shown + c);
    return near;
}

/* The factor of weights by distance, before it is clipped to 1. */
INLINE vf left_over(const keys_of_block *t, int64_t c, int32_t position) {
    vi away = *(const vi *)(t->place + c) - position;
    vf distance = __builtin_convertvector(away, vf);
    return (t->span + t->ramp - larger(distance, -distance)) / t->ramp;
}
