// The int4 experts of a few tokens: two kernels without a sorted list, as few_experts.cuh.
//
// Roofline: bytes of the chosen experts' weights (0.516 a weight) at 4.27 TB/s.
//
// Schedule: one block a multiprocessor, four warpgroups. Each warp has a ring of groups of 16 rows by 128
// inputs on their way into shared memory (cp.async), which costs no registers: both kernels' blocks fit
// beside each other, and down's first groups arrive while gate and up still run. Codes become e4m3 in
// registers, the A side of wgmma (experts_w4.cuh); its N side is all tokens, or the rows of act of one
// expert, of which a thread uses what it needs. Each block quantises all rows of x (of act) while its first
// weights arrive.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/wgmma.cuh"
#include "ops/moe/cuda/few_entries.cuh"
#include "ops/moe/cuda/quantize_row.cuh"
#include "ops/moe/cuda/swiglu.cuh"
#include "ops/moe/cuda/w4_mma.cuh"
#include "ops/moe/cuda/w4_weights.cuh"

namespace tessera::cuda {

struct FewW4Args {
    FewRouting routing;
    const uint8_t* gate_up = nullptr;  // [experts, w4_gate_up_bytes()]
    const uint8_t* down = nullptr;     // [experts, w4_down_bytes()]
    const uint16_t* x = nullptr;       // [tokens, hidden] bfloat16
    int32_t hidden = 0;
    int32_t width = 0;
    const float* expert_weights = nullptr;  // [tokens, k]
    uint16_t* act = nullptr;                // [tokens * k, width] bfloat16
    const __nv_bfloat16* more = nullptr;    // [tokens, hidden]: the shared expert's outputs; may be null
    __nv_bfloat16* y = nullptr;             // [tokens, hidden]
};

inline constexpr int kFewW4Warps = 16;
inline constexpr int kFewW4Threads = 32 * kFewW4Warps;
inline constexpr int kFewW4Groups = kFewW4Warps / 4;  // warpgroups
inline constexpr int kFewW4Stages = 4;
inline constexpr int kFewW4StageBytes = 32 + 1024;  // scales and codes of 16 rows by 128 inputs
inline constexpr int kFewW4RingBytes = kFewW4Stages * kFewW4StageBytes;
inline constexpr int kFewW4GateOutputs = 32;
inline constexpr int kFewW4DownOutputs = 32;

constexpr int few_w4_gate_up_shared(int hidden) {
    return kFewW4Warps * kFewW4RingBytes + 8 * hidden;
}
// Groups of each half of the inputs of down.
constexpr int few_w4_half(int width) {
    return (width + 255) / 256;
}
// pairs + 8 rows of act, and the pairs' sums.
constexpr int few_w4_down_shared(int pairs, int width) {
    return kFewW4Warps * kFewW4RingBytes + 256 * few_w4_half(width) * (pairs + 8) +
           2 * pairs * kFewW4DownOutputs * 4;
}

// Rows as the N side of wgmma without swizzle: 16 inputs of all rows, then the next 16: input i of row r is
// byte i / 16 * 16 rows + 16 r + i % 16.
__device__ __forceinline__ uint64_t few_w4_descriptor(uint32_t address, int rows, int halves_bytes) {
    return static_cast<uint64_t>(halves_bytes >> 4) << 32 | static_cast<uint64_t>(rows) << 16 |
           (address & 0x3FFFF) >> 4;
}

// Rows of bfloat16 to e4m3 with a scale each, in shared memory in that layout. By all warps; the caller
// synchronises before the values are read.
template <int Kept>  // pieces of a row that a thread holds
struct FewW4Quantizer {
    const uint16_t* from = nullptr;  // [rows, count]
    int rows = 0;
    int count = 0;  // a multiple of 16
    uint8_t* to = nullptr;
    int to_rows = 0;
    const int16_t* places = nullptr;  // of the rows, < 0: not needed; null: their numbers
    float* scales = nullptr;          // [rows]
    float* partial = nullptr;         // [kFewW4Warps]
    int share = kFewW4Warps;          // warps of a row
    RowPieces<Kept> pieces;           // the first ones of this warp's first row

    __device__ __forceinline__ QuantizeRow row(int index) const {
        return {.from = from + static_cast<int64_t>(index) * count, .count = count};
    }
    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % (32 * share); }
    __device__ __forceinline__ void begin() {
        while (share > 1 && rows * share > kFewW4Warps) {
            share /= 2;
        }
        const int mine = static_cast<int>(threadIdx.x) / (32 * share);
        if (mine < rows) {
            pieces.load(row(mine), lane(), 32 * share);
        }
    }
    __device__ __forceinline__ void store(int place, int first, const Divider& divide) const {
#pragma unroll
        for (int i = 0; i < Kept; ++i) {
            const int piece = first + 32 * share * i;
            if (piece * 8 < count) {
                *reinterpret_cast<uint2*>(to + piece / 2 * 16 * to_rows + place * 16 + piece % 2 * 8) =
                    quantize_eight(pieces.pieces[i], divide);
            }
        }
    }
    __device__ __forceinline__ void finish() {
        const int at_once = kFewW4Warps / share;
        const int span = 32 * share * Kept;  // pieces of a row that are kept at once
        const int warp = static_cast<int>(threadIdx.x / 32);
        for (int index = warp / share; index - warp / share < rows; index += at_once) {
            const bool there = index < rows;
            float largest = there ? pieces.largest() : 0;
            for (int first = lane() + span; there && (first - lane()) * 8 < count; first += span) {
                pieces.load(row(index), first, 32 * share);
                largest = fmaxf(largest, pieces.largest());
            }
            if (share > 1) {
                if (threadIdx.x % 32 == 0) {
                    partial[warp] = largest;
                }
                __syncthreads();
                for (int i = 0; i < share; ++i) {
                    largest = fmaxf(largest, partial[warp / share * share + i]);
                }
            }
            const int place = there && places != nullptr ? places[index] : index;
            if (there && place >= 0) {
                const float scale = row_scale(largest);
                const Divider divide = divider(scale);
                if (lane() == 0) {
                    scales[index] = scale;
                }
                const bool whole = span * 8 >= count;
                for (int first = lane(); (first - lane()) * 8 < count; first += span) {
                    if (!whole) {
                        pieces.load(row(index), first, 32 * share);
                    }
                    store(place, first, divide);
                }
            }
            if (index + at_once < rows) {
                pieces.load(row(index + at_once), lane(), 32 * share);
            }
        }
        fence_proxy_async();
    }
};

// 16 rows of a unit by a group, into a stage; nothing of them counts, if inputs <= 0.
__device__ __forceinline__ void few_w4_fetch(uint32_t stage, const uint8_t* group, int quarter, int inputs) {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* codes = group + kW4ScaleBytes + quarter * 512 + lane * 16;
    const bool first = inputs > 0;
    const bool second = inputs > 64;
    copy_async_16(stage + 32 + lane * 16, first ? codes : group, first ? 16 : 0);
    copy_async_16(stage + 544 + lane * 16, second ? codes + 2048 : group, second ? 16 : 0);
    if (lane < 2) {
        copy_async_16(stage + lane * 16, group + quarter * 32 + lane * 16, first ? 16 : 0);
    }
}

// This thread's weights in a stage.
__device__ __forceinline__ W4Raw few_w4_load(uint32_t stage) {
    return w4_load(threadIdx.x % 32, stage, stage + 32, 512);
}

// sums += scales x (weights x columns) of a group, by a warpgroup. columns: its descriptor; step: bytes
// between 32 inputs of them, a multiple of 16. Of 16 columns the thread uses the second 8 with `second`.
template <int Columns>
__device__ __forceinline__ void few_w4_multiply(float (&sums)[4], const W4Raw& raw, uint64_t columns,
                                                int step, bool second) {
    const W4Weights weights = w4_convert(raw);
    float part[Columns / 2];
    mma_pin(part);
    mma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        mma_weights_fp8(part, weights.registers + 4 * i, columns + i * (step >> 4), i > 0 ? 1 : 0);
    }
    mma_commit();
    mma_wait<0>();
    w4_hold(weights);
    mma_pin(part);
    const float low = low_bf16(weights.scales);
    const float high = high_bf16(weights.scales);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float value = part[i];
        if constexpr (Columns == 16) {
            value = second ? part[4 + i] : value;
        }
        sums[i] = fmaf(i < 2 ? low : high, value, sums[i]);
    }
}

// A warp's groups on their way: the one that is read next, and the stage that is free once it has been
// acquired.
struct FewW4Ring {
    static_assert(kFewW4Stages == 4);
    uint32_t memory = 0;
    int next = 0;

    __device__ __forceinline__ uint32_t stage(int index) const {
        return memory + (index & (kFewW4Stages - 1)) * kFewW4StageBytes;
    }
    // The next group, once it is there.
    __device__ __forceinline__ uint32_t acquire() {
        copy_async_wait<kFewW4Stages - 2>();
        __syncwarp();
        return stage(next++);
    }
    __device__ __forceinline__ uint32_t free() const { return stage(next + kFewW4Stages - 2); }
};

// Units of 32 outputs of an expert, entry by entry; the four warpgroups share a unit's groups.
__global__ void __launch_bounds__(kFewW4Threads, 2)
    few_w4_gate_up_kernel(const __grid_constant__ FewW4Args args) {
    extern __shared__ __align__(128) uint8_t few_shared[];
    __shared__ float sums[2][kFewW4Groups][64][kFewTokens];
    __shared__ FewEntries entries;
    __shared__ FewEntriesScratch scratch;
    __shared__ float x_scales[kFewTokens];
    __shared__ float partial[kFewW4Warps];
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    uint8_t* x8 = few_shared + kFewW4Warps * kFewW4RingBytes;
    wait_for_previous_kernel();
    let_next_kernel_start();
    FewW4Quantizer<8> quantizer{.from = args.x,
                                .rows = args.routing.tokens,
                                .count = args.hidden,
                                .to = x8,
                                .to_rows = kFewTokens,
                                .scales = x_scales,
                                .partial = partial};
    quantizer.begin();
    find_entries(args.routing, entries, scratch);
    __syncthreads();
    const int row_units = args.width / kFewW4GateOutputs;
    const int units = entries.count * row_units;
    const int groups = args.hidden / static_cast<int>(kW4Group);
    const int64_t unit_bytes = w4_unit_bytes(args.hidden);
    FewW4Ring ring{.memory = shared_address(few_shared) + warp * kFewW4RingBytes};
    // What is fetched next.
    int unit_ahead = warp / 4 < groups ? static_cast<int>(blockIdx.x) : units;
    int group_ahead = warp / 4;
    const uint8_t* from = nullptr;
    const auto fetch = [&](uint32_t stage) {
        if (unit_ahead < units) {
            if (group_ahead == warp / 4) {
                const int64_t expert = entries.expert[unit_ahead / row_units];
                from = args.gate_up + (expert * row_units + unit_ahead % row_units) * unit_bytes;
            }
            few_w4_fetch(stage, from + group_ahead * kW4GroupBytes, warp % 4, 128);
            group_ahead += kFewW4Groups;
            if (group_ahead >= groups) {
                group_ahead = warp / 4;
                unit_ahead += static_cast<int>(gridDim.x);
            }
        }
        copy_async_commit();
    };
    for (int i = 0; i < kFewW4Stages - 1; ++i) {
        fetch(ring.stage(i));
    }
    quantizer.finish();
    __syncthreads();
    const uint64_t columns = few_w4_descriptor(shared_address(x8), kFewTokens, 0);
    int buffer = 0;
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
        float d[4] = {};
        for (int group = warp / 4; group < groups; group += kFewW4Groups) {
            const W4Raw raw = few_w4_load(ring.acquire());
            fetch(ring.free());
            few_w4_multiply<kFewTokens>(d, raw, columns + group * (kW4Group * kFewTokens >> 4),
                                        32 * kFewTokens, false);
        }
        auto& to = sums[buffer][warp / 4];
        const int row = warp % 4 * 16 + lane / 4;
        *reinterpret_cast<float2*>(&to[row][lane % 4 * 2]) = make_float2(d[0], d[1]);
        *reinterpret_cast<float2*>(&to[row + 8][lane % 4 * 2]) = make_float2(d[2], d[3]);
        __syncthreads();
        const int o = static_cast<int>(threadIdx.x) % kFewW4GateOutputs;
        const int n = static_cast<int>(threadIdx.x) / kFewW4GateOutputs;
        const int pair = n < kFewTokens ? entries.columns[unit / row_units][n] : -1;
        if (pair >= 0) {
            const int token = pair / args.routing.k;
            const auto gate_row = static_cast<int>(w4_gate_row(o));
            float gate = 0;
            float up = 0;
#pragma unroll
            for (int i = 0; i < kFewW4Groups; ++i) {
                gate += sums[buffer][i][gate_row][token];
                up += sums[buffer][i][gate_row + 8][token];
            }
            const float scale = x_scales[token] * kW4Unit;
            reinterpret_cast<__nv_bfloat16*>(args.act)[static_cast<int64_t>(pair) * args.width +
                                                       unit % row_units * kFewW4GateOutputs + o] =
                __float2bfloat16_rn(swiglu(gate * scale, up * scale));
        }
        buffer ^= 1;
    }
}

// Where the rows of act lie: by entry. By the first threads, after find_entries(); the caller synchronises.
struct FewW4Places {
    int16_t row[kFewPairs];  // of each pair; -1: none
    int16_t first[kFewPairs + 1];

    __device__ __forceinline__ void find(const FewEntries& entries) {
        const auto thread = static_cast<int>(threadIdx.x);
        if (thread < kFewPairs) {
            row[thread] = -1;
        }
        __syncthreads();
        if (thread < entries.count) {
            int before = 0;
            for (int entry = 0; entry < thread; ++entry) {
                before += count(entries, entry);
            }
            first[thread] = static_cast<int16_t>(before);
#pragma unroll
            for (int i = 0; i < kFewTokens; ++i) {
                const int pair = entries.columns[thread][i];
                if (pair >= 0) {
                    row[pair] = static_cast<int16_t>(before + i);
                }
            }
        }
    }
    static __device__ __forceinline__ int count(const FewEntries& entries, int entry) {
        const uint2 columns = *reinterpret_cast<const uint2*>(entries.columns[entry]);
        return 8 - (__popc(columns.x & 0x80808080u) + __popc(columns.y & 0x80808080u));
    }
};

// The index of this thread's result in y.
__device__ __forceinline__ int few_w4_output(const FewW4Args& args) {
    return static_cast<int>(threadIdx.x) / kFewW4DownOutputs * args.hidden +
           static_cast<int>(blockIdx.x) * kFewW4DownOutputs +
           static_cast<int>(threadIdx.x) % kFewW4DownOutputs;
}

// gridDim.x = hidden / 32. A warpgroup takes an expert at a time: two of its warps the first half of the
// inputs, two the second, whose columns lie that much further.
__global__ void __launch_bounds__(kFewW4Threads, 2)
    few_w4_down_kernel(const __grid_constant__ FewW4Args args) {
    extern __shared__ __align__(128) uint8_t few_shared[];
    __shared__ __align__(16) FewEntries entries;
    __shared__ FewEntriesScratch scratch;
    __shared__ FewW4Places places;
    __shared__ float act_scales[kFewPairs];
    __shared__ float shares[kFewPairs];
    __shared__ float2 added[kFewTokens * kFewW4DownOutputs];  // y and more
    __shared__ float partial[kFewW4Warps];
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int pairs = args.routing.tokens * args.routing.k;
    const int rows = pairs + 8;
    const int half = few_w4_half(args.width);
    uint8_t* act8 = few_shared + kFewW4Warps * kFewW4RingBytes;

    const int output = static_cast<int>(blockIdx.x) * kFewW4DownOutputs;
    // The choices are complete: the kernel before waited for the one that made them, and let this one start
    // only then.
    find_entries(args.routing, entries, scratch);
    __syncthreads();
    const auto unit_bytes = static_cast<int>(w4_unit_bytes(args.width));
    const int quarter = output % static_cast<int>(kW4UnitRows) / 16 + warp % 2;
    const bool second = warp % 4 >= 2;
    FewW4Ring ring{.memory = shared_address(few_shared) + warp * kFewW4RingBytes};
    // What is fetched next.
    int entry_ahead = warp / 4;
    int step_ahead = 0;
    const auto fetch = [&](uint32_t stage) {
        if (entry_ahead < entries.count) {
            const int64_t unit =
                (static_cast<int64_t>(entries.expert[entry_ahead]) * args.hidden + output) / kW4UnitRows;
            const int group = step_ahead + (second ? half : 0);
            const int inputs = args.width - group * static_cast<int>(kW4Group);
            few_w4_fetch(stage, args.down + unit * unit_bytes + (inputs > 0 ? group * kW4GroupBytes : 0),
                         quarter, inputs);
            if (++step_ahead == half) {
                step_ahead = 0;
                entry_ahead += kFewW4Groups;
            }
        }
        copy_async_commit();
    };
    for (int i = 0; i < kFewW4Stages - 1; ++i) {
        fetch(ring.stage(i));
    }
    places.find(entries);
    if (static_cast<int>(threadIdx.x) < pairs) {
        shares[threadIdx.x] = args.expert_weights[threadIdx.x];
    }
    // Inputs that the last group lacks.
    for (int i = static_cast<int>(threadIdx.x) + args.width / 16 * rows; i < 16 * half * rows;
         i += kFewW4Threads) {
        reinterpret_cast<uint4*>(act8)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    FewW4Quantizer<6> quantizer{.from = args.act,
                                .rows = pairs,
                                .count = args.width,
                                .to = act8,
                                .to_rows = rows,
                                .places = places.row,
                                .scales = act_scales,
                                .partial = partial};
    quantizer.begin();
    quantizer.finish();
    if (static_cast<int>(threadIdx.x) < args.routing.tokens * kFewW4DownOutputs) {
        const int at = few_w4_output(args);
        added[threadIdx.x] = make_float2(__bfloat162float(args.y[at]),
                                         args.more != nullptr ? __bfloat162float(args.more[at]) : 0);
    }
    __syncthreads();
    auto* parts = reinterpret_cast<float*>(act8 + 256 * half * rows);
    for (int entry = warp / 4; entry < entries.count; entry += kFewW4Groups) {
        const uint64_t columns =
            few_w4_descriptor(shared_address(act8) + places.first[entry] * 16, rows, 128 * half * rows);
        float d[4] = {};
        for (int step = 0; step < half; ++step) {
            const W4Raw raw = few_w4_load(ring.acquire());
            fetch(ring.free());
            few_w4_multiply<2 * kFewTokens>(d, raw, columns + step * (128 * rows >> 4), 32 * rows, second);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int taker = entries.columns[entry][lane % 4 * 2 + i % 2];
            if (taker >= 0) {
                parts[(2 * taker + (second ? 1 : 0)) * kFewW4DownOutputs + warp % 2 * 16 + i / 2 * 8 +
                      lane / 4] = d[i];
            }
        }
    }
    __syncthreads();
    const int token = static_cast<int>(threadIdx.x) / kFewW4DownOutputs;
    if (token >= args.routing.tokens) {
        return;
    }
    int mine = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(mine));  // else its place is kept from above, in local memory
    const float2 base = added[mine];
    float sum = 0;
    for (int i = 0; i < args.routing.k; ++i) {
        const int pair = token * args.routing.k + i;
        if (scratch.choices[pair] >= 0) {
            const float* part = parts + 2 * pair * kFewW4DownOutputs + threadIdx.x % kFewW4DownOutputs;
            const float out = (part[0] + part[kFewW4DownOutputs]) * (act_scales[pair] * kW4Unit);
            sum = fmaf(shares[pair], round_bf16(out), sum);
        }
    }
    if (args.more != nullptr) {
        sum = round_bf16(sum) + base.y;
    }
    args.y[few_w4_output(args)] = __float2bfloat16_rn(base.x + round_bf16(sum));
}

}  // namespace tessera::cuda
