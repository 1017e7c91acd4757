/* Causal clustered attention in C, backward: forwards over the queries, then backwards for gradients of the past. */

#include "clustered/causal_heads.h"

enum { BLOCK = 64 }; /* Keys that are multiplied with all centroids at once. */

typedef struct {
    problem all;
    tensor grad, dq, dk, dv;
} backward_problem;
SIZE_OF(causal_clustered_backward, backward_problem)

/* One head. The rest of a centroid, at a boundary, are the keys before it that the centroid does not list. */
typedef struct {
    const backward_problem *all;
    int64_t b, h, size, values, lanes;
    const int32_t *groups, *top;
    const float *most, *peak, *mass;
    float *keys, *v, *dk, *dv; /* [S, D] and [S, E] */
    float *rows, *across; /* centroids, scaled, [R, D] and [D, R] */
    float *weights; /* [S, R], of a key in the rest of each centroid, at the first boundary after it */
    float *mean_key, *mean_value; /* of the rest, [R, D] and [R, E] */
    float *share, *moved, *risen; /* [L], a query's weight of the rest; gradients of its score and of its log mass */
    float *dkeys, *dvalues, *rises; /* gradients of the means, [R, D] and [R, E], and of the log mass, [R] */
    float *dkeys_across, *dvalues_across; /* [D, R] and [E, R] */
    float *queries, *given, *dq, *standing; /* of a strip: [STRIP, D], [STRIP, E], [STRIP, D]; one of them across */
    float *near, *change; /* of a strip, weights in its chunk and gradients of scores, [keys, STRIP] */
    float *own, *own_change; /* of a query, the same for the keys that its centroid lists, [K] */
    int32_t *listed, *lost; /* [S], whether listed; [K] */
    float *dropped; /* [BLOCK, R]; NULL where nothing is dropped */
    uint32_t *before, *between; /* draws of the centroids, [R] */
} head;

/* Queries from token `first` on, scaled, and the gradients of their outputs. */
static void read_queries(const head *x, int64_t first, int64_t deep) {
    const problem *p = &x->all->all;
    read_scaled(p->q, p->bf16, x->b, x->h, NULL, first, deep, p->size, p->scale, x->queries);
    read_rows(x->all->grad, p->bf16, x->b, x->h, NULL, first, deep, p->values, x->given);
}

/* The factor from a weight at one boundary to that at the next; at most 1, since sums of exponentials never fall. */
INLINE float faded(const head *x, int64_t boundary, int64_t r) {
    int64_t now = boundary * x->all->all.rows + r, then = now - x->all->all.rows;
    return expf(x->peak[then] - x->peak[now]) * x->mass[then] / x->mass[now];
}

/* Find the keys that centroid r listed at the boundary before and no longer lists, and their weights, left in `own`. */
static int64_t losers(const head *x, int64_t boundary, int64_t r) {
    const problem *p = &x->all->all;
    int64_t place = boundary * p->rows + r, count = 0;
    const int32_t *now = x->top + place * p->kept, *then = now - p->rows * p->kept;
    for (int64_t j = 0; j < p->kept; j++) x->listed[now[j]] = 1;
    for (int64_t j = 0; boundary && j < p->kept; j++) {
        if (x->listed[then[j]]) continue;
        float score = dot(x->size, x->rows + r * x->size, x->keys + then[j] * x->size);
        x->own[count] = weight_of(score - x->peak[place]) / x->mass[place];
        x->lost[count++] = then[j];
    }
    for (int64_t j = 0; j < p->kept; j++) x->listed[now[j]] = 0;
    return count;
}

/* A key that dropout removes from the rest of a centroid loses only its value. */
INLINE float kept_value(const head *x, int64_t r, int64_t key) {
    return kept_key(&x->all->all.dropout, (draw){x->before[r], x->between[r]}, key);
}

static void drop_values(const head *x, int64_t first, int64_t count, float *weights) {
    drop_lanes(&x->all->all.dropout, x->before, x->between, x->lanes, first, count, weights, x->lanes);
}

/* Weights of a block of keys' values in the rest, [count, R]. */
static const float *value_weights(const head *x, int64_t first, int64_t count) {
    const float *weights = x->weights + first * x->lanes;
    if (!x->dropped) return weights;
    memcpy(x->dropped, weights, sizeof(float) * count * x->lanes);
    drop_values(x, first, count, x->dropped);
    return x->dropped;
}

/* Add the chunk before a boundary to the means. */
static void absorb(const head *x, int64_t boundary) {
    const problem *p = &x->all->all;
    int64_t begin = boundary * p->chunk, size = x->size, values = x->values, lanes = x->lanes,
            place = boundary * p->rows;
    const float *keys = x->keys + begin * size;
    float *weights = x->weights + begin * lanes;
    product(p->chunk, lanes, p->size, keys, size, 1, x->across, lanes, weights, lanes, 0);
    for (int64_t r = 0; r < lanes; r += WIDTH) {
        vf most = {0}, sum = most + 1.0f;
        memcpy(&most, x->peak + place + r, sizeof(float) * lesser(WIDTH, p->rows - r));
        memcpy(&sum, x->mass + place + r, sizeof(float) * lesser(WIDTH, p->rows - r));
        for (int64_t c = 0; c < p->chunk; c++) {
            vf *weight = (vf *)(weights + c * lanes + r);
            *weight = vweight(*weight - most) / sum;
        }
    }
    for (int64_t r = 0; r < p->rows; r++) {
        const int32_t *top = x->top + (place + r) * p->kept;
        float *mean_key = x->mean_key + r * size, *mean_value = x->mean_value + r * values;
        float fade = boundary ? faded(x, boundary, r) : 0.0f;
        for (int64_t j = 0; j < p->kept; j++)
            if (top[j] >= begin) weights[(top[j] - begin) * lanes + r] = 0.0f;
        int64_t count = losers(x, boundary, r);
        scale_row(size, fade, mean_key), add_listed(size, x->lost, count, x->own, x->keys, mean_key);
        for (int64_t j = 0; x->dropped && j < count; j++) x->own[j] *= kept_value(x, r, x->lost[j]);
        scale_row(values, fade, mean_value), add_listed(values, x->lost, count, x->own, x->v, mean_value);
    }
    product(p->rows, size, p->chunk, weights, 1, lanes, keys, size, x->mean_key, size, 1);
    for (int64_t end = begin + p->chunk, first = begin; first < end; first += BLOCK) {
        int64_t count = lesser(BLOCK, end - first);
        product(p->rows, values, count, value_weights(x, first, count), 1, lanes, x->v + first * values, values,
                x->mean_value, values, 1);
    }
}

/* Gradients of one query, and through it of its centroid's listed keys and the rest. `sum` and `along` are sums of its
   exponentials, and of these times the gradients of weights; they include its own chunk already. */
static void through_past(const head *x, int64_t boundary, int64_t at, const float *query, const float *given, draw of,
                         float *sum, float *along, float *dq) {
    const problem *p = &x->all->all;
    int64_t size = x->size, values = x->values, r = x->groups[at], place = boundary * p->rows + r;
    const float *mean_key = x->mean_key + r * size;
    const int32_t *top = x->top + place * p->kept;
    float *own = x->own, *change = x->own_change;
    float tangent = dot(size, query, mean_key) - dot(size, x->rows + r * size, mean_key);
    float share = weight_of(x->peak[place] + logf(x->mass[place]) + tangent - x->most[at]);
    float outer = dot(values, given, x->mean_value + r * values);
    *sum += share, *along += share * outer;
    listed_products(size, top, p->kept, query, x->keys, own);
    listed_products(values, top, p->kept, given, x->v, change);
    *sum += weigh_row(p->kept, x->most[at], own);
    for (int64_t j = 0; x->dropped && j < p->kept; j++) change[j] *= kept_key(&p->dropout, of, top[j]);
    for (int64_t j = 0; j < p->kept; j++) *along += own[j] * change[j];
    float mean = *along / *sum;
    for (int64_t j = 0; j < p->kept; j++) {
        own[j] /= *sum, change[j] = own[j] * (change[j] - mean);
        add_row(size, change[j], query, x->dk + top[j] * size);
        float stays = kept_key(&p->dropout, of, top[j]);
        add_row(values, stays * own[j], given, x->dv + top[j] * values);
    }
    add_listed(size, top, p->kept, change, x->keys, dq);
    x->share[at] = share / *sum, x->moved[at] = x->share[at] * (outer - mean);
    x->risen[at] = x->moved[at] * (1.0f - tangent) - x->share[at] * outer;
    add_row(size, x->moved[at], mean_key, dq);
}

/* Queries from `first` on, of the chunk that begins at `begin`. */
static void through_queries(const head *x, int64_t begin, int64_t first, int64_t deep) {
    const problem *p = &x->all->all;
    int64_t size = x->size, values = x->values, before = p->keys - p->length, wide = padded(deep);
    int64_t seen = first + deep - begin;
    const float *keys = x->keys + begin * size;
    float most[STRIP], sum[STRIP], along[STRIP];
    draws of;
    draw_strip(p, x->b * p->heads + x->h, first - before, deep, &of);
    read_queries(x, first - before, deep);
    meet(0, seen, deep, p->size, keys, x->queries, x->standing, x->near);
    meet(0, seen, deep, p->values, x->v + begin * values, x->given, x->standing, x->change);
    hide_later(seen, deep, x->near);
    drop_near(p, &of, begin, seen, deep, x->change);
    for (int64_t i = 0; i < wide; i++) most[i] = i < deep ? x->most[first + i - before] : 0.0f;
    for (int64_t i = 0; i < wide; i += WIDTH) {
        /* Rounding of very large scores may leave no weight; quotients by the sum must be 0 then. */
        vf weights = (vf){0} + 1e-37f, changes = {0};
        for (int64_t c = 0; c < seen; c++) {
            vf *weight = (vf *)(x->near + c * STRIP + i);
            *weight = vweight(*weight - *(vf *)(most + i));
            weights += *weight, changes += *weight * *(vf *)(x->change + c * STRIP + i);
        }
        *(vf *)(sum + i) = weights, *(vf *)(along + i) = changes;
    }
    memset(x->dq, 0, sizeof(float) * deep * size);
    for (int64_t i = 0; begin && i < deep; i++)
        through_past(x, begin / p->chunk - 1, first + i - before, x->queries + i * size, x->given + i * values,
                     drawn(&of, i), sum + i, along + i, x->dq + i * size);
    for (int64_t i = 0; i < wide; i += WIDTH) {
        vf inverse = 1.0f / *(vf *)(sum + i), mean = *(vf *)(along + i) * inverse;
        for (int64_t c = 0; c < seen; c++) {
            vf *weight = (vf *)(x->near + c * STRIP + i), *change = (vf *)(x->change + c * STRIP + i);
            *weight *= inverse, *change = *weight * (*change - mean);
        }
    }
    drop_near(p, &of, begin, seen, deep, x->near);
    product(deep, size, seen, x->change, 1, STRIP, keys, size, x->dq, size, 1);
    product(seen, size, deep, x->change, STRIP, 1, x->queries, size, x->dk + begin * size, size, 1);
    product(seen, values, deep, x->near, STRIP, 1, x->given, values, x->dv + begin * values, values, 1);
    for (int64_t i = 0; i < deep; i++) {
        scale_row(size, p->scale, x->dq + i * size);
        write_row(x->all->dq, p->bf16, x->b, x->h, first + i - before, p->size, x->dq + i * size);
    }
}

/* Gradients from the queries after a boundary, and all later ones, to the keys that joined the rest there. A key never
   leaves the rest, and its weight fades alike for all queries after a boundary, so gradients are summed from the
   end. */
static void through_means(const head *x, int64_t boundary) {
    const problem *p = &x->all->all;
    int64_t size = x->size, values = x->values, lanes = x->lanes, before = p->keys - p->length;
    int64_t begin = boundary * p->chunk, end = begin + p->chunk, last = lesser(end + p->chunk, p->keys);
    for (int64_t r = 0; boundary + 1 < boundaries(p) && r < p->rows; r++) {
        float fade = faded(x, boundary + 1, r);
        scale_row(size, fade, x->dkeys + r * size), scale_row(values, fade, x->dvalues + r * values);
        x->rises[r] *= fade;
    }
    for (int64_t first = greater(end, before); first < last; first += STRIP) {
        int64_t deep = lesser(STRIP, last - first);
        read_queries(x, first - before, deep);
        for (int64_t i = 0; i < deep; i++) {
            int64_t at = first + i - before, r = x->groups[at];
            add_row(size, x->moved[at], x->queries + i * size, x->dkeys + r * size);
            add_row(size, -x->moved[at], x->rows + r * size, x->dkeys + r * size);
            add_row(values, x->share[at], x->given + i * values, x->dvalues + r * values);
            x->rises[r] += x->risen[at];
        }
    }
    for (int64_t r = 0; r < p->rows; r++) {
        const float *dkey = x->dkeys + r * size, *dvalue = x->dvalues + r * values;
        int64_t count = losers(x, boundary, r);
        for (int64_t j = 0; j < count; j++) {
            int64_t key = x->lost[j];
            float risen = x->rises[r] + dot(size, dkey, x->keys + key * size), stays = kept_value(x, r, key);
            risen += stays * dot(values, dvalue, x->v + key * values);
            add_row(values, stays * x->own[j], dvalue, x->dv + key * values);
            add_row(size, x->own[j], dkey, x->dk + key * size);
            add_row(size, x->own[j] * risen, x->rows + r * size, x->dk + key * size);
        }
    }
    transpose(p->rows, p->size, x->dkeys, size, x->dkeys_across, lanes);
    transpose(p->rows, p->values, x->dvalues, values, x->dvalues_across, lanes);
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t count = lesser(BLOCK, end - first);
        const float *keys = x->keys + first * size, *v = x->v + first * values;
        float *weights = x->weights + first * lanes, *risen = x->near, *dk = x->dk + first * size;
        product(count, lanes, p->size, keys, size, 1, x->dkeys_across, lanes, risen, lanes, 0);
        product(count, values, p->rows, value_weights(x, first, count), lanes, 1, x->dvalues, values,
                x->dv + first * values, values, 1);
        float *through_values = x->dropped ? x->dropped : risen;
        product(count, lanes, p->values, v, values, 1, x->dvalues_across, lanes, through_values, lanes, !x->dropped);
        if (x->dropped) drop_values(x, first, count, x->dropped), add_row(count * lanes, 1.0f, x->dropped, risen);
        product(count, size, p->rows, weights, lanes, 1, x->dkeys, size, dk, size, 1);
        for (int64_t c = 0; c < count; c++)
            for (int64_t r = 0; r < lanes; r += WIDTH)
                *(vf *)(weights + c * lanes + r) *= *(vf *)(risen + c * lanes + r) + *(vf *)(x->rises + r);
        product(count, size, p->rows, weights, lanes, 1, x->rows, size, dk, size, 1);
    }
}

static int gradients(const backward_problem *g, int64_t b, int64_t h) {
    const problem *p = &g->all;
    int64_t S = p->keys, R = p->rows, L = p->length, D = p->size, E = p->values, N = boundaries(p);
    int64_t size = padded(D), values = padded(E), lanes = padded(R), item = b * p->heads + h;
    head x = {.all = g, .b = b, .h = h, .size = size, .values = values, .lanes = lanes};
    int64_t pairs = STRIP * lesser(p->chunk, S), kept = padded(p->kept);
    float *memory = floats(2 * S * (size + values) + R * (3 * size + 2 * values) + N * p->chunk * lanes + 3 * L +
                           (2 * D + E + 1) * lanes + STRIP * (2 * size + values + greater(D, E)) +
                           greater(pairs, BLOCK * lanes) + pairs + 2 * kept + (p->dropout.bound ? BLOCK * lanes : 0));
    x.listed = calloc(S + p->kept + 2 * lanes, sizeof(int32_t));
    if (!memory || !x.listed) return free(memory), free(x.listed), 1;
    x.lost = x.listed + S, x.before = (uint32_t *)x.lost + p->kept, x.between = x.before + lanes;
    draw_queries(&p->dropout, p->batch * p->heads + item, 0, R, x.before, x.between);
    x.dk = memory, x.dv = x.dk + S * size, x.mean_key = x.dv + S * values, x.mean_value = x.mean_key + R * size;
    x.dkeys = x.mean_value + R * values, x.dvalues = x.dkeys + R * size, x.rises = x.dvalues + R * values;
    memset(memory, 0, sizeof(float) * ((S + 2 * R) * (size + values) + lanes));
    x.keys = x.rises + lanes, x.v = x.keys + S * size, x.rows = x.v + S * values, x.across = x.rows + R * size;
    x.weights = x.across + D * lanes, x.share = x.weights + N * p->chunk * lanes, x.moved = x.share + L;
    x.risen = x.moved + L, x.dkeys_across = x.risen + L, x.dvalues_across = x.dkeys_across + D * lanes;
    x.queries = x.dvalues_across + E * lanes, x.given = x.queries + STRIP * size, x.dq = x.given + STRIP * values;
    x.standing = x.dq + STRIP * size, x.change = x.standing + STRIP * greater(D, E), x.own = x.change + pairs;
    x.own_change = x.own + kept, x.near = x.own_change + kept;
    x.dropped = p->dropout.bound ? x.near + greater(pairs, BLOCK * lanes) : NULL;
    x.groups = p->groups + item * L, x.most = p->most + item * L, x.peak = p->peak + item * N * R;
    x.mass = p->mass + item * N * R, x.top = p->top + item * N * R * p->kept;
    read_rows(p->k, p->bf16, b, h, NULL, 0, S, D, x.keys);
    read_rows(p->v, p->bf16, b, h, NULL, 0, S, E, x.v);
    read_rows(p->centroids, 0, b, h, NULL, 0, R, D, x.rows);
    scale_row(R * size, p->scale, x.rows);
    transpose(R, D, x.rows, size, x.across, lanes);
    for (int64_t begin = 0; begin < S; begin += p->chunk) {
        int64_t end = lesser(begin + p->chunk, S);
        for (int64_t first = greater(begin, S - L); first < end; first += STRIP)
            through_queries(&x, begin, first, lesser(STRIP, end - first));
        if (end < S) absorb(&x, begin / p->chunk);
    }
    for (int64_t boundary = N; boundary-- > 0;) through_means(&x, boundary);
    write_rows(g->dk, p->bf16, b, h, NULL, 0, S, D, x.dk);
    write_rows(g->dv, p->bf16, b, h, NULL, 0, S, E, x.dv);
    free(memory), free(x.listed);
    return 0;
}

int backward(const backward_problem *g) { return ANY_HEAD_FAILS(&g->all, gradients(g, b, h)); }
