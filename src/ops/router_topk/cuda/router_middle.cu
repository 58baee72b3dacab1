#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/tensor_map.h"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_meet.cuh"

namespace tessera::cuda {
namespace {

constexpr int kExperts = kMeetExperts;
constexpr int kParts = 8;  // of the width, each with sums of its own: as router_many.cu with `deterministic`
constexpr int kStageColumns = 64;  // 128 bytes of each row
constexpr int kRowBytes = 128;
constexpr int kStepsAStage = 4;
constexpr int kBarrierBytes = 1024;
constexpr int kConsumers = 256;  // threads of two warpgroups
constexpr int kWarps = kConsumers / kWarp;
constexpr int kThreads = kConsumers + 2 * kWarp;  // a warp brings weights, one x

// A block multiplies 64 TokenGroups tokens with BlockExperts experts over one of `Splits` pieces of the
// width; all blocks of a tile of tokens then end an equal share of it each. A piece of sums: 16 bytes, four
// experts of a token.
template <int TokenGroups, int ExpertGroups, int BlockExperts, int Splits, bool Low>
struct Tile {
    static constexpr int kLow = Low;
    static constexpr int kSplits = Splits;
    static constexpr int kTokens = 64 * TokenGroups;
    static constexpr int kBlockExperts = BlockExperts;
    static constexpr int kTokenGroups = TokenGroups;
    static constexpr int kGroups = TokenGroups * ExpertGroups;         // warpgroups that multiply
    static constexpr int kGroupExperts = BlockExperts / ExpertGroups;  // of each
    static constexpr int kBlocks = Splits * (kExperts / BlockExperts);
    static constexpr int kChunks = kParts / Splits;
    static constexpr int kRows = kTokens / kBlocks;  // tokens that a block ends
    static constexpr int kRun = std::min(kRows, 8);  // whose pieces lie side by side
    static constexpr int kPieces = kRows * kExperts / 4;
    static constexpr bool kOwn = Splits <= 4;  // what a block sends itself does not leave it
    static constexpr int kPiecesAThread = (kPieces + kConsumers - 1) / kConsumers;
    static constexpr int kRowsAWarp = (kRows + kWarps - 1) / kWarps;
    static constexpr int kXBytes = kTokens * kRowBytes;
    static constexpr int kWeightBytes = BlockExperts * kRowBytes;
    static constexpr int kStageBytes = kXBytes + (Low ? 2 : 1) * kWeightBytes;
    static constexpr int kLogitBytes = kRows * kExperts * 4;
    static constexpr int kStages =
        std::min(8, (224 * 1024 - kBarrierBytes - 1024 - kLogitBytes) / kStageBytes);
    static constexpr int kSharedBytes = kBarrierBytes + 1024 + kStages * kStageBytes + kLogitBytes;
    static_assert(8 * 2 * kStages <= kBarrierBytes && kRows * kBlocks == kTokens);
};

struct MiddleArgs {
    CUtensorMap x, high, low;
    RouterTopkCudaArgs choice;  // without a place for it, the logits are stored
    uint32_t* sums = nullptr;   // [tiles][blocks][splits][pieces][4]
    float* logits = nullptr;
    int64_t logits_stride = 0;
    int tokens = 0;
    int experts = 0;
    int stages = 0;  // of the whole width
};

// Where a block works, and its ring of stages.
template <typename T>
struct Place {
    uint32_t barriers = 0;
    uint32_t ring = 0;
    int split = 0;
    int first_expert = 0;
    int tile_token = 0;
    int token = 0;  // the first that the block ends

    __device__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return barriers + 8 * (T::kStages + stage); }
    __device__ uint32_t x(int stage) const { return ring + stage * T::kStageBytes; }
    __device__ uint32_t high(int stage) const { return x(stage) + T::kXBytes; }
    __device__ uint32_t low(int stage) const { return high(stage) + T::kWeightBytes; }
    // The stage of the whole width at which the block's chunk begins.
    __device__ int begin(const MiddleArgs& args, int chunk) const {
        return (split * T::kChunks + chunk) * args.stages / kParts;
    }
};

// By one thread: the weights do not wait for the kernel before.
template <typename T>
__device__ __forceinline__ void bring_weights(const MiddleArgs& args, const Place<T>& place) {
    const int begin = place.begin(args, 0);
    const int count = place.begin(args, T::kChunks) - begin;
    for (int i = 0; i < count; ++i) {
        const int slot = i % T::kStages;
        const int column = (begin + i) * kStageColumns;
        if (i >= T::kStages) {
            barrier_wait(place.empty(slot), static_cast<uint32_t>(i / T::kStages - 1) & 1);
        }
        barrier_arrive_expect(place.full(slot), T::kStageBytes);
        copy_box(place.high(slot), &args.high, column, place.first_expert, place.full(slot));
        if constexpr (T::kLow) {
            copy_box(place.low(slot), &args.low, column, place.first_expert, place.full(slot));
        }
    }
}
// By another.
template <typename T>
__device__ __forceinline__ void bring_x(const MiddleArgs& args, const Place<T>& place) {
    const int begin = place.begin(args, 0);
    const int count = place.begin(args, T::kChunks) - begin;
    wait_for_previous_kernel();
    let_next_kernel_start();
    for (int i = 0; i < count; ++i) {
        const int slot = i % T::kStages;
        if (i >= T::kStages) {
            barrier_wait(place.empty(slot), static_cast<uint32_t>(i / T::kStages - 1) & 1);
        }
        copy_box(place.x(slot), &args.x, (begin + i) * kStageColumns, place.tile_token, place.full(slot));
    }
}

// A warpgroup's sums over a chunk of the block's stages.
template <typename T>
__device__ __forceinline__ void multiply(const MiddleArgs& args, const Place<T>& place, int chunk,
                                         float (&sums)[T::kGroupExperts / 2]) {
    const int group = static_cast<int>(threadIdx.x) / 128;
    const uint32_t x_rows = group % T::kTokenGroups * 64 * kRowBytes;
    const uint32_t weight_rows = group / T::kTokenGroups * T::kGroupExperts * kRowBytes;
    const int first = place.begin(args, chunk) - place.begin(args, 0);
    const int end = place.begin(args, chunk + 1) - place.begin(args, 0);
    for (int i = first; i < end; ++i) {
        const int slot = i % T::kStages;
        barrier_wait(place.full(slot), static_cast<uint32_t>(i / T::kStages) & 1);
        mma_pin(sums);
        mma_begin();
#pragma unroll
        for (int step = 0; step < kStepsAStage; ++step) {
            const uint64_t x = mma_descriptor(place.x(slot) + x_rows + step * kMmaStepBytes);
            mma_shared<false>(sums, x, mma_descriptor(place.high(slot) + weight_rows + step * kMmaStepBytes),
                              i > first || step > 0 ? 1 : 0);
            if constexpr (T::kLow) {
                mma_shared<false>(sums, x,
                                  mma_descriptor(place.low(slot) + weight_rows + step * kMmaStepBytes), 1);
            }
        }
        mma_commit();
        mma_wait<1>();
        mma_pin(sums);
        if (i > first) {
            barrier_arrive_for_all(place.empty((i - 1) % T::kStages), threadIdx.x % 128 == 0);
        }
    }
    mma_wait<0>();
    mma_pin(sums);
    barrier_arrive_for_all(place.empty((end - 1) % T::kStages), threadIdx.x % 128 == 0);
}

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
    // Takes piece n out of the workspace; the sum of its parts, neighbours first.
    __device__ __forceinline__ float4 take(const Place<T>& place, uint32_t* from, int n) const {
        float4 sum[T::kSplits];
#pragma unroll
        for (int s = 0; s < T::kSplits; ++s) {
            sum[s] = as_floats(v[n][s]);
            if (!is_own(place, n, s)) {
                make_absent(at(from, n, s));
            }
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
        const float4 logits = pieces.take(place, from, n);
        const int token = place.token + pieces.row(n);
        if (chooses) {
            store_piece(room + pieces.row(n) * kExperts, pieces.expert(n), kExperts, true, logits);
        } else if (token < args.tokens) {
            store_piece(args.logits + token * args.logits_stride, pieces.expert(n), args.experts,
                        args.logits_stride % 2 == 0, logits);
        }
    }
}

// Products, exchange and choice of a consumer's warp.
template <typename T>
__device__ __forceinline__ void consume(const MiddleArgs& args, const Place<T>& place, float* room,
                                        SelectRoom* rooms) {
    const Beside<T::kRowsAWarp, kWarps> beside(args.choice, place.token);
    if (T::kGroups == 2 || threadIdx.x < 128) {
        float sums[T::kGroupExperts / 2];
        multiply(args, place, 0, sums);
#pragma unroll 1
        for (int chunk = 1; chunk < T::kChunks; ++chunk) {
            float more[T::kGroupExperts / 2];
            multiply(args, place, chunk, more);
#pragma unroll
            for (int i = 0; i < T::kGroupExperts / 2; ++i) {
                sums[i] += more[i];
            }
        }
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
    const uint32_t base = shared_address(memory);
    Place<T> place;
    place.barriers = base;
    place.ring = (base + kBarrierBytes + 1023) / 1024 * 1024;
    place.split = static_cast<int>(blockIdx.x) % T::kSplits;
    place.first_expert = static_cast<int>(blockIdx.x) / T::kSplits * T::kBlockExperts;
    place.tile_token = static_cast<int>(blockIdx.y) * T::kTokens;
    place.token = place.tile_token + static_cast<int>(blockIdx.x) * T::kRows;
    const bool brings_weights = threadIdx.x == kConsumers;
    const bool brings_x = threadIdx.x == kConsumers + kWarp;
    if (brings_weights || brings_x) {
        prefetch_map(brings_x ? &args.x : &args.high);
        for (int stage = 0; stage < T::kStages; ++stage) {
            barrier_init(brings_x ? place.empty(stage) : place.full(stage),
                         brings_x ? T::kGroups * kGroupArrivals : 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (brings_weights) {
        bring_weights(args, place);
    } else if (brings_x) {
        bring_x(args, place);
    } else if (threadIdx.x < kConsumers) {
        std::byte* after_ring = memory + (place.ring - base) + T::kStages * T::kStageBytes;
        consume(args, place, reinterpret_cast<float*>(after_ring), rooms);
    }
}

template <typename T>
void launch(cudaStream_t stream, const RouterLogitsCudaArgs& product, const RouterTopkCudaArgs& choice) {
    const auto weight_map = [&](const __nv_bfloat16* weights) {
        return make_tensor_map(weights, DType::kBFloat16, product.experts, product.width, T::kBlockExperts);
    };
    const MiddleArgs args{.x = make_tensor_map(product.x, {.dtype = DType::kBFloat16,
                                                           .rank = 2,
                                                           .sizes = {product.width, product.tokens},
                                                           .strides = {product.x_stride * 2},
                                                           .box = {T::kTokens}}),
                          .high = weight_map(product.high),
                          .low = weight_map(T::kLow ? product.low : product.high),
                          .choice = choice,
                          .sums = reinterpret_cast<uint32_t*>(product.workspace),
                          .logits = product.logits,
                          .logits_stride = product.logits_stride,
                          .tokens = static_cast<int>(product.tokens),
                          .experts = static_cast<int>(product.experts),
                          .stages = static_cast<int>(product.width / kStageColumns)};
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
// The first that serves so many tokens; of one and of two products. The last ones, in halves of the width,
// add in an order of their own.
constexpr int64_t kDeterministicMax = 2048;
constexpr Variant kVariants[2][4] = {
    {variant<Tile<1, 1, 96, 8, false>>(512), variant<Tile<1, 1, 192, 8, false>>(1024),
     variant<Tile<1, 2, 192, 4, false>>(kDeterministicMax), variant<Tile<1, 2, 192, 2, false>>(4096)},
    {variant<Tile<1, 1, 96, 8, true>>(512), variant<Tile<2, 1, 96, 8, true>>(1024),
     variant<Tile<2, 1, 96, 4, true>>(kDeterministicMax), variant<Tile<2, 1, 96, 2, true>>(4096)}};
constexpr int64_t kSumsMax = 8192;  // tokens times splits

// Null: none.
const Variant* find_variant(const RouterLogitsCudaArgs& args) {
    const auto& variants = kVariants[args.low != nullptr ? 1 : 0];
    const auto* found = std::find_if(std::begin(variants), std::end(variants),
                                     [&](const Variant& v) { return args.tokens <= v.tokens_max; });
    return found == std::end(variants) || (args.deterministic && args.tokens > kDeterministicMax) ? nullptr
                                                                                                  : found;
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
    const bool serves = experts <= kExperts && width % kStageColumns == 0 && width / kStageColumns >= kParts;
    return serves ? kSumsMax * kExperts * 4 : 0;
}

}  // namespace tessera::cuda
