// The narrow int4 experts of one token: weights go from memory straight into registers.
//
// Roofline: bytes of the chosen experts' weights (0.516 a weight) at 4.27 TB/s.
//
// Schedule: one launch, one block a multiprocessor, all resident. An item is four outputs of gate and up,
// eight rows of weights, which lie in runs of 256 bytes; they are dealt in turn, and each of the 16 warps has
// two groups of their inputs, the same ones of all items, so that x stays in registers. Of down a block has
// 32 outputs of all experts, a warp 16 of them of one expert. A warp's loads are three items ahead, with
// width 192 all of the block's; down's take an item's place, so that they do not delay gate and up. x is
// quantised by each block while the first weights come. Blocks hand act to each other in bfloat16, half a
// word at a time (few_exchange.cuh), in some copies; a warp for each expert waits for its row, whose scale
// needs all of it, and meanwhile down's codes are expanded.
//
// mma.sync with float16: a lane's 16 bytes are 16 inputs of two rows of weights (w4_layout.h), rows g and
// g + 8 of A, and column g of B is x at the same inputs. So the lanes of a row may have inputs of their own,
// and the diagonal counts.
#pragma once

#include <cstdint>

#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/moe/cuda/few_exchange.cuh"
#include "ops/moe/cuda/quantize_row.cuh"
#include "ops/moe/cuda/swiglu.cuh"
#include "ops/moe/w4_layout.h"

namespace tessera::cuda {

inline constexpr int kOneW4Warps = 16;
inline constexpr int kOneW4Threads = 32 * kOneW4Warps;
inline constexpr int kOneW4K = kOneW4Warps / 2;  // experts at most: two warps each have down
inline constexpr int kOneW4Groups = 2;           // of the inputs of gate and up, a warp's
inline constexpr int kOneW4HiddenMax = kOneW4Warps * kOneW4Groups * static_cast<int>(kGroupedInputs);
inline constexpr int kOneW4WidthMax = 192;
inline constexpr int kOneW4Halves = kOneW4WidthMax / 64;  // of down's groups
inline constexpr int kOneW4Depth = 3;                     // items on their way, then groups of down
inline constexpr int kOneW4Outputs = 4;                   // of an item
inline constexpr int kOneW4DownOutputs = 32;              // of a block
inline constexpr int kOneW4Copies = 4;  // of act: blocks that wait for the same words delay each other

struct FewOneW4Args {
    const int32_t* chosen = nullptr;   // [k]
    const uint16_t* x = nullptr;       // [hidden] bfloat16
    const uint8_t* gate_up = nullptr;  // [experts, w4_gate_up_bytes()]
    const uint8_t* down = nullptr;     // [experts, w4_down_bytes()]
    FewExchange* exchange = nullptr;   // act: [kOneW4Copies, k, width] bfloat16
    int32_t k = 0;
    int32_t experts = 0;
    int32_t hidden = 0;
    int32_t width = 0;
    int32_t rounds = 0;                     // of gate and up: kOneW4Depth items of each block
    uint32_t inverse = 0;                   // one over an expert's items, times 2^kOneW4Shift
    const float* expert_weights = nullptr;  // [k]
    const uint16_t* more = nullptr;         // [hidden] bfloat16: the shared expert's; may be null
    uint16_t* y = nullptr;                  // [hidden] bfloat16
};
// Exact for all items of a launch: their number times an expert's is below 2^22.
inline constexpr int kOneW4Shift = 22;

struct FewOneW4Shared {
    float2 sums[2][kOneW4Depth * kOneW4Outputs][kOneW4Warps * kOneW4Groups];  // of gate and up
    float parts[kOneW4K][kOneW4DownOutputs];
    float largest[kOneW4Warps];  // of x, then of the rows of act
    uint32_t turn;
};

__device__ __forceinline__ uint4 one_w4_load(const uint8_t* from, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
    }
    return v;
}
__device__ __forceinline__ uint32_t one_w4_load_scales(const uint8_t* from, bool there) {
    uint32_t v = 0;
    if (there) {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
    }
    return v;
}

// Eight stored codes as the A side, in subnormal float16: those of row g times 2^-23, those of g + 8 times
// 2^-19. A sign moves to bit 15, and counts one more beside the magnitude.
inline constexpr float kOneW4Low = 1 << 23;
inline constexpr float kOneW4High = 1 << 19;
__device__ __forceinline__ void one_w4_expand(uint32_t word, uint32_t (&a)[4]) {
    const uint32_t odd = word >> 8;
    a[0] = (word & 0x00010001u) * 0x8002u + (word & 0x000E000Eu);
    a[1] = (word & 0x00100010u) * 0x0802u + (word & 0x00E000E0u);
    a[2] = (odd & 0x00010001u) * 0x8002u + (odd & 0x000E000Eu);
    a[3] = (odd & 0x00100010u) * 0x0802u + (odd & 0x00E000E0u);
}
// d += 64 inputs of the lanes' rows by those of `columns`.
__device__ __forceinline__ void one_w4_multiply(float (&d)[4], uint4 codes, const uint2 (&columns)[4]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t a[4];
        one_w4_expand(words[i], a);
        mma_16x8<true>(d, a, columns[i].x, columns[i].y);
    }
}
// Four values in e4m3, as float16 in the order of the A side.
__device__ __forceinline__ uint2 one_w4_column(const Divider& divide, uint32_t first, uint32_t second) {
    return make_uint2(halves_of_e4m3(pack_e4m3(divide(low_bf16(first)), divide(low_bf16(second)))),
                      halves_of_e4m3(pack_e4m3(divide(high_bf16(first)), divide(high_bf16(second)))));
}
// Whether half a word is a mark.
__device__ __forceinline__ bool one_w4_missing(uint4 v) {
    const auto marks = [](uint32_t w) { return (~w - 0x00010001u) & w & 0x80008000u; };
    return (marks(v.x) | marks(v.y) | marks(v.z) | marks(v.w)) != 0;
}

class FewOneW4Warp {
  public:
    __device__ __forceinline__ FewOneW4Warp(const FewOneW4Args& args, FewOneW4Shared& shared, uint2* act)
        : args_(args), s_(shared), act_(act) {}

    __device__ __forceinline__ void ask() const {
        if (warp_ == 0 && lane_ == 0) {
            ask_ahead(args_.chosen);
        } else if (warp_ == 0 && lane_ == 1 && block() * 64 < args_.hidden) {
            ask_ahead(args_.x + block() * 64);
        }
    }
    __device__ __forceinline__ void load_inputs() {
        choice_ = lane_ < args_.k ? args_.chosen[lane_] : -1;
        const uint16_t* from = args_.x + group() * 128 + lane_ % 4 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x_[i / 4][i % 4] =
                has_group() ? *reinterpret_cast<const uint2*>(from + 16 * i) : make_uint2(0, 0);
        }
        if (threadIdx.x == kOneW4Threads - 1) {
            turn_ = few_turn(args_.exchange);
        }
        if (warp_ == 0 && has_down()) {
            share_ = lane_ < args_.k ? args_.expert_weights[lane_] : 0;
            before_ = args_.y[output()];
            if (args_.more != nullptr) {
                more_ = args_.more[output()];
            }
        }
        if (choice_ >= args_.experts) {
            choice_ = -1;
        }
    }
    // The first steps.
    __device__ __forceinline__ void begin() {
        own_expert_ = __shfl_sync(kFullWarp, choice_, slot());
        own_expert_ = slot() < args_.k && has_down() ? own_expert_ : -1;
#pragma unroll
        for (int i = 0; i < kOneW4Depth; ++i) {
            fetch_gate_up(i, i);
        }
    }
    // With a barrier.
    __device__ __forceinline__ void quantize_x() {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            most = larger_bf16x2(larger_bf16x2(most, x_[i / 4][i % 4].x), x_[i / 4][i % 4].y);
        }
        const float own = warp_reduce(fmaxf(low_bf16(most), high_bf16(most)), Max{});
        if (lane_ == 0) {
            s_.largest[warp_] = own;
        }
        __syncthreads();
        x_scale_ = row_scale(warp_reduce<kOneW4Warps>(s_.largest[lane_ % kOneW4Warps], Max{}));
        const Divider divide = divider(x_scale_);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint2& at = x_[i / 4][i % 4];
            at = one_w4_column(divide, at.x, at.y);
        }
    }
    __device__ __forceinline__ void gate_up() {
#pragma unroll 1
        for (int round = 0; round < args_.rounds; ++round) {
            const bool last = round + 1 == args_.rounds;
#pragma unroll
            for (int i = 0; i < kOneW4Depth; ++i) {
                multiply_gate_up(i, round % 2);
                if (last) {
                    fetch_down(i, i);
                } else {
                    fetch_gate_up(i, (round + 1) * kOneW4Depth + i);
                }
            }
            if (round == 0 && threadIdx.x == kOneW4Threads - 1) {
                s_.turn = turn_;
            }
            __syncthreads();
            publish(round);
            if (round == 0) {
                few_reset(args_.exchange, s_.turn ^ 1);
            }
        }
    }
    __device__ __forceinline__ bool has_down() const { return part() * kOneW4DownOutputs < args_.hidden; }
    __device__ __forceinline__ void down() {
        if (own_expert_ >= 0) {
            multiply_down();
        }
        __syncthreads();
        if (warp_ == 0) {
            store_y();
        }
    }

  private:
    static __device__ __forceinline__ int block() { return static_cast<int>(blockIdx.x); }
    static __device__ __forceinline__ int grid() { return static_cast<int>(gridDim.x); }
    // The blocks with an item more come last.
    __device__ __forceinline__ int part() const { return grid() - 1 - block(); }
    __device__ __forceinline__ int output() const { return part() * kOneW4DownOutputs + lane_; }
    // Of the inputs of gate and up, this lane's.
    __device__ __forceinline__ int group() const { return kOneW4Groups * warp_ + lane_ / 16; }
    __device__ __forceinline__ bool has_group() const { return group() * 128 < args_.hidden; }
    __device__ __forceinline__ int slot() const { return warp_ / 2; }  // of the choices, whose down it has

    struct Item {
        int slot;
        int at;  // of the expert's
        int expert;
    };
    // The block's n-th.
    __device__ __forceinline__ Item item(int n) const {
        const auto number = static_cast<uint32_t>(n * grid() + block());
        const auto slot = static_cast<int>(number * args_.inverse >> kOneW4Shift);
        const int expert = __shfl_sync(kFullWarp, choice_, slot);
        return {slot, static_cast<int>(number) - slot * (args_.width / kOneW4Outputs),
                slot < args_.k ? expert : -1};
    }
    __device__ __forceinline__ void fetch_gate_up(int i, int n) {
        const Item item = this->item(n);
        const bool there = item.expert >= 0 && has_group();
        const uint8_t* from = args_.gate_up +
                              (static_cast<int64_t>(item.expert) * (args_.width / 32) + item.at / 8) *
                                  w4_unit_bytes(args_.hidden) +
                              group() * kW4GroupBytes;
        const uint8_t* codes = from + kW4ScaleBytes + item.at % 8 * 256 + lane_ % 16 * 16;
        codes_[i][0] = one_w4_load(codes, there);
        codes_[i][1] = one_w4_load(codes + 2048, there);
        scales_[i] = one_w4_load_scales(from + item.at % 8 * 16 + lane_ / 4 % 4 * 4, there);
    }
    __device__ __forceinline__ void fetch_down(int i, int n) {
        const int left = args_.width - n * 128;
        const bool there = own_expert_ >= 0 && left > 0;
        const int rows = part() % 2 * 2 + warp_ % 2;  // 16 of the unit's
        const uint8_t* from = args_.down +
                              (static_cast<int64_t>(own_expert_) * (args_.hidden / 64) + part() / 2) *
                                  w4_unit_bytes(args_.width) +
                              n * kW4GroupBytes;
        const uint8_t* codes = from + kW4ScaleBytes + rows * 512 + lane_ * 16;
        codes_[i][0] = one_w4_load(codes, there);
        codes_[i][1] = one_w4_load(codes + 2048, there && left > 64);
        scales_[i] = one_w4_load_scales(from + (rows * 8 + lane_ / 4) * 4, there);
    }

    __device__ __forceinline__ void multiply_gate_up(int i, int buffer) const {
        const int g = lane_ / 4;
        float d[2][4] = {};
        one_w4_multiply(d[0], codes_[i][0], x_[0]);
        one_w4_multiply(d[1], codes_[i][1], x_[1]);
        if (lane_ % 4 == g / 2) {
            const float gate = g % 2 == 0 ? d[0][0] + d[1][0] : d[0][1] + d[1][1];
            const float up = g % 2 == 0 ? d[0][2] + d[1][2] : d[0][3] + d[1][3];
            s_.sums[buffer][i * kOneW4Outputs + g % 4][group()] =
                make_float2(gate * kOneW4Low * low_bf16(scales_[i]), up * kOneW4High * high_bf16(scales_[i]));
        }
    }
    // By a warp for each output of the round.
    __device__ __forceinline__ void publish(int round) const {
        if (warp_ >= kOneW4Depth * kOneW4Outputs) {
            return;
        }
        const Item item = this->item(round * kOneW4Depth + warp_ / kOneW4Outputs);
        const float2 own = s_.sums[round % 2][warp_][lane_];
        const bool first = lane_ < 16;
        float sum = first ? own.x : own.y;
        sum += __shfl_xor_sync(kFullWarp, first ? own.y : own.x, 16);
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(kFullWarp, sum, offset);
        }
        const float up = __shfl_sync(kFullWarp, sum, 16);
        sum = __shfl_sync(kFullWarp, sum, 0);
        if (lane_ < kOneW4Copies && item.expert >= 0) {
            const float h = swiglu(sum * x_scale_, up * x_scale_);
            const int at =
                (lane_ * args_.k + item.slot) * args_.width + item.at * kOneW4Outputs + warp_ % kOneW4Outputs;
            store_relaxed_half(reinterpret_cast<uint16_t*>(args_.exchange->act[s_.turn]) + at,
                               static_cast<uint16_t>(pack_bf16(h, h)));
        }
    }

    // Where this expert's row of act comes.
    __device__ __forceinline__ const uint4* act_from() const {
        return reinterpret_cast<const uint4*>(args_.exchange->act[s_.turn]) +
               (block() % kOneW4Copies * args_.k + slot()) * (args_.width / 8);
    }
    // Codes are expanded before act is there; one warp waits for it.
    __device__ __forceinline__ void multiply_down() {
        uint32_t a[kOneW4Halves][4][4];
#pragma unroll
        for (int half = 0; half < kOneW4Halves; ++half) {
            const uint4 codes = codes_[half / 2][half % 2];
            const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                one_w4_expand(words[j], a[half][j]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    asm volatile("" : "+r"(a[half][j][i]));
                }
            }
        }
        if (warp_ % 2 == 0) {
            const int count = args_.width / 8;
            const uint4* from = act_from() + lane_;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (lane_ < count) {
                do {
                    raw = load_relaxed_16(from);
                } while (one_w4_missing(raw));
            }
            __syncwarp();
            const uint32_t most = larger_bf16x2(0, raw);
            const float scale = row_scale(warp_reduce(fmaxf(low_bf16(most), high_bf16(most)), Max{}));
            const Divider divide = divider(scale);
            const uint2 low = one_w4_column(divide, raw.x, raw.y);
            const uint2 high = one_w4_column(divide, raw.z, raw.w);
            if (lane_ < count) {
                reinterpret_cast<uint4*>(act_)[slot() * count + lane_] =
                    make_uint4(low.x, low.y, high.x, high.y);
            }
            if (lane_ == 0) {
                s_.largest[slot()] = scale;
            }
        }
        group_barrier(1 + slot(), 64);
        const uint2* act = act_ + slot() * (args_.width / 4) + lane_ % 4;
        float d[kOneW4Halves][4] = {};
#pragma unroll
        for (int half = 0; half < kOneW4Halves; ++half) {
            if (64 * half < args_.width) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint2 column = act[16 * half + 4 * j];
                    mma_16x8<true>(d[half], a[half][j], column.x, column.y);
                }
            }
        }
        if (lane_ % 4 == 0) {
            const float scale = s_.largest[slot()];
            float* to = &s_.parts[slot()][warp_ % 2 * 16 + lane_ / 4];
            to[0] = ((d[0][0] + d[1][0]) * kOneW4Low * low_bf16(scales_[0]) +
                     d[2][0] * kOneW4Low * low_bf16(scales_[1])) *
                    scale;
            to[8] = ((d[0][2] + d[1][2]) * kOneW4High * high_bf16(scales_[0]) +
                     d[2][2] * kOneW4High * high_bf16(scales_[1])) *
                    scale;
        }
    }
    __device__ __forceinline__ void store_y() const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kOneW4K; ++i) {
            const int expert = __shfl_sync(kFullWarp, choice_, i);
            const float share = __shfl_sync(kFullWarp, share_, i);
            if (expert >= 0) {
                sum = fmaf(share, round_bf16(s_.parts[i][lane_]), sum);
            }
        }
        if (args_.more != nullptr) {
            sum = round_bf16(sum) + low_bf16(more_);
        }
        const uint32_t y = pack_bf16(low_bf16(before_) + round_bf16(sum), 0);
        args_.y[output()] = static_cast<uint16_t>(y);
    }

    const FewOneW4Args& args_;
    FewOneW4Shared& s_;
    uint2* act_;  // [k][width / 4]: four inputs as float16, the first and third, then the others
    const int warp_ = static_cast<int>(threadIdx.x / 32);
    const int lane_ = static_cast<int>(threadIdx.x % 32);
    int choice_ = -1;      // `lane`
    int own_expert_ = -1;  // of slot()
    uint32_t turn_ = 0;
    uint2 x_[2][4];  // of the lane's group, each half: bfloat16, then float16 as B has them
    float x_scale_ = 0;
    uint4 codes_[kOneW4Depth][2];
    uint32_t scales_[kOneW4Depth];
    float share_ = 0;      // of choice `lane`
    uint16_t before_ = 0;  // y, of output `lane`
    uint16_t more_ = 0;
};

// gridDim.x: the multiprocessors. Dynamic shared memory: act.
__global__ void __launch_bounds__(kOneW4Threads, 1)
    few_one_w4_kernel(const __grid_constant__ FewOneW4Args args) {
    extern __shared__ __align__(16) uint2 few_one_act[];
    __shared__ FewOneW4Shared s;
    FewOneW4Warp warp(args, s, few_one_act);
    warp.ask();
    wait_for_previous_kernel();
    let_next_kernel_start();
    warp.load_inputs();
    warp.begin();
    warp.quantize_x();
    warp.gate_up();
    if (warp.has_down()) {
        warp.down();
    }
}

}  // namespace tessera::cuda
