/* Exact top-k attention in C: scores are computed a tile at a time, and of each row only the largest are kept. */

#include "topk/heads.h"

static int head(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, K = p->kept, before = S - p->length,
            real = 0;
    float *memory = floats(S * (size + values) + p->size * BLOCK + ROWS * (size + BLOCK + K) + values);
    int32_t *tokens = malloc(sizeof(int32_t) * (S + ROWS + 1));
    if (!memory || !tokens) {
        free(memory), free(tokens);
        return 1;
    }
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
                product(lesser(STRIP, count - strip), padded(wide), p->size, queries + strip * size, size, 1, standing,
                        BLOCK, scores + strip * BLOCK, BLOCK, 0);
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
