// KVCacheUpdate and PagedAttention of a step: the checks of indices, and the cut into items.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace trtforge {
namespace {

// Floats at a multiple of 64 bytes, kept for the next call; not initialized.
class Floats {
public:
    float* at_least(size_t count) {
        if (count > size_) {
            memory_.reset(new float[count + 16]);
            size_ = count;
        }
        return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
    }

private:
    std::unique_ptr<float[]> memory_;
    size_t size_ = 0;
};

float* thread_scratch(size_t floats) {
    thread_local Floats memory;
    return memory.at_least(floats);
}

// First position that a row sees.
int64_t first_seen(const Attention& a, int64_t row) {
    return a.window > 0 ? std::max<int64_t>(0, a.positions[row] - a.window + 1) : 0;
}

}  // namespace

const char* find_fault(const CacheUpdate& u) {
    if (u.layer < 0 || u.layer >= u.pool.layers) return "layer lies outside the pool";
    if (u.rotary % 2 || u.rotary > u.pool.head_size) return "cos_sin must have an even width, at most head_size";
    const int64_t slots = u.pool.num_blocks * u.pool.tokens_per_block;
    for (int64_t t = 0; t < u.num_tokens; t++)
        if (u.slots[t] < 0 || u.slots[t] >= slots) return "slot_mapping has a slot outside the pool";
    return nullptr;
}

const char* find_fault(const Attention& a) {
    if (a.layer < 0 || a.layer >= a.pool.layers) return "layer lies outside the pool";
    if (a.query_start[0] != 0 || a.query_start[a.num_sequences] != a.num_tokens)
        return "query_start must begin with 0 and end with the number of tokens";
    for (int64_t b = 0; b < a.num_sequences; b++) {
        if (a.query_start[b] > a.query_start[b + 1]) return "query_start must not decrease";
        if (a.kv_lengths[b] < 0 || a.kv_lengths[b] > a.max_blocks * a.pool.tokens_per_block)
            return "kv_lengths has a length that the block table cannot hold";
        int64_t begin = a.kv_lengths[b], end = 0;
        for (int64_t row = a.query_start[b]; row < a.query_start[b + 1]; row++) {
            const int64_t p = a.positions[row];
            if (p < 0 || p >= a.kv_lengths[b]) return "positions has one outside its sequence's kv_length";
            begin = std::min(begin, first_seen(a, row));
            end = std::max(end, p + 1);
        }
        const int32_t* const table = a.block_tables + b * a.max_blocks;
        for (int64_t i = begin / a.pool.tokens_per_block; i * a.pool.tokens_per_block < end; i++)
            if (table[i] < 0 || table[i] >= a.pool.num_blocks) return "block_tables has a block outside the pool";
    }
    return nullptr;
}

void kv_cache_update(const CacheUpdate& u, const Parallel& parallel) {
    const Kernels& k = kernels();
    const size_t scratch = k.update_scratch(u);
    const int64_t per_token = (u.num_heads + 2 * u.pool.kv_heads) * u.pool.head_size;
    constexpr int64_t kTokens = 8;  // per item
    const int64_t items = (u.num_tokens + kTokens - 1) / kTokens;
    run_items(items, u.num_tokens * per_token, parallel, [&](int64_t item) {
        const int64_t end = std::min(u.num_tokens, (item + 1) * kTokens);
        for (int64_t t = item * kTokens; t < end; t++) k.update_token(u, t, thread_scratch(scratch));
    });
}

namespace {

// Some rows of a sequence, over all keys that they see.
struct StepTile {
    int64_t sequence, first_row, num_rows, begin, end, num_parts;
    int64_t work;         // multiply-adds of all heads
    int64_t first_float;  // of the partial results [num_parts, kv_heads, num_rows, group, partial_floats], if split
    int64_t first_count;  // of the parts that are still to be done [kv_heads], if split
    bool is_split;
    // The first parts, whose keys lie in the same blocks as those of an earlier tile, the leader, are done with its
    // own. A leader's other tiles are a list through next_shared, -1 at its end.
    int64_t shared_parts;
    int32_t next_shared;
};

struct Item {
    int32_t tile, kv_head, part;  // part -1: all of them, one after the other
};

// A step's cut. Kept from call to call, since a step makes one per layer.
struct Plan {
    std::vector<StepTile> tiles;
    std::vector<Item> items;
    std::vector<int32_t> leaders;  // hash table of tiles by their first block, -1 where empty
    std::unique_ptr<std::atomic<int32_t>[]> open_parts;
    size_t num_open_parts = 0;
    Floats partials;
    int64_t work = 0;  // multiply-adds
};

class Step {
public:
    Step(const Attention& a, Plan* plan)
        : a_(a),
          plan_(*plan),
          k_(kernels()),
          d_(a.pool.head_size),
          kv_heads_(a.pool.kv_heads),
          group_(a.num_heads / a.pool.kv_heads),
          stride_(partial_floats(a.pool.head_size)) {
        cut_rows();
        find_shared();
        cut_items();
    }

    void run(const Parallel& parallel) {
        run_items(plan_.items.size(), plan_.work, parallel, [this](int64_t i) {
            const Item& item = plan_.items[i];
            item.part < 0 ? run_whole(item) : run_part(item);
        });
    }

private:
    // As many rows of a tile as stay in the second-level cache with their sums.
    int64_t most_rows() const { return std::min(std::max<int64_t>(1, 12288 / (group_ * padded(d_))), kTileRows); }

    void cut_rows() {
        // tiles enough for all threads
        const int64_t fair = (a_.num_tokens * kv_heads_ + 23) / 24;
        const int64_t tile_rows = std::min(most_rows(), std::max<int64_t>(fair, 8));
        plan_.tiles.clear();
        plan_.work = 0;
        for (int64_t b = 0; b < a_.num_sequences; b++) {
            for (int64_t row = a_.query_start[b]; row < a_.query_start[b + 1]; row += tile_rows) {
                const int64_t rows = std::min<int64_t>(tile_rows, a_.query_start[b + 1] - row);
                int64_t begin = first_seen(a_, row), end = 0;
                for (int64_t r = row; r < row + rows; r++) {
                    begin = std::min(begin, first_seen(a_, r));
                    end = std::max<int64_t>(end, a_.positions[r] + 1);
                }
                begin = begin / kPartition * kPartition;
                const int64_t work = 2 * rows * a_.num_heads * d_ * (end - begin);
                plan_.work += work;
                plan_.tiles.push_back(
                    {b, row, rows, begin, end, (end - begin + kPartition - 1) / kPartition, work, 0, 0, false, 0, -1});
            }
        }
    }

    // How many whole parts from the beginning on have their keys in the same blocks.
    int64_t common_parts(const StepTile& x, const StepTile& y) const {
        const int64_t block = a_.pool.tokens_per_block, most = std::min(x.end, y.end) / kPartition * kPartition;
        const int32_t *const p = a_.block_tables + x.sequence * a_.max_blocks, *const q = a_.block_tables + y.sequence * a_.max_blocks;
        const int64_t blocks = (most + block - 1) / block;
        return std::min(most, (std::mismatch(p, p + blocks, q).first - p) * block) / kPartition;
    }

    // Single rows that begin with the blocks of an earlier one, as requests with the same prompt do.
    void find_shared() {
        size_t slots = 4;
        while (slots < 2 * plan_.tiles.size()) slots *= 2;
        plan_.leaders.assign(slots, -1);
        for (size_t i = 0; i < plan_.tiles.size(); i++) {
            StepTile& tile = plan_.tiles[i];
            if (tile.num_rows > 1 || tile.begin > 0 || tile.end < kPartition) continue;
            const int32_t first = a_.block_tables[tile.sequence * a_.max_blocks];
            const auto first_of = [&](int32_t t) { return a_.block_tables[plan_.tiles[t].sequence * a_.max_blocks]; };
            size_t slot = uint32_t(first) * 2654435761u & (slots - 1);
            while (plan_.leaders[slot] >= 0 && first_of(plan_.leaders[slot]) != first) slot = (slot + 1) & (slots - 1);
            if (plan_.leaders[slot] < 0) {
                plan_.leaders[slot] = int32_t(i);
                continue;
            }
            StepTile& leader = plan_.tiles[plan_.leaders[slot]];
            tile.shared_parts = common_parts(leader, tile);
            if (tile.shared_parts == 0) continue;
            tile.next_shared = leader.next_shared;
            leader.next_shared = int32_t(i);
            leader.is_split = tile.is_split = true;
        }
    }

    void cut_items() {
        int64_t floats = 0;
        size_t counts = 0;
        plan_.items.clear();
        for (size_t i = plan_.tiles.size(); i-- > 0;) {  // a prompt's last rows, which see most, first
            StepTile& tile = plan_.tiles[i];
            // a large piece of the step, and its partial results are small beside the keys
            tile.is_split |= tile.num_parts > 1 && tile.num_rows <= 8 && tile.work * 64 > plan_.work * kv_heads_;
            if (!tile.is_split) {
                for (int64_t head = 0; head < kv_heads_; head++) plan_.items.push_back({int32_t(i), int32_t(head), -1});
                continue;
            }
            tile.first_float = floats;
            tile.first_count = counts;
            floats += tile.num_parts * kv_heads_ * tile.num_rows * group_ * stride_;
            counts += kv_heads_;
            for (int64_t part = tile.shared_parts; part < tile.num_parts; part++)
                for (int64_t head = 0; head < kv_heads_; head++)
                    plan_.items.push_back({int32_t(i), int32_t(head), int32_t(part)});
        }
        partials_ = plan_.partials.at_least(floats);
        if (plan_.num_open_parts < counts) {
            plan_.open_parts.reset(new std::atomic<int32_t>[counts]);
            plan_.num_open_parts = counts;
        }
        for (const StepTile& tile : plan_.tiles) {
            for (int64_t head = 0; tile.is_split && head < kv_heads_; head++)
                plan_.open_parts[tile.first_count + head].store(tile.num_parts, std::memory_order_relaxed);
        }
    }

    float* out(const StepTile& tile, int64_t kv_head, int64_t query) const {
        return a_.out + ((tile.first_row + query / group_) * a_.num_heads + kv_head * group_ + query % group_) * d_;
    }

    void attend(const StepTile& tile, const Item& item, int64_t part, const AttentionRow* rows, int64_t num_rows,
                float* scratch) const {
        const int64_t begin = tile.begin + part * kPartition, end = std::min(begin + kPartition, tile.end);
        k_.attend(a_, {rows, num_rows, tile.sequence, item.kv_head, begin, end}, scratch);
    }

    void run_whole(const Item& item) const {
        const StepTile& tile = plan_.tiles[item.tile];
        const int64_t queries = tile.num_rows * group_, floats = queries * stride_;
        float* const partials = thread_scratch(2 * floats + k_.attend_scratch(a_, tile.num_rows));
        float *const next = partials + floats, *const scratch = next + floats;
        AttentionRow rows[kTileRows];
        for (int64_t part = 0; part < tile.num_parts; part++) {
            for (int64_t r = 0; part < 2 && r < tile.num_rows; r++)
                rows[r] = {tile.first_row + r, partials + part * floats + r * group_ * stride_};
            attend(tile, item, part, rows, tile.num_rows, scratch);
            for (int64_t n = 0; part && n < queries; n++) k_.fold(next + n * stride_, d_, partials + n * stride_);
        }
        for (int64_t n = 0; n < queries; n++) k_.finish(partials + n * stride_, 1, 0, d_, out(tile, item.kv_head, n));
    }

    // Floats of a split tile's partial results of one part and head.
    int64_t part_floats(const StepTile& tile) const { return tile.num_rows * group_ * stride_; }

    float* partials_of(const StepTile& tile, int64_t kv_head, int64_t part) const {
        return partials_ + tile.first_float + (part * kv_heads_ + kv_head) * part_floats(tile);
    }

    void run_part(const Item& item) const {
        const StepTile& tile = plan_.tiles[item.tile];
        AttentionRow rows[kTileRows];
        int64_t num_rows = 0;
        for (; num_rows < tile.num_rows; num_rows++)
            rows[num_rows] = {tile.first_row + num_rows,
                              partials_of(tile, item.kv_head, item.part) + num_rows * group_ * stride_};
        const auto flush = [&] {
            attend(tile, item, item.part, rows, num_rows, thread_scratch(k_.attend_scratch(a_, num_rows)));
            num_rows = 0;
        };
        for_sharing(item, [&](const StepTile& t) {
            if (num_rows == most_rows()) flush();
            rows[num_rows++] = {t.first_row, partials_of(t, item.kv_head, item.part)};
        });
        flush();
        end_part(tile, item.kv_head);
        for_sharing(item, [&](const StepTile& t) { end_part(t, item.kv_head); });
    }

    // The tiles whose part is done with the item's.
    template <class F>
    void for_sharing(const Item& item, const F& f) const {
        if (plan_.tiles[item.tile].shared_parts > 0) return;  // not a leader
        for (int32_t i = plan_.tiles[item.tile].next_shared; i >= 0; i = plan_.tiles[i].next_shared)
            if (plan_.tiles[i].shared_parts > item.part) f(plan_.tiles[i]);
    }

    // Whoever ends the last part of a tile's head folds them all.
    void end_part(const StepTile& tile, int64_t kv_head) const {
        if (plan_.open_parts[tile.first_count + kv_head].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        for (int64_t n = 0; n < tile.num_rows * group_; n++)
            k_.finish(partials_of(tile, kv_head, 0) + n * stride_, tile.num_parts, kv_heads_ * part_floats(tile), d_,
                      out(tile, kv_head, n));
    }

    const Attention& a_;
    Plan& plan_;
    const Kernels& k_;
    const int64_t d_, kv_heads_, group_, stride_;
    float* partials_ = nullptr;
};

}  // namespace

void paged_attention(const Attention& a, const Parallel& parallel) {
    thread_local Plan kept;
    Plan plan = std::move(kept);  // taken, since a waiting thread may be given another step
    Step(a, &plan).run(parallel);
    kept = std::move(plan);
}

}  // namespace trtforge
