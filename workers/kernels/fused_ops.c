// The operations of fused_ops.py between a layer's products, each in one pass over its tensors, computed in float32.

#include "element.h"

#define FEW_NUMBERS (1 << 15) // which one thread computes sooner than several can begin

static inline void rotate(const element *restrict x, const element *restrict cosines, const element *restrict sines,
                          element *restrict out, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = widen(x[i]), second = widen(x[i + half]);
        out[i] = narrow(first * widen(cosines[i]) - second * widen(sines[i]));
        out[i + half] = narrow(second * widen(cosines[i + half]) + first * widen(sines[i + half]));
    }
}

// x [rows][heads][dim], with `stride` elements from row to row; cosines, sines [rows][dim]; out [rows][heads][dim]. Element i of
// a head is paired with element i + dim / 2.
void apply_rotary(const element *x, const element *cosines, const element *sines, element *out, int64_t rows, int64_t heads,
                  int64_t dim, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            rotate(x + row * stride + head * dim, cosines + row * dim, sines + row * dim, out + (row * heads + head) * dim, dim / 2);
}

static inline void silu_and_mul_row(const element *restrict gates, const element *restrict ups, element *restrict out, int64_t width) {
    for (int64_t i = 0; i < width; i++) {
        const float gate = widen(gates[i]), e = exp_negative(-fabsf(gate));
        out[i] = narrow(gate * (gate < 0 ? e : 1.0f) / (1.0f + e) * widen(ups[i]));
    }
}

// gate_up [rows][2][width] to silu(gate) * up, [rows][width].
void silu_and_mul(const element *gate_up, element *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; row++)
        silu_and_mul_row(gate_up + 2 * row * width, gate_up + (2 * row + 1) * width, out + row * width, width);
}

#define SUMS 32 // of squares, side by side: sum l has the elements l, l + 32, l + 64 ... of a row

// One function for both norms, so that a row has the same bits in each. The order of addition is written out: a compiler's own
// could depend on where a row begins in memory.
static __attribute__((noinline)) float sum_of_squares(const element *x, int64_t width) {
    float sums[SUMS] = {0};
    int64_t start = 0;
    for (; start + SUMS <= width; start += SUMS)
        for (int l = 0; l < SUMS; l++) sums[l] += widen(x[start + l]) * widen(x[start + l]);
    for (int l = 0; start + l < width; l++) sums[l] += widen(x[start + l]) * widen(x[start + l]);
    for (int half = SUMS / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sums[l] += sums[l + half];
    return sums[0];
}

static inline void rms_norm_row(const element *restrict x, const element *restrict weight, element *restrict out, int64_t width,
                                float eps) {
    const float scale = 1.0f / sqrtf(sum_of_squares(x, width) / width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = narrow(widen(x[i]) * scale * widen(weight[i]));
}

static inline void add_row(const element *restrict h, const element *restrict more, element *restrict sums, int64_t width) {
    for (int64_t i = 0; i < width; i++) sums[i] = narrow(widen(h[i]) + widen(more[i]));
}

// x, out [rows][width]: x / root mean square of x * weight.
void rms_norm(const element *x, const element *weight, element *out, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; row++) rms_norm_row(x + row * width, weight, out + row * width, width, eps);
}

// h, more, sums, out [rows][width]: sums = h + more, rounded; out = rms_norm of sums.
void fused_add_rms_norm(const element *h, const element *more, const element *weight, element *sums, element *out, int64_t rows,
                        int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = row * width;
        add_row(h + start, more + start, sums + start, width);
        rms_norm_row(sums + start, weight, out + start, width, eps);
    }
}
