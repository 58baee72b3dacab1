// The experts of a few tokens: at decode the weights of every chosen expert are read once, and nothing else
// takes time but the launches. So there is no sorting: a block finds the experts of the batch, and the tokens
// of each, by looking at all the choices.
//
// Roofline: bytes of the chosen experts' weights at 4.27 TB/s.
//
// Schedule: two kernels. Gate and up: two blocks a multiprocessor take units of 8 outputs (16 rows of
// weights) of one expert in turn, the shared expert's first, whose weights are on the way before the kernel
// before has ended. Down: a block has 16 outputs of all experts; the sum over a token's experts is its last
// step. Weights go from memory to registers, 16 bytes a lane, straight into the layout of mma.sync: which
// inputs share an instruction does not matter as long as weights and x agree. While a lane multiplies one
// batch of loads, the next is under way.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/moe/cuda/few_entries.cuh"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

struct FewSide {
    const uint8_t* gate_up = nullptr;  // [experts, 2 * width, hidden]
    const uint8_t* down = nullptr;     // [experts, hidden, width]
    const uint8_t* x = nullptr;        // [tokens, hidden]
    int32_t width = 0;
    float input_scale = 1;
    const float* gate_up_scale = nullptr;     // [experts, 2]
    const float* down_scale = nullptr;        // [experts]
    const float* down_input_scale = nullptr;  // [experts]
};

struct FewArgs {
    FewSide routed;
    FewSide shared;
    FewRouting routing;
    int32_t hidden = 0;
    const float* expert_weights = nullptr;  // [tokens, k]
    uint8_t* act = nullptr;                 // rows: the pairs, then the tokens as the shared expert has them
    int64_t act_bytes = 0;                  // of a row
    __nv_bfloat16* y = nullptr;             // [tokens, hidden]
    bool add = true;                        // to y
};

inline constexpr int kFewChunk = 64;  // bytes of a row that four lanes load at once
inline constexpr int kFewBatch = 4;   // chunks of a row that a lane loads at once
inline constexpr int kFewWarps = 8;
inline constexpr int kFewGateOutputs = 8;
inline constexpr int kFewDownOutputs = 16;
inline constexpr int kFewSlice = kFewChunk * kFewBatch;  // bytes of a row, of one warp's unit of down

__device__ __forceinline__ uint4 load_once(const uint8_t* from, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
    }
    return v;
}

// d[16, 8] += weights x columns over the 64 bytes of K of a load: two instructions. Lane (g, t) has 16 bytes
// of rows g and g + 8, and of column g.
template <bool Fp8>
__device__ __forceinline__ void few_multiply(float (&d)[4], uint4 low, uint4 high, uint4 column) {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    if constexpr (Fp8) {
        mma_16x8_e4m3(d, first, column.x, column.y);
        mma_16x8_e4m3(d, second, column.z, column.w);
    } else {
        mma_16x8<false>(d, first, column.x, column.y);
        mma_16x8<false>(d, second, column.z, column.w);
    }
}

// A batch of loads of two rows: chunks first, first + step, ... of `bytes` bytes.
struct FewBatch {
    uint4 low[kFewBatch];
    uint4 high[kFewBatch];

    __device__ __forceinline__ void load(const uint8_t* low_row, const uint8_t* high_row, int first, int step,
                                         int bytes) {
        const int inside = static_cast<int>(threadIdx.x % 4) * 16;
#pragma unroll
        for (int i = 0; i < kFewBatch; ++i) {
            const int at = (first + i * step) * kFewChunk + inside;
            low[i] = load_once(low_row + at, at < bytes);
            high[i] = load_once(high_row + at, at < bytes);
        }
    }
    // column: of this lane, or null.
    template <bool Fp8>
    __device__ __forceinline__ void multiply(float (&d)[4], const uint8_t* column, int first, int step,
                                             int bytes) const {
        const int inside = static_cast<int>(threadIdx.x % 4) * 16;
        uint4 values[kFewBatch];
#pragma unroll
        for (int i = 0; i < kFewBatch; ++i) {
            const int at = (first + i * step) * kFewChunk + inside;
            values[i] = column != nullptr && at < bytes ? *reinterpret_cast<const uint4*>(column + at)
                                                        : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kFewBatch; ++i) {
            few_multiply<Fp8>(d, low[i], high[i], values[i]);
        }
    }
};

// One block's work on 8 outputs of an expert, or its next batch of it.
struct FewGateUnit {
    int entry = 0;
    int output = 0;
    bool shared = false;
    const uint8_t* gate = nullptr;  // this lane's rows
    const uint8_t* up = nullptr;

    // index: the shared expert's units, then the others', entry by entry. `experts`: of the entries.
    static __device__ __forceinline__ FewGateUnit at(const FewArgs& args, const int32_t* experts, int index,
                                                     int64_t bytes) {
        const int shared_units = args.shared.width / kFewGateOutputs;
        FewGateUnit unit;
        unit.shared = index < shared_units;
        const int routed_units = args.routed.width / kFewGateOutputs;
        int expert = 0;
        if (unit.shared) {
            unit.output = index * kFewGateOutputs;
        } else {
            const int routed = index - shared_units;
            unit.entry = (shared_units > 0 ? 1 : 0) + routed / routed_units;
            unit.output = routed % routed_units * kFewGateOutputs;
            expert = experts[unit.entry];
        }
        const FewSide& side = unit.shared ? args.shared : args.routed;
        const auto group = static_cast<int>(threadIdx.x % 32 / 4);
        unit.gate =
            side.gate_up + (2 * static_cast<int64_t>(expert) * side.width + unit.output + group) * bytes;
        unit.up = unit.gate + side.width * bytes;
        return unit;
    }
};

// Of an entry, in fp8: of its sums, and one over act's.
struct FewGateScales {
    float gate;
    float up;
    float inverse;
};
// By all threads; the caller synchronises.
__device__ __forceinline__ void few_gate_scales(const FewArgs& args, const FewEntries& entries,
                                                FewGateScales (&scales)[kFewPairs + 1]) {
    const auto entry = static_cast<int>(threadIdx.x);
    if (entry < entries.count) {
        const FewSide& side = args.routing.shared && entry == 0 ? args.shared : args.routed;
        const int expert = entries.expert[entry];
        scales[entry] = {.gate = side.input_scale * side.gate_up_scale[2 * expert],
                         .up = side.input_scale * side.gate_up_scale[2 * expert + 1],
                         .inverse = __frcp_rn(side.down_input_scale[expert])};
    }
}

// SwiGLU of a unit, by a thread for each output and column, from the warps' sums.
template <bool Fp8>
__device__ __forceinline__ void few_store_act(
    const FewArgs& args, const FewEntries& entries, const FewGateUnit& unit,
    const FewGateScales (&scales)[kFewPairs + 1],
    const float (&sums)[kFewWarps][2 * kFewGateOutputs][kFewTokens]) {
    const int n = static_cast<int>(threadIdx.x) / kFewGateOutputs;
    const int o = static_cast<int>(threadIdx.x) % kFewGateOutputs;
    const int row = n < kFewTokens ? entries.columns[unit.entry][n] : -1;
    if (row < 0) {
        return;
    }
    float gate = 0;
    float up = 0;
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) {
        gate += sums[w][o][n];
        up += sums[w][o + kFewGateOutputs][n];
    }
    uint8_t* act = args.act + row * args.act_bytes;
    if constexpr (Fp8) {
        const FewGateScales scale = scales[unit.entry];
        const float h = swiglu(gate * scale.gate, up * scale.up);
        act[unit.output + o] = static_cast<uint8_t>(pack_e4m3(round_bf16(h) * scale.inverse, 0));
    } else {
        reinterpret_cast<__nv_bfloat16*>(act)[unit.output + o] = __float2bfloat16_rn(swiglu(gate, up));
    }
}

// gridDim.x: two blocks a multiprocessor, or the units if they are fewer.
template <bool Fp8>
__global__ void __launch_bounds__(32 * kFewWarps, 2)
    few_gate_up_kernel(const __grid_constant__ FewArgs args) {
    __shared__ float sums[2][kFewWarps][2 * kFewGateOutputs][kFewTokens];
    __shared__ FewEntries entries;
    __shared__ FewEntriesScratch scratch;
    __shared__ FewGateScales scales[kFewPairs + 1];
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int group = static_cast<int>(threadIdx.x % 32 / 4);
    const int64_t bytes = static_cast<int64_t>(args.hidden) * (Fp8 ? 1 : 2);
    const int chunks = static_cast<int>((bytes + kFewChunk - 1) / kFewChunk);
    const int batches = (chunks + kFewWarps * kFewBatch - 1) / (kFewWarps * kFewBatch);
    const int stride = static_cast<int>(gridDim.x);
    int index = static_cast<int>(blockIdx.x);
    FewGateUnit unit;
    FewBatch batch[2];
    const auto load = [&](FewBatch& to, const FewGateUnit& of, int number) {
        to.load(of.gate, of.up, number * kFewWarps * kFewBatch + warp, kFewWarps, static_cast<int>(bytes));
    };
    const bool early = index < args.shared.width / kFewGateOutputs;
    static_assert(kFewPairs + 1 <= 32 * kFewWarps);
    if (early) {
        unit = FewGateUnit::at(args, nullptr, index, bytes);
        load(batch[0], unit, 0);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    find_entries(args.routing, entries, scratch);
    __syncthreads();
    const int routed = entries.count - (args.shared.width > 0 ? 1 : 0);
    const int units = (args.shared.width + routed * args.routed.width) / kFewGateOutputs;
    if (index >= units) {
        return;
    }
    if (!early) {
        unit = FewGateUnit::at(args, entries.expert, index, bytes);
        load(batch[0], unit, 0);
    }
    if constexpr (Fp8) {
        few_gate_scales(args, entries, scales);  // read after the first unit's barrier
    }
    float d[4] = {};
    int number = 0;
    int buffer = 0;
    // Multiplies one batch while the next is under way. Returns whether there is a next.
    const auto step = [&](FewBatch& now, FewBatch& next) {
        FewGateUnit following = unit;
        const bool last = number + 1 == batches;
        const bool more = !last || index + stride < units;
        if (last && more) {
            following = FewGateUnit::at(args, entries.expert, index + stride, bytes);
        }
        if (more) {
            load(next, following, last ? 0 : number + 1);
        }
        const int row = entries.columns[unit.entry][group];
        const int pairs = args.routing.tokens * args.routing.k;
        const uint8_t* column = nullptr;
        if (row >= 0) {
            column = unit.shared ? args.shared.x + (row - pairs) * bytes
                                 : args.routed.x + row / args.routing.k * bytes;
        }
        now.template multiply<Fp8>(d, column, number * kFewWarps * kFewBatch + warp, kFewWarps,
                                   static_cast<int>(bytes));
        if (last) {
            const int pair = static_cast<int>(threadIdx.x % 4) * 2;
            *reinterpret_cast<float2*>(&sums[buffer][warp][group][pair]) = make_float2(d[0], d[1]);
            *reinterpret_cast<float2*>(&sums[buffer][warp][group + 8][pair]) = make_float2(d[2], d[3]);
            __syncthreads();
            few_store_act<Fp8>(args, entries, unit, scales, sums[buffer]);
            buffer ^= 1;
#pragma unroll
            for (float& value : d) {
                value = 0;
            }
            index += stride;
            number = 0;
            unit = following;
        } else {
            ++number;
        }
        return more;
    };
    while (step(batch[0], batch[1]) && step(batch[1], batch[0])) {
    }
}

// One warp's work on 16 outputs: a slice of the inputs of one expert.
struct FewDownUnit {
    int entry = 0;
    int slice = 0;
    bool shared = false;
    int bytes = 0;                 // of a row
    const uint8_t* low = nullptr;  // this lane's first row

    template <bool Fp8>
    static __device__ __forceinline__ FewDownUnit at(const FewArgs& args, const FewEntries& entries,
                                                     int index, int slices, int output) {
        FewDownUnit unit{.entry = index / slices, .slice = index % slices};
        unit.shared = args.shared.width > 0 && unit.entry == 0;
        const FewSide& side = unit.shared ? args.shared : args.routed;
        unit.bytes = side.width * (Fp8 ? 1 : 2);
        const int64_t row = static_cast<int64_t>(entries.expert[unit.entry]) * args.hidden + output +
                            static_cast<int>(threadIdx.x % 32 / 4);
        unit.low = side.down + row * unit.bytes;
        return unit;
    }
    __device__ __forceinline__ void load(FewBatch& to) const {
        to.load(low, low + 8 * static_cast<int64_t>(bytes), slice * kFewBatch, 1, bytes);
    }
};

// Of each pair: its weight, and with fp8 the scale of its sums; the shared expert's last. By all threads,
// after find_entries().
template <bool Fp8>
__device__ __forceinline__ void few_down_scales(const FewArgs& args, const FewEntriesScratch& found,
                                                float (&shares)[kFewPairs], float (&scales)[kFewPairs + 1]) {
    const auto pair = static_cast<int>(threadIdx.x);
    const int expert = pair < kFewPairs ? found.choices[pair] : -1;
    if (expert >= 0) {
        shares[pair] = args.expert_weights[pair];
    }
    if constexpr (Fp8) {
        if (expert >= 0) {
            scales[pair] = args.routed.down_input_scale[expert] * args.routed.down_scale[expert];
        } else if (pair == kFewPairs && args.routing.shared) {
            scales[pair] = args.shared.down_input_scale[0] * args.shared.down_scale[0];
        }
    }
}

// gridDim.x = hidden / 16. Dynamic shared memory: float [rows of act][slices][16].
template <bool Fp8>
__global__ void __launch_bounds__(32 * kFewWarps, 2)
    few_down_kernel(const __grid_constant__ FewArgs args, int slices) {
    extern __shared__ float parts[];
    __shared__ FewEntries entries;
    __shared__ FewEntriesScratch scratch;
    __shared__ float shares[kFewPairs];
    __shared__ float scales[kFewPairs + 1];
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int group = static_cast<int>(threadIdx.x % 32 / 4);
    const int output = static_cast<int>(blockIdx.x) * kFewDownOutputs;
    // The choices are complete: the kernel before waited for the one that made them, and let this one start
    // only then.
    find_entries(args.routing, entries, scratch);
    __syncthreads();
    const int units = entries.count * slices;
    FewBatch batch[2];
    int index = warp;
    FewDownUnit unit;
    if (index < units) {
        unit = FewDownUnit::at<Fp8>(args, entries, index, slices, output);
        unit.load(batch[0]);
    }
    few_down_scales<Fp8>(args, scratch, shares, scales);  // read after the last barrier
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int token = static_cast<int>(threadIdx.x) / kFewDownOutputs;
    const int o = static_cast<int>(threadIdx.x) % kFewDownOutputs;
    __nv_bfloat16* y = args.y + static_cast<int64_t>(token) * args.hidden + output + o;
    const float before = args.add && token < args.routing.tokens ? __bfloat162float(*y) : 0;
    const auto step = [&](FewBatch& now, FewBatch& next) {
        if (index >= units) {
            return false;
        }
        FewDownUnit following;
        if (index + kFewWarps < units) {
            following = FewDownUnit::at<Fp8>(args, entries, index + kFewWarps, slices, output);
            following.load(next);
        }
        const int row = entries.columns[unit.entry][group];
        float d[4] = {};
        now.template multiply<Fp8>(d, row < 0 ? nullptr : args.act + row * args.act_bytes,
                                   unit.slice * kFewBatch, 1, unit.bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int taker = entries.columns[unit.entry][threadIdx.x % 4 * 2 + i % 2];
            if (taker >= 0) {
                parts[(taker * slices + unit.slice) * kFewDownOutputs + group + i / 2 * 8] = d[i];
            }
        }
        index += kFewWarps;
        unit = following;
        return true;
    };
    while (step(batch[0], batch[1]) && step(batch[1], batch[0])) {
    }
    __syncthreads();
    if (token >= args.routing.tokens) {
        return;
    }
    const auto result = [&](const FewSide& side, int row, float scale) {
        const int used = (side.width * (Fp8 ? 1 : 2) + kFewSlice - 1) / kFewSlice;
        float sum = 0;
        for (int s = 0; s < used; ++s) {
            sum += parts[(row * slices + s) * kFewDownOutputs + o];
        }
        return round_bf16(Fp8 ? sum * scale : sum);
    };
    float sum = 0;
    for (int i = 0; i < args.routing.k; ++i) {
        const int pair = token * args.routing.k + i;
        if (scratch.choices[pair] >= 0) {
            sum = fmaf(shares[pair], result(args.routed, pair, scales[pair]), sum);
        }
    }
    if (args.routing.shared) {
        sum = round_bf16(sum) +
              result(args.shared, args.routing.tokens * args.routing.k + token, scales[kFewPairs]);
    }
    *y = __float2bfloat16_rn(before + round_bf16(sum));
}

}  // namespace tessera::cuda
