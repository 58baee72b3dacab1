// Roofline: 4 bytes a logit at 4.27 TB/s: 0.11 us a row of 120,832. Every logit is read once, by the bulk
// copy engine, into the shared memory of a cluster of eight blocks; from there on a row waits for the latency
// of two or three cluster barriers, which other rows' loads cover when there are more rows than fit at once
// (three blocks a multiprocessor and whole clusters, so 48 rows).
#include <string>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/sample/cuda/sample_cuda.h"
#include "ops/sample/cuda/sample_draw.cuh"

namespace tessera {
namespace {

using namespace cuda;

constexpr uint64_t kNotFiniteRank = ~uint64_t{0};
constexpr int64_t kSharedBytes = (sizeof(SampleShared) + 15) / 16 * 16;

int64_t segment_size(int64_t vocab) {
    return ((vocab + kSampleSegments - 1) / kSampleSegments + 3) / 4 * 4;
}

int64_t shared_bytes(int64_t vocab) {
    return kSharedBytes + segment_size(vocab) * kSampleWarps * 4;
}

// The best of what a lane has seen, in order of ids; and whether all of it was finite (or -inf).
struct Scan {
    float best = minus_infinity();
    int32_t id = -1;
    bool finite = true;

    __device__ __forceinline__ void check(float x) {
        finite = finite && x < -minus_infinity();  // false for a NaN too
    }
    __device__ __forceinline__ void see(float x, int32_t i) {
        if (x > best) {
            best = x;
            id = i;
        }
    }
    // Of the whole warp.
    __device__ uint64_t rank() const {
        const uint64_t mine = id < 0 ? 0 : ranked(best, static_cast<uint32_t>(id));
        return __all_sync(kFullWarp, finite) != 0 ? warp_reduce(mine, Max{}) : kNotFiniteRank;
    }
};

// Begins the load of this warp's segment: its barrier tells of the end.
__device__ void load_begin(const SampleCudaArgs& args, const SampleRow& row, int32_t real) {
    const float* from = args.logits + row.row * args.logits_stride + row.first;
    const uint32_t barrier = shared_address(&row.shared.barriers[row.warp]);
    const bool bulk = real > 0 && real % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    if (row.lane == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    __syncwarp();
    if (!bulk) {
        for (int32_t i = row.lane; i < row.count; i += kWarp) {
            row.x[i] = i < real ? from[i] : minus_infinity();
        }
    }
    __syncwarp();
    if (row.lane == 0) {
        const auto bytes = static_cast<uint32_t>(bulk ? real * 4 : 0);
        barrier_arrive_expect(barrier, bytes);
        if (bulk) {
            copy_bulk(shared_address(row.x), from, bytes, barrier);
        }
    }
}

__device__ Scan scan_raw(const SampleRow& row) {
    Scan scan;
    row.for_each([&](float x, int32_t id) {
        scan.check(x);
        scan.see(x, id);
    });
    return scan;
}

// Log-probabilities of a row: log of the sum of exp, and the most probable tokens into the result. The whole
// cluster takes part.
__device__ double report_top(SampleRow& row, int32_t top, uint64_t best, SampleRowResult& result) {
    SampleShared& shared = row.shared;
    const float largest = best == 0 ? 0.0f : ranked_value(best);
    double sum = 0;
    row.for_each([&](float x, int32_t) { sum += static_cast<double>(cuda::exp_f32(__fsub_rn(x, largest))); });
    row.publish(shared.exp_sums, warp_reduce(sum, Sum{}));
    const uint64_t bound = kth_maximum(shared, top > 0 ? top : 1);
    collect(row, 0, top > 0 && shared.maxima[row.segment()] >= bound,
            [&](float x, int32_t id) { return ranked(x, static_cast<uint32_t>(id)) >= bound; });
    row.cluster.sync();
    const double log_sum =
        static_cast<double>(largest) + log(reduce_segments(shared.exp_sums, row.lane, Sum{}));
    const auto give = [&](int32_t place, float value, int32_t id) {
        result.top[static_cast<size_t>(place)] = {id,
                                                  static_cast<float>(static_cast<double>(value) - log_sum)};
    };
    const int32_t found = reduce_segments(shared.found, row.lane, Sum{});
    int32_t count = min(top, found);
    const auto t = static_cast<int32_t>(threadIdx.x);
    if (found <= kSampleCandidatesMax) {
        if (row.rank == 0) {
            sort_candidates(shared, found);
            if (t < count) {
                give(t, from_ordered_bits(shared.sorted[t].key), shared.sorted[t].id);
            }
        }
    } else {  // many equal logits: one after the other
        uint64_t last = kNotFiniteRank;
        for (count = 0; count < top; ++count) {
            uint64_t next = 0;
            row.for_each([&](float x, int32_t id) {
                const uint64_t rank = ranked(x, static_cast<uint32_t>(id));
                next = x > minus_infinity() && rank < last ? max(next, rank) : next;
            });
            last = row.cluster_reduce(next, Max{});
            if (last == 0) {
                break;
            }
            if (row.rank == 0 && t == 0) {
                give(count, ranked_value(last), ranked_index(last));
            }
        }
    }
    if (row.rank == 0 && t == 0) {
        result.top_count = count;
    }
    return log_sum;
}

// The edits that name their tokens: stop ids, then biases (-inf stays -inf in any order).
__device__ void apply_named_edits(const SampleCudaArgs& args, const SampleSlot& slot, const SampleRow& row) {
    const auto mine = [&](int32_t id) { return id >= row.first && id < row.first + row.count; };
    __syncwarp();  // the other lanes have read what this one writes
    for (int32_t i = row.lane; masks_stops(slot) && i < slot.stop_count; i += kWarp) {
        if (mine(slot.stop_ids[i])) {
            row.x[slot.stop_ids[i] - row.first] = minus_infinity();
        }
    }
    __syncwarp();
    const int64_t base = static_cast<int64_t>(args.row_slots[row.row]) * kSampleBiasMax;
    for (int32_t i = 0; i < slot.bias_count; ++i) {  // an id may have several, which add up in their order
        const int32_t id = args.slots.bias_ids[base + i];
        if (mine(id) && id % kWarp == row.lane) {
            row.x[id - row.first] = biased(row.x[id - row.first], args.slots.bias_values[base + i]);
        }
    }
    __syncwarp();
}

// Mask, penalties and temperature of the segment, in place; `scan` sees what comes of it. `check`: the values
// are still the raw ones, to be looked at for NaN.
__device__ void edit_segment(const SampleCudaArgs& args, const SampleSlot& slot, const SampleRow& row,
                             bool check, Scan& scan) {
    const int64_t slot_id = args.row_slots[row.row];
    const int64_t words = (args.vocab + 63) / 64;
    const uint32_t* allowed =
        args.allowed == nullptr ? nullptr : args.allowed + row.row * ((args.vocab + 31) / 32);
    const bool penalties = slot.has_penalties();
    const auto* in_prompt = reinterpret_cast<const uint32_t*>(args.slots.prompt_seen + slot_id * words);
    const auto* in_output = reinterpret_cast<const uint32_t*>(args.slots.output_seen + slot_id * words);
    const int32_t* counts = args.slots.output_counts + slot_id * args.vocab;
    const bool greedy = is_greedy(slot);
    row.for_fours([&](float4 four, int32_t i) {
        const int32_t id = row.first + i;
        const int shift = id % 32;
        const uint32_t may = allowed == nullptr ? 0xFu : allowed[id / 32] >> shift;
        const uint32_t prompt = penalties ? in_prompt[id / 32] >> shift : 0u;
        const uint32_t output = penalties ? in_output[id / 32] >> shift : 0u;
        float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float x = values[e];
            if (check) {
                scan.check(x);
            }
            x = (may >> e & 1) != 0 ? x : minus_infinity();
            if (((prompt | output) >> e & 1) != 0) {
                x = penalised(x, (prompt >> e & 1) != 0, (output >> e & 1) != 0 ? counts[id + e] : 0, slot);
            }
            x = greedy ? x : scaled_logit(x, slot.temperature);
            scan.see(x, id + e);
            values[e] = x;
        }
        *reinterpret_cast<float4*>(row.x + i) = make_float4(values[0], values[1], values[2], values[3]);
    });
    __syncwarp();
}

// Draws. One warp of the cluster gets the token, every other -1.
__device__ int32_t draw_token(SampleRow& row, const SampleDraw& draw) {
    SampleShared& shared = row.shared;
    const SampleSlot& slot = draw.slot;
    if (slot.top_k <= 0 && slot.top_p >= 1) {
        return draw_by_cut(row, draw, {});
    }
    if (slot.top_k <= kSampleBestMax) {
        const auto bound =
            static_cast<uint32_t>(kth_maximum(shared, slot.top_k > 0 ? slot.top_k : kSampleBestMax) >> 32);
        const bool any = static_cast<uint32_t>(shared.maxima[row.segment()] >> 32) >= bound;
        collect(row, 1, any, [&](float x, int32_t) { return ordered_bits(x) >= bound; });
        if (slot.top_k <= 0) {
            uint64_t mass = 0;
            row.for_each([&](float x, int32_t) { mass += draw.weight(x); });
            row.publish(shared.mass, warp_reduce(mass, Sum{}));
        }
        row.cluster.sync();
        const int32_t count = reduce_segments(shared.found, row.lane, Sum{});
        bool done = count <= kSampleCandidatesMax;
        if (done && row.rank == 0) {
            const uint64_t total = slot.top_k > 0 ? 0 : segment_sums(shared.mass, 0, row.lane).total;
            done = draw_from_candidates(shared, count, draw, total);
        }
        if (count <= kSampleCandidatesMax && slot.top_k <= 0) {  // the first block alone knows
            if (row.rank == 0 && threadIdx.x < kSampleCluster) {
                *row.remote(&shared.unfinished, static_cast<int>(threadIdx.x)) = done ? 0 : 1;
            }
            row.cluster.sync();
            done = shared.unfinished == 0;
        }
        if (done) {
            return row.rank == 0 && row.warp == 0 ? shared.token : -1;
        }
    }
    const SampleCut cut = find_cut(row, draw);
    return draw_by_cut(row, draw, cut);
}

struct Choice {
    int32_t token = -1;
    SampleError error = SampleError::kNone;
};

// By one warp.
__device__ void finish_row(const SampleCudaArgs& args, const SampleRow& row, Choice choice, double log_sum) {
    const int32_t slot_id = args.row_slots[row.row];
    SampleSlot& slot = args.slots.slot[slot_id];
    SampleRowResult& result = args.results[row.row];
    if (row.lane != 0) {
        return;
    }
    const bool failed = choice.error != SampleError::kNone;
    if (!failed && stops_early(slot, choice.token)) {
        choice.token = slot.forced_after;
    }
    result.token = failed ? -1 : choice.token;
    result.error = choice.error;
    result.logprob = 0;
    if (failed || slot.logprobs == 0) {
        result.top_count = 0;
    } else {
        const float logit = args.logits[row.row * args.logits_stride + choice.token];
        result.logprob = static_cast<float>(static_cast<double>(logit) - log_sum);
    }
    if (!failed) {
        append_output(args, slot, slot_id, choice.token);
    }
}

__global__ void __cluster_dims__(kSampleCluster, 1, 1) __launch_bounds__(kSampleThreads, 3)
    sample_kernel(SampleCudaArgs args, int32_t segment) {
    extern __shared__ __align__(16) unsigned char memory[];
    SampleShared& shared = *reinterpret_cast<SampleShared*>(memory);
    const int32_t slot_id = args.row_slots[blockIdx.y];
    if (slot_id < 0) {
        return;
    }
    SampleRow row{shared, cooperative_groups::this_cluster(), blockIdx.y};
    row.rank = static_cast<int>(blockIdx.x);
    row.warp = static_cast<int>(threadIdx.x) / kWarp;
    row.lane = static_cast<int>(threadIdx.x) % kWarp;
    row.x = reinterpret_cast<float*>(memory + kSharedBytes) + row.warp * segment;
    row.first = row.segment() * segment;
    const int32_t real = max(0, min(segment, static_cast<int32_t>(args.vocab) - row.first));
    row.count = (real + 3) / 4 * 4;
    load_begin(args, row, real);
    if (threadIdx.x == 0) {
        shared.candidate_count[0] = 0;
        shared.candidate_count[1] = 0;
    }
    row.cluster.sync();  // all blocks run, and their counts are set, before anyone writes to another
    barrier_wait(shared_address(&shared.barriers[row.warp]), 0);

    const SampleSlot& slot = args.slots.slot[slot_id];
    const bool named = slot.bias_count > 0 || masks_stops(slot);
    const bool first_block_warp = row.rank == 0 && row.warp == 0;
    double log_sum = 0;
    uint64_t best = 0;
    Scan scan;
    if (slot.logprobs != 0) {
        row.publish(shared.maxima, scan_raw(row).rank());
        row.cluster.sync();
        best = reduce_segments(shared.maxima, row.lane, Max{});
        if (best == kNotFiniteRank) {
            if (first_block_warp) {
                finish_row(args, row, {-1, SampleError::kNotFinite}, 0);
            }
            return;
        }
        log_sum = report_top(row, min(slot.top, kSampleTopMax), best, args.results[row.row]);
    } else if (named) {
        scan.finite = scan_raw(row).finite;
    }
    if (named) {
        apply_named_edits(args, slot, row);
    }
    if (has_edits(args, slot) || !is_greedy(slot)) {
        edit_segment(args, slot, row, !named, scan);
        row.publish(shared.maxima, scan.rank());
    } else if (slot.logprobs == 0) {
        row.publish(shared.maxima, scan_raw(row).rank());
    }
    row.cluster.sync();
    best = reduce_segments(shared.maxima, row.lane, Max{});

    Choice choice{forced_token(args, slot, slot_id)};
    if (best == kNotFiniteRank) {
        choice.error = SampleError::kNotFinite;
    } else if (choice.token < 0 && best == 0) {
        choice.error = SampleError::kNoToken;
    } else if (choice.token < 0 && is_greedy(slot)) {
        choice.token = ranked_index(best);
    } else if (choice.token < 0) {
        choice.token = draw_token(row, {slot, ranked_value(best)});
        if (choice.token >= 0) {
            finish_row(args, row, choice, log_sum);
        }
        return;
    }
    if (first_block_warp) {
        finish_row(args, row, choice, log_sum);
    }
}

__global__ void sample_history_kernel(SampleHistoryArgs args) {
    const int64_t words = (args.vocab + 63) / 64;
    const auto set = [](uint64_t* bits, int32_t id) {
        atomicOr(reinterpret_cast<unsigned long long*>(bits) + id / 64, 1ull << (id % 64));
    };
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i < args.prompt_count) {
        set(args.slots.prompt_seen + args.slot * words, args.prompt[i]);
    }
    if (i < args.output_count) {
        set(args.slots.output_seen + args.slot * words, args.output[i]);
        atomicAdd(args.slots.output_counts + args.slot * args.vocab + args.output[i], 1);
    }
}

}  // namespace

Status sample_cuda_prepare(int64_t vocab) {
    if (vocab > kSampleCudaVocabMax) {
        return invalid_argument("a vocabulary of " + std::to_string(vocab) +
                                " tokens; the CUDA sampler takes " + std::to_string(kSampleCudaVocabMax) +
                                " at most");
    }
    cuda_check(cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes(vocab))));
    return Status();
}

void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args) {
    check(args.vocab > 0 && args.vocab <= kSampleCudaVocabMax && args.rows <= 65535,
          "sample: at most 65535 rows of kSampleCudaVocabMax logits");
    if (args.rows == 0) {
        return;
    }
    sample_kernel<<<dim3(kSampleCluster, static_cast<unsigned>(args.rows)), kSampleThreads,
                    static_cast<size_t>(shared_bytes(args.vocab)), stream>>>(
        args, static_cast<int32_t>(segment_size(args.vocab)));
    cuda_check_launch();
}

void sample_history_cuda(cudaStream_t stream, const SampleHistoryArgs& args) {
    const int64_t words = (args.vocab + 63) / 64;
    const auto clear = [stream](auto* from, int64_t count) {
        cuda_check(cudaMemsetAsync(from, 0, static_cast<size_t>(count) * sizeof *from, stream));
    };
    clear(args.slots.prompt_seen + args.slot * words, words);
    clear(args.slots.output_seen + args.slot * words, words);
    clear(args.slots.output_counts + args.slot * args.vocab, args.vocab);
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
