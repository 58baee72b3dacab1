// The int4 experts of a few tokens: one kernel without a sorted list, as few_experts.cuh.
//
// Roofline: bytes of the chosen experts' weights (0.516 a weight) at 4.27 TB/s.
//
// Schedule: one block a multiprocessor, four warpgroups. Units of 32 outputs of gate and up of one expert in
// turn, then 32 outputs of down of all experts. Each warp has a ring of groups of 16 rows by 128 inputs on
// their way into shared memory (cp.async): down's first groups arrive while the last gate and up are handed
// over (few_exchange.cuh). Codes become e4m3 in registers, the A side of wgmma (experts_grouped.cuh); its N
// side is all tokens, or the rows of act of one expert, of which a thread uses what it needs. Each block
// quantises all rows of x (of act) while weights arrive.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/wgmma.cuh"
#include "ops/moe/cuda/few_entries.cuh"
#include "ops/moe/cuda/few_exchange.cuh"
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
    FewExchange* exchange = nullptr;        // [tokens * k, width] bfloat16
    const __nv_bfloat16* more = nullptr;    // [tokens, hidden]: the shared expert's outputs; may be null
    __nv_bfloat16* y = nullptr;             // [tokens, hidden]
};

inline constexpr int kFewW4Warps = 16;
inline constexpr int kFewW4Threads = 32 * kFewW4Warps;
inline constexpr int kFewW4Groups = kFewW4Warps / 4;  // warpgroups
inline constexpr int kFewW4Stages = 4;                // of a ring; twice as many where there is room
inline constexpr int kFewW4StageBytes = 32 + 1024;    // scales and codes of 16 rows by 128 inputs
inline constexpr int kFewW4GateOutputs = 32;
inline constexpr int kFewW4DownOutputs = 32;

// Groups of each half of the inputs of down.
constexpr int few_w4_half(int width) {
    return (width + 255) / 256;
}
// x in e4m3, then pairs + 8 rows of act.
constexpr int few_w4_columns_bytes(int pairs, int hidden, int width) {
    return std::max(kFewTokens * hidden, 256 * few_w4_half(width) * (pairs + 8));
}
// The rings, the columns, and the pairs' sums.
constexpr int few_w4_shared_bytes(int stages, int pairs, int hidden, int width) {
    return kFewW4Warps * stages * kFewW4StageBytes + few_w4_columns_bytes(pairs, hidden, width) +
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
template <int Kept, bool Awaited = false>  // pieces of a row that a thread holds; the rows are awaited
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
        bring(static_cast<int>(threadIdx.x) / (32 * share), lane());
    }
    __device__ __forceinline__ bool is_there(int index) const {
        return index < rows && (places == nullptr || places[index] >= 0);
    }
    __device__ __forceinline__ void bring(int index, int first) {
        if (is_there(index)) {
            if constexpr (Awaited) {
                pieces.look(row(index), first, 32 * share);
            } else {
                pieces.load(row(index), first, 32 * share);
            }
        }
    }
    // What bring() has asked for is there.
    __device__ __forceinline__ void settle(int index, int first) {
        if constexpr (Awaited) {
            while (pieces.is_missing()) {
                bring(index, first);
            }
            __syncwarp();
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
            const bool there = is_there(index);
            if (there) {
                settle(index, lane());
            }
            float largest = there ? pieces.largest() : 0;
            for (int first = lane() + span; there && (first - lane()) * 8 < count; first += span) {
                bring(index, first);
                settle(index, first);
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
            if (there) {
                const int place = places != nullptr ? places[index] : index;
                const float scale = row_scale(largest);
                const Divider divide = divider(scale);
                if (lane() == 0) {
                    scales[index] = scale;
                }
                const bool whole = span * 8 >= count;
                for (int first = lane(); (first - lane()) * 8 < count; first += span) {
                    if (!whole) {
                        bring(index, first);
                    }
                    store(place, first, divide);
                }
            }
            bring(index + at_once, lane());
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
    grouped_hold(weights);
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
template <int Stages>
struct FewW4Ring {
    static_assert((Stages & (Stages - 1)) == 0);
    uint32_t memory = 0;
    int next = 0;

    __device__ __forceinline__ uint32_t stage(int index) const {
        return memory + (index & (Stages - 1)) * kFewW4StageBytes;
    }
    // The next group, once it is there.
    __device__ __forceinline__ uint32_t acquire() {
        copy_async_wait<Stages - 2>();
        __syncwarp();
        return stage(next++);
    }
    __device__ __forceinline__ uint32_t free() const { return stage(next + Stages - 2); }
};

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

struct FewW4Shared {
    float sums[2][kFewW4Groups][64][kFewTokens];
    FewEntries entries;
    FewEntriesScratch scratch;
    FewW4Places places;
    float x_scales[kFewTokens];
    float act_scales[kFewPairs];
    float shares[kFewPairs];
    float partial[kFewW4Warps];
    uint32_t turn;
};

// The groups of a warp one after the other, into its ring: of the block's units of gate and up, which the
// four warpgroups share group by group; then of down, where a warpgroup takes an expert at a time: two of its
// warps the first half of the inputs, two the second.
class FewW4Order {
  public:
    __device__ __forceinline__ FewW4Order(const FewW4Args& args, const FewEntries& entries)
        : args_(args), entries_(entries), row_units_(args.width / kFewW4GateOutputs) {
        units_ = entries.count * row_units_;
        unit_ = groups() > warp() / 4 ? static_cast<int>(blockIdx.x) : units_;
        entry_ = warp() / 4;
        // The blocks that have a unit more have outputs of down less.
        part_ = static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x);
    }
    __device__ __forceinline__ int units() const { return units_; }
    __device__ __forceinline__ int row_units() const { return row_units_; }
    __device__ __forceinline__ int groups() const { return args_.hidden / static_cast<int>(kGroupedInputs); }
    // Whether this warp has the second half of the inputs of down; its 16 rows.
    static __device__ __forceinline__ bool second() { return warp() % 4 >= 2; }

    __device__ __forceinline__ void fetch(uint32_t stage) {
        if (unit_ < units_) {
            fetch_gate_up(stage);
        } else if (part_ < args_.hidden / kFewW4DownOutputs && entry_ < entries_.count) {
            fetch_down(stage);
        }
        copy_async_commit();
    }

  private:
    static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / 32); }
    __device__ __forceinline__ void fetch_gate_up(uint32_t stage) {
        if (step_ == 0) {
            const int64_t expert = entries_.expert[unit_ / row_units_];
            from_ = args_.gate_up + (expert * row_units_ + unit_ % row_units_) * w4_unit_bytes(args_.hidden) +
                    warp() / 4 * kW4GroupBytes;
        }
        few_w4_fetch(stage, from_ + step_ * (kFewW4Groups * kW4GroupBytes), warp() % 4, 128);
        ++step_;
        if (warp() / 4 + step_ * kFewW4Groups >= groups()) {
            step_ = 0;
            unit_ += static_cast<int>(gridDim.x);
        }
    }
    __device__ __forceinline__ void fetch_down(uint32_t stage) {
        const int output = part_ * kFewW4DownOutputs;
        const int half = few_w4_half(args_.width);
        if (step_ == 0) {
            const int64_t row = static_cast<int64_t>(entries_.expert[entry_]) * args_.hidden + output;
            from_ = args_.down + row / kGroupedUnitRows * w4_unit_bytes(args_.width);
        }
        const int group = step_ + (second() ? half : 0);
        const int inputs = args_.width - group * static_cast<int>(kGroupedInputs);
        few_w4_fetch(stage, from_ + (inputs > 0 ? group * kW4GroupBytes : 0),
                     output % static_cast<int>(kGroupedUnitRows) / 16 + warp() % 2, inputs);
        if (++step_ == half) {
            step_ = 0;
            entry_ += kFewW4Groups;
            if (entry_ >= entries_.count) {
                entry_ = warp() / 4;
                part_ += static_cast<int>(gridDim.x);
            }
        }
    }

    const FewW4Args& args_;
    const FewEntries& entries_;
    const int row_units_;
    int units_;
    int unit_;
    int step_ = 0;
    int entry_;
    int part_;
    const uint8_t* from_ = nullptr;
};

// A block's work on units of gate and up, then on down.
template <int Stages>
struct FewW4Block {
    const FewW4Args& args;
    FewW4Shared& s;
    FewW4Order order;
    FewW4Ring<Stages> ring;
    uint32_t columns;  // x, then act
    uint8_t* act;
    float* parts;  // [pairs][2][32]
    int warp = static_cast<int>(threadIdx.x / 32);
    int lane = static_cast<int>(threadIdx.x % 32);

    // SwiGLU of a unit, by a warp for each column and a lane for each output.
    __device__ __forceinline__ void publish(int unit,
                                            const float (&sums)[kFewW4Groups][64][kFewTokens]) const {
        const int o = lane;
        const int pair = warp < kFewTokens ? s.entries.columns[unit / order.row_units()][warp] : -1;
        if (pair < 0) {
            return;
        }
        const int token = pair / args.routing.k;
        const auto gate_row = static_cast<int>(grouped_gate_row(o));
        float gate = 0;
        float up = 0;
#pragma unroll
        for (int i = 0; i < kFewW4Groups; ++i) {
            gate += sums[i][gate_row][token];
            up += sums[i][gate_row + 8][token];
        }
        const float scale = s.x_scales[token] * kW4Unit;
        const float h = swiglu(gate * scale, up * scale);
        const float next = __shfl_down_sync(kFullWarp, h, 1);
        if (o % 2 == 0) {
            const int output = unit % order.row_units() * kFewW4GateOutputs + o;
            store_relaxed(act + (pair * args.width + output) * 2, pack_bf16(h, next));
        }
    }
    __device__ __forceinline__ void gate_up() {
        const uint64_t x = few_w4_descriptor(columns, kFewTokens, 0);
        int buffer = 0;
        for (int unit = static_cast<int>(blockIdx.x); unit < order.units();
             unit += static_cast<int>(gridDim.x)) {
            float d[4] = {};
            for (int group = warp / 4; group < order.groups(); group += kFewW4Groups) {
                const W4Raw raw = few_w4_load(ring.acquire());
                order.fetch(ring.free());
                few_w4_multiply<kFewTokens>(d, raw, x + group * (kGroupedInputs * kFewTokens >> 4),
                                            32 * kFewTokens, false);
            }
            auto& to = s.sums[buffer][warp / 4];
            const int row = warp % 4 * 16 + lane / 4;
            *reinterpret_cast<float2*>(&to[row][lane % 4 * 2]) = make_float2(d[0], d[1]);
            *reinterpret_cast<float2*>(&to[row + 8][lane % 4 * 2]) = make_float2(d[2], d[3]);
            __syncthreads();
            publish(unit, s.sums[buffer]);
            buffer ^= 1;
        }
    }
    // 32 outputs of down of all experts, each half of the inputs.
    __device__ __forceinline__ void down() {
        const int rows = args.routing.tokens * args.routing.k + 8;
        const int half = few_w4_half(args.width);
        const bool second = FewW4Order::second();
        for (int entry = warp / 4; entry < s.entries.count; entry += kFewW4Groups) {
            const uint64_t first =
                few_w4_descriptor(columns + s.places.first[entry] * 16, rows, 128 * half * rows);
            float d[4] = {};
            for (int step = 0; step < half; ++step) {
                const W4Raw raw = few_w4_load(ring.acquire());
                order.fetch(ring.free());
                few_w4_multiply<2 * kFewTokens>(d, raw, first + step * (128 * rows >> 4), 32 * rows, second);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int taker = s.entries.columns[entry][lane % 4 * 2 + i % 2];
                if (taker >= 0) {
                    parts[(2 * taker + (second ? 1 : 0)) * kFewW4DownOutputs + warp % 2 * 16 + i / 2 * 8 +
                          lane / 4] = d[i];
                }
            }
        }
    }
};

// This thread's result.
struct FewW4End {
    const FewW4Args& args;
    const FewW4Shared& s;
    const float* parts;
    int token = static_cast<int>(threadIdx.x) / kFewW4DownOutputs;
    int o = static_cast<int>(threadIdx.x) % kFewW4DownOutputs;

    __device__ __forceinline__ bool is_there(int part) const {
        return token < args.routing.tokens && part < args.hidden / kFewW4DownOutputs;
    }
    __device__ __forceinline__ int at(int part) const {
        return token * args.hidden + part * kFewW4DownOutputs + o;
    }
    // y and more.
    __device__ __forceinline__ float2 base(int part) const {
        if (!is_there(part)) {
            return make_float2(0, 0);
        }
        return make_float2(__bfloat162float(args.y[at(part)]),
                           args.more != nullptr ? __bfloat162float(args.more[at(part)]) : 0);
    }
    __device__ __forceinline__ void store(int part, float2 base) const {
        if (!is_there(part)) {
            return;
        }
        float sum = 0;
#pragma unroll 8
        for (int i = 0; i < args.routing.k; ++i) {
            const int pair = token * args.routing.k + i;
            if (s.scratch.choices[pair] >= 0) {
                const float* from = parts + 2 * pair * kFewW4DownOutputs + o;
                const float out = (from[0] + from[kFewW4DownOutputs]) * (s.act_scales[pair] * kW4Unit);
                sum = fmaf(s.shares[pair], round_bf16(out), sum);
            }
        }
        if (args.more != nullptr) {
            sum = round_bf16(sum) + base.y;
        }
        args.y[at(part)] = __float2bfloat16_rn(base.x + round_bf16(sum));
    }
};

// gridDim.x: the multiprocessors.
template <int Stages>
__global__ void __launch_bounds__(kFewW4Threads, 1) few_w4_kernel(const __grid_constant__ FewW4Args args) {
    extern __shared__ __align__(128) uint8_t few_shared[];
    __shared__ __align__(16) FewW4Shared s;
    const auto thread = static_cast<int>(threadIdx.x);
    const int pairs = args.routing.tokens * args.routing.k;
    const int rows = pairs + 8;
    const int half = few_w4_half(args.width);
    uint8_t* columns = few_shared + kFewW4Warps * Stages * kFewW4StageBytes;
    auto* parts = reinterpret_cast<float*>(columns + few_w4_columns_bytes(pairs, args.hidden, args.width));
    const FewW4End end{args, s, parts};
    int part = static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x);
    wait_for_previous_kernel();
    let_next_kernel_start();
    // Loads return in order: what is asked for after the weights comes after them.
    if (thread == kFewW4Threads - 1) {
        s.turn = few_turn(args.exchange);
    }
    const int choice = few_choice(args.routing, thread);
    const float expert_share = thread < pairs ? args.expert_weights[thread] : 0;
    float2 base = end.base(part);
    FewW4Quantizer<8> x{.from = args.x,
                        .rows = args.routing.tokens,
                        .count = args.hidden,
                        .to = columns,
                        .to_rows = kFewTokens,
                        .scales = s.x_scales,
                        .partial = s.partial};
    x.begin();
    find_entries(args.routing, choice, s.entries, s.scratch);
    __syncthreads();
    FewW4Block<Stages> block{
        .args = args,
        .s = s,
        .order = FewW4Order(args, s.entries),
        .ring = {.memory = shared_address(few_shared) + thread / 32 * Stages * kFewW4StageBytes},
        .columns = shared_address(columns),
        .act = args.exchange->act[s.turn],
        .parts = parts};
    for (int i = 0; i < Stages - 1; ++i) {
        block.order.fetch(block.ring.stage(i));
    }
    few_reset(args.exchange, s.turn ^ 1);
    s.places.find(s.entries);
    if (thread < pairs) {
        s.shares[thread] = expert_share;
    }
    x.finish();
    __syncthreads();
    block.gate_up();
    if (part * kFewW4DownOutputs >= args.hidden) {
        return;
    }
    // No warp reads x any more: each has passed a barrier after its last product.
    for (int i = thread + args.width / 16 * rows; i < 16 * half * rows; i += kFewW4Threads) {
        reinterpret_cast<uint4*>(columns)[i] = make_uint4(0, 0, 0, 0);  // inputs that the last group lacks
    }
    FewW4Quantizer<6, true> rows_of_act{.from = reinterpret_cast<const uint16_t*>(block.act),
                                        .rows = pairs,
                                        .count = args.width,
                                        .to = columns,
                                        .to_rows = rows,
                                        .places = s.places.row,
                                        .scales = s.act_scales,
                                        .partial = s.partial};
    rows_of_act.begin();
    rows_of_act.finish();
    __syncthreads();
    while (true) {
        block.down();
        __syncthreads();
        end.store(part, base);
        part += static_cast<int>(gridDim.x);
        if (part * kFewW4DownOutputs >= args.hidden) {
            return;
        }
        base = end.base(part);
        __syncthreads();
    }
}

}  // namespace tessera::cuda
