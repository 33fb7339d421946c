// A team of threads that spins between parallel regions. A step has some 150 of them, a few microseconds each: a
// thread that sleeps in between takes longer to wake than the region lasts.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ranges.hpp"

namespace trtforge {

class Team {
public:
    // The caller of run() is one of the threads.
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // item(0) .. item(count - 1), successive ones mostly on one thread, and none waiting for a thread that wakes late or
    // shares its core (Ranges); returns when all are done. One caller at a time.
    void run(int64_t count, const std::function<void(int64_t)>& item);

    int threads() const { return int(workers_.size()) + 1; }

private:
    void work(int64_t thread);
    void do_items(int64_t thread);

    // Whoever is given an item knows that `item_` belongs to it: run() waits for all items before it changes either.
    Ranges ranges_;
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) const std::function<void(int64_t)>* item_ = nullptr;

    // Those who have given up spinning.
    std::atomic<int> asleep_{0};
    std::atomic<bool> closing_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace trtforge
