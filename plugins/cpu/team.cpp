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

}  // namespace

Team::Team(int threads) : ranges_(threads) {
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
    ranges_.fill(count);  // sequentially consistent, as asleep_ is: one of the two sees the other
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

void Team::do_items(int64_t thread) {
    int64_t done = 0;
    for (int64_t i = ranges_.next(thread); i >= 0; i = ranges_.next(thread), done++) (*item_)(i);
    if (done) done_.fetch_add(done, std::memory_order_acq_rel);
}

void Team::work(int64_t thread) {
    auto busy = std::chrono::steady_clock::now();
    for (int round = 1; !closing_.load(std::memory_order_relaxed); round++) {
        if (ranges_.has_own(thread)) {
            do_items(thread);
            busy = std::chrono::steady_clock::now();
            round = 0;
            continue;
        }
        relax();
        if (round % kRounds || std::chrono::steady_clock::now() - busy < kSpin) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return ranges_.has_own(thread) || closing_; });
        asleep_--;
        lock.unlock();
        busy = std::chrono::steady_clock::now();
    }
}

}  // namespace trtforge
