// Packed linears, what all instruction sets share: rows are cut into tiles, weights into runs of row blocks.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace trtforge {
namespace {

// Prepared activations of as many rows as stay in the second-level cache while the weights pass by.
constexpr int64_t kCachedBytes = 256 << 10;
// Row blocks that the tiles of a chunk go over one after the other, out of the second-level cache too.
constexpr int64_t kPieceBytes = 64 << 10;
// Runs of row blocks that a linear is cut into for few rows: enough to even out threads that share their cores.
constexpr int64_t kRuns = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// This thread's buffer for the step's rows; not initialized. Taken in pieces.
class Buffer {
public:
    explicit Buffer(size_t bytes) {
        thread_local std::unique_ptr<uint8_t[]> memory;
        thread_local size_t size = 0;
        if (size < bytes) memory.reset(new uint8_t[size = bytes]);
        next_ = memory.get();
    }
    uint8_t* take(size_t bytes) {
        uint8_t* const piece = next_;
        next_ += bytes;
        return piece;
    }

private:
    uint8_t* next_;
};

// The step's rows in tiles, tiles in chunks that stay in cache, and `blocks` row blocks in runs: an item is one run
// of one chunk.
struct Cut {
    int64_t rows, tiles, chunks, blocks, runs;

    Cut(const PackedLinear& l, int64_t blocks) : rows(l.num_rows), blocks(blocks) {
        const Kernels& k = kernels();
        tiles = divide_up(rows, k.linear_tile_rows(l));
        const int64_t tile_bytes = k.linear_row_bytes(l) * divide_up(rows, tiles);
        chunks = divide_up(tiles, std::max<int64_t>(1, kCachedBytes / tile_bytes));
        runs = std::min(blocks, divide_up(kRuns, chunks));
    }

    int64_t items() const { return chunks * runs; }

    RowTile tile(int64_t t) const { return {rows * t / tiles, rows * (t + 1) / tiles - rows * t / tiles}; }

    // visit(tile, first block, end block) for all of an item, in pieces of piece_blocks.
    template <class Visit>
    void each(int64_t item, int64_t piece_blocks, const Visit& visit) const {
        const int64_t chunk = item / runs, run = item % runs, end = blocks * (run + 1) / runs;
        for (int64_t piece = blocks * run / runs; piece < end; piece += piece_blocks)
            for (int64_t t = tiles * chunk / chunks; t < tiles * (chunk + 1) / chunks; t++)
                visit(tile(t), piece, std::min(end, piece + piece_blocks));
    }
};

int64_t piece_blocks(const PackedLinear& l) { return std::max<int64_t>(1, kPieceBytes / l.block_bytes()); }

int64_t prepared_bytes(const PackedLinear& l) { return l.num_rows * kernels().linear_row_bytes(l); }

// Whether what is prepared for one serves the other.
bool prepare_alike(const PackedLinear& a, const PackedLinear& b) {
    return a.bits == b.bits && a.zero_point == b.zero_point;
}

struct Product {
    const PackedLinear* linear;
    const uint8_t* prepared;
};

// All products of one input, as one parallel region.
void multiply(const std::vector<Product>& products, const Parallel& parallel) {
    const Kernels& k = kernels();
    const PackedLinear& first = *products[0].linear;
    int64_t blocks = 0, work = 0;
    for (const Product& p : products) {
        blocks += p.linear->row_blocks();
        work += p.linear->num_rows * p.linear->in_features * p.linear->out_features;
    }
    const Cut cut(first, blocks);
    const int64_t row_bytes = k.linear_row_bytes(first);
    run_items(cut.items(), work, parallel, [&](int64_t item) {
        cut.each(item, piece_blocks(first), [&](RowTile tile, int64_t begin, int64_t end) {
            int64_t before = 0;
            for (const Product& p : products) {
                const PackedLinear& l = *p.linear;
                for (int64_t b = std::max(begin - before, int64_t{0}); b < std::min(end - before, l.row_blocks()); b++) {
                    const int64_t at = tile.first * l.out_features + b * l.kRows;
                    k.multiply_tile(l, tile.count, p.prepared + tile.first * row_bytes, b, l.out + at,
                                    l.added ? l.added + at : nullptr, l.out_features);
                }
                before += l.row_blocks();
            }
        });
    });
}

// x, normalized, prepared for some linears: pointers to each one's, which may be shared.
std::vector<const uint8_t*> prepare_normalized(const std::vector<const PackedLinear*>& linears, const float* x,
                                               const float* norm, float epsilon, Buffer& buffer,
                                               const Parallel& parallel) {
    const Kernels& k = kernels();
    const PackedLinear& first = *linears[0];
    const int64_t count = first.in_features, row_bytes = k.linear_row_bytes(first);
    std::vector<uint8_t*> prepared;
    std::vector<PackedLinear> distinct;
    float* const normalized = (float*)buffer.take(first.num_rows * count * sizeof(float));
    std::vector<const uint8_t*> found;
    for (const PackedLinear* l : linears) {
        size_t i = 0;
        while (i < distinct.size() && !prepare_alike(distinct[i], *l)) i++;
        if (i == distinct.size()) {
            distinct.push_back(*l);
            distinct.back().x = normalized;
            prepared.push_back(buffer.take(prepared_bytes(*l)));
        }
        found.push_back(prepared[i]);
    }
    const Cut cut(first, 1);
    run_items(cut.tiles, first.num_rows * count * 8, parallel, [&](int64_t t) {
        const RowTile tile = cut.tile(t);
        for (int64_t row = tile.first; row < tile.first + tile.count; row++)
            k.normalize(x + row * count, norm, epsilon, count, normalized + row * count);
        for (size_t i = 0; i < distinct.size(); i++)
            k.prepare_tile(distinct[i], tile, prepared[i] + tile.first * row_bytes);
    });
    return found;
}

}  // namespace

void packed_linear(const PackedLinear& l, const Parallel& parallel) {
    if (l.num_rows == 0) return;
    const Kernels& k = kernels();
    const int64_t row_bytes = k.linear_row_bytes(l);
    Buffer buffer(prepared_bytes(l));
    uint8_t* const prepared = buffer.take(prepared_bytes(l));
    const Cut cut(l, 1);
    run_items(cut.tiles, l.num_rows * l.in_features * 4, parallel, [&](int64_t t) {
        k.prepare_tile(l, cut.tile(t), prepared + cut.tile(t).first * row_bytes);
    });
    multiply({{&l, prepared}}, parallel);
}

void packed_qkv(const PackedQkv& a, const Parallel& parallel) {
    const PackedLinear* const l = a.linears;
    if (l->num_rows == 0) return;
    Buffer buffer(l->num_rows * l->in_features * sizeof(float) + 3 * prepared_bytes(*l));
    const auto prepared = prepare_normalized({l, l + 1, l + 2}, a.x, a.norm, a.epsilon, buffer, parallel);
    multiply({{l, prepared[0]}, {l + 1, prepared[1]}, {l + 2, prepared[2]}}, parallel);
}

void packed_mlp(const PackedMlp& a, const Parallel& parallel) {
    const PackedLinear &gate = a.gate, &up = a.up;
    if (gate.num_rows == 0) return;
    const Kernels& k = kernels();
    PackedLinear down = a.down;
    down.added = a.added;
    down.out = a.out;
    Buffer buffer(gate.num_rows * gate.in_features * sizeof(float) + 2 * prepared_bytes(gate) + prepared_bytes(down));
    const auto prepared = prepare_normalized({&gate, &up}, a.x, a.norm, a.epsilon, buffer, parallel);
    uint8_t* const inner = buffer.take(prepared_bytes(down));

    // 32 columns of gate and up at a time: what down takes as one group of activations.
    constexpr int64_t kGroup = PackedLinear::kColumns, kBlocks = kGroup / PackedLinear::kRows, kMostRows = 8;
    const int64_t row_bytes = k.linear_row_bytes(gate), inner_row_bytes = k.linear_row_bytes(down);
    const Cut cut(gate, gate.out_features / kGroup);
    const int64_t piece = std::max<int64_t>(1, piece_blocks(gate) / (2 * kBlocks));
    run_items(cut.items(), 2 * gate.num_rows * gate.in_features * gate.out_features, parallel, [&](int64_t item) {
        cut.each(item, piece, [&](RowTile tile, int64_t begin, int64_t end) {
            float gated[kMostRows * kGroup], factor[kMostRows * kGroup];
            for (int64_t g = begin; g < end; g++) {
                for (int64_t b = 0; b < kBlocks; b++) {
                    const int64_t block = g * kBlocks + b, at = b * PackedLinear::kRows;
                    k.multiply_tile(gate, tile.count, prepared[0] + tile.first * row_bytes, block, gated + at, nullptr,
                                    kGroup);
                    k.multiply_tile(up, tile.count, prepared[1] + tile.first * row_bytes, block, factor + at, nullptr,
                                    kGroup);
                }
                k.activate(a.is_gelu, factor, tile.count * kGroup, gated);
                for (int64_t m = 0; m < tile.count; m++)
                    k.prepare_group(down, gated + m * kGroup, g * tile.count + m, inner + tile.first * inner_row_bytes);
            }
        });
    });
    multiply({{&down, inner}}, parallel);
}

}  // namespace trtforge
