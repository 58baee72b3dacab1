// What the parts of the experts' kernel share: shapes of tiles, arguments, and the rings by which the roles
// of a block speak to each other. The kernel itself is in experts_kernel.cuh.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/wgmma.cuh"

namespace tessera::cuda {

// Rows that one expert works on together.
struct ExpertsItem {
    int32_t expert = 0;  // of the routed ones
    int32_t row = 0;     // first of the sorted rows
    int32_t rows = 0;
    int32_t place = 0;  // among the items of gate and up
};

// An expert's rows in items of at most rows_max, a multiple of 16, as equal as steps of 16 allow.
struct ExpertsCut {
    int items = 0;
    int rows = 0;  // of each but the last
};
__device__ __forceinline__ ExpertsCut experts_cut(int count, int rows_max) {
    if (count <= rows_max) {
        return {count > 0 ? 1 : 0, rows_max};
    }
    const int items = (count + rows_max - 1) / rows_max;
    const int rows = ((count + items - 1) / items + 15) / 16 * 16;
    return {(count + rows - 1) / rows, rows};
}

// Per expert, of the routed ones or of the shared one.
struct ExpertsSide {
    CUtensorMap gate_up;
    CUtensorMap down;
    CUtensorMap act;     // [sorted rows, width]
    CUtensorMap x_rows;  // [sorted rows, hidden], if x_sorted
    int32_t width = 0;
    const uint8_t* x = nullptr;               // [tokens, hidden]
    float input_scale = 1;                    // of x
    const float* gate_up_scale = nullptr;     // [experts, 2]
    const float* down_scale = nullptr;        // [experts]
    const float* down_input_scale = nullptr;  // [experts]
};

struct ExpertsArgs {
    // First what a block begins with: parameters come from memory, 64 bytes at once.
    int32_t hidden = 0;
    int32_t tokens = 0;
    int32_t shared_items = 0;         // the first items; none without a shared expert
    int32_t shared_rows = 0;          // of each but the last
    int32_t shared_row = 0;           // sorted row of token 0
    int32_t early_items = 0;          // the first routed items are the first of each expert, by number
    int32_t gate_tiles = 0;           // of an item; grouped: not given
    int32_t shared_gate_tiles = 0;    // the same
    const int32_t* chosen = nullptr;  // [tokens, k]: each block makes the plan for itself; null: not
    int32_t k = 0;
    int32_t experts = 0;
    int32_t x_stride = 0;                // bytes
    bool x_sorted = false;               // x lies in the order of the rows as well
    bool down_pairs = false;             // maps of down: a warp's 16 rows of two blocks are neighbours
    const ExpertsItem* items = nullptr;  // the routed ones for gate and up; an early one may have no rows
    const ExpertsItem* down_items = nullptr;  // for down: those with rows
    const int32_t* routed_items = nullptr;    // [2] their numbers
    const int32_t* row_source = nullptr;      // the token of each routed row
    // Of blocks that make the plan for themselves, in place of the four above.
    int32_t* slots = nullptr;  // [tokens, k]: the sorted row of each pair, -1 without one
    uint32_t* left = nullptr;  // [1]: blocks that have left, less one, modulo all
    int32_t ready_count = 0;
    const float* x_scale = nullptr;  // [tokens]: grouped weights only
    // Counters begin at 0, of blocks with a plan of their own at kOwnCounter.
    int32_t* next_tile = nullptr;  // [1]
    int32_t* ready = nullptr;      // [items]: consumers that have stored a tile of act
    uint8_t* act = nullptr;        // [sorted rows, act_stride]
    void* out = nullptr;           // [sorted rows, hidden] bfloat16
    int64_t act_stride = 0;        // elements
    ExpertsSide routed;
    ExpertsSide shared;
};

// Steps of a block's first tile whose weights are asked for at once, before its rows are known.
inline constexpr int kEarlySteps = 4;

// A plan in shared memory: of so many pairs and experts at most.
inline constexpr int kOwnPairs = 1024;
inline constexpr int kOwnExperts = 256;
inline constexpr int32_t kOwnCounter = -1;  // as a workspace is at first
// As ExpertsItem.
struct OwnItem {
    uint16_t expert = 0;
    uint16_t row = 0;
    uint16_t rows = 0;
    uint16_t unused = 0;
};
// No item is early, so that gate and up and down have the same ones.
template <int TileMax>
struct ExpertsOwnPlan {
    static constexpr int kItems = kOwnExperts + kOwnPairs / TileMax;
    OwnItem items[kItems];
    uint16_t tokens[kOwnPairs];  // of the sorted rows
    int32_t routed_items;
    uint32_t warps[4];
};

// How far a block of experts_kernel looks ahead in the list of down tiles, and what it expects.
struct ExpertsLook {
    int32_t run = 1;      // neighbouring tiles that one claim takes; divides an item's
    int32_t ahead = 1;    // tiles that a block may hold, the one under way among them, when it claims more
    bool keep = false;    // out stays in the level-2 cache, if nothing else asks for it
    int32_t columns = 0;  // that most tiles have
    int32_t first_columns = 0;  // those of the shared expert, with which some blocks begin
};

inline constexpr int kExpertsThreads = 384;  // with two consumers
inline constexpr int kExpertsRowWarps = 2;   // that bring the tokens' rows
inline constexpr int kRowBoxRows = 16;       // of act in one copy

// A tile of Consumers * Blocks times 64 rows of weights by up to TileMax tokens, and where a thread block has
// its stages, its buffers of results, its barriers and its list of tiles, of `Slots` places.
template <int Consumers, int Blocks, int TileMax, int Stages, int Slots, int Buffers>
struct ExpertsTileShape {
    static constexpr int kConsumers = Consumers;
    static constexpr int kThreads = 128 * (Consumers + 1);
    static constexpr int kBlocks = Blocks;  // of 64 rows of weights, for each of the consumers
    static constexpr int kTileMax = TileMax;
    static constexpr int kStages = Stages;
    static constexpr int kSlots = Slots;
    static constexpr int kWeightRows = 64 * Consumers * Blocks;
    static constexpr int kOutputs = kWeightRows / 2;  // of SwiGLU
    static constexpr int kBlockBytes = 64 * kSwizzleRowBytes;
    static constexpr int kWeightBytes = kWeightRows * kSwizzleRowBytes;
    static constexpr int kRowsOffset = kWeightBytes;  // of the tokens' rows in a stage
    static constexpr int kStageBytes = kWeightBytes + TileMax * kSwizzleRowBytes;
    static constexpr bool kRowScales = false;  // of x, in the tiles' list
    static constexpr int kResultBytes = 8192;
    static constexpr int kBuffers = Stages * kStageBytes;
    static constexpr int kBarriers = kBuffers + Buffers * kResultBytes;
    static constexpr int kTiles = kBarriers + (2 * Stages + 2 * Slots) * 8;
    static constexpr int kSlotBytes = 32 + TileMax * 4 + 16;
    static constexpr int kPlan = (kTiles + 15) / 16 * 16 + Slots * kSlotBytes;
};

inline constexpr int experts_slots(int tile_max) {
    return tile_max == 16 ? 6 : tile_max == 64 ? 8 : 3;
}

// 128 * Blocks rows of weights. Two consumers halve each tile, or (Turns) take them in turn. Results pass
// through a buffer: with many tokens the last stage's weights, which then waits; those of one block need
// none.
template <int Blocks, int TileMax, int Stages, bool Turns>
struct ExpertsShape : ExpertsTileShape<2, Blocks, TileMax, Stages, experts_slots(TileMax),
                                       (TileMax <= 64 && Blocks > 1) ? 2 : 0> {
    static constexpr bool kTurns = Turns;
    static constexpr bool kAtOnce = false;  // a stage is given back before the next one's products begin
    static constexpr int kHeld = Turns ? 2 * Blocks : Blocks;  // of a consumer in one tile
    static constexpr int kTileMin = TileMax > 64 ? 64 : 16;
    static constexpr int kReadyTiles = Turns ? 1 : 2;        // how often one of act is told of
    static constexpr int kConsumerArrivals = Turns ? 1 : 2;  // at a stage's "empty" barrier
    static constexpr bool kOwnBuffer = TileMax <= 64;
    // Of a thread, that brings and that consumes: 40 + 2 * 232 is all there is.
    static constexpr int kBringRegisters = TileMax > 64 ? 40 : 56;
    static constexpr int kConsumeRegisters = TileMax > 64 ? 232 : 224;
    static constexpr bool kOwnPlan = TileMax <= 64;  // it has room for one
    static constexpr int kBytes = ExpertsShape::kPlan + (kOwnPlan ? sizeof(ExpertsOwnPlan<TileMax>) : 0);
    static_assert(kBytes <= 232448);
};

// 192 rows of weights. Three consumers take 64 each; of gate and up these are 8 of gate, then the same 8 of
// up in turn. e4m3 only.
template <int TileMax, int Stages>
struct ExpertsThirdsShape : ExpertsTileShape<3, 1, TileMax, Stages, experts_slots(TileMax), 3> {
    static constexpr bool kTurns = false;
    static constexpr bool kAtOnce = true;  // the other consumers multiply meanwhile
    static constexpr int kHeld = 1;
    static constexpr int kTileMin = TileMax > 64 ? 64 : 16;
    static constexpr int kReadyTiles = 3;
    static constexpr int kConsumerArrivals = 3;
    static constexpr bool kOwnBuffer = true;
    // Of a thread: 56 + 3 * 152 is all there is.
    static constexpr int kBringRegisters = 56;
    static constexpr int kConsumeRegisters = 152;
    static constexpr bool kOwnPlan = TileMax <= 64;
    static constexpr int kBytes =
        ExpertsThirdsShape::kPlan + (kOwnPlan ? sizeof(ExpertsOwnPlan<TileMax>) : 0);
    static_assert(kBytes <= 232448);
};
using ExpertsThirds = ExpertsThirdsShape<192, 4>;
using ExpertsShortThirds = ExpertsThirdsShape<64, 6>;  // some tokens

inline constexpr int32_t kTileShared = 1;   // of the shared expert
inline constexpr int32_t kTileActHere = 2;  // grouped only: all rows of act that it reads are there

// One tile of work. phase: 0 = gate and up, 1 = down, -1 = no more.
struct ExpertsTile {
    int32_t phase = -1;
    int32_t item = 0;  // the shared ones first
    int32_t expert = 0;
    int32_t marks = 0;  // kTileShared, kTileActHere
    int32_t row = 0;
    int32_t rows = 0;
    int32_t tile = 0;     // along the weights' rows
    int32_t columns = 0;  // rows as the tensor cores take them

    __device__ __forceinline__ bool shared() const { return (marks & kTileShared) != 0; }
};

// Scales of a tile: of the sums, and one over the next input's.
struct ExpertsScales {
    float gate = 1;  // or of the down product
    float up = 1;
    float inverse_output = 1;
    float unused = 0;
};

// A ring of Stages places as one role sees it: barriers "full" of all places, then "empty".
template <int Stages>
struct ExpertsRing {
    uint32_t barriers = 0;
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ uint32_t full() const { return barriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty() const { return barriers + 8 * (Stages + stage); }
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void advance(int places) {
        for (stage += places; stage >= Stages; stage -= Stages) {
            parity ^= 1;
        }
    }
};

// The shared memory of a block.
template <typename Shape>
struct ExpertsMemory {
    uint8_t* base = nullptr;
    uint32_t address = 0;
    __device__ __forceinline__ ExpertsRing<Shape::kStages> stages() const {
        return {.barriers = address + Shape::kBarriers};
    }
    __device__ __forceinline__ ExpertsRing<Shape::kSlots> tiles() const {
        return {.barriers = address + Shape::kBarriers + 16 * Shape::kStages};
    }
    __device__ __forceinline__ ExpertsTile* tile(int slot) const {
        return reinterpret_cast<ExpertsTile*>(base + (Shape::kTiles + 15) / 16 * 16 +
                                              slot * Shape::kSlotBytes);
    }
    // Byte offsets of the tile's rows of x.
    __device__ __forceinline__ int32_t* row_offsets(int slot) const {
        return reinterpret_cast<int32_t*>(tile(slot) + 1);
    }
    // With kOwnPlan.
    __device__ __forceinline__ ExpertsOwnPlan<Shape::kTileMax>* own_plan() const {
        return reinterpret_cast<ExpertsOwnPlan<Shape::kTileMax>*>(base + Shape::kPlan);
    }
    // An ExpertsScales, without kRowScales.
    __device__ __forceinline__ float* scales(int slot) const {
        return reinterpret_cast<float*>(row_offsets(slot) + Shape::kTileMax);
    }
    // The rows' scales, with kRowScales.
    __device__ __forceinline__ float* row_scales(int slot) const {
        return reinterpret_cast<float*>(row_offsets(slot) + Shape::kTileMax);
    }
};

__device__ __forceinline__ const ExpertsSide& experts_side(const ExpertsArgs& args, const ExpertsTile& tile) {
    return tile.shared() ? args.shared : args.routed;
}

// Bytes of one row of a phase's inputs; of a tile without rows those that were asked for early.
template <bool Fp8>
__device__ __forceinline__ int experts_input_bytes(const ExpertsArgs& args, const ExpertsTile& tile) {
    const int inputs = tile.phase == 0 ? args.hidden : experts_side(args, tile).width;
    const int bytes = inputs * (Fp8 ? 1 : 2);
    return tile.rows > 0 ? bytes : min(bytes, kEarlySteps * kSwizzleRowBytes);
}

// One thread.
template <typename Shape>
__device__ __forceinline__ void experts_init_barriers(const ExpertsMemory<Shape>& memory) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
        barrier_init(memory.stages().barriers + 8 * stage, 1 + 32 * kExpertsRowWarps);
        barrier_init(memory.stages().barriers + 8 * (Shape::kStages + stage), Shape::kConsumerArrivals);
    }
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
        barrier_init(memory.tiles().barriers + 8 * slot, kWarpArrivals);
        barrier_init(memory.tiles().barriers + 8 * (Shape::kSlots + slot),
                     1 + (4 * Shape::kConsumers + kExpertsRowWarps) * kWarpArrivals);
    }
    barrier_init_fence();
}

// Waits for the next tile of the list. Only the rows of the list stay in use until release_tile().
template <typename Shape>
__device__ __forceinline__ ExpertsTile acquire_tile(const ExpertsMemory<Shape>& memory,
                                                    const ExpertsRing<Shape::kSlots>& tiles) {
    barrier_wait(tiles.full(), tiles.parity);
    const int4* from = reinterpret_cast<const int4*>(memory.tile(tiles.stage));
    const int4 low = from[0];
    const int4 high = from[1];
    return {.phase = low.x,
            .item = low.y,
            .expert = low.z,
            .marks = low.w,
            .row = high.x,
            .rows = high.y,
            .tile = high.z,
            .columns = high.w};
}
template <int Slots>
__device__ __forceinline__ void release_tile(const ExpertsRing<Slots>& tiles) {
    __syncwarp();
    barrier_arrive_for_all(tiles.empty(), threadIdx.x % 32 == 0);
}

}  // namespace tessera::cuda
