// The CPU kernels of our ops: plain pointers in, no OpenVINO, no threads of their own.
//
// A host gives the tensors of a node and a way to run items in parallel. What a row's result is never depends on
// how the items are spread, nor on the other rows of the step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

// In files that are compiled per instruction set nothing may be left to the linker's choice (vec.hpp).
#define TRTFORGE_INLINE inline __attribute__((always_inline))

namespace trtforge {

enum class KVDtype { fp32, fp16, bf16, int8, fp8 };

// Bytes of one element in the pool.
TRTFORGE_INLINE int64_t kv_bytes(KVDtype dtype) {
    return dtype == KVDtype::fp32 ? 4 : dtype == KVDtype::fp16 || dtype == KVDtype::bf16 ? 2 : 1;
}

TRTFORGE_INLINE bool kv_has_scales(KVDtype dtype) { return dtype == KVDtype::int8 || dtype == KVDtype::fp8; }

// A paged cache: [num_blocks, layers, 2, kv_heads, tokens_per_block] rows of head_size elements, and as many
// scales if the type is quantized. K is index 0 of the third axis, V is 1.
struct Pool {
    uint8_t* rows = nullptr;
    float* scales = nullptr;
    KVDtype dtype = KVDtype::fp32;
    int64_t num_blocks = 0, layers = 0, kv_heads = 0, tokens_per_block = 0, head_size = 0;

    // Index of the row of (block, layer, K or V, head, 0); the block's other tokens follow.
    TRTFORGE_INLINE int64_t row(int64_t block, int64_t layer, int64_t kv, int64_t head) const {
        return (((block * layers + layer) * 2 + kv) * kv_heads + head) * tokens_per_block;
    }
    TRTFORGE_INLINE int64_t row_bytes() const { return head_size * kv_bytes(dtype); }
};

struct CacheUpdate {
    Pool pool;
    int64_t layer, num_tokens, num_heads, rotary;  // rotary: elements of cos_sin's rows
    const float *q, *k, *v, *cos_sin;              // [T, num_heads * D], [T, kv_heads * D] twice, [T, rotary]
    const int64_t* slots;                          // [T], all within the pool
    float* q_rotated;                              // [T, num_heads * D]
};

struct Attention {
    Pool pool;
    int64_t layer, num_tokens, num_heads, num_sequences, max_blocks;
    float scale, softcap;  // softcap: 0 for none
    int64_t window;        // 0 for none
    const float* q;        // [T, num_heads * D]
    const int32_t *positions, *query_start, *kv_lengths, *block_tables;  // [T], [B + 1], [B], [B, max_blocks]
    float* out;                                                           // [T, num_heads * D]
};

// A linear over packed weights (packing.py): out = x_used * weights^T + bias + added, x_used rounded to int8 or x itself.
struct PackedLinear {
    int64_t num_rows, in_features, out_features, group_size;
    int bits, zero_point, scale_bytes;
    bool has_minimums, int8_activations;
    const float* x;          // [num_rows, in_features]
    const uint8_t* weights;  // [row_blocks, block_bytes]
    const float* bias;       // [out_features], or nullptr
    const float* added;      // [num_rows, out_features], or nullptr
    float* out;              // [num_rows, out_features]

    TRTFORGE_INLINE int64_t row_blocks() const { return (out_features + kRows - 1) / kRows; }
    // A row block is its groups one after the other: codes, scales [kRows], minimums [kRows].
    TRTFORGE_INLINE int64_t code_bytes() const { return group_size * kRows * bits / 8; }
    TRTFORGE_INLINE int64_t group_bytes() const {
        return code_bytes() + kRows * scale_bytes * (has_minimums ? 2 : 1);
    }
    TRTFORGE_INLINE int64_t block_bytes() const {
        return (in_features / group_size * group_bytes() + 63) / 64 * 64;
    }

    static constexpr int64_t kRows = 16, kColumns = 32;  // interleaved rows, and columns that lie together
};

// What one layer's attention begins with: q, k and v of the normalized x, all three prepared once.
struct PackedQkv {
    PackedLinear linears[3];  // their x is not used
    const float *x, *norm;    // [num_rows, in_features], [in_features]
    float epsilon;
};

// out = added + down(activation(gate(n)) * up(n)), n = the normalized x.
struct PackedMlp {
    PackedLinear gate, up, down;  // their x, added and out are not used
    const float *x, *norm;        // [num_rows, hidden], [hidden]
    const float* added;           // [num_rows, hidden], or nullptr
    float epsilon;
    bool is_gelu;  // GELU in its tanh form; else SiLU
    float* out;    // [num_rows, hidden]
};

// Runs item(0) .. item(count - 1), in any order, on any threads, and returns when all are done.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& item)>;

void kv_cache_update(const CacheUpdate&, const Parallel&);
void paged_attention(const Attention&, const Parallel&);
void packed_linear(const PackedLinear&, const Parallel&);
void packed_qkv(const PackedQkv&, const Parallel&);
void packed_mlp(const PackedMlp&, const Parallel&);
// out [num_rows, in_features] = scale * some rows of the weights, by their ids [num_rows], all below out_features
void packed_embedding(const PackedLinear& table, const int32_t* row_ids, float scale, const Parallel&);

// What is wrong with the indices in a node's inputs, or nullptr; nothing may be run if there is something.
const char* find_fault(const CacheUpdate&);
const char* find_fault(const Attention&);

// --- one instruction set's kernels -------------------------------------------------------------------------------

// A row of the step, and where the partial results of the KV head's queries go: [group, partial_floats].
struct AttentionRow {
    int64_t row;
    float* partials;
};

// Rows whose keys in a range of positions are those of one sequence's blocks; one KV head.
struct AttentionTile {
    const AttentionRow* rows;
    int64_t num_rows, sequence, kv_head;
    int64_t begin, end;
};

// A sequence is split at multiples of this, absolute positions, so that a row's sums are always taken in the same
// order, whoever computes the parts.
constexpr int64_t kPartition = 256;
// Keys whose scores are taken together; divides kPartition.
constexpr int64_t kChunk = 32;
// Most rows of a tile.
constexpr int64_t kTileRows = 64;

TRTFORGE_INLINE int64_t padded(int64_t head_size) { return (head_size + 15) / 16 * 16; }

// Floats of one query's partial result: the running sum over V [padded], the sums of weights by lane [16], the
// largest score.
TRTFORGE_INLINE int64_t partial_floats(int64_t head_size) { return padded(head_size) + 32; }

// Some rows of x that a kernel takes together.
struct RowTile {
    int64_t first, count;
};

// Some row blocks of a linear's weights.
struct Blocks {
    int64_t first, count;
};

struct Kernels {
    const char* isa;
    void (*update_token)(const CacheUpdate&, int64_t token, float* scratch);
    size_t (*update_scratch)(const CacheUpdate&);
    // scratch: attend_scratch(num_rows) floats, at a multiple of 64 bytes, as are the rows' partials
    void (*attend)(const Attention&, const AttentionTile&, float* scratch);
    size_t (*attend_scratch)(const Attention&, int64_t num_rows);
    // partial = partial and `next` together; a query's partials are always folded from the left
    void (*fold)(const float* next, int64_t head_size, float* partial);
    // out [head_size] = the attention of a query from its partials, `stride` floats apart; changes the first
    void (*finish)(float* partials, int64_t num_partials, int64_t stride, int64_t head_size, float* out);
    // A linear's activations, prepared by tiles of at most linear_tile_rows; a row takes linear_row_bytes.
    int64_t (*linear_tile_rows)(const PackedLinear&);
    int64_t (*linear_row_bytes)(const PackedLinear&);
    void (*prepare_tile)(const PackedLinear&, RowTile, uint8_t* prepared);
    // The prepared group of 32 columns with this index (column group * tile.count + row) of a tile, from x.
    void (*prepare_group)(const PackedLinear&, const float* x, int64_t index, uint8_t* prepared);
    // out [num_rows, 16 * blocks.count], `stride` apart, of a prepared tile and some row blocks of the weights; added
    // (or nullptr) lies like out
    void (*multiply_tile)(const PackedLinear&, int64_t num_rows, const uint8_t* prepared, Blocks, float* out,
                          const float* added, int64_t stride);
    // out = x / sqrt(mean(x^2) + epsilon) * weight, all [count]
    void (*normalize)(const float* x, const float* weight, float epsilon, int64_t count, float* out);
    // gate = activation(gate) * up, both [count]; count is a multiple of 8
    void (*activate)(bool is_gelu, const float* up, int64_t count, float* gate);
    // Runs nothing but multiply-adds, of bytes or of floats; their number, or 0 for the generic set.
    int64_t (*peak)(bool int8, int64_t rounds);
};

// The fastest set that this CPU has, or the one that was forced.
const Kernels& kernels();
// Runs items in parallel if `work`, in multiply-adds, is worth waking threads for.
void run_items(int64_t count, int64_t work, const Parallel&, const std::function<void(int64_t)>& item);

// Forces an instruction set by name ("generic", "avx2", "avx512"), or the best one by ""; false if this CPU lacks it.
bool force_isa(const char* name);

}  // namespace trtforge
