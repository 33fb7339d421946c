// PackedEmbedding: rows of packed weights (packing.py) as floats. A row is spread over its block, 4 bytes in 64.
#include <cmath>
#include <cstring>

#include "kernels.hpp"

namespace trtforge {
namespace {

float from_half(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    float value;
    if (exponent == 31)
        value = fraction ? NAN : INFINITY;
    else
        value = exponent ? std::ldexp(float(fraction + 1024), exponent - 25) : std::ldexp(float(fraction), -24);
    return half >> 15 ? -value : value;
}

float load_scale(const uint8_t* p, int bytes) {
    if (bytes == 2) return from_half(p);
    float value;
    std::memcpy(&value, p, 4);
    return value;
}

// 32 codes of row `row` of a row block, from the bytes of all its rows' 32 columns
void load_codes(const uint8_t* block, int64_t row, int bits, int zero_point, float* codes) {
    for (int c = 0; c < 8; c++) {
        const uint8_t* const four = block + 64 * (bits == 4 ? c % 4 : c) + 4 * row;
        for (int j = 0; j < 4; j++) {
            const int code = bits == 8 ? four[j] : c < 4 ? four[j] & 15 : four[j] >> 4;
            codes[4 * c + j] = float(code - zero_point);
        }
    }
}

}  // namespace

void packed_embedding(const PackedLinear& table, const int32_t* row_ids, float scale, const Parallel& parallel) {
    const PackedLinear& t = table;
    run_items(t.num_rows, t.num_rows * t.in_features * 4, parallel, [&](int64_t i) {
        const int64_t row = row_ids[i] % t.kRows;
        const uint8_t* const block = t.weights + row_ids[i] / t.kRows * t.block_bytes();
        float* const out = t.out + i * t.in_features;
        for (int64_t k = 0; k < t.in_features; k += t.kColumns) {
            const uint8_t* const group = block + k / t.group_size * t.group_bytes();
            load_codes(group + k % t.group_size * t.kRows * t.bits / 8, row, t.bits, t.zero_point, out + k);
            const uint8_t* const at = group + t.code_bytes() + row * t.scale_bytes;
            const float unit = load_scale(at, t.scale_bytes);
            const float minimum = t.has_minimums ? load_scale(at + t.kRows * t.scale_bytes, t.scale_bytes) : 0.0f;
            for (int64_t j = k; j < k + t.kColumns; j++) out[j] = (out[j] * unit + minimum) * scale;
        }
    });
}

}  // namespace trtforge
