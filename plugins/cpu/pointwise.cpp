// The norm before a linear and the activation between two. Compiled once per instruction set.
#include "kernels.hpp"
#include "vec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {

// The last `count` < 8 floats, zeros behind them.
static inline f32x8 load_last(const float* p, int64_t count) {
    f32x8 v = {};
    for (int64_t i = 0; i < count; i++) v[i] = p[i];
    return v;
}

void normalize(const float* x, const float* weight, float epsilon, int64_t count, float* out) {
    const int64_t whole = count / 8 * 8, last = count - whole;
    f32x8 squares[4] = {};
    int64_t at = 0;
    for (; at + 32 <= whole; at += 32)
        for (int j = 0; j < 4; j++) {
            const f32x8 v = load(x + at + 8 * j);
            squares[j] = madd(v, v, squares[j]);
        }
    for (int j = 0; j < 4 && at < count; j++, at += 8) {
        const f32x8 v = at < whole ? load(x + at) : load_last(x + at, last);
        squares[j] = madd(v, v, squares[j]);
    }
    const float mean = sum8((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)count;
    const f32x8 factor = splat(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t i = 0; i < whole; i += 8) store(out + i, load(x + i) * factor * load(weight + i));
    if (last == 0) return;
    const f32x8 v = load_last(x + whole, last) * factor * load_last(weight + whole, last);
    for (int64_t i = 0; i < last; i++) out[whole + i] = v[i];
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
