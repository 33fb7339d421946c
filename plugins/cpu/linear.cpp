// PackedLinear, what all instruction sets share: rows are cut into tiles, weights into runs of row blocks.
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

RowTile cut(int64_t rows, int64_t tiles, int64_t tile) {
    const int64_t first = rows * tile / tiles;
    return {first, rows * (tile + 1) / tiles - first};
}

// This thread's buffer for the rows of one linear; not initialized.
uint8_t* buffer(size_t bytes) {
    thread_local std::unique_ptr<uint8_t[]> memory;
    thread_local size_t size = 0;
    if (size < bytes) memory.reset(new uint8_t[size = bytes]);
    return memory.get();
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void packed_linear(const PackedLinear& l, const Parallel& parallel) {
    if (l.num_rows == 0) return;
    const Kernels& k = kernels();
    const int64_t row_bytes = k.linear_row_bytes(l), tiles = divide_up(l.num_rows, k.linear_tile_rows(l));
    uint8_t* const prepared = buffer(l.num_rows * row_bytes);
    run_items(tiles, l.num_rows * l.in_features * 4, parallel, [&](int64_t t) {
        const RowTile tile = cut(l.num_rows, tiles, t);
        k.prepare_tile(l, tile, prepared + tile.first * row_bytes);
    });

    const int64_t cached_tiles = std::max<int64_t>(1, kCachedBytes / (row_bytes * divide_up(l.num_rows, tiles)));
    const int64_t chunks = divide_up(tiles, cached_tiles);
    const int64_t piece_blocks = std::max<int64_t>(1, kPieceBytes / l.block_bytes());
    const int64_t blocks = l.row_blocks(), runs = std::min(blocks, divide_up(kRuns, chunks));
    run_items(chunks * runs, l.num_rows * l.in_features * l.out_features, parallel, [&](int64_t item) {
        const int64_t chunk = item / runs, run = item % runs;
        const int64_t first_tile = tiles * chunk / chunks, end_tile = tiles * (chunk + 1) / chunks;
        const int64_t end = blocks * (run + 1) / runs;
        for (int64_t piece = blocks * run / runs; piece < end; piece += piece_blocks)
            for (int64_t t = first_tile; t < end_tile; t++) {
                const RowTile tile = cut(l.num_rows, tiles, t);
                for (int64_t block = piece; block < std::min(end, piece + piece_blocks); block++)
                    k.multiply_tile(l, tile, prepared + tile.first * row_bytes, block);
            }
    });
}

}  // namespace trtforge
