"""Groups of keys and strips of queries as tiles (AMX), in C: how they are packed, multiplied, and weighed meanwhile.

Scores are computed across, a key to a row and a query to a lane, so that nothing is summed or compared between lanes, and
weights leave as the right side of the product with the values. Tiles and vectors work at the same time: a group of keys
is weighed between the products of the next one and those of earlier ones with their values.
"""

GROUPS = r"""
#if HAVE_TILES
/* Queries of a strip and keys of a group; groups that wait for their values together. */
enum { SPAN = 32, WAITING = 2, SQUARE = SPAN * SPAN, TILE = SIDE * DEPTH * 2 };

/* Keys from SPAN * at on, which are seen as an entry says. */
typedef struct { int32_t at, entry; } group;

/* What a thread works with: keys and values of a head as tiles, packed where somebody saw them; and of a strip the rest. */
typedef struct {
    int64_t groups, deep, pairs, item;
    char *keys, *values, *queries, *weights;
    float *scores, *again, *out;
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

/* Which keys of a group are real, those from the one on that is given. */
INLINE uint32_t real_keys(const problem *p, int64_t b, int64_t first) {
    int64_t left = p->keys - first;
    uint32_t there = left < SPAN ? (1u << left) - 1 : ~0u;
    if (!p->mask) return there;
    return _mm256_mask_test_epi8_mask(there, _mm256_maskz_loadu_epi8(there, p->mask + b * p->keys + first),
                                      _mm256_set1_epi8(-1));
}

/* Rows of a tensor that are packed after these. */
INLINE void expect(tensor x, int64_t b, int64_t h, int64_t first, int64_t end, int64_t size) {
    const uint16_t *from = (uint16_t *)x.data + b * x.batch + h * x.head;
    for (int64_t i = first; i < end; i++)
        for (int64_t d = 0; d < size; d += 32) __builtin_prefetch(from + i * x.row + d);
}

/* Keys and values of a group as tiles of the left side of products: as they lie, and across. What padding holds may be
   no number, and times a weight of 0 it would not be 0. */
static void pack_group(const problem *p, const strips *s, int64_t b, int64_t h, int64_t at) {
    int64_t first = at * SPAN, rows = lesser(SPAN, p->keys - first);
    const uint16_t *keys = (uint16_t *)p->k.data + b * p->k.batch + h * p->k.head + first * p->k.row;
    const uint16_t *values = (uint16_t *)p->v.data + b * p->v.batch + h * p->v.head + first * p->v.row;
    char *to = s->keys + at * s->deep * 2 * TILE;
    expect(p->k, b, h, first + rows, lesser(first + rows + SPAN, p->keys), p->size);
    expect(p->v, b, h, first + rows, lesser(first + rows + SPAN, p->keys), p->values);
    for (int64_t j = 0; j < SPAN; j++)
        for (int64_t d = 0; d < s->deep; d++) {
            int64_t left = j < rows ? p->size - d * DEPTH : 0;
            __mmask32 there = (uint32_t)first_lanes(left - SIDE) << SIDE | first_lanes(left);
            __m512i row = _mm512_maskz_loadu_epi16(there, keys + j * p->k.row + d * DEPTH);
            _mm512_store_si512(to + (j / SIDE * s->deep + d) * TILE + j % SIDE * 64, row);
        }
    uint32_t real = real_keys(p, b, first);
    vf block[WIDTH];
    to = s->values + at * s->pairs * 2 * TILE;
    for (int64_t e = 0; e < 2 * s->pairs; e++, to += TILE) {
        __mmask16 there = first_lanes(p->values - e * SIDE);
        for (int64_t i = 0; i < SIDE; i++) {
            const uint16_t *row = values + 2 * i * p->v.row + e * SIDE;
            __m256i low = _mm256_maskz_loadu_epi16(real >> 2 * i & 1 ? there : 0, row);
            __m256i high = _mm256_maskz_loadu_epi16(real >> 2 * i & 2 ? there : 0, row + p->v.row);
            __m512i above = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
            block[i] = (vf)_mm512_or_si512(_mm512_cvtepu16_epi32(low), above);
        }
        transpose_block(block);
        memcpy(to, block, TILE);
    }
}

/* Queries of a strip as tiles of the right side: pairs of numbers by queries. */
static void pack_queries(const problem *p, const strips *s, int64_t b, int64_t h, int64_t first, int64_t rows) {
    const uint16_t *queries = (uint16_t *)p->q.data + b * p->q.batch + h * p->q.head + first * p->q.row;
    vf block[WIDTH];
    char *to = s->queries;
    expect(p->q, b, h, first + rows, lesser(first + rows + SPAN, p->length), p->size);
    for (int64_t d = 0; d < s->deep; d++) {
        int64_t left = p->size - d * DEPTH;
        __mmask32 there = (uint32_t)first_lanes(left - SIDE) << SIDE | first_lanes(left);
        for (int64_t half = 0; half < SPAN; half += SIDE, to += TILE) {
            for (int64_t i = 0; i < SIDE; i++) {
                const uint16_t *row = queries + (half + i) * p->q.row + d * DEPTH;
                block[i] = (vf)_mm512_maskz_loadu_epi16(half + i < rows ? there : 0, row);
            }
            transpose_block(block);
            memcpy(to, block, TILE);
        }
    }
}
#endif
"""
