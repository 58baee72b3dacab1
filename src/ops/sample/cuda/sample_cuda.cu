// Roofline: 4 bytes a logit at 4.27 TB/s: 0.11 us a row of 120,832. Every logit is read once, by the bulk
// copy engine, into the shared memory of a cluster of eight blocks; from there on a row waits for the latency
// of two to four cluster barriers, which other rows' loads cover when there are more rows than fit at once
// (three blocks a multiprocessor and clusters within its groups of multiprocessors: 45 rows of an H200).
#include <algorithm>
#include <string>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/sample/cuda/sample_cuda.h"
#include "ops/sample/cuda/sample_draw.cuh"

namespace tessera {
namespace {

using namespace cuda;

constexpr uint64_t kNotFiniteRank = ~uint64_t{0};
constexpr int64_t kSharedBytes = (sizeof(SampleShared) + 15) / 16 * 16;

int64_t segment_size(int64_t vocab) {
    return (vocab + kSampleSegments * kSamplePass - 1) / (kSampleSegments * kSamplePass) * kSamplePass;
}

// Few rows ask for so much that one or two blocks fill a multiprocessor: three of them would be put on one
// although others are free.
int64_t shared_bytes(int64_t vocab, int64_t rows) {
    constexpr int64_t kClusters = 15;  // of one block a multiprocessor that an H200 holds
    const int64_t spread = rows <= kClusters ? 116 << 10 : rows <= 2 * kClusters ? 77 << 10 : 0;
    return std::max(kSharedBytes + segment_size(vocab) * kSampleWarps * 4, spread);
}

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
    for (int32_t i = row.lane + (bulk ? real : 0); i < row.count; i += kWarp) {
        row.x[i] = i < real ? from[i] : minus_infinity();
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

// The largest of a and b; NaN when one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// The key of the segment's largest logit.
__device__ uint32_t scan_segment(const SampleRow& row) {
    float best = minus_infinity();
    row.for_fours([&](const float4& v, int32_t) {
        best = max_or_nan(max_or_nan(best, max_or_nan(v.x, v.y)), max_or_nan(v.z, v.w));
    });
    best = warp_reduce(best, [](float p, float q) { return max_or_nan(p, q); });
    if (best == minus_infinity()) {
        return kSampleEmpty;
    }
    return best < -minus_infinity() ? ordered_bits(best) : kSampleNotFinite;  // a NaN is not less
}

// The lowest id of the segment whose logit equals `value`, which is there.
__device__ int32_t find_value(const SampleRow& row, float value) {
    for (int32_t i0 = 0; i0 < row.count; i0 += kSamplePass) {
        const float4 v = *reinterpret_cast<const float4*>(row.x + i0 + 4 * row.lane);
        const int e = v.x == value ? 0 : v.y == value ? 1 : v.z == value ? 2 : 3;
        const bool here = v.x == value || v.y == value || v.z == value || v.w == value;
        const uint32_t votes = __ballot_sync(kFullWarp, here);
        if (votes != 0) {
            const int owner = __ffs(static_cast<int>(votes)) - 1;
            return row.first + i0 + 4 * owner + __shfl_sync(kFullWarp, e, owner);
        }
    }
    return -1;
}

// Log-probabilities of a row: log of the sum of exp, and the most probable tokens into the result. The whole
// cluster takes part.
__device__ double report_top(SampleRow& row, int32_t top, uint32_t best, SampleRowResult& result) {
    SampleShared& shared = row.shared;
    const float largest = best == kSampleEmpty ? 0.0f : from_ordered_bits(best);
    double sum = 0;
    row.for_each([&](float x, int32_t) { sum += static_cast<double>(cuda::exp_f32(__fsub_rn(x, largest))); });
    row.publish(shared.exp_sums, warp_reduce(sum, Sum{}));
    const uint32_t bound = kth_maximum(shared, top > 0 ? top : 1);
    int32_t mine = 0;
    if (top > 0 && shared.maxima[row.segment()] >= bound) {
        row.for_each([&](float x, int32_t id) {
            if (x > minus_infinity() && ordered_bits(x) >= bound) {
                append_candidate(row, 0, x, id);
                ++mine;
            }
        });
    }
    row.publish(shared.found, warp_reduce(mine, Sum{}));
    row.cluster.sync();
    const double log_sum =
        static_cast<double>(largest) + log(reduce_segments(shared.exp_sums, row.lane, Sum{}));
    const auto give = [&](int32_t place, float value, int32_t id) {
        result.top[static_cast<size_t>(place)] = {id,
                                                  static_cast<float>(static_cast<double>(value) - log_sum)};
    };
    const SampleFound found(row);
    int32_t count = min(top, found.count);
    const auto t = static_cast<int32_t>(threadIdx.x);
    if (found.fits) {
        if (row.rank == 0) {
            sort_candidates(row, found);
            if (t < count) {
                const uint64_t token = shared.sorted.tokens[t];
                give(t, ranked_value(token), ranked_index(token));
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

// 64 ids a lane: which of them are in the prompt and in the output.
struct SeenWords {
    uint64_t prompt = 0;
    uint64_t output = 0;
};

__device__ SeenWords load_seen(const SampleCudaArgs& args, const SampleRow& row, int32_t group) {
    const int64_t words = (args.vocab + 63) / 64;
    const int64_t word = (row.first + group) / 64 + row.lane;
    if (!row.shared.slot.has_penalties() || group + 64 * row.lane >= row.count || word >= words) {
        return {};
    }
    const int64_t base = args.row_slots[row.row] * words;
    return {args.slots.prompt_seen[base + word], args.slots.output_seen[base + word]};
}

// The penalties of the segment's tokens, in place; few have any. seen: of the first 2048. False where a
// logit was not finite.
__device__ bool apply_penalties(const SampleCudaArgs& args, const SampleRow& row, SeenWords seen) {
    const SampleSlot& slot = row.shared.slot;
    const int32_t* counts = args.slots.output_counts + args.row_slots[row.row] * args.vocab + row.first;
    bool finite = true;
    for (int32_t group = 0; group < row.count; group += 64 * kWarp) {
        if (group > 0) {
            seen = load_seen(args, row, group);
        }
        for (uint64_t left = seen.prompt | seen.output; left != 0; left &= left - 1) {
            const int bit = __ffsll(static_cast<long long>(left)) - 1;
            const int32_t i = group + 64 * row.lane + bit;
            const float x = row.x[i];
            finite = finite && x < -minus_infinity();
            row.x[i] = penalised(x, (seen.prompt >> bit & 1) != 0,
                                 (seen.output >> bit & 1) != 0 ? counts[i] : 0, slot);
        }
    }
    __syncwarp();
    return __all_sync(kFullWarp, finite) != 0;
}

// Tokens that the mask does not allow, in place. False where a logit was not finite.
__device__ bool apply_mask(const SampleCudaArgs& args, const SampleRow& row) {
    const int64_t words = (args.vocab + 31) / 32;
    const uint32_t* allowed = args.allowed + row.row * words;
    bool finite = true;
    for (int32_t i = row.lane; i < row.count; i += kWarp) {
        const int64_t word = (row.first + i) / 32;
        const uint32_t may = word < words ? allowed[word] : 0u;
        const float x = row.x[i];
        finite = finite && x < -minus_infinity();
        if ((may >> row.lane & 1) == 0) {
            row.x[i] = minus_infinity();
        }
    }
    __syncwarp();
    return __all_sync(kFullWarp, finite) != 0;
}

// Everything between the raw logits and the temperature, in place. False where a raw logit that it replaces
// was not finite.
__device__ bool edit_segment(const SampleCudaArgs& args, const SampleRow& row, const SeenWords& seen) {
    const SampleSlot& slot = row.shared.slot;
    bool finite = true;
    if (slot.bias_count > 0 || masks_stops(slot)) {
        finite = scan_segment(row) != kSampleNotFinite;
        apply_named_edits(args, slot, row);
    }
    if (args.allowed != nullptr) {
        finite = apply_mask(args, row) && finite;
    }
    if (slot.has_penalties()) {
        finite = apply_penalties(args, row, seen) && finite;
    }
    return finite;
}

// Lists the tokens that are as probable as the k-th largest of the segments' maxima, with their scaled
// logits. A cluster barrier follows.
__device__ void collect_best(const SampleRow& row, const SampleDraw& draw, int k) {
    const uint32_t key = kth_maximum(row.shared, k);
    const float bound = key == kSampleEmpty ? minus_infinity() : from_ordered_bits(key);
    const SampleScale& scale = draw.weights.scale;
    const float scaled_bound = scale(bound);
    // Logits so close below the bound that their quotient may be the same.
    const float low =
        scaled_bound < kSampleLogitMax ? bound - fmaxf(fabsf(bound) * 1e-6f, 1e-30f) : minus_infinity();
    int32_t mine = 0;
    const uint32_t best = row.shared.maxima[row.segment()];
    if (best != kSampleEmpty && from_ordered_bits(best) >= low) {
        const auto see = [&](float x, int32_t id) {
            const float scaled = scale(x);
            if (x >= low && x > minus_infinity() && scaled >= scaled_bound) {
                append_candidate(row, 1, scaled, id);
                ++mine;
            }
        };
        row.for_fours([&](const float4& v, int32_t i) {
            if (fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) >= low) {
                see(v.x, row.first + i);
                see(v.y, row.first + i + 1);
                see(v.z, row.first + i + 2);
                see(v.w, row.first + i + 3);
            }
        });
    }
    row.publish(row.shared.found, warp_reduce(mine, Sum{}));
}

// Draws. One warp of the cluster gets the token, every other -1.
__device__ int32_t draw_token(SampleRow& row, const SampleDraw& draw) {
    SampleShared& shared = row.shared;
    const SampleSlot& slot = draw.slot;
    if (slot.top_k <= 0 && slot.top_p >= 1) {
        return draw_uncut(row, draw);
    }
    if (slot.top_k <= kSampleBestMax) {
        collect_best(row, draw, slot.top_k > 0 ? slot.top_k : kSampleBestMax);
        if (slot.top_k <= 0) {
            row.publish(shared.mass, segment_mass(row, draw.weights));
        }
        row.cluster.sync();
        const SampleFound found(row);
        bool done = found.fits;
        if (done && row.rank == 0) {
            const uint64_t total = slot.top_k > 0 ? 0 : segment_sums(shared.mass, 0, row.lane).total;
            done = draw_from_candidates(row, found, draw, total);
        }
        if (found.fits && slot.top_k <= 0) {  // the first block alone knows
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
    row.for_fours(
        [&](const float4& v, int32_t i) { *reinterpret_cast<float4*>(row.x + i) = draw.weights.scale(v); });
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
    const SampleSlot& slot = row.shared.slot;
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

// The slot as it is before this launch, into shared memory. A barrier follows.
__device__ void load_slot(const SampleCudaArgs& args, SampleShared& shared, int32_t slot_id) {
    static_assert(sizeof(SampleSlot) % 8 == 0 && sizeof(SampleSlot) / 8 <= kSampleThreads);
    const auto* from = reinterpret_cast<const uint64_t*>(args.slots.slot + slot_id);
    if (threadIdx.x < sizeof(SampleSlot) / 8) {
        reinterpret_cast<uint64_t*>(&shared.slot)[threadIdx.x] = from[threadIdx.x];
    }
    if (threadIdx.x == 0) {
        shared.candidate_count[0] = 0;
        shared.candidate_count[1] = 0;
    }
}

// From the edited logits to the token. `best`: the segments' largest key.
__device__ void choose(const SampleCudaArgs& args, SampleRow& row, uint32_t best, uint64_t fraction,
                       double log_sum) {
    SampleShared& shared = row.shared;
    const SampleSlot& slot = shared.slot;
    const bool first_block_warp = row.rank == 0 && row.warp == 0;
    Choice choice{forced_token(args, slot, args.row_slots[row.row])};
    bool mine = first_block_warp;
    if (best == kSampleNotFinite) {
        choice.error = SampleError::kNotFinite;
    } else if (choice.token < 0 && best == kSampleEmpty) {
        choice.error = SampleError::kNoToken;
    } else if (choice.token < 0 && is_greedy(slot)) {
        int32_t before = 0;  // segments before this one that are as good
        for (int j = row.lane; j < row.segment(); j += kWarp) {
            before += shared.maxima[j] == best ? 1 : 0;
        }
        mine = shared.maxima[row.segment()] == best && __any_sync(kFullWarp, before) == 0;
        choice.token = mine ? find_value(row, from_ordered_bits(best)) : -1;
    } else if (choice.token < 0) {
        const SampleScale scale{slot.temperature, __frcp_rn(slot.temperature)};
        choice.token =
            draw_token(row, {slot, SampleWeights(scale, from_ordered_bits(best), slot.min_p), fraction});
        mine = choice.token >= 0;
    }
    if (mine) {
        finish_row(args, row, choice, log_sum);
    }
}

__global__ void __cluster_dims__(kSampleCluster, 1, 1) __launch_bounds__(kSampleThreads, 3)
    sample_kernel(SampleCudaArgs args, int32_t segment) {
    extern __shared__ __align__(16) unsigned char memory[];
    SampleShared& shared = *reinterpret_cast<SampleShared*>(memory);
    SampleRow row{shared, cooperative_groups::this_cluster(), blockIdx.y};
    row.rank = static_cast<int>(blockIdx.x);
    row.warp = static_cast<int>(threadIdx.x) / kWarp;
    row.lane = static_cast<int>(threadIdx.x) % kWarp;
    row.x = reinterpret_cast<float*>(memory + kSharedBytes) + row.warp * segment;
    row.first = row.segment() * segment;
    const int32_t real = max(0, min(segment, static_cast<int32_t>(args.vocab) - row.first));
    row.count = (real + kSamplePass - 1) / kSamplePass * kSamplePass;
    let_next_kernel_start();
    wait_for_previous_kernel();
    load_begin(args, row, real);
    const uint32_t barrier = shared_address(&shared.barriers[row.warp]);
    const int32_t slot_id = args.row_slots[row.row];
    if (slot_id < 0) {
        barrier_wait(barrier, 0);  // no copy may be under way at the end
        return;
    }
    load_slot(args, shared, slot_id);
    row.cluster.sync();  // all blocks run, and their counts are set, before anyone writes to another
    const SeenWords seen = load_seen(args, row, 0);
    const uint64_t fraction = draw_fraction(shared.slot.seed, static_cast<uint64_t>(shared.slot.outputs));
    barrier_wait(barrier, 0);

    double log_sum = 0;
    bool finite = true;
    if (shared.slot.logprobs != 0) {
        row.publish(shared.maxima, scan_segment(row));
        row.cluster.sync();
        const uint32_t best = reduce_segments(shared.maxima, row.lane, Max{});
        finite = best != kSampleNotFinite;
        if (finite) {
            log_sum = report_top(row, min(shared.slot.top, kSampleTopMax), best, args.results[row.row]);
        }
    }
    finite = edit_segment(args, row, seen) && finite;
    row.publish(shared.maxima, finite ? scan_segment(row) : kSampleNotFinite);
    row.cluster.sync();
    choose(args, row, reduce_segments(shared.maxima, row.lane, Max{}), fraction, log_sum);
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
                                    static_cast<int>(shared_bytes(vocab, 1))));
    return Status();
}

void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args) {
    check(args.vocab > 0 && args.vocab <= kSampleCudaVocabMax && args.rows <= 65535,
          "sample: at most 65535 rows of kSampleCudaVocabMax logits");
    if (args.rows == 0) {
        return;
    }
    cuda_check(launch_dependent({.grid = dim3(kSampleCluster, static_cast<unsigned>(args.rows)),
                                 .threads = kSampleThreads,
                                 .shared_bytes = static_cast<int>(shared_bytes(args.vocab, args.rows)),
                                 .stream = stream},
                                sample_kernel, args, static_cast<int32_t>(segment_size(args.vocab))));
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
