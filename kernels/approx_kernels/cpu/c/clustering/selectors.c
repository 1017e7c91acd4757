/* The nearest of fitted centroids in C: heights of some queries at a time, of which only the largest is kept. */

#include "rows.h"
#include "softmax.h"

/* Queries whose heights stay in a core's own cache. */
enum { ROWS = 48 };

/* selectors [H, C, D + 1], the constants last -> groups [B, H, L], the first where several are as high. */
int nearest(const tensor *q, const float *selectors, int64_t bf16, int64_t batch, int64_t heads, int64_t length,
            int64_t size, int64_t clusters, int64_t threads, int32_t *groups) {
    int64_t wide = padded(size), lanes = padded(clusters);
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : failed)
    for (int64_t item = 0; item < batch * heads; item++) {
        const float *own = selectors + item % heads * clusters * (size + 1);
        float *memory = floats(ROWS * (wide + lanes) + size * lanes);
        if (!memory) {
            failed = 1;
            continue;
        }
        float *queries = memory, *heights = queries + ROWS * wide, *standing = heights + ROWS * lanes;
        transpose(clusters, size, own, size + 1, standing, lanes);
        for (int64_t first = 0; first < length; first += ROWS) {
            int64_t rows = lesser(ROWS, length - first);
            read_rows(*q, bf16, item / heads, item % heads, NULL, first, rows, size, queries);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t c = 0; c < lanes; c++)
                    heights[i * lanes + c] = c < clusters ? own[c * (size + 1) + size] : -INFINITY;
            product(rows, lanes, size, queries, wide, 1, standing, lanes, heights, lanes, 1);
            for (int64_t i = 0; i < rows; i++) {
                float *row = heights + i * lanes, highest = row_most(clusters, row, -INFINITY);
                int64_t found = 0;
                while (found + 1 < clusters && row[found] != highest) found++;
                groups[item * length + first + i] = (int32_t)found;
            }
        }
        free(memory);
    }
    return failed;
}
