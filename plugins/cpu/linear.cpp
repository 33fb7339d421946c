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

// The step's rows in tiles, tiles in chunks that stay in cache, and `units` of row blocks in pieces: an item is one
// piece of one chunk.
struct Cut {
    int64_t rows, tiles, chunks, units, pieces;

    // unit_bytes: of a unit's weights
    Cut(const PackedLinear& l, int64_t units, int64_t unit_bytes) : rows(l.num_rows), units(units) {
        const Kernels& k = kernels();
        tiles = divide_up(rows, k.linear_tile_rows(l));
        const int64_t tile_bytes = k.linear_row_bytes(l) * divide_up(rows, tiles);
        chunks = divide_up(tiles, std::max<int64_t>(1, kCachedBytes / tile_bytes));
        // One tile needs no more than the shortest pieces, which even out threads that share their cores.
        const int64_t piece = tiles == 1 ? 1 : std::max<int64_t>(1, kPieceBytes / unit_bytes);
        pieces = std::max(divide_up(units, piece), std::min(units, divide_up(kItems, chunks)));
    }

    int64_t items() const { return chunks * pieces; }

    RowTile tile(int64_t t) const { return {rows * t / tiles, rows * (t + 1) / tiles - rows * t / tiles}; }

    // visit(tile, units) for all of an item
    template <class Visit>
    void each(int64_t item, const Visit& visit) const {
        const int64_t chunk = item / pieces, piece = item % pieces;
        const int64_t begin = units * piece / pieces, end = units * (piece + 1) / pieces;
        for (int64_t t = tiles * chunk / chunks; t < tiles * (chunk + 1) / chunks; t++)
            visit(tile(t), Blocks{begin, end - begin});
    }

private:
    static constexpr int64_t kItems = 64;  // at least, where there are as many
};

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
    const Cut cut(first, blocks, first.block_bytes());
    const int64_t row_bytes = k.linear_row_bytes(first);
    run_items(cut.items(), work, parallel, [&](int64_t item) {
        cut.each(item, [&](RowTile tile, Blocks wanted) {
            int64_t begin = wanted.first, end = wanted.first + wanted.count;
            for (const Product& p : products) {
                const PackedLinear& l = *p.linear;
                const int64_t count = std::min(end, l.row_blocks()) - begin;
                if (count > 0) {
                    const int64_t at = tile.first * l.out_features + begin * l.kRows;
                    k.multiply_tile(l, tile.count, p.prepared + tile.first * row_bytes, {begin, count}, l.out + at,
                                    l.added ? l.added + at : nullptr, l.out_features);
                    begin += count;
                }
                begin -= l.row_blocks();
                end -= l.row_blocks();
                if (end <= 0) break;
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
    const Cut cut(first, 1, 1);
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
    const Cut cut(l, 1, 1);
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
    const Cut cut(gate, gate.out_features / kGroup, kBlocks * (gate.block_bytes() + up.block_bytes()));
    const int64_t work = 2 * gate.num_rows * gate.in_features * gate.out_features;
    run_items(cut.items(), work, parallel, [&](int64_t item) {
        cut.each(item, [&](RowTile tile, Blocks groups) {
            float gated[kMostRows * kGroup], factor[kMostRows * kGroup];
            for (int64_t g = groups.first; g < groups.first + groups.count; g++) {
                const Blocks blocks{g * kBlocks, kBlocks};
                const int64_t at = tile.first * row_bytes;
                k.multiply_tile(gate, tile.count, prepared[0] + at, blocks, gated, nullptr, kGroup);
                k.multiply_tile(up, tile.count, prepared[1] + at, blocks, factor, nullptr, kGroup);
                k.activate(a.is_gelu, factor, tile.count * kGroup, gated);
                for (int64_t m = 0; m < tile.count; m++)
                    k.prepare_group(down, gated + m * kGroup, g * tile.count + m, inner + tile.first * inner_row_bytes);
            }
        });
    });
    multiply({{&down, inner}}, parallel);
}

}  // namespace trtforge

// For benchmarks: runs `rounds` of independent multiply-adds of bytes or floats on this thread, as fast as the
// instruction set can; their number, or 0 for one without a loop of its own.
extern "C" __attribute__((visibility("default"))) int64_t trtforge_cpu_peak(int int8, int64_t rounds) {
    return trtforge::kernels().peak(int8 != 0, rounds);
}
