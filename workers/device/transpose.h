// Writes rows of elements as a panel of the inner loop of products: COLUMNS rows of `numbers` elements, whole units, become the
// columns of [units][COLUMNS][STEP].

#include "tile.h"

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

static inline void transpose_rows(part *to, const element *const rows[COLUMNS], const int numbers) {
    const int units = UNITS(numbers);
    for (int begin = 0; begin < units; begin += 16) {
        const __mmask16 mask = units - begin < 16 ? (1 << (units - begin)) - 1 : 0xffff;
        for (int column = 0; column < COLUMNS; column += 16) {
            __m512i square[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) square[i] = _mm512_maskz_loadu_epi32(mask, rows[column + i] + begin * STEP);
            transpose(square);
            for (int i = 0; i < 16 && begin + i < units; i++)
                _mm512_storeu_si512(to + ((begin + i) * COLUMNS + column) * STEP, square[i]);
        }
    }
}
#elif LANES == 8 && STEP == 1
static inline __m128 read_four(const element from[4]) {
    float x[4];
    for (int i = 0; i < 4; i++) x[i] = widen(from[i]);
    return _mm_loadu_ps(x);
}

// Transposes 4 rows of 4 numbers, and 4 others in the upper halves of the vectors: swaps pairs, then single numbers. Nothing goes
// from one half to the other, which on some processors takes several times as long.
static inline void transpose(floats rows[4]) {
    typedef int32_t lanes __attribute__((vector_size(32)));
    floats pairs[4];
    for (int i = 0; i < 4; i += 2) {
        pairs[i / 2] = __builtin_shuffle(rows[i], rows[i + 1], (lanes){0, 1, 8, 9, 4, 5, 12, 13});
        pairs[i / 2 + 2] = __builtin_shuffle(rows[i], rows[i + 1], (lanes){2, 3, 10, 11, 6, 7, 14, 15});
    }
    for (int i = 0; i < 4; i += 2) {
        rows[i] = __builtin_shuffle(pairs[i], pairs[i + 1], (lanes){0, 2, 8, 10, 4, 6, 12, 14});
        rows[i + 1] = __builtin_shuffle(pairs[i], pairs[i + 1], (lanes){1, 3, 9, 11, 5, 7, 13, 15});
    }
}

static inline void transpose_rows(part *to, const element *const rows[COLUMNS], const int numbers) {
    for (int begin = 0; begin + 4 <= numbers; begin += 4)
        for (int column = 0; column < COLUMNS; column += 8) {
            floats square[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const __m128 lower = read_four(rows[column + i] + begin), upper = read_four(rows[column + i + 4] + begin);
                square[i] = (floats)_mm256_insertf128_ps(_mm256_castps128_ps256(lower), upper, 1);
            }
            transpose(square);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) memcpy(to + (begin + i) * COLUMNS + column, &square[i], sizeof square[i]);
        }
    for (int i = numbers / 4 * 4; i < numbers; i++)
        for (int column = 0; column < COLUMNS; column++) to[i * COLUMNS + column] = widen(rows[column][i]);
}
#else
_Static_assert(STEP == 1, "processors with units of two numbers have AVX-512");
static inline void transpose_rows(part *to, const element *const rows[COLUMNS], const int numbers) {
    for (int i = 0; i < numbers; i++)
        for (int column = 0; column < COLUMNS; column++) to[i * COLUMNS + column] = widen(rows[column][i]);
}
#endif
