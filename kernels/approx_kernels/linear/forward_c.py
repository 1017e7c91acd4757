"""Outputs of linear attention in C: features are made where their products need them, and never stored."""

from approx_kernels.c_vectors import VECTORS

HEADS = (
    VECTORS
    + r"""
enum { TOKENS = 64, CHUNK = 32, STRIP = 16 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, causal, relu, bf16, threads;
    tensor q, k, v, out;
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    float *sums;         /* [B, H, D, E + 1] */
    float input_scale, eps;
} problem;

/* Features in place of rows whose padding to whole vectors is 0, and stays so. */
static void features(const problem *p, int64_t rows, int64_t stride, float *x) {
    for (int64_t i = 0; i < rows; i++, x += stride) {
        for (int64_t d = 0; d < stride; d += WIDTH) {
            vf at = *(vf *)(x + d) * p->input_scale, none = {0};
            vf above = choose(at < 0.0f, none, at);
            if (!p->relu) above += vexp(choose(at < 0.0f, at, none));
            *(vf *)(x + d) = above;
        }
        for (int64_t d = p->size; d < stride; d++) x[d] = 0.0f;
    }
}

static void read_features(const problem *p, tensor from, int64_t b, int64_t h, int64_t first, int64_t rows, float *to) {
    int64_t stride = padded(p->size);
    for (int64_t i = 0; i < rows; i++) {
        read_row(from, p->bf16, b, h, first + i, p->size, to + i * stride);
        for (int64_t d = p->size; d < stride; d++) to[i * stride + d] = 0.0f;
    }
    features(p, rows, stride, to);
}

static void read_values(const problem *p, tensor from, int64_t b, int64_t h, int64_t first, int64_t rows, float *to) {
    int64_t stride = padded(p->values);
    for (int64_t i = 0; i < rows; i++) {
        read_row(from, p->bf16, b, h, first + i, p->values, to + i * stride);
        for (int64_t d = p->values; d < stride; d++) to[i * stride + d] = 0.0f;
    }
}

/* Features of keys, and their values; both 0 where padded, and up to `full` rows. */
static void read_keys(const problem *p, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t full, float *keys,
                      float *values) {
    int64_t size = padded(p->size), width = padded(p->values);
    read_features(p, p->k, b, h, first, rows, keys);
    read_values(p, p->v, b, h, first, rows, values);
    for (int64_t i = 0; i < full; i++)
        if (i >= rows || (p->mask && !p->mask[b * p->keys + first + i])) {
            memset(keys + i * size, 0, sizeof(float) * size);
            memset(values + i * width, 0, sizeof(float) * width);
        }
}

INLINE void add_row(int64_t n, float factor, const float *from, float *to) {
    for (int64_t d = 0; d < n; d += WIDTH) *(vf *)(to + d) += factor * *(const vf *)(from + d);
}

INLINE float dot(int64_t n, const float *a, const float *b) {
    vf sums = {0};
    for (int64_t d = 0; d < n; d += WIDTH) sums += *(const vf *)(a + d) * *(const vf *)(b + d);
    float sum = 0.0f;
    for (int l = 0; l < WIDTH; l++) sum += sums[l];
    return sum;
}

/* from [rows, width] with that stride -> to [width, stride_to]. */
static void transpose(int64_t rows, int64_t width, const float *from, int64_t stride, float *to, int64_t stride_to) {
    for (int64_t first = 0; first < rows; first += 8)
        for (int64_t d = 0; d < width; d++)
            for (int64_t i = first; i < first + 8 && i < rows; i++) to[d * stride_to + i] = from[i * stride + d];
}

/* Products of each row with the rows up to its own, whose transpose is given, [CHUNK, CHUNK]; 0 beyond. */
static void past_pairs(int64_t depth, const float *rows, int64_t stride, const float *others, float *pairs) {
    memset(pairs, 0, sizeof(float) * CHUNK * CHUNK);
    for (int64_t i = 0; i < CHUNK; i += STRIP) {
        product(STRIP, i + STRIP, depth, rows + i * stride, stride, 1, others, CHUNK, pairs + i * CHUNK, CHUNK, 0);
        for (int64_t r = i; r < i + STRIP; r++)
            for (int64_t j = r + 1; j < i + STRIP; j++) pairs[r * CHUNK + j] = 0.0f;
    }
}
"""
)

FORWARD = (
    HEADS
    + r"""
static int attend(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), width = padded(p->values), D = p->size, E = p->values;
    float *memory = floats((D + 2 * TOKENS) * width + (2 * TOKENS + 1 + CHUNK) * size + CHUNK * CHUNK);
    if (!memory) return 1;
    float *state = memory, *values = state + D * width, *out = values + TOKENS * width, *keys = out + TOKENS * width;
    float *queries = keys + TOKENS * size, *total = queries + TOKENS * size, *other = total + size;
    float *pairs = other + CHUNK * size;
    float *sums = p->sums + (b * p->heads + h) * D * (E + 1);
    memset(state, 0, sizeof(float) * D * width), memset(total, 0, sizeof(float) * size);
    for (int64_t d = 0; d < D; d++) {
        memcpy(state + d * width, sums + d * (E + 1), sizeof(float) * E);
        total[d] = sums[d * (E + 1) + E];
    }
    /* A single query sees every key, its own too. */
    int64_t seen = p->causal && p->length > 1 ? p->keys - p->length : p->keys;
    for (int64_t first = 0; first < seen; first += TOKENS) {
        int64_t rows = seen - first < TOKENS ? seen - first : TOKENS;
        read_keys(p, b, h, first, rows, rows, keys, values);
        for (int64_t i = 0; i < rows; i++) add_row(size, 1.0f, keys + i * size, total);
        product(D, width, rows, keys, 1, size, values, width, state, width, 1);
    }
    int64_t step = seen < p->keys ? CHUNK : TOKENS;
    for (int64_t first = 0; first < p->length; first += step) {
        int64_t rows = p->length - first < step ? p->length - first : step;
        read_features(p, p->q, b, h, first, rows, queries);
        product(rows, width, D, queries, size, 1, state, width, out, width, 0);
        if (seen < p->keys) {
            read_keys(p, b, h, seen + first, rows, CHUNK, keys, values);
            memset(queries + rows * size, 0, sizeof(float) * (CHUNK - rows) * size);
            transpose(CHUNK, D, keys, size, other, CHUNK);
            past_pairs(D, queries, size, other, pairs);
            for (int64_t i = 0; i < rows; i += STRIP)
                product(rows - i < STRIP ? rows - i : STRIP, width, i + STRIP, pairs + i * CHUNK, CHUNK, 1, values,
                        width, out + i * width, width, 1);
            product(D, width, rows, keys, 1, size, values, width, state, width, 1);
        }
        for (int64_t i = 0; i < rows; i++) {
            if (seen < p->keys) add_row(size, 1.0f, keys + i * size, total);
            float factor = 1.0f / (dot(size, queries + i * size, total) + p->eps);
            for (int64_t e = 0; e < width; e += WIDTH) *(vf *)(out + i * width + e) *= factor;
            write_row(p->out, p->bf16, b, h, first + i, E, out + i * width);
        }
    }
    for (int64_t d = 0; d < D; d++) {
        memcpy(sums + d * (E + 1), state + d * width, sizeof(float) * E);
        sums[d * (E + 1) + E] = total[d];
    }
    free(memory);
    return 0;
}

int forward(const problem *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < p->batch * p->heads; item++) failed |= attend(p, item / p->heads, item % p->heads);
    return failed;
}
"""
)
