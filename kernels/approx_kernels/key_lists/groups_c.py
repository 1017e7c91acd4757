"""Groups of keys and strips of queries as tiles (AMX), in C: how they are packed, multiplied, and weighed meanwhile.

Scores are computed across, a key to a row and a query to a lane, so that nothing is summed or compared between lanes, and
weights leave as the right side of the product with the values. Tiles and vectors work at the same time: a group of keys
is weighed between the products of the next one and those of earlier ones with their values.
"""

GROUPS = r"""
#if HAVE_TILES
/* Groups that wait for their values together; numbers of a square of scores: a strip of queries and a group of keys have
   SPAN each. */
enum { WAITING = 2, SQUARE = SPAN * SPAN };

/* Keys of ranks from SPAN * at on, which are seen as an entry says. */
typedef struct { int32_t at, entry; } group;

/* What a thread works with: keys and values of a head as tiles, packed where somebody saw them; and of a strip the rest. */
typedef struct {
    int64_t groups, deep, pairs, parts, item, part;
    char *keys, *values, *queries, *weights;
    float *scores, *again, *out, *faded;
    uint8_t *packed;
    group *list;
} strips;

/* SIDE queries of a strip: their weights are powers of 2, relative to that of the origin. */
typedef struct { __m512 origin, low, high; } lanes;

/* The group that is being weighed: how many of its pairs of keys are done, and what that has come to. */
typedef struct { const float *scores; char *weights; int64_t done; __m512 factor; lanes left, right; } weighing;

/* 2^x of what is rounded to bfloat16 next, within 1e-4; 0 at minus infinity. */
INLINE __m512 power(__m512 x) {
    __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 y = _mm512_fmadd_ps(part, _mm512_set1_ps(0.0790209f), _mm512_set1_ps(0.224121f));
    y = _mm512_fmadd_ps(part, y, _mm512_set1_ps(0.696834f));
    y = _mm512_fmadd_ps(part, y, _mm512_set1_ps(0.999925f));
    return _mm512_scalef_ps(y, x);
}

/* 2^x, within two roundings; 0 at minus infinity. */
INLINE __m512 whole_power(__m512 x) {
    __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT), r = _mm512_mul_ps(part, _mm512_set1_ps(0.693147181f));
    __m512 y = _mm512_fmadd_ps(r, _mm512_set1_ps(1.9875691500e-4f), _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(y, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, _mm512_sub_ps(x, part));
}

INLINE void weigh_lanes(const int wide, const float *scores, __m512 factor, lanes *l, char *weights) {
    __m512 low = _mm512_fmsub_ps(_mm512_load_ps(scores), factor, l->origin);
    __m512 high = _mm512_fmsub_ps(_mm512_load_ps(scores + SPAN), factor, l->origin);
    low = wide ? whole_power(low) : power(low), high = wide ? whole_power(high) : power(high);
    l->low = _mm512_add_ps(l->low, low), l->high = _mm512_add_ps(l->high, high);
    if (!wide) { _mm512_store_si512(weights, paired(low, high)); return; }
    __m512i lows[PARTS], uppers[PARTS];
    part(low, lows), part(high, uppers);
    for (int p = 0; p < PARTS; p++)
        _mm512_store_si512(weights + p * 2 * TILE, _mm512_or_si512(_mm512_srli_epi32(lows[p], 16), uppers[p]));
}

/* The next pairs of keys. */
INLINE void weigh_pairs(const int wide, weighing *w, int64_t count) {
    if (!w) return;
    for (int64_t upto = lesser(w->done + count, SIDE); w->done < upto; w->done++) {
        const float *scores = w->scores + w->done * 2 * SPAN;
        char *weights = w->weights + w->done * 64;
        weigh_lanes(wide, scores, w->factor, &w->left, weights);
        weigh_lanes(wide, scores + SIDE, w->factor, &w->right, weights + TILE);
    }
}

/* Between products of a square, `share` pairs of keys are weighed four times. */
INLINE void multiply_square(const int wide, weighing *w, int64_t share) {
    ADD_PRODUCT(0, 4, 6);
    weigh_pairs(wide, w, share);
    ADD_PRODUCT(1, 4, 7);
    weigh_pairs(wide, w, share);
    ADD_PRODUCT(2, 5, 6);
    weigh_pairs(wide, w, share);
    ADD_PRODUCT(3, 5, 7);
    weigh_pairs(wide, w, share);
}

/* Tiles 0 to 3 += two by two tiles, of three parts where numbers are float32. */
INLINE void add_square(const int wide, const char *left, const char *right, weighing *w, int64_t share) {
    if (wide) { ADD_PARTS(multiply_square(wide, w, share)); return; }
    READ_TILE(4, left, SIDE);
    READ_TILE(6, right, SIDE);
    ADD_PRODUCT(0, 4, 6);
    weigh_pairs(wide, w, share);
    READ_TILE(7, right + TILE, SIDE);
    ADD_PRODUCT(1, 4, 7);
    weigh_pairs(wide, w, share);
    READ_TILE(5, left + TILE, SIDE);
    ADD_PRODUCT(2, 5, 6);
    weigh_pairs(wide, w, share);
    ADD_PRODUCT(3, 5, 7);
    weigh_pairs(wide, w, share);
}

/* Scores of the queries at a group, keys by queries. */
INLINE void meet(const int wide, const strips *s, int64_t at, float *scores, weighing *w, int64_t share) {
    const int64_t step = (wide ? PARTS : 1) * 2 * TILE;
    zero_square();
    for (int64_t d = 0; d < s->deep; d++)
        add_square(wide, s->keys + (at * s->deep + d) * step, s->queries + d * step, w, share);
    write_square(scores);
}

/* What the values of some groups add to 32 numbers of the outputs, which are numbers by queries. */
INLINE void bring(const int wide, const strips *s, int64_t pair, const group *groups, int64_t count,
                  const char *weights, weighing *w, int64_t share) {
    const int64_t step = (wide ? PARTS : 1) * 2 * TILE;
    float *out = s->out + pair * SQUARE;
    if (wide) zero_square();
    else read_square(out);
    for (int64_t g = 0; g < count; g++)
        add_square(wide, s->values + (groups[g].at * s->pairs + pair) * step, weights + g * step, w, share);
    if (!wide) { write_square(out); return; }
    /* In one chain a sum of float32 would gather a rounding at every second key. */
    write_square(s->again);
    for (int64_t i = 0; i < SQUARE; i += WIDTH)
        _mm512_store_ps(out + i, _mm512_add_ps(_mm512_load_ps(out + i), _mm512_load_ps(s->again + i)));
}

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

/* Rows of a tensor that are packed after these. */
INLINE void expect(const problem *p, tensor x, const strip *t, const int32_t *tokens, int64_t first, int64_t end,
                   int64_t size) {
    int64_t bytes = p->bf16 ? 2 : 4;
    const char *from = (char *)x.data + bytes * (t->b * x.batch + t->h * x.head);
    for (int64_t i = first; i < end; i++)
        for (int64_t d = 0; d < bytes * size; d += 64) __builtin_prefetch(from + bytes * token(tokens, i) * x.row + d);
}

/* 32 numbers of a row of a tensor from one on, as a row of two tiles of each part; zeros beyond `left` of them. */
INLINE void pack_row(const problem *p, tensor x, int64_t at, int64_t left, char *to) {
    if (p->bf16) {
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(halves_of(left), (uint16_t *)x.data + at));
        return;
    }
    __m512 first = _mm512_maskz_loadu_ps(first_lanes(left), (float *)x.data + at);
    write_parts(first, _mm512_maskz_loadu_ps(first_lanes(left - SIDE), (float *)x.data + at + SIDE), to);
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
        int64_t even = from + key[2 * i] * p->v.row, odd = from + key[2 * i + 1] * p->v.row;
        if (p->bf16) {
            const uint16_t *v = p->v.data;
            __m256i low = _mm256_maskz_loadu_epi16(real >> 2 * i & 1 ? there : 0, v + even);
            __m256i high = _mm256_maskz_loadu_epi16(real >> 2 * i & 2 ? there : 0, v + odd);
            __m512i above = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            block[i] = (vf)_mm512_or_si512(_mm512_cvtepu16_epi32(low), above);
        } else {
            const float *v = p->v.data;
            block[i] = (vf)_mm512_maskz_loadu_ps(real >> i & 1 ? there : 0, v + from + key[i] * p->v.row);
            __mmask16 second = real >> (SIDE + i) & 1 ? there : 0;
            other[i] = (vf)_mm512_maskz_loadu_ps(second, v + from + key[SIDE + i] * p->v.row);
        }
    }
    transpose_block(block);
    if (p->bf16) { memcpy(to, block, TILE); return; }
    transpose_block(other);
    for (int64_t i = 0; i < SIDE; i++) write_parts((__m512)block[i], (__m512)other[i], to + i * 64);
}

/* Keys and values of a group as tiles of the left side of products: as they lie, and across. What padding holds may be
   no number, and times a weight of 0 it would not be 0. */
static void pack_group(const problem *p, const strips *s, const strip *t, int64_t at) {
    int64_t first = at * SPAN, end = lesser(first + SPAN, p->ranks), next = lesser(end + SPAN, p->ranks), key[SPAN];
    int64_t step = s->parts * 2 * TILE, keys = t->b * p->k.batch + t->h * p->k.head;
    int64_t values = t->b * p->v.batch + t->h * p->v.head;
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
    int64_t queries = t->b * p->q.batch + t->h * p->q.head, end = t->first + t->rows, step = s->parts * 2 * TILE;
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
                int64_t at = t->b * x.batch + t->h * x.head + rows[i] * x.row + e;
                __mmask16 own = which >> i & 1 ? there : 0;
                __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(bf16 ? own : 0, (uint16_t *)x.data + at));
                __m512 row = _mm512_maskz_loadu_ps(bf16 ? 0 : own, (float *)x.data + at);
                block[i - half] = bf16 ? (vf)_mm512_slli_epi32(wide, 16) : (vf)row;
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
    *s = (strips){.groups = (p->ranks + SPAN - 1) / SPAN, .deep = (p->size + DEPTH - 1) / DEPTH,
                  .pairs = (p->values + SPAN - 1) / SPAN, .parts = p->bf16 ? 1 : PARTS, .item = -1};
    int64_t words = s->parts * TILE / 2, keys = s->groups * s->deep * words, values = s->groups * s->pairs * words;
    int64_t again = greater(SQUARE, 2 * padded(p->size)), faded = p->spans ? padded(p->keys + p->length + 1) : 0;
    int64_t rest = s->pairs * SQUARE + faded + padded(2 * most) + padded((s->groups + 3) / 4);
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
    s->packed = (uint8_t *)at;
    return memory;
}
#endif
"""
