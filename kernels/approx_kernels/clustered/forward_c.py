"""Clustered attention in C, forward: one pass over keys and values for all mean queries of a head."""

from approx_kernels.clustered.heads_c import HEADS

FORWARD = (
    HEADS
    + r"""
/* A score and a key in one number: larger for larger scores, and for lower keys among equal ones. */
INLINE uint64_t candidate(float score, int32_t key) {
    int32_t bits;
    memcpy(&bits, &score, 4);
    uint32_t ordered = (uint32_t)bits ^ (bits < 0 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)ordered << 32 | ~(uint32_t)key;
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

/* Candidates for the largest keys of one mean query: those at or above a floor that at least K of them reach. */
typedef struct { float *scores, floor; int32_t *keys; int64_t count; } candidates;

static int64_t reaching(const candidates *x, float floor) {
    int64_t found = 0;
    for (int64_t i = 0; i < x->count; i++) found += x->scores[i] >= floor;
    return found;
}

/* Drop most of those that are not among the k largest, by halving: cheaper than to sort them out. */
static void thin(candidates *x, int64_t k) {
    float low = x->scores[0], high = low;
    for (int64_t i = 1; i < x->count; i++) {
        low = x->scores[i] < low ? x->scores[i] : low;
        high = x->scores[i] > high ? x->scores[i] : high;
    }
    for (int step = 0; step < 12; step++) {
        float middle = 0.5f * (low + high);
        int64_t found = reaching(x, middle);
        if (found < k) high = middle; else low = middle;
        if (found >= k && found <= k + k / 4) break;
    }
    if (reaching(x, low) < k) return;
    int64_t left = 0;
    for (int64_t i = 0; i < x->count; i++) {
        float score = x->scores[i];
        int32_t key = x->keys[i];
        x->scores[left] = score, x->keys[left] = key;
        left += score >= low;
    }
    x->count = left, x->floor = low;
}

/* Drop all but the k largest. */
static void settle(candidates *x, int64_t k, uint64_t *scratch) {
    for (int64_t i = 0; i < x->count; i++) scratch[i] = candidate(x->scores[i], x->keys[i]);
    select_largest(scratch, x->count, k);
    for (int64_t i = 0; i < k; i++) {
        uint32_t ordered = (uint32_t)(scratch[i] >> 32), bits = ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu);
        memcpy(x->scores + i, &bits, 4);
        x->keys[i] = (int32_t)~(uint32_t)scratch[i];
        x->floor = i && x->floor < x->scores[i] ? x->floor : x->scores[i];
    }
    x->count = k;
}

static int ascending(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

typedef struct { float *scores, *largest, *sums, *outputs, *given; candidates *top; uint64_t *scratch; int64_t room; } pass;

/* What the mean queries attend to, not yet divided by the sums, and candidates for their largest keys. */
static void attend_means(const head *x, pass *w) {
    int64_t lanes = x->lanes, wide = x->values, c, j;
    for (c = 0; c < lanes; c++) w->largest[c] = -1e30f, w->sums[c] = 0;
    memset(w->outputs, 0, sizeof(float) * x->clusters * wide);
    float *seen = w->largest + lanes, *fade = seen + lanes;
    for (int64_t begin = 0; begin < x->keys; begin += BLOCK) {
        int64_t count = score_block(x, begin, w->scores);
        for (c = 0; c < lanes; c += WIDTH) {
            vf most = *(vf *)(w->scores + c);
            for (j = 1; j < count; j++) most = larger(most, *(vf *)(w->scores + j * lanes + c));
            *(vf *)(seen + c) = most;
        }
        for (c = 0; x->kept && c < x->clusters; c++) {
            candidates *top = w->top + c;
            if (seen[c] < top->floor || x->first[c] == x->first[c + 1]) continue;
            if (top->count + BLOCK > w->room) thin(top, x->kept);
            if (top->count + BLOCK > w->room) settle(top, x->kept, w->scratch);
            for (j = 0; j < count; j++) {
                float score = w->scores[j * lanes + c];
                top->scores[top->count] = score, top->keys[top->count] = (int32_t)(begin + j);
                top->count += !(score < top->floor);
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
        if (x->all->dropout.bound) drop_block(x, begin, count, w->scores);
        right values = rows_right(x->half, count, wide, x->v + begin * wide, wide, w->given);
        multiply(x->clusters, wide, count, w->scores, 1, lanes, values, 0, 0, w->outputs, wide, 1);
    }
}

/* Take the share of the largest keys from what the mean query of cluster c attends to, and return their mass. */
static float take_share(const head *x, int64_t c, const int32_t *top, right keys, const float *values, int64_t width,
                        float *scores, float sums, float *rest) {
    if (x->kept == x->keys) {
        /* Nothing is left beside them, exactly. */
        memset(rest, 0, sizeof(float) * x->all->values);
        return 1;
    }
    float mass = 0;
    /* As in `score_block`, to the bit: shares of one sum. */
    multiply(1, width, x->all->size, x->means + c * x->size, x->size, 1, keys, 0, 0, scores, width, 0);
    if (x->half) multiply(1, width, x->all->size, x->residues + c * x->size, x->size, 1, keys, 0, 0, scores, width, 1);
    for (int64_t i = 0; i < width; i += WIDTH) *(vf *)(scores + i) = vexp(*(vf *)(scores + i) - sums);
    for (int64_t i = 0; i < x->kept; i++) {
        float share = scores[i];
        mass += share;
        if (x->all->dropout.bound) share *= kept_key(&x->all->dropout, (draw){x->before[c], x->between[c]}, top[i]);
        for (int64_t e = 0; e < x->all->values; e++) rest[e] -= share * values[i * x->values + e];
    }
    return mass;
}

static int forward_head(const problem *all, int64_t item) {
    head x;
    pass w = {0};
    int failed = 1;
    int64_t width, c, i, r;
    float *own = NULL, *out = NULL;
    if (!gather(&x, all, item)) goto done;
    width = padded(x.kept), w.room = 2 * x.kept + 2 * BLOCK;
    w.scores = floats(BLOCK * x.lanes + 4 * x.lanes + x.clusters * x.values + room(BLOCK, x.values));
    out = floats(x.n * x.values);
    if (!w.scores || !out) goto done;
    w.sums = w.scores + BLOCK * x.lanes, w.largest = w.sums + x.lanes, w.outputs = w.sums + 4 * x.lanes;
    w.given = w.outputs + x.clusters * x.values;
    if (x.kept) {
        int64_t rooms = room(all->size, width) + room(width, x.values);
        int64_t numbers = MEMBERS * width + width * (x.size + x.values) + rooms;
        w.top = malloc((sizeof(candidates) + 8 * w.room) * x.clusters + 8 * w.room);
        own = floats(numbers);
        if (!w.top || !own) goto done;
        memset(own, 0, sizeof(float) * numbers);
        w.scratch = (uint64_t *)(w.top + x.clusters);
        float *scores = (float *)(w.scratch + w.room);
        int32_t *keys = (int32_t *)(scores + x.clusters * w.room);
        for (c = 0; c < x.clusters; c++)
            w.top[c] = (candidates){.scores = scores + c * w.room, .keys = keys + c * w.room, .floor = -INFINITY};
    }
    attend_means(&x, &w);
    float *keys = own, *values = keys + width * x.size, *weights = values + width * x.values;
    float *standing = weights + MEMBERS * width, *lying = standing + room(all->size, width);
    right asked = {0}, given = {0};
    for (c = 0; c < x.clusters; c++) {
        int64_t place = item * all->most_clusters + c, end = x.first[c + 1];
        float *rest = all->rest + place * all->values, mass = 0, sums = w.largest[c] + logf(w.sums[c]);
        for (i = 0; i < all->values; i++) rest[i] = w.outputs[c * x.values + i] / w.sums[c];
        all->sums[place] = sums;
        if (x.kept && x.first[c] < end) {
            int32_t *top = all->top + place * all->kept;
            thin(w.top + c, x.kept);
            settle(w.top + c, x.kept, w.scratch);
            memcpy(top, w.top[c].keys, sizeof(int32_t) * x.kept);
            qsort(top, x.kept, sizeof(int32_t), ascending);
            gather_keys(&x, top, keys, values);
            asked = columns_right(x.half, x.kept, all->size, keys, x.size, standing);
            given = rows_right(x.half, x.kept, x.values, values, x.values, lying);
            mass = take_share(&x, c, top, asked, values, width, weights, sums, rest);
        }
        all->mass[place] = mass;
        for (int64_t from = x.first[c]; from < end; from += MEMBERS) {
            int64_t rows = end - from < MEMBERS ? end - from : MEMBERS;
            float *made = out + from * x.values;
            if (x.kept) {
                multiply(rows, width, all->size, x.q + from * x.size, x.size, 1, asked, 0, 0, weights, width, 0);
                softmax_rows(weights, rows, x.kept, width);
                if (all->dropout.bound) drop_members(&x, from, rows, width, weights);
                multiply(rows, x.values, x.kept, weights, width, 1, given, 0, 0, made, x.values, 0);
            }
            for (r = 0; r < rows; r++)
                for (i = 0; i < all->values; i++)
                    made[r * x.values + i] = rest[i] + (x.kept ? mass * made[r * x.values + i] : 0);
        }
    }
    write_rows(all->out, all->bf16, x.b, x.h, x.queries_at, x.n, all->values, x.values, x.places, out);
    failed = 0;
done:
    release(&x), free(w.scores), free(w.top), free(own), free(out);
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
