// Attention of single tokens to the pages of a rolling cache, which are read in place; softmax over pages as in
// FlashAttention (Dao et al., 2022), in float32. Compiled when a stage starts, for its own geometry, with
//   ELEMENT   the dtype, see workers/device/element.h
//   HEAD_DIM  d, elements of a head
//   GROUP     query heads that share a key/value head
//   PAGE      rows of a page
// so that the compiler knows the length of every loop and turns it into vector instructions.

#include "element.h"

#define LOWEST -1e30f // a score below all others, and finite

// The query heads of one key/value head and their state: `out` is the sum of the values with weights e^(score - highest), `sums`
// that of the weights.
struct group {
    float queries[GROUP][HEAD_DIM], out[GROUP][HEAD_DIM], highest[GROUP], sums[GROUP];
};

// Adds the rows [first, end) of one page, which are `stride` elements apart.
static void add_page(struct group *own, const element *keys, const element *values, int64_t stride, int first, int end) {
    float scores[GROUP][PAGE];
    for (int row = first; row < end; row++) {
        float key[HEAD_DIM];
        for (int e = 0; e < HEAD_DIM; e++) key[e] = widen(keys[row * stride + e]);
        for (int g = 0; g < GROUP; g++) {
            float sum = 0;
            for (int e = 0; e < HEAD_DIM; e++) sum += own->queries[g][e] * key[e];
            scores[g][row] = sum;
        }
    }
    for (int g = 0; g < GROUP; g++) {
        for (int row = 0; row < first; row++) scores[g][row] = LOWEST;
        for (int row = end; row < PAGE; row++) scores[g][row] = LOWEST;
        float highest = own->highest[g], sum = 0;
        for (int row = 0; row < PAGE; row++) highest = scores[g][row] > highest ? scores[g][row] : highest;
        for (int row = 0; row < PAGE; row++) scores[g][row] = exp_negative(scores[g][row] - highest);
        for (int row = first; row < end; row++) sum += scores[g][row];
        const float scale = exp_negative(own->highest[g] - highest);
        own->highest[g] = highest;
        own->sums[g] = own->sums[g] * scale + sum;
        for (int e = 0; e < HEAD_DIM; e++) own->out[g][e] *= scale;
    }
    for (int row = first; row < end; row++) {
        float value[HEAD_DIM];
        for (int e = 0; e < HEAD_DIM; e++) value[e] = widen(values[row * stride + e]);
        for (int g = 0; g < GROUP; g++)
            for (int e = 0; e < HEAD_DIM; e++) own->out[g][e] += scores[g][row] * value[e];
    }
}

static void load(struct group *own, const element *q) {
    const float scale = 1.0f / sqrtf(HEAD_DIM);
    for (int g = 0; g < GROUP; g++) {
        own->highest[g] = LOWEST;
        own->sums[g] = 0;
        for (int e = 0; e < HEAD_DIM; e++) {
            own->queries[g][e] = widen(q[g * HEAD_DIM + e]) * scale;
            own->out[g][e] = 0;
        }
    }
}

static void store(const struct group *own, element *out) {
    for (int g = 0; g < GROUP; g++)
        for (int e = 0; e < HEAD_DIM; e++) out[g * HEAD_DIM + e] = narrow(own->out[g][e] / own->sums[g]);
}

// q, out [tokens][kv_heads * GROUP][HEAD_DIM]; k, v [rows][kv_heads][HEAD_DIM]; pages [tokens][width]. Token b sees the rows
// first[b] up to and without end[b] of its pages, counted consecutively: with PAGE 4, first 3 and end 9 these are row 3 of its
// first page, all of the second, and row 0 of the third. A unit of work has all heads of a token, since their keys are next to
// each other, unless there are too few tokens for the threads. What it computes does not depend on the other units.
void attend(const element *q, const element *k, const element *v, const int32_t *pages, const int32_t *first, const int32_t *end,
            element *out, int64_t tokens, int64_t kv_heads, int64_t width, int threads) {
    const int64_t parts = tokens < threads ? kv_heads : 1, num_groups = kv_heads / parts, stride = kv_heads * HEAD_DIM;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t unit = 0; unit < tokens * parts; unit++) {
        const int64_t token = unit / parts, head = unit % parts, size = GROUP * HEAD_DIM;
        const int64_t place = (token * kv_heads + head) * size;
        struct group groups[num_groups];
        for (int64_t i = 0; i < num_groups; i++) load(&groups[i], q + place + i * size);
        for (int row = first[token] / PAGE * PAGE; row < end[token]; row += PAGE) {
            const int64_t start = pages[token * width + row / PAGE] * PAGE * stride + head * HEAD_DIM;
            const int from = row < first[token] ? first[token] - row : 0, to = end[token] - row < PAGE ? end[token] - row : PAGE;
            for (int64_t i = 0; i < num_groups; i++) {
                const int64_t own = start + i * HEAD_DIM;
                add_page(&groups[i], k + own, v + own, stride, from, to);
            }
        }
        for (int64_t i = 0; i < num_groups; i++) store(&groups[i], out + place + i * size);
    }
}
