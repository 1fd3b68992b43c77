// The inner loop of all matrix products on CPUs: sums of a few rows and COLUMNS columns in vector registers. A sum adds its products
// in the order of the units, in float32, so it depends neither on the other rows nor on how rows are put together.

#include "element.h"
#if defined(__AVX512F__)
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

// A unit is what one multiplication takes of a row: two bfloat16 where the processor has an instruction for their products, else a
// float, into which numbers of 16 bits are converted.
#if ELEMENT == 1 && defined(__AVX512BF16__)
#define STEP 2
typedef uint32_t unit;
typedef uint16_t part __attribute__((may_alias)); // of a unit
static inline part to_part(float x) { return narrow(x); }
static inline part element_to_part(element x) { return x; }
#else
#define STEP 1
typedef float unit;
typedef float part;
static inline part to_part(float x) { return x; }
static inline part element_to_part(element x) { return widen(x); }
#endif
#define UNITS(numbers) (((numbers) + STEP - 1) / STEP)

// Adds to the sums [rows][2] of one panel [units][COLUMNS][STEP]. The input of row r and unit i is inputs[r * row_stride + i *
// unit_stride]. For every unit `stride` bytes are requested from memory, from `ahead` on.
static inline __attribute__((always_inline)) void add_products_of(const int rows, floats sums[][2], const unit *inputs,
                                                                  int64_t row_stride, int64_t unit_stride, const part *panel,
                                                                  int64_t units, const char *ahead, int64_t stride) {
    floats own[ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) own[row][0] = sums[row][0], own[row][1] = sums[row][1];
    for (int64_t i = 0; i < units; i++) {
        if (ahead) __builtin_prefetch(ahead + i * stride, 0, 2);
#if STEP == 2
        const __m512bh first = (__m512bh)_mm512_loadu_si512(panel), second = (__m512bh)_mm512_loadu_si512(panel + COLUMNS);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const __m512bh input = (__m512bh)_mm512_set1_epi32((int)inputs[row * row_stride]);
            own[row][0] = (floats)_mm512_dpbf16_ps((__m512)own[row][0], input, first);
            own[row][1] = (floats)_mm512_dpbf16_ps((__m512)own[row][1], input, second);
        }
#else
        floats first, second;
        memcpy(&first, panel, sizeof first);
        memcpy(&second, panel + LANES, sizeof second);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            own[row][0] += inputs[row * row_stride] * first;
            own[row][1] += inputs[row * row_stride] * second;
        }
#endif
        inputs += unit_stride;
        panel += COLUMNS * STEP;
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) sums[row][0] = own[row][0], sums[row][1] = own[row][1];
}
