// KVCacheUpdate, one token at a time. Compiled once per instruction set.
#include "kv_codec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {

// out [head_size] = the first `rotary` elements of x rotated by pairs (i, i + rotary / 2), the rest as it is.
static void rotate(const float* x, const float* cos_sin, int64_t rotary, int64_t head_size, float* out) {
    const int64_t half = rotary / 2;
    const float *cos = cos_sin, *sin = cos_sin + half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = rotary; i < head_size; i++) out[i] = x[i];
}

static void write_row(const Pool& pool, int64_t row, const float* values) {
    uint8_t* const to = pool.rows + row * pool.row_bytes();
    float scale = 0;
    switch (pool.dtype) {
        case KVDtype::fp32: memcpy(to, values, pool.row_bytes()); return;
        case KVDtype::fp16: encode_row<Fp16>(values, pool.head_size, to); return;
        case KVDtype::bf16: encode_row<Bf16>(values, pool.head_size, to); return;
        case KVDtype::int8: scale = encode_row<Int8>(values, pool.head_size, to); break;
        case KVDtype::fp8: scale = encode_row<Fp8>(values, pool.head_size, to); break;
    }
    pool.scales[row] = scale;
}

size_t update_scratch(const CacheUpdate& u) { return padded(u.pool.head_size); }

// scratch [padded(head_size)]
void update_token(const CacheUpdate& u, int64_t token, float* scratch) {
    const int64_t d = u.pool.head_size;
    const float* const cos_sin = u.cos_sin + token * u.rotary;
    for (int64_t head = 0; head < u.num_heads; head++) {
        const int64_t at = (token * u.num_heads + head) * d;
        rotate(u.q + at, cos_sin, u.rotary, d, u.q_rotated + at);
    }
    const int64_t block = u.slots[token] / u.pool.tokens_per_block;
    const int64_t offset = u.slots[token] % u.pool.tokens_per_block;
    for (int64_t i = d; i < padded(d); i++) scratch[i] = 0;
    for (int64_t head = 0; head < u.pool.kv_heads; head++) {
        const int64_t at = (token * u.pool.kv_heads + head) * d;
        rotate(u.k + at, cos_sin, u.rotary, d, scratch);
        write_row(u.pool, u.pool.row(block, u.layer, 0, head) + offset, scratch);
        memcpy(scratch, u.v + at, d * sizeof(float));
        write_row(u.pool, u.pool.row(block, u.layer, 1, head) + offset, scratch);
    }
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
