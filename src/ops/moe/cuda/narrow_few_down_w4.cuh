// Down of narrow int4 experts for a few tokens, and the sums over each token's: no rows of out.
//
// Roofline: memory, 0.516 bytes a weight: 0.41 MB an expert of 192 at hidden 4096.
//
// Schedule: a cluster of two blocks has 64 outputs (a unit of each expert's weights) of all tokens, each
// block half of the experts. It goes through them in steps of up to 8 rows, which five consumers take in
// turn: weights go to registers two steps ahead, from the level-2 cache, which narrow_few_w4.cuh has asked
// for them; products by wgmma; results in bfloat16, as rows of out would be, are added with their shares to
// the consumer's float32 sums in shared memory. Before the first step each block quantises the rows of act
// that it needs.
#pragma once

#include <cstdint>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/common/cuda/wgmma.cuh"
#include "ops/moe/cuda/narrow_down_weights.cuh"
#include "ops/moe/cuda/narrow_few_w4.h"
#include "ops/moe/cuda/quantize_row.cuh"

namespace tessera::cuda {

inline constexpr int kFewDownConsumers = 5;
inline constexpr int kFewDownThreads = 128 * kFewDownConsumers;
inline constexpr int kFewDownOutputs = static_cast<int>(kGroupedUnitRows);
inline constexpr int kFewDownRows = 8;  // of a step
inline constexpr int kFewDownPairs = kNarrowFewTokens * kNarrowFewK;
inline constexpr int kFewDownSteps = kFewDownPairs;  // at most: a row each
static_assert(kNarrowFewExperts <= kFewDownThreads && kFewDownPairs <= kFewDownThreads);
static_assert(kNarrowFewTokens / 2 * (kFewDownOutputs / 4) <= 128);

// Rows that are worked on together: of one expert.
struct FewDownStep {
    int32_t unit = 0;   // of the expert's weights, the first of its units
    int16_t first = 0;  // of the pairs
    int16_t rows = 0;
};

// What lies where in shared memory.
struct FewDownMemory {
    // Of act: 16 bytes of all rows, then the next of all. No two of them begin in the same banks; a step
    // reads past its rows.
    static constexpr int kPieceBytes = 16 * (kFewDownPairs + kFewDownRows + 1);
    static constexpr int kSums = 0;  // float [consumers][tokens, kFewDownOutputs]
    static constexpr int kSumsBytes = kNarrowFewTokens * kFewDownOutputs * 4;
    static constexpr int kInbox = kFewDownConsumers * kSumsBytes;  // sums of the other block
    static constexpr int kAct = kInbox + kSumsBytes;
    static constexpr int kResults = (kAct + kNarrowWidth / 16 * kPieceBytes + 127) / 128 * 128;
    static constexpr int kResultBytes =
        kFewDownRows * kSwizzleRowBytes;  // of a consumer and step: two in turn
    static constexpr int kBarrier = kResults + 2 * kFewDownConsumers * kResultBytes;
    static constexpr int kScales = kBarrier + 16;
    static constexpr int kShares = kScales + (kFewDownPairs + kFewDownRows) * 4;
    static constexpr int kSteps = kShares + (kFewDownPairs + kFewDownRows) * 4;
    static constexpr int kPairs = kSteps + kFewDownSteps * static_cast<int>(sizeof(FewDownStep));
    static constexpr int kTokens = kPairs + kFewDownPairs * 2;   // of the pairs: where their sums begin
    static constexpr int kCounts = kTokens + kFewDownPairs * 2;  // of the experts, then of warps; of all
    static constexpr int kBytes = kCounts + (kNarrowFewExperts + kNarrowFewExperts / 32 + 1) * 4;
    static_assert(kBytes <= 64 << 10);

    uint8_t* base = nullptr;
    uint32_t address = 0;

    __device__ __forceinline__ uint32_t barrier() const { return address + kBarrier; }
    __device__ __forceinline__ FewDownStep* steps() const {
        return reinterpret_cast<FewDownStep*>(base + kSteps);
    }
    __device__ __forceinline__ uint16_t* pairs() const { return reinterpret_cast<uint16_t*>(base + kPairs); }
    __device__ __forceinline__ uint16_t* tokens() const {
        return reinterpret_cast<uint16_t*>(base + kTokens);
    }
    __device__ __forceinline__ int* counts() const { return reinterpret_cast<int*>(base + kCounts); }
};

// By all threads: the pairs by expert, of this block's half of the experts, and the steps. Their number.
__device__ __forceinline__ int few_down_plan(const NarrowFewArgs& args, const FewDownMemory& memory) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int units = args.hidden / kFewDownOutputs;
    int* counts = memory.counts();
    int* warps = counts + kNarrowFewExperts;
    const int id = thread < args.tokens * args.k ? args.chosen[thread] : -1;
    const bool mine = id >= 0 && id < args.experts && (id & 1) == static_cast<int>(cluster_rank());
    if (thread < kNarrowFewExperts) {
        counts[thread] = 0;
    }
    for (int i = thread; i < kFewDownConsumers * FewDownMemory::kSumsBytes / 16; i += kFewDownThreads) {
        store_shared(memory.address + FewDownMemory::kSums + i * 16, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
    // A bit for each token: so the order of an expert's rows, and of its sums, is that of the tokens.
    const int token = thread / args.k;
    if (mine) {
        atomicOr(counts + id, 1 << token);
    }
    __syncthreads();
    const int count = thread < kNarrowFewExperts ? __popc(counts[thread]) : 0;
    const int place = mine ? __popc(counts[id] & ((1 << token) - 1)) : 0;
    const int steps = (count + kFewDownRows - 1) / kFewDownRows;
    const int sum = count | steps << 16;
    int upto = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(0xFFFFFFFFu, upto, offset);
        upto += lane >= offset ? before : 0;
    }
    if (lane == 31 && thread < kNarrowFewExperts) {
        warps[thread / 32] = upto;
    }
    __syncthreads();
    int before = upto - sum;
    int all = 0;
#pragma unroll
    for (int i = 0; i < kNarrowFewExperts / 32; ++i) {
        before += i < thread / 32 ? warps[i] : 0;
        all += warps[i];
    }
    if (thread < kNarrowFewExperts) {
        const int first = before & 0xFFFF;
        for (int i = 0; i < steps; ++i) {
            memory.steps()[(before >> 16) + i] = {
                .unit = thread * units,
                .first = static_cast<int16_t>(first + i * kFewDownRows),
                .rows = static_cast<int16_t>(min(kFewDownRows, count - i * kFewDownRows))};
        }
        counts[thread] = first;
    }
    __syncthreads();
    if (mine) {
        memory.pairs()[counts[id] + place] = static_cast<uint16_t>(thread);
        memory.tokens()[counts[id] + place] = static_cast<uint16_t>(token * kFewDownOutputs * 4);
    }
    if (thread == 0) {
        counts[kNarrowFewExperts + kNarrowFewExperts / 32] = all & 0xFFFF;
    }
    __syncthreads();
    return all >> 16;
}

// Eight rows of act from an address, of which a sixteenth is given, as the N side of wgmma.
__device__ __forceinline__ uint64_t few_down_rows(uint32_t sixteenth) {
    constexpr uint32_t kPieces = static_cast<uint32_t>(FewDownMemory::kPieceBytes >> 4) << 16;
    constexpr uint32_t kEightRows = 128 >> 4;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(sixteenth | kPieces), "n"(kEightRows));
    return descriptor;
}

// Where a thread's weights of the first unit lie.
struct FewDownPlace {
    const uint8_t* codes = nullptr;
    const uint8_t* scales = nullptr;

    __device__ __forceinline__ explicit FewDownPlace(const uint8_t* weights)
        : codes(weights + kW4ScaleBytes + threadIdx.x % 128 * 16),
          scales(weights + threadIdx.x % 128 / 4 * 4) {}
    __device__ __forceinline__ void load(NarrowRaw& raw, int unit) const {
        const int64_t at = static_cast<int64_t>(unit) * kNarrowDownBytes;
        const uint8_t* from = codes + at;
        raw.first.codes[0] = load_16(from);
        raw.first.codes[1] = load_16(from + 2048);
        raw.half = load_16(from + kNarrowGroupBytes);
        raw.first.scales = load_4(scales + at);
        raw.half_scales = load_4(scales + at + kNarrowGroupBytes);
    }
    static __device__ __forceinline__ uint32_t load_4(const uint8_t* from) {
        uint32_t v;
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
        return v;
    }
    static __device__ __forceinline__ uint4 load_16(const uint8_t* from) {
        uint4 v;
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
        return v;
    }
};

struct FewDownConsumer {
    const NarrowFewArgs& args;
    const FewDownMemory& memory;
    int count = 0;         // of steps
    FewDownPlace weights;  // of expert 0, the block's unit

    __device__ __forceinline__ int index() const { return static_cast<int>(threadIdx.x / 128); }
    __device__ __forceinline__ void load(NarrowRaw& raw, int step) const {
        if (step < count) {
            weights.load(raw, memory.steps()[step].unit);
        }
    }
    // Act to e4m3, by all warps. A lane has eight values of a row.
    __device__ __forceinline__ void quantise() const {
        constexpr int kAtOnce = 4;
        constexpr int kWarps = kFewDownThreads / 32;
        const int lane = static_cast<int>(threadIdx.x % 32);
        const int rows = memory.counts()[kNarrowFewExperts + kNarrowFewExperts / 32];
        const uint32_t act = memory.address + FewDownMemory::kAct;
#pragma unroll 1
        for (auto begin = static_cast<int>(threadIdx.x / 32); begin < rows; begin += kAtOnce * kWarps) {
            uint4 raw[kAtOnce];
            float share[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int pair = memory.pairs()[min(begin + i * kWarps, rows - 1)];
                raw[i] = make_uint4(0, 0, 0, 0);
                if (lane < kNarrowWidth / 8) {
                    raw[i] = __ldcg(reinterpret_cast<const uint4*>(args.act + pair * kNarrowWidth) + lane);
                }
                share[i] = args.expert_weights[pair];
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int row = begin + i * kWarps;
                const uint32_t most = larger_bf16x2(0, raw[i]);
                float value = fmaxf(low_bf16(most), high_bf16(most));
#pragma unroll
                for (int offset = 16; offset > 0; offset /= 2) {
                    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
                }
                const float scale = row_scale(value);
                const uint2 eight = quantize_eight(raw[i], divider(scale));
                if (lane < kNarrowWidth / 8 && row < rows) {
                    store_shared(act + lane / 2 * FewDownMemory::kPieceBytes + row * 16 + lane % 2 * 8,
                                 eight);
                }
                if (lane == 0 && row < rows) {
                    store_shared(memory.address + FewDownMemory::kScales + row * 4, scale);
                    store_shared(memory.address + FewDownMemory::kShares + row * 4, share[i]);
                }
            }
        }
        fence_proxy_async();
        __syncthreads();
    }
    // raw: the step's weights; then those of the second next of this consumer.
    __device__ __forceinline__ void work(NarrowRaw& raw, int s, int turn) const {
        const int thread = static_cast<int>(threadIdx.x % 128);
        const int lane = thread % 32;
        const FewDownStep step = memory.steps()[s];
        const NarrowDown now = narrow_convert(raw);
        load(raw, s + 2 * kFewDownConsumers);
        float sums[kFewDownRows / 2];
        float part[kFewDownRows / 2];
        // Addresses in a cluster have the block's rank above their 18 bits.
        const uint32_t rows = ((memory.address + FewDownMemory::kAct) & 0x3FFFF) / 16 + step.first;
        mma_pin(sums);
        mma_pin(part);
        mma_begin();
        // Neither waits for the other.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            constexpr int kStep = 2 * FewDownMemory::kPieceBytes / 16;
            mma_weights_fp8(sums, now.first.registers + 4 * i, few_down_rows(rows + i * kStep),
                            i > 0 ? 1 : 0);
            if (i < 2) {
                mma_weights_fp8(part, now.half + 4 * i, few_down_rows(rows + (4 + i) * kStep), i > 0 ? 1 : 0);
            }
        }
        mma_commit();
        // Of the row that this thread adds: four outputs.
        const int quad = thread % 16;
        const int row = step.first + min(thread / 16, step.rows - 1);
        const uint32_t to = memory.address + FewDownMemory::kSums + index() * FewDownMemory::kSumsBytes +
                            memory.tokens()[row] + quad * 16;
        const float share = load_shared_float(memory.address + FewDownMemory::kShares + row * 4);
        const float2 tokens = column_pair(memory.address + FewDownMemory::kScales + step.first * 4, 0);
        const float2 scale = make_float2(tokens.x * kW4Unit, tokens.y * kW4Unit);
        mma_wait<0>();
        mma_pin(sums);
        mma_pin(part);
        narrow_hold(now);
        const auto value = [&](int i) {
            const float first = i < 2 ? low_bf16(now.first.scales) : high_bf16(now.first.scales);
            const float half = i < 2 ? low_bf16(now.half_scales) : high_bf16(now.half_scales);
            return fmaf(half, part[i], first * sums[i]) * (i % 2 == 0 ? scale.x : scale.y);
        };
        const uint32_t results =
            memory.address + FewDownMemory::kResults + (2 * index() + turn) * FewDownMemory::kResultBytes;
        store_transposed(results + swizzle_128(lane % 8, thread / 32 * 2 + lane / 8 % 2),
                         {pack_bf16(value(0), value(1)), pack_bf16(value(2), value(3))});
        group_barrier(1 + index(), 128);
        const uint2 out = load_shared_8(results + swizzle_128(thread / 16, quad / 2) + quad % 2 * 8);
        if (thread / 16 < step.rows) {
            const uint4 raw_sum = load_shared_16(to);
            store_shared(
                to,
                make_uint4(add(share, low_bf16(out.x), raw_sum.x), add(share, high_bf16(out.x), raw_sum.y),
                           add(share, low_bf16(out.y), raw_sum.z), add(share, high_bf16(out.y), raw_sum.w)));
        }
    }
    static __device__ __forceinline__ uint32_t add(float share, float value, uint32_t sum) {
        return __float_as_uint(fmaf(share, value, __uint_as_float(sum)));
    }
    template <typename End>
    __device__ __forceinline__ void run(End& end) const {
        NarrowRaw even;
        NarrowRaw odd;
        load(even, index());
        load(odd, index() + kFewDownConsumers);
        wait_for_previous_kernel();
        end.load();
        quantise();
#pragma unroll 1
        for (int s = index(); s < count; s += 2 * kFewDownConsumers) {
            work(even, s, 0);
            if (s + kFewDownConsumers < count) {
                work(odd, s + kFewDownConsumers, 1);
            }
        }
    }
};

// Four outputs of a token: of this block's half of the tokens, which it ends with, or of the other's, whose
// sums it sends. y, and what is added to it.
struct FewDownEnd {
    const NarrowFewArgs& args;
    int quad = static_cast<int>(threadIdx.x % 16);
    bool own = threadIdx.x / 128 == 0;
    bool there = false;
    int token = 0;
    int at = 0;
    uint2 y = {0, 0};
    uint2 more = {0, 0};

    __device__ __forceinline__ explicit FewDownEnd(const NarrowFewArgs& all) : args(all) {
        const bool second = (cluster_rank() == 1) == own;
        token = static_cast<int>(threadIdx.x % 128 / 16) + (second ? middle() : 0);
        there = threadIdx.x < 256 && token < (second ? args.tokens : middle());
        at = token * args.hidden + static_cast<int>(blockIdx.x / 2) * kFewDownOutputs + 4 * quad;
    }
    __device__ __forceinline__ int middle() const { return (args.tokens + 1) / 2; }
    // What comes from the other block.
    __device__ __forceinline__ uint32_t inbox_bytes() const {
        const int tokens = cluster_rank() == 1 ? args.tokens - middle() : middle();
        return static_cast<uint32_t>(tokens * kFewDownOutputs * 4);
    }
    __device__ __forceinline__ void load() {
        if (there && own) {
            y = *reinterpret_cast<const uint2*>(args.y + at);
            if (args.more != nullptr) {
                more = *reinterpret_cast<const uint2*>(args.more + at);
            }
        }
    }
    // The consumers' sums are there.
    __device__ __forceinline__ void finish(const FewDownMemory& memory) const {
        if (!there) {
            return;
        }
        const uint32_t offset = (token * kFewDownOutputs + 4 * quad) * 4;
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < kFewDownConsumers; ++i) {
            add(sums, memory.address + FewDownMemory::kSums + i * FewDownMemory::kSumsBytes + offset);
        }
        const uint32_t inbox = memory.address + FewDownMemory::kInbox + offset;
        if (!own) {
            const uint32_t other = cluster_rank() ^ 1;
            store_to_block(address_in_block(inbox, other), sums, address_in_block(memory.barrier(), other));
            return;
        }
        barrier_wait(memory.barrier(), 0);
        add(sums, inbox);
        const float base[4] = {low_bf16(y.x), high_bf16(y.x), low_bf16(y.y), high_bf16(y.y)};
        const float shared[4] = {low_bf16(more.x), high_bf16(more.x), low_bf16(more.y), high_bf16(more.y)};
        float out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = round_bf16(sums[i]);
            if (args.more != nullptr) {
                sum = round_bf16(sum + shared[i]);
            }
            out[i] = base[i] + sum;
        }
        *reinterpret_cast<uint2*>(args.y + at) =
            make_uint2(pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3]));
    }
    static __device__ __forceinline__ void add(float (&sums)[4], uint32_t address) {
        const uint4 raw = load_shared_16(address);
        sums[0] += __uint_as_float(raw.x);
        sums[1] += __uint_as_float(raw.y);
        sums[2] += __uint_as_float(raw.z);
        sums[3] += __uint_as_float(raw.w);
    }
};

__global__ void __launch_bounds__(kFewDownThreads, 1)
    narrow_few_down_kernel(const __grid_constant__ NarrowFewArgs args) {
    extern __shared__ __align__(1024) uint8_t shared_raw[];
    const FewDownMemory memory{.base = shared_raw, .address = shared_address(shared_raw)};
    FewDownEnd end(args);
    if (threadIdx.x == 0) {
        barrier_init(memory.barrier(), 1);
        barrier_init_fence();
        barrier_arrive_expect(memory.barrier(), end.inbox_bytes());
    }
    let_next_kernel_start();
    if (!args.early) {
        wait_for_previous_kernel();
    }
    const int steps = few_down_plan(args, memory);
    // The barriers are fenced.
    cluster_arrive_relaxed();
    const FewDownConsumer consumer{
        .args = args,
        .memory = memory,
        .count = steps,
        .weights = FewDownPlace(args.down + static_cast<int64_t>(blockIdx.x / 2) * kNarrowDownBytes)};
    consumer.run(end);
    cluster_wait();  // the other block runs, and its barrier is there
    __syncthreads();
    end.finish(memory);
}

}  // namespace tessera::cuda
