/* Softmax attention to listed keys in C: a tile of scores at a time, under a running softmax. */

#include "key_lists/tiles.h"
#include "softmax.h"
#include "key_lists/strips.h"

/* Turn scores of a query in columns from begin to end into weights relative to the largest so far. */
INLINE void weigh(const keys_of_block *t, int64_t begin, int64_t end, int32_t position, float *row, int64_t width,
                  float *out, float *top, float *sum) {
    for (int64_t c = begin; t->partial && c < end; c += WIDTH)
        *(vf *)(row + c) = choose(seen(t, c, position), *(vf *)(row + c), (vf){0} - INFINITY);
    float fade = rescale(row_most(end - begin, row + begin, *top), top, sum);
    if (fade != 1.0f) scale_row(width, fade, out);
    float added = weigh_row(end - begin, *top, row + begin);
    if (t->soft) {
        for (int64_t c = begin; c < end; c += WIDTH)
            *(vf *)(row + c) *= smaller(left_over(t, c, position), (vf){0} + 1.0f);
        added = row_sum(end - begin, row + begin);
    }
    *sum += added;
}

static int attend(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), width = padded(p->values), D = p->size, E = p->values;
    int64_t rooms = room(D, KEYS) + room(KEYS, E);
    float *memory = floats((ROWS + KEYS) * (size + width) + rooms + HALF_STRIP * KEYS + 2 * ROWS + p->parts * KEYS);
    if (!memory) return 1;
    float *queries = memory, *keys = queries + ROWS * size, *values = keys + KEYS * size, *out = values + KEYS * width;
    float *standing = out + ROWS * width, *lying = standing + room(D, KEYS), *scores = standing + rooms;
    float *top = scores + HALF_STRIP * KEYS, *sum = top + ROWS, *lse = p->lse + (b * p->heads + h) * p->length;
    /* Buffers that are added to are float32. */
    int narrow = p->bf16 && p->parts == 1, half = begin_halves(p->bf16, p->length);
    int64_t most = half ? HALF_STRIP : STRIP;
    queries_of_block w;
    int64_t last;
    for (blocks_of(p, b * p->heads + h, &w.block, &last); w.block < last; w.block++) {
        queries_from(p, b, h, &w);
        read_scaled(p->q, p->bf16, b, h, w.order, w.first, w.rows, D, p->scale, queries);
        /* The result of earlier parts counts as one weight of 1. */
        if (w.part) read_scaled(p->out, narrow, b, h, w.order, w.first, w.rows, E, 1.0f, out);
        else memset(out, 0, sizeof(float) * w.rows * width);
        for (int64_t i = 0; i < w.rows; i++) {
            top[i] = w.part ? lse[token(w.order, w.first + i)] : -INFINITY;
            if (sees_itself(p, &w, i)) {
                top[i] = own_score(p, b, h, w.at[i], queries + i * size, keys);
                read_row(p->v, p->bf16, b, h, w.at[i], E, out + i * width);
                if (p->dropout.bound)
                    scale_row(width, kept_key(&p->dropout, draw_at(p, b, h, &w, i), w.at[i]), out + i * width);
            }
            sum[i] = top[i] == -INFINITY ? 0.0f : 1.0f;
        }
        keys_of_block t = keys_from(p, b, h, &w, (int32_t *)(sum + ROWS));
        while (next_keys(p, b, &w, &t)) {
            read_rows(p->k, p->bf16, b, h, t.key, 0, t.count, D, keys);
            read_rows(p->v, p->bf16, b, h, t.key, 0, t.count, E, values);
            right asked = columns_right(half, t.count, D, keys, size, standing);
            right given = rows_right(half, t.count, E, values, width, lying);
            for (int64_t strip = 0; strip < w.rows; strip += most) {
                int64_t deep = lesser(most, w.rows - strip), begin, end;
                columns(&t, w.at[strip], w.at[strip + deep - 1], &begin, &end);
                if (begin >= end) continue;
                multiply(deep, end - begin, D, queries + strip * size, size, 1, asked, 0, begin, scores + begin, KEYS,
                         0);
                for (int64_t i = 0; i < deep; i++) {
                    screen(p, &w, strip + i, begin, end, &t);
                    weigh(&t, begin, end, w.at[strip + i], scores + i * KEYS, width, out + (strip + i) * width,
                          top + strip + i, sum + strip + i);
                }
                for (int64_t i = 0; p->dropout.bound && i < deep; i++)
                    drop_row(&p->dropout, draw_at(p, b, h, &w, strip + i), t.key, begin, end, scores + i * KEYS);
                multiply(deep, width, lesser(end, t.count) - begin, scores + begin, KEYS, 1, given, begin, 0,
                         out + strip * width, width, 1);
            }
        }
        for (int64_t i = 0; i < w.rows; i++) {
            int64_t query = token(w.order, w.first + i);
            scale_row(width, share_of(sum[i]), out + i * width);
            write_row(p->out, narrow, b, h, query, E, out + i * width);
            lse[query] = top[i] + logf(sum[i]);
            if (p->totals) p->totals[(b * p->heads + h) * p->length + query] = sum[i];
        }
    }
    end_halves(half), free(memory);
    return 0;
}

int forward(const problem *p) {
    if (!in_bounds(p)) return OUT_OF_BOUNDS;
    return worth_strips(p) ? attend_strips(p) : ANY_HEAD_FAILS(p, attend(p, b, h));
}
