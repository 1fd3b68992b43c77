// The AVX-512 instructions that tile.h, transpose.h and packed_matmul.c use, in plain C: their code for such processors then runs on any other.

#include <stdint.h>
#include <string.h>

#pragma GCC optimize("O1") // compiled in a third of the time; results are the same

typedef int32_t __m512i __attribute__((vector_size(64)));
typedef uint32_t __m512u __attribute__((vector_size(64)));
typedef float __m512 __attribute__((vector_size(64)));
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef uint16_t __mmask16;

#define INSTRUCTION static inline __attribute__((always_inline, unused))
#define LONG_INSTRUCTION static __attribute__((noinline, unused)) // one copy is compiled sooner than hundreds

INSTRUCTION __m512i _mm512_set1_epi32(int x) { return x - (__m512i){0}; }
INSTRUCTION __m512i _mm512_add_epi32(__m512i x, __m512i y) { return x + y; }
INSTRUCTION void _mm512_storeu_si512(void *to, __m512i x) { memcpy(to, &x, sizeof x); }

INSTRUCTION __m512i _mm512_loadu_si512(const void *from) {
    __m512i out;
    memcpy(&out, from, sizeof out);
    return out;
}

INSTRUCTION __m512i _mm512_set_epi32(int p, int o, int n, int m, int l, int k, int j, int i, int h, int g, int f, int e, int d, int c,
                                     int b, int a) {
    return (__m512i){a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}

LONG_INSTRUCTION __mmask16 _mm512_test_epi32_mask(__m512i x, __m512i y) {
    __mmask16 mask = 0;
    for (int i = 0; i < 16; i++) mask |= (x[i] & y[i]) != 0 ? 1 << i : 0;
    return mask;
}

LONG_INSTRUCTION __m512i _mm512_mask_add_epi32(__m512i otherwise, __mmask16 mask, __m512i x, __m512i y) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) otherwise[i] = x[i] + y[i];
    return otherwise;
}

LONG_INSTRUCTION __m512i _mm512_permutex2var_epi32(__m512i x, __m512i from, __m512i y) {
    __m512i out;
    for (int i = 0; i < 16; i++) out[i] = from[i] & 16 ? y[from[i] & 15] : x[from[i] & 15];
    return out;
}

LONG_INSTRUCTION __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void *from) { // what is masked is not read
    int32_t out[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) memcpy(out + i, (const char *)from + 4 * i, 4);
    return _mm512_loadu_si512(out);
}

// Pairs of products; the instruction rounds otherwise in between, and takes numbers below the normal ones as 0.
INSTRUCTION __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh x, __m512bh y) {
    const __m512u first = (__m512u)x, second = (__m512u)y;
    sums += (__m512)(first & 0xffff0000u) * (__m512)(second & 0xffff0000u);
    return sums + (__m512)(first << 16) * (__m512)(second << 16);
}

// Four products of uint8 and int8 each, and two of int16.
LONG_INSTRUCTION __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i x, __m512i y) {
    uint8_t first[64];
    int8_t second[64];
    memcpy(first, &x, 64);
    memcpy(second, &y, 64);
    for (int i = 0; i < 64; i++) sums[i / 4] += first[i] * second[i];
    return sums;
}

LONG_INSTRUCTION __m512i _mm512_madd_epi16(__m512i x, __m512i y) {
    int16_t first[32], second[32];
    memcpy(first, &x, 64);
    memcpy(second, &y, 64);
    __m512i sums = {0};
    for (int i = 0; i < 32; i++) sums[i / 2] += first[i] * second[i];
    return sums;
}
