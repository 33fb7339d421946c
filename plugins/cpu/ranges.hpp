// How items are spread over threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace trtforge {

// The numbers 0 .. count - 1, each given out once. Every worker has a range of its own: it reads weights from front to
// back, and no two write one cache line for every number. Who is done takes from the others', number by number: were it
// more, a worker that is late, from before the last fill(), could write over its own new range.
class Ranges {
public:
    explicit Ranges(int64_t workers) : ranges_(workers) {}

    // Once all numbers of the last time are given out. count: below 2^32.
    void fill(int64_t count) {
        const int64_t workers = ranges_.size();
        for (int64_t w = 0; w < workers; w++)
            ranges_[w].packed.store(pack(count * w / workers, count * (w + 1) / workers));
    }

    // The next number for a worker, or -1 when all are given out.
    int64_t next(int64_t worker) {
        const int64_t workers = ranges_.size();
        for (int64_t i = 0; i < workers; i++)
            if (const int64_t number = take(ranges_[(worker + i) % workers].packed); number >= 0) return number;
        return -1;
    }

    // Whether a worker's own range has any left.
    bool has_own(int64_t worker) const {
        const uint64_t packed = ranges_[worker].packed.load();
        return begin(packed) < end(packed);
    }

private:
    // Begin and end in one word: whoever takes a number knows that the range was still that.
    struct alignas(64) Range {
        std::atomic<uint64_t> packed{0};
    };
    static uint64_t pack(int64_t begin, int64_t end) { return uint64_t(end) << 32 | uint64_t(begin); }
    static int64_t begin(uint64_t packed) { return packed & 0xffffffff; }
    static int64_t end(uint64_t packed) { return packed >> 32; }

    static int64_t take(std::atomic<uint64_t>& range) {
        uint64_t packed = range.load(std::memory_order_acquire);
        while (begin(packed) < end(packed))
            if (range.compare_exchange_weak(packed, packed + 1, std::memory_order_acq_rel)) return begin(packed);
        return -1;
    }

    std::vector<Range> ranges_;
};

}  // namespace trtforge
