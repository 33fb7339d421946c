#include "team.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trtforge {
namespace {

// A worker spins so long before it sleeps: longer than the serial parts of a step, shorter than what lies between two.
constexpr std::chrono::microseconds kSpin{100};
// Looks at the clock, and gives its core to whoever holds an item on it, once in so many rounds.
constexpr int kRounds = 256;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

bool is_open(uint64_t region) { return uint32_t(region) < region >> 32; }

}  // namespace

Team::Team(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Team::run(int64_t count, const std::function<void(int64_t)>& item) {
    if (workers_.empty() || count <= 1) {
        for (int64_t i = 0; i < count; i++) item(i);
        return;
    }
    item_ = &item;
    done_.store(0, std::memory_order_relaxed);
    region_.store(uint64_t(count) << 32);  // sequentially consistent, as asleep_ is: one of the two sees the other
    if (asleep_.load() > 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    while (claim()) {
    }
    for (int round = 1; done_.load(std::memory_order_acquire) < count; round++) {
        relax();
        if (round % kRounds == 0) std::this_thread::yield();
    }
}

// Does one item, if there is one.
bool Team::claim() {
    const uint64_t claimed = region_.fetch_add(1, std::memory_order_acq_rel);
    if (!is_open(claimed)) return false;
    (*item_)(int64_t(uint32_t(claimed)));
    done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
}

void Team::work() {
    auto busy = std::chrono::steady_clock::now();
    for (int round = 1; !closing_.load(std::memory_order_relaxed); round++) {
        if (is_open(region_.load(std::memory_order_acquire))) {
            while (claim()) {
            }
            busy = std::chrono::steady_clock::now();
            round = 0;
            continue;
        }
        relax();
        if (round % kRounds || std::chrono::steady_clock::now() - busy < kSpin) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [this] { return is_open(region_.load()) || closing_; });
        asleep_--;
        lock.unlock();
        busy = std::chrono::steady_clock::now();
    }
}

}  // namespace trtforge
