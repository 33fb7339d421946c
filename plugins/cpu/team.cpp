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

bool is_left(uint64_t items) { return uint32_t(items) < items >> 32; }

}  // namespace

Team::Team(int threads) : shares_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
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
    const int64_t threads = shares_.size();
    for (int64_t t = 0; t < threads; t++)  // sequentially consistent, as asleep_ is: one of the two sees the other
        shares_[t].items.store(uint64_t(count * (t + 1) / threads) << 32 | uint64_t(count * t / threads));
    if (asleep_.load() > 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    do_items(0);
    for (int round = 1; done_.load(std::memory_order_acquire) < count; round++) {
        relax();
        if (round % kRounds == 0) std::this_thread::yield();
    }
}

// The thread's own items, then those that others have left.
void Team::do_items(size_t thread) {
    int64_t done = 0;
    for (size_t i = 0; i < shares_.size(); i++) {
        std::atomic<uint64_t>& items = shares_[(thread + i) % shares_.size()].items;
        while (is_left(items.load(std::memory_order_acquire))) {
            const uint64_t claimed = items.fetch_add(1, std::memory_order_acq_rel);
            if (!is_left(claimed)) break;
            (*item_)(int64_t(uint32_t(claimed)));
            done++;
        }
    }
    if (done) done_.fetch_add(done, std::memory_order_acq_rel);
}

void Team::work(size_t thread) {
    const std::atomic<uint64_t>& items = shares_[thread].items;
    auto busy = std::chrono::steady_clock::now();
    for (int round = 1; !closing_.load(std::memory_order_relaxed); round++) {
        if (is_left(items.load(std::memory_order_acquire))) {
            do_items(thread);
            busy = std::chrono::steady_clock::now();
            round = 0;
            continue;
        }
        relax();
        if (round % kRounds || std::chrono::steady_clock::now() - busy < kSpin) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return is_left(items.load()) || closing_; });
        asleep_--;
        lock.unlock();
        busy = std::chrono::steady_clock::now();
    }
}

}  // namespace trtforge
