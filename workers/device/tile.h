// The inner loop of all matrix products on CPUs: sums of a few rows and COLUMNS columns in vector registers. A sum adds its products
// in the order of the units, in float32, so it depends neither on the other rows nor on how rows are put together.

#include "element.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Sums of ROWS rows, weights and one input are in vector registers: 12 * 2 + 2 + 1 of 32, or 6 * 2 + 2 + 1 of 16.
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 12
#else
#define LANES 4
#define ROWS 6
#endif
#define COLUMNS (2 * LANES)

typedef float floats __attribute__((vector_size(4 * LANES)));

// A unit is what one multiplication takes of a row, and `vector` sums of LANES columns:
//   INTEGERS  four int8, or two int16, whichever the processor adds up with one instruction; sums in int32, which are exact
//   else      two bfloat16 where the processor has an instruction for their products, else a float; sums in float
#if defined(INTEGERS)
typedef uint32_t unit;
typedef int32_t vector __attribute__((vector_size(4 * LANES)));
#if (defined(__AVX512F__) && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define STEP 4
typedef uint8_t part __attribute__((may_alias)); // of a unit of weights: the number + 128, since the instruction multiplies uint8 by int8
#define OFFSET 128
#else
#define STEP 2
typedef int16_t part __attribute__((may_alias));
#define OFFSET 0
#endif
#elif ELEMENT == 1 && defined(__AVX512BF16__)
#define STEP 2
typedef uint32_t unit;
typedef uint16_t part __attribute__((may_alias)); // of a unit
typedef floats vector;
static inline part to_part(float x) { return narrow(x); }
static inline part element_to_part(element x) { return x; }
#else
#define STEP 1
typedef float unit;
typedef float part;
typedef floats vector;
static inline part to_part(float x) { return x; }
static inline part element_to_part(element x) { return widen(x); }
#endif
#define UNITS(numbers) (((numbers) + STEP - 1) / STEP)

// Returns sum + input * column, for LANES columns [LANES][STEP] of a panel.
static inline __attribute__((always_inline)) vector add_product(vector sum, unit input, vector column) {
#if STEP == 1
    return sum + input * column;
#elif !defined(INTEGERS)
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)input), (__m512bh)column);
#elif STEP == 4 && LANES == 16
    return (vector)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)column, _mm512_set1_epi32((int)input));
#elif STEP == 4
    return (vector)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)column, _mm256_set1_epi32((int)input));
#elif LANES == 16 && defined(__AVX512BW__)
    return sum + (vector)_mm512_madd_epi16(_mm512_set1_epi32((int)input), (__m512i)column);
#elif LANES == 8 && defined(__AVX2__)
    return sum + (vector)_mm256_madd_epi16(_mm256_set1_epi32((int)input), (__m256i)column);
#else // int16 in both halves of an int32; the first is the lower one
    return sum + (int32_t)(int16_t)input * ((column << 16) >> 16) + ((int32_t)input >> 16) * (column >> 16);
#endif
}

// Reads the COLUMNS columns of a unit.
typedef void (*reader)(const void *weights, vector columns[2]);
static inline __attribute__((always_inline)) void read_parts(const void *weights, vector columns[2]) {
    memcpy(&columns[0], weights, sizeof(vector)); // one by one, which GCC keeps in registers
    memcpy(&columns[1], (const char *)weights + sizeof(vector), sizeof(vector));
}

// Adds to the sums [rows][2] of one panel [units][COLUMNS][STEP], of numbers that have `size` bytes and that `read` reads. The input
// of row r and unit i is inputs[r * row_stride + i * unit_stride]. For every unit a line is prefetched, `stride` bytes after
// the one before, from `ahead` on.
static inline __attribute__((always_inline)) void add_products_of(const int rows, vector sums[][2], const unit *inputs,
                                                                  int64_t row_stride, int64_t unit_stride, const void *panel,
                                                                  const int64_t size, const reader read, int64_t units,
                                                                  const char *ahead, int64_t stride) {
    const char *weights = panel;
    vector own[ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) own[row][0] = sums[row][0], own[row][1] = sums[row][1];
    for (int64_t i = 0; i < units; i++) {
        if (ahead) __builtin_prefetch(ahead + i * stride, 0, 2);
        vector columns[2];
        read(weights, columns);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            own[row][0] = add_product(own[row][0], inputs[row * row_stride], columns[0]);
            own[row][1] = add_product(own[row][1], inputs[row * row_stride], columns[1]);
        }
        inputs += unit_stride;
        weights += COLUMNS * STEP * size;
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) sums[row][0] = own[row][0], sums[row][1] = own[row][1];
}
