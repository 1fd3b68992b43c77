// Causal attention with a window, to the pages of a rolling cache, which are read in place, or to consecutive keys; softmax over
// blocks of keys as in FlashAttention (Dao et al., 2022). Compiled when a stage starts, for its own geometry, with
//   ELEMENT   the dtype, see workers/device/element.h
//   HEAD_DIM  d, elements of a head, an even number
//   GROUP     query heads that share a key/value head
//   PAGE      rows of a page
//
// Blocks begin at multiples of COLUMNS positions of the sequence, and what a query does not see changes nothing. So the result of a
// query depends on the keys that it sees alone, bit for bit: not on other queries, on threads, on where the keys are stored, nor on
// whether its token is decoded or part of a prompt.

#include "tile.h"

#define LOWEST -3.4028235e38f                  // a score that no other is below, and finite
#define HEAD_UNITS UNITS(HEAD_DIM)             // of a query or key
#define BLOCK_UNITS UNITS(COLUMNS)             // of the weights of a block's keys
#define PANELS ((HEAD_DIM + COLUMNS - 1) / COLUMNS) // of a head's values
#define MOST_TOKENS (GROUP < 128 ? 128 / GROUP : 1) // whose queries are a unit of work
#define MOST_ROWS (MOST_TOKENS * GROUP)

// Where the keys and values of a sequence are. The key of position p is in row p - first, or if there are pages in row
// p % PAGE of page pages[p / PAGE - first / PAGE]. Rows are key_stride and value_stride elements apart.
struct source {
    const element *keys, *values;
    int64_t key_stride, value_stride, first;
    const int32_t *pages;
};

// The queries of consecutive tokens for one key/value head, row by row: the GROUP queries of the first token, those of the second.
// `sums` are the sums of the weights e^(score - highest), `out` those of the values with these weights.
struct rows {
    unit queries[MOST_ROWS][HEAD_UNITS];
    float highest[MOST_ROWS], sums[MOST_ROWS];
    floats out[PANELS][MOST_ROWS][2];
};

// The keys [HEAD_UNITS][COLUMNS] and values [PANELS][BLOCK_UNITS][COLUMNS] of a block, as units of panels.
struct block {
    part keys[HEAD_UNITS * COLUMNS * STEP], values[PANELS * BLOCK_UNITS * COLUMNS * STEP];
};

static int64_t row_of(const struct source *from, int64_t position) {
    if (!from->pages) return position - from->first;
    return from->pages[position / PAGE - from->first / PAGE] * (int64_t)PAGE + position % PAGE;
}

#if defined(__AVX512F__) && (STEP == 2 || ELEMENT == 0)
// Transposes 16 rows of 16 numbers of 4 bytes: swaps quarters of squares with a side of 16, then of 8, 4 and 2.
static inline void transpose(__m512i rows[16]) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int half = 8; half > 0; half /= 2) {
        const __mmask16 is_right = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(half));
        const __m512i upper = _mm512_mask_add_epi32(lanes, is_right, lanes, _mm512_set1_epi32(16 - half));
        const __m512i lower = _mm512_mask_add_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(half)), is_right, lanes, _mm512_set1_epi32(16));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & half) continue;
            const __m512i first = rows[i], second = rows[i + half];
            rows[i] = _mm512_permutex2var_epi32(first, upper, second);
            rows[i + half] = _mm512_permutex2var_epi32(first, lower, second);
        }
    }
}

static void load_keys(part *to, const element *const keys[COLUMNS]) {
    for (int begin = 0; begin < HEAD_UNITS; begin += 16) {
        const __mmask16 mask = HEAD_UNITS - begin < 16 ? (1 << (HEAD_UNITS - begin)) - 1 : 0xffff;
        for (int column = 0; column < COLUMNS; column += 16) {
            __m512i rows[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) rows[i] = _mm512_maskz_loadu_epi32(mask, keys[column + i] + begin * STEP);
            transpose(rows);
            for (int i = 0; i < 16 && begin + i < HEAD_UNITS; i++)
                _mm512_storeu_si512(to + ((begin + i) * COLUMNS + column) * STEP, rows[i]);
        }
    }
}
#elif LANES == 8 && STEP == 1
// Transposes 8 rows of 8 floats in the same way.
static inline void transpose(floats rows[8]) {
    typedef int32_t lanes __attribute__((vector_size(32)));
    static const lanes upper[] = {{0, 8, 2, 10, 4, 12, 6, 14}, {0, 1, 8, 9, 4, 5, 12, 13}, {0, 1, 2, 3, 8, 9, 10, 11}};
    static const lanes lower[] = {{1, 9, 3, 11, 5, 13, 7, 15}, {2, 3, 10, 11, 6, 7, 14, 15}, {4, 5, 6, 7, 12, 13, 14, 15}};
#pragma GCC unroll 3
    for (int level = 2; level >= 0; level--) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            if (i >> level & 1) continue;
            const floats first = rows[i], second = rows[i + (1 << level)];
            rows[i] = __builtin_shuffle(first, second, upper[level]);
            rows[i + (1 << level)] = __builtin_shuffle(first, second, lower[level]);
        }
    }
}

static void load_keys(part *to, const element *const keys[COLUMNS]) {
    for (int begin = 0; begin < HEAD_DIM; begin += 8) {
        const int count = HEAD_DIM - begin < 8 ? HEAD_DIM - begin : 8;
        for (int column = 0; column < COLUMNS; column += 8) {
            floats rows[8];
            for (int i = 0; i < 8; i++) {
                float row[8] = {0};
                for (int e = 0; e < count; e++) row[e] = widen(keys[column + i][begin + e]);
                memcpy(&rows[i], row, sizeof row);
            }
            transpose(rows);
            for (int i = 0; i < count; i++) memcpy(to + (begin + i) * COLUMNS + column, &rows[i], sizeof rows[i]);
        }
    }
}
#else
static void load_keys(part *to, const element *const keys[COLUMNS]) {
    for (int e = 0; e < HEAD_DIM; e++)
        for (int column = 0; column < COLUMNS; column++)
            to[(e / STEP * COLUMNS + column) * STEP + e % STEP] = element_to_part(keys[column][e]);
}
#endif

// Loads the keys and values of the positions `begin` to begin + COLUMNS - 1, with 0 for those outside of [first, end).
static void load_block(struct block *to, const struct source *from, int64_t begin, int64_t first, int64_t end) {
    static const element zeros[HEAD_DIM + STEP];
    const element *keys[COLUMNS], *values[COLUMNS];
    for (int column = 0; column < COLUMNS; column++) {
        const int64_t position = begin + column;
        const int is_seen = position >= first && position < end;
        const int64_t row = is_seen ? row_of(from, position) : 0;
        keys[column] = is_seen ? from->keys + row * from->key_stride : zeros;
        values[column] = is_seen ? from->values + row * from->value_stride : zeros;
    }
    load_keys(to->keys, keys);
    for (int unit = 0; unit < BLOCK_UNITS; unit++)
        for (int panel = 0; panel < PANELS; panel++) {
            part *target = to->values + (panel * BLOCK_UNITS + unit) * COLUMNS * STEP;
            const int start = panel * COLUMNS, count = HEAD_DIM - start < COLUMNS ? HEAD_DIM - start : COLUMNS;
            for (int e = 0; e < count; e++)
                for (int s = 0; s < STEP; s++) target[e * STEP + s] = element_to_part(values[unit * STEP + s][start + e]);
        }
}

static int has_finite_values(const struct block *block) {
    int others = 0;
    for (int i = 0; i < PANELS * BLOCK_UNITS * COLUMNS * STEP; i++) {
#if STEP == 2
        others |= (block->values[i] & 0x7f80) == 0x7f80;
#else
        others |= block->values[i] - block->values[i] != 0;
#endif
    }
    return !others;
}

// The highest, and the sum, of COLUMNS numbers: of halves, of their halves and so on, which compilers turn into vector instructions.
static inline float highest_of(float *x) {
#pragma GCC unroll 8
    for (int half = COLUMNS / 2; half > 0; half /= 2)
        for (int c = 0; c < half; c++) x[c] = x[c] > x[c + half] ? x[c] : x[c + half];
    return x[0];
}

static inline float sum_of(float *x) {
#pragma GCC unroll 8
    for (int half = COLUMNS / 2; half > 0; half /= 2)
        for (int c = 0; c < half; c++) x[c] += x[c + half];
    return x[0];
}

// Turns the scores of a row into weights, of which only those of the columns [from, to) are not 0. Returns the factor of what has
// been added up before.
static inline float weigh(const float *scores, part *weights, int from, int to, float *highest, float *sum) {
    const float scale = 1.0f / sqrtf(HEAD_DIM);
    float scaled[COLUMNS], reduced[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) reduced[c] = scaled[c] = c >= from && c < to ? scores[c] * scale : LOWEST;
    const float block_highest = highest_of(reduced), top = *highest > block_highest ? *highest : block_highest;
    for (int c = 0; c < COLUMNS; c++) {
        const float weight = exp_negative(scaled[c] - top);
        reduced[c] = scaled[c] = c >= from && c < to ? weight : 0;
    }
    for (int c = 0; c < COLUMNS; c++) weights[c] = to_part(scaled[c]);
    const float factor = exp_negative(*highest - top);
    *highest = top;
    *sum = *sum * factor + sum_of(reduced);
    return factor;
}

#define TILE(count)                                                                                                               \
    case count:                                                                                                                   \
        add_products_of(count, sums, inputs, row_stride, 1, panel, sizeof(part), read_parts, units, 0, 0);                        \
        break;

static inline void add_products(int64_t rows, floats sums[][2], const unit *inputs, const int64_t row_stride, const part *panel,
                                const int64_t units) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if ROWS == 12
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

// Adds a block of keys from position `begin` on to `count` rows from `row` on. Row 0 belongs to the token at `position`.
static void add_block(struct rows *own, const struct block *block, int64_t row, int64_t count, int64_t begin, int64_t position,
                      int64_t window) {
    floats scores[ROWS][2];
    unit weights[ROWS][BLOCK_UNITS];
    float factors[ROWS];
    memset(scores, 0, count * sizeof scores[0]);
    add_products(count, scores, own->queries[row], HEAD_UNITS, block->keys, HEAD_UNITS);
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = position + (row + i) / GROUP - begin; // relative to the block, as `from` and `to`
        const int64_t from = query - window + 1 < 0 ? 0 : query - window + 1, to = query + 1 < COLUMNS ? query + 1 : COLUMNS;
        factors[i] = weigh((const float *)scores[i], (part *)weights[i], from < COLUMNS ? from : COLUMNS, to,
                           own->highest + row + i, own->sums + row + i);
    }
    for (int64_t panel = 0; panel < PANELS; panel++) {
        floats(*out)[2] = own->out[panel] + row;
        for (int64_t i = 0; i < count; i++) out[i][0] *= factors[i], out[i][1] *= factors[i];
        add_products(count, out, weights[0], BLOCK_UNITS, block->values + panel * BLOCK_UNITS * COLUMNS * STEP, BLOCK_UNITS);
    }
}

// Attends with the queries of `tokens` tokens of one key/value head, the first of them at `position`. Tokens are query_stride
// elements apart, in `out` out_stride. Returns 0, without a result, if a value is NaN or infinite and not all tokens may see it: they
// would multiply it by 0. A clone for one token could be compiled to other roundings than the one for several.
static __attribute__((noinline, noclone)) int attend(const struct source *from, const element *queries, int64_t query_stride,
                                                     element *out, int64_t out_stride, int64_t position, int64_t tokens,
                                                     int64_t window) {
    struct rows own;
    struct block block;
    memset(block.values, 0, sizeof block.values); // also past a head's last element
    const int64_t rows = tokens * GROUP, oldest = position - window + 1 < 0 ? 0 : position - window + 1;
    memset(own.queries, 0, rows * sizeof own.queries[0]);
    for (int64_t row = 0; row < rows; row++) {
        part *query = (part *)own.queries[row];
        const element *given = queries + row / GROUP * query_stride + row % GROUP * HEAD_DIM;
        for (int64_t e = 0; e < HEAD_DIM; e++) query[e] = element_to_part(given[e]);
        own.highest[row] = LOWEST;
        own.sums[row] = 0;
        for (int64_t panel = 0; panel < PANELS; panel++) own.out[panel][row][0] = own.out[panel][row][1] = (floats){0};
    }
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t begin = oldest / COLUMNS * COLUMNS; begin < position + tokens; begin += COLUMNS) {
        load_block(&block, from, begin, oldest, position + tokens);
        if (tokens > 1 && !has_finite_values(&block)) return 0;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = tile * rows / tiles, count = (tile + 1) * rows / tiles - row;
            const int64_t last = position + (row + count - 1) / GROUP;
            const int is_seen = begin <= last && begin + COLUMNS > position + row / GROUP - window + 1;
            if (is_seen) add_block(&own, &block, row, count, begin, position, window);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        element *to = out + row / GROUP * out_stride + row % GROUP * HEAD_DIM;
        for (int64_t e = 0; e < HEAD_DIM; e++)
            to[e] = narrow(((const float *)own.out[e / COLUMNS][row])[e % COLUMNS] / own.sums[row]);
    }
    return 1;
}

// Single tokens. q [tokens][kv_heads * GROUP][HEAD_DIM], tokens query_stride elements apart; k, v [rows][kv_heads][HEAD_DIM]; out
// as q, without gaps. pages [tokens][width]: those of a token's sequence, from the page of the oldest key that it sees.
void attend_tokens(const element *q, int64_t query_stride, const element *k, const element *v, const int32_t *pages,
                   const int64_t *positions, element *out, int64_t tokens, int64_t kv_heads, int64_t width, int64_t window,
                   int threads) {
    const int64_t stride = kv_heads * HEAD_DIM;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < tokens * kv_heads; i++) {
        const int64_t token = i / kv_heads, head = i % kv_heads, oldest = positions[token] - window + 1;
        const struct source from = {k + head * HEAD_DIM, v + head * HEAD_DIM,    stride,
                                    stride,              oldest < 0 ? 0 : oldest, pages + token * width};
        attend(&from, q + token * query_stride + head * GROUP * HEAD_DIM, 0, out + i * GROUP * HEAD_DIM, 0, positions[token], 1,
               window);
    }
}

// Chunks of several tokens, one after the other in q, and their keys in k and v. chunks [num_chunks][4]: tokens, keys, position of
// the first token, position of the first key.
void attend_chunks(const element *q, int64_t query_stride, const element *k, int64_t key_stride, const element *v,
                   int64_t value_stride, const int64_t (*chunks)[4], int64_t num_chunks, element *out, int64_t kv_heads,
                   int64_t window, int threads) {
    const int64_t out_stride = kv_heads * GROUP * HEAD_DIM;
#pragma omp parallel num_threads(threads)
    for (int64_t chunk = 0, token = 0, key = 0; chunk < num_chunks; token += chunks[chunk][0], key += chunks[chunk][1], chunk++) {
        const int64_t tokens = chunks[chunk][0], parts = (tokens + MOST_TOKENS - 1) / MOST_TOKENS;
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < parts * kv_heads; i++) {
            const int64_t head = i % kv_heads, first = i / kv_heads * tokens / parts, end = (i / kv_heads + 1) * tokens / parts;
            const struct source from = {k + key * key_stride + head * HEAD_DIM, v + key * value_stride + head * HEAD_DIM,
                                        key_stride, value_stride, chunks[chunk][3], 0};
            const element *queries = q + (token + first) * query_stride + head * GROUP * HEAD_DIM;
            element *to = out + (token + first) * out_stride + head * GROUP * HEAD_DIM;
            const int64_t position = chunks[chunk][2] + first;
            if (attend(&from, queries, query_stride, to, out_stride, position, end - first, window)) continue;
            for (int64_t t = 0; t < end - first; t++)
                attend(&from, queries + t * query_stride, 0, to + t * out_stride, 0, position + t, 1, window);
        }
    }
}
