// Numbers of the stage's dtype as float: ELEMENT is 0 for float32, 1 for bfloat16, 2 for float16.

#include <math.h>
#include <stdint.h>
#include <string.h>

#if ELEMENT == 0
typedef float element;
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#elif ELEMENT == 1
typedef uint16_t element;
static inline float widen(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
static inline element narrow(float x) { // to the nearest, ties to even; NaN remains NaN, since its low half is 0 here
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (element)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
typedef _Float16 element;
static inline float widen(element x) { return (float)x; }
static inline element narrow(float x) { return (element)x; }
#endif

// e^x for x <= 0 with a relative error below 2e-7: 2^n times the polynomial of Cephes' expf on [-ln 2 / 2, ln 2 / 2].
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}
