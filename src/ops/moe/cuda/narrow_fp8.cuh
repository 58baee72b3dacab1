// Narrow fp8 experts, some rows each: a cluster of two blocks does all of an item, an expert and its rows.
//
// Roofline: memory, 2.36 MB an expert of 192 at hidden 4096, 36 us of a cluster's share. Of 192 experts 64,
// 128 and 512 tokens take 103.8, 112.1 and 126.9 us with combine, which is 96, 95 and 86 % (one H200,
// 2026-12-01).
//
// Schedule: each block makes half of the outputs of gate and up, 64 rows of weights by each of three
// consumers, and brings act to both blocks by distributed shared memory; then each makes half of down's
// outputs, 128 at a stage, which the consumers take in turn. Weights are one stream from the first item's to
// the last's. A stage is 128 bytes of K of gate and up and of the tokens' rows, or all inputs of down.
//
// Sums and roundings are those of experts_kernel.cuh, so that the bits are the same.
#pragma once

#include "ops/common/cuda/cache_policy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/moe/cuda/act_pairs.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/narrow_fp8.h"
#include "ops/moe/cuda/narrow_plan.cuh"

namespace tessera::cuda {

inline constexpr int kNarrowFp8Consumers = 3;
static_assert(kNarrowWidth == 2 * 32 * kNarrowFp8Consumers);

struct NarrowFp8Shape {
    static constexpr int kRowsMax = 64;
    static constexpr int kStages = 2 * kNarrowFp8Consumers;
    static constexpr int kBlockBytes = 64 * kSwizzleRowBytes;
    static constexpr int kGateBytes = kNarrowFp8Consumers * kBlockBytes;  // behind them the rows
    static constexpr int kRowsBytes = kRowsMax * kSwizzleRowBytes;        // also half of act
    static constexpr int kDownBytes = 4 * kBlockBytes;  // two blocks of outputs, twice 128 bytes of K
    static constexpr int kStageBytes = kGateBytes + kRowsBytes;
    static constexpr int kResultBytes = 4096;  // of a consumer
    static constexpr int kAct = kStages * kStageBytes;
    static constexpr int kResults = kAct + 2 * kRowsBytes;
    static constexpr int kBarriers = kResults + kNarrowFp8Consumers * kResultBytes;
    static constexpr int kBarrierCount = 2 * kStages + 3;
    static constexpr int kItems = kBarriers + kBarrierCount * 8;
    static constexpr int kPlanWarps = kItems + (kNarrowItemsMax + 1) * static_cast<int>(sizeof(NarrowItem));
    static constexpr int kLists = (kPlanWarps + kNarrowThreads / 32 * 4 + 15) / 16 * 16;
    static constexpr int kBytes = kLists + kNarrowItemsMax * kRowsMax * 2;
    static_assert(kBytes <= 232448 && kDownBytes <= kStageBytes);
    // Consumers take down's stages in turn by their places in the ring, so that each has seen the stage
    // before in a place of its own.
    static_assert(kStages % kNarrowFp8Consumers == 0);
    // The plan's lists are where act and results will be.
    static_assert(kNarrowPairsMax * 2 <= 2 * kRowsBytes &&
                  kNarrowExpertsMax * 4 <= kNarrowFp8Consumers * kResultBytes);
};

struct NarrowFp8Memory {
    using Shape = NarrowFp8Shape;
    uint8_t* base = nullptr;
    uint32_t address = 0;

    __device__ __forceinline__ ExpertsRing<Shape::kStages> stages() const {
        return {.barriers = address + Shape::kBarriers};
    }
    __device__ __forceinline__ uint32_t stage(int index) const {
        return address + index * Shape::kStageBytes;
    }
    // All of an item's act is there; no consumer of the cluster reads it any more; all consumers of the block
    // have seen their last stages of an item.
    __device__ __forceinline__ uint32_t act_full() const {
        return address + Shape::kBarriers + 16 * Shape::kStages;
    }
    __device__ __forceinline__ uint32_t act_empty() const { return act_full() + 8; }
    __device__ __forceinline__ uint32_t seen() const { return act_full() + 16; }
    __device__ __forceinline__ NarrowPlan plan() const {
        return {.ids = reinterpret_cast<uint16_t*>(base + Shape::kAct),
                .counts = reinterpret_cast<int32_t*>(base + Shape::kResults),
                .warps = reinterpret_cast<int32_t*>(base + Shape::kPlanWarps),
                .items = reinterpret_cast<NarrowItem*>(base + Shape::kItems),
                .pairs = reinterpret_cast<uint16_t*>(base + Shape::kLists)};
    }
    __device__ __forceinline__ NarrowItem item(int i) const { return plan().items[i]; }
    __device__ __forceinline__ const uint16_t* pairs(int i) const {
        return plan().pairs + i * Shape::kRowsMax;
    }
};

// Of an item: whose weights, and which of them.
struct NarrowFp8Expert {
    const NarrowFp8Side& side;
    int index;
    bool shared;

    __device__ __forceinline__ NarrowFp8Expert(const NarrowFp8Args& args, const NarrowItem& item)
        : side(item.expert == args.choices.experts ? args.shared : args.routed),
          index(item.expert == args.choices.experts ? 0 : item.expert),
          shared(item.expert == args.choices.experts) {}
};

// A barrier a thread.
__device__ __forceinline__ void narrow_fp8_init_barriers(const NarrowFp8Memory& memory) {
    using Shape = NarrowFp8Shape;
    constexpr uint32_t kConsumers = 4 * kNarrowFp8Consumers * kWarpArrivals;
    const auto barrier = static_cast<int>(threadIdx.x);
    const uint32_t arrivals = barrier < Shape::kStages            ? 1 + 32 * kExpertsRowWarps
                              : barrier == 2 * Shape::kStages     ? 1
                              : barrier == 2 * Shape::kStages + 1 ? 2 * kConsumers
                                                                  : kConsumers;
    if (barrier < Shape::kBarrierCount) {
        barrier_init(memory.address + Shape::kBarriers + 8 * barrier, arrivals);
    }
    barrier_init_fence();
}

// How many stages a cluster may have under way, among which memory's rate is shared. With a last round of few
// clusters, which would not use all of it, those without an item in it have fewer in proportion all the time,
// so that all end together.
struct NarrowFp8Share {
    int mine = 1;  // items of this cluster
    int most = 1;  // of any

    __device__ __forceinline__ explicit NarrowFp8Share(int items) {
        const int clusters = static_cast<int>(gridDim.x / 2);
        const int rounds = (items + clusters - 1) / clusters;
        const int last = items - (rounds - 1) * clusters;
        if (3 * last <= clusters && static_cast<int>(blockIdx.x / 2) >= last) {
            mine = rounds - 1;
            most = rounds;
        }
    }
    // In item i: whole numbers whose mean is the share.
    __device__ __forceinline__ int stages(int i) const {
        const int all = NarrowFp8Shape::kStages * mine;
        return (i + 1) * all / most - i * all / most;
    }
};

// One thread. Weights of routed experts leave the level-2 cache first; those of the shared one are read by
// some clusters.
__device__ __forceinline__ void narrow_fp8_bring_weights(const NarrowFp8Args& args,
                                                         const NarrowFp8Memory& memory,
                                                         const NarrowFp8Share& share) {
    using Shape = NarrowFp8Shape;
    ExpertsRing<Shape::kStages> ring = memory.stages();
    ExpertsRing<Shape::kStages> gone = memory.stages();  // the first that is not yet free again
    int under_way = 0;
    int limit = 0;
    const auto begin = [&](uint32_t bytes) {
        for (; under_way >= limit; --under_way) {
            barrier_wait(gone.empty(), gone.parity);
            gone.advance();
        }
        ++under_way;
        barrier_arrive_expect(ring.full(), bytes);
    };
    const auto rank = static_cast<int>(cluster_rank());
    const int tiles = args.hidden / 256;
    for (int i = 0; memory.item(i).rows > 0; ++i) {
        const NarrowFp8Expert expert(args, memory.item(i));
        limit = share.stages(i);
        const auto copy = [&](uint32_t to, const CUtensorMap* map, const int(&place)[5]) {
            if (expert.shared) {
                copy_box(to, map, place, ring.full());
            } else {
                copy_box_once(to, map, place, ring.full());
            }
        };
        for (int input = 0; input < args.hidden; input += kSwizzleRowBytes) {
            begin(Shape::kGateBytes);
            copy(memory.stage(ring.stage), &expert.side.gate_up,
                 {input, 0, 0, rank * (kNarrowWidth / 16), expert.index});
            ring.advance();
        }
        const int first = (2 * expert.index + rank) * tiles;
        for (int tile = first; tile < first + tiles; ++tile) {
            begin(Shape::kDownBytes);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                copy(memory.stage(ring.stage) + part * 2 * Shape::kBlockBytes, &expert.side.down,
                     {part * kSwizzleRowBytes, 0, 0, 0, tile});
            }
            ring.advance();
        }
    }
}

// Two warps.
__device__ __forceinline__ void narrow_fp8_bring_rows(const NarrowFp8Args& args,
                                                      const NarrowFp8Memory& memory) {
    using Shape = NarrowFp8Shape;
    constexpr int kCopied = kExpertsRowWarps * 32 / 8;  // at once
    constexpr int kKept = Shape::kRowsMax / kCopied;
    const int lane_row = static_cast<int>(threadIdx.x % (32 * kExpertsRowWarps) / 8);
    const int piece = static_cast<int>(threadIdx.x % 8);
    ExpertsRing<Shape::kStages> ring = memory.stages();
    for (int i = 0; memory.item(i).rows > 0; ++i) {
        const uint8_t* x = NarrowFp8Expert(args, memory.item(i)).side.x + piece * 16;
        const int rows = memory.item(i).rows - lane_row;
        int32_t offsets[kKept];
#pragma unroll
        for (int n = 0; n < kKept; ++n) {
            const int pair = n * kCopied < rows ? memory.pairs(i)[lane_row + n * kCopied] : 0;
            offsets[n] =
                (pair < args.choices.pairs ? pair / args.k : pair - args.choices.pairs) * args.hidden;
        }
        for (int input = 0; input < args.hidden; input += kSwizzleRowBytes) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            const uint32_t to = memory.stage(ring.stage) + Shape::kGateBytes + swizzle_128(lane_row, piece);
#pragma unroll
            for (int n = 0; n < kKept; ++n) {
                if (n * kCopied < rows) {
                    copy_async_16(to + n * kCopied * kSwizzleRowBytes, x + offsets[n] + input);
                }
            }
            barrier_arrive_copies(ring.full());
            ring.advance();
        }
        for (int tile = 0; tile < args.hidden / 256; ++tile) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            barrier_arrive(ring.full());
            ring.advance();
        }
    }
    // The block must not end while copies are under way into its memory.
    copy_async_commit();
    copy_async_wait<0>();
}

struct NarrowFp8Consumer {
    using Shape = NarrowFp8Shape;
    NarrowFp8Memory memory;
    ExpertsRing<Shape::kStages> ring;
    int index = 0;
    uint32_t parity = 0;  // of the item

    __device__ __forceinline__ uint32_t results() const {
        return memory.address + Shape::kResults + index * Shape::kResultBytes;
    }
    // The warp is through with the stage, `Times` for as many consumers.
    template <int Times>
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (kAllArrive || threadIdx.x % 32 == 0) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(ring.empty()), "n"(Times)
                         : "memory");
        }
    }
    __device__ __forceinline__ void tell_seen() const {
        __syncwarp();
        barrier_arrive_for_all(memory.seen(), threadIdx.x % 32 == 0);
    }
    __device__ __forceinline__ void tell_act_empty() const {
        __syncwarp();
#pragma unroll
        for (uint32_t rank = 0; rank < 2; ++rank) {
            if (kAllArrive || threadIdx.x % 32 == rank) {
                barrier_arrive_in(memory.act_empty(), rank);
            }
        }
    }
};

// Gate and up: sums over all inputs of this consumer's rows of weights.
template <int N>
__device__ __forceinline__ void narrow_fp8_multiply(float (&sums)[N / 2], NarrowFp8Consumer& me, int steps) {
    using Shape = NarrowFp8Shape;
#pragma unroll
    for (float& sum : sums) {
        sum = 0;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const uint32_t stage = me.memory.stage(me.ring.stage);
        const uint64_t weights = mma_descriptor(stage + me.index * Shape::kBlockBytes);
        const uint64_t rows = mma_descriptor(stage + Shape::kGateBytes);
        barrier_wait(me.ring.full(), me.ring.parity);
        fence_proxy_async();
        mma_pin(sums);
        mma_begin();
#pragma unroll
        for (int part = 0; part < kSwizzleRowBytes / kMmaStepBytes; ++part) {
            mma_shared<true>(sums, weights + part * kMmaStepBytes / 16, rows + part * kMmaStepBytes / 16, 1);
        }
        mma_commit();
        mma_wait<0>();
        mma_pin(sums);
        me.release<1>();
        me.ring.advance();
    }
}

// act of this consumer's 32 outputs into both blocks; then all of it is here.
template <int N>
__device__ __forceinline__ void narrow_fp8_make_act(const float (&sums)[N / 2], const ExpertsScales& scales,
                                                    NarrowFp8Consumer& me) {
    using Shape = NarrowFp8Shape;
    const int thread = static_cast<int>(threadIdx.x % 128);
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
        store_transposed(me.results() + act_pairs_put(j), act_pairs_matrix(sums + 8 * j, scales));
    }
    if (threadIdx.x == 0) {
        barrier_arrive_expect(me.memory.act_full(), N * kNarrowWidth);
    }
    group_barrier(1 + me.index, 128);
    barrier_wait(me.memory.act_empty(), me.parity ^ 1);
    const int row = thread / 2;  // of the buffer
    const int half = thread % 2;
    if (row < N / 2) {
        const ActPair pair = act_pairs_get(me.results(), row, half);
        const int token = act_pairs_token(row);
        const int piece = (static_cast<int>(cluster_rank()) * kNarrowFp8Consumers + me.index) * 2 + half;
        const uint32_t to = me.memory.address + Shape::kAct + piece / 8 * Shape::kRowsBytes;
        store_to_both(to + swizzle_128(token, piece % 8), me.memory.act_full(), pair.even);
        store_to_both(to + swizzle_128(token + 1, piece % 8), me.memory.act_full(), pair.odd);
    }
    group_barrier(1 + me.index, 128);  // the buffer is free
    barrier_wait(me.memory.act_full(), me.parity);
    fence_proxy_async();
}

// The sums of 128 outputs into the rows of out, 64 bytes of a row by each warp.
template <int N>
struct NarrowFp8Out {
    uint8_t* out = nullptr;  // of this thread: the first 16 bytes in row 0
    int32_t offsets[N / 8];  // of its rows; below 0: no row
    uint32_t put[2];
    uint32_t get = 0;

    __device__ __forceinline__ NarrowFp8Out(const NarrowFp8Args& args, const NarrowFp8Consumer& me,
                                            const uint16_t* pairs, int rows) {
        const int warp = static_cast<int>(threadIdx.x % 128 / 32);
        const int lane = static_cast<int>(threadIdx.x % 32);
        const uint32_t buffer = me.results() + warp * (NarrowFp8Shape::kResultBytes / 4);
        const int put_row = lane / 16 * 8 + lane % 8;
        put[0] = buffer + act_pairs_place(put_row, lane / 8 % 2);
        put[1] = buffer + act_pairs_place(put_row, 2 + lane / 8 % 2);
        get = buffer + act_pairs_place(lane / 4, lane % 4);
        out = args.out + static_cast<int64_t>(cluster_rank()) * args.hidden + warp * 64 + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const int row = 8 * i + lane / 4;
            offsets[i] = row < rows ? pairs[row] * args.hidden * 2 : -1;
        }
    }

    __device__ __forceinline__ void store(const float (&sums)[2][N / 2], float scale, int tile) const {
#pragma unroll
        for (int j = 0; j < N / 16; ++j) {
            __syncwarp();
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                uint32_t matrices[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float* sum = sums[block] + 8 * j + 2 * m;
                    matrices[m] = pack_bf16(sum[0] * scale, sum[1] * scale);
                }
                store_transposed(put[block], matrices);
            }
            __syncwarp();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t offset = offsets[2 * j + half];
                if (offset >= 0) {
                    store_with_policy(out + offset + tile * 256, load_shared_16(get + half * 512),
                                      policy_to_keep());  // until it is added
                }
            }
        }
    }
};

// Down: this consumer's stages of the block's half.
template <int N>
__device__ __forceinline__ void narrow_fp8_down(const NarrowFp8Args& args, NarrowFp8Consumer& me, float scale,
                                                const uint16_t* pairs, int rows) {
    using Shape = NarrowFp8Shape;
    const NarrowFp8Out<N> out(args, me, pairs, rows);
    const int tiles = args.hidden / 256;
    const uint64_t act = mma_descriptor(me.memory.address + Shape::kAct);
    // The first whose place in the ring is one of this consumer's.
    const int first = (me.index + Shape::kStages - me.ring.stage) % kNarrowFp8Consumers;
    if (first >= tiles) {
        me.tell_seen();
        me.tell_act_empty();
    }
    ExpertsRing<Shape::kStages> ring = me.ring;
    me.ring.advance(first);
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += kNarrowFp8Consumers) {
        const bool last = tile + kNarrowFp8Consumers >= tiles;
        const uint64_t weights = mma_descriptor(me.memory.stage(me.ring.stage));
        float sums[2][N / 2];
        barrier_wait(me.ring.full(), me.ring.parity);
        if (last) {
            me.tell_seen();
        }
        mma_pin(sums[0]);
        mma_pin(sums[1]);
        mma_begin();
#pragma unroll
        for (int step = 0; step < kNarrowWidth / kMmaStepBytes; ++step) {
            const int half = step / 4;
            const int inputs = step % 4 * kMmaStepBytes;
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                mma_shared<true>(sums[block],
                                 weights + ((2 * half + block) * Shape::kBlockBytes + inputs) / 16,
                                 act + (half * Shape::kRowsBytes + inputs) / 16, step > 0 ? 1 : 0);
            }
        }
        mma_commit();
        mma_wait<0>();
        mma_pin(sums[0]);
        mma_pin(sums[1]);
        me.release<kNarrowFp8Consumers>();
        if (last) {
            me.tell_act_empty();
        }
        me.ring.advance(kNarrowFp8Consumers);
        out.store(sums, scale, tile);
    }
    ring.advance(tiles);
    me.ring = ring;
}

template <int N>
__device__ __forceinline__ void narrow_fp8_consume_item(const NarrowFp8Args& args, NarrowFp8Consumer& me,
                                                        const NarrowItem& item, const uint16_t* pairs) {
    const NarrowFp8Expert expert(args, item);
    const NarrowFp8Side& side = expert.side;
    const float gate = side.gate_up_scale[2 * expert.index];
    const float up = side.gate_up_scale[2 * expert.index + 1];
    const float input = side.down_input_scale[expert.index];
    const float down = side.down_scale[expert.index];
    {
        float sums[N / 2];
        narrow_fp8_multiply<N>(sums, me, args.hidden / kSwizzleRowBytes);
        group_barrier(1 + me.index, 128);  // the results of the last item are copied
        narrow_fp8_make_act<N>(sums,
                               {.gate = gate * side.input_scale,
                                .up = up * side.input_scale,
                                .inverse_output = __frcp_rn(input)},
                               me);
    }
    narrow_fp8_down<N>(args, me, down * input, pairs, item.rows);
}

__device__ __forceinline__ void narrow_fp8_consume(const NarrowFp8Args& args, const NarrowFp8Memory& memory,
                                                   int consumer) {
    NarrowFp8Consumer me{.memory = memory, .ring = memory.stages(), .index = consumer};
    for (int i = 0;; ++i) {
        const NarrowItem item = memory.item(i);
        if (item.rows == 0) {
            return;
        }
        if (i > 0) {
            barrier_wait(memory.seen(), me.parity ^ 1);
        }
        const uint16_t* pairs = memory.pairs(i);
        if (item.rows <= 16) {
            narrow_fp8_consume_item<16>(args, me, item, pairs);
        } else if (item.rows <= 32) {
            narrow_fp8_consume_item<32>(args, me, item, pairs);
        } else if (item.rows <= 48) {
            narrow_fp8_consume_item<48>(args, me, item, pairs);
        } else {
            narrow_fp8_consume_item<64>(args, me, item, pairs);
        }
        me.parity ^= 1;
    }
}

__global__ void __launch_bounds__(kNarrowThreads, 1) __cluster_dims__(2)
    narrow_fp8_kernel(const __grid_constant__ NarrowFp8Args args) {
    extern __shared__ __align__(1024) uint8_t shared_raw[];
    const NarrowFp8Memory memory{.base = shared_raw, .address = shared_address(shared_raw)};
    const auto warpgroup = static_cast<int>(threadIdx.x / 128);
    const auto warp = static_cast<int>(threadIdx.x / 32);
    narrow_fp8_init_barriers(memory);
    if (threadIdx.x == kNarrowThreads - 32) {
        prefetch_map(&args.routed.gate_up);
        prefetch_map(&args.routed.down);
    }
    let_next_kernel_start();
    wait_for_previous_kernel();
    // The barriers are fenced.
    cluster_arrive_relaxed();
    const int items = narrow_plan<NarrowFp8Shape::kRowsMax>(args.choices, memory.plan());
    cluster_wait();  // the other block runs, and its barriers are there
    if (cluster_rank() == 0) {
        narrow_list<NarrowFp8Shape::kRowsMax>(args.choices, memory.plan());
    }
    cluster_arrive();
    if (warpgroup == kNarrowFp8Consumers) {
        registers_give<56>();
        if (warp % 4 == 0) {
            if (threadIdx.x % 32 == 0) {
                narrow_fp8_bring_weights(args, memory, NarrowFp8Share(items));
            }
            __syncwarp();
        }
        cluster_wait();
        if (warp % 4 >= 4 - kExpertsRowWarps) {
            narrow_fp8_bring_rows(args, memory);
        }
    } else {
        registers_take<152>();
        cluster_wait();
        narrow_fp8_consume(args, memory, warpgroup);
    }
    cluster_sync();  // none ends before all that is brought to it is there
}

}  // namespace tessera::cuda
