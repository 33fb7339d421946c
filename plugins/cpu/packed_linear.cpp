// PackedLinear: some rows of x times one row block of the weights. Compiled once per instruction set.
//
// Each output is a sum over the groups of 32 columns from the left, whatever rows are taken together:
// sum += dot * (scale * unit); sum += minimum * (sum of x). So a row's result does not depend on the other rows.
#include "linear_dot.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {
namespace {

constexpr int kVectors = PackedLinear::kRows / kLanes;  // of a row block's rows

#if defined(__AVX512VNNI__)
constexpr int kTileRows = 8, kFloatTileRows = 8;
#else
constexpr int kTileRows = 4, kFloatTileRows = 6;
#endif

static inline bool uses_integers(const PackedLinear& l) {
#if defined(__AVX2__)
    return l.int8_activations;
#else
    (void)l;
    return false;
#endif
}

// --- activations -------------------------------------------------------------------------------------------------

struct Rounded {
    f32x8 codes[4];
    float unit;
    int32_t sum;
};

static inline i32x8 larger(i32x8 a, i32x8 b) { return a > b ? a : b; }

static inline int32_t largest_lane(i32x8 v) {
#if defined(__AVX2__)
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#else
    int32_t most = v[0];
    for (int i = 1; i < 8; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

static inline int32_t sum_of_lanes(i32x8 v) {
#if defined(__AVX2__)
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < 8; i++) sum += v[i];
    return sum;
#endif
}

// 32 elements to int8: the arithmetic of the op's body, bit for bit. A NaN makes the unit a NaN.
static inline Rounded round_group(const float* x) {
    i32x8 largest_bits = {};
    for (int i = 0; i < 4; i++)  // of floats without sign: ordered as integers
        largest_bits = larger(as_int(load(x + 8 * i)) & 0x7fffffff, largest_bits);
    const int32_t most = largest_lane(largest_bits);
    float largest;
    memcpy(&largest, &most, 4);
    Rounded r;
    r.unit = largest < 1e-30f ? 1.0f : largest / 127.0f;
    i32x8 sums = {};
    for (int i = 0; i < 4; i++) {
        r.codes[i] = round8(load(x + 8 * i) / splat(r.unit));
        sums += to_int(r.codes[i]);
    }
    r.sum = sum_of_lanes(sums);
    return r;
}

static inline void store_codes(const Rounded& r, int8_t* codes) {
#if defined(__AVX2__)
    const __m256i a = _mm256_packs_epi32((__m256i)to_int(r.codes[0]), (__m256i)to_int(r.codes[1]));
    const __m256i b = _mm256_packs_epi32((__m256i)to_int(r.codes[2]), (__m256i)to_int(r.codes[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)codes, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)r.codes[i / 8][i % 8];
#endif
}

static inline void prepare(const PackedLinear& l, const float* x, IntegerBlock* block) {
#if defined(__AVX2__)
    const int bias = l.bits == 4 ? IntegerDot<4>::kBias : IntegerDot<8>::kBias;
#else
    const int bias = 0;
#endif
    const Rounded r = round_group(x);
    store_codes(r, block->codes);
    block->unit = r.unit;
    block->sum = r.unit * (float)r.sum;
    block->offset = -(l.zero_point - bias) * r.sum;
}

static inline void prepare(const PackedLinear& l, const float* x, FloatBlock* block) {
    if (l.int8_activations) {
        const Rounded r = round_group(x);
        for (int i = 0; i < 4; i++) store(block->values + 8 * i, r.codes[i]);
        block->unit = r.unit;
        block->sum = r.unit * (float)r.sum;
    } else {
        memcpy(block->values, x, sizeof block->values);
        block->unit = 1.0f;
        block->sum = sum8((load(x) + load(x + 8)) + (load(x + 16) + load(x + 24)));
    }
}

// prepared: [in_features / 32, tile.count] blocks
template <class Block>
static void prepare_rows(const PackedLinear& l, RowTile tile, Block* prepared) {
    for (int64_t m = 0; m < tile.count; m++) {
        const float* const x = l.x + (tile.first + m) * l.in_features;
        for (int64_t b = 0; b < l.in_features / 32; b++) prepare(l, x + 32 * b, prepared + b * tile.count + m);
    }
}

// --- products ----------------------------------------------------------------------------------------------------

// How far ahead weights are asked for: more than memory answers late. Into the second-level cache, since the first has
// room for fewer answers to wait for.
constexpr int64_t kAhead = 4096;

template <int Bytes>
static TRTFORGE_INLINE void ask_for(const uint8_t* p) {
    for (int line = 0; line < Bytes; line += 64) __builtin_prefetch(p + line, 0, 2);
}

// Of a row block: its groups, and a group's blocks of kColumns. Divisions that are not done again for every row block.
struct Sizes {
    int64_t groups, blocks, code_bytes, group_bytes;
};

// H vectors of weights, from row `first` of the row block, with M rows of x.
template <class Dot, int Bits, int H, int M>
static TRTFORGE_INLINE void multiply_part(const PackedLinear& l, Sizes n, const uint8_t* weights, int first,
                                          const typename Dot::Block* x, lanes_f acc[H][M]) {
    constexpr int64_t kBlockBytes = PackedLinear::kRows * PackedLinear::kColumns * Bits / 8;
    const auto [groups, blocks, code_bytes, group_bytes] = n;
    const int scale_bytes = l.scale_bytes;
    for (int h = 0; h < H; h++)
        for (int m = 0; m < M; m++) acc[h][m] = lanes_f{};
    for (int64_t g = 0; g < groups; g++, weights += group_bytes) {
        const uint8_t* const scales = weights + code_bytes + scale_bytes * first;
        lanes_f scale[H], minimum[H] = {};
        for (int h = 0; h < H; h++) scale[h] = load_scales(scales + scale_bytes * kLanes * h, scale_bytes);
        if (l.has_minimums)
            for (int h = 0; h < H; h++)
                minimum[h] = load_scales(scales + scale_bytes * (PackedLinear::kRows + kLanes * h), scale_bytes);
        ask_for<64>(weights + code_bytes + kAhead);
        for (int64_t b = 0; b < blocks; b++, x += M) {
            const uint8_t* const codes = weights + kBlockBytes * b;
            ask_for<kBlockBytes>(codes + kAhead);
            typename Dot::Sum sums[H][M];
            for (int h = 0; h < H; h++)
                for (int m = 0; m < M; m++) sums[h][m] = Dot::start(x[m]);
            Dot::template add<H, M>(codes + 4 * first, l.zero_point, x, sums);
            for (int h = 0; h < H; h++)
                for (int m = 0; m < M; m++)
                    acc[h][m] = lane_madd(Dot::finish(sums[h][m], x[m]), scale[h] * lane_splat(x[m].unit), acc[h][m]);
            if (!l.has_minimums) continue;
            for (int h = 0; h < H; h++)
                for (int m = 0; m < M; m++) acc[h][m] = lane_madd(minimum[h], lane_splat(x[m].sum), acc[h][m]);
        }
    }
}

// Where the outputs of a row block go.
struct Place {
    float* out;
    const float* added;
    int64_t stride;

    void move(int64_t by) {
        out += by;
        if (added) added += by;
    }
};

// One row of x with kLanes rows of weights, from `column` of all outputs; `place` is that of the row block.
static TRTFORGE_INLINE void put(const PackedLinear& l, const Place& place, int64_t row, int64_t column, lanes_f v) {
    const int64_t at = row * place.stride + column % PackedLinear::kRows, count = l.out_features - column;
    if (count >= kLanes) {
        if (l.bias) v += load_as<lanes_f>((const uint8_t*)(l.bias + column));
        if (place.added) v += load_as<lanes_f>((const uint8_t*)(place.added + at));
        store_as((uint8_t*)(place.out + at), v);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const float biased = l.bias ? v[i] + l.bias[column + i] : v[i];
        place.out[at + i] = place.added ? biased + place.added[at + i] : biased;
    }
}

template <class Dot, int Bits, int M>
static __attribute__((noinline)) void multiply_rows(const PackedLinear& l, const uint8_t* prepared, Blocks blocks,
                                                    Place place) {
    // Few rows wait for memory: take all of a row block as it comes. With more the sums need the registers.
    constexpr int H = M <= 2 ? kVectors : 1;
    const auto* const x = (const typename Dot::Block*)prepared;
    const Sizes n = {l.in_features / l.group_size, l.group_size / PackedLinear::kColumns, l.code_bytes(),
                     l.group_bytes()};
    const int64_t block_bytes = l.block_bytes();
    for (int64_t b = blocks.first; b < blocks.first + blocks.count; b++) {
        for (int part = 0; part < kVectors; part += H) {
            lanes_f acc[H][M];
            multiply_part<Dot, Bits, H, M>(l, n, l.weights + b * block_bytes, part * kLanes, x, acc);
            for (int m = 0; m < M; m++)
                for (int h = 0; h < H; h++)
                    put(l, place, m, b * PackedLinear::kRows + (part + h) * kLanes, acc[h][m]);
        }
        place.move(PackedLinear::kRows);
    }
}

template <class Dot, int Bits, int M>
static void multiply_up_to(const PackedLinear& l, int64_t num_rows, const uint8_t* prepared, Blocks blocks,
                           const Place& place) {
    if (num_rows == M) return multiply_rows<Dot, Bits, M>(l, prepared, blocks, place);
    if constexpr (M > 1) multiply_up_to<Dot, Bits, M - 1>(l, num_rows, prepared, blocks, place);
}

}  // namespace

int64_t linear_tile_rows(const PackedLinear& l) { return uses_integers(l) ? kTileRows : kFloatTileRows; }

int64_t linear_row_bytes(const PackedLinear& l) {
    const int64_t block = uses_integers(l) ? sizeof(IntegerBlock) : sizeof(FloatBlock);
    return l.in_features / PackedLinear::kColumns * block;
}

void prepare_tile(const PackedLinear& l, RowTile tile, uint8_t* prepared) {
    if (uses_integers(l)) return prepare_rows(l, tile, (IntegerBlock*)prepared);
    prepare_rows(l, tile, (FloatBlock*)prepared);
}

void prepare_group(const PackedLinear& l, const float* x, int64_t index, uint8_t* prepared) {
    if (uses_integers(l)) return prepare(l, x, (IntegerBlock*)prepared + index);
    prepare(l, x, (FloatBlock*)prepared + index);
}

void multiply_tile(const PackedLinear& l, int64_t num_rows, const uint8_t* prepared, Blocks blocks, float* out,
                   const float* added, int64_t stride) {
    const Place place = {out, added, stride};
#if defined(__AVX2__)
    if (uses_integers(l)) {
        if (l.bits == 4) return multiply_up_to<IntegerDot<4>, 4, kTileRows>(l, num_rows, prepared, blocks, place);
        return multiply_up_to<IntegerDot<8>, 8, kTileRows>(l, num_rows, prepared, blocks, place);
    }
#endif
    if (l.bits == 4) return multiply_up_to<FloatDot<4>, 4, kFloatTileRows>(l, num_rows, prepared, blocks, place);
    multiply_up_to<FloatDot<8>, 8, kFloatTileRows>(l, num_rows, prepared, blocks, place);
}

#if defined(__AVX2__)
// Independent sums, each a variable: GCC leaves an array of them in memory.
template <class V, int N>
struct Sums {
    V first = {};
    Sums<V, N - 1> others;

    template <class Step>
    TRTFORGE_INLINE void each(const Step& step) {
        step(first);
        others.each(step);
    }
};
template <class V>
struct Sums<V, 0> {
    template <class Step>
    TRTFORGE_INLINE void each(const Step&) {}
};

template <class V, class Step>
static TRTFORGE_INLINE int64_t count_steps(int64_t rounds, const Step& step) {
    constexpr int kSums = 12;
    Sums<V, kSums> sums;
    for (int64_t r = 0; r < rounds; r++) sums.each(step);
    sums.each([](V& sum) __attribute__((always_inline)) { __asm__ volatile("" : : "v"(sum)); });
    return rounds * kSums;
}
#endif

// The loop that kernels come down to without anything around it, for benchmarks.
int64_t peak(bool int8, int64_t rounds) {
#if defined(__AVX512VNNI__)
    const __m512i bytes = _mm512_set1_epi8(3);
    if (int8)
        return 64 * count_steps<__m512i>(rounds, [&](__m512i& sum) __attribute__((always_inline)) {
                   sum = _mm512_dpbusd_epi32(sum, bytes, bytes);
                   settle(sum);
               });
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_set1_epi8(3);
    if (int8)
        return 32 * count_steps<__m256i>(rounds, [&](__m256i& sum) __attribute__((always_inline)) {
                   __m256i x = bytes;
                   __asm__ volatile("" : "+x"(x));  // or GCC multiplies once
                   sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(bytes, x));
                   settle(sum);
               });
#endif
#if defined(__AVX2__)
    const lanes_f one = lane_splat(1.0f);
    return kLanes * count_steps<lanes_f>(rounds, [&](lanes_f& sum) __attribute__((always_inline)) {
               sum = lane_madd(sum, one, one);
               settle(sum);
           });
#else
    (void)int8, (void)rounds;
    return 0;
#endif
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
