// Products of 32 columns of a row block (16 rows, packing.py) with some rows of x, per instruction set.
//
// A "dot" has: Block, 32 prepared columns of one row of x; Sum, the running products of kLanes rows of weights with
// one of x; start(), add(), which takes 32 columns of M rows of x and H vectors of kLanes rows of weights, and
// finish(). Products of int8 activations are exact integers, so they are the same in every instruction set.
#pragma once

#include "kernels.hpp"
#include "kv_codec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {

// Vectors of as many rows of weights as fit a register.
#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
typedef float lanes_f __attribute__((vector_size(64)));
typedef int32_t lanes_i __attribute__((vector_size(64)));
static inline lanes_f lane_madd(lanes_f a, lanes_f b, lanes_f c) {
    return (lanes_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
static inline lanes_f lane_splat(float x) { return (lanes_f)_mm512_set1_ps(x); }
static inline lanes_f load_half(const uint8_t* p) {
    return (lanes_f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
#else
constexpr int kLanes = 8;
typedef f32x8 lanes_f;
typedef i32x8 lanes_i;
static inline lanes_f lane_madd(lanes_f a, lanes_f b, lanes_f c) { return madd(a, b, c); }
static inline lanes_f lane_splat(float x) { return splat(x); }
static inline lanes_f load_half(const uint8_t* p) { return Fp16::decode(p); }
#endif

static inline lanes_i load_lanes(const uint8_t* p) { return load_as<lanes_i>(p); }
static inline lanes_f load_scales(const uint8_t* p, int bytes) {
    return bytes == 2 ? load_half(p) : load_as<lanes_f>(p);
}

// Computes a sum here and now. Else GCC puts off additions until it has all products of 32 columns in memory.
template <class V>
static TRTFORGE_INLINE void settle(V& sum) {
#if defined(__AVX2__)
    __asm__("" : "+v"(sum));
#else
    (void)sum;
#endif
}

// 32 int8 columns of a row of x: x is about codes * unit. sum: of codes * unit. offset: what is to be added to the
// dot of the codes as the kernel sees them, since the weights' stored codes are not around zero.
struct IntegerBlock {
    int8_t codes[32];
    float unit, sum;
    int32_t offset, padding;
};

// 32 columns as floats: x itself (unit 1), or its codes.
struct FloatBlock {
    float values[32];
    float unit, sum;
};

// For x in fp32, and for int8 where the instruction set has no products of bytes: every sum of 32 products of codes
// is below 2^24, so floats hold it exactly.
template <int Bits>
struct FloatDot {
    using Block = FloatBlock;
    using Sum = lanes_f;

    template <int H, int M>
    static TRTFORGE_INLINE void add(const uint8_t* codes, int zero_point, const Block* x, Sum sums[H][M]) {
        for (int i = 0; i < (Bits == 4 ? 4 : 8); i++)
            for (int h = 0; h < H; h++) {
                const lanes_i v = load_lanes(codes + 64 * i + 4 * kLanes * h);
                for (int j = 0; j < 4; j++) {
                    const lanes_i bytes = v >> 8 * j;
                    add_column<H, M>((Bits == 4 ? bytes & 15 : bytes & 255) - zero_point, 4 * i + j, h, x, sums);
                    if (Bits == 4) add_column<H, M>((bytes >> 4 & 15) - zero_point, 16 + 4 * i + j, h, x, sums);
                }
            }
    }

    static TRTFORGE_INLINE Sum start(const Block&) { return Sum{}; }
    static TRTFORGE_INLINE lanes_f finish(Sum sum, const Block&) { return sum; }

private:
    template <int H, int M>
    static TRTFORGE_INLINE void add_column(lanes_i code, int column, int h, const Block* x, Sum sums[H][M]) {
        const lanes_f w = __builtin_convertvector(code, lanes_f);
        for (int m = 0; m < M; m++) {
            sums[h][m] = lane_madd(w, lane_splat(x[m].values[column]), sums[h][m]);
            settle(sums[h][m]);
        }
    }
};

#if defined(__AVX512VNNI__)

template <int Bits>
struct IntegerDot {
    using Block = IntegerBlock;
    using Sum = __m512i;
    static constexpr int kBias = 0;

    template <int H, int M>
    static TRTFORGE_INLINE void add(const uint8_t* codes, int, const Block* x, Sum sums[H][M]) {
        const __m512i low = _mm512_set1_epi8(15);
        for (int i = 0; i < (Bits == 4 ? 4 : 8); i++) {
            const __m512i v = _mm512_loadu_si512(codes + 64 * i);
            const __m512i w = Bits == 4 ? _mm512_and_si512(v, low) : v;
            for (int m = 0; m < M; m++) sums[0][m] = _mm512_dpbusd_epi32(sums[0][m], w, columns(x[m], i));
            if (Bits == 8) continue;
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            for (int m = 0; m < M; m++) sums[0][m] = _mm512_dpbusd_epi32(sums[0][m], high, columns(x[m], i + 4));
        }
    }

    static TRTFORGE_INLINE Sum start(const Block& x) { return _mm512_set1_epi32(x.offset); }
    static TRTFORGE_INLINE lanes_f finish(Sum sum, const Block&) { return (lanes_f)_mm512_cvtepi32_ps(sum); }

private:
    static TRTFORGE_INLINE __m512i columns(const Block& x, int chunk) {
        int32_t four;
        memcpy(&four, x.codes + 4 * chunk, 4);
        return _mm512_set1_epi32(four);
    }
};

#elif defined(__AVX2__)

static TRTFORGE_INLINE __m256i columns(const IntegerBlock& x, int chunk) {
    int32_t four;
    memcpy(&four, x.codes + 4 * chunk, 4);
    return _mm256_set1_epi32(four);
}

template <int Bits>
struct IntegerDot;

// Sums of 16 bits: 32 columns of at most 15 * 127, two to a lane, stay below 2^15.
template <>
struct IntegerDot<4> {
    using Block = IntegerBlock;
    using Sum = __m256i;
    static constexpr int kBias = 0;

    template <int H, int M>
    static TRTFORGE_INLINE void add(const uint8_t* codes, int, const Block* x, Sum sums[H][M]) {
        const __m256i low = _mm256_set1_epi8(15);
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < H; h++) {
                const __m256i v = _mm256_loadu_si256((const __m256i*)(codes + 64 * i + 32 * h));
                const __m256i w = _mm256_and_si256(v, low), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
                for (int m = 0; m < M; m++) {
                    const __m256i a = _mm256_maddubs_epi16(w, columns(x[m], i));
                    const __m256i b = _mm256_maddubs_epi16(high, columns(x[m], i + 4));
                    sums[h][m] = _mm256_add_epi16(sums[h][m], _mm256_add_epi16(a, b));
                    settle(sums[h][m]);
                }
            }
    }

    static TRTFORGE_INLINE Sum start(const Block&) { return _mm256_setzero_si256(); }
    static TRTFORGE_INLINE lanes_f finish(Sum sum, const Block& x) {
        const __m256i wide = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        return (lanes_f)_mm256_cvtepi32_ps(_mm256_add_epi32(wide, _mm256_set1_epi32(x.offset)));
    }
};

// Two products of 255 * 127 overflow 16 bits, two of 128 * 127 do not: |w| * (x with w's sign), w around zero.
template <>
struct IntegerDot<8> {
    using Block = IntegerBlock;
    using Sum = __m256i;
    static constexpr int kBias = 128;

    template <int H, int M>
    static TRTFORGE_INLINE void add(const uint8_t* codes, int, const Block* x, Sum sums[H][M]) {
        const __m256i bias = _mm256_set1_epi8((char)kBias), ones = _mm256_set1_epi16(1);
        for (int i = 0; i < 8; i++)
            for (int h = 0; h < H; h++) {
                const __m256i v = _mm256_loadu_si256((const __m256i*)(codes + 64 * i + 32 * h));
                const __m256i w = _mm256_xor_si256(v, bias), size = _mm256_abs_epi8(w);
                for (int m = 0; m < M; m++) {
                    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(columns(x[m], i), w));
                    sums[h][m] = _mm256_add_epi32(sums[h][m], _mm256_madd_epi16(pairs, ones));
                    settle(sums[h][m]);
                }
            }
    }

    static TRTFORGE_INLINE Sum start(const Block& x) { return _mm256_set1_epi32(x.offset); }
    static TRTFORGE_INLINE lanes_f finish(Sum sum, const Block&) { return (lanes_f)_mm256_cvtepi32_ps(sum); }
};

#endif

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
