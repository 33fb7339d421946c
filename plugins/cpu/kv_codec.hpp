// K and V rows to and from the elements of a pool: the arithmetic of plugins/kv_codec.py, bit for bit.
#pragma once

#include "kernels.hpp"
#include "lanes.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {

typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

template <class V>
static inline V load_as(const uint8_t* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
static inline void store_as(uint8_t* p, V v) {
    memcpy(p, &v, sizeof v);
}

// Eight small integers as 32-bit ones. (GCC takes a byte vector apart one by one, hence the instructions by name.)
#if defined(__AVX2__)
static inline i32x8 widen_i8(const uint8_t* p) {
    return (i32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline i32x8 widen_u8(const uint8_t* p) {
    return (i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline i32x8 widen_u16(const uint8_t* p) {
    return (i32x8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
#else
static inline i32x8 widen_i8(const uint8_t* p) { return __builtin_convertvector(load_as<i8x8>(p), i32x8); }
static inline i32x8 widen_u8(const uint8_t* p) { return __builtin_convertvector(load_as<u8x8>(p), i32x8); }
static inline i32x8 widen_u16(const uint8_t* p) { return __builtin_convertvector(load_as<u16x8>(p), i32x8); }
#endif

// Each codec: bytes per element, the largest magnitude (0: not quantized), eight elements to and from fp32; and
// kFloats elements to fp32 in units of `unit`, the fast way of attention, which multiplies sums by unit and scale.

struct Fp32 {
    static constexpr int bytes = 4;
    static constexpr float max = 0;
    static inline f32x8 decode(const uint8_t* p) { return load_as<f32x8>(p); }
    static inline void encode(uint8_t* p, f32x8 v) { store_as(p, v); }
    static constexpr float unit = 1.0f;
    static inline floats decode_floats(const uint8_t* p) { return load_as<floats>(p); }
};

struct Bf16 {
    static constexpr int bytes = 2;
    static constexpr float max = 0;
    static inline f32x8 decode(const uint8_t* p) { return as_float(widen_u16(p) << 16); }
    static inline void encode(uint8_t* p, f32x8 v) {  // nearest, ties to even
        const i32x8 bits = as_int(v);
        store_as(p, __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, u16x8));
    }
    static constexpr float unit = 1.0f;
    static inline floats decode_floats(const uint8_t* p) {
#if defined(__AVX512F__)
        return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
        return decode(p);
#endif
    }
};

struct Fp16 {  // saturates
    static constexpr int bytes = 2;
    static constexpr float max = 0;
#if defined(__F16C__)
    static inline f32x8 decode(const uint8_t* p) {
        return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    }
    static inline void encode(uint8_t* p, f32x8 v) {
        const f32x8 clipped = min8(max8(v, splat(-65504.0f)), splat(65504.0f));
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)clipped, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    static inline f32x8 decode(const uint8_t* p) {
        const i32x8 half = widen_u16(p);
        const i32x8 magnitude = half & 0x7fff, sign = (half & 0x8000) << 16;
        const f32x8 normal = as_float((magnitude << 13) + (112 << 23));
        const f32x8 subnormal = to_float(magnitude) * splat(0x1p-24f);
        return as_float(as_int(magnitude < 0x400 ? subnormal : normal) | sign);
    }
    static inline void encode(uint8_t* p, f32x8 v) {
        const i32x8 sign = (as_int(v) >> 16) & 0x8000;
        const f32x8 magnitude = min8(abs8(v), splat(65504.0f));
        const i32x8 bits = as_int(magnitude);
        const i32x8 normal = ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112 << 10);
        const i32x8 subnormal = to_int(round8(min8(magnitude, splat(0x1p-14f)) * splat(0x1p24f)));
        store_as(p, __builtin_convertvector((magnitude < splat(0x1p-14f) ? subnormal : normal) | sign, u16x8));
    }
#endif
    static constexpr float unit = 1.0f;
    static inline floats decode_floats(const uint8_t* p) {
#if defined(__AVX512F__)
        return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
        return decode(p);
#endif
    }
};

struct Int8 {
    static constexpr int bytes = 1;
    static constexpr float max = 127.0f;
    static inline f32x8 decode(const uint8_t* p) { return to_float(widen_i8(p)); }
    static inline void encode(uint8_t* p, f32x8 v) {
        store_as(p, __builtin_convertvector(to_int(round8(v)), i8x8));
    }
    static constexpr float unit = 1.0f;
    static inline floats decode_floats(const uint8_t* p) {
#if defined(__AVX512F__)
        return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
        return decode(p);
#endif
    }
};

struct Fp8 {  // e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits
    static constexpr int bytes = 1;
    static constexpr float max = 448.0f;
    static inline f32x8 decode(const uint8_t* p) {
        const i32x8 code = widen_u8(p);
        const i32x8 magnitude = code & 0x7f, sign = (code & 0x80) << 24;
        const f32x8 normal = as_float((magnitude << 20) + (120 << 23));
        const f32x8 subnormal = to_float(magnitude) * splat(0x1p-9f);
        return as_float(as_int(magnitude < 8 ? subnormal : normal) | sign);
    }
    static inline void encode(uint8_t* p, f32x8 v) {
        const f32x8 magnitude = abs8(v);
        const i32x8 bits = as_int(magnitude);
        const i32x8 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
        const i32x8 subnormal = to_int(round8(min8(magnitude, splat(0x1p-6f)) * splat(0x1p9f)));
        const i32x8 sign = (v < splat(0.0f)) & 0x80;
        store_as(p, __builtin_convertvector((magnitude < splat(0x1p-6f) ? subnormal : normal) | sign, u8x8));
    }
    // Shifted to fp16's places, a code is its value / 2^8, the difference of the exponents' biases.
#if defined(__AVX512F__)
    static constexpr float unit = 256.0f;
    static inline floats decode_floats(const uint8_t* p) {
        const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
        return (floats)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbfff)));
    }
#elif defined(__AVX2__) && defined(__F16C__)
    static constexpr float unit = 256.0f;
    static inline floats decode_floats(const uint8_t* p) {
        const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
        return (floats)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)0xbfff)));
    }
#else
    static constexpr float unit = 1.0f;
    static inline floats decode_floats(const uint8_t* p) { return decode(p); }
#endif
};

// out [padded(n)] = the n elements at `row` in units of Codec::unit, the padding 0.
template <class Codec>
static inline void decode_row(const uint8_t* row, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + kFloats <= n; i += kFloats) store_floats(out + i, Codec::decode_floats(row + i * Codec::bytes));
    for (; i < padded(n); i += kFloats) {
        uint8_t tail[kFloats * Codec::bytes] = {};
        if (i < n) memcpy(tail, row + i * Codec::bytes, (n - i) * Codec::bytes);
        store_floats(out + i, Codec::decode_floats(tail));
    }
}

// row = the n floats at `in`, encoded; gives the scale (1 if the codec has none). in [padded(n)], the padding 0.
template <class Codec>
static inline float encode_row(const float* in, int64_t n, uint8_t* row) {
    float scale = 1.0f;
    if (Codec::max > 0) {
        f32x8 largest = splat(0.0f);
        for (int64_t i = 0; i < n; i += 8) largest = max8(largest, abs8(load(in + i)));
        scale = largest8(largest) / Codec::max;
    }
    const f32x8 divisor = splat(scale > 0.0f ? scale : 1.0f), limit = splat(Codec::max);
    for (int64_t i = 0; i < n; i += 8) {
        f32x8 v = load(in + i);
        if (Codec::max > 0) v = min8(max8(v / divisor, -limit), limit);
        if (i + 8 <= n) {
            Codec::encode(row + i * Codec::bytes, v);
        } else {
            uint8_t tail[8 * Codec::bytes];
            Codec::encode(tail, v);
            memcpy(row + i * Codec::bytes, tail, (n - i) * Codec::bytes);
        }
    }
    return scale;
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
