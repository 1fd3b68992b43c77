// Scores of an indexer (DeepSeek-V3.2, arXiv 2512.02556, equation 1): what a key is worth to a token is the sum over heads of
// weight * max(query . key, 0). Compiled when a stage starts, for its own geometry, with
//   ELEMENT   the dtype, see workers/device/element.h
//   HEADS     heads of the indexer
//   DIM       elements of a query and key
//
// Every sum has the same order, whatever other tokens and keys there are, on any number of threads.

#include "element.h"

#define LANES 16
#define BLOCK 64 // keys of a unit of work

static inline float multiply(const float *query, const float *key) {
    float sums[LANES] = {0};
    int d = 0;
    for (; d + LANES <= DIM; d += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += query[d + l] * key[d + l];
    for (int l = 0; d + l < DIM; l++) sums[l] += query[d + l] * key[d + l];
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sums[l] += sums[l + half];
    return sums[0];
}

// q [tokens][HEADS][DIM], weights [tokens][HEADS], cached [rows][DIM], of which `rows` [keys] are a sequence's; scores [tokens][keys].
void score_keys(const element *q, const float *weights, const element *cached, const int64_t *rows, float *scores, int64_t tokens,
                int64_t keys, int threads) {
    const int64_t blocks = (keys + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK, count = keys - first < BLOCK ? keys - first : BLOCK;
        float own[BLOCK][DIM], query[DIM];
        for (int64_t k = 0; k < count; k++)
            for (int d = 0; d < DIM; d++) own[k][d] = widen(cached[rows[first + k] * DIM + d]);
        for (int64_t token = 0; token < tokens; token++) {
            float *out = scores + token * keys + first;
            for (int64_t k = 0; k < count; k++) out[k] = 0;
            for (int head = 0; head < HEADS; head++) {
                const float weight = weights[token * HEADS + head];
                for (int d = 0; d < DIM; d++) query[d] = widen(q[(token * HEADS + head) * DIM + d]);
                for (int64_t k = 0; k < count; k++) {
                    const float product = multiply(query, own[k]);
                    out[k] += weight * (product > 0 ? product : 0);
                }
            }
        }
    }
}
