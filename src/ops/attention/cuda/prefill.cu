// Prefill attention over paged K and V, with or without a cached prefix.
//
// Roofline: 4 * 128 operations for each (query, head, visible slot) at 0.8 PFLOP/s: 8,192 causal queries with
// 64 heads take 1,390 us.
//
// Schedule: a block has 192 rows, 24 queries (at group 8) times the heads of one KV head, 64 for each of its
// three consumer warpgroups; K and V are thus read once for the whole group. A fourth warpgroup brings one
// page (64 slots) of K and V a stage into shared memory, in the 128-byte swizzle: bfloat16 by cp.async, fp8
// through registers, where it becomes bfloat16 (exact). Scores: wgmma from shared memory; the probabilities
// stay in registers as the first operand of the second wgmma. While one warpgroup is in its softmax, the
// others keep the tensor cores busy. Late tiles of a sequence, which see the most slots, start first.
#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/common/cuda/wgmma.cuh"

namespace tessera::cuda {
namespace {

constexpr int kHeadDim = 128;
constexpr int kPageSlots = 64;
constexpr int kConsumers = 3;
constexpr int kConsumerRows = 64;
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPlanThreads = 1024;
constexpr float kLog2E = 1.4426950408889634f;

constexpr int kBlockBytes = kPageSlots * kSwizzleRowBytes;  // 64 rows of 64 values: half of a head's block
constexpr int kQueryBytes = 2 * kBlockBytes;                // of one consumer
constexpr int kStageBytes = 4 * kBlockBytes;                // K, V
constexpr int kStages = 4;
constexpr int kBarriers = kConsumers * kQueryBytes + kStages * kStageBytes;
constexpr int kSharedBytes = kBarriers + 2 * kStages * 8 + 1024;  // 1024 to align the begin

struct Item {
    int32_t sequence;
    int32_t query;  // the tile's first, counted within the sequence
};

struct Plan {
    int32_t* count;
    Item* items;
    int64_t items_max;
    int64_t bytes;
};

int32_t group_of(const AttentionCudaShape& shape) {
    return shape.q_heads / shape.kv_heads;
}
int32_t tile_queries(int32_t group) {
    return kConsumers * kConsumerRows / group;
}

Plan make_plan(std::byte* workspace, const AttentionCudaShape& shape, int32_t sequences, int32_t rows_max) {
    Plan plan{};
    plan.items_max = rows_max / tile_queries(group_of(shape)) + sequences;
    plan.count = reinterpret_cast<int32_t*>(workspace);
    plan.items = reinterpret_cast<Item*>(workspace + 256);
    plan.bytes = 256 + (plan.items_max * static_cast<int64_t>(sizeof(Item)) + 255) / 256 * 256;
    return plan;
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(PrefillPlanCudaArgs args, Plan plan, int queries) {
    __shared__ int32_t warps[kPlanThreads / kWarp];
    const int sequence = static_cast<int>(threadIdx.x);
    const int lane = sequence % kWarp;
    int tiles = 0;
    if (sequence < args.sequences) {
        tiles = (args.first_rows[sequence + 1] - args.first_rows[sequence] + queries - 1) / queries;
    }
    int end = tiles;
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(kFullWarp, end, offset);
        end += lane >= offset ? other : 0;
    }
    if (lane == kWarp - 1) {
        warps[sequence / kWarp] = end;
    }
    __syncthreads();
    for (int w = 0; w < sequence / kWarp; ++w) {
        end += warps[w];
    }
    for (int tile = 0; tile < tiles; ++tile) {
        plan.items[end - 1 - tile] = {sequence, tile * queries};
    }
    if (sequence == args.sequences - 1) {
        *plan.count = end;
    }
}

struct KernelArgs {
    PrefillCudaArgs prefill;
    Plan plan;
    int32_t group_shift = 0;
    int32_t tile_queries = 0;
};

// What a block computes.
struct Tile {
    int32_t sequence = 0;
    int32_t kv_head = 0;
    int64_t row = 0;  // of q: the tile's first query
    int32_t queries = 0;
    int32_t position = 0;  // of the tile's first query
    int32_t slots = 0;     // the last query sees slots [first_slot, slots)
    int32_t pages = 0;
};

__device__ __forceinline__ Tile make_tile(const KernelArgs& args) {
    const Item item = args.plan.items[blockIdx.y];
    const int32_t* rows = args.prefill.plan.first_rows + item.sequence;
    Tile tile{.sequence = item.sequence, .kv_head = static_cast<int32_t>(blockIdx.x)};
    tile.row = rows[0] + item.query;
    tile.queries = min(args.tile_queries, rows[1] - rows[0] - item.query);
    tile.position = args.prefill.positions[item.sequence] + item.query;
    tile.slots = args.prefill.first_slot + tile.position + tile.queries;
    tile.pages = (tile.slots + kPageSlots - 1) / kPageSlots;
    return tile;
}

__device__ __forceinline__ uint32_t full_barrier(uint32_t base, int stage) {
    return base + kBarriers + 8 * stage;
}
__device__ __forceinline__ uint32_t empty_barrier(uint32_t base, int stage) {
    return base + kBarriers + 8 * (kStages + stage);
}

// Where 8 values, piece 0 to 15 of row `row`, lie in a [64][128] block of two swizzled halves.
__device__ __forceinline__ uint32_t block_place(int row, int piece) {
    return static_cast<uint32_t>(piece / 8 * kBlockBytes) + swizzle_128(row, piece % 8);
}

// Eight e4m3 values as bfloat16.
__device__ __forceinline__ uint4 widen(uint32_t low, uint32_t high) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_e4m3(static_cast<uint16_t>((i < 2 ? low : high) >> (i % 2 * 16)));
        words[i] = pack_bf16(pair.x, pair.y);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The page's slots that some query of the tile sees: [first, end).
struct Visible {
    int32_t first = 0;
    int32_t end = 0;
};

// bfloat16: copies a page of K or V; slots outside become zeros.
__device__ __forceinline__ void copy_block(const std::byte* from, uint32_t to, int thread,
                                           const Visible& visible) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int slot = i * 8 + thread / 16;
        const int piece = thread % 16;
        copy_async_16(to + block_place(slot, piece), from + slot * kHeadDim * 2 + piece * 16,
                      slot >= visible.first && slot < visible.end ? 16 : 0);
    }
}

// fp8: the thread's 16 bytes of slot i * 16 + thread / 8.
__device__ __forceinline__ uint4 read_piece(const std::byte* from, int i, int thread,
                                            const Visible& visible) {
    const int slot = i * 16 + thread / 8;
    if (slot < visible.first || slot >= visible.end) {
        return make_uint4(0, 0, 0, 0);
    }
    return *reinterpret_cast<const uint4*>(from + slot * kHeadDim + thread % 8 * 16);
}
__device__ __forceinline__ void write_piece(uint4 raw, uint32_t to, int i, int thread) {
    const int slot = i * 16 + thread / 8;
    store_shared_16(to + block_place(slot, thread % 8 * 2), widen(raw.x, raw.y));
    store_shared_16(to + block_place(slot, thread % 8 * 2 + 1), widen(raw.z, raw.w));
}

// Where the producer is: page i of the tile.
struct Cursor {
    const PagedKvCuda& kv;
    const int32_t* pages;
    int64_t head_bytes;
    const Tile& tile;
    int32_t first_slot;
    __device__ __forceinline__ const std::byte* from(int page) const {
        return kv.pool + page * kv.page_stride + head_bytes;
    }
    __device__ __forceinline__ Visible visible(int i) const {
        return {first_slot - i * kPageSlots, tile.slots - i * kPageSlots};
    }
    __device__ __forceinline__ int page(int i) const { return i < tile.pages ? pages[i] : 0; }
};

__device__ __forceinline__ uint32_t stage_address(uint32_t base, int i) {
    return base + static_cast<uint32_t>(kConsumers * kQueryBytes + i % kStages * kStageBytes);
}

__device__ __forceinline__ void produce_bf16(const Cursor& cursor, uint32_t base, int thread) {
    int page = cursor.page(0);
    for (int i = 0; i < cursor.tile.pages; ++i) {
        const std::byte* from = cursor.from(page);
        page = cursor.page(i + 1);
        barrier_wait(empty_barrier(base, i % kStages), (i / kStages & 1) ^ 1);
        copy_block(from + cursor.kv.k_offset, stage_address(base, i), thread, cursor.visible(i));
        copy_block(from + cursor.kv.v_offset, stage_address(base, i) + 2 * kBlockBytes, thread,
                   cursor.visible(i));
        barrier_arrive_copies(full_barrier(base, i % kStages));
    }
    copy_async_commit();
    copy_async_wait<0>();  // the block must not end while copies are under way into its memory
}

// The reads of the next page are under way while this one is widened.
__device__ __forceinline__ void produce_fp8(const Cursor& cursor, uint32_t base, int thread) {
    uint4 raw[8];  // four pieces of K, four of V
    const std::byte* from = cursor.from(cursor.page(0));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        raw[j] = read_piece(from + (j < 4 ? cursor.kv.k_offset : cursor.kv.v_offset), j % 4, thread,
                            cursor.visible(0));
    }
    int page = cursor.page(1);
    for (int i = 0; i < cursor.tile.pages; ++i) {
        from = cursor.from(page);
        page = cursor.page(i + 2);
        // Past the last page nothing is visible, and nothing is read.
        const Visible next = i + 1 < cursor.tile.pages ? cursor.visible(i + 1) : Visible{};
        barrier_wait(empty_barrier(base, i % kStages), (i / kStages & 1) ^ 1);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            write_piece(raw[j], stage_address(base, i) + j / 4 * 2 * kBlockBytes, j % 4, thread);
            raw[j] =
                read_piece(from + (j < 4 ? cursor.kv.k_offset : cursor.kv.v_offset), j % 4, thread, next);
        }
        fence_proxy_async();
        barrier_arrive(full_barrier(base, i % kStages));
    }
}

template <bool Fp8>
__device__ __forceinline__ void produce(const KernelArgs& args, const Tile& tile, uint32_t base, int thread) {
    const PagedKvCuda& kv = args.prefill.kv;
    const Cursor cursor{
        .kv = kv,
        .pages = kv.page_tables + static_cast<int64_t>(tile.sequence) * kv.pages_max,
        .head_bytes = static_cast<int64_t>(tile.kv_head) * kPageSlots * kHeadDim * (Fp8 ? 1 : 2),
        .tile = tile,
        .first_slot = args.prefill.first_slot};
    if constexpr (Fp8) {
        produce_fp8(cursor, base, thread);
    } else {
        produce_bf16(cursor, base, thread);
    }
}

// A consumer's 64 rows of q to shared memory; rows past the last query become zeros.
__device__ __forceinline__ void load_queries(const KernelArgs& args, const Tile& tile, uint32_t to,
                                             int consumer, int thread) {
    const auto* q = static_cast<const __nv_bfloat16*>(args.prefill.q);
    const int group_mask = (1 << args.group_shift) - 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i * 8 + thread / 16;
        const int piece = thread % 16;
        const int query = (consumer * kConsumerRows + row) >> args.group_shift;
        const int head = (tile.kv_head << args.group_shift) + (row & group_mask);
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (query < tile.queries) {
            raw = *reinterpret_cast<const uint4*>(q + (tile.row + query) * args.prefill.q_stride +
                                                  head * kHeadDim + piece * 8);
        }
        store_shared_16(to + block_place(row, piece), raw);
    }
    fence_proxy_async();
    group_barrier(1 + consumer, 128);
}

// Online softmax over 64 slots: lane (g, t) of a warp has rows g and g + 8 of the warp's 16.
struct State {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};  // of this lane's columns
    float out[64] = {};
};

// Scores (log2 scale) to probabilities.
__device__ __forceinline__ void soften(float (&scores)[32], State& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float max = scores[2 * half];
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            max = fmaxf(max, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
        }
        max = fmaxf(warp_reduce<4>(max, Max{}), state.max[half]);
        const float base = max == -INFINITY ? 0.0f : max;
        const float factor = exp2_fast(state.max[half] - base);
        state.max[half] = max;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
#pragma unroll
            for (int c = 2 * half; c < 2 * half + 2; ++c) {
                scores[i + c] = exp2_fast(scores[i + c] - base);
                sum += scores[i + c];
            }
        }
        state.sum[half] = fmaf(state.sum[half], factor, sum);
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            state.out[i + 2 * half] *= factor;
            state.out[i + 2 * half + 1] *= factor;
        }
    }
}

// Hides what the rows may not see of page `page`.
__device__ __forceinline__ void hide(float (&scores)[32], const KernelArgs& args, const Tile& tile, int page,
                                     int row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int first = page * kPageSlots;
    const int limit_least = args.prefill.first_slot + tile.position + (row >> args.group_shift);
    const bool whole = first >= args.prefill.first_slot && first + kPageSlots - 1 <= limit_least;
    if (whole) {
        return;
    }
    const int limits[2] = {limit_least,
                           args.prefill.first_slot + tile.position + ((row + 8) >> args.group_shift)};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int slot = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const bool visible = slot >= args.prefill.first_slot && slot <= limits[i / 2 % 2];
        scores[i] = visible ? scores[i] : -INFINITY;
    }
}

__device__ __forceinline__ void store_rows(const KernelArgs& args, const Tile& tile, State& state, int row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float v_scale = args.prefill.kv.v_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = warp_reduce<4>(state.sum[half], Sum{});
        const float factor = sum == 0 ? 0.0f : v_scale / sum;  // 0: a query that sees nothing
        const int query = (row + 8 * half) >> args.group_shift;
        const int head =
            (tile.kv_head << args.group_shift) + ((row + 8 * half) & ((1 << args.group_shift) - 1));
        if (query < tile.queries) {
            auto* to = static_cast<__nv_bfloat16*>(args.prefill.out) +
                       (tile.row + query) * args.prefill.out_stride + head * kHeadDim + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                *reinterpret_cast<uint32_t*>(to + 8 * i) =
                    pack_bf16(state.out[4 * i + 2 * half] * factor, state.out[4 * i + 2 * half + 1] * factor);
            }
        }
    }
}

__device__ __forceinline__ void consume(const KernelArgs& args, const Tile& tile, uint32_t base,
                                        int consumer) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const uint32_t queries = base + consumer * kQueryBytes;
    load_queries(args, tile, queries, consumer, thread);
    const int row = consumer * kConsumerRows + thread / kWarp * 16 + thread % kWarp / 4;  // this lane's first
    const float k_scale = args.prefill.kv.k_scale;
    const float scale = args.prefill.scale * k_scale * kLog2E;
    State state;
    for (int page = 0; page < tile.pages; ++page) {
        const int stage = page % kStages;
        const uint32_t keys = base + kConsumers * kQueryBytes + stage * kStageBytes;
        barrier_wait(full_barrier(base, stage), page / kStages & 1);
        fence_proxy_async();  // cp.async wrote K and V
        float scores[32];
        mma_begin();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const uint32_t offset = static_cast<uint32_t>(step / 4 * kBlockBytes + step % 4 * kMmaStepBytes);
            mma_shared<false>(scores, mma_descriptor(queries + offset), mma_descriptor(keys + offset),
                              step > 0);
        }
        mma_commit();
        mma_wait<0>();
        mma_pin(scores);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            scores[i] *= scale;
        }
        hide(scores, args, tile, page, row);
        soften(scores, state);
        uint32_t probabilities[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            probabilities[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
        }
        mma_pin(state.out);
        mma_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint32_t values =
                keys + 2 * kBlockBytes + static_cast<uint32_t>(step * 16 * kSwizzleRowBytes);
            mma_registers_transposed(state.out, probabilities[step],
                                     mma_descriptor_transposed(values, kBlockBytes));
        }
        mma_commit();
        mma_wait<0>();
        mma_pin(state.out);
        if (thread == 0) {
            barrier_arrive(empty_barrier(base, stage));
        }
    }
    store_rows(args, tile, state, row);
}

template <bool Fp8>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ KernelArgs args) {
    extern __shared__ uint8_t shared_raw[];
    if (static_cast<int>(blockIdx.y) >= *args.plan.count) {
        return;
    }
    const uint32_t base = (shared_address(shared_raw) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(full_barrier(base, stage), 128);
            barrier_init(empty_barrier(base, stage), kConsumers);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const Tile tile = make_tile(args);
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (warpgroup == kConsumers) {
        registers_give<80>();
        produce<Fp8>(args, tile, base, static_cast<int>(threadIdx.x) % 128);
    } else {
        registers_take<144>();
        consume(args, tile, base, warpgroup);
    }
}

template <bool Fp8>
void launch_prefill(cudaStream_t stream, const KernelArgs& args) {
    cuda_check(
        cudaFuncSetAttribute(prefill_kernel<Fp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    const dim3 grid(static_cast<unsigned>(args.prefill.plan.shape.kv_heads),
                    static_cast<unsigned>(args.plan.items_max));
    prefill_kernel<Fp8><<<grid, kThreads, kSharedBytes, stream>>>(args);
    cuda_check_launch();
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

int64_t prefill_cuda_workspace_bytes(const AttentionCudaShape& shape, int32_t sequences_max,
                                     int32_t rows_max) {
    return cuda::make_plan(nullptr, shape, sequences_max, rows_max).bytes;
}

void prefill_plan_cuda(cudaStream_t stream, const PrefillPlanCudaArgs& args) {
    check(args.sequences >= 1 && args.sequences <= cuda::kPlanThreads,
          "attention prefill: 1 to 1024 sequences");
    const cuda::Plan plan = cuda::make_plan(args.workspace, args.shape, args.sequences, args.rows_max);
    cuda::plan_kernel<<<1, cuda::kPlanThreads, 0, stream>>>(args, plan,
                                                            cuda::tile_queries(cuda::group_of(args.shape)));
    cuda_check_launch();
}

void attention_prefill_cuda(cudaStream_t stream, const PrefillCudaArgs& args) {
    const AttentionCudaShape& shape = args.plan.shape;
    const int32_t group = cuda::group_of(shape);
    int32_t shift = 0;
    while (1 << shift < group) {
        ++shift;
    }
    check(group * shape.kv_heads == shape.q_heads && 1 << shift == group && group <= 16,
          "attention prefill: the query heads of a KV head must be 1, 2, 4, 8 or 16");
    const cuda::KernelArgs kernel_args{
        .prefill = args,
        .plan = cuda::make_plan(args.plan.workspace, shape, args.plan.sequences, args.plan.rows_max),
        .group_shift = shift,
        .tile_queries = cuda::tile_queries(group)};
    if (args.kv.dtype == DType::kFloat8E4M3) {
        cuda::launch_prefill<true>(stream, kernel_args);
    } else {
        check(args.kv.dtype == DType::kBFloat16, "attention prefill: KV in bfloat16 or e4m3");
        cuda::launch_prefill<false>(stream, kernel_args);
    }
}

}  // namespace tessera
