// PackedLayer: a whole decoder layer as one OpenVINO operation. OpenVINO spends some 15 us on a custom operation at
// every call, whatever it does, and a layer has a dozen of them.
#include <memory>
#include <openvino/core/op_extension.hpp>
#include <utility>

#include "openvino_op.hpp"

namespace trtforge {
namespace {

// This thread's floats for a step's rows; not initialized. Taken in pieces.
class Rows {
public:
    explicit Rows(size_t floats) {
        thread_local std::unique_ptr<float[]> memory;
        thread_local size_t size = 0;
        if (size < floats) memory.reset(new float[size = floats]);
        next_ = memory.get();
    }
    float* take(size_t floats) { return std::exchange(next_, next_ + floats); }

private:
    float* next_;
};

}  // namespace

class PackedLayerOp : public PagedOp {
public:
    OPENVINO_OP("PackedLayer", "trtforge");
    PackedLayerOp() = default;
    explicit PackedLayerOp(const ov::OutputVector& inputs) : PagedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visit_common(visitor);
        visitor.on_attribute("kv_dtype", attributes.kv_dtype);
        visitor.on_attribute("scale", attributes.scale);
        visitor.on_attribute("window", attributes.window);
        visitor.on_attribute("softcap", attributes.softcap);
        visitor.on_attribute("hidden_size", hidden);
        visitor.on_attribute("intermediate_size", intermediate);
        for (size_t i = 0; i < kLinears; i++)
            visitor.on_attribute(std::string(kNames[i]) + "_format", formats[i]);
        visitor.on_attribute("activation", activation);
        visitor.on_attribute("epsilon", epsilon);
        visitor.on_attribute("activation_bits", activation_bits);
        return true;
    }

    void validate_and_infer_types() override {
        check_attributes();
        const size_t s = num_scales();
        const auto any = ov::Dimension::dynamic();
        NODE_VALIDATION_CHECK(this, get_input_size() == kInputs + s, "has ", get_input_size(), " inputs, want ",
                              kInputs + s, " for kv_dtype ", attributes.kv_dtype);
        NODE_VALIDATION_CHECK(this, activation == "silu" || activation == "gelu_tanh", "activation='", activation, "'");
        check_input(kX, "x", {ov::element::f32}, {any, hidden});
        check_input(kAttentionNorm, "attention_norm", {ov::element::f32}, {hidden});
        check_input(kMlpNorm, "mlp_norm", {ov::element::f32}, {hidden});
        for (size_t i = 0; i < kLinears; i++) {
            const PackedLinear l = linear(i);
            check_input(kWeights + i, kNames[i], {ov::element::u8}, {l.row_blocks(), l.block_bytes()});
            if (i >= kBiased) continue;
            check_input(kBiases + i, kNames[i], {ov::element::f32}, {any});
            const ov::Dimension bias = get_input_partial_shape(kBiases + i)[0];
            NODE_VALIDATION_CHECK(this, bias.compatible(1) || bias.compatible(l.out_features), kNames[i],
                                  "_bias has ", bias, " elements, want ", l.out_features, " or one zero");
        }
        check_input(kCosSin, "cos_sin", {ov::element::f32}, {any, any});
        check_input(kSlots, "slot_mapping", {ov::element::i64, ov::element::i32}, {any});
        check_input(kTables, "positions", {ov::element::i32}, {any});
        check_input(kTables + 1, "query_start", {ov::element::i32}, {any});
        check_input(kTables + 2, "kv_lengths", {ov::element::i32}, {any});
        check_input(kTables + 3, "block_tables", {ov::element::i32}, {any, any});
        check_pool(kPool);
        set_output_type(0, ov::element::f32, {get_input_partial_shape(kX)[0], hidden});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PackedLayerOp>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        const size_t tokens = in[kX].get_shape()[0], wide = query_width(), narrow = key_width();
        OPENVINO_ASSERT(in[kCosSin].get_shape()[0] == tokens && in[kSlots].get_size() == tokens &&
                            in[kTables].get_size() == tokens,
                        "PackedLayer: inputs differ in tokens");
        out[0].set_shape(in[kX].get_shape());
        Rows rows(tokens * (3 * wide + 2 * narrow + hidden));
        PackedLinear linears[kLinears] = {};
        for (size_t i = 0; i < kLinears; i++) {
            linears[i] = linear(i);
            linears[i].num_rows = tokens;
            linears[i].weights = in[kWeights + i].data<const uint8_t>();
            const bool has_bias = i < kBiased && in[kBiases + i].get_size() == size_t(linears[i].out_features);
            linears[i].bias = has_bias ? in[kBiases + i].data<const float>() : nullptr;
        }

        PackedQkv qkv{{linears[0], linears[1], linears[2]},
                      in[kX].data<const float>(),
                      in[kAttentionNorm].data<const float>(),
                      epsilon};
        for (PackedLinear& l : qkv.linears) l.out = rows.take(tokens * l.out_features);
        packed_qkv(qkv, run_parallel);

        const Pool kv = pool(in, kPool);
        std::vector<int64_t> widened;
        CacheUpdate u = cache_update(in[kCosSin], kv, slots_of(in[kSlots], &widened));
        u.q = qkv.linears[0].out;
        u.k = qkv.linears[1].out;
        u.v = qkv.linears[2].out;
        u.q_rotated = rows.take(tokens * wide);
        if (const char* fault = find_fault(u)) OPENVINO_THROW("PackedLayer: ", fault);
        kv_cache_update(u, run_parallel);

        Attention a = attention(in, kTables, kv);
        a.q = u.q_rotated;
        a.out = rows.take(tokens * wide);
        if (const char* fault = find_fault(a)) OPENVINO_THROW("PackedLayer: ", fault);
        paged_attention(a, run_parallel);

        PackedLinear& o = linears[3];
        o.x = a.out;
        o.added = qkv.x;
        o.out = rows.take(tokens * hidden);
        packed_linear(o, run_parallel);

        packed_mlp({linears[4], linears[5], linears[6], o.out, in[kMlpNorm].data<const float>(), epsilon,
                    activation == "gelu_tanh", out[0].data<float>()},
                   run_parallel);
        return true;
    }

private:
    // The order of inputs; scales of the cache, if there are any, come last.
    static constexpr size_t kLinears = 7, kBiased = 4;
    static constexpr size_t kX = 0, kAttentionNorm = 1, kMlpNorm = 2, kWeights = 3, kBiases = kWeights + kLinears,
                            kCosSin = kBiases + kBiased, kSlots = kCosSin + 1, kTables = kSlots + 1,
                            kPool = kTables + 4, kInputs = kPool + 1;
    static constexpr const char* kNames[kLinears] = {"q", "k", "v", "o", "gate", "up", "down"};

    int64_t hidden = 32, intermediate = 32, activation_bits = 8;
    float epsilon = 0;
    std::string formats[kLinears] = {"8 0 32 32 0", "8 0 32 32 0", "8 0 32 32 0", "8 0 32 32 0",
                                     "8 0 32 32 0", "8 0 32 32 0", "8 0 32 32 0"};
    std::string activation = "silu";

    PackedLinear linear(size_t i) const {
        const int64_t inputs[kLinears] = {hidden, hidden, hidden, query_width(), hidden, hidden, intermediate};
        const int64_t outputs[kLinears] = {query_width(), key_width(),  key_width(), hidden,
                                           intermediate,  intermediate, hidden};
        return parse_format(this, formats[i], inputs[i], outputs[i], activation_bits);
    }
};

ov::Extension::Ptr layer_op() { return std::make_shared<ov::OpExtension<PackedLayerOp>>(); }

}  // namespace trtforge
