// Products x W^T with weights that are stored in the order in which they are read. Compiled when a stage starts, with
//   ELEMENT  the dtype of x and of the output, see workers/device/element.h
//   WEIGHT   the numbers of W: 0 for ELEMENT itself, 1 for int8, 2 for float8_e4m3fn, 3 for int8 and x rounded to int8, too,
//            4 for bfloat16
// Each output is one sum over all inputs, in their order and in float32, whatever the other rows and the threads are: it is the
// same for a token alone and in a micro-batch.

#if WEIGHT == 3
#define INTEGERS
#endif
#include "tile.h"
#include <stdlib.h>
#include <sys/mman.h>

#if WEIGHT >= 1 && WEIGHT <= 3
typedef int8_t number; // the bits of float8_e4m3fn too
#elif WEIGHT == 4 || ELEMENT == 2
typedef int16_t number; // the bits of bfloat16 or float16
#else
typedef element number;
#endif
// bfloat16 that are not multiplied as such are stored in pairs: column c is the lower half of 32 bits and column LANES + c the upper
// one, so both are read at once. Other numbers that cannot be multiplied as they are stored are converted.
#define IS_PAIRED (STEP == 1 && (WEIGHT == 4 || (WEIGHT == 0 && ELEMENT == 1)))
#define IS_CONVERTED (STEP != 4 && !IS_PAIRED && (WEIGHT != 0 || (STEP == 1 && ELEMENT != 0)))
// Up to so many tiles of rows convert the weights themselves, which costs a twentieth of the time if they are pairs. For more, a
// chunk is converted once.
#if IS_PAIRED
#define DIRECT_TILES 4
#elif IS_CONVERTED
#define DIRECT_TILES 1
#else
#define DIRECT_TILES INT64_MAX
#endif

// Inputs are multiplied a block of rows at a time, which remains in the third-level cache while it is multiplied by all panels.
#define BLOCK_BYTES (1 << 21)
#define BLOCK_ROWS 252
// So many units of a panel are converted once, and multiplied by all rows of the block, before the next: they remain in the
// second-level cache. Numbers that are not converted once are multiplied a panel at a time.
#define CHUNK_UNITS ((1 << 16) / (COLUMNS * STEP * (int64_t)sizeof(part)))
#define AHEAD_BYTES 2048 // how far ahead weights are prefetched if they are used only once

#if defined(INTEGERS)
#define WITH_OFFSET(x) (number)((x) + OFFSET)
#else
#define WITH_OFFSET(x) (x)
#endif

int64_t panel_columns(void) { return COLUMNS; }
int64_t unit_numbers(void) { return STEP; }

// How many rows of x a block has: whole tiles. It depends on the inputs alone.
int64_t block_rows(int64_t inputs) {
    const int64_t rows = BLOCK_BYTES / (UNITS(inputs) * sizeof(unit)) / ROWS * ROWS;
    return rows < 4 * ROWS ? 4 * ROWS : rows > BLOCK_ROWS ? BLOCK_ROWS : rows;
}

// Requests large pages for `bytes` from `start` on, before they are used: a step reads all weights, and would otherwise wait for
// the address of every 4 KiB. Only whole ones.
void use_large_pages(const void *start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t large = 1 << 21, first = ((uintptr_t)start + large - 1) / large * large;
    const uintptr_t end = ((uintptr_t)start + bytes) / large * large;
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
}

// Where a column of a panel is in it. With LANES 8 and in pairs, column 8 of 16 is the second number of the first pair: 1.
static inline int64_t place(int64_t column) { return IS_PAIRED ? column % LANES * 2 + column / LANES : column; }
int64_t position(int64_t column) { return place(column); } // calls of an exported function are never inlined

// Some rows of a matrix, [rows][inputs], whose first is row `first` of `outputs`, to packed [panels][units][COLUMNS][STEP], in which
// columns have their `place`. The last unit, and with the last row the last panel, get zeros where there is no weight.
void pack(const number *weight, number *packed, int64_t first, int64_t rows, int64_t outputs, int64_t inputs, int threads) {
    const int64_t units = UNITS(inputs), size = units * COLUMNS * STEP, last = first + rows;
    const int64_t end = last == outputs ? (outputs + COLUMNS - 1) / COLUMNS * COLUMNS : last;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = first / COLUMNS; panel < (end + COLUMNS - 1) / COLUMNS; panel++) {
        const int64_t panel_end = (panel + 1) * COLUMNS, own_first = panel * COLUMNS > first ? panel * COLUMNS : first;
        for (int64_t begin = 0; begin < units; begin += CHUNK_UNITS)
            for (int64_t output = own_first; output < end && output < panel_end; output++) {
                number *to = packed + panel * size + place(output % COLUMNS) * STEP;
                for (int64_t i = begin; i < units && i < begin + CHUNK_UNITS; i++)
                    for (int64_t s = 0; s < STEP; s++) {
                        const int is_weight = output < last && i * STEP + s < inputs;
                        const number x = is_weight ? weight[(output - first) * inputs + i * STEP + s] : 0;
                        to[i * COLUMNS * STEP + s] = WITH_OFFSET(x);
                    }
            }
    }
}

#if IS_CONVERTED && defined(INTEGERS)
// Reads numbers of LANES columns of a unit and converts them to parts.
static inline __attribute__((always_inline)) vector convert(const number *from) {
    typedef number numbers __attribute__((vector_size(LANES * STEP)));
    typedef part parts __attribute__((vector_size(LANES * STEP * sizeof(part))));
    numbers stored;
    memcpy(&stored, from, sizeof stored);
    return (vector)__builtin_convertvector(stored, parts);
}
#elif IS_CONVERTED
typedef int32_t integers __attribute__((vector_size(LANES * 4)));

// Floats of `exponent` + `mantissa` + 1 bits moved to those of floats of 32 bits: the exponent to the lower bits of its exponent,
// whose bias of 127 makes the result too small. 1.5 in 4 + 3 bits (bias 7) is 0 0111 100 -> 0 00000111 1000... = 1.5 * 2^-120. Wrong
// for infinities and NaN, which no weight is.
static inline floats move_bits(integers number, int exponent, int mantissa) {
    const int32_t kept = (int32_t)(0x80000000u | (((1u << (exponent + mantissa)) - 1) << (23 - mantissa)));
    return (floats)((number << (23 - mantissa)) & kept);
}

static inline floats values(integers number) {
#if WEIGHT == 1
    return __builtin_convertvector(number, floats);
#elif WEIGHT == 2
    return move_bits(number, 4, 3) * 0x1p120f;
#else
    return move_bits(number, 5, 10) * 0x1p112f;
#endif
}

// Reads numbers of LANES columns of a unit and converts them to parts, in steps that at most double the size of integers: for larger
// ones GCC does not find all instructions.
static inline __attribute__((always_inline)) vector convert(const number *from) {
    typedef int16_t shorts __attribute__((vector_size(LANES * 2)));
#if STEP == 2 // numbers of 8 bits, whose floats have a lower half of 0
    shorts both;
    memcpy(&both, from, sizeof both);
    const integers pairs = __builtin_convertvector(both, integers);
    const integers first = (integers)values(pairs << 24 >> 24), second = (integers)values(pairs << 16 >> 24);
    return (vector)(second | (first >> 16 & 0xffff));
#elif WEIGHT == 0
    shorts stored;
    memcpy(&stored, from, sizeof stored);
    return values(__builtin_convertvector(stored, integers));
#elif LANES == 8 && defined(__AVX2__)
    return values((integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    typedef number bytes __attribute__((vector_size(LANES)));
    bytes stored;
    memcpy(&stored, from, sizeof stored);
    return values(__builtin_convertvector(__builtin_convertvector(stored, shorts), integers));
#endif
}
#endif

#if IS_CONVERTED
static inline __attribute__((always_inline)) void read_numbers(const void *weights, vector columns[2]) {
    const number *from = weights;
    columns[0] = convert(from), columns[1] = convert(from + LANES * STEP);
}
#elif IS_PAIRED
static inline __attribute__((always_inline)) void read_numbers(const void *weights, vector columns[2]) {
    typedef uint32_t pairs __attribute__((vector_size(4 * LANES)));
    pairs both;
    memcpy(&both, weights, sizeof both);
    columns[0] = (vector)(both << 16), columns[1] = (vector)(both & 0xffff0000u);
}
#else
#define read_numbers read_parts
#endif

static void convert_units(const number *from, vector to[][2], int64_t units) {
    for (int64_t i = 0; i < units; i++) read_numbers(from + i * COLUMNS * STEP, to[i]);
}

#define TILE(count)                                                                                                               \
    case count:                                                                                                                   \
        if (is_converted)                                                                                                         \
            add_products_of(count, sums, inputs, 1, count, panel, sizeof(part), read_parts, units, ahead, stride);                \
        else                                                                                                                      \
            add_products_of(count, sums, inputs, 1, count, panel, sizeof(number), read_numbers, units, ahead, stride);            \
        break;

// Adds the products of `rows` rows and a chunk to their sums, for inputs [units][rows].
static void add_products(int64_t rows, vector sums[][2], const unit *inputs, const void *panel, int is_converted, int64_t units,
                         const char *ahead, int64_t stride) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if ROWS == 12
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

// What an output is: (sum + start) * scale, where sums are of integers.
struct row {
    int32_t start;
    float scale;
};

// x [rows][inputs] of one tile to units [units][rows].
#if defined(INTEGERS)
// Numbers are x / scale to the nearest; the largest of a row is 127 or -127. Weights are OFFSET too large, so a row's sums start at
// -OFFSET times the sum of its numbers. A row with an infinity or NaN has a scale of NaN, one below 1e-30 zeros.
static void pack_tile(const element *x, unit *to, struct row *row, int64_t rows, int64_t inputs) {
    const int64_t units = UNITS(inputs);
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        float largest = 0, check = 0;
#pragma omp simd reduction(max : largest) reduction(+ : check)
        for (int64_t i = 0; i < inputs; i++) {
            const float size = fabsf(widen(x[i]));
            largest = size > largest ? size : largest;
            check += size * 0;
        }
        const float factor = largest > 1e-30f ? 127 / largest : 0; // which is finite
        int32_t total = 0;
        for (int64_t i = 0; i < units; i++) {
            int8_t numbers[4] = {0};
            for (int64_t s = 0; s < STEP; s++)
                if (i * STEP + s < inputs && check == 0) numbers[s] = (int8_t)rintf(widen(x[i * STEP + s]) * factor);
            total += numbers[0] + numbers[1] + numbers[2] + numbers[3];
#if STEP == 4
            memcpy(to + i * rows + r, numbers, 4);
#else
            to[i * rows + r] = (uint16_t)numbers[0] | (uint32_t)(uint16_t)numbers[1] << 16;
#endif
        }
        row[r] = (struct row){-OFFSET * total, largest / 127 + check};
    }
}
#else
static void pack_tile(const element *x, unit *to, struct row *row, int64_t rows, int64_t inputs) {
    const int64_t units = UNITS(inputs);
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        row[r] = (struct row){0, 1};
        for (int64_t i = 0; i < units; i++) {
#if STEP == 2
            to[i * rows + r] = x[i * STEP] | (i * STEP + 1 < inputs ? (uint32_t)x[i * STEP + 1] << 16 : 0);
#else
            to[i * rows + r] = widen(x[i]);
#endif
        }
    }
}
#endif

// Rounds the sums of `rows` rows and a panel to y [rows][outputs], at its column `first`.
static void store(vector sums[][2], element *y, const float *scales, const struct row *row, int64_t rows, int64_t first,
                  int64_t outputs) {
    const int64_t columns = outputs - first < COLUMNS ? outputs - first : COLUMNS;
    for (int64_t r = 0; r < rows; r++) {
        element *to = y + r * outputs + first;
        float from[COLUMNS];
#if defined(INTEGERS)
        for (int64_t c = 0; c < COLUMNS; c++) from[c] = (float)(((const int32_t *)sums[r])[c] + row[r].start) * row[r].scale;
#else
        memcpy(from, sums[r], sizeof from);
#endif
        for (int64_t c = 0; c < columns; c++) to[c] = narrow(scales ? from[c] * scales[first + c] : from[c]);
    }
}

// x [rows][inputs], packed weights, scales [outputs] or null, y [rows][outputs]. Rows are cut into tiles of about equal size: 32
// into 11, 11 and 10. Returns 0 if there is no memory; y is incomplete then.
int64_t multiply(const element *x, const number *packed, const float *scales, element *y, int64_t rows, int64_t outputs,
                 int64_t inputs, int threads) {
    const int64_t panels = (outputs + COLUMNS - 1) / COLUMNS, units = UNITS(inputs), width = COLUMNS * STEP;
    const int64_t most = block_rows(inputs);
    struct row row[BLOCK_ROWS];
    unit *block = malloc((rows < most ? rows : most) * units * sizeof(unit));
    if (!block && rows) return 0;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < rows; begin += most) {
        const int64_t count = rows - begin < most ? rows - begin : most, tiles = (count + ROWS - 1) / ROWS;
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = tile * count / tiles, own = (tile + 1) * count / tiles - first;
            pack_tile(x + (begin + first) * inputs, block + first * units, row + first, own, inputs);
        }
        // While a chunk is multiplied by the tiles, each of them prefetches its part of the same chunk of the next panel.
        const int64_t stride = (width * (int64_t)sizeof(number) + tiles - 1) / tiles;
        const int is_converted = tiles > DIRECT_TILES;
        const int64_t distance = tiles == 1 ? AHEAD_BYTES : units * width * (int64_t)sizeof(number);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) {
            vector sums[BLOCK_ROWS][2];
            memset(sums, 0, count * sizeof sums[0]);
            for (int64_t at = 0, length; at < units; at += length) {
                length = is_converted && units - at > CHUNK_UNITS ? CHUNK_UNITS : units - at;
                const number *stored = packed + (panel * units + at) * width;
                const char *ahead = (const char *)stored + distance;
                vector converted[CHUNK_UNITS][2];
                if (is_converted) convert_units(stored, converted, length);
                const void *chunk = is_converted ? (const void *)converted : (const void *)stored;
                for (int64_t tile = 0; tile < tiles; tile++, ahead += stride * length) {
                    const int64_t first = tile * count / tiles, own = (tile + 1) * count / tiles - first;
                    add_products(own, sums + first, block + first * units + at * own, chunk, is_converted, length, ahead, stride);
                }
            }
            store(sums, y + begin * outputs, scales, row, count, panel * COLUMNS, outputs);
        }
    }
    free(block);
    return 1;
}

// Consecutive groups of rows, each times weights of its own: packed and scales [groups]; group i ends before row ends[i]. Returns 0
// if there is no memory; y is incomplete then.
int64_t multiply_groups(const element *x, const number *const *packed, const float *const *scales, element *y,
                        const int64_t *ends, int64_t groups, int64_t outputs, int64_t inputs, int threads) {
    for (int64_t group = 0, row = 0; group < groups; row = ends[group++]) {
        const int64_t rows = ends[group] - row;
        const element *own = x + row * inputs;
        if (rows && !multiply(own, packed[group], scales[group], y + row * outputs, rows, outputs, inputs, threads)) return 0;
    }
    return 1;
}
