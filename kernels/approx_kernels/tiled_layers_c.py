"""Layers of float32 in C on tiles for bfloat16 (AMX), every number in three parts."""

from approx_kernels.c_parts import PARTS

SOURCE = (
    PARTS
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
/* Bytes of a square of 32 numbers in all parts; of the right side, what stays in the second cache: outputs, and depth in
   squares. Rows that are packed at a time: in all, and in bytes. */
enum { PACKED = 2 * PARTS * TILE, WIDE = 128, DEEP = 24, ROWS = 2048, MOST_PACKED = 16 << 20 };

/* Numbers [32, 32] of rows that lie in one piece, as tiles of the left side. */
static void pack_rows(const float *x, int64_t stride, int64_t rows, int64_t depth, char *to) {
    for (int64_t i = 0; i < SPAN; i++, x += stride) {
        __m512 first = _mm512_maskz_loadu_ps(i < rows ? first_lanes(depth) : 0, x);
        write_parts(first, _mm512_maskz_loadu_ps(i < rows ? first_lanes(depth - SIDE) : 0, x + SIDE), to + i * 64);
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

INLINE void multiply_square(void) {
    ADD_PRODUCT(0, 4, 6);
    ADD_PRODUCT(1, 4, 7);
    ADD_PRODUCT(2, 5, 6);
    ADD_PRODUCT(3, 5, 7);
}

INLINE void add_parts(const char *left, const char *right) { ADD_PARTS(multiply_square()); }

/* A square of sums, of `count` squares of both sides. */
static void add_squares(const char *left, const char *right, int64_t count, float *sums, int add) {
    if (add) read_square(sums);
    else zero_square();
    for (int64_t d = 0; d < count; d++) add_parts(left + d * PACKED, right + d * PACKED);
    write_square(sums);
}

static void write_sums(const layer *l, const float *sums, int64_t row, int64_t n) {
    for (int64_t e = 0; e < SPAN; e += SIDE) {
        __mmask16 there = first_lanes(l->out - n - e);
        __m512 bias = _mm512_maskz_loadu_ps(l->bias ? there : 0, l->bias + n + e);
        for (int64_t i = 0; i < lesser(SPAN, l->rows - row); i++) {
            __m512 made = _mm512_add_ps(_mm512_load_ps(sums + i * SPAN + e), bias);
            _mm512_mask_storeu_ps(l->y + (row + i) * l->out + n + e, there, made);
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
