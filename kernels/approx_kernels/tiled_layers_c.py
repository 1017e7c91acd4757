"""Layers of float32 in C on tiles for bfloat16 (AMX): every number is the sum of three, and none of what counts is left out.

Three parts of 8 bits are all 24 of a float32. Of their nine products the three smallest are less than its last bit; the
other six, on tiles, take less time than one on the widest vectors.
"""

from approx_kernels.c_halves import HALVES

SOURCE = (
    HALVES
    + r"""
typedef struct {
    int64_t rows, in, out, threads;
    const float *x, *weight, *bias; /* [rows, in]; [in, out] or [out, in]; [out], or NULL */
    float *y;                       /* [rows, out] */
} layer;

#if HAVE_TILES
#ifdef _OPENMP
#include <omp.h>
#endif
/* Rows and outputs of a square, and the bytes of its parts, 32 numbers deep; of the right side, what stays in the second
   cache: outputs, and depth in squares. Rows that are packed at a time: in all, and in bytes. */
enum { SPAN = 32, TILE = SIDE * DEPTH * 2, PARTS = 3, PACKED = 2 * PARTS * TILE, WIDE = 128, DEEP = 24, ROWS = 2048 };
enum { MOST_PACKED = 16 << 20 };

/* Bits of 16 numbers, 8 of the 24 at a time, in the high halves of words. */
INLINE void part(__m512 x, __m512i parts[PARTS]) {
    for (int i = 0; i < PARTS; i++) {
        parts[i] = _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0xffff0000));
        /* Nothing is left of what is not finite. */
        __mmask16 more = _mm512_cmp_ps_mask(x, (__m512)parts[i], _CMP_NEQ_UQ);
        x = _mm512_maskz_sub_ps(more, x, (__m512)parts[i]);
    }
}

/* Numbers [32, 32] of rows that lie in one piece, as tiles of the left side. */
static void pack_rows(const float *x, int64_t stride, int64_t rows, int64_t depth, char *to) {
    const __m512i highs = (__m512i)(__v32hi){1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                             33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    for (int64_t i = 0; i < SPAN; i++, x += stride) {
        __m512i low[PARTS], high[PARTS];
        part(_mm512_maskz_loadu_ps(i < rows ? first_lanes(depth) : 0, x), low);
        part(_mm512_maskz_loadu_ps(i < rows ? first_lanes(depth - SIDE) : 0, x + SIDE), high);
        for (int p = 0; p < PARTS; p++)
            _mm512_store_si512(to + p * 2 * TILE + i * 64, _mm512_permutex2var_epi16(low[p], highs, high[p]));
    }
}

/* Weights [out, in], 32 by 32 of them, as tiles of the right side: pairs of inputs by outputs. */
static void pack_by_output(const layer *l, int64_t d, int64_t n, char *to) {
    vf block[WIDTH];
    pack_rows(l->weight + n * l->in + d, l->in, l->out - n, l->in - d, to);
    for (int64_t t = 0; t < 2 * PARTS; t++, to += TILE) {
        memcpy(block, to, TILE);
        transpose_block(block);
        memcpy(to, block, TILE);
    }
}

/* The same of weights [in, out]. */
static void pack_by_input(const layer *l, int64_t d, int64_t n, char *to) {
    for (int64_t half = 0; half < SPAN; half += SIDE)
        for (int64_t i = 0; i < SIDE; i++) {
            const float *row = l->weight + (d + 2 * i) * l->out + n + half;
            __m512i low[PARTS], high[PARTS];
            part(_mm512_maskz_loadu_ps(d + 2 * i < l->in ? first_lanes(l->out - n - half) : 0, row), low);
            part(_mm512_maskz_loadu_ps(d + 2 * i + 1 < l->in ? first_lanes(l->out - n - half) : 0, row + l->out), high);
            for (int p = 0; p < PARTS; p++)
                _mm512_store_si512(to + p * 2 * TILE + half * 64 + i * 64,
                                   _mm512_or_si512(_mm512_srli_epi32(low[p], 16), high[p]));
        }
}

#define READ_LEFT(p) READ_TILE(4, left + p * 2 * TILE, SIDE); READ_TILE(5, left + p * 2 * TILE + TILE, SIDE)
#define READ_RIGHT(p) READ_TILE(6, right + p * 2 * TILE, SIDE); READ_TILE(7, right + p * 2 * TILE + TILE, SIDE)
#define ADD_SQUARE() ADD_PRODUCT(0, 4, 6); ADD_PRODUCT(1, 4, 7); ADD_PRODUCT(2, 5, 6); ADD_PRODUCT(3, 5, 7)

/* Tiles 0 to 3 += two by two tiles, in an order in which every step has one side of the last. */
INLINE void add_parts(const char *left, const char *right) {
    READ_LEFT(0);
    READ_RIGHT(2);
    ADD_SQUARE();
    READ_RIGHT(1);
    ADD_SQUARE();
    READ_LEFT(1);
    ADD_SQUARE();
    READ_RIGHT(0);
    ADD_SQUARE();
    READ_LEFT(2);
    ADD_SQUARE();
    READ_LEFT(0);
    ADD_SQUARE();
}

/* A square of sums, tile by tile, of `count` squares of both sides. */
static void add_squares(const char *left, const char *right, int64_t count, float *sums, int add) {
    if (add) {
        READ_TILE(0, sums, SIDE);
        READ_TILE(1, sums + SIDE * SIDE, SIDE);
        READ_TILE(2, sums + 2 * SIDE * SIDE, SIDE);
        READ_TILE(3, sums + 3 * SIDE * SIDE, SIDE);
    } else {
        ZERO_TILE(0);
        ZERO_TILE(1);
        ZERO_TILE(2);
        ZERO_TILE(3);
    }
    for (int64_t d = 0; d < count; d++) add_parts(left + d * PACKED, right + d * PACKED);
    WRITE_TILE(0, sums, SIDE);
    WRITE_TILE(1, sums + SIDE * SIDE, SIDE);
    WRITE_TILE(2, sums + 2 * SIDE * SIDE, SIDE);
    WRITE_TILE(3, sums + 3 * SIDE * SIDE, SIDE);
}

static void write_sums(const layer *l, const float *sums, int64_t row, int64_t n) {
    int64_t rows = lesser(SPAN, l->rows - row);
    for (int64_t e = 0; e < SPAN; e += SIDE) {
        __mmask16 there = first_lanes(l->out - n - e);
        __m512 bias = _mm512_maskz_loadu_ps(l->bias ? there : 0, l->bias + n + e);
        for (int64_t i = 0; i < rows; i++) {
            const float *made = sums + (i / SIDE * 2 * SIDE + e + i % SIDE) * SIDE;
            _mm512_mask_storeu_ps(l->y + (row + i) * l->out + n + e, there, _mm512_add_ps(_mm512_load_ps(made), bias));
        }
    }
}

/* Some outputs of all rows that are packed. */
static void some_outputs(const layer *l, int by_input, const char *left, int64_t first, int64_t rows, int64_t begin,
                         int64_t end, char *right, float *sums) {
    int64_t deep = (l->in + SPAN - 1) / SPAN, across = WIDE / SPAN;
    for (int64_t from = 0; from < deep; from += DEEP) {
        int64_t some = lesser(DEEP, deep - from);
        for (int64_t n = begin; n < end; n += SPAN)
            for (int64_t d = 0; d < some; d++) {
                char *to = right + ((n - begin) / SPAN * DEEP + d) * PACKED;
                if (by_input) pack_by_input(l, (from + d) * SPAN, n, to);
                else pack_by_output(l, (from + d) * SPAN, n, to);
            }
        for (int64_t i = 0; i * SPAN < rows; i++)
            for (int64_t n = begin; n < end; n += SPAN) {
                int64_t at = (n - begin) / SPAN;
                float *own = sums + (i * across + at) * SPAN * SPAN;
                add_squares(left + (i * deep + from) * PACKED, right + at * DEEP * PACKED, some, own, from > 0);
                if (from + some == deep) write_sums(l, own, first + i * SPAN, n);
            }
    }
}

static int layer_on_tiles(const layer *l, int by_input) {
    int64_t deep = (l->in + SPAN - 1) / SPAN, most = lesser(ROWS, (l->rows + SPAN - 1) / SPAN * SPAN);
    most = greater(SPAN, lesser(most, MOST_PACKED / (deep * PACKED) * SPAN));
    int64_t wide = greater(SPAN, lesser(WIDE, (l->out / l->threads + SPAN - 1) / SPAN * SPAN));
    /* Floats of the left side, and of what each thread has: its right side and its sums. */
    int64_t shared = most / SPAN * deep * PACKED / 4, right = WIDE / SPAN * DEEP * PACKED / 4, own = right + most * WIDE;
    float *memory = floats(shared + l->threads * own);
    if (!memory) return 1;
#pragma omp parallel num_threads(l->threads)
    {
#ifdef _OPENMP
        float *mine = memory + shared + omp_get_thread_num() * own;
#else
        float *mine = memory + shared;
#endif
        int half = begin_halves(1, SIDE);
        for (int64_t first = 0; first < l->rows; first += most) {
            int64_t rows = lesser(most, l->rows - first);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < (rows + SPAN - 1) / SPAN; i++)
                for (int64_t d = 0; d < deep; d++)
                    pack_rows(l->x + (first + i * SPAN) * l->in + d * SPAN, l->in, rows - i * SPAN, l->in - d * SPAN,
                              (char *)memory + (i * deep + d) * PACKED);
#pragma omp for schedule(dynamic)
            for (int64_t begin = 0; begin < l->out; begin += wide)
                some_outputs(l, by_input, (char *)memory, first, rows, begin, lesser(begin + wide, l->out),
                             (char *)mine, mine + right);
        }
        end_halves(half);
    }
    free(memory);
    return 0;
}

int usable(void) { return tiles_at_hand(); }
int by_output(const layer *l) { return layer_on_tiles(l, 0); }
int by_input(const layer *l) { return layer_on_tiles(l, 1); }
#else
int usable(void) { return 0; }
#endif
"""
)
