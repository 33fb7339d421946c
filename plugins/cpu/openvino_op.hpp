// What our OpenVINO operations share: a way to run items in parallel, and checks of inputs.
#pragma once

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <openvino/core/extension.hpp>
#include <openvino/op/op.hpp>

#include "kernels.hpp"

namespace trtforge {

// Items are claimed one by one, so that a thread that wakes late, or shares its core, delays nobody. Runs in the
// arena of the caller, OpenVINO's own, and so with its number of threads.
inline void run_parallel(int64_t count, const std::function<void(int64_t)>& item) {
    const int64_t workers = std::min<int64_t>(count, tbb::this_task_arena::max_concurrency());
    std::atomic<int64_t> next{0};
    tbb::parallel_for(
        int64_t{0}, workers,
        [&](int64_t) {
            for (int64_t i = next++; i < count; i = next++) item(i);
        },
        tbb::simple_partitioner());
}

class CheckedOp : public ov::op::Op {
public:
    using Op::Op;

protected:
    void check_input(size_t i, const char* name, std::initializer_list<ov::element::Type> types,
                     const ov::PartialShape& shape) const {
        const ov::element::Type type = get_input_element_type(i);
        const bool known = std::find(types.begin(), types.end(), type) != types.end();
        NODE_VALIDATION_CHECK(this, known || type.is_dynamic(), name, " has type ", type, ", want ", *types.begin());
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(i).compatible(shape), name, " has shape ",
                              get_input_partial_shape(i), ", want ", shape);
    }
};

// The ops of openvino_packed.cpp and openvino_fused.cpp.
std::vector<ov::Extension::Ptr> packed_ops();
std::vector<ov::Extension::Ptr> fused_ops();

}  // namespace trtforge
