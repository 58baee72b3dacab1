// Log-probabilities of a row, by one thread block.
#pragma once

#include "ops/sample/cuda/sample_slow.cuh"

namespace tessera::cuda {

// The log of the sum of exp of a row whose largest key is given. told: of tile t by thread t. For the whole
// block.
__device__ __forceinline__ double sum_of_tiles(const SampleBlock& block, const uint4& told,
                                               uint32_t largest) {
    const float best = largest > kSampleEmptyKey ? from_ordered_bits(largest) : 0.0f;
    const double sum =
        block.reduce(__hiloint2double(static_cast<int>(told.w), static_cast<int>(told.z)) *
                         exp(static_cast<double>(from_ordered_bits(told.x)) - static_cast<double>(best)),
                     Sum{});
    return static_cast<double>(best) + log(sum);
}

// Log-probabilities of a row: the log of the sum of exp, and the most probable tokens into the result. NaN
// where a logit is not finite. For the whole block.
__device__ inline double report_top(SampleBlock& block) {
    SampleShared& shared = block.shared;
    const auto t = static_cast<int>(threadIdx.x);
    const int32_t top = min(block.slot().top, kSampleTopMax);
    SampleRowResult& result = block.args.results[block.tile.row];
    const SampleGroupKeys keys(block, true);
    uint4 told{kSampleEmptyKey, 0, 0, 0};
    if (t < block.tiles) {
        uint32_t* from = block.words[t].raw;
        told = block.take(from, get_words(from), false);
    }
    const double log_sum = sum_of_tiles(block, told, keys.largest);
    if (top <= 0 || keys.largest >= kSampleInfinityKey) {
        if (t == 0) {
            result.top_count = 0;
        }
        return log_sum;
    }
    int32_t count = 0;
    if (list_tokens(block, keys, keys.bound(block, static_cast<uint32_t>(top)), false)) {
        sort_tokens(block);
        count = min(top, static_cast<int32_t>(shared.token_count));
    } else {
        count = list_by_keys(block, keys.largest, top);
    }
    if (t < count) {
        const uint64_t token = shared.tokens[t];
        result.top[static_cast<size_t>(t)] = {
            ranked_index(token), static_cast<float>(static_cast<double>(ranked_value(token)) - log_sum)};
    }
    if (t == 0) {
        result.top_count = count;
    }
    __syncthreads();
    return log_sum;
}

}  // namespace tessera::cuda
