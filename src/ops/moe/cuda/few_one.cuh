// The experts of one token, where all weights that a multiprocessor multiplies fit into its shared memory:
// narrow experts in fp8. So nothing waits for room.
//
// Roofline: bytes of the chosen experts' weights at 4.27 TB/s.
//
// Schedule: one launch, one block a multiprocessor, all resident. A unit is an output of gate and up: two
// rows of weights. They are dealt in turn, the shared expert's first, so that every block brings some before
// the kernel before has ended; of down a block has 32 outputs of all experts. Bulk copies bring a piece, a
// unit or an expert's rows of down, to a barrier of its own, a few under way at once: with more, what blocks
// hand each other waits behind them in memory's queues. Four groups of warps take the units in turn; further
// warps add the sums and publish act (few_exchange.cuh), byte by byte, while down's weights still come. One
// warp brings all of act, once it is there, into shared memory; down's weights are in registers by then.
//
// A unit by mma.sync: rows 0 to 7 of A are eight pieces of gate's row, rows 8 to 15 those of up's, the
// columns of B the same pieces of x; the diagonal counts.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/moe/cuda/few_exchange.cuh"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

inline constexpr int kOneGroups = 4;  // of multiplying warps, which take units in turn
inline constexpr int kOneGroupWarps = 4;
inline constexpr int kOneWarps = kOneGroups * kOneGroupWarps;
inline constexpr int kOneEnders = 3;  // warps that make act of the sums; the first makes y, too
inline constexpr int kOneDownWarps =
    kOneWarps + kOneEnders - 1;  // that multiply down, all but the first ender
inline constexpr int kOneThreads = 32 * (kOneWarps + kOneEnders + 1);
inline constexpr int kOneChunks = 2;  // of 16 bytes of a row of gate or up, a lane's
inline constexpr int kOneHiddenMax = kOneGroupWarps * kOneChunks * 512;
inline constexpr int kOneOutputs = 32;  // of down, a block's
inline constexpr int kOneEntries = 9;   // the shared expert and the choices
inline constexpr int kOneUnits = 20;    // of a block
inline constexpr int kOnePieces = 32;   // the units, routed experts' rows of down, last the shared expert's
inline constexpr int kOneBarriers = kOnePieces + kOneUnits + 3;
inline constexpr int kOneSlice = 64;  // of a row of down, a warp's at once
inline constexpr int kOneSlices = 3;
inline constexpr int kOneItems =
    (kOneEntries * 2 * kOneSlices + kOneDownWarps - 1) / kOneDownWarps;  // of down, a warp's
inline constexpr int kOneActWords = kOneEntries * kOneSlices * kOneSlice / 16;
inline constexpr int kOneActParts = (kOneActWords + 31) / 32;

// What a block begins with comes first: the parameters are in memory, and come 64 bytes at once.
struct FewOneArgs {
    const uint8_t* shared_gate_up = nullptr;  // [2 * shared_width, hidden]
    const uint8_t* shared_down = nullptr;     // [hidden, shared_width]
    const int32_t* chosen = nullptr;          // [k]
    const uint8_t* x = nullptr;               // [hidden]
    const uint8_t* shared_x = nullptr;
    uint16_t hidden = 0;
    uint16_t width = 0;
    uint16_t shared_width = 0;  // 0: no shared expert
    uint16_t down_blocks = 0;
    uint8_t k = 0;
    uint8_t ahead = 0;  // pieces under way at once
    bool add = true;    // to y
    uint16_t experts = 0;
    uint16_t act_bytes = 0;            // of a row
    const uint8_t* gate_up = nullptr;  // [experts, 2 * width, hidden]
    const uint8_t* down = nullptr;     // [experts, hidden, width]
    FewExchange* exchange = nullptr;
    const float* expert_weights = nullptr;  // [k]
    float input_scale = 1;
    float shared_input_scale = 1;
    const float* gate_up_scale = nullptr;     // [experts, 2]
    const float* down_scale = nullptr;        // [experts]
    const float* down_input_scale = nullptr;  // [experts]
    const float* shared_gate_up_scale = nullptr;
    const float* shared_down_scale = nullptr;
    const float* shared_down_input_scale = nullptr;
    __nv_bfloat16* y = nullptr;  // [hidden]
};

struct FewOneShared {
    float2 sums[kOneUnits][kOneGroupWarps * 8];
    float parts[kOneEntries][kOneSlices][kOneOutputs];
    uint4 act[kOneActWords];
    float2 down_scales[kOneEntries];  // of an entry's sums; the routing weight
    uint64_t landed[kOnePieces];
    uint64_t summed[kOneUnits];
    uint64_t turn_known;
    uint64_t act_landed;
    uint64_t down_done;
    uint32_t turn;
};

// Whether a byte of it is a mark; act in e4m3 is never 0xFF.
__device__ __forceinline__ bool few_byte_missing(uint4 v) {
    const auto marks = [](uint32_t w) { return (~w - 0x01010101u) & w & 0x80808080u; };
    return (marks(v.x) | marks(v.y) | marks(v.z) | marks(v.w)) != 0;
}

// What a warp knows: lane i of unit i, of entry i and of choice i.
class FewOneWarp {
  public:
    __device__ __forceinline__ FewOneWarp(const FewOneArgs& args, FewOneShared& shared, uint8_t* pieces)
        : args_(args), s_(shared), pieces_(pieces), shared_(args.shared_width > 0 ? 1 : 0) {}

    __device__ __forceinline__ int number() const { return warp_; }
    __device__ __forceinline__ int lane() const { return lane_; }
    __device__ __forceinline__ bool multiplies() const { return warp_ < kOneWarps; }
    __device__ __forceinline__ bool ends() const {
        return warp_ >= kOneWarps && warp_ < kOneWarps + kOneEnders;
    }
    __device__ __forceinline__ bool has_down() const { return block() < args_.down_blocks; }

    // The barriers. By all warps: for one after the other a lane takes 50 ns each.
    __device__ __forceinline__ void begin() {
        if (lane_ == 0) {
#pragma unroll
            for (int i = warp_; i < kOneBarriers; i += kOneThreads / 32) {
                uint32_t count = 1;
                if (i >= kOnePieces && i < kOnePieces + kOneUnits) {
                    count = kOneGroupWarps * kWarpArrivals;
                } else if (i == kOneBarriers - 2) {
                    count = kWarpArrivals;
                } else if (i == kOneBarriers - 1) {
                    count = kOneDownWarps * kWarpArrivals;
                }
                barrier_init(shared_address(&s_.landed[0]) + i * 8, count);
            }
            fence_proxy_async();
        }
    }
    __device__ __forceinline__ void ask() const {
        if (warp_ == kOneWarps + kOneEnders) {
            if (lane_ == 0) {
                ask_ahead(args_.chosen);
            } else if (lane_ == 1 && block() * 128 < args_.hidden) {
                ask_ahead(args_.x + block() * 128);
            }
        }
    }
    // What this block does, if so many entries there are. Lane i of unit i, of entry i, of piece i.
    __device__ __forceinline__ void deal(int entries) {
        entries_ = entries;
        const int shared_units = shared_ * args_.shared_width;
        const int total = shared_units + (entries - shared_) * args_.width;
        // Blocks without down, which are the last, come first.
        const int unit = lane_ * grid() + grid() - 1 - block();
        units_ = __popc(__ballot_sync(kFullWarp, unit < total));
        shared_units_ = __popc(__ballot_sync(kFullWarp, unit < shared_units));
        const bool of_shared = unit < shared_units;
        const auto routed = static_cast<uint32_t>(max(unit - shared_units, 0));
        const uint32_t entry = routed / args_.width;
        output_ = of_shared ? unit : static_cast<int>(routed - entry * args_.width);
        unit_entry_ = of_shared ? 0 : static_cast<int>(entry) + shared_;
        row_ = lane_ < shared_ ? args_.k : lane_ - shared_;
        unit_row_ = of_shared ? args_.k : unit_entry_ - shared_;
        pieces_count_ = units_ + (has_down() ? entries - shared_ : 0);
        deal_piece();
    }
    __device__ __forceinline__ void know(int32_t choice) {
        const uint32_t valid = __ballot_sync(kFullWarp, choice >= 0);
        if (valid != (1u << args_.k) - 1) {
            deal(shared_ + __popc(valid));
            if (lane_ >= shared_) {
                row_ = static_cast<int>(__fns(valid, 0, lane_ - shared_ + 1));
            }
            unit_row_ = __shfl_sync(kFullWarp, row_, unit_entry_);
            piece_row_ = __shfl_sync(kFullWarp, row_, piece_entry_);
        }
        choice_ = choice;
    }
    // The first pieces, by all multiplying warps; the others by the last warp.
    __device__ __forceinline__ void bring_first(bool early) {
        const int expert = __shfl_sync(kFullWarp, choice_, piece_row_);
        const bool mine = early ? is_early(lane_) : lane_ < min(pieces_count_, ahead()) && !is_early(lane_);
        if (lane_ % kOneWarps == warp_ && mine) {
            bring(early ? 0 : expert);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void bring_others() {
        const int expert = __shfl_sync(kFullWarp, choice_, piece_row_);
        for (int piece = ahead(); piece < pieces_count_; ++piece) {
            barrier_wait(shared_address(&s_.landed[piece - ahead()]), 0);
            if (lane_ == piece && !is_early(piece)) {
                bring(expert);
            }
            __syncwarp();
        }
    }

    // Of the multiplying warps.
    __device__ __forceinline__ void load_x() {
#pragma unroll
        for (int c = 0; c < kOneChunks; ++c) {
            x_[c] = make_uint4(0, 0, 0, 0);
            shared_x_[c] = make_uint4(0, 0, 0, 0);
            if (input(c) < args_.hidden) {
                x_[c] = *reinterpret_cast<const uint4*>(args_.x + input(c));
                shared_x_[c] = *reinterpret_cast<const uint4*>(args_.shared_x + input(c));
            }
        }
    }
    __device__ __forceinline__ void multiply_units() {
        uint32_t columns[kOneChunks][8];
        widen(shared_x_, columns);
        bool shared = true;
        for (int i = group(); i < units_; i += kOneGroups) {
            if (shared && i >= shared_units_) {
                shared = false;
                widen(x_, columns);
            }
            barrier_wait(shared_address(&s_.landed[i]), 0);
            multiply_unit(i, columns);
        }
    }
    __device__ __forceinline__ void multiply_down() {
        const int down_warp = this->down_warp();
        const int slices = (args_.act_bytes + kOneSlice - 1) / kOneSlice;
        const int items = entries_ * 2 * slices;
        uint32_t a[kOneItems][4][4];
#pragma unroll
        for (int i = 0; i < kOneItems; ++i) {
            if (down_warp + i * kOneDownWarps < items) {
                take_weights(down_item(down_warp + i * kOneDownWarps, slices), a[i]);
            }
        }
        multiply_items(items, slices, a);
        __syncwarp();
        barrier_arrive_for_all(shared_address(&s_.down_done), lane_ == 0);
    }

    // Of the enders.
    __device__ __forceinline__ void prepare_end() {
        const bool of_shared = lane_ < shared_units_;
        const int unit_expert = __shfl_sync(kFullWarp, choice_, unit_row_);
        const int expert = __shfl_sync(kFullWarp, choice_, row_);
        if (lane_ < units_) {
            const float* scale =
                of_shared ? args_.shared_gate_up_scale : args_.gate_up_scale + 2 * unit_expert;
            const float input_scale = of_shared ? args_.shared_input_scale : args_.input_scale;
            gate_scale_ = input_scale * scale[0];
            up_scale_ = input_scale * scale[1];
            inverse_ = of_shared ? args_.shared_down_input_scale[0] : args_.down_input_scale[unit_expert];
        }
        if (warp_ == kOneWarps && has_down()) {
            float down = 0;
            float share = 1;
            if (lane_ < entries_) {
                const bool shared = lane_ < shared_;
                down = shared ? args_.shared_down_input_scale[0] * args_.shared_down_scale[0]
                              : args_.down_input_scale[expert] * args_.down_scale[expert];
                share = shared ? 1 : args_.expert_weights[row_];
            }
            before_ = args_.add ? __bfloat162float(*y()) : 0;
            if (lane_ < entries_) {
                s_.down_scales[lane_] = make_float2(down, share);
            }
            __syncwarp();
        }
        inverse_ = __frcp_rn(inverse_);
    }
    // Marks the area of the next call.
    __device__ __forceinline__ void reset() {
        barrier_wait(shared_address(&s_.turn_known), 0);
        constexpr uint4 kMarks = {kFewUnwritten, kFewUnwritten, kFewUnwritten, kFewUnwritten};
        constexpr int kThreads = 32 * kOneEnders;
        auto* area = reinterpret_cast<uint4*>(args_.exchange->act[s_.turn ^ 1]);
        for (int i = block() * kThreads + static_cast<int>(threadIdx.x) - 32 * kOneWarps;
             i < kFewActBytes / static_cast<int>(sizeof(uint4)); i += grid() * kThreads) {
            area[i] = kMarks;
        }
    }
    __device__ __forceinline__ void publish_units() {
        uint8_t* act = args_.exchange->act[s_.turn] + unit_row_ * args_.act_bytes + output_;
        for (int i = warp_ - kOneWarps; i < units_; i += kOneEnders) {
            barrier_wait(shared_address(&s_.summed[i]), 0);
            const float2 own = s_.sums[i][lane_];
            const bool first = lane_ < 16;
            float sum = first ? own.x : own.y;
            sum += __shfl_xor_sync(kFullWarp, first ? own.y : own.x, 16);
#pragma unroll
            for (int offset = 8; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(kFullWarp, sum, offset);
            }
            const float gate = __shfl_sync(kFullWarp, sum, 0);
            const float up = __shfl_sync(kFullWarp, sum, 16);
            if (lane_ == i) {
                const float h = swiglu(gate * gate_scale_, up * up_scale_);
                store_relaxed_byte(act, pack_e4m3(round_bf16(h) * inverse_, 0) & 0xFF);
            }
        }
    }
    __device__ __forceinline__ void store_y() {
        float2 scales[kOneEntries];
#pragma unroll
        for (int entry = 0; entry < kOneEntries; ++entry) {
            scales[entry] = s_.down_scales[entry];
        }
        barrier_wait(shared_address(&s_.down_done), 0);
        *y() = __float2bfloat16_rn(before_ + sum_of_down(scales));
    }
    // Brings act, as it is published, into shared memory. By one warp.
    __device__ __forceinline__ void await_act() {
        barrier_wait(shared_address(&s_.turn_known), 0);
        const uint8_t* act = args_.exchange->act[s_.turn];
        const int act_bytes = args_.act_bytes;
        uint32_t rows = 0;  // that some block publishes
        for (int entry = 0; entry < entries_; ++entry) {
            rows |= 1u << __shfl_sync(kFullWarp, row_, entry);
        }
        uint32_t wanted = 0;
#pragma unroll
        for (int i = 0; i < kOneActParts; ++i) {
            const int at = (lane_ + 32 * i) * 16;
            const int row = at / act_bytes;
            const int width = row >= args_.k ? args_.shared_width : args_.width;
            if (row <= args_.k && (rows >> row & 1) != 0 && at - row * act_bytes < width) {
                wanted |= 1u << i;
            }
        }
        while (wanted != 0) {
            uint4 v[kOneActParts];
#pragma unroll
            for (int i = 0; i < kOneActParts; ++i) {
                if ((wanted >> i & 1) != 0) {
                    v[i] = load_relaxed_16(act + (lane_ + 32 * i) * 16);
                }
            }
#pragma unroll
            for (int i = 0; i < kOneActParts; ++i) {
                if ((wanted >> i & 1) != 0 && !few_byte_missing(v[i])) {
                    s_.act[lane_ + 32 * i] = v[i];
                    wanted &= ~(1u << i);
                }
            }
        }
        __syncwarp();
        barrier_arrive_for_all(shared_address(&s_.act_landed), lane_ == 0);
    }

  private:
    // Over the experts and, rounded, the shared one: of output `lane`.
    __device__ __forceinline__ float sum_of_down(const float2 (&scales)[kOneEntries]) const {
        float results[kOneEntries];
#pragma unroll
        for (int entry = 0; entry < kOneEntries; ++entry) {
            const int width = entry < shared_ ? args_.shared_width : args_.width;
            float sum = 0;
#pragma unroll
            for (int slice = 0; slice < kOneSlices; ++slice) {
                sum += slice * kOneSlice < width ? s_.parts[entry][slice][lane_] : 0;
            }
            results[entry] = round_bf16(sum * scales[entry].x);
        }
        float sum = 0;
#pragma unroll
        for (int entry = 0; entry < kOneEntries; ++entry) {
            if (entry >= shared_ && entry < entries_) {
                sum = fmaf(scales[entry].y, results[entry], sum);
            }
        }
        return round_bf16(shared_ != 0 ? round_bf16(sum) + results[0] : sum);
    }

    struct DownItem {
        int entry;
        int width;
        int slice;
        int first;  // byte of a row, this lane's
        int row;    // of the 32, this lane's first
    };
    static __device__ __forceinline__ int grid() { return static_cast<int>(gridDim.x); }
    static __device__ __forceinline__ int block() { return static_cast<int>(blockIdx.x); }
    __device__ __forceinline__ int group() const { return warp_ / kOneGroupWarps; }
    __device__ __forceinline__ int down_warp() const { return warp_ < kOneWarps ? warp_ : warp_ - 1; }
    __device__ __forceinline__ int input(int chunk) const {
        return (warp_ % kOneGroupWarps * kOneChunks + chunk) * 512 + lane_ * 16;
    }
    // Whether this lane's piece is the shared expert's.
    __device__ __forceinline__ bool is_early(int piece) const {
        return piece * grid() + grid() - 1 - block() < args_.shared_width ||
               (piece == kOnePieces - 1 && shared_ != 0 && has_down());
    }
    __device__ __forceinline__ __nv_bfloat16* y() const { return args_.y + block() * kOneOutputs + lane_; }
    // The pieces that are asked for at first: the shared expert's have come by then.
    __device__ __forceinline__ int ahead() const { return args_.ahead + shared_units_; }
    // In shared memory: the shared expert's rows of down, the units, the others' rows of down.
    __device__ __forceinline__ int unit_place(int unit) const {
        return kOneOutputs * args_.shared_width + unit * 2 * args_.hidden;
    }
    __device__ __forceinline__ int down_place(int entry) const {
        return entry < shared_ ? 0 : unit_place(units_) + (entry - shared_) * kOneOutputs * args_.width;
    }
    __device__ __forceinline__ int down_piece(int entry) const {
        return entry < shared_ ? kOnePieces - 1 : units_ + entry - shared_;
    }
    // Which piece is this lane's: a unit, or an expert's rows of down.
    __device__ __forceinline__ void deal_piece() {
        const bool is_unit = lane_ < units_;
        const bool is_shared = is_unit ? lane_ < shared_units_ : lane_ == kOnePieces - 1;
        piece_entry_ = is_unit ? unit_entry_ : is_shared ? 0 : lane_ - units_ + shared_;
        piece_row_ = piece_entry_ - shared_;
        const int hidden = args_.hidden;
        const int width = is_shared ? args_.shared_width : args_.width;
        if (is_unit) {
            piece_bytes_ = hidden;
            piece_place_ = unit_place(lane_);
            piece_apart_ = static_cast<uint32_t>(width * hidden);
            piece_stride_ = 2 * piece_apart_;
            piece_from_ = (is_shared ? args_.shared_gate_up : args_.gate_up) + output_ * hidden;
        } else {
            piece_bytes_ = kOneOutputs / 2 * width;
            piece_place_ = down_place(piece_entry_);
            piece_apart_ = static_cast<uint32_t>(piece_bytes_);
            piece_stride_ = static_cast<uint32_t>(hidden * width);
            piece_from_ = (is_shared ? args_.shared_down : args_.down) + block() * kOneOutputs * width;
        }
    }
    // By one lane, its piece.
    __device__ __forceinline__ void bring(int expert) const {
        const uint32_t barrier = shared_address(&s_.landed[lane_]);
        const uint32_t to = shared_address(pieces_ + piece_place_);
        const auto bytes = static_cast<uint32_t>(piece_bytes_);
        const uint8_t* from =
            piece_from_ + static_cast<uint64_t>(static_cast<uint32_t>(expert)) * piece_stride_;
        barrier_arrive_expect(barrier, 2 * bytes);
        copy_bulk_once(to, from, bytes, barrier);
        copy_bulk_once(to + bytes, from + piece_apart_, bytes, barrier);
    }
    static __device__ __forceinline__ void widen(uint4 from, uint32_t (&to)[8]) {
        const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[2 * i] = halves_of_e4m3(static_cast<uint16_t>(words[i]));
            to[2 * i + 1] = halves_of_e4m3(static_cast<uint16_t>(words[i] >> 16));
        }
    }
    static __device__ __forceinline__ void widen(const uint4 (&from)[kOneChunks],
                                                 uint32_t (&to)[kOneChunks][8]) {
#pragma unroll
        for (int c = 0; c < kOneChunks; ++c) {
            widen(from[c], to[c]);
        }
    }
    __device__ __forceinline__ void multiply_unit(int unit, const uint32_t (&columns)[kOneChunks][8]) const {
        float d[2 * kOneChunks][4] = {};
        uint4 gate[kOneChunks];
        uint4 up[kOneChunks];
#pragma unroll
        for (int c = 0; c < kOneChunks; ++c) {
            gate[c] = make_uint4(0, 0, 0, 0);
            up[c] = gate[c];
            if (input(c) < args_.hidden) {
                const uint8_t* from = pieces_ + unit_place(unit) + input(c);
                gate[c] = *reinterpret_cast<const uint4*>(from);
                up[c] = *reinterpret_cast<const uint4*>(from + args_.hidden);
            }
        }
#pragma unroll
        for (int c = 0; c < kOneChunks; ++c) {
            uint32_t g[8];
            uint32_t u[8];
            widen(gate[c], g);
            widen(up[c], u);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t a[4] = {g[2 * i], u[2 * i], g[2 * i + 1], u[2 * i + 1]};
                mma_16x8<true>(d[2 * c + i % 2], a, columns[c][2 * i], columns[c][2 * i + 1]);
            }
        }
        const int piece = lane_ / 4;
        if (lane_ % 4 == piece / 2) {
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int c = 0; c < 2 * kOneChunks; ++c) {
                sum.x += piece % 2 == 0 ? d[c][0] : d[c][1];
                sum.y += piece % 2 == 0 ? d[c][2] : d[c][3];
            }
            s_.sums[unit][warp_ % kOneGroupWarps * 8 + piece] = sum;
        }
        __syncwarp();
        barrier_arrive_for_all(shared_address(&s_.summed[unit]), lane_ == 0);
    }
    // index: of entries, then halves of the outputs, then slices.
    __device__ __forceinline__ DownItem down_item(int index, int slices) const {
        const auto part = static_cast<int>(static_cast<uint32_t>(index) / static_cast<uint32_t>(slices));
        DownItem item;
        item.slice = index - part * slices;
        item.entry = part / 2;
        item.width = item.entry < shared_ ? args_.shared_width : args_.width;
        item.first = item.slice * kOneSlice + lane_ % 4 * 16;
        item.row = part % 2 * 16 + lane_ / 4;
        return item;
    }
    __device__ __forceinline__ void take_weights(const DownItem& item, uint32_t (&a)[4][4]) const {
        barrier_wait(shared_address(&s_.landed[down_piece(item.entry)]), 0);
        uint4 low = make_uint4(0, 0, 0, 0);
        uint4 high = low;
        if (item.first < item.width) {
            const uint8_t* from = pieces_ + down_place(item.entry) + item.row * item.width + item.first;
            low = *reinterpret_cast<const uint4*>(from);
            high = *reinterpret_cast<const uint4*>(from + 8 * item.width);
        }
        uint32_t l[8];
        uint32_t h[8];
        widen(low, l);
        widen(high, h);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i][0] = l[2 * i];
            a[i][1] = h[2 * i];
            a[i][2] = l[2 * i + 1];
            a[i][3] = h[2 * i + 1];
        }
    }
    __device__ __forceinline__ void multiply_items(int items, int slices,
                                                   const uint32_t (&a)[kOneItems][4][4]) {
        const int down_warp = this->down_warp();
        int from[kOneItems];  // word of act, or < 0
#pragma unroll
        for (int i = 0; i < kOneItems; ++i) {
            const DownItem item = down_item(down_warp + i * kOneDownWarps, slices);
            const int row = __shfl_sync(kFullWarp, row_, item.entry);
            const bool takes = lane_ < 4 && item.first < item.width && down_warp + i * kOneDownWarps < items;
            from[i] = takes ? (row * args_.act_bytes + item.first) / 4 : -1;
        }
        barrier_wait(shared_address(&s_.act_landed), 0);
        float d[kOneItems][4] = {};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
            for (int i = 0; i < kOneItems; ++i) {
                const uint32_t word =
                    from[i] >= 0 ? reinterpret_cast<const uint32_t*>(s_.act)[from[i] + q] : 0;
                mma_16x8<true>(d[i], a[i][q], halves_of_e4m3(static_cast<uint16_t>(word)),
                               halves_of_e4m3(static_cast<uint16_t>(word >> 16)));
            }
        }
#pragma unroll
        for (int i = 0; i < kOneItems; ++i) {
            const DownItem item = down_item(down_warp + i * kOneDownWarps, slices);
            if (lane_ % 4 == 0 && item.slice * kOneSlice < item.width &&
                down_warp + i * kOneDownWarps < items) {
                s_.parts[item.entry][item.slice][item.row] = d[i][0];
                s_.parts[item.entry][item.slice][item.row + 8] = d[i][2];
            }
        }
    }

    const FewOneArgs& args_;
    FewOneShared& s_;
    uint8_t* pieces_;
    const int warp_ = static_cast<int>(threadIdx.x / 32);
    const int lane_ = static_cast<int>(threadIdx.x % 32);
    const int shared_;  // 1 with a shared expert
    int entries_ = 0;
    int units_ = 0;
    int shared_units_ = 0;
    // Of entry `lane`.
    int row_ = 0;  // of act, and of the choice
    // Of unit `lane`.
    int unit_entry_ = 0;
    int unit_row_ = 0;
    int output_ = 0;
    // Of piece `lane`: two copies.
    int pieces_count_ = 0;
    int piece_entry_ = 0;
    int piece_row_ = 0;
    int piece_bytes_ = 0;
    int piece_place_ = 0;
    uint32_t piece_apart_ = 0;   // from the first to the second
    uint32_t piece_stride_ = 0;  // from expert to expert
    const uint8_t* piece_from_ = nullptr;
    int choice_ = -1;  // `lane`
    float gate_scale_ = 0;
    float up_scale_ = 0;
    float inverse_ = 0;
    uint4 x_[kOneChunks];
    uint4 shared_x_[kOneChunks];
    float before_ = 0;  // y, of output `lane`
};

// gridDim.x: the multiprocessors. Dynamic shared memory: the weights.
__global__ void __launch_bounds__(kOneThreads, 1) few_one_kernel(const __grid_constant__ FewOneArgs args) {
    extern __shared__ __align__(128) uint8_t pieces[];
    __shared__ FewOneShared s;
    FewOneWarp warp(args, s, pieces);
    warp.begin();
    warp.ask();
    warp.deal(static_cast<int>(args.k) + (args.shared_width > 0 ? 1 : 0));
    __syncthreads();
    if (warp.multiplies()) {
        warp.bring_first(true);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    int32_t choice = warp.lane() < args.k ? args.chosen[warp.lane()] : -1;
    if (warp.multiplies()) {
        warp.load_x();
    }
    // Two of a block, as many as the two blocks of few_experts_kernel have, with which the exchange is
    // shared.
    const bool counts = threadIdx.x / 2 == 32 * kOneWarps / 2;
    const uint32_t turn = counts ? few_turn(args.exchange, 2 * gridDim.x) : 0;
    choice = choice < args.experts ? choice : -1;
    warp.know(choice);
    if (warp.multiplies()) {
        warp.bring_first(false);
        warp.multiply_units();
    } else if (warp.ends()) {
        warp.prepare_end();
        if (threadIdx.x == 32 * kOneWarps) {
            s.turn = turn;
            barrier_arrive(shared_address(&s.turn_known));
        }
        __syncwarp();
        warp.reset();
        warp.publish_units();
    } else {
        warp.bring_others();
    }
    if (!warp.has_down()) {
        return;
    }
    if (warp.number() == kOneWarps) {
        warp.store_y();
    } else if (warp.number() == kOneWarps + kOneEnders) {
        warp.await_act();
    } else {
        warp.multiply_down();
    }
}

}  // namespace tessera::cuda
