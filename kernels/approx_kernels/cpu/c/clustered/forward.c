/* Clustered attention in C, forward: one pass over keys and values for all mean queries of a head. */

#include "clustered/heads.h"
#include "largest.h"

typedef struct {
    float *scores, *largest, *sums, *outputs, *block, *standing, *lying;
    candidates *top;
} pass;

/* Outputs of the mean queries, not yet divided by the sums, and candidates for their largest keys. */
static void attend_means(const head *x, pass *w) {
    const problem *all = x->all;
    int64_t wide = x->values, c, j;
    for (c = 0; c < x->clusters; c++) w->largest[c] = -INFINITY, w->sums[c] = 0;
    memset(w->outputs, 0, sizeof(float) * x->clusters * wide);
    for (int64_t begin = 0; begin < x->keys; begin += BLOCK) {
        int64_t count = lesser(BLOCK, x->keys - begin), full = padded(count);
        int32_t keys_at[BLOCK];
        for (j = 0; j < BLOCK; j++) keys_at[j] = (int32_t)(begin + j);
        read_block(x, all->k, begin, count, all->size, w->block);
        right keys = columns_right(x->half, count, all->size, w->block, x->size, w->standing);
        multiply(x->clusters, full, all->size, x->means, x->size, 1, keys, 0, 0, w->scores, BLOCK, 0);
        if (x->residues)
            multiply(x->clusters, full, all->size, x->residues, x->size, 1, keys, 0, 0, w->scores, BLOCK, 1);
        for (c = 0; c < x->clusters; c++) {
            float *row = w->scores + c * BLOCK;
            if (x->kept && x->first[c] < x->first[c + 1]) offer(w->top + c, count, row, keys_at);
            float fade = softmax_step(count, row, w->largest + c, w->sums + c);
            if (fade != 1.0f) scale_row(wide, fade, w->outputs + c * wide);
            if (all->dropout.bound) drop_stretch(&all->dropout, (draw){x->before[c], x->between[c]}, begin, count, row);
        }
        read_block(x, all->v, begin, count, all->values, w->block);
        right values = rows_right(x->half, count, wide, w->block, wide, w->lying);
        multiply(x->clusters, wide, count, w->scores, BLOCK, 1, values, 0, 0, w->outputs, wide, 1);
    }
}

/* Subtract the largest keys from the output of the mean query of cluster c, and return their mass. */
static float take_share(const head *x, int64_t c, const int32_t *top, right keys, const float *values, int64_t width,
                        float *scores, float sums, float *rest) {
    if (x->kept == x->keys) {
        /* Exactly nothing remains without them. */
        memset(rest, 0, sizeof(float) * x->all->values);
        return 1;
    }
    /* The same bits as before: shares of one sum. */
    multiply(1, width, x->all->size, x->means + c * x->size, x->size, 1, keys, 0, 0, scores, width, 0);
    if (x->residues)
        multiply(1, width, x->all->size, x->residues + c * x->size, x->size, 1, keys, 0, 0, scores, width, 1);
    float mass = weigh_row(x->kept, sums, scores);
    for (int64_t i = 0; i < x->kept; i++) {
        float share = scores[i];
        share *= kept_key(&x->all->dropout, (draw){x->before[c], x->between[c]}, top[i]);
        for (int64_t e = 0; e < x->all->values; e++) rest[e] -= share * values[i * x->values + e];
    }
    return mass;
}

static int forward_head(const problem *all, int64_t b, int64_t h) {
    head x;
    pass w = {0};
    int failed = 1;
    int64_t item = b * all->heads + h, width, c, i, r;
    float *own = NULL, *queries = NULL;
    if (!gather(&x, all, item)) goto done;
    width = padded(x.kept);
    int64_t block = BLOCK * greater(x.size, x.values);
    w.scores = floats(x.clusters * (BLOCK + 2 + x.values) + room(all->size, BLOCK) + room(BLOCK, x.values) + block);
    queries = floats(MEMBERS * (x.size + x.values));
    if (!w.scores || !queries) goto done;
    w.outputs = w.scores + x.clusters * BLOCK, w.standing = w.outputs + x.clusters * x.values;
    w.lying = w.standing + room(all->size, BLOCK), w.sums = w.lying + room(BLOCK, x.values);
    w.largest = w.sums + x.clusters, w.block = w.largest + x.clusters;
    if (x.kept) {
        int64_t rooms = room(all->size, width) + room(width, x.values);
        int64_t numbers = MEMBERS * width + width * (x.size + x.values) + rooms;
        w.top = candidates_of(x.clusters, x.kept, BLOCK);
        own = floats(numbers);
        if (!w.top || !own) goto done;
        memset(own, 0, sizeof(float) * numbers);
    }
    attend_means(&x, &w);
    float *made = queries + MEMBERS * x.size, *keys = own, *values = keys + width * x.size,
          *weights = values + width * x.values;
    float *standing = weights + MEMBERS * width, *lying = standing + room(all->size, width);
    right asked = {0}, given = {0};
    for (c = 0; c < x.clusters; c++) {
        int64_t place = item * all->most_clusters + c, end = x.first[c + 1];
        float *rest = all->rest + place * all->values, mass = 0, sums = w.largest[c] + logf(w.sums[c]);
        for (i = 0; i < all->values; i++) rest[i] = w.outputs[c * x.values + i] / w.sums[c];
        all->sums[place] = sums;
        if (x.kept && x.first[c] < end) {
            int32_t *top = all->top + place * all->kept;
            settle(w.top + c);
            memcpy(top, w.top[c].keys, sizeof(int32_t) * x.kept);
            read_list(&x, top, keys, values);
            asked = columns_right(x.half, x.kept, all->size, keys, x.size, standing);
            given = rows_right(x.half, x.kept, x.values, values, x.values, lying);
            mass = take_share(&x, c, top, asked, values, width, weights, sums, rest);
        }
        all->mass[place] = mass;
        for (int64_t from = x.first[c]; from < end; from += MEMBERS) {
            int64_t rows = end - from < MEMBERS ? end - from : MEMBERS;
            if (x.kept) {
                read_queries(&x, from, rows, queries);
                multiply(rows, width, all->size, queries, x.size, 1, asked, 0, 0, weights, width, 0);
                softmax_rows(weights, rows, x.kept, width);
                if (all->dropout.bound) drop_members(&x, from, rows, width, weights);
                multiply(rows, x.values, x.kept, weights, width, 1, given, 0, 0, made, x.values, 0);
            }
            for (r = 0; r < rows; r++)
                for (i = 0; i < all->values; i++)
                    made[r * x.values + i] = rest[i] + (x.kept ? mass * made[r * x.values + i] : 0);
            write_rows(all->out, all->bf16, x.b, x.h, x.order, from, rows, all->values, made);
        }
    }
    failed = 0;
done:
    release(&x), free(w.scores), free(w.top), free(own), free(queries);
    return failed;
}

int forward(const problem *all) { return ANY_HEAD_FAILS(all, all->clusters[b] && forward_head(all, b, h)); }
