// What decode attention accumulates for the rows of a piece, and how the parts of a split sequence meet.
//
// Of few pieces, all but the first leave their parts in device memory, where the first one's block collects
// them into its registers. Of many, all leave theirs, and several blocks add up some slices of the rows each.
// Either way parts are read side by side, so that a part's way costs one write and one read of the level-2
// cache. The order of the additions depends on the plan alone.
//
// A part needs no flag and no fence: a word is valid once it differs from kUnwritten, which the plan writes
// everywhere and the reader writes again when it has read. Each word has one reading warp.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/decode_layout.cuh"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/relaxed.cuh"
#include "ops/common/cuda/shared_access.cuh"

namespace tessera::cuda {

inline constexpr int kMathThreads = 128;  // the warpgroup that computes
inline constexpr int kMathBarrier = 1;    // named, of its threads
inline constexpr int kMathWarps = kMathThreads / kWarp;

inline constexpr int kSliceLanes = kHeadDim / kDecodeSlices / 4;  // threads that read one, four sums each
inline constexpr int kSliceGroups = kMathThreads / kSliceLanes;   // slices read at a time

// A slice: what a warp of the group holds of a row, as lane 4 g + t of it has it at place g.
struct DecodeSlice {
    int32_t row = 0;
    int32_t warp = 0;
};
// A lane's share of a slice: four sums of O, not divided, and the row's state.
struct DecodeShare {
    float4 out = {0, 0, 0, 0};
    float base = -INFINITY;
    float sum = 0;

    __device__ __forceinline__ void scale_to(float most) {
        const float factor = exp2_fast(base - (most == -INFINITY ? 0.0f : most));
        base = most;
        sum *= factor;
        out = make_float4(out.x * factor, out.y * factor, out.z * factor, out.w * factor);
    }
    // Of the same base.
    __device__ __forceinline__ void add(const DecodeShare& other) {
        sum += other.sum;
        out = make_float4(out.x + other.out.x, out.y + other.out.y, out.z + other.out.z, out.w + other.out.w);
    }
};

// A thread's share: columns 8 j + 2 t + {0, 1} (rows of the attention: query and head) for t = lane % 4.
template <int Rows>
struct DecodeSums {
    static constexpr int kBlocks = Rows / 8;  // of 8 columns

    float base[kBlocks][2];  // the maximum so far, log2
    float sum[kBlocks][2];   // of this thread's slots; after the piece, of all
    float out[2][Rows / 2];  // O^T, not divided: [half of the dimensions][4 j + c], [4 j + 2 + c]

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                base[j][c] = -INFINITY;
                sum[j][c] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            out[i / (Rows / 2)][i % (Rows / 2)] = 0;
        }
    }
    // Of row 8 j + 2 t + c.
    __device__ __forceinline__ DecodeShare share(int j, int c) const {
        return {
            make_float4(out[0][4 * j + c], out[0][4 * j + 2 + c], out[1][4 * j + c], out[1][4 * j + 2 + c]),
            base[j][c], sum[j][c]};
    }
    __device__ __forceinline__ void set(int j, int c, const DecodeShare& to) {
        out[0][4 * j + c] = to.out.x;
        out[0][4 * j + 2 + c] = to.out.y;
        out[1][4 * j + c] = to.out.z;
        out[1][4 * j + 2 + c] = to.out.w;
        base[j][c] = to.base;
        sum[j][c] = to.sum;
    }
};

// Parts in device memory, for one of the block's computing threads.
template <int Rows>
class DecodeParts {
    static constexpr int kAhead = 9;  // parts of a slice under way
    // Parts and rows under way in a thread that collects; more would not fit into its registers.
    static constexpr int kCollectedAtOnce = Rows == 8 ? 4 : 1;
    static constexpr int kRowsAtOnce = 2;

  public:
    // shared: 1 KiB that nobody else uses while slices are added.
    __device__ DecodeParts(float* parts, uint32_t shared)
        : parts_(parts),
          shared_(shared),
          lane_(static_cast<int>(threadIdx.x) % kWarp),
          warp_(static_cast<int>(threadIdx.x) / kWarp) {}

    // rows: as many as are wanted.
    __device__ __forceinline__ void publish(int slot, int rows, const DecodeSums<Rows>& sums) const {
#pragma unroll
        for (int r = 0; r < Rows / 4; ++r) {
            const DecodeSlice slice = own_slice(r);
            if (slice.row < rows) {
                const DecodeShare share = sums.share(r / 2, r % 2);
                store_relaxed(out_at(slot, slice, lane_ / 4), written(share.out));
                if (lane_ < 4) {
                    store_relaxed(state_at(slot, slice),
                                  make_float2(written(share.base), written(share.sum)));
                }
            }
        }
    }
    // Adds the parts of all pieces but the first to its own, as they come, in ascending order. Every thread
    // calls it.
    __device__ __forceinline__ void collect(const DecodePieces& all, int rows, DecodeSums<Rows>& sums) const {
#pragma unroll
        for (int r = 0; r < Rows / 4; r += kRowsAtOnce) {
            for (int first = 1; first < all.count; first += kCollectedAtOnce) {
                collect_rows(all, {first, 1, all.count}, rows, r, sums);
            }
        }
    }

    // Adds up this block's slices of a sequence of many pieces, and hands each to write(slice, place g,
    // share). Every thread calls it, after all its block's parts are published.
    template <typename Write>
    __device__ __forceinline__ void merge(const DecodePieces& all, int rows, Write&& write) const {
        const DecodeSlices slices = decode_slices_of(all, rows * kDecodeSlices);
        switch (decode_slices_at_once(all.count)) {
            case 16:
                add_slices<1>(all, slices, write);
                break;
            case 4:
                add_slices<4>(all, slices, write);
                break;
            default:
                add_slices<16>(all, slices, write);
        }
    }

  private:
    // Pieces first, first + step, .. < end.
    struct Pick {
        int32_t first = 0;
        int32_t step = 1;
        int32_t end = 0;
        __device__ __forceinline__ int32_t operator()(int i) const { return first + i * step; }
        __device__ __forceinline__ bool has(int i) const { return (*this)(i) < end; }
    };
    // Shares of the first Count of a pick's pieces.
    template <int Count>
    struct Batch {
        float4 out[Count];
        float2 states[Count];
    };

    // Of the thread's rows from r on.
    __device__ __forceinline__ void collect_rows(const DecodePieces& all, const Pick& pieces, int rows, int r,
                                                 DecodeSums<Rows>& sums) const {
        Batch<kCollectedAtOnce> batches[kRowsAtOnce];
        const auto pick = [&](int i) {
            return Pick{pieces.first, 1, own_slice(r + i).row < rows ? pieces.end : 0};
        };
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            load(all, pick(i), own_slice(r + i), lane_ / 4, batches[i]);
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            await(all, pick(i), own_slice(r + i), lane_ / 4, batches[i]);
        }
        __syncwarp();  // all lanes have read the states
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            DecodeShare share = sums.share((r + i) / 2, (r + i) % 2);
            add(pick(i), batches[i], share);
            sums.set((r + i) / 2, (r + i) % 2, share);
            mark<kCollectedAtOnce>(all, pick(i), own_slice(r + i), lane_ / 4);
        }
    }
    // As this thread has it in its sums' row 8 (r / 2) + 2 t + r % 2.
    __device__ __forceinline__ DecodeSlice own_slice(int r) const {
        return {8 * (r / 2) + lane_ % 4 * 2 + r % 2, warp_};
    }
    template <int Count>
    __device__ __forceinline__ void load(const DecodePieces& all, const Pick& pick, const DecodeSlice& slice,
                                         int place, Batch<Count>& batch) const {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (pick.has(i)) {
                load(all.slot(pick(i)), slice, place, batch.out[i], batch.states[i]);
            }
        }
    }
    // Loads again what is not there yet until all is, all of that at once: waiting for one piece after the
    // other would ask the level-2 cache once for each that came late. What is there is not asked for again,
    // since that delays the others.
    template <int Count>
    __device__ __forceinline__ void await(const DecodePieces& all, const Pick& pick, const DecodeSlice& slice,
                                          int place, Batch<Count>& batch) const {
        for (bool missing = true; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                if (pick.has(i) && largest_word(batch.out[i], batch.states[i]) == kUnwritten) {
                    load(all.slot(pick(i)), slice, place, batch.out[i], batch.states[i]);
                    missing = true;
                }
            }
        }
    }
    __device__ static __forceinline__ uint32_t largest_word(const float4& out, const float2& state) {
        const uint4 words = as_words(out);
        return max(max(max(words.x, words.y), max(words.z, words.w)),
                   max(__float_as_uint(state.x), __float_as_uint(state.y)));
    }
    // As not written, for the next kernel that publishes here.
    template <int Count>
    __device__ __forceinline__ void mark(const DecodePieces& all, const Pick& pick, const DecodeSlice& slice,
                                         int place) const {
        const float none = __uint_as_float(kUnwritten);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (pick.has(i)) {
                store_relaxed(out_at(all.slot(pick(i)), slice, place), make_float4(none, none, none, none));
                if (place == 0) {
                    store_relaxed(state_at(all.slot(pick(i)), slice), make_float2(none, none));
                }
            }
        }
    }
    template <int Count>
    __device__ static __forceinline__ void add(const Pick& pick, const Batch<Count>& batch,
                                               DecodeShare& share) {
        float most = share.base;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            most = pick.has(i) ? fmaxf(most, batch.states[i].x) : most;
        }
        share.scale_to(most);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (pick.has(i)) {
                DecodeShare part{batch.out[i], batch.states[i].x, batch.states[i].y};
                part.scale_to(most);
                share.add(part);
            }
        }
    }

    // Groups: that share the parts of a slice.
    template <int Groups, typename Write>
    __device__ __forceinline__ void add_slices(const DecodePieces& all, const DecodeSlices& slices,
                                               Write& write) const {
        const int group = static_cast<int>(threadIdx.x) / kSliceLanes;
        const int place = lane_ % kSliceLanes;
        for (int begin = slices.begin; begin < slices.end; begin += kSliceGroups / Groups) {
            const int index = begin + group / Groups;
            const DecodeSlice slice{index / kDecodeSlices, index % kDecodeSlices};
            const int count = index < slices.end ? all.count : 0;
            DecodeShare share;
            for (int first = 0; first < all.count; first += Groups * kAhead) {
                const Pick pick{first + group % Groups, Groups, count};
                Batch<kAhead> batch;
                load(all, pick, slice, place, batch);
                await(all, pick, slice, place, batch);
                __syncwarp();  // all lanes have read the states
                add(pick, batch, share);
            }
            if constexpr (Groups > 1) {
                add_lanes(share);
            }
            if constexpr (Groups > kWarp / kSliceLanes) {
                add_warps(share);
            }
            if (count > 0 && group % Groups == 0) {
                write(slice, place, share);
            }
            for (int first = 0; first < all.count; first += Groups * kAhead) {
                mark<kAhead>(all, {first + group % Groups, Groups, count}, slice, place);
            }
        }
    }
    // Over the groups of a warp, in every lane.
    __device__ static __forceinline__ void add_lanes(DecodeShare& share) {
        float most = share.base;
#pragma unroll
        for (int offset = kSliceLanes; offset < kWarp; offset *= 2) {
            most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
        }
        share.scale_to(most);
#pragma unroll
        for (int offset = kSliceLanes; offset < kWarp; offset *= 2) {
            DecodeShare other;
            other.sum = __shfl_xor_sync(kFullWarp, share.sum, offset);
            other.out = make_float4(__shfl_xor_sync(kFullWarp, share.out.x, offset),
                                    __shfl_xor_sync(kFullWarp, share.out.y, offset),
                                    __shfl_xor_sync(kFullWarp, share.out.z, offset),
                                    __shfl_xor_sync(kFullWarp, share.out.w, offset));
            share.add(other);
        }
    }
    // Over the warps, in every lane.
    __device__ __forceinline__ void add_warps(DecodeShare& share) const {
        const uint32_t place = shared_ + static_cast<uint32_t>(lane_ * 32);
        const auto at = [&](int warp) { return place + static_cast<uint32_t>(warp * kSliceLanes * 32); };
        if (lane_ < kSliceLanes) {
            store_shared(at(warp_), as_words(share.out));
            store_shared(at(warp_) + 16, as_words(make_float4(share.base, share.sum, 0, 0)));
        }
        group_barrier(kMathBarrier, kMathThreads);
        if (lane_ < kSliceLanes) {
            share = DecodeShare{};
#pragma unroll
            for (int warp = 0; warp < kMathWarps; ++warp) {
                const float4 state = as_floats(load_shared_16(at(warp) + 16));
                DecodeShare other{as_floats(load_shared_16(at(warp))), state.x, state.y};
                const float most = fmaxf(share.base, other.base);
                share.scale_to(most);
                other.scale_to(most);
                share.add(other);
            }
        }
        group_barrier(kMathBarrier, kMathThreads);
    }
    __device__ static __forceinline__ uint4 as_words(const float4& v) {
        return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                          __float_as_uint(v.w));
    }
    __device__ static __forceinline__ float4 as_floats(const uint4& v) {
        return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                           __uint_as_float(v.w));
    }

    __device__ __forceinline__ float* slot_at(int slot) const {
        return parts_ + static_cast<int64_t>(slot) * Rows * kPartialFloatsOfRow;
    }
    __device__ __forceinline__ float* out_at(int slot, const DecodeSlice& slice, int place) const {
        return slot_at(slot) + ((slice.row * kDecodeSlices + slice.warp) * kSliceLanes + place) * 4;
    }
    __device__ __forceinline__ float* state_at(int slot, const DecodeSlice& slice) const {
        return slot_at(slot) + Rows * kHeadDim + (slice.row * kDecodeSlices + slice.warp) * 2;
    }
    __device__ __forceinline__ void load(int slot, const DecodeSlice& slice, int place, float4& out,
                                         float2& state) const {
        out = load_relaxed_4(out_at(slot, slice, place));
        state = load_relaxed_2(state_at(slot, slice));
    }
    __device__ static __forceinline__ bool is_written(float v) { return __float_as_uint(v) != kUnwritten; }
    // Arithmetic makes no NaN of these bits, but it may pass one on.
    __device__ static __forceinline__ float written(float v) {
        return is_written(v) ? v : __uint_as_float(0x7FFFFFFF);
    }
    __device__ static __forceinline__ float4 written(const float4& v) {
        return make_float4(written(v.x), written(v.y), written(v.z), written(v.w));
    }

    float* parts_;
    uint32_t shared_;
    int lane_;
    int warp_;
};

}  // namespace tessera::cuda
