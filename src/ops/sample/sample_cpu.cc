#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "ops/common/simd_targets.h"
#include "ops/sample/sample.h"
#include "ops/sample/sample_common.h"
#include "ops/sample/sample_filter.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sample/sample_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/common/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET == HWY_SCALAR

void sample_row(const SampleRowArgs&, const SampleMemory&, SampleRowResult&) {}

#else

namespace hn = hwy::HWY_NAMESPACE;

// Copies the logits to memory.x, padded with -inf. False when one is a NaN or +inf.
bool load_logits(const SampleRowArgs& row, const SampleMemory& memory) {
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    std::fill(memory.x + memory.vocab, memory.x + memory.padded, kMinusInf);
    const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    auto good = hn::Eq(infinity, infinity);
    int64_t i = 0;
    for (; i + lanes <= memory.vocab; i += lanes) {
        const auto value = hn::LoadU(d, row.logits + i);
        good = hn::And(good, hn::Lt(value, infinity));
        hn::StoreU(value, d, memory.x + i);
    }
    bool finite = hn::AllTrue(d, good);
    for (; i < memory.vocab; ++i) {
        memory.x[i] = row.logits[i];
        finite = finite && row.logits[i] < std::numeric_limits<float>::infinity();
    }
    return finite;
}

float max_of(const SampleMemory& memory, int64_t begin, int64_t end) {
    const hn::ScalableTag<float> d;
    auto max = hn::Set(d, kMinusInf);
    for (int64_t i = begin; i < end; i += static_cast<int64_t>(hn::Lanes(d))) {
        max = hn::Max(max, hn::LoadU(d, memory.x + i));
    }
    return hn::GetLane(hn::MaxOfLanes(d, max));
}

// The first index whose logit is `value`.
int32_t find_value(const SampleMemory& memory, float value) {
    const hn::ScalableTag<float> d;
    const auto wanted = hn::Set(d, value);
    for (int64_t i = 0; i < memory.padded; i += static_cast<int64_t>(hn::Lanes(d))) {
        const intptr_t found = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, memory.x + i), wanted));
        if (found >= 0) {
            return static_cast<int32_t>(i + found);
        }
    }
    return -1;
}

// log(sum of exp) in float64 over 16 lanes, folded in a fixed order: the same on every instruction set.
double log_sum_exp(const SampleMemory& memory, float max) {
    const hn::ScalableTag<float> d;
    const hn::CappedTag<double, 4> dd;
    const hn::Rebind<float, decltype(dd)> df;
    const auto shift = hn::Set(d, max);
    auto s0 = hn::Zero(dd);
    auto s1 = s0, s2 = s0, s3 = s0;
    alignas(64) float p[16];
    for (int64_t i = 0; i < memory.padded; i += 16) {
        for (size_t j = 0; j < 16; j += hn::Lanes(d)) {
            hn::StoreU(exp_simd(d, hn::Sub(hn::LoadU(d, memory.x + i + j), shift)), d, p + j);
        }
        s0 = hn::Add(s0, hn::PromoteTo(dd, hn::LoadU(df, p)));
        s1 = hn::Add(s1, hn::PromoteTo(dd, hn::LoadU(df, p + 4)));
        s2 = hn::Add(s2, hn::PromoteTo(dd, hn::LoadU(df, p + 8)));
        s3 = hn::Add(s3, hn::PromoteTo(dd, hn::LoadU(df, p + 12)));
    }
    alignas(64) double sums[4];
    hn::StoreU(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), dd, sums);
    return max + std::log((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The `count` largest raw logits, best first, ties in order of ids.
void find_top(const SampleMemory& memory, int32_t count, SampleRowResult& result) {
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    float least = kMinusInf;  // what a token must exceed to enter
    for (int64_t i = 0; i < memory.padded; i += lanes) {
        if (hn::AllFalse(d, hn::Gt(hn::LoadU(d, memory.x + i), hn::Set(d, least)))) {
            continue;
        }
        for (int64_t j = i; j < i + lanes; ++j) {
            const float value = memory.x[j];
            if (!(value > least)) {
                continue;
            }
            int32_t place = std::min(result.top_count, count - 1);
            for (; place > 0 && result.top[static_cast<size_t>(place) - 1].logprob < value; --place) {
                result.top[static_cast<size_t>(place)] = result.top[static_cast<size_t>(place) - 1];
            }
            result.top[static_cast<size_t>(place)] = {static_cast<int32_t>(j), value};
            result.top_count = std::min(result.top_count + 1, count);
            least =
                result.top_count == count ? result.top[static_cast<size_t>(count) - 1].logprob : kMinusInf;
        }
    }
}

void report_top(const SampleMemory& memory, const SampleRowArgs& row, double log_sum,
                SampleRowResult& result) {
    const int32_t count =
        static_cast<int32_t>(std::min<int64_t>(std::min(row.top, kSampleTopMax), memory.vocab));
    if (count <= 0) {
        return;
    }
    find_top(memory, count, result);
    for (int32_t i = 0; i < result.top_count; ++i) {
        float& value = result.top[static_cast<size_t>(i)].logprob;
        value = static_cast<float>(value - log_sum);
    }
}

void apply_allowed(const SampleRowArgs& row, const SampleMemory& memory) {
    for (int64_t word = 0; word * 32 < memory.vocab; ++word) {
        for (uint32_t denied = ~row.allowed[word]; denied != 0; denied &= denied - 1) {
            const int64_t id = word * 32 + std::countr_zero(denied);
            if (id < memory.vocab) {
                memory.x[id] = kMinusInf;
            }
        }
    }
}

// Whole groups of 16 ids that were neither seen nor generated are passed over.
void apply_penalties(const SampleRowArgs& row, const SampleMemory& memory) {
    const hn::CappedTag<int32_t, 8> d;
    for (int64_t i = 0; i < memory.vocab; i += 16) {
        const int64_t end = std::min(i + 16, memory.vocab);
        const bool whole = i + 16 <= memory.vocab;
        bool touched = row.prompt_seen != nullptr && (row.prompt_seen[i / 64] >> (i % 64) & 0xFFFF) != 0;
        if (!touched && row.output_counts != nullptr) {
            touched = !whole;
            if (whole) {
                const auto counts =
                    hn::Or(hn::LoadU(d, row.output_counts + i), hn::LoadU(d, row.output_counts + i + 8));
                touched = !hn::AllTrue(d, hn::Eq(counts, hn::Zero(d)));
            }
        }
        for (int64_t id = i; touched && id < end; ++id) {
            const bool in_prompt = row.prompt_seen != nullptr && bit_is_set(row.prompt_seen, id);
            const int32_t count = row.output_counts == nullptr ? 0 : row.output_counts[id];
            memory.x[id] = penalised(memory.x[id], in_prompt, count, row);
        }
    }
}

// SampleWeights of a vector, not yet rounded.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V unrounded_weights(D d, const SampleWeights& weigh, V x, V best) {
    using C = SampleWeightConstants;
    const hn::RebindToUnsigned<D> du;
    const V rate = hn::Set(d, weigh.rate());
    const V shifted_zero = hn::Set(d, C::kRound + C::kBits);
    const V t = hn::Max(hn::Sub(x, best), hn::Set(d, weigh.lowest()));
    const V shifted = hn::MulAdd(t, rate, shifted_zero);
    const V r = hn::MulSub(t, rate, hn::Sub(shifted, shifted_zero));
    static_assert(C::kDegree == 4);
    V p = hn::Set(d, C::kPoly[4]);
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[3]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[2]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[1]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[0]));
    return hn::BitCast(d, hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
}

// A tile's sum of weights, as sums of their low and their high 16 bits: neither overflows within a tile.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void add_halves(D du, V weight, V& low, V& high) {
    low = hn::Add(low, hn::And(weight, hn::Set(du, 0xFFFF)));
    high = hn::Add(high, hn::ShiftRight<16>(weight));
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE uint64_t sum_of_halves(D du, V low, V high) {
    const uint64_t low_sum = hn::GetLane(hn::SumOfLanes(du, low));
    const uint64_t high_sum = hn::GetLane(hn::SumOfLanes(du, high));
    return low_sum + (high_sum << 16);
}

// The integer weights of a tile's tokens, and their sum.
void weigh_tile(const SampleRowArgs& row, const SampleMemory& memory, int64_t tile, float best, float min_p) {
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    const hn::RebindToUnsigned<decltype(d)> du;
    const SampleWeights weigh(row.temperature);
    const auto most = hn::Set(d, best);
    const auto least = hn::Set(d, min_p * (1 << SampleWeightConstants::kBits));
    auto low = hn::Zero(du);
    auto high = low;
    const int64_t end = std::min((tile + 1) * kSampleTile, memory.padded);
    for (int64_t i = tile * kSampleTile; i < end; i += static_cast<int64_t>(hn::Lanes(d))) {
        const auto p = unrounded_weights(d, weigh, hn::LoadU(d, memory.x + i), most);
        const auto weight = hn::NearestInt(hn::IfThenZeroElse(hn::Lt(p, least), p));
        hn::StoreU(weight, di, memory.weights + i);
        add_halves(du, hn::BitCast(du, weight), low, high);
    }
    memory.tile_sums[tile] = sum_of_halves(du, low, high);
}

// Weights by each tile's best.
void weigh_by_tiles(const SampleRowArgs& row, const SampleMemory& memory) {
    for (int64_t tile = 0; tile < memory.tiles(); ++tile) {
        const int64_t first = tile * kSampleTile;
        const float best = max_of(memory, first, std::min(first + kSampleTile, memory.padded));
        memory.tile_best[tile] = best;
        memory.tile_sums[tile] = 0;
        if (best > kMinusInf) {
            weigh_tile(row, memory, tile, best, 0);
            const int64_t count = std::min<int64_t>(kSampleTile, memory.padded - first);
            memory.tile_sums[tile] = sum_of_runs(memory.weights + first, count);
        }
    }
}

// Which of kSampleBuckets a token falls into by its distance from the best; weightless tokens into the last.
void assign_buckets(const SampleRowArgs& row, const SampleMemory& memory, float max) {
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    const auto top = hn::Set(d, max);
    const auto scale = hn::Set(d, SampleWeights(row.temperature).rate() * kSampleBucketScale);
    const auto last = hn::Set(d, static_cast<float>(kSampleBuckets - 2));
    for (int64_t i = 0; i < memory.padded; i += static_cast<int64_t>(hn::Lanes(d))) {
        const auto distance = hn::Mul(hn::Sub(top, hn::LoadU(d, memory.x + i)), scale);
        const auto bucket = hn::ConvertTo(di, hn::Min(distance, last));
        const auto none = hn::Eq(hn::LoadU(di, memory.weights + i), hn::Zero(di));
        hn::StoreU(hn::IfThenElse(none, hn::Set(di, kSampleBuckets - 1), bucket), di, memory.buckets + i);
    }
}

// Zeroes the weights that the cut drops, and sums the tiles anew.
void apply_cut(const SampleMemory& memory, const SampleCut& cut) {
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    const hn::RebindToUnsigned<decltype(d)> du;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto logit = hn::Set(d, cut.logit);
    const auto last_id = hn::Set(di, cut.id);
    for (int64_t tile = 0; tile < memory.tiles(); ++tile) {
        auto low = hn::Zero(du);
        auto high = low;
        const int64_t end = std::min((tile + 1) * kSampleTile, memory.padded);
        for (int64_t i = tile * kSampleTile; i < end; i += lanes) {
            const auto x = hn::LoadU(d, memory.x + i);
            const auto id = hn::Iota(di, static_cast<int32_t>(i));
            const auto tie = hn::And(hn::RebindMask(di, hn::Eq(x, logit)), hn::Not(hn::Gt(id, last_id)));
            const auto keep = hn::Or(hn::RebindMask(di, hn::Gt(x, logit)), tie);
            const auto weight = hn::IfThenElseZero(keep, hn::LoadU(di, memory.weights + i));
            hn::StoreU(weight, di, memory.weights + i);
            add_halves(du, hn::BitCast(du, weight), low, high);
        }
        memory.tile_sums[tile] = sum_of_halves(du, low, high);
    }
}

int32_t choose(const SampleRowArgs& row, const SampleMemory& memory, float max) {
    if (is_greedy(row)) {
        return find_value(memory, max);
    }
    const int64_t vocab = memory.vocab;
    double whole = 0;
    if (sums_tiles(row, vocab)) {
        weigh_by_tiles(row, memory);
        if (row.top_p >= 1) {
            return draw_by_tiles(row, memory, max);
        }
        whole = whole_of_tiles(tile_masses(row, memory, max, memory.bucket_mass));
    }
    for (int64_t tile = 0; tile < memory.tiles(); ++tile) {
        weigh_tile(row, memory, tile, max, row.min_p);
    }
    if (top_k_of(row, vocab) > 0 || row.top_p < 1) {
        assign_buckets(row, memory, max);
        apply_cut(memory, find_cut(row, memory, whole));
    }
    return draw_token(row, memory);
}

void sample_row(const SampleRowArgs& row, const SampleMemory& memory, SampleRowResult& result) {
    result = SampleRowResult();
    if (!load_logits(row, memory)) {
        result.error = SampleError::kNotFinite;
        return;
    }
    double log_sum = 0;
    if (row.logprobs) {
        log_sum = log_sum_exp(memory, max_of(memory, 0, memory.padded));
        report_top(memory, row, log_sum, result);
    }
    if (row.forced_token >= 0) {
        result.token = row.forced_token;
    } else {
        if (row.allowed != nullptr) {
            apply_allowed(row, memory);
        }
        apply_named_edits(row, memory.vocab, memory.x);
        if (has_penalties(row)) {
            apply_penalties(row, memory);
        }
        const float max = max_of(memory, 0, memory.padded);
        if (max == kMinusInf) {
            result = SampleRowResult{.error = SampleError::kNoToken};
            return;
        }
        result.token = choose(row, memory, max);
    }
    if (row.logprobs) {
        result.logprob = static_cast<float>(row.logits[result.token] - log_sum);
    }
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

HWY_EXPORT(sample_row);
HWY_EXPORT(has_kernels);

void sample(OpContext& context, const SampleArgs& args) {
    check(args.rows.size() == args.results.size(), "sample: one result for each row");
    check(args.workspace != nullptr && args.workspace->vocab() == args.vocab,
          "sample: workspace of another vocab");
    if (!HWY_DYNAMIC_DISPATCH(has_kernels)()) {
        sample_ref(args);
        return;
    }
    const auto kernel = HWY_DYNAMIC_DISPATCH(sample_row);
    context.threads.parallel_for(static_cast<int64_t>(args.rows.size()), [&](int64_t i, int thread) {
        const SampleMemory memory = SampleMemory::at(args.workspace->thread_memory(thread), args.vocab);
        kernel(args.rows[static_cast<size_t>(i)], memory, args.results[static_cast<size_t>(i)]);
    });
}

}  // namespace tessera
#endif  // HWY_ONCE
