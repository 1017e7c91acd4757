/* Causal clustered attention in C: one pass over the keys of a head, with a state of the past for each centroid. */

#include "clustered/causal_heads.h"
#include "largest.h"

/* Keys that are multiplied with all centroids at once, and the number of centroids below which keys are not
   transposed. */
enum { BLOCK = 128, FEW = 4 };

/* Keys and values of one head, and for each centroid: the scaled centroid and its rounding errors; its largest keys
   with their scores; and for all other keys the largest score, and relative to it the sums of weights, weighted keys
   and weighted values. */
typedef struct {
    const problem *all;
    int64_t item, size, values;
    float *keys, *v, *rows, *residues, *scores, *standing, *lying, *held_scores, *peak, *mass, *mean_key, *mean_value;
    int32_t *held;
    candidates *lists;
    int half;
} past;

/* Let the scores of a centroid with `count` keys from `begin` on compete for its list. What stays outside remains in
   the row; keys that lose a place which they took in an earlier block go to `lost`, and their number is returned. */
static int64_t compete(past *x, int64_t r, int64_t begin, int64_t count, float *row, int32_t *lost,
                       float *lost_scores) {
    candidates *list = x->lists + r;
    int64_t held = list->count, losers = 0, at = 0;
    int32_t keys[BLOCK];
    for (int64_t c = 0; c < BLOCK; c++) keys[c] = (int32_t)(begin + c);
    memcpy(x->held, list->keys, sizeof(int32_t) * held), memcpy(x->held_scores, list->scores, sizeof(float) * held);
    take(list, count, row, keys), settle(list);
    for (int64_t j = 0; j < held; j++)
        if (at < list->count && list->keys[at] == x->held[j]) at++;
        else lost[losers] = x->held[j], lost_scores[losers++] = x->held_scores[j];
    for (; at < list->count; at++) row[list->keys[at] - begin] = -INFINITY;
    return losers;
}

/* Add `count` keys from `begin` on to the past. */
static void absorb(past *x, int64_t begin, int64_t count) {
    const problem *p = x->all;
    const float *keys = x->keys + begin * x->size, *values = x->v + begin * x->values;
    int64_t wide = padded(count);
    if (p->rows < FEW) {
        for (int64_t r = 0; r < p->rows; r++)
            for (int64_t c = 0; c < count; c++)
                x->scores[r * BLOCK + c] = dot(x->size, x->rows + r * x->size, keys + c * x->size);
    } else {
        right standing = columns_right(x->half, count, p->size, keys, x->size, x->standing);
        multiply(p->rows, wide, p->size, x->rows, x->size, 1, standing, 0, 0, x->scores, BLOCK, 0);
        /* Rounding must not decide which keys a centroid lists. */
        if (x->half) multiply(p->rows, wide, p->size, x->residues, x->size, 1, standing, 0, 0, x->scores, BLOCK, 1);
    }
    for (int64_t r = 0; r < p->rows; r++) {
        float *row = x->scores + r * BLOCK, *mean_key = x->mean_key + r * x->size,
              *mean_value = x->mean_value + r * x->values;
        int32_t lost[BLOCK];
        float lost_scores[BLOCK];
        int64_t losers = p->kept ? compete(x, r, begin, count, row, lost, lost_scores) : 0;
        float most = row_most(losers, lost_scores, row_most(count, row, x->peak[r]));
        float fade = rescale(most, x->peak + r, x->mass + r);
        if (fade != 1.0f) scale_row(x->size, fade, mean_key), scale_row(x->values, fade, mean_value);
        x->mass[r] += weigh_row(count, most, row) + weigh_row(losers, most, lost_scores);
        for (int64_t j = 0; j < losers; j++) {
            float weight = lost_scores[j];
            add_row(x->size, weight, x->keys + lost[j] * x->size, mean_key);
            weight *= kept_key(&p->dropout, draw_of_centroid(p, x->item, r), lost[j]);
            add_row(x->values, weight, x->v + lost[j] * x->values, mean_value);
        }
    }
    right lying = rows_right(x->half, count, x->size, keys, x->size, x->lying);
    multiply(p->rows, x->size, count, x->scores, BLOCK, 1, lying, 0, 0, x->mean_key, x->size, 1);
    for (int64_t r = 0; p->dropout.bound && r < p->rows; r++)
        drop_stretch(&p->dropout, draw_of_centroid(p, x->item, r), begin, count, x->scores + r * BLOCK);
    lying = rows_right(x->half, count, x->values, values, x->values, x->lying);
    multiply(p->rows, x->values, count, x->scores, BLOCK, 1, lying, 0, 0, x->mean_value, x->values, 1);
}

/* Store the past of a boundary for the backward pass. */
static void keep(const past *x, int64_t boundary) {
    const problem *p = x->all;
    int64_t R = p->rows, place = (x->item * boundaries(p) + boundary) * R;
    for (int64_t r = 0; p->kept && r < R; r++)
        memcpy(p->top + (place + r) * p->kept, x->lists[r].keys, sizeof(int32_t) * p->kept);
    memcpy(p->peak + place, x->peak, sizeof(float) * R), memcpy(p->mass + place, x->mass, sizeof(float) * R);
}

/* Add its centroid's listed keys and the rest to a query's output, relative to its largest score, which they may raise;
   the sum of their exponentials is returned. `own` has room for K + 1 scores. */
static float attend_past(const past *x, int64_t r, const float *query, draw of, float *most, float *own, float *out) {
    int64_t kept = x->all->kept;
    const int32_t *top = x->lists[r].keys;
    const float *mean = x->mean_key + r * x->size;
    listed_products(x->size, top, kept, query, x->keys, own);
    /* The tangent of a convex function: close to the remaining mass of a query near the centroid, and never above
       it. */
    float tangent = (dot(x->size, query, mean) - dot(x->size, x->rows + r * x->size, mean)) / x->mass[r];
    own[kept] = x->peak[r] + logf(x->mass[r]) + tangent;
    *most = row_most(kept + 1, own, *most);
    float sum = weigh_row(kept + 1, *most, own), share = own[kept] / x->mass[r];
    if (x->all->dropout.bound) drop_row(&x->all->dropout, of, top, 0, kept, own);
    add_listed(x->values, top, kept, own, x->v, out);
    add_row(x->values, share, x->mean_value + r * x->values, out);
    return sum;
}

/* Memory of a strip: queries, [STRIP, D] and across, outputs, [STRIP, E], scores in the chunk, [keys, STRIP], and of a
   query with its list and the rest; the chunk's values, [keys, E]. */
typedef struct {
    float *queries, *standing, *out, *near, *own;
    right values;
} strip;

/* Queries from `first` on, of the chunk that begins at `begin`. */
static void attend(const past *x, const strip *s, int64_t b, int64_t h, int64_t begin, int64_t first, int64_t deep) {
    const problem *p = x->all;
    int64_t seen = first + deep - begin, at = first - (p->keys - p->length), place = x->item * p->length + at;
    float most[STRIP], sum[STRIP];
    draws of;
    draw_strip(p, x->item, at, deep, &of);
    read_scaled(p->q, p->bf16, b, h, NULL, at, deep, p->size, p->scale, s->queries);
    meet(x->half, seen, deep, p->size, x->keys + begin * x->size, s->queries, s->standing, s->near);
    hide_later(seen, deep, s->near);
    memset(s->out, 0, sizeof(float) * deep * x->values);
    for (int64_t i = 0; i < padded(deep); i += WIDTH) {
        vf highest = (vf){0} - INFINITY;
        for (int64_t c = 0; c < seen; c++) highest = larger(*(vf *)(s->near + c * STRIP + i), highest);
        *(vf *)(most + i) = highest, *(vf *)(sum + i) = (vf){0};
    }
    for (int64_t i = 0; begin && i < deep; i++)
        sum[i] = attend_past(x, p->groups[place + i], s->queries + i * x->size, drawn(&of, i), most + i, s->own,
                             s->out + i * x->values);
    for (int64_t i = 0; i < padded(deep); i += WIDTH) {
        vf total = *(vf *)(sum + i);
        for (int64_t c = 0; c < seen; c++) {
            vf *weight = (vf *)(s->near + c * STRIP + i);
            *weight = vweight(*weight - *(vf *)(most + i)), total += *weight;
        }
        *(vf *)(sum + i) = total;
    }
    drop_near(p, &of, begin, seen, deep, s->near);
    multiply(deep, x->values, seen, s->near, 1, STRIP, s->values, 0, 0, s->out, x->values, 1);
    for (int64_t i = 0; i < deep; i++) {
        if (p->most) p->most[place + i] = most[i];
        scale_row(x->values, 1.0f / sum[i], s->out + i * x->values);
        write_row(p->out, p->bf16, b, h, at + i, p->values, s->out + i * x->values);
    }
}

static int head(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, R = p->rows, K = p->kept;
    past x = {.all = p, .item = b * p->heads + h, .size = size, .values = values};
    strip s = {0};
    int64_t chunk = lesser(p->chunk, S), standing = room(p->size, BLOCK);
    float *lying, *memory = floats(S * (size + values) + R * (3 * size + values + BLOCK + 2) + 2 * standing +
                                   STRIP * (size + values + chunk) + room(BLOCK, greater(size, values)) +
                                   room(chunk, values) + padded(K + 1) + 2 * K);
    x.lists = candidates_of(R, K, BLOCK);
    if (!memory || !x.lists) return free(memory), free(x.lists), 1;
    x.keys = memory, x.v = x.keys + S * size, x.rows = x.v + S * values, x.mean_key = x.rows + R * size;
    x.mean_value = x.mean_key + R * size, x.scores = x.mean_value + R * values, x.standing = x.scores + R * BLOCK;
    s.queries = x.standing + standing, s.out = s.queries + STRIP * size, s.standing = s.out + STRIP * values;
    s.near = s.standing + standing, s.own = s.near + STRIP * chunk, x.residues = s.own + padded(K + 1);
    x.lying = x.residues + R * size, lying = x.lying + room(BLOCK, greater(size, values));
    x.peak = lying + room(chunk, values), x.mass = x.peak + R, x.held_scores = x.mass + R;
    x.held = (int32_t *)(x.held_scores + K);
    memset(x.mean_key, 0, sizeof(float) * R * (size + values));
    read_rows(p->k, p->bf16, b, h, NULL, 0, S, p->size, x.keys);
    read_rows(p->v, p->bf16, b, h, NULL, 0, S, p->values, x.v);
    read_scaled(p->centroids, 0, b, h, NULL, 0, R, p->size, p->scale, x.rows);
    for (int64_t r = 0; r < R; r++) x.peak[r] = -INFINITY, x.mass[r] = 0.0f;
    x.half = begin_halves(p->bf16, p->length);
    if (x.half) rounding(R * size, x.rows, x.residues);
    for (int64_t begin = 0; begin < S; begin += p->chunk) {
        int64_t end = lesser(begin + p->chunk, S);
        if (end > S - p->length)
            s.values = rows_right(x.half, end - begin, values, x.v + begin * values, values, lying);
        for (int64_t first = greater(begin, S - p->length); first < end; first += STRIP)
            attend(&x, &s, b, h, begin, first, lesser(STRIP, end - first));
        for (int64_t key = begin; end < S && key < end; key += BLOCK) absorb(&x, key, lesser(BLOCK, end - key));
        if (p->most && end < S) keep(&x, begin / p->chunk);
    }
    end_halves(x.half), free(memory), free(x.lists);
    return 0;
}

int forward(const problem *p) { return ANY_HEAD_FAILS(p, head(p, b, h)); }
