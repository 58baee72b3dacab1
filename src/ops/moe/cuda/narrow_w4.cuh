// Narrow int4 experts, some rows each: a cluster of two blocks does all of an item, an expert and its rows.
//
// Roofline: memory, 0.516 bytes a weight: 1.22 MB an expert of 192 at hidden 4096, 19 us of a cluster's
// share.
//
// Schedule: each block makes half of the outputs of gate and up (three units of 64 rows of weights, one a
// consumer), SwiGLU in registers; the blocks exchange their rows' largest values and act by distributed
// shared memory; then each makes half of down's outputs, whose units its consumers take in turn. Weights are
// one stream from the first item's to the last's: a ring for each consumer, two groups of gate and up or a
// unit of down at a place. The rows of x have a ring of their own.
//
// Sums and roundings are those of experts_grouped.cuh.
#pragma once

#include <algorithm>

#include "ops/common/cuda/cache_policy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/cuda/grouped_products.cuh"
#include "ops/moe/cuda/grouped_rows.cuh"
#include "ops/moe/cuda/narrow_down_weights.cuh"
#include "ops/moe/cuda/narrow_plan.cuh"
#include "ops/moe/cuda/narrow_w4.h"
#include "ops/moe/cuda/quantize_row.cuh"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

inline constexpr int kNarrowConsumers = 3;
inline constexpr int kNarrowWarps = 2 * 4 * kNarrowConsumers;  // that consume, of a cluster
static_assert(kNarrowWidth == 2 * 32 * kNarrowConsumers);
static_assert(kNarrowDownBytes <= 2 * kNarrowGroupBytes);

template <int RowsMax>
struct NarrowW4Shape {
    static constexpr int kRowsMax = RowsMax;
    static constexpr int kGroupRowBytes = RowsMax * kSwizzleRowBytes;  // of x or act
    // Of x, two groups each.
    static constexpr int kRowStages = RowsMax <= 32 ? 5 : 3;
    static constexpr int kUnderWay = kRowStages - (RowsMax <= 32 ? 2 : 1);
    static constexpr int kRowStageBytes = 2 * kGroupRowBytes;
    static constexpr int kSlots = RowsMax <= 48 ? 6 : 5;  // of a consumer's weights
    static constexpr int kSlotBytes = 2 * kNarrowGroupBytes;
    static constexpr int kActBytes = 2 * kGroupRowBytes;
    // Of a consumer: two buffers of up to 32 rows, or one.
    static constexpr int kTwoRows = RowsMax <= 48 ? 32 : 0;
    static constexpr int kResultBytes = std::max(2 * kTwoRows, RowsMax) * kSwizzleRowBytes;
    static constexpr int kRows = 0;
    static constexpr int kAct = kRowStages * kRowStageBytes;
    static constexpr int kResults = kAct + kActBytes;
    static constexpr int kWeights = kResults + kNarrowConsumers * kResultBytes;
    static constexpr int kLargest = kWeights + kNarrowConsumers * kSlots * kSlotBytes;
    static constexpr int kScales = kLargest + kNarrowWarps * RowsMax * 2;
    static constexpr int kBarriers = kScales + kNarrowConsumers * RowsMax * 4;
    static constexpr int kBarrierCount = 2 * kRowStages + 2 * kNarrowConsumers * kSlots + 2;
    static constexpr int kItems = kBarriers + kBarrierCount * 8;
    static constexpr int kPlanWarps = kItems + (kNarrowItemsMax + 1) * static_cast<int>(sizeof(NarrowItem));
    static constexpr int kLists = (kPlanWarps + kNarrowThreads / 32 * 4 + 15) / 16 * 16;
    static constexpr int kBytes = kLists + kNarrowItemsMax * RowsMax * 2;
    static_assert(kBytes <= 232448);
    // The plan's lists are where x and act will be.
    static_assert(kNarrowPairsMax * 2 <= kAct && kNarrowExpertsMax * 4 <= kActBytes);
};

template <typename Shape>
struct NarrowMemory {
    uint8_t* base = nullptr;
    uint32_t address = 0;

    __device__ __forceinline__ ExpertsRing<Shape::kRowStages> rows() const {
        return {.barriers = address + Shape::kBarriers};
    }
    __device__ __forceinline__ ExpertsRing<Shape::kSlots> weights(int consumer) const {
        return {.barriers = address + Shape::kBarriers + 16 * (Shape::kRowStages + consumer * Shape::kSlots)};
    }
    __device__ __forceinline__ uint32_t slot(int consumer, int slot) const {
        return address + Shape::kWeights + (consumer * Shape::kSlots + slot) * Shape::kSlotBytes;
    }
    // That all warps of the cluster have told their largest values; that all of act is there.
    __device__ __forceinline__ uint32_t told() const {
        return address + Shape::kBarriers + 16 * (Shape::kRowStages + kNarrowConsumers * Shape::kSlots);
    }
    __device__ __forceinline__ uint32_t act_full() const { return told() + 8; }
    __device__ __forceinline__ NarrowPlan plan() const {
        return {.ids = reinterpret_cast<uint16_t*>(base),
                .counts = reinterpret_cast<int32_t*>(base + Shape::kAct),
                .warps = reinterpret_cast<int32_t*>(base + Shape::kPlanWarps),
                .items = reinterpret_cast<NarrowItem*>(base + Shape::kItems),
                .pairs = reinterpret_cast<uint16_t*>(base + Shape::kLists)};
    }
    __device__ __forceinline__ uint16_t* pairs(int item) const {
        return plan().pairs + item * Shape::kRowsMax;
    }
};

// A barrier a thread.
template <typename Shape>
__device__ __forceinline__ void narrow_init_barriers(const NarrowMemory<Shape>& memory) {
    static_assert(Shape::kBarrierCount <= kNarrowThreads);
    const int barrier = static_cast<int>(threadIdx.x);
    const int weights = barrier - 2 * Shape::kRowStages;
    uint32_t arrivals = 1;  // of those that bring weights; of the exchange
    if (barrier < Shape::kRowStages) {
        arrivals = 32 * kExpertsRowWarps;
    } else if (weights < 0) {
        arrivals = 4 * kNarrowConsumers * kWarpArrivals;
    } else if (weights < 2 * kNarrowConsumers * Shape::kSlots && weights / Shape::kSlots % 2 != 0) {
        arrivals = 4 * kWarpArrivals;
    }
    if (barrier < Shape::kBarrierCount) {
        barrier_init(memory.address + Shape::kBarriers + 8 * barrier, arrivals);
    }
    barrier_init_fence();
}

// One thread. Weights do not depend on the kernel before.
template <typename Shape>
__device__ __forceinline__ void narrow_bring_weights(const NarrowW4Args& args,
                                                     const NarrowMemory<Shape>& memory) {
    ExpertsRing<Shape::kSlots> rings[kNarrowConsumers];
#pragma unroll
    for (int c = 0; c < kNarrowConsumers; ++c) {
        rings[c] = memory.weights(c);
    }
    const auto bring = [&](int c, const uint8_t* from, uint32_t bytes) {
        barrier_wait(rings[c].empty(), rings[c].parity ^ 1);
        barrier_arrive_expect(rings[c].full(), bytes);
        copy_bulk_once(memory.slot(c, rings[c].stage), from, bytes, rings[c].full());
        rings[c].advance();
    };
    const auto rank = static_cast<int>(cluster_rank());
    const int groups = args.hidden / static_cast<int>(kGroupedInputs);
    const int units = args.hidden / static_cast<int>(2 * kGroupedUnitRows);  // of down, of one block
    const int64_t unit_bytes = w4_unit_bytes(args.hidden);
    for (int i = 0; memory.plan().items[i].rows > 0; ++i) {
        const int half = 2 * memory.plan().items[i].expert + rank;
        const uint8_t* from = args.gate_up + half * kNarrowConsumers * unit_bytes;
        for (int group = 0; group < groups; group += 2) {
            const uint32_t bytes = min(2, groups - group) * kNarrowGroupBytes;
#pragma unroll
            for (int c = 0; c < kNarrowConsumers; ++c) {
                bring(c, from + c * unit_bytes, bytes);
            }
            from += bytes;
        }
        from = args.down + static_cast<int64_t>(half) * units * kNarrowDownBytes;
        for (int unit = 0; unit < units; unit += kNarrowConsumers) {
#pragma unroll
            for (int c = 0; c < kNarrowConsumers; ++c) {
                if (unit + c < units) {
                    bring(c, from + (unit + c) * kNarrowDownBytes, kNarrowDownBytes);
                }
            }
        }
    }
}

// Two warps.
template <typename Shape>
__device__ __forceinline__ void narrow_bring_rows(const NarrowW4Args& args,
                                                  const NarrowMemory<Shape>& memory) {
    constexpr int kKept = Shape::kRowsMax / kCopyRows;
    const int lane_row = static_cast<int>(threadIdx.x % (32 * kExpertsRowWarps) / 8);
    const int piece = static_cast<int>(threadIdx.x % 8);
    ExpertsRing<Shape::kRowStages> stages = memory.rows();
    FencedStages<Shape::kRowStages, Shape::kUnderWay> fenced(stages);
    for (int i = 0; memory.plan().items[i].rows > 0; ++i) {
        const int rows = memory.plan().items[i].rows - lane_row;
        const uint16_t* pairs = memory.pairs(i) + lane_row;
        int32_t offsets[kKept];
#pragma unroll
        for (int n = 0; n < kKept; ++n) {
            offsets[n] = n * kCopyRows < rows ? pairs[n * kCopyRows] / args.k * args.hidden + piece * 16 : 0;
        }
        for (int input = 0; input < args.hidden; input += 2 * kSwizzleRowBytes) {
            fenced.acquire();
            const uint32_t to = memory.address + Shape::kRows + stages.stage * Shape::kRowStageBytes +
                                swizzle_128(lane_row, piece);
#pragma unroll
            for (int group = 0; group < 2; ++group) {
#pragma unroll
                for (int n = 0; n < kKept; ++n) {
                    if (n * kCopyRows < rows && input + group * kSwizzleRowBytes < args.hidden) {
                        copy_async_16(to + group * Shape::kGroupRowBytes + n * kCopyRows * kSwizzleRowBytes,
                                      args.x + offsets[n] + input + group * kSwizzleRowBytes);
                    }
                }
            }
            fenced.commit();
        }
    }
    fenced.tell_all();
}

template <typename Shape>
struct NarrowConsumer {
    NarrowMemory<Shape> memory;
    ExpertsRing<Shape::kSlots> weights;
    ExpertsRing<Shape::kRowStages> rows;
    uint32_t parity = 0;  // of the exchange

    __device__ __forceinline__ int index() const { return static_cast<int>(threadIdx.x / 128); }
    __device__ __forceinline__ uint32_t rank() const { return cluster_rank(); }
    __device__ __forceinline__ uint32_t slot() const { return memory.slot(index(), weights.stage); }
    // kW4Unit times those of the rows: of x, then of act.
    __device__ __forceinline__ uint32_t scales() const {
        return memory.address + Shape::kScales + index() * Shape::kRowsMax * 4;
    }
    // As the sums of a thread need them: of rows 8 j + 2 (lane % 4) and the next.
    __device__ __forceinline__ float2 row_scales(int j) const { return column_pair(scales(), j); }
    __device__ __forceinline__ uint32_t results(int turn = 0) const {
        return memory.address + Shape::kResults + index() * Shape::kResultBytes +
               turn * (Shape::kTwoRows * kSwizzleRowBytes);
    }
};

// Gate and up: sums over all groups of one unit.
template <typename Shape, int N>
__device__ __forceinline__ void narrow_multiply(float (&sums)[N / 2], NarrowConsumer<Shape>& me, int groups) {
    float part[N / 2];
#pragma unroll
    for (float& sum : sums) {
        sum = 0;
    }
    const auto issue = [&](const W4Weights& weights, int group) {
        grouped_issue<N>(
            part, weights,
            mma_descriptor(me.memory.address + Shape::kRows + me.rows.stage * Shape::kRowStageBytes +
                           group * Shape::kGroupRowBytes));
    };
    const auto finish = [&](const W4Weights& weights) {
        mma_wait<0>();
        grouped_hold(weights);
        grouped_promote<N>(sums, part, weights);
    };
    // Codes are loaded a product before they are converted, as loads wait behind the tensor cores' reads.
    const auto load = [&](int half) { return w4_load_unit(me.slot() + half * kNarrowGroupBytes); };
    barrier_wait(me.weights.full(), me.weights.parity);
    W4Weights first = w4_convert(load(0));
    W4Raw raw = load(1);
#pragma unroll 1
    for (int group = 0; group + 1 < groups; group += 2) {
        barrier_wait(me.rows.full(), me.rows.parity);
        issue(first, 0);
        grouped_release(me.weights);
        const W4Weights second = w4_convert(raw);
        if (group + 2 < groups) {
            barrier_wait(me.weights.full(), me.weights.parity);
            raw = load(0);
        }
        finish(first);
        issue(second, 1);
        if (group + 2 < groups) {
            first = w4_convert(raw);
            raw = load(1);
        }
        finish(second);
        grouped_release(me.rows);
    }
    if (groups % 2 != 0) {
        barrier_wait(me.rows.full(), me.rows.parity);
        issue(first, 0);
        grouped_release(me.weights);
        finish(first);
        grouped_release(me.rows);
    }
}

// act of all outputs in both blocks; its scales, of rows below N, in scales().
template <typename Shape, int N>
__device__ __forceinline__ void narrow_make_act(const float (&sums)[N / 2], NarrowConsumer<Shape>& me) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int warp = thread / 32;
    const int lane = thread % 32;
    uint32_t most = 0;  // of two rows, in the lanes of their eight
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t matrices[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const float2 scales = me.row_scales(j + m);
            const float* sum = sums + 4 * (j + m);
            matrices[m] = pack_bf16(swiglu(sum[0] * scales.x, sum[2] * scales.x),
                                    swiglu(sum[1] * scales.y, sum[3] * scales.y));
            uint32_t largest = larger_bf16x2(0, matrices[m]);
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) {
                largest = larger_bf16x2(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
            }
            most = lane / 4 == j + m ? largest : most;
        }
        store_transposed(me.results() + swizzle_128(8 * j + lane % 16, warp), matrices);
    }
    const uint32_t largest = me.memory.address + Shape::kLargest;
    if (lane / 4 < N / 8) {
        const uint32_t to =
            largest + 2 * (((me.rank() * kNarrowConsumers + me.index()) * 4 + warp) * Shape::kRowsMax +
                           lane / 4 * 8 + lane % 4 * 2);
        store_to_both(to, me.memory.told(), most);
    }
    if (threadIdx.x == 0) {
        barrier_arrive_expect(me.memory.told(), kNarrowWarps * N * 2);
        barrier_arrive_expect(me.memory.act_full(), N * kNarrowWidth);
    }
    group_barrier(1 + me.index(), 128);  // the rows' values are there
    barrier_wait(me.memory.told(), me.parity);

    constexpr int kThreads = N <= 16 ? 8 : N <= 32 ? 4 : 2;  // of a row
    const int row = thread / kThreads;
    const int part = thread % kThreads;
    float value = 0;
#pragma unroll
    for (int i = 0; i < kNarrowWarps / kThreads; ++i) {
        uint16_t bits = 0;
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(bits)
                     : "r"(largest + 2 * ((part + i * kThreads) * Shape::kRowsMax + min(row, N - 1)))
                     : "memory");
        value = fmaxf(value, low_bf16(bits));
    }
#pragma unroll
    for (int offset = 1; offset < kThreads; offset *= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
    }
    const float scale = row_scale(value);
    if (row < N && part < 2) {
        if (part == 0) {
            store_shared(me.scales() + row * 4, scale * kW4Unit);
        }
        const Divider divide = divider(scale);
        const uint2 low = quantize_eight(load_shared_16(me.results() + swizzle_128(row, 2 * part)), divide);
        const uint2 high =
            quantize_eight(load_shared_16(me.results() + swizzle_128(row, 2 * part + 1)), divide);
        const int place = static_cast<int>(me.rank() * kNarrowConsumers + me.index()) * 2 + part;
        const uint32_t to =
            me.memory.address + Shape::kAct + place / 8 * Shape::kGroupRowBytes + swizzle_128(row, place % 8);
        store_to_both(to, me.memory.act_full(), make_uint4(low.x, low.y, high.x, high.y));
    }
    group_barrier(1 + me.index(), 128);  // the scales are there
    barrier_wait(me.memory.act_full(), me.parity);
    fence_proxy_async();
    me.parity ^= 1;
}

// Down: this consumer's units of the block's half.
template <typename Shape, int N>
__device__ __forceinline__ void narrow_down(const NarrowW4Args& args, NarrowConsumer<Shape>& me,
                                            const uint16_t* pairs, int rows) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const int units = args.hidden / static_cast<int>(2 * kGroupedUnitRows);
    uint8_t* to[N / 16];
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
        const int row = 16 * i + thread / 8;
        const int64_t at = row < rows ? pairs[row] : 0;
        to[i] = args.out +
                2 * (at * args.hidden + static_cast<int>(me.rank()) * args.hidden / 2 + thread % 8 * 8);
    }
    constexpr bool kTwo = N <= Shape::kTwoRows;
    constexpr bool kKept =
        kTwo && (Shape::kRowsMax <= 32 || N <= 16);  // scales and the next weights, as registers allow
    int turn = 0;                                    // of the buffers
    const auto copy = [&](int unit) {
        group_barrier(1 + me.index(), 128);
#pragma unroll
        for (int i = 0; i < N / 16; ++i) {
            const int row = 16 * i + thread / 8;
            if (row < rows) {
                store_with_policy(to[i] + unit * 128,
                                  load_shared_16(me.results(turn) + swizzle_128(row, thread % 8)),
                                  policy_to_keep());  // until it is added
            }
        }
        if (kTwo) {
            turn ^= 1;
        } else {
            group_barrier(1 + me.index(), 128);
        }
    };
    const uint64_t act = mma_descriptor(me.memory.address + Shape::kAct);
    const auto load = [&] {
        barrier_wait(me.weights.full(), me.weights.parity);
        const NarrowRaw raw = narrow_load_down(me.slot());
        grouped_release(me.weights);
        return raw;
    };
    if (me.index() >= units) {
        return;
    }
    NarrowDown weights = narrow_convert(load());
#pragma unroll 1
    for (int unit = me.index(); unit < units; unit += kNarrowConsumers) {
        float sums[N / 2];
        float part[N / 2];
        mma_pin(sums);
        mma_pin(part);
        mma_begin();
        // Neither waits for the other.
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            mma_weights_fp8(sums, weights.first.registers + 4 * step, act + step * kMmaStepBytes / 16,
                            step > 0 ? 1 : 0);
            if (step < 2) {
                mma_weights_fp8(part, weights.half + 4 * step,
                                act + (Shape::kGroupRowBytes + step * kMmaStepBytes) / 16, step > 0 ? 1 : 0);
            }
        }
        mma_commit();
        NarrowRaw raw{};
        if (kKept && unit + kNarrowConsumers < units) {
            raw = load();
        }
        if (unit != me.index()) {
            copy(unit - kNarrowConsumers);
        }
        const uint32_t scales_first = weights.first.scales;
        const uint32_t scales_half = weights.half_scales;
        NarrowDown next;
        if (kKept && unit + kNarrowConsumers < units) {
            next = narrow_convert(raw);
        }
        mma_wait<0>();
        mma_pin(sums);
        mma_pin(part);
        narrow_hold(weights);
        if constexpr (kKept) {
            weights = next;
        } else if (unit + kNarrowConsumers < units) {
            weights = narrow_convert(load());
        }
        const auto value = [&](int i) {
            const float first = i % 4 < 2 ? low_bf16(scales_first) : high_bf16(scales_first);
            const float half = i % 4 < 2 ? low_bf16(scales_half) : high_bf16(scales_half);
            return fmaf(half, part[i], fmaf(first, sums[i], 0.0f));
        };
        const int place = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            const float2 scales[2] = {me.row_scales(j), me.row_scales(j + 1)};
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                matrices[m] = pack_bf16(value(4 * j + 2 * m) * scales[m / 2].x,
                                        value(4 * j + 2 * m + 1) * scales[m / 2].y);
            }
            store_transposed(me.results(turn) + swizzle_128(8 * j + lane / 16 * 8 + lane % 8, place),
                             matrices);
        }
    }
    copy(units - 1 - (units - 1 - me.index()) % kNarrowConsumers);
}

template <typename Shape, int N>
__device__ __forceinline__ void narrow_consume_item(const NarrowW4Args& args, NarrowConsumer<Shape>& me,
                                                    const uint16_t* pairs, int rows) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const float x_scale = thread < rows ? args.x_scale[pairs[thread] / args.k] : 0.0f;
    {
        float sums[N / 2];
        narrow_multiply<Shape, N>(sums, me, args.hidden / static_cast<int>(kGroupedInputs));
        if (thread < N) {
            store_shared(me.scales() + thread * 4, x_scale * kW4Unit);
        }
        group_barrier(1 + me.index(), 128);  // also: the results of the last item are copied
        narrow_make_act<Shape, N>(sums, me);
    }
    narrow_down<Shape, N>(args, me, pairs, rows);
}

template <typename Shape>
__device__ __forceinline__ void narrow_consume(const NarrowW4Args& args, const NarrowMemory<Shape>& memory,
                                               int consumer) {
    NarrowConsumer<Shape> me{.memory = memory, .weights = memory.weights(consumer), .rows = memory.rows()};
    for (int i = 0;; ++i) {
        const int rows = memory.plan().items[i].rows;
        if (rows == 0) {
            return;
        }
        const uint16_t* pairs = memory.pairs(i);
        if (rows <= 16) {
            narrow_consume_item<Shape, 16>(args, me, pairs, rows);
        } else if (rows <= 32) {
            narrow_consume_item<Shape, 32>(args, me, pairs, rows);
        } else if constexpr (Shape::kRowsMax > 32) {
            if (Shape::kRowsMax <= 48 || rows <= 48) {
                narrow_consume_item<Shape, 48>(args, me, pairs, rows);
            } else if constexpr (Shape::kRowsMax > 48) {
                narrow_consume_item<Shape, 64>(args, me, pairs, rows);
            }
        }
    }
}

template <typename Shape>
__global__ void __launch_bounds__(kNarrowThreads, 1) __cluster_dims__(2)
    narrow_w4_kernel(const __grid_constant__ NarrowW4Args args) {
    extern __shared__ __align__(1024) uint8_t shared_raw[];
    const NarrowMemory<Shape> memory{.base = shared_raw, .address = shared_address(shared_raw)};
    const auto warpgroup = static_cast<int>(threadIdx.x / 128);
    const auto warp = static_cast<int>(threadIdx.x / 32);
    narrow_init_barriers(memory);
    let_next_kernel_start();
    if (!args.early) {
        wait_for_previous_kernel();
    }
    // The barriers are fenced.
    cluster_arrive_relaxed();
    narrow_plan<Shape::kRowsMax>(args.choices, memory.plan());
    cluster_wait();  // the other block runs, and its barriers are there
    // Before the weights are asked for: the code for it would come from memory behind them (2 to 6 us).
    if (cluster_rank() == 0) {
        narrow_list<Shape::kRowsMax>(args.choices, memory.plan());
    }
    cluster_arrive();
    if (warpgroup == kNarrowConsumers) {
        registers_give<48>();
        if (warp % 4 == 0) {
            if (threadIdx.x % 32 == 0) {
                narrow_bring_weights(args, memory);
            }
            __syncwarp();
        }
        cluster_wait();
        if (warp % 4 >= 4 - kExpertsRowWarps) {
            wait_for_previous_kernel();
            narrow_bring_rows(args, memory);
        }
    } else {
        registers_take<152>();
        cluster_wait();
        wait_for_previous_kernel();
        narrow_consume(args, memory, warpgroup);
    }
}

// x in e4m3 by blocks of a row each.
inline constexpr int kNarrowInputThreads = 256;

__global__ void __launch_bounds__(kNarrowInputThreads) narrow_inputs_kernel(NarrowInputsArgs args) {
    __shared__ float warps[kNarrowInputThreads / 32];
    wait_for_previous_kernel();
    let_next_kernel_start();
    const auto thread = static_cast<int>(threadIdx.x);
    const int64_t row = blockIdx.x;
    const QuantizeRow work{.from = args.x + row * args.hidden,
                           .to = args.x8 + row * args.hidden,
                           .scale = args.x_scale + row,
                           .count = args.hidden};
    RowPieces<kGroupedHiddenMax / (8 * kNarrowInputThreads)> pieces;
    pieces.load(work, thread, kNarrowInputThreads);
    warps[thread / 32] = pieces.largest();
    for (auto i = static_cast<int>(row) * kNarrowInputThreads + thread; i < args.counters_count;
         i += static_cast<int>(gridDim.x) * kNarrowInputThreads) {
        args.counters[i] = 0;
    }
    __syncthreads();
    pieces.store_scaled<kNarrowInputThreads / 32>(work, thread, warps);
}

}  // namespace tessera::cuda
