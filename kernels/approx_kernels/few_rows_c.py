"""Layers of a few rows in C: about as fast as their weights can be read, on all threads."""

from approx_kernels.c_vectors import VECTORS

SOURCE = (
    VECTORS
    + r"""
/* Outputs that a thread makes at a time, at most and at least; columns and rows that share what is read of them. */
enum { STRIP = 256, LEAST = 64, ACROSS = 3, ABREAST = 4 };

typedef struct {
    int64_t rows, in, out, bf16, threads;
    const void *x, *weight, *bias; /* [rows, in]; [in, out] or [out, in]; [out], or NULL */
    void *y;                       /* [rows, out] */
} layer;

/* Numbers of a tensor that lies in one piece, from one of them on. */
INLINE tensor piece(const layer *p, const void *from, int64_t at) {
    return (tensor){(char *)from + (p->bf16 ? 2 : 4) * at, 0, 0, 0};
}

INLINE void read_piece(const layer *p, const void *from, int64_t at, int64_t n, float *to) {
    read_row(piece(p, from, at), p->bf16, 0, 0, 0, n, to);
}

/* The inputs as whole vectors. */
static float *inputs(const layer *p) {
    int64_t wide = padded(p->in);
    float *x = floats(p->rows * wide);
    for (int64_t m = 0; x && m < p->rows; m++) {
        read_piece(p, p->x, m * p->in, p->in, x + m * wide);
        for (int64_t k = p->in; k < wide; k++) x[m * wide + k] = 0.0f;
    }
    return x;
}

/* Few outputs are cut so that every thread has some, at places that do not depend on how many there are. */
static int64_t strip_of(const layer *p) {
    return greater(LEAST, lesser(STRIP, (p->out / (2 * p->threads) + LEAST - 1) / LEAST * LEAST));
}

static void write_outputs(const layer *p, int64_t first, int64_t count, const float *sums) {
    float added[STRIP] = {0}, row[STRIP];
    if (p->bias) read_piece(p, p->bias, first, count, added);
    for (int64_t m = 0; m < p->rows; m++) {
        for (int64_t n = 0; n < count; n++) row[n] = sums[m * STRIP + n] + added[n];
        write_row(piece(p, p->y, m * p->out + first), p->bf16, 0, 0, 0, count, row);
    }
}

/* Weights [in, out]: a strip of columns at a time, and of those as many rows as sums have terms in a chain. */
int by_input(const layer *p) {
    int64_t wide = padded(p->in), strip = strip_of(p), bytes = p->bf16 ? 2 : 4;
    float *x = inputs(p);
    int failed = !x;
#pragma omp parallel for schedule(static) num_threads(p->threads) reduction(| : failed)
    for (int64_t first = 0; first < p->out; first += strip) {
        float *sums = x ? floats((p->rows + CHAIN) * STRIP) : NULL;
        if (!sums) { failed = 1; continue; }
        float *copy = sums + p->rows * STRIP;
        int64_t count = lesser(strip, p->out - first);
        /* Whole vectors of the last columns would reach beyond the weights. */
        int copied = p->bf16 || count % WIDTH;
        memset(sums, 0, sizeof(float) * (p->rows + CHAIN) * STRIP);
        for (int64_t k = 0; k < p->in; k += CHAIN) {
            int64_t deep = lesser(CHAIN, p->in - k), next = lesser(CHAIN, p->in - k - deep);
            const char *weight = piece(p, p->weight, k * p->out + first).data;
            for (int64_t j = 0; j < deep && copied; j++) read_piece(p, weight, j * p->out, count, copy + j * STRIP);
            /* Pieces of rows lie pages apart, where no processor looks ahead by itself. */
            for (int64_t j = deep; j < deep + next; j++)
                for (int64_t at = 0; at < bytes * count; at += 64) __builtin_prefetch(weight + bytes * j * p->out + at);
            product(p->rows, padded(count), deep, x + k, wide, 1, copied ? copy : (const float *)weight,
                    copied ? STRIP : p->out, sums, STRIP, 1);
        }
        write_outputs(p, first, count, sums);
        free(sums);
    }
    free(x);
    return failed;
}

/* to[m STRIP + n] of some rows, their products with the rows w; as many of these always, or compilers round otherwise. */
INLINE void dots(const int rows, int64_t wide, const float *x, const float *const *w, int64_t columns, float *to) {
    vf sums[ABREAST][ACROSS];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int n = 0; n < ACROSS; n++) sums[m][n] = (vf){0};
    for (int64_t k = 0; k < wide; k += WIDTH)
#pragma GCC unroll 3
        for (int n = 0; n < ACROSS; n++) {
            vf weight = *(const vf *)(w[n] + k);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) sums[m][n] += *(const vf *)(x + m * wide + k) * weight;
        }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int n = 0; n < ACROSS; n++)
            if (n < columns) to[m * STRIP + n] = lane_sum(sums[m][n]);
}

/* Weights [out, in]: every output is a product of two rows. */
int by_output(const layer *p) {
    int64_t wide = padded(p->in), strip = strip_of(p);
    float *x = inputs(p);
    int failed = !x;
#pragma omp parallel for schedule(static) num_threads(p->threads) reduction(| : failed)
    for (int64_t first = 0; first < p->out; first += strip) {
        float *sums = x ? floats(p->rows * STRIP + ACROSS * wide) : NULL;
        if (!sums) { failed = 1; continue; }
        float *copy = sums + p->rows * STRIP;
        int64_t count = lesser(strip, p->out - first);
        int copied = p->bf16 || p->in % WIDTH;
        memset(copy, 0, sizeof(float) * ACROSS * wide);
        for (int64_t n = 0; n < count; n += ACROSS) {
            int64_t columns = lesser(ACROSS, count - n);
            const float *w[ACROSS];
            for (int64_t j = 0; j < ACROSS; j++) {
                int64_t at = (first + n + lesser(j, columns - 1)) * p->in;
                if (copied) read_piece(p, p->weight, at, p->in, copy + j * wide);
                w[j] = copied ? copy + j * wide : (const float *)p->weight + at;
            }
            for (int64_t m = 0; m < p->rows; m += ABREAST) {
                float *to = sums + m * STRIP + n;
                const float *row = x + m * wide;
                switch (lesser(p->rows - m, ABREAST)) {
                    case 1: dots(1, wide, row, w, columns, to); break;
                    case 2: dots(2, wide, row, w, columns, to); break;
                    case 3: dots(3, wide, row, w, columns, to); break;
                    default: dots(4, wide, row, w, columns, to);
                }
            }
        }
        write_outputs(p, first, count, sums);
        free(sums);
    }
    free(x);
    return failed;
}
"""
)
