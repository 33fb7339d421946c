// PagedAttention: some rows of one sequence, one KV head, one range of positions. Compiled once per instruction set.
//
// The rows' query heads that share the KV head ("queries", num_rows * group of them) go over the keys together, in
// chunks of kChunk absolute positions, with a running softmax. Every number of a query depends on its own q and the
// keys that it sees: chunks and partitions lie at absolute positions, and a key that a row does not see adds nothing,
// not even a zero.
#include "kv_codec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {
namespace {

struct Scratch {
    float *q, *rows, *scores;
    Scratch(float* p, int64_t queries, int64_t width)
        : q(p), rows(q + queries * width), scores(rows + kChunk * width) {}
    static size_t floats(int64_t queries, int64_t width) { return (queries + kChunk) * width + queries * kChunk; }
};

struct Range {
    int64_t begin, end;
};

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Positions that a row sees.
static inline Range seen(const Attention& a, int64_t row) {
    const int64_t p = a.positions[row];
    return {a.window > 0 ? at_least(0, p - a.window + 1) : 0, p + 1};
}

// Positions within the chunk at `chunk` that a row of the tile sees, relative to it.
static inline Range seen_in_chunk(const Attention& a, const AttentionTile& t, int64_t row, int64_t chunk) {
    const Range s = seen(a, row);
    return {at_least(at_least(s.begin, t.begin), chunk) - chunk,
            at_most(at_most(s.end, t.end), chunk + kChunk) - chunk};
}

template <class Codec>
static void decode_rows(const uint8_t* rows, const float* scales, int64_t count, int64_t d, const float** pointers,
                        float* buffer) {
    for (int64_t i = 0; i < count; i++) {
        decode_row<Codec>(rows + i * d * Codec::bytes, Codec::max > 0 ? scales[i] : 1.0f, d, buffer + i * padded(d));
        pointers[i] = buffer + i * padded(d);
    }
}

// pointers[range] = the chunk's K (kv = 0) or V (kv = 1) rows as fp32 [padded(head_size)].
static void fetch(const Attention& a, const AttentionTile& t, int64_t kv, int64_t chunk, Range range, float* buffer,
                  const float** pointers) {
    const Pool& pool = a.pool;
    const int64_t d = pool.head_size, width = padded(d);
    const int32_t* const table = a.block_tables + t.sequence * a.max_blocks;
    for (int64_t i = range.begin; i < range.end;) {
        const int64_t position = chunk + i, offset = position % pool.tokens_per_block;
        const int64_t count = at_most(range.end - i, pool.tokens_per_block - offset);
        const int64_t row = pool.row(table[position / pool.tokens_per_block], a.layer, kv, t.kv_head) + offset;
        const uint8_t* const rows = pool.rows + row * pool.row_bytes();
        const float* const scales = pool.scales + (pool.scales ? row : 0);
        float* const to = buffer + i * width;
        switch (pool.dtype) {
            case KVDtype::fp32:
                if (d == width && (uintptr_t)rows % alignof(float) == 0) {  // as it lies
                    for (int64_t j = 0; j < count; j++) pointers[i + j] = (const float*)(rows + j * d * 4);
                } else {
                    decode_rows<Fp32>(rows, scales, count, d, pointers + i, to);
                }
                break;
            case KVDtype::fp16: decode_rows<Fp16>(rows, scales, count, d, pointers + i, to); break;
            case KVDtype::bf16: decode_rows<Bf16>(rows, scales, count, d, pointers + i, to); break;
            case KVDtype::int8: decode_rows<Int8>(rows, scales, count, d, pointers + i, to); break;
            case KVDtype::fp8: decode_rows<Fp8>(rows, scales, count, d, pointers + i, to); break;
        }
        i += count;
    }
}

// scores[n][0..3] = q[n] . k[0..3] for N queries, `q` and `scores` width and kChunk floats apart. The order of the
// additions does not depend on N.
template <int N>
static inline void dot4(const float* q, const float* const k[4], int64_t width, float* scores) {
    f32x8 sums[N][4] = {};
    for (int64_t i = 0; i < width; i += 8) {
        const f32x8 keys[4] = {load(k[0] + i), load(k[1] + i), load(k[2] + i), load(k[3] + i)};
        for (int n = 0; n < N; n++) {
            const f32x8 query = load(q + n * width + i);
            for (int j = 0; j < 4; j++) sums[n][j] = madd(query, keys[j], sums[n][j]);
        }
    }
    for (int n = 0; n < N; n++) sum8x4(sums[n], scores + n * kChunk);
}

// scores [queries, kChunk] of the chunk's keys in `range`; those outside it are left undefined.
static void score(const float* q, int64_t queries, int64_t width, Range range, const float* const* keys,
                  float* scores) {
    for (int64_t j = range.begin / 4 * 4; j < range.end; j += 4) {
        const float* k[4];
        for (int64_t i = 0; i < 4; i++) k[i] = keys[at_most(at_least(j + i, range.begin), range.end - 1)];
        int64_t n = 0;
        for (; n + 2 <= queries; n += 2) dot4<2>(q + n * width, k, width, scores + n * kChunk + j);
        if (n < queries) dot4<1>(q + n * width, k, width, scores + n * kChunk + j);
    }
}

// Scores of one query to weights e^(score - largest so far); what was summed before is scaled to the new largest.
static void soften(const Attention& a, Range range, int64_t width, float* scores, float* partial) {
    float &largest = partial[width], &total = partial[width + 1];
    const i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
    f32x8 s[kChunk / 8], chunk_largest = splat(kNegInf);
    for (int64_t i = 0; i < kChunk / 8; i++) {
        s[i] = load(scores + 8 * i) * splat(a.scale);
        if (a.softcap > 0) s[i] = tanh8(s[i] / splat(a.softcap)) * splat(a.softcap);
        const i32x8 index = lane + (int32_t)(8 * i);
        s[i] = (index >= (int32_t)range.begin) & (index < (int32_t)range.end) ? s[i] : splat(kNegInf);
        chunk_largest = max8(chunk_largest, s[i]);
    }
    const float new_largest = largest8(chunk_largest);
    if (new_largest > largest) {
        const f32x8 shrink = exp8(splat(largest - new_largest));
        for (int64_t i = 0; i < width; i += 8) store(partial + i, load(partial + i) * shrink);
        total *= shrink[0];
        largest = new_largest;
    }
    f32x8 sum = splat(0.0f);
    for (int64_t i = 0; i < kChunk / 8; i++) {
        const f32x8 weight = exp8(s[i] - splat(largest));
        sum += weight;
        store(scores + 8 * i, weight);
    }
    total += sum8(sum);
}

// partial[0 .. 8 N) += weights[j] * values[j][0 .. 8 N), j over the range, in order.
template <int N>
static inline void mix_columns(const float* weights, const float* const* values, int64_t column, Range range,
                               float* partial) {
    f32x8 sums[N];
    for (int n = 0; n < N; n++) sums[n] = load(partial + column + 8 * n);
    for (int64_t j = range.begin; j < range.end; j++) {
        const f32x8 weight = splat(weights[j]);
        for (int n = 0; n < N; n++) sums[n] = madd(weight, load(values[j] + column + 8 * n), sums[n]);
    }
    for (int n = 0; n < N; n++) store(partial + column + 8 * n, sums[n]);
}

static void mix(const float* weights, const float* const* values, int64_t width, Range range, float* partial) {
    int64_t column = 0;
    for (; column + 64 <= width; column += 64) mix_columns<8>(weights, values, column, range, partial);
    for (; column < width; column += 8) mix_columns<1>(weights, values, column, range, partial);
}

}  // namespace

size_t attend_scratch(const Attention& a, int64_t num_rows) {
    return Scratch::floats(num_rows * (a.num_heads / a.pool.kv_heads), padded(a.pool.head_size));
}

void attend(const Attention& a, const AttentionTile& t, float* scratch, float* partials) {
    const int64_t d = a.pool.head_size, width = padded(d), stride = partial_floats(d);
    const int64_t group = a.num_heads / a.pool.kv_heads, queries = t.num_rows * group;
    const Scratch s(scratch, queries, width);
    int64_t begin = t.end, end = t.begin;
    for (int64_t r = 0; r < t.num_rows; r++) {
        const Range row = seen(a, t.first_row + r);
        begin = at_most(begin, row.begin);
        end = at_least(end, row.end);
    }
    begin = at_least(begin, t.begin);
    end = at_most(end, t.end);
    for (int64_t n = 0; n < queries; n++) {
        const int64_t row = t.first_row + n / group, head = t.kv_head * group + n % group;
        float* const q = s.q + n * width;
        memset(q, 0, width * sizeof(float));
        memcpy(q, a.q + (row * a.num_heads + head) * d, d * sizeof(float));
        memset(partials + n * stride, 0, stride * sizeof(float));
        partials[n * stride + width] = kNegInf;
    }
    for (int64_t chunk = begin / kChunk * kChunk; chunk < end; chunk += kChunk) {
        const Range range = {at_least(begin - chunk, 0), at_most(end - chunk, kChunk)};
        const float* rows[kChunk];
        fetch(a, t, 0, chunk, range, s.rows, rows);
        score(s.q, queries, width, range, rows, s.scores);
        fetch(a, t, 1, chunk, range, s.rows, rows);
        for (int64_t n = 0; n < queries; n++) {
            const Range own = seen_in_chunk(a, t, t.first_row + n / group, chunk);
            if (own.begin >= own.end) continue;
            soften(a, own, width, s.scores + n * kChunk, partials + n * stride);
            mix(s.scores + n * kChunk, rows, width, own, partials + n * stride);
        }
    }
}

void fold(const float* next, int64_t head_size, float* partial) {
    const int64_t width = padded(head_size);
    if (next[width] == kNegInf) return;  // the row sees nothing there
    if (partial[width] == kNegInf) {
        memcpy(partial, next, partial_floats(head_size) * sizeof(float));
        return;
    }
    const float largest = next[width] > partial[width] ? next[width] : partial[width];
    const f32x8 ours = exp8(splat(partial[width] - largest)), theirs = exp8(splat(next[width] - largest));
    for (int64_t i = 0; i < width; i += 8) store(partial + i, load(partial + i) * ours + load(next + i) * theirs);
    partial[width] = largest;
    partial[width + 1] = partial[width + 1] * ours[0] + next[width + 1] * theirs[0];
}

void finish(const float* partial, int64_t head_size, float* out) {
    const float total = partial[padded(head_size) + 1];
    for (int64_t i = 0; i < head_size; i++) out[i] = partial[i] / total;
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
