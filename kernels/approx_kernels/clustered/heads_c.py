"""What both directions of clustered attention in C begin with: one head of one sample, and what it reads."""

from approx_kernels.c_vectors import VECTORS

HEADS = (
    VECTORS
    + r"""
/* Keys of a block; what belongs to it stays in a core's own cache. */
#define BLOCK 64
/* Queries of one cluster that share one product. */
#define MEMBERS 24

typedef struct {
    int64_t batch, heads, length, keys, size, values, most_clusters, kept, bf16, threads;
    tensor q, k, v, out;
    const int32_t *query_tokens, *key_tokens;    /* [B, L] and [B, S], real ones first; NULL where all are real */
    const int64_t *queries, *real_keys, *clusters;    /* [B] */
    const int32_t *groups;    /* [B, H, L], of the real queries */
    float *rest, *sums, *mass;    /* [B, H, C, E], [B, H, C], [B, H, C] */
    int32_t *top;    /* [B, H, C, K] */
    float scale;
} problem;

/* One head of one sample. */
typedef struct {
    const problem *all;
    int64_t b, h, n, keys, clusters, lanes, size, values, kept;
    const int32_t *queries_at, *keys_at, *groups;
    int32_t *first, *order;    /* members of cluster c: order[first[c]] up to order[first[c + 1]] */
    float *means, *across;    /* scaled mean queries, [C, D] and [D, C] */
} head;

INLINE int64_t token(const int32_t *tokens, int64_t i) { return tokens ? tokens[i] : i; }

INLINE void read_query(const head *x, int64_t i, float *to) {
    read_row(x->all->q, x->all->bf16, x->b, x->h, token(x->queries_at, i), x->all->size, to);
}
INLINE void read_key(const head *x, int64_t j, float *to) {
    read_row(x->all->k, x->all->bf16, x->b, x->h, token(x->keys_at, j), x->all->size, to);
}
INLINE void read_value(const head *x, int64_t j, float *to) {
    read_row(x->all->v, x->all->bf16, x->b, x->h, token(x->keys_at, j), x->all->values, to);
}

static void transpose(const float *a, int64_t rows, int64_t columns, int64_t lda, float *to, int64_t ldt) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < columns; d++) to[d * ldt + i] = a[i * lda + d];
}

static void release(head *x) { free(x->first), free(x->means); }

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
    x->first = calloc(x->clusters + 2 + x->n, sizeof(int32_t));
    x->means = floats(x->clusters * x->size + x->size * x->lanes + x->size);
    if (!x->first || !x->means) return 0;
    memset(x->means, 0, sizeof(float) * (x->clusters * x->size + x->size * x->lanes + x->size));
    x->order = x->first + x->clusters + 2, x->across = x->means + x->clusters * x->size;
    float *row = x->across + x->size * x->lanes;
    /* Counted two places on, so that after the sort first[c] is where c begins. */
    for (i = 0; i < x->n; i++) x->first[x->groups[i] + 2]++;
    for (c = 0; c < x->clusters; c++) x->first[c + 2] += x->first[c + 1];
    for (i = 0; i < x->n; i++) {
        float *sum = x->means + x->groups[i] * x->size;
        x->order[x->first[x->groups[i] + 1]++] = (int32_t)i;
        read_query(x, i, row);
        for (d = 0; d < x->size; d++) sum[d] += row[d];
    }
    for (c = 0; c < x->clusters; c++) {
        int64_t count = x->first[c + 1] - x->first[c];
        for (d = 0; d < x->size; d++) x->means[c * x->size + d] *= all->scale / (count ? count : 1);
    }
    transpose(x->means, x->clusters, x->size, x->size, x->across, x->lanes);
    return 1;
}

/* Scores of a block of keys against all mean queries, [keys, C]; the keys stay behind. */
static int64_t score_block(const head *x, int64_t begin, float *keys, float *scores) {
    int64_t count = x->keys - begin < BLOCK ? x->keys - begin : BLOCK;
    for (int64_t j = 0; j < count; j++) read_key(x, begin + j, keys + j * x->size);
    product(count, x->lanes, x->all->size, keys, x->size, 1, x->across, x->lanes, scores, x->lanes, 0);
    return count;
}

/* Softmax of scores [members, keys] in place, columns from `kept` on becoming 0. */
static void softmax_rows(float *scores, int64_t rows, int64_t kept, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * width, largest = row[0], sum = 0;
        for (int64_t j = 1; j < kept; j++) largest = row[j] > largest ? row[j] : largest;
        for (int64_t j = 0; j < width; j += WIDTH) *(vf *)(row + j) = vexp(*(vf *)(row + j) - largest);
        for (int64_t j = 0; j < kept; j++) sum += row[j];
        for (int64_t j = 0; j < width; j++) row[j] = j < kept ? row[j] / sum : 0;
    }
}

/* Keys [D, K] and values [K, E] of a list, padded with zeros. */
static void gather_keys(const head *x, const int32_t *list, float *rows, float *across, float *values, int64_t width) {
    for (int64_t j = 0; j < x->kept; j++) {
        read_key(x, list[j], rows + j * x->size);
        read_value(x, list[j], values + j * x->values);
    }
    transpose(rows, x->kept, x->all->size, x->size, across, width);
}
"""
)
