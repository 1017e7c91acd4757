"""Groups of keys and strips of queries as tiles (AMX), in C: how they are packed, multiplied, and weighed meanwhile.

Scores are computed across, a key to a row and a query to a lane, so that nothing is summed or compared between lanes, and
weights leave as the right side of the product with the values. Tiles and vectors work at the same time: a group of keys
is weighed between the products of the next one and those of earlier ones with their values.
"""

GROUPS = r"""
#if HAVE_TILES
/* Queries of a strip and keys of a group; groups that wait for their values together. */
enum { SPAN = 32, WAITING = 2, SQUARE = SPAN * SPAN, TILE = SIDE * DEPTH * 2 };

/* Keys of ranks from SPAN * at on, which are seen as an entry says. */
typedef struct { int32_t at, entry; } group;

/* What a thread works with: keys and values of a head as tiles, packed where somebody saw them; and of a strip the rest. */
typedef struct {
    int64_t groups, deep, pairs, item, part;
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

INLINE void weigh_lanes(const float *scores, __m512 factor, lanes *l, char *weights) {
    __m512 low = power(_mm512_fmsub_ps(_mm512_load_ps(scores), factor, l->origin));
    __m512 high = power(_mm512_fmsub_ps(_mm512_load_ps(scores + SPAN), factor, l->origin));
    l->low = _mm512_add_ps(l->low, low), l->high = _mm512_add_ps(l->high, high);
    _mm512_store_si512(weights, paired(low, high));
}

/* The next pairs of keys. */
INLINE void weigh_pairs(weighing *w, int64_t count) {
    if (!w) return;
    for (int64_t upto = lesser(w->done + count, SPAN / 2); w->done < upto; w->done++) {
        const float *scores = w->scores + w->done * 2 * SPAN;
        char *weights = w->weights + w->done * 4 * SPAN;
        weigh_lanes(scores, w->factor, &w->left, weights);
        weigh_lanes(scores + SIDE, w->factor, &w->right, weights + 2 * SPAN);
    }
}

/* Tiles 0 to 3 += two tiles by two tiles; between them, `share` pairs of keys are weighed four times. */
INLINE void add_square(const char *above, const char *below, const char *left, const char *right, int64_t stride,
                       weighing *w, int64_t share) {
    READ_TILE(4, above, SIDE);
    READ_TILE(6, left, stride);
    ADD_PRODUCT(0, 4, 6);
    weigh_pairs(w, share);
    READ_TILE(7, right, stride);
    ADD_PRODUCT(1, 4, 7);
    weigh_pairs(w, share);
    READ_TILE(5, below, SIDE);
    ADD_PRODUCT(2, 5, 6);
    weigh_pairs(w, share);
    ADD_PRODUCT(3, 5, 7);
    weigh_pairs(w, share);
}

INLINE void write_square(float *to) {
    WRITE_TILE(0, to, SPAN);
    WRITE_TILE(1, to + SIDE, SPAN);
    WRITE_TILE(2, to + SIDE * SPAN, SPAN);
    WRITE_TILE(3, to + SIDE * SPAN + SIDE, SPAN);
}

/* Scores of the queries at a group, keys by queries. */
INLINE void meet(const strips *s, int64_t at, float *scores, weighing *w, int64_t share) {
    const char *keys = s->keys + at * s->deep * 2 * TILE;
    ZERO_TILE(0);
    ZERO_TILE(1);
    ZERO_TILE(2);
    ZERO_TILE(3);
    for (int64_t d = 0; d < s->deep; d++) {
        const char *queries = s->queries + d * 2 * TILE;
        add_square(keys + d * TILE, keys + (s->deep + d) * TILE, queries, queries + TILE, SIDE, w, share);
    }
    write_square(scores);
}

/* What the values of some groups add to 32 numbers of the outputs, which are numbers by queries. */
INLINE void bring(const strips *s, int64_t pair, const group *groups, int64_t count, const char *weights, weighing *w,
                  int64_t share) {
    float *out = s->out + pair * SQUARE;
    READ_TILE(0, out, SPAN);
    READ_TILE(1, out + SIDE, SPAN);
    READ_TILE(2, out + SIDE * SPAN, SPAN);
    READ_TILE(3, out + SIDE * SPAN + SIDE, SPAN);
    for (int64_t g = 0; g < count; g++, weights += 2 * TILE) {
        const char *values = s->values + (groups[g].at * s->pairs + pair) * 2 * TILE;
        add_square(values, values + TILE, weights, weights + 2 * SPAN, SPAN, w, share);
    }
    write_square(out);
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
INLINE void expect(tensor x, const strip *t, const int32_t *tokens, int64_t first, int64_t end, int64_t size) {
    const uint16_t *from = (uint16_t *)x.data + t->b * x.batch + t->h * x.head;
    for (int64_t i = first; i < end; i++)
        for (int64_t d = 0; d < size; d += 32) __builtin_prefetch(from + token(tokens, i) * x.row + d);
}

/* Keys and values of a group as tiles of the left side of products: as they lie, and across. What padding holds may be
   no number, and times a weight of 0 it would not be 0. */
static void pack_group(const problem *p, const strips *s, const strip *t, int64_t at) {
    int64_t first = at * SPAN, end = lesser(first + SPAN, p->ranks), next = lesser(end + SPAN, p->ranks);
    uint32_t real = real_keys(p, t, first);
    const uint16_t *keys = (uint16_t *)p->k.data + t->b * p->k.batch + t->h * p->k.head;
    const uint16_t *values = (uint16_t *)p->v.data + t->b * p->v.batch + t->h * p->v.head;
    int64_t key[SPAN];
    for (int64_t j = 0; j < SPAN; j++) key[j] = first + j < end ? token(t->keys, first + j) : 0;
    expect(p->k, t, t->keys, end, next, p->size), expect(p->v, t, t->keys, end, next, p->values);
    char *to = s->keys + at * s->deep * 2 * TILE;
    for (int64_t j = 0; j < SPAN; j++)
        for (int64_t d = 0; d < s->deep; d++) {
            __mmask32 there = first + j < end ? halves_of(p->size - d * DEPTH) : 0;
            __m512i row = _mm512_maskz_loadu_epi16(there, keys + key[j] * p->k.row + d * DEPTH);
            _mm512_store_si512(to + (j / SIDE * s->deep + d) * TILE + j % SIDE * 64, row);
        }
    vf block[WIDTH];
    to = s->values + at * s->pairs * 2 * TILE;
    for (int64_t e = 0; e < 2 * s->pairs * SIDE; e += SIDE, to += TILE) {
        __mmask16 there = first_lanes(p->values - e);
        for (int64_t i = 0; i < SIDE; i++) {
            __mmask16 even = real >> 2 * i & 1 ? there : 0, odd = real >> 2 * i & 2 ? there : 0;
            __m256i low = _mm256_maskz_loadu_epi16(even, values + key[2 * i] * p->v.row + e);
            __m256i high = _mm256_maskz_loadu_epi16(odd, values + key[2 * i + 1] * p->v.row + e);
            __m512i above = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            block[i] = (vf)_mm512_or_si512(_mm512_cvtepu16_epi32(low), above);
        }
        transpose_block(block);
        memcpy(to, block, TILE);
    }
}

/* Queries of a strip as tiles of the right side: pairs of numbers by queries. */
static void pack_queries(const problem *p, const strips *s, const strip *t) {
    const uint16_t *queries = (uint16_t *)p->q.data + t->b * p->q.batch + t->h * p->q.head;
    int64_t end = t->first + t->rows;
    vf block[WIDTH];
    char *to = s->queries;
    expect(p->q, t, t->queries, end, lesser(end + SPAN, p->length), p->size);
    for (int64_t d = 0; d < s->deep; d++)
        for (int64_t half = t->first; half < t->first + SPAN; half += SIDE, to += TILE) {
            for (int64_t i = half; i < half + SIDE; i++) {
                const uint16_t *row = queries + (i < end ? token(t->queries, i) : 0) * p->q.row + d * DEPTH;
                block[i - half] = (vf)_mm512_maskz_loadu_epi16(i < end ? halves_of(p->size - d * DEPTH) : 0, row);
            }
            transpose_block(block);
            memcpy(to, block, TILE);
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
                  .pairs = (p->values + SPAN - 1) / SPAN, .item = -1};
    int64_t words = TILE / 2, keys = s->groups * s->deep * words, values = s->groups * s->pairs * words;
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
