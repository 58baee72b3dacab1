#include <cstring>
#include <limits>

#include "base/check.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_scratch.h"
#include "ops/common/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/attention_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/attention/attention_kernels-inl.h"
#include "ops/common/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET == HWY_SCALAR

void run_item(const AttentionArgs&, const AttentionItem&, const AttentionItem*, int) {}
void run_merge(const AttentionArgs&, const AttentionItem&) {}

#else

// One item's block: `rows` = queries * group rows (query-major), padded to whole vectors.
struct Block {
    const AttentionArgs& args;
    const AttentionSequence& sequence;
    const AttentionItem& item;
    AttentionScratch scratch;
    int64_t head_dim = 0;
    int64_t group = 0;
    int32_t rows = 0;
    int32_t padded = 0;  // rows, rounded up to `lanes`
    int32_t lanes = 0;
    int32_t first_limit = 0;  // last slot that the first query sees; the next query sees one more
    int32_t last_limit = 0;
    KvStream* stream = nullptr;
};

// Rows that are computed together from `row` on: at most three vectors.
int32_t group_width(const Block& b, int32_t row) {
    return std::min(b.padded - row, 3 * b.lanes);
}

// As load_queries(), for one query with eight heads to a KV head: 4 x 4 pairs at a time.
void load_eight_heads(const Block& b) {
    const hn::CappedTag<float, 8> d;
    const hn::CappedTag<uint64_t, 4> pairs;
    const auto scale = hn::Set(d, b.args.scale);
    const float* q =
        b.args.q + (b.sequence.first + b.item.query) * b.args.q_stride + b.item.kv_head * 8 * b.head_dim;
    const auto load = [&](const float* row) { return hn::BitCast(pairs, hn::Mul(hn::LoadU(d, row), scale)); };
    for (int64_t e = 0; e < b.head_dim; e += 8) {
        for (int64_t head = 0; head < 8; head += 4) {
            const float* from = q + head * b.head_dim + e;
            const auto r0 = load(from);
            const auto r1 = load(from + b.head_dim);
            const auto r2 = load(from + 2 * b.head_dim);
            const auto r3 = load(from + 3 * b.head_dim);
            const auto even01 = hn::InterleaveLower(pairs, r0, r1);  // pairs 0 and 2 of each
            const auto even23 = hn::InterleaveLower(pairs, r2, r3);
            const auto odd01 = hn::InterleaveUpper(pairs, r0, r1);
            const auto odd23 = hn::InterleaveUpper(pairs, r2, r3);
            auto* to = reinterpret_cast<uint64_t*>(b.scratch.q) + e / 2 * 8 + head;
            hn::StoreU(hn::ConcatLowerLower(pairs, even23, even01), pairs, to);
            hn::StoreU(hn::ConcatLowerLower(pairs, odd23, odd01), pairs, to + 8);
            hn::StoreU(hn::ConcatUpperUpper(pairs, even23, even01), pairs, to + 16);
            hn::StoreU(hn::ConcatUpperUpper(pairs, odd23, odd01), pairs, to + 24);
        }
    }
    std::fill_n(b.scratch.limit, 8, static_cast<float>(b.first_limit));
}

// Each row group's queries lie together, pairs of elements transposed: [head_dim / 2][width][2] from row *
// head_dim on.
void load_queries(const Block& b) {
    const hn::ScalableTag<float> d;
    const auto scale = hn::Set(d, b.args.scale);
    float* scaled = b.scratch.scores;  // not yet in use; as large as a head
    for (int32_t first = 0; first < b.padded; first += 3 * b.lanes) {
        const int32_t width = group_width(b, first);
        const int32_t rows = std::min(width, b.rows - first);
        for (int32_t i = 0; i < rows; ++i) {
            const int64_t query = (first + i) / b.group;
            const int64_t token = b.sequence.first + b.item.query + query;
            const int64_t head = b.item.kv_head * b.group + (first + i) % b.group;
            const float* q = b.args.q + token * b.args.q_stride + head * b.head_dim;
            for (int64_t e = 0; e < b.head_dim; e += static_cast<int64_t>(hn::Lanes(d))) {
                hn::StoreU(hn::Mul(hn::LoadU(d, q + e), scale), d, scaled + e);
            }
            float* pair = b.scratch.q + first * b.head_dim + 2 * i;
            for (int64_t e = 0; e < b.head_dim; e += 2, pair += 2 * width) {
                std::memcpy(pair, scaled + e, 2 * sizeof(float));
            }
            b.scratch.limit[first + i] = static_cast<float>(b.first_limit + query);
        }
        std::fill(b.scratch.limit + first + rows, b.scratch.limit + first + width,
                  std::numeric_limits<float>::max());
        float* padding = b.scratch.q + first * b.head_dim + 2 * rows;
        for (int64_t e = 0; rows < width && e < b.head_dim; e += 2, padding += 2 * width) {
            std::fill_n(padding, 2 * (width - rows), 0.0f);
        }
    }
}

void reset(const Block& b, const AttentionState& state) {
    std::fill_n(state.output, b.rows * b.head_dim, 0.0f);
    std::fill_n(state.sum, b.padded, 0.0f);
    std::fill_n(state.max, b.padded, std::numeric_limits<float>::lowest());
}

// A tile of K or V as float32 [64][head_dim]: where it lies, or its first `keys` slots widened into `buffer`.
const float* load_tile(const Block& b, int64_t offset, int32_t tile, int32_t keys, float* buffer) {
    const int64_t page = b.sequence.pages[static_cast<size_t>(tile)];
    const std::byte* base = b.args.pool + page * b.args.page_stride + offset;
    const int64_t first = b.item.kv_head * kAttentionTile * b.head_dim;
    if (b.args.kv_dtype == DType::kFloat32) {
        return reinterpret_cast<const float*>(base) + first;
    }
    const uint16_t* source = reinterpret_cast<const uint16_t*>(base) + first;
    const hn::ScalableTag<float> d;
    const hn::RebindToUnsigned<decltype(d)> du32;
    const hn::Rebind<uint16_t, decltype(d)> du16;
    const int64_t count = keys * b.head_dim;
    for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
        const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, source + i)));
        hn::StoreU(hn::BitCast(d, bits), d, buffer + i);
    }
    return buffer;
}

template <class D>
void run_tile(D d, const Block& b, const AttentionState& state, int32_t tile) {
    const int32_t slot = tile * kAttentionTile;
    TileArgs t;
    t.head_dim = b.head_dim;
    t.begin = std::max(b.sequence.first_slot - slot, 0);
    t.keys = std::min(kAttentionTile, b.last_limit + 1 - slot);
    t.k = load_tile(b, b.args.k_offset, tile, t.keys, b.scratch.k);
    t.v = load_tile(b, b.args.v_offset, tile, t.keys, b.scratch.v);
    t.scores = b.scratch.scores;
    t.stream = b.stream;
    t.masked = slot + t.keys - 1 > b.first_limit;
    t.first_slot = static_cast<float>(slot);
    for (int32_t row = 0; row < b.padded;) {
        const int32_t width = group_width(b, row);
        t.width = width;
        t.rows = std::min(width, b.rows - row);
        t.q = b.scratch.q + row * b.head_dim;
        t.limit = b.scratch.limit + row;
        t.max = state.max + row;
        t.sum = state.sum + row;
        t.alpha = b.scratch.alpha + row;
        t.output = state.output + row * b.head_dim;
        if (width == 3 * b.lanes) {
            tile_step<3>(d, t);
        } else if (width == 2 * b.lanes) {
            tile_step<2>(d, t);
        } else {
            tile_step<1>(d, t);
        }
        row += width;
    }
}

void run_span(const Block& b, const AttentionState& state, int32_t span) {
    reset(b, state);
    const int32_t first = span * kAttentionSpanTiles;
    const int32_t last = std::min(first + kAttentionSpanTiles - 1, b.last_limit / kAttentionTile);
    for (int32_t tile = first; tile <= last; ++tile) {
        if (b.lanes == 8) {
            run_tile(hn::CappedTag<float, 8>(), b, state, tile);
        } else {
            run_tile(hn::ScalableTag<float>(), b, state, tile);
        }
    }
}

// total <- total and part, in this order. The spans' rows are brought to their common maximum.
void merge_states(const AttentionState& total, const AttentionState& part, int32_t rows, int64_t head_dim) {
    const hn::ScalableTag<float> d;
    for (int32_t row = 0; row < rows; ++row) {
        const float max = part.max[row] > total.max[row] ? part.max[row] : total.max[row];
        const float a = exp_f32(total.max[row] - max);
        const float b = exp_f32(part.max[row] - max);
        total.max[row] = max;
        total.sum[row] = std::fma(part.sum[row], b, total.sum[row] * a);
        float* to = total.output + row * head_dim;
        const float* from = part.output + row * head_dim;
        for (int64_t i = 0; i < head_dim; i += static_cast<int64_t>(hn::Lanes(d))) {
            const auto kept = hn::Mul(hn::LoadU(d, to + i), hn::Set(d, a));
            hn::StoreU(hn::MulAdd(hn::LoadU(d, from + i), hn::Set(d, b), kept), d, to + i);
        }
    }
}

struct OutputBlock {
    const AttentionArgs& args;
    const AttentionItem& item;
    int64_t head_dim = 0;
    int64_t group = 0;
};

void store_output(const OutputBlock& o, const AttentionState& state) {
    const hn::ScalableTag<float> d;
    const AttentionSequence& sequence = o.args.plan->sequences()[static_cast<size_t>(o.item.sequence)];
    for (int64_t row = 0; row < o.item.queries * o.group; ++row) {
        const int64_t token = sequence.first + o.item.query + row / o.group;
        const int64_t head = o.item.kv_head * o.group + row % o.group;
        float* out = o.args.out + token * o.args.out_stride + head * o.head_dim;
        const float inverse = 1.0f / state.sum[row];
        for (int64_t i = 0; i < o.head_dim; i += static_cast<int64_t>(hn::Lanes(d))) {
            const auto value = hn::LoadU(d, state.output + row * o.head_dim + i);
            hn::StoreU(hn::Mul(value, hn::Set(d, inverse)), d, out + i);
        }
    }
}

Block make_block(const AttentionArgs& args, const AttentionItem& item, int thread) {
    const AttentionShape& shape = args.plan->shape();
    const AttentionSequence& sequence = args.plan->sequences()[static_cast<size_t>(item.sequence)];
    Block b{.args = args,
            .sequence = sequence,
            .item = item,
            .scratch = AttentionScratch::at(args.plan->scratch(thread), shape)};
    b.head_dim = shape.head_dim;
    b.group = shape.q_heads / shape.kv_heads;
    b.rows = static_cast<int32_t>(item.queries * b.group);
    b.lanes = b.rows <= 8 ? 8 : static_cast<int32_t>(hn::Lanes(hn::ScalableTag<float>()));
    b.padded = (b.rows + b.lanes - 1) / b.lanes * b.lanes;
    b.first_limit = sequence.first_slot + sequence.position + item.query;
    b.last_limit = b.first_limit + item.queries - 1;
    return b;
}

KvStream::Tiles tiles_of(const AttentionArgs& args, const AttentionItem& item) {
    const AttentionSequence& sequence = args.plan->sequences()[static_cast<size_t>(item.sequence)];
    const int32_t slots = sequence.first_slot + sequence.position + item.query + item.queries;
    const int32_t last = (slots - 1) / kAttentionTile;
    KvStream::Tiles tiles{.args = &args,
                          .sequence = &sequence,
                          .kv_head = item.kv_head,
                          .last = last,
                          .keys = slots - last * kAttentionTile};
    if (item.span >= 0) {
        tiles.tile = item.span * kAttentionSpanTiles;
        if (const int32_t end = tiles.tile + kAttentionSpanTiles; end <= last) {
            tiles.last = end - 1;
            tiles.keys = kAttentionTile;
        }
    }
    return tiles;
}

// `next`: the item that this thread runs then, or null.
void run_item(const AttentionArgs& args, const AttentionItem& item, const AttentionItem* next, int thread) {
    Block b = make_block(args, item, thread);
    KvStream stream(b.scratch.q);
    if (b.rows == 8 && args.kv_dtype == DType::kFloat32) {
        constexpr int64_t kAhead = kAttentionTile;  // of slots; those before came with the item before
        stream.start(tiles_of(args, item), next == nullptr ? KvStream::Tiles{} : tiles_of(args, *next),
                     kAhead * b.head_dim);
    }
    b.stream = &stream;
    if (b.group == 8 && item.queries == 1) {
        load_eight_heads(b);
    } else {
        load_queries(b);
    }
    const int64_t rows_max = attention_rows_max(args.plan->shape());
    const AttentionState state = AttentionState::at(b.scratch.state, rows_max, b.head_dim);
    if (item.span >= 0) {
        run_span(b, state, item.span);
        const AttentionState partial =
            AttentionState::at(args.plan->partials() + item.partial, b.rows, b.head_dim);
        std::copy_n(state.output, b.rows * b.head_dim, partial.output);
        std::copy_n(state.sum, b.rows, partial.sum);
        std::copy_n(state.max, b.rows, partial.max);
        return;
    }
    const AttentionState total = AttentionState::at(b.scratch.total, rows_max, b.head_dim);
    run_span(b, total, 0);
    for (int32_t span = 1; span * kAttentionSpanTiles * kAttentionTile <= b.last_limit; ++span) {
        run_span(b, state, span);
        merge_states(total, state, b.rows, b.head_dim);
    }
    store_output({args, item, b.head_dim, b.group}, total);
}

// item.span = how many partials follow one another from item.partial.
void run_merge(const AttentionArgs& args, const AttentionItem& item) {
    const AttentionShape& shape = args.plan->shape();
    const int64_t group = shape.q_heads / shape.kv_heads;
    const int32_t rows = static_cast<int32_t>(item.queries * group);
    float* memory = args.plan->partials() + item.partial;
    const AttentionState total = AttentionState::at(memory, rows, shape.head_dim);
    for (int32_t span = 1; span < item.span; ++span) {
        memory += attention_state_floats(rows, shape.head_dim);
        merge_states(total, AttentionState::at(memory, rows, shape.head_dim), rows, shape.head_dim);
    }
    store_output({args, item, shape.head_dim, group}, total);
}

#endif  // HWY_TARGET == HWY_SCALAR
bool has_kernels() {
    return HWY_TARGET != HWY_SCALAR;
}
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

namespace {

// Of one thread; the second-level cache has other things to hold.
constexpr int64_t kKeysAheadMax = int64_t{1} << 21;  // bytes

// Whether items wait for memory, so that fetching helps: those of decode. A prompt's are bound by arithmetic.
bool is_decode(const AttentionItem& item) {
    return item.queries == 1;
}

}  // namespace

void attention_keys_ahead(const OpContext& context, const AttentionArgs& args, FetchAhead& ahead) {
    const int64_t threads = context.threads.size();
    ahead.clear(static_cast<int>(threads));
    const std::span<const AttentionItem> items = args.plan->items();
    const AttentionShape& shape = args.plan->shape();
    const int64_t block = kAttentionTile * shape.head_dim * 4;
    if (args.kv_dtype != DType::kFloat32) {
        return;
    }
    int64_t listed = 0;
    for (size_t i = 0; i < items.size() && listed < threads * kKeysAheadMax; ++i) {
        const AttentionItem& item = items[i];
        if (!is_decode(item) || item.span >= 0) {
            return;
        }
        const AttentionSequence& sequence = args.plan->sequences()[static_cast<size_t>(item.sequence)];
        const int32_t tiles = (sequence.first_slot + sequence.position + 1) / kAttentionTile;
        for (int32_t tile = 0; tile < tiles; ++tile, listed += block) {
            const std::byte* page = args.pool + sequence.pages[static_cast<size_t>(tile)] * args.page_stride;
            ahead.add(static_cast<int64_t>(i) % threads, page + args.k_offset + item.kv_head * block);
        }
    }
}

HWY_EXPORT(run_item);
HWY_EXPORT(run_merge);
HWY_EXPORT(has_kernels);

void attention(OpContext& context, const AttentionArgs& args) {
    check(args.kv_dtype == DType::kFloat32 || args.kv_dtype == DType::kBFloat16,
          "attention: kv_dtype must be float32 or bfloat16");
    if (!HWY_DYNAMIC_DISPATCH(has_kernels)()) {
        attention_ref(args);
        return;
    }
    const std::span<const AttentionItem> items = args.plan->items();
    const auto item_kernel = HWY_DYNAMIC_DISPATCH(run_item);
    const auto count = static_cast<int64_t>(items.size());
    // Items lie in falling order of cost. A thread's next one is that after the other threads' next ones.
    context.threads.parallel_for(count, [&](int64_t i, int thread) {
        const int64_t after = i + context.threads.size();
        const AttentionItem* next = after < count ? &items[static_cast<size_t>(after)] : nullptr;
        item_kernel(args, items[static_cast<size_t>(i)], next != nullptr && is_decode(*next) ? next : nullptr,
                    thread);
    });
    const std::span<const AttentionItem> merges = args.plan->merges();
    const auto merge_kernel = HWY_DYNAMIC_DISPATCH(run_merge);
    context.threads.parallel_for(static_cast<int64_t>(merges.size()),
                                 [&](int64_t i, int) { merge_kernel(args, merges[static_cast<size_t>(i)]); });
}

}  // namespace tessera
#endif  // HWY_ONCE
