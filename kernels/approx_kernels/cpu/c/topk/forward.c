/* Exact top-k attention in C: scores are computed a tile at a time, and of each row only the largest are kept. */

#include "topk/heads.h"
#include "largest.h"

static int head(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, K = p->kept, before = S - p->length;
    int64_t real = 0;
    float *memory = floats(S * (size + values + 2) + p->size * BLOCK + ROWS * (size + BLOCK) + values);
    candidates *lists = candidates_of(ROWS, K, BLOCK);
    if (!memory || !lists) return free(memory), free(lists), 1;
    float *keys = memory, *rows = keys + S * size, *standing = rows + S * values, *queries = standing + p->size * BLOCK;
    float *scores = queries + ROWS * size, *out = scores + ROWS * BLOCK;
    int32_t *tokens = (int32_t *)(out + values), *places = tokens + S;
    for (int64_t j = 0; j < S; j++) {
        places[j] = (int32_t)j;
        if (!p->mask || p->mask[b * S + j]) tokens[real++] = (int32_t)j;
    }
    read_rows(p->k, p->bf16, b, h, tokens, 0, real, p->size, keys);
    read_rows(p->v, p->bf16, b, h, tokens, 0, real, p->values, rows);
    for (int64_t first = 0, seen = 0; first < p->length; first += ROWS) {
        int64_t count = lesser(ROWS, p->length - first);
        for (int64_t i = 0; i < count; i++) lists[i].count = 0, lists[i].floor = -INFINITY;
        read_scaled(p->q, p->bf16, b, h, NULL, first, count, p->size, p->scale, queries);
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
                offer(lists + i, until, scores + i * BLOCK, places + begin);
            }
        }
        for (int64_t i = 0; i < count; i++) {
            int32_t *top = p->top + ((b * p->heads + h) * p->length + first + i) * K;
            draw of = draw_of(&p->dropout, b * p->heads + h, first + i);
            candidates *x = lists + i;
            settle(x), softmax(x->count, x->scores);
            memset(out, 0, sizeof(float) * values);
            for (int64_t j = 0; j < x->count; j++) {
                top[j] = tokens[x->keys[j]];
                add_row(values, x->scores[j] * kept_key(&p->dropout, of, top[j]), rows + x->keys[j] * values, out);
            }
            for (int64_t j = x->count; j < K; j++) top[j] = -1;
            write_row(p->out, p->bf16, b, h, first + i, p->values, out);
        }
    }
    free(memory), free(lists);
    return 0;
}

int forward(const problem *p) { return ANY_HEAD_FAILS(p, head(p, b, h)); }
