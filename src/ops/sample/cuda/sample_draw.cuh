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
    float max = 0;  // the largest scaled logit

    __device__ uint32_t weight(float x) const { return token_weight(x, max, slot.min_p); }
    __device__ uint64_t point(uint64_t total) const {
        return draw_point(slot.seed, static_cast<uint64_t>(slot.outputs), total);
    }
};

// The sum of the lanes' values up to this one.
__device__ inline uint64_t warp_scan(uint64_t value, int lane) {
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint64_t other = __shfl_up_sync(kFullWarp, value, offset);
        value += lane >= offset ? other : 0;
    }
    return value;
}

// Draws among the sorted candidates of the first block, which runs this whole. `total`: the mass of what
// top_k leaves when it is off. False when top_p reaches beyond the candidates.
__device__ inline bool draw_from_candidates(SampleShared& shared, int32_t count, const SampleDraw& draw,
                                            uint64_t total) {
    const auto t = static_cast<int32_t>(threadIdx.x);
    sort_candidates(shared, count);
    if (t < kWarp) {
        uint64_t sum = 0;
        for (int32_t i = t; i < (count + kWarp - 1) / kWarp * kWarp; i += kWarp) {
            const uint64_t own = i < count ? draw.weight(from_ordered_bits(shared.sorted[i].key)) : 0;
            const uint64_t scan = warp_scan(own, t);
            shared.before[i < count ? i : count] = sum + scan - own;  // lanes beyond agree on the total
            sum += __shfl_sync(kFullWarp, scan, kWarp - 1);
        }
        if (t == 0) {
            shared.before[count] = sum;
        }
    }
    __syncthreads();
    const SampleSlot& slot = draw.slot;
    const uint32_t least = slot.top_k > 0 && count >= slot.top_k ? shared.sorted[slot.top_k - 1].key : 0;
    bool kept = t < count && shared.sorted[t].key >= least;
    int32_t left = __syncthreads_count(kept ? 1 : 0);
    if (slot.top_p < 1) {
        const uint64_t mass = slot.top_k > 0 ? shared.before[left] : total;
        const double target = static_cast<double>(slot.top_p) * static_cast<double>(mass);
        if (static_cast<double>(shared.before[left]) < target) {
            return false;
        }
        kept = kept && (t == 0 || static_cast<double>(shared.before[t]) < target);
        left = __syncthreads_count(kept ? 1 : 0);
    }
    const uint64_t point = draw.point(shared.before[left]);
    if (kept) {
        const int32_t id = shared.sorted[t].id;
        uint64_t before = 0;
        for (int32_t j = 0; j < left; ++j) {
            before += shared.sorted[j].id < id ? shared.before[j + 1] - shared.before[j] : 0;
        }
        if (before <= point && point < before + (shared.before[t + 1] - shared.before[t])) {
            shared.token = id;
        }
    }
    __syncthreads();
    return true;
}

// The largest key for which reached(sum over tokens with at least this key of f(value)) holds; it must hold
// for key 0. 32 passes over the row: the slow way, for any cut.
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
    const auto weight = [&](float x) { return uint64_t{draw.weight(x)}; };
    SampleCut cut;
    if (slot.top_k > 0) {
        const auto k = static_cast<uint64_t>(slot.top_k);
        cut.key = bisect_key(
            row, [&](float x) { return draw.weight(x) > 0 ? uint64_t{1} : uint64_t{0}; },
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
        const uint64_t sum = before + warp_scan(in && kept ? draw.weight(x) : 0, row.lane);
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
        above += key > cut.key ? draw.weight(x) : 0;
        ties += key == cut.key ? 1 : 0;
    });
    above = warp_reduce(above, Sum{});
    ties = warp_reduce(ties, Sum{});
    if (cut.key > 0) {
        row.publish(shared.mass, ties);
        row.cluster.sync();
        const uint64_t earlier = segment_sums(shared.mass, row.segment(), row.lane).before;
        ties = min(ties, cut.ties - min(cut.ties, earlier));
        above += ties * draw.weight(from_ordered_bits(cut.key));
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

}  // namespace tessera::cuda
