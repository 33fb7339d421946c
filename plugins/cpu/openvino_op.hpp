// What our OpenVINO operations share: a way to run items in parallel, and checks of inputs.
#pragma once

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <openvino/core/extension.hpp>
#include <openvino/op/op.hpp>

#include "kernels.hpp"
#include "ranges.hpp"

namespace trtforge {

// Runs in the arena of the caller, OpenVINO's own, and so with its number of threads; see Ranges.
inline void run_parallel(int64_t count, const std::function<void(int64_t)>& item) {
    const int64_t workers = std::min<int64_t>(count, tbb::this_task_arena::max_concurrency());
    Ranges ranges(workers);
    ranges.fill(count);
    tbb::parallel_for(
        int64_t{0}, workers,
        [&](int64_t worker) {
            for (int64_t i = ranges.next(worker); i >= 0; i = ranges.next(worker)) item(i);
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

inline KVDtype parse_kv_dtype(const ov::Node* node, const std::string& name) {
    const std::pair<const char*, KVDtype> known[] = {{"fp32", KVDtype::fp32},
                                                     {"fp16", KVDtype::fp16},
                                                     {"bf16", KVDtype::bf16},
                                                     {"int8", KVDtype::int8},
                                                     {"fp8", KVDtype::fp8}};
    for (const auto& [text, dtype] : known)
        if (name == text) return dtype;
    NODE_VALIDATION_CHECK(node, false, "unknown kv_dtype '", name, "'");
    return KVDtype::fp32;
}

// What the ops over a cache have in common: the pool and the shape of the heads.
class PagedOp : public CheckedOp {
public:
    using CheckedOp::CheckedOp;

    struct Attributes {
        int64_t layer = 0, num_heads = 1, num_kv_heads = 1, head_size = 1;
        std::string kv_dtype = "fp32";
        // PagedAttention's own
        float scale = 1, softcap = 0;
        int64_t window = 0;
    } attributes;

protected:
    void visit_common(ov::AttributeVisitor& visitor) {
        visitor.on_attribute("layer", attributes.layer);
        visitor.on_attribute("num_heads", attributes.num_heads);
        visitor.on_attribute("num_kv_heads", attributes.num_kv_heads);
        visitor.on_attribute("head_size", attributes.head_size);
    }

    KVDtype dtype() const { return parse_kv_dtype(this, attributes.kv_dtype); }
    size_t num_scales() const { return kv_has_scales(dtype()) ? 1 : 0; }

    void check_attributes() const {
        const Attributes& n = attributes;
        NODE_VALIDATION_CHECK(this, n.layer >= 0 && n.head_size > 0 && n.num_kv_heads > 0, "layer=", n.layer,
                              ", head_size=", n.head_size, ", num_kv_heads=", n.num_kv_heads);
        NODE_VALIDATION_CHECK(this, n.num_heads > 0 && n.num_heads % n.num_kv_heads == 0, "num_kv_heads=",
                              n.num_kv_heads, " does not divide num_heads=", n.num_heads);
        NODE_VALIDATION_CHECK(this, n.window >= 0 && n.softcap >= 0, "window=", n.window, ", softcap=", n.softcap);
    }

    // The widths of q, and of k and v.
    int64_t query_width() const { return attributes.num_heads * attributes.head_size; }
    int64_t key_width() const { return attributes.num_kv_heads * attributes.head_size; }

    void check_pool(size_t i) const {
        const Attributes& n = attributes;
        const auto any = ov::Dimension::dynamic();
        check_input(i, "kv_pool", {ov::element::u8},
                    {any, any, 2, n.num_kv_heads, any, n.head_size * kv_bytes(dtype())});
        if (num_scales()) check_input(i + 1, "kv_scales", {ov::element::f32}, {any, any, 2, n.num_kv_heads, any, 1});
    }

    // The tensors' memory is written through: it is the caller's own (bound with shared_memory=True).
    Pool pool(const ov::TensorVector& in, size_t i) const {
        const ov::Shape shape = in[i].get_shape();
        Pool p;
        p.rows = static_cast<uint8_t*>(const_cast<void*>(static_cast<const void*>(in[i].data())));
        p.dtype = dtype();
        p.num_blocks = shape[0];
        p.layers = shape[1];
        p.kv_heads = shape[3];
        p.tokens_per_block = shape[4];
        p.head_size = attributes.head_size;
        if (num_scales()) {
            p.scales = const_cast<float*>(in[i + 1].data<const float>());
            OPENVINO_ASSERT(in[i + 1].get_size() * attributes.head_size == in[i].get_size(), get_type_info().name,
                            ": kv_scales does not fit kv_pool");
        }
        return p;
    }

    CacheUpdate cache_update(const ov::Tensor& cos_sin, const Pool& pool, const int64_t* slots) const {
        CacheUpdate u{};
        u.pool = pool;
        u.layer = attributes.layer;
        u.num_tokens = cos_sin.get_shape()[0];
        u.num_heads = attributes.num_heads;
        u.rotary = cos_sin.get_shape()[1];
        u.cos_sin = cos_sin.data<const float>();
        u.slots = slots;
        return u;
    }

    // in[i] to in[i + 3]: positions, query_start, kv_lengths, block_tables. q and out are left open.
    Attention attention(const ov::TensorVector& in, size_t i, const Pool& pool) const {
        Attention a{};
        a.pool = pool;
        a.layer = attributes.layer;
        a.num_tokens = in[i].get_size();
        a.num_heads = attributes.num_heads;
        a.num_sequences = in[i + 2].get_size();
        a.max_blocks = in[i + 3].get_shape()[1];
        a.scale = attributes.scale;
        a.softcap = attributes.softcap;
        a.window = attributes.window;
        OPENVINO_ASSERT(in[i + 1].get_size() == size_t(a.num_sequences) + 1 &&
                            in[i + 3].get_shape()[0] == size_t(a.num_sequences),
                        get_type_info().name, ": inputs differ in sequences");
        a.positions = in[i].data<const int32_t>();
        a.query_start = in[i + 1].data<const int32_t>();
        a.kv_lengths = in[i + 2].data<const int32_t>();
        a.block_tables = in[i + 3].data<const int32_t>();
        return a;
    }
};

// Slots as the kernels want them; `widened` has them if OpenVINO gives narrow ones.
inline const int64_t* slots_of(const ov::Tensor& tensor, std::vector<int64_t>* widened) {
    if (tensor.get_element_type() == ov::element::i64) return tensor.data<const int64_t>();
    const int32_t* const slots = tensor.data<const int32_t>();
    widened->assign(slots, slots + tensor.get_size());
    return widened->data();
}

// The ops of openvino_packed.cpp.
std::vector<ov::Extension::Ptr> packed_ops();

}  // namespace trtforge
