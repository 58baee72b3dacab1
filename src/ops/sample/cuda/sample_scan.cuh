// The sampler's first kernel: reads every logit once, over many blocks a row.
#pragma once

#include "ops/common/cuda/reduce.cuh"
#include "ops/sample/cuda/sample_row.cuh"

namespace tessera::cuda {

inline constexpr int kScanThreads = 256;

struct ScanRange {
    int64_t begin = 0;
    int64_t end = 0;
};

// The edits of one piece of a row, in the order of sample.h, from the logits into `x`. Each id belongs to one
// thread, which does all that concerns it; a barrier lies between the steps that split the ids differently.
__device__ inline void edit_piece(const SampleCudaArgs& args, const SampleSlot& slot, int64_t row,
                                  ScanRange range, float* x) {
    const float* logits = args.logits + row * args.logits_stride;
    const int32_t slot_id = args.row_slots[row];
    const uint32_t* allowed =
        args.allowed == nullptr ? nullptr : args.allowed + row * ((args.vocab + 31) / 32);
    for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kScanThreads) {
        const bool may = allowed == nullptr || (allowed[i / 32] >> (i % 32) & 1) != 0;
        x[i] = may ? logits[i] : minus_infinity();
    }
    __syncthreads();
    const auto mine = [&](int32_t id) {
        return id >= range.begin && id < range.end && id % kScanThreads == static_cast<int>(threadIdx.x);
    };
    for (int32_t i = 0; i < slot.stop_count && slot.outputs < slot.min_tokens; ++i) {
        if (mine(slot.stop_ids[i])) {
            x[slot.stop_ids[i]] = minus_infinity();
        }
    }
    const int32_t* bias_ids = args.slots.bias_ids + static_cast<int64_t>(slot_id) * kSampleBiasMax;
    const float* bias_values = args.slots.bias_values + static_cast<int64_t>(slot_id) * kSampleBiasMax;
    for (int32_t i = 0; i < slot.bias_count; ++i) {
        if (mine(bias_ids[i])) {
            const float biased = __fadd_rn(x[bias_ids[i]], bias_values[i]);
            x[bias_ids[i]] = kSampleLogitMax < biased ? kSampleLogitMax : biased;
        }
    }
    __syncthreads();
    if (!slot.has_penalties()) {
        return;
    }
    const uint64_t* seen = args.slots.prompt_seen + slot_id * ((args.vocab + 63) / 64);
    const int32_t* counts = args.slots.output_counts + slot_id * args.vocab;
    for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kScanThreads) {
        x[i] = penalised(x[i], (seen[i / 64] >> (i % 64) & 1) != 0, counts[i], slot);
    }
}

// The best of this thread's raw logits that rank below `limit`; 0 = none.
__device__ inline uint64_t best_below(const float* logits, ScanRange range, uint64_t limit) {
    uint64_t best = 0;
    for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kScanThreads) {
        const uint64_t rank = ranked(logits[i], static_cast<uint32_t>(i));
        best = rank < limit && rank > best && logits[i] != minus_infinity() ? rank : best;
    }
    return best;
}

// The `count` best raw logits of the piece. Each round takes the best of all threads; its owner looks for its
// next.
__device__ inline void find_top(const float* logits, ScanRange range, int32_t count, uint64_t* shared,
                                SamplePart& part) {
    uint64_t mine = count > 0 ? best_below(logits, range, ~uint64_t{0}) : 0;
    for (int32_t n = 0; n < kSampleTopMax; ++n) {
        const uint64_t best = n < count ? block_reduce(mine, Max{}, uint64_t{0}, shared) : 0;
        if (threadIdx.x == 0) {
            part.top[n] = best;
        }
        if (best != 0 && mine == best) {
            mine = best_below(logits, range, best);
        }
    }
}

// Roofline: 4 bytes a logit, so bandwidth; rows with edits write and read it again, rows with
// log-probabilities read it again from the cache. Block (p, r) does piece p of row r.
__global__ void __launch_bounds__(kScanThreads)
    sample_scan_kernel(SampleCudaArgs args, SampleScratch scratch) {
    __shared__ uint64_t shared[kWarp];
    __shared__ double shared_sum[kWarp];
    const int64_t row = blockIdx.y;
    if (args.row_slots[row] < 0) {
        return;
    }
    const SampleSlot& slot = args.slots.slot[args.row_slots[row]];
    const int64_t piece = (args.vocab + kSampleParts - 1) / kSampleParts;
    const ScanRange range{min(blockIdx.x * piece, args.vocab), min((blockIdx.x + 1) * piece, args.vocab)};
    SamplePart& part = scratch.parts[row * kSampleParts + blockIdx.x];
    const float* logits = args.logits + row * args.logits_stride;

    uint64_t best = 0;
    bool finite = true;
    for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kScanThreads) {
        const float value = logits[i];
        finite = finite && value < -minus_infinity();  // false for a NaN too
        const uint64_t rank = ranked(value, static_cast<uint32_t>(i));
        best = rank > best ? rank : best;
    }
    const bool not_finite = __syncthreads_or(!finite ? 1 : 0) != 0;
    const uint64_t raw_best = block_reduce(best, Max{}, uint64_t{0}, shared);
    uint64_t edited_best = raw_best;
    if (has_edits(args, slot) && !not_finite) {
        float* x = reinterpret_cast<float*>(scratch.edited) + row * args.vocab;
        edit_piece(args, slot, row, range, x);
        best = 0;
        for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kScanThreads) {
            const uint64_t rank = ranked(x[i], static_cast<uint32_t>(i));
            best = rank > best ? rank : best;
        }
        edited_best = block_reduce(best, Max{}, uint64_t{0}, shared);
    }
    double sum = 0;
    if (slot.logprobs != 0 && !not_finite) {
        if (raw_best != 0 && ranked_value(raw_best) != minus_infinity()) {
            for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kScanThreads) {
                sum += static_cast<double>(cuda::exp_f32(__fsub_rn(logits[i], ranked_value(raw_best))));
            }
        }
        sum = block_reduce(sum, Sum{}, 0.0, shared_sum);
        find_top(logits, range, min(slot.top, kSampleTopMax), shared, part);
    }
    if (threadIdx.x == 0) {
        part.best = edited_best;
        part.raw_best = raw_best;
        part.raw_sum = sum;
        part.not_finite = not_finite ? 1 : 0;
    }
}

}  // namespace tessera::cuda
