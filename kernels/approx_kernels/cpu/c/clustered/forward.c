/* Clustered attention in C, forward: one pass over keys and values for all mean queries of a head. */

#include "clustered/heads.h"

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
            if (i <= j) {
                uint64_t y = x[i];
                x[i++] = x[j], x[j--] = y;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

/* Candidates for the largest keys of one mean query, in the order of the keys: those at or above a floor that at least K
   of them reach. */
typedef struct {
    float *scores, floor;
    int32_t *keys;
    int64_t count;
} candidates;

/* Let scores of keys, the candidates' own or others, be candidates if they are not too low. */
INLINE void take(candidates *x, int64_t count, const float *scores, const int32_t *keys) {
#if WIDTH == 16
    for (int64_t i = 0; i < count; i += WIDTH) {
        __m512 at = _mm512_loadu_ps(scores + i);
        __m512i key = _mm512_loadu_si512(keys + i);
        __mmask16 there = count - i < WIDTH ? (1u << (count - i)) - 1 : 0xffff;
        __mmask16 in = _mm512_mask_cmp_ps_mask(there, at, _mm512_set1_ps(x->floor), _CMP_NLT_UQ);
        _mm512_storeu_ps(x->scores + x->count, _mm512_maskz_compress_ps(in, at));
        _mm512_storeu_si512(x->keys + x->count, _mm512_maskz_compress_epi32(in, key));
        x->count += __builtin_popcount(in);
    }
#else
    for (int64_t i = 0; i < count; i++) {
        float score = scores[i];
        int32_t key = keys[i];
        x->scores[x->count] = score, x->keys[x->count] = key;
        x->count += !(score < x->floor);
    }
#endif
}

static int64_t reaching(const candidates *x, float floor) {
    int64_t found = 0;
    for (int64_t i = 0; i < x->count; i++) found += x->scores[i] >= floor;
    return found;
}

/* Drop most of those that are not among the k largest, by halving: cheaper than to sort them out. */
static void thin(candidates *x, int64_t k) {
    for (int64_t i = x->count; i < padded(x->count); i++) x->scores[i] = x->scores[0];
    vf most = *(vf *)x->scores, least = -most;
    for (int64_t i = 0; i < x->count; i += WIDTH) {
        vf at = *(vf *)(x->scores + i);
        most = larger(at, most), least = larger(-at, least);
    }
    float low = -lane_most(least), high = lane_most(most);
    for (int step = 0; step < 12; step++) {
        float middle = 0.5f * (low + high);
        int64_t found = reaching(x, middle);
        if (found < k) high = middle;
        else low = middle;
        if (found >= k && found <= k + k / 4) break;
    }
    if (reaching(x, low) < k) return;
    int64_t count = x->count;
    x->count = 0, x->floor = low;
    take(x, count, x->scores, x->keys);
}

/* Drop all but the k largest; the order stays. */
static void settle(candidates *x, int64_t k, uint64_t *scratch) {
    for (int64_t i = 0; i < x->count; i++) scratch[i] = candidate(x->scores[i], x->keys[i]);
    select_largest(scratch, x->count, k);
    uint64_t last = scratch[0];
    for (int64_t i = 1; i < k; i++) last = scratch[i] < last ? scratch[i] : last;
    int64_t left = 0;
    for (int64_t i = 0; left < k; i++) {
        float score = x->scores[i];
        int32_t key = x->keys[i];
        x->scores[left] = score, x->keys[left] = key;
        left += candidate(score, key) >= last;
    }
    x->count = k, x->floor = x->scores[0];
    for (int64_t i = 1; i < k; i++) x->floor = x->scores[i] < x->floor ? x->scores[i] : x->floor;
}

typedef struct {
    float *scores, *largest, *sums, *outputs, *block, *standing, *lying;
    candidates *top;
    uint64_t *scratch;
    int64_t room;
} pass;

/* What the mean queries attend to, not yet divided by the sums, and candidates for their largest keys. */
static void attend_means(const head *x, pass *w) {
    const problem *all = x->all;
    int64_t wide = x->values, c, j;
    for (c = 0; c < x->clusters; c++) w->largest[c] = -1e30f, w->sums[c] = 0;
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
            vf most = (vf){0} + w->largest[c], sum = {0};
            for (j = count; j < full; j++) row[j] = -INFINITY;
            for (j = 0; j < full; j += WIDTH) most = larger(*(vf *)(row + j), most);
            float largest = lane_most(most);
            if (x->kept && x->first[c] < x->first[c + 1]) {
                candidates *top = w->top + c;
                if (top->count + BLOCK > w->room) thin(top, x->kept);
                if (top->count + BLOCK > w->room) settle(top, x->kept, w->scratch);
                take(top, count, row, keys_at);
            }
            for (j = 0; j < full; j += WIDTH) sum += *(vf *)(row + j) = vexp(*(vf *)(row + j) - largest);
            if (largest > w->largest[c]) {
                float fade = expf(w->largest[c] - largest);
                w->sums[c] *= fade, w->largest[c] = largest;
                scale_row(wide, fade, w->outputs + c * wide);
            }
            w->sums[c] += lane_sum(sum);
            if (all->dropout.bound) drop_stretch(&all->dropout, (draw){x->before[c], x->between[c]}, begin, count, row);
        }
        read_block(x, all->v, begin, count, all->values, w->block);
        right values = rows_right(x->half, count, wide, w->block, wide, w->lying);
        multiply(x->clusters, wide, count, w->scores, BLOCK, 1, values, 0, 0, w->outputs, wide, 1);
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
    /* As before, to the bit: shares of one sum. */
    multiply(1, width, x->all->size, x->means + c * x->size, x->size, 1, keys, 0, 0, scores, width, 0);
    if (x->residues)
        multiply(1, width, x->all->size, x->residues + c * x->size, x->size, 1, keys, 0, 0, scores, width, 1);
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
    float *own = NULL, *queries = NULL;
    if (!gather(&x, all, item)) goto done;
    width = padded(x.kept), w.room = padded(2 * x.kept + 2 * BLOCK);
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
            thin(w.top + c, x.kept);
            settle(w.top + c, x.kept, w.scratch);
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
            write_rows(all->out, all->bf16, x.b, x.h, x.order + from, rows, all->values, x.values, made);
        }
    }
    failed = 0;
done:
    release(&x), free(w.scores), free(w.top), free(own), free(queries);
    return failed;
}

int forward(const problem *all) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(all->threads) reduction(| : failed)
    for (int64_t item = 0; item < all->batch * all->heads; item++)
        if (all->clusters[item / all->heads]) failed |= forward_head(all, item);
    return failed;
}
