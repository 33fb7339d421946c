// The native host: a decoder-only transformer over packed weights, a plain loop over the kernels.
//
// The structs are what the entries of host.cpp take; plugins/cpu/host.py mirrors them field by field (a test compares
// their sizes). All pointers are the caller's and must outlive the decoder; "or nullptr" means that the model has none.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "team.hpp"

namespace trtforge {

struct LinearWeights {
    int64_t in_features, out_features, group_size;
    int64_t bits, zero_point, scale_bytes, has_minimums;
    const uint8_t* weights;  // packed (packing.py)
    const float* bias;       // [out_features], or nullptr
};

struct Layer {
    LinearWeights q, k, v, o, gate, up, down;
    const float *attention_norm, *mlp_norm;            // [hidden]
    const float *q_norm, *k_norm;                      // of each head before its rotation: [head_size], or nullptr
    const float *attention_post_norm, *mlp_post_norm;  // of a block's output: [hidden], or nullptr
    int64_t group, layer;                              // the KV group, and the layer's index in its pool
    int64_t rope, window;                              // window: 0 for none
    int64_t is_gelu;
    float scale, softcap, epsilon, padding;
};

struct Model {
    int64_t hidden, num_heads, num_kv_heads, head_size, num_layers, num_groups, num_ropes;
    int64_t kv_dtype, tokens_per_block;
    int64_t int8_activations, head_int8_activations;
    const Layer* layers;
    LinearWeights embedding, head;
    const float* norm;  // [hidden], the last
    float embedding_scale, logit_softcap, epsilon, padding;
};

// One step (docs/graph.md): T tokens of B sequences, R rows of logits.
struct StepInputs {
    int64_t num_tokens, num_sequences, num_logits;
    const int32_t *token_ids, *positions, *query_start, *kv_lengths, *logit_rows;
    const float* const* cos_sin;           // per RoPE kind [T, rotary]
    const int64_t* rotary;                 // per RoPE kind
    const int64_t* const* slot_mapping;    // per group [T]
    const int32_t* const* block_tables;    // per group [B, max_blocks]
    const int64_t* max_blocks;             // per group
};

class Decoder {
public:
    Decoder(const Model&, int threads);

    // The pool of a KV group: written in place by every step.
    void bind_pool(int64_t group, uint8_t* rows, float* scales, int64_t num_blocks, int64_t layers);

    // What is wrong with a step's indices, or nullptr; one with a fault must not be run.
    const char* find_fault(const StepInputs&) const;

    // logits [R, vocabulary] of one step, this object's own memory until the next one.
    const float* run(const StepInputs&);

private:
    struct Rows;

    void run_layer(const Layer&, const StepInputs&, const Rows&);
    void attend(const Layer&, const StepInputs&, const Rows&);
    void add_normalized(const float* block_out, const float* norm, float epsilon, int64_t rows, float* x);
    const float* head(const StepInputs&, const Rows&);
    PackedLinear linear(const LinearWeights&, int64_t rows, bool int8_activations) const;
    CacheUpdate cache_update(const Layer&, const StepInputs&) const;
    Attention attention(const Layer&, const StepInputs&) const;

    Model model_;
    std::vector<Layer> layers_;
    std::vector<Pool> pools_;  // by group
    Team team_;
    Parallel parallel_;
    std::unique_ptr<float[]> rows_, logits_;
    size_t rows_size_ = 0, logits_size_ = 0;
};

}  // namespace trtforge
