#include <algorithm>

#include "base/check.h"
#include "ops/common/gemm.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

void store_rows(const LinearArgs& args, int64_t row, int64_t rows, int64_t block, const float* out) {
    const int64_t column = block * kBlockOutputs;
    const int64_t columns = std::min(kBlockOutputs, args.outputs - column);
    for (int64_t r = 0; r < rows; ++r) {
        float* y = args.y + (row + r) * args.y_stride + column;
        const float* from = out + r * kBlockOutputs;
        if (args.accumulate) {
            for (int64_t c = 0; c < columns; ++c) {
                y[c] += from[c];
            }
        } else {
            std::copy_n(from, columns, y);
        }
    }
}

void one_item(const LinearArgs& args, int64_t row, int64_t rows, int64_t block) {
    const float* pointers[kGemmRowsMax];
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t x_row = args.x_rows == nullptr ? row + r : args.x_rows[row + r];
        pointers[r] = args.x + x_row * args.x_stride;
    }
    alignas(64) float out[kGemmRowsMax * kBlockOutputs];
    gemm_block({pointers, rows, args.weight, block, out});
    store_rows(args, row, rows, block, out);
}

}  // namespace

void linear(const OpContext& context, const LinearArgs& args) {
    check(args.outputs <= args.weight->outputs, "linear: more outputs than the weight has");
    const int64_t blocks = (args.outputs + kBlockOutputs - 1) / kBlockOutputs;
    const int64_t chunks = (args.rows + kGemmRowsMax - 1) / kGemmRowsMax;
    // Neighbouring items share their rows, which stay in the cache; a block is read once per chunk of rows.
    context.threads.parallel_for(chunks * blocks, [&](int64_t item, int) {
        const int64_t row = args.rows * (item / blocks) / chunks;
        const int64_t end = args.rows * (item / blocks + 1) / chunks;
        one_item(args, row, end - row, item % blocks);
    });
}

}  // namespace tessera
