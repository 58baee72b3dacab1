// Prefill attention over paged K and V, with or without a cached prefix.
//
// Roofline: 4 * 128 operations for each (query, head, visible slot) at 0.79 PFLOP/s (fp8: 1.58): 8,192 causal
// queries with 64 heads take 1,392 us (696). The exponentials alone, 16 a clock and multiprocessor, take 520.
//
// Schedule: persistent blocks take query tiles in the plan's order. A tile is some queries times the heads of
// one KV head, 64 rows for each consumer warpgroup, so K and V are read once for the whole group. In the
// first warpgroup a warp enters the copies of q and of pages (two make a KV tile of 128 slots, the last tile
// first) into rings of 128-byte swizzled rows (prefill_bring.cuh).
//
// bfloat16: two consumers issue the scores of the next KV tile before the product with V of the present one,
// so that one's softmax runs beside the other's products. In which order they issue is left to the hardware:
// named barriers that make them take turns cost 5 %.
//
// fp8: a consumer makes e4m3 rows of its q, with a scale each. Scores in e4m3. The second operand of an fp8
// product must have K (here the slots) contiguous, so two warps of the first warpgroup turn every page of V
// in shared memory, the slots in the order in which a lane holds its probabilities. Each KV tile's product
// starts from zero and is added to the output in float32, since the sums of the tensor cores keep few bits;
// that takes the registers of the next scores, so here three consumers fill each other's gaps.
#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/prefill_bring.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/tensor_map.h"

namespace tessera::cuda::prefill {
namespace {

// ---- the consumers

// fp8: this consumer's 64 rows of q as e4m3, and their scales. Two threads have a row.
__device__ __forceinline__ void narrow_queries(uint32_t from, uint32_t to, uint32_t scales, int thread,
                                               int barrier) {
    const int row = thread / 2;
    const int part = thread % 2;
    uint4 raw[8];
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        raw[i] = load_shared_16(from + i / 4 * Layout<true>::kQueryHalf + swizzle_128(row, 4 * part + i % 4));
        for (const uint32_t word : {raw[i].x, raw[i].y, raw[i].z, raw[i].w}) {
            most = fmaxf(most, fmaxf(fabsf(low_bf16(word)), fabsf(high_bf16(word))));
        }
    }
    most = warp_reduce<2>(most, Max{});
    most = fmaxf(most, 1e-20f);  // of a row of zeros: a scale of zero would make NaN of a hidden score
    const float factor = 448.0f / most;
    const auto narrow = [&](uint32_t low, uint32_t high) {
        return pack_e4m3x4(low_bf16(low) * factor, high_bf16(low) * factor, low_bf16(high) * factor,
                           high_bf16(high) * factor);
    };
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        store_shared_16(to + swizzle_128(row, i / 4 * 4 + 2 * part + i % 4 / 2),
                        make_uint4(narrow(raw[i].x, raw[i].y), narrow(raw[i].z, raw[i].w),
                                   narrow(raw[i + 1].x, raw[i + 1].y), narrow(raw[i + 1].z, raw[i + 1].w)));
    }
    if (part == 0) {
        store_shared_4(scales + 4 * row, __float_as_uint(most / 448.0f));
    }
    fence_proxy_async();
    group_barrier(barrier, kGroup);
}

template <bool Fp8>
struct Consumer {
    using L = Layout<Fp8>;
    // e4m3 weights of the softmax are 256 times as large, so that small ones keep their bits.
    static constexpr float kShift = Fp8 ? 8.0f : 0.0f;
    static constexpr int kPacked = Fp8 ? 4 : 8;  // steps of the product with V

    const KernelArgs& args;
    const uint32_t base;
    const int index;
    const int thread;
    int tiles = 0;
    int steps = 0;  // K of this many tiles has been used
    static constexpr int kValueStages = Fp8 ? L::kTurnedStages : L::kValueStages;
    static constexpr int kValueBarriers = Fp8 ? L::kTurnedBarriers : L::kValueBarriers;
    static constexpr int kValues = Fp8 ? L::kTurned : L::kValues;

    // Lane (g, t) of warp w has rows 16 w + g and 16 w + g + 8.
    float max[2];  // of scores, unscaled
    float sum[2];  // of this lane's columns
    float factor[2];

    // Hidden from the compiler, so that it does not hold what few steps need in registers.
    __device__ __forceinline__ int hidden_thread() const {
        int hidden = thread;
        asm volatile("" : "+r"(hidden));
        return hidden;
    }
    __device__ __forceinline__ int row(int half) const {
        const int thread = hidden_thread();
        return index * kRows + thread / kWarp * 16 + thread % kWarp / 4 + 8 * half;
    }

    // Returns the first operand of the scores.
    __device__ __forceinline__ uint32_t begin_tile() {
        uint32_t queries = base + L::kQueries + stage_of<L::kQueryStages>(tiles) * 2 * L::kQueryHalf +
                           index * kRows * kSwizzleRowBytes;
        if constexpr (Fp8) {
            const uint32_t narrow = base + L::kNarrowQueries + index * kRows * kSwizzleRowBytes;
            const uint32_t scales = base + L::kScales + 4 * index * kRows;
            narrow_queries(queries, narrow, scales, hidden_thread(), kGroupBarrier + index);
            queries = narrow;
            end_queries();
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            max[half] = -INFINITY;
            sum[half] = 0;
            factor[half] = 0;
        }
        return queries;
    }
    __device__ __forceinline__ void end_queries() {
        if (thread == 0) {
            barrier_arrive(empty_barrier(base + L::kQueryBarriers, stage_of<L::kQueryStages>(tiles)));
        }
    }

    __device__ __forceinline__ int key() const { return stage_of<L::kKeyStages>(steps); }
    // Of the KV tile before.
    __device__ __forceinline__ int value() const { return stage_of<kValueStages>(steps - 1); }

    // Waits for the next K. Returns the KV tile.
    __device__ __forceinline__ int wait_keys() {
        barrier_wait(full_barrier(base + L::kKeyBarriers, key()), parity_of<L::kKeyStages>(steps));
        return static_cast<int>(load_shared_4(base + L::kKvTiles + 4 * key()));
    }
    __device__ __forceinline__ void issue_scores(float (&scores)[64], uint32_t queries) {
        const uint32_t keys = base + L::kKeys + key() * L::kKvBytes;
        mma_begin();
#pragma unroll
        for (int step = 0; step < (Fp8 ? 4 : 8); ++step) {
            const uint32_t at = static_cast<uint32_t>(step % 4 * kMmaStepBytes);
            mma_shared<Fp8>(scores, mma_descriptor(queries + step / 4 * L::kQueryHalf + at),
                            mma_descriptor(keys + step / 4 * L::kHalf + at), step > 0);
        }
        mma_commit();
    }
    __device__ __forceinline__ void end_keys() {
        if (thread == 0) {
            barrier_arrive(empty_barrier(base + L::kKeyBarriers, key()));
        }
    }

    __device__ __forceinline__ void wait_values(const Tile& tile, int kv_tile) {
        barrier_wait(full_barrier(base + kValueBarriers, value()), parity_of<kValueStages>(steps - 1));
        if (!Fp8 && has_unseen(args, tile, kv_tile)) {
            clear_unseen(tile, kv_tile);
        }
    }
    // Zeros for the slots that no row sees: 0 times what may lie there could be NaN. Both consumers write
    // them.
    __device__ __forceinline__ void clear_unseen(const Tile& tile, int kv_tile) {
        const int slot = kv_tile * kPrefillKvSlots + thread;
        if (slot < args.prefill.plan.first_slot || slot >= tile.slots) {
            const uint32_t to = base + kValues + value() * L::kKvBytes;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                store_shared_16(to + i / 8 * L::kHalf + swizzle_128(thread, (i + thread / 8) % 8),
                                make_uint4(0, 0, 0, 0));
            }
        }
        fence_proxy_async();
        group_barrier(kGroupBarrier + index, kGroup);
    }
    // bfloat16: adds to sums. fp8: sums begin at zero.
    __device__ __forceinline__ void issue_values(float (&sums)[64], const uint32_t (&packed)[kPacked][4]) {
        const uint32_t values = base + kValues + value() * L::kKvBytes;
        mma_begin();
#pragma unroll
        for (int step = 0; step < kPacked; ++step) {
            if constexpr (Fp8) {
                mma_registers_fp8(sums, packed[step], mma_descriptor(values + step * kMmaStepBytes),
                                  step > 0);
            } else {
                mma_registers_transposed(
                    sums, packed[step],
                    mma_descriptor_transposed(values + step * 16 * kSwizzleRowBytes, L::kHalf));
            }
        }
        mma_commit();
    }
    __device__ __forceinline__ void end_values() {
        if (thread == 0) {
            barrier_arrive(empty_barrier(base + kValueBarriers, value()));
        }
    }

    // Of a row's scores, times log2(e).
    __device__ __forceinline__ float scale(int half) const {
        const float common = args.prefill.scale * args.prefill.kv.k_scale * kLog2E;
        return Fp8 ? common * __uint_as_float(load_shared_4(base + L::kScales + 4 * row(half))) : common;
    }

    // Hides what the rows may not see.
    __device__ __forceinline__ void hide(float (&scores)[64], const Tile& tile, int kv_tile) {
        const int first = kv_tile * kPrefillKvSlots;
        const int first_slot = args.prefill.plan.first_slot;
        if (first >= first_slot && first + kPrefillKvSlots - 1 <= tile.first) {
            return;
        }
        const int limits[2] = {tile.first + row(0) / args.group, tile.first + row(1) / args.group};
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const int slot = first + i / 4 * 8 + thread % 4 * 2 + i % 2;
            const bool visible = slot >= first_slot && slot <= limits[i / 2 % 2];
            scores[i] = visible ? scores[i] : -INFINITY;
        }
    }

    // Scores to weights of the softmax; factor: what earlier sums must be multiplied with.
    __device__ __forceinline__ void soften(float (&scores)[64]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float by = scale(half);
            float most = max[half];
#pragma unroll
            for (int i = 2 * half; i < 64; i += 4) {
                most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            }
            most = warp_reduce<4>(most, Max{});
            const float zero = most == -INFINITY ? 0.0f : most * by - kShift;
            factor[half] = exp2_fast(fmaf(max[half], by, -kShift) - zero);
            max[half] = most;
            float total = 0;
#pragma unroll
            for (int i = 2 * half; i < 64; i += 4) {
                scores[i] = exp2_fast(fmaf(scores[i], by, -zero));
                scores[i + 1] = exp2_fast(fmaf(scores[i + 1], by, -zero));
                total += scores[i] + scores[i + 1];
            }
            sum[half] = fmaf(sum[half], factor[half], total);
        }
    }

    __device__ __forceinline__ void pack(const float (&p)[64], uint32_t (&packed)[kPacked][4]) {
#pragma unroll
        for (int i = 0; i < 4 * kPacked; ++i) {
            if constexpr (Fp8) {  // see turn_page() for the order of the slots
                const int at = i / 2 * 8 + i % 2 * 2;
                packed[i / 4][i % 4] = pack_e4m3x4(p[at], p[at + 1], p[at + 4], p[at + 5]);
            } else {
                packed[i / 4][i % 4] = pack_bf16(p[2 * i], p[2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void attend(const Tile& tile) {
        const uint32_t queries = begin_tile();
        float out[64] = {};
        if (tile.steps > 0) {
            attend_steps(tile, queries, out);
        }
        if (!Fp8) {
            end_queries();
        }
        store(read_tile(base + L::kTiles + stage_of<L::kTileStages>(tiles) * sizeof(Tile)), out);
    }

    __device__ __forceinline__ void attend_steps(const Tile& tile, uint32_t queries, float (&out)[64]) {
        if constexpr (Fp8) {
            attend_fp8(tile, queries, out);
        } else {
            attend_bf16(tile, queries, out);
        }
    }

    // The scores of the next KV tile are under way beside the product with V.
    __device__ __forceinline__ void attend_bf16(const Tile& tile, uint32_t queries, float (&out)[64]) {
        float scores[64];
        uint32_t packed[kPacked][4];
        int kv_tile = wait_keys();
        issue_scores(scores, queries);
        mma_wait<0>();
        mma_pin(scores);
        end_keys();
        ++steps;
        hide(scores, tile, kv_tile);
        soften(scores);
        pack(scores, packed);
        for (int step = 1; step < tile.steps; ++step) {
            const int next_tile = wait_keys();
            issue_scores(scores, queries);
            wait_values(tile, kv_tile);
            kv_tile = next_tile;
            mma_pin(out);
            issue_values(out, packed);
            mma_wait<1>();
            mma_pin(scores);
            end_keys();
            hide(scores, tile, kv_tile);
            soften(scores);
            mma_wait<0>();
            mma_pin(out);
            end_values();
            rescale(out);
            ++steps;
            pack(scores, packed);
        }
        wait_values(tile, kv_tile);
        mma_pin(out);
        issue_values(out, packed);
        mma_wait<0>();
        mma_pin(out);
        end_values();
    }

    // Scores and the product with V take turns in the same registers; the other consumers' products fill the
    // gaps.
    __device__ __forceinline__ void attend_fp8(const Tile& tile, uint32_t queries, float (&out)[64]) {
        float sums[64];
        uint32_t packed[kPacked][4];
#pragma unroll 1
        for (const int end = steps + tile.steps; steps < end;) {
            const int kv_tile = wait_keys();
            issue_scores(sums, queries);
            mma_wait<0>();
            mma_pin(sums);
            end_keys();
            ++steps;
            hide(sums, tile, kv_tile);
            soften(sums);
            pack(sums, packed);
            wait_values(tile, kv_tile);
            issue_values(sums, packed);
            mma_wait<0>();
            mma_pin(sums);
            end_values();
            add(out, sums);
        }
    }

    __device__ __forceinline__ void rescale(float (&out)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
    }
    __device__ __forceinline__ void add(float (&out)[64], const float (&part)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            out[i] = fmaf(out[i], factor[i / 2 % 2], part[i]);
        }
    }

    // Four lanes have a row, each two of every 8 columns; they exchange them so that each stores 16 bytes.
    __device__ __forceinline__ void store(const Tile& tile, const float (&out)[64]) {
        const int lane = thread % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = warp_reduce<4>(sum[half], Sum{});
            const float by = total == 0 ? 0.0f : args.prefill.kv.v_scale / total;  // 0: sees nothing
            const int in_tile = row(half) / args.group;
            const int head = tile.kv_head * args.group + row(half) % args.group;
            auto* to = static_cast<__nv_bfloat16*>(args.prefill.out) +
                       static_cast<int64_t>(tile.row + in_tile) * args.prefill.out_stride + head * kHeadDim;
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = 16 * block + 4 * i + 2 * half;
                    words[i] = pack_bf16(out[at] * by, out[at + 1] * by);
                }
                exchange<1>(words, lane);
                exchange<2>(words, lane);
                if (in_tile < tile.queries) {
                    *reinterpret_cast<uint4*>(to + 32 * block + 8 * lane) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }
    // One step of the transposition of four words over four lanes.
    template <int Bit>
    __device__ __forceinline__ void exchange(uint32_t (&words)[4], int lane) {
        const bool upper = (lane & Bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & Bit) == 0) {
                const uint32_t give = upper ? words[i] : words[i | Bit];
                const uint32_t got = __shfl_xor_sync(kFullWarp, give, Bit);
                words[i] = upper ? got : words[i];
                words[i | Bit] = upper ? words[i | Bit] : got;
            }
        }
    }

    __device__ __forceinline__ void run() {
        for (;; ++tiles) {
            barrier_wait(full_barrier(base + L::kQueryBarriers, stage_of<L::kQueryStages>(tiles)),
                         parity_of<L::kQueryStages>(tiles));
            const Tile tile = read_tile(base + L::kTiles + stage_of<L::kTileStages>(tiles) * sizeof(Tile));
            if (tile.steps < 0) {
                return;
            }
            attend(tile);
        }
    }
};

template <bool Fp8>
__global__ void __launch_bounds__(Layout<Fp8>::kThreads, 1)
    prefill_kernel(const __grid_constant__ KernelArgs args) {
    extern __shared__ uint8_t shared_raw[];
    const uint32_t base = (shared_address(shared_raw) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        init_barriers<Fp8>(base);
    }
    __syncthreads();
    const int group = static_cast<int>(threadIdx.x) / kGroup;
    if (group == 0) {
        registers_give<Fp8 ? 32 : 40>();
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        if (warp == 0) {
            Bringer<Fp8>{.args = args, .base = base}.run();
        } else if (Fp8 && warp <= kTurners) {
            turn_values(args, base, warp - 1);
        }
    } else {
        registers_take<Fp8 ? 160 : 232>();
        Consumer<Fp8>{
            .args = args, .base = base, .index = group - 1, .thread = static_cast<int>(threadIdx.x) % kGroup}
            .run();
    }
}

CUtensorMap make_kv_map(const PagedKvCuda& kv, int64_t offset, int32_t kv_heads) {
    const int64_t row = kHeadDim * dtype_size(kv.dtype);
    // How many pages the pool has is not known here; every page in a table lies in it.
    const int64_t pages = std::min<int64_t>((int64_t{1} << 39) / kv.page_stride, INT32_MAX);
    return make_tensor_map(kv.pool + offset, {.dtype = kv.dtype,
                                              .rank = 4,
                                              .sizes = {kHeadDim, kPageSlots, kv_heads, pages},
                                              .strides = {row, kPageSlots * row, kv.page_stride},
                                              .box = {kPageSlots, 1, 1}});
}

template <bool Fp8>
void launch_prefill(cudaStream_t stream, const KernelArgs& args) {
    cuda_check(cudaFuncSetAttribute(prefill_kernel<Fp8>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Layout<Fp8>::kBytes));
    const int64_t tiles = args.plan.items_max * args.prefill.plan.shape.kv_heads;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, args.prefill.sm_count));
    prefill_kernel<Fp8><<<blocks, Layout<Fp8>::kThreads, Layout<Fp8>::kBytes, stream>>>(args);
    cuda_check_launch();
}

}  // namespace
}  // namespace tessera::cuda::prefill

namespace tessera {

void attention_prefill_cuda(cudaStream_t stream, const PrefillCudaArgs& args) {
    const AttentionCudaShape& shape = args.plan.shape;
    const int32_t group = shape.q_heads / shape.kv_heads;
    check(group * shape.kv_heads == shape.q_heads && group >= 1 && group <= 16,
          "attention prefill: a KV head must have 1 to 16 query heads");
    check(args.sm_count >= 1, "attention prefill: the number of multiprocessors is missing");
    check(args.kv.dtype == args.plan.kv_dtype, "attention prefill: the plan is of another KV format");
    cuda::prefill::KernelArgs kernel_args{.prefill = args,
                                          .plan = cuda::make_prefill_plan(args.plan),
                                          .group = group,
                                          .tile_queries = prefill_cuda_tile_queries(shape, args.kv.dtype)};
    kernel_args.q_map = cuda::make_tensor_map(
        args.q, {.dtype = DType::kBFloat16,
                 .rank = 3,
                 .sizes = {cuda::prefill::kHeadDim, shape.q_heads, args.plan.rows_max},
                 .strides = {2 * cuda::prefill::kHeadDim, 2 * args.q_stride},
                 .box = {static_cast<uint32_t>(group), static_cast<uint32_t>(kernel_args.tile_queries)}});
    kernel_args.k_map = cuda::prefill::make_kv_map(args.kv, args.kv.k_offset, shape.kv_heads);
    kernel_args.v_map = cuda::prefill::make_kv_map(args.kv, args.kv.v_offset, shape.kv_heads);
    if (args.kv.dtype == DType::kFloat8E4M3) {
        cuda::prefill::launch_prefill<true>(stream, kernel_args);
    } else {
        check(args.kv.dtype == DType::kBFloat16, "attention prefill: KV in bfloat16 or e4m3");
        cuda::prefill::launch_prefill<false>(stream, kernel_args);
    }
}

}  // namespace tessera
