/* Hashes and orders of tokens in C, as hashing.py and buckets.py specify them: in double here as there. */

#include "rows.h"

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

/* Tokens from the first on; old rows after the last one are projected too, and not used. */
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
    const double *planes; /* [D, wide]: a column of each round, then nothing */
    const double *query_lift, *key_lift; /* [R] */
    int32_t *by_query, *by_key; /* [R, B, H, n]: tokens by rank */
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
    const double *planes; /* [D, wide]: `bits` columns of each round, then nothing */
    const uint8_t *mask; /* [B, n], 0 at padding; NULL when all tokens are real */
    const int64_t *before; /* [B]: real tokens before these; NULL where there are none */
    double *sums; /* [B, H, wide]: sums of their products, to which these are added; NULL where no mean is taken off */
    int32_t *codes; /* [B, H, R, n]; with levels, [levels + 1, B, H, R, n] */
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
        if (!found || !rows) {
            free(found), free(rows), failed = 1;
            continue;
        }
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
                        /* Equal keys are all on one side, whatever rounding does to their mean. */
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
