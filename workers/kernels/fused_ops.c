// The operations of fused_ops.py between a layer's products, each in one pass over its tensors, computed in float32.

#include "element.h"

#define FEW_ROWS 16 // which one thread computes sooner than several can begin

// x [rows][heads][dim], with `stride` elements from row to row; cosines, sines [rows][dim]; out [rows][heads][dim]. Element i of
// a head is paired with element i + dim / 2.
void apply_rotary(const element *x, const element *cosines, const element *sines, element *out, int64_t rows, int64_t heads,
                  int64_t dim, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > FEW_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const element *c = cosines + row * dim, *s = sines + row * dim;
        for (int64_t head = 0; head < heads; head++) {
            const element *from = x + row * stride + head * dim;
            element *to = out + (row * heads + head) * dim;
            const int64_t half = dim / 2;
            for (int64_t i = 0; i < half; i++) {
                const float first = widen(from[i]), second = widen(from[i + half]);
                to[i] = narrow(first * widen(c[i]) - second * widen(s[i]));
                to[i + half] = narrow(second * widen(c[i + half]) + first * widen(s[i + half]));
            }
        }
    }
}

// gate_up [rows][2][width] to silu(gate) * up, [rows][width].
void silu_and_mul(const element *gate_up, element *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > FEW_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const element *gates = gate_up + 2 * row * width, *ups = gates + width;
        element *to = out + row * width;
        for (int64_t i = 0; i < width; i++) {
            const float gate = widen(gates[i]), e = exp_negative(-fabsf(gate));
            to[i] = narrow(gate * (gate < 0 ? e : 1.0f) / (1.0f + e) * widen(ups[i]));
        }
    }
}

// h, more, sums, out [rows][width]: sums = h + more, rounded; out = sums / root mean square of sums * weight.
void fused_add_rms_norm(const element *h, const element *more, const element *weight, element *sums, element *out, int64_t rows,
                        int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > FEW_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = row * width;
        float squares = 0;
        for (int64_t i = 0; i < width; i++) {
            const element sum = narrow(widen(h[start + i]) + widen(more[start + i]));
            sums[start + i] = sum;
            squares += widen(sum) * widen(sum);
        }
        const float scale = 1.0f / sqrtf(squares / width + eps);
        for (int64_t i = 0; i < width; i++) out[start + i] = narrow(widen(sums[start + i]) * scale * widen(weight[i]));
    }
}
