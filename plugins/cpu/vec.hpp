// Eight floats at a time, in the compiler's own vector type: one source for every instruction set.
//
// A file that includes this is compiled once per instruction set, each time with its own TRTFORGE_ISA, and may
// use no inline function or template of the standard library: the linker would keep one copy for all of them.
// Contraction is off (setup.py); where a fused multiply-add is meant, it is written.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trtforge {
namespace TRTFORGE_ISA {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

constexpr float kNegInf = -__builtin_inff();

static inline f32x8 load(const float* p) {
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, f32x8 v) { memcpy(p, &v, sizeof v); }

static inline f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }
static inline i32x8 splat_int(int32_t x) { return i32x8{x, x, x, x, x, x, x, x}; }

static inline i32x8 as_int(f32x8 v) { return (i32x8)v; }
static inline f32x8 as_float(i32x8 v) { return (f32x8)v; }
static inline f32x8 to_float(i32x8 v) { return __builtin_convertvector(v, f32x8); }
static inline i32x8 to_int(f32x8 v) { return __builtin_convertvector(v, i32x8); }  // truncates

static inline f32x8 max8(f32x8 a, f32x8 b) { return a > b ? a : b; }
static inline f32x8 min8(f32x8 a, f32x8 b) { return a < b ? a : b; }
static inline f32x8 abs8(f32x8 v) { return as_float(as_int(v) & 0x7fffffff); }

// a * b + c, rounded once where the instruction set can.
static inline f32x8 madd(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Nearest integer, ties to even, for |v| < 2^22.
static inline f32x8 round8(f32x8 v) {
    const f32x8 magic = splat(12582912.0f);  // 1.5 * 2^23
    return (v + magic) - magic;
}

static inline float sum8(f32x8 v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

static inline float largest8(f32x8 v) {
    float m = v[0];
    for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// out[i] = sum8(v[i]), the same additions in the same order.
static inline void sum8x4(const f32x8 v[4], float* out) {
#if defined(__AVX2__)
    const __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]);
    const __m256 cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    const __m256 abcd = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
    for (int i = 0; i < 4; i++) out[i] = sum8(v[i]);
#endif
}

// e^x for x <= 0, within 2 ulp; 0 below -87 (and for -inf).
static inline f32x8 exp8(f32x8 x) {
    const f32x8 clamped = max8(x, splat(-87.0f));
    const f32x8 n = round8(clamped * splat(1.44269504f));
    // ln 2 in two parts, so that the product with n loses nothing (Cody and Waite)
    f32x8 r = madd(n, splat(-0.693359375f), clamped);
    r = madd(n, splat(2.12194440e-4f), r);
    f32x8 p = splat(1.9875691500e-4f);  // minimax polynomial on [-ln 2 / 2, ln 2 / 2]
    p = madd(p, r, splat(1.3981999507e-3f));
    p = madd(p, r, splat(8.3334519073e-3f));
    p = madd(p, r, splat(4.1665795894e-2f));
    p = madd(p, r, splat(1.6666665459e-1f));
    p = madd(p, r, splat(5.0000001201e-1f));
    p = madd(p * r, r, r + splat(1.0f));
    const f32x8 power = as_float((to_int(n) + 127) << 23);
    return x < splat(-87.0f) ? splat(0.0f) : p * power;
}

static inline f32x8 tanh8(f32x8 x) {
    const f32x8 a = abs8(x), one = splat(1.0f);
    const f32x8 e = exp8(splat(-2.0f) * a);
    const f32x8 far = (one - e) / (one + e);
    // near 0 that difference cancels: Taylor series up to x^9
    const f32x8 s = a * a;
    f32x8 t = splat(62.0f / 2835.0f);
    t = madd(t, s, splat(-17.0f / 315.0f));
    t = madd(t, s, splat(2.0f / 15.0f));
    t = madd(t, s, splat(-1.0f / 3.0f));
    t = madd(t * s, a, a);
    const f32x8 magnitude = a < splat(0.25f) ? t : far;
    return as_float(as_int(magnitude) | (as_int(x) & (int32_t)0x80000000));
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
