/* Squares of products in C, of a strip of queries and a group of keys or values, on tiles (AMX) or on vectors
   (AVX-512).

   Scores are computed across, a key to a row and a query to a lane, so that nothing is summed or compared between
   lanes, and weights leave as the right side of the product with the values. Tiles and vectors work at the same time: a
   group of keys is weighed between the products of the next one and those of earlier ones with their values. Where
   there are no tiles, their places in memory are the same and vectors multiply what lies there: pairs of bfloat16, or
   half as many of float32. */
#pragma once

#if WIDTH == 16
/* Groups that wait for their values together; numbers of a square of scores: a strip of queries and a group of keys
   have SPAN each. */
enum { WAITING = HAVE_TILES ? 2 : 4, SQUARE = SPAN * SPAN };

/* Keys of ranks from SPAN * at on, which are seen as an entry says. */
typedef struct {
    int32_t at, entry;
} group;

/* The buffers of a thread: keys and values of a head as tiles, packed once some query sees them; and data of a
   strip. */
typedef struct {
    int64_t groups, deep, pairs, parts, item, part;
    char *keys, *values, *queries, *weights;
    float *scores, *again, *out, *faded;
    uint8_t *packed;
    group *list;
    int32_t *stretches; /* [P, 4, SIDE]: of the queries' stretches in earlier parts the firsts, then the ends */
} strips;

/* SIDE queries of a strip: their weights are powers of 2, relative to that of the origin; the sum of those of earlier
   groups, and of every other key since, for in one chain long sums would gather roundings. */
typedef struct {
    __m512 origin, sum, low, high;
} lanes;

/* The group that is being weighed: how many of its pairs of keys are done, and what that has come to. */
typedef struct {
    const float *scores;
    char *weights;
    int64_t done;
    __m512 factor;
    lanes left, right;
} weighing;

INLINE __m512 total(const lanes *l) { return _mm512_add_ps(l->sum, _mm512_add_ps(l->low, l->high)); }

INLINE void gather_sums(lanes *l) { l->sum = total(l), l->low = l->high = _mm512_setzero_ps(); }

/* 2^x for results that are rounded to bfloat16 next, within 1e-4; 0 at minus infinity. */
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
    return _mm512_scalef_ps((__m512)exp_near_0((vf)r), _mm512_sub_ps(x, part));
}

BEGIN_STAND_INS
/* Weights of two keys, for SIDE queries: pairs, or each key by itself. */
INLINE void write_weights(const int wide, __m512 low, __m512 high, char *to) {
#if HAVE_PAIRS
    if (!wide) {
        _mm512_store_si512(to, paired(low, high));
        return;
    }
#endif
#if HAVE_TILES
    __m512i lows[PARTS], uppers[PARTS];
    part(low, lows), part(high, uppers);
    for (int p = 0; p < PARTS; p++)
        _mm512_store_si512(to + p * 2 * TILE, _mm512_or_si512(_mm512_srli_epi32(lows[p], 16), uppers[p]));
#else
    _mm512_store_ps(to, low), _mm512_store_ps(to + 64, high);
#endif
}
END_STAND_INS

/* A product that no compiler fuses with the following addition. */
INLINE __m512 rounded_product(__m512 a, __m512 b) {
    __m512 product = _mm512_mul_ps(a, b);
    __asm__("" : "+v"(product));
    return product;
}

INLINE void weigh_lanes(const int wide, const float *scores, __m512 factor, lanes *l, char *weights) {
    /* Products are rounded as the origin's was: one that is not differs in its last bit, which for a large score is too
       much for an exponential. */
    __m512 low = _mm512_sub_ps(rounded_product(_mm512_load_ps(scores), factor), l->origin);
    __m512 high = _mm512_sub_ps(rounded_product(_mm512_load_ps(scores + SPAN), factor), l->origin);
    low = wide ? whole_power(low) : power(low), high = wide ? whole_power(high) : power(high);
    l->low = _mm512_add_ps(l->low, low), l->high = _mm512_add_ps(l->high, high);
    write_weights(wide, low, high, weights);
}

/* The next pairs of keys. */
INLINE void weigh_pairs(const int wide, weighing *w, int64_t count) {
    if (!w) return;
    for (int64_t upto = lesser(w->done + count, SIDE); w->done < upto; w->done++) {
        const float *scores = w->scores + w->done * 2 * SPAN;
        /* Where keys are not paired, a tile has half as many. */
        int64_t row = wide && !HAVE_TILES ? w->done / 8 * 2 * TILE + w->done % 8 * 128 : w->done * 64;
        weigh_lanes(wide, scores, w->factor, &w->left, w->weights + row);
        weigh_lanes(wide, scores + SIDE, w->factor, &w->right, w->weights + row + TILE);
    }
}

#if HAVE_TILES
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
    if (wide) {
        ADD_PARTS(multiply_square(wide, w, share));
        return;
    }
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

/* Add the values of some groups to 32 numbers of the outputs, which are numbers by queries. */
INLINE void bring(const int wide, const strips *s, int64_t pair, const group *groups, int64_t count,
                  const char *weights, weighing *w, int64_t share) {
    const int64_t step = (wide ? PARTS : 1) * 2 * TILE;
    float *out = s->out + pair * SQUARE;
    if (wide) zero_square();
    else read_square(out);
    for (int64_t g = 0; g < count; g++)
        add_square(wide, s->values + (groups[g].at * s->pairs + pair) * step, weights + g * step, w, share);
    if (!wide) {
        write_square(out);
        return;
    }
    /* In one chain a sum of float32 would gather a rounding at every second key. */
    write_square(s->again);
    for (int64_t i = 0; i < SQUARE; i += WIDTH)
        _mm512_store_ps(out + i, _mm512_add_ps(_mm512_load_ps(out + i), _mm512_load_ps(s->again + i)));
}
#else
BEGIN_STAND_INS
INLINE __m512 multiply_add(const int wide, __m512 a, __m512 b, __m512 sum) {
#if HAVE_PAIRS
    if (!wide) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
    return _mm512_fmadd_ps(a, b, sum);
}

/* Rows whose sums stay in registers. */
enum { AT_ONCE = 8 };

INLINE void zero_rows(__m512 sums[AT_ONCE][2]) {
    for (int r = 0; r < AT_ONCE; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
}

/* Some rows of a square += those of two tiles by two tiles; of twice as many where numbers are float32. */
INLINE void add_rows(const int wide, const char *left, const char *right, __m512 sums[AT_ONCE][2]) {
    for (int64_t p = 0; p < (wide ? PARTS : 1); p++, left += 2 * TILE, right += 2 * TILE)
        for (int64_t w = 0; w < SIDE; w++) {
            __m512 first = _mm512_load_ps(right + w * 64), second = _mm512_load_ps(right + TILE + w * 64);
#pragma GCC unroll 8
            for (int r = 0; r < AT_ONCE; r++) {
                __m512 both = _mm512_set1_ps(*(const float *)(left + r * 64 + w * 4));
                sums[r][0] = multiply_add(wide, both, first, sums[r][0]);
                sums[r][1] = multiply_add(wide, both, second, sums[r][1]);
            }
        }
}

INLINE void meet(const int wide, const strips *s, int64_t at, float *scores, weighing *w, int64_t share) {
    const int64_t step = (wide ? PARTS : 1) * 2 * TILE;
    for (int64_t row = 0; row < SPAN; row += AT_ONCE) {
        __m512 sums[AT_ONCE][2];
        zero_rows(sums);
        for (int64_t d = 0; d < s->deep; d++)
            add_rows(wide, s->keys + (at * s->deep + d) * step + row * 64, s->queries + d * step, sums);
        for (int r = 0; r < AT_ONCE; r++)
            for (int x = 0; x < 2; x++) _mm512_store_ps(scores + (row + r) * SPAN + x * SIDE, sums[r][x]);
    }
}

INLINE void bring(const int wide, const strips *s, int64_t pair, const group *groups, int64_t count,
                  const char *weights, weighing *w, int64_t share) {
    const int64_t step = (wide ? PARTS : 1) * 2 * TILE;
    for (int64_t row = 0; row < SPAN; row += AT_ONCE) {
        float *out = s->out + pair * SQUARE + row * SPAN;
        __m512 sums[AT_ONCE][2];
        zero_rows(sums);
        for (int64_t g = 0; g < count; g++)
            add_rows(wide, s->values + (groups[g].at * s->pairs + pair) * step + row * 64, weights + g * step, sums);
        for (int r = 0; r < AT_ONCE; r++)
            for (int x = 0; x < 2; x++, out += SIDE)
                _mm512_store_ps(out, _mm512_add_ps(_mm512_load_ps(out), sums[r][x]));
    }
}
END_STAND_INS
#endif
#endif
