/* Sign hashes and Hamming k-means in C: the words of a head stay in a core's own cache. */

#include "parts.h"
#include "rows.h"

/* Queries whose heights stay in a core's own cache, and bits of a word. */
enum { ROWS = 64, BITS = 64 };

/* Signs of a row of heights. */
INLINE uint64_t signs(const float *row) {
    uint64_t word = 0;
#if WIDTH == 16
    for (int64_t d = 0; d < BITS; d += WIDTH)
        word |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(row + d), _mm512_setzero_ps(), _CMP_GT_OQ) << d;
#else
    vi lane;
    for (int l = 0; l < WIDTH; l++) lane[l] = 1 << l;
    for (int64_t side = 0; side < BITS; side += 32) {
        vi found = {0};
        uint32_t half = 0;
        for (int d = 0; d < 32; d += WIDTH) found |= (*(const vf *)(row + side + d) > 0.0f) & (lane << d);
        for (int l = 0; l < WIDTH; l++) half |= (uint32_t)found[l];
        word |= (uint64_t)half << side;
    }
#endif
    return word;
}

/* Planes transposed, [D, BITS], with a last row that is added to heights: their biases, or a value that no height
   reaches. */
static void stand(const float *planes, int64_t bits, int64_t size, float *across) {
    for (int64_t d = 0; d <= size; d++)
        for (int64_t i = 0; i < BITS; i++) {
            float plane = i < bits ? planes[i * (size + 1) + d] : 0;
            across[d * BITS + i] = d < size ? plane : i < bits ? -plane : -INFINITY;
        }
}

/* Words of some queries of a head, the first n unless they are named; for bfloat16 by planes in parts, if there are
   any. */
static void hash(tensor q, int64_t bf16, int64_t b, int64_t h, const int32_t *tokens, int64_t n, int64_t size,
                 int64_t bits, const float *across, split parts, float *memory, uint64_t *words) {
    int64_t wide = padded(size);
    int half = begin_halves(parts.pairs != NULL, n);
    float *heights = memory + ROWS * wide;
    for (int64_t first = 0; first < n; first += ROWS) {
        int64_t rows = lesser(ROWS, n - first);
        read_rows(q, bf16, b, h, tokens, first, rows, size, memory);
        for (int64_t i = 0; i < rows; i++) memcpy(heights + i * BITS, across + size * BITS, sizeof(float) * BITS);
        if (half) split_product(rows, padded(bits), size, memory, wide, parts, heights, BITS, 1);
        else product(rows, padded(bits), size, memory, wide, 1, across, BITS, heights, BITS, 1);
        for (int64_t i = 0; i < rows; i++) words[first + i] = signs(heights + i * BITS);
    }
    end_halves(half);
}

#if defined(__AVX2__) && !defined(__AVX512VPOPCNTDQ__)
/* Bits set in each of four words: a table of sixteen for each half of a byte, summed over the bytes. */
INLINE __m256i bits_set(__m256i x) {
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2,
                                           2, 3, 2, 3, 3, 4);
    const __m256i half = _mm256_set1_epi8(15);
    __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, half));
    __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), half));
    return _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256());
}
#endif

#if WIDTH == 16 && defined(__AVX512VPOPCNTDQ__)
#define HAVE_COUNTS 1
/* As `nearest`, for up to 2^16 centroids: of 16 words the differences and the centroid's number make one vector of
   keys. */
static void nearest_counted(const uint64_t *words, int64_t n, const uint64_t *centroids, int64_t clusters,
                            int32_t *groups) {
    for (int64_t i = 0; i < n; i += 32) {
        uint64_t row[32];
        uint32_t best[32];
        for (int r = 0; r < 32; r++) row[r] = words[lesser(i + r, n - 1)];
        __m512i word[4], least[2] = {_mm512_set1_epi32(-1), _mm512_set1_epi32(-1)}, number = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) word[w] = _mm512_loadu_si512(row + 8 * w);
        for (int64_t c = 0; c < clusters; c++) {
            __m512i other = _mm512_set1_epi64((long long)centroids[c]);
#pragma GCC unroll 2
            for (int w = 0; w < 2; w++) {
                __m512i low = _mm512_slli_epi64(_mm512_popcnt_epi64(_mm512_xor_si512(word[2 * w], other)), 16);
                __m512i high = _mm512_slli_epi64(_mm512_popcnt_epi64(_mm512_xor_si512(word[2 * w + 1], other)), 48);
                least[w] = _mm512_min_epu32(_mm512_ternarylogic_epi64(low, high, number, 0xfe), least[w]);
            }
            number = _mm512_add_epi32(number, _mm512_set1_epi32(1));
        }
        for (int w = 0; w < 2; w++) _mm512_storeu_si512(best + 16 * w, least[w]);
        for (int r = 0; r < 32 && i + r < n; r++) groups[i + r] = best[r / 16 * 16 + r % 8 * 2 + r / 8 % 2] & 0xffff;
    }
}
#else
#define HAVE_COUNTS 0
BEGIN_STAND_INS
INLINE void nearest_counted(const uint64_t *words, int64_t n, const uint64_t *centroids, int64_t clusters,
                            int32_t *groups) {}
END_STAND_INS
#endif

/* The centroid that differs in fewest bits from each word, the lowest among equals. */
static void nearest(const uint64_t *words, int64_t n, const uint64_t *centroids, int64_t clusters, int32_t *groups) {
    if (HAVE_COUNTS && clusters <= 1 << 16) {
        nearest_counted(words, n, centroids, clusters, groups);
        return;
    }
    for (int64_t i = 0; i < n; i += 8) {
        uint64_t row[8], best[8];
        for (int r = 0; r < 8; r++) row[r] = words[i + r < n ? i + r : n - 1], best[r] = UINT64_MAX;
#if defined(__AVX2__) && !defined(__AVX512VPOPCNTDQ__)
        __m256i first = _mm256_loadu_si256((__m256i *)row), second = _mm256_loadu_si256((__m256i *)(row + 4));
        __m256d most = _mm256_set1_pd(1e300), least[2] = {most, most};
        for (int64_t c = 0; c < clusters; c++) {
            /* Read as doubles, which have a minimum, keys keep their order; the one more keeps them normal. */
            __m256i other = _mm256_set1_epi64x((long long)centroids[c]), number = _mm256_set1_epi64x(1LL << 52 | c);
            __m256i one = _mm256_slli_epi64(bits_set(_mm256_xor_si256(first, other)), 52);
            __m256i two = _mm256_slli_epi64(bits_set(_mm256_xor_si256(second, other)), 52);
            least[0] = _mm256_min_pd(_mm256_castsi256_pd(_mm256_add_epi64(one, number)), least[0]);
            least[1] = _mm256_min_pd(_mm256_castsi256_pd(_mm256_add_epi64(two, number)), least[1]);
        }
        _mm256_storeu_pd((double *)best, least[0]), _mm256_storeu_pd((double *)(best + 4), least[1]);
#else
        for (int64_t c = 0; c < clusters; c++)
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                uint64_t key = (uint64_t)__builtin_popcountll(row[r] ^ centroids[c]) << 32 | (uint64_t)c;
                best[r] = key < best[r] ? key : best[r];
            }
#endif
        for (int r = 0; r < 8 && i + r < n; r++) groups[i + r] = (int32_t)best[r];
    }
}

/* Which of the sums of a cluster's bits are no smaller than a bound. */
INLINE uint64_t reaching(const int32_t *sums, int32_t bound) {
    /* As numbers of float32, of which signs are taken anyway; exact below 2^24 members. */
    float above[BITS];
    for (int b = 0; b < BITS; b++) above[b] = (float)(sums[b] - bound) + 0.5f;
    return signs(above);
}

/* Move each centroid to the majority bits of its members; says whether any has moved. */
static int move(const uint64_t *words, int64_t n, const int32_t *groups, uint64_t *centroids, int64_t clusters,
                const int64_t *draws, int64_t step, int32_t *ones, int32_t *members) {
    memset(ones, 0, sizeof(int32_t) * 64 * clusters);
    memset(members, 0, sizeof(int32_t) * clusters);
    for (int64_t i = 0; i < n; i++) {
        int32_t *sums = ones + 64 * groups[i];
        uint32_t low = (uint32_t)words[i], high = (uint32_t)(words[i] >> 32);
        for (int b = 0; b < 32; b++) sums[b] += low >> b & 1;
        for (int b = 0; b < 32; b++) sums[32 + b] += high >> b & 1;
        members[groups[i]]++;
    }
    int moved = 0;
    for (int64_t c = 0; c < clusters; c++) {
        uint64_t majority = reaching(ones + BITS * c, members[c] / 2 + 1);
        uint64_t tied = members[c] % 2 ? 0 : reaching(ones + BITS * c, members[c] / 2) & ~majority;
        uint64_t next = members[c] ? majority | (tied & centroids[c]) : words[(draws[c] + step) % n];
        moved |= !members[c] || next != centroids[c];
        centroids[c] = next;
    }
    return moved;
}

/* q [B, H, L, D], planes [bits, D + 1] -> groups [B, H, L], of the real tokens of each sample in their order; a sample
   without clusters is skipped, and with no more queries than clusters each query is a cluster. */
int cluster(const tensor *q, const float *planes, const int32_t *tokens, const int64_t *counts, const int64_t *clusters,
            const int64_t *draws, int64_t bf16, int64_t batch, int64_t heads, int64_t length, int64_t size,
            int64_t bits, int64_t iterations, int64_t stride, int64_t threads, int32_t *groups) {
    int failed = 0;
    float *across = floats((size + 1) * BITS);
    if (!across) return 1;
    stand(planes, bits, size, across);
    /* Three parts hold all bits of a plane, so hashes do not depend on the processor. */
    split parts = split_rows(bf16, 3, size, BITS, 1.0f, across, BITS);
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : failed)
    for (int64_t item = 0; item < batch * heads; item++) {
        int64_t b = item / heads, n = counts[b], wanted = clusters[b];
        if (!wanted) continue;
        int32_t *found = groups + item * length;
        if (n <= wanted) {
            for (int64_t i = 0; i < n; i++) found[i] = (int32_t)i;
            continue;
        }
        uint64_t *words = malloc(sizeof(uint64_t) * (n + wanted)), *centroids = words + n;
        int32_t *ones = malloc(sizeof(int32_t) * (BITS + 1) * wanted);
        float *memory = floats(ROWS * (padded(size) + BITS));
        if (!words || !ones || !memory) {
            free(words), free(ones), free(memory), failed = 1;
            continue;
        }
        hash(*q, bf16, b, item % heads, tokens ? tokens + b * length : NULL, n, size, bits, across, parts, memory,
             words);
        for (int64_t c = 0; c < wanted; c++) {
            int64_t low = c * n / wanted, high = (c + 1) * n / wanted;
            centroids[c] = words[low + draws[c] % (high - low)];
        }
        nearest(words, n, centroids, wanted, found);
        for (int64_t step = 1; step < iterations; step++) {
            if (!move(words, n, found, centroids, wanted, draws, step * stride, ones, ones + BITS * wanted)) break;
            nearest(words, n, centroids, wanted, found);
        }
        free(words), free(ones), free(memory);
    }
    free(across), free((void *)parts.pairs);
    return failed;
}
