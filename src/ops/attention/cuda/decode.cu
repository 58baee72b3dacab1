// Decode attention, split over the KV slots.
//
// Roofline: K and V are read once, sum of lengths * kv_heads * 2 * 128 * element bytes at 4.27 TB/s: 64 x
// 4,096 slots at 8 KV heads take 251 us in bfloat16 and 126 us in fp8. The arithmetic is below a tenth of the
// tensor cores' rate.
//
// Schedule: a unit is one split of one sequence for one KV head; blocks take units in a fixed stride. Each of
// a block's four warps owns 16 of the 64 slots of every page, with its own ring of cp.async stages and its
// own online softmax, so that no barrier stands inside the loop. The query heads of the group (times q_len)
// are the rows of mma.sync. The K dimension of the first product is permuted so that every lane reads its K
// values as 16 contiguous bytes, and the N dimension of the second so that it reads its V values likewise;
// fp8 becomes float16 in registers (exact). The four states merge at the end, the splits in a second kernel.
#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/reduce.cuh"

namespace tessera::cuda {
namespace {

constexpr int kHeadDim = 128;
constexpr int kPageSlots = 64;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kChunk = kPageSlots / kWarps;  // slots of one warp in a page
constexpr int kPlanThreads = 1024;
constexpr int kSplitSlotsMin = 512;
constexpr int kSplitsMax = 64;
constexpr float kLog2E = 1.4426950408889634f;

struct Unit {
    int32_t sequence;
    int32_t split;
};

// What lies in the workspace.
struct Plan {
    int32_t* unit_count;
    int32_t* first_unit;  // [batch + 1]
    Unit* units;
    float* sums;     // [units, kv_heads, rows, 128]: not divided
    float2* states;  // [units, kv_heads, rows]: maximum (log2), sum
    int64_t bytes;
};

Plan make_plan(std::byte* workspace, int32_t batch, int64_t rows_of_unit, int32_t slots_max) {
    const int32_t split_slots = decode_cuda_split_slots(slots_max);
    const int64_t units = static_cast<int64_t>(batch) * ((slots_max + split_slots - 1) / split_slots);
    Plan plan{};
    const auto take = [&plan, workspace](int64_t bytes) {
        std::byte* at = workspace + plan.bytes;
        plan.bytes += (bytes + 255) / 256 * 256;
        return at;
    };
    plan.unit_count = reinterpret_cast<int32_t*>(take(4));
    plan.first_unit = reinterpret_cast<int32_t*>(take((batch + 1) * 4));
    plan.units = reinterpret_cast<Unit*>(take(units * static_cast<int64_t>(sizeof(Unit))));
    plan.sums = reinterpret_cast<float*>(take(units * rows_of_unit * kHeadDim * 4));
    plan.states =
        reinterpret_cast<float2*>(take(units * rows_of_unit * static_cast<int64_t>(sizeof(float2))));
    return plan;
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(DecodePlanCudaArgs args, Plan plan, int split_slots) {
    __shared__ int32_t warps[kPlanThreads / kWarp];
    const int sequence = static_cast<int>(threadIdx.x);
    const int lane = sequence % kWarp;
    const int position = sequence < args.batch ? args.positions[sequence] : -1;
    const int slots = position < 0 ? 0 : min(args.first_slot + position + args.q_len, args.slots_max);
    const int splits = (slots + split_slots - 1) / split_slots;
    int end = splits;
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
    if (sequence < args.batch) {
        plan.first_unit[sequence] = end - splits;
        for (int split = 0; split < splits; ++split) {
            plan.units[end - splits + split] = {sequence, split};
        }
    }
    if (sequence == args.batch - 1) {
        plan.first_unit[args.batch] = end;
        *plan.unit_count = end;
    }
}

struct KernelArgs {
    DecodeCudaArgs decode;
    Plan plan;
    int32_t split_slots = 0;
    int32_t group = 0;
    int32_t rows = 0;  // group * q_len: row r = query r / group, head r % group of the group
};

template <bool Fp8>
struct Ring {
    static constexpr int kRowBytes = kHeadDim * (Fp8 ? 1 : 2);
    static constexpr int kPieces = kRowBytes / 16;
    static constexpr int kHalfBytes = kChunk * kRowBytes;  // K, then V
    static constexpr int kStageBytes = 2 * kHalfBytes;
    static constexpr int kStages = Fp8 ? 4 : 3;
    static constexpr int kBytes = kWarps * kStages * kStageBytes;
    // Where piece `piece` of slot `slot` lies, so that the eight lanes of one access phase meet all banks.
    __device__ static __forceinline__ uint32_t k_place(int slot, int piece) {
        return static_cast<uint32_t>(slot * kRowBytes + ((piece ^ ((slot & 1) << 2)) << 4));
    }
    __device__ static __forceinline__ uint32_t v_place(int slot, int piece) {
        const int pair = (slot >> 1) & 3;
        const int exchange = Fp8 ? pair << 1 : (pair & 1) | (pair & 2) << 1;
        return static_cast<uint32_t>(kHalfBytes + slot * kRowBytes + ((piece ^ exchange) << 4));
    }
};

// A unit for one KV head.
struct Work {
    Unit unit;
    int32_t index = 0;  // of the unit
    int32_t kv_head = 0;
};

// The slots of one unit.
struct Range {
    int32_t begin = 0;  // a multiple of 64
    int32_t end = 0;    // one past the last slot that any query sees
    int32_t first_slot = 0;
};

// Copies the warp's 16 slots from `slot` on; those outside the range become zeros.
template <bool Fp8>
__device__ __forceinline__ void load_chunk(const PagedKvCuda& kv, const std::byte* from, int slot,
                                           const Range& range, uint32_t stage) {
    using R = Ring<Fp8>;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::byte* k = from + kv.k_offset + lane * 16;
    const std::byte* v = from + kv.v_offset + lane * 16;
    const bool whole = slot >= range.first_slot && slot + kChunk <= range.end;
#pragma unroll
    for (int i = 0; i < kChunk * R::kPieces / kWarp; ++i) {
        const int index = i * kWarp + lane;
        const int at = index / R::kPieces;
        const int piece = index % R::kPieces;
        const int bytes = whole || (slot + at >= range.first_slot && slot + at < range.end) ? 16 : 0;
        copy_async_16(stage + R::k_place(at, piece), k + i * kWarp * 16, bytes);
        copy_async_16(stage + R::v_place(at, piece), v + i * kWarp * 16, bytes);
    }
}

// A warp's online softmax state for 16 rows: lane (g, t) has rows g and g + 8.
struct State {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};            // of this lane's columns
    float out[kHeadDim / 8][4] = {};  // tile i: column g' = 2t + {0, 1} stands for dimension 16 g' + i
};

// Queries as the operands of the first product, in shared memory: [tile][step][lane]. Step s of the K
// dimension covers, in lane t, four neighbouring dimensions. A warp makes two of the eight steps.
template <bool Fp8, int Tiles>
__device__ __forceinline__ void load_queries(const KernelArgs& args, int sequence, int kv_head,
                                             uint4* queries) {
    constexpr int kDims = Fp8 ? 16 : 8;  // of a 16-byte piece of K
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const auto* base = static_cast<const __nv_bfloat16*>(args.decode.q);
#pragma unroll
    for (int i = 0; i < Tiles * 2; ++i) {
        const int tile = i / 2;
        const int step = warp * 2 + i % 2;
        const int dim = (step / (kDims / 4) * 4 + lane % 4) * kDims + step % (kDims / 4) * 4;
        uint2 halves[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile * 16 + lane / 4 + 8 * half;
            if (row < args.rows) {
                const int64_t token = sequence * args.decode.plan.q_len + row / args.group;
                const int head = kv_head * args.group + row % args.group;
                uint2 raw = *reinterpret_cast<const uint2*>(base + token * args.decode.q_stride +
                                                            head * kHeadDim + dim);
                if constexpr (Fp8) {
                    raw.x = pack_f16(low_bf16(raw.x), high_bf16(raw.x));
                    raw.y = pack_f16(low_bf16(raw.y), high_bf16(raw.y));
                }
                halves[half] = raw;
            }
        }
        queries[(tile * 8 + step) * kWarp + lane] =
            make_uint4(halves[0].x, halves[1].x, halves[0].y, halves[1].y);
    }
}

__device__ __forceinline__ void load_operand(const uint4* queries, int step, int lane, uint32_t (&q)[4]) {
    const uint4 raw = queries[step * kWarp + lane];
    q[0] = raw.x;
    q[1] = raw.y;
    q[2] = raw.z;
    q[3] = raw.w;
}

template <bool Fp8>
__device__ __forceinline__ void scores_of(const uint4* queries, uint32_t stage, int lane,
                                          float (&scores)[2][4]) {
    using R = Ring<Fp8>;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        scores[c / 4][c % 4] = 0;
    }
#pragma unroll
    for (int j = 0; j < R::kPieces / 4; ++j) {
        const uint4 a = load_shared_16(stage + R::k_place(lane / 4, j * 4 + lane % 4));
        const uint4 b = load_shared_16(stage + R::k_place(lane / 4 + 8, j * 4 + lane % 4));
        const uint32_t words[2][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
        constexpr int kSteps = Fp8 ? 4 : 2;
#pragma unroll
        for (int h = 0; h < kSteps; ++h) {
            uint32_t q[4];
            load_operand(queries, kSteps * j + h, lane, q);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                if constexpr (Fp8) {
                    mma_16x8<true>(scores[tile], q, half_from_e4m3(words[tile][h]),
                                   half_from_e4m3(words[tile][h] >> 16));
                } else {
                    mma_16x8<false>(scores[tile], q, words[tile][2 * h], words[tile][2 * h + 1]);
                }
            }
        }
    }
}

template <bool Fp8>
__device__ __forceinline__ void add_values(const uint32_t (&p)[4], uint32_t stage, int lane, State& state) {
    using R = Ring<Fp8>;
    const int slot = lane % 4 * 2;
#pragma unroll
    for (int part = 0; part < R::kPieces / 8; ++part) {  // a lane's 16 dimensions: one piece (fp8) or two
        const int piece = lane / 4 * (R::kPieces / 8) + part;
        const uint4 a = load_shared_16(stage + R::v_place(slot, piece));
        const uint4 b = load_shared_16(stage + R::v_place(slot + 1, piece));
        const uint4 c = load_shared_16(stage + R::v_place(slot + 8, piece));
        const uint4 d = load_shared_16(stage + R::v_place(slot + 9, piece));
        const uint32_t words[4][4] = {
            {a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}, {c.x, c.y, c.z, c.w}, {d.x, d.y, d.z, d.w}};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (Fp8) {
                const uint32_t low01 = __byte_perm(words[0][w], words[1][w], 0x5140);
                const uint32_t low23 = __byte_perm(words[0][w], words[1][w], 0x7362);
                const uint32_t high01 = __byte_perm(words[2][w], words[3][w], 0x5140);
                const uint32_t high23 = __byte_perm(words[2][w], words[3][w], 0x7362);
                mma_16x8<true>(state.out[4 * w], p, half_from_e4m3(low01), half_from_e4m3(high01));
                mma_16x8<true>(state.out[4 * w + 1], p, half_from_e4m3(low01 >> 16),
                               half_from_e4m3(high01 >> 16));
                mma_16x8<true>(state.out[4 * w + 2], p, half_from_e4m3(low23), half_from_e4m3(high23));
                mma_16x8<true>(state.out[4 * w + 3], p, half_from_e4m3(low23 >> 16),
                               half_from_e4m3(high23 >> 16));
            } else {
                mma_16x8<false>(state.out[8 * part + 2 * w], p, __byte_perm(words[0][w], words[1][w], 0x5410),
                                __byte_perm(words[2][w], words[3][w], 0x5410));
                mma_16x8<false>(state.out[8 * part + 2 * w + 1], p,
                                __byte_perm(words[0][w], words[1][w], 0x7632),
                                __byte_perm(words[2][w], words[3][w], 0x7632));
            }
        }
    }
}

// Scores to probabilities, against the running maximum; p = the operand of the second product. Halves = 1:
// only rows 0 to 7 exist.
template <bool Fp8, int Halves>
__device__ __forceinline__ void soften(float (&scores)[2][4], State& state, uint32_t (&p)[4]) {
    p[1] = 0;
    p[3] = 0;
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
        float max = fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]),
                          fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
        max = fmaxf(warp_reduce<4>(max, Max{}), state.max[half]);
        const float base = max == -INFINITY ? 0.0f : max;
        if (max > state.max[half]) {
            const float factor = exp2_fast(state.max[half] - base);
            state.max[half] = max;
            state.sum[half] *= factor;
#pragma unroll
            for (int i = 0; i < kHeadDim / 8; ++i) {
                state.out[i][2 * half] *= factor;
                state.out[i][2 * half + 1] *= factor;
            }
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float low = exp2_fast(scores[tile][2 * half] - base);
            const float high = exp2_fast(scores[tile][2 * half + 1] - base);
            state.sum[half] += low + high;
            p[2 * tile + half] = Fp8 ? pack_f16(low, high) : pack_bf16(low, high);
        }
    }
}

// The warp's states to shared memory: sums [warp][rows][128], states [warp][rows].
template <int Tiles>
__device__ __forceinline__ void publish(State (&states)[Tiles], int warp, int lane, float* sums,
                                        float2* marks) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = (warp * Tiles + tile) * 16 + lane / 4 + 8 * half;
            const float sum = warp_reduce<4>(states[tile].sum[half], Sum{});
            if (lane % 4 == 0) {
                marks[row] = make_float2(states[tile].max[half], sum);
            }
            float* out = sums + row * kHeadDim + lane % 4 * 32;
#pragma unroll
            for (int side = 0; side < 2; ++side) {
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                    const int c = 2 * half + side;
                    *reinterpret_cast<float4*>(out + 16 * side + i) =
                        make_float4(states[tile].out[i][c], states[tile].out[i + 1][c],
                                    states[tile].out[i + 2][c], states[tile].out[i + 3][c]);
                }
            }
        }
    }
}

// Merges the warps' states; each thread has one dimension. A sequence of one split gets its result here.
template <int Tiles>
__device__ __forceinline__ void merge_warps(const KernelArgs& args, const Work& work, const float* sums,
                                            const float2* marks) {
    const Unit& unit = work.unit;
    const int dim = static_cast<int>(threadIdx.x);
    const bool last = args.plan.first_unit[unit.sequence + 1] - args.plan.first_unit[unit.sequence] == 1;
    const float v_scale = args.decode.kv.v_scale;
    for (int row = 0; row < args.rows; ++row) {
        float max = -INFINITY;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            max = fmaxf(max, marks[warp * Tiles * 16 + row].x);
        }
        const float base = max == -INFINITY ? 0.0f : max;
        float sum = 0;
        float out = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const int at = warp * Tiles * 16 + row;
            const float factor = exp2_fast(marks[at].x - base);
            sum = fmaf(marks[at].y, factor, sum);
            out = fmaf(sums[at * kHeadDim + dim], factor, out);
        }
        if (last) {
            const int64_t token = unit.sequence * args.decode.plan.q_len + row / args.group;
            const int head = work.kv_head * args.group + row % args.group;
            static_cast<__nv_bfloat16*>(
                args.decode.out)[token * args.decode.out_stride + head * kHeadDim + dim] =
                __float2bfloat16_rn(out * v_scale / sum);
        } else {
            const int64_t at =
                (static_cast<int64_t>(work.index) * args.decode.shape.kv_heads + work.kv_head) * args.rows +
                row;
            args.plan.sums[at * kHeadDim + dim] = out;
            if (dim == 0) {
                args.plan.states[at] = make_float2(max, sum);
            }
        }
    }
}

// Hides what the rows of tile `tile` may not see. Slots run from `slot` on, the last query's last is `last`
// - 1.
__device__ __forceinline__ void hide(float (&scores)[2][4], const KernelArgs& args, int tile, int slot,
                                     int last) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const int row = tile * 16 + lane / 4 + (c / 2 % 2) * 8;
        const int at = slot + c / 4 * 8 + lane % 4 * 2 + c % 2;
        const int limit = last - args.decode.plan.q_len + row / args.group;
        const bool visible = at >= args.decode.plan.first_slot && at <= limit;
        scores[c / 4][c % 4] = visible ? scores[c / 4][c % 4] : -INFINITY;
    }
}

// One unit, this warp's part. Halves: groups of 8 rows.
template <bool Fp8, int Halves>
__device__ __forceinline__ void run_unit(const KernelArgs& args, const Work& work, uint32_t ring,
                                         uint4* queries, State (&states)[(Halves + 1) / 2]) {
    using R = Ring<Fp8>;
    const Unit& unit = work.unit;
    constexpr int kTiles = (Halves + 1) / 2;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const DecodePlanCudaArgs& plan = args.decode.plan;
    const PagedKvCuda& kv = args.decode.kv;
    const int last = min(plan.first_slot + plan.positions[unit.sequence] + plan.q_len, plan.slots_max);
    Range range{.begin = unit.split * args.split_slots, .first_slot = plan.first_slot};
    range.end = min(range.begin + args.split_slots, last);
    const int32_t* pages =
        kv.page_tables + static_cast<int64_t>(unit.sequence) * kv.pages_max + range.begin / kPageSlots;
    const int first = range.begin + warp * kChunk;
    const int count = (range.end - first + kPageSlots - 1) / kPageSlots;  // <= 0: nothing for this warp
    const std::byte* chunk = kv.pool + (work.kv_head * kPageSlots + warp * kChunk) * R::kRowBytes;
    int page = count > 0 ? pages[0] : 0;  // read one iteration ahead of its use
    const auto load = [&](int i, int stage) {
        if (i < count) {
            const std::byte* from = chunk + page * kv.page_stride;
            page = i + 1 < count ? pages[i + 1] : 0;
            load_chunk<Fp8>(kv, from, first + i * kPageSlots, range,
                            ring + static_cast<uint32_t>(stage * R::kStageBytes));
        }
        copy_async_commit();
    };
    for (int i = 0; i < R::kStages - 1; ++i) {
        load(i, i);
    }
    load_queries<Fp8, kTiles>(args, unit.sequence, work.kv_head, queries);
    __syncthreads();
    const float scale = args.decode.scale * kv.k_scale * kLog2E;
    int free_stage = R::kStages - 1;
    int stage = 0;
    for (int i = 0; i < count; ++i) {
        load(i + R::kStages - 1, free_stage);
        copy_async_wait<R::kStages - 1>();
        __syncwarp();
        const uint32_t at = ring + static_cast<uint32_t>(stage * R::kStageBytes);
        const int slot = first + i * kPageSlots;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float scores[2][4];
            scores_of<Fp8>(queries + tile * 8 * kWarp, at, lane, scores);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                scores[c / 4][c % 4] *= scale;
            }
            if (slot < plan.first_slot || slot + kChunk - 1 > last - plan.q_len) {
                hide(scores, args, tile, slot, last);
            }
            uint32_t p[4];
            soften<Fp8, (Halves == 1 ? 1 : 2)>(scores, states[tile], p);
            add_values<Fp8>(p, at, lane, states[tile]);
        }
        __syncwarp();  // before the stage is written again
        free_stage = stage;
        stage = stage + 1 == R::kStages ? 0 : stage + 1;
    }
    copy_async_wait<0>();
}

// Blocks that one multiprocessor holds, by registers and shared memory.
template <bool Fp8, int Halves>
constexpr int kBlocksPerSm = Fp8 && Halves <= 2 ? 3 : 2;

template <bool Fp8, int Halves>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Fp8, Halves>)
    decode_kernel(const __grid_constant__ KernelArgs args) {
    using R = Ring<Fp8>;
    constexpr int kTiles = (Halves + 1) / 2;
    extern __shared__ __align__(128) uint8_t shared_raw[];
    __shared__ float2 marks[kWarps * kTiles * 16];
    __shared__ uint4 queries[kTiles * 8 * kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const uint32_t ring =
        shared_address(shared_raw) + static_cast<uint32_t>(warp * R::kStages * R::kStageBytes);
    float* sums = reinterpret_cast<float*>(shared_raw);
    const int end = *args.plan.unit_count * args.decode.shape.kv_heads;
    for (int w = static_cast<int>(blockIdx.x); w < end; w += static_cast<int>(gridDim.x)) {
        Work work{.index = w / args.decode.shape.kv_heads, .kv_head = w % args.decode.shape.kv_heads};
        work.unit = args.plan.units[work.index];
        State states[kTiles];
        run_unit<Fp8, Halves>(args, work, ring, queries, states);
        __syncthreads();  // all rings are free
        publish<kTiles>(states, warp, lane, sums, marks);
        __syncthreads();
        merge_warps<kTiles>(args, work, sums, marks);
        __syncthreads();
    }
}

// Merges the splits of one (query, head) a warp, in ascending order; writes zeros for empty rows.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ KernelArgs args) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int head = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
    const int token = static_cast<int>(blockIdx.y);
    const int sequence = token / args.decode.plan.q_len;
    const int first = args.plan.first_unit[sequence];
    const int end = args.plan.first_unit[sequence + 1];
    if (head >= args.decode.shape.q_heads || end - first == 1) {
        return;
    }
    const int row = token % args.decode.plan.q_len * args.group + head % args.group;
    const auto place = [&](int unit) {
        return (static_cast<int64_t>(unit) * args.decode.shape.kv_heads + head / args.group) * args.rows +
               row;
    };
    float max = -INFINITY;
    for (int unit = first + lane; unit < end; unit += kWarp) {
        max = fmaxf(max, args.plan.states[place(unit)].x);
    }
    max = warp_reduce(max, Max{});
    float sum = 0;
    float out[4] = {};
    for (int unit = first; unit < end; ++unit) {
        const float2 state = args.plan.states[place(unit)];
        const float factor = exp2_fast(state.x - max);
        const float4 part =
            *reinterpret_cast<const float4*>(args.plan.sums + place(unit) * kHeadDim + lane * 4);
        sum = fmaf(state.y, factor, sum);
        out[0] = fmaf(part.x, factor, out[0]);
        out[1] = fmaf(part.y, factor, out[1]);
        out[2] = fmaf(part.z, factor, out[2]);
        out[3] = fmaf(part.w, factor, out[3]);
    }
    const float v_scale = args.decode.kv.v_scale;
    const float factor = end > first ? v_scale / sum : 0.0f;
    auto* to = static_cast<__nv_bfloat16*>(args.decode.out) + token * args.decode.out_stride +
               head * kHeadDim + lane * 4;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(out[0] * factor, out[1] * factor), pack_bf16(out[2] * factor, out[3] * factor));
}

template <bool Fp8, int Halves>
void launch_halves(cudaStream_t stream, const KernelArgs& args) {
    constexpr int kBytes = std::max(Ring<Fp8>::kBytes, kWarps * (Halves + 1) / 2 * 16 * kHeadDim * 4);
    cuda_check(cudaFuncSetAttribute(decode_kernel<Fp8, Halves>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kBytes));
    decode_kernel<Fp8, Halves><<<static_cast<unsigned>(args.decode.sm_count * kBlocksPerSm<Fp8, Halves>),
                                 kThreads, kBytes, stream>>>(args);
    cuda_check_launch();
}

template <bool Fp8>
void launch_decode(cudaStream_t stream, const KernelArgs& args) {
    if (args.rows <= 8) {
        launch_halves<Fp8, 1>(stream, args);
    } else if (args.rows <= 16) {
        launch_halves<Fp8, 2>(stream, args);
    } else {
        launch_halves<Fp8, 4>(stream, args);
    }
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

int32_t decode_cuda_split_slots(int32_t slots_max) {
    const int32_t slots = (slots_max + cuda::kSplitsMax - 1) / cuda::kSplitsMax;
    return std::max(cuda::kSplitSlotsMin,
                    (slots + cuda::kPageSlots - 1) / cuda::kPageSlots * cuda::kPageSlots);
}

int64_t decode_cuda_workspace_bytes(const AttentionCudaShape& shape, int32_t batch_max, int32_t q_len,
                                    int32_t slots_max) {
    return cuda::make_plan(nullptr, batch_max, int64_t{shape.q_heads} * q_len, slots_max).bytes;
}

void decode_plan_cuda(cudaStream_t stream, const DecodePlanCudaArgs& args) {
    check(args.batch >= 1 && args.batch <= cuda::kPlanThreads, "attention decode: 1 to 1024 sequences");
    // The lists come before what depends on the heads.
    const cuda::Plan plan = cuda::make_plan(args.workspace, args.batch, 1, args.slots_max);
    cuda::plan_kernel<<<1, cuda::kPlanThreads, 0, stream>>>(args, plan,
                                                            decode_cuda_split_slots(args.slots_max));
    cuda_check_launch();
}

void attention_decode_cuda(cudaStream_t stream, const DecodeCudaArgs& args) {
    const int32_t group = args.shape.q_heads / args.shape.kv_heads;
    const int32_t rows = group * args.plan.q_len;
    check(rows >= 1 && rows <= 32 && group * args.shape.kv_heads == args.shape.q_heads,
          "attention decode: at most 32 queries times heads for each KV head");
    check(args.sm_count >= 1, "attention decode: needs the device's number of multiprocessors");
    const int64_t rows_of_unit = int64_t{args.shape.q_heads} * args.plan.q_len;
    const cuda::KernelArgs kernel_args{
        .decode = args,
        .plan = cuda::make_plan(args.plan.workspace, args.plan.batch, rows_of_unit, args.plan.slots_max),
        .split_slots = decode_cuda_split_slots(args.plan.slots_max),
        .group = group,
        .rows = rows};
    if (args.kv.dtype == DType::kFloat8E4M3) {
        cuda::launch_decode<true>(stream, kernel_args);
    } else {
        check(args.kv.dtype == DType::kBFloat16, "attention decode: KV in bfloat16 or e4m3");
        cuda::launch_decode<false>(stream, kernel_args);
    }
    const dim3 grid(static_cast<unsigned>((args.shape.q_heads + cuda::kWarps - 1) / cuda::kWarps),
                    static_cast<unsigned>(args.plan.batch * args.plan.q_len));
    cuda::combine_kernel<<<grid, cuda::kThreads, 0, stream>>>(kernel_args);
    cuda_check_launch();
}

}  // namespace tessera
