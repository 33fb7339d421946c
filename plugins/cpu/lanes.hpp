// As many floats at a time as a register of the instruction set holds, for attention; on top of vec.hpp.
#pragma once

#include "vec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#else
constexpr int kFloats = 8;
#endif
constexpr float kLog2E = 1.44269504f;

typedef float floats __attribute__((vector_size(4 * kFloats)));
typedef int32_t ints __attribute__((vector_size(4 * kFloats)));

static inline floats load_floats(const float* p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store_floats(float* p, floats v) { memcpy(p, &v, sizeof v); }

#if defined(__AVX512F__)
static inline floats all(float x) { return (floats)_mm512_set1_ps(x); }
static inline floats fused(floats a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
// The larger one; b where either is not a number.
static inline floats larger(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
static inline bool any_above(floats a, floats b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
}
static inline float sum_lanes(floats v) {
    const __m512 x = (__m512)v;
    const __m512 a = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    const __m512 b = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    const __m512 c = _mm512_add_ps(b, _mm512_permute_ps(b, 0x4e));
    return _mm512_cvtss_f32(_mm512_add_ps(c, _mm512_permute_ps(c, 0xb1)));
}
static inline float largest_lane(floats v) {
    const __m512 x = (__m512)v;
    const __m512 a = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    const __m512 b = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    const __m512 c = _mm512_max_ps(b, _mm512_permute_ps(b, 0x4e));
    return _mm512_cvtss_f32(_mm512_max_ps(c, _mm512_permute_ps(c, 0xb1)));
}
#else
static inline floats all(float x) { return splat(x); }
static inline floats fused(floats a, floats b, floats c) { return madd(a, b, c); }
static inline floats larger(floats a, floats b) { return a > b ? a : b; }
static inline bool any_above(floats a, floats b) {
#if defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
    const ints above = a > b;
    int32_t any = 0;
    for (int i = 0; i < kFloats; i++) any |= above[i];
    return any != 0;
#endif
}
static inline float sum_lanes(floats v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
static inline float largest_lane(floats v) { return largest8(v); }
#endif

// v where its index, counted from `first`, lies in [begin, end); -inf elsewhere.
static inline floats only_within(floats v, int32_t first, int32_t begin, int32_t end) {
    ints index;
    for (int i = 0; i < kFloats; i++) index[i] = first + i;
    return (index >= begin) & (index < end) ? v : all(kNegInf);
}

// 2^x for x <= 0, within 2 ulp; 0 below -126 (and for -inf).
static inline floats exp2_lanes(floats x) {
    const floats magic = all(12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
    const floats clamped = larger(all(-160.0f), x);
#if defined(__AVX512F__)
    (void)magic;
    const floats n = (floats)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const floats n = (clamped + magic) - magic;
#endif
    const floats r = clamped - n;
    floats p = all(1.535336188319500e-4f);  // minimax polynomial on [-1/2, 1/2]
    p = fused(p, r, all(1.339887440266574e-3f));
    p = fused(p, r, all(9.618437357674640e-3f));
    p = fused(p, r, all(5.550332471162809e-2f));
    p = fused(p, r, all(2.402264791363012e-1f));
    p = fused(p, r, all(6.931472028550421e-1f));
    p = fused(p, r, all(1.0f));
#if defined(__AVX512F__)
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const ints exponent = __builtin_convertvector(larger(n, all(-126.0f)), ints);
    const floats power = (floats)((exponent + 127) << 23);
    return x < all(-126.0f) ? all(0.0f) : p * power;
#endif
}

static inline floats tanh_lanes(floats x) {
    const ints bits = (ints)x;
    const floats a = (floats)(bits & 0x7fffffff), one = all(1.0f);
    const floats e = exp2_lanes(all(-2.0f * kLog2E) * a);
    const floats far = (one - e) / (one + e);
    // near 0 that difference cancels: Taylor series up to x^9
    const floats s = a * a;
    floats t = all(62.0f / 2835.0f);
    t = fused(t, s, all(-17.0f / 315.0f));
    t = fused(t, s, all(2.0f / 15.0f));
    t = fused(t, s, all(-1.0f / 3.0f));
    t = fused(t * s, a, a);
    const floats magnitude = a < all(0.25f) ? t : far;
    return (floats)((ints)magnitude | (bits & (int32_t)0x80000000));
}

// v[i][j] = v[j][i]
static inline void transpose(floats v[kFloats]) {
#if defined(__AVX512F__)
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            const __m512d x = _mm512_castps_pd(a[i + j]), y = _mm512_castps_pd(a[i + j + 2]);
            b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    for (int j = 0; j < 4; j++) {  // b[4 i + j]: quarter q has column 4 q + j of rows 4 i .. 4 i + 3
        const __m512 x = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), y = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
        const __m512 z = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd), w = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        v[j] = (floats)_mm512_shuffle_f32x4(x, y, 0x88);
        v[8 + j] = (floats)_mm512_shuffle_f32x4(x, y, 0xdd);
        v[4 + j] = (floats)_mm512_shuffle_f32x4(z, w, 0x88);
        v[12 + j] = (floats)_mm512_shuffle_f32x4(z, w, 0xdd);
    }
#elif defined(__AVX2__)
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            const __m256d x = _mm256_castps_pd(a[i + j]), y = _mm256_castps_pd(a[i + j + 2]);
            b[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
            b[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
        }
    }
    for (int j = 0; j < 4; j++) {
        v[j] = (floats)_mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        v[4 + j] = (floats)_mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
#else
    for (int i = 0; i < kFloats; i++) {
        for (int j = 0; j < i; j++) {
            const float x = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = x;
        }
    }
#endif
}

// The sums of kFloats registers' lanes, in two steps, so that four registers at a time are enough: group g's four are
// those of results summed_at(g, 0) .. summed_at(g, 3). Lane l + n / 2 is added to lane l, n = kFloats halving to 1.
constexpr int kGroups = kFloats / 4;
#if defined(__AVX512F__)
typedef __m512 Halfway;
static inline constexpr int summed_at(int g, int i) { return g + 4 * i; }
static inline Halfway sum_halfway(const floats v[4]) {
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}
static inline floats sum_rest(const Halfway h[kGroups]) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(h[0], h[1]), _mm512_unpackhi_ps(h[0], h[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(h[2], h[3]), _mm512_unpackhi_ps(h[2], h[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return (floats)_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
#elif defined(__AVX2__)
typedef __m256 Halfway;
static inline constexpr int summed_at(int g, int i) { return 2 * g + i / 2 + 4 * (i % 2); }
static inline Halfway sum_halfway(const floats v[4]) {
    const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    return _mm256_add_ps(_mm256_unpacklo_ps(ab, cd), _mm256_unpackhi_ps(ab, cd));
}
static inline floats sum_rest(const Halfway h[kGroups]) {
    const __m256d a = _mm256_castps_pd(h[0]), b = _mm256_castps_pd(h[1]);
    return (floats)_mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                                 _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
}
#else
typedef struct {
    float sums[4];
} Halfway;
static inline constexpr int summed_at(int g, int i) { return 4 * g + i; }
static inline Halfway sum_halfway(const floats v[4]) {
    return {{sum_lanes(v[0]), sum_lanes(v[1]), sum_lanes(v[2]), sum_lanes(v[3])}};
}
static inline floats sum_rest(const Halfway h[kGroups]) {
    floats v;
    for (int i = 0; i < kFloats; i++) v[i] = h[i / 4].sums[i % 4];
    return v;
}
#endif

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
