/* Stretches of sorted keys that queries may see, found in C round by round; see bucket_lists in lsh/cpu.py. */

#include "vectors.h"

/* Two bounds of ranks, and two of distances: `entry` of tiles.h. */
typedef struct {
    int32_t begin, end, low, high;
} entry;

typedef struct {
    int64_t batch, heads, rounds, length, keys, cluster, doublings, ranks, most, rows, far, levels, shared, threads;
    const int32_t *by_query, *by_key; /* codes [B, H, R, L] and [B, H / shared, R, S]; with levels one of each */
    const uint8_t *mask; /* [B, S], 0 at padding; NULL when all keys are real */
    int32_t *query_order; /* [R, B, H, L]: queries by where their stretch begins, those that see nothing last */
    int32_t *key_order; /* [R, B, H, ranks]: keys by rank */
    int64_t *blocks, *starts; /* [B H + 1] and [B H R most + 1]: see `attend_own_lists` */
    entry *entries; /* [B H R most] */
    int64_t *count; /* [B H R]: blocks of each round */
    int32_t *seen, *places; /* `stretches` of attention to lists, and `places`, -1 where no rank is; NULL */
} stretching;
SIZE_OF(stretching, stretching)

/* The tables of a round, level by level and key by key, and the part of them that each query sees once its own key is
   in. */
static int look_back(const stretching *p, int64_t item) {
    int64_t b = item / p->rounds / p->heads, r = item % p->rounds, L = p->length, S = p->keys, n = 0, at = 0;
    int64_t own_keys = item / p->rounds / p->shared * p->rounds + r;
    const int32_t *mine = p->by_query + item * L, *theirs = p->by_key + own_keys * S;
    const uint8_t *mask = p->mask ? p->mask + b * S : NULL;
    int64_t place = (r * p->batch * p->heads + item / p->rounds);
    int32_t *query_order = p->query_order + place * L, *key_order = p->key_order + place * p->ranks;
    int64_t all = p->batch * p->heads * p->rounds;
    int32_t *seen = p->seen ? p->seen + place * L : NULL, *entry_of = p->places ? p->places + place * p->ranks : NULL;
    int32_t *real = malloc(sizeof(int32_t) * (S + 2 * L + p->ranks + 2));
    int32_t *bucket = malloc(sizeof(int32_t) * ((int64_t)2 << p->doublings));
    if (!real || !bucket) return free(real), free(bucket), 1;
    int32_t *low = real + S, *end = low + L, *begins = end + L, *filled = bucket + ((int64_t)1 << p->doublings);
    for (int64_t s = 0; s < S; s++) {
        if (mask && !mask[s]) continue;
        at += s < S - L;
        real[n++] = (int32_t)s;
    }
    memset(begins, 0, sizeof(int32_t) * (p->ranks + 2));
    int64_t level = -1, size = 0, base = 0, next = 0;
    /* A single query asks for one bucket, and no other is laid out. */
    int single = L == 1;
    for (int64_t i = 0; i < L; i++) {
        int64_t s = S - L + i;
        low[i] = end[i] = (int32_t)p->ranks;
        if (s < 0 || (mask && !mask[s])) {
            begins[p->ranks + 1]++;
            continue;
        }
        int64_t position = at++, doubled = level < 0 ? 0 : level;
        while (doubled < p->doublings && position >= p->cluster << (doubled + 1)) doubled++;
        int32_t last = ((int32_t)1 << doubled) - 1;
        if (doubled != level) {
            if (p->levels)
                mine = p->by_query + (doubled * all + item) * L,
                theirs = p->by_key + (doubled * (all / p->shared) + own_keys) * S;
            base += size, level = doubled, next = 0;
            size = level < p->doublings ? lesser(n, p->cluster << (level + 1)) : n;
            memset(filled, 0, sizeof(int32_t) * (last + 1));
            for (int64_t j = 0; j < size && !single; j++) filled[theirs[real[j]] & last]++;
            for (int64_t c = 0, sum = base; c <= last; c++) bucket[c] = (int32_t)sum, sum += filled[c], filled[c] = 0;
        }
        int32_t own = mine[i] & last;
        for (; next <= position; next++) {
            int32_t c = theirs[real[next]] & last;
            if (single && c != own) continue;
            int32_t rank = bucket[c] + filled[c]++;
            key_order[rank] = real[next];
            if (entry_of) entry_of[rank] = (int32_t)(base + next), entry_of[all * p->ranks + base + next] = rank;
        }
        int32_t seen = filled[own];
        if (seen) {
            low[i] = bucket[own] + (int32_t)(greater((seen - 1) / p->cluster - 1, 0) * p->cluster);
            end[i] = bucket[own] + seen;
        }
        begins[low[i] + 1]++;
    }
    if (seen) memcpy(seen, low, sizeof(int32_t) * L), memcpy(seen + all * L, end, sizeof(int32_t) * L);
    for (int64_t rank = 0; rank < p->ranks; rank++) begins[rank + 1] += begins[rank];
    for (int64_t i = 0; i < L; i++) query_order[begins[low[i]]++] = (int32_t)i;
    int64_t first = 0, blocks = 0, *starts = p->starts + item * p->most;
    entry *entries = p->entries + item * p->most;
    for (int64_t i = 1; i <= L; i++) {
        if (i < L && low[query_order[i]] == low[query_order[first]] && i - first < p->rows) continue;
        entries[blocks] = (entry){low[query_order[first]], end[query_order[i - 1]], (int32_t)-p->far, -1};
        starts[blocks++] = item * L + first, first = i;
    }
    p->count[item] = blocks, free(real), free(bucket);
    return 0;
}

int stretches(const stretching *p) {
    int failed = 0;
    int64_t items = p->batch * p->heads * p->rounds, total = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < items; item++) failed |= look_back(p, item);
    if (failed) return 1;
    for (int64_t item = 0; item < items; item++) {
        if (item % p->rounds == 0) p->blocks[item / p->rounds] = total;
        memmove(p->starts + total, p->starts + item * p->most, sizeof(int64_t) * p->count[item]);
        memmove(p->entries + total, p->entries + item * p->most, sizeof(entry) * p->count[item]);
        total += p->count[item];
    }
    p->blocks[p->batch * p->heads] = total, p->starts[total] = items * p->length;
    return 0;
}
