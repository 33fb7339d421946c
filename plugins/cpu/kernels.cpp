// The kernels of all instruction sets, and which set to use.
#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>

namespace trtforge {

#define TRTFORGE_DECLARE(isa)                                                                           \
    namespace isa {                                                                                     \
    void update_token(const CacheUpdate&, int64_t, float*);                                             \
    size_t update_scratch(const CacheUpdate&);                                                          \
    void attend(const Attention&, const AttentionTile&, float*);                                        \
    size_t attend_scratch(const Attention&, int64_t);                                                   \
    void fold(const float*, int64_t, float*);                                                           \
    void finish(float*, int64_t, int64_t, int64_t, float*);                                             \
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

// Fewer multiply-adds than this take less time than waking a thread does.
constexpr int64_t kSerialWork = 1 << 16;

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

}  // namespace trtforge
