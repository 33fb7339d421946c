#include "decoder.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace trtforge {
namespace {

// At least `floats` of memory, kept from step to step; not initialized.
float* grown(std::unique_ptr<float[]>& memory, size_t& size, size_t floats) {
    if (size < floats) memory.reset(new float[size = floats]);
    return memory.get();
}

}  // namespace

// A step's activations.
struct Decoder::Rows {
    float *x, *h;                // residual stream [T, hidden] before a layer, and between attention and MLP
    float *q, *k, *v;            // [T, num_heads * D], [T, num_kv_heads * D] twice
    float *rotated, *attention;  // [T, num_heads * D] both
    float* block_out;            // [T, hidden], of a block that has a norm after it
};

Decoder::Decoder(const Model& model, int threads)
    : model_(model),
      layers_(model.layers, model.layers + model.num_layers),
      pools_(model.num_groups),
      team_(threads),
      parallel_([this](int64_t count, const std::function<void(int64_t)>& item) { team_.run(count, item); }) {
    model_.layers = nullptr;
}

void Decoder::bind_pool(int64_t group, uint8_t* rows, float* scales, int64_t num_blocks, int64_t layers) {
    Pool& p = pools_[group];
    p.rows = rows;
    p.scales = scales;
    p.dtype = KVDtype(model_.kv_dtype);
    p.num_blocks = num_blocks;
    p.layers = layers;
    p.kv_heads = model_.num_kv_heads;
    p.tokens_per_block = model_.tokens_per_block;
    p.head_size = model_.head_size;
}

const char* Decoder::find_fault(const StepInputs& s) const {
    for (int64_t t = 0; t < s.num_tokens; t++)
        if (s.token_ids[t] < 0 || s.token_ids[t] >= model_.embedding.out_features)
            return "token_ids has one outside the vocabulary";
    for (int64_t r = 0; r < s.num_logits; r++)
        if (s.logit_rows[r] < 0 || s.logit_rows[r] >= s.num_tokens) return "logit_rows has one outside the step";
    // Layers of a group read the same indices, but not through the same window.
    const Layer* last = nullptr;
    for (const Layer& layer : layers_) {
        if (last && last->group == layer.group && last->window == layer.window && last->rope == layer.rope) continue;
        if (const char* fault = trtforge::find_fault(cache_update(layer, s))) return fault;
        if (const char* fault = trtforge::find_fault(attention(layer, s))) return fault;
        last = &layer;
    }
    return nullptr;
}

const float* Decoder::run(const StepInputs& s) {
    const size_t tokens = s.num_tokens, wide = model_.num_heads * model_.head_size,
                 narrow = model_.num_kv_heads * model_.head_size, hidden = model_.hidden;
    float* next = grown(rows_, rows_size_, tokens * (3 * hidden + 3 * wide + 2 * narrow));
    const auto take = [&](size_t width) { return std::exchange(next, next + tokens * width); };
    Rows r{};
    for (float** p : {&r.x, &r.h, &r.block_out}) *p = take(hidden);
    for (float** p : {&r.q, &r.rotated, &r.attention}) *p = take(wide);
    for (float** p : {&r.k, &r.v}) *p = take(narrow);

    PackedLinear embedding = linear(model_.embedding, tokens, false);
    embedding.out = r.x;
    packed_embedding(embedding, s.token_ids, model_.embedding_scale, parallel_);
    for (const Layer& layer : layers_) run_layer(layer, s, r);
    return head(s, r);
}

// x = x + attention(norm(x)), then x = x + mlp(norm(x)); with a norm after each block too, where the model has it.
void Decoder::run_layer(const Layer& l, const StepInputs& s, const Rows& r) {
    const int64_t tokens = s.num_tokens;
    const bool int8 = model_.int8_activations;
    PackedQkv qkv{{linear(l.q, tokens, int8), linear(l.k, tokens, int8), linear(l.v, tokens, int8)},
                  r.x, l.attention_norm, l.epsilon};
    qkv.linears[0].out = r.q;
    qkv.linears[1].out = r.k;
    qkv.linears[2].out = r.v;
    packed_qkv(qkv, parallel_);
    attend(l, s, r);

    PackedLinear o = linear(l.o, tokens, int8);
    o.x = r.attention;
    o.added = l.attention_post_norm ? nullptr : r.x;
    o.out = l.attention_post_norm ? r.block_out : r.h;
    packed_linear(o, parallel_);
    if (l.attention_post_norm) {
        std::copy(r.x, r.x + tokens * model_.hidden, r.h);
        add_normalized(r.block_out, l.attention_post_norm, l.epsilon, tokens, r.h);
    }

    packed_mlp({linear(l.gate, tokens, int8), linear(l.up, tokens, int8), linear(l.down, tokens, int8), r.h,
                l.mlp_norm, l.mlp_post_norm ? nullptr : r.h, l.epsilon, l.is_gelu != 0,
                l.mlp_post_norm ? r.block_out : r.x},
               parallel_);
    if (l.mlp_post_norm) {
        std::copy(r.h, r.h + tokens * model_.hidden, r.x);
        add_normalized(r.block_out, l.mlp_post_norm, l.epsilon, tokens, r.x);
    }
}

// attention = the attention of q, k and v, which go through the cache.
void Decoder::attend(const Layer& l, const StepInputs& s, const Rows& r) {
    const int64_t d = model_.head_size;
    const auto normalize_heads = [&](float* heads, const float* norm, int64_t per_token) {
        if (!norm) return;
        run_items(s.num_tokens, s.num_tokens * per_token * d * 4, parallel_, [&](int64_t t) {
            for (float* head = heads + t * per_token * d; head < heads + (t + 1) * per_token * d; head += d)
                kernels().normalize(head, norm, l.epsilon, d, head);
        });
    };
    normalize_heads(r.q, l.q_norm, model_.num_heads);
    normalize_heads(r.k, l.k_norm, model_.num_kv_heads);

    CacheUpdate u = cache_update(l, s);
    u.q = r.q;
    u.k = r.k;
    u.v = r.v;
    u.q_rotated = r.rotated;
    kv_cache_update(u, parallel_);

    Attention a = attention(l, s);
    a.q = r.rotated;
    a.out = r.attention;
    paged_attention(a, parallel_);
}

// x += norm(block_out)
void Decoder::add_normalized(const float* block_out, const float* norm, float epsilon, int64_t rows, float* x) {
    const int64_t n = model_.hidden;
    float* const scratch = const_cast<float*>(block_out);  // this decoder's own
    run_items(rows, rows * n * 4, parallel_, [&](int64_t row) {
        kernels().normalize(block_out + row * n, norm, epsilon, n, scratch + row * n);
        for (int64_t i = row * n; i < (row + 1) * n; i++) x[i] += scratch[i];
    });
}

// The last norm and the head, of the rows whose logits are wanted.
const float* Decoder::head(const StepInputs& s, const Rows& r) {
    const int64_t n = model_.hidden, vocabulary = model_.head.out_features;
    float* const logits = grown(logits_, logits_size_, s.num_logits * vocabulary);
    // r.h and r.block_out lie behind r.x: any rows of x fit there
    run_items(s.num_logits, s.num_logits * n * 4, parallel_, [&](int64_t row) {
        kernels().normalize(r.x + s.logit_rows[row] * n, model_.norm, model_.epsilon, n, r.h + row * n);
    });
    PackedLinear l = linear(model_.head, s.num_logits, model_.head_int8_activations);
    l.x = r.h;
    l.out = logits;
    packed_linear(l, parallel_);
    if (const float cap = model_.logit_softcap; cap > 0)
        run_items(s.num_logits, s.num_logits * vocabulary * 16, parallel_, [&](int64_t row) {
            for (int64_t i = row * vocabulary; i < (row + 1) * vocabulary; i++)
                logits[i] = std::tanh(logits[i] / cap) * cap;
        });
    return logits;
}

PackedLinear Decoder::linear(const LinearWeights& w, int64_t rows, bool int8_activations) const {
    return {rows, w.in_features, w.out_features, w.group_size, int(w.bits), int(w.zero_point), int(w.scale_bytes),
            w.has_minimums != 0, int8_activations, nullptr, w.weights, w.bias, nullptr, nullptr};
}

CacheUpdate Decoder::cache_update(const Layer& l, const StepInputs& s) const {
    CacheUpdate u{};
    u.pool = pools_[l.group];
    u.layer = l.layer;
    u.num_tokens = s.num_tokens;
    u.num_heads = model_.num_heads;
    u.rotary = s.rotary[l.rope];
    u.cos_sin = s.cos_sin[l.rope];
    u.slots = s.slot_mapping[l.group];
    return u;
}

Attention Decoder::attention(const Layer& l, const StepInputs& s) const {
    Attention a{};
    a.pool = pools_[l.group];
    a.layer = l.layer;
    a.num_tokens = s.num_tokens;
    a.num_heads = model_.num_heads;
    a.num_sequences = s.num_sequences;
    a.max_blocks = s.max_blocks[l.group];
    a.scale = l.scale;
    a.softcap = l.softcap;
    a.window = l.window;
    a.positions = s.positions;
    a.query_start = s.query_start;
    a.kv_lengths = s.kv_lengths;
    a.block_tables = s.block_tables[l.group];
    return a;
}

}  // namespace trtforge
