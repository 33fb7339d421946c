// What the kernels of all instruction sets share: which set to use, the checks of indices, and the cut into items.
#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace trtforge {

#define TRTFORGE_DECLARE(isa)                                                                           \
    namespace isa {                                                                                     \
    void update_token(const CacheUpdate&, int64_t, float*);                                             \
    size_t update_scratch(const CacheUpdate&);                                                          \
    void attend(const Attention&, const AttentionTile&, float*, float*);                                \
    size_t attend_scratch(const Attention&, int64_t);                                                   \
    void fold(const float*, int64_t, float*);                                                           \
    void finish(const float*, int64_t, float*);                                                         \
    int64_t linear_tile_rows(const PackedLinear&);                                                      \
    int64_t linear_row_bytes(const PackedLinear&);                                                      \
    void prepare_tile(const PackedLinear&, RowTile, uint8_t*);                                              \
    void prepare_group(const PackedLinear&, const float*, int64_t, uint8_t*);                               \
    void multiply_tile(const PackedLinear&, int64_t, const uint8_t*, Blocks, float*, const float*, int64_t);    \
    void normalize(const float*, const float*, float, int64_t, float*);                                     \
    void activate(bool, const float*, int64_t, float*);                                                     \
    int64_t peak(bool, int64_t);                                                                            \
    const Kernels table = {#isa,          update_token,     update_scratch,   attend,       attend_scratch, \
                           fold,          finish,           linear_tile_rows, linear_row_bytes, prepare_tile, \
                           prepare_group, multiply_tile,    normalize,        activate,     peak};             \
    }

TRTFORGE_DECLARE(generic)
#if defined(__x86_64__)
TRTFORGE_DECLARE(avx2)
TRTFORGE_DECLARE(avx512)
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    unsigned eax, ebx, ecx, edx;  // clang 14 does not know "f16c" as a feature to ask for
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

const Kernels* find_isa(const char* name) {
#if defined(__x86_64__)
    const bool has_avx512 = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni");
    if (has_avx512 && (!*name || !std::strcmp(name, "avx512"))) return &avx512::table;
    if (has_avx2() && (!*name || !std::strcmp(name, "avx2"))) return &avx2::table;
#endif
    return !*name || !std::strcmp(name, "generic") ? &generic::table : nullptr;
}

std::atomic<const Kernels*> current{nullptr};

// Scratch memory of this thread, at least `floats` large; not initialized.
float* thread_scratch(size_t floats) {
    thread_local std::vector<float> memory;
    if (memory.size() < floats) memory.resize(floats);
    return memory.data();
}

// Fewer multiply-adds than this take less time than waking a thread does.
constexpr int64_t kSerialWork = 1 << 16;

// First position that a row sees.
int64_t first_seen(const Attention& a, int64_t row) {
    return a.window > 0 ? std::max<int64_t>(0, a.positions[row] - a.window + 1) : 0;
}

}  // namespace

void run_items(int64_t count, int64_t work, const Parallel& parallel, const std::function<void(int64_t)>& item) {
    if (work >= kSerialWork && count > 1) return parallel(count, item);
    for (int64_t i = 0; i < count; i++) item(i);
}

const Kernels& kernels() {
    const Kernels* k = current.load(std::memory_order_acquire);
    if (!k) current.store(k = find_isa(""), std::memory_order_release);
    return *k;
}

bool force_isa(const char* name) {
    const Kernels* k = find_isa(name);
    if (k) current.store(k, std::memory_order_release);
    return k != nullptr;
}

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

// One tile over all keys that its rows see, and where its partial results lie.
struct Job {
    AttentionTile tile;
    int64_t first_part, num_parts;
};

// The step's tiles, every KV head of a tile by itself; `work` is their multiply-adds.
std::vector<Job> cut(const Attention& a, int64_t* work) {
    const int64_t group = a.num_heads / a.pool.kv_heads;
    // Rows of one tile share the decoded keys: as many as stay in the first-level cache with their sums.
    const int64_t tile_rows = std::max<int64_t>(1, 2048 / (group * padded(a.pool.head_size)));
    std::vector<Job> jobs;
    int64_t parts_so_far = 0;
    for (int64_t b = 0; b < a.num_sequences; b++) {
        for (int64_t row = a.query_start[b]; row < a.query_start[b + 1]; row += tile_rows) {
            const int64_t rows = std::min<int64_t>(tile_rows, a.query_start[b + 1] - row);
            int64_t begin = first_seen(a, row), end = 0;
            for (int64_t r = row; r < row + rows; r++) {
                begin = std::min(begin, first_seen(a, r));
                end = std::max<int64_t>(end, a.positions[r] + 1);
            }
            begin = begin / kPartition * kPartition;
            const int64_t parts = (end - begin + kPartition - 1) / kPartition;
            *work += 2 * rows * a.num_heads * a.pool.head_size * (end - begin);
            for (int64_t head = 0; head < a.pool.kv_heads; head++) {
                jobs.push_back({{row, rows, b, head, begin, end}, parts_so_far, parts});
                parts_so_far += parts;
            }
        }
    }
    return jobs;
}

AttentionTile part_of(const Job& job, int64_t part) {
    AttentionTile t = job.tile;
    t.begin += part * kPartition;
    t.end = std::min(t.end, t.begin + kPartition);
    return t;
}

}  // namespace

void paged_attention(const Attention& a, const Parallel& parallel) {
    const Kernels& k = kernels();
    const int64_t d = a.pool.head_size, group = a.num_heads / a.pool.kv_heads, stride = partial_floats(d);
    int64_t work = 0, most_rows = 0;
    const std::vector<Job> jobs = cut(a, &work);
    for (const Job& job : jobs) most_rows = std::max(most_rows, job.tile.num_rows);
    const size_t part_floats = most_rows * group * stride, scratch_floats = k.attend_scratch(a, most_rows);

    const auto fold = [&](const Job& job, const float* next, float* partial) {
        for (int64_t n = 0; n < job.tile.num_rows * group; n++) k.fold(next + n * stride, d, partial + n * stride);
    };
    const auto finish = [&](const Job& job, const float* partial) {
        const AttentionTile& t = job.tile;
        for (int64_t n = 0; n < t.num_rows * group; n++) {
            const int64_t head = (t.first_row + n / group) * a.num_heads + t.kv_head * group + n % group;
            k.finish(partial + n * stride, d, a.out + head * d);
        }
    };

    constexpr size_t kEnoughJobs = 64;  // for any number of threads that a step may get
    if (jobs.size() >= kEnoughJobs) {
        return run_items(jobs.size(), work, parallel, [&](int64_t i) {
            float* const scratch = thread_scratch(scratch_floats + 2 * part_floats);
            float *const partial = scratch + scratch_floats, *const next = partial + part_floats;
            k.attend(a, part_of(jobs[i], 0), scratch, partial);
            for (int64_t part = 1; part < jobs[i].num_parts; part++) {
                k.attend(a, part_of(jobs[i], part), scratch, next);
                fold(jobs[i], next, partial);
            }
            finish(jobs[i], partial);
        });
    }
    // Few rows, perhaps over long sequences: the parts are items of their own.
    std::vector<std::pair<const Job*, int64_t>> items;
    for (const Job& job : jobs)
        for (int64_t part = 0; part < job.num_parts; part++) items.emplace_back(&job, part);
    const std::unique_ptr<float[]> partials(new float[items.size() * part_floats]);
    run_items(items.size(), work, parallel, [&](int64_t i) {
        k.attend(a, part_of(*items[i].first, items[i].second), thread_scratch(scratch_floats),
                 partials.get() + i * part_floats);
    });
    for (const Job& job : jobs) {
        float* const partial = partials.get() + job.first_part * part_floats;
        for (int64_t part = 1; part < job.num_parts; part++) fold(job, partial + part * part_floats, partial);
        finish(job, partial);
    }
}

}  // namespace trtforge
