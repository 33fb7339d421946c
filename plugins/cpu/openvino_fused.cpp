// The fused ops as OpenVINO operations. Each linear's storage is one attribute, its format.
#include <cstdlib>
#include <openvino/core/op_extension.hpp>

#include "openvino_op.hpp"

namespace trtforge {
// A linear of this format: "bits zero_point group_size scale_bits has_minimums" (PackedLayout.format).
PackedLinear parse_format(const ov::Node* node, const std::string& format, int64_t in_features, int64_t out_features,
                          int64_t activation_bits) {
    PackedLinear l{};
    // OpenVINO clones and validates a node at every call: no place for scanf.
    long numbers[5] = {};
    const char* at = format.c_str();
    bool known = true;
    for (long& number : numbers) {
        char* end = nullptr;
        number = std::strtol(at, &end, 10);
        known = known && end != at;
        at = end;
    }
    const auto [bits, zero_point, group_size, scale_bits, has_minimums] = numbers;
    known = known && !*at && (bits == 4 || bits == 8) && (scale_bits == 16 || scale_bits == 32) &&
            (has_minimums == 0 || has_minimums == 1) && group_size > 0 && group_size % PackedLinear::kColumns == 0 &&
            in_features % group_size == 0;
    NODE_VALIDATION_CHECK(node, known && out_features > 0, "no format for ", out_features, " x ", in_features,
                          " weights: '", format, "'");
    NODE_VALIDATION_CHECK(node, activation_bits == 8 || activation_bits == 32, "activation_bits=", activation_bits);
    l.bits = int(bits);
    l.zero_point = int(zero_point);
    l.in_features = in_features;
    l.out_features = out_features;
    l.group_size = group_size;
    l.scale_bytes = int(scale_bits / 8);
    l.has_minimums = has_minimums == 1;
    l.int8_activations = activation_bits == 8;
    return l;
}

namespace {

class FusedOp : public CheckedOp {
public:
    using CheckedOp::CheckedOp;

protected:
    int64_t activation_bits = 8;
    float epsilon = 0;

    PackedLinear linear(const std::string& format, int64_t in_features, int64_t out_features) const {
        return parse_format(this, format, in_features, out_features, activation_bits);
    }

    // x and its norm; more inputs follow.
    void check_normalized(size_t num_inputs, int64_t hidden) const {
        NODE_VALIDATION_CHECK(this, get_input_size() == num_inputs, "has ", get_input_size(), " inputs, want ",
                              num_inputs);
        check_input(0, "x", {ov::element::f32}, {ov::Dimension::dynamic(), hidden});
        check_input(1, "norm", {ov::element::f32}, {hidden});
    }

    void check_weights(size_t i, const char* name, const PackedLinear& l) const {
        check_input(i, name, {ov::element::u8}, {l.row_blocks(), l.block_bytes()});
    }
};

}  // namespace

class PackedQkvOp : public FusedOp {
public:
    OPENVINO_OP("PackedQkv", "trtforge");
    PackedQkvOp() = default;
    explicit PackedQkvOp(const ov::OutputVector& inputs) : FusedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("hidden_size", hidden);
        visitor.on_attribute("q_size", sizes[0]);
        visitor.on_attribute("kv_size", sizes[1]);
        visitor.on_attribute("q_format", formats[0]);
        visitor.on_attribute("k_format", formats[1]);
        visitor.on_attribute("v_format", formats[2]);
        visitor.on_attribute("epsilon", epsilon);
        visitor.on_attribute("activation_bits", activation_bits);
        return true;
    }

    void validate_and_infer_types() override {
        check_normalized(8, hidden);
        static const char* const names[3][2] = {{"q_weights", "q_bias"}, {"k_weights", "k_bias"},
                                                {"v_weights", "v_bias"}};
        for (size_t i = 0; i < 3; i++) {
            const PackedLinear l = linear_of(i);
            check_weights(2 + i, names[i][0], l);
            check_input(5 + i, names[i][1], {ov::element::f32}, {ov::Dimension::dynamic()});
            const ov::Dimension bias = get_input_partial_shape(5 + i)[0];
            NODE_VALIDATION_CHECK(this, bias.compatible(1) || bias.compatible(l.out_features), names[i][1], " has ",
                                  bias, " elements, want ", l.out_features, " or one zero");
            set_output_type(i, ov::element::f32, {get_input_partial_shape(0)[0], l.out_features});
        }
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PackedQkvOp>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        PackedQkv a{};
        a.x = in[0].data<const float>();
        a.norm = in[1].data<const float>();
        a.epsilon = epsilon;
        const size_t rows = in[0].get_shape()[0];
        for (size_t i = 0; i < 3; i++) {
            PackedLinear& l = a.linears[i] = linear_of(i);
            l.num_rows = rows;
            l.weights = in[2 + i].data<const uint8_t>();
            l.bias = in[5 + i].get_size() == size_t(l.out_features) ? in[5 + i].data<const float>() : nullptr;
            out[i].set_shape({rows, size_t(l.out_features)});
            l.out = out[i].data<float>();
        }
        packed_qkv(a, run_parallel);
        return true;
    }

private:
    int64_t hidden = 32, sizes[2] = {1, 1};
    std::string formats[3] = {"8 0 32 32 0", "8 0 32 32 0", "8 0 32 32 0"};

    PackedLinear linear_of(size_t i) const { return linear(formats[i], hidden, sizes[i > 0]); }
};

class PackedMlpOp : public FusedOp {
public:
    OPENVINO_OP("PackedMlp", "trtforge");
    PackedMlpOp() = default;
    explicit PackedMlpOp(const ov::OutputVector& inputs) : FusedOp(inputs) {}

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("hidden_size", hidden);
        visitor.on_attribute("intermediate_size", intermediate);
        visitor.on_attribute("gate_format", gate_format);
        visitor.on_attribute("up_format", up_format);
        visitor.on_attribute("down_format", down_format);
        visitor.on_attribute("activation", activation);
        visitor.on_attribute("epsilon", epsilon);
        visitor.on_attribute("activation_bits", activation_bits);
        return true;
    }

    void validate_and_infer_types() override {
        check_normalized(5, hidden);
        NODE_VALIDATION_CHECK(this, activation == "silu" || activation == "gelu_tanh", "activation='", activation, "'");
        check_weights(2, "gate", linear(gate_format, hidden, intermediate));
        check_weights(3, "up", linear(up_format, hidden, intermediate));
        check_weights(4, "down", linear(down_format, intermediate, hidden));
        set_output_type(0, ov::element::f32, {get_input_partial_shape(0)[0], hidden});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<PackedMlpOp>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& out, const ov::TensorVector& in) const override {
        PackedMlp a{};
        a.gate = linear(gate_format, hidden, intermediate);
        a.up = linear(up_format, hidden, intermediate);
        a.down = linear(down_format, intermediate, hidden);
        PackedLinear* const linears[3] = {&a.gate, &a.up, &a.down};
        for (size_t i = 0; i < 3; i++) {
            linears[i]->num_rows = in[0].get_shape()[0];
            linears[i]->weights = in[2 + i].data<const uint8_t>();
        }
        a.x = in[0].data<const float>();
        a.norm = in[1].data<const float>();
        a.epsilon = epsilon;
        a.is_gelu = activation == "gelu_tanh";
        out[0].set_shape(in[0].get_shape());
        a.out = out[0].data<float>();
        packed_mlp(a, run_parallel);
        return true;
    }

private:
    int64_t hidden = 32, intermediate = 32;
    std::string gate_format = "8 0 32 32 0", up_format = "8 0 32 32 0", down_format = "8 0 32 32 0", activation = "silu";
};

std::vector<ov::Extension::Ptr> fused_ops() {
    return {std::make_shared<ov::OpExtension<PackedQkvOp>>(), std::make_shared<ov::OpExtension<PackedMlpOp>>(), layer_op()};
}

}  // namespace trtforge
