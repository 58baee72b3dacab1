#include <algorithm>
#include <bit>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/tensor_map.h"
#include "ops/linear/cuda/skinny.cuh"
#include "ops/linear/cuda/skinny_linear.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int64_t kBlocksMax = 132;             // that an H200 runs at once
constexpr int64_t kSharedBytesMax = 226 << 10;  // of 227 KiB: the barriers lie beside it
constexpr int64_t kAlignBytes = 1024;
constexpr int64_t kXBytesMin = 64 * kSwizzleRowBytes;  // what wgmma reads of the last box of x
constexpr int kBoxes = 2;                              // 128 bytes of K each
constexpr int64_t kWeightStagesMax = 10;
constexpr int64_t kOnWayBytes = 64 << 10;  // of weights in a block

// A block's tile. One for each width of y, whatever the rows: the order of the sums depends on it.
struct SkinnyTile {
    int64_t outputs = 0;  // columns, of a block or of the two that split K
    int split = 1;
    void (*fp8)(SkinnyArgs) = nullptr;
    void (*bf16)(SkinnyArgs) = nullptr;
};

constexpr SkinnyTile kTiles[] = {
    {64, 2, skinny_kernel<true, 64, kBoxes, 2>, skinny_kernel<false, 64, kBoxes, 2>},
    {80, 1, skinny_kernel<true, 80, kBoxes, 1>, skinny_kernel<false, 80, kBoxes, 1>},
};

int64_t tile_blocks(const SkinnyTile& tile, int64_t outputs) {
    return (outputs + tile.outputs - 1) / tile.outputs * tile.split;
}

// The narrowest tile with which all blocks run at once; null: none.
const SkinnyTile* choose_tile(int64_t outputs) {
    const auto* tile = std::find_if(std::begin(kTiles), std::end(kTiles), [outputs](const SkinnyTile& t) {
        return tile_blocks(t, outputs) <= kBlocksMax;
    });
    return tile == std::end(kTiles) ? nullptr : tile;
}

struct SkinnyRingSizes {
    int32_t stages = 0;
    int32_t on_way = 0;
    int32_t x_stages = 0;
    int64_t bytes = 0;
};

// x lies in the level-2 cache, but there many blocks ask for it. Both are even.
SkinnyRingSizes choose_rings(const SkinnyTile& tile, int64_t rows, int64_t x_rows) {
    constexpr int64_t kStageBytes = kBoxes * kSwizzleRowBytes;  // of one row
    const int64_t inbox = tile.split == 2 ? skinny_inbox_bytes(tile.outputs, rows) : 0;
    const int64_t room =
        kSharedBytesMax - kAlignBytes - std::max(inbox, kXBytesMin - x_rows * kSwizzleRowBytes);
    int64_t x_stages = x_rows <= 16 ? 8 : (x_rows <= 32 ? 6 : 4);
    const int64_t stages = std::min<int64_t>(
        (room - x_stages * kStageBytes * x_rows) / (kStageBytes * tile.outputs) / 2 * 2, kWeightStagesMax);
    const int64_t left = room - stages * kStageBytes * tile.outputs;
    x_stages = std::min<int64_t>(left / (kStageBytes * x_rows) / 2 * 2, kSkinnyStagesMax);
    return {.stages = static_cast<int32_t>(stages),
            .on_way = static_cast<int32_t>(kOnWayBytes / (kStageBytes * tile.outputs)),
            .x_stages = static_cast<int32_t>(x_stages),
            .bytes = kSharedBytesMax - left + x_stages * kStageBytes * x_rows};
}

// A row-major matrix in boxes of 128 bytes of K. Nothing beside a box is read ahead: it will be.
CUtensorMap make_map(const void* data, DType dtype, int64_t rows, int64_t inputs, int64_t box_rows) {
    return make_tensor_map(data, {.dtype = dtype,
                                  .rank = 2,
                                  .sizes = {inputs, rows},
                                  .strides = {inputs * dtype_size(dtype)},
                                  .box = {static_cast<uint32_t>(box_rows)},
                                  .promote = false});
}

}  // namespace

bool skinny_linear_serves(const LinearCudaArgs& args) {
    const int64_t stride = args.y_stride != 0 ? args.y_stride : args.outputs;
    const bool pairs = args.outputs % 2 == 0 && stride % 2 == 0;  // neighbouring results are stored as one
    return args.rows <= kSkinnyRowsMax && pairs && args.inputs % 16 == 0 &&
           !(args.accumulate && args.y_dtype == DType::kFloat32) && choose_tile(args.outputs) != nullptr;
}

void skinny_linear_prepare() {
    for (const SkinnyTile& tile : kTiles) {
        for (auto* kernel : {tile.fp8, tile.bf16}) {
            cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kSharedBytesMax)));
        }
    }
}

void skinny_linear_cuda(cudaStream_t stream, const LinearCudaArgs& args) {
    check(skinny_linear_serves(args), "skinny linear: not a product of few rows that it takes");
    const SkinnyTile& tile = *choose_tile(args.outputs);
    const int64_t x_rows =
        std::max<int64_t>(8, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(args.rows))));
    const SkinnyRingSizes rings = choose_rings(tile, args.rows, x_rows);
    const int64_t step = kBoxes * kSwizzleRowBytes * tile.split;  // bytes of K of a stage of all blocks
    const int64_t y_stride = args.y_stride != 0 ? args.y_stride : args.outputs;
    const SkinnyArgs kernel_args{
        .weights = make_map(args.weight, args.dtype, args.outputs, args.inputs, tile.outputs),
        .x = make_map(args.x, args.dtype, args.rows, args.inputs, x_rows),
        .y = args.y,
        .y_stride = y_stride,
        .column_scale = args.column_scale,
        .row_scale = args.row_scale,
        .scale = args.scale,
        .rows = static_cast<int32_t>(args.rows),
        .outputs = static_cast<int32_t>(args.outputs),
        .x_rows = static_cast<int32_t>(x_rows),
        .steps = static_cast<int32_t>((args.inputs * dtype_size(args.dtype) + step - 1) / step),
        .stages = rings.stages,
        .on_way = rings.on_way,
        .x_stages = rings.x_stages,
        .accumulate = args.accumulate,
        .to_float = args.y_dtype == DType::kFloat32,
        .wide = args.y_dtype == DType::kBFloat16 && (args.outputs | y_stride) % 8 == 0 &&
                reinterpret_cast<uintptr_t>(args.y) % 16 == 0};
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(tile_blocks(tile, args.outputs))),
                                 .threads = kSkinnyThreads,
                                 .shared_bytes = static_cast<int>(rings.bytes),
                                 .stream = stream},
                                args.dtype == DType::kFloat8E4M3 ? tile.fp8 : tile.bf16, kernel_args));
}

}  // namespace tessera
