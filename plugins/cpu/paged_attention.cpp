// PagedAttention: some rows, one KV head, one range of positions. Compiled once per instruction set.
//
// The rows' query heads that share the KV head ("queries", num_rows * group of them) go over the keys together, in
// chunks of kChunk absolute positions, with a running softmax. Few queries read the cache's elements straight into
// registers; for many a chunk is decoded once, K transposed. Both take every sum in the same order: a score's
// products by lanes over head_size and the lanes by halves (lanes.hpp), a query's values key by key. So every number
// of a query depends on its own q and the keys that it sees: chunks and partitions lie at absolute positions, and a
// key that a row does not see adds nothing, not even a zero.
#include "kv_codec.hpp"

namespace trtforge {
namespace TRTFORGE_ISA {
namespace {

constexpr int kBlock = 4;                 // queries that go through a chunk together
constexpr int64_t kDirectQueries = 8;     // more than these decode a chunk first
constexpr int kParts = kChunk / kFloats;   // registers of a query's scores

struct Range {
    int64_t begin, end;
};

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline Range both(Range a, Range b) { return {at_least(a.begin, b.begin), at_most(a.end, b.end)}; }
static inline Range either(Range a, Range b) { return {at_most(a.begin, b.begin), at_least(a.end, b.end)}; }

// Keys of a chunk that lie in one block, and where the scales of their K rows begin.
struct Piece {
    int64_t begin, end;
    const float* k_scales;
};

// The chunk's rows in the cache. Those of keys outside the range are those of its nearest key.
struct Rows {
    const uint8_t *k[kChunk], *v[kChunk];
    Piece pieces[kChunk];  // of quantized types
    int64_t num_pieces, to_v;  // to_v: rows from K to V
};

// Their scales, in the codec's unit.
struct Scales {
    float k[kChunk] = {}, v[kChunk] = {};
};

struct Scratch {
    // [queries, width], [kBlock, kChunk], [width, kChunk], [kChunk, width]; the sums of a block's places to spare
    float *q, *scores, *keys, *values, *spare;
    Scratch(float* p, int64_t queries, int64_t width)
        : q(p),
          scores(q + queries * width),
          keys(scores + kBlock * kChunk),
          values(keys + kChunk * width),
          spare(values + kChunk * width) {}
    static size_t floats(int64_t queries, int64_t width) {
        return (queries + 1) * width + kBlock * kChunk + 2 * kChunk * width;
    }
};

static inline int64_t whole_blocks(int64_t queries) { return (queries + kBlock - 1) / kBlock * kBlock; }

// A chunk's queries n .. n + N - 1: where their partial results lie, and the keys that they see, relative to the chunk.
template <int N>
struct Block {
    float* partials[N];
    Range own[N], any, common;  // any: all that lies in some query's range
};

struct Walk {
    const Attention& a;
    const AttentionTile& t;
    const int64_t width, stride, group, queries;
    Range seen[kTileRows];  // positions that each row sees within the tile's range
    Range any;

    Walk(const Attention& a, const AttentionTile& t)
        : a(a),
          t(t),
          width(padded(a.pool.head_size)),
          stride(partial_floats(a.pool.head_size)),
          group(a.num_heads / a.pool.kv_heads),
          queries(t.num_rows * group),
          any{t.end, t.begin} {
        for (int64_t r = 0; r < t.num_rows; r++) {
            const int64_t p = a.positions[t.rows[r].row];
            seen[r] = both({a.window > 0 ? p - a.window + 1 : 0, p + 1}, {t.begin, t.end});
            if (seen[r].begin < seen[r].end) any = either(any, seen[r]);
        }
    }

    // q times the scores' factor, rows of zeros after the last; partial results of nothing.
    void begin(float* q, float* spare) const {
        const int64_t d = a.pool.head_size;
        const float factor = a.softcap > 0 ? a.scale : a.scale * kLog2E;
        for (int64_t n = 0; n < queries; n++) {
            const float* const from = a.q + (t.rows[n / group].row * a.num_heads + t.kv_head * group + n % group) * d;
            for (int64_t i = 0; i < d; i++) q[n * width + i] = from[i] * factor;
            memset(q + n * width + d, 0, (width - d) * sizeof(float));
            float* const partial = t.rows[n / group].partials + n % group * stride;
            memset(partial, 0, stride * sizeof(float));
            partial[width + 16] = kNegInf;
        }
        memset(q + queries * width, 0, (whole_blocks(queries) - queries) * width * sizeof(float));
        memset(spare, 0, width * sizeof(float));
    }

    Range in_chunk(int64_t chunk) const { return {at_least(any.begin - chunk, 0), at_most(any.end - chunk, kChunk)}; }

    template <int N>
    Block<N> block(int64_t n, int64_t chunk, float* spare) const {
        Block<N> b;
        b.any = {kChunk, 0};
        b.common = {0, kChunk};
        for (int i = 0; i < N; i++) {
            if (n + i >= queries) {
                b.partials[i] = spare;
                b.own[i] = {0, 0};
                continue;
            }
            const int64_t row = (int32_t)(n + i) / (int32_t)group;
            b.partials[i] = t.rows[row].partials + (n + i - row * group) * stride;
            b.own[i] = both({seen[row].begin - chunk, seen[row].end - chunk}, {0, kChunk});
            if (b.own[i].begin >= b.own[i].end) b.own[i] = {0, 0};
            b.common = both(b.common, b.own[i]);
            if (b.own[i].end > 0) b.any = either(b.any, b.own[i]);
        }
        return b;
    }
};

// Asks for the row of key j of the next chunk. Rows of a line go to the first-level cache; longer ones would use up
// its few places for lines on the way, so they go to the second level, and to the first half a chunk ahead.
static inline __attribute__((always_inline)) void prefetch(const uint8_t* const* rows, const uint8_t* const* next, int64_t j, int64_t bytes) {
    if (bytes <= 64) return __builtin_prefetch(next[j]);
    const uint8_t* const soon = rows[at_most(j + kChunk / 2, kChunk - 1)];
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(next[j] + i, 0, 2);
        __builtin_prefetch(soon + i);
    }
}

template <class Codec>
static void find_rows(const Attention& a, const AttentionTile& t, int64_t chunk, Range range, Rows* rows) {
    const Pool& pool = a.pool;
    const int64_t bytes = pool.head_size * Codec::bytes, to_v = pool.kv_heads * pool.tokens_per_block;
    const int32_t* const table = a.block_tables + t.sequence * a.max_blocks;
    rows->to_v = to_v;
    rows->num_pieces = 0;
    for (int64_t i = range.begin; i < range.end;) {
        const int64_t position = chunk + i, logical = position / pool.tokens_per_block;
        const int64_t offset = position - logical * pool.tokens_per_block;
        const int64_t end = at_most(range.end, i + pool.tokens_per_block - offset);
        const int64_t row = pool.row(table[logical], a.layer, 0, t.kv_head) + offset;
        const uint8_t* const k = pool.rows + row * bytes;
        if (Codec::max > 0) {
            rows->pieces[rows->num_pieces++] = {i, end, pool.scales + row};
            __builtin_prefetch(pool.scales + row);
            __builtin_prefetch(pool.scales + row + to_v);
        }
        for (int64_t j = 0; j < end - i; j++) {
            rows->k[i + j] = k + j * bytes;
            rows->v[i + j] = k + (to_v + j) * bytes;
        }
        i = end;
    }
    for (int64_t i = 0; i < range.begin; i++) {
        rows->k[i] = rows->k[range.begin];
        rows->v[i] = rows->v[range.begin];
    }
    for (int64_t i = range.end; i < kChunk; i++) {
        rows->k[i] = rows->k[range.end - 1];
        rows->v[i] = rows->v[range.end - 1];
    }
}

template <class Codec>
static void read_scales(const Rows& rows, Scales* scales) {
    for (int i = 0; i < rows.num_pieces; i++) {
        const Piece& p = rows.pieces[i];
        for (int64_t j = p.begin; j < p.end; j++) {
            scales->k[j] = p.k_scales[j - p.begin] * Codec::unit;
            scales->v[j] = p.k_scales[rows.to_v + j - p.begin] * Codec::unit;
        }
    }
}

// scores [N, kChunk] of the queries at q and the keys in `range`, and of some around it.
template <class Codec, int N, int Width>
static void score_rows(const float* q, int64_t any_width, const uint8_t* const* keys, const uint8_t* const* next,
                       Range range, float* scores) {
    const int64_t width = Width ? Width : any_width;
    for (int64_t first = range.begin / kFloats * kFloats; first < range.end; first += kFloats) {
        Halfway half[N][kGroups];
        for (int g = 0; g < kGroups; g++) {
            const uint8_t* const k[4] = {keys[first + summed_at(g, 0)], keys[first + summed_at(g, 1)],
                                         keys[first + summed_at(g, 2)], keys[first + summed_at(g, 3)]};
            floats sums[N][4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const floats x = Codec::decode_floats(k[j]);
                prefetch(keys, next, first + summed_at(g, j), width * Codec::bytes);
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) sums[n][j] = load_floats(q + n * width) * x;
            }
#pragma GCC unroll 4
            for (int64_t i = kFloats; i < width; i += kFloats) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    const floats x = Codec::decode_floats(k[j] + i * Codec::bytes);
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) sums[n][j] = fused(load_floats(q + n * width + i), x, sums[n][j]);
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) half[n][g] = sum_halfway(sums[n]);
        }
        for (int n = 0; n < N; n++) store_floats(scores + n * kChunk + first, sum_rest(half[n]));
    }
}

// keys [width, kChunk] = rows of `width` elements, transposed
template <class Codec>
static void transpose_rows(const uint8_t* const* rows, int64_t width, float* keys) {
    for (int64_t first = 0; first < kChunk; first += kFloats) {
        for (int64_t i = 0; i < width; i += kFloats) {
            floats v[kFloats];
            for (int j = 0; j < kFloats; j++) v[j] = Codec::decode_floats(rows[first + j] + i * Codec::bytes);
            transpose(v);
            for (int j = 0; j < kFloats; j++) store_floats(keys + (i + j) * kChunk + first, v[j]);
        }
    }
}

// decoded [kChunk, width] = rows of head_size elements, which point there from now on
template <class Codec>
static void decode_rows(int64_t head_size, int64_t width, float* decoded, const uint8_t** rows) {
    for (int64_t j = 0; j < kChunk; j++) {
        decode_row<Codec>(rows[j], head_size, decoded + j * width);
        rows[j] = (const uint8_t*)(decoded + j * width);
    }
}

template <int N>
struct Sums {
    floats of[N];
};

// The products of elements Lane, Lane + Step, .. of every kFloats, summed as sum_lanes sums lanes.
template <int N, int Lane, int Step>
static inline __attribute__((always_inline)) Sums<N> sum_columns(const float* q, const float* keys, int64_t width) {
    Sums<N> s;
    if constexpr (Step == kFloats) {
        const floats k = load_floats(keys + Lane * kChunk);
        for (int n = 0; n < N; n++) s.of[n] = all(q[n * width + Lane]) * k;
        for (int64_t i = Lane + kFloats; i < width; i += kFloats) {
            const floats x = load_floats(keys + i * kChunk);
            for (int n = 0; n < N; n++) s.of[n] = fused(all(q[n * width + i]), x, s.of[n]);
        }
    } else {
        s = sum_columns<N, Lane, 2 * Step>(q, keys, width);
        const Sums<N> t = sum_columns<N, Lane + Step, 2 * Step>(q, keys, width);
        for (int n = 0; n < N; n++) s.of[n] = s.of[n] + t.of[n];
    }
    return s;
}

// The same scores as score_rows, from transposed keys.
template <int N, int Width>
static void score_columns(const float* q, int64_t any_width, const float* keys, Range range, float* scores) {
    const int64_t width = Width ? Width : any_width;
    for (int64_t first = range.begin / kFloats * kFloats; first < range.end; first += kFloats) {
        const Sums<N> s = sum_columns<N, 0, 1>(q, keys + first, width);
        for (int n = 0; n < N; n++) store_floats(scores + n * kChunk + first, s.of[n]);
    }
}

// Scores of one query to weights 2^(score - largest so far); what was summed before is scaled to the new largest.
template <bool Scaled>
static inline void soften(const Attention& a, const Scales& scales, Range own, int64_t width, float* scores,
                          float* partial) {
    float& largest = partial[width + 16];
    floats s[kParts], chunk_largest = all(kNegInf);
    const bool is_whole = own.begin == 0 && own.end == kChunk;
    for (int i = 0; i < kParts; i++) {
        s[i] = load_floats(scores + kFloats * i);
        if (Scaled) s[i] *= load_floats(scales.k + kFloats * i);
        if (a.softcap > 0) s[i] = tanh_lanes(s[i] / all(a.softcap)) * all(a.softcap * kLog2E);
        if (!is_whole) s[i] = only_within(s[i], kFloats * i, (int32_t)own.begin, (int32_t)own.end);
        chunk_largest = larger(chunk_largest, s[i]);
    }
    floats total = load_floats(partial + width);
    if (any_above(chunk_largest, all(largest))) {
        const float new_largest = largest_lane(chunk_largest);
        const floats shrink = exp2_lanes(all(largest - new_largest));
        for (int64_t i = 0; i < width; i += kFloats) store_floats(partial + i, load_floats(partial + i) * shrink);
        total *= shrink;
        largest = new_largest;
    }
    for (int i = 0; i < kParts; i++) {
        const floats weight = exp2_lanes(s[i] - all(largest));
        total += weight;
        store_floats(scores + kFloats * i, Scaled ? weight * load_floats(scales.v + kFloats * i) : weight);
    }
    store_floats(partial + width, total);
}

// partials[n][0 .. C * kFloats) += weights[n][j] * values[j], j over the range, in order.
template <class Codec, int N, int C>
static inline void mix_columns(const float* weights, const uint8_t* const* values, const uint8_t* const* next,
                               int64_t width, int64_t column, Range range, float* const* partials) {
    floats sums[N][C];
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) sums[n][c] = load_floats(partials[n] + column + c * kFloats);
    for (int64_t j = range.begin; j < range.end; j++) {
        if (next) prefetch(values, next, j, width * Codec::bytes);
        floats v[C];
        for (int c = 0; c < C; c++) v[c] = Codec::decode_floats(values[j] + (column + c * kFloats) * Codec::bytes);
        for (int n = 0; n < N; n++) {
            const floats weight = all(weights[n * kChunk + j]);
            for (int c = 0; c < C; c++) sums[n][c] = fused(weight, v[c], sums[n][c]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) store_floats(partials[n] + column + c * kFloats, sums[n][c]);
}

template <class Codec, int N>
static void mix_range(const float* weights, const uint8_t* const* values, const uint8_t* const* next, int64_t width,
                      Range range, float* const* partials) {
    constexpr int kColumns = kFloats == 16 ? 4 : N < 4 ? 4 : 2;  // as many sums as there are registers
    int64_t column = 0;
    for (; column + kColumns * kFloats <= width; column += kColumns * kFloats)
        mix_columns<Codec, N, kColumns>(weights, values, column ? nullptr : next, width, column, range, partials);
    for (; column < width; column += kFloats)
        mix_columns<Codec, N, 1>(weights, values, nullptr, width, column, range, partials);
}

// A query's keys before those that all see, those, and those after.
template <class Codec, int N>
static void mix(const Block<N>& b, const float* weights, const Rows& rows, const uint8_t* const* next, int64_t width) {
    const bool is_common = b.common.begin < b.common.end;
    for (int n = 0; n < N; n++) {
        const Range before = {b.own[n].begin, is_common ? b.common.begin : b.own[n].end};
        if (before.begin < before.end)
            mix_range<Codec, 1>(weights + n * kChunk, rows.v, nullptr, width, before, b.partials + n);
    }
    if (!is_common) return;
    mix_range<Codec, N>(weights, rows.v, next, width, b.common, b.partials);
    for (int n = 0; n < N; n++) {
        const Range after = {b.common.end, b.own[n].end};
        if (after.begin < after.end)
            mix_range<Codec, 1>(weights + n * kChunk, rows.v, nullptr, width, after, b.partials + n);
    }
}

template <class Codec, int N>
static void soften_all(const Walk& w, const Block<N>& b, const Scales& scales, float* weights) {
    for (int i = 0; i < N; i++) {
        if (b.own[i].begin < b.own[i].end)
            soften<(Codec::max > 0)>(w.a, scales, b.own[i], w.width, weights + i * kChunk, b.partials[i]);
    }
}

template <class Codec, int N>
static void attend_block(const Walk& w, int64_t n, int64_t chunk, const Rows& rows, const Scales& scales,
                         const Rows& next, const Scratch& s) {
    const Block<N> b = w.block<N>(n, chunk, s.spare);
    if (b.any.begin >= b.any.end) return;
    const float* const q = s.q + n * w.width;
    if (w.width == 64)
        score_rows<Codec, N, 64>(q, w.width, rows.k, next.k, b.any, s.scores);
    else
        score_rows<Codec, N, 0>(q, w.width, rows.k, next.k, b.any, s.scores);
    soften_all<Codec, N>(w, b, scales, s.scores);
    mix<Codec, N>(b, s.scores, rows, next.v, w.width);
}

// Few queries: the cache's elements go straight into registers, and the next chunk's are on their way.
template <class Codec>
static void attend_few(const Walk& w, const Scratch& s) {
    Rows found[2];
    Scales scales;
    int64_t chunk = w.any.begin / kChunk * kChunk;
    find_rows<Codec>(w.a, w.t, chunk, w.in_chunk(chunk), &found[0]);
    for (int turn = 0; chunk < w.any.end; chunk += kChunk, turn ^= 1) {
        const Rows& rows = found[turn];
        const bool is_last = chunk + kChunk >= w.any.end;
        const Rows& next = found[is_last ? turn : turn ^ 1];
        if (!is_last) find_rows<Codec>(w.a, w.t, chunk + kChunk, w.in_chunk(chunk + kChunk), &found[turn ^ 1]);
        read_scales<Codec>(rows, &scales);
        int64_t n = 0;
        for (; n + kBlock <= w.queries; n += kBlock) attend_block<Codec, kBlock>(w, n, chunk, rows, scales, next, s);
        switch (w.queries - n) {
            case 1: attend_block<Codec, 1>(w, n, chunk, rows, scales, next, s); break;
            case 2: attend_block<Codec, 2>(w, n, chunk, rows, scales, next, s); break;
            case 3: attend_block<Codec, 3>(w, n, chunk, rows, scales, next, s); break;
        }
    }
}

// Many queries, or heads that registers do not divide: a chunk is decoded once for all.
template <class Codec>
static void attend_many(const Walk& w, const Scratch& s) {
    const int64_t d = w.a.pool.head_size;
    Rows rows;
    Scales scales;
    for (int64_t chunk = w.any.begin / kChunk * kChunk; chunk < w.any.end; chunk += kChunk) {
        find_rows<Codec>(w.a, w.t, chunk, w.in_chunk(chunk), &rows);
        read_scales<Codec>(rows, &scales);
        if (w.width == d) {
            transpose_rows<Codec>(rows.k, w.width, s.keys);
        } else {
            decode_rows<Codec>(d, w.width, s.values, rows.k);
            transpose_rows<Fp32>(rows.k, w.width, s.keys);
        }
        decode_rows<Codec>(d, w.width, s.values, rows.v);
        for (int64_t n = 0; n < w.queries; n += kBlock) {
            const Block<kBlock> b = w.block<kBlock>(n, chunk, s.spare);
            if (b.any.begin >= b.any.end) continue;
            const float* const q = s.q + n * w.width;
            if (w.width == 64)
                score_columns<kBlock, 64>(q, w.width, s.keys, b.any, s.scores);
            else
                score_columns<kBlock, 0>(q, w.width, s.keys, b.any, s.scores);
            soften_all<Codec, kBlock>(w, b, scales, s.scores);
            mix<Fp32, kBlock>(b, s.scores, rows, nullptr, w.width);
        }
    }
}

template <class Codec>
static void attend_as(const Walk& w, const Scratch& s) {
    if (w.queries <= kDirectQueries && w.width == w.a.pool.head_size)
        attend_few<Codec>(w, s);
    else
        attend_many<Codec>(w, s);
}

}  // namespace

size_t attend_scratch(const Attention& a, int64_t num_rows) {
    const int64_t queries = whole_blocks(num_rows * (a.num_heads / a.pool.kv_heads));
    return Scratch::floats(queries, padded(a.pool.head_size));
}

void attend(const Attention& a, const AttentionTile& t, float* scratch) {
    const Walk w(a, t);
    const Scratch s(scratch, whole_blocks(w.queries), w.width);
    w.begin(s.q, s.spare);
    if (w.any.begin >= w.any.end) return;
    switch (a.pool.dtype) {
        case KVDtype::fp32: return attend_as<Fp32>(w, s);
        case KVDtype::fp16: return attend_as<Fp16>(w, s);
        case KVDtype::bf16: return attend_as<Bf16>(w, s);
        case KVDtype::int8: return attend_as<Int8>(w, s);
        case KVDtype::fp8: return attend_as<Fp8>(w, s);
    }
}

void fold(const float* next, int64_t head_size, float* partial) {
    const int64_t width = padded(head_size);
    const float ours = partial[width + 16], theirs = next[width + 16];
    if (theirs == kNegInf) return;  // the row sees nothing there
    if (ours == kNegInf) {
        memcpy(partial, next, partial_floats(head_size) * sizeof(float));
        return;
    }
    const float largest = theirs > ours ? theirs : ours;
    const floats shrink = exp2_lanes(all(ours - largest)), next_shrink = exp2_lanes(all(theirs - largest));
    for (int64_t i = 0; i < width + 16; i += kFloats)  // the sums of weights lie behind those of values
        store_floats(partial + i, fused(load_floats(next + i), next_shrink, load_floats(partial + i) * shrink));
    partial[width + 16] = largest;
}

void finish(float* partials, int64_t num_partials, int64_t stride, int64_t head_size, float* out) {
    for (int64_t i = 1; i < num_partials; i++) fold(partials + i * stride, head_size, partials);
    const float total = sum_lanes(load_floats(partials + padded(head_size)));
    for (int64_t i = 0; i < head_size; i += kFloats) {
        const floats v = load_floats(partials + i) / all(total);
        memcpy(out + i, &v, at_most(kFloats, head_size - i) * sizeof(float));
    }
}

}  // namespace TRTFORGE_ISA
}  // namespace trtforge
