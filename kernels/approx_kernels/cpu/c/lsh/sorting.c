/* Hashes and orders of tokens in C, as hashing.py and buckets.py specify them: in double here as there. */

#include "vectors.h"

/* Doubles in a vector, and tokens that are projected together. */
enum { LANES = WIDTH / 2, TOGETHER = 8 };
typedef double vd __attribute__((vector_size(4 * WIDTH), aligned(8), may_alias));

INLINE double *doubles(int64_t n) { return (double *)floats(2 * n); }

/* Some tokens of a head [TOGETHER, D] times planes [D, wide], whole vectors. */
static void project(const double *x, int64_t size, const double *planes, int64_t wide, double *to) {
    for (int64_t c = 0; c < wide; c += LANES) {
        vd sum[TOGETHER] = {{0}};
        for (int64_t d = 0; d < size; d++) {
            vd plane = *(const vd *)(planes + d * wide + c);
#pragma GCC unroll 8
            for (int t = 0; t < TOGETHER; t++) sum[t] += x[t * size + d] * plane;
        }
        for (int t = 0; t < TOGETHER; t++) *(vd *)(to + t * wide + c) = sum[t];
    }
}

/* Tokens from the first on; what is left of earlier ones behind the last is projected for nothing. */
INLINE int64_t read_some(tensor x, int bf16, int64_t b, int64_t h, int64_t first, int64_t n, int64_t size, double *to) {
    int64_t count = lesser(TOGETHER, n - first);
    float *row = (float *)(to + TOGETHER * size);
    for (int64_t t = 0; t < count; t++) {
        read_row(x, bf16, b, h, first + t, size, row);
        for (int64_t d = 0; d < size; d++) to[t * size + d] = row[d];
    }
    return count;
}

/* Room for what that reads. */
INLINE double *room_for(int64_t size) {
    double *found = doubles((TOGETHER + 1) * size);
    if (found) memset(found, 0, sizeof(double) * TOGETHER * size);
    return found;
}

typedef struct {
    int64_t batch, heads, rounds, length, keys, size, wide, bf16, threads;
    tensor q, k;
    const double *planes;         /* [D, wide]: a column of each round, then nothing */
    const double *query_lift, *key_lift; /* [R] */
    int32_t *by_query, *by_key;   /* [R, B, H, n]: tokens by rank */
} ordering;
SIZE_OF(ordering, ordering)

/* Tokens by rising numbers, equal ones in their own order. `from` and `to` hold n pairs each. */
static void sort(const float *numbers, int64_t n, uint64_t *from, uint64_t *to, int32_t *order) {
    int64_t counts[4][256] = {{0}};
    for (int64_t i = 0; i < n; i++) {
        float number = numbers[i] + 0.0f; /* There is one zero. */
        uint32_t bits;
        memcpy(&bits, &number, 4);
        bits ^= bits >> 31 ? UINT32_MAX : 1u << 31;
        from[i] = (uint64_t)i << 32 | bits;
        for (int byte = 0; byte < 4; byte++) counts[byte][bits >> 8 * byte & 255]++;
    }
    for (int byte = 0; byte < 4; byte++) {
        int64_t first = 0;
        for (int value = 0; value < 256; value++) {
            int64_t count = counts[byte][value];
            counts[byte][value] = first, first += count;
        }
        for (int64_t i = 0; i < n; i++) to[counts[byte][from[i] >> 8 * byte & 255]++] = from[i];
        uint64_t *other = from;
        from = to, to = other;
    }
    for (int64_t i = 0; i < n; i++) order[i] = (int32_t)(from[i] >> 32);
}

/* Projections [n, wide] and squared lengths [n] of all tokens of a head; the greatest of the latter is returned. */
static double lengths(const ordering *p, tensor x, int64_t b, int64_t h, int64_t n, double *rows, double *products,
                      double *squares) {
    double most = 0.0;
    for (int64_t first = 0; first < n; first += TOGETHER) {
        int64_t count = read_some(x, p->bf16, b, h, first, n, p->size, rows);
        project(rows, p->size, p->planes, p->wide, products + first * p->wide);
        for (int64_t t = 0; t < count; t++) {
            double square = 0.0;
            for (int64_t d = 0; d < p->size; d++) square += rows[t * p->size + d] * rows[t * p->size + d];
            squares[first + t] = square, most = square > most ? square : most;
        }
    }
    return most;
}

int sort_tokens(const ordering *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < p->batch * p->heads; item++) {
        int64_t b = item / p->heads, h = item % p->heads, L = p->length, S = p->keys, most = greater(L, S);
        double *products = doubles((L + S + 2 * TOGETHER) * p->wide + L + S), *rows = room_for(p->size);
        uint64_t *pairs = malloc(sizeof(uint64_t) * 2 * most);
        float *numbers = floats(most);
        if (!products || !rows || !pairs || !numbers) {
            free(products), free(rows), free(pairs), free(numbers), failed = 1;
            continue;
        }
        double *theirs = products + (L + TOGETHER) * p->wide, *squares = theirs + (S + TOGETHER) * p->wide;
        double longest = lengths(p, p->q, b, h, L, rows, products, squares);
        longest += lengths(p, p->k, b, h, S, rows, theirs, squares + L);
        for (int64_t r = 0; r < p->rounds; r++)
            for (int side = 0; side < 2; side++) {
                int64_t n = side ? S : L;
                const double *found = side ? theirs : products, *square = side ? squares + L : squares;
                double lift = side ? p->key_lift[r] : p->query_lift[r];
                for (int64_t i = 0; i < n; i++) {
                    double room = longest - square[i];
                    numbers[i] = (float)(found[i * p->wide + r] + (room > 0.0 ? sqrt(room) : 0.0) * lift);
                }
                int32_t *order = side ? p->by_key : p->by_query;
                sort(numbers, n, pairs, pairs + most, order + (r * p->batch * p->heads + item) * n);
            }
        free(products), free(rows), free(pairs), free(numbers);
    }
    return failed;
}

/* Tokens by rising codes [items, n] below `most`, equal ones in their own order. */
int sort_codes(int64_t items, int64_t n, int64_t most, const int32_t *codes, int32_t *order) {
    int64_t *first = malloc(sizeof(int64_t) * (most + 1));
    if (!first) return 1;
    for (int64_t item = 0; item < items; item++, codes += n, order += n) {
        memset(first, 0, sizeof(int64_t) * (most + 1));
        for (int64_t i = 0; i < n; i++) first[codes[i] + 1]++;
        for (int64_t c = 0; c < most; c++) first[c + 1] += first[c];
        for (int64_t i = 0; i < n; i++) order[first[codes[i]]++] = (int32_t)i;
    }
    free(first);
    return 0;
}

typedef struct {
    int64_t batch, heads, rounds, tokens, size, wide, bits, levels, bf16, threads;
    tensor x;
    const double *planes;   /* [D, wide]: `bits` columns of each round, then nothing */
    const uint8_t *mask;    /* [B, n], 0 at padding; NULL when all tokens are real */
    const int64_t *before;  /* [B]: real tokens before these; NULL where there are none */
    double *sums;           /* [B, H, wide]: sums of their products, to which these are added; NULL where no mean is taken off */
    int32_t *codes;         /* [B, H, R, n]; with levels, [levels + 1, B, H, R, n] */
} hashing;
SIZE_OF(hashing, hashing)

/* The nearest of the first 1, 2, 4, ... directions and of their opposites, of each level one. */
INLINE void nearest(const double *products, int64_t levels, int32_t *codes, int64_t step) {
    int64_t best = 0;
    codes[0] = 0;
    for (int64_t level = 1; level <= levels; level++) {
        for (int64_t c = (int64_t)1 << level >> 2; c < (int64_t)1 << (level - 1); c++)
            if (fabs(products[c]) > fabs(products[best])) best = c;
        codes[level * step] = (int32_t)(2 * best + (products[best] < 0.0));
    }
}

int hash_tokens(const hashing *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < p->batch * p->heads; item++) {
        int64_t b = item / p->heads, h = item % p->heads, n = p->tokens;
        double *found = doubles(TOGETHER * p->wide), *sums = p->sums ? p->sums + item * p->wide : NULL;
        double *rows = room_for(p->size);
        if (!found || !rows) { free(found), free(rows), failed = 1; continue; }
        int64_t real = p->before ? p->before[b] : 0;
        for (int64_t first = 0; first < n; first += TOGETHER) {
            int64_t count = read_some(p->x, p->bf16, b, h, first, n, p->size, rows);
            project(rows, p->size, p->planes, p->wide, found);
            for (int64_t i = first; i < first + count; i++) {
                double *products = found + (i - first) * p->wide;
                if (sums && (!p->mask || p->mask[b * n + i])) {
                    real++;
                    for (int64_t c = 0; c < p->wide; c++) {
                        sums[c] += products[c];
                        double mean = sums[c] / (double)real;
                        /* Keys that are all the same lie on one side, whatever rounding makes of their mean. */
                        products[c] -= mean + 1e-9 * fabs(mean);
                    }
                }
                for (int64_t r = 0; r < p->rounds; r++) {
                    int32_t code = 0, *to = p->codes + (item * p->rounds + r) * n + i;
                    if (p->levels) {
                        nearest(products + r * p->bits, p->levels, to, p->batch * p->heads * p->rounds * n);
                        continue;
                    }
                    for (int64_t j = 0; j < p->bits; j++) code |= (products[r * p->bits + j] > 0.0) << j;
                    *to = code;
                }
            }
        }
        free(found), free(rows);
    }
    return failed;
}

/* Two bounds of ranks, and two of distances: `entry` of tiles.h. */
typedef struct { int32_t begin, end, low, high; } entry;

typedef struct {
    int64_t batch, heads, rounds, length, keys, cluster, doublings, ranks, most, rows, far, levels, shared, threads;
    const int32_t *by_query, *by_key; /* codes [B, H, R, L] and [B, H / shared, R, S]; with levels one of each */
    const uint8_t *mask;              /* [B, S], 0 at padding; NULL when all keys are real */
    int32_t *query_order;             /* [R, B, H, L]: queries by where their stretch begins, who sees nothing last */
    int32_t *key_order;               /* [R, B, H, ranks]: keys by rank */
    int64_t *blocks, *starts;         /* [B H + 1] and [B H R most + 1]: see `attend_own_lists` */
    entry *entries;                   /* [B H R most] */
    int64_t *count;                   /* [B H R]: blocks of each round */
    int32_t *seen, *places;           /* `stretches` of attention to lists, and `places`, -1 where no rank is; NULL */
} stretching;
SIZE_OF(stretching, stretching)

/* The tables of a round, level by level, key by key, and what of them each query sees when its own key has come. */
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
    if (!real || !bucket) { free(real), free(bucket); return 1; }
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
        if (s < 0 || (mask && !mask[s])) { begins[p->ranks + 1]++; continue; }
        int64_t position = at++, doubled = level < 0 ? 0 : level;
        while (doubled < p->doublings && position >= p->cluster << (doubled + 1)) doubled++;
        int32_t last = ((int32_t)1 << doubled) - 1;
        if (doubled != level) {
            if (p->levels) mine = p->by_query + (doubled * all + item) * L, theirs = p->by_key + (doubled * (all / p->shared) + own_keys) * S;
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
