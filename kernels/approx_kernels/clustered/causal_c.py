"""Causal clustered attention in C: one walk over the keys of a head, with what each centroid has made of the past."""

from approx_kernels.c_largest import LARGEST
from approx_kernels.c_vectors import VECTORS

CAUSAL = (
    VECTORS
    + LARGEST
    + r"""
/* Keys that meet all centroids at once, and queries that share the products with the keys of their chunk; centroids for
   which keys are not worth turning. */
enum { BLOCK = 64, STRIP = 24, FEW = 4 };

typedef struct {
    int64_t batch, heads, length, keys, size, values, rows, chunk, kept, bf16, threads;
    tensor q, k, v, centroids, out;    /* centroids are float32, [B, H, R, D] */
    const int32_t *groups;    /* [B, H, L], the centroid of each query */
    float scale;
} problem;

/* Keys and values of one head, and of each centroid: itself, scaled; its largest keys with their scores, and how
   many there are; of all other keys the largest score, and the sums relative to it of weights, of
   weighted keys and of weighted values. */
typedef struct {
    const problem *all;
    int64_t size, values;
    float *keys, *v, *rows, *scores, *standing, *best, *peak, *mass, *mean_key, *mean_value;
    int32_t *top, *filled;
} past;

/* Let the scores of a centroid with `count` keys from `begin` on compete for its list. What stays outside remains in the
   row; who loses a place that he took in an earlier block goes to `lost`, and their number is returned. */
static int64_t compete(past *x, int64_t r, int64_t begin, int64_t count, float *row, int32_t *lost, float *lost_scores) {
    int64_t kept = x->all->kept, losers = 0;
    float *best = x->best + r * kept;
    int32_t *top = x->top + r * kept, *filled = x->filled + r;
    for (int64_t c = 0; kept && c < count; c++) {
        float score = row[c];
        if (*filled == kept && !(score > best[0])) continue;
        row[c] = -INFINITY;
        if (*filled < kept) { append(best, top, filled, kept, score, (int32_t)(begin + c)); continue; }
        if (top[0] >= begin) row[top[0] - begin] = best[0];
        else lost[losers] = top[0], lost_scores[losers++] = best[0];
        replace(best, top, kept, score, (int32_t)(begin + c));
    }
    return losers;
}

/* Take `count` keys from `begin` on into the past. */
static void absorb(past *x, int64_t begin, int64_t count) {
    const problem *p = x->all;
    const float *keys = x->keys + begin * x->size, *values = x->v + begin * x->values;
    int64_t wide = padded(count);
    if (p->rows < FEW) {
        for (int64_t r = 0; r < p->rows; r++)
            for (int64_t c = 0; c < count; c++)
                x->scores[r * BLOCK + c] = dot(x->size, x->rows + r * x->size, keys + c * x->size);
    } else {
        transpose(count, p->size, keys, x->size, x->standing, BLOCK);
        product(p->rows, wide, p->size, x->rows, x->size, 1, x->standing, BLOCK, x->scores, BLOCK, 0);
    }
    for (int64_t r = 0; r < p->rows; r++) {
        float *row = x->scores + r * BLOCK, *mean_key = x->mean_key + r * x->size, *mean_value = x->mean_value + r * x->values;
        int32_t lost[BLOCK];
        float lost_scores[BLOCK], most = x->peak[r];
        int64_t losers = compete(x, r, begin, count, row, lost, lost_scores);
        for (int64_t c = 0; c < count; c++) most = row[c] > most ? row[c] : most;
        for (int64_t j = 0; j < losers; j++) most = lost_scores[j] > most ? lost_scores[j] : most;
        if (most > x->peak[r]) {
            float fade = expf(x->peak[r] - most);
            x->mass[r] *= fade, scale_row(x->size, fade, mean_key), scale_row(x->values, fade, mean_value);
            x->peak[r] = most;
        }
        /* Nothing is outside the list yet: any finite number makes weights of 0. */
        float origin = most == -INFINITY ? 0.0f : most;
        for (int64_t c = count; c < wide; c++) row[c] = -INFINITY;
        for (int64_t c = 0; c < wide; c += WIDTH) {
            vf score = *(vf *)(row + c);
            *(vf *)(row + c) = choose(score == -INFINITY, (vf){0}, vexp(score - origin));
        }
        for (int64_t c = 0; c < count; c++) x->mass[r] += row[c];
        for (int64_t j = 0; j < losers; j++) {
            float weight = expf(lost_scores[j] - origin);
            x->mass[r] += weight;
            add_row(x->size, weight, x->keys + lost[j] * x->size, mean_key);
            add_row(x->values, weight, x->v + lost[j] * x->values, mean_value);
        }
    }
    product(p->rows, x->size, count, x->scores, BLOCK, 1, keys, x->size, x->mean_key, x->size, 1);
    product(p->rows, x->values, count, x->scores, BLOCK, 1, values, x->values, x->mean_value, x->values, 1);
}

/* One query: what it weighs of its own chunk is in `near`, `count` scores; then its centroid's list and the rest. */
static void attend(const past *x, int64_t r, int64_t begin, int64_t count, const float *query, float *near, float *own,
                   float *out) {
    const problem *p = x->all;
    int64_t kept = begin ? p->kept : 0, wide = padded(count);
    const int32_t *top = x->top + r * p->kept;
    float most = -INFINITY, rest = -INFINITY, sum = 0.0f;
    for (int64_t c = 0; c < count; c++) most = near[c] > most ? near[c] : most;
    for (int64_t j = 0; j < kept; j++) {
        own[j] = dot(x->size, query, x->keys + top[j] * x->size);
        most = own[j] > most ? own[j] : most;
    }
    if (begin) {
        /* The tangent of a convex function: the remaining mass of a query near the centroid, and never more than it. */
        const float *mean = x->mean_key + r * x->size;
        rest = x->peak[r] + logf(x->mass[r]) + (dot(x->size, query, mean) - dot(x->size, x->rows + r * x->size, mean)) / x->mass[r];
        most = rest > most ? rest : most;
    }
    for (int64_t c = 0; c < wide; c += WIDTH) *(vf *)(near + c) = vexp(*(vf *)(near + c) - most);
    for (int64_t c = count; c < wide; c++) near[c] = 0.0f;
    for (int64_t c = 0; c < count; c++) sum += near[c];
    memset(out, 0, sizeof(float) * x->values);
    for (int64_t j = 0; j < kept; j++) {
        float weight = expf(own[j] - most);
        sum += weight, add_row(x->values, weight, x->v + top[j] * x->values, out);
    }
    if (begin) {
        float weight = expf(rest - most);
        sum += weight, add_row(x->values, weight / x->mass[r], x->mean_value + r * x->values, out);
    }
    /* Weights of the chunk are scaled before the product with its values, all others after it is begun. */
    scale_row(x->values, 1.0f / sum, out), scale_row(wide, 1.0f / sum, near);
}

static int head(const problem *p, int64_t b, int64_t h) {
    int64_t size = padded(p->size), values = padded(p->values), S = p->keys, R = p->rows, K = p->kept;
    int64_t before = S - p->length, wide = padded(lesser(p->chunk, S) + BLOCK);
    past x = {.all = p, .size = size, .values = values};
    float *memory = floats(S * (size + values) + R * (2 * size + values + BLOCK + K + 2) + p->size * BLOCK +
                           STRIP * (size + values + wide) + padded(K) + 8 * WIDTH);
    x.top = calloc(R * (K + 1) + 1, sizeof(int32_t));
    if (!memory || !x.top) { free(memory), free(x.top); return 1; }
    x.filled = x.top + R * K;
    x.keys = memory, x.v = x.keys + S * size, x.rows = x.v + S * values, x.mean_key = x.rows + R * size;
    x.mean_value = x.mean_key + R * size, x.scores = x.mean_value + R * values, x.standing = x.scores + R * BLOCK;
    float *queries = x.standing + p->size * BLOCK, *out = queries + STRIP * size, *near = out + STRIP * values;
    x.best = near + STRIP * wide, x.peak = x.best + R * K, x.mass = x.peak + R;
    float *own = x.mass + R;
    memset(x.mean_key, 0, sizeof(float) * R * (size + values));
    read_rows(p->k, p->bf16, b, h, NULL, S, p->size, size, NULL, x.keys);
    read_rows(p->v, p->bf16, b, h, NULL, S, p->values, values, NULL, x.v);
    read_rows(p->centroids, 0, b, h, NULL, R, p->size, size, NULL, x.rows);
    for (int64_t r = 0; r < R; r++) x.peak[r] = -INFINITY, x.mass[r] = 0.0f, scale_row(size, p->scale, x.rows + r * size);
    const int32_t *groups = p->groups + (b * p->heads + h) * p->length;
    for (int64_t begin = 0; begin < S; begin += p->chunk) {
        int64_t end = lesser(begin + p->chunk, S), first = begin > before ? begin : before;
        for (; first < end; first += STRIP) {
            int64_t deep = lesser(STRIP, end - first), seen = first + deep - begin;
            for (int64_t i = 0; i < deep; i++) {
                float *query = queries + i * size;
                read_row(p->q, p->bf16, b, h, first + i - before, p->size, query);
                for (int64_t d = 0; d < size; d++) query[d] = d < p->size ? query[d] * p->scale : 0.0f;
            }
            for (int64_t c = 0; c < seen; c += BLOCK) {
                int64_t count = lesser(BLOCK, seen - c);
                transpose(count, p->size, x.keys + (begin + c) * size, size, x.standing, BLOCK);
                product(deep, padded(count), p->size, queries, size, 1, x.standing, BLOCK, near + c, wide, 0);
            }
            for (int64_t i = 0; i < deep; i++) {
                attend(&x, groups[first + i - before], begin, first + i + 1 - begin, queries + i * size, near + i * wide, own,
                       out + i * values);
                for (int64_t c = padded(first + i + 1 - begin); c < seen; c++) near[i * wide + c] = 0.0f;
            }
            product(deep, values, seen, near, wide, 1, x.v + begin * values, values, out, values, 1);
            for (int64_t i = 0; i < deep; i++) write_row(p->out, p->bf16, b, h, first + i - before, p->values, out + i * values);
        }
        for (int64_t key = begin; end < S && key < end; key += BLOCK) absorb(&x, key, lesser(BLOCK, end - key));
    }
    free(memory), free(x.top);
    return 0;
}

int forward(const problem *p) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) reduction(| : failed)
    for (int64_t item = 0; item < p->batch * p->heads; item++) failed |= head(p, item / p->heads, item % p->heads);
    return failed;
}
"""
)
