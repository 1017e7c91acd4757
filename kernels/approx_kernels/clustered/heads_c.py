"""What both directions of clustered attention in C begin with: one head of one sample, and what it reads."""

from approx_kernels.c_dropout import DROPOUT
from approx_kernels.c_halves import HALVES

HEADS = (
    HALVES
    + DROPOUT
    + r"""
/* Keys of a block; what belongs to it stays in a core's own cache. */
#define BLOCK 128
/* Queries of one cluster that share one product. */
#define MEMBERS 32

typedef struct {
    int64_t batch, heads, length, keys, size, values, most_clusters, kept, bf16, threads;
    tensor q, k, v, out;
    const int32_t *query_tokens, *key_tokens;    /* [B, L] and [B, S], real ones first; NULL where all are real */
    const int64_t *queries, *real_keys, *clusters;    /* [B] */
    const int32_t *groups;    /* [B, H, L], of the real queries */
    float *rest, *sums, *mass;    /* [B, H, C, E], [B, H, C], [B, H, C] */
    int32_t *top;    /* [B, H, C, K] */
    float scale;
    dropout dropout;
} problem;

/* One head of one sample, in one piece each: queries, scaled and sorted by cluster, keys and values. */
typedef struct {
    const problem *all;
    int64_t b, h, n, keys, clusters, lanes, size, values, kept;
    const int32_t *queries_at, *keys_at, *groups;
    int32_t *first, *places;    /* cluster c has rows first[c] up to first[c + 1]; places[i] is the row of query i */
    float *q, *k, *v, *means;    /* [n, D], [S, D], [S, E]; mean queries, [C, D] */
    float *residues;    /* what rounding takes of them; NULL where it does not matter */
    int half;
    uint32_t *before, *between;    /* draws of the clusters, [C]; of nothing where nothing is dropped */
} head;

static void release(head *x) { end_halves(x->half), free(x->first), free(x->q); }

/* Sort the queries of one head by cluster and average them; 0 where there is no memory. */
static int gather(head *x, const problem *all, int64_t item) {
    int64_t b = item / all->heads, c, d, i;
    *x = (head){.all = all, .b = b, .h = item % all->heads};
    x->n = all->queries[b], x->keys = all->real_keys[b], x->clusters = all->clusters[b];
    x->lanes = padded(x->clusters), x->size = padded(all->size), x->values = padded(all->values);
    /* A query that is its own cluster is exact by itself. */
    x->kept = x->clusters == x->n ? 0 : all->kept < x->keys ? all->kept : x->keys;
    x->queries_at = all->query_tokens ? all->query_tokens + b * all->length : NULL;
    x->keys_at = all->key_tokens ? all->key_tokens + b * all->keys : NULL;
    x->groups = all->groups + item * all->length;
    x->half = begin_halves(all->bf16, all->length);
    int64_t means = x->clusters * x->size;
    x->first = calloc(x->clusters + 2 + x->n + 2 * x->lanes, sizeof(int32_t));
    x->q = floats((x->n + x->keys) * x->size + x->keys * x->values + 2 * means);
    if (!x->first || !x->q) return 0;
    x->places = x->first + x->clusters + 2;
    x->before = (uint32_t *)x->places + x->n, x->between = x->before + x->lanes;
    for (c = 0; all->dropout.bound && c < x->clusters; c++) {
        draw of = draw_of(&all->dropout, item, c);
        x->before[c] = of.before, x->between[c] = of.between;
    }
    x->k = x->q + x->n * x->size, x->v = x->k + x->keys * x->size, x->means = x->v + x->keys * x->values;
    memset(x->means, 0, sizeof(float) * means);
    /* Counted two places on, so that after the sort first[c] is where c begins. */
    for (i = 0; i < x->n; i++) x->first[x->groups[i] + 2]++;
    for (c = 0; c < x->clusters; c++) x->first[c + 2] += x->first[c + 1];
    for (i = 0; i < x->n; i++) x->places[i] = x->first[x->groups[i] + 1]++;
    read_rows(all->q, all->bf16, b, x->h, x->queries_at, x->n, all->size, x->size, x->places, x->q);
    read_rows(all->k, all->bf16, b, x->h, x->keys_at, x->keys, all->size, x->size, NULL, x->k);
    read_rows(all->v, all->bf16, b, x->h, x->keys_at, x->keys, all->values, x->values, NULL, x->v);
    for (c = 0; c < x->clusters; c++) {
        float *mean = x->means + c * x->size;
        int64_t count = x->first[c + 1] - x->first[c];
        for (i = x->first[c]; i < x->first[c + 1]; i++)
            for (d = 0; d < x->size; d++) mean[d] += x->q[i * x->size + d] *= all->scale;
        for (d = 0; d < x->size; d++) mean[d] /= count ? count : 1;
    }
    /* Which keys score highest is not left to rounding. */
    x->residues = x->half && x->kept ? x->means + means : NULL;
    for (i = 0; x->residues && i < means; i++) x->residues[i] = x->means[i] - halved(x->means[i]);
    return 1;
}

/* Softmax of scores [members, keys] in place, columns from `kept` on becoming 0. */
static void softmax_rows(float *scores, int64_t rows, int64_t kept, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * width;
        vf tops = (vf){0} - INFINITY, sums = {0};
        for (int64_t j = kept; j < width; j++) row[j] = -INFINITY;
        for (int64_t j = 0; j < width; j += WIDTH) tops = larger(*(vf *)(row + j), tops);
        float most = lane_most(tops);
        for (int64_t j = 0; j < width; j += WIDTH) *(vf *)(row + j) = vexp(*(vf *)(row + j) - most);
        for (int64_t j = kept; j < width; j++) row[j] = 0;
        for (int64_t j = 0; j < width; j += WIDTH) sums += *(vf *)(row + j);
        scale_row(width, 1.0f / lane_sum(sums), row);
    }
}

/* Drop weights of the members in rows from `from` on, [members, width], for the places of their cluster's list. */
static void drop_members(const head *x, int64_t from, int64_t rows, int64_t width, float *weights) {
    const problem *p = x->all;
    int64_t item = (p->batch + x->b) * p->heads + x->h;
    for (int64_t r = 0; r < rows; r++)
        drop_stretch(&p->dropout, draw_of(&p->dropout, item, from + r), 0, width, weights + r * width);
}

/* Keys and values of a list. */
static void gather_keys(const head *x, const int32_t *list, float *keys, float *values) {
    for (int64_t j = 0; j < x->kept; j++) {
        memcpy(keys + j * x->size, x->k + list[j] * x->size, sizeof(float) * x->size);
        memcpy(values + j * x->values, x->v + list[j] * x->values, sizeof(float) * x->values);
    }
}
"""
)
