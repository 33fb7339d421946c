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

namespace trtforge {

class Team {
public:
    // The caller of run() is one of the threads.
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // item(0) .. item(count - 1); returns when all are done. One caller at a time. Each thread has a run of successive
    // items, for memory is read best from front to back; one that is done takes from the others', item by item, so that
    // a thread that wakes late or shares its core delays nobody.
    void run(int64_t count, const std::function<void(int64_t)>& item);

    int threads() const { return int(workers_.size()) + 1; }

private:
    // A thread's share of the region: the end of its items in the high half, the next one in the low half. One word, so
    // that whoever claims an item knows that `item_` belongs to it: run() waits for all items before it changes either.
    struct alignas(64) Share {
        std::atomic<uint64_t> items{0};
    };

    void work(size_t thread);
    void do_items(size_t thread);

    std::vector<Share> shares_;
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
