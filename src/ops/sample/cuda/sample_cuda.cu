#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/sample/cuda/sample_cuda.h"
#include "ops/sample/cuda/sample_draw.cuh"
#include "ops/sample/cuda/sample_scan.cuh"

namespace tessera {
namespace {

using namespace cuda;

__device__ __forceinline__ int32_t forced_token(const SampleCudaArgs& args, const SampleSlot& slot,
                                                int32_t slot_id) {
    if (slot.forced_next < 0 || slot.forced_next >= slot.forced_count) {
        return -1;
    }
    return args.slots.forced[static_cast<int64_t>(slot_id) * kSampleForcedMax + slot.forced_next];
}

// A stop token while `forced_after` is awaited would end the request before the forced tokens come.
__device__ __forceinline__ bool stops_early(const SampleSlot& slot, int32_t token) {
    bool stop = false;
    for (int32_t i = 0; slot.forced_next < 0 && i < slot.stop_count; ++i) {
        stop = stop || slot.stop_ids[i] == token;
    }
    return stop;
}

// The log-probabilities of a row, by one warp: lane l holds piece l's findings.
__device__ inline void report_logprobs(const SamplePart& part, int32_t top, float chosen_logit,
                                       SampleRowResult& result) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float max = ranked_value(warp_reduce(part.raw_best, Max{}));
    const double own_max = part.raw_best == 0 ? 0.0 : static_cast<double>(ranked_value(part.raw_best));
    const double sum = part.raw_sum == 0 ? 0.0 : part.raw_sum * exp(own_max - static_cast<double>(max));
    const double log_sum = static_cast<double>(max) + log(warp_reduce(sum, Sum{}));
    int32_t head = 0;  // how many of its piece's best this lane has given
    int32_t count = 0;
    for (; count < min(top, kSampleTopMax); ++count) {
        const uint64_t mine = head < kSampleTopMax ? part.top[head] : 0;
        const uint64_t best = warp_reduce(mine, Max{});
        if (best == 0) {
            break;
        }
        head += mine == best ? 1 : 0;
        if (lane == 0) {
            result.top[static_cast<size_t>(count)] = {
                ranked_index(best), static_cast<float>(static_cast<double>(ranked_value(best)) - log_sum)};
        }
    }
    if (lane == 0) {
        result.top_count = count;
        result.logprob = static_cast<float>(static_cast<double>(chosen_logit) - log_sum);
    }
}

__device__ __forceinline__ DrawRow draw_row(const SampleCudaArgs& args, SampleScratch scratch, int64_t row,
                                            uint64_t best) {
    const SampleSlot& slot = args.slots.slot[args.row_slots[row]];
    uint32_t* edited = scratch.edited + row * args.vocab;
    return {slot,
            has_edits(args, slot) ? reinterpret_cast<const float*>(edited)
                                  : args.logits + row * args.logits_stride,
            scaled_logit(ranked_value(best), slot.temperature),
            args.vocab,
            edited,
            scratch.ids + row * args.vocab,
            scratch.weights + row * args.vocab};
}

// Takes the token into the slot's state.
__device__ inline void append_output(const SampleCudaArgs& args, SampleSlot& slot, int32_t slot_id,
                                     int32_t token) {
    if (slot.has_penalties()) {
        ++args.slots.output_counts[slot_id * args.vocab + token];
    }
    ++slot.outputs;
    if (slot.forced_next < 0) {
        slot.forced_next = token == slot.forced_after ? 0 : -1;
    } else if (slot.forced_next < slot.forced_count) {
        ++slot.forced_next;
    }
    if (args.slots.last_token != nullptr) {
        args.slots.last_token[slot_id] = token;
    }
}

// Roofline: a greedy row reads 32 findings of the scan: latency alone. A drawn row is read once more by one
// block; then its tokens that have a weight are passed over two to eight times, and the bucket of each cut is
// searched in registers.
__global__ void __launch_bounds__(kDrawThreads, 1)
    sample_choose_kernel(SampleCudaArgs args, SampleScratch scratch) {
    __shared__ DrawShared shared;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t row = blockIdx.x;
    const int32_t slot_id = args.row_slots[row];
    if (slot_id < 0) {
        return;
    }
    SampleSlot& slot = args.slots.slot[slot_id];
    SampleRowResult& result = args.results[row];
    const SamplePart& part = scratch.parts[row * kSampleParts + lane];
    const bool finite = __all_sync(kFullWarp, part.not_finite == 0) != 0;
    const uint64_t best = warp_reduce(part.best, Max{});
    SampleError error = SampleError::kNone;
    int32_t token = -1;
    if (!finite) {
        error = SampleError::kNotFinite;
    } else if (token = forced_token(args, slot, slot_id); token < 0) {
        if (ranked_value(best) == minus_infinity()) {
            error = SampleError::kNoToken;
        } else {
            token =
                is_greedy(slot) ? ranked_index(best) : draw_token(draw_row(args, scratch, row, best), shared);
        }
    }
    __syncthreads();  // all have read the slot
    if (threadIdx.x >= kWarp) {
        return;
    }
    if (error == SampleError::kNone && stops_early(slot, token)) {
        token = slot.forced_after;
    }
    if (lane == 0) {
        result.token = token;
        result.error = error;
        result.logprob = 0;
        result.top_count = 0;
    }
    if (error != SampleError::kNone) {
        return;
    }
    __syncwarp();
    if (slot.logprobs != 0) {
        report_logprobs(part, slot.top, args.logits[row * args.logits_stride + token], result);
    }
    __syncwarp();
    if (lane == 0) {
        append_output(args, slot, slot_id, token);
    }
}

__global__ void sample_history_kernel(SampleHistoryArgs args) {
    const int64_t words = (args.vocab + 63) / 64;
    auto* seen = reinterpret_cast<unsigned long long*>(args.slots.prompt_seen) + args.slot * words;
    int32_t* counts = args.slots.output_counts + args.slot * args.vocab;
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i < args.prompt_count) {
        atomicOr(seen + args.prompt[i] / 64, 1ull << (args.prompt[i] % 64));
    }
    if (i < args.output_count) {
        atomicAdd(counts + args.output[i], 1);
    }
}

}  // namespace

int64_t sample_cuda_workspace_bytes(int64_t vocab, int64_t rows) {
    int64_t bytes = 0;
    SampleScratch::at(nullptr, vocab, rows, &bytes);
    return bytes;
}

void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args) {
    check(args.vocab > 0 && args.rows <= 65535, "sample: at most 65535 rows");
    if (args.rows == 0) {
        return;
    }
    const SampleScratch scratch = SampleScratch::at(args.workspace, args.vocab, args.rows, nullptr);
    const unsigned rows = static_cast<unsigned>(args.rows);
    sample_scan_kernel<<<dim3(kSampleParts, rows), kScanThreads, 0, stream>>>(args, scratch);
    cuda_check_launch();
    sample_choose_kernel<<<rows, kDrawThreads, 0, stream>>>(args, scratch);
    cuda_check_launch();
}

void sample_history_cuda(cudaStream_t stream, const SampleHistoryArgs& args) {
    const int64_t words = (args.vocab + 63) / 64;
    cuda_check(cudaMemsetAsync(args.slots.prompt_seen + args.slot * words, 0, static_cast<size_t>(words) * 8,
                               stream));
    cuda_check(cudaMemsetAsync(args.slots.output_counts + args.slot * args.vocab, 0,
                               static_cast<size_t>(args.vocab) * 4, stream));
    const int64_t count = args.prompt_count > args.output_count ? args.prompt_count : args.output_count;
    if (count == 0) {
        return;
    }
    constexpr int kThreads = 256;
    sample_history_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        args);
    cuda_check_launch();
}

}  // namespace tessera
