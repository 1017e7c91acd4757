"""Exact top-k attention in C: scores are computed a tile at a time, and of each row only the largest are kept."""

from approx_kernels.cpu.dropout import DROPOUT
from approx_kernels.cpu.largest import LARGEST
from approx_kernels.cpu.vectors import VECTORS

_HEADS = (
    VECTORS
    + DROPOUT
    + LARGEST
    + r"""
/* Queries that meet a block of keys together, in strips that are whole tiles of a product. */
enum { STRIP = 24, ROWS = 4 * STRIP, BLOCK = 64 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, kept, causal, bf16, threads;
    tensor q, k, v, out;
    const uint8_t *mask;    /* [B, S], 0 at padding; NULL when all keys are real */
    int32_t *top;    /* [B, H, L, K]: the keys of each query, -1 where it has fewer */
    float scale;
    dropout dropout;
} problem;
SIZE_OF(topk, problem)

/* What a query's weight of a key is multiplied by. */
INLINE float stay(const problem *p, draw of, int64_t key) {
    return p->dropout.bound ? kept_key(&p->dropout, of, key) : 1.0f;
}

/* Scores become weights in place; a NaN among them is one in all. */
static void softmax(float *scores, int64_t count) {
    float most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    for (int64_t j = 0; j < count; j++) sum += scores[j] = expf(scores[j] - most);
    for (int64_t j = 0; j < count; j++) scores[j] /= sum;
}

static void read_query(const problem *p, int64_t b, int64_t h, int64_t i, int64_t wide, float *to) {
    read_row(p->q, p->bf16, b, h, i, p->size, to);
    for (int64_t d = 0; d < wide; d++) to[d] = d < p->size ? to[d] * p->scale : 0.0f;
}
"""
)

FORWARD = (
    _HEADS
    + r"""
static int head(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, K = p->kept, before = S - p->length, real = 0;
    float *memory = floats(S * (size + values) + p->size * BLOCK + ROWS * (size + BLOCK + K) + values);
    int32_t *tokens = malloc(sizeof(int32_t) * (S + ROWS + 1));
    if (!memory || !tokens) { free(memory), free(tokens); return 1; }
    float *keys = memory, *rows = keys + S * size, *standing = rows + S * values, *queries = standing + p->size * BLOCK;
    float *scores = queries + ROWS * size, *best = scores + ROWS * BLOCK, *out = best + ROWS * K;
    int32_t *filled = tokens + S;
    for (int64_t j = 0; j < S; j++)
        if (!p->mask || p->mask[b * S + j]) tokens[real++] = (int32_t)j;
    read_rows(p->k, p->bf16, b, h, tokens, real, p->size, size, keys);
    read_rows(p->v, p->bf16, b, h, tokens, real, p->values, values, rows);
    for (int64_t first = 0, seen = 0; first < p->length; first += ROWS) {
        int64_t count = lesser(ROWS, p->length - first);
        int32_t *top = p->top + ((b * p->heads + h) * p->length + first) * K;
        float spoiled[ROWS] = {0};
        memset(filled, 0, sizeof(int32_t) * ROWS);
        for (int64_t i = 0; i < count; i++) read_query(p, b, h, first + i, size, queries + i * size);
        /* Keys up to the last query; those of the first are where the last block ended. */
        int64_t alone = seen;
        while (seen < real && (!p->causal || tokens[seen] <= before + first + count - 1)) seen++;
        alone = p->causal ? alone : real;
        for (int64_t begin = 0; begin < seen; begin += BLOCK) {
            int64_t wide = lesser(BLOCK, seen - begin);
            transpose(wide, p->size, keys + begin * size, size, standing, BLOCK);
            for (int64_t strip = 0; strip < count; strip += STRIP)
                product(lesser(STRIP, count - strip), padded(wide), p->size, queries + strip * size, size, 1, standing, BLOCK,
                        scores + strip * BLOCK, BLOCK, 0);
            for (int64_t i = 0; i < count; i++) {
                int64_t until = wide;
                while (begin + until > alone && until && tokens[begin + until - 1] > before + first + i) until--;
                for (int64_t c = 0; c < until; c++) {
                    float score = scores[i * BLOCK + c], *mine = best + i * K;
                    int32_t *whose = top + i * K;
                    if (filled[i] == K && score <= mine[0]) continue;
                    if (score != score) spoiled[i] = score;
                    else if (filled[i] < K) append(mine, whose, filled + i, K, score, (int32_t)(begin + c));
                    else replace(mine, whose, K, score, (int32_t)(begin + c));
                }
            }
        }
        for (int64_t i = 0; i < count; i++) {
            draw of = draw_of(&p->dropout, b * p->heads + h, first + i);
            softmax(best + i * K, filled[i]);
            memset(out, 0, sizeof(float) * values);
            for (int64_t j = 0; j < filled[i]; j++) {
                float weight = best[i * K + j] + spoiled[i], *value = rows + top[i * K + j] * values;
                top[i * K + j] = tokens[top[i * K + j]];
                add_row(values, weight * stay(p, of, top[i * K + j]), value, out);
            }
            for (int64_t e = 0; e < p->values && !filled[i]; e++) out[e] = spoiled[i];
            for (int64_t j = filled[i]; j < K; j++) top[i * K + j] = -1;
            write_row(p->out, p->bf16, b, h, first + i, p->values, out);
        }
    }
    free(memory), free(tokens);
    return 0;
}

int forward(const problem *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < p->batch * p->heads; item++) failed |= head(p, item / p->heads, item % p->heads);
    return failed;
}
"""
)

BACKWARD = (
    _HEADS
    + r"""
typedef struct { problem all; tensor grad, dq, dk, dv; } backward_problem;
SIZE_OF(topk_backward, backward_problem)

static int gradients(const backward_problem *g, int64_t b, int64_t h) {
    const problem *p = &g->all;
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, K = p->kept;
    float *memory = floats(2 * S * (size + values) + 2 * size + values + 3 * K);
    if (!memory) return 1;
    float *keys = memory, *rows = keys + S * size, *dk = rows + S * values, *dv = dk + S * size, *query = dv + S * values;
    float *dq = query + size, *grad = dq + size, *weights = grad + values, *change = weights + K, *stays = change + K;
    memset(dk, 0, sizeof(float) * S * (size + values));
    read_rows(p->k, p->bf16, b, h, NULL, S, p->size, size, keys);
    read_rows(p->v, p->bf16, b, h, NULL, S, p->values, values, rows);
    for (int64_t i = 0; i < p->length; i++) {
        const int32_t *top = p->top + ((b * p->heads + h) * p->length + i) * K;
        draw of = draw_of(&p->dropout, b * p->heads + h, i);
        int64_t count = 0;
        float share = 0;
        while (count < K && top[count] >= 0) count++;
        read_query(p, b, h, i, size, query);
        read_row(g->grad, p->bf16, b, h, i, p->values, grad);
        for (int64_t e = p->values; e < values; e++) grad[e] = 0.0f;
        memset(dq, 0, sizeof(float) * size);
        for (int64_t j = 0; j < count; j++) weights[j] = dot(size, query, keys + top[j] * size);
        softmax(weights, count);
        for (int64_t j = 0; j < count; j++) stays[j] = stay(p, of, top[j]);
        for (int64_t j = 0; j < count; j++)
            share += weights[j] * (change[j] = stays[j] * dot(values, grad, rows + top[j] * values));
        for (int64_t j = 0; j < count; j++) {
            float much = weights[j] * (change[j] - share);
            add_row(size, much, keys + top[j] * size, dq), add_row(size, much, query, dk + top[j] * size);
            add_row(values, stays[j] * weights[j], grad, dv + top[j] * values);
        }
        scale_row(size, p->scale, dq);
        write_row(g->dq, p->bf16, b, h, i, p->size, dq);
    }
    for (int64_t j = 0; j < S; j++) {
        write_row(g->dk, p->bf16, b, h, j, p->size, dk + j * size);
        write_row(g->dv, p->bf16, b, h, j, p->values, dv + j * values);
    }
    free(memory);
    return 0;
}

int backward(const backward_problem *g) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(g->all.threads) reduction(| : failed)
    for (int64_t item = 0; item < g->all.batch * g->all.heads; item++)
        failed |= gradients(g, item / g->all.heads, item % g->all.heads);
    return failed;
}
"""
)
