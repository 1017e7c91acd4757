/* Groups of keys and strips of queries as tiles, in C: how they are packed, and the memory for them. */
#pragma once

#include "key_lists/squares.h"

#if WIDTH == 16
/* Whether numbers are multiplied as float32. */
INLINE int is_wide(const problem *p) { return !p->bf16 || !HAVE_PAIRS; }

/* Some queries of a block: their head and part, their tokens and those of the keys, and their positions, which rise. */
typedef struct {
    int64_t b, h, part, first, rows, early, late;
    const int32_t *queries, *keys;
    __m512i left, right;
} strip;

INLINE __mmask32 halves_of(int64_t n) { return (uint32_t)first_lanes(n - SIDE) << SIDE | first_lanes(n); }

/* Which keys of a group are real, those from a rank on. */
INLINE uint32_t real_keys(const problem *p, const strip *t, int64_t first) {
    uint32_t there = halves_of(p->ranks - first), real = 0;
    if (!p->mask || !there) return there;
    const uint8_t *mask = p->mask + t->b * p->keys;
    if (!t->keys)
        return _mm256_mask_test_epi8_mask(there, _mm256_maskz_loadu_epi8(there, mask + first), _mm256_set1_epi8(-1));
    for (int64_t j = 0; j < lesser(SPAN, p->ranks - first); j++) real |= (uint32_t)!!mask[t->keys[first + j]] << j;
    return real;
}

/* Positions of the keys of a group, from the lowest to the highest. */
INLINE void positions_of(const problem *p, const strip *t, int64_t first, int64_t *low, int64_t *high) {
    *low = first, *high = first + SPAN - 1;
    if (!p->own || !t->keys) return;
    __mmask16 some = first_lanes(p->ranks - first), more = first_lanes(p->ranks - first - SIDE);
    __m512i left = _mm512_maskz_loadu_epi32(some, t->keys + first);
    __m512i right = _mm512_mask_loadu_epi32(left, more, t->keys + first + SIDE);
    *low = _mm512_mask_reduce_min_epi32(some, _mm512_min_epi32(left, right));
    *high = _mm512_mask_reduce_max_epi32(some, _mm512_max_epi32(left, right));
}

/* Rows of a tensor that are packed after these. */
INLINE void expect(const problem *p, tensor x, const strip *t, const int32_t *tokens, int64_t first, int64_t end,
                   int64_t size) {
    for (int64_t i = first; i < end; i++) prefetch_row(x, p->bf16, t->b, t->h, token(tokens, i), size);
}

/* SIDE numbers of a tensor as float32. */
INLINE __m512 read_lanes(tensor x, int bf16, __mmask16 there, int64_t at) {
    if (!bf16) return _mm512_maskz_loadu_ps(there, (float *)x.data + at);
    __m512i halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, (uint16_t *)x.data + at));
    return (__m512)_mm512_slli_epi32(halves, 16);
}

/* 32 numbers of a row of a tensor from one on, as a row of two tiles of each part; zeros beyond `left` of them. */
INLINE void pack_row(const problem *p, tensor x, int64_t at, int64_t left, char *to) {
    if (is_wide(p)) {
        __m512 first = read_lanes(x, p->bf16, first_lanes(left), at);
        write_parts(first, read_lanes(x, p->bf16, first_lanes(left - SIDE), at + SIDE), to);
    } else _mm512_store_si512(to, _mm512_maskz_loadu_epi16(halves_of(left), (uint16_t *)x.data + at));
}

INLINE void transpose_tile(char *tile) {
    vf block[WIDTH];
    memcpy(block, tile, TILE);
    transpose_block(block);
    memcpy(tile, block, TILE);
}

/* SIDE numbers of the values of a group, across. */
static void pack_values(const problem *p, int64_t from, const int64_t *key, uint32_t real, int64_t left, char *to) {
    __mmask16 there = first_lanes(left);
    vf block[WIDTH], other[WIDTH];
    for (int64_t i = 0; i < SIDE; i++) {
        if (is_wide(p)) {
            __mmask16 first = real >> i & 1 ? there : 0, second = real >> (SIDE + i) & 1 ? there : 0;
            block[i] = (vf)read_lanes(p->v, p->bf16, first, from + key[i] * p->v.row);
            other[i] = (vf)read_lanes(p->v, p->bf16, second, from + key[SIDE + i] * p->v.row);
        } else {
            __m512 low = read_lanes(p->v, 1, real >> 2 * i & 1 ? there : 0, from + key[2 * i] * p->v.row);
            __m512 high = read_lanes(p->v, 1, real >> 2 * i & 2 ? there : 0, from + key[2 * i + 1] * p->v.row);
            block[i] = (vf)_mm512_or_si512(_mm512_srli_epi32((__m512i)low, 16), (__m512i)high);
        }
    }
    transpose_block(block);
    if (!is_wide(p)) {
        memcpy(to, block, TILE);
        return;
    }
    transpose_block(other);
    for (int64_t i = 0; i < SIDE; i++) write_parts((__m512)block[i], (__m512)other[i], to + i * 64);
}

/* Keys and values of a group as tiles of the left side of products: as they lie, and across. Padding may hold NaN,
   which times a weight of 0 is not 0. */
static void pack_group(const problem *p, const strips *s, const strip *t, int64_t at) {
    int64_t first = at * SPAN, end = lesser(first + SPAN, p->ranks), next = lesser(end + SPAN, p->ranks), key[SPAN];
    int64_t step = s->parts * 2 * TILE, keys = head_of(p->k, t->b, t->h);
    int64_t values = head_of(p->v, t->b, t->h);
    uint32_t real = real_keys(p, t, first);
    for (int64_t j = 0; j < SPAN; j++) key[j] = first + j < end ? token(t->keys, first + j) : 0;
    expect(p, p->k, t, t->keys, end, next, p->size), expect(p, p->v, t, t->keys, end, next, p->values);
    for (int64_t j = 0; j < SPAN; j++)
        for (int64_t d = 0; d < s->deep; d++) {
            int64_t left = first + j < end ? p->size - d * DEPTH : 0;
            pack_row(p, p->k, keys + key[j] * p->k.row + d * DEPTH, left, s->keys + (at * s->deep + d) * step + j * 64);
        }
    for (int64_t e = 0; e < 2 * s->pairs; e++)
        pack_values(p, values + e * SIDE, key, real, p->values - e * SIDE,
                    s->values + (at * s->pairs + e / 2) * step + e % 2 * TILE);
}

/* Queries of a strip as tiles of the right side: pairs of numbers by queries. */
static void pack_queries(const problem *p, const strips *s, const strip *t) {
    int64_t queries = head_of(p->q, t->b, t->h), end = t->first + t->rows, step = s->parts * 2 * TILE;
    expect(p, p->q, t, t->queries, end, lesser(end + SPAN, p->length), p->size);
    for (int64_t d = 0; d < s->deep; d++) {
        char *to = s->queries + d * step;
        for (int64_t i = 0; i < SPAN; i++) {
            int64_t query = i < t->rows ? token(t->queries, t->first + i) : 0;
            int64_t left = i < t->rows ? p->size - d * DEPTH : 0;
            pack_row(p, p->q, queries + query * p->q.row + d * DEPTH, left, to + i * 64);
        }
        for (int64_t tile = 0; tile < 2 * s->parts; tile++) transpose_tile(to + tile * TILE);
    }
}

/* Outputs that a strip begins with, from the rows of a tensor that `which` names. */
static void lay_outputs(const problem *p, const strips *s, const strip *t, tensor x, int bf16, const int64_t *rows,
                        uint32_t which) {
    vf block[WIDTH];
    for (int64_t e = 0; e < p->values; e += SIDE)
        for (int64_t half = 0; half < SPAN; half += SIDE) {
            __mmask16 there = first_lanes(p->values - e);
            for (int64_t i = half; i < half + SIDE; i++) {
                int64_t at = head_of(x, t->b, t->h) + rows[i] * x.row + e;
                __mmask16 own = which >> i & 1 ? there : 0;
                block[i - half] = (vf)read_lanes(x, bf16, own, at);
            }
            transpose_block(block);
            for (int64_t i = 0; i < SIDE; i++) *(vf *)(s->out + (e + i) * SPAN + half) = block[i];
        }
}

/* Memory of a thread, in one piece; NULL where there is none. */
static float *begin_strips(const problem *p, strips *s) {
    int64_t most = 0, own = 0;
    for (int64_t block = 0; block < (p->own ? p->own[p->batch * p->heads] : p->blocks); block++, own = 0) {
        for (int64_t e = p->first[block]; e < p->first[block + 1]; e++)
            own += greater(p->entries[e].end - p->entries[e].begin, 0) / SPAN + 2;
        most = greater(most, own);
    }
    *s = (strips){.groups = (p->ranks + SPAN - 1) / SPAN,
                  .deep = (p->size + DEPTH - 1) / DEPTH,
                  .pairs = (p->values + SPAN - 1) / SPAN,
                  .parts = is_wide(p) ? PARTS : 1,
                  .item = -1};
    int64_t words = s->parts * TILE / 2, keys = s->groups * s->deep * words, values = s->groups * s->pairs * words;
    int64_t again = greater(SQUARE, 2 * padded(p->size)), faded = p->spans ? padded(p->keys + p->length + 1) : 0;
    int64_t rest = s->pairs * SQUARE + faded + padded(2 * most) + padded((s->groups + 3) / 4) + 4 * SIDE * p->parts;
    float *memory = floats(keys + values + (s->deep + 2 * WAITING) * words + 2 * SQUARE + again + rest), *at = memory;
    if (!memory) return NULL;
    s->keys = (char *)at, at += keys;
    s->values = (char *)at, at += values;
    s->queries = (char *)at, at += s->deep * words;
    s->weights = (char *)at, at += 2 * WAITING * words;
    s->scores = at, at += 2 * SQUARE;
    s->again = at, at += again;
    s->out = at, at += s->pairs * SQUARE;
    s->faded = at, at += faded;
    s->list = (group *)at, at += padded(2 * most);
    s->packed = (uint8_t *)at, at += padded((s->groups + 3) / 4);
    s->stretches = (int32_t *)at;
    return memory;
}
#endif
