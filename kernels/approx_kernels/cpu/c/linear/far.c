/* Attention by features to the keys outside of windows in C, joined with the softmax over the others. Forward only. */

#include "softmax.h"
#include "rows.h"

/* Queries computed together, of whose windows the outermost keys differ. */
enum { BLOCK = 32, HALF = BLOCK / 2 };
/* As in ops/exact_part/reference.py: a smaller normaliser counts as none, and the bound of the logarithm of a key's gate. */
#define LEAST_NORM 1e-15f
#define MOST_GATE 30.0f
/* Logarithms of normalisers of nothing are below. */
#define NOTHING -4e37f

typedef struct {
    int64_t batch, heads, length, keys, size, features, values, left, right, causal, bf16, threads;
    tensor q, k, v, near, out; /* near are float32 */
    const uint8_t *mask; /* [B, S], 0 at keys that are not far from any query; NULL for none */
    const float *query_map, *key_map; /* [H, D, F / 2], whose softmax with either sign is the features; NULL: rows are features */
    /* With maps: [H, D + 1], the last added to query_gate.q, is the logarithm of the far keys' factor; [H, D], that of a key. */
    const float *query_gate, *key_gate;
    const float *gates; /* Without: [B, H, L], the logarithm of that factor */
    const float *near_logs; /* [B, H, L], logarithms of the normalisers of near keys */
    const float *share; /* [H], of uniform attention among the far keys; NULL for none */
    float input_scale;
} problem;
SIZE_OF(far, problem)

/* One head of one sample; rows are whole vectors. */
typedef struct {
    const problem *all;
    int64_t b, h, wide, size, width; /* inputs, features, values */
    float *inputs, *heights, *map, *gate; /* [BLOCK, D], [BLOCK, F / 2], [D, F / 2], [D] */
    float *logs, *others; /* [BLOCK], products of the inputs with the gate; [F / 2] */
    float *keys, *values; /* [S, F], [S, E], 0 at keys that are not far */
    double *spread; /* [3, E + 1]: values and a one, summed over all keys, those up to the window, and those up to its end */
    int64_t begun, ended; /* how many keys are in the second and the third */
} head;

/* Features of rows from one on and, with maps, products of the rows with the gate. */
static void read_features(const head *x, tensor from, int64_t first, int64_t rows, float *to) {
    const problem *p = x->all;
    if (!p->query_map) {
        read_rows(from, p->bf16, x->b, x->h, NULL, first, rows, p->size, to);
        return;
    }
    int64_t half = p->features / 2, wide = padded(half);
    read_scaled(from, p->bf16, x->b, x->h, NULL, first, rows, p->size, p->input_scale, x->inputs);
    product(rows, wide, p->size, x->inputs, x->wide, 1, x->map, wide, x->heights, wide, 0);
    for (int64_t i = 0; i < rows; i++, to += x->size) {
        float *heights = x->heights + i * wide;
        x->logs[i] = dot(x->wide, x->inputs + i * x->wide, x->gate);
        for (int64_t j = half; j < wide; j++) heights[j] = heights[0];
        vf highs = (vf){0} - INFINITY, lows = (vf){0} + INFINITY, up = {0}, down = {0};
        for (int64_t j = 0; j < wide; j += WIDTH)
            highs = larger(*(vf *)(heights + j), highs), lows = smaller(*(vf *)(heights + j), lows);
        float most = lane_most(highs), least = -lane_most(-lows);
        for (int64_t j = 0; j < wide; j += WIDTH) {
            /* What fills the row up weighs nothing. */
            vf at = *(vf *)(heights + j);
            vf positive = vweight(at - most), negative = vweight(least - at);
            if (j + WIDTH > half)
                for (int64_t e = half - j; e < WIDTH; e++) positive[e] = negative[e] = 0.0f;
            up += positive, down += negative;
            *(vf *)(heights + j) = positive, *(vf *)(x->others + j) = negative;
        }
        scale_row(wide, 1.0f / lane_sum(up), heights), scale_row(wide, 1.0f / lane_sum(down), x->others);
        memcpy(to, heights, sizeof(float) * half), memcpy(to + half, x->others, sizeof(float) * half);
        for (int64_t f = 2 * half; f < x->size; f++) to[f] = 0.0f;
    }
}

static void read_map(const head *x, const float *map, const float *gate) {
    int64_t D = x->all->size, half = x->all->features / 2, wide = padded(half);
    if (!map) return;
    memset(x->map, 0, sizeof(float) * D * wide), memset(x->gate, 0, sizeof(float) * x->wide);
    memcpy(x->gate, gate, sizeof(float) * D);
    for (int64_t d = 0; d < D; d++) memcpy(x->map + d * wide, map + (x->h * D + d) * half, sizeof(float) * half);
}

static void read_keys(const head *x) {
    const problem *p = x->all;
    read_map(x, p->key_map, p->key_gate + x->h * p->size);
    for (int64_t first = 0; first < p->keys; first += BLOCK) {
        int64_t rows = lesser(BLOCK, p->keys - first);
        float *keys = x->keys + first * x->size, *values = x->values + first * x->width;
        read_features(x, p->k, first, rows, keys);
        read_rows(p->v, p->bf16, x->b, x->h, NULL, first, rows, p->values, values);
        for (int64_t i = 0; i < rows; i++)
            if (p->mask && !p->mask[x->b * p->keys + first + i]) {
                memset(keys + i * x->size, 0, sizeof(float) * x->size);
                memset(values + i * x->width, 0, sizeof(float) * x->width);
            } else if (p->key_map) {
                scale_row(x->size, expf(x->logs[i] > MOST_GATE ? MOST_GATE : x->logs[i]), keys + i * x->size);
            }
    }
}

/* Keys from one on and before another join sums over keys: their features times values, [F, E], and their features, [F]. */
static void add_keys(const head *x, int64_t from, int64_t to, float *sums, float *some) {
    float *total = sums + x->all->features * x->width;
    for (int64_t first = from; first < to; first += BLOCK) {
        int64_t rows = lesser(BLOCK, to - first);
        const float *keys = x->keys + first * x->size;
        product(x->all->features, x->width, rows, keys, 1, x->size, x->values + first * x->width, x->width, sums,
                x->width, 1);
        /* Added to one another first: one by one, small ones would all round the same way. */
        memset(some, 0, sizeof(float) * x->size);
        for (int64_t i = 0; i < rows; i++) add_row(x->size, 1.0f, keys + i * x->size, some);
        add_row(x->size, 1.0f, some, total);
    }
}

/* The keys from one on, of which the query of row r sees those before the r-th, or, `after`, those behind it.

   Half of the pairs are of no use; quarters of them are left out. */
static void add_pairs(const head *x, int after, int64_t from, int64_t rows, const float *queries, float *pairs,
                      float *out, float *norms) {
    /* The first of all keys, and after the last of those that the block needs. */
    int64_t begin = greater(0, -from), end = lesser(rows, x->all->keys - from);
    if (begin >= end) return;
    for (int64_t t = 0; t < BLOCK; t += HALF) {
        int64_t first = greater(t, begin), last = lesser(t + HALF, end);
        if (first >= last) continue;
        /* None of the first half of the rows sees the second half of the keys before, nor of the second the first after. */
        int64_t column = after || !t ? 0 : HALF, columns = after && !t ? HALF : BLOCK - column;
        product(last - first, columns, x->all->features, x->keys + (from + first) * x->size, x->size, 1,
                queries + column, BLOCK, pairs + first * BLOCK + column, BLOCK, 0);
        for (int64_t k = first; k < last; k++) {
            float *row = pairs + k * BLOCK;
            if (after) memset(row + k, 0, sizeof(float) * (BLOCK - k));
            else memset(row, 0, sizeof(float) * (k + 1));
            add_row(BLOCK, 1.0f, row, norms);
        }
    }
    for (int64_t i = 0; i < rows; i += HALF) {
        int64_t first = greater(begin, after ? i : 0), last = lesser(end, after ? BLOCK : i + HALF);
        if (first < last)
            product(lesser(HALF, rows - i), x->width, last - first, pairs + first * BLOCK + i, 1, BLOCK,
                    x->values + (from + first) * x->width, x->width, out + i * x->width, x->width, 1);
    }
}

/* Keys from one on and before another join sums of values. */
static void spread_keys(const head *x, int64_t from, int64_t to, double *sums) {
    int64_t E = x->all->values;
    for (int64_t j = from; j < to; j++) {
        for (int64_t e = 0; e < E; e++) sums[e] += x->values[j * x->width + e];
        sums[E] += !x->all->mask || x->all->mask[x->b * x->all->keys + j];
    }
}

/* Share of the mean of the values that are far from the query at a place, and the rest of the estimate. */
static void spread(head *x, int64_t place, float norm, float *far) {
    const problem *p = x->all;
    int64_t E = p->values, begun = lesser(p->keys, greater(0, place - p->left));
    int64_t ended = p->causal ? 0 : lesser(p->keys, greater(0, place + p->right + 1));
    double *total = x->spread, *before = total + E + 1, *until = before + E + 1;
    spread_keys(x, x->begun, begun, before), spread_keys(x, x->ended, ended, until);
    x->begun = greater(x->begun, begun), x->ended = greater(x->ended, ended);
    double share = p->share[x->h], count = before[E] + total[E] - until[E];
    for (int64_t e = 0; e < E; e++) {
        double mean = (before[e] + total[e] - until[e]) / (count < 1 ? 1 : count);
        far[e] = norm * (float)((1 - share) * (far[e] / norm) + share * mean);
    }
}

/* Outputs joined under one normaliser, and written. */
static void join(head *x, int64_t first, int64_t rows, float *far, const float *norms, float *out) {
    const problem *p = x->all;
    read_rows(p->near, 0, x->b, x->h, NULL, first, rows, p->values, out);
    int64_t at = (x->b * p->heads + x->h) * p->length + first;
    float shares[BLOCK] = {0}, others[BLOCK] = {0}, logs[BLOCK] = {0}, gates[BLOCK] = {0};
    memcpy(logs, p->near_logs + at, sizeof(float) * rows);
    memcpy(gates, p->query_map ? x->logs : p->gates + at, sizeof(float) * rows);
    float more = p->query_map ? p->query_gate[x->h * (p->size + 1) + p->size] : 0.0f;
    for (int64_t i = 0; i < BLOCK; i += WIDTH) {
        vf near = *(vf *)(logs + i), gate = *(vf *)(gates + i) + more, norm = *(const vf *)(norms + i), none = {0};
        vf most = larger(near, gate), one = choose(near <= NOTHING, none, vexp(near - most));
        /* Whatever is not less than the bound counts, NaN too. */
        vf other = choose(norm < LEAST_NORM, none, norm * vexp(gate - most)), sum = one + other;
        *(vf *)(shares + i) = choose(sum == 0.0f, none, one / sum);
        *(vf *)(others + i) = choose(other == 0.0f, none, other / sum / norm);
    }
    for (int64_t i = 0; i < rows; i++, out += x->width, far += x->width) {
        if (p->share && others[i] != 0.0f) spread(x, first + i + p->keys - p->length, norms[i], far);
        scale_row(x->width, shares[i], out);
        if (others[i] != 0.0f) add_row(x->width, others[i], far, out);
        write_row(p->out, p->bf16, x->b, x->h, first + i, p->values, out);
    }
}

static int attend(const problem *p, int64_t b, int64_t h) {
    int64_t D = p->size, F = p->features, E = p->values, S = p->keys, L = p->length, before = S - L;
    int64_t size = padded(F), width = padded(E), wide = padded(D), half = padded(F / 2);
    int64_t blocks = (L + BLOCK - 1) / BLOCK, sums = F * width + size;
    int64_t ends = p->causal ? 0 : blocks;
    float *memory = floats(S * (size + width) + (ends + 2) * sums + BLOCK * (wide + half + 2 * width + BLOCK + size) +
                           size * BLOCK + D * half + wide + size + 2 * BLOCK + half);
    if (!memory) return 1;
    float *keys = memory, *values = keys + S * size, *after = values + S * width, *past = after + ends * sums;
    float *seen = past + sums, *inputs = seen + sums, *heights = inputs + BLOCK * wide, *far = heights + BLOCK * half;
    float *out = far + BLOCK * width, *pairs = out + BLOCK * width, *queries = pairs + BLOCK * BLOCK;
    float *across = queries + BLOCK * size, *map = across + size * BLOCK, *gate = map + D * half;
    float *some = gate + wide, *norms = some + size, *logs = norms + BLOCK, *others = logs + BLOCK;
    double sums_of_values[3 * (E + 1)];
    memset(sums_of_values, 0, sizeof(sums_of_values));
    head x = {p, b, h, wide, size, width, inputs, heights, map, gate, logs, others, keys, values, sums_of_values, 0, 0};
    read_keys(&x);
    if (p->share && !p->causal) spread_keys(&x, 0, S, x.spread);
    /* Sums over the keys that all queries of a block have after their windows, from the last block on. */
    memset(past, 0, sizeof(float) * sums);
    for (int64_t i = ends - 1, known = S; i >= 0; i--) {
        int64_t from = lesser(S, greater(0, lesser(L, (i + 1) * BLOCK) + before + p->right));
        add_keys(&x, from, known, past, some), known = lesser(known, from);
        memcpy(after + i * sums, past, sizeof(float) * sums);
    }
    memset(past, 0, sizeof(float) * sums);
    read_map(&x, p->query_map, p->query_gate + h * (D + 1));
    for (int64_t i = 0, known = 0; i < blocks; i++) {
        int64_t first = i * BLOCK, rows = lesser(BLOCK, L - first), place = first + before;
        int64_t to = lesser(S, greater(0, place - p->left));
        add_keys(&x, known, to, past, some), known = greater(known, to);
        read_features(&x, p->q, first, rows, queries);
        memset(queries + rows * size, 0, sizeof(float) * (BLOCK - rows) * size);
        const float *all = past;
        if (ends) {
            for (int64_t d = 0; d < sums; d += WIDTH)
                *(vf *)(seen + d) = *(vf *)(past + d) + *(vf *)(after + i * sums + d);
            all = seen;
        }
        product(rows, width, F, queries, size, 1, all, width, far, width, 0);
        for (int64_t r = 0; r < BLOCK; r++) norms[r] = dot(size, queries + r * size, all + F * width);
        transpose(BLOCK, F, queries, size, across, BLOCK);
        add_pairs(&x, 0, place - p->left, rows, across, pairs, far, norms);
        if (ends) add_pairs(&x, 1, place + p->right, rows, across, pairs, far, norms);
        join(&x, first, rows, far, norms, out);
    }
    free(memory);
    return 0;
}

int attend_far(const problem *p) { return ANY_HEAD_FAILS(p, attend(p, b, h)); }
