// Causal attention with a window, to the pages of a rolling cache, which are read in place, or to consecutive keys; softmax over
// blocks of keys as in FlashAttention (Dao et al., 2022). Compiled when a stage starts, for its own geometry, with
//   ELEMENT   the dtype, see workers/device/element.h
//   HEAD_DIM  d, elements of a head, an even number
//   GROUP     query heads that share a key/value head
//   PAGE      rows of a page
//   FP8_CACHE if pages hold numbers in FP8 (e4m3), times a scale for each row and head
//
// Blocks begin at multiples of COLUMNS positions of the sequence, and what a query does not see changes nothing. So the result of a
// query depends on the keys that it sees alone, bit for bit: not on other queries, on threads, on where the keys are stored, nor on
// whether its token is decoded or part of a prompt.

#include "transpose.h"

#define LINE 64                                // bytes of a cache line
#define LOWEST -3.4028235e38f                  // a score that no other is below, and finite
#define HEAD_UNITS UNITS(HEAD_DIM)             // of a query or key
#define BLOCK_UNITS UNITS(COLUMNS)             // of the weights of a block's keys
#define PANELS ((HEAD_DIM + COLUMNS - 1) / COLUMNS) // of a head's values
#define MOST_TOKENS (GROUP < 128 ? 128 / GROUP : 1) // whose queries are a unit of work
#define MOST_ROWS (MOST_TOKENS * GROUP)
_Static_assert(HEAD_DIM % STEP == 0, "no unit of a head is incomplete");

#ifdef FP8_CACHE
typedef uint8_t cached;
#else
typedef element cached;
#endif

// Where the keys and values of a sequence are. Those of the position p < split are in row p % PAGE of page
// pages[p / PAGE - first / PAGE], rows being paged_stride elements apart, and scales of rows paged_stride / HEAD_DIM; the others in
// row p - split of `keys` and `values`, whose rows are key_stride and value_stride elements apart.
struct source {
    const cached *paged_keys, *paged_values;
    const float *key_scales, *value_scales;
    int64_t paged_stride, first, split;
    const int32_t *pages;
    const element *keys, *values;
    int64_t key_stride, value_stride;
};

// The queries of consecutive tokens for one key/value head, row by row: the GROUP queries of the first token, those of the second.
// sums[r][l] is the sum of the weights e^(score - highest) of the keys in lane l of a block, `out` has those of the values with these
// weights.
struct rows {
    unit queries[MOST_ROWS][HEAD_UNITS];
    float highest[MOST_ROWS], sums[MOST_ROWS][LANES];
    floats out[PANELS][MOST_ROWS][2];
};

// The keys [HEAD_UNITS][COLUMNS] and values [PANELS][BLOCK_UNITS][COLUMNS] of a block, as units of panels.
struct block {
    part keys[HEAD_UNITS * COLUMNS * STEP], values[PANELS * BLOCK_UNITS * COLUMNS * STEP];
};

// Where the keys and values of a block are.
struct pointers {
    const element *keys[COLUMNS], *values[COLUMNS];
#ifdef FP8_CACHE
    element wide_keys[COLUMNS][HEAD_DIM], wide_values[COLUMNS][HEAD_DIM]; // of rows of pages
#endif
};

#ifdef FP8_CACHE
// A number of 4 bits of exponent and 3 of mantissa. In the place of a float's bits it is 2^-120 of itself: a float's exponent is
// counted from 127, its own from 7.
static inline float widen_fp8(uint8_t x) {
    const uint32_t bits = (uint32_t)(x & 0x80) << 24 | (uint32_t)(x & 0x7f) << 20;
    float y;
    memcpy(&y, &bits, 4);
    return (x & 0x7f) == 0x7f ? NAN : y * 0x1p120f;
}

// Writes a row of a page to `wide` with the bits that PyTorch gives it, and returns it.
static const element *widen_row(element *wide, const uint8_t *row, float scale) {
    for (int e = 0; e < HEAD_DIM; e++) wide[e] = narrow(widen_fp8(row[e]) * scale);
    return wide;
}
#endif

// Finds the rows of the positions `begin` to begin + COLUMNS - 1; of those outside of [first, end), zeros.
static void locate(struct pointers *to, const struct source *from, int64_t begin, int64_t first, int64_t end) {
    static const element zeros[HEAD_DIM + STEP];
    for (int column = 0; column < COLUMNS; column++) {
        const int64_t position = begin + column;
        if (position < first || position >= end) {
            to->keys[column] = to->values[column] = zeros;
        } else if (position >= from->split) {
            to->keys[column] = from->keys + (position - from->split) * from->key_stride;
            to->values[column] = from->values + (position - from->split) * from->value_stride;
        } else {
            const int64_t page = from->pages[position / PAGE - from->first / PAGE], row = page * PAGE + position % PAGE;
            const cached *key = from->paged_keys + row * from->paged_stride, *value = from->paged_values + row * from->paged_stride;
#ifdef FP8_CACHE
            const int64_t scale = row * (from->paged_stride / HEAD_DIM);
            to->keys[column] = widen_row(to->wide_keys[column], key, from->key_scales[scale]);
            to->values[column] = widen_row(to->wide_values[column], value, from->value_scales[scale]);
#else
            to->keys[column] = key;
            to->values[column] = value;
#endif
        }
    }
}

// Prefetches part `part` of `parts` of a block's keys or values. It is called between the products of the block before: a core waits
// if more lines are on their way than it can keep account of, which are fewer on the way to its first cache than to its second, so
// that is where they go. GCC takes a call of a function that only prefetches for one without an effect: hence always_inline.
static inline __attribute__((always_inline)) void prefetch(const element *const rows[COLUMNS], int64_t part, int64_t parts) {
    const int64_t lines = COLUMNS * ((sizeof(element[HEAD_DIM]) + LINE - 1) / LINE);
    for (int64_t i = part * lines / parts; i < (part + 1) * lines / parts; i++)
        __builtin_prefetch((const char *)rows[i % COLUMNS] + i / COLUMNS * LINE, 0, 2);
}

static void load_block(struct block *to, const struct pointers *rows) {
    transpose_rows(to->keys, rows->keys, HEAD_DIM);
    for (int unit = 0; unit < BLOCK_UNITS; unit++)
        for (int panel = 0; panel < PANELS; panel++) {
            part *target = to->values + (panel * BLOCK_UNITS + unit) * COLUMNS * STEP;
            const int start = panel * COLUMNS, count = HEAD_DIM - start < COLUMNS ? HEAD_DIM - start : COLUMNS;
            for (int e = 0; e < count; e++)
                for (int s = 0; s < STEP; s++) target[e * STEP + s] = element_to_part(rows->values[unit * STEP + s][start + e]);
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

// The highest of COLUMNS numbers.
static inline float highest_of(const float numbers[COLUMNS]) {
    float x[4];
    for (int i = 0; i < 4; i++) x[i] = numbers[i];
    for (int c = 4; c < COLUMNS; c += 4)
        for (int i = 0; i < 4; i++) x[i] = x[i] > numbers[c + i] ? x[i] : numbers[c + i];
    for (int i = 0; i < 2; i++) x[i] = x[i] > x[i + 2] ? x[i] : x[i + 2];
    return x[0] > x[1] ? x[0] : x[1];
}

// Turns the scores of a row into weights, of which only those of the columns [from, to) are not 0, and adds them to the sums [LANES].
// Returns the factor of what has been added up before.
static inline float weigh(const float *scores, part *weights, int from, int to, float *highest, float *sums) {
    const float scale = 1.0f / sqrtf(HEAD_DIM);
    const int is_whole = from <= 0 && to >= COLUMNS;
    float scaled[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) scaled[c] = scores[c] * scale;
    if (!is_whole)
        for (int c = 0; c < COLUMNS; c++) scaled[c] = c >= from && c < to ? scaled[c] : LOWEST;
    const float block_highest = highest_of(scaled), top = *highest > block_highest ? *highest : block_highest;
    for (int c = 0; c < COLUMNS; c++) scaled[c] = exp_negative(scaled[c] - top);
    if (!is_whole)
        for (int c = 0; c < COLUMNS; c++) scaled[c] = c >= from && c < to ? scaled[c] : 0;
    for (int c = 0; c < COLUMNS; c++) weights[c] = to_part(scaled[c]);
    const float factor = top == *highest ? 1 : exp_negative(*highest - top);
    *highest = top;
    for (int c = 0; c < LANES; c++) sums[c] = sums[c] * factor + (scaled[c] + scaled[c + LANES]);
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

// Adds a block of keys from position `begin` on to `count` rows from `row` on. Row 0 belongs to the token at `position`. The block
// `next` is prefetched, if it is given.
static void add_block(struct rows *own, const struct block *block, int64_t row, int64_t count, int64_t begin, int64_t position,
                      int64_t window, const struct pointers *next) {
    floats scores[ROWS][2];
    unit weights[ROWS][BLOCK_UNITS];
    float factors[ROWS];
    int changed = 0;
    memset(scores, 0, count * sizeof scores[0]);
    add_products(count, scores, own->queries[row], HEAD_UNITS, block->keys, HEAD_UNITS);
    for (int64_t i = 0; i < count; i++) {
        const int64_t query = position + (row + i) / GROUP - begin; // relative to the block, as `from` and `to`
        const int64_t from = query - window + 1 < 0 ? 0 : query - window + 1, to = query + 1 < COLUMNS ? query + 1 : COLUMNS;
        factors[i] = weigh((const float *)scores[i], (part *)weights[i], from < COLUMNS ? from : COLUMNS, to,
                           own->highest + row + i, own->sums[row + i]);
        changed |= factors[i] != 1;
    }
    for (int64_t panel = 0; panel < PANELS; panel++) {
        floats(*out)[2] = own->out[panel] + row;
        if (next) prefetch(next->keys, panel, PANELS);
        if (next && next->values[0] != next->keys[0]) prefetch(next->values, panel, PANELS);
        for (int64_t i = 0; changed && i < count; i++) out[i][0] *= factors[i], out[i][1] *= factors[i];
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
        memset(own.sums[row], 0, sizeof own.sums[row]);
        for (int64_t panel = 0; panel < PANELS; panel++) own.out[panel][row][0] = own.out[panel][row][1] = (floats){0};
    }
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    struct pointers pointers[2];
    int64_t begin = oldest / COLUMNS * COLUMNS;
    locate(&pointers[0], from, begin, oldest, position + tokens);
    for (int number = 0; begin < position + tokens; begin += COLUMNS, number = !number) {
        locate(&pointers[!number], from, begin + COLUMNS, oldest, position + tokens);
        load_block(&block, &pointers[number]);
        if (tokens > 1 && !has_finite_values(&block)) return 0;
        const struct pointers *next = &pointers[!number]; // for the first tile that sees this block
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = tile * rows / tiles, count = (tile + 1) * rows / tiles - row;
            const int64_t last = position + (row + count - 1) / GROUP;
            const int is_seen = begin <= last && begin + COLUMNS > position + row / GROUP - window + 1;
            if (!is_seen) continue;
            add_block(&own, &block, row, count, begin, position, window, next);
            next = 0;
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        element *to = out + row / GROUP * out_stride + row % GROUP * HEAD_DIM;
        float sum = 0;
        for (int c = 0; c < LANES; c++) sum += own.sums[row][c];
        for (int64_t e = 0; e < HEAD_DIM; e++) to[e] = narrow(((const float *)own.out[e / COLUMNS][row])[e % COLUMNS] / sum);
    }
    return 1;
}

// Single tokens. q [tokens][kv_heads * GROUP][HEAD_DIM], tokens query_stride elements apart; k, v [rows][kv_heads][HEAD_DIM] and, of
// numbers in FP8, their scales [rows][kv_heads]; out as q, without gaps. pages [tokens][width]: those of a token's sequence, from the
// page of the oldest key that it sees.
void attend_tokens(const element *q, int64_t query_stride, const cached *k, const cached *v, const float *k_scales,
                   const float *v_scales, const int32_t *pages, const int64_t *positions, element *out, int64_t tokens,
                   int64_t kv_heads, int64_t width, int64_t window, int threads) {
    const int64_t stride = kv_heads * HEAD_DIM;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < tokens * kv_heads; i++) {
        const int64_t token = i / kv_heads, head = i % kv_heads, oldest = positions[token] - window + 1;
        const struct source from = {.paged_keys = k + head * HEAD_DIM, .paged_values = v + head * HEAD_DIM,
                                    .key_scales = k_scales ? k_scales + head : 0, .value_scales = v_scales ? v_scales + head : 0,
                                    .paged_stride = stride, .first = oldest < 0 ? 0 : oldest, .split = positions[token] + 1,
                                    .pages = pages + token * width};
        attend(&from, q + token * query_stride + head * GROUP * HEAD_DIM, 0, out + i * GROUP * HEAD_DIM, 0, positions[token], 1,
               window);
    }
}

// Chunks of several tokens, one after the other in q, and keys of theirs in k and v. chunks [num_chunks][5]: tokens, keys in k,
// position of the first token, of the first key in k, and of the first key that the chunk sees. The keys between the last two are
// in pages of paged_k and paged_v [rows][kv_heads][HEAD_DIM], with scales as above, pages [num_chunks][width] from that of the first
// key on.
void attend_chunks(const element *q, int64_t query_stride, const element *k, int64_t key_stride, const element *v,
                   int64_t value_stride, const cached *paged_k, const cached *paged_v, const float *k_scales,
                   const float *v_scales, const int32_t *pages, int64_t width, const int64_t (*chunks)[5], int64_t num_chunks,
                   element *out, int64_t kv_heads, int64_t window, int threads) {
    const int64_t out_stride = kv_heads * GROUP * HEAD_DIM, paged_stride = kv_heads * HEAD_DIM;
#pragma omp parallel num_threads(threads)
    for (int64_t chunk = 0, token = 0, key = 0; chunk < num_chunks; token += chunks[chunk][0], key += chunks[chunk][1], chunk++) {
        const int64_t tokens = chunks[chunk][0], parts = (tokens + MOST_TOKENS - 1) / MOST_TOKENS;
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < parts * kv_heads; i++) {
            const int64_t head = i % kv_heads, first = i / kv_heads * tokens / parts, end = (i / kv_heads + 1) * tokens / parts;
            const struct source from = {paged_k + head * HEAD_DIM,
                                        paged_v + head * HEAD_DIM,
                                        k_scales ? k_scales + head : 0,
                                        v_scales ? v_scales + head : 0,
                                        paged_stride,
                                        chunks[chunk][4],
                                        chunks[chunk][3],
                                        pages + chunk * width,
                                        k + key * key_stride + head * HEAD_DIM,
                                        v + key * value_stride + head * HEAD_DIM,
                                        key_stride,
                                        value_stride};
            const element *queries = q + (token + first) * query_stride + head * GROUP * HEAD_DIM;
            element *to = out + (token + first) * out_stride + head * GROUP * HEAD_DIM;
            const int64_t position = chunks[chunk][2] + first;
            if (attend(&from, queries, query_stride, to, out_stride, position, end - first, window)) continue;
            for (int64_t t = 0; t < end - first; t++)
                attend(&from, queries + t * query_stride, 0, to + t * out_stride, 0, position + t, 1, window);
        }
    }
}
