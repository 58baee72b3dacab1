// The experts of a few tokens: at decode the weights of every chosen expert are read once, and nothing else
// takes time but the launch. So there is no sorting: a block finds the experts of the batch, and the tokens
// of each, by looking at all the choices.
//
// Roofline: bytes of the chosen experts' weights at 4.27 TB/s.
//
// Schedule: one launch, two blocks a multiprocessor, all resident. Of gate and up they take units of 8
// outputs (16 rows of weights) of one expert in turn, the shared expert's first, whose weights are on the way
// before the kernel before has ended; of down a block has 16 outputs of all experts, a warp 256 bytes of an
// expert's inputs at a time; the sum over a token's experts is the last step. Weights go from memory to
// registers, 16 bytes a lane, straight into the layout of mma.sync: which inputs share an instruction does
// not matter as long as weights and x agree. While a lane multiplies one batch of loads, the next is under
// way, also from gate and up to down. Act passes from block to block (few_exchange.cuh), the first experts'
// long before the last gate and up ends.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/moe/cuda/few_entries.cuh"
#include "ops/moe/cuda/few_exchange.cuh"
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
    FewExchange* exchange = nullptr;        // rows: the pairs, then the tokens as the shared expert has them
    int32_t act_bytes = 0;                  // of a row
    int32_t slices = 0;                     // of the longest row of down
    __nv_bfloat16* y = nullptr;             // [tokens, hidden]
    bool add = true;                        // to y
};

inline constexpr int kFewChunk = 64;  // bytes of a row that four lanes load at once
inline constexpr int kFewBatch = 4;   // chunks of a row that a lane loads at once
inline constexpr int kFewWarps = 8;
inline constexpr int kFewGateOutputs = 8;
inline constexpr int kFewUnitsMax = 8192;  // of an expert
inline constexpr int kFewDownOutputs = 16;
inline constexpr int kFewSlice = kFewChunk * kFewBatch;  // bytes of a row, of one warp's unit of down
inline constexpr int kFewHiddenMax = 16384;

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

// A batch of loads: of two rows, kFewBatch chunks.
struct FewBatch {
    uint4 low[kFewBatch];
    uint4 high[kFewBatch];

    // From byte `first` of a row of `bytes`, `step` bytes apart; the second row is `distance` bytes further.
    __device__ __forceinline__ void load(const uint8_t* row, int64_t distance, int first, int step,
                                         int bytes) {
        const uint8_t* from = row + first;
#pragma unroll
        for (int i = 0; i < kFewBatch; ++i) {
            const bool there = first + i * step < bytes;
            low[i] = load_once(from + i * step, there);
            high[i] = load_once(from + i * step + distance, there);
        }
    }
};

// What a warp does with a batch of loads, in a word.
class FewTask {
  public:
    FewTask() = default;
    // number: of the unit's batches
    static __device__ __forceinline__ FewTask gate_up(int entry, int unit, int number, bool last) {
        return FewTask((last ? 1u : 0u) | place(entry, unit) | static_cast<uint32_t>(number) << 22);
    }
    static __device__ __forceinline__ FewTask down(int entry, int slice, int group) {
        return FewTask(2u | place(entry, slice) | static_cast<uint32_t>(group) << 22);
    }
    static __device__ __forceinline__ FewTask none() { return FewTask(3); }

    __device__ __forceinline__ bool is_none() const { return word_ == 3; }
    __device__ __forceinline__ bool is_down() const { return (word_ & 2) != 0; }
    __device__ __forceinline__ bool is_last() const { return (word_ & 1) != 0; }
    __device__ __forceinline__ int entry() const { return static_cast<int>(word_ >> 2 & 127); }
    // Unit of the expert, or slice.
    __device__ __forceinline__ int at() const { return static_cast<int>(word_ >> 9 & (kFewUnitsMax - 1)); }
    // Number, or group.
    __device__ __forceinline__ int more() const { return static_cast<int>(word_ >> 22); }

  private:
    explicit __device__ __forceinline__ FewTask(uint32_t word) : word_(word) {}
    static __device__ __forceinline__ uint32_t place(int entry, int at) {
        static_assert(kFewPairs + 1 <= 128);
        return static_cast<uint32_t>(entry) << 2 | static_cast<uint32_t>(at) << 9;
    }

    uint32_t word_ = 3;
};

// A warp's tasks one after the other: those of the block's units of gate and up, then its own of down.
template <bool Fp8>
class FewOrder {
  public:
    __device__ __forceinline__ explicit FewOrder(const FewArgs& args)
        : args_(args),
          shared_units_(args.shared.width / kFewGateOutputs),
          routed_units_(args.routed.width / kFewGateOutputs),
          units_(shared_units_) {
        constexpr int kBytes = kFewWarps * kFewSlice;
        batches_ = (args.hidden * (Fp8 ? 1 : 2) + kBytes - 1) / kBytes;
        // The blocks that have a unit more have a group of down less.
        const int left = args.hidden / kFewDownOutputs - first_group();
        groups_ = left > 0 ? (left + grid() - 1) / grid() : 0;
    }
    // Groups of 16 outputs of down that the block has.
    __device__ __forceinline__ int groups() const { return groups_; }
    __device__ __forceinline__ int output(int group) const {
        return (first_group() + group * grid()) * kFewDownOutputs;
    }
    __device__ __forceinline__ bool is_shared(int entry) const { return shared_units_ > 0 && entry == 0; }
    // The entries of the batch; before, there is gate and up of the shared expert alone.
    __device__ __forceinline__ void know(int entries) {
        units_ = shared_units_ + (entries - (shared_units_ > 0 ? 1 : 0)) * routed_units_;
        downs_ = entries * args_.slices * groups_;
    }
    __device__ __forceinline__ FewTask next() {
        if (unit_ < units_) {
            return next_gate_up();
        }
        if (down_ >= downs_) {
            return FewTask::none();
        }
        int index = down_;
        int group = 0;
        if (groups_ > 1) {
            group = index % groups_;
            index /= groups_;
        }
        down_ += kFewWarps;
        const int entry = index / args_.slices;
        return FewTask::down(entry, index - entry * args_.slices, group);
    }

  private:
    static __device__ __forceinline__ int grid() { return static_cast<int>(gridDim.x); }
    static __device__ __forceinline__ int first_group() { return grid() - 1 - static_cast<int>(blockIdx.x); }
    __device__ __forceinline__ FewTask next_gate_up() {
        int entry = 0;
        int unit = unit_;
        if (unit >= shared_units_) {
            const int routed = unit - shared_units_;
            entry = routed / routed_units_;
            unit = routed - entry * routed_units_;
            entry += shared_units_ > 0 ? 1 : 0;
        }
        const int number = number_++;
        const bool last = number_ == batches_;
        if (last) {
            number_ = 0;
            unit_ += grid();
        }
        return FewTask::gate_up(entry, unit, number, last);
    }

    const FewArgs& args_;
    const int shared_units_;
    const int routed_units_;
    int batches_;  // of a unit of gate and up
    int groups_;
    int units_;
    int downs_ = 0;
    int unit_ = static_cast<int>(blockIdx.x);
    int number_ = 0;
    int down_ = static_cast<int>(threadIdx.x / 32);
};

// Of an entry, in fp8: of its sums, and one over act's.
struct FewGateScales {
    float gate;
    float up;
    float inverse;
};

struct FewShared {
    float sums[2][kFewWarps][2 * kFewGateOutputs][kFewTokens];
    FewEntries entries;
    FewEntriesScratch scratch;
    FewGateScales gate_scales[kFewPairs + 1];
    float shares[kFewPairs];
    float down_scales[kFewPairs + 1];  // of each pair's sums; the shared expert's last
    uint32_t turn;

    // By all threads, after find_entries(); to be read after the caller has synchronised.
    __device__ __forceinline__ void load_scales(const FewArgs& args, bool fp8) {
        const auto thread = static_cast<int>(threadIdx.x);
        static_assert(kFewPairs + 1 <= 32 * kFewWarps);
        if (fp8 && thread < entries.count) {
            const FewSide& side = args.routing.shared && thread == 0 ? args.shared : args.routed;
            const int expert = entries.expert[thread];
            gate_scales[thread] = {.gate = side.input_scale * side.gate_up_scale[2 * expert],
                                   .up = side.input_scale * side.gate_up_scale[2 * expert + 1],
                                   .inverse = __frcp_rn(side.down_input_scale[expert])};
        }
        const int expert = thread < kFewPairs ? scratch.choices[thread] : -1;
        if (expert >= 0) {
            shares[thread] = args.expert_weights[thread];
            if (fp8) {
                down_scales[thread] = args.routed.down_input_scale[expert] * args.routed.down_scale[expert];
            }
        } else if (fp8 && thread == kFewPairs && args.routing.shared) {
            down_scales[thread] = args.shared.down_input_scale[0] * args.shared.down_scale[0];
        }
    }
};

// A warp's work.
template <bool Fp8>
class FewWarp {
  public:
    __device__ __forceinline__ FewWarp(const FewArgs& args, FewShared& shared, float* parts)
        : args_(args), s_(shared), parts_(parts), order_(args) {}

    __device__ __forceinline__ FewOrder<Fp8>& order() { return order_; }
    // The next batch. expert_of(entry): of a routed expert.
    template <int Place, typename ExpertOf>
    __device__ __forceinline__ void bring(ExpertOf expert_of) {
        const FewTask task = order_.next();
        tasks_[Place] = task;
        if (!task.is_none()) {
            const int entry = task.entry();
            load(batches_[Place], task, order_.is_shared(entry) ? 0 : expert_of(entry));
        }
    }
    // The rest, after all has been found and two batches are under way.
    __device__ __forceinline__ void run() {
        act_ = args_.exchange->act[s_.turn];
        while (step<0>() && step<1>()) {
        }
    }

  private:
    static constexpr int kValueBytes = Fp8 ? 1 : 2;

    // Multiplies a batch while the next is under way, then brings another. Returns whether there was one.
    template <int This>
    __device__ __forceinline__ bool step() {
        const FewTask now = tasks_[This];
        if (now.is_none()) {
            return false;
        }
        uint4 columns[kFewBatch];
        if (now.is_down()) {
            await_act(now, columns);
        } else {
            load_x(now, columns);
        }
#pragma unroll
        for (int i = 0; i < kFewBatch; ++i) {
            few_multiply<Fp8>(sums_, batches_[This].low[i], batches_[This].high[i], columns[i]);
        }
        bring<This>([this](int entry) { return s_.entries.expert[entry]; });
        if (now.is_down()) {
            store_part(now);
        } else if (now.is_last()) {
            store_act(now);
        }
        if (now.is_down() || now.is_last()) {
#pragma unroll
            for (float& sum : sums_) {
                sum = 0;
            }
        }
        return true;
    }
    // inside: of a chunk, this lane's.
    __device__ __forceinline__ int gate_up_byte(FewTask task) const {
        return task.more() * kFewWarps * kFewSlice + warp_ * kFewSlice + inside_;
    }
    __device__ __forceinline__ int down_byte(FewTask task) const { return task.at() * kFewSlice + inside_; }
    __device__ __forceinline__ const FewSide& side(FewTask task) const {
        return order_.is_shared(task.entry()) ? args_.shared : args_.routed;
    }
    __device__ __forceinline__ void load(FewBatch& to, FewTask task, int expert) const {
        const FewSide& from = side(task);
        if (task.is_down()) {
            const int bytes = from.width * kValueBytes;
            const int row = order_.output(task.more()) + group_;
            to.load(from.down + (static_cast<int64_t>(expert) * args_.hidden + row) * bytes, 8 * bytes,
                    down_byte(task), kFewChunk, bytes);
        } else {
            const int bytes = args_.hidden * kValueBytes;
            const int row = task.at() * kFewGateOutputs + group_;
            to.load(from.gate_up + (static_cast<int64_t>(2 * expert) * from.width + row) * bytes,
                    static_cast<int64_t>(from.width) * bytes, gate_up_byte(task), kFewChunk, bytes);
        }
    }
    __device__ __forceinline__ void load_x(FewTask task, uint4 (&columns)[kFewBatch]) const {
        const int row = s_.entries.columns[task.entry()][group_];
        const int pairs = args_.routing.tokens * args_.routing.k;
        const int bytes = args_.hidden * kValueBytes;
        const int first = gate_up_byte(task);
        const uint8_t* from =
            first + (order_.is_shared(task.entry()) ? args_.shared.x + (row - pairs) * bytes
                                                    : args_.routed.x + row / args_.routing.k * bytes);
#pragma unroll
        for (int i = 0; i < kFewBatch; ++i) {
            const int at = i * kFewChunk;
            columns[i] = row >= 0 && first + at < bytes ? *reinterpret_cast<const uint4*>(from + at)
                                                        : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void await_act(FewTask task, uint4 (&columns)[kFewBatch]) const {
        const int row = s_.entries.columns[task.entry()][group_];
        const int bytes = row >= 0 ? side(task).width * kValueBytes : 0;
        const int first = down_byte(task);
        const uint8_t* from = act_ + row * args_.act_bytes + first;
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int i = 0; i < kFewBatch; ++i) {
                const int at = i * kFewChunk;
                columns[i] = first + at < bytes ? load_relaxed_16(from + at) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < kFewBatch; ++i) {
                missing |= few_missing(columns[i]);
            }
        } while (missing);
        __syncwarp();
    }
    __device__ __forceinline__ void store_part(FewTask task) const {
        const int rows = args_.routing.tokens * (args_.routing.k + 1);
        float* to = parts_ + (task.more() * rows * args_.slices + task.at()) * kFewDownOutputs + group_;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int taker = s_.entries.columns[task.entry()][threadIdx.x % 4 * 2 + i % 2];
            if (taker >= 0) {
                to[taker * args_.slices * kFewDownOutputs + i / 2 * 8] = sums_[i];
            }
        }
    }
    // SwiGLU of a unit, by the warp whose turn it is, a lane for each output and column.
    __device__ __forceinline__ void store_act(FewTask task) {
        auto& sums = s_.sums[units_done_ % 2];
        const int pair = static_cast<int>(threadIdx.x % 4) * 2;
        *reinterpret_cast<float2*>(&sums[warp_][group_][pair]) = make_float2(sums_[0], sums_[1]);
        *reinterpret_cast<float2*>(&sums[warp_][group_ + 8][pair]) = make_float2(sums_[2], sums_[3]);
        __syncthreads();
        if (units_done_++ % kFewWarps != warp_) {
            return;
        }
        const auto lane = static_cast<int>(threadIdx.x % 32);
        const int o = lane % kFewGateOutputs;
#pragma unroll
        for (int first = 0; first < kFewTokens; first += 4) {
            const int n = first + lane / kFewGateOutputs;
            const int row = s_.entries.columns[task.entry()][n];
            if (__all_sync(kFullWarp, row < 0)) {
                return;
            }
            float gate = 0;
            float up = 0;
#pragma unroll
            for (int w = 0; w < kFewWarps; ++w) {
                gate += sums[w][o][n];
                up += sums[w][o + kFewGateOutputs][n];
            }
            publish(gate, up, task, row);
        }
    }
    // By all lanes: neighbours' outputs are a word.
    __device__ __forceinline__ void publish(float gate, float up, FewTask task, int row) const {
        constexpr int kInWord = 4 / kValueBytes;
        const int o = static_cast<int>(threadIdx.x) % kFewGateOutputs;
        uint32_t word;
        if constexpr (Fp8) {
            const FewGateScales scale = s_.gate_scales[task.entry()];
            const float h = swiglu(gate * scale.gate, up * scale.up);
            word = pack_e4m3(round_bf16(h) * scale.inverse, 0);
        } else {
            word = pack_bf16(swiglu(gate, up), 0);
        }
        word <<= o % kInWord * (32 / kInWord);
#pragma unroll
        for (int i = 1; i < kInWord; i *= 2) {
            word |= __shfl_xor_sync(kFullWarp, word, i);
        }
        if (row >= 0 && o % kInWord == 0) {
            store_relaxed(act_ + row * args_.act_bytes + (task.at() * kFewGateOutputs + o) * kValueBytes,
                          word);
        }
    }

    const FewArgs& args_;
    FewShared& s_;
    const int warp_ = static_cast<int>(threadIdx.x / 32);
    const int group_ = static_cast<int>(threadIdx.x % 32 / 4);
    const int inside_ = static_cast<int>(threadIdx.x % 4) * 16;
    float* parts_;  // [groups][rows of act][slices][16]
    FewOrder<Fp8> order_;
    uint8_t* act_ = nullptr;
    FewBatch batches_[2];
    FewTask tasks_[2];
    float sums_[4] = {};
    int units_done_ = 0;
};

// The end: the sums over the slices, then over a token's experts. parts: as FewWarp leaves them.
template <bool Fp8>
struct FewEnd {
    const FewArgs& args;
    const FewShared& s;
    const FewOrder<Fp8>& order;
    float* parts;
    int rows = args.routing.tokens * (args.routing.k + 1);
    int token = static_cast<int>(threadIdx.x) / kFewDownOutputs;
    int output = static_cast<int>(threadIdx.x) % kFewDownOutputs;

    __device__ __forceinline__ __nv_bfloat16* y(int group) const {
        return args.y + static_cast<int64_t>(token) * args.hidden + order.output(group) + output;
    }
    __device__ __forceinline__ float before(int group) const {
        const bool there = args.add && token < args.routing.tokens && group < order.groups();
        return there ? __bfloat162float(*y(group)) : 0;
    }
    // Each expert's results, where its first slice was.
    __device__ __forceinline__ void add_slices() const {
        const int pairs = args.routing.tokens * args.routing.k;
        for (auto i = static_cast<int>(threadIdx.x); i < order.groups() * rows * kFewDownOutputs;
             i += 32 * kFewWarps) {
            const int at = i / kFewDownOutputs;
            const int row = at % rows;
            const FewSide& side = row >= pairs ? args.shared : args.routed;
            const int used = (side.width * (Fp8 ? 1 : 2) + kFewSlice - 1) / kFewSlice;
            float* from = parts + at * args.slices * kFewDownOutputs + output;
            float sum = 0;
#pragma unroll 6
            for (int slice = 0; slice < used; ++slice) {
                sum += from[slice * kFewDownOutputs];
            }
            from[0] = round_bf16(Fp8 ? sum * s.down_scales[row >= pairs ? kFewPairs : row] : sum);
        }
    }
    __device__ __forceinline__ void store(int group, float base) const {
        const auto result = [&](int row) {
            return parts[(group * rows + row) * args.slices * kFewDownOutputs + output];
        };
        float sum = 0;
#pragma unroll 8
        for (int i = 0; i < args.routing.k; ++i) {
            const int pair = token * args.routing.k + i;
            if (s.scratch.choices[pair] >= 0) {
                sum = fmaf(s.shares[pair], result(pair), sum);
            }
        }
        if (args.routing.shared) {
            sum = round_bf16(sum) + result(args.routing.tokens * args.routing.k + token);
        }
        *y(group) = __float2bfloat16_rn(base + round_bf16(sum));
    }
};

// gridDim.x: two blocks a multiprocessor. Dynamic shared memory: float [groups][rows of act][slices][16].
template <bool Fp8>
__global__ void __launch_bounds__(32 * kFewWarps, 2)
    few_experts_kernel(const __grid_constant__ FewArgs args) {
    extern __shared__ float parts[];
    __shared__ FewShared s;
    FewWarp<Fp8> warp(args, s, parts);
    const bool early = static_cast<int>(blockIdx.x) < args.shared.width / kFewGateOutputs;
    if (early) {
        warp.template bring<0>([](int) { return 0; });
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    // What is asked for after the weights waits for them.
    const bool counts = threadIdx.x == 32 * kFewWarps - 1;
    const uint32_t turn = counts ? few_turn(args.exchange) : 0;
    const FewExperts experts(args.routing);
    const auto expert_of = [&](int entry) { return experts.expert(entry); };
    warp.order().know(experts.count());
    const FewEnd<Fp8> end{args, s, warp.order(), parts};
    const float before = end.before(0);
    if (counts) {
        s.turn = turn;
    }
    if (!early) {
        warp.template bring<0>(expert_of);
    }
    warp.template bring<1>(expert_of);
    find_entries(args.routing, threadIdx.x < 32 ? experts.choice(0) : experts.choice(1), s.entries,
                 s.scratch);
    __syncthreads();
    s.load_scales(args, Fp8);
    few_reset(args.exchange, s.turn ^ 1);
    warp.run();
    __syncthreads();
    end.add_slices();
    __syncthreads();
    if (end.token < args.routing.tokens) {
        for (int group = 0; group < warp.order().groups(); ++group) {
            end.store(group, group == 0 ? before : end.before(group));
        }
    }
}

}  // namespace tessera::cuda
