// Single ops over packed weights (packing.py) as OpenVINO operations.
#include <openvino/core/op_extension.hpp>

#include "openvino_op.hpp"

namespace trtforge {
namespace {

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

}  // namespace

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
        visitor.on_attribute("scale", scale);
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
        packed_embedding(table, ids, scale, run_parallel);
        return true;
    }

private:
    float scale = 1;
};

std::vector<ov::Extension::Ptr> packed_ops() {
    return {std::make_shared<ov::OpExtension<PackedLinearOp>>(), std::make_shared<ov::OpExtension<PackedEmbedding>>()};
}

}  // namespace trtforge
