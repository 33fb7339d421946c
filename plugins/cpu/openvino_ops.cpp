// Our ops as OpenVINO operations: checks of types and shapes, and evaluate() over the kernels.
//
// The pool is an input of u8 elements that the ops write in place; it is never an output, which OpenVINO would copy.
// q_rotated is what orders the write before the read. Attribute names are those of plugins/*.py (a test compares).
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>

#include "openvino_op.hpp"

namespace trtforge {
namespace {

KVDtype parse_kv_dtype(const ov::Node* node, const std::string& name) {
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

// What both ops over a cache have in common: the pool and the shape of the heads.
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
};

}  // namespace

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
        CacheUpdate u;
        u.pool = pool(in, 5);
        u.layer = attributes.layer;
        u.num_tokens = in[0].get_shape()[0];
        u.num_heads = attributes.num_heads;
        u.rotary = in[3].get_shape()[1];
        for (size_t i = 1; i < 5; i++)
            OPENVINO_ASSERT(in[i].get_shape()[0] == size_t(u.num_tokens), "KVCacheUpdate: inputs differ in tokens");
        u.q = in[0].data<const float>();
        u.k = in[1].data<const float>();
        u.v = in[2].data<const float>();
        u.cos_sin = in[3].data<const float>();
        std::vector<int64_t> widened;
        if (in[4].get_element_type() == ov::element::i32) {
            const int32_t* const slots = in[4].data<const int32_t>();
            widened.assign(slots, slots + u.num_tokens);
            u.slots = widened.data();
        } else {
            u.slots = in[4].data<const int64_t>();
        }
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
        const size_t s = num_scales();
        Attention a;
        a.pool = pool(in, 1);
        a.layer = attributes.layer;
        a.num_tokens = in[0].get_shape()[0];
        a.num_heads = attributes.num_heads;
        a.num_sequences = in[4 + s].get_shape()[0];
        a.max_blocks = in[5 + s].get_shape()[1];
        a.scale = attributes.scale;
        a.softcap = attributes.softcap;
        a.window = attributes.window;
        const size_t tokens = a.num_tokens, sequences = a.num_sequences;
        OPENVINO_ASSERT(in[2 + s].get_size() == tokens && in[3 + s].get_size() == sequences + 1 &&
                            in[5 + s].get_shape()[0] == sequences,
                        "PagedAttention: inputs differ in tokens or sequences");
        a.q = in[0].data<const float>();
        a.positions = in[2 + s].data<const int32_t>();
        a.query_start = in[3 + s].data<const int32_t>();
        a.kv_lengths = in[4 + s].data<const int32_t>();
        a.block_tables = in[5 + s].data<const int32_t>();
        out[0].set_shape(in[0].get_shape());
        a.out = out[0].data<float>();
        if (const char* fault = find_fault(a)) OPENVINO_THROW("PagedAttention: ", fault);
        paged_attention(a, run_parallel);
        return true;
    }
};

// What both ops over packed weights have in common.
class PackedOp : public CheckedOp {
public:
    using CheckedOp::CheckedOp;

protected:
    struct Attributes {
        int64_t in_features = 32, out_features = 1, bits = 8, zero_point = 0, group_size = 32, scale_bits = 32;
        int64_t has_minimums = 0, activation_bits = 8;
    } attributes;

    void visit_common(ov::AttributeVisitor& visitor) {
        Attributes& n = attributes;
        visitor.on_attribute("in_features", n.in_features);
        visitor.on_attribute("out_features", n.out_features);
        visitor.on_attribute("bits", n.bits);
        visitor.on_attribute("zero_point", n.zero_point);
        visitor.on_attribute("group_size", n.group_size);
        visitor.on_attribute("scale_bits", n.scale_bits);
        visitor.on_attribute("has_minimums", n.has_minimums);
    }

    void check_weights() const {
        const Attributes& n = attributes;
        const bool known = (n.bits == 4 || n.bits == 8) && (n.scale_bits == 16 || n.scale_bits == 32) &&
                           (n.activation_bits == 8 || n.activation_bits == 32);
        NODE_VALIDATION_CHECK(this, known, "bits=", n.bits, ", scale_bits=", n.scale_bits, ", activation_bits=",
                              n.activation_bits);
        NODE_VALIDATION_CHECK(this, n.in_features > 0 && n.out_features > 0 && n.group_size > 0 &&
                                        n.group_size % PackedLinear::kColumns == 0 &&
                                        n.in_features % n.group_size == 0,
                              "in_features=", n.in_features, ", out_features=", n.out_features, ", group_size=",
                              n.group_size);
        const PackedLinear l = linear();
        check_input(1, "weights", {ov::element::u8}, {l.row_blocks(), l.block_bytes()});
    }

    PackedLinear linear() const {
        PackedLinear l{};
        l.in_features = attributes.in_features;
        l.out_features = attributes.out_features;
        l.group_size = attributes.group_size;
        l.bits = int(attributes.bits);
        l.zero_point = int(attributes.zero_point);
        l.scale_bytes = int(attributes.scale_bits / 8);
        l.has_minimums = attributes.has_minimums != 0;
        l.int8_activations = attributes.activation_bits == 8;
        return l;
    }
};

class PackedLinearOp : public PackedOp {
public:
    OPENVINO_OP("PackedLinear", "trtforge", PackedOp);
    PackedLinearOp() = default;
    explicit PackedLinearOp(const ov::OutputVector& inputs) : PackedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visit_common(visitor);
        visitor.on_attribute("activation_bits", attributes.activation_bits);
        return true;
    }

    void validate_and_infer_types() override {
        const Attributes& n = attributes;
        NODE_VALIDATION_CHECK(this, get_input_size() == 3, "has ", get_input_size(), " inputs, want 3");
        check_input(0, "x", {ov::element::f32}, {ov::Dimension::dynamic(), n.in_features});
        check_weights();
        check_input(2, "bias", {ov::element::f32}, {ov::Dimension::dynamic()});
        const ov::Dimension bias = get_input_partial_shape(2)[0];
        NODE_VALIDATION_CHECK(this, bias.compatible(1) || bias.compatible(n.out_features), "bias has ", bias,
                              " elements, want ", n.out_features, " or one zero");
        set_output_type(0, ov::element::f32, {get_input_partial_shape(0)[0], n.out_features});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PackedLinearOp>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        PackedLinear l = linear();
        l.num_rows = in[0].get_shape()[0];
        l.x = in[0].data<const float>();
        l.weights = in[1].data<const uint8_t>();
        // a single zero stands for none
        l.bias = in[2].get_size() == size_t(l.out_features) ? in[2].data<const float>() : nullptr;
        out[0].set_shape({size_t(l.num_rows), size_t(l.out_features)});
        l.out = out[0].data<float>();
        packed_linear(l, run_parallel);
        return true;
    }
};

class PackedEmbedding : public PackedOp {
public:
    OPENVINO_OP("PackedEmbedding", "trtforge", PackedOp);
    PackedEmbedding() = default;
    explicit PackedEmbedding(const ov::OutputVector& inputs) : PackedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visit_common(visitor);
        return true;
    }

    void validate_and_infer_types() override {
        NODE_VALIDATION_CHECK(this, get_input_size() == 2, "has ", get_input_size(), " inputs, want 2");
        check_input(0, "token_ids", {ov::element::i32}, {ov::Dimension::dynamic()});
        check_weights();
        set_output_type(0, ov::element::f32, {get_input_partial_shape(0)[0], attributes.in_features});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PackedEmbedding>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        PackedLinear table = linear();
        table.num_rows = in[0].get_size();
        table.weights = in[1].data<const uint8_t>();
        const int32_t* const ids = in[0].data<const int32_t>();
        for (int64_t i = 0; i < table.num_rows; i++)
            OPENVINO_ASSERT(ids[i] >= 0 && ids[i] < table.out_features, "PackedEmbedding: token id ", ids[i],
                            " is not below ", table.out_features);
        out[0].set_shape({size_t(table.num_rows), size_t(table.in_features)});
        table.out = out[0].data<float>();
        packed_embedding(table, ids, run_parallel);
        return true;
    }
};

}  // namespace trtforge

static std::vector<ov::Extension::Ptr> all_ops() {
    std::vector<ov::Extension::Ptr> ops = trtforge::fused_ops();
    ops.push_back(std::make_shared<ov::OpExtension<trtforge::KVCacheUpdate>>());
    ops.push_back(std::make_shared<ov::OpExtension<trtforge::PagedAttention>>());
    ops.push_back(std::make_shared<ov::OpExtension<trtforge::PackedLinearOp>>());
    ops.push_back(std::make_shared<ov::OpExtension<trtforge::PackedEmbedding>>());
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
                                   out};
    arena.execute([&] { trtforge::packed_linear(l, trtforge::run_parallel); });
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
