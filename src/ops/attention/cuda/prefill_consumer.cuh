// What prefill attention's consumer warpgroups have in common for both formats of K and V.
#pragma once

#include "ops/attention/cuda/prefill_layout.cuh"
#include "ops/common/cuda/convert.cuh"

namespace tessera::cuda::prefill {

template <bool Fp8, int Blocks>
struct ConsumerBase {
    using L = Layout<Fp8>;

    const KernelArgs& args;
    const uint32_t base;
    const int index;   // of the consumers
    const int thread;  // of its 128
    int tiles = 0;

    // Hidden from the compiler, so that it does not hold what few steps need in registers.
    __device__ __forceinline__ int hidden_thread() const {
        int hidden = thread;
        asm volatile("" : "+r"(hidden));
        return hidden;
    }
    // Lane (g, t) of warp w has rows 16 w + g and 16 w + g + 8.
    __device__ __forceinline__ int row(int half) const {
        const int thread = hidden_thread();
        return index * kRows + thread / kWarp * 16 + thread % kWarp / 4 + 8 * half;
    }
    // The query of a row within the tile.
    __device__ __forceinline__ int query_of(int row) const {
        return static_cast<int>(row * args.group_inverse >> 16);
    }
    // A lane has 32 slots of a KV tile for each half, in ascending order: how many lie before `slot`.
    __device__ __forceinline__ int slots_before(int slot) const {
        const int seen = min(max(slot, 0), kPrefillKvSlots);
        return seen / 8 * 2 + min(max(seen % 8 - thread % 4 * 2, 0), 2);
    }
    // How many of them row(half) sees, but for those before first_slot. first: of the KV tile.
    __device__ __forceinline__ int slots_seen(const Tile& tile, int half, int first) const {
        return slots_before(tile.first + query_of(row(half)) + 1 - first);
    }
    __device__ __forceinline__ void arrive(uint32_t barrier) const {
        barrier_arrive_for_all(barrier, thread == 0);
    }
    // Of a buffer that the cluster's blocks fill together.
    __device__ __forceinline__ void leave(uint32_t barrier) const {
        if (kAllArrive || thread == 0) {
            leave_buffer<Blocks>(barrier);
        }
    }

    // The two consumers' warps on one scheduler take turns at the exponentials: at the same time each would
    // take twice as long, and then both would wait for the tensor cores at the same time.
    __device__ __forceinline__ int turn_barrier(int consumer) const {
        return kTurnBarrier + 2 * (thread / kWarp) + consumer;
    }
    // The loop, passed through once, keeps the compiler from doing what follows before the wait.
    __device__ __forceinline__ void wait_turn() const {
        asm volatile(
            "{\n.reg .pred more;\nsetp.ne.u32 more, %2, 0;\nagain:\nbar.sync %0, %1;\n@more bra again;\n}" ::
                "r"(turn_barrier(index)),
            "n"(2 * kWarp), "r"(args.zero)
            : "memory");
    }
    // When `result`, to which the exponentials lead, is there: the compiler moves arithmetic past a barrier
    // that does not depend on it.
    __device__ __forceinline__ void pass_turn(uint32_t result) const {
        group_barrier_arrive(turn_barrier(1 - index) + static_cast<int>(result & args.zero), 2 * kWarp);
    }

    __device__ __forceinline__ void begin_turns() const {
        if (index == 1) {
            pass_turn(0);
        }
    }
    __device__ __forceinline__ void end_turns() const {
        if (index == 0) {
            wait_turn();
        }
    }

    __device__ __forceinline__ Tile wait_tile() const {
        barrier_wait(full_barrier(base + L::kQueryBarriers, stage_of<L::kQueryStages>(tiles)),
                     parity_of<L::kQueryStages>(tiles));
        Tile tile = this_tile();
        tile.steps =
            __shfl_sync(kFullWarp, tile.steps, 0);  // the same for all lanes, as the compiler then knows
        return tile;
    }
    __device__ __forceinline__ Tile this_tile() const {
        return read_tile(base + L::kTiles + stage_of<L::kTileStages>(tiles) * sizeof(Tile));
    }
    __device__ __forceinline__ void end_queries() const {
        arrive(empty_barrier(base + L::kQueryBarriers, stage_of<L::kQueryStages>(tiles)));
    }

    // Four lanes have a row, each two of every 8 columns; they exchange them so that each stores 16 bytes.
    // sums: a lane's share of its rows' weights.
    template <int Count>
    __device__ __forceinline__ void store(const Tile& tile, const float (&out)[Count],
                                          const float (&sums)[2]) const {
        const int lane = thread % 4;
        const PagedKvCuda& kv = args.prefill.kv;
        const float v_scale = Fp8 && kv.v_scales != nullptr ? kv.v_scales[tile.kv_head] : kv.v_scale;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = warp_reduce<4>(sums[half], Sum{});
            const float by = total == 0 ? 0.0f : v_scale / total;  // 0: sees nothing
            const int in_tile = query_of(row(half));
            const int head = tile.kv_head * args.group + row(half) - in_tile * args.group;
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
    static __device__ __forceinline__ void exchange(uint32_t (&words)[4], int lane) {
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
};

// All tiles of a consumer.
template <typename Consumer>
__device__ __forceinline__ void attend_tiles(Consumer consumer) {
    consumer.begin_turns();
    for (;; ++consumer.tiles) {
        const Tile tile = consumer.wait_tile();
        if (tile.steps < 0) {
            break;
        }
        consumer.begin_tile();
        float out[Consumer::kOut] = {};
        if (tile.steps > 0) {
            consumer.attend_steps(tile, out);
        }
        consumer.end_tile(out);
    }
    consumer.end_turns();
}

}  // namespace tessera::cuda::prefill
