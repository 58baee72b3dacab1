// The draw of a row that a cluster holds. Sums are of integers, so their order does not matter and the token
// is the CPU backend's.
#pragma once

#include "ops/sample/cuda/sample_cluster.cuh"

namespace tessera::cuda {

// What is kept: tokens with a key above `key`, and the first `ties` in order of ids of those that equal it.
struct SampleCut {
    uint32_t key = 0;
    uint64_t ties = ~uint64_t{0};
};

struct SampleDraw {
    const SampleSlot& slot;
    SampleWeights weights;
    uint64_t fraction = 0;  // of 2^64: where in the mass the token lies

    __device__ uint64_t point(uint64_t total) const { return __umul64hi(fraction, total); }
};

// The sum of the lanes' values up to this one.
__device__ inline uint64_t warp_scan(uint64_t value, int lane) {
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint64_t other = __shfl_up_sync(kFullWarp, value, offset);
        value += lane >= offset ? other : 0;
    }
    return value;
}

// Draws among the candidates of the first block, whose values are scaled; it runs this whole. `total`: the
// mass of what top_k leaves when it is off. False when top_p reaches beyond the candidates.
__device__ inline bool draw_from_candidates(const SampleRow& row, const SampleFound& found,
                                            const SampleDraw& draw, uint64_t total) {
    SampleShared& shared = row.shared;
    const SampleSlot& slot = draw.slot;
    const uint64_t* tokens = shared.sorted.tokens;
    uint64_t* before = shared.sorted.before;
    const auto t = static_cast<int32_t>(threadIdx.x);
    const int32_t count = found.count;
    sort_candidates(row, found);
    const uint64_t own = t < count ? draw.weights.of_scaled(ranked_value(tokens[t])) : 0;
    const uint64_t scan = warp_scan(own, row.lane);
    if (row.lane == kWarp - 1) {
        shared.reduce[row.warp] = scan;
    }
    __syncthreads();
    if (t <= count) {
        uint64_t sum = scan - own;
        for (int w = 0; w < row.warp; ++w) {
            sum += shared.reduce[w];
        }
        before[t] = sum;
    }
    __syncthreads();
    // Equal values rank next to each other: the low words do not matter.
    const uint64_t least =
        slot.top_k > 0 && count >= slot.top_k ? tokens[slot.top_k - 1] & ~uint64_t{0xFFFFFFFF} : 0;
    bool kept = t < count && tokens[t] >= least;
    int32_t left = __syncthreads_count(kept ? 1 : 0);
    if (slot.top_p < 1) {
        const uint64_t mass = slot.top_k > 0 ? before[left] : total;
        const double target = static_cast<double>(slot.top_p) * static_cast<double>(mass);
        if (static_cast<double>(before[left]) < target) {
            return false;
        }
        kept = kept && (t == 0 || static_cast<double>(before[t]) < target);
        left = __syncthreads_count(kept ? 1 : 0);
    }
    // The running sum in order of ids, four threads a candidate.
    const uint64_t point = draw.point(before[left]);
    for (int32_t c0 = row.warp * (kWarp / 4); c0 < left; c0 += kSampleThreads / 4) {
        const int32_t c = min(c0 + row.lane / 4, left - 1);
        const auto id = static_cast<uint32_t>(tokens[c]);  // the larger, the lower the token's id
        uint64_t sum = 0;
#pragma unroll 4
        for (int32_t j = row.lane % 4; j < left; j += 4) {
            sum += static_cast<uint32_t>(tokens[j]) > id ? before[j + 1] - before[j] : 0;
        }
        sum = warp_reduce<4>(sum, Sum{});
        if (sum <= point && point < sum + (before[c + 1] - before[c])) {
            shared.token = ranked_index(tokens[c]);
        }
    }
    __syncthreads();
    return true;
}

// The functions from here on to draw_by_cut() are the slow way: the row's logits have been scaled in place.

// The largest key for which reached(sum over tokens with at least this key of f(value)) holds; it must hold
// for key 0. 32 passes over the row.
template <typename F, typename Reached>
__device__ inline uint32_t bisect_key(SampleRow& row, F f, Reached reached) {
    uint32_t key = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        uint64_t sum = 0;
        row.for_each([&](float x, int32_t) { sum += ordered_bits(x) >= (key | bit) ? f(x) : 0; });
        key |= reached(row.cluster_reduce(sum, Sum{})) ? bit : 0;
    }
    return key;
}

__device__ inline SampleCut find_cut(SampleRow& row, const SampleDraw& draw) {
    const SampleSlot& slot = draw.slot;
    const auto weight = [&](float x) { return uint64_t{draw.weights.of_scaled(x)}; };
    SampleCut cut;
    if (slot.top_k > 0) {
        const auto k = static_cast<uint64_t>(slot.top_k);
        cut.key = bisect_key(
            row, [&](float x) { return draw.weights.of_scaled(x) > 0 ? uint64_t{1} : uint64_t{0}; },
            [&](uint64_t count) { return count >= k; });
    }
    if (slot.top_p >= 1) {
        return cut;
    }
    uint64_t mass = 0;
    row.for_each([&](float x, int32_t) { mass += ordered_bits(x) >= cut.key ? weight(x) : 0; });
    const double target =
        static_cast<double>(slot.top_p) * static_cast<double>(row.cluster_reduce(mass, Sum{}));
    const auto reached = [&](uint64_t sum) { return static_cast<double>(sum) >= target; };
    const uint32_t key =
        bisect_key(row, [&](float x) { return ordered_bits(x) >= cut.key ? weight(x) : 0; }, reached);
    cut.key = max(cut.key, key);
    uint64_t above = 0;
    uint64_t ties = 0;
    row.for_each([&](float x, int32_t) {
        above += ordered_bits(x) > cut.key ? weight(x) : 0;
        ties += ordered_bits(x) == cut.key ? 1 : 0;
    });
    above = row.cluster_reduce(above, Sum{});
    uint64_t low = 1;
    uint64_t high = max(row.cluster_reduce(ties, Sum{}), uint64_t{1});
    const uint64_t one = weight(from_ordered_bits(cut.key));
    while (low < high) {  // the fewest ties that reach the target
        const uint64_t middle = (low + high) / 2;
        if (reached(above + middle * one)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    cut.ties = low;
    return cut;
}

// The sum over the segments before `segment`, and over all.
struct SegmentSums {
    uint64_t before = 0;
    uint64_t total = 0;
};
__device__ inline SegmentSums segment_sums(const uint64_t (&values)[kSampleSegments], int segment, int lane) {
    SegmentSums sums;
    for (int j = lane; j < kSampleSegments; j += kWarp) {
        sums.total += values[j];
        sums.before += j < segment ? values[j] : 0;
    }
    return {warp_reduce(sums.before, Sum{}), warp_reduce(sums.total, Sum{})};
}

// The token of the segment that holds `point`, by this warp. `ties` of the segment are kept.
__device__ inline int32_t find_in_segment(const SampleRow& row, const SampleDraw& draw, const SampleCut& cut,
                                          uint64_t ties, uint64_t point) {
    uint64_t before = 0;
    for (int32_t i0 = 0; i0 < row.count; i0 += kWarp) {
        const bool in = i0 + row.lane < row.count;
        const float x = in ? row.x[i0 + row.lane] : minus_infinity();
        const uint32_t key = ordered_bits(x);
        const uint32_t tie_votes = __ballot_sync(kFullWarp, in && key == cut.key);
        const int earlier = __popc(tie_votes & ((1u << row.lane) - 1));
        const bool kept = key > cut.key || (key == cut.key && static_cast<uint64_t>(earlier) < ties);
        ties -= min(ties, static_cast<uint64_t>(__popc(tie_votes)));
        const uint64_t sum = before + warp_scan(in && kept ? draw.weights.of_scaled(x) : 0, row.lane);
        const uint32_t beyond = __ballot_sync(kFullWarp, sum > point);
        if (beyond != 0) {
            return row.first + i0 + __ffs(static_cast<int>(beyond)) - 1;
        }
        before = __shfl_sync(kFullWarp, sum, kWarp - 1);
    }
    return -1;
}

// Draws from all tokens that the cut keeps. The warp that owns the token gets it, every other -1.
__device__ inline int32_t draw_by_cut(SampleRow& row, const SampleDraw& draw, const SampleCut& cut) {
    SampleShared& shared = row.shared;
    uint64_t above = 0;
    uint64_t ties = 0;
    row.for_each([&](float x, int32_t) {
        const uint32_t key = ordered_bits(x);
        above += key > cut.key ? draw.weights.of_scaled(x) : 0;
        ties += key == cut.key ? 1 : 0;
    });
    above = warp_reduce(above, Sum{});
    ties = warp_reduce(ties, Sum{});
    if (cut.key > 0) {
        row.publish(shared.mass, ties);
        row.cluster.sync();
        const uint64_t earlier = segment_sums(shared.mass, row.segment(), row.lane).before;
        ties = min(ties, cut.ties - min(cut.ties, earlier));
        above += ties * draw.weights.of_scaled(from_ordered_bits(cut.key));
        row.cluster.sync();  // all have read
    }
    row.publish(shared.mass, above);
    row.cluster.sync();
    const SegmentSums sums = segment_sums(shared.mass, row.segment(), row.lane);
    const uint64_t point = draw.point(sums.total);
    if (point < sums.before || point >= sums.before + above) {
        return -1;
    }
    return find_in_segment(row, draw, cut, ties, point - sums.before);
}

// The sum of the weights of a warp's four times 32 logits. Each lane's is at most 2^32.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
    const auto low = static_cast<uint32_t>(value) & 0xFFFFu;
    const auto high = static_cast<uint32_t>(value >> 16);
    return (uint64_t{__reduce_add_sync(kFullWarp, high)} << 16) + __reduce_add_sync(kFullWarp, low);
}

// The sum of the weights of the segment's tokens, and of each pass over it into `passes`. Every lane gets it.
__device__ inline uint64_t segment_mass(const SampleRow& row, const SampleWeights& weights) {
    uint64_t* passes = row.shared.passes[row.warp];
    uint64_t sum = 0;
    for (int32_t i = 0; i < row.count; i += kSamplePass) {
        uint32_t four[4];
        weights.of_four(*reinterpret_cast<const float4*>(row.x + i + 4 * row.lane), four);
        const uint64_t all = warp_sum(uint64_t{four[0]} + four[1] + four[2] + four[3]);
        if (row.lane == 0) {
            passes[i / kSamplePass] = all;
        }
        sum += all;
    }
    __syncwarp();
    return sum;
}

// The token of the segment, of which nothing is cut, that holds `point`; after segment_mass().
__device__ inline int32_t find_uncut(const SampleRow& row, const SampleWeights& weights, uint64_t point) {
    const uint64_t* passes = row.shared.passes[row.warp];
    int32_t first = 0;
    while (point >= passes[first / kSamplePass]) {
        point -= passes[first / kSamplePass];
        first += kSamplePass;
    }
    uint32_t four[4];
    weights.of_four(*reinterpret_cast<const float4*>(row.x + first + 4 * row.lane), four);
    const uint64_t own = uint64_t{four[0]} + four[1] + four[2] + four[3];
    uint64_t sum = warp_scan(own, row.lane);
    const int owner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, sum > point))) - 1;
    sum -= own;
    int32_t e = 0;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
        sum += four[j];
        e += sum <= point ? 1 : 0;
    }
    return row.first + first + 4 * owner + __shfl_sync(kFullWarp, e, owner);
}

// Draws from all tokens. The warp that owns the token gets it, every other -1.
__device__ inline int32_t draw_uncut(SampleRow& row, const SampleDraw& draw) {
    const uint64_t mass = segment_mass(row, draw.weights);
    row.publish(row.shared.mass, mass);
    row.cluster.sync();
    const SegmentSums sums = segment_sums(row.shared.mass, row.segment(), row.lane);
    const uint64_t point = draw.point(sums.total);
    if (point < sums.before || point >= sums.before + mass) {
        return -1;
    }
    return find_uncut(row, draw.weights, point - sums.before);
}

}  // namespace tessera::cuda
