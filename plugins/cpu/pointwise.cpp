// The norm before a linear and the activation between two. Compiled once per instruction set.
#include "kernels.hpp"
#include "vec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {

// Up to 8 floats, zeros behind them.
static inline f32x8 load_some(const float* p, int64_t count) {
    f32x8 v = {};
    memcpy(&v, p, (count < 8 ? count : 8) * sizeof(float));
    return v;
}

void normalize(const float* x, const float* weight, float epsilon, int64_t count, float* out) {
    f32x8 squares[4] = {};
    for (int64_t i = 0; i < count; i += 32)
        for (int64_t j = i; j < i + 32 && j < count; j += 8) {
            const f32x8 v = load_some(x + j, count - j);
            f32x8& sum = squares[(j - i) / 8];
            sum = madd(v, v, sum);
        }
    const float mean = sum8((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)count;
    const f32x8 factor = splat(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t i = 0; i < count; i += 8) {
        const f32x8 v = load_some(x + i, count - i) * factor * load_some(weight + i, count - i);
        memcpy(out + i, &v, (count - i < 8 ? count - i : 8) * sizeof(float));
    }
}

// x / (1 + e^-x), by way of e^-|x| <= 1.
static inline f32x8 silu(f32x8 x) {
    const f32x8 e = exp8(as_float(as_int(x) | (int32_t)0x80000000)), one = splat(1.0f);
    return x * (x < splat(0.0f) ? e : one) / (one + e);
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016)
static inline f32x8 gelu(f32x8 x) {
    const f32x8 inner = splat(0.7978845608f) * madd(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + tanh8(inner));
}

void activate(bool is_gelu, const float* up, int64_t count, float* gate) {
    for (int64_t i = 0; i < count; i += 8) {
        const f32x8 g = load(gate + i);
        store(gate + i, (is_gelu ? gelu(g) : silu(g)) * load(up + i));
    }
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
