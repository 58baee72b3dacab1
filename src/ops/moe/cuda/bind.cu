#include "base/check.h"
#include "ops/common/cuda/tensor_map.h"
#include "ops/moe/cuda/experts_grouped.h"
#include "ops/moe/cuda/experts_launch.h"

namespace tessera {
namespace cuda {
namespace {

// The maps order the rows of a box of gate and up as the sums of SwiGLU need them in a thread, which holds
// rows r and r + 8 of each 16: with few tokens (`fine`) 8 rows of gate, then the same 8 of up; otherwise all
// of one matrix, and with e4m3 first the even ones of 16, then the odd ones. With few tokens memory alone
// counts, and reads of less than 256 bytes keep it busier: whole at 64 tokens 788 us, 811 with them (H200).
// The rows of down: see down_pairs().
MoeCudaMaps make_maps(const MoeCudaTensors& t, DType dtype, bool shared) {
    const void* gate_up = shared ? t.shared_gate_up : t.gate_up;
    const void* down = shared ? t.shared_down : t.down;
    const int64_t experts = shared ? 1 : t.experts;
    const int64_t width = shared ? t.shared_width : t.width;
    const int64_t hidden = t.hidden;
    const int64_t row = hidden * dtype_size(dtype);
    const bool pairs = dtype == DType::kFloat8E4M3;
    MoeCudaMaps maps;
    maps.gate_up = make_tensor_map(
        gate_up, {.dtype = dtype,
                  .rank = 5,
                  .sizes = {hidden, 8, 2, width / 16, 2 * experts},
                  .strides = {pairs ? 2 * row : row, pairs ? row : 8 * row, 16 * row, width * row},
                  .box = {8, 2, 4, 1}});
    const auto fine = [&](uint32_t eights, bool promote) {
        return make_tensor_map(gate_up, {.dtype = dtype,
                                         .rank = 5,
                                         .sizes = {hidden, 8, 2, width / 8, experts},
                                         .strides = {row, width * row, 8 * row, 2 * width * row},
                                         .box = {8, 2, eights, 1},
                                         .promote = promote});
    };
    maps.gate_up_fine = fine(NarrowShape::kOutputs / 8, false);
    maps.gate_up_thirds = fine(ExpertsThirds::kOutputs / 8, true);
    const int64_t line = width * dtype_size(dtype);
    const auto down_map = [&](bool promote) {
        return make_tensor_map(down, {.dtype = dtype,
                                      .rank = 2,
                                      .sizes = {width, experts * hidden},
                                      .strides = {line},
                                      .box = {128},
                                      .promote = promote});
    };
    maps.down = down_pairs(t) ? make_tensor_map(down, {.dtype = dtype,
                                                       .rank = 5,
                                                       .sizes = {width, 16, 4, 2, experts * hidden / 128},
                                                       .strides = {line, 32 * line, 16 * line, 128 * line},
                                                       .box = {16, 4, 2, 1}})
                              : down_map(true);
    maps.down_fine = down_map(false);
    maps.down_thirds = make_tensor_map(down, dtype, experts * hidden, width,
                                       static_cast<uint32_t>(ExpertsThirds::kWeightRows));
    return maps;
}

}  // namespace
}  // namespace cuda

MoeCudaWeights moe_cuda_bind(const MoeCudaTensors& tensors) {
    const MoeCudaTensors& t = tensors;
    check(t.experts >= 0 && t.experts <= cuda::kExpertsMax, "moe: at most 1024 experts");
    check(t.hidden % 16 == 0 && t.width % 16 == 0 && t.shared_width % 16 == 0,
          "moe: hidden and the experts' widths must be multiples of 16");
    const DType others = t.grouped() ? DType::kBFloat16 : t.dtype;
    check(others == DType::kBFloat16 || others == DType::kFloat8E4M3,
          "moe: bfloat16 or e4m3 weights, or int4 of routed experts");
    check(!t.fp8_blocks || t.dtype == DType::kFloat8E4M3, "moe: blocks are of e4m3 weights");
    check(
        !t.grouped() || (t.experts > 0 && grouped_sizes_fit(t.hidden, t.width)),
        "moe: with grouped weights hidden must be a multiple of 128 and at most 8192, the width of 64 and at "
        "most 2048");
    MoeCudaWeights weights{.tensors = t};
    if (t.experts > 0 && !t.grouped()) {
        weights.routed = cuda::make_maps(t, others, false);
    }
    if (t.shared_width > 0) {
        weights.shared = cuda::make_maps(t, others, true);
    }
    return weights;
}

}  // namespace tessera
