"""Clustered attention in C, forward: one pass over keys and values for all mean queries of a head."""

from approx_kernels.clustered.heads_c import HEADS

FORWARD = (
    HEADS
    + r"""
/* A score and a key in one number: larger for larger scores, and for lower keys among equal ones. */
INLINE uint64_t candidate(float score, int64_t key) {
    int32_t bits;
    memcpy(&bits, &score, 4);
    uint32_t ordered = (uint32_t)bits ^ (bits < 0 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)ordered << 32 | (uint32_t)~(uint32_t)key;
}
INLINE float score_of(uint64_t found) {
    uint32_t ordered = (uint32_t)(found >> 32), bits = ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu);
    float score;
    memcpy(&score, &bits, 4);
    return score;
}

/* Bring the k largest of n to the front; quickselect. */
static void select_largest(uint64_t *x, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        uint64_t a = x[low], b = x[(low + high) / 2], c = x[high];
        uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) { uint64_t y = x[i]; x[i++] = x[j], x[j--] = y; }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

static int ascending(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

typedef struct { float *keys, *values, *scores, *largest, *sums, *outputs; uint64_t *found; int64_t room, *count; } pass;

/* What the mean queries attend to, not yet divided by the sums, and candidates for their largest keys. */
static void attend_means(const head *x, pass *w) {
    int64_t lanes = x->lanes, wide = x->values, c, j;
    for (c = 0; c < lanes; c++) w->largest[c] = -1e30f, w->sums[c] = 0;
    memset(w->outputs, 0, sizeof(float) * x->clusters * wide);
    float *seen = w->largest + lanes, *fade = seen + lanes, *floor = fade + lanes;
    for (c = 0; c < x->clusters; c++) w->count ? (w->count[c] = 0) : 0, floor[c] = -INFINITY;
    for (int64_t begin = 0; begin < x->keys; begin += BLOCK) {
        int64_t count = score_block(x, begin, w->keys, w->scores);
        for (j = 0; j < count; j++) read_value(x, begin + j, w->values + j * wide);
        for (c = 0; c < lanes; c += WIDTH) {
            vf most = *(vf *)(w->scores + c);
            for (j = 1; j < count; j++) most = larger(most, *(vf *)(w->scores + j * lanes + c));
            *(vf *)(seen + c) = most;
        }
        for (c = 0; w->count && c < x->clusters; c++) {
            if (seen[c] < floor[c]) continue;
            uint64_t *found = w->found + c * w->room;
            for (j = 0; j < count; j++) {
                float score = w->scores[j * lanes + c];
                if (score < floor[c]) continue;
                found[w->count[c]++] = candidate(score, begin + j);
                if (w->count[c] < w->room) continue;
                select_largest(found, w->room, x->kept);
                w->count[c] = x->kept;
                floor[c] = INFINITY;
                for (int64_t i = 0; i < x->kept; i++) {
                    float low = score_of(found[i]);
                    floor[c] = low < floor[c] ? low : floor[c];
                }
            }
        }
        for (c = 0; c < lanes; c += WIDTH) {
            vf most = larger(*(vf *)(w->largest + c), *(vf *)(seen + c));
            vf factor = vexp(*(vf *)(w->largest + c) - most), sum = {0};
            for (j = 0; j < count; j++) {
                vf *at = (vf *)(w->scores + j * lanes + c);
                sum += *at = vexp(*at - most);
            }
            *(vf *)(w->sums + c) = *(vf *)(w->sums + c) * factor + sum;
            *(vf *)(w->largest + c) = most, *(vf *)(fade + c) = factor;
        }
        for (c = 0; c < x->clusters; c++)
            if (fade[c] != 1.0f)
                for (j = 0; j < wide; j++) w->outputs[c * wide + j] *= fade[c];
        product(x->clusters, wide, count, w->scores, 1, lanes, w->values, wide, w->outputs, wide, 1);
    }
}

/* Sort out the largest keys of a cluster and take their share from what its mean query attends to. */
static void take_top(const head *x, pass *w, int64_t c, int32_t *top, float sums, float *mass, float *rest, float *row) {
    uint64_t *found = w->found + c * w->room;
    if (w->count[c] > x->kept) select_largest(found, w->count[c], x->kept);
    for (int64_t i = 0; i < x->kept; i++) top[i] = (int32_t)~(uint32_t)found[i];
    *mass = 0;
    if (x->kept == x->keys) {
        /* Nothing is left beside them, exactly. */
        *mass = 1;
        memset(rest, 0, sizeof(float) * x->all->values);
    } else
        for (int64_t i = 0; i < x->kept; i++) {
            float weight = expf(score_of(found[i]) - sums);
            read_value(x, top[i], row);
            for (int64_t e = 0; e < x->all->values; e++) rest[e] -= weight * row[e];
            *mass += weight;
        }
    qsort(top, x->kept, sizeof(int32_t), ascending);
}

static int forward_head(const problem *all, int64_t item) {
    head x;
    pass w = {0};
    int failed = 1;
    int64_t width, c, i, r;
    float *own = NULL;
    if (!gather(&x, all, item)) goto done;
    width = padded(x.kept);
    w.room = x.kept + (x.kept > 64 ? x.kept : 64);
    w.keys = floats(BLOCK * (x.size + x.values + x.lanes) + 5 * x.lanes + x.clusters * x.values);
    if (!w.keys) goto done;
    memset(w.keys, 0, sizeof(float) * BLOCK * (x.size + x.values));
    w.values = w.keys + BLOCK * x.size, w.scores = w.values + BLOCK * x.values;
    w.sums = w.scores + BLOCK * x.lanes, w.largest = w.sums + x.lanes;
    w.outputs = w.sums + 5 * x.lanes;
    if (x.kept) {
        w.count = malloc(sizeof(int64_t) * x.clusters * (w.room + 1));
        own = floats(MEMBERS * (x.size + x.values + width) + width * (2 * x.size + x.values));
        if (!w.count || !own) goto done;
        w.found = (uint64_t *)(w.count + x.clusters);
        memset(own, 0, sizeof(float) * (MEMBERS * (x.size + x.values + width) + width * (2 * x.size + x.values)));
    }
    attend_means(&x, &w);
    float *queries = own, *outputs = queries + MEMBERS * x.size, *weights = outputs + MEMBERS * x.values;
    float *keys = weights + MEMBERS * width, *across = keys + width * x.size, *values = across + x.size * width;
    for (c = 0; c < x.clusters; c++) {
        int64_t place = item * all->most_clusters + c;
        float *rest = all->rest + place * all->values, sum = w.sums[c], mass = 0;
        for (i = 0; i < all->values; i++) rest[i] = w.outputs[c * x.values + i] / sum;
        all->sums[place] = w.largest[c] + logf(sum);
        if (x.first[c] == x.first[c + 1]) continue;
        int32_t *top = all->top + place * all->kept;
        if (x.kept) {
            take_top(&x, &w, c, top, all->sums[place], &mass, rest, outputs);
            all->mass[place] = mass;
            gather_keys(&x, top, keys, across, values, width);
        }
        for (int64_t from = x.first[c]; from < x.first[c + 1]; from += MEMBERS) {
            int64_t rows = x.first[c + 1] - from < MEMBERS ? x.first[c + 1] - from : MEMBERS;
            for (r = 0; x.kept && r < rows; r++) {
                read_query(&x, x.order[from + r], queries + r * x.size);
                for (i = 0; i < x.size; i++) queries[r * x.size + i] *= all->scale;
            }
            if (x.kept) {
                product(rows, width, all->size, queries, x.size, 1, across, width, weights, width, 0);
                softmax_rows(weights, rows, x.kept, width);
                product(rows, x.values, x.kept, weights, width, 1, values, x.values, outputs, x.values, 0);
            }
            for (r = 0; r < rows; r++) {
                float *row = x.kept ? outputs + r * x.values : rest;
                for (i = 0; x.kept && i < all->values; i++) row[i] = rest[i] + mass * row[i];
                write_row(all->out, all->bf16, x.b, x.h, token(x.queries_at, x.order[from + r]), all->values, row);
            }
        }
    }
    failed = 0;
done:
    release(&x), free(w.keys), free(w.count), free(own);
    return failed;
}

int forward(const problem *all) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(all->threads) reduction(| : failed)
    for (int64_t item = 0; item < all->batch * all->heads; item++)
        if (all->clusters[item / all->heads]) failed |= forward_head(all, item);
    return failed;
}
"""
)
