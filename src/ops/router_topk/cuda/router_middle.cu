#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_meet.cuh"
#include "ops/router_topk/cuda/router_ring.cuh"

namespace tessera::cuda {
namespace {

constexpr int kExperts = kMeetExperts;
constexpr int kConsumers = 256;  // threads of two warpgroups
constexpr int kWarps = kConsumers / kWarp;
constexpr int kThreads = kConsumers + 2 * kWarp;  // a warp brings weights, one x

// Tokens that a block ends: all blocks of a tile of tokens end an equal share of it.
template <int TokenGroups, int BlockExperts, int Splits>
inline constexpr int kRowsABlock = 64 * TokenGroups / (Splits * (kExperts / BlockExperts));

// A piece of sums: 16 bytes, four experts of a token.
template <int TokenGroups, int ExpertGroups, int BlockExperts, int Splits, bool Low>
struct Tile : RingTile<TokenGroups, ExpertGroups, BlockExperts, Splits, Low,
                       kRowsABlock<TokenGroups, BlockExperts, Splits> * kExperts * 4> {
    // Clocks before a block looks for others' sums: looks that come too early are in the sums' way.
    static constexpr int kPause = Splits < 8 ? 0 : BlockExperts == 48 ? 400 : 750;
    static constexpr int kBlocks = Splits * (kExperts / BlockExperts);
    static constexpr int kRows = kRowsABlock<TokenGroups, BlockExperts, Splits>;
    static constexpr int kRun = std::min(kRows, 8);  // whose pieces lie side by side
    static constexpr int kPieces = kRows * kExperts / 4;
    static constexpr bool kOwn = Splits <= 4;  // what a block sends itself does not leave it
    static constexpr int kPiecesAThread = (kPieces + kConsumers - 1) / kConsumers;
    static constexpr int kRowsAWarp = (kRows + kWarps - 1) / kWarps;
    static_assert(kRows * kBlocks == 64 * TokenGroups);
};

struct MiddleArgs : RingArgs {
    uint32_t* sums = nullptr;  // [tiles][blocks][splits][pieces][4]
};

template <typename T>
struct Place : RingPlace<T> {
    int token = 0;  // the first that the block ends

    __device__ explicit Place(const std::byte* memory) : RingPlace<T>(memory) {
        this->split = static_cast<int>(blockIdx.x) % T::kSplits;
        this->first_expert = static_cast<int>(blockIdx.x) / T::kSplits * T::kBlockExperts;
        this->tile_token = static_cast<int>(blockIdx.y) * T::kTokens;
        token = this->tile_token + static_cast<int>(blockIdx.x) * T::kRows;
    }
};

// The pieces of a block that ends tokens: [rows / 8][16 experts][row of 8][4]. Piece t of 16 experts has
// those from 2 t on, two each, and those 8 further: what a lane holds of the products.
template <typename T>
__device__ __forceinline__ int piece_of(int row, int sixteen, int t) {
    return ((row / 8 * (kExperts / 16) + sixteen) * T::kRun + row % T::kRun) * 4 + t;
}
template <typename T>
__device__ __forceinline__ uint32_t* pieces_from(const MiddleArgs& args, int block, int split) {
    const int64_t tile = blockIdx.y * static_cast<int64_t>(T::kBlocks) + block;
    return args.sums + (tile * T::kSplits + split) * T::kPieces * 4;
}

// The warp's sums to the blocks that end its tokens. own: [pieces], of the block itself.
template <typename T>
__device__ __forceinline__ void send(const MiddleArgs& args, const Place<T>& place,
                                     const float (&sums)[T::kGroupExperts / 2], uint4* own) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int group = static_cast<int>(threadIdx.x) / 128;
    const int sixteen = (place.first_expert + group / T::kTokenGroups * T::kGroupExperts) / 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = group % T::kTokenGroups * 64 + static_cast<int>(threadIdx.x) % 128 / kWarp * 16 +
                        half * 8 + lane / 4;
        const int block = row / T::kRows;
        const int piece = piece_of<T>(row % T::kRows, sixteen, lane % 4);
        uint32_t* to = pieces_from<T>(args, block, place.split) + piece * 4;
        const bool mine = T::kOwn && block == static_cast<int>(blockIdx.x);
#pragma unroll
        for (int p = 0; p < T::kGroupExperts / 16; ++p) {
            const int first = 8 * p + 2 * half;
            const uint4 v = {present(sums[first]), present(sums[first + 1]), present(sums[first + 4]),
                             present(sums[first + 5])};
            if (mine) {
                own[piece + p * T::kRun * 4] = v;
            } else {
                store_relaxed(to + p * T::kRun * 16, v);
            }
        }
    }
}

// Four logits of a piece to their places in a row.
__device__ __forceinline__ void store_piece(float* row, int expert, int experts, bool pairs, float4 v) {
    if (pairs && expert + 10 <= experts) {
        *reinterpret_cast<float2*>(row + expert) = {v.x, v.y};
        *reinterpret_cast<float2*>(row + expert + 8) = {v.z, v.w};
        return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = expert + i % 2 + i / 2 * 8;
        if (at < experts) {
            row[at] = values[i];
        }
    }
}

// A thread's pieces of the tokens that its block ends, from all pieces of the width.
template <typename T>
struct Pieces {
    uint4 v[T::kPiecesAThread][T::kSplits];

    __device__ static int number(int n) { return static_cast<int>(threadIdx.x) + n * kConsumers; }
    __device__ static int row(int n) {
        return number(n) / (T::kRun * kExperts / 4) * 8 + number(n) / 4 % T::kRun;
    }
    __device__ static int expert(int n) {
        return number(n) / (T::kRun * 4) % (kExperts / 16) * 16 + number(n) % 4 * 2;
    }
    __device__ static bool is_own(const Place<T>& place, int n, int split) {
        return T::kOwn && split == place.split &&
               expert(n) / T::kBlockExperts == place.first_expert / T::kBlockExperts;
    }
    __device__ static uint32_t* at(uint32_t* from, int n, int split) {
        return from + (split * T::kPieces + number(n)) * 4;
    }

    __device__ __forceinline__ void ask(uint32_t* from, int n) {
#pragma unroll
        for (int s = 0; s < T::kSplits; ++s) {
            if (is_absent(v[n][s])) {
                v[n][s] = load_relaxed_16(at(from, n, s));
            }
        }
    }
    __device__ __forceinline__ bool misses(int n) const {
        bool any = false;
#pragma unroll
        for (int s = 0; s < T::kSplits; ++s) {
            any = any || is_absent(v[n][s]);
        }
        return any;
    }
    // What is missing is asked for again, together.
    __device__ __forceinline__ void wait(const Place<T>& place, uint32_t* from, const uint4* own) {
#pragma unroll
        for (int n = 0; n < T::kPiecesAThread; ++n) {
            const bool exists = number(n) < T::kPieces;
#pragma unroll
            for (int s = 0; s < T::kSplits; ++s) {
                v[n][s] = {exists ? kAbsent : 0, 0, 0, 0};
                if (exists && is_own(place, n, s)) {
                    v[n][s] = own[number(n)];
                }
            }
        }
        const auto start = clock64();
        while (T::kPause > 0 && clock64() - start < T::kPause) {
        }
        bool waits = true;
        while (waits) {
            waits = false;
#pragma unroll
            for (int n = 0; n < T::kPiecesAThread; ++n) {
                ask(from, n);
            }
#pragma unroll
            for (int n = 0; n < T::kPiecesAThread; ++n) {
                waits = waits || misses(n);
            }
        }
    }
    // The sum of piece n's parts, neighbours first.
    __device__ __forceinline__ float4 whole(int n) const {
        float4 sum[T::kSplits];
#pragma unroll
        for (int s = 0; s < T::kSplits; ++s) {
            sum[s] = as_floats(v[n][s]);
        }
#pragma unroll
        for (int width = 1; width < T::kSplits; width *= 2) {
#pragma unroll
            for (int s = 0; s < T::kSplits; s += 2 * width) {
                sum[s] = sum[s] + sum[s + width];
            }
        }
        return sum[0];
    }
    // Takes piece n out of the workspace.
    __device__ __forceinline__ void clear(const Place<T>& place, uint32_t* from, int n) const {
#pragma unroll
        for (int s = 0; s < T::kSplits; ++s) {
            if (!is_own(place, n, s)) {
                make_absent(at(from, n, s));
            }
        }
    }
};

// The logits of the block's tokens, to `room` for the choice, where also the block's own sums are, or to
// where they are wanted.
template <typename T>
__device__ __forceinline__ void collect(const MiddleArgs& args, const Place<T>& place, float* room,
                                        bool chooses) {
    uint32_t* from = pieces_from<T>(args, static_cast<int>(blockIdx.x), 0);
    Pieces<T> pieces;
    pieces.wait(place, from, reinterpret_cast<const uint4*>(room));
    if (T::kOwn && chooses) {
        group_barrier(1, kConsumers);  // the own sums are read
    }
#pragma unroll
    for (int n = 0; n < T::kPiecesAThread; ++n) {
        if (pieces.number(n) >= T::kPieces) {
            break;
        }
        const float4 logits = pieces.whole(n);
        const int token = place.token + pieces.row(n);
        if (chooses) {
            store_piece(room + pieces.row(n) * kExperts, pieces.expert(n), kExperts, true, logits);
        } else if (token < args.tokens) {
            store_piece(args.logits + token * args.logits_stride, pieces.expert(n), args.experts,
                        args.logits_stride % 2 == 0, logits);
        }
        pieces.clear(place, from, n);
    }
}

// Products, exchange and choice of a consumer's warp.
template <typename T>
__device__ __forceinline__ void consume(const MiddleArgs& args, const Place<T>& place, float* room,
                                        SelectRoom* rooms) {
    const Beside<T::kRowsAWarp, kWarps> beside(args.choice, [&](int row) { return place.token + row; });
    if (T::kGroups == 2 || threadIdx.x < 128) {
        float sums[T::kGroupExperts / 2];
        multiply_chunks<T>(args, place, sums);
        send(args, place, sums, reinterpret_cast<uint4*>(room));
    }
    if constexpr (T::kGroups == 1 || T::kOwn) {
        group_barrier(1, kConsumers);  // the own sums are there, and nobody asks for others before
    }
    const bool chooses = args.choice.chosen != nullptr;
    collect(args, place, room, chooses);
    if (!chooses) {
        return;
    }
    group_barrier(1, kConsumers);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int r = 0; r < T::kRowsAWarp; ++r) {
        const int row = warp + r * kWarps;
        if (row < T::kRows && place.token + row < args.tokens) {
            beside.choose(args.choice, place.token + row, r, room + row * kExperts, rooms[warp]);
        }
    }
}

// Roofline as router_many's; what counts for some hundred tokens is the number of steps one after the other.
// The tiles and pieces of the width are so many that all multiprocessors have one; sums meet in the
// workspace, where a word that is not there yet is its own flag, so that no fence, no counter and no cluster
// lie between writing and reading. All blocks are on the device at once (router_middle_serves()), so those
// that wait do not keep others out.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) router_middle_kernel(const __grid_constant__ MiddleArgs args) {
    extern __shared__ std::byte memory[];
    __shared__ SelectRoom rooms[kWarps];
    const Place<T> place(memory);
    const bool brings_weights = threadIdx.x == kConsumers;
    const bool brings_x = threadIdx.x == kConsumers + kWarp;
    if (brings_weights || brings_x) {
        place.prepare(args, brings_x);
    }
    __syncthreads();
    if (brings_weights) {
        bring_weights<T>(args, place);
    } else if (brings_x) {
        bring_x<T>(args, place);
    } else if (threadIdx.x < kConsumers) {
        consume(args, place, place.room(memory), rooms);
    }
}

template <typename T>
void launch(cudaStream_t stream, const RouterLogitsCudaArgs& product, const RouterTopkCudaArgs& choice) {
    MiddleArgs args{ring_args<T>(product, choice)};
    args.sums = reinterpret_cast<uint32_t*>(product.workspace);
    const auto kernel = router_middle_kernel<T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes));
    const dim3 grid(T::kBlocks, static_cast<unsigned>((product.tokens + T::kTokens - 1) / T::kTokens));
    cuda_check(launch_dependent({grid, kThreads, T::kSharedBytes, stream}, kernel, args));
}

using Launch = void (*)(cudaStream_t, const RouterLogitsCudaArgs&, const RouterTopkCudaArgs&);
struct Variant {
    int64_t tokens_max;
    int64_t blocks;  // of that many tokens
    Launch launch;
};
template <typename T>
constexpr Variant variant(int64_t tokens_max) {
    return {tokens_max, tokens_max / T::kTokens * T::kBlocks, launch<T>};
}
// The first that serves so many tokens; of one and of two products.
constexpr Variant kVariants[2][4] = {
    {variant<Tile<1, 1, 48, 8, false>>(128), variant<Tile<1, 1, 96, 8, false>>(512),
     variant<Tile<1, 1, 192, 8, false>>(1024), variant<Tile<1, 2, 192, 4, false>>(kRouterMiddleTokens)},
    {variant<Tile<1, 1, 48, 8, true>>(128), variant<Tile<1, 1, 96, 8, true>>(512),
     variant<Tile<2, 1, 96, 8, true>>(1024), variant<Tile<2, 1, 96, 4, true>>(kRouterMiddleTokens)}};
constexpr int64_t kSumsMax = 8192;  // tokens times splits

// Null: none.
const Variant* find_variant(const RouterLogitsCudaArgs& args) {
    const auto& variants = kVariants[args.low != nullptr ? 1 : 0];
    const auto* found = std::find_if(std::begin(variants), std::end(variants),
                                     [&](const Variant& v) { return args.tokens <= v.tokens_max; });
    return found == std::end(variants) ? nullptr : found;
}

}  // namespace

bool router_middle_serves(const RouterLogitsCudaArgs& args) {
    const Variant* variant = find_variant(args);
    return args.workspace != nullptr && variant != nullptr && variant->blocks <= args.sm_count &&
           router_middle_workspace_bytes(args.experts, args.width) > 0;
}

void launch_router_middle(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                          const RouterTopkCudaArgs& choice) {
    const Variant* variant = find_variant(product);
    check(variant != nullptr, "router: not a call of some hundred tokens");
    variant->launch(stream, product, choice);
}

int64_t router_middle_workspace_bytes(int64_t experts, int64_t width) {
    const bool serves =
        experts <= kExperts && width % kRingColumns == 0 && width / kRingColumns >= kRingParts;
    return serves ? kSumsMax * kExperts * 4 : 0;
}

}  // namespace tessera::cuda
