// The ops over a cache as OpenVINO operations, and the extension's entries: checks of types and shapes, and evaluate() over the kernels.
//
// The pool is an input of u8 elements that the ops write in place; it is never an output, which OpenVINO would copy.
// q_rotated is what orders the write before the read. Attribute names are those of plugins/*.py (a test compares).
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>

#include "openvino_op.hpp"

namespace trtforge {

class KVCacheUpdate : public PagedOp {
public:
    OPENVINO_OP("KVCacheUpdate", "trtforge", PagedOp);
    KVCacheUpdate() = default;
    explicit KVCacheUpdate(const ov::OutputVector& inputs) : PagedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visit_common(visitor);
        visitor.on_attribute("kv_dtype", attributes.kv_dtype);
        return true;
    }

    void validate_and_infer_types() override {
        check_attributes();
        NODE_VALIDATION_CHECK(this, get_input_size() == 6 + num_scales(), "has ", get_input_size(), " inputs, want ",
                              6 + num_scales(), " for kv_dtype ", attributes.kv_dtype);
        const auto any = ov::Dimension::dynamic();
        check_input(0, "q", {ov::element::f32}, {any, query_width()});
        check_input(1, "k", {ov::element::f32}, {any, key_width()});
        check_input(2, "v", {ov::element::f32}, {any, key_width()});
        check_input(3, "cos_sin", {ov::element::f32}, {any, any});
        // the CPU plugin turns every i64 of a graph into i32: a pool has fewer than 2^31 slots here
        check_input(4, "slot_mapping", {ov::element::i64, ov::element::i32}, {any});
        check_pool(5);
        set_output_type(0, ov::element::f32, {get_input_partial_shape(0)[0], query_width()});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<KVCacheUpdate>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        std::vector<int64_t> widened;
        CacheUpdate u = cache_update(in[3], pool(in, 5), slots_of(in[4], &widened));
        for (size_t i : {0, 1, 2, 4})
            OPENVINO_ASSERT(in[i].get_shape()[0] == size_t(u.num_tokens), "KVCacheUpdate: inputs differ in tokens");
        u.q = in[0].data<const float>();
        u.k = in[1].data<const float>();
        u.v = in[2].data<const float>();
        out[0].set_shape(in[0].get_shape());
        u.q_rotated = out[0].data<float>();
        if (const char* fault = find_fault(u)) OPENVINO_THROW("KVCacheUpdate: ", fault);
        kv_cache_update(u, run_parallel);
        return true;
    }
};

class PagedAttention : public PagedOp {
public:
    OPENVINO_OP("PagedAttention", "trtforge", PagedOp);
    PagedAttention() = default;
    explicit PagedAttention(const ov::OutputVector& inputs) : PagedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visit_common(visitor);
        visitor.on_attribute("scale", attributes.scale);
        visitor.on_attribute("window", attributes.window);
        visitor.on_attribute("softcap", attributes.softcap);
        visitor.on_attribute("kv_dtype", attributes.kv_dtype);
        return true;
    }

    void validate_and_infer_types() override {
        check_attributes();
        const size_t s = num_scales();
        NODE_VALIDATION_CHECK(this, get_input_size() == 6 + s, "has ", get_input_size(), " inputs, want ", 6 + s,
                              " for kv_dtype ", attributes.kv_dtype);
        const auto any = ov::Dimension::dynamic();
        check_input(0, "q", {ov::element::f32}, {any, query_width()});
        check_pool(1);
        check_input(2 + s, "positions", {ov::element::i32}, {any});
        check_input(3 + s, "query_start", {ov::element::i32}, {any});
        check_input(4 + s, "kv_lengths", {ov::element::i32}, {any});
        check_input(5 + s, "block_tables", {ov::element::i32}, {any, any});
        set_output_type(0, ov::element::f32, {get_input_partial_shape(0)[0], query_width()});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PagedAttention>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        Attention a = attention(in, 2 + num_scales(), pool(in, 1));
        OPENVINO_ASSERT(in[0].get_shape()[0] == size_t(a.num_tokens), "PagedAttention: inputs differ in tokens");
        a.q = in[0].data<const float>();
        out[0].set_shape(in[0].get_shape());
        a.out = out[0].data<float>();
        if (const char* fault = find_fault(a)) OPENVINO_THROW("PagedAttention: ", fault);
        paged_attention(a, run_parallel);
        return true;
    }
};

}  // namespace trtforge

static std::vector<ov::Extension::Ptr> all_ops() {
    std::vector<ov::Extension::Ptr> ops = trtforge::packed_ops();
    ops.push_back(std::make_shared<ov::OpExtension<trtforge::KVCacheUpdate>>());
    ops.push_back(std::make_shared<ov::OpExtension<trtforge::PagedAttention>>());
    return ops;
}

OPENVINO_CREATE_EXTENSIONS(all_ops());

// For tests: which instruction set runs ("" for the best one); 0 if this CPU lacks it.
extern "C" __attribute__((visibility("default"))) int trtforge_cpu_force_isa(const char* name) {
    return trtforge::force_isa(name);
}

extern "C" __attribute__((visibility("default"))) const char* trtforge_cpu_isa() { return trtforge::kernels().isa; }

// For benchmarks: one linear in an arena of its own. sizes: rows, in_features, out_features, group_size, bits,
// zero_point, scale_bytes, has_minimums, int8_activations.
extern "C" __attribute__((visibility("default"))) void trtforge_cpu_packed_linear(
    const int64_t sizes[9], const float* x, const uint8_t* weights, float* out, int threads) {
    static tbb::task_arena arena(threads);
    const trtforge::PackedLinear l{sizes[0],      sizes[1],      sizes[2],      sizes[3], int(sizes[4]), int(sizes[5]),
                                   int(sizes[6]), sizes[7] != 0, sizes[8] != 0, x,        weights,       nullptr,
                                   nullptr,       out};
    arena.execute([&] { trtforge::packed_linear(l, trtforge::run_parallel); });
}

// For benchmarks: the attention of all layers, in an arena of its own. sizes: the KV type's number, num_blocks, layers,
// kv_heads, tokens_per_block, head_size, tokens, heads, sequences, max_blocks.
extern "C" __attribute__((visibility("default"))) void trtforge_cpu_paged_attention(
    const int64_t sizes[10], uint8_t* rows, float* scales, const float* q, const int32_t* positions,
    const int32_t* query_start, const int32_t* kv_lengths, const int32_t* block_tables, float* out, int threads) {
    static tbb::task_arena arena(threads);
    trtforge::Attention a{};
    a.pool = {rows, scales, trtforge::KVDtype(sizes[0]), sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    a.num_tokens = sizes[6];
    a.num_heads = sizes[7];
    a.num_sequences = sizes[8];
    a.max_blocks = sizes[9];
    a.scale = 0.125f;
    a.q = q;
    a.positions = positions;
    a.query_start = query_start;
    a.kv_lengths = kv_lengths;
    a.block_tables = block_tables;
    a.out = out;
    arena.execute([&] {
        for (a.layer = 0; a.layer < a.pool.layers; a.layer++) trtforge::paged_attention(a, trtforge::run_parallel);
    });
}

// For benchmarks: reads a buffer, in an arena of its own.
extern "C" __attribute__((visibility("default"))) int64_t trtforge_cpu_read(const int64_t* p, int64_t bytes,
                                                                            int threads) {
    static tbb::task_arena arena(threads);
    constexpr int64_t kPiece = 1 << 14;  // of 8 bytes
    std::atomic<int64_t> total{0};
    const auto item = [&](int64_t i) {
        int64_t sums[8] = {};
        for (int64_t j = i * kPiece; j < (i + 1) * kPiece; j += 8)
            for (int64_t lane = 0; lane < 8; lane++) sums[lane] += p[j + lane];
        total += sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
    };
    arena.execute([&] { trtforge::run_parallel(bytes / 8 / kPiece, item); });
    return total;
}
